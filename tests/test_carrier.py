"""The fused head in miles and slime, whose step is the step of logits and makes none; and a forward that is left out.

A Carrier that is asked for something else names it. --skip-old-log-probs leaves the forward out, and a rollout that needs it is
refused: tests/test_hosts.py has the loss, tests/test_host_rules.py the launches, tests/test_whole_host.py the hosts' actors.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from carrier_cases import (
    FUSED,
    INIT,
    UNTIED,
    VOCABULARY,
    HostStep,
    enlarge_head,
    found_on_rank,
    host_args,
    host_model,
    measured_on_rank,
    peaks_on_rank,
    results,
    train_one_step,
)
from helpers import error_of, pool_of
from host_steps import GSPO, REPLAY, TERMS, TIS, Case, Sample, host_batch, host_logits, never
from launch_settings import CUSTOM_LOSS
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.args import ADVANTAGES, FORWARD, host_named
from megatron_rl.hosts.checks import SKIP_REMEDY
from megatron_rl.hosts.heads import carried_log_probs
from megatron_rl.hosts.heads.carrier import Carrier, carried, carry
from megatron_rl.hosts.heads.skipped_log_probs import unknown_log_probs
from megatron_rl.hosts.loss import custom_loss
from megatron_rl.hosts.training_hooks import custom_megatron_init
from megatron_rl.layout.groups import SINGLE, resolve_groups
from megatron_rl.megatron.head import HeadInputs
from megatron_rl.ops.linear_log_probs import linear_log_probs
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
OBSERVED = Case(
    settings=WIDE | {"observe_training_entropy": True, "calculate_per_token_loss": True, "loss_aggregation": "token_mean"}
)
OBSERVED = replace(OBSERVED, shapes=[shape for shape in OBSERVED.shapes if any(shape[2])])
KEPT = Case(settings=WIDE | REPLAY["miles"] | {"entropy_coef": 0.2, "policy_metrics": "none"})
KEPT_OBSERVED = Case(settings=WIDE | REPLAY["miles"] | {"observe_training_entropy": True})
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


def test_no_token_of_a_prompt_is_multiplied(monkeypatch):
    """The host computes rows of whole samples; lists have those of responses."""
    seen, (first, second) = [], GRPO.samples()[:2]

    def counting(*operands, loss_mask, **options):
        seen.append(int(loss_mask.sum()))
        return linear_log_probs(*operands, loss_mask=loss_mask, **options)

    monkeypatch.setattr(carried_log_probs, "linear_log_probs", counting)
    batch = host_batch(GRPO, [first, second], GRPO.samples(), 0, 1)
    hidden, weight = torch.randn(first.total + second.total + 3, 1, 4), torch.randn(8, 4)
    carrier = carry(HeadInputs(hidden, weight, False), SINGLE).transpose(0, 1)
    named = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    found = carried_log_probs.carried_log_probs(carrier, args=host_args(HostStep(GRPO, flags=FUSED)), **named)
    assert seen == [len(first.mask) + len(second.mask)] == [sum(map(len, found["log_probs"]))]


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


def rows_on_rank(rank: int, steps: list[HostStep]) -> list[int]:
    """Of each step the rows of logits that its head has made."""
    found = []
    for step in steps:
        args = host_args(step)
        models, optimizer, _ = host_model(args)
        with RowsOfLogits() as logits:
            train_one_step(args, models, optimizer, step)
        found.append(logits.rows)
    return found


@pytest.mark.megatron
def test_a_reported_entropy_takes_no_product_of_its_own(pool):
    """slime always reports one. It comes from the chunk's logits, which the loss has made."""
    reports = Case(host="slime", settings=WIDE)
    silent = replace(reports, settings=WIDE | {"policy_metrics": "none"})
    observes = Case(settings=WIDE | {"observe_training_entropy": True})
    steps = [HostStep(case, flags=FUSED) for case in (silent, reports, observes)]
    [found] = pool.run(rows_on_rank, steps, world_size=1)
    assert found == [sum(sum(mask) for _, _, mask in reports.shapes)] * 3


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


# --skip-old-log-probs


SLIME = host_named("slime")
SKIPPED = {"skip_old_log_probs": True, **INIT}

