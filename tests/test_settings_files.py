"""Trees of settings from files: inheritance, overrides, references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.settings import UNKNOWN, read_overrides
from megatron_rl.hosts.settings_files import inherited, merge, nested, resolved, with_values

FILES: dict[str, Any] = {
    "runs/run.yaml": {"defaults": ["../a.yaml", "b.yaml"], "loss": {"clip": "2e-1"}},
    "a.yaml": {"defaults": "root.yaml", "loss": {"name": "a", "low": 0.2}, "kl": {"type": "k1", "clamp": 5, "of": {"x": 1}}},
    "root.yaml": {"loss": {"name": "root"}, "seed": 1},
    "runs/b.yaml": {"loss": {"name": "b"}, "kl": {"_override_": True, "type": "k3"}},
    "ring.yaml": {"defaults": "runs/../other.yaml"},
    "other.yaml": {"defaults": ["ring.yaml"]},
    "own.yaml": {"defaults": "own.yaml"},
    "number.yaml": {"defaults": 5},
    "absent.yaml": {"defaults": "no.yaml"},
}


def read_file(path: Path) -> dict[str, Any]:
    name = str(path.resolve().relative_to(Path.cwd()))
    if name not in FILES:
        raise ConfigError(f"{name} is no file here")
    return FILES[name]


def test_a_file_wins_over_its_parents_and_a_later_parent_over_an_earlier_one():
    found = inherited(Path("runs/run.yaml"), read_file)
    assert found == {"loss": {"name": "b", "low": 0.2, "clip": "2e-1"}, "kl": {"type": "k3"}, "seed": 1}
    assert FILES["runs/b.yaml"]["kl"] == {"_override_": True, "type": "k3"}, "what a file said is not changed"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("ring.yaml", "other.yaml: defaults: runs/../ring.yaml inherits this file"),
        ("own.yaml", "own.yaml: defaults: own.yaml inherits this file"),
        ("number.yaml", "number.yaml: defaults: 5 is no path, and no list of paths"),
        ("absent.yaml", "no.yaml is no file here"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(path, message):
    with pytest.raises(ConfigError, match=message):
        inherited(Path(path), read_file)


def test_overrides_are_merged_into_the_tree():
    tree: dict[str, Any] = {"loss": {"name": "a", "kl": {"type": "k1", "clamp": 5}}, "policy": None}
    merge(tree, nested({"loss.kl.type": "k2", "loss": {"name": "b"}, "policy.size": 8, "loss.low.deep": 1}))
    assert tree == {"loss": {"name": "b", "kl": {"type": "k2", "clamp": 5}, "low": {"deep": 1}}, "policy": {"size": 8}}


def test_references_are_those_of_the_whole_tree_and_a_ring_is_not_known():
    tree = {"a": {"b": "${c.d}", "size": "3e-4"}, "c": {"d": "${e}"}, "e": [1, "${a.size}"], "of": "x${e}", "not": "${no.where}"}
    tree |= {"ring": "${gnir}", "gnir": "${ring}", "kind": "true"}
    found = resolved(with_values(tree))
    assert found["a"] == {"b": [1, 3e-4], "size": 3e-4} and found["kind"] is True
    assert [found[name] for name in ("of", "not", "ring")] == [UNKNOWN] * 3
    assert resolved({"typed": "1"}) == {"typed": "1"}, "a text of the line has been read"


def test_a_setting_that_the_line_takes_away_is_none_of_its_settings():
    words = ["a.b=1", "~a.b", "~a.c=7", "+a.d=2", "a.e='0.5'", "a.f=1e-6", "--flag=3", "a.g=", "a.h=\u00fc"]
    assert read_overrides(words) == {"a.d": 2, "a.e": "0.5", "a.f": 1e-6, "a.g": "", "a.h": "\u00fc"}
