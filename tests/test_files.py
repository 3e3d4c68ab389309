"""JSON is plain values, or one named error."""

from __future__ import annotations

import pytest

from megatron_rl.files.json_values import parse_json


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
