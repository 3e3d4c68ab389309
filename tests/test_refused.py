"""Refused calls and launches, what is allowed beside them, and the tables that they read; tests/messages.txt has what is said.

tests/test_pages.py sees a line of it that nothing says.
"""

from __future__ import annotations

from inspect import isgeneratorfunction, signature

import pytest
from helpers import ROOT, names_forgotten
from refused import (
    ALLOWED_BY_RULES,
    NOT_WARNED,
    REFUSED,
    REFUSED_BY_RULES,
    WARNED,
    judge,
    launch,
    message_of,
    own_names_of,
    shown,
    warnings_at,
)

from megatron_rl.declare import POLICY_LOSSES
from megatron_rl.train import option_rules
from megatron_rl.validation import find_problems, rules
from megatron_rl.weights import AGGREGATIONS

TABLE = (ROOT / "tests/messages.txt").read_text(encoding="utf-8")
ROWS = [
    pytest.param(entry, changes, id=f"{entry.__name__} {', '.join(f'{k}={shown(v)}' for k, v in changes.items())}"[:100])
    for entry, rows in REFUSED.items()
    for changes in rows
]


def in_table(message: str) -> bool:
    return message.replace("\n", "\n    ") in TABLE


@pytest.mark.parametrize(("entry", "changes"), ROWS)
def test_a_refused_call_says_what_the_table_says(entry, changes):
    """FB-02, FB-12, FB-17, FB-40, FB-55, FB-63, FB-65, FB-73, FB-74, FB-80, FB-116: no shape is guessed or broadcast, nothing is
    dropped without a word, and no missing denominator has a default."""
    assert in_table(message_of(entry, changes)[1])


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.__name__)
def test_the_same_call_without_a_fault_is_taken(entry):
    entry()


# Rules

REFUSED_ROWS = [(rule_name, row) for rule_name, rows in REFUSED_BY_RULES.items() for row in rows]
ALLOWED_ROWS = [(rule_name, row) for rule_name, rows in ALLOWED_BY_RULES.items() for row in rows]


@pytest.fixture(autouse=True)
def only_built_in_names():
    """Names that other tests registered would show up in messages, and ours in theirs."""
    with names_forgotten():
        for registry in (AGGREGATIONS, POLICY_LOSSES):
            for name in registry.names():
                if not registry.is_built_in(name):
                    del registry[name]
        yield


@pytest.mark.parametrize(("rule_name", "settings"), REFUSED_ROWS, ids=str)
def test_the_rule_refuses(rule_name, settings):
    """FB-74, FB-12: nonsense and contradictions never start a run."""
    (message,) = judge(rule_name, settings)
    with own_names_of(settings):
        assert in_table(message) and message in find_problems(launch(settings))


@pytest.mark.parametrize(("rule_name", "settings"), ALLOWED_ROWS, ids=str)
def test_the_rule_allows_what_is_right(rule_name, settings):
    """Catches a rule that refuses its own boundary, or fires without the fact it needs."""
    assert judge(rule_name, settings) == []


def test_each_rule_has_a_row_that_it_refuses_and_one_that_it_allows():
    names = [rule.__name__ for rule in rules.RULES]
    assert names == list(REFUSED_BY_RULES) == list(ALLOWED_BY_RULES)
    assert all(REFUSED_BY_RULES.values())
    assert all(ALLOWED_BY_RULES.values())


@pytest.mark.parametrize("module", [rules, option_rules])
def test_no_rule_lies_where_nobody_asks_it(module):
    """A rule yields, of one launch."""
    own = [one for one in vars(module).values() if isgeneratorfunction(one) and one.__module__ == module.__name__]
    assert {one for one in own if len(signature(one).parameters) == 1} <= {*module.RULES}


def test_a_setting_that_rarely_means_what_it_says_gives_one_warning():
    """FB-72: a GSPO clip of 0.2 never clips. FB-115: the product of many ratios. Coefficients beside a rescaled loss."""
    assert [len(warnings_at(settings)) for settings in WARNED] == [1] * len(WARNED)
    assert [warnings_at(settings) for settings in NOT_WARNED] == [[]] * len(NOT_WARNED)
