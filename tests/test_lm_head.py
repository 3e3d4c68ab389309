"""The fp32 head: logits, gradients and log-probabilities of 16-bit parameters at float32 precision, alone and in a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import pool_of
from test_fused_head import FUSED, model_input
from torch import nn
from trainer_cases import STILL, TP, VOCABULARY, lively, ragged_step, tiny_trainer

from megatron_rl.config import PolicyLossConfig
from megatron_rl.layout import SINGLE
from megatron_rl.layout.groups import all_gather_stack, resolve_groups
from megatron_rl.megatron.head import run_model
from megatron_rl.ops.fp32_head import fp32_head_logits

TOKENS, HIDDEN, COLUMNS = 48, 64, 40
# float32 sums of 64 products against float64 ones: 64 roundings of 6e-8 at most, a tenth of it in the mean. bf16 logits: 4e-3.
FLOAT32 = 2e-6


pool = pool_of(4)


def operands(dtype: torch.dtype = torch.bfloat16, seed: int = 0):
    """hidden [S, B, H], weight [V, H] as a parameter, gradient of the logits [S, B, V] float32."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS // 2, 2, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = nn.Parameter(torch.randn(COLUMNS, HIDDEN, generator=generator).to(dtype))
    return hidden, weight, torch.randn(TOKENS // 2, 2, COLUMNS, generator=generator)


def relative(found, truth) -> float:
    return float((found.detach().double() - truth).norm() / truth.norm())


def exact(hidden, weight, gradient):
    """logits, their gradient's products with weight and hidden, all in float64."""
    x, w, g = hidden.detach().double(), weight.detach().double(), gradient.double()
    return x @ w.t(), g @ w, g.flatten(0, 1).t() @ x.flatten(0, 1)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)], ids=str)
