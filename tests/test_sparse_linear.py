"""The fused head with sets of kept ids: which rows are in which products, its memory, layouts and gradients.

tests/test_generated_steps.py has its values for each loss, correction and layout; tests/test_sparse_head.py the products.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from carrier_cases import LiveBytes
from helpers import without_needless_clip
from linear_cases import VOCAB_SIZE, HeadBatch, by_logits, every_term, head_batch, run, seen, worst_error
from simulated_ranks import groups_of_ranks, on_simulated_ranks
from test_support_scores import BY_HAND, GRADIENT, SUPPORT
from torch import Tensor

from megatron_rl.declare import policy_loss_names
from megatron_rl.errors import DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.ops.linear_head import HeadOptions
from megatron_rl.ops.linear_log_probs import linear_log_probs, score_kept
from megatron_rl.ops.support import pair_gradient
from megatron_rl.policy_loss import linear_policy_loss

# Sums of a few dozen float64 products in another order.
EXACT = 1e-12
# Of a third of the rows one id, then two, a few, eight, most and all of the vocabulary.
SIZES = (1, 2, 5, 1, 8, 15, 1, VOCAB_SIZE, 3)


def sets(case: HeadBatch, sizes: tuple[int, ...] = SIZES, *, seed: int = 3) -> SamplingSupport:
    """The label is in each set; at a tp of 4 some miss a shard and some straddle all. Masked rows hold junk."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size, lists = case.weight.shape[0], []
    for token, label in enumerate(case.batch.labels.tolist()):
        ids = torch.randperm(vocab_size, generator=generator)[: sizes[token % len(sizes)]].tolist()
        ids = ids if label in ids else [label, *ids[1:]]
        lists.append(ids if case.batch.loss_mask[token] else [[], [-1, 3, 3], ids][token % 3])
    return SamplingSupport.from_lists(lists)


def fused(kind: str):
    return partial(without_needless_clip, linear_policy_loss, kind)


def terms(which: str, case: HeadBatch) -> dict:
    """none: nothing reads the vocabulary; KL: over the sets; entropy: it does, as a bonus and a metric, beside a KL term."""
    if which == "none":
        return {"metrics": "basic"}
    of_all = {"entropy_coefficient": 0.0, "metrics": "basic"} if which == "KL" else {}
    return every_term(case.batch) | of_all


@pytest.mark.parametrize("which", ["none", "KL", "entropy"])
@pytest.mark.parametrize("kind", policy_loss_names())
def test_it_is_the_loss_of_the_logits_with_these_sets(kind, which):
    case = head_batch()
    options = {"sampling_support": sets(case), "temperature": 0.7, **terms(which, case)}
    if kind.startswith("dppo") or kind == "topr":
        options |= {"rollout_log_probs": case.batch.old_log_probs - 0.1}
    want = by_logits(kind, case, **options)
    case.hidden[~case.batch.loss_mask] = math.nan
    for max_logits_bytes in (8 * VOCAB_SIZE * 3, 2**30):  # three rows a chunk, and all
        got = run(fused(kind), case, max_logits_bytes=max_logits_bytes, **options)
        assert max(worst_error(got, want).values()) < EXACT


def test_float32_is_exact_to_its_rounding():
    case = head_batch()
    options = {"sampling_support": sets(case), "temperature": 0.7}
    want = by_logits("grpo", case, **options)
    got = run(fused("grpo"), case.to(torch.float32), **options)
    assert max(worst_error(got, want).values()) < 1e-6  # a few roundings of 2^-24 of what is at most twice the largest


@pytest.mark.parametrize("which", ["none", "entropy"])
def test_a_set_of_the_whole_vocabulary_is_the_head_without_sets(which):
    case = head_batch()
    whole = SamplingSupport.from_lists([range(VOCAB_SIZE)] * len(case.batch.labels))
    options = {**terms(which, case), "temperature": 0.7}
    want, got = run(fused("grpo"), case, **options), run(fused("grpo"), case, sampling_support=whole, **options)
    assert max(worst_error(got, want).values()) < EXACT