# What slime's actor does between a rollout and its step. read: what the advantages take from the old log-probabilities.
ACTOR = """
def compute_advantages_and_returns(args, rollout_data):
    xs = rollout_data.get("log_probs") or rollout_data.get("values")
    if xs is None:
        raise TypeError("no lengths")
    rollout_data["advantages"] = [args.read(x, own) for x, own in zip(xs, rollout_data["own_advantages"], strict=True)]

class MegatronTrainRayActor:
    def __init__(self, args, forward):
        self.args, self.forward, self.measured = args, forward, []

    def compute_log_prob(self, data_iterator, num_microbatches, store_prefix=""):
        self.measured.append(store_prefix)
        return {store_prefix + "log_probs": self.forward()}

    def train_actor(self, rollout_data, num_microbatches=(2,)):
        rollout_data.update(self.compute_log_prob(None, num_microbatches, store_prefix="ref_"))
        rollout_data.update(self.compute_log_prob(None, num_microbatches))
        compute_advantages_and_returns(self.args, rollout_data)
        return rollout_data
"""


def placed(source: str) -> ModuleType:
    module = ModuleType(f"{SLIME.training_package}.actor")
    module.__file__ = "slime/actor.py"
    exec(source, vars(module))
    sys.modules[module.__name__] = module
    return module


def started(**settings) -> tuple[Namespace, str]:
    """The arguments of a run of slime after its init hook, and what that printed."""
    args = Case(host="slime", settings=settings).args()
    args.read = lambda x, own: torch.zeros_like(x) + own
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        custom_megatron_init(args)
    return args, printed.getvalue()


def rollout_of(samples: list[Sample]) -> dict:
    return {
        "total_lengths": [sample.total for sample in samples],
        "response_lengths": [len(sample.mask) for sample in samples],
        "loss_masks": [torch.tensor(sample.mask) for sample in samples],
        "own_advantages": [1.5, -0.75, 0.5, -2.0, 1.0, -0.25],
    }


def step_of(actor: ModuleType, args: Namespace) -> tuple[list[str], list, dict, dict]:
    """(the forwards of a rollout, its step's gradients by the logits, its metrics, its data before the step)."""
    case = Case(host="slime", without=())
    samples = case.samples()
    leaves = [sample.logits.clone().requires_grad_() for sample in samples]

    def forward() -> list:
        found = []
        for sample, leaf in zip(samples, leaves, strict=True):
            rows = torch.log_softmax(leaf.detach()[sample.prompt - 1 : -1] / args.rollout_temperature, -1)
            found.append(rows.gather(-1, sample.tokens[sample.prompt :, None])[:, 0].float())
        return found

    made = actor.MegatronTrainRayActor(args, forward)
    data = made.train_actor(rollout_of(samples))
    batch = host_batch(case, samples, samples, 0, 1) | {"log_probs": data.get("log_probs"), "advantages": data["advantages"]}
    loss, metrics = custom_loss(args, batch, host_logits(case, samples, samples, leaves, 0, 1), never)
    loss.backward()
    return made.measured, [leaf.grad for leaf in leaves], metrics, data


def steps_on_rank(rank: int) -> tuple[tuple, list[tuple], str, tuple]:
    """Steps of a run without our flag, of two with it, what the second printed at start, and the first run once more."""
    actor = placed(ACTOR)
    plain, _ = started()
    first = step_of(actor, plain)
    ours = []
    for _ in range(2):  # the second init hook of a process puts nothing around what is there
        args, printed = started(**SKIPPED)
        ours.append(step_of(actor, args))
    return first, ours, printed, step_of(actor, plain)


@pytest.mark.megatron
def test_without_the_forward_the_step_is_that_of_the_forward(pool):
    """The model has not moved since the forward, so its numbers are the step's own. The reference is measured as before."""
    [((measured, expected, _, data), ours, printed, again)] = pool.run(steps_on_rank, world_size=1)
    assert measured == ["ref_", ""] and set(data) >= {"log_probs", "ref_log_probs"}
    for measured, gradients, metrics, data in ours:
        assert measured == ["ref_"] and "log_probs" not in data and "ref_log_probs" in data
        assert all(torch.isfinite(advantage).all() for advantage in data["advantages"])
        for found, theirs in zip(gradients, expected, strict=True):
            # The forward's numbers are float64 rounded to float32: a ratio is 1 up to 2^-24 x 12.
            torch.testing.assert_close(found, theirs, rtol=1e-6, atol=1e-9)
        assert metrics["ppo_kl"] == 0 and metrics["pg_clipfrac"] == 0
    assert "old log-probabilities are the step's own, each ratio is 1" in printed
    assert again[0] == ["ref_", ""]  # a run beside it, in the same process, keeps its forward


