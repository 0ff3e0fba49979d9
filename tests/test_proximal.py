"""The proximal policies: their numbers, their gradients, and whose weights score which token."""

import io
import math

import numpy as np
import pytest
import reference_proximal as reference
import torch
from torch.func import functional_call

from pace_lightning.core.batch import collate
from pace_lightning.core.heads import HEADS, dapo_head
from pace_lightning.core.importance_weights import Correction
from pace_lightning.core.logprobs import shared_prompt_logprobs, token_logprobs
from pace_lightning.core.losses import log_ratio, ratio_statistics
from pace_lightning.core.objective import Objective, Terms, objective_statistics
from pace_lightning.core.proximal import (
    ewma_decay,
    linear_logprobs,
    log_linear_logprobs,
    own_version_logprobs,
    policy_weight,
)
from pace_lightning.core.proximal_sources import (
    Memoryless,
    bypass,
    linear,
    log_linear,
    recompute,
)
from pace_lightning.core.trajectory import Prompt, Sampled, Trajectory, TrajectoryGroup
from pace_lightning.training.own_scores import InterruptionScores
from pace_lightning.training.policy import load_policy
from pace_lightning.training.proximal_models import EwmaPolicy, SnapshotStore, other_weights

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
VERSION = 3


def logs(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


def decoupled(policy, proximal, behavior, advantages, **bounds):
    """(prox/mu) times the clipped surrogate around prox: the loss and its gradient."""
    policy = policy.clone().requires_grad_()
    weight = log_ratio(proximal, behavior).exp().detach()
    everywhere = torch.ones_like(policy, dtype=torch.bool)
    losses = weight * dapo_head(policy, proximal, advantages, everywhere, **bounds)
    losses.sum().backward()
    return losses.detach(), policy.grad


BOUNDS = {"clip_low": 0.2, "clip_high": 0.2}


# --- decoupled PPO, log-linear, linear ----------------------------------------------------------


@pytest.mark.parametrize(
    ("pi", "prox", "mu", "advantage", "loss", "gradient"),
    [
        # rho = .6/.5 = 1.2, on the upper bound, w = .5/.4 = 1.25: -1.25 * 1.2
        (0.6, 0.5, 0.4, 1.0, -1.5, None),
        # not clipped for A < 0: the loss is A pi/mu = 1.5, the gradient the same
        (0.6, 0.5, 0.4, -1.0, 1.5, 1.5),
        # rho = .55/.5 = 1.1 inside: -1.25 * 1.1
        (0.55, 0.5, 0.4, 1.0, -1.375, -1.375),
        # rho = .7/.5 = 1.4 outside: -1.25 * 1.2, no gradient
        (0.7, 0.5, 0.4, 1.0, -1.5, 0.0),
        # coupled: prox = mu, rho = 1.5 outside: -1.2
        (0.6, 0.4, 0.4, 1.0, -1.2, 0.0),
    ],
)
def test_decoupled_ppo_has_the_numbers_of_its_equation(pi, prox, mu, advantage, loss, gradient):
    losses, gradients = decoupled(
        logs(pi), logs(prox), logs(mu), torch.full((1, 1), advantage).double(), **BOUNDS
    )
    assert losses.item() == pytest.approx(loss, abs=1e-12)
    if gradient is not None:
        assert gradients.item() == pytest.approx(gradient, abs=1e-12)


@pytest.mark.parametrize(
    ("lag", "prox", "weight", "ratio", "loss", "gradient"),
    [
        # d = 0: no step lies between; prox = mu
        (0, 0.4, 1.0, 1.5, -1.2, 0.0),
        # d = 1: a = 0, prox = mu = .4, rho = .6/.4 = 1.5 > 1.2: -1.2
        (1, 0.4, 1.0, 1.5, -1.2, 0.0),
        # d = 2: a = 1/2, prox = sqrt(.4 * .6), rho = sqrt(1.5) > 1.2: -1.224745 * 1.2
        (2, 0.489898, 1.224745, 1.224745, -1.469694, 0.0),
        # d = 4: a = 3/4, prox = .4^.25 .6^.75, rho = 1.5^.25 < 1.2: -pi/mu
        (4, 0.542161, 1.355403, 1.106682, -1.5, -1.5),
    ],
)
def test_log_linear_has_the_numbers_of_its_equation(lag, prox, weight, ratio, loss, gradient):
    policy, behavior = logs(0.6), logs(0.4)
    versions = torch.tensor([[9 - lag]], dtype=torch.int32)
    proximal = log_linear_logprobs(policy, behavior, versions, version=9)
    assert proximal.exp().item() == pytest.approx(prox, abs=5e-7)
    assert log_ratio(proximal, behavior).exp().item() == pytest.approx(weight, abs=5e-7)
    assert log_ratio(policy, proximal).exp().item() == pytest.approx(ratio, abs=5e-7)
    losses, gradients = decoupled(policy, proximal, behavior, torch.ones(1, 1).double(), **BOUNDS)
    assert losses.item() == pytest.approx(loss, abs=5e-7)
    assert gradients.item() == pytest.approx(gradient, abs=1e-12)


def test_linear_mixes_probabilities():
    # d = 2: (.4 + .6) / 2; d = 4: .4/4 + .6 * 3/4 = .55; d = 1: mu
    versions = torch.tensor([[7, 5, 8]])
    proximal = linear_logprobs(logs(0.6, 0.6, 0.6), logs(0.4, 0.4, 0.4), versions, version=9)
    assert proximal.exp().flatten().tolist() == pytest.approx([0.5, 0.55, 0.4], abs=1e-12)


def test_linear_keeps_a_token_that_is_very_unlikely():
    behavior = torch.full((1, 1), -60.0)
    proximal = linear_logprobs(behavior - 1, behavior, torch.tensor([[8]]), version=9)
    assert proximal.item() == -60.0


def random_tokens(seed=0, shape=(5, 17), spread=1.0):
    rng = np.random.default_rng(seed)
    behavior = -rng.uniform(0.05, 6, shape)
    proximal = behavior + rng.normal(0, 0.3 * spread, shape)
    policy = proximal + rng.normal(0, 0.3 * spread, shape)
    versions = rng.integers(-1, 9, shape)
    return policy, proximal, behavior, rng.normal(0, 1, shape), versions


@pytest.mark.parametrize("name", ["log_linear", "linear"])
def test_interpolations_equal_the_reference(name):
    policy, _, behavior, _, versions = random_tokens()
    compute = {"log_linear": log_linear_logprobs, "linear": linear_logprobs}[name]
    got = compute(torch.tensor(policy), torch.tensor(behavior), torch.tensor(versions), version=8)
    expected = getattr(reference, name)(policy, behavior, versions, 8)
    np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-12)
    single = compute(
        torch.tensor(policy).float(),
        torch.tensor(behavior).float(),
        torch.tensor(versions).int(),
        version=8,
    )
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single.numpy(), expected, rtol=0, atol=2e-6)


