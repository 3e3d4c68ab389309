"""Ranks that were given different arguments: each raises the same named error, none hangs, aborts or goes on with another loss.

Ranks are threads here (simulated_ranks.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from helpers import error_of
from refused import REFUSED, log_probs_of_hidden, log_probs_of_logits, loss_of_hidden, loss_of_logits, shown
from simulated_ranks import groups_of_ranks, on_simulated_ranks

import megatron_rl
from megatron_rl.declare import register_policy_loss
from megatron_rl.layout.agreement import MESSAGE_BYTES, RankAgreement, checks_microbatch
from megatron_rl.layout.groups import SINGLE, ParallelGroups
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.ops.linear_log_probs import linear_log_probs
from megatron_rl.ops.log_probs import vocab_parallel_log_probs

NUM_TOKENS, VOCAB_SIZE, HIDDEN_SIZE, MASKED = 6, 8, 4, 2


def on_ranks(work: Callable[[int, ParallelGroups], object], **sizes: int) -> list:
    """What work(rank, groups) gives on each of the ranks, or the error that it raises there."""
    of_ranks = groups_of_ranks(**sizes)
    return on_simulated_ranks(lambda groups: work(of_ranks.index(groups), groups), of_ranks)


def arguments(entry: str, groups: ParallelGroups) -> dict:
    """Keyword arguments of a micro-batch of two documents, with 2 and 4 tokens; under cp both ranks hold equal slices."""
    generator = torch.Generator().manual_seed(0)
    columns = VOCAB_SIZE // groups.tp.size()
    first = groups.tp.rank() * columns
    logits = torch.randn(NUM_TOKENS, VOCAB_SIZE, generator=generator)[:, first : first + columns]
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)[first : first + columns]
    given = {
        "labels": torch.tensor([0, 1, 5, 3, 7, 2]),
        "old_log_probs": -torch.rand(NUM_TOKENS, generator=generator) - 1,
        "advantages": torch.tensor([1.0, -1.0]),
        "loss_mask": torch.arange(NUM_TOKENS) != MASKED,
        "cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32),
        "token_weights": torch.tensor([0.3, 0.2]),
        "ref_log_probs": -torch.rand(NUM_TOKENS, generator=generator) - 1,
        "kl_coefficient": 0.1,
        "regularizer_weights": torch.tensor([0.1, 0.2]),
        "tp_group": groups.tp,
        "cp_group": groups.cp,
    }
    if entry.startswith("linear"):
        hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator)
        given["max_logits_bytes"] = 2 * 4 * VOCAB_SIZE  # document 1 is in several chunks
        return {"hidden": hidden.requires_grad_(), "weight": weight.clone().requires_grad_(), **given}
    return {"logits": logits.clone().requires_grad_(), **given}


def operand(given: dict) -> str:
    return "hidden" if "hidden" in given else "logits"


def with_rows(given: dict, num_rows: int, bounds: list[int]) -> None:
    given[operand(given)] = given[operand(given)].detach()[:num_rows].clone().requires_grad_()
    for name in ("labels", "old_log_probs", "ref_log_probs", "loss_mask"):
        given[name] = given[name][:num_rows]
    given["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)


def with_documents(given: dict, bounds: list[int]) -> None:
    given["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    given["advantages"], given["token_weights"] = torch.ones(len(bounds) - 1), torch.full((len(bounds) - 1,), 0.1)
    given["regularizer_weights"] = given["token_weights"]


def as_dtype(given: dict, dtype: torch.dtype) -> None:
    for name in {"logits", "hidden", "weight"} & given.keys():
        given[name] = given[name].detach().to(dtype).requires_grad_()


def changed(**values) -> Callable[[dict], None]:
    return lambda given: given.update(values)


def nan_old(given: dict) -> None:
    given["old_log_probs"][0] = math.nan


def nan_operand(given: dict) -> None:
    with torch.no_grad():
        given[operand(given)][0, 0] = math.nan


def masked_junk(given: dict) -> None:
    given["labels"][MASKED], given["old_log_probs"][MASKED] = -100, math.nan


# What rank 1 does to its arguments -> a text that every rank's error holds. A user's own mistake names the argument.
ONE_RANK_ALONE = {
    "tokens": (lambda given: with_rows(given, 4, [0, 2, 4]), "number of tokens differs"),
    "no token": (lambda given: with_rows(given, 0, [0, 0, 0]), "number of tokens differs"),
    "NaN old_log_probs": (nan_old, "old_log_probs differs"),
    "ref_log_probs": (changed(ref_log_probs=torch.zeros(NUM_TOKENS)), "ref_log_probs differs"),
    "masked tokens": (masked_junk, None),
    "labels": (changed(labels=torch.ones(NUM_TOKENS, dtype=torch.int64)), "labels differs"),
    "loss_mask": (changed(loss_mask=torch.arange(NUM_TOKENS) != 3), "loss_mask differs"),
    "temperature": (changed(temperature=2.0), "temperature differs .* rank 0 has 1.0, rank 1 has 2.0"),
    "vocab_size": (changed(vocab_size=7), "vocab_size differs"),
    "wider shard": (
        lambda given: given.update(
            {operand(given): torch.randn(NUM_TOKENS, 6, requires_grad=True)}
            | ({"weight": torch.randn(4, 6, requires_grad=True)} if "hidden" in given else {})
        ),
        "number of columns differs",
    ),
}
EVERYWHERE = {
    "nothing": (lambda given: None, None),
    "dtype bfloat16": (lambda given: as_dtype(given, torch.bfloat16), "dtype of logits differs"),
    "fewer documents": (lambda given: with_documents(given, [0, 6]), "number of documents differs"),
    "token_weights": (changed(token_weights=torch.tensor([0.9, 0.1])), "token_weights differs"),
    "token_counts on one rank": (changed(token_counts=torch.tensor([4, 8])), "token_counts differs"),
    "advantages": (changed(advantages=torch.tensor([-1.0, 1.0])), "advantages differs"),
    "advantages of tokens": (changed(advantages=torch.ones(NUM_TOKENS), advantages_per="token"), "advantages differs"),
    "importance_weights": (changed(importance_weights=torch.ones(NUM_TOKENS)), "importance_weights differs"),
    "a correction": (
        changed(correction=CorrectionSettings(sequence_delta=0.1), rollout_log_probs=torch.zeros(NUM_TOKENS)),
        "correction differs",
    ),
    "kl_estimator": (changed(kl_estimator="k2"), "kl_estimator differs"),
}
# Seen by one rank alone, in its slice: told after the same all-reduce.
OF_ONE_SLICE = r"document 0 .* has 1 unmasked tokens .*(in {}|on another context-parallel rank)"
ONLY_CP = {
    "a NaN": (nan_operand, OF_ONE_SLICE.format("log_probs")),
    "an infinite old log-prob": (
        lambda given: given["old_log_probs"].__setitem__(0, math.inf),
        OF_ONE_SLICE.format("old_log_probs"),
    ),
    "an empty slice": (lambda given: with_rows(given, 0, [0, 0, 0]), None),
    "a shorter slice": (lambda given: with_rows(given, 3, [0, 1, 3]), None),
    "as many tokens as documents": (lambda given: with_rows(given, 2, [0, 0, 2]), "advantages .* fit both"),
}
ONLY_LINEAR = {
    "max_logits_bytes": (changed(max_logits_bytes=10**6), "max_logits_bytes differs"),
    "no gradient": (
        lambda given: given.update(hidden=given["hidden"].detach(), weight=given["weight"].detach()),
        "which gradients are needed",
    ),
    "loss_scale": (changed(loss_scale=2.0), "loss_scale differs"),
}


OF_LOG_PROBS = {
    "temperature": (changed(temperature=2.0), "temperature differs"),
    "entropy": (changed(with_entropy=True), "with_entropy differs"),
}


def table_of(entry: str, group_name: str) -> dict[str, tuple[Callable, str | None]]:
    if entry.endswith("log_probs"):
        return OF_LOG_PROBS
    return EVERYWHERE | (ONE_RANK_ALONE if group_name == "tp" else ONLY_CP) | (ONLY_LINEAR if entry.startswith("linear") else {})


# Each entry over one group, each group with logits and with hidden states.
ENTRIES = {"grpo_loss": "tp", "gspo_loss": "cp", "linear_grpo_loss": "tp", "linear_gspo_loss": "cp"}
ENTRIES |= {"vocab_parallel_log_probs": "tp", "linear_log_probs": "tp"}
CASES = [(entry, group_name, name) for entry, group_name in ENTRIES.items() for name in table_of(entry, group_name)]


@pytest.mark.parametrize(("entry", "group_name", "name"), CASES)
def test_a_difference_between_ranks_is_the_same_named_error_on_both(entry, group_name, name):
    """Slices of context-parallel ranks may differ, and so may whatever a masked position holds."""
    change, expected = table_of(entry, group_name)[name]

    def outcome(rank: int, groups: ParallelGroups) -> str:
        given = arguments(entry, groups)
        if rank == 1:
            change(given)
        if entry.endswith("log_probs"):
            names = ("logits", "hidden", "weight", "labels", "loss_mask", "tp_group", "temperature", "with_entropy")
            function = linear_log_probs if entry.startswith("linear") else vocab_parallel_log_probs
            return error_of(lambda: function(**{name: value for name, value in given.items() if name in names}))
        return error_of(lambda: getattr(megatron_rl.policy_loss, entry)(**given).loss.backward())

    for text in on_ranks(outcome, **{group_name: 2}):
        assert (text == "") if expected is None else re.search(expected, text), text


ENTRIES = {loss_of_logits: "cp", loss_of_hidden: "tp", log_probs_of_hidden: "tp", log_probs_of_logits: "tp"}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_what_one_rank_refuses_is_told_on_both(entry):
    """Each row of refused.py. A check outside the comparison would leave the other rank in a collective."""
    for changes in REFUSED[entry]:

        def outcome(rank: int, groups: ParallelGroups, changes=changes) -> str:
            shared = {"tp_group": groups.tp} | ({} if "log_probs" in entry.__name__ else {"cp_group": groups.cp})
            return error_of(lambda: entry(**shared | (changes if rank == 1 else {})))

        first, second = on_ranks(outcome, **{ENTRIES[entry]: 2})
        is_told = first.partition("rank 1: ")[2][:300] == second.partition(": ")[2][:300]
        assert second and (is_told or first == second), ({name: shown(value) for name, value in changes.items()}, first, second)


def test_an_error_reaches_the_ranks_of_both_groups():
    """TP2 x CP2: rank (1, 1) alone is wrong; (0, 0) shares no group with it and hears of it through the others."""

    def step(rank: int, groups: ParallelGroups) -> str:
        given = arguments("grpo_loss", groups)
        if rank == 3:
            given["cu_seqlens"] = torch.tensor([0, 2, 7], dtype=torch.int32)
        return error_of(lambda: megatron_rl.grpo_loss(**given))

    errors = on_ranks(step, tp=2, cp=2)
    assert len(errors) == 4 and all("cu_seqlens ends at 7 but there are 6 tokens" in error for error in errors)


def test_what_is_exchanged_and_when():
    """A gather of MESSAGE_BYTES over a group before the loss is computed; on CUDA it is off unless asked for."""

    def step(rank: int, groups: ParallelGroups) -> dict:
        counts = {}
        for check_ranks in (None, True, False):
            begin = len(groups.cp.calls)
            megatron_rl.gspo_loss(**arguments("gspo_loss", groups), check_ranks=check_ranks)
            counts[check_ranks] = groups.cp.calls[begin:]
        return counts

    for counts in on_ranks(step, cp=2):
        check = ("all_gather", (MESSAGE_BYTES,))
        assert counts[None] == counts[True] == [check, *counts[False]]
        assert counts[False] == [("all_reduce", (2, 5))]
    assert [checks_microbatch(number) for number in range(4)] == [True, True, None, None]
    with RankAgreement(SINGLE, SINGLE, check_ranks=True) as agreement:
        assert not agreement.is_active, "one rank compares nothing"


def overflowing_with_mean(log_ratio, advantages, *, mean_log_ratio):
    return -(log_ratio * 10).exp() * advantages + mean_log_ratio


@pytest.mark.parametrize("name", ["own_overflowing", "overflowing with a mean"])
@pytest.mark.parametrize("entry", ["policy_loss", "linear_policy_loss"])
def test_numbers_that_overflow_on_one_rank_alone_stop_both(own_losses, entry, name):
    """Those of one context-parallel rank's tokens are in the sums of both."""
    register_policy_loss("overflowing with a mean", needs=("mean_log_ratio",))(overflowing_with_mean)

    def step(rank: int, groups: ParallelGroups) -> str:
        given = arguments("grpo_loss" if entry == "policy_loss" else "linear_grpo_loss", groups)
        if rank == 1:
            given["old_log_probs"][3] = -1000.0
        return error_of(lambda: getattr(megatron_rl.policy_loss, entry)(name, **given))

    for text in on_ranks(step, cp=2):
        assert f"in what policy loss {name} or KL estimator k3 returns for finite inputs, or on another" in text


def test_advantages_that_vary_between_slices_alone_are_refused_on_both():
    """Each rank sees one value in each document, together they vary."""

    def step(rank: int, groups: ParallelGroups) -> list[str]:
        given = arguments("gspo_loss", groups) | {"advantages_per": "token"}
        of_ranks = (1.0 + rank, 1.0)
        return [error_of(lambda a=a: megatron_rl.gspo_loss(**given | {"advantages": a * torch.ones(NUM_TOKENS)})) for a in of_ranks]

    for varying, equal in on_ranks(step, cp=2):
        assert "advantages vary inside document 0" in varying and equal == ""
