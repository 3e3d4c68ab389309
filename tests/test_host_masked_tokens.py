"""A masked token of a rollout with an old log-probability of -inf: what miles, slime and our loss make of it, and who notices.

The emulated hosts run always, real checkouts with MILES_ROOT=... SLIME_ROOT=... pytest -m host --require host.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import error_of, set_global_args
from host_cases import HostCase, host_args
from host_harness import exact_cross_entropy, roots_by_environment
from host_ranks import deal, logits_of, make_host, micro_batch, train_data
from torch import nn

from megatron_rl.hosts.training_hooks import before_train_step
from megatron_rl.testing.ranks import RankPool

pytestmark = pytest.mark.megatron
ROOTS = roots_by_environment()
GUARDED = (("custom_megatron_before_train_step_hook_path", "megatron_rl.hooks.before_train_step"),)
REDUCER = HostCase("slime", "reducer", "sample_mean", options=GUARDED)


class Policy(nn.Module):
    """A table of logits behind a norm's weight, which every token's gradient reaches, as that of a model's last norm."""

    def __init__(self, logits: torch.Tensor, fp16: bool):
        super().__init__()
        self.table = nn.Parameter(logits)
        self.final_layernorm = nn.Module()
        self.final_layernorm.weight = nn.Parameter(torch.ones(logits.shape[-1]))
        self.config = SimpleNamespace(calculate_per_token_loss=False, fp16=fp16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return logits_of(self.table * self.final_layernorm.weight, rows)


def guarded_steps(rank: int, roots: dict[str, str], case: HostCase, fp16: bool = False, skips: bool = False) -> dict:
    """Two steps, in the second of which each masked token has an old log-probability of -inf."""
    host, args, step = make_host(case.host, roots), host_args(case), case.step()
    set_global_args(args)
    data = train_data(host, args, step)
    policy = Policy(step.logits.float(), fp16)
    optimizer, found = torch.optim.SGD(policy.parameters(), lr=0.0), {"losses": [], "gradients": [], "errors": []}
    for number in range(2):
        optimizer.zero_grad()
        before_train_step(args, 7, number, [policy], optimizer, None)
        micro_batches = deal(case, 0, 1)
        for samples in micro_batches:
            rows, batch = micro_batch(host, args, case, step, data, samples)
            if number:
                for old, mask in zip(batch["log_probs"], batch["loss_masks"], strict=True):
                    old[mask == 0] = -math.inf
            settings = {"num_microbatches": len(micro_batches), "num_rollouts": len(set(data["rollout_ids"]))}
            with exact_cross_entropy():
                loss, _, _ = host.loss_function(args, batch, policy(rows), **settings)
            loss.backward()
            found["losses"].append(float(loss))
        found["gradients"].append(bool(torch.isfinite(policy.table.grad).all()))
        found["errors"].append("" if skips else error_of(optimizer.step))
    found["next call"] = error_of(lambda: before_train_step(args, 7, 2, [policy], optimizer, None))
    return found


HOSTS = [pytest.param({}, id="emulated"), pytest.param(ROOTS, id="checkout", marks=pytest.mark.host)]


@pytest.fixture(scope="module", params=HOSTS)
def steps(request):
    """guarded_steps on one rank, where a checkout stays loaded."""
    with RankPool(1) as ranks:
        yield lambda *arguments: ranks.run(guarded_steps, request.param, *arguments)[0]


SAYS = (
    "DataError: rollout 7, step 1: the gradient of final_layernorm.weight is not finite on one of the ranks, and no unmasked token"
)


def test_the_step_guard_sees_a_gradient_that_a_masked_token_spoils_in_slime(steps):
    """The logged loss is right, because our reducer leaves the token out; slime's own backward is 0 times inf."""
    found = steps(REDUCER)
    assert found["gradients"] == [True, False] and all(map(math.isfinite, found["losses"]))
    first, second = (found["losses"][start : start + len(found["losses"]) // 2] for start in (0, len(found["losses"]) // 2))
    assert second == pytest.approx(first, rel=1e-6)
    assert found["errors"][0] == "" and found["errors"][1].startswith(SAYS), found["errors"]
    assert "--loss-type custom_loss" in found["errors"][1] and found["next call"] == ""


def test_a_step_that_slime_skips_is_told_at_the_next_call(steps):
    """With --no-check-for-nan-in-loss-and-grad slime leaves the optimiser out, and the run goes on without the step."""
    found = steps(REDUCER, False, True)
    assert found["next call"].startswith(SAYS)


@pytest.mark.parametrize("case", [replace(REDUCER, host="miles"), replace(REDUCER, door="custom_loss")], ids=["miles", "our loss"])
def test_miles_and_our_loss_train_such_a_step(steps, case):
    found = steps(case)
    assert found["gradients"] == [True, True] and found["errors"] == ["", ""] and found["next call"] == ""


def test_an_overflow_under_a_loss_scale_is_no_finding(steps):
    """fp16 takes inf gradients for a sign that its loss scale is too large, and skips such steps by design."""
    found = steps(REDUCER, True)
    assert found["gradients"] == [True, False] and found["errors"] == ["", ""]
