"""The reducer against loops over whole responses, in the two ways that hosts call it; what it must refuse."""

from __future__ import annotations

import math
from argparse import Namespace

import pytest
import torch
from helpers import counted_collectives, error_of, pool_of, set_global_args, zigzag

from megatron_rl import hooks, reducers  # noqa: F401  (the names that the launch line gives)
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.reducer import get_pg_loss_reducer

MODES = {
    "sample_mean": {"loss_aggregation": "sample_mean"},
    "constant": {"loss_aggregation": "constant", "loss_aggregation_divisor": 40960.0},
    "token_mean": {"loss_aggregation": "token_mean", "calculate_per_token_loss": True},
}
# Total length, mask of the response. Ragged, partly masked; one response of one token, two long prompts.
RESPONSES = [
    (9, [1, 1, 0, 0, 1]),  # FB-10: tool tokens in the middle, m = 3 and not 5
    (40, [1, 1]),  # at cp 2 and 4 some ranks own none of it
    (12, [0, 1, 1, 1, 1, 1, 1, 1, 1]),
    (31, [1]),
    (16, [1] * 15),
]
FULLY_MASKED = (8, [0, 0, 0])


def arguments(**settings) -> Namespace:
    args = Namespace(**settings)
    set_global_args(args)
    return args


def as_host_lists(responses) -> tuple[list[int], list[int], list[torch.Tensor]]:
    masks = [torch.tensor(mask, dtype=torch.int32) for _, mask in responses]
    return [total for total, _ in responses], [len(mask) for _, mask in responses], masks


def call_as_hosts(responses, per_token: bool):
    """miles and slime: positional, and `calculate_per_token_loss` is the fourth."""
    return get_pg_loss_reducer(*as_host_lists(responses), per_token)


