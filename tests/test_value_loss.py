"""The value loss of a critic: by hand, against a loop in any cut of the step, and through Megatron's schedule."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from unittest import mock

import pytest
import torch
from helpers import last_rank_alone, pool_of, zigzag
from simulated_cuda import simulated_cuda
from simulated_ranks import groups_of_ranks, on_simulated_ranks
from torch import Tensor

from megatron_rl import count_step, sample_token_weights, value_loss
from megatron_rl.config import PolicyLossConfig
from megatron_rl.layout.groups import SINGLE, resolve_groups
from megatron_rl.megatron.head import HeadSettings, run_model
from megatron_rl.megatron.model import model_config_of
from megatron_rl.megatron.samples import weigh_samples
from megatron_rl.megatron.schedule import scale_for_schedule
from megatron_rl.testing import layout_step, reference
from megatron_rl.testing.layout_step import (
    Layout,
    LayoutModel,
    Shards,
    StepSample,
    TinyGPT,
    build_tiny,
    make_step_batches,
    named_shards,
    row_length,
    run_schedule,
)
from megatron_rl.testing.reference import ragged_samples
from megatron_rl.weights import AGGREGATIONS

DOUBLE, NAN, INF = torch.float64, float("nan"), float("inf")
CLIP = 0.4

pool = pool_of(2)

# Two documents of three and two tokens, weights 1/2 and 1/4, c = 1/2. All numbers are exact in 16 bits.
#
#   V     R    V_old  (V-R)^2  clipped V  its square  larger
#   1     2    1.25   1        1          1           1        inside the clip
#   3     0    1      9        1.5        2.25        9        the clip lowers the error, and does not act
#   1     1.5  0      0.25     0.5        1           1        the clip holds: no gradient
#   2     0    2      4        2          4           4        V has not moved
#   1     0    -1.5   1        -1         1           1        equal squares: the gradient is that of V
#
# With the clip 1/2 (1/2 (1 + 9 + 1) + 1/4 (4 + 1)) = 3.375, and without 1/2 (1/2 (1 + 9 + 0.25) + 5/4) = 3.1875.
# Where the clip does not hold, the gradient is w (V - R): 1/2 of -1, 3, -0.5, and 1/4 of 2, 1.
VALUES, RETURNS, OLD = [1.0, 3, 1, 2, 1], [2.0, 0, 1.5, 0, 0], [1.25, 1, 0, 2, -1.5]
BY_HAND = {
    "clip": ({"clip": 0.5}, 3.375, [-0.5, 1.5, 0, 0.5, 0.25], 1),
    "no clip": ({}, 3.1875, [-0.5, 1.5, -0.25, 0.5, 0.25], 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, DOUBLE])
@pytest.mark.parametrize("name", BY_HAND)
def test_loss_and_gradient_by_hand(name, dtype):
    """Returns, old values and weights are constants, also where they hang on the critic."""
    options, loss, gradient, num_clipped = BY_HAND[name]
    leaf, *constants = (torch.tensor(vector, dtype=dtype, requires_grad=True) for vector in (VALUES, RETURNS, OLD, [0.5, 0.25]))
    returns, old, weights = constants
    options = options | ({"old_values": old} if options else {})
    output = value_loss(leaf, returns, torch.ones(5, dtype=torch.bool), torch.tensor([0, 3, 5]), weights, **options)
    output.loss.backward()
    assert output.loss.dtype == (DOUBLE if dtype == DOUBLE else torch.float32) and output.loss.shape == ()
    assert (output.loss.item(), leaf.grad.tolist(), output.num_clipped.item()) == (loss, gradient, num_clipped)
    assert (output.squared_error.item(), output.num_nonfinite.tolist()) == (15.25, [0, 0])  # 1 + 9 + 0.25 + 4 + 1
    assert all(vector.grad is None for vector in constants)


# A step

LENGTHS, PROMPTS = [5, 1, 8, 3, 2, 6, 4], [*"aabbbcc"]
ENDS = list(accumulate(LENGTHS))
DOCUMENTS = [list(range(end - length, end)) for end, length in zip(ENDS, LENGTHS, strict=True)]
GENERATOR = torch.Generator().manual_seed(5)
STEP_VALUES, STEP_RETURNS, NOISE = torch.randn(3, ENDS[-1], generator=GENERATOR, dtype=DOUBLE)
STEP_OLD = STEP_VALUES + NOISE
# The fourth sample has no unmasked token.
MASK = torch.tensor([i != 3 and t % 3 != 2 for i, length in enumerate(LENGTHS) for t in range(length)])


def weights_of(aggregation: str, samples: list[int], group=None) -> tuple[object, Tensor]:
    """The step's counts, and the weights of these samples, all that lie on this dp rank."""
    masks, prompts = [MASK[DOCUMENTS[i]] for i in samples], [PROMPTS[i] for i in samples]
    totals, counts, prompt_counts, _ = count_step(masks, prompts, group)
    divisor = 8.0 if aggregation == "constant" else None
    return totals, sample_token_weights(aggregation, counts, totals, prompt_token_counts=prompt_counts, divisor=divisor)