def test_logits_of_16_bit_parameters_are_exact_to_float32(dtype, bits):
    """FB-85: products of two 16-bit numbers are exact in float32; a gradient is rounded once, to the parameters' dtype."""
    hidden, weight, gradient = operands(dtype)
    logits = fp32_head_logits(hidden, weight, tp_group=SINGLE)
    truth, *of_operands = exact(hidden, weight, gradient)
    assert logits.dtype == torch.float32 and logits.shape == (TOKENS // 2, 2, COLUMNS)
    assert relative(logits, truth) < FLOAT32 and relative(hidden @ weight.t(), truth) > 1e-4
    logits.backward(gradient)
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    for found, expected in zip((hidden.grad, weight.grad), of_operands, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2.0**-bits, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("num_microbatches", [1, 16])
def test_the_error_of_the_weight_gradient_does_not_grow_with_micro_batches(num_microbatches, tied):
    """FB-85: a gradient that is rounded to bf16 in each micro-batch loses bits as they grow; in the float32 buffer it keeps them.
    What autograd gets is no gradient: Megatron's hook leaves it, but adds it for a tied weight, so there it must be zeros."""
    hidden, weight, gradient = operands()
    weight.main_grad = torch.zeros(weight.shape)
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, tied
    rows, gradients = hidden.detach().repeat(num_microbatches, 1, 1), gradient.repeat(num_microbatches, 1, 1)
    rows += torch.randn(rows.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    for part, of_logits in zip(rows.chunk(num_microbatches), gradients.chunk(num_microbatches), strict=True):
        fp32_head_logits(part, weight, tp_group=SINGLE).backward(of_logits)
        assert weight.grad_added_to_main_grad
        assert weight.grad.dtype == torch.bfloat16
        assert not tied or not weight.grad.any()
    *_, truth = exact(rows, weight, gradients)
    assert relative(weight.main_grad, truth) < FLOAT32


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_hook_on_the_weight_sees_its_gradient(tied):
    """FB-150: it changes what Megatron's DDP then adds to main_grad."""
    hidden, weight, gradient = operands()
    weight.main_grad = torch.zeros(weight.shape)
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, tied
    weight.register_hook(lambda gradient: gradient * 2)
    fp32_head_logits(hidden, weight, tp_group=SINGLE).backward(gradient)
    *_, truth = exact(hidden, weight, gradient)
    assert not weight.grad_added_to_main_grad and not weight.main_grad.any()
    torch.testing.assert_close(weight.grad.double(), 2 * truth, rtol=2.0**-7, atol=1e-3)


def test_a_frozen_head_and_frozen_hidden_states_get_no_gradient():
    """The reference policy's head, and a head that is trained alone."""
    hidden, weight, gradient = operands()
    fp32_head_logits(hidden, weight.detach(), tp_group=SINGLE).backward(gradient)
    fp32_head_logits(hidden.detach(), weight, tp_group=SINGLE).backward(gradient)
    assert hidden.grad is not None and weight.grad is not None
    assert not fp32_head_logits(hidden.detach(), weight.detach(), tp_group=SINGLE).requires_grad


def test_a_detached_copy_of_the_weight_delivers_its_own_gradient():
    """FB-85: the gradient goes to the tensor that was multiplied, and into nobody else's buffer."""
    hidden, weight, gradient = operands()
    weight.main_grad = torch.zeros(weight.shape)
    copy = weight.detach().clone().requires_grad_()
    fp32_head_logits(hidden, copy, tp_group=SINGLE).backward(gradient)
    assert copy.grad.any() and not weight.main_grad.any() and weight.grad is None


def sharded_on_rank(rank, sequence_parallel):
    """Errors of this rank's logits, hidden gradient and weight gradient, and whether tp ranks hold one hidden gradient."""
    tp = resolve_groups().tp
    hidden, weight, gradient = operands()
    truth = exact(hidden, weight, gradient)
    shard = nn.Parameter(weight.detach().chunk(tp.size())[tp.rank()].clone())
    shard.main_grad = torch.zeros(shard.shape)
    own = hidden.detach().chunk(tp.size())[tp.rank()].clone().requires_grad_() if sequence_parallel else hidden
    logits = fp32_head_logits(own, shard, tp_group=tp, sequence_parallel=sequence_parallel)
    logits.backward(gradient.chunk(tp.size(), -1)[tp.rank()])
    of_hidden = truth[1].chunk(tp.size())[tp.rank()] if sequence_parallel else truth[1]
    errors = [
        relative(logits, truth[0].chunk(tp.size(), -1)[tp.rank()]),
        relative(shard.main_grad, truth[2].chunk(tp.size())[tp.rank()]),
        # Rounded once, to bf16: 2^-9 of each number at most, less in the mean.
        relative(own.grad, of_hidden) / 2**-9,
    ]
    return errors, own.grad.shape == own.shape, None if sequence_parallel else own.grad


@pytest.mark.megatron
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP+SP"])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_sharded_vocabulary_gives_whole_hidden_gradients(pool, tp_size, sequence_parallel):
    """Catches a shard's part of the sum over the vocabulary taken for the sum, or counted tp times, and shards in another order."""
    answers = pool.run(sharded_on_rank, sequence_parallel, world_size=tp_size, **{TP: tp_size})
    for (of_logits, of_weight, of_hidden), has_shape, gradient in answers:
        assert of_logits < FLOAT32 and of_weight < FLOAT32 and of_hidden < 1.0 and has_shape
        assert gradient is None or torch.equal(gradient, answers[0][2])


def bf16_trainer(is_fp32: bool, is_fused: bool, **settings):
    """A bf16 policy whose logits are as large as those of a trained one, some 10: there bf16 has steps of 0.06."""
    others = {"fused_lm_head_loss": True, "max_logits_bytes": 1024} if is_fused else {}
    return lively(tiny_trainer(PolicyLossConfig(fp32_lm_head=is_fp32, **others), bf16=True, **STILL, **settings))


def reference_log_probs(trainer, samples) -> list[list[float]]:
    """Each response's log-probabilities by a float64 product of the very hidden states and weights, as an fp32 sampler has them."""
    tp, values = trainer.groups.tp, []
    length = max(len(sample.tokens) for sample in samples) + 1
    for sample in samples:
        tokens = torch.zeros(1, length // 2 * 2, dtype=torch.int64)
        tokens[0, : len(sample.tokens)] = torch.tensor(sample.tokens)
        with torch.no_grad():
            inputs = run_model(trainer.model, model_input(tokens), FUSED, tp).inputs
        hidden = inputs.hidden
        if inputs.is_sequence_parallel:
            hidden = all_gather_stack(hidden, tp).flatten(0, 1)
        weight = all_gather_stack(inputs.weight.detach(), tp).flatten(0, 1)[:VOCABULARY]
        rows = torch.log_softmax(hidden[:, 0].double() @ weight.double().t(), -1)
        prompt = len(sample.tokens) - len(sample.loss_mask)
        values.append([float(rows[q - 1, sample.tokens[q]]) for q in range(prompt, len(sample.tokens))])
    return values


def ratios_on_rank(rank, is_fp32, is_fused, settings):
    """(largest |ratio - 1| of a token by the trainer's log-probabilities, metrics of its first step on the reference's)."""
    trainer = bf16_trainer(is_fp32, is_fused, **settings)
    dp = trainer.groups.dp
    step = ragged_step()[dp.rank() :: dp.size()]
    reference = reference_log_probs(trainer, step)
    own = [row for [row] in trainer.log_probs([[sample] for sample in step])]
    found, truth = (torch.tensor([value for row in rows for value in row]).double() for rows in (own, reference))
    samples = [replace(sample, old_log_probs=row) for sample, row in zip(step, reference, strict=True)]
    return float(((found - truth).exp() - 1).abs().max()), trainer.step([[sample] for sample in samples])


RATIO_LAYOUTS = [
    pytest.param(2, {TP: 2}, {"sequence_parallel": True}, id="TP2+SP"),
    pytest.param(4, {TP: 2}, {"use_distributed_optimizer": True}, id="DP2xTP2, distributed optimiser"),
]


@pytest.mark.megatron
@pytest.mark.parametrize(("world_size", "layout", "settings"), RATIO_LAYOUTS)
def test_the_first_importance_ratio_is_1_against_an_fp32_reference(pool, world_size, layout, settings):
    """FB-85: a bf16 policy, old log-probabilities by a float64 product of the same hidden states and weights. The fp32 head's ratio
    is 1 to 1e-5, in the log-probabilities and in the step, fused or not; the plain head's is off by more than 1e-3."""
    for is_fused in (False, True):
        for ratio, metrics in pool.run(ratios_on_rank, True, is_fused, settings, world_size=world_size, **layout):
            assert ratio < 1e-5
            assert metrics["policy/ratio_new_old"] == pytest.approx(1.0, abs=1e-5)
            assert metrics["policy/kl_new_old"] < 1e-9
    for ratio, metrics in pool.run(ratios_on_rank, False, False, settings, world_size=world_size, **layout):
        assert ratio > 1e-3
        assert metrics["policy/kl_new_old"] > 1e-7
