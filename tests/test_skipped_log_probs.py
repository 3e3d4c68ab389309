"""--skip-old-log-probs: the forward that measures old log-probabilities is left out, and rollouts that need it are refused.

tests/test_custom_loss.py has the loss, tests/test_host_rules.py the launches, tests/test_whole_host.py the hosts' own actors.
"""

from __future__ import annotations

import contextlib
import io
import sys
from argparse import Namespace
from types import ModuleType

import pytest
import torch
from carrier_cases import INIT
from helpers import error_of, pool_of
from host_loss_cases import Case, Sample, host_batch, host_logits, never
from launch_settings import CUSTOM_LOSS

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.args import ADVANTAGES, FORWARD, host_named
from megatron_rl.hosts.checks import SKIP_REMEDY
from megatron_rl.hosts.heads.skipped_log_probs import unknown_log_probs
from megatron_rl.hosts.loss import custom_loss
from megatron_rl.hosts.training_hooks import custom_megatron_init
from megatron_rl.layout.groups import resolve_groups

SLIME = host_named("slime")
SKIPPED = {"skip_old_log_probs": True, **INIT}
pool = pool_of(4)

# What slime's actor does between a rollout and its step. read: what the advantages take from the old log-probabilities.
ACTOR = """
def compute_advantages_and_returns(args, rollout_data):
    xs = rollout_data.get("log_probs") or rollout_data.get("values")
    if xs is None:
        raise TypeError("no lengths")
    rollout_data["advantages"] = [args.read(x, own) for x, own in zip(xs, rollout_data["own_advantages"], strict=True)]

class MegatronTrainRayActor:
    def __init__(self, args, forward):
        self.args, self.forward, self.measured = args, forward, []

    def compute_log_prob(self, data_iterator, num_microbatches, store_prefix=""):
        self.measured.append(store_prefix)
        return {store_prefix + "log_probs": self.forward()}

    def train_actor(self, rollout_data, num_microbatches=(2,)):
        rollout_data.update(self.compute_log_prob(None, num_microbatches, store_prefix="ref_"))
        rollout_data.update(self.compute_log_prob(None, num_microbatches))
        compute_advantages_and_returns(self.args, rollout_data)
        return rollout_data
"""


def placed(source: str) -> ModuleType:
    module = ModuleType(f"{SLIME.training_package}.actor")
    module.__file__ = "slime/actor.py"
    exec(source, vars(module))
    sys.modules[module.__name__] = module
    return module


def started(**settings) -> tuple[Namespace, str]:
    """The arguments of a run of slime after its init hook, and what that printed."""
    args = Case(host="slime", settings=settings).args()
    args.read = lambda x, own: torch.zeros_like(x) + own
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        custom_megatron_init(args)
    return args, printed.getvalue()


def rollout_of(samples: list[Sample]) -> dict:
    return {
        "total_lengths": [sample.total for sample in samples],
        "response_lengths": [len(sample.mask) for sample in samples],
        "loss_masks": [torch.tensor(sample.mask) for sample in samples],
        "own_advantages": [1.5, -0.75, 0.5, -2.0, 1.0, -0.25],
    }


def step_of(actor: ModuleType, args: Namespace) -> tuple[list[str], list, dict, dict]:
    """(the forwards of a rollout, its step's gradients by the logits, its metrics, its data before the step)."""
    case = Case(host="slime", without=())
    samples = case.samples()
    leaves = [sample.logits.clone().requires_grad_() for sample in samples]

    def forward() -> list:
        found = []
        for sample, leaf in zip(samples, leaves, strict=True):
            rows = torch.log_softmax(leaf.detach()[sample.prompt - 1 : -1] / args.rollout_temperature, -1)
            found.append(rows.gather(-1, sample.tokens[sample.prompt :, None])[:, 0].float())
        return found

    made = actor.MegatronTrainRayActor(args, forward)
    data = made.train_actor(rollout_of(samples))
    batch = host_batch(case, samples, samples, 0, 1) | {"log_probs": data.get("log_probs"), "advantages": data["advantages"]}
    loss, metrics = custom_loss(args, batch, host_logits(case, samples, samples, leaves, 0, 1), never)
    loss.backward()
    return made.measured, [leaf.grad for leaf in leaves], metrics, data


def steps_on_rank(rank: int) -> tuple[tuple, list[tuple], str, tuple]:
    """Steps of a run without our flag, of two with it, what the second printed at start, and the first run once more."""
    actor = placed(ACTOR)
    plain, _ = started()
    first = step_of(actor, plain)
    ours = []
    for _ in range(2):  # the second init hook of a process puts nothing around what is there
        args, printed = started(**SKIPPED)
        ours.append(step_of(actor, args))
    return first, ours, printed, step_of(actor, plain)