def truth(aggregation: str, clip: float | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, gradient, clipped tokens and squared error of the whole step, token by token."""
    leaf, loss, num_clipped, squared_error = STEP_VALUES.clone().requires_grad_(), 0.0, 0, 0.0
    for document, weight in zip(DOCUMENTS, weights_of(aggregation, [*range(len(LENGTHS))])[1].tolist(), strict=True):
        for t in (t for t in document if MASK[t]):
            found = (leaf[t] - STEP_RETURNS[t]) ** 2
            squared_error += float(found.detach())
            if clip is not None:
                moved = STEP_OLD[t] + max(-clip, min(clip, float(STEP_VALUES[t] - STEP_OLD[t])))
                held = (moved - STEP_RETURNS[t]) ** 2
                num_clipped += bool(held > found)
                found = held if held > found else found
            loss = loss + weight * found / 2
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient, torch.tensor(num_clipped, dtype=DOUBLE), torch.tensor(squared_error, dtype=DOUBLE)


def part_of_step(positions: list[list[int]], weights: Tensor, clip: float | None, fill: float = NAN):
    """Output and gradient of these positions, a list a document, and two tokens of padding. What must not be read is `fill`."""
    rows = [t for document in positions for t in document]
    live, bounds = MASK[rows], [0, *accumulate(map(len, positions))]

    def padded(vector: Tensor) -> Tensor:
        return torch.cat([torch.where(live, vector[rows], fill), vector.new_full((2,), fill)])

    leaf, mask = padded(STEP_VALUES).requires_grad_(), torch.cat([live, torch.ones(2, dtype=torch.bool)])
    options = {} if clip is None else {"clip": clip, "old_values": padded(STEP_OLD)}
    output = value_loss(leaf, padded(STEP_RETURNS), mask, torch.tensor(bounds, dtype=torch.int32), weights, **options)
    output.loss.backward()
    assert not leaf.grad[len(rows) :].any() and not leaf.grad[: len(rows)][~live].any()
    return output, rows, leaf.grad[: len(rows)]


def test_masked_tokens_and_padding_change_no_bit():
    weights = weights_of("prompt_mean", [*range(len(LENGTHS))])[1]
    (expected, _, gradient), *others = (part_of_step(DOCUMENTS, weights, CLIP, fill) for fill in (0.0, NAN, INF, 1e200))
    for output, _, found in others:
        assert torch.equal(output.loss, expected.loss) and torch.equal(found, gradient)
        assert torch.equal(output.squared_error, expected.squared_error) and output.num_clipped == expected.num_clipped


CUTS = [
    pytest.param({}, 1, zigzag, id="one process"),
    pytest.param({}, 3, zigzag, id="FB-01 three unlike micro-batches: a mean of means"),
    pytest.param({"dp": 2}, 2, zigzag, id="DP2: groups straddle ranks"),
    pytest.param({"cp": 2}, 2, zigzag, id="CP2: slices, some empty"),
    pytest.param({"cp": 2, "dp": 2}, 5, last_rank_alone, id="CP2xDP2: micro-batches and ranks without a token"),
    pytest.param({"cp": 4, "dp": 3, "tp": 2}, 1, zigzag, id="CP4xDP3xTP2"),
]


@pytest.mark.parametrize("clip", [None, CLIP])
@pytest.mark.parametrize("aggregation", AGGREGATIONS.names())
@pytest.mark.parametrize(("sizes", "num_microbatches", "slice_of"), CUTS)
def test_the_parts_sum_to_the_loss_and_gradient_of_one_process(sizes, num_microbatches, slice_of, aggregation, clip):
    """Catches a count of a micro-batch or of a slice, and a factor of cp, dp or M. Each tp rank has the same."""

    def on_rank(groups):
        mine, found = [*range(len(LENGTHS))][groups.dp.rank() :: groups.dp.size()], [0.0, torch.zeros_like(STEP_VALUES), 0, 0.0]
        _, weights = weights_of(aggregation, mine, groups.dp)
        for part in range(num_microbatches):
            own = slice(part, None, num_microbatches)
            positions = [slice_of(DOCUMENTS[i], groups.cp.rank(), groups.cp.size()) for i in mine[own]]
            output, rows, gradient = part_of_step(positions, weights[own], clip)
            found[1][rows] += gradient
            for place, sums in ((0, output.loss.detach()), (2, output.num_clipped), (3, output.squared_error)):
                found[place] += sums
        return found

    expected, of_ranks, tp = truth(aggregation, clip), on_simulated_ranks(on_rank, groups_of_ranks(**sizes)), sizes.get("tp", 1)
    assert int(expected[2]) > 3 or clip is None
    for tp_rank in range(tp):
        for parts, whole in zip(zip(*of_ranks[tp_rank::tp], strict=True), expected, strict=True):
            torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-12)


# A critic: Megatron's GPTModel with a head of one output in the place of its output layer.


class ValueHead(torch.nn.Linear):
    """What GPTModel asks of its output layer."""

    def forward(self, input_: Tensor, **ignored) -> tuple[Tensor, None]:  # [S, B, H] -> [S, B, 1]
        return super().forward(input_), None


def build_critic(tiny: TinyGPT, config, row_length: int, **options):
    model = build_tiny(tiny, config, row_length, **options)
    if model.post_process:
        model.output_layer = ValueHead(config.hidden_size, 1, bias=False)
        with torch.no_grad():
            model.output_layer.weight.copy_(torch.linspace(-1, 1, config.hidden_size))
    return model


def critic_samples() -> list[StepSample]:
    """ref_log_probs are the returns, and rollout_log_probs the old values, on both sides of the clip."""
    numbers = random.Random(3)

    def drawn(sample: StepSample) -> list[float]:
        return [numbers.gauss(0.0, 2.0) for _ in sample.loss_mask]

    return [replace(sample, ref_log_probs=drawn(sample), rollout_log_probs=drawn(sample)) for sample in ragged_samples()]


def config_of(aggregation: str) -> PolicyLossConfig:
    return PolicyLossConfig(loss_aggregation=aggregation, loss_aggregation_divisor=8.0 if aggregation == "constant" else None)


def critic_forward_step(batches, model):
    batch = next(batches)
    output, *_ = run_model(model, batch, HeadSettings(), SINGLE)

    def loss_func(values: Tensor):  # [B, S, 1]
        given = batch.loss
        vectors = (values.flatten(), given.ref_log_probs, given.loss_mask, given.cu_seqlens, given.token_weights)
        found = value_loss(*vectors, old_values=given.rollout_log_probs, clip=CLIP)
        return scale_for_schedule(
            found.loss,
            batch.context.num_microbatches,
            totals=batch.context.totals,
            num_local_tokens=given.loss_mask.sum(),
            config=model_config_of(model),
            groups=resolve_groups(),
        )

    return output, loss_func


def critic_on_rank(rank: int, layout: Layout, aggregation: str) -> Shards:
    samples = critic_samples()
    with mock.patch.object(layout_step, "build_tiny", build_critic):
        model = LayoutModel(layout, row_length(samples, layout), CRITIC)
    batches = make_step_batches(config_of(aggregation), layout, samples, model.groups)
    rows, length = batches[0].tokens.shape
    run_schedule(model.models, batches, length * model.groups.cp.size(), rows, critic_forward_step)
    return named_shards(model.models[0])


def critic_truth_on_rank(rank: int, aggregation: str) -> dict[str, Tensor]:
    """The gradient of the whole step, in float64, sample after sample."""
    samples, loss = critic_samples(), 0.0
    with mock.patch.object(reference, "build_tiny", build_critic):
        model = reference.double_model(CRITIC, samples)
    weighed, _ = weigh_samples(config_of(aggregation), samples, resolve_groups())
    for sample, weight, values in zip(samples, weighed, reference.model_logits(model, samples, CRITIC), strict=True):
        returns, old = (torch.tensor(vector, dtype=DOUBLE) for vector in (sample.ref_log_probs, sample.rollout_log_probs))
        live = torch.tensor(sample.loss_mask, dtype=torch.bool)
        plain, clipped = (values[:, 0] - returns) ** 2, (values[:, 0].clamp(old - CLIP, old + CLIP) - returns) ** 2
        loss = loss + weight.token_weight * torch.maximum(plain, clipped)[live].sum() / 2
    parameters = reference.global_parameters(model)
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


CRITIC = TinyGPT(num_layers=2)
CRITIC_LAYOUTS = [
    Layout(data=2, num_microbatches=3),
    Layout(context=2, num_microbatches=2, packed=True),
    Layout(pipeline=2, num_microbatches=4),
    Layout(data=2, num_microbatches=3, calculate_per_token_loss=True),
    Layout(context=2, num_microbatches=2, calculate_per_token_loss=True),
]


@pytest.mark.megatron
@pytest.mark.parametrize("layout", CRITIC_LAYOUTS, ids=str)
def test_the_gradient_of_a_critic_is_that_of_one_process(pool, layout):
    """Catches a critic that is off by cp, dp or M under the schedule that is right for the policy, and weights of a micro-batch."""
    for aggregation in ("prompt_mean", "constant"):
        [truth_of] = pool.run(critic_truth_on_rank, aggregation, world_size=1)
        answers = pool.run(critic_on_rank, layout, aggregation, world_size=2, **layout.model_parallel)
        found = {name: shard.gradient for answer in answers for name, shard in answer.items()}
        assert found.keys() == truth_of.keys()
        error = sum(float((found[name] - value).square().sum()) for name, value in truth_of.items()) ** 0.5
        # As in test_layouts.py: a float32 gradient lies up to 6e-7 from the truth on one rank, and a layout may double it.
        assert error < 2e-6 * sum(float(value.square().sum()) for value in truth_of.values()) ** 0.5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and no simulation of one")
def test_on_a_gpu_it_waits_for_nothing_and_counts_what_is_not_finite():
    """Bounds and weights are on the host. An old value that is not finite counts, though no value is clipped to it."""
    with simulated_cuda() as seen:
        values, returns = torch.ones(4, device="cuda", requires_grad=True), torch.zeros(4, device="cuda")
        old, mask = torch.ones(4, device="cuda"), torch.ones(4, dtype=torch.bool, device="cuda")
        old[2], returns[3] = NAN, INF
        seen.clear()
        bounds, weights = torch.tensor([0, 2, 4]), torch.tensor([0.5, 0.5])
        output = value_loss(values, returns, mask, bounds, weights, old_values=old, clip=0.5)
        output.loss.backward()
        assert seen == []
        assert output.num_nonfinite.cpu().tolist() == [0, 2] and values.grad[:2].cpu().tolist() == [0.5, 0.5]
