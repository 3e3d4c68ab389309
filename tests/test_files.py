"""Files of settings and JSON are plain values, or one named error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.files.json_values import parse_json
from megatron_rl.files.settings_file import read_settings_file


def test_an_object_of_many_keys_names_the_one_that_stands_twice():
    """300,000 keys: a search that counts each among all others takes hours."""
    keys = ",".join(f'"{number}":0' for number in range(300_000))
    with pytest.raises(ValueError, match="the key 'z' stands twice in one object"):
        parse_json(f'{{{keys},"z":1,"z":2}}')


def test_levels_of_json_are_bounded():
    """repr and copy of a thousand levels raise a RecursionError, which is no named error."""
    lists, both = "[" * 64 + "1" + "]" * 64, '{"a": [' * 32 + "]}" * 32
    assert parse_json(lists) is not None and parse_json(both) is not None
    for text in (f"[1, {lists}]", f'{{"b": 2, "a": {both}}}', "[" * 9000 + "]" * 9000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(text)


# Settings: pyyaml raises errors of ten kinds

HOSTILE = {
    "a tag of Python": ("c.yaml", "a: !!python/object/apply:os.mkdir [was_run]", "could not determine a constructor"),
    "a name of Python": ("c.yaml", "a: !!python/name:os.system", "could not determine a constructor"),
    "a date that is none": ("c.yaml", "a: 2020-13-45", "month must be in 1..12"),
    "no number": ("c.yaml", "a: !!int x", "invalid literal for int"),
    "an alias, which may make a small text a large value": ("c.yaml", "a: &a [x]\nb: [*a, *a]", "an alias: write the value"),
    "deep": ("c.yaml", "a: " + "[" * 9000 + "]" * 9000, "recursion"),
    "a list as a key": ("c.yaml", "[1, 2]: 1", "found unhashable key"),
    "a long file": ("c.yaml", "a" * 300_000, "more than 262144 bytes"),
    "an escape": ("c.yaml", "a: \x1b[31m", "special characters are not allowed"),
    "a list": ("c.yaml", "[1, 2]", "holds list: it must be key: value lines"),
    "no file": ("folder/c.yaml", None, "No such file"),
    "no TOML": ("c.toml", "a = ", "Invalid value"),
    "a key twice": ("c.json", '{"a": 1, "a": 2}', "the key 'a' stands twice"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_of_settings_is_a_named_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, text, message = HOSTILE[name]
    if text is not None:
        Path(path).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"^{path} ") as refused:
        read_settings_file(Path(path))
    assert re.search(message, str(refused.value)) and str(refused.value).isprintable(), refused.value
    assert not Path("was_run").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "a: 2.5e-1\nb: [x, 1]\nc: null\n"),
        ("c.json", '{"a": 0.25, "b": ["x", 1], "c": null}'),
        ("c.toml", 'a = 0.25\nb = ["x", 1]\n'),
    ],
)
def test_settings_are_plain_values_by_name(name, text, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = read_settings_file(tmp_path / name)
    assert (found["a"], found["b"], found.get("c")) == (0.25, ["x", 1], None)
