"""How a launch cuts a step into ranks and micro-batches, as far as its line says it: for a step that a command is given."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.closed_words import refused
from megatron_rl.hosts.dealing import Dealing
from megatron_rl.hosts.settings import ABSENT, Settings, Size, StepSizes
from megatron_rl.validation.checks import Row

# Kinds of parallelism whose ranks train one sample together, as Megatron names them.
MODEL_KINDS = ("tensor_model", "pipeline_model", "context")


def whole_number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeNames:
    """The settings that say it, by their whole names.

    micro_batch: the samples of a rank in a micro-batch. num_microbatches: of a rank in a step. ranks: their product is all ranks.
    shared: sizes of groups of ranks that train one sample together. by_tokens: where one is set, micro-batches have at
    most the tokens of its value here, times `of_budget`: a budget of one rank, of which so many share a sample's tokens. older:
    another name of a size, which counts where it is above 1. defaults: the host's own. count: what a value of them counts; None:
    not known. dealing: how samples are dealt by length; of_dealing: what it reads."""

    micro_batch: str = ""
    num_microbatches: str = ""
    ranks: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    by_tokens: Mapping[str, str] = field(default_factory=dict)
    of_budget: tuple[str, ...] = ()
    older: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)
    count: Callable[[Any], int | None] = whole_number
    dealing: Callable[[Callable[[str], Any]], Dealing | None] = lambda value_of: None
    of_dealing: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """All settings that are read."""
        by_tokens = (*self.by_tokens, *self.by_tokens.values(), *self.of_budget, *self.older.values(), *self.of_dealing)
        return frozenset({self.micro_batch, self.num_microbatches, *self.ranks, *self.shared, *by_tokens})

    def read(self, value_of: Callable[[str], Any], asked: StepSizes) -> StepSizes:
        """value_of: a number, a Size, or ABSENT. asked: what the command's own flags say, which wins."""
        switch = next((name for name in self.by_tokens if value_of(name) not in (ABSENT, None, False, 0, -1)), None)
        of_line = StepSizes(
            data=self._data(value_of),
            unread=tuple(name for name, size in self._given((*self.ranks, *self.shared), value_of).items() if size is None),
            micro_batch=None if switch else self._size(self.micro_batch, value_of),
            num_microbatches=None if switch else self._size(self.num_microbatches, value_of),
            tokens=None if switch is None else self._budget(self.by_tokens[switch], value_of) or Size(0, switch),
            dealing=self.dealing(value_of),
        )
        if asked.micro_batch or asked.num_microbatches:  # one says what the other is
            of_line = of_line._replace(micro_batch=asked.micro_batch, num_microbatches=asked.num_microbatches, tokens=None)
        return of_line if asked.data is None else of_line._replace(data=asked.data, unread=())

    def _size(self, name: str, value_of: Callable[[str], Any]) -> Size | None:
        value = value_of(name) if name else None
        if (older := self.older.get(name)) is not None and value_of(older) not in (ABSENT, None):
            if value_of(older) != 1 or value in (ABSENT, None):
                return self._size(older, value_of)
        if isinstance(value, Size):
            return value
        if value is ABSENT and name in self.defaults:
            return Size(self.defaults[name], f"{name} by default")
        number = None if value is ABSENT else self.count(value)
        return None if number is None else Size(number, name)

    def _budget(self, name: str, value_of: Callable[[str], Any]) -> Size | None:
        """None: it is not known, or by how many ranks it is shared."""
        budget, shared = self._size(name, value_of), [*self._given(self.of_budget, value_of).values()]
        if budget is None or None in shared:
            return None
        sizes = [budget, *(size for size in shared if size is not None and size.value > 1)]
        return Size(math.prod(size.value for size in sizes), " x ".join(size.source for size in sizes))

    def _given(self, names: Sequence[str], value_of: Callable[[str], Any]) -> dict[str, Size | None]:
        """Of the names that are set; None: its size is not known."""
        both = {name: (value_of(name), value_of(self.older.get(name, name))) for name in names}
        is_set = {name: any(value not in (ABSENT, None) for value in values) for name, values in both.items()}
        return {name: self._size(name, value_of) for name in names if is_set[name]}

    def _data(self, value_of: Callable[[str], Any]) -> Size | None:
        """Known where one of `ranks` is given, and no given one is unknown."""
        found = self._groups(value_of)
        if found is None or found[0].value % found[1].value:
            return None
        ranks, shared = found
        return Size(ranks.value // shared.value, " / ".join(filter(None, [ranks.source, shared.source])))

    def misfit(self, value_of: Callable[[str], Any]) -> str | None:
        """What is said of ranks that the groups of them do not divide."""
        found = self._groups(value_of)
        if found is None or found[0].value % found[1].value == 0:
            return None
        ranks, shared = found
        words = shared.source.replace(" / ", " x ")
        return f"{ranks.value} ranks of {ranks.source} are no multiple of {shared.value} of {words}"

    def _groups(self, value_of: Callable[[str], Any]) -> tuple[Size, Size] | None:
        """(all ranks, those that train one sample together)."""
        sizes = self._given((*self.ranks, *self.shared), value_of)
        if None in sizes.values() or not any(name in sizes for name in self.ranks):
            return None
        numbers = {name: size.value for name, size in sizes.items() if size is not None} | {
            name: self.defaults.get(name, 1) for name in self.ranks if name not in sizes
        }
        ranks, shared = (math.prod(numbers.get(name, 1) for name in names) for names in (self.ranks, self.shared))
        sources = {name: size.source for name, size in sizes.items() if size is not None}
        sources |= {name: f"{name} by default" for name in self.ranks if name not in sources and numbers[name] > 1}
        of_ranks = " x ".join(sources[name] for name in self.ranks if name in sources)
        groups = [size.source for name, size in sizes.items() if size is not None and name in self.shared and size.value > 1]
        return Size(ranks, of_ranks), Size(shared, " / ".join(groups))


def whole_steps(
    title: str,
    settings: Settings,
    of_batch: Sequence[str],
    of_step: Sequence[str],
    defaults: Mapping[str, int],
    *,
    num_data: int | None = 1,
    drops: bool = False,
    or_else: str = "",
) -> Iterator[Row]:
    """Of a trainer that refuses a batch without whole steps, or drops its rest. of_batch, of_step: settings whose products they
    are, the last one of a step to be changed. defaults: the trainer's. num_data: ranks that multiply a step; None: not known.
    or_else: what else keeps the rest."""
    values = {name: settings.value_of(name) for name in (*of_batch, *of_step)}
    if settings.knows_defaults:
        values = {name: defaults.get(name) if value is ABSENT else value for name, value in values.items()}
    numbers = {name: number for name, value in values.items() if (number := whole_number(value)) is not None}
    if not num_data or len(numbers) < len(values):
        return
    batch, size = (math.prod(numbers[name] for name in names) for names in (of_batch, of_step))
    size, last, first = size * num_data, of_step[-1], of_batch[0]
    if batch % size == 0:
        return

    batch_words = product_in_words({name: numbers[name] for name in of_batch}, batch)
    step = product_in_words({name: numbers[name] for name in of_step}, size, f"{num_data} data-parallel ranks" * (num_data > 1))
    rest = size // numbers[last]
    nearest = next((one for one in range(min(batch, size) // rest, 0, -1) if batch % (one * rest) == 0), None)
    remedy = f"set {last}={nearest}"
    if nearest is None:
        least = rest // math.gcd(rest, batch // numbers[first])
        remedy = f"set {first}={-(-numbers[first] // least) * least} and {last}=1"
    if drops and batch > size:
        text = f"{title} trains {batch - batch % size} of {batch_words} and drops the last {batch % size}"
        yield Row("mini-batch", f"{text}: {step} does not divide it; {remedy}{or_else}", is_note=True)
    else:
        yield refused(title, "mini-batch", f"{step} does not divide {batch_words}; {remedy}")


def product_in_words(numbers: Mapping[str, int], product: int, other: str = "") -> str:
    """a=2 x b=3 = 6 samples, or one of them alone. other: what multiplies it too; empty: nothing."""
    words = [*(f"{name}={number}" for name, number in numbers.items()), *filter(None, [other])]
    return f"{' x '.join(words)} = {product} samples" if len(words) > 1 else words[0]


# The name here of what a launcher is told. Not a setting.
PROCESSES = "num_processes"
# Flags of launchers that start as many processes: torchrun, accelerate, deepspeed. Those of one line are multiplied.
LAUNCHERS = (("--num-processes",), ("--nproc-per-node", "--nnodes"), ("--num-gpus", "--num-nodes"))
# Launchers that count GPUs where no flag says a number.
COUNTING = ("accelerate", "deepspeed")
# accelerate's own files.
CONFIG_FILES = ("--config-file", "--accelerate-config")
# A flag that is as similar is a slip. --num-cpus is less similar to --num-gpus.
CLOSEST_FLAG = 0.92
_ASSIGNMENT = re.compile(r"\w+=")


def launched_processes(words: Sequence[str], read_file: Callable[[Path], Mapping[str, Any]] | None = None) -> Size | None:
    """What a launcher is told, by its flags or by accelerate's file. words: without those of the script. read_file: raises
    ConfigError where there is no file."""
    given = dict(_flags(words))
    for names in LAUNCHERS:
        texts = [given[name][1] for name in names if name in given]
        if names[0] in given and all(text.isdecimal() for text in texts):
            return Size(math.prod(map(int, texts)), " x ".join(given[name][0] for name in names if name in given))
    path = next((Path(given[name][1]) for name in CONFIG_FILES if name in given), None)
    if path is None or read_file is None:
        return None
    try:
        number = whole_number(read_file(path).get("num_processes"))
    except ConfigError:
        return None
    return None if number is None else Size(number, f"num_processes of {path}")


def has_other_number(words: Sequence[str]) -> bool:
    """Whether the processes of such words follow from something else, where launched_processes has none: a file of the launcher's
    own, the GPUs of the machine, or a word that is no number."""
    is_named = any(name in dict(_flags(words)) for names in LAUNCHERS for name in names[:1])
    return is_named or any(Path(word).name.split(".")[0] in COUNTING for word in words)


def launcher_problems(words: Sequence[str], read_file: Callable[[Path], Mapping[str, Any]]) -> Iterator[Row]:
    """A misspelt flag of a size, and a file of accelerate that cannot be read. words: without those of the script."""
    known = [*CONFIG_FILES, *(name for names in LAUNCHERS for name in names)]
    for name, (typed, value) in _flags(words):
        close = get_close_matches(name, known, 1, CLOSEST_FLAG)
        if name not in known and close:
            meant = close[0].replace("-", "_").replace("__", "--", 1) if "_" in typed else close[0]
            yield Row(typed, f"no launcher takes {typed}: did you mean {meant}?", is_wrong=True)
        elif name in CONFIG_FILES and not value.startswith("$"):
            try:
                read_file(Path(value))
            except ConfigError as error:
                yield Row(typed, str(error), is_wrong=True)


def is_python_alone(words: Sequence[str]) -> bool:
    """Whether words before a script start one process of it. What a scheduler starts has a word of its own."""
    program, *options = [word for word in words if not _ASSIGNMENT.match(word) and word not in ("env", "uv", "run")] or [""]
    is_several = any(word.startswith("WORLD_SIZE=") for word in words)
    return Path(program).name.startswith("python") and not is_several and all(re.fullmatch("-[^m]", word) for word in options)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """--a_b=3 and --a-b 3 as (--a-b, (as it is typed, its value))."""
    for word, behind in pairwise([*words, ""]):
        name, is_joined, value = word.partition("=")
        if name.startswith("--"):
            yield name.replace("_", "-"), (name, value if is_joined else behind)


# The samples of a step


@dataclass(frozen=True, slots=True)
class Cut:
    """parts: the samples of each micro-batch of each rank: runs of the step, in its order. words: whose sizes they are. other:
    what differs from a step of the line; empty where nothing does."""

    parts: list[list[list[int]]]
    words: str
    other: str


def cut(lengths: Sequence[int], sizes: StepSizes) -> Cut:
    """A step on the line's ranks, in micro-batches of its size: one of fewer samples than the line's has fewer of them. One that
    leaves a rank of the line empty is taken as one rank's. lengths: tokens of each response."""
    num_samples, data, size, count = len(lengths), sizes.data, sizes.micro_batch, sizes.num_microbatches
    of_line = size.value * count.value * (data.value if data else 1) if size and count else None
    other = f"; a step of the line has {of_line} samples" if of_line not in (None, num_samples) else ""
    of_ranks = f"{_said_data(data, sizes)}, "
    if data is not None and data.value > num_samples:
        few = f"{num_samples} of the {data.value} or more samples that {data.value} data-parallel ranks of {data.source} need"
        other, of_ranks, data = f"; judged as on 1 rank: the step has {few}{other}", "", None
    num_ranks = data.value if data else 1
    share = -(-num_samples // num_ranks)
    if sizes.tokens is not None and sizes.tokens.value:
        budget, order = sizes.tokens.value, ""
        ranks = [sum(of_rank, []) for of_rank in microbatches(num_samples, num_ranks, share)]
        if sizes.dealing is not None and sizes.dealing.work is not None:
            parts = sizes.dealing.parts(lengths, ranks, budget)
        else:
            parts = [list(_filled(rank, lengths, budget)) for rank in ranks]
            order = "" if sizes.dealing is None else f", samples in the order given; {sizes.dealing.said}"
        words = f"micro-batches of about {budget} tokens of {sizes.tokens.source}, prompt tokens not counted"
        return Cut(parts, f"{of_ranks}{words}{order}", other)
    if sizes.tokens is not None:
        words, length = f"1 sample a micro-batch, for the tokens that {sizes.tokens.source} gives them are not known", 1
    elif count is not None and size is None:
        plural = "es" if count.value > 1 else ""
        words, length = f"{count.value} micro-batch{plural} a rank of {count.source}", max(1, -(-share // count.value))
    else:
        words, length = _said("micro-batch size", size), size.value if size else 1
    parts = microbatches(num_samples, num_ranks, length)
    if of_line and count and num_samples < of_line and (number := max(map(len, parts))) < count.value:
        other += f", in {count.value} micro-batches a rank, and this one has {number}"
    if len({len(part) for of_rank in parts for part in of_rank}) > 1:
        last = ", ".join(f"{len(of_rank[-1])} on rank {rank}" for rank, of_rank in enumerate(parts) if len(of_rank[-1]) < length)
        other += f"; {length} samples a micro-batch do not divide it: the last one has {last}"
    return Cut(parts, f"{of_ranks}{words}", other)


def _filled(samples: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Micro-batches in the order of the step, each as full as it can be."""
    part: list[int] = []
    for sample in samples:
        if part and sum(lengths[one] for one in part) + lengths[sample] > budget:
            yield part
            part = []
        part.append(sample)
    if part:
        yield part


def _said(what: str, size: Size | None) -> str:
    return f"{what} 1 by default" if size is None else f"{what} {size.value} of {size.source}"


def _said_data(data: Size | None, sizes: StepSizes) -> str:
    return "data-parallel size taken as 1" if sizes.unread else _said("data-parallel size", data)


def taken_as_one(sizes: StepSizes) -> str:
    """Why the number of ranks is not known; empty where it is."""
    if sizes.unread == (PROCESSES,):
        return "data-parallel size not known here, and taken as 1: give --num_processes, or --data-parallel-size before --"
    verb = "was" if len(sizes.unread) == 1 else "were"
    why = f"{', '.join(sizes.unread)} {verb} not read; give --data-parallel-size before --"
    return f"data-parallel size not known, and taken as 1: {why}" if sizes.unread else ""


def microbatches(num_samples: int, data_parallel_size: int, micro_batch_size: int) -> list[list[list[int]]]:
    share = -(-num_samples // data_parallel_size)
    ranks = [list(range(num_samples))[rank * share : (rank + 1) * share] for rank in range(data_parallel_size)]
    return [[row[place : place + micro_batch_size] for place in range(0, len(row), micro_batch_size)] for row in ranks]