def token_losses(responses) -> list[list[float]]:
    """One number a response token, all different."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(len(mask), generator=generator).tolist() for _, mask in responses]


def by_hand(mode: str, responses, losses) -> tuple[float, list[list[float]]]:
    """(sum, its derivative by each token's loss), over whole responses."""
    total, derivative = 0.0, []
    for (_, mask), values in zip(responses, losses, strict=True):
        divisor = {"sample_mean": max(sum(mask), 1), "constant": 40960.0, "token_mean": 1.0}[mode]
        total += sum(value for value, is_set in zip(values, mask, strict=True) if is_set) / divisor
        derivative.append([is_set / divisor for is_set in mask])
    return total, derivative


def test_three_samples_by_hand():
    """S = (1 + 2, 4, 0); m = (2, 1, 0): sample_mean 3/2 + 4/1 + 0, constant 7/4, token_mean 7."""
    responses = [(5, [1, 0, 1]), (3, [1]), FULLY_MASKED]
    x = torch.tensor([1.0, 9.0, 2.0, 4.0, 9.0, 9.0, 9.0])
    arguments(loss_aggregation="sample_mean")
    assert call_as_hosts(responses, False)(x).item() == 5.5
    arguments(loss_aggregation="constant", loss_aggregation_divisor=4)
    assert call_as_hosts(responses, False)(x).item() == 1.75
    arguments(loss_aggregation="token_mean", calculate_per_token_loss=True)
    assert call_as_hosts(responses[:2], True)(x[:4]).item() == 7.0


def local_indices(total_length: int, response_length: int, cp_rank: int, cp_size: int) -> list[int]:
    """Response indices whose loss a rank has: logits at position q give the token at q + 1, so q is dealt out."""
    if cp_size == 1:
        return list(range(response_length))
    prompt_length = total_length - response_length
    dealt = zigzag(list(range(total_length)), cp_rank, cp_size)
    return [q + 1 - prompt_length for q in dealt if prompt_length <= q + 1 < total_length]


def reduce_on_rank(rank: int, mode: str, responses) -> tuple[float, list[tuple[int, int, float]], int]:
    """(this rank's sum, (sample, response index, gradient) of each of its tokens, number of collectives)."""
    from megatron.core import parallel_state

    cp_size, cp_rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    set_global_args(Namespace(context_parallel_size=cp_size, **MODES[mode]))
    losses, places, values = token_losses(responses), [], []
    for sample, (total_length, mask) in enumerate(responses):
        for index in local_indices(total_length, len(mask), cp_rank, cp_size):
            places.append((sample, index))
            values.append(losses[sample][index] if mask[index] else math.nan)
    x = torch.tensor(values, requires_grad=True)
    with counted_collectives() as calls:
        result = call_as_hosts(responses, mode == "token_mean")(x)
        result.backward()
    gradient = x.grad.tolist()
    return result.item(), [(*place, value) for place, value in zip(places, gradient, strict=True)], len(calls)


pool = pool_of(4)


@pytest.mark.megatron
@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_context_parallel_ranks_sum_to_the_unsharded_loss(pool, mode, cp_size):
    """FB-12: counts of the local slice, a factor cp, or chunks in another order; masked values are NaN, some slices empty."""
    responses = RESPONSES + ([] if mode == "token_mean" else [FULLY_MASKED])
    results = pool.run(reduce_on_rank, mode, responses, world_size=cp_size, context_parallel_size=cp_size)
    total, derivative = by_hand(mode, responses, token_losses(responses))
    assert sum(value for value, _, _ in results) == pytest.approx(total, rel=1e-6, abs=1e-7)
    got = {(sample, index): value for _, rows, _ in results for sample, index, value in rows}
    assert sum(len(rows) for _, rows, _ in results) == len(got) == sum(len(mask) for _, mask in responses)
    for (sample, index), value in got.items():
        assert value == pytest.approx(derivative[sample][index], rel=1e-6)
    assert [number for _, _, number in results] == [0] * cp_size, "a reducer launches no collective"


def refuse_bshd(rank: int) -> str:
    set_global_args(Namespace(loss_aggregation="sample_mean", qkv_format="bshd"))
    return error_of(lambda: call_as_hosts(RESPONSES, False))


@pytest.mark.megatron
def test_padded_rows_under_context_parallelism_are_refused_by_the_group_itself(pool):
    """FB-26: also where the arguments do not say cp. Slicing packed chunks out of padded rows takes the wrong tokens."""
    for message in pool.run(refuse_bshd, world_size=2, context_parallel_size=2):
        assert message.startswith("ConfigError: --qkv-format bshd with --context-parallel-size 2")


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", MODES)
def test_a_masked_value_may_be_anything(mode, junk):
    """FB-56: 0 x NaN is NaN, and the gradient of a product by NaN weights is too: slime does not zero masked entries."""
    arguments(**MODES[mode])
    mask = torch.tensor([is_set for _, mask in RESPONSES for is_set in mask], dtype=torch.bool)
    clean = torch.tensor([value for values in token_losses(RESPONSES) for value in values])
    results, gradients = [], []
    for values in (clean, torch.where(mask, clean, junk)):
        x = values.clone().requires_grad_()
        result = call_as_hosts(RESPONSES, mode == "token_mean")(x)
        result.backward()
        results.append(result.detach())
        gradients.append(x.grad)
    assert torch.equal(*results) and torch.equal(*gradients)
    assert (gradients[0][~mask] == 0).all() and (gradients[0][mask] != 0).all()


NOTHING = [("sample_mean", []), ("token_mean", []), ("sample_mean", [FULLY_MASKED] * 2), ("constant", [FULLY_MASKED] * 2)]


@pytest.mark.parametrize(("mode", "responses"), NOTHING)
def test_nothing_to_sum_gives_a_zero_in_the_graph(mode, responses):
    """A Python 0 has no clone, a detached 0 leaves this rank out of the backward's collectives; never NaN."""
    arguments(**MODES[mode])
    x = torch.full((sum(len(mask) for _, mask in responses),), math.nan, requires_grad=True)
    result = call_as_hosts(responses, mode == "token_mean")(x)
    assert result.dim() == 0 and result.item() == 0.0 and result.requires_grad
    result.clone().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("mode", MODES)
def test_a_fully_masked_sample_leaves_the_others_as_they_are(mode):
    """FB-09: no phantom token; under --calculate-per-token-loss the host would count one, so that is refused."""
    arguments(**MODES[mode])
    responses = [RESPONSES[0], FULLY_MASKED]
    if mode == "token_mean":
        with pytest.raises(
            DataError, match="samples .1. of the micro-batch are fully masked.*counts one token for each.*reward_post_process"
        ):
            call_as_hosts(responses, True)
        return
    x = torch.arange(8.0)
    assert torch.equal(call_as_hosts(responses, False)(x), call_as_hosts(RESPONSES[:1], False)(x[:5]))


def test_two_calls_give_the_same_and_leave_nothing_behind():
    """--recompute-loss-function calls factory and reducer twice; the masks belong to the host."""
    args = arguments(**MODES["constant"])
    before, lists = dict(vars(args)), as_host_lists(RESPONSES)
    x = torch.randn(sum(lists[1]))
    first = get_pg_loss_reducer(*lists)
    assert torch.equal(first(x), first(x)) and torch.equal(first(x), get_pg_loss_reducer(*lists)(x))
    assert vars(args) == before
    assert [mask.tolist() for mask in lists[2]] == [mask for _, mask in RESPONSES]


@pytest.mark.parametrize(
    "masks", [torch.bool, torch.int32, torch.int64, torch.float32], ids=["bool", "int32", "int64", "float32 (rejection sampling)"]
)
def test_masks_of_each_kind_are_read_alike(masks):
    arguments(**MODES["sample_mean"])
    mask = torch.tensor([1, 0, 1]).to(masks)
    assert get_pg_loss_reducer([5], [3], [mask])(torch.tensor([2.0, 5.0, 4.0])).item() == 3.0


# test_host_rules has the rules of a launch; these show that the reducer asks for them.
REFUSED = [
    pytest.param({}, False, "loss_aggregation is missing from args.*megatron_rl.hosts.launch", id="dropped flag"),
    # The call says what the host does with the result.
    pytest.param(
        *(MODES["token_mean"], False, "calculate_per_token_loss=False and the arguments say True.*leave both alone"),
        id="FB-15 a flag that was changed after parsing",
    ),
    pytest.param(None, False, "call megatron.training.global_vars.set_args.args. before the first step", id="no arguments"),
]


@pytest.mark.parametrize(("settings", "per_token", "says"), REFUSED)
def test_a_launch_of_a_wrong_scale_never_gets_a_reducer(settings, per_token, says):
    if settings is not None:
        arguments(**settings)
    with pytest.raises(ConfigError, match=says):
        call_as_hosts(RESPONSES, per_token)


MASK = torch.tensor([1, 0, 1])


@pytest.mark.parametrize("num_values", [0, 2, 4])
def test_a_loss_of_the_wrong_length_is_refused_with_both_numbers(num_values):
    """[1] would broadcast, and anything else fail far from its cause."""
    arguments(**MODES["sample_mean"])
    reducer = get_pg_loss_reducer([5], [3], [MASK])
    with pytest.raises(DataError, match=rf"shape \({num_values},\) and this rank's responses hold 3 tokens .cp rank 0 of 1"):
        reducer(torch.ones(num_values))
    with pytest.raises(DataError, match=r"shape \(1, 3\) and this rank's responses hold 3"):
        reducer(torch.ones(1, 3))
    with pytest.raises(DataError, match="2 values for 0 samples"):
        get_pg_loss_reducer([], [], [])(torch.ones(2))
