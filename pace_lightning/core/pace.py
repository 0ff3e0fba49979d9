"""PACE in one file: how many ready groups to reject, and which (arXiv:2609.36830, section 3).

Notation, counted in groups where nothing else is said:

    j     trainer version that consumes the draw (policy versions)
    B     groups that a draw must deliver
    N     ready groups when the draw begins;  N*  their target
    v_t, log mu_t   version and behavior log-prob of response token t
    c     trainer version when the trajectory finished
    l_t   log-prob of token t of an unfinished response, re-scored after a weight publication

1. Rejection budget, from the occupancy of the pool (`RejectionBudget`):

    e     = max(0, 1 - N*/N)
    rho   = (1 - beta) rho + beta e                     once per draw, also with e = 0
    rate  = 0 if N <= N*, else min(rho, rate_max)
    R     = rate B / (1 - rate), at most N - B - reserve

2. Prefix forgetting score over the tokens S that existed at a publication (`rescore`), and its
   mid-rank percentile among the latest scores H of other trajectories (`DriftWindow`):

    F     = 1/|S| sum_S |l_t - log mu_t|
    q     = (#{h < F} + #{h = F} / 2) / |H|

3. Effective staleness:

    E     = K_wait + q^gamma K_gen,    K_wait = j - c,    K_gen = c - mean_t v_t

4. The candidates are the oldest B + R ready groups. The R with the largest mean E over their
   trajectories leave untrained; the other B are the draw (`Pace`).

Little's law links 1 to the waiting staleness. A draw takes B + R = B / (1 - rate) groups, so a
group waits N (1 - rate) / B steps: N*/B if rate = 1 - N*/N, whatever the production P per step.
The occupancy settles at N* P/B.

The paper states the split of staleness; a budget that follows occupancy, relaxes when ready data is
scarce and never starves the trainer; waiting in full, generation weighted by prefix drift relative
to recent scores; gamma in {1, 2, 4}; rejection of whole groups. The exact forms are reconstructed:

    e                 ``excess="target"``: min(1, N/N* - 1); the wait is then (2 - B/P) B/P N*/B
    beta, rate_max    ``smoothing``, ``rate_max``
    F                 ``form`` and ``aggregate`` of `prefix_forgetting`
    H                 ``window_size``, ``window_minimum``; below the minimum every weight is 1
    no score          ``no_score="zero"``: a response that met no publication has not drifted at all
    mean over group   ``group_score="max"``
    the ranking       ``ranking="raw"`` (K) and ``"generation"`` (K_gen) are the paper's ablations
    aging             ``aging_limit``; not in the paper

All of it is pure; what is remembered between draws is an immutable state that the pool holds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

from pace_lightning.core.admission import Selection
from pace_lightning.core.staleness import StalenessDecomposition, group_staleness
from pace_lightning.core.trajectory import Fate, PolicyVersion, TrajectoryGroup, prompt_index


def _require(holds: bool, name: str, value: object, needed: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; needed {needed}")


@dataclass(frozen=True, slots=True)
class BudgetState:
    """What the budget remembers from draw to draw."""

    ema: float = 0.0
    """``rho``: smoothed excess."""
    carry: float = 0.0
    """Fraction of a group that is still to be rejected."""
    capped_draws: int = 0
    """Draws in a row that wanted a higher rate than ``rate_max``."""


@dataclass(frozen=True, slots=True)
class RejectionBudget:
    """How many groups a draw may reject, from the occupancy of the pool.

    Attributes:
        target_groups: N*.
        smoothing: beta, the weight of the newest excess.
        rate_max: largest share of the candidates that may be rejected.
        reserve_groups: ready groups that rejections must leave beyond those that are drawn.
        excess: ``occupancy`` or ``target``: what the excess is relative to.

    >>> budget = RejectionBudget(target_groups=64, smoothing=1.0)
    >>> budget.update(BudgetState(), occupancy=96, needed=32)[0]  # e = 1/3
    16
    """

    target_groups: float
    smoothing: float = 0.2
    rate_max: float = 0.5
    reserve_groups: int = 0
    excess: Literal["occupancy", "target"] = "occupancy"

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        _require(self.target_groups > 0, "target_groups", self.target_groups, "above 0")
        _require(0 < self.smoothing <= 1, "smoothing", self.smoothing, "above 0, at most 1")
        _require(0 <= self.rate_max < 1, "rate_max", self.rate_max, "at least 0, below 1")
        _require(self.reserve_groups >= 0, "reserve_groups", self.reserve_groups, "at least 0")
        known = ("occupancy", "target")
        _require(self.excess in known, "excess", self.excess, f"one of {known}")

    def update(self, state: BudgetState, *, occupancy: int, needed: int) -> tuple[int, BudgetState]:
        """Open a draw of ``needed`` (B) groups: how many may be rejected, and the new state.

        A fraction of a group cannot be rejected; it is carried to the next draw.
        """
        surplus = max(0.0, occupancy - self.target_groups)
        relative_to = occupancy if self.excess == "occupancy" else self.target_groups
        excess = min(1.0, surplus / relative_to) if surplus else 0.0
        ema = (1 - self.smoothing) * state.ema + self.smoothing * excess
        if not surplus:
            return 0, BudgetState(ema, state.carry, 0)
        rate = min(ema, self.rate_max)
        exact = rate * needed / (1 - rate) + state.carry
        whole = math.floor(exact + 1e-9)  # 15.999999999999998 is 16
        budget = min(whole, self.allowed(occupancy=occupancy, needed=needed))
        capped_draws = state.capped_draws + 1 if ema > self.rate_max else 0
        return budget, BudgetState(ema, max(0.0, exact - whole), capped_draws)

    def allowed(self, *, occupancy: int, needed: int) -> int:
        """Rejections that leave enough for a draw of ``needed`` groups and for the reserve."""
        return max(0, occupancy - needed - self.reserve_groups)

    def warning(self, state: BudgetState) -> str | None:
        """What is wrong and what to change, if ``rate_max`` has bound for many draws in a row."""
        if state.capped_draws < CAPPED_DRAWS:
            return None
        return (
            f"the rejection rate is at rate_max = {self.rate_max:g} for {CAPPED_DRAWS} draws: "
            f"over {1 / (1 - self.rate_max):.3g} times as much is generated as is used, so pool "
            f"and waiting grow until dispatch stops them (target: {self.target_groups:g} groups). "
            "Allow fewer outstanding groups, use more groups per step, or raise rate_max"
        )


CAPPED_DRAWS = 20
"""Draws in a row at the cap after which the budget warns; a cold start is there for fewer."""


@dataclass(frozen=True, slots=True)
class PrefixRescore:
    """One re-scoring: sums of ``|l - log mu|``, ``max(0, log mu - l)``, ``l - log mu`` (nats)."""

    num_tokens: int
    absolute: float
    drop: float
    signed: float


def rescore(behavior_logprobs: Sequence[float], new_logprobs: Sequence[float]) -> PrefixRescore:
    """Compare the log-probs of a prefix, shape ``(S,)``, with those under newer weights.

    Both must belong to the same distribution: same temperature, same truncation. S may be 0.

    Raises:
        ValueError: if the lengths differ, or a value is not a finite log-prob.

    >>> rescore([-1.0, -2.0], [-1.5, -1.75])
    PrefixRescore(num_tokens=2, absolute=0.75, drop=0.5, signed=-0.25)
    """
    lengths = len(behavior_logprobs), len(new_logprobs)
    _require(lengths[0] == lengths[1], "(old, new) number of log-probs", lengths, "equal ones")
    bad = [x for x in (*behavior_logprobs, *new_logprobs) if not -1e30 < x <= 1e-6]  # or NaN
    _require(not bad, "log-prob of a prefix token", bad[:1], "finite ones, at most 0")
    changes = [new - old for old, new in zip(behavior_logprobs, new_logprobs, strict=True)]
    return PrefixRescore(
        num_tokens=len(changes),
        absolute=sum(abs(change) for change in changes),
        drop=sum(max(0.0, -change) for change in changes),
        signed=sum(changes),
    )


def prefix_forgetting(
    events: Sequence[PrefixRescore],
    *,
    form: Literal["absolute", "drop", "signed"] = "absolute",
    aggregate: Literal["last", "max", "token_weighted"] = "last",
) -> float | None:
    """The prefix forgetting score of one trajectory, in nats per token.

    Args:
        events: its re-scorings, oldest first.
        form: which change counts. ``signed`` is the size of the mean change.
        aggregate: the newest event, the largest score, or the mean over events weighted by tokens.

    Returns:
        The score; None if no event had a token.
    """
    sums = [(abs(float(getattr(e, form))), e.num_tokens) for e in events if e.num_tokens]
    if not sums:
        return None
    if aggregate == "max":
        return max(total / count for total, count in sums)
    used = sums[-1:] if aggregate == "last" else sums
    return sum(total for total, _ in used) / sum(count for _, count in used)


@dataclass(frozen=True, slots=True)
class DriftWindow:
    """Percentiles among the latest drift scores, which are a tuple, oldest first.

    Only trajectories that have a score enter: many zeros from responses that met no publication
    would make the least drift look like a lot.
    """

    size: int
    """How many scores are kept."""
    minimum: int
    """Below this number there is no percentile."""

    def __post_init__(self) -> None:
        """Refuse a window that could never fill."""
        _require(1 <= self.minimum <= self.size, "window_minimum", self.minimum, f"1..{self.size}")

    def percentiles(
        self, window: tuple[float, ...], scores: Sequence[float | None]
    ) -> list[float | None]:
        """Mid-rank percentile of each score, in [0, 1]; None where there is no score or no basis.

        >>> DriftWindow(8, 1).percentiles((0.2, 0.1, 0.1, 0.4), [0.1, 0.3, None])
        [0.25, 0.75, None]
        """
        if len(window) < self.minimum:
            return [None] * len(scores)
        ranked, twice = sorted(window), 2 * len(window)
        return [
            None if s is None else (bisect_left(ranked, s) + bisect_right(ranked, s)) / twice
            for s in scores
        ]

    def extend(self, window: tuple[float, ...], scores: Sequence[float]) -> tuple[float, ...]:
        """The window with new scores; the oldest ones leave."""
        return (*window, *scores)[-self.size :]


def effective_staleness(
    staleness: StalenessDecomposition, percentile: float | None, gamma: float
) -> float:
    """Waiting in full, generation weighted with the sharpened percentile; with 1 if that is None.

    >>> effective_staleness(StalenessDecomposition(generation=1.25, waiting=3), 0.625, gamma=2)
    3.48828125
    """
    weight = 1.0 if percentile is None else percentile**gamma
    return staleness.waiting + weight * staleness.generation


@dataclass(frozen=True, slots=True)
class PaceState:
    """What `Pace` remembers from draw to draw."""

    budget: BudgetState = BudgetState()
    drift: tuple[float, ...] = ()
    rejections: Mapping[str, int] = field(default_factory=dict)
    """How often a prompt was rejected since it was last trained on, by its index in the data."""

    def to_primitives(self) -> dict[str, Any]:
        """The state in numbers, lists and dicts."""
        return {**asdict(self), "drift": list(self.drift)}

    @classmethod
    def from_primitives(cls, state: Mapping[str, Any]) -> PaceState:
        """The inverse of `to_primitives`; refuses what it cannot have made."""
        for x in (*state["budget"].values(), *state["drift"], *state["rejections"].values()):
            _require(0 <= x < math.inf, "a value of the saved state", x, "finite, at least 0")
        return cls(BudgetState(**state["budget"]), tuple(state["drift"]), dict(state["rejections"]))


class Pace:
    """Pool-aware control of effective staleness: an `AdmissionPolicy`.

    Args:
        budget: how many groups a draw may reject.
        ranking: ``effective``, ``raw`` or ``generation``: the staleness that is rejected first.
        gamma: sharpening of the percentile; 0 is raw staleness.
        group_score: ``mean`` or ``max`` over the trajectories of a group.
        window_size: drift scores that are kept.
        window_minimum: number of drift scores below which every weight is 1.
        no_score: without a drift score, a trajectory has weight 1 (``raw``) or score 0 (``zero``).
        aging_limit: a prompt rejected so many times in a row is not rejected again; None: no limit.
    """

    examines_all = False

    def __init__(
        self,
        budget: RejectionBudget,
        *,
        ranking: Literal["effective", "raw", "generation"] = "effective",
        gamma: float = 4.0,
        group_score: Literal["mean", "max"] = "mean",
        window_size: int,
        window_minimum: int,
        no_score: Literal["raw", "zero"] = "raw",
        aging_limit: int | None = None,
    ) -> None:
        ranked = {"effective": None, "raw": "total", "generation": "generation"}
        _require(ranking in ranked, "ranking", ranking, f"one of {[*ranked]}")
        _require(group_score in ("mean", "max"), "group_score", group_score, "'mean' or 'max'")
        _require(no_score in ("raw", "zero"), "no_score", no_score, "'raw' or 'zero'")
        _require(0 <= gamma < math.inf, "gamma", gamma, "a number of at least 0")
        _require(aging_limit is None or aging_limit > 0, "aging_limit", aging_limit, "1 or more")
        self._budget = budget
        self._ranked = ranked[ranking]
        self._gamma = gamma
        self._combine: Callable[[list[float]], float] = max if group_score == "max" else fmean
        self._window = DriftWindow(window_size, window_minimum)
        self._absent = 0.0 if no_score == "zero" else None
        self._aging_limit = math.inf if aging_limit is None else aging_limit

    def begin(
        self, *, needed: int, occupancy: int, state: PaceState | None
    ) -> tuple[int, PaceState]:
        """Open a draw: the only place where the budget's average moves."""
        old = state or PaceState()
        rejections, budget = self._budget.update(old.budget, occupancy=occupancy, needed=needed)
        return rejections, replace(old, budget=budget)

    def select(
        self,
        candidates: Sequence[TrajectoryGroup],
        *,
        needed: int,
        version: PolicyVersion,
        occupancy: int,
        budget: int,
        state: PaceState | None,
    ) -> tuple[Selection, PaceState]:
        """Reject the stalest of the oldest ``needed + budget``; admit ``needed``, oldest first."""
        old = state or PaceState()
        budget = min(budget, self._budget.allowed(occupancy=occupancy, needed=needed))
        candidates = candidates[: needed + budget]
        indices = [prompt_index(group.prompt.uid) for group in candidates]
        staleness = tuple(group_staleness(group, version) for group in candidates)
        scores, order = self._rank(candidates, staleness, old.drift)
        rejected: list[int] = []
        counts = dict(old.rejections)
        for i in order:
            count = counts.get(indices[i], 0)
            if len(rejected) < budget and count < self._aging_limit:
                rejected.append(i)
                counts[indices[i]] = count + 1
        # If more than `needed` are left, because they have aged, the newest stay in the pool.
        admitted = sorted({*order} - {*rejected})[:needed]
        selection = Selection(
            admitted=tuple(admitted),
            rejected=tuple((i, Fate.REJECTED) for i in sorted(rejected)),
            staleness=staleness,
            scores=tuple(scores),
            warning=self._budget.warning(old.budget),
        )
        leaving = [t for i in (*admitted, *rejected) for t in candidates[i].trajectories]
        drifts = [t.prefix_forgetting for t in leaving if t.prefix_forgetting is not None]
        for i in admitted:
            counts.pop(indices[i], None)
        counts = counts if self._aging_limit < math.inf else {}
        return selection, PaceState(old.budget, self._window.extend(old.drift, drifts), counts)

    def state_to_primitives(self, state: PaceState | None) -> dict[str, Any]:
        """For a checkpoint."""
        return (state or PaceState()).to_primitives()

    def state_from_primitives(self, primitives: Mapping[str, Any] | None) -> PaceState:
        """From a checkpoint; anew, if another policy made it."""
        return PaceState.from_primitives(primitives) if primitives else PaceState()

    def _rank(
        self,
        candidates: Sequence[TrajectoryGroup],
        staleness: Sequence[Sequence[StalenessDecomposition]],
        drift: tuple[float, ...],
    ) -> tuple[list[float], list[int]]:
        """Effective staleness of each group, and the order in which they would be rejected."""
        own = [t.prefix_forgetting for group in candidates for t in group.trajectories]
        own = [self._absent if score is None else score for score in own]
        percentiles = iter(self._window.percentiles(drift, own))
        scores, keys = [], []
        for group, parts in zip(candidates, staleness, strict=True):
            effective = [effective_staleness(p, next(percentiles), self._gamma) for p in parts]
            scores.append(self._combine(effective))
            values = [getattr(p, self._ranked) for p in parts] if self._ranked else effective
            waiting = self._combine([part.waiting for part in parts])
            epoch, _, index = group.prompt.uid.rpartition(":")
            # the older uid first: numbers are in order by length, then by text
            age = (len(epoch), epoch, len(index), index)
            keys.append((-self._combine(values), -waiting, *age))
        return scores, sorted(range(len(keys)), key=keys.__getitem__)
