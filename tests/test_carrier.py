"""The fused head in miles and slime: its step is the step of logits and makes none; a Carrier names what else it is asked for.

tests/test_placed_head.py has where it is placed, tests/test_whole_host.py the hosts' actors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from carrier_cases import (
    FUSED,
    UNTIED,
    VOCABULARY,
    HostStep,
    enlarge_head,
    found_on_rank,
    host_args,
    host_model,
    measured_by_the_actor,
    measured_on_rank,
    peaks_on_rank,
    results,
    train_one_step,
)
from helpers import pool_of
from host_steps import GSPO, REPLAY, TERMS, TIS, Case
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.heads.carrier import Carrier, carried, carry
from megatron_rl.layout.groups import SINGLE
from megatron_rl.megatron.head import HeadInputs
from megatron_rl.testing.invariance import Layout

# Two orders of float32 additions are up to 4e-6 of a parameter's gradient; one token more or less is 1e-2 and more.
TOLERANCE = 1e-5
TIED = replace(UNTIED, tie_embeddings=True)
# Wide enough that some tokens are clipped and some are not.
WIDE = {"eps_clip": 0.6, "eps_clip_high": 0.8}
GRPO, OF_GSPO = Case(settings=WIDE), Case(settings=WIDE | GSPO)
CISPO = Case(host="slime", settings=WIDE | {"advantage_estimator": "cispo"})
PADDED, CONTIGUOUS = replace(GRPO, layout="bshd"), replace(OF_GSPO, layout="allgather")
EVERY_TERM = Case(host="slime", settings=WIDE | TERMS | {"kl_loss_type": "k2"}, without=())
OBSERVES = {"observe_training_entropy": True}
OBSERVED = Case(settings=WIDE | OBSERVES | {"calculate_per_token_loss": True, "loss_aggregation": "token_mean"})
OBSERVED = replace(OBSERVED, shapes=[shape for shape in OBSERVED.shapes if any(shape[2])])
KEPT = Case(settings=WIDE | REPLAY["miles"] | {"entropy_coef": 0.2, "policy_metrics": "none"})
KEPT_OBSERVED = Case(settings=WIDE | REPLAY["miles"] | OBSERVES)
KEPT_ALONE = Case(settings=WIDE | REPLAY["miles"] | TIS | {"policy_metrics": "none"}, without=())
K2 = TERMS | {"kl_loss_type": "k2", "entropy_coef": 0.0}
KEPT_OF_SLIME = Case(host="slime", settings=WIDE | REPLAY["slime"] | K2)
RECOMPUTED = {"recompute_loss_function": True}

SP, CP, PP, DP = Layout(tensor=2, sequence_parallel=True), Layout(context=2), Layout(pipeline=2), Layout(data=2)
INTERLEAVED, DEEP = Layout(pipeline=2, virtual_pipeline=2), replace(TIED, num_layers=4)
STEPS = {
    "one rank": [HostStep(GRPO), HostStep(OF_GSPO, tiny=TIED), HostStep(CISPO)],
    "one rank, padded rows, every term": [HostStep(PADDED), HostStep(EVERY_TERM, size=2), HostStep(OBSERVED, size=5)],
    "one rank, kept ids": [HostStep(KEPT), HostStep(KEPT_OBSERVED), HostStep(KEPT_ALONE), HostStep(KEPT_OF_SLIME, tiny=TIED)],
    "TP2+SP, kept ids": [HostStep(KEPT_OBSERVED, SP), HostStep(KEPT_ALONE, SP), HostStep(KEPT_OF_SLIME, SP, TIED)],
    "CP2, kept ids": [HostStep(KEPT, CP), HostStep(KEPT_ALONE, CP), HostStep(replace(KEPT_OF_SLIME, layout="allgather"), CP)],
    "one rank, the loss is recomputed": [HostStep(GRPO, flags=RECOMPUTED), HostStep(CISPO, tiny=TIED, flags=RECOMPUTED)],
    "TP2+SP": [HostStep(GRPO, SP), HostStep(OF_GSPO, SP, TIED), HostStep(CISPO, SP, TIED), HostStep(PADDED, SP)],
    "CP2": [HostStep(GRPO, CP, TIED), HostStep(OF_GSPO, CP), HostStep(CISPO, CP), HostStep(PADDED, CP), HostStep(CONTIGUOUS, CP)],
    "PP2": [HostStep(GRPO, PP), HostStep(OF_GSPO, PP, TIED), HostStep(CISPO, PP)],
    "PP2, interleaved": [HostStep(GRPO, INTERLEAVED, DEEP, size=1)],
    "DP2, distributed optimiser": [HostStep(GRPO, replace(DP, distributed_optimizer=True), size=2)],
}

pool = pool_of(4)


def by_logits_and_carrier(pool, on_rank: Callable, steps: list[HostStep]) -> list[list]:
    """Of each rank: for each step the answer with logits, and the one with a carrier. The steps have one layout."""
    both = [replace(step, flags=step.flags | flags) for step in steps for flags in ({}, FUSED)]
    layout = steps[0].layout
    return pool.run(on_rank, both, world_size=layout.world_size, **layout.model_parallel)


@pytest.mark.megatron
@pytest.mark.parametrize("name", STEPS)
def test_the_step_of_a_carrier_is_the_step_of_logits(pool, name):
    """Loss, metrics, and the gradient of each parameter; and no tensor has a row of this rank's vocabulary for each token."""
    answers = by_logits_and_carrier(pool, found_on_rank, STEPS[name])
    found = results(answers)
    for number, (plain, fused) in enumerate(zip(found[::2], found[1::2], strict=True)):
        assert fused.loss == pytest.approx(plain.loss, rel=1e-6, abs=1e-6)
        assert fused.reported == pytest.approx(plain.reported, rel=TOLERANCE, abs=1e-6)
        assert fused.gradient_error(plain) < TOLERANCE
        for parameter, gradient in plain.gradient.items():
            assert (fused.gradient[parameter] - gradient).norm() < TOLERANCE * gradient.norm() + 1e-9, parameter
        of_logits, of_carrier = (max(answer[2 * number + which].most_rows for answer in answers) for which in (0, 1))
        # The weight in a product is [H, V_tp].
        assert of_carrier <= UNTIED.hidden_size < of_logits