def errors_on_rank(rank: int) -> dict[str, str]:
    actor = placed(ACTOR)
    args, _ = started(**SKIPPED)
    made, rollout = actor.MegatronTrainRayActor(args, lambda: []), rollout_of(Case().samples())
    own = rollout | {"log_probs": [torch.zeros(len(mask)) for mask in rollout["loss_masks"]]}
    found = {"three steps": error_of(lambda: made.train_actor(dict(rollout), (2, 2, 1)))}
    found["its own"] = error_of(lambda: made.train_actor(own))
    args.read = lambda x, own: own + 0.0 * x
    found["a reader"] = error_of(lambda: step_of(actor, args))
    args.read = lambda x, own: x
    values = [torch.ones(len(mask)) for mask in rollout["loss_masks"]]
    found["a critic"] = str(made.train_actor(rollout | {"values": values})["advantages"][0].tolist())
    return found


@pytest.mark.megatron
def test_what_needs_the_forward_is_refused_at_the_first_rollout(pool):
    """What no rule of the launch knows of: an advantage that reads the old log-probabilities is not finite, and our loss refuses
    it. With a critic the host takes the lengths of its values."""
    [found] = pool.run(errors_on_rank, world_size=1)
    assert "this rollout is 3 optimiser steps, and from the second on" in found["three steps"]
    assert "make a rollout one step (--num-steps-per-rollout 1), or remove --skip-old-log-probs" in found["three steps"]
    assert "the rollout brings log_probs of its own, which would be ignored; remove --skip-old-log-probs" in found["its own"]
    assert "a value that is not finite" in found["a reader"]
    assert found["a critic"] == str([1.0] * len(Case().samples()[0].mask))


def test_a_batch_with_measured_log_probabilities_is_refused():
    """The init hook was not called, or a function at its flag does not call ours."""
    case = Case(settings=SKIPPED)
    samples = case.samples()
    logits = host_logits(case, samples, samples, [sample.logits for sample in samples], 0, 1)
    with pytest.raises(DataError, match="--skip-old-log-probs: the host's batch has log_probs.*add --custom-megatron-init-path"):
        custom_loss(case.args(), host_batch(case, samples, samples, 0, 1), logits, never)


def lengths_on_rank(rank: int, layout: str) -> tuple[list[int], list[int]]:
    cp, samples = resolve_groups().cp, Case(layout).samples()
    longest = -(-max(sample.total for sample in samples) // 4) * 4
    data = rollout_of(samples) | {"max_seq_lens": [longest] * len(samples) if layout == "bshd" else None}
    batch = host_batch(Case(layout), samples, samples, cp.rank(), cp.size())
    found = unknown_log_probs(data)
    assert all(values.dtype == torch.float32 and values.isnan().all() for values in found)
    return [len(values) for values in found], [len(values) for values in batch["log_probs"]]


@pytest.mark.megatron
@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_lengths_are_those_of_the_ranks_own_tokens(pool, cp_size, layout):
    for found, expected in pool.run(lengths_on_rank, layout, world_size=cp_size, context_parallel_size=cp_size):
        assert found == expected


MOVED = [
    pytest.param(ACTOR.replace("store_prefix", "prefix"), "compute_log_prob has no argument store_prefix", id="another prefix"),
    pytest.param(
        ACTOR.replace("    compute_advantages_and_returns(", "    advantages("),
        "train_actor does not call compute_advantages_and_returns",
        id="advantages elsewhere",
    ),
]


@pytest.mark.parametrize(("source", "says"), MOVED)
def test_a_host_that_measures_in_another_way_is_refused(source, says, monkeypatch):
    monkeypatch.setitem(sys.modules, f"{SLIME.training_package}.actor", None)  # as it was at the end
    placed(source)
    problems = [text for one in (FORWARD, ADVANTAGES) for text in one.problems("slime", SLIME.training_package, SKIP_REMEDY)]
    assert problems and all("no forward can be left out; remove --skip-old-log-probs" in problem for problem in problems)
    with pytest.raises(ConfigError, match=f"slime's .*{says}"):
        custom_megatron_init(Namespace(**CUSTOM_LOSS, **SKIPPED, loss_aggregation="sample_mean", rollout_batch_size=8))
