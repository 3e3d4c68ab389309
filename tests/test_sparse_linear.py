"""The fused head with sets of kept ids: which rows are in which products, its memory, layouts and gradients.

tests/test_generated_steps.py has its values for each loss, correction and layout; tests/test_sparse_head.py the products.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from carrier_cases import LiveBytes
from helpers import without_needless_clip
from linear_cases import VOCAB_SIZE, HeadBatch, by_logits, every_term, head_batch, run, seen, worst_error
from simulated_ranks import groups_of_ranks, on_simulated_ranks
from test_support_scores import BY_HAND, GRADIENT, SUPPORT
from torch import Tensor

from megatron_rl.declare import policy_loss_names
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.ops import support_head
from megatron_rl.ops.linear_head import HeadOptions
from megatron_rl.ops.linear_log_probs import linear_log_probs
from megatron_rl.ops.log_probs import vocab_parallel_log_probs
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
    """none: nothing reads the vocabulary; full: KL, entropy bonus and metric do; support: all of them are over the kept ids."""
    if which == "none":
        return {"metrics": "basic"}
    return {"kl_score": which, "entropy_score": which, **every_term(case.batch)}


@pytest.fixture(params=[2, 512], ids=["limit 2", "limit 512"])
def limit(request, monkeypatch) -> int:
    """At 2 a row of three ids goes to the matmuls of all columns."""
    monkeypatch.setattr(support_head, "SPARSE_ROW_LIMIT", request.param)
    return request.param


@pytest.mark.parametrize("which", ["none", "support", "full"])
@pytest.mark.parametrize("kind", policy_loss_names())
def test_it_is_the_loss_of_the_logits_with_these_sets(kind, which, limit):
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


@pytest.mark.parametrize("which", ["none", "full", "support"])
def test_a_set_of_the_whole_vocabulary_is_the_head_without_sets(which):
    case = head_batch().to(torch.float32)
    whole = SamplingSupport.from_lists([range(VOCAB_SIZE)] * len(case.batch.labels))
    without = {**terms(which, case), "temperature": 0.7}
    of_none = {name: value for name, value in without.items() if name not in ("kl_score", "entropy_score")}
    want, got = run(fused("grpo"), case, **of_none), run(fused("grpo"), case, sampling_support=whole, **without)
    assert max(worst_error(got, want).values()) == 0.0  # in one chunk the same rows are in the same products


@pytest.mark.parametrize(("which", "products"), [("none", "whole"), ("support", "whole"), ("full", "all")])
def test_small_sets_are_in_no_matmul_of_all_columns(which, products):
    """A row of one id is in no product at all, and its hidden state is not read."""
    case = head_batch()
    support, mask = sets(case), case.batch.loss_mask
    if products == "whole":
        case.hidden[(support.sizes == 1) & mask] = math.nan
    with seen(case) as record:
        result = run(fused("grpo"), case, sampling_support=support, **terms(which, case))
    # Whole rows have a chunk of their own, and the buffer holds both chunks. A clipped row has no gradient.
    rows = mask & (support.sizes == VOCAB_SIZE) if products == "whole" else mask
    trained = int((rows & result.hidden_gradient.any(1)).sum())
    assert record.rows == {"logits": int(rows.sum()), "hidden": trained, "weight": trained}
    if products == "whole":
        assert not result.hidden_gradient[support.sizes == 1].any() and torch.isfinite(result.weight_gradient).all()
        assert (result.output.log_probs[support.sizes == 1] == 0).all()


@pytest.mark.parametrize("rows_at_once", [1000, 12, 5, 1])
def test_rows_without_a_coefficient_are_in_no_product_of_the_gradient(rows_at_once):
    """Document 1 has advantage 0. The logits of the last rows stay; of the others those with a coefficient come again."""
    case = head_batch([5, 21, 7, 12], mask="none")
    advantages = case.batch.advantages.clone()
    advantages[1] = 0.0
    mask = torch.ones(45, dtype=torch.bool)
    case = replace(case, batch=replace(case.batch, advantages=advantages, loss_mask=mask))
    support, options = sets(case, (VOCAB_SIZE, 9, 3, 7)), {"temperature": 0.7, **terms("none", case)}
    want = by_logits("reinforce", case, sampling_support=support, **options)
    idle = torch.arange(45).sub(5).ge(0) & torch.arange(45).lt(26)
    with seen(case) as record, mock.patch.object(support_head, "SPARSE_ROW_LIMIT", 4):
        got = run(fused("reinforce"), case, sampling_support=support, max_logits_bytes=8 * VOCAB_SIZE * rows_at_once, **options)
    assert max(worst_error(got, want).values()) < EXACT
    dense = support.sizes > 4
    trained = int((dense & ~idle).sum())
    assert record.rows["hidden"] == record.rows["weight"] == trained
    again = record.rows["logits"] - int(dense.sum())
    assert again == 0 if rows_at_once == 1000 else 0 < again < trained
    assert not got.hidden_gradient[idle].any()


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
    for reads_all, c_full in ((True, torch.tensor([0.1, 0.0, -0.3, 0.05], dtype=torch.float64)), (False, None)):
        sizes = {"capacity": 3, "max_bytes": 2**20, "reads_all": reads_all}
        sparse = support_head.make_support_head(hidden, weight, labels, options, support, torch.arange(4), **sizes)
        support_head.run_scores(sparse)
        assert sparse.head.log_probs.tolist() == pytest.approx(SUPPORT, abs=1e-9)
        c = torch.tensor([-1.0, 0.5, 2.0, -0.25]).double()
        if reads_all:  # the last row is whole: it has one score, and its two coefficients come together
            c, c_full = c + torch.tensor([0, 0, 0, 0.05], dtype=torch.float64), torch.where(support.sizes == 5, 0.0, c_full)
        found = support_head.run_support_gradient(
            sparse, c, c_full, None, of_hidden=torch.zeros_like(hidden), of_weight=torch.zeros_like(weight)
        )
        rows = range(4) if reads_all else [1]  # of row 1 alone the gradient has no part of the vocabulary
        for row in rows:
            assert found[row].tolist() == pytest.approx(GRADIENT[row], abs=1e-9)


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


@pytest.mark.parametrize("which", ["none", "full"])
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
    torch.testing.assert_close(hidden.grad.float(), want.hidden_gradient, rtol=2**-7, atol=1e-5)  # bfloat16, rounded once or twice


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
    of_sets = [
        function(*operands, labels, with_entropy=True, entropy_score="support", **options)[1]
        for function, operands in ((vocab_parallel_log_probs, (case.batch.logits,)), (linear_log_probs, (case.hidden, case.weight)))
    ]
    for row in mask.nonzero()[:, 0].tolist():
        kept = (case.batch.logits[row, support.ids[support.bounds[row] : support.bounds[row + 1]].long()] / 0.7).log_softmax(-1)
        assert [float(entropy[row]) for entropy in of_sets] == pytest.approx([-float((kept.exp() * kept).sum())] * 2, abs=EXACT)
    for function, operands in ((vocab_parallel_log_probs, (case.batch.logits,)), (linear_log_probs, (case.hidden, case.weight))):
        with pytest.raises(ConfigError, match="^entropy_score='support' needs sampling_support"):
            function(*operands, labels, with_entropy=True, entropy_score="support")


@pytest.mark.parametrize("lengths", [[], [3]], ids=["no document", "a masked one"])
def test_a_micro_batch_without_a_row_has_a_gradient_of_zeros(lengths):
    case = head_batch(lengths)
    case = replace(case, batch=replace(case.batch, loss_mask=torch.zeros(sum(lengths), dtype=torch.bool)))
    support = SamplingSupport.from_lists([[]] * sum(lengths))
    result = run(fused("grpo"), case, sampling_support=support)
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


@pytest.mark.parametrize("which", ["none", "full", "support"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_the_vocabulary_have_the_gradient_of_the_whole(layout, which, limit):
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
