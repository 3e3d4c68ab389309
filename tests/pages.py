"""Writes every generated page and block of docs/ anew, and says which there are; it must never change a sentence around them.

    python tests/pages.py [docs/explain.md ...]      # all pages where none is named; from .venv, a minute

Three kinds of text are generated, and nothing of them is typed: a page of WHOLE_PAGES; what follows the command in a block that
begins with `$ command`; and the block after a comment, where no single command prints it:

    <!-- output of: what prints it -->
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from unittest import mock

import refused
from helpers import names_forgotten
from test_doctor import SICK_MACHINE

from megatron_rl.__main__ import main as megatron_rl
from megatron_rl.arguments import default_text, field_meanings, meanings_of_parameter, metavar_of
from megatron_rl.commands import doctor
from megatron_rl.config import CorrectionLevel, LaunchMethod, flag_fields
from megatron_rl.declare import POLICY_LOSSES, declared_parameters, get_policy_loss
from megatron_rl.losses.corrections import CORRECTIONS
from megatron_rl.testing.ranks import run_ranks
from megatron_rl.validation import flag_of, methods_of_flags

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(?:<!-- (?P<comment>.*?) -->\n+)?```(?P<language>\w*)\n(?P<text>(?:(?!```).*\n)*)```$", re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
SPAN = re.compile(r"(?<!`)`(?!`)([^`]+)`(?!`)")
LINK = re.compile(r"\]\(([^()\s]+)\)")
# A page whose Python blocks share one namespace: each goes on where the one before has ended. of_block runs them.
NOTEBOOK = "docs/step_by_hand.md"


@dataclass(frozen=True)
class Fence:
    page: str
    line: int
    comment: str  # of the line above, "" without one
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def all_pages() -> list[str]:
    """From the root of the repository."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def fences(page: str) -> Iterator[Fence]:
    text = text_of(page)
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        yield Fence(page, line, found["comment"] or "", found["language"], found["text"])


def prose(page: str) -> str:
    """Without fences and comments."""
    return COMMENT.sub("", FENCE.sub("", text_of(page)))


def spans(page: str) -> list[str]:
    """`code` within the prose; a line break within it is a space."""
    return [" ".join(span.split()) for span in SPAN.findall(prose(page))]


def links(page: str) -> list[str]:
    """Targets of links and images."""
    return LINK.findall(SPAN.sub("", prose(page)))


# What commands print

# Pages show ranks on a CPU, whatever machine fills them.
CPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))}