def test_decoupled_gradients_equal_the_reference_under_log_linear():
    policy, _, behavior, advantages, versions = random_tokens(seed=1)
    proximal = reference.log_linear(policy, behavior, versions, 8)
    got = log_linear_logprobs(
        torch.tensor(policy, requires_grad=True),
        torch.tensor(behavior),
        torch.tensor(versions),
        version=8,
    )
    assert not got.requires_grad
    losses, gradients = decoupled(
        torch.tensor(policy), got, torch.tensor(behavior), torch.tensor(advantages), **BOUNDS
    )
    for at in np.ndindex(policy.shape):
        loss, gradient = reference.decoupled_token(
            policy[at], proximal[at], behavior[at], advantages[at], 0.2, 0.2
        )
        assert losses[at].item() == pytest.approx(loss, abs=1e-12)
        assert gradients[at].item() == pytest.approx(gradient, abs=1e-12)


@pytest.mark.parametrize("lag", [1, 2, 3, 8])
def test_a_log_linear_bound_is_a_bound_on_the_total_ratio(lag):
    total = torch.linspace(-1.5, 1.5, 301).double()[None]
    behavior = torch.full_like(total, -4.0)
    versions = torch.full(total.shape, 10 - lag)
    proximal = log_linear_logprobs(behavior + total, behavior, versions, version=10)
    _, gradients = decoupled(behavior + total, proximal, behavior, torch.ones_like(total), **BOUNDS)
    assert torch.equal(gradients == 0, total.exp() > 1.2**lag)


def test_tokens_of_no_version_and_of_the_future_keep_their_behavior():
    assert policy_weight(torch.tensor([-1, 9, 12, 0]), version=9).tolist() == [0, 0, 0, 8 / 9]


# --- PPO-EWMA -----------------------------------------------------------------------------------


def scalar(value):
    return {"w": torch.tensor([float(value)], dtype=torch.float64)}


def ewma_of(values, decay, **settings):
    policy = EwmaPolicy(decay=decay, dtype=torch.float64, **settings)
    policy.begin(0, scalar(values[0]))
    for version, value in enumerate(values[1:], start=1):
        policy.after_step(version, scalar(value))
    return policy


def test_the_average_has_the_numbers_of_its_equation():
    # (0/8 + 1/4 + 2/2 + 3) / (1/8 + 1/4 + 1/2 + 1) = 4.25 / 1.875
    policy = ewma_of([0, 1, 2, 3], 0.5)
    assert policy.parameters["w"].item() == pytest.approx(2.266667, abs=5e-7)
    assert policy.state_dict()["weight"] == 1.875


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.8, 0.95])
def test_the_average_has_its_closed_form_at_every_step(decay):
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(3, 2)) for _ in range(30)]
    policy = EwmaPolicy(decay=decay, dtype=torch.float64)
    policy.begin(0, {"w": torch.tensor(values[0])})
    for t in range(1, 30):
        policy.after_step(t, {"w": torch.tensor(values[t])})
        mean, weight, age = reference.ewma(values[: t + 1], decay)
        np.testing.assert_allclose(policy.parameters["w"].numpy(), mean, rtol=0, atol=1e-13)
        assert policy.state_dict()["weight"] == pytest.approx(weight, rel=1e-13)
        assert policy.lag_versions == pytest.approx(age, abs=1e-12)