@pytest.mark.parametrize("which", ["none", "entropy"])
def test_rows_are_in_a_matmul_of_all_columns_for_an_entropy_alone(which):
    case = head_batch()
    with seen(case) as record:
        result = run(fused("grpo"), case, sampling_support=sets(case), **terms(which, case))
    num_rows = int(case.batch.loss_mask.sum()) * (which == "entropy")
    assert record.rows == {"logits": 2 * num_rows, "hidden": num_rows, "weight": num_rows}
    is_single = (sets(case).sizes == 1) & case.batch.loss_mask
    assert (result.output.log_probs[is_single] == 0).all()
    assert bool(result.hidden_gradient[is_single].any()) == (which == "entropy")


def test_a_row_of_one_id_counts():
    """Value by hand: two tokens of advantage 1, weights 1/2, on-policy. Ratio 1 each: the loss is -1/2 - 1/2, and token 1 has no
    gradient. Token 0 keeps ids 0 and 1 of equal logits: its score is -ln 2."""
    hidden, weight = torch.ones(2, 1, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64)
    weight[2] = 9.0
    hidden.requires_grad_(), weight.requires_grad_()
    mask, cu_seqlens = torch.ones(2, dtype=torch.bool), torch.tensor([0, 2])
    arguments = (torch.tensor([1, 2]), None, torch.ones(1), mask, cu_seqlens, torch.ones(1) / 2)
    output = linear_policy_loss(
        "grpo", hidden, weight, *arguments, sampling_support=SamplingSupport.from_lists([[0, 1], [2]]), advantages_per="sample"
    )
    output.loss.backward()
    assert output.loss.item() == -1.0
    assert torch.allclose(output.log_probs, torch.tensor([-math.log(2.0), 0.0], dtype=torch.float64), rtol=0, atol=1e-15)
    # dL / dlog_prob = -1/2, so dL / dz = -1/2 (1_1 - 1/2): 1/4 of id 0 and -1/4 of id 1.
    assert weight.grad.tolist() == [[0.25], [-0.25], [0.0]] and not hidden.grad.any()


def test_values_by_hand_come_out_of_a_head_that_is_the_identity():
    """Then hidden states are logits, and the gradient of hidden states is that of the logits (test_support_scores.py)."""
    labels, support = torch.tensor(BY_HAND.labels), SamplingSupport.from_lists(BY_HAND.kept)
    hidden, weight = BY_HAND.logits, torch.eye(5, dtype=torch.float64)
    options = HeadOptions(BY_HAND.temperature, None, SINGLE, False, "torch", False, False)
    head, _, pairs, kernels, scores = score_kept(hidden, weight, labels, options, support, torch.arange(4), 3, 2**20)
    assert head.log_probs.tolist() == pytest.approx(SUPPORT, abs=1e-9)
    g = pair_gradient(scores, pairs, torch.tensor([-1.0, 0.5, 2.0, -0.25]).double(), head.shard)
    out = torch.zeros_like(hidden)
    kernels.add_hidden(g, pairs, weight, out=out, max_bytes=2**20)
    for found, wanted in zip(out.tolist(), GRADIENT, strict=True):
        assert found == pytest.approx(wanted, abs=1e-9)


def large_case(dtype: torch.dtype = torch.float32) -> tuple[HeadBatch, SamplingSupport]:
    case = head_batch([300, 212], seed=2, hidden_size=64, vocab_size=8192).to(dtype)
    case = replace(case, batch=replace(case.batch, loss_mask=torch.ones(512, dtype=torch.bool)))
    return case, sets(case, (1, 1, 2, 30, 1, 2, 9, 1))