@pytest.mark.megatron
def test_without_the_forward_the_step_is_that_of_the_forward(pool):
    """The model has not moved since the forward, so its numbers are the step's own. The reference is measured as before."""
    [((measured, expected, _, data), ours, printed, again)] = pool.run(steps_on_rank, world_size=1)
    assert measured == ["ref_", ""] and set(data) >= {"log_probs", "ref_log_probs"}
    for measured, gradients, metrics, data in ours:
        assert measured == ["ref_"] and "log_probs" not in data and "ref_log_probs" in data
        assert all(torch.isfinite(advantage).all() for advantage in data["advantages"])
        for found, theirs in zip(gradients, expected, strict=True):
            # The forward's numbers are float64 rounded to float32: a ratio is 1 up to 2^-24 x 12.
            torch.testing.assert_close(found, theirs, rtol=1e-6, atol=1e-9)
        assert metrics["ppo_kl"] == 0 and metrics["pg_clipfrac"] == 0
    assert "old log-probabilities are the step's own, each ratio is 1" in printed
    assert again[0] == ["ref_", ""]  # a run beside it, in the same process, keeps its forward


def errors_on_rank(rank: int) -> dict[str, str]:
    actor = placed(ACTOR)
    args, _ = started(**SKIPPED)
    made, rollout = actor.MegatronTrainRayActor(args, lambda: []), rollout_of(Case().samples())
    own = rollout | {"log_probs": [torch.zeros(len(mask)) for mask in rollout["loss_masks"]]}
    found = {"three steps": error_of(lambda: made.train_actor(dict(rollout), (2, 2, 1)))}
    found["its own"] = error_of(lambda: made.train_actor(own))
    args.read = lambda x, own: own + 0.0 * x
    found["a reader"] = error_of(lambda: step_of(actor, args))
    args.read = lambda x, own: x
    values = [torch.ones(len(mask)) for mask in rollout["loss_masks"]]
    found["a critic"] = str(made.train_actor(rollout | {"values": values})["advantages"][0].tolist())
    return found


@pytest.mark.megatron
def test_what_needs_the_forward_is_refused_at_the_first_rollout(pool):
    """What no rule of the launch knows of: an advantage that reads the old log-probabilities is not finite, and our loss refuses
    it. With a critic the host takes the lengths of its values."""
    [found] = pool.run(errors_on_rank, world_size=1)
    assert "this rollout is 3 optimiser steps, and from the second on" in found["three steps"]
    assert "make a rollout one step (--num-steps-per-rollout 1), or remove --skip-old-log-probs" in found["three steps"]
    assert "the rollout brings log_probs of its own, which would be ignored; remove --skip-old-log-probs" in found["its own"]
    assert "a value that is not finite" in found["a reader"]
    assert found["a critic"] == str([1.0] * len(Case().samples()[0].mask))


def test_a_batch_with_measured_log_probabilities_is_refused():
    """The init hook was not called, or a function at its flag does not call ours."""
    case = Case(settings=SKIPPED)
    samples = case.samples()
    logits = host_logits(case, samples, samples, [sample.logits for sample in samples], 0, 1)
    with pytest.raises(DataError, match="--skip-old-log-probs: the host's batch has log_probs.*add --custom-megatron-init-path"):
        custom_loss(case.args(), host_batch(case, samples, samples, 0, 1), logits, never)


def lengths_on_rank(rank: int, layout: str) -> tuple[list[int], list[int]]:
    cp, samples = resolve_groups().cp, Case(layout).samples()
    longest = -(-max(sample.total for sample in samples) // 4) * 4
    data = rollout_of(samples) | {"max_seq_lens": [longest] * len(samples) if layout == "bshd" else None}
    batch = host_batch(Case(layout), samples, samples, cp.rank(), cp.size())
    found = unknown_log_probs(data)
    assert all(values.dtype == torch.float32 and values.isnan().all() for values in found)
    return [len(values) for values in found], [len(values) for values in batch["log_probs"]]


@pytest.mark.megatron
@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_lengths_are_those_of_the_ranks_own_tokens(pool, cp_size, layout):
    for found, expected in pool.run(lengths_on_rank, layout, world_size=cp_size, context_parallel_size=cp_size):
        assert found == expected


MOVED = [
    pytest.param(ACTOR.replace("store_prefix", "prefix"), "compute_log_prob has no argument store_prefix", id="another prefix"),
    pytest.param(
        ACTOR.replace("    compute_advantages_and_returns(", "    advantages("),
        "train_actor does not call compute_advantages_and_returns",
        id="advantages elsewhere",
    ),
]


@pytest.mark.parametrize(("source", "says"), MOVED)
def test_a_host_that_measures_in_another_way_is_refused(source, says, monkeypatch):
    monkeypatch.setitem(sys.modules, f"{SLIME.training_package}.actor", None)  # as it was at the end
    placed(source)
    problems = [text for one in (FORWARD, ADVANTAGES) for text in one.problems("slime", SLIME.training_package, SKIP_REMEDY)]
    assert problems and all("no forward can be left out; remove --skip-old-log-probs" in problem for problem in problems)
    with pytest.raises(ConfigError, match=f"slime's .*{says}"):
        custom_megatron_init(Namespace(**CUSTOM_LOSS, **SKIPPED, loss_aggregation="sample_mean", rollout_batch_size=8))