ENTROPY = {"use_rollout_entropy": True}
MEASURED = {
    "one rank": [HostStep(GRPO, flags=ENTROPY), HostStep(CISPO, tiny=TIED), HostStep(PADDED)],
    "TP2+SP": [HostStep(CISPO, SP), HostStep(PADDED, SP, flags=ENTROPY)],
    "one rank, kept ids": [HostStep(KEPT_OF_SLIME, flags=ENTROPY)],
    "CP2, kept ids": [HostStep(KEPT_OF_SLIME, CP), HostStep(replace(KEPT_OF_SLIME, layout="allgather"), CP)],
    "CP2": [HostStep(CISPO, CP, flags=ENTROPY), HostStep(PADDED, CP), HostStep(CONTIGUOUS, CP, flags=ENTROPY)],
    "PP2": [HostStep(GRPO, PP), HostStep(CISPO, PP)],
    "PP2, interleaved": [HostStep(case, INTERLEAVED, DEEP, size=1) for case in (GRPO, CISPO)],
}


@pytest.mark.megatron
@pytest.mark.parametrize("name", MEASURED)
def test_old_log_probabilities_are_measured_without_logits(pool, name):
    """By the host's own function of logits, token by token, and by ours of hidden states."""
    answers = by_logits_and_carrier(pool, measured_on_rank, MEASURED[name])
    for answer in answers:
        for (plain, of_logits), (found, of_carrier) in zip(answer[::2], answer[1::2], strict=True):
            torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
            assert of_carrier <= UNTIED.hidden_size < of_logits or not found
    assert any(logs for answer in answers for logs, _ in answer)


@pytest.mark.megatron
def test_a_fused_step_takes_a_tenth_of_the_memory_of_the_logits(pool):
    """1,440 tokens, 4,096 columns, chunks of 1 MiB, in bfloat16: the whole step, its layers included."""
    case = Case(settings=WIDE, shapes=[(240, 200, [1] * 200)] * 6)
    tiny = replace(UNTIED, num_layers=1, vocab_size=4096, true_vocab_size=4096, bf16=True)
    steps = [HostStep(case, tiny=tiny, size=6, flags=flags) for flags in ({}, FUSED | {"max_logits_bytes": 2**20})]
    [[(trains, measures), (trains_fused, measures_fused)]] = pool.run(peaks_on_rank, steps, world_size=1)
    of_logits = 1440 * 4096 * 4
    assert trains > 2 * of_logits and measures > of_logits
    assert trains_fused < 0.1 * trains and measures_fused < 0.1 * measures