def test_its_memory_is_a_twentieth_of_the_logits():
    """Beside the operands, their gradients and vectors of [T]. A budget for the pairs' rows bounds the rest."""
    case, support = large_case()
    parameter = torch.nn.Parameter(case.weight)
    parameter.main_grad = torch.zeros(parameter.shape)
    hidden = case.hidden.clone().requires_grad_()
    labels, old, *rest = case.batch.arguments()
    with LiveBytes() as live:
        linear_policy_loss(
            "grpo", hidden, parameter, labels, old, *rest, sampling_support=support, loss_scale=1.0, max_logits_bytes=2**18
        )
    beside = sum(part.nbytes for part in (hidden, hidden, parameter, parameter))
    assert 0 < live.peak - beside < 0.05 * 512 * 8192 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_runs_agree_in_each_bit(dtype):
    case, support = large_case(dtype)
    first, second = (run(fused("grpo"), case, sampling_support=support) for _ in range(2))
    assert torch.equal(first.hidden_gradient, second.hidden_gradient) and torch.equal(first.weight_gradient, second.weight_gradient)


@pytest.mark.parametrize("which", ["none", "entropy"])
@pytest.mark.parametrize("loss_scale", [None, 3.0])
def test_main_grad_gets_the_sum_unrounded(which, loss_scale):
    """In forward with an announced factor, else in backward; beside what is there."""
    case = head_batch().to(torch.bfloat16)
    options = {"sampling_support": sets(case), **terms(which, case)}
    want = run(fused("grpo"), head_batch().to(torch.bfloat16).to(torch.float32), factor=3.0, **options)
    parameter = torch.nn.Parameter(case.weight)
    parameter.main_grad, parameter.grad_added_to_main_grad = torch.ones(parameter.shape), False
    hidden = case.hidden.clone().requires_grad_()
    labels, old, *rest = case.batch.arguments()
    keywords = {**options, "clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "fp32_logits": True, "loss_scale": loss_scale}
    output = linear_policy_loss("grpo", hidden, parameter, labels, old, *rest, **keywords)
    (output.loss * 3.0).backward()
    assert parameter.grad_added_to_main_grad
    # float32 sums of bfloat16's products; the other head rounds nothing either.
    torch.testing.assert_close(parameter.main_grad - 1, want.weight_gradient, rtol=1e-4, atol=3e-6)
    # bfloat16, rounded once or twice; beside an entropy the sum of two such parts, which may cancel.
    atol = 2**-8 * float(want.hidden_gradient.abs().max()) if which == "entropy" else 1e-5
    torch.testing.assert_close(hidden.grad.float(), want.hidden_gradient, rtol=2**-7, atol=atol)


def test_without_a_gradient_it_is_the_value_alone_and_log_probs_are_the_heads():
    case = head_batch()
    support, mask = sets(case), case.batch.loss_mask
    want = by_logits("grpo", case, sampling_support=support, temperature=0.7)
    labels, old, *rest = case.batch.arguments()
    with torch.no_grad(), seen(case) as record:
        got = linear_policy_loss(
            *("grpo", case.hidden, case.weight, labels, old, *rest),
            sampling_support=support,
            temperature=0.7,
            clip_ratio_low=0.1,
            clip_ratio_high=0.15,
        )
    assert record.rows["weight"] == record.rows["hidden"] == 0
    assert abs(float(got.loss - want.output.loss.detach())) < EXACT
    options = {"sampling_support": support, "temperature": 0.7, "loss_mask": mask}
    alone, entropy = linear_log_probs(case.hidden, case.weight, labels, with_entropy=True, **options)
    for scores in (alone, linear_log_probs(case.hidden, case.weight, labels, **options), got.log_probs):
        torch.testing.assert_close(scores, want.output.log_probs, rtol=0, atol=EXACT)
    softmax = (case.batch.logits / 0.7).log_softmax(-1)
    torch.testing.assert_close(entropy, torch.where(mask, -(softmax.exp() * softmax).sum(-1), 0.0), rtol=0, atol=EXACT)


@pytest.mark.parametrize("which", ["none", "entropy"])
@pytest.mark.parametrize("lengths", [[], [3]], ids=["no document", "a masked one"])
def test_a_micro_batch_without_a_row_has_a_gradient_of_zeros(lengths, which):
    case = head_batch(lengths)
    case = replace(case, batch=replace(case.batch, loss_mask=torch.zeros(sum(lengths), dtype=torch.bool)))
    support = SamplingSupport.from_lists([[]] * sum(lengths))
    result = run(fused("grpo"), case, sampling_support=support, **terms(which, case))
    assert result.output.loss == 0 and not result.hidden_gradient.any() and not result.weight_gradient.any()
    assert result.weight_gradient.shape == case.weight.shape


LAYOUTS = {"tp 2": (2, False), "tp 4": (4, False), "tp 4 SP": (4, True)}


def on_shards(case: HeadBatch, support: SamplingSupport, tp: int, sequence_parallel: bool, options: dict) -> tuple[Tensor, ...]:
    """(loss, gradient of hidden [T, H], gradient of weight [V, H]) of tp ranks, and the collectives of the first."""
    height, labels, old, *rest = case.weight.shape[0] // tp, *case.batch.arguments()

    def one(of_rank):
        group = of_rank.tp
        hidden = case.hidden.chunk(tp)[group.rank()] if sequence_parallel else case.hidden
        hidden, weight = (
            part.clone().requires_grad_() for part in (hidden, case.weight[group.rank() * height : (group.rank() + 1) * height])
        )
        keywords = {"tp_group": group, "sequence_parallel": sequence_parallel, "sampling_support": support, **options}
        output = linear_policy_loss(
            *("grpo", hidden, weight, labels, old, *rest), clip_ratio_low=0.1, clip_ratio_high=0.15, **keywords
        )
        output.loss.backward()
        return output.loss.detach(), hidden.grad, weight.grad

    ranks = on_simulated_ranks(one, groups_of_ranks(tp=tp))
    of_hidden = [rank[1] for rank in ranks]
    whole = torch.cat(of_hidden) if sequence_parallel else of_hidden[0]
    assert sequence_parallel or all(torch.equal(part, of_hidden[0]) for part in of_hidden), "tp ranks have one gradient"
    return ranks[0][0], whole, torch.cat([rank[2] for rank in ranks])


@pytest.mark.parametrize("which", ["none", "entropy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_the_vocabulary_have_the_gradient_of_the_whole(layout, which):
    case = head_batch([12, 21, 7, 0, 1, 12, 3])  # 56 rows
    options = {"temperature": 0.7, **terms(which, case)}
    support = sets(case)
    want = by_logits("grpo", case, sampling_support=support, **options)
    loss, of_hidden, of_weight = on_shards(case, support, *LAYOUTS[layout], options)
    assert abs(float(loss - want.output.loss.detach())) < EXACT
    torch.testing.assert_close(of_hidden, want.hidden_gradient, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(of_weight, want.weight_gradient, rtol=EXACT, atol=EXACT)


def test_tp_ranks_with_other_sets_are_told():
    case = head_batch([4])
    labels, old, *rest = case.batch.arguments()

    def one(of_rank):
        lists = [[int(label), (int(label) + 1 + of_rank.tp.rank()) % VOCAB_SIZE] for label in labels]
        weight = case.weight[of_rank.tp.rank() * 8 :][:8]
        with pytest.raises(DataError, match="ids of sampling_support differs between tensor-parallel ranks"):
            linear_policy_loss(
                *("grpo", case.hidden, weight, labels, old, *rest),
                tp_group=of_rank.tp,
                check_ranks=True,
                sampling_support=SamplingSupport.from_lists(lists),
            )

    on_simulated_ranks(one, groups_of_ranks(tp=2))
