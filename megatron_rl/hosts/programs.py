"""What starts a training besides the program that our losses are made for: by its name, or by what its script imports.

Nothing is imported or run: a script is parsed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.scripts import imported_packages, syntax_tree

# Why the loss of a program is not judged, for those that every trainer has.
SUPERVISED, PREFERENCES = "trains on given answers, without a policy loss", "trains on preferences, without a policy loss"
REWARDS, DISTILLED = "trains a reward model", "trains a student on its teacher's probabilities, without a policy loss"
TRAINS_NOTHING = "trains nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """names: a regular expression of the last parts of a module, or of a file without .py -> why it is not judged; None: the
    trainer's own loss trains there too. package: what a script of this trainer imports; "": scripts are not looked at. of_script:
    why a script that imports it is not judged; None: it is."""

    names: Mapping[str, str | None] = field(default_factory=dict)
    package: str = ""
    of_script: Callable[[ast.Module], str | None] = lambda tree: None

    def named(self, words: Iterable[str]) -> Program | None:
        """The first word that is one of the names. A file that is here and imports something else is not."""
        for word in words:
            if word.endswith(".py") and Path(word).is_file() and self.imported([word]) is None and self.package:
                continue
            dotted = word.removesuffix(".py").replace("/", ".")
            for name, why in self.names.items():
                if re.fullmatch(rf"(?:.*\.)?(?:{name})", dotted):
                    return Program(word, why)
        return None

    def imported(self, words: Iterable[str]) -> Program | None:
        """The script that is here and imports the package."""
        script = next((word for word in words if word.endswith(".py")), None)
        if not self.package or script is None or not Path(script).is_file():
            return None
        try:
            tree = syntax_tree(Path(script))
        except (ConfigError, ValueError, RecursionError, MemoryError):  # what is no Python is told by who reads the line
            return None
        return Program(script, self.of_script(tree), is_script=True) if self.package in imported_packages(tree) else None


@dataclass(frozen=True, slots=True)
class Program:
    """word: as it is typed. why: why its loss is not judged. is_script: known by what it imports."""

    word: str
    why: str | None
    is_script: bool = False


def program_word(words: Sequence[str]) -> str:
    """What a line starts."""
    return next((word for flag, word in pairwise(("", *words)) if flag == "-m" or word.endswith(".py")), "the script")


def called(tree: ast.Module, ending: str) -> list[str]:
    """Names of what a script calls, as SFTTrainer of trl.SFTTrainer(...), in their order."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [func.id if isinstance(func, ast.Name) else func.attr for func in calls if isinstance(func, ast.Name | ast.Attribute)]
    return list(dict.fromkeys(name for name in names if name.endswith(ending)))


def modules_from(tree: ast.Module, package: str) -> list[str]:
    """The last part of each module below the package that a script imports from."""
    froms: Sequence[ast.ImportFrom] = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    below = [node.module for node in froms if node.module is not None and node.module.startswith(f"{package}.")]
    return list(dict.fromkeys(module.removeprefix(f"{package}.").partition(".")[0] for module in below))
