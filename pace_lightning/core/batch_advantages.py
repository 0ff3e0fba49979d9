"""Advantages that need more than the rewards of one group: lengths, gradients, or the whole batch.

Shapes:

    G   responses of one group
    N   responses (rows), T positions of the longest row
    M   all trained tokens of the global mini-batch

Symbols, for response i:

    R_i   reward
    L_i   number of trained tokens
    w_i   ratio of the sequence, the product of pi / mu over its trained tokens
    s_i   score, the gradient of log pi of the whole response (a sum over tokens, not a mean)
    b     baseline of the group

    opo                     A_i = R_i - b,  b = sum L R / sum L               2505.23585
    opob                    A_i = R_i - b,  b = sum W R / sum W, W = w^2 ||s||^2   VCPO, 2602.17616
    reinforce_plus_plus     return of each token, whitened over M             2501.03262
    ..._baseline            R_i - (mean of the group), whitened over M

OPOB replaces the mean of the group; the other baselines must not be applied before it. Whitening
is two steps, since the mean and the variance are those of the global mini-batch:
`whitening_statistics` on all its trained tokens, `whiten` on each part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pace_lightning.core.importance_weights import check_like, row_totals
from pace_lightning.core.losses import LOG_RATIO_LIMIT, blank

WEIGHTINGS = ("paper", "repo")
"""The two definitions of W in `opob_baseline`."""

CENTERS = ("mean", "median", "winsorized")
"""What `opob_baseline` takes of the weighted rewards."""


def opo_advantages(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Rewards minus their length-weighted mean (OPO): long responses have large gradients.

    Args:
        rewards: R of one group; shape ``(G,)``.
        lengths: L, in tokens, with a positive sum; shape ``(G,)``.

    Returns:
        Float32, computed in float64; shape ``(G,)``. Exactly 0 if all rewards are equal.

    Raises:
        ValueError: if the shapes differ, a reward is not finite, or no length is positive.

    >>> opo_advantages(torch.tensor([1.0, 0.0]), torch.tensor([30, 10])).tolist()
    [0.25, -0.75]
    """
    _check_group(rewards, lengths, "lengths")
    if not (lengths >= 0).all() or not lengths.sum() > 0:
        raise ValueError(f"lengths are {lengths.tolist()} tokens; none may be < 0, nor all be 0")
    weights = lengths.double()
    return _centered(rewards, (weights * rewards.double()).sum() / weights.sum()).float()


def opob_advantages(
    rewards: Tensor,
    log_ratios: Tensor,
    score_square_norms: Tensor,
    *,
    weighting: str = "paper",
    center: str = "mean",
    ratio_cap: float | None = None,
    lengths: Tensor | None = None,
    std_normalize: bool = False,
    eps: float = 1e-8,
) -> Tensor:
    """Rewards minus the optimal off-policy baseline (VCPO); the loss weighs them by w.

    Args:
        rewards: R of one group, or of the mini-batch if that is the scope; shape ``(G,)``.
        log_ratios: as in `opob_baseline`.
        score_square_norms: as in `opob_baseline`.
        weighting: as in `opob_baseline`.
        center: as in `opob_baseline`.
        ratio_cap: as in `opob_baseline`.
        lengths: as in `opob_baseline`.
        std_normalize: divide by the deviation of the rewards (ddof 0) plus ``eps``.
        eps: >= 0.

    Returns:
        Float32, computed in float64; shape ``(G,)``. Exactly 0 if all rewards are equal.

    Raises:
        ValueError: as `opob_baseline`, or if ``eps`` is negative.
    """
    if not eps >= 0:
        raise ValueError(f"eps is {eps}; it must be >= 0")
    baseline = opob_baseline(
        rewards,
        log_ratios,
        score_square_norms,
        weighting=weighting,
        center=center,
        ratio_cap=ratio_cap,
        lengths=lengths,
    )
    advantages = _centered(rewards, baseline)
    if std_normalize and advantages.any():
        advantages = advantages / (rewards.double().std(correction=0) + eps)
    return advantages.float()


