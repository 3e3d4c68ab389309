"""Two trainers of one process, as an actor and a critic: neither sees the other's settings, verdicts, guard or lines."""

from __future__ import annotations

import gc
import math
import weakref
from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import chain
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


class Trainer:
    """A trainer on an emulated host, as a list of calls that others may come between. bad_step: the step with an advantage that
    is not finite. Its record has each loss, gradient and error."""

    def __init__(self, case: HostCase, is_guarded: bool, bad_step: int, divisor: float | None):
        self.case, self.step, self.host = case, case.step(), make_host(case.host, {})
        self.args = host_args(case)
        if divisor is not None:
            self.args.loss_aggregation_divisor = divisor
        self.policy = Policy(self.step.logits.float(), case.per_token)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.5)
        self.is_guarded, self.bad_step, self.record = is_guarded, bad_step, []

    def calls(self) -> list[Callable[[], None]]:
        of_steps = [self._calls_of_step(number) for number in range(NUM_STEPS)]
        return [self._init, *chain.from_iterable(of_steps)]

    def _init(self) -> None:
        self.data = train_data(self.host, self.args, self.step)

    def _calls_of_step(self, number: int) -> list[Callable[[], None]]:
        micro_batches = deal(self.case, 0, 1)
        passes = [lambda samples=samples: self._pass(number, samples, len(micro_batches)) for samples in micro_batches]
        return [lambda: self._begin(number), *passes, self._end]

    def _begin(self, number: int) -> None:
        self.optimizer.zero_grad()
        if self.is_guarded:
            before_train_step(self.args, 7, number, [self.policy], self.optimizer, None)

    def _pass(self, number: int, samples: list[int], num_microbatches: int) -> None:
        rows, batch = micro_batch(self.host, self.args, self.case, self.step, self.data, samples)
        if number == self.bad_step:
            batch["advantages"][0][0] = math.inf
        with exact_cross_entropy():
            settings = {"num_microbatches": num_microbatches, "num_rollouts": len(set(self.data["rollout_ids"]))}
            loss, _, log = self.host.loss_function(self.args, batch, self.policy(rows), **settings)
        loss.backward()
        self.record += [loss.detach().clone(), log["values"]]

    def _end(self) -> None:
        self.record += [self.policy.table.grad.clone(), error_of(self.optimizer.step), self.policy.table.detach().clone()]


def play(trainers: Sequence[Trainer]) -> list[list]:
    """The records of trainers whose calls take turns. Each sets Megatron's arguments before its own, as each host's actor does."""
    lists = [trainer.calls() for trainer in trainers]
    for turn in range(max(map(len, lists))):
        for trainer, calls in zip(trainers, lists, strict=True):
            if turn < len(calls):
                set_global_args(trainer.args)
                calls[turn]()
    return [trainer.record for trainer in trainers]


def bits(record: list) -> list:
    return [entry.view(torch.int32).tolist() if isinstance(entry, torch.Tensor) else entry for entry in record]


def records_on_rank(rank: int, *cases: tuple) -> tuple[list, list]:
    alone = [bits(play([Trainer(*case)])[0]) for case in cases]
    return alone, [bits(record) for record in play([Trainer(*case) for case in cases])]


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
