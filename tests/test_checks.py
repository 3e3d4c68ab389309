"""The registry of checks: what a check is asked, by whom, of which launches, and in which order."""

from __future__ import annotations

import random
from argparse import Namespace
from dataclasses import dataclass
from importlib import import_module

import pytest
from conftest import ROOT
from forked import forget, forked
from launch_settings import REDUCER

from megatron_rl.errors import ConfigError
from megatron_rl.hosts import HOST_NAMES
from megatron_rl.hosts.base import read_launch
from megatron_rl.hosts.checks import check_launch, checks_of, host_warnings
from megatron_rl.hosts.doors import DOORS
from megatron_rl.validation.checks import EVERYONE, Asker, Row, ask, check, checks_in, problems_of, warnings_of


@dataclass(frozen=True)
class Order:
    """A kind of launch that the package has never heard of."""

    size: int
    is_urgent: bool = False


@check(subject="size")
def size_is_positive(order):
    if order.size < 1:
        yield f"size={order.size}: give 1 or more"


@check(asked_by=(Asker.DOCTOR,), when=lambda order: order.is_urgent, is_warning=True)
def urgent_orders_cost_more(order):
    yield "urgent: it costs more"


@check()
def size_is_known(order):
    yield Row("size", f"{order.size}", is_note=True)
    if order.size > 100:
        yield Row("store", "holds 100", is_wrong=True)


CHECKS = checks_in(__name__)


def test_the_checks_of_a_file_are_those_that_it_defines_in_its_order():
    assert CHECKS == (size_is_positive, urgent_orders_cost_more, size_is_known)
    assert [one.name for one in CHECKS] == ["size_is_positive", "urgent_orders_cost_more", "size_is_known"]
    assert checks_in("megatron_rl.validation.checks") == ()


def test_a_message_becomes_a_row_of_the_check_s_subject():
    assert list(ask(CHECKS, Order(0), Asker.TRAIN)) == [
        Row("size", "size=0: give 1 or more", is_wrong=True),
        Row("size", "0", is_note=True),
    ]
    assert list(ask(CHECKS, Order(1, is_urgent=True), Asker.DOCTOR))[0] == Row("rule", "urgent: it costs more", is_note=True)


def test_a_check_is_asked_by_who_it_says_and_of_the_launches_that_it_is_for():
    urgent, calm = Order(1, is_urgent=True), Order(1)
    assert warnings_of(CHECKS, urgent, Asker.DOCTOR) == ["urgent: it costs more"]
    assert warnings_of(CHECKS, calm, Asker.DOCTOR) == warnings_of(CHECKS, urgent, Asker.LAUNCHER) == []


def test_problems_are_told_once_and_hold_no_note():
    assert problems_of((*CHECKS, *CHECKS), Order(200, is_urgent=True), Asker.DOCTOR) == ["holds 100"]


# The files whose checks are asked of a kind of launch. A host's own file may hold some; a door has its own in a tuple.
FILES = {
    "settings": ("validation.rules", "validation.advice"),
    "host": (
        "hosts.names",
        "hosts.checks",
        "hosts.clip_checks",
        "hosts.correction_checks",
        "hosts.loss_checks",
        "hosts.head_checks",
        "hosts.skip_checks",
        "hosts.support_checks",
        *(f"hosts.{name}" for name in HOST_NAMES),
        "hosts.actor_checks",
    ),
    "train": ("train.option_rules", "train.output_dir"),
    "train_rl": ("hosts.train_rl_checks",),
}
MODULES = [f"megatron_rl.{name}" for of_kind in FILES.values() for name in of_kind]
# A launch with something wrong for most of these files.
WRONG = {
    **{"loss_aggregation": "prompt_mean", "loss_agregation": "constant", "advantage_estimator": "ppo", "kl_coef": 0.1},
    **{"custom_reward_post_process_path": "megatron_rl.hooks.reward_post_process", "policy_loss": "gspo", "clip_ratio_low": 1.5},
    **{"use_tis": True, "custom_tis_function_path": "user.tis", "global_batch_size": 15, "n_samples_per_prompt": 4},
    **{"loss_type": "custom_loss", "custom_loss_function_path": "megatron_rl.hooks.custom_loss", "get_mismatch_metrics": True},
}


def test_no_check_lies_where_nobody_asks_it():
    """Catches a check in a file that no kind of launch has, and one that a door's tuple lacks."""
    paths = [path for path in (ROOT / "megatron_rl").rglob("*.py") if "@check(" in path.read_text(encoding="utf-8")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    asked = {one for door in DOORS.values() for one in door.checks}
    for name in sorted(set(names) - set(MODULES)):
        assert set(checks_in(name)) <= asked, f"{name}: {[one.name for one in checks_in(name) if one not in asked]}"


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_messages_does_not_depend_on_the_order_of_imports(seed):
    """Each process imports the files of checks in an order of its own, and is told the same."""
    shuffled = random.Random(seed).sample(MODULES, len(MODULES))
    told_here = pytest.raises(ConfigError, check_launch, Namespace(**WRONG)).value.problems

    def judge() -> None:
        forget()
        for name in shuffled:
            import_module(name)
        try:
            import_module("megatron_rl.hosts.checks").check_launch(Namespace(**WRONG))
        except import_module("megatron_rl.errors").ConfigError as error:
            print("\n".join(error.problems))

    code, told, error = forked(judge)
    assert code == 0, error
    assert told.splitlines() == list(told_here) and len(told_here) > 6


ASKED_BY_FEW = {
    Asker.LAUNCHER: {"paths_load", "flags_reach_the_arguments", "actors_are_checked"},
    Asker.INIT_HOOK: {
        *("paths_load", "flags_reach_the_arguments", "no_report_was_asked_for", "kernels_are_there"),
        *("groups_have_the_sizes_of_the_arguments", "this_release_trains_the_model", "host_builds_its_model_as_known"),
        *("host_measures_as_known", "sampler_scores_what_it_kept"),
    },
    Asker.DOCTOR: {"clip_has_a_use"},  # nothing is wrong with such a launch, and a start has enough to say
}


@pytest.mark.parametrize("asker", [Asker.LAUNCHER, Asker.INIT_HOOK, Asker.HOOK, Asker.DOCTOR])
def test_a_launch_is_asked_what_its_asker_can_know(asker):
    few = {one.name for one in checks_of(read_launch(Namespace(**REDUCER))) if one.asked_by != EVERYONE and asker in one.asked_by}
    assert few == ASKED_BY_FEW.get(asker, set())


def test_the_launcher_alone_misses_the_init_hook():
    launch = read_launch(Namespace(**REDUCER, loss_aggregation="sample_mean"))
    (line,) = host_warnings(launch, Asker.LAUNCHER)
    assert line.startswith("no --custom-megatron-init-path is on the launch line") and host_warnings(launch, Asker.DOCTOR) == []


def test_a_path_that_does_not_load_stops_the_launcher_and_leaves_doctor_its_own_words():
    args = Namespace(**REDUCER, loss_aggregation="sample_mean", custom_megatron_init_path="megatron_rl.hooks.no_such_hook")
    with pytest.raises(ConfigError, match="no_such_hook cannot be loaded"):
        check_launch(args, asker=Asker.LAUNCHER)
    check_launch(args, asker=Asker.DOCTOR)
