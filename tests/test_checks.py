"""The registry of checks: what a check is asked, by whom, of which launches, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.validation.checks import Asker, Row, ask, check, checks_in, problems_of, warnings_of


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
