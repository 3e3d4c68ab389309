"""Reads YAML of settings: plain values alone, bounded in size, depth and aliases. pyyaml parses."""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron_rl.errors import ConfigError, printable
from megatron_rl.files.bounds import MOST_DEPTH, check_tree

# pyyaml takes seconds for a megabyte; a file of a launch has some thousand bytes.
LARGEST_YAML = 2**18
MOST_ALIASES, MOST_MERGED, MOST_VALUES, LONGEST_NUMBER = 256, 10_000, 100_000, 400


def parse_yaml(text: str, name: object) -> Any:
    """The value of one document. ConfigError, which names the file, for all that is no plain value or beyond a bound."""
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            f"{name} is read with pyyaml, which is not installed: pip install '/path/to/megatron_rl[doctor]'"
        ) from error
    if len(text) > LARGEST_YAML:
        raise ConfigError(f"{name} has {len(text)} characters: at most {LARGEST_YAML} are read")
    try:
        value = yaml.load(text, _loader())  # of SafeLoader: it makes plain values alone
        check_tree(value, most_values=MOST_VALUES)
    # What the constructors raise for a date that is none, a tag on a value of another kind, or a depth beyond Python's.
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"{name} is no YAML: {printable(' '.join(str(error).split()))[:400]}") from error
    return value


@cache
def _loader() -> Any:
    from yaml import SafeLoader, ScalarNode
    from yaml.events import AliasEvent

    class Loader(SafeLoader):
        """Ends where a small text would become a large value: aliases of aliases, merges of merges, numbers of many digits."""

        depth = aliases = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.aliases += self.check_event(AliasEvent)
            if self.aliases > MOST_ALIASES or self.depth > MOST_DEPTH:
                raise ValueError(f"more than {MOST_ALIASES} aliases, or nested too deeply: more than {MOST_DEPTH} levels")
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            if isinstance(node, ScalarNode) and not node.tag.endswith(":str") and len(node.value) > LONGEST_NUMBER:
                raise ValueError(f"a value of {len(node.value)} characters that is no text")
            return node

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            if len(node.value) > MOST_MERGED:
                raise ValueError(f"a mapping of more than {MOST_MERGED} keys")

    return Loader