def printed(command: str) -> str:
    """What `megatron-rl ...` says on both streams, in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.redirect_stderr(shown):
        megatron_rl(shlex.split(command)[1:])
    return shown.getvalue()


def of_block(command: str) -> str:
    """`block N`: what the N-th Python block of the notebook prints, after those above it."""
    return printed_by_blocks()[int(command.split()[-1]) - 1]


@functools.cache
def printed_by_blocks() -> list[str]:
    namespace: dict[str, object] = {"__name__": "__main__"}
    with names_forgotten():
        codes = [compile(fence.text, str(fence), "exec") for fence in fences(NOTEBOOK) if fence.language == "python"]
        return [printed_by(code, namespace) for code in codes]


def printed_by(code: CodeType, namespace: dict[str, object]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        exec(code, namespace)
    return shown.getvalue()


def of_the_chain(command: str) -> str:
    """Without the table of samples before it and what is left out after it."""
    lines = printed(command).splitlines()
    first = next(place for place, line in enumerate(lines) if ": ranks " in line)
    last = next(place for place, line in enumerate(lines) if line.startswith("left out"))
    return "\n".join(["...", *lines[first:last]]).rstrip() + "\n...\n"


def of_a_sick_machine(command: str) -> str:
    with mock.patch.object(doctor, "collect_facts", lambda: SICK_MACHINE):
        return printed("megatron-rl doctor")


def of_own_loop(command: str) -> str:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *shlex.split(command)[1:]]
    return subprocess.run(words, check=True, cwd=ROOT, env=CPU, capture_output=True, text=True).stdout


def of_a_step_divided_by_cp(command: str) -> str:
    from test_selftest import failing_rows

    return run_ranks(failing_rows, 2, use_megatron=True)[0] + "\n"


def of_the_examples_of_testing(command: str) -> str:
    """What pytest says of the one failure among the tests that docs/testing.md shows."""
    code = "\n\n".join([fence.text for fence in fences("docs/testing.md") if fence.language == "python"])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_page.py").write_text(code, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "--color=no", "-p", "pytest_megatron_rl", "-p", "no:hypothesispytest", folder]
        said = subprocess.run(command, check=False, cwd=folder, env=CPU, capture_output=True, text=True).stdout
    if "1 failed, 2 passed" not in said:
        raise RuntimeError(f"docs/testing.md says that one of its three tests fails: {said}")
    lines = said.splitlines()
    first = next(index for index, line in enumerate(lines) if "the gradient depends on the layout:" in line)
    return "\n".join(lines[first : first + 2]) + "\n"


# The generated parts

BLOCK = re.compile(
    r"^(?:<!-- output of: (?P<described>.*?) -->\n+```\n|```console\n\$ (?P<typed>(?:.*\\\n)*.*)\n)(?P<text>(?:(?!```).*\n)*)```$",
    re.MULTILINE,
)
# What differs from machine to machine, and its stand-in: versions, seconds, roundings.
MACHINE = (
    (re.compile(r"\b\d+\.\d+\.\d+(\+\w+)?(\.\w+)?\b"), "VERSION"),
    (re.compile(r"\b\d+\.\d s\b"), "SECONDS"),
    (re.compile(r" +\de-\d\d"), " ERROR"),
)


@dataclass(frozen=True)
class Producer:
    """output(command) is the text of a block. A block that a machine has a part in is left alone where all else is equal."""

    output: Callable[[str], str]
    is_of_a_machine: bool = False
    is_slow: bool = False
    needs: tuple[str, ...] = ()  # packages, beside torch


def with_tables(text: str, tables: dict[str, Iterable[str]]) -> str:
    """The text with new lines for the first table after each key."""
    for head, lines in tables.items():
        before, _, behind = text.partition(head)
        words, _, rest = re.split(r"((?:^\|.*\n)+)", behind, maxsplit=1, flags=re.MULTILINE)
        text = before + head + words + "".join(lines) + rest
    return text


def of_losses() -> str:
    """The page with its table as the docstrings of the losses have it."""
    functions = {name: get_policy_loss(name).function for name in POLICY_LOSSES.names()}
    rows = {
        f"[`{name}`](../{function.__module__.replace('.', '/')}.py)": guide_of(name, str(inspect.getdoc(function)))
        for name, function in functions.items()
    }
    return with_guide("docs/losses.md", "losses", "loss | what it does", rows)


def of_corrections() -> str:
    """The page with its table as the docstrings of the corrections have it."""
    kinds = [CORRECTIONS[name] for name in CORRECTIONS.names()]
    rows = {f"`{kind.name}`": guide_of(kind.name, str(inspect.getdoc(kind.function))) for kind in kinds}
    text = with_guide("docs/corrections.md", "corrections", "correction | the factor of a token", rows)
    return with_tables(text, {"<!-- table: bounds -->": rows_of_bounds()})


def rows_of_bounds() -> list[str]:
    """Of each correction, what is taken and what is required at each of its levels."""
    lines = [f"| kind | {' | '.join(CorrectionLevel)} |\n|---|{'---|' * len(CorrectionLevel)}\n"]
    for kind in map(CORRECTIONS.find, CORRECTIONS.names()):
        cells = ["refused" if level not in kind.bounds else bounds_in_words(*kind.bounds[level]) for level in CorrectionLevel]
        lines.append(f"| `{kind.name}` | {' | '.join(cells)} |\n")
    return lines


def bounds_in_words(low: float | None, high: float | None) -> str:
    if high is None:
        return "both are required" if low is None else f"high is required, low is {low:g}"
    return f"[{low:g}, {high:g}]"


def with_guide(page: str, table: str, head: str, rows: dict[str, tuple[str, str, str]]) -> str:
    lines = [f"| {head} | source | use it when |\n|---|---|---|---|\n"]
    lines += [f"| {name} | {' | '.join(cells)} |\n" for name, cells in rows.items()]
    return with_tables((ROOT / page).read_text(encoding="utf-8"), {f"<!-- table: {table} -->": lines})


def guide_of(name: str, docstring: str) -> tuple[str, str, str]:
    """(what it does, source, when to use it): a docstring's first sentence, first source, and sentence `Use it when ...`."""
    text = re.sub(r"\s+", " ", docstring)
    what, _, rest = text.partition(". ")
    when = re.search(r"Use it when (.+?)\.(?: |$)", text)
    source = re.search(
        r"arXiv:(?P<paper>\d+\.\d+)|^(?P<title>[^,]+), (?P<url>https://[^ ]+[\w/])|(?P<book>Williams), .*?(?P<year>\d{4})", rest
    )
    if when is None or source is None:
        raise ValueError(
            f"the docstring of {name} needs a source, arXiv:2402.03300 or a line `Title, https://...` whose title has no comma, "
            "and a sentence `Use it when ... .`: a page has them"
        )
    if source["paper"]:
        link = f"[{source['paper']}](https://arxiv.org/abs/{source['paper']})"
    else:
        link = f"[{source['title']}]({source['url']})" if source["url"] else f"{source['book']}, {source['year']}"
    return what.removesuffix("."), link, when[1]


