"""The tables of docs/hosts/index.md: each name of the hub at each door works, or has a stated reason."""

from __future__ import annotations

import door_table
import pytest
import torch
from door_table import ANY, DOORS, REASONS
from markdown_pages import text_of
from pages import renewed
from test_pages import OF_DOORS, WRITE
from test_validation import only_built_in_names  # noqa: F401  (what other tests register would be refused too)

from megatron_rl.hosts import DOOR_NAMES, HOST_NAMES
from megatron_rl.loss_hub import register_loss_aggregation

NAMES = [(kind, name) for kind, names in door_table.settings().items() for name in names]


def test_the_page_is_up_to_date():
    assert text_of(OF_DOORS) == renewed(OF_DOORS, text_of(OF_DOORS)), f"{WRITE} {OF_DOORS}"


def test_each_host_has_a_column():
    assert sorted(DOORS) == sorted((*HOST_NAMES, *DOOR_NAMES)) == sorted(door_table.TITLES)


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_each_name_works_at_each_door_or_has_a_stated_reason(kind, name):
    for door in DOORS:
        if door_table.refused(door, kind, name):
            assert len(door_table.reason_of(door, kind, name).split()) <= 3


def test_each_stated_reason_is_of_something_that_is_refused():
    refused = {
        (door, kind, name)
        for kind, names in door_table.settings().items()
        for name in names
        for door in DOORS
        if door_table.refused(door, kind, name)
    }
    for (door, kind), reasons in REASONS.items():
        names = {name for found_door, found_kind, name in refused if (found_door, found_kind) == (door, kind)}
        assert names and set(reasons) - {ANY} <= names, (door, kind)


def test_a_loss_that_a_door_lacks_without_a_reason_is_named(monkeypatch):
    monkeypatch.delitem(REASONS["nemo_rl", "loss"], "dro")
    with pytest.raises(ValueError, match="NeMo-RL refuses the loss dro: state why in REASONS"):
        list(door_table.lines("loss"))


def test_a_fifth_aggregation_has_its_row_on_the_page(monkeypatch):
    @register_loss_aggregation("of_samples", formula="1 / N")
    def of_samples(token_counts, totals, *, prompt_token_counts, divisor):
        return torch.full_like(token_counts, 1 / totals.num_samples)

    closed = ("skyrl", "prime_rl")
    for door in closed:
        stated = REASONS.get((door, "aggregation"), {})
        monkeypatch.setitem(REASONS, (door, "aggregation"), stated | {"of_samples": "no reduction"})
    (row,) = [line for line in door_table.lines("aggregation") if line.startswith("| `of_samples` |")]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["no reduction" if door in closed else "yes" for door in DOORS]
    assert door_table.refused("skyrl", "loss", "gspo") == [], "its own row says that SkyRL lacks it"