def test_the_center_of_mass_is_half_the_expected_lag_behind():
    # s = 8: beta = 8/10, beta / (1 - beta) = 4
    assert ewma_decay(8) == 0.8
    policy = ewma_of(range(400), ewma_decay(8))
    assert policy.lag_versions == pytest.approx(4.0, abs=1e-12)
    assert policy.parameters["w"].item() == pytest.approx(399 - 4.0, abs=1e-9)
    with pytest.raises(ValueError, match="stale_versions is -1"):
        ewma_decay(-1)


def test_the_average_resets_when_few_tokens_are_active():
    for share, resets in ((0.91, 0), (0.9, 0), (0.89, 1), (None, 0)):
        policy = ewma_of([0, 1, 2], 0.5)
        policy.after_step(3, scalar(3), active_share=share)
        expected = 3.0 if resets else 4.25 / 1.875
        assert policy.parameters["w"].item() == pytest.approx(expected, abs=1e-12)
        assert policy.metrics()["resets"] == resets
        if resets:  # and goes on as if it had begun here: (3/2 + 7) / 1.5
            assert policy.lag_versions == 0
            policy.after_step(4, scalar(7), active_share=1.0)
            assert policy.parameters["w"].item() == pytest.approx(8.5 / 1.5, abs=1e-12)
    never = ewma_of([0, 1, 2, 3], 0.5, reset_below=0.0)
    never.after_step(4, scalar(4), active_share=0.0)
    assert never.metrics()["resets"] == 0


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_an_active_share_that_is_no_fraction_is_refused(share):
    with pytest.raises(ValueError, match="active_share is"):
        ewma_of([0, 1], 0.5).after_step(2, scalar(2), active_share=share)


def test_the_average_shares_no_memory_with_the_weights_and_keeps_small_steps():
    weights = {"w": torch.ones(4, dtype=torch.bfloat16)}
    policy = EwmaPolicy(decay=0.9)
    policy.begin(0, weights)
    weights["w"].add_(1.0)
    assert policy.parameters["w"].tolist() == [1.0] * 4
    values = [np.ones(4)]
    for version in range(1, 40):
        weights["w"].fill_(1.0 + 0.0078125 * version)  # a bfloat16 unit
        policy.after_step(version, weights)
        values.append(np.full(4, 1.0 + 0.0078125 * version))
    mean, _, _ = reference.ewma(values, 0.9)
    np.testing.assert_allclose(policy.parameters["w"].numpy(), mean, rtol=1e-6)


# --- statistics ---------------------------------------------------------------------------------


def statistics_of(policy, proximal, behavior, advantages, mask, *, clip_low, clip_high, keep=None):
    """What is logged of a micro-batch under the clip of DAPO."""
    correction = None
    if keep is not None:
        correction = Correction(weight=torch.ones_like(behavior), keep=keep & mask)
    terms = Terms(proximal, advantages, mask, correction, {}, num_tokens=1, num_sequences=1)
    objective = Objective(HEADS["dapo"], {"clip_low": clip_low, "clip_high": clip_high})
    found = objective_statistics(objective, policy, behavior, terms)
    total = ratio_statistics(policy, behavior, mask)
    return {
        "tokens": total["tokens"],
        "active_sum": found["active_sum"],
        "total_ratio_sum": total["ratio_sum"],
        "total_ratio_max": total["ratio_max"],
        "total_log_ratio_abs_sum": total["log_ratio_abs_sum"],
        "behavior_log_ratio_abs_sum": found["behavior_log_ratio_abs_sum"],
    }


def test_statistics_have_their_numbers():
    # rho = 1.5 (A 1: clipped), 1.5 (A -1), .5 (A 1), .5 (A -1: clipped), 1, masked
    policy = logs(0.6, 0.6, 0.2, 0.2, 0.3, 0.9)
    proximal = logs(0.4, 0.4, 0.4, 0.4, 0.3, 0.9)
    behavior = logs(0.3, 0.3, 0.1, 0.4, 0.6, 0.9)
    advantages = torch.tensor([[1, -1, 1, -1, 0, 1]]).double()
    mask = torch.tensor([[True] * 5 + [False]])
    settings = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}
    got = statistics_of(policy, proximal, behavior, advantages, mask, **settings)
    assert got["tokens"] == 5
    assert got["active_sum"] == 3
    # pi/mu = 2, 2, 2, .5, .5
    assert got["total_ratio_sum"].item() == pytest.approx(7.0)
    assert got["total_ratio_max"].item() == pytest.approx(2.0)
    assert got["total_log_ratio_abs_sum"].item() == pytest.approx(5 * math.log(2))
    # prox/mu = 4/3, 4/3, 4, 1, 1/2
    gap = 2 * math.log(4 / 3) + math.log(4) + math.log(2)
    assert got["behavior_log_ratio_abs_sum"].item() == pytest.approx(gap)
    keep = torch.tensor([[True, False, True, True, True, True]])
    kept = statistics_of(policy, proximal, behavior, advantages, mask, keep=keep, **settings)
    assert kept["active_sum"] == 2


