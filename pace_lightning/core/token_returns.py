"""REINFORCE++ with rewards of single tokens: advantages that differ along a response.

    return     G_t = r_t + gamma G_(t+1) with r_t = -beta kl_t, plus the reward at the last token
    advantage  whitened over all trained tokens of the draw

(arXiv:2501.03262; confirmed in verl.) With gamma 1 and beta 0 each token returns the reward, which
`draw_advantages` knows without log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pace_lightning.core.batch_advantages import (
    reinforce_plus_plus_returns,
    whiten,
    whitening_statistics,
)

if TYPE_CHECKING:
    from pace_lightning.core.objective import Scored


@torch.no_grad()
def token_advantages(
    parts: Sequence[Scored],
    gather: Callable[[Tensor], Tensor],
    *,
    gamma: float = 1.0,
    kl_coef: float = 0.0,
) -> list[Tensor]:
    """The advantages of all micro-batches of a draw.

    Args:
        parts: all of this rank; with ``kl_coef`` the log-probs of the reference are needed.
        gather: from this rank's vector to that of all ranks.
        gamma: discount per trained token, in [0, 1].
        kl_coef: beta; kl is ``log pi - log ref`` (k1) under the weights at the beginning of the
            step; >= 0.

    Returns:
        For each micro-batch ``(N, T)``, 0 at masked positions.

    Raises:
        ValueError: if a setting is out of range, or the reference is missing.
    """
    returns = []
    for part in parts:
        kl = None
        if part.reference_logprobs is not None:
            kl = part.policy_logprobs - part.reference_logprobs
        returns.append(
            reinforce_plus_plus_returns(
                part.rewards, part.mask, gamma=gamma, kl=kl, kl_coefficient=kl_coef
            )
        )
    own = [values[part.mask] for values, part in zip(returns, parts, strict=True)]
    found = whitening_statistics(gather(torch.cat(own)))
    return [
        whiten(values, part.mask, mean=found["mean"], variance=found["variance"])
        for values, part in zip(returns, parts, strict=True)
    ]
