"""Our log-probabilities in ROLL: numbers on one and two ranks, our worker with ROLL's own loss, and what is refused.

ROLL_ROOT=... pytest -m host --require host tests/test_roll_log_probs.py
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial

import own_log_probs
import pytest
import roll_cases
import torch
from forked import in_fork
from helpers import error_of
from host_checkouts import ROLL
from test_host_log_probs import before_and_after, nearly_equal, roll_with_ours, rows
from test_roll import started_with

from megatron_rl.errors import ConfigError
from megatron_rl.hosts import roll
from megatron_rl.hosts.heads import log_probs
from megatron_rl.testing.ranks import run_ranks


def install() -> None:
    importlib.import_module("megatron_rl.hosts.heads.roll").install("ROLL", roll.PROBED)


def in_an_order(rank: int, orders: list[tuple[str, ...]]):
    """For each order the gradient by the logits of ROLL's strategy with ours, or the error. The logits are no leaf."""
    logits, labels, _, c, e = rows()
    strategy, found = roll_with_ours().MegatronInferStrategy(), []
    for order in orders:
        leaf = logits.clone().requires_grad_()
        of_model = (leaf * 1.0)[None]
        values = {
            name: strategy.op_compute_log_probs(of_model, labels[None])
            if name == "log_probs"
            else strategy.op_compute_entropy(of_model)
            for name in order
        }
        total = sum(((c if name == "log_probs" else e) * value).sum() for name, value in values.items())
        message = error_of(total.backward)
        found.append(message or leaf.grad)
    return found


@pytest.mark.megatron
def test_the_entropy_after_the_log_probabilities_reads_the_logits_before_they_are_written():
    """As in both losses of ROLL. In the other order backward raises, and gives no wrong number."""
    orders = [("log_probs", "entropy"), ("entropy", "log_probs"), ("log_probs",), ("entropy",)]
    [(both, other, *alone)] = run_ranks(in_an_order, 1, orders)
    torch.testing.assert_close(both, sum(alone), rtol=1e-5, atol=1e-7)
    assert "modified by an inplace operation" in other


def test_a_roll_whose_strategy_calls_another_function_is_refused():
    def work():
        modules = own_log_probs.roll_modules()
        modules["roll.distributed.strategy.megatron_strategy"].MegatronInferStrategy.op_compute_entropy = lambda self, logits: (
            logits
        )
        with pytest.raises(ConfigError, match=r"op_compute_entropy does not call vocab_parallel_entropy any more, .*\.py:\d+"):
            install()

    in_fork(work)


# Our worker


@pytest.mark.parametrize(
    ("variant", "value", "loss", "is_replaced"),
    [
        ("gspo.prompt_mean", None, "ours", False),
        ("gspo.prompt_mean", "megatron_rl", "ours", True),
        ("ppo", "megatron_rl", "ROLL's", True),
        (None, "megatron_rl", "ROLL's", True),
        ("gspo.prompt_mean", "roll", "ours", False),
    ],
)
def test_our_worker_has_our_log_probabilities_with_our_loss_or_rolls(variant, value, loss, is_replaced):
    def work():
        modules = own_log_probs.roll_modules()
        variables = {} if value is None else {"MEGATRON_RL_LOG_PROBS": value}
        worker = started_with(roll_cases.worker_config(variant, **variables))
        assert ("ours" if worker.loss is not None else "ROLL's") == loss
        if worker.loss is None:
            assert worker.loss_func("data", "logits") == "ROLL's own loss"
        replaced = modules["mcore_adapter.parallel_functions.vocab_parallel"].vocab_parallel_logprobs
        assert hasattr(replaced, log_probs.MARK) == is_replaced

    in_fork(work)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MEGATRON_RL_LOG_PROBS": "ours"}, "MEGATRON_RL_LOG_PROBS=ours is neither megatron_rl nor roll"),
        (
            {"MEGATRON_RL_LOG_PROBS": "megatron_rl", "MEGATRON_RL_KL_ESTIMATOR": "k3"},
            "MEGATRON_RL_KL_ESTIMATOR has no effect on ROLL's own loss",
        ),
    ],
)
def test_rolls_setting_is_judged(variables, message):
    worker = roll_cases.worker_config("ppo", **variables)
    with pytest.raises(ConfigError, match=message):
        roll.has_log_probs(worker)


def test_another_strategy_than_megatrons_is_refused():
    """Its workers never load what is replaced."""
    worker = roll_cases.worker_config("ppo", MEGATRON_RL_LOG_PROBS="megatron_rl")
    worker.strategy_args.strategy_name = "fsdp2_train"
    with pytest.raises(ConfigError, match=r"LOG_PROBS=megatron_rl with strategy_name=fsdp2_train: it acts in"):
        roll.has_log_probs(worker)


# ROLL's own code


def rolls_own_functions(rank: int, tp: int) -> None:
    entropies = ROLL.load("roll.third_party.megatron.tensor_parallel")
    vocab_parallel = roll_file("mcore_adapter.parallel_functions.vocab_parallel")
    logits, labels, _, c, e = rows()

    def call():
        found = []
        for has_entropy in (False, True):
            leaf = logits.chunk(tp, 1)[rank].clone().requires_grad_()
            of_model = (leaf * 1.0)[None]
            values = {}
            if has_entropy:
                values["entropy"] = entropies.vocab_parallel_entropy(of_model.clone(), use_fused_kernel=False)
            values["log_probs"] = vocab_parallel.vocab_parallel_logprobs(of_model, labels[None], use_fused_kernel=False)
            total = (c * values["log_probs"]).sum()
            (total + (e * values["entropy"]).sum() if has_entropy else total).backward()
            found.append((values, [leaf.grad]))
        return found

    for pair in zip(*before_and_after(call, install), strict=True):
        nearly_equal(*pair)


def roll_file(name: str):
    """A module of mcore_adapter by its file: its package imports what is stubbed."""
    path = ROLL.path("mcore_adapter", "src", *name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.host("ROLL_ROOT")
@pytest.mark.megatron
@pytest.mark.parametrize("tp", [1, 2])
def test_roll_has_its_own_numbers_by_our_functions(tp):
    """Its strategy's file, whose callers are checked, is read, not run."""
    run_ranks(partial(rolls_own_functions, tp=tp), tp, tensor_model_parallel_size=tp)
    source = ROLL.source("roll/distributed/strategy/megatron_strategy.py")
    assert "log_probs = vocab_parallel_logprobs(" in source and "entropy = vocab_parallel_entropy(" in source