def arguments_page() -> str:
    """Every flag, from PolicyLossConfig, its methods and the parameters of losses."""
    meanings, methods_of_flag = field_meanings(), methods_of_flags()
    lines = [
        "# Flags",
        "",
        "One argparse group, `megatron_rl`; `megatron_rl.arguments.add_megatron_rl_args(parser)` adds it. A flag that",
        "is not given takes its default. In a YAML file that a host merges, a key is the flag's name with underscores",
        "and without the dashes in front. A flag that is set on a launch method where it has no effect is an error.",
        "",
        "| flag | value | default | methods | meaning |",
        "|---|---|---|---|---|",
    ]
    for field in flag_fields():
        value = (metavar_of(field) or "no value").strip("{}").replace(",", ", ")
        cells = (value, default_text(field), _places(methods_of_flag[flag_of(field.name)]), " ".join(meanings[field.name].split()))
        lines.append(f"| `{flag_of(field.name)}` | {' | '.join(cells)} |")
    lines += [
        "",
        "## Parameters of losses",
        "",
        "Each is a number that one or several policy losses take. With another loss the flag is an error, and so is a",
        "value outside its range. [A loss of your own](losses.md#a-loss-of-your-own) adds its own.",
        "",
        "| flag | `--policy-loss` | range | meaning |",
        "|---|---|---|---|",
    ]
    for name, losses in declared_parameters().items():
        built_in = {loss: one for loss, one in losses.items() if POLICY_LOSSES.is_built_in(loss)}
        for text, owners in meanings_of_parameter(built_in).items():
            names = ", ".join(f"`{owner}`" for owner in owners)
            lines.append(f"| `{flag_of(name)}` | {names} | {built_in[owners[0]].range_in_words()} | {text}. |")
    return "\n".join(lines) + "\n"


def _places(methods: frozenset[LaunchMethod]) -> str:
    return "all" if methods == frozenset(LaunchMethod) else ", ".join(method for method in LaunchMethod if method in methods)


WHOLE_PAGES: dict[str, Callable[[], str]] = {
    "docs/arguments.md": arguments_page,
    "docs/losses.md": of_losses,
    "docs/corrections.md": of_corrections,
    "tests/messages.txt": refused.messages_table,
}
OF_RANKS = {"is_of_a_machine": True, "needs": ("megatron",)}
EXPLAIN_A_STEP = {"megatron-rl explain --response-lengths": Producer(printed)}
EXPLAIN = EXPLAIN_A_STEP | {
    "megatron-rl explain --stock": Producer(printed),
    "megatron-rl explain --host": Producer(of_the_chain),
}
# page -> how the command of a block begins -> what makes its text.
BLOCKS: dict[str, dict[str, Producer]] = {
    "docs/step_by_hand.md": EXPLAIN_A_STEP | {"block": Producer(of_block)},
    "docs/explain.md": EXPLAIN,
    "docs/tools.md": {
        "megatron-rl doctor, on a machine with a broken package": Producer(of_a_sick_machine),
        "a forward step that divides by cp": Producer(of_a_step_divided_by_cp, is_slow=True, **OF_RANKS),
    },
    "docs/own_loop.md": {
        "torchrun --nproc-per-node 4 examples/own_loop.py": Producer(of_own_loop, is_slow=True, **OF_RANKS),
    },
    "docs/testing.md": {"pytest on the second test of this page": Producer(of_the_examples_of_testing, is_slow=True)},
    "docs/hosts/miles.md": {"megatron-rl launch-config": Producer(printed)},
}


def blocks(text: str) -> Iterator[tuple[str, re.Match]]:
    """(command, where it stands) of each block that a command has printed."""
    for found in BLOCK.finditer(text):
        yield re.sub(r"\\\n\s*", "", found["described"] or found["typed"]), found


def beginnings(page: str, command: str) -> list[str]:
    """Of the producers that answer for a block: one, unless something is wrong."""
    return [begins for begins in BLOCKS.get(page, {}) if command.startswith(begins)]


def normalised(text: str) -> str:
    for pattern, stand_in in MACHINE:
        text = pattern.sub(stand_in, text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def renewed(page: str, text: str, only: str | None = None) -> str:
    """The page's text with each generated part as it is now; only: of the producer of that name."""
    if page in WHOLE_PAGES:
        return WHOLE_PAGES[page]()
    parts, end = [], 0
    for command, found in blocks(text):
        (begins,) = beginnings(page, command)
        if only in (None, begins):
            producer, before = BLOCKS[page][begins], found["text"]
            now = producer.output(command)
            is_equal = producer.is_of_a_machine and normalised(now) == normalised(before)
            parts += [text[end : found.start("text")], before if is_equal else now]
            end = found.end("text")
    return "".join([*parts, text[end:]])


def main() -> int:
    known = [*WHOLE_PAGES, *BLOCKS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"of {', '.join(known)}; default: all")
    chosen = [Path(page).as_posix() for page in parser.parse_args().pages] or known
    if set(chosen) - set(known):
        parser.error(f"nothing is generated in {', '.join(sorted(set(chosen) - set(known)))}")
    warnings.simplefilter("ignore")  # of Megatron-Core at import
    for page in chosen:
        before = (ROOT / page).read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), names_forgotten():
            now = renewed(page, before)
        if now != before:
            (ROOT / page).write_text(now, encoding="utf-8")
        print(f"{page}: {'unchanged' if now == before else 'written'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
