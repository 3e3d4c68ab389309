"""The output layer replaced for a call: what it hands over, what is refused by name, and when its weight gradient is there."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import error_of, pool_of
from test_forward_step import SeenShapes
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainer_cases import (
    CP,
    NO_CLIPPING,
    NO_MOVE,
    PP,
    STILL,
    TP,
    VOCABULARY,
    gradients_of,
    lively,
    ragged_step,
    relative_difference,
    tiny_trainer,
    whole,
)

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.layout import SINGLE
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.megatron.head import HeadSettings, run_model, setting_problems
from megatron_rl.megatron.model import build_gpt_model, find_output_layer, transformer_config
from megatron_rl.testing.invariance import Layout, TinyGPT, steps_on_layout
from megatron_rl.testing.reference import ragged_samples
from megatron_rl.train.generation import SamplingSettings, gumbel_noise

pytestmark = pytest.mark.megatron

FUSED, FP32 = HeadSettings(is_fused=True), HeadSettings(is_fp32=True)
HIDDEN = 32
# Chunks of some rows: 11 float32 logits take 44 bytes.
TINY_BUDGET = 512


pool = pool_of(4)


def config_of(is_fused: bool, **others) -> PolicyLossConfig:
    head = {"fused_lm_head_loss": True, "max_logits_bytes": TINY_BUDGET} if is_fused else {}
    return PolicyLossConfig(policy_temperature=0.7, **head, **others)


def measured_on_rank(rank, settings):
    """By logits and fused: (log-probabilities of this dp rank's samples in micro-batches of unlike size, sampled tokens)."""
    return [measured_with(is_fused, settings) for is_fused in (False, True)]


def measured_with(is_fused, settings):
    trainer, dp = lively(tiny_trainer(config_of(is_fused), **settings)), resolve_groups().dp
    mine = ragged_step()[dp.rank() :: dp.size()]
    log_probs = trainer.log_probs([mine[:2], [], mine[2:]])
    prompts = [[(3 * number + place) % VOCABULARY for place in range(1 + number % 5)] for number in range(6)]
    sampling = SamplingSettings(max_new_tokens=5, end_tokens=(4,), temperature=0.7, vocab_size=VOCABULARY, rows_per_forward=4)
    return log_probs, trainer.sample(prompts, list(range(6)), sampling, partial(gumbel_noise, 7, 0))


LAYOUTS = [
    pytest.param(2, {TP: 2}, {"sequence_parallel": True}, id="TP2+SP, padded: shards of several rows"),
    pytest.param(2, {TP: 2}, {"sequence_parallel": True, "packed": True}, id="TP2+SP, packed: shards of one row"),
    pytest.param(4, {TP: 2, CP: 2}, {"sequence_parallel": True}, id="TP2+SPxCP2, padded"),
    pytest.param(2, {PP: 2}, {"packed": True}, id="PP2, packed: the head is on one stage"),
]


@pytest.mark.parametrize(("world_size", "layout", "settings"), LAYOUTS)
def test_log_probs_and_samples_of_the_fused_head_are_those_of_logits(pool, world_size, layout, settings):
    """FB-64: catches Megatron's [S, B] order taken for rows, shards that are not gathered, and another position's logits. Two
    orders of float32 additions differ by 1e-6, another row by 1e-2 and more."""
    for (truth, expected), (log_probs, tokens) in pool.run(measured_on_rank, settings, world_size=world_size, **layout):
        assert tokens == expected
        for rows, true_rows in zip(log_probs, truth, strict=True):
            for row, true_row in zip(rows, true_rows, strict=True):
                assert row == pytest.approx(true_row, abs=2e-5)


def fp32_samples_on_rank(rank, is_fused):
    """Tokens of 512 prompts from a bf16 policy: sampled through the fp32 head, and by products of the same hidden states in
    float64 and in bf16."""
    config = PolicyLossConfig(fp32_lm_head=True, fused_lm_head_loss=is_fused)
    trainer = lively(tiny_trainer(config, bf16=True))
    count, noise = 512, partial(gumbel_noise, 3, 0)
    prompts = [[n % VOCABULARY, 3, 5] for n in range(count)]
    sampling = SamplingSettings(max_new_tokens=1, end_tokens=(), temperature=1.0, vocab_size=VOCABULARY, rows_per_forward=count)
    found = trainer.sample(prompts, list(range(count)), sampling, noise)
    tokens = torch.tensor([[*prompt, 0] for prompt in prompts])  # in rows of the length that sampling makes of them
    with torch.no_grad():
        inputs = run_model(trainer.model, model_input(tokens), FUSED, SINGLE).inputs
    hidden, weight = inputs.hidden[2], inputs.weight.detach()
    noise_of_all = noise(torch.arange(count), torch.full((count,), 3), torch.arange(VOCABULARY))
    both = [(hidden.double() @ weight.double().t() + noise_of_all), (hidden @ weight.t()).float() + noise_of_all]
    return [[token for [token] in found], *(scores.argmax(-1).tolist() for scores in both)]


@pytest.mark.parametrize("is_fused", [False, True], ids=["logits", "fused"])
def test_samples_come_from_the_fp32_head_too(pool, is_fused):
    """FB-39: sampling with rounded logits would draw from another policy than the loss measures: of 512 tokens some are others."""
    [(found, exact, rounded)] = pool.run(fp32_samples_on_rank, is_fused, world_size=1)
    assert found == exact and found != rounded


def ratio_on_rank(rank, is_fp32, is_fused):
    """The largest |ratio - 1| of a token between the trainer's log-probabilities and a float64 product of the same hidden states
    and weights, as an fp32 sampler has them. Logits are as large as those of a trained policy, some 10: bf16 has steps of 0.06."""
    trainer = lively(tiny_trainer(PolicyLossConfig(fp32_lm_head=is_fp32, fused_lm_head_loss=is_fused), bf16=True, **STILL))
    step, errors = ragged_step(), []
    length = max(len(sample.tokens) for sample in step) + 1
    for sample, [row] in zip(step, trainer.log_probs([[sample] for sample in step]), strict=True):
        tokens = torch.zeros(1, length // 2 * 2, dtype=torch.int64)
        tokens[0, : len(sample.tokens)] = torch.tensor(sample.tokens)
        with torch.no_grad():
            inputs = run_model(trainer.model, model_input(tokens), FUSED, SINGLE).inputs
        exact = torch.log_softmax(inputs.hidden[:, 0].double() @ inputs.weight.detach().double().t(), -1)
        prompt = len(sample.tokens) - len(sample.loss_mask)
        truth = [float(exact[q - 1, sample.tokens[q]]) for q in range(prompt, len(sample.tokens))]
        errors += [abs(math.expm1(new - old)) for new, old in zip(row, truth, strict=True)]
    return max(errors)


@pytest.mark.parametrize(("is_fp32", "is_fused"), [(True, False), (True, True), (False, False)])
def test_the_first_importance_ratio_is_1_against_an_fp32_reference(pool, is_fp32, is_fused):
    """FB-85: the fp32 head's ratio is 1 to 1e-5, fused or not; the plain head's of a bf16 policy is off by more than 1e-3."""
    [ratio] = pool.run(ratio_on_rank, is_fp32, is_fused, world_size=1)
    assert ratio < 1e-5 if is_fp32 else ratio > 1e-3


def unknown_scale(trainer):
    """A factor that cannot be foretold, though it is 1."""
    trainer._model_config.grad_scale_func = lambda loss: trainer.optimizer.scale_loss(loss)


def reused_buffers(trainer):
    trainer.model.ddp_config.reuse_grad_buf_for_mxfp8_param_ag = True


def fused_accumulation(trainer):
    """What --gradient-accumulation-fusion sets on the layer; without apex Megatron's own backward of it has no such function."""
    find_output_layer(trainer.model).gradient_accumulation_fusion = True


def changed_on_rank(rank, config, settings, change):
    """(main_grad of the head when forward has run, after the step) of a step of two micro-batches, before and after the change."""
    answers = []
    for is_changed in (False, True):
        trainer = tiny_trainer(config, clip_grad=NO_CLIPPING, lr=NO_MOVE, **settings)
        if is_changed:
            change(trainer)
        weight, sums = find_output_layer(trainer.model).weight, []
        finish = trainer._forward_step._finish

        def watched(*arguments, finish=finish, weight=weight, sums=sums):
            sums.append(float(weight.main_grad.abs().sum()))
            return finish(*arguments)

        trainer._forward_step._finish = watched
        samples = ragged_step()
        trainer.step([samples[:3], samples[3:]])
        answers.append((sums, gradients_of(trainer)))
    return answers


CHANGES = [
    pytest.param({"fused_lm_head_loss": True}, {}, unknown_scale, True, id="fused, a factor that nobody foretells"),
    pytest.param({"fused_lm_head_loss": True}, {}, reused_buffers, True, id="fused, buffers that are not free in forward"),
    pytest.param({"fused_lm_head_loss": True}, {}, fused_accumulation, False, id="fused, gradient accumulation fusion"),
    pytest.param({"fp32_lm_head": True}, {"bf16": True}, fused_accumulation, None, id="fp32, gradient accumulation fusion"),
]


@pytest.mark.parametrize(("options", "settings", "change", "must_wait"), CHANGES)
def test_the_weight_gradient_is_the_same_in_forward_and_in_backward(pool, options, settings, change, must_wait):
    """FB-87: with a factor that is known the head's gradient is in main_grad when forward ends; else it waits for backward. Either
    way it is there once, with gradient accumulation fusion too, which Megatron's own head needs apex for."""
    [(before, after)] = pool.run(changed_on_rank, PolicyLossConfig(**options), settings, change, world_size=1)
    (sums, truth), (other_sums, found) = before, after
    assert relative_difference(whole([found]), whole([truth])) < 1e-6
    if must_wait is not None:  # the fp32 head of logits knows no gradient in forward
        assert sums[0] > 0 and (other_sums[0] == 0) is must_wait
        assert other_sums[1] > 0


# The logits that are never there


def most_rows(seen: SeenShapes, num_columns: int) -> int:
    """Of any tensor that an operation takes or gives and that ends with the vocabulary's shard; not the weight, transposed."""
    rows = {math.prod(shape[:-1]) for shape in seen.shapes if len(shape) > 1 and shape[-1] == num_columns}
    return max(rows - {HIDDEN}, default=0)


def logits_on_rank(rank, config, settings):
    """Of old and reference log-probabilities, and of a step: rows of the largest tensor of logits."""
    trainer, samples = tiny_trainer(config, vocab_size=246, hidden_size=HIDDEN, **settings), ragged_step()
    measuring, training = SeenShapes(), SeenShapes()
    with measuring:
        [old], [ref] = trainer.log_probs([samples]), trainer.log_probs([samples], with_reference=True)
    rows = zip(samples, old, ref, strict=True)
    with training:
        trainer.step([[replace(sample, old_log_probs=row, ref_log_probs=ref_row) for sample, row, ref_row in rows]])
    return [most_rows(seen, 246 // trainer.groups.tp.size()) for seen in (measuring, training)]


@pytest.mark.parametrize("settings", [{}, {"sequence_parallel": True, "packed": True}], ids=["padded", "SP, packed"])
def test_no_logits_larger_than_the_budget_are_ever_there(pool, settings):
    """FB-42, FB-69: a flag that is accepted and computes the logits all the same. The batches have 49 rows and more; the budget
    holds five."""
    options = {"policy_loss": "gspo", "kl_coefficient": 0.1, "entropy_coefficient": 0.01, "policy_metrics": "with_entropy"}
    config = PolicyLossConfig(**options, fused_lm_head_loss=True, max_logits_bytes=5 * 4 * 123)
    assert pool.run(logits_on_rank, config, settings, world_size=2, **{TP: 2}) == [[5, 5]] * 2


# The replaced layer


def model_input(tokens):
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    absent = dict.fromkeys(("packed_seq_params", "cp_group", "routes", "is_padding"))
    return SimpleNamespace(tokens=tokens, position_ids=positions, **absent)


def small_model(**overrides):
    config = transformer_config(num_layers=1, hidden_size=16, num_attention_heads=2, **overrides)
    return build_gpt_model(config, vocab_size=VOCABULARY, max_sequence_length=8)


class Wrapper(nn.Module):
    """A model around a model, as DDP is one."""

    def __init__(self, module, around):
        super().__init__()
        self.module, self.around = module, around

    def forward(self, *inputs):
        return self.around(self.module, *inputs)


def called_twice(module, *inputs):
    module(*inputs)
    return module(*inputs)


def recomputed(module, tokens, positions, mask):
    anchor = torch.zeros(1, requires_grad=True)
    return checkpoint(lambda anchor: module(tokens, positions, mask), anchor, use_reentrant=True)


def failing(module, *inputs):
    module(*inputs)
    raise RuntimeError("after the head")


def as_it_is(module, *inputs):
    return module(*inputs)


def with_bias(model):
    model.output_layer.bias = nn.Parameter(torch.zeros(VOCABULARY))


def wrapped_on_rank(rank, around, change):
    """(what running the model says, whether the layer is its own again, whether its logits are)."""
    model = small_model()
    tokens = torch.tensor([[1, 2, 3, 4]])
    before = model(tokens, torch.arange(4)[None], None)
    if change is not None:
        change(model)
    message = error_of(lambda: run_model(Wrapper(model, around), model_input(tokens), FUSED, SINGLE))
    layer = find_output_layer(model)
    return message, "forward" not in vars(layer), torch.equal(model(tokens, torch.arange(4)[None], None), before)


WRAPPED = {
    "changes the logits afterwards (a scale or a soft cap)": (lambda module, *inputs: 0.5 * module(*inputs), None),
    "calls its output layer 2 times": (called_twice, None),
    "activation recomputation around the output layer": (recomputed, None),
    "RuntimeError: after the head": (failing, None),
    "asked to gather logits over tp": (lambda module, *inputs: module(*inputs, runtime_gather_output=True), None),
    "ConfigError: --fused-lm-head-loss with a bias in the output layer": (as_it_is, with_bias),
}


@pytest.mark.parametrize("says", WRAPPED)
def test_a_model_whose_logits_are_not_the_product_is_refused_and_the_layer_put_back(pool, says):
    """FB-69, FB-80: the loss would silently be that of other logits, or have no gradient. After any end the model is as it was."""
    [(message, is_own, is_equal)] = pool.run(wrapped_on_rank, *WRAPPED[says], world_size=1)
    assert says in message and is_own and is_equal


def test_what_a_model_s_config_cannot_do_with_the_head_is_told_at_once():
    """FB-74: all of it in one error, on every pipeline stage alike; and nothing is said where no flag asks for it."""
    config = SimpleNamespace(defer_embedding_wgrad_compute=True, bf16=False, fp16=False, params_dtype=torch.float32)
    assert [*setting_problems(HeadSettings(), config)] == []
    deferred, float32 = setting_problems(HeadSettings(is_fused=True, is_fp32=True), config)
    assert "remove --defer-embedding-wgrad-compute" in deferred
    assert "float32 parameters" in float32
    vars(config).update(defer_embedding_wgrad_compute=False, bf16=True, params_dtype=torch.bfloat16)
    assert [*setting_problems(HeadSettings(is_fused=True, is_fp32=True), config)] == []


# The fused head in models that are more than layers and a head: hooks, layers of others, evaluation mode, 16 bits.


SIZES = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}


def hooked_on_rank(rank, kind):
    """(what running the model says, logits of the model, those of what the layer handed over)."""
    model = small_model()
    layer, seen = find_output_layer(model), []
    if kind == "input doubled":
        layer.register_forward_pre_hook(lambda module, arguments: (2.0 * arguments[0], *arguments[1:]))
    elif kind == "output scaled":
        layer.register_forward_hook(lambda module, arguments, output: (0.5 * output[0], output[1]))
    else:
        layer.register_forward_hook(lambda module, arguments, output: seen.append(arguments[0].shape))
    batch = model_input(torch.tensor([[1, 2, 3, 4]]))
    logits = model(batch.tokens, batch.position_ids, None)
    try:
        inputs = run_model(model, batch, FUSED, SINGLE).inputs
    except ConfigError as error:
        return str(error), None, None, len(seen)
    handed = (inputs.hidden @ inputs.weight.t()).transpose(0, 1)
    return "", logits.detach(), handed.detach(), len(seen)


def test_hooks_on_the_output_layer_run_and_what_they_change_is_seen(pool):
    """FB-80: a hook on the input is part of the hidden states; one that changes the logits would be dropped, so it is refused."""
    for kind in ("input doubled", "looks on"):
        [(message, logits, handed, num_looks)] = pool.run(hooked_on_rank, kind, world_size=1)
        assert message == "" and num_looks == (2 if kind == "looks on" else 0)
        torch.testing.assert_close(handed, logits, rtol=1e-6, atol=1e-6)
    [(message, *_)] = pool.run(hooked_on_rank, "output scaled", world_size=1)
    assert "changes the logits afterwards" in message


# Output layers that compute more than X W^T, as bridges and adapters build them


def capped(output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    return 3.0 * torch.tanh(output[0] / 3.0), output[1]


def subclassed(model: nn.Module) -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class CappedLayer(ColumnParallelLinear):
        def forward(self, *given, **named):
            return capped(super().forward(*given, **named))

    model.output_layer.__class__ = CappedLayer


def replaced_on_the_instance(model: nn.Module) -> None:
    own = model.output_layer.forward
    model.output_layer.forward = lambda *given, **named: capped(own(*given, **named))


class Adapter(nn.Module):
    """Around a layer: it has no attribute of the layer."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.to_wrap = layer

    def forward(self, *given, **named):
        return capped(self.to_wrap(*given, **named))


def wrapped(model: nn.Module) -> None:
    model.output_layer = Adapter(model.output_layer)


# The change of a model whose output_layer is Megatron's own -> words of the refusal.
FOREIGN_HEADS = {
    subclassed: ("is a CappedLayer, a subclass of Megatron's ColumnParallelLinear", "CappedLayer.forward ("),
    replaced_on_the_instance: ("is a ColumnParallelLinear whose forward was replaced", "<locals>.<lambda> ("),
    wrapped: (
        "is a Adapter, not Megatron's ColumnParallelLinear",
        "It computes by test_fused_head.Adapter.forward (",
    ),
}


def check_refusals(found: list[str], setting: str) -> None:
    """found: the error of each of FOREIGN_HEADS."""
    for message, words in zip(found, FOREIGN_HEADS.values(), strict=True):
        assert message.startswith(f"ConfigError: {setting}: the output layer "), message
        assert all(part in message for part in words) and "test_fused_head.py:" in message, message
        assert f"Remove {setting}, or build the plain layer" in message


HEADS = [
    ("--fused-lm-head-loss", FUSED, {}),
    ("--fp32-lm-head", HeadSettings(is_fp32=True), {}),
    ("sampling", HeadSettings(), {"positions": torch.tensor([2])}),
    ("multi-token prediction", HeadSettings(), {"num_further": 1}),
]


def refused_on_rank(rank, changes):
    """What running the model says, for each of the settings and changes of the model."""
    batch, found = model_input(torch.tensor([[1, 2, 3, 4]])), []
    for _, head, given in HEADS:
        models = [small_model(bf16=True) for _ in changes]
        for change, model in zip(changes, models, strict=True):
            change(model)
        found.append([error_of(partial(run_model, model, batch, head, SINGLE, **given)) for model in models])
    return found


def test_an_output_layer_that_adds_to_the_product_is_refused_by_name(pool):
    """What it adds would be lost, or added twice, without a word: the loss and the gradient would be those of another function."""
    [found] = pool.run(refused_on_rank, FOREIGN_HEADS, world_size=1)
    for (setting, *_), refusals in zip(HEADS, found, strict=True):
        check_refusals(refusals, setting)


def under_another_name(model):
    model.lm_head = model.output_layer
    del model.output_layer


def test_a_model_whose_output_layer_is_not_found_is_refused(pool):
    """Its logits would be the model's own, without a word."""
    [(fused, fp32, *_)] = pool.run(refused_on_rank, [under_another_name], world_size=1)
    for (setting, *_), [error] in zip(HEADS[:2], (fused, fp32), strict=True):
        assert error.startswith(f"ConfigError: {setting}: the model is a GPTModel whose output layer is not found")


def evaluated_on_rank(rank):
    """Sums of main_grad after a forward-only schedule in train and in eval mode, and gradients of a step in either."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    trainer = tiny_trainer(PolicyLossConfig(fused_lm_head_loss=True), **STILL, **SIZES)
    weight, sums, gradients = find_output_layer(trainer.model).weight, [], []
    finish = trainer._forward_step._finish
    trainer._forward_step._finish = lambda output, batch, *rest: batches.append(batch) or finish(output, batch, *rest)
    for is_training in (True, False):
        trainer.model.train(is_training)
        batches = []
        trainer.step([ragged_step()])
        gradients.append(gradients_of(trainer))
        trainer.model.zero_grad_buffer()
        get_forward_backward_func()(
            **{"forward_step_func": trainer._forward_step, "data_iterator": iter(batches[:1]), "model": trainer.model},
            **{"num_microbatches": 1, "seq_length": batches[0].tokens.shape[1], "micro_batch_size": 6, "forward_only": True},
        )
        sums.append(float(weight.main_grad.abs().sum()))
        trainer._forward_step.take_reports()
    return sums, gradients


def test_evaluation_leaves_no_gradient_behind(pool):
    """Megatron's schedule leaves gradients on under forward_only: what the head puts into main_grad in forward would stay there."""
    [(sums, (trained, evaluated))] = pool.run(evaluated_on_rank, world_size=1)
    assert sums[0] > 0 and sums[1] == 0
    assert relative_difference(whole([evaluated]), whole([trained])) < 1e-6


def dtypes_on_rank(rank):
    """Of the logits that the loss gets of a bf16 policy."""
    trainer, seen = tiny_trainer(PolicyLossConfig(policy_loss="gspo"), bf16=True, **STILL, **SIZES), []
    whole_loss = trainer._forward_step.loss_func
    trainer._forward_step.loss_func = lambda *given, **scale: seen.append(given[-1].dtype) or whole_loss(*given, **scale)
    trainer.step([ragged_step()])
    return seen


def test_16_bit_logits_reach_the_loss_as_they_are(pool):
    """A float32 copy of the logits holds the same numbers in twice the memory."""
    assert pool.run(dtypes_on_rank, world_size=1) == [[torch.bfloat16]]


# Layouts: test_layouts.py has the fused head in float32

FP32_LAYOUTS = [
    pytest.param(Layout(tensor=2, sequence_parallel=True, packed=True, num_microbatches=2), False, id="TP2+SP, packed"),
    pytest.param(Layout(tensor=2, sequence_parallel=True, num_microbatches=2), True, id="TP2+SP, padded, tied"),
    pytest.param(Layout(pipeline=2, num_microbatches=2), True, id="PP2, tied"),
]


@pytest.mark.parametrize(("layout", "is_tied"), FP32_LAYOUTS)
def test_the_fp32_head_of_a_bf16_model_is_one_head_fused_or_not(pool, layout, is_tied):
    """FB-85: through Float16Module, DDP with float32 buffers and the bf16 optimisers. Two different paths, float32 logits in both:
    the head's weight gradient, which is float32 on both, agrees to float32; so do loss and metrics, which plain bf16 logits do not.
    Below the head each path's hidden gradient is rounded to bf16 once more, and a rounding falls on the other side now and then."""
    model = TinyGPT(num_layers=2, bf16=True, tie_embeddings=is_tied)
    heads = {}, {"fp32_lm_head": True}, {"fp32_lm_head": True, "fused_lm_head_loss": True, "max_logits_bytes": 1500}
    configs = [PolicyLossConfig(policy_loss="gspo", **head) for head in heads]
    rounded, plain, fused = steps_on_layout(pool, layout, [(ragged_samples(), config) for config in configs], model)
    [exact] = steps_on_layout(pool, layout, [(ragged_samples(), configs[0])], replace(model, bf16=False))
    assert 1e-5 < rounded.gradient_error(exact) < 3e-2  # bf16 rounds by 4e-3: catches a scale lost in Float16Module
    assert fused.gradient_error(plain) < 1e-2
    assert fused.loss == pytest.approx(plain.loss, rel=1e-4, abs=1e-6)
    if not is_tied:
        found, truth, of_rounded = (step.gradient["output_layer.weight"] for step in (fused, plain, rounded))
        assert (found - truth).norm() < 1e-5 * truth.norm()
        assert (of_rounded - truth).norm() > 1e-3 * truth.norm()
