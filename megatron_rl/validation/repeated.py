"""A setting that one line gives several times. Parsers keep the last value and say nothing; this is what is said for every host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

LONGEST_VALUE = 200


def repeated(given: Iterable[tuple[str, str]], is_read: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """(name, what is said of it), for names that are read and have more than one value."""
    values: dict[str, list[str]] = {}
    for name, value in given:
        values.setdefault(name, []).append(value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]}...")
    for name, each in values.items():
        if len({*each}) > 1 and is_read(name):
            others = "the first one has" if len(each) == 2 else "the others have"
            yield name, f"given {len(each)} times ({', '.join(each)}): the last one counts, {others} no effect"


def flags_with_values(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The flags before a lone `--`, each with the words up to the next one."""
    own = words[: words.index("--")] if "--" in words else words
    places = [at for at, word in enumerate(own) if word.startswith("--")]
    for start, end in pairwise([*places, len(own)]):
        flag, equals, value = own[start].partition("=")
        yield flag, " ".join([*([value] if equals else []), *own[start + 1 : end]])