class RowsOfLogits(TorchDispatchMode):
    """The rows of all matrix products with as many columns as the vocabulary has."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm) and result.shape[1] == VOCABULARY:
            self.rows += result.shape[0]
        return result


def rows_on_rank(rank: int, steps: list[HostStep]) -> list[tuple[int, ...]]:
    """Of each step the rows of logits that its head makes in training and in measuring."""
    found = []
    for step in steps:
        args, rows = host_args(step), []
        models, optimizer, _ = host_model(args)
        for run in (train_one_step, measured_by_the_actor):
            with RowsOfLogits() as logits:
                run(args, models, optimizer, step)
            rows.append(logits.rows)
        found.append(tuple(rows))
    return found


@pytest.mark.megatron
def test_each_token_of_a_response_is_multiplied_once(pool):
    """No token of a prompt is, though the host computes rows of whole samples; in training no masked one either. An entropy, which
    slime always reports, comes from the chunk's logits, which the loss has made."""
    reports = Case(host="slime", settings=WIDE)
    silent = replace(reports, settings=WIDE | {"policy_metrics": "none"})
    steps = [HostStep(case, flags=FUSED | ENTROPY) for case in (silent, reports, Case(settings=WIDE | OBSERVES))]
    [found] = pool.run(rows_on_rank, steps, world_size=1)
    assert found == [(sum(sum(mask) for _, _, mask in reports.shapes), sum(size for _, size, _ in reports.shapes))] * 3


@pytest.mark.megatron
def test_the_start_line_says_what_the_head_leaves_in_memory(pool):
    [[plain, fused]] = pool.run(found_on_rank, [HostStep(GRPO), HostStep(GRPO, flags=FUSED)], world_size=1)
    assert "applied | hidden states on each tp rank, logits [rows, V/1] in at most 300 bytes | step of" in fused.printed
    assert "logits" not in plain.printed


HALF = replace(UNTIED, bf16=True)


@pytest.mark.megatron
def test_the_fp32_head_of_a_bf16_model_is_one_head_fused_or_not(pool):
    """FB-85: through Float16Module, whose cast the Carrier survives without a copy. Below the head a hidden gradient is rounded to
    bf16 once more, and a rounding falls on the other side now and then; bf16 logits are another loss."""
    fp32 = {"fp32_lm_head": True}
    flags = [{}, fp32, FUSED, FUSED | fp32]
    steps = [HostStep(OF_GSPO, SP, HALF, flags=one) for one in flags]
    answers = pool.run(found_on_rank, steps, world_size=2, **SP.model_parallel)
    rounded, plain, fused_rounded, fused = results(answers)
    assert fused.loss == pytest.approx(plain.loss, rel=1e-4) and fused_rounded.loss == pytest.approx(rounded.loss, rel=1e-4)
    assert fused.gradient_error(plain) < 2e-2
    of_head = "output_layer.weight"
    assert (fused.gradient[of_head] - plain.gradient[of_head]).norm() < TOLERANCE * plain.gradient[of_head].norm()
    assert (rounded.gradient[of_head] - plain.gradient[of_head]).norm() > 100 * TOLERANCE * plain.gradient[of_head].norm()


@pytest.mark.megatron
def test_old_log_probabilities_of_a_bf16_model_have_the_precision_of_its_head(pool):
    """FB-39: measured from bf16 logits beside a loss of float32 logits, the first ratio would not be 1. A token's log-probability
    moves by 1e-2 where logits of some units are rounded to bf16."""
    fp32 = {"fp32_lm_head": True}
    steps = [HostStep(CISPO, SP, HALF, flags=flags | ENTROPY) for flags in ({}, fp32, FUSED | fp32)]
    for answer in pool.run(measured_on_rank, steps, world_size=2, **SP.model_parallel):
        (rounded, _), (plain, _), (fused, _) = answer
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
        moved = [(one["log_probs"][0] - other["log_probs"][0]).abs().max() for one, other in zip(rounded, plain, strict=True)]
        assert max(moved) > 1e-3


def head_alone_on_rank(rank: int, flags: dict) -> torch.Tensor:
    """main_grad of a head whose model is not trained."""
    step = HostStep(GRPO, flags=flags)
    args = host_args(step)
    models, optimizer, _ = host_model(args)
    enlarge_head(models, step.factor_of_head)
    models[0].requires_grad_(False)
    weight = models[0].module.output_layer.weight.requires_grad_()
    train_one_step(args, models, optimizer, step)
    return weight.main_grad.clone()


