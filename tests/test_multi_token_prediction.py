"""What Megatron makes of the losses of multi-token prediction (MTP), measured on a real GPTModel, and where hosts are refused."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from helpers import error_of, pool_of
from test_layouts import GRADIENT_TOLERANCE, config_of

from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.hosts.megatron_lm import megatron_lm_config
from megatron_rl.hosts.training_hooks import check_model_contract
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.testing.layout_step import Layout, make_step_batches, row_length
from megatron_rl.testing.reference import ragged_samples

megatron = pytest.mark.megatron
NUM_TOKENS = sum(sum(sample.loss_mask) for sample in ragged_samples())
# An MTP layer predicts the token after the next one: not the second token of a sample. In two samples that is a response token.
NUM_PREDICTED = NUM_TOKENS - 2


class Case(NamedTuple):
    """How a model with an MTP layer is called. counts_whole_samples: each cp rank counts them whole, as in miles and slime."""

    layout: Layout
    is_masked: bool = True
    counts_whole_samples: bool = False


def model_with_mtp(length: int, **settings):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from megatron_rl.megatron.model import gpt_layer_spec, layout_independent_normal, transformer_config

    config = transformer_config(num_layers=2, hidden_size=32, num_attention_heads=4, mtp_num_layers=1, **settings)
    spec = gpt_layer_spec(config, use_transformer_engine=False)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=64,
        max_sequence_length=length,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(mean + 0.05 * layout_independent_normal(model, name, parameter))
    return model


def gradients_on_rank(rank: int, cases: list[Case]) -> list[torch.Tensor]:
    """Of MTP alone, in one vector: the model's own loss is multiplied by 0. No parameter is sharded."""
    return [gradient_of(case) for case in cases]


def gradient_of(case: Case) -> torch.Tensor:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    layout, step = case.layout, ragged_samples()
    length = row_length(step, layout)
    settings = {"calculate_per_token_loss": layout.calculate_per_token_loss, "finalize_model_grads_func": finalize_model_grads}
    bare = model_with_mtp(length, **settings)
    model = DistributedDataParallel(bare.config, DistributedDataParallelConfig(), bare)
    batches = make_step_batches(config_of("reinforce", "token_mean"), layout, step, resolve_groups())

    def forward_step(iterator, model):
        batch = next(iterator)
        labels, mask = batch.labels.view(batch.tokens.shape), batch.loss_mask.view(batch.tokens.shape)
        masked = {"loss_mask": mask.float()} if case.is_masked else {}
        count = batch.token_counts.sum() if case.counts_whole_samples else mask.sum()
        num_tokens = (count if layout.calculate_per_token_loss else torch.tensor(1)).int()
        losses = model(batch.tokens, batch.position_ids, None, labels=labels, **masked)
        return losses, lambda losses: (losses.sum() * 0.0, num_tokens, {})

    model.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=layout.num_microbatches,
        seq_length=length,
        micro_batch_size=batches[0].tokens.shape[0],
        forward_only=False,
    )
    return torch.cat([parameter.main_grad.flatten().double() for parameter in bare.parameters()])


def per_token(**sizes: int) -> Layout:
    return Layout(**sizes, calculate_per_token_loss=True)


# Title -> how the model is called. The first, with a mask and without, is the mean over what is predicted.
CASES = {
    "one rank, M1": Case(Layout()),
    "one rank, M4": Case(Layout(num_microbatches=4)),
    "one rank, a sample a micro-batch": Case(Layout(num_microbatches=len(ragged_samples()))),
    "DP2, M1": Case(Layout(data=2)),
    "CP2, M1": Case(Layout(context=2)),
    "one rank, M4, per token": Case(per_token(num_microbatches=4)),
    "DP2, M1, per token": Case(per_token(data=2)),
    "CP2, M1, per token": Case(per_token(context=2)),
    "CP2, M1, per token, miles and slime": Case(per_token(context=2), counts_whole_samples=True),
    "one rank, M1, no mask": Case(Layout(), is_masked=False),
    "one rank, M1, per token, no mask": Case(per_token(), is_masked=False),
}


