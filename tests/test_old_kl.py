"""What a token selection changes of a loss: a KL penalty of some tokens, and an entropy term of some."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import CLIP, EXACT, KERNEL_DEVICE, clip_for, loop_entropy, loop_log_probs, random_batch, run_loss, with_gradient
from loss_backends import LOSSES, over_backends
from simulated_ranks import groups_of_ranks, on_simulated_ranks

from megatron_rl import LossValue, linear_policy_loss, policy_loss
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.loss_hub import get_policy_loss
from megatron_rl.losses.old_kl import with_old_kl

TOKEN_LOSSES = [name for name in LOSSES if get_policy_loss(name).level == "token"]


def options_of(batch):
    """Coefficients of every second token, an entropy mask of every third, and weights of both."""
    places = torch.arange(len(batch.labels))
    return {
        "old_kl_coefficients": (places % 2).double() * 1.7,
        "importance_weights": 1.2 + torch.cos(places.double()),
        "entropy_mask": (places % 3 == 0).to(KERNEL_DEVICE if torch.cuda.is_available() else "cpu"),
        "entropy_coefficient": 0.3,
        "regularizer_weights": 0.5 + torch.arange(len(batch.documents), dtype=torch.float64),
    }


def terms_by_loop(batch, logits, options):
    """sum w_i u_t c_t (rho_t - 1 - log rho_t) - 0.3 sum v_i H_t of the masked tokens, one after the other."""
    log_probs, entropy = loop_log_probs(logits, batch.labels), loop_entropy(logits)
    total = logits.sum() * 0
    for i, tokens in enumerate(batch.documents):
        for t in (t for t in tokens if batch.loss_mask[t]):
            log_ratio = log_probs[t] - batch.old_log_probs[t]
            penalty = log_ratio.exp() - 1 - log_ratio
            factor = batch.token_weights[i] * options["importance_weights"][t] * options["old_kl_coefficients"][t]
            total = total + factor * penalty
            if options["entropy_mask"][t]:
                total = total - 0.3 * options["regularizer_weights"][i] * entropy[t]
    return total


@over_backends
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_penalty_and_masked_entropy_are_added_to_the_loss(name, backend):
    """The loss with them less the loss without, value and gradient, against a loop over tokens. One sample has advantage 0."""
    batch = random_batch([5, 7, 1, 6], seed=3)
    batch.advantages[1] = 0.0
    options = options_of(batch)
    batch = replace(batch, **({"advantages": batch.advantages}))
    with_terms, gradient = backend.run(LOSSES[name], batch, **options, **clip_for(name))
    plain, of_plain = backend.run(LOSSES[name], batch, importance_weights=options["importance_weights"], **clip_for(name))
    value, of_terms = with_gradient(lambda logits: terms_by_loop(batch, logits, options), batch.logits)
    tolerance = EXACT if backend.name != "triton" else {"rtol": 1e-4, "atol": 1e-5}  # of the difference of two float32 losses
    torch.testing.assert_close(with_terms.loss - plain.loss, value, **tolerance)
    torch.testing.assert_close(gradient - of_plain, of_terms, **tolerance)


@over_backends
def test_a_masked_entropy_alone_is_added_too(backend):
    """Of a loss with a twin, whose kernels have no mask: it is reduced in torch."""
    batch = random_batch([5, 7], seed=3)
    options = options_of(batch) | {"old_kl_coefficients": torch.zeros(12).double()}
    given = {name: value for name, value in options.items() if name != "old_kl_coefficients"}
    _, gradient = backend.run(LOSSES["grpo"], batch, **given, **CLIP)
    _, of_plain = backend.run(LOSSES["grpo"], batch, importance_weights=options["importance_weights"], **CLIP)
    _, of_terms = with_gradient(lambda logits: terms_by_loop(batch, logits, options), batch.logits)
    tolerance = EXACT if backend.name != "triton" else {"rtol": 1e-4, "atol": 1e-5}  # of the difference of two float32 gradients
    torch.testing.assert_close(gradient - of_plain, of_terms, **tolerance)


def test_the_penalty_by_hand():
    """rho = 2 and 1 / 2: 1 - ln 2 and ln 2 - 1 / 2; derivatives 1 and -1 / 2, and 0 where the ratio is 1 or beyond the bound."""
    loss = with_old_kl(get_policy_loss("grpo"))
    log_ratio = torch.tensor([math.log(2), -math.log(2), 0.0, 30.0], dtype=torch.float64)
    clip = {"clip_ratio_low": 0.5, "clip_ratio_high": 1.0}
    found = loss.function(log_ratio, torch.zeros(4).double(), old_kl_coefficients=torch.ones(4).double(), **clip)
    beyond = math.expm1(20.0) - 20.0
    assert found.value.tolist() == pytest.approx([1 - math.log(2), math.log(2) - 0.5, 0.0, beyond], rel=1e-12)
    assert found.derivative.tolist() == pytest.approx([1.0, -0.5, 0.0, 0.0], rel=1e-12)


def test_on_policy_there_is_no_penalty_and_no_gradient_of_one():
    batch = random_batch([4, 3])
    batch = replace(batch, old_log_probs=None)
    plain, of_plain = run_loss(LOSSES["grpo"], batch, **CLIP)
    found, gradient = run_loss(LOSSES["grpo"], batch, old_kl_coefficients=torch.full((7,), 9.0).double(), **CLIP)
    assert found.loss == plain.loss and torch.equal(gradient, of_plain)


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_a_loss_of_whole_samples_has_no_penalty_of_tokens(name):
    batch = random_batch([4, 3])
    with pytest.raises(ConfigError, match=f"old_kl_coefficients with policy loss {name!r} of level .*choose a token-level loss"):
        run_loss(LOSSES[name], batch, old_kl_coefficients=torch.ones(7).double())


@pytest.mark.parametrize("front_door", ["logits", "hidden states"])
def test_wrong_vectors_are_refused(front_door):
    batch = random_batch([4, 3])

    def call(**options):
        rows = (batch.logits,) if front_door == "logits" else (batch.logits, torch.eye(batch.logits.shape[1], dtype=torch.float64))
        loss = policy_loss if front_door == "logits" else linear_policy_loss
        return loss("grpo", *rows, *batch.arguments(), **options)

    nan = torch.where(batch.loss_mask, math.nan, 0.0).double()
    for options, message in (
        ({"old_kl_coefficients": torch.ones(3)}, r"old_kl_coefficients must be \[T=7\], got \(3,\)"),
        ({"old_kl_coefficients": nan}, "not finite, in old_kl_coefficients"),
        ({"entropy_mask": torch.ones(7)}, r"entropy_mask is torch.float32: it must be \[T=7\] bool"),
    ):
        with pytest.raises(DataError, match=message):
            call(**options)


def test_the_derivative_of_a_loss_without_one_is_taken_by_autograd_with_the_penalty():
    plain = replace(get_policy_loss("reinforce"), function=lambda log_ratio, advantages: LossValue(-log_ratio * advantages))
    log_ratio = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    found = with_old_kl(plain).function(log_ratio, torch.ones(2).double(), old_kl_coefficients=torch.tensor([0.0, 2.0]).double())
    assert found.derivative is None
    (gradient,) = torch.autograd.grad(found.value.sum(), log_ratio)
    torch.testing.assert_close(gradient, torch.tensor([-1.0, -1.0 + 2 * math.expm1(-0.2)], dtype=torch.float64), **EXACT)


def test_slices_of_context_parallel_ranks_add_up_to_the_whole():
    batch = random_batch([8, 4], num_masked=(1, 0), seed=5)
    options = options_of(batch) | {"entropy_mask": torch.arange(12) % 3 == 0}
    whole, gradient = run_loss(LOSSES["grpo"], batch, **options, **CLIP)

    def on_rank(groups):
        mine = torch.arange(groups.cp.rank(), 12, 2)
        cut = {
            name: value[mine] if len(value) == 12 else value for name, value in options.items() if isinstance(value, torch.Tensor)
        }
        leaf = batch.logits[mine].clone().requires_grad_()
        tensors = (batch.labels[mine], batch.old_log_probs[mine], batch.advantages, batch.loss_mask[mine])
        found = policy_loss(
            "grpo",
            leaf,
            *tensors,
            torch.tensor([0, 4, 6], dtype=torch.int32),
            batch.token_weights,
            cp_group=groups.cp,
            **options | cut,
            **CLIP,
        )
        found.loss.backward()
        return mine, found.loss.detach(), leaf.grad

    answers = on_simulated_ranks(on_rank, groups_of_ranks(cp=2))
    torch.testing.assert_close(sum(loss for _, loss, _ in answers), whole.loss.detach(), **EXACT)
    for mine, _, of_rank in answers:
        torch.testing.assert_close(of_rank, gradient[mine], **EXACT)


def test_a_token_of_advantage_0_keeps_its_penalty_in_the_fused_head():
    """Without log-probabilities to return, the head leaves out the rows that a loss declares to have no gradient."""
    batch = random_batch([5, 3], num_masked=(1, 0), seed=4)
    batch.advantages[:] = 0.0
    coefficients, weight = torch.ones(8).double(), torch.eye(batch.logits.shape[1], dtype=torch.float64)
    leaf = batch.logits.clone().requires_grad_()
    options = {"old_kl_coefficients": coefficients, "return_log_probs": False, **CLIP}
    linear_policy_loss("grpo", leaf, weight, *batch.arguments(), **options).loss.backward()
    _, gradient = run_loss(LOSSES["grpo"], batch, old_kl_coefficients=coefficients, **CLIP)
    assert gradient.any()
    torch.testing.assert_close(leaf.grad, gradient, **EXACT)