@pytest.mark.megatron
@pytest.mark.parametrize("flags", [{}, RECOMPUTED], ids=["plain", "the loss is recomputed"])
def test_a_head_that_is_trained_alone_gets_its_gradient(pool, flags):
    """Hidden states of frozen layers have no gradient, and logits have one: miles's checkpoint takes the latter for granted."""
    [of_logits], [found] = (pool.run(head_alone_on_rank, flags | fused, world_size=1) for fused in ({}, FUSED))
    assert of_logits.any() and (found - of_logits).norm() < TOLERANCE * of_logits.norm()


# What a Carrier is asked for


def carrier_of(*, dtype: torch.dtype = torch.float32) -> Carrier:
    """As the loss of a host gets it: 5 tokens, hidden size 4, 7 columns."""
    hidden = torch.randn(5, 1, 4, dtype=dtype, requires_grad=True)
    made = carry(HeadInputs(hidden * 1, torch.zeros(7, 4, dtype=dtype), False), SINGLE)
    return made.transpose(0, 1).contiguous()


def test_a_carrier_says_of_itself_what_logits_would_say():
    carrier = carrier_of(dtype=torch.bfloat16)
    assert carrier.dtype == torch.bfloat16 and carrier.float().dtype == torch.float32
    assert carrier.shape == carrier.size() == (1, 5, 7) and carrier.size(-1) == 7 and carrier.numel() == 35
    assert carrier.dim() == carrier.ndim == 3 and carrier.device.type == "cpu" and not carrier.is_cuda
    assert carrier.requires_grad and not carrier.detach().requires_grad and carrier.is_floating_point()
    assert "hidden states in the place of logits (1, 5, 7) torch.bfloat16" in f"{carrier} {carrier!r}"
    inputs = carried(carrier.float())
    assert type(inputs.hidden) is torch.Tensor and inputs.hidden.shape == (5, 1, 4) and inputs.hidden.dtype == torch.bfloat16


def test_zero_times_its_sum_is_zero_and_keeps_the_graph():
    """--allgather-cp: a rank without tokens must meet the collectives of the backward."""
    hidden = torch.randn(5, 1, 4, requires_grad=True)
    for product in (lambda total: 0 * total, lambda total: total * 0.0):
        carrier = carry(HeadInputs(hidden * 1, torch.zeros(7, 4), False), SINGLE).transpose(0, 1).contiguous()
        zero = product(carrier.sum())
        assert type(zero) is torch.Tensor and zero == 0
        (gradient,) = torch.autograd.grad(zero, hidden)
        assert torch.equal(gradient, torch.zeros_like(hidden))


TOUCHES = {
    "div": lambda logits: logits / 0.7,
    "__getitem__": lambda logits: logits[0],
    "log_softmax": lambda logits: torch.log_softmax(logits, -1),
    "cat": lambda logits: torch.cat([torch.zeros(1, 5, 7), logits]),
    "transpose": lambda logits: logits.transpose(1, 2),
    "data_ptr": lambda logits: logits.data_ptr(),
    "grad": lambda logits: logits.grad,
    "__reduce_ex__": lambda logits: logits.__reduce_ex__(4),
    "exp": lambda logits: logits.detach().exp(),
    "sum": lambda logits: logits.sum(dim=-1),
    "add": lambda logits: logits.sum() + 1,
    "mul": lambda logits: 2 * logits.sum(),
    "view_as": lambda logits: PassedOn.apply(logits),
}


class PassedOn(torch.autograd.Function):
    """As torch passes on the output of a module with a backward hook."""

    @staticmethod
    def forward(ctx, logits):
        return logits

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize("name", TOUCHES)
def test_another_use_of_it_is_refused_with_the_operation_and_the_line(name):
    touch = TOUCHES[name]
    file, line = inspect.getsourcefile(touch), inspect.getsourcelines(touch)[1]
    with pytest.raises(ConfigError, match=f"{file}:{line} asks for `{name}` of .*the model's output.*--fused-lm-head-loss"):
        touch(carrier_of())


def test_logits_in_its_place_are_refused():
    with pytest.raises(ConfigError, match=r"the loss is given a Tensor \(1, 5, 7\), and not what our output layer returns"):
        carried(torch.zeros(1, 5, 7))
    moved_by_nobody = carry(HeadInputs(torch.zeros(5, 1, 4), torch.zeros(7, 4), False), SINGLE)
    with pytest.raises(ConfigError, match=r"the model's output is \[S, B, V_tp\] \(5, 1, 7\)"):
        carried(moved_by_nobody)
