"""From the rewards of one group to one advantage per response.

Notation, for the G responses to one prompt:

    R_i   reward of response i: its score plus shaping
    m     mean of the group's rewards
    s     standard deviation of the group's rewards
    A_i   advantage of response i, the same for each of its tokens

    grpo      A_i = (R_i - m) / (s + eps)                      GRPO, arXiv:2402.03300
    dr_grpo   A_i = R_i - m                                    Dr. GRPO, arXiv:2503.20783
    rloo      A_i = R_i - mean_{k != i} R_k = G/(G-1) (R_i - m)    RLOO, arXiv:2402.14740

All three compare a response with its siblings, so a group needs at least two. The divisor of the
variance in ``s`` is ``G - std_ddof``: implementations of GRPO differ in it.

The overlong penalty (DAPO, arXiv:2503.14476, section 3.4) is part of the reward, not of the score,
and dynamic sampling looks at the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor, *, method: str, std_ddof: int = 1, eps: float = 1e-6
) -> Tensor:
    """Advantages of one group.

    Args:
        rewards: ``R_i``; shape ``(G,)``, G >= 2, finite.
        method: a key of `ADVANTAGES`.
        std_ddof: 1 divides the variance by ``G - 1``, 0 by ``G``; only ``grpo`` has a deviation.
        eps: added to the deviation; only for ``grpo``.

    Returns:
        ``A_i`` in float32, computed in float64; shape ``(G,)``. Exactly 0 if all rewards are equal.

    Raises:
        ValueError: if the method is unknown, the group has fewer than two responses, a reward is
            not finite, or an advantage does not fit into float32.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), method="dr_grpo").tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    if method not in ADVANTAGES:
        raise ValueError(f"unknown advantage {method!r}; choose one of {sorted(ADVANTAGES)}")
    if std_ddof not in (0, 1):
        raise ValueError(f"std_ddof is {std_ddof}; it must be 0 (biased) or 1 (unbiased)")
    if not eps >= 0:
        raise ValueError(f"eps is {eps}; it must be >= 0")
    if rewards.ndim != 1:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)}; expected (G,), the rewards of one group"
        )
    if len(rewards) < 2:
        raise ValueError(
            f"a group of {len(rewards)} has no baseline: {method!r} compares a response with its "
            "siblings; sample at least 2 responses per prompt"
        )
    if not rewards.isfinite().all():
        raise ValueError(
            f"rewards {rewards.tolist()} are not all finite; a group whose scorer failed must be "
            "settled as such before it reaches the advantages"
        )
    if (rewards == rewards[0]).all():  # the mean of equal numbers may be off by a rounding
        return torch.zeros_like(rewards, dtype=torch.float32)
    advantages = ADVANTAGES[method](rewards.double(), std_ddof, eps).float()
    if not advantages.isfinite().all():
        raise ValueError(
            f"rewards {rewards.tolist()} give the advantages {advantages.tolist()}, which do not "
            "fit into float32; scale the rewards down"
        )
    return advantages


def grpo(rewards: Tensor, std_ddof: int, eps: float) -> Tensor:
    """Centered rewards in units of the group's standard deviation; shape ``(G,)`` to ``(G,)``."""
    return (rewards - rewards.mean()) / (rewards.std(correction=std_ddof) + eps)


def dr_grpo(rewards: Tensor, _std_ddof: int, _eps: float) -> Tensor:
    """Centered rewards; shape ``(G,)`` to ``(G,)``."""
    return rewards - rewards.mean()


def rloo(rewards: Tensor, _std_ddof: int, _eps: float) -> Tensor:
    """Rewards minus the mean of the others; shape ``(G,)`` to ``(G,)``."""
    group_size = len(rewards)
    return (rewards - rewards.mean()) * (group_size / (group_size - 1))


ADVANTAGES: dict[str, Callable[[Tensor, int, float], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
}
"""Method name to a function of ``(rewards, std_ddof, eps)``, all in float64."""


def soft_overlong_penalty(
    num_tokens: int, *, max_tokens: int, cache_tokens: int, factor: float = 1.0
) -> float:
    """What a long response loses of its reward (DAPO, equation 13).

    Nothing up to ``max_tokens - cache_tokens``, then linearly down to ``-factor`` at
    ``max_tokens``, and ``-factor`` beyond. (verl lets the line run on beyond ``max_tokens``.)

    Args:
        num_tokens: length of the response.
        max_tokens: length at which the penalty is complete.
        cache_tokens: length of the slope before it.
        factor: the full penalty.

    Returns:
        A number in ``[-factor, 0]``, to be added to the score.

    Raises:
        ValueError: if the slope does not fit between 0 and ``max_tokens``, or a number is negative.

    >>> [soft_overlong_penalty(n, max_tokens=100, cache_tokens=20) for n in (80, 90, 100)]
    [0.0, -0.5, -1.0]
    """
    if not 0 < cache_tokens <= max_tokens:
        raise ValueError(
            f"cache_tokens is {cache_tokens} and max_tokens {max_tokens}; the slope needs "
            "0 < cache_tokens <= max_tokens"
        )
    if num_tokens < 0 or not factor >= 0:
        raise ValueError(f"num_tokens is {num_tokens} and factor {factor}; both must be >= 0")
    excess_tokens = num_tokens - (max_tokens - cache_tokens)
    if excess_tokens <= 0:
        return 0.0
    return -factor * min(excess_tokens / cache_tokens, 1.0)


def is_zero_variance(scores: Sequence[float]) -> bool:
    """Whether a group has nothing to teach: all unshaped scores are exactly equal.

    Equality has no tolerance: two scores that differ at all have an advantage. NaN equals nothing,
    so a group with one is not called constant here; `group_advantages` refuses it.

    Args:
        scores: one score per response, at least one.

    Raises:
        ValueError: if there is no score.

    >>> is_zero_variance([1.0, 1.0]), is_zero_variance([1.0, 0.0])
    (True, False)
    """
    if not scores:
        raise ValueError("got 0 scores; a group has at least one response")
    return all(score == scores[0] for score in scores)
