"""JSON is plain values, or one named error."""

from __future__ import annotations

import pytest

from megatron_rl.files.bounds import check_tree
from megatron_rl.files.json_values import parse_json


def test_an_object_of_many_keys_names_the_one_that_stands_twice():
    """300,000 keys: a search that counts each among all others takes hours."""
    keys = ",".join(f'"{number}":0' for number in range(300_000))
    with pytest.raises(ValueError, match="the key 'z' stands twice in one object"):
        parse_json(f'{{{keys},"z":1,"z":2}}')


def test_a_tree_is_bounded_by_what_it_would_print():
    shared = [1, 2]
    check_tree([shared, shared], most_values=6)
    with pytest.raises(ValueError, match="more than 5 values"):
        check_tree([shared, shared], most_values=5)
    with pytest.raises(ValueError, match="more than 2 levels"):
        check_tree({"a": ([],)}, most_values=99, most_depth=2)
