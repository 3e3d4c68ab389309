"""The registry of checks: what a check finds, and in which order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from importlib import import_module

import pytest
from conftest import ROOT
from forked import forget, forked

from megatron_rl.config import PolicyLossConfig
from megatron_rl.validation import Settings, find_problems
from megatron_rl.validation.checks import check, checks_in, problems_of, warnings_of


@dataclass(frozen=True)
class Order:
    """A kind of launch that the package has never heard of."""

    size: int
    is_urgent: bool = False


@check()
def size_is_positive(order):
    if order.size < 1:
        yield f"size={order.size}: give 1 or more"


@check(is_warning=True)
def urgent_orders_cost_more(order):
    if order.is_urgent:
        yield "urgent: it costs more"


@check()
def size_is_known(order):
    if order.size > 100:
        yield "holds 100"


CHECKS = checks_in(__name__)


def test_the_checks_of_a_file_are_those_that_it_defines_in_its_order():
    assert CHECKS == (size_is_positive, urgent_orders_cost_more, size_is_known)
    assert [one.name for one in CHECKS] == ["size_is_positive", "urgent_orders_cost_more", "size_is_known"]
    assert checks_in("megatron_rl.validation.checks") == ()


def test_problems_are_told_once_and_hold_no_warning():
    assert problems_of((*CHECKS, *CHECKS), Order(200, is_urgent=True)) == ["holds 100"]
    assert problems_of(CHECKS, Order(0)) == ["size=0: give 1 or more"]


def test_warnings_are_told_once_and_hold_no_problem():
    assert warnings_of((*CHECKS, *CHECKS), Order(200, is_urgent=True)) == ["urgent: it costs more"]
    assert warnings_of(CHECKS, Order(200)) == []


# The files whose checks are asked.
MODULES = [f"megatron_rl.{name}" for name in ("validation.rules", "validation.advice", "train.option_rules", "train.output_dir")]


def test_no_check_lies_where_nobody_asks_it():
    paths = [path for path in (ROOT / "megatron_rl").rglob("*.py") if "@check(" in path.read_text(encoding="utf-8")]
    assert {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths} == {*MODULES}


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_messages_does_not_depend_on_the_order_of_imports(seed):
    """Each process imports the files of checks in an order of its own, and is told the same."""
    shuffled = random.Random(seed).sample(MODULES, len(MODULES))
    wrong = {"policy_loss": "gspo", "clip_ratio_low": 1.5, "kl_coefficient": -1.0, "loss_aggregation": "constant"}
    told_here = find_problems(Settings(config=PolicyLossConfig(**wrong)))

    def judge() -> None:
        forget()
        for name in shuffled:
            import_module(name)
        validation, config = (import_module(f"megatron_rl.{name}") for name in ("validation", "config"))
        print("\n".join(validation.find_problems(validation.Settings(config=config.PolicyLossConfig(**wrong)))))

    code, told, error = forked(judge)
    assert code == 0, error
    assert told.splitlines() == told_here and len(told_here) > 2
