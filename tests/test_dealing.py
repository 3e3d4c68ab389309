"""How trainers deal samples by length: by hand, and against verl's own functions."""

from __future__ import annotations

import copy
import heapq
import random
from types import SimpleNamespace

import pytest
import torch
from test_golden_losses import functions_of, source_of

from megatron_rl.hosts.dealing import deal
from megatron_rl.hosts.settings import Size, StepSizes
from megatron_rl.hosts.step_sizes import cut
from megatron_rl.hosts.verl_refusals import BALANCE, CHUNKS_OF_MODEL, DYNAMIC_CP, PIPELINE, dealing


def sizes(data: int, budget: int, **settings) -> StepSizes:
    return StepSizes(data=Size(data, "ranks"), tokens=Size(budget, "budget"), dealing=dealing(settings.get))


def test_differencing_by_hand():
    """8 | 7, then 6 beside 7 and 5 beside 8: 8 - 7 = 1, 6 - 5 = 1, and 4 beside one of them. Karmarkar and Karp's example."""
    piles = deal([4, 5, 6, 7, 8], 2)
    assert sorted(sum([4, 5, 6, 7, 8][sample] for sample in pile) for pile in piles) == [14, 16]
    assert deal([], 2) == [] and deal([3], 1) == [[0]]
    assert sorted(map(len, deal([1, 1, 1, 100, 1, 1], 3, is_equal=True))) == [2, 2, 2]


def test_verl_deals_and_other_trainers_keep_the_order():
    """Two micro-batches of 8 and 7 of 15 tokens. In the order given 8 + 1 and 5 + 1 would be too many, and make three."""
    lengths = (8, 1, 5, 1)
    found = cut(lengths, sizes(1, 8))
    assert sorted(sorted(part) for part in found.parts[0]) == [[0], [1, 2, 3]] and "order" not in found.words
    by_order = cut(lengths, sizes(1, 8, **{DYNAMIC_CP: True}))
    assert by_order.parts == [[[0], [1, 2, 3]]] and "samples in the order given; verl deals them by length" in by_order.words
    assert cut((1, 8, 1, 5), sizes(2, 8, **{BALANCE: False})).parts[0] == [[1], [0]]  # 9 tokens are two of 8, so 6 are too
    assert len(cut((4,) * 6, sizes(1, 12, **{PIPELINE: 4, CHUNKS_OF_MODEL: 2})).parts[0]) == 4  # 24 tokens are 2 of 12
    assert [len(rank) for rank in cut((4, 4, 4, 4, 4), sizes(4, 8)).parts] == [1, 1, 1, 1]  # 2 of one rank, within its budget


@pytest.mark.host("VERL_ROOT")
def test_micro_batches_are_verls_own():
    """Its v1 trainer and its engines, on lengths of which some are equal."""
    tree = source_of("VERL_ROOT", "verl/utils/seqlen_balancing.py")
    names = "calculate_workload karmarkar_karp get_seqlen_balanced_partitions ceildiv roundup_divisible rearrange_micro_batches"
    number = 0

    def as_many(count, op, group):
        count.fill_(max(number, int(count)))

    dist = SimpleNamespace(is_initialized=lambda: True, all_reduce=as_many, ReduceOp=SimpleNamespace(MAX=None))
    parts_of = SimpleNamespace(index_select_tensor_dict=lambda batch, partition: partition)
    theirs = functions_of(tree, *names.split(), heapq=heapq, copy=copy, dist=dist, tu=parts_of, get_device_name=lambda: "cpu")

    def ranks_of(lengths: list[int], data: int) -> list[list[int]]:
        order: list[int] = []
        trainer = SimpleNamespace(
            actor_rollout_wg=SimpleNamespace(_dispatch_info={"actor": list(range(data))}),
            _get_required_batch_multiple=lambda size: size,
            tokenizer=SimpleNamespace(eos_token_id=0),
        )
        batch = SimpleNamespace(tags=[{"seq_len": length} for length in lengths], reorder=order.extend)
        balance = functions_of(
            source_of("VERL_ROOT", "verl/trainer/ppo/v1/trainer_base.py"),
            "_balance_batch",
            upsample_batch_to_divisible_size=lambda batch, multiple, token: batch,
            log_seqlen_unbalance=lambda **kwargs: {},
            calculate_workload=theirs.calculate_workload,
            get_seqlen_balanced_partitions=theirs.get_seqlen_balanced_partitions,
        )
        balance._balance_batch(trainer, batch, {})
        share = len(lengths) // data
        return [order[rank * share : (rank + 1) * share] for rank in range(data)]

    draw = random.Random(7)
    for _ in range(60):
        data, longest = draw.choice([1, 2, 4]), draw.choice([3, 40, 900])
        lengths = [draw.randint(1, longest) for _ in range(data * draw.randint(1, 9))]
        budget, ranks, number = draw.randint(longest, 4 * longest), ranks_of(lengths, data), 0
        expected = []
        for _ in range(2):  # the number of micro-batches, which all ranks share, is known after the first
            expected = []
            for of_rank in ranks:
                mask = torch.arange(longest) < torch.tensor([lengths[sample] for sample in of_rank])[:, None]
                batch = {"input_ids": SimpleNamespace(is_nested=False), "attention_mask": mask.long()}
                parts, _ = theirs.rearrange_micro_batches(batch, budget, dp_group=object())
                expected.append([[of_rank[place] for place in part] for part in parts])
            number = max(map(len, expected))
        assert cut(lengths, sizes(data, budget)).parts == expected, (lengths, data, budget)
