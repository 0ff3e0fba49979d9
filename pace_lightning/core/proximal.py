"""Formulas of the proximal log-probs: the anchor that the trust region is centered on.

Where they come from, and at what cost: `core.proximal_sources`.

Shapes:

    N   responses (rows) of a micro-batch
    T   positions of the longest row; shorter rows are padded

Symbols, for each token:

    log mu    ``behavior_logprobs``: of the policy that sampled it, as the engine reported them
    log prox  ``proximal_logprobs``: never with a gradient
    log pi    ``policy_logprobs``: of the weights that are trained
    v         ``token_versions``: version of the weights that sampled it, -1 where nothing was
    j         ``version``: of the weights that are trained
    d         j - v, the lag of the token in versions

The total ratio pi/mu is (pi/prox) (prox/mu): the trust region bounds the first factor, a correction
bounds the second one.

Interpolations between mu and pi know nothing that these two do not: a bound on pi/prox is one on
pi/mu in other words. With `log_linear_logprobs`, ``pi/prox <= 1 + eps`` says ``pi/mu <=
(1 + eps)^d``. So the total ratio is logged too (`losses.ratio_statistics`).

Masked positions may hold anything, NaN included; so may the results there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pace_lightning.core.trajectory import PolicyVersion


def policy_weight(token_versions: Tensor, *, version: PolicyVersion) -> Tensor:
    """The weight of pi in an interpolated prox: ``(d - 1) / d``, and 0 for d < 1 or v < 0.

    The version interpolated for is j - 1, as in AReaL's code
    (``compute_prox_logp_approximations``). A-3PO (arXiv:2512.06547) writes 1/d, the weight of mu.

    Args:
        token_versions: v; integers of any shape.
        version: j.

    Returns:
        float64 of the same shape, in ``[0, 1)``.

    >>> policy_weight(torch.tensor([-1, 8, 7, 6, 4]), version=8).tolist()
    [0.0, 0.0, 0.0, 0.5, 0.75]
    """
    lag = version - token_versions.double()
    weight = (lag - 1) / lag.clamp(min=1)
    return torch.where(token_versions >= 0, weight.clamp(min=0), 0.0)


@torch.no_grad()
def log_linear_logprobs(
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    token_versions: Tensor,
    *,
    version: PolicyVersion,
) -> Tensor:
    """``log prox = log mu + a (log pi - log mu)`` with a = `policy_weight`.

    AReaL's ``loglinear``, which is A-3PO (arXiv:2512.06547); confirmed in AReaL's code.

    Args:
        policy_logprobs: log pi; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        token_versions: v; shape ``(N, T)``.
        version: j.

    Returns:
        Shape ``(N, T)``, without gradient.

    Raises:
        ValueError: if the shapes differ.
    """
    _check_shapes(policy_logprobs, behavior_logprobs, token_versions)
    weight = policy_weight(token_versions, version=version).to(behavior_logprobs.dtype)
    return behavior_logprobs + weight * (policy_logprobs - behavior_logprobs)


@torch.no_grad()
def linear_logprobs(
    policy_logprobs: Tensor,
    behavior_logprobs: Tensor,
    token_versions: Tensor,
    *,
    version: PolicyVersion,
) -> Tensor:
    """``log prox = log((1 - a) mu + a pi)`` with a = `policy_weight`.

    AReaL's ``linear``, with one departure: its code adds 1e-10 to the probability, which raises a
    token of probability 1e-12 a hundredfold even where prox should be mu. Computed from log-probs
    here, nothing has to be added.

    Args:
        policy_logprobs: log pi; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        token_versions: v; shape ``(N, T)``.
        version: j.

    Returns:
        Shape ``(N, T)``, without gradient.

    Raises:
        ValueError: if the shapes differ.
    """
    _check_shapes(policy_logprobs, behavior_logprobs, token_versions)
    weight = policy_weight(token_versions, version=version)
    of_behavior = behavior_logprobs + (-weight).log1p().to(behavior_logprobs.dtype)
    of_policy = policy_logprobs + weight.log().to(policy_logprobs.dtype)
    return torch.logaddexp(of_behavior, of_policy)


@torch.no_grad()
def own_version_logprobs(
    policy_logprobs: Tensor,
    recorded_logprobs: Tensor,
    token_versions: Tensor,
    mask: Tensor,
    *,
    version: PolicyVersion,
) -> Tensor:
    """The recorded log-probs; for tokens of the present version those of the present weights.

    Args:
        policy_logprobs: log pi; shape ``(N, T)``.
        recorded_logprobs: NaN where nothing was recorded; shape ``(N, T)``.
        token_versions: v; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        version: j.

    Returns:
        Shape ``(N, T)``, without gradient.

    Raises:
        ValueError: if the shapes differ, or a trained token of an older version was not scored.
    """
    _check_shapes(policy_logprobs, recorded_logprobs, token_versions, mask)
    missing = recorded_logprobs.isnan()
    lost = token_versions[mask & missing & (token_versions != version)].tolist()
    if lost:
        raise ValueError(
            f"{len(lost)} tokens of versions {sorted(set(lost))} were not scored before their "
            f"weights were replaced, and version {version} cannot score them; needed a score of "
            "every token that exists at a publication, or another source of proximal log-probs"
        )
    return torch.where(missing, policy_logprobs, recorded_logprobs)


def ewma_decay(stale_versions: float) -> float:
    """The decay that puts the average s/2 versions behind: ``beta = s / (s + 2)``.

    In the steady state the center of mass is ``beta / (1 - beta)`` behind. Revised PPO-EWMA
    (arXiv:2605.12070), from a reading note.

    Args:
        stale_versions: s, the largest lag that is expected, in versions; >= 0.

    Raises:
        ValueError: if it is negative or not finite.

    >>> ewma_decay(8)
    0.8
    """
    if not 0 <= stale_versions < math.inf:
        raise ValueError(
            f"stale_versions is {stale_versions}; it is the largest lag that is expected, so it "
            "must be a finite number of versions, at least 0"
        )
    return stale_versions / (stale_versions + 2)


def _check_shapes(*tensors: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"the tensors have shapes {shapes}; all must be (N, T), nothing is broadcast"
        )
