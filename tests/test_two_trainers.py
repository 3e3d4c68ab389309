"""Two trainers of one process, as an actor and a critic: neither sees the other's settings, verdicts, guard or lines."""

from __future__ import annotations

import gc
import math
import weakref
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from helpers import error_of, pool_of, set_global_args
from host_cases import HostCase, host_args
from host_harness import exact_cross_entropy
from host_ranks import deal, logits_of, make_host, micro_batch, train_data
from torch import nn

from megatron_rl.hosts.host_run import RUNS
from megatron_rl.hosts.reducer import get_pg_loss_reducer
from megatron_rl.hosts.training_hooks import before_train_step

NUM_STEPS = 3


class Policy(nn.Module):
    """A table of logits behind the weight of a norm."""

    def __init__(self, logits: torch.Tensor, per_token: bool):
        super().__init__()
        self.table = nn.Parameter(logits)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(logits.shape[-1]))
        self.config = SimpleNamespace(calculate_per_token_loss=per_token)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return logits_of(self.table * self.norm.weight, rows)


def training(record: list, case: HostCase, is_guarded: bool, bad_step: int, divisor: float | None) -> Iterator[Namespace]:
    """A trainer on an emulated host, which gives way to others after each call of its host; the first time with its arguments.
    record: gets each loss, gradient and error. bad_step: the step with an advantage that is not finite."""
    step, host, args = case.step(), make_host(case.host, {}), host_args(case)
    if divisor is not None:
        args.loss_aggregation_divisor = divisor
    policy = Policy(step.logits.float(), case.per_token)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    yield args
    data, micro_batches = train_data(host, args, step), deal(case, 0, 1)
    settings = {"num_microbatches": len(micro_batches), "num_rollouts": len(set(data["rollout_ids"]))}
    for number in range(NUM_STEPS):
        yield args
        optimizer.zero_grad()
        if is_guarded:
            before_train_step(args, 7, number, [policy], optimizer, None)
        for samples in micro_batches:
            yield args
            rows, batch = micro_batch(host, args, case, step, data, samples)
            if number == bad_step:
                batch["advantages"][0][0] = math.inf
            with exact_cross_entropy():
                loss, _, log = host.loss_function(args, batch, policy(rows), **settings)
            loss.backward()
            record += [loss.detach().clone(), log["values"]]
        yield args
        record += [policy.table.grad.clone(), error_of(optimizer.step), policy.table.detach().clone()]


def play(*cases: tuple) -> list[list]:
    """The records of trainers whose calls take turns. Each sets Megatron's arguments before its own, as each host's actor does."""
    records: list[list] = [[] for _ in cases]
    playing = [training(record, *case) for record, case in zip(records, cases, strict=True)]
    arguments = {trainer: next(trainer) for trainer in playing}
    while playing:
        for trainer in [*playing]:
            set_global_args(arguments[trainer])
            if next(trainer, None) is None:
                playing.remove(trainer)
    return records


def bits(record: list) -> list:
    return [entry.view(torch.int32).tolist() if isinstance(entry, torch.Tensor) else entry for entry in record]


def records_on_rank(rank: int, *cases: tuple) -> tuple[list, list]:
    alone = [bits(record) for case in cases for record in play(case)]
    return alone, [bits(record) for record in play(*cases)]


# (case, is guarded, the step with data that is not finite, divisor)
GUARDED = (HostCase("slime", "reducer", "constant", size=5), True, 1, 24.0)
OTHERS = {
    "another divisor, unguarded, its own bad step": (HostCase("slime", "reducer", "constant", size=4), False, 0, 7.0),
    "tokens, slime, guarded": (HostCase("slime", "reducer", "token_mean", per_token=True, size=5), True, 2, None),
    "our loss of means, miles, unguarded": (
        HostCase("miles", "custom_loss", "sample_mean", estimator="gspo", size=3),
        False,
        -1,
        None,
    ),
}
pool = pool_of(1)


@pytest.mark.megatron
@pytest.mark.parametrize("other", OTHERS)
def test_trainers_that_take_turns_train_as_alone(pool, other):
    """Losses, metrics, gradients, parameters and errors, bit by bit: a divisor, a count or an armed guard of the other shows."""
    ((alone, together),) = pool.run(records_on_rank, GUARDED, OTHERS[other])
    assert together == alone
    errors = [[entry for entry in record if isinstance(entry, str)] for record in alone]
    assert [bool(error) for error in errors[0]] == [False, True, False] and "rollout 7, step 1" in errors[0][1]
    assert [bool(error) for error in errors[1]] == [number == 2 and other.startswith("tokens") for number in range(NUM_STEPS)]


def test_a_trainer_that_is_forgotten_is_freed():
    """Its verdict, its guard with the optimiser, and its arguments: nothing of it is held by the module."""
    args = Namespace(loss_aggregation="constant", loss_aggregation_divisor=4.0, calculate_per_token_loss=False)
    model, parameter = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    model.config = SimpleNamespace(calculate_per_token_loss=False)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    set_global_args(args)
    before_train_step(args, 7, 0, [model], optimizer, None)
    get_pg_loss_reducer([5], [3], [torch.tensor([1, 0, 1])])(torch.ones(3))
    seen = [weakref.ref(one) for one in (args, RUNS.of(args), optimizer)]
    assert len([*RUNS]) == 1
    set_global_args(Namespace())
    del args, optimizer
    gc.collect()
    assert [one() for one in seen] == [None] * 3 and len([*RUNS]) == 0