def opob_baseline(
    rewards: Tensor,
    log_ratios: Tensor,
    score_square_norms: Tensor,
    *,
    weighting: str = "paper",
    center: str = "mean",
    ratio_cap: float | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """The baseline of least variance for gradients weighted by w (VCPO).

    The authors' code measures the norm of a gradient that already contains the truncated weight
    min(w, cap), so its W has two more factors than the paper's. If all W are 0, every response has
    gradient 0, and the plain mean is returned.

    Args:
        rewards: R of one group, or of the mini-batch if that is the scope; shape ``(G,)``.
        log_ratios: log w, clamped to +-20; shape ``(G,)``.
        score_square_norms: ``||s||**2``, exact or from `score_square_norm_proxy`, >= 0; shape
            ``(G,)``. A gradient of a mean over tokens must be multiplied by L first.
        weighting: ``paper`` is ``W = w**2 ||s||**2``, ``repo`` is that times ``min(w, cap)**2``,
            with the loss's ``cap`` of 8 unless ``ratio_cap`` is given.
        center: ``mean`` of the rewards weighted by W, their weighted ``median``, or the mean of the
            rewards ``winsorized`` to their weighted 5 % and 95 % quantiles.
        ratio_cap: with ``paper``, caps w in W; None does not.
        lengths: if given, W is divided by ``L**2``; shape ``(G,)``, all >= 1.

    Returns:
        b, a scalar in float64.

    Raises:
        ValueError: if a name is unknown, the shapes differ, or a number is out of range.
    """
    if weighting not in WEIGHTINGS or center not in CENTERS:
        raise ValueError(
            f"weighting is {weighting!r} and center {center!r}; choose of {WEIGHTINGS} and of "
            f"{CENTERS}"
        )
    if ratio_cap is not None and not ratio_cap > 0:
        raise ValueError(f"ratio_cap is {ratio_cap}; a cap of ratios must be > 0")
    _check_group(rewards, log_ratios, "log_ratios")
    _check_group(rewards, score_square_norms, "score_square_norms")
    if not (score_square_norms >= 0).all():
        raise ValueError(f"squared norms are {score_square_norms.tolist()}; none may be < 0 or NaN")
    ratios = log_ratios.double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if weighting == "repo":
        factors = ratios * ratios.clamp(max=8.0 if ratio_cap is None else ratio_cap)
    else:
        factors = ratios if ratio_cap is None else ratios.clamp(max=ratio_cap)
    weights = factors.square() * score_square_norms.double()
    if lengths is not None:
        _check_group(rewards, lengths, "lengths")
        if not (lengths >= 1).all():
            raise ValueError(f"lengths are {lengths.tolist()} tokens; W is divided by them")
        weights = weights / lengths.double().square()
    values = rewards.double()
    if not weights.any():
        return values.mean()
    if center == "median":
        return _weighted_quantile(values, weights, 0.5)
    if center == "winsorized":
        low, high = (_weighted_quantile(values, weights, q) for q in (0.05, 0.95))
        values = values.clamp(low, high)
    return (weights * values).sum() / weights.sum()


@torch.no_grad()
def score_square_norm_proxy(
    policy_logprobs: Tensor, sum_square_probs: Tensor, mask: Tensor
) -> Tensor:
    """A cheap stand-in for ``||s||**2``: the squared gradient with respect to the logits, summed.

    For one token it is ``1 - 2 pi + sum of pi(a)**2`` over the vocabulary (verl's optimal token
    baseline); tokens are treated as orthogonal.

    Args:
        policy_logprobs: log pi of the sampled tokens; shape ``(N, T)``.
        sum_square_probs: the sum of pi(a)**2 at each position; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.

    Returns:
        Float64, >= 0; shape ``(N,)``.

    Raises:
        ValueError: if the shapes differ.
    """
    check_like(policy_logprobs, mask, "policy log-probs")
    check_like(sum_square_probs, mask, "sums of squared probabilities")
    squares = 1 - 2 * policy_logprobs.double().exp() + sum_square_probs.double()
    return row_totals(squares.clamp(min=0), mask)


@torch.no_grad()
def reinforce_plus_plus_returns(
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    kl: Tensor | None = None,
    kl_coefficient: float = 0.0,
) -> Tensor:
    """Discounted return of each token (REINFORCE++), to be whitened over the batch.

    The reward arrives at the last trained token, minus ``kl_coefficient * kl`` at each. Positions
    that are not trained, such as the output of a tool, are skipped: they neither discount nor pay.

    Args:
        rewards: R; shape ``(N,)``.
        mask: boolean; shape ``(N, T)``.
        gamma: discount per trained token, in [0, 1].
        kl: estimate of KL(pi || reference) at each token, in nats; shape ``(N, T)``. None is 0.
        kl_coefficient: the penalty's factor; >= 0.

    Returns:
        Float32, 0 at masked positions; shape ``(N, T)``.

    Raises:
        ValueError: if the shapes differ, or a setting is out of range.
    """
    if not 0 <= gamma <= 1 or not kl_coefficient >= 0:
        raise ValueError(
            f"gamma is {gamma} and kl_coefficient {kl_coefficient}; 0 <= gamma <= 1 and a "
            "coefficient >= 0 are needed"
        )
    if kl is None and kl_coefficient > 0:
        raise ValueError(f"kl_coefficient is {kl_coefficient} but kl is None; pass the estimates")
    _check_rows(rewards, mask, "rewards")
    penalty = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    if kl is not None:
        check_like(kl, mask, "estimates of the KL")
        penalty = kl_coefficient * blank(kl, mask).double()
    running = rewards.double()  # nothing is behind the last trained token but the reward
    is_last = torch.ones_like(mask[:, 0])
    returns = torch.zeros_like(penalty)
    for t in reversed(range(mask.shape[1])):
        discounted = torch.where(is_last, running, gamma * running) - penalty[:, t]
        running = torch.where(mask[:, t], discounted, running)
        is_last = is_last & ~mask[:, t]
        returns[:, t] = running
    return blank(returns, mask).float()


@torch.no_grad()
def reinforce_plus_plus_baseline(rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
    """Rewards minus the mean of their group (REINFORCE++-baseline), to be whitened over the batch.

    Args:
        rewards: R; shape ``(N,)``.
        group_ids: rows with the same number belong to one group, all of whose rows are here; shape
            ``(N,)``.
        mask: boolean; shape ``(N, T)``.

    Returns:
        Float32, the same at each trained token of a row and 0 at masked positions; ``(N, T)``.

    Raises:
        ValueError: if the shapes differ.
    """
    _check_rows(rewards, mask, "rewards")
    _check_rows(group_ids, mask, "group_ids")
    centered = torch.zeros_like(rewards, dtype=torch.float64)
    for group_id in set(group_ids.tolist()):
        members = group_ids == group_id
        values = rewards[members].double()
        centered[members] = _centered(values, values.mean())
    return blank(centered[:, None].expand(mask.shape), mask).float()


@torch.no_grad()
def whitening_statistics(values: Tensor) -> dict[str, Tensor]:
    """Mean and unbiased variance of all trained tokens of the global mini-batch.

    Args:
        values: M >= 2 of them, in any order: they are sorted first, so the order does not change a
            bit; shape ``(M,)``.

    Returns:
        ``mean`` and ``variance``, scalars in float64; the arguments of `whiten`.

    Raises:
        ValueError: if there are fewer than two values, or one is not finite.
    """
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(
            f"values have shape {tuple(values.shape)}; the variance needs all trained tokens of "
            "the mini-batch, (M,) with M >= 2"
        )
    if not values.isfinite().all():
        raise ValueError(f"{int((~values.isfinite()).sum())} of {len(values)} are not finite")
    ordered = values.double().sort().values
    if ordered[0] == ordered[-1]:  # the mean of equal numbers may be off by a rounding
        return {"mean": ordered[0], "variance": torch.zeros_like(ordered[0])}
    return {"mean": ordered.mean(), "variance": ordered.var(correction=1)}


@torch.no_grad()
def whiten(
    values: Tensor, mask: Tensor, *, mean: Tensor, variance: Tensor, eps: float = 1e-8
) -> Tensor:
    """``(value - mean) / sqrt(variance + eps)`` at trained tokens (verl).

    Args:
        values: shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        mean: of the global mini-batch, from `whitening_statistics`.
        variance: likewise.
        eps: > 0.

    Returns:
        Float32, computed in float64, 0 at masked positions; shape ``(N, T)``.

    Raises:
        ValueError: if the shapes differ, or ``eps`` is not positive.
    """
    if not eps > 0:
        raise ValueError(f"eps is {eps}; it must be > 0, as the variance of equal values is 0")
    check_like(values, mask, "values")
    scaled = (values.double() - mean) / (variance + eps).sqrt()
    return blank(scaled, mask).float()


def _centered(rewards: Tensor, baseline: Tensor) -> Tensor:
    """Rewards minus the baseline, exactly 0 if all rewards are equal; float64, ``(G,)``."""
    if (rewards == rewards[0]).all():  # a weighted mean of equal numbers may be off by a rounding
        return torch.zeros_like(rewards, dtype=torch.float64)
    return rewards.double() - baseline


def _weighted_quantile(values: Tensor, weights: Tensor, q: float) -> Tensor:
    """The smallest value at which the cumulated weight reaches a share q of the total."""
    ordered, order = values.sort()
    cumulated = weights[order].cumsum(dim=0)
    index = torch.searchsorted(cumulated, q * cumulated[-1])
    return ordered[index.clamp(max=len(ordered) - 1)]


def _check_group(rewards: Tensor, values: Tensor, name: str) -> None:
    if rewards.ndim != 1 or rewards.shape != values.shape or len(rewards) == 0:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)} and {name} {tuple(values.shape)}; both "
            "must be (G,) with G >= 1"
        )
    if not rewards.isfinite().all():
        raise ValueError(f"rewards {rewards.tolist()} are not all finite")


def _check_rows(values: Tensor, mask: Tensor, name: str) -> None:
    if mask.dtype != torch.bool or mask.ndim != 2 or values.shape != mask.shape[:1]:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}, the mask dtype {mask.dtype} and shape "
            f"{tuple(mask.shape)}; (N,) and a boolean (N, T) are needed"
        )
