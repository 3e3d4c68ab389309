"""What verl loads by the entry point `verl.plugins`, in each process that imports verl: it adds our losses to verl's tables.

verl's tables are in a module that this import must not load, so they are filled right after verl has loaded it. Before that nothing
of the package is imported. verl drops an exception of a plugin without a word; therefore a launch line with a problem ends here, in
the process that it starts, by SystemExit.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

TABLES = "verl.trainer.ppo.core_algos"
OURS = re.compile(r"=['\"]?megatron[-_]rl\.")
# A name and one of our aggregations: verl's own modes have no dot. Another mode, which somebody registered, is not judged.
WITHOUT_PREFIX = re.compile(r"policy_loss\.loss_mode=['\"]?[\w-]+\.((sample|prompt|token)[-_]mean|constant)\b")


class _AfterTables(importlib.abc.MetaPathFinder):
    """Finds no module by itself; it lets `fill` run after the module of the tables."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != TABLES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_fill(module: ModuleType) -> None:
                load(module)
                fill(module)

            spec.loader.exec_module = load_and_fill  # type: ignore[method-assign]
        return spec


def fill(tables: ModuleType) -> None:
    """Registers our losses and estimators. A verl that has another contract keeps its own alone, and says so."""
    from megatron_rl.errors import ConfigError
    from megatron_rl.hosts import verl

    try:
        verl.register(tables)
    except ConfigError as error:
        print(f"megatron_rl: none of its losses is registered in verl: {error}", file=sys.stderr, flush=True)


def refuse_bad_line(words: Sequence[str]) -> None:
    """Ends the process that a launch line with one of our names starts, where the line has a problem."""
    if not any(OURS.search(word) or WITHOUT_PREFIX.search(word) for word in words):
        return
    from megatron_rl.hosts.verl_launch import problems_of

    if problems := problems_of(words):
        raise SystemExit("\n".join(f"megatron_rl: ConfigError: {problem}" for problem in problems))


refuse_bad_line(sys.argv[1:])
if TABLES in sys.modules:
    fill(sys.modules[TABLES])
else:
    sys.meta_path.insert(0, _AfterTables())
