"""What the project weighs: code tokens by room, words by page. `make lint` fails above a figure of tests/weight.toml.

    python tests/weight.py                       # a table; exit code 1 where a room is above its figure
    python tests/weight.py --write               # lowers the figures to what is there; it raises none
    python tests/weight.py --seconds junit.xml   # seconds by test file into tests/seconds.toml, of `pytest --junitxml junit.xml`

A code token is a name, number, string or operator. Comments, docstrings, blank lines and layout are free: a joined line or a
shorter name gains nothing. A figure is raised by hand, in a commit whose message names the user's need.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
FIGURES, SECONDS = ROOT / "tests" / "weight.toml", ROOT / "tests" / "seconds.toml"
LAYOUT = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")
FREE = {getattr(tokenize, name) for name in LAYOUT}
FOLDERS = ("megatron_rl", "tests", "benchmarks", ".ci", "examples")
PAGES = ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# A file of tests below this many seconds is not in the list.
SHORTEST = 1.0


def code_tokens(text: str) -> int:
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        first = node.body[0] if isinstance(node, DOCUMENTED) and node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            docstrings.add((first.lineno, first.col_offset))
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in FREE]
    return sum(not (token.type == tokenize.STRING and token.start in docstrings) for token in tokens)


def room_of(path: Path) -> str:
    """Of the package the folder that the file is in, with hosts/heads apart; else the folder at the top."""
    top, *inner = path.parts
    if top != "megatron_rl":
        return top
    if len(inner) == 1:
        return "megatron_rl/*.py"
    return "megatron_rl/hosts/heads" if inner[:2] == ["hosts", "heads"] else f"megatron_rl/{inner[0]}"


def weigh(root: Path = ROOT) -> dict[str, int]:
    """Room -> code tokens, page or folder of pages -> words."""
    found: Counter[str] = Counter()
    for path in (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))):
        found[room_of(path.relative_to(root))] += code_tokens(path.read_text(encoding="utf-8"))
    for name in PAGES:
        pages = sorted((root / name).rglob("*.md")) if (root / name).is_dir() else [root / name]
        found[name] = sum(len(page.read_text(encoding="utf-8").split()) for page in pages if page.exists())
    return dict(found)


def too_heavy(found: dict[str, int], figures: dict[str, int]) -> list[str]:
    problems = []
    for room, weight in found.items():
        if weight > figures.get(room, 0):
            problems.append(f"{room} weighs {weight}, {weight - figures.get(room, 0)} above its figure in tests/weight.toml")
    return problems


def read_table(path: Path) -> dict[str, float]:
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_table(path: Path, table: dict[str, float], comment: str) -> None:
    lines = [f'"{name}" = {value}\n' for name, value in sorted(table.items())]
    path.write_text(f"# {comment}\n{''.join(lines)}", encoding="utf-8")


def seconds_by_file(junit: Path) -> dict[str, float]:
    """Of a run's --junitxml: test file -> the seconds of its tests, together with their fixtures."""
    found: Counter[str] = Counter()
    for case in ElementTree.parse(junit).iter("testcase"):
        module = next(part for part in case.attrib["classname"].split(".") if part.startswith("test_"))
        found[f"tests/{module}.py"] += float(case.attrib["time"])
    return {name: round(seconds, 1) for name, seconds in found.items() if seconds >= SHORTEST}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--seconds"]:
        comment = (
            "Seconds of each test file, on two quiet cores, by python tests/weight.py --seconds junit.xml. Others take less than 1."
        )
        write_table(SECONDS, seconds_by_file(Path(arguments[1])), comment)
        return 0
    found, figures = weigh(), read_table(FIGURES)
    if arguments == ["--write"]:
        lowered = {room: min(weight, int(figures.get(room, weight))) for room, weight in found.items()}
        write_table(FIGURES, lowered, "What each room may weigh: code tokens, words of pages. See tests/weight.py.")
        return 0
    for room, weight in sorted(found.items()):
        print(f"{room:32}{weight:9d}{int(figures.get(room, 0)):9d}")
    problems = too_heavy(found, {room: int(figure) for room, figure in figures.items()})
    for problem in problems:
        print(f"{problem}: take something away, or raise the figure in a commit that names the user's need", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