def test_statistics_equal_the_reference_and_the_gradient_of_the_head():
    policy, proximal, behavior, advantages, _ = random_tokens(seed=3, spread=2.0)
    rng = np.random.default_rng(4)
    mask, keep = rng.random(policy.shape) < 0.7, rng.random(policy.shape) < 0.8
    tensors = [torch.tensor(x) for x in (policy, proximal, behavior, advantages, mask)]
    got = statistics_of(*tensors, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, keep=torch.tensor(keep))
    expected = reference.statistics(
        policy, proximal, behavior, advantages, mask, keep, CLIP_LOW, CLIP_HIGH
    )
    assert {name: value.item() for name, value in got.items()} == pytest.approx(expected)
    _, gradients = decoupled(*tensors[:4], clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
    everything = statistics_of(*tensors, clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
    assert everything["active_sum"] == (gradients[tensors[4]] != 0).sum()


def test_statistics_ignore_padding_to_the_last_bit_and_add_up():
    policy, proximal, behavior, advantages, _ = (
        torch.tensor(x).float() for x in random_tokens(seed=5)
    )
    mask = torch.rand(policy.shape, generator=torch.Generator().manual_seed(0)) < 0.6
    parts = (policy, proximal, behavior, advantages, mask)
    settings = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}
    whole = statistics_of(*parts, **settings)

    def padded(tensor):
        wide = torch.full((7, 30), 0 if tensor.dtype == torch.bool else math.nan).to(tensor.dtype)
        wide[:5, :17] = tensor
        return wide

    assert statistics_of(*map(padded, parts), **settings) == whole
    one, two = (
        statistics_of(*(part[rows] for part in parts), **settings)
        for rows in (slice(0, 2), slice(2, 5))
    )
    for name, value in whole.items():
        joined = max(one[name], two[name]) if name.endswith("max") else one[name] + two[name]
        assert joined.item() == pytest.approx(value.item(), rel=1e-12)


def test_extreme_log_ratios_are_inactive_and_leave_gradients_finite():
    policy = torch.tensor([[-1e3, -1.0, -1e3, -1.0]])
    other = torch.tensor([[-1.0, -1e3, -1.0, -1e3]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    versions = torch.full((1, 4), 5)
    got = statistics_of(policy, other, other, advantages, mask, clip_low=0.2, clip_high=0.2)
    assert got["active_sum"] == 0
    assert all(math.isfinite(value) for value in got.values())
    for proximal in (
        log_linear_logprobs(policy, other, versions, version=9),
        linear_logprobs(policy, other, versions, version=9),
        other,
    ):
        losses, gradients = decoupled(policy, proximal, other, advantages, **BOUNDS)
        assert losses.isfinite().all()
        assert gradients.isfinite().all()


def test_nothing_is_broadcast():
    a, b = torch.zeros(2, 3), torch.zeros(1, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)
    for call in (
        lambda: log_linear_logprobs(a, b, torch.zeros(2, 3), version=1),
        lambda: linear_logprobs(a, a, torch.zeros(1, 3), version=1),
        lambda: own_version_logprobs(a, b, torch.zeros(2, 3), mask, version=1),
    ):
        with pytest.raises(ValueError, match="nothing is broadcast"):
            call()


# --- a real model -------------------------------------------------------------------------------


def make_model(seed=0):
    model = load_policy("conf/models/tiny", random_init=True, seed=seed, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
    return model


def parameters_of(model):
    return {name: parameter.data for name, parameter in model.named_parameters()}


def step(model, version):
    """The optimizer makes ``version``: a seeded change of all weights, in place."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise * 0.1 * parameter.std())


def copy_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class Scorer:
    """What the module passes as ``compute``; counts its passes and the rows in them."""

    def __init__(self, model, share_prompts=False):
        self.model = model
        self.share_prompts = share_prompts
        self.rows = []
        self.used_present = []

    def __call__(self, batch, weights):
        self.rows.append(len(batch.input_ids))
        self.used_present.append(weights is None)
        inputs = (batch.input_ids, batch.attention_mask, batch.loss_mask)
        with other_weights(self.model, weights):
            if self.share_prompts:
                return shared_prompt_logprobs(self.model, *inputs, batch.prompt_lengths)[0]
            return token_logprobs(self.model, *inputs)[0]


def make_batch(seed=0, versions=(0, 1, 2, 3), own=None):
    """Two prompts, four responses to each, tokens of several versions in each response."""
    rng = np.random.default_rng(seed)
    groups = []
    for uid in range(2):
        prompt = tuple(rng.integers(3, 100, 3 + 2 * uid).tolist())
        trajectories = []
        for index in range(4):
            length = int(rng.integers(2, 10))
            trajectories.append(
                Trajectory(
                    token_ids=tuple(rng.integers(3, 100, length).tolist()),
                    token_versions=tuple(sorted(rng.choice(versions, length).tolist())),
                    behavior_logprobs=tuple((-rng.uniform(0.1, 9, length)).tolist()),
                    completed_at=VERSION,
                    reward=float(index % 2),
                    score=0.0,
                    truncated=index == 3,
                )
            )
        groups.append(TrajectoryGroup(Prompt(str(uid), prompt, ""), tuple(trajectories)))
    return collate(
        groups,
        version=VERSION,
        num_micro_batches=1,
        pad_token_id=0,
        advantage="grpo",
        std_ddof=1,
        mask_truncated=True,
    )[0]


def brute_force(model, batch, weights_of):
    """Each trained token by itself: its prefix alone, under the weights of its own version."""
    result = torch.full(batch.input_ids.shape, math.nan, dtype=torch.float64)
    for row, t in batch.loss_mask.nonzero().tolist():
        weights = weights_of[int(batch.token_versions[row, t])]
        ids = batch.input_ids[row : row + 1, :t]
        with torch.no_grad():
            logits = functional_call(model, weights, (ids,)).logits
        result[row, t] = logits[0, -1].log_softmax(-1)[batch.input_ids[row, t]]
    return result


def trained_store(max_versions=8, **settings):
    """A model at version 3, a store that followed it, and the weights of every version."""
    model = make_model()
    store = SnapshotStore(max_versions=max_versions, **settings)
    store.published(0, parameters_of(model), oldest_version=0)
    weights_of = {0: copy_of(model)}
    for version in range(1, VERSION + 1):
        step(model, version)
        weights_of[version] = copy_of(model)
        store.published(version, parameters_of(model), oldest_version=0)
    return model, store, weights_of


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("know_policy", [False, True])
def test_snapshots_score_each_token_by_its_own_version(share_prompts, know_policy):
    model, store, weights_of = trained_store()
    batch = make_batch()
    scorer = Scorer(model, share_prompts)
    policy = scorer(batch, None) if know_policy else None
    scorer.rows.clear()
    scorer.used_present.clear()
    mask, behavior = batch.loss_mask.clone(), batch.behavior_logprobs.clone()
    got = store.logprobs(batch, scorer, policy)
    expected = brute_force(model, batch, weights_of)
    torch.testing.assert_close(got[mask].double(), expected[mask], rtol=0, atol=3e-6)
    assert torch.equal(batch.loss_mask, mask)  # the batch is as it was
    assert torch.equal(batch.behavior_logprobs, behavior)
    # one pass per older version, over the rows that have such tokens
    seen = [int((mask & (batch.token_versions == v)).any(1).sum()) for v in range(VERSION + 1)]
    assert scorer.rows == (seen[:VERSION] if know_policy else seen)
    assert scorer.used_present == [False] * VERSION + [True] * (not know_policy)
    assert min(seen) < len(mask)
    # versions differ by far more than the tolerance
    wrong = brute_force(model, batch, dict.fromkeys(weights_of, weights_of[VERSION]))
    assert (wrong - expected)[mask & (batch.token_versions < VERSION)].abs().mean() > 0.05


def test_recompute_scores_every_token_by_the_present_weights():
    model, _, weights_of = trained_store()
    batch = make_batch()
    scorer = Scorer(model)
    source = Memoryless(recompute)
    got = source.logprobs(batch, scorer)
    expected = brute_force(model, batch, dict.fromkeys(range(VERSION + 1), weights_of[VERSION]))
    mask = batch.loss_mask
    torch.testing.assert_close(got[mask].double(), expected[mask], rtol=0, atol=3e-6)
    assert scorer.rows == [len(mask)]
    known = got.clone().requires_grad_()
    again = source.logprobs(batch, scorer, known)
    assert torch.equal(again, got)
    assert not again.requires_grad
    assert scorer.rows == [len(mask)]  # no second pass


def test_bypass_and_interpolations_read_the_batch():
    model = make_model()
    batch = make_batch()
    scorer = Scorer(model)
    assert torch.equal(Memoryless(bypass).logprobs(batch, scorer), batch.behavior_logprobs)
    assert scorer.rows == []
    policy = scorer(batch, None)
    tensors = (policy, batch.behavior_logprobs, batch.token_versions)
    for source, formula in ((log_linear, log_linear_logprobs), (linear, linear_logprobs)):
        got = Memoryless(source).logprobs(batch, scorer, policy)
        assert torch.equal(got, formula(*tensors, version=VERSION))
        assert torch.equal(Memoryless(source).logprobs(batch, scorer), got)


def test_no_source_hands_on_a_gradient():
    model, store, _ = trained_store()
    batch = make_batch()
    ewma = EwmaPolicy(decay=0.5)
    ewma.begin(0, parameters_of(model))

    def with_gradient(part, weights):
        return torch.zeros(part.input_ids.shape, requires_grad=True) - 1

    policy = torch.zeros(batch.input_ids.shape, requires_grad=True) - 1
    functions = (bypass, recompute, log_linear, linear)
    for source in (*map(Memoryless, functions), ewma, store):
        assert not source.logprobs(batch, with_gradient).requires_grad
        assert not source.logprobs(batch, with_gradient, policy).requires_grad


def test_ewma_scores_by_its_mean():
    model = make_model()
    policy = EwmaPolicy(decay=0.6, dtype=torch.float64)
    policy.begin(0, parameters_of(model))
    history = [copy_of(model)]
    for version in (1, 2, 3):
        step(model, version)
        history.append(copy_of(model))
        policy.after_step(version, parameters_of(model))
    mean = {
        name: torch.tensor(reference.ewma([weights[name].numpy() for weights in history], 0.6)[0])
        for name in history[0]
    }
    batch = make_batch()
    got = policy.logprobs(batch, Scorer(model))
    expected = brute_force(model, batch, dict.fromkeys(range(VERSION + 1), mean))
    mask = batch.loss_mask
    torch.testing.assert_close(got[mask].double(), expected[mask], rtol=0, atol=3e-6)
    assert all(torch.equal(p, history[-1][n]) for n, p in parameters_of(model).items())


def test_on_policy_every_source_gives_the_gradient_of_the_base():
    model = make_model()
    batch = make_batch(versions=(VERSION,))
    scorer = Scorer(model)
    batch.behavior_logprobs = scorer(batch, None)
    ewma, store = EwmaPolicy(decay=0.5), SnapshotStore()
    stateless = [Memoryless(f) for f in (bypass, recompute, log_linear, linear)]
    for source in (*stateless, ewma, store, InterruptionScores()):
        source.begin(VERSION, {n: p.double() for n, p in parameters_of(model).items()})
        policy, _ = token_logprobs(model, batch.input_ids, batch.attention_mask, batch.loss_mask)
        proximal = source.logprobs(batch, scorer, policy)
        _, gradients = decoupled(
            policy.detach(), proximal, batch.behavior_logprobs, batch.advantages, **BOUNDS
        )
        base = torch.where(batch.loss_mask, -batch.advantages, 0.0)
        torch.testing.assert_close(
            gradients[batch.loss_mask], base[batch.loss_mask], rtol=1e-4, atol=1e-5
        )


# --- other weights in the same model ------------------------------------------------------------


def test_other_weights_are_what_a_functional_call_uses_to_the_last_bit():
    model = make_model()
    other = copy_of(make_model(seed=1))
    ids = make_batch().input_ids
    present = model(ids).logits.detach()
    with torch.no_grad():
        expected = functional_call(model, other, (ids,)).logits
    with other_weights(model, other):
        got = model(ids).logits
    assert torch.equal(got, expected)
    assert not torch.equal(got, present)
    assert torch.equal(model(ids).logits, present)


def test_the_weights_come_back_after_an_exception_as_the_same_tensors():
    model = make_model()
    before = [(p, p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    with (
        pytest.raises(RuntimeError, match="in the middle"),
        other_weights(model, copy_of(make_model(seed=1))),
    ):
        raise RuntimeError("in the middle")
    for (old, address, value), new in zip(before, model.parameters(), strict=True):
        assert new is old
        assert new.data_ptr() == address
        assert torch.equal(new, value)


def test_a_pass_between_forward_and_backward_changes_no_gradient():
    batch = make_batch()
    gradients = []
    for between in (False, True):
        model = make_model()
        logprobs, _ = token_logprobs(
            model, batch.input_ids, batch.attention_mask, batch.loss_mask, chunk_tokens=8
        )
        if between:
            Scorer(model)(batch, copy_of(make_model(seed=1)))
        (logprobs * batch.advantages).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, swapped in zip(*gradients, strict=True):
        assert plain.abs().max() > 0
        assert torch.equal(plain, swapped)


def test_no_gradient_is_recorded_under_other_weights():
    model = make_model()
    for weights in (None, copy_of(model)):
        with other_weights(model, weights):
            assert not model(make_batch().input_ids).logits.requires_grad
        assert torch.is_grad_enabled()


def test_weights_of_another_model_are_refused():
    model = make_model()
    before = copy_of(model)
    missing = dict(list(before.items())[1:])
    first = next(iter(before))
    for weights in (missing, before | {"new": torch.zeros(1)}, before | {first: torch.zeros(1)}):
        with (
            pytest.raises(ValueError, match=r"1 of .* parameters differ"),
            other_weights(model, weights),
        ):
            pass
    assert all(torch.equal(p, before[n]) for n, p in parameters_of(model).items())
    policy = EwmaPolicy(decay=0.5)
    policy.begin(0, before)
    with pytest.raises(ValueError, match="differ in name or shape"):
        policy.after_step(1, missing)


def test_weights_of_another_dtype_are_converted():
    model = make_model()
    other = {name: w.float() for name, w in copy_of(make_model(seed=1)).items()}
    with other_weights(model, other):
        dtypes = {p.dtype for p in model.parameters()}
        assert torch.equal(next(model.parameters()), next(iter(other.values())).double())
    assert dtypes == {torch.float64}


# --- what a store keeps -------------------------------------------------------------------------


def test_a_store_keeps_what_was_published_from_the_oldest_token_on():
    store = SnapshotStore()
    for version, oldest in ((0, 0), (2, 0), (4, 2)):  # published at every second step
        store.begin(version, scalar(version))
        store.after_step(version, scalar(version))
        store.published(version, scalar(version), oldest_version=oldest)
    assert store.versions == [2, 4]
    store.published(3, scalar(-3), oldest_version=3)  # older weights come back after an evaluation
    store.published(3, scalar(3), oldest_version=3)
    assert store.versions == [3, 4]
    assert [float(weights["w"]) for weights in store.state_dict()["copies"].values()] == [4, 3]
    store.published(5, scalar(5), oldest_version=5)
    assert store.versions == [5]
    assert store.metrics() == {"versions": 1, "bytes": 8, "missing_tokens": 0}


def test_a_store_never_holds_more_than_its_bound():
    store = SnapshotStore(max_versions=3)
    for version in range(6):
        store.published(version, scalar(version), oldest_version=0)
    assert store.versions == [3, 4, 5]
    for wrong in ({"max_versions": 0}, {"max_versions": 2, "missing": "nearest"}):
        with pytest.raises(ValueError, match=next(reversed(wrong))):
            SnapshotStore(**wrong)


def test_tokens_of_a_version_that_was_dropped_are_an_error_or_keep_their_behavior():
    model, store, _ = trained_store(max_versions=2)
    batch = make_batch()
    lost = batch.loss_mask & (batch.token_versions < 2)
    with pytest.raises(ValueError, match=r"sampled at version 0, .* only \[2, 3\] are kept"):
        store.logprobs(batch, Scorer(model))
    model, lenient, weights_of = trained_store(max_versions=2, missing="behavior")
    got = lenient.logprobs(batch, Scorer(model))
    assert torch.equal(got[lost], batch.behavior_logprobs[lost])
    assert lenient.metrics()["missing_tokens"] == int(lost.sum()) > 0
    again = SnapshotStore(max_versions=2)
    again.load_state_dict(lenient.state_dict())
    assert again.metrics() == lenient.metrics()
    kept = batch.loss_mask & ~lost
    expected = brute_force(model, batch, weights_of)[kept]
    torch.testing.assert_close(got[kept].double(), expected, rtol=0, atol=3e-6)


# --- resume -------------------------------------------------------------------------------------


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def make_sources():
    return {
        "ewma": EwmaPolicy(decay=0.7),
        "snapshots": SnapshotStore(max_versions=4),
        "recompute": Memoryless(recompute),
    }


def run(source, model, versions):
    for version in versions:
        step(model, version)
        source.after_step(version, parameters_of(model), active_share=0.8 if version == 1 else 1.0)
        source.published(version, parameters_of(model), oldest_version=version - 1)


@pytest.mark.parametrize("name", list(make_sources()))
@pytest.mark.parametrize("at", [1, 2])
def test_a_resumed_source_goes_on_to_the_last_bit(name, at):
    batch = make_batch(versions=(2, 3))
    model, through = make_model(), make_sources()[name]
    through.begin(0, parameters_of(model))
    run(through, model, range(1, at + 1))
    state = through_a_file({"source": through.state_dict(), "model": model.state_dict()})
    run(through, model, range(at + 1, VERSION + 1))
    expected = through.logprobs(batch, Scorer(model))

    other, resumed = make_model(seed=9), make_sources()[name]
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["source"])
    resumed.begin(at, parameters_of(other))
    run(resumed, other, range(at + 1, VERSION + 1))
    assert torch.equal(resumed.logprobs(batch, Scorer(other)), expected)
    assert resumed.metrics() == through.metrics()


def test_a_loaded_state_is_a_copy():
    policy = ewma_of([0, 1, 2], 0.5)
    state = policy.state_dict()
    twin = EwmaPolicy(decay=0.5, dtype=torch.float64)
    twin.load_state_dict(state)
    twin.begin(2, scalar(2))
    before = twin.parameters["w"].clone()
    policy.after_step(3, scalar(30))
    assert torch.equal(twin.parameters["w"], before)


# --- scored before the weights change -----------------------------------------------------------


class Rollout:
    """One response that the model really samples, token by token."""

    def __init__(self, prompt, seed):
        self.prompt, self.generator = prompt, torch.Generator().manual_seed(seed)
        self.tokens, self.versions, self.logprobs = [], [], []

    @torch.no_grad()
    def sample(self, model, version, num_tokens):
        for _ in range(num_tokens):
            logits = model(torch.tensor([[*self.prompt, *self.tokens]])).logits[0, -1]
            logprobs = logits.log_softmax(-1)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=self.generator))
            self.tokens.append(token)
            self.versions.append(version)
            self.logprobs.append(float(logprobs[token]))

    def sampled(self):
        return Sampled(self.prompt, tuple(self.tokens), tuple(self.versions))

    def trajectory(self, reward):
        return Trajectory(
            token_ids=tuple(self.tokens),
            token_versions=tuple(self.versions),
            behavior_logprobs=tuple(self.logprobs),
            completed_at=VERSION,
            reward=reward,
            score=reward,
            truncated=False,
        )


PLAN = {0: (2, 3, 1, 0), 1: (2, 0, 1, 0), 2: (0, 0, 3, 2), 3: (1, 0, 3, 6)}
"""Tokens that each version samples of each response: one ends early, one begins late."""


def interrupted(source, *, published=(0, 1, 2, 3), resume_at=None):
    """Four responses, interrupted at each publication; the batch, the model and the source."""
    model = make_model()
    store = SnapshotStore()
    rollouts = [Rollout((5, 17, 40), seed) for seed in range(4)]
    scorer, current = Scorer(model), 0
    for version, counts in PLAN.items():
        if version:
            step(model, version)
        if version in published:
            # the engine stands still, and the trainer has the new weights already
            source.leaving([rollout.sampled() for rollout in rollouts], scorer)
            current = version
            for each in (source, store):
                each.published(version, parameters_of(model), oldest_version=0)
        if version == resume_at:
            state = through_a_file(source.state_dict())
            source = InterruptionScores()
            source.load_state_dict(state)
        with other_weights(model, store.state_dict()["copies"][current]):
            for rollout, count in zip(rollouts, counts, strict=True):
                rollout.sample(model, current, count)
    group = TrajectoryGroup(
        Prompt("0", (5, 17, 40), ""),
        tuple(r.trajectory(float(i % 2)) for i, r in enumerate(rollouts)),
    )
    (batch,) = collate(
        [group], version=VERSION, num_micro_batches=1, pad_token_id=0, advantage="grpo", std_ddof=1
    )
    return batch, scorer, source, store


@pytest.mark.parametrize("positions", [1, 20, 16384])
@pytest.mark.parametrize("published", [(0, 1, 2, 3), (0, 2), (0, 3)])
@pytest.mark.parametrize("resume_at", [None, 2])
def test_tokens_scored_before_their_weights_go_equal_snapshots(positions, published, resume_at):
    source = InterruptionScores(batch_positions=positions)
    batch, scorer, source, store = interrupted(source, published=published, resume_at=resume_at)
    mask = batch.loss_mask
    exact = store.logprobs(batch, scorer)
    scorer.used_present.clear()
    got = source.logprobs(batch, scorer, scorer(batch, None))
    torch.testing.assert_close(got[mask], exact[mask], rtol=0, atol=3e-6)
    # trainer and engine are one model here: at its own version, no token has a discrepancy
    torch.testing.assert_close(got[mask], batch.behavior_logprobs[mask], rtol=0, atol=3e-6)
    old = mask & (batch.token_versions < VERSION)
    assert (scorer(batch, None) - batch.behavior_logprobs)[old].abs().mean() > 0.05
    # a pass only for tokens of weights that still sample and are not those of the step
    assert scorer.used_present == [True] + [False] * (published[-1] != VERSION) + [True]
    assert source.metrics()["missing_tokens"] == 0
    assert source.metrics()["scored_tokens"] == int(
        (mask & (batch.token_versions < published[-1])).sum()
    )


def test_a_response_is_scored_once_by_each_version_that_added_to_it():
    model = make_model()
    scorer, source = Scorer(model), InterruptionScores()
    source.leaving([Sampled((1, 2), (3,), (0,))], scorer)  # before anything was published
    source.published(4, parameters_of(model), oldest_version=4)
    twin = Sampled((1, 2), (3, 5), (4, 4))
    responses = [
        twin,
        Sampled((1, 2), (3, 5), (4, 4)),
        Sampled((1, 2), (6,), (2,)),
        Sampled((1,), (), ()),
    ]
    source.leaving(responses, scorer)
    source.leaving(responses, scorer)  # the engine died and is given the weights again
    assert scorer.rows == [1]
    assert source.metrics()["scored_tokens"] == 2
    source.published(5, parameters_of(model), oldest_version=4)
    source.leaving([Sampled((1, 2), (3, 5, 7), (4, 4, 5)), *responses], scorer)
    assert scorer.rows == [1, 1]
    assert source.metrics()["scored_tokens"] == 3
    source.published(6, parameters_of(model), oldest_version=5)
    assert source.metrics()["scored_tokens"] == 1


def test_a_token_that_was_not_scored_is_an_error_or_keeps_its_behavior():
    class Forgetful(InterruptionScores):
        def leaving(self, responses, compute):
            if self._version != 1:
                super().leaving(responses, compute)

    batch, scorer, source, _ = interrupted(Forgetful())
    with pytest.raises(ValueError, match=r"3 tokens of versions \[1\] were not scored"):
        source.logprobs(batch, scorer)
    batch, scorer, source, store = interrupted(Forgetful(missing="behavior"))
    got = source.logprobs(batch, scorer)
    lost = batch.token_versions == 1
    assert torch.equal(got[lost], batch.behavior_logprobs[lost])
    kept = batch.loss_mask & ~lost
    torch.testing.assert_close(got[kept], store.logprobs(batch, scorer)[kept], rtol=0, atol=3e-6)
    assert source.metrics()["missing_tokens"] == 3
    for wrong in ({"batch_positions": 0}, {"missing": "nearest"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            InterruptionScores(**wrong)


def test_settings_without_meaning_are_refused():
    for wrong in ({"decay": 1.0}, {"decay": -0.1}, {"decay": 0.5, "reset_below": 1.5}):
        with pytest.raises(ValueError, match="needed 0 <= decay < 1"):
            EwmaPolicy(**wrong)
