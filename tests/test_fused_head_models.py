"""The fused head in models that are more than layers and a head: hooks, layers of others, evaluation mode, 16 bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers import error_of, pool_of
from test_fused_head import FUSED, model_input, small_model
from torch import nn
from trainer_cases import STILL, gradients_of, ragged_step, relative_difference, tiny_trainer, whole

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.layout import SINGLE
from megatron_rl.megatron.head import HeadSettings, run_model
from megatron_rl.megatron.model import find_output_layer
from megatron_rl.testing.invariance import Layout, TinyGPT, steps_on_layout
from megatron_rl.testing.reference import ragged_samples

pytestmark = pytest.mark.megatron

SIZES = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}


pool = pool_of(2)


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
        "It computes by test_fused_head_models.Adapter.forward (",
    ),
}


def check_refusals(found: list[str], setting: str) -> None:
    """found: the error of each of FOREIGN_HEADS."""
    for message, words in zip(found, FOREIGN_HEADS.values(), strict=True):
        assert message.startswith(f"ConfigError: {setting}: the output layer "), message
        assert all(part in message for part in words) and "test_fused_head_models.py:" in message, message
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
