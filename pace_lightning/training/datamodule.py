"""The LightningDataModule: owns generation, hands out batches and nothing else.

Prompts are leased by the rollout thread, groups wait in the pool, the stream draws them. Each
prompt is settled exactly once: here when it was trained on, by the worker or the pool when it ended
otherwise.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import lightning.pytorch as pl
from torch import Tensor

from pace_lightning.core.admission import AdmissionPolicy
from pace_lightning.core.dispatch import Dispatch
from pace_lightning.core.ledger import Ledger
from pace_lightning.core.pace import PrefixRescore
from pace_lightning.core.pool import TrajectoryPool
from pace_lightning.core.saved_groups import group_state
from pace_lightning.core.trajectory import Fate, PolicyVersion, Prompt, TrajectoryGroup
from pace_lightning.rollout.engine import Completion, RolloutEngine, Sampling
from pace_lightning.rollout.groups import NothingToLearnError, evaluation_metrics
from pace_lightning.rollout.publication import PublishReport
from pace_lightning.rollout.rollouts import Rollout
from pace_lightning.rollout.supervision import Patience
from pace_lightning.rollout.worker import RolloutWorker
from pace_lightning.training.ranks import ALONE, Ranks
from pace_lightning.training.saved_rollouts import restore
from pace_lightning.training.stream import EvaluationStream, Prompts, TrajectoryStream

log = logging.getLogger(__name__)


class Scorer(Protocol):
    """What the data module needs of the scoring processes."""

    def start(self) -> None:
        """Start them."""
        ...

    def close(self) -> None:
        """Stop them. Idempotent."""
        ...


class RolloutDataModule(pl.LightningDataModule):
    """Prompts, engine, worker, pool and the streams that lead out of them.

    Args:
        engine: not yet started.
        prompts: training prompts.
        eval_prompts: held-out prompts; may be empty.
        scorer: the processes behind ``score``.
        score: judges the responses to one prompt.
        shape_reward: from ``(score, num_tokens)`` to reward.
        admission: which ready groups a draw may use.
        dispatch: how much may be ahead of training.
        in_rounds: synchronous dispatch, see `RolloutWorker`.
        prefix_forgetting: see `RolloutWorker`.
        group_size: responses per prompt.
        sampling: of training rollouts.
        eval_sampling: of evaluation.
        eval_samples: responses per held-out prompt.
        eval_timeout_seconds: for one evaluation.
        group_timeout_seconds: for the generation of one group.
        patience: what is done when generation fails or is late.
        drop_zero_variance: dynamic sampling.
        max_empty_groups: groups without gradient in a row before the run ends.
        require_gradient: whether a draw whose groups all have equal rewards is repeated.
        startup_timeout_seconds: for the engine.
        publish_timeout_seconds: for one publication.
        engine_threads_while_waiting: intra-op threads of the engine while the trainer waits; None:
            unchanged.
        waiting: context manager entered while the trainer waits for a draw; for the time ledger.
        on_draw: called with ``(version, groups)`` for each draw.
        finish_with_nothing_to_learn: whether training then ends, and is not broken off by an error.
        ranks: who gets parts of the draws, and the results of evaluations.
        **stream: remaining arguments of `TrajectoryStream`.
    """

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        prompts: Prompts,
        eval_prompts: Sequence[Prompt],
        scorer: Scorer,
        score: Callable[[Prompt, Sequence[Completion]], Awaitable[Sequence[float]]],
        shape_reward: Callable[[float, int], float],
        admission: AdmissionPolicy,
        dispatch: Dispatch,
        in_rounds: bool,
        prefix_forgetting: Callable[[Sequence[PrefixRescore]], float | None] | None = None,
        group_size: int,
        sampling: Sampling,
        eval_sampling: Sampling,
        eval_samples: int,
        eval_timeout_seconds: float,
        group_timeout_seconds: float,
        patience: Patience | None = None,
        drop_zero_variance: bool,
        max_empty_groups: int,
        require_gradient: bool,
        startup_timeout_seconds: float,
        publish_timeout_seconds: float,
        engine_threads_while_waiting: int | None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_draw: Callable[[PolicyVersion, Sequence[TrajectoryGroup]], None] = lambda *_: None,
        finish_with_nothing_to_learn: bool = False,
        ranks: Ranks = ALONE,
        **stream: Any,
    ) -> None:
        super().__init__()
        self.ledger = Ledger()
        self._prompts = prompts
        self._books = threading.Lock()
        """Held while ledger and prompts change or are saved together.

        Nothing but these two is called under it.
        """
        self._eval_prompts = list(eval_prompts)
        self._scorer = scorer
        self._eval_sampling = eval_sampling
        self._eval_samples = eval_samples
        self._eval_timeout_seconds = eval_timeout_seconds
        self._startup_timeout_seconds = startup_timeout_seconds
        self._publish_timeout_seconds = publish_timeout_seconds
        self._engine_threads_while_waiting = engine_threads_while_waiting
        self._waiting = waiting
        self._on_draw = on_draw
        self._ranks = ranks
        self.nothing_to_learn: NothingToLearnError | None = None
        """Why training ended, if it is that."""
        self._max_empty_groups = max_empty_groups
        self._num_redrawn = 0
        self._groups_per_step: int = stream["groups_per_step"]
        self._limits = {"group_size": group_size, "max_new_tokens": sampling.max_new_tokens}
        self._mask_truncated: bool = stream["mask_truncated"]
        self._drawn: list[TrajectoryGroup] = []
        self._published: PolicyVersion | None = None
        self._started = False
        self.tokens_trained = 0
        self._tokens_generated_before = 0
        self.evaluations: dict[PolicyVersion, dict[str, float]] = {}
        """Results by version, in the order in which they were made."""
        self.pool = TrajectoryPool(admission, settle=self._settle)
        self.worker = RolloutWorker(
            engine=engine,
            pool=self.pool,
            lease=self._lease,
            settle=self._settle,
            score=score,
            shape_reward=shape_reward,
            dispatch=dispatch,
            in_rounds=in_rounds,
            prefix_forgetting=prefix_forgetting,
            group_size=group_size,
            sampling=sampling,
            group_timeout_seconds=group_timeout_seconds,
            patience=patience,
            drop_zero_variance=drop_zero_variance,
            max_empty_groups=max_empty_groups,
        )
        self._stream = TrajectoryStream(
            self.pool,
            policy_version=lambda: self._policy_version(),
            drop_empty=self._drop_empty,
            needs_spread=require_gradient,
            on_draw=self._take,
            waiting=self._wait_for_draw,
            on_nothing_to_learn=self._end_learning if finish_with_nothing_to_learn else None,
            ranks=ranks,
            **stream,
        )

    # --- Lightning's side -------------------------------------------------------------------------

    def train_dataloader(self) -> TrajectoryStream:
        """The sized stream of micro-batches; always the same object, drawing only when iterated."""
        return self._stream

    def val_dataloader(self) -> EvaluationStream:
        """One batch: the evaluation of all held-out prompts."""
        return EvaluationStream(lambda: self._ranks.share(self.evaluate))

    def on_exception(self, exception: BaseException) -> None:
        """Lightning does not call ``teardown`` after an exception; close here."""
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Prompts, ledger, ready groups, unfinished responses, the admission policy's memory.

        Of one moment, in which the engine is paused; tensors and primitives.
        """
        return self.worker.snapshot(self._state, timeout_seconds=self._publish_timeout_seconds)

    def _state(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        with self._books:
            books = {"prompts": self._prompts.state_dict(), "ledger": self.ledger.state_dict()}
        # counted when generation ended, and once more when it goes on to the scorer again
        scored_again = sum(rollout.num_tokens for rollout in rollouts)
        return {
            **books,
            "pool": self.pool.state_dict(),
            "drawn": [group_state(group) for group in self._drawn],
            "rollouts": [rollout.state_dict() for rollout in rollouts],
            "tokens_trained": self.tokens_trained,
            "tokens_generated": self.tokens_generated - scored_again,
            "evaluations": dict(self.evaluations),
            "policy_version": self._policy_version(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint: ready groups are ready, unfinished responses go on first.

        Raises:
            ValueError: if the state is damaged, or of another run.
        """
        try:
            self._load(state_dict)
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"the checkpoint's state of the rollout side cannot be used ({error!r:.300}); "
                "remove this checkpoint to go on from the one before it, or start a new run"
            ) from error

    def _load(self, state: Mapping[str, Any]) -> None:
        self._prompts.load_state_dict(state["prompts"])
        self.ledger.load_state_dict(state["ledger"])
        for name in ("policy_version", "tokens_trained", "tokens_generated"):
            if type(state[name]) is not int or state[name] < 0:
                raise ValueError(f"{name} is {state[name]!r:.80}; needed an integer of at least 0")
        version = state["policy_version"]
        leases = [self._lease() for _ in range(self._prompts.num_outstanding)]
        groups, rollouts = restore(state, leases, version=version, **self._limits)
        self.pool.load_state_dict(state["pool"], groups, drawn=version * self._groups_per_step)
        self.worker.rollouts.interrupted = deque(rollouts)
        self.tokens_trained = state["tokens_trained"]
        self._tokens_generated_before = state["tokens_generated"]
        self.evaluations = dict(state["evaluations"])

    # --- called by `WeightSync` and by the command that runs the experiment -----------------------

    def start_scoring(self) -> None:
        """Start the scoring processes. Idempotent."""
        if not self._started:
            self._started = True
            self._scorer.start()

    def start(self) -> None:
        """Start the scoring processes and the rollout thread with its engine. Idempotent."""
        self.start_scoring()
        self.worker.start(timeout_seconds=self._startup_timeout_seconds)

    def publish(
        self,
        weights: Mapping[str, Tensor],
        version: PolicyVersion,
        *,
        clock: PolicyVersion | None = None,
    ) -> PublishReport:
        """Give the engine the weights of ``version``; the trainer is at ``clock``, or there too."""
        report = self.worker.publish(
            weights, version, clock=clock, timeout_seconds=self._publish_timeout_seconds
        )
        self._published = version
        return report

    def finish_round(self) -> None:
        """Wait for the round of synchronous dispatch that is under way, as an evaluation does."""
        self.worker.evaluate(
            [],
            samples=1,
            sampling=self._eval_sampling,
            timeout_seconds=self._eval_timeout_seconds,
        )

    @property
    def tokens_generated(self) -> int:
        """Tokens of finished training responses, those before a resume included."""
        return self._tokens_generated_before + self.worker.num_tokens_generated

    @property
    def oldest_version(self) -> PolicyVersion:
        """At the last publication: no token that may still be trained on is older."""
        return self.worker.rollouts.oldest_version

    @property
    def published_version(self) -> PolicyVersion | None:
        """Version of the engine's weights; None before the first publication."""
        return self._published

    def complete_step(self) -> None:
        """The optimizer step on the last draw was taken: its prompts are trained."""
        for group in self._drawn:
            self._settle(group.prompt.uid, Fate.TRAINED, group.num_tokens)
            self.tokens_trained += sum(
                len(t.token_ids)
                for t in group.trajectories
                if not (self._mask_truncated and t.truncated)
            )
        self._drawn = []
        self.ledger.check()

    def evaluate(self) -> dict[str, float]:
        """Scores of the held-out prompts under the published weights."""
        if not self._eval_prompts:
            return {}
        with self.worker.waiting_trainer(self._engine_threads_while_waiting):
            results = self.worker.evaluate(
                self._eval_prompts,
                samples=self._eval_samples,
                sampling=self._eval_sampling,
                timeout_seconds=self._eval_timeout_seconds,
            )
        metrics = evaluation_metrics(results)
        self.evaluations[self._policy_version()] = metrics
        return metrics

    def end(self) -> None:
        """Training is over: settle what is ready or in flight as unused.

        The engine stays for evaluation.
        """
        if self.worker.is_alive:
            self.worker.stop_training()
        for group in [*self._drawn, *self.pool.drain()]:
            self._settle(group.prompt.uid, Fate.UNUSED, group.num_tokens)
        self._drawn = []
        tokens = {rollout.uid: rollout.num_tokens for rollout in self.worker.rollouts.unended()}
        for uid in self.ledger.pending:  # in flight when training ended
            self._settle(uid, Fate.UNUSED, tokens.get(uid, 0))
        self.ledger.check()

    def close(self) -> None:
        """Stop everything. Idempotent, bounded in time, never raises."""
        self.worker.close()
        try:
            self._scorer.close()
        except Exception:
            log.exception("the scoring processes did not close cleanly")

    # --- bookkeeping ------------------------------------------------------------------------------

    def _policy_version(self) -> PolicyVersion:
        return self.trainer.global_step if self.trainer is not None else 0

    def _lease(self) -> Prompt:
        with self._books:
            prompt = self._prompts.lease()
            self.ledger.lease(prompt.uid)
        return prompt

    def _settle(self, uid: str, fate: Fate, num_tokens: int) -> None:
        with self._books:
            self.ledger.settle(uid, fate, num_tokens=num_tokens)
            self._prompts.settle(uid)

    def _take(self, groups: list[TrajectoryGroup]) -> None:
        self._drawn = list(groups)
        self._num_redrawn = 0
        self._on_draw(self._policy_version(), groups)

    def _end_learning(self, error: NothingToLearnError) -> None:
        self.nothing_to_learn = error

    def _drop_empty(self, groups: list[TrajectoryGroup]) -> None:
        for group in groups:
            self._settle(group.prompt.uid, Fate.ZERO_VARIANCE, group.num_tokens)
        self._num_redrawn += len(groups)
        self.pool.discount(len(groups))
        if self._num_redrawn >= self._max_empty_groups:
            mean = sum(group.mean_score for group in groups) / len(groups)
            raise NothingToLearnError(
                f"nothing to learn: pass rate {mean:.2f} on the last draw, and no gradient in the "
                f"last {self._num_redrawn} groups (trainer.max_empty_groups, "
                "trainer.on_nothing_to_learn)"
            )

    @contextmanager
    def _wait_for_draw(self) -> Iterator[None]:
        with self._waiting(), self.worker.waiting_trainer(self._engine_threads_while_waiting):
            yield
