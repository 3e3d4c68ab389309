"""Holds the weight of the project: no folder may get heavier than tests/weight.toml says, without a commit that raises its figure.

    python tests/weight.py                        prints a table; exits with 1 where a folder is above its figure
    python tests/weight.py --write                lowers the figures of folders that are below them; raises none

Weight is code tokens: names, numbers, strings and operators. Comments, docstrings and layout are free, so a joined line or a
shorter name gains nothing. The weight of a text is its words.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE, TEXTS = ("megatron_rl", "tests", "benchmarks", ".ci", "examples"), ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
APART = "megatron_rl/hosts/heads"
FREE = {getattr(tokenize, name) for name in "COMMENT NL NEWLINE INDENT DEDENT ENDMARKER".split()}
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def num_tokens(source: str) -> int:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, WITH_DOCSTRING)]
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset) for node in nodes if ast.get_docstring(node, clean=False) is not None
    }
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        # Since Python 3.12 an f-string is many tokens; it counts as one, as before.
        kind = tokenize.tok_name[token.type]
        depth += kind.endswith("STRING_START") - kind.endswith("STRING_END")
        is_docstring = token.type == tokenize.STRING and token.start in docstrings
        count += depth == 0 and token.type not in FREE and not is_docstring
    return count


def folder_of(path: str) -> str:
    """`megatron_rl/losses/grpo.py` -> `megatron_rl/losses`; elsewhere the first folder."""
    first, second, *deeper = path.split("/")
    if first != "megatron_rl":
        return first
    if path.startswith(f"{APART}/"):
        return APART
    return f"{first}/{second}" if deeper else f"{first}/*.py"


def weigh(root: Path) -> Counter[str]:
    weights: Counter[str] = Counter()
    for path in (path for top in CODE for path in (root / top).rglob("*.py")):
        weights[folder_of(path.relative_to(root).as_posix())] += num_tokens(path.read_text(encoding="utf-8"))
    for name in TEXTS:
        paths = [*(root / name).rglob("*.md")] if name == "docs" else [root / name]
        weights[name] = sum(len(path.read_text(encoding="utf-8").split()) for path in paths)
    return weights


def read_figures(path: Path) -> dict[str, int]:
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_figures(path: Path, figures: Mapping[str, int]) -> None:
    heading = "# Code tokens of a folder, words of a text: see tests/weight.py. A commit that takes away runs --write.\n"
    lines = (f'"{name}" = {figures[name]}\n' for name in sorted(figures))
    path.write_text(heading + "".join(lines), encoding="utf-8")


def problems_of(weights: Mapping[str, int], figures: Mapping[str, float]) -> list[str]:
    mend = "take something away, or raise the figure in a commit that names the user's need"
    return [
        f'{name} has no figure in tests/weight.toml; add the line "{name}" = {weight} in a commit that names the user\'s need'
        if name not in figures
        else f"{name} weighs {weight}, {weight - figures[name]} more than its figure {figures[name]} in tests/weight.toml; {mend}"
        for name, weight in sorted(weights.items())
        if weight > figures.get(name, -1)
    ]


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    weights, path = weigh(root), root / "tests/weight.toml"
    figures = read_figures(path)
    if options.write:  # the first file has what is there
        figures = {name: min(figures.get(name, weights[name]), weights[name]) for name in figures or weights if name in weights}
        write_figures(path, figures)
    for name, weight in sorted(weights.items()):
        print(f"{name:30}{weight:9}{figures.get(name, 'none'):>9}")
    problems = problems_of(weights, figures)
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