def measured(pool) -> dict[str, torch.Tensor]:
    """Title -> gradient, with one start of the ranks a layout."""
    found: dict[str, torch.Tensor] = {}
    for sizes in ({"world_size": 1}, {"world_size": 2}, {"world_size": 2, "context_parallel_size": 2}):
        chosen = {
            title: case
            for title, case in CASES.items()
            if (case.layout.world_size, case.layout.context) == (sizes["world_size"], sizes.get("context_parallel_size", 1))
        }
        found |= zip(chosen, pool.run(gradients_on_rank, list(chosen.values()), **sizes)[0], strict=True)
    return {title: found[title] for title in CASES}


def along_and_off(found: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """(the part along the truth, the norm of the difference), both over the truth."""
    return float(found @ truth / (truth @ truth)), float((found - truth).norm() / truth.norm())


pool = pool_of(2)


@pytest.fixture(scope="module")
def gradients(pool):
    return measured(pool)


def has_own_function_for_mtp(rank: int) -> bool:
    """Since Megatron-Core 0.17. It divides by the tokens that are predicted, at least by 1; labels may be left out."""
    from megatron.core.transformer import multi_token_prediction

    return hasattr(multi_token_prediction, "process_mtp_loss")


@pytest.fixture(scope="module")
def is_new(pool):
    return pool.run(has_own_function_for_mtp, world_size=1)[0]


@pytest.fixture(scope="module")
def kept(is_new):
    """Of the mean over the tokens that are predicted, under the per-token contract."""
    return 1.0 if is_new else NUM_PREDICTED / NUM_TOKENS


@megatron
def test_with_a_response_mask_the_per_token_contract_keeps_their_denominator(gradients, kept, is_new):
    """FB-103: the step's response tokens, of which an MTP layer predicts nearly all, whatever the layout. Since 0.17 each part is
    multiplied by its own response tokens and divided by those that it predicts: near the mean of the step, and not equal."""
    expected = gradients["one rank, M1"] * kept
    for title in ("one rank, M4, per token", "DP2, M1, per token", "CP2, M1, per token"):
        off = along_and_off(gradients[title], expected)[1]
        assert 1e-3 < off < 0.05 if is_new else off < GRADIENT_TOLERANCE, title


@megatron
def test_the_factors_that_the_refusals_name_are_those_that_act(gradients, kept, is_new):
    """FB-104: 1 / cp in miles and slime. FB-103: all / response tokens where no mask is given."""
    expected = gradients["one rank, M1"] * kept
    of_hosts = along_and_off(gradients["CP2, M1, per token, miles and slime"], expected)
    assert of_hosts == pytest.approx((0.5, 0.5), rel=1e-3 if is_new else 1e-5)  # as above
    step = ragged_samples()
    all_tokens = len(step) * (row_length(step, Layout()) - (0 if is_new else 1))  # padding too
    found = along_and_off(gradients["one rank, M1, per token, no mask"], gradients["one rank, M1, no mask"])
    assert found[0] == pytest.approx(all_tokens / NUM_TOKENS, rel=1e-5)


@megatron
def test_the_default_contract_takes_a_mean_of_means(gradients, is_new):
    """It changes with the layout, and 0 / 0 of a micro-batch without a response token reaches the parameters."""
    truth = gradients["one rank, M1"]
    for title in ("one rank, M4", "DP2, M1", "CP2, M1"):
        assert along_and_off(gradients[title], truth)[1] > 0.1, title
    assert math.isnan(along_and_off(gradients["one rank, a sample a micro-batch"], truth)[0]) != is_new


# Where they are trained, and where refused


def test_our_forward_step_trains_them():
    """FB-103: the arguments of Megatron-LM. tests/test_mtp_layouts.py has the gradient."""
    args = add_megatron_rl_args(ArgumentParser()).parse_args(["--loss-aggregation", "sample_mean"])
    megatron_lm_config(Namespace(**vars(args), mtp_num_layers=1))


@pytest.mark.parametrize(("cp", "is_refused"), [(1, False), (2, True)])
def test_an_actor_refuses_the_factor_of_the_hosts(cp, is_refused):
    """FB-104"""
    args = Namespace(calculate_per_token_loss=True, enable_mtp_training=True, context_parallel_size=cp)
    config = SimpleNamespace(calculate_per_token_loss=True, mtp_num_layers=1, mtp_loss_scaling_factor=0.1, context_parallel_size=cp)
    found = error_of(lambda: check_model_contract(args, config))
    assert ("so its gradient is x 1 / cp" in found) == is_refused and bool(found) == is_refused
