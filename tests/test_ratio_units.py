"""Whose tokens share a ratio: rows, rollouts, turns. And the property: how a rollout is cut into rows moves no gradient."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from helpers import error_of
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import groups_of_ranks, on_simulated_ranks

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout import turn_cu_seqlens
from megatron_rl.layout.groups import SINGLE, ParallelGroups
from megatron_rl.loss_hub import get_policy_loss, loss_aggregation_names, policy_loss_names
from megatron_rl.losses import loss_of_log_probs
from megatron_rl.megatron.batch import PolicyBatch, StepContext, make_packed_batch, make_padded_batch
from megatron_rl.megatron.forward_step import PolicyForwardStep
from megatron_rl.megatron.samples import PolicySample, weigh_samples
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.ranks import run_ranks

CPU = torch.device("cpu")


def test_turns_by_hand():
    """The example of its docstring; a masked document between others, a masked head, a masked tail, padding behind the last one."""
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 0, 0, 0, 1, 1, 0, 1]).bool()
    bounds, documents = turn_cu_seqlens(mask, torch.tensor([0, 4, 6, 8, 12], dtype=torch.int32))
    assert (bounds.tolist(), documents.tolist(), bounds.dtype) == ([0, 3, 4, 6, 8, 12], [0, 0, 1, 2, 3], torch.int32)
    # Two documents that meet unmasked are two turns; empty documents keep their place.
    bounds, documents = turn_cu_seqlens(torch.ones(4), torch.tensor([0, 0, 2, 2, 4, 4]))
    assert (bounds.tolist(), documents.tolist()) == ([0, 0, 2, 2, 4, 4], [0, 1, 2, 3, 4])
    bounds, documents = turn_cu_seqlens(torch.zeros(0, dtype=torch.bool), torch.tensor([0]))
    assert (bounds.tolist(), documents.tolist()) == ([0], [])


@given(st.lists(st.lists(st.booleans(), max_size=7), max_size=5), st.integers(0, 3))
@settings(max_examples=60, derandomize=True, database=None)
def test_turns_are_the_runs_of_a_loop(masks, padding):
    mask = [bit for of_document in masks for bit in of_document] + [True] * padding
    bounds = torch.tensor([0, *(len(of_document) for of_document in masks)]).cumsum(0)
    turns, documents = turn_cu_seqlens(torch.tensor(mask, dtype=torch.bool), bounds)
    wanted = []
    for number, of_document in enumerate(masks):
        runs = "".join("x" if bit else " " for bit in of_document).split()
        wanted += [(number, len(run)) for run in runs] or [(number, 0)]
    counts = [sum(mask[start:end]) for start, end in zip(turns[:-1].tolist(), turns[1:].tolist(), strict=True)]
    assert list(zip(documents.tolist(), counts, strict=True)) == wanted
    assert turns[-1] == bounds[-1] and bool((turns.diff() >= 0).all())


# Log-ratios of the tokens of rollout A, in rows of 2 and 4 tokens.
OF_A = [[0.1, -0.2], [0.3, 0.0, -0.1, 0.2]]
GOLDEN = {
    "rollout": [1.051271096],  # exp(0.3 / 6)
    "row": [0.951229425, 1.105170918],  # exp(-0.1 / 2), exp(0.4 / 4)
    # The second row with its second token masked: exp(-0.1 / 2), exp(0.3), exp(0.1 / 2).
    "turn": [0.951229425, 1.349858808, 1.051271096],
}


@pytest.mark.parametrize("unit", GOLDEN)
def test_the_ratios_of_a_rollout_of_two_rows_by_hand(unit):
    samples = []
    for row, log_ratios in enumerate(OF_A):
        mask = [1] * len(log_ratios)
        if unit == "turn" and row:
            mask[1] = 0
        samples.append(
            StepSample(
                tokens=[0] * (len(mask) + 1),
                loss_mask=mask,
                prompt_id="a",
                rollout_id="A",
                advantage=1.0,
                old_log_probs=[-1.0 - value for value in log_ratios],
            )
        )
    config = PolicyLossConfig(policy_loss="gspo", importance_ratio_unit=unit)
    weighed, totals = weigh_samples(config, samples, ParallelGroups())
    batch = padded(weighed, totals)
    assert batch.ratio_unit == unit and batch.token_counts.numel() == len(GOLDEN[unit])
    ratios = []
    for document in range(len(GOLDEN[unit])):  # the value of a document is -w m s, with a clip that does not act
        one = torch.zeros_like(batch.token_weights)
        one[document] = 1 / batch.token_counts[document]
        log_probs = torch.full(batch.labels.shape, -1.0, dtype=torch.float64)
        ratios.append(-float(loss_of(replace(batch, token_weights=one), log_probs, "gspo", (0.9, 9.0))))
    assert ratios == pytest.approx(GOLDEN[unit], rel=1e-6)  # old log-probabilities are float32


def padded(samples: list[PolicySample], totals, cp_group=SINGLE, num_microbatches: int = 1) -> PolicyBatch:
    context = StepContext(totals=totals, num_microbatches=num_microbatches)
    longest = max((len(sample.tokens) for sample in samples), default=1)
    row_length = longest + -longest % (2 * cp_group.size())
    return make_padded_batch(samples, context, num_rows=len(samples) + 1, row_length=row_length, cp_group=cp_group, device=CPU)


def loss_of(batch: PolicyBatch, log_probs: torch.Tensor, name: str, clip: tuple | None, cp_group=SINGLE) -> torch.Tensor:
    loss = get_policy_loss(name)
    clips = {} if loss.clip_ratios is None else {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1]}
    anchor = batch.old_log_probs.double()
    rollout = {"rollout_log_probs": anchor} if "rollout_log_probs" in loss.inputs_needed else {}
    return loss_of_log_probs(
        *(name, log_probs, anchor, batch.advantages.double(), batch.loss_mask, batch.cu_seqlens, batch.token_weights.double()),
        token_counts=batch.token_counts,
        cp_group=cp_group,
        cp_layout="zigzag",
        metrics="none",
        **clips,
        **rollout,
    ).loss


# What is promised. row_mean weighs rows; a loss of level "batch" sums over the tokens of a row.
LEVELS = {name: get_policy_loss(name).level for name in policy_loss_names()}
OF_TOKENS = [name for name, level in LEVELS.items() if level == "token"]
OF_SEQUENCES = [name for name, level in LEVELS.items() if level == "sequence"]
AGGREGATIONS = [name for name in loss_aggregation_names() if name != "row_mean"]
PROMISED = [(name, "row") for name in OF_TOKENS] + [(name, unit) for name in OF_SEQUENCES for unit in ("rollout", "turn")]


class Rollouts:
    """Random rollouts: of 0 to 9 response tokens, some masked, of which token number t has the label t of the step."""

    def __init__(self, seed: int):
        numbers = random.Random(seed)
        self.masks, self.prompts, self.advantages, start = [], [], [], 0
        self.tokens: list[list[int]] = []
        for number in range(numbers.randint(1, 5)):
            length = numbers.randint(1, 9)
            mask = [int(numbers.random() < numbers.choice((0.0, 0.6, 1.0))) for _ in range(length)]
            self.masks.append(mask)
            self.tokens.append(list(range(start, start + length)))
            self.prompts.append(f"prompt {number // 2}")
            self.advantages.append(numbers.gauss(0.0, 1.0))
            start += length
        if not any(map(any, self.masks)):
            self.masks[0][0] = 1
        self.log_probs = torch.tensor([-0.5 - numbers.random() for _ in range(start)], dtype=torch.float64)
        self.old = [float(value) + numbers.choice((-0.3, -0.05, 0.02, 0.3)) * numbers.random() for value in self.log_probs]

    def rows(self, numbers: random.Random, unit: str) -> list[StepSample]:
        """Cut anywhere; where a turn has a ratio, between turns. Now and then a row of masked tokens is put between."""
        found = []
        for number, (tokens, mask) in enumerate(zip(self.tokens, self.masks, strict=True)):
            ends = {place for place in range(1, len(tokens)) if numbers.random() < 0.4}
            if unit == "turn":
                ends = {place for place in ends if not (mask[place - 1] and mask[place])}
            starts = [0, *sorted(ends)]
            for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
                found.append(self.row(number, tokens[start:end], mask[start:end]))
            if numbers.random() < 0.3:
                found.append(self.row(number, tokens[:1], [0]))
        return found

    def row(self, number: int, tokens: list[int], mask: list[int]) -> StepSample:
        return StepSample(
            tokens=[0, *tokens],
            loss_mask=mask,
            prompt_id=self.prompts[number],
            rollout_id=f"rollout {number}",
            advantage=self.advantages[number],
            old_log_probs=[self.old[token] for token in tokens],
        )


def gradient_of(step: Rollouts, config: PolicyLossConfig, rows: list[StepSample], dp: int, cp: int, parts: int, seed: int):
    """The gradient by the log-probabilities of all tokens, summed over ranks and micro-batches."""
    numbers = random.Random(seed)
    is_together = config.importance_ratio_unit == "rollout"
    keys = sorted({row.rollout_id for row in rows}) if is_together else list(range(len(rows)))
    place_of = {key: (numbers.randrange(dp), numbers.randrange(parts)) for key in keys}
    numbers.shuffle(rows)
    places = [place_of[row.rollout_id if is_together else number] for number, row in enumerate(rows)]

    def on_rank(groups: ParallelGroups) -> torch.Tensor:
        mine = [(row, part) for row, (rank, part) in zip(rows, places, strict=True) if rank == groups.dp.rank()]
        samples, totals = weigh_samples(config, [row for row, _ in mine], groups)
        gradient = torch.zeros_like(step.log_probs)
        for number in range(parts):
            of_part = [sample for sample, (_, part) in zip(samples, mine, strict=True) if part == number]
            if not of_part:
                continue
            batch = padded(of_part, totals, groups.cp, parts)
            leaf = step.log_probs.clone().requires_grad_()
            loss_of(batch, leaf[batch.labels], config.policy_loss, (0.1, 0.15), groups.cp).backward()
            gradient += leaf.grad
        return gradient

    return torch.stack(on_simulated_ranks(on_rank, groups_of_ranks(dp=dp, cp=cp))).sum(0)


@pytest.mark.parametrize(("name", "unit"), PROMISED)
@given(
    seed=st.integers(0, 2**31),
    layout=st.sampled_from([(1, 1, 1), (1, 1, 4), (2, 1, 2), (3, 1, 1), (1, 2, 1), (2, 2, 2)]),
    turn=st.integers(0, len(AGGREGATIONS) - 1),
)
@settings(max_examples=25, derandomize=True, database=None, deadline=None)
def test_no_cut_of_a_rollout_into_rows_moves_the_gradient(name, unit, seed, layout, turn):
    """Rows on other ranks, in other micro-batches, in another order, some without a token; ranks without a row."""
    aggregation, numbers = AGGREGATIONS[turn], random.Random(seed)
    config = PolicyLossConfig(
        policy_loss=name,
        importance_ratio_unit=unit,
        loss_aggregation=aggregation,
        loss_aggregation_divisor=8.0 if aggregation == "constant" else None,
    )
    step = Rollouts(seed)
    whole = [step.row(number, tokens, mask) for number, (tokens, mask) in enumerate(zip(step.tokens, step.masks, strict=True))]
    expected = gradient_of(step, config, whole, 1, 1, 1, seed)
    found = gradient_of(step, config, step.rows(numbers, unit), *layout, seed)
    # Weights are float32: 6e-8 of each. Sums of the other terms are float64.
    assert float((found - expected).abs().max()) <= 1e-6 * max(float(expected.abs().max()), 1e-12)


def test_a_cut_moves_the_gradient_of_rows_as_samples():
    """What the property would miss otherwise: the same rows without a rollout_id."""
    step = Rollouts(3)
    whole = [step.row(number, tokens, mask) for number, (tokens, mask) in enumerate(zip(step.tokens, step.masks, strict=True))]
    rows = [replace(row, rollout_id=None) for row in step.rows(random.Random(3), "row")]
    config = PolicyLossConfig(policy_loss="grpo")
    expected, found = gradient_of(step, config, whole, 1, 1, 1, 0), gradient_of(step, config, rows, 1, 1, 1, 0)
    assert float((found - expected).abs().max()) > 0.05 * float(expected.abs().max())


OF_ROLLOUTS = PolicyLossConfig(policy_loss="gspo", importance_ratio_unit="rollout")


def two_rollouts(**changes) -> list[StepSample]:
    rows = [
        StepSample(tokens=[0, 1, 2], loss_mask=[1, 1], prompt_id="a", rollout_id=name, advantage=0.5, old_log_probs=[-1.0, -1.0])
        for name in "AAB"
    ]
    return [replace(rows[0], **changes), *rows[1:]]


def test_the_samples_of_a_rollout_are_put_side_by_side():
    samples, totals = weigh_samples(OF_ROLLOUTS, [*two_rollouts()[1:], two_rollouts()[0]], ParallelGroups())
    for batch in (
        padded(samples, totals),
        make_packed_batch(samples, StepContext(totals=totals, num_microbatches=1), row_length=12, cp_group=SINGLE, device=CPU),
    ):
        assert (batch.token_counts.tolist(), batch.token_weights.tolist()) == ([4, 2], [0.125, 0.25])
        assert batch.cu_seqlens.diff().tolist() == ([8, 4] if batch.packed_seq_params is None else [6, 3])


WRONG_ROLLOUTS = [
    (lambda samples: samples[1:], "rollout 'A' has 4 unmasked tokens and 2 in this micro-batch: its one ratio needs all"),
    (lambda samples: [replace(samples[0], advantage=-1.0), *samples[1:]], "samples of rollout 'A' have the advantage -1 and 0.5"),
    (lambda samples: [replace(samples[0], token_weight=0.25), *samples[1:]], "have the token_weight 0.125 and 0.25: one ratio"),
    (lambda samples: [replace(samples[0], ratio_unit="row"), *samples[1:]], "samples of the ratio units rollout, row in one"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_ROLLOUTS)
def test_samples_without_one_ratio_are_refused(change, message):
    samples, totals = weigh_samples(OF_ROLLOUTS, two_rollouts(), ParallelGroups())
    with pytest.raises(DataError, match=message):
        padded(change(samples), totals)


def test_a_weight_that_differs_between_rows_is_refused_where_the_settings_are_read():
    config = replace(OF_ROLLOUTS, loss_aggregation="row_mean")
    samples, totals = weigh_samples(config, two_rollouts(loss_mask=[1, 0]), ParallelGroups())
    with pytest.raises(DataError, match="have the token_weight"):
        padded(samples, totals)


def apart_on_ranks(rank):
    groups = ParallelGroups(dp=torch.distributed.group.WORLD)
    mine = (two_rollouts()[:1], two_rollouts()[1:], [])[rank]
    error = error_of(lambda: weigh_samples(OF_ROLLOUTS, mine, groups))
    whole = (two_rollouts()[:2], two_rollouts()[2:], [])[rank]
    return error, len(weigh_samples(OF_ROLLOUTS, whole, groups)[0])


def test_a_rollout_of_several_ranks_is_refused_on_all_of_them():
    """A rank that raises alone leaves the others in a collective."""
    found = run_ranks(apart_on_ranks, 3, use_megatron=False)
    assert [number for _, number in found] == [2, 1, 0]
    for rank, (error, _) in enumerate(found):
        assert "has samples on several data-parallel ranks" in error
        own = ("rollout 'A' (samples 0 of this rank)", "rollout 'A' (samples 0 of this rank)", "a rollout of other ranks")
        assert own[rank] in error, error


@pytest.mark.megatron
def test_a_batch_of_another_unit_than_the_settings_is_refused():
    """Samples of another config, or made by hand, would train rows without a word."""
    from trainer_cases import tiny_trainer

    def forward(rank):
        trainer = tiny_trainer(PolicyLossConfig(policy_loss="gspo"))
        samples, totals = weigh_samples(PolicyLossConfig(policy_loss="gspo"), two_rollouts(), ParallelGroups())
        step = PolicyForwardStep(OF_ROLLOUTS, vocab_size=8)
        return error_of(lambda: step(iter([padded(samples, totals)]), trainer.model.module))

    (error,) = run_ranks(forward, 1)
    assert error.startswith(ConfigError.__name__) and "importance_ratio_unit=rollout, and the batch has one ratio a row" in error


def dropped(unit: str, gaps: list[list[float]], masks: list[list[int]]) -> list[float]:
    """The weights of two rows of A and one of B, whose correction compares the means of units."""
    rows = [
        replace(row, loss_mask=mask, rollout_log_probs=[-1.0 - gap for gap in of_row])
        for row, of_row, mask in zip(two_rollouts(), gaps, masks, strict=True)
    ]
    config = replace(
        OF_ROLLOUTS,
        importance_ratio_unit=unit,
        importance_correction="mask",
        importance_correction_level="sequence_mean",
        importance_correction_low=0.8,
        importance_correction_high=1.25,
        rejected_tokens="dropped",
    )
    samples, _ = weigh_samples(config, rows, ParallelGroups())
    return [sample.token_weight for sample in samples]


def test_dropped_tokens_are_those_of_the_unit():
    """log 1.25 = 0.223. Row 0 alone has the mean 0.3 and goes; with row 1 the rollout's mean is 0.15, and all of it stays."""
    gaps = [[0.3, 0.3], [0.0, 0.0], [0.0, 0.0]]
    full = [[1, 1]] * 3
    assert dropped("row", gaps, full) == pytest.approx([0, 1 / 4, 1 / 4])
    assert dropped("rollout", gaps, full) == pytest.approx([1 / 8, 1 / 8, 1 / 4])
    with pytest.raises(DataError, match="needs rollout_log_probs"):
        weigh_samples(PolicyLossConfig(importance_correction="icepop", rejected_tokens="dropped"), two_rollouts(), ParallelGroups())
    assert math.exp(0.15) < 1.25 < math.exp(0.3)


@pytest.mark.megatron
def test_the_metrics_of_a_step_say_how_many_rows_a_rollout_has():
    """Two documents of three samples are no phantoms."""
    from trainer_cases import tiny_trainer

    def step(rank):
        trainer = tiny_trainer(OF_ROLLOUTS)
        found = trainer.step([two_rollouts()])
        plain = trainer.step([[replace(sample, rollout_id=None) for sample in two_rollouts()]])
        return found, plain

    ((found, plain),) = run_ranks(step, 1)
    assert (found["num_samples"], found["num_rollouts"], found["rollout/rows"], found["policy/num_documents"]) == (3, 2, 1.5, 2)
    assert not {"num_rollouts", "rollout/rows"} & plain.keys()
