"""The packages of megatron_rl, their layers and callers, and the imports of each file, read from syntax trees."""

from __future__ import annotations

import ast
import functools
import sys
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.util import find_spec

import pytest
from conftest import ROOT
from forked import forget, forked

# From the ground up. A package is a folder of megatron_rl, or a file beside them. It imports packages of lower layers, and itself;
# packages of one layer do not know each other. So the number of layers is the longest chain of imports between packages. `__init__`
# is megatron_rl itself; benchmarks/ lies beside it, and the wheel does not hold it.
LAYERS = (
    ("errors", "config"),
    ("files", "layout", "registry", "formula"),
    ("ops", "count", "declare"),
    ("weights", "losses"),
    ("metrics",),
    ("policy_loss",),
    ("validation", "__init__"),
    ("arguments", "megatron"),
    ("hosts", "testing", "train"),
    ("commands", "benchmarks"),
)
MOST_LAYERS = 10
# Files that a user types, each an entry of a package: it only hands on what the package has.
ENTRIES = {"__main__": "commands", "hooks": "hosts", "reducers": "hosts"}
# The callers: packages that a reader may ignore -> those of them that each may import. Everything else is the core.
CALLERS = {
    "hosts": (),
    "testing": (),
    "train": (),
    "commands": ("hosts", "testing", "train"),
    "benchmarks": ("hosts", "testing", "train"),
}
PACKAGES_WITH_MEGATRON = ("megatron", "testing", "train")
FILES_WITH_MEGATRON = ("layout/groups.py", "benchmarks/hosts.py", "benchmarks/peers.py")
# The references that others are compared with: what they share with the package, they cannot find wrong.
FILES_OF_TORCH_ALONE = ("testing/oracle.py",)
FILES_WITHOUT_TORCH = (
    "errors.py",
    "config.py",
    *(f"files/{name}.py" for name in ("bounds", "json_values")),
)
MAX_LINES, MAX_KERNEL_LINES = 600, 800


def package_of(path: str) -> str:
    name = path.split("/")[0].removesuffix(".py")
    return ENTRIES.get(name, name)


def layer_of(package: str) -> int | None:
    return next((number for number, packages in enumerate(LAYERS, 1) if package in packages), None)


@functools.cache  # a million nodes, which several tests ask for
def imported_names(path: str, tree: ast.Module) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of each import, wherever it stands: `from a.b import c` gives a.b.c."""
    found, package = [], [*([] if package_of(path) == "benchmarks" else ["megatron_rl"]), *path.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def layering_faults(path: str, tree: ast.Module) -> list[str]:
    own, faults = package_of(path), []
    if layer_of(own) is None:
        return [f"{path}: {own} has no place in LAYERS"]
    for line, name in imported_names(path, tree):
        first, *rest = name.split(".")
        if first == "benchmarks":
            first, rest = "megatron_rl", ["benchmarks"]
        if first == "megatron_rl":
            target = package_of(rest[0]) if rest and layer_of(package_of(rest[0])) else "__init__"
            if target in CALLERS and own not in CALLERS:
                faults.append(f"{path}:{line}: {own} is of the core and imports {name}, one of the callers")
            elif target in CALLERS and target != own and target not in CALLERS[own]:
                faults.append(f"{path}:{line}: {own} imports {name}: CALLERS does not say that it needs {target}")
            elif target != own and layer_of(target) >= layer_of(own):
                faults.append(f"{path}:{line}: {own} imports {name}, but {target} does not stand below it")
        elif first == "megatron" and own not in PACKAGES_WITH_MEGATRON and path not in FILES_WITH_MEGATRON:
            faults.append(f"{path}:{line}: {name} belongs in {', '.join((*PACKAGES_WITH_MEGATRON, *FILES_WITH_MEGATRON))}")
        elif first == "torch" and path in FILES_WITHOUT_TORCH:
            faults.append(f"{path}:{line}: {name} in a file that works without torch")
    return faults


# path, code of one fault, how it is told; a check that cannot fail proves nothing
FAULTS = [
    ("ops/log_probs.py", "import megatron_rl.losses.grpo", "losses does not stand below"),
    ("layout/groups.py", "from .. import losses", "losses does not stand below"),
    ("config.py", "def f():\n    import megatron_rl.ops", "ops does not stand below"),
    ("losses/grpo.py", "if TYPE_CHECKING:\n    import megatron_rl.weights", "not stand below"),
    ("losses/grpo.py", "from megatron.core import mpu", "belongs in"),
    ("config.py", "from torch import Tensor", "without torch"),
    ("megatron/head.py", "from megatron_rl import hooks", "one of the callers"),
    ("train/loop.py", "from megatron_rl.hosts import args", "CALLERS does not say"),
    ("utils.py", "", "no place in LAYERS"),
]


def test_packages_import_only_those_of_lower_layers(package_trees, benchmark_trees):
    """Catches what reaches up or across: a loss that reads flags, a kernel that knows Megatron, a core that needs a host."""
    assert package_trees and benchmark_trees, "no module was found: the test looks in the wrong place"
    faults = [fault for path, tree in (package_trees | benchmark_trees).items() for fault in layering_faults(path, tree)]
    assert not faults, "\n".join(faults)
    for path, code, told in FAULTS:
        assert [told in fault for fault in layering_faults(path, ast.parse(code))] == [True], (path, code)
    assert layering_faults("losses/grpo.py", ast.parse("from . import clipping\nfrom ..ops import y")) == []


@pytest.mark.parametrize("path", FILES_OF_TORCH_ALONE)
def test_a_reference_imports_torch_alone(path, package_trees):
    packages = {name.split(".")[0] for _, name in imported_names(path, package_trees[path])}
    assert packages - {*sys.stdlib_module_names} == {"torch"}


def test_there_are_few_layers_and_each_package_is_there(package_trees, benchmark_trees):
    assert len(LAYERS) <= MOST_LAYERS
    packages = [package for layer in LAYERS for package in layer]
    assert sorted(packages) == sorted({package_of(path) for path in (package_trees | benchmark_trees)})
    assert set(CALLERS) < set(packages) and set(ENTRIES.values()) <= set(CALLERS)


def test_no_file_of_the_package_imports_itself_through_others(package_trees):
    """Imports for types and in functions count: a reader follows them too. CycleError names the circle."""
    files = {f"megatron_rl.{path.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__"): path for path in package_trees}
    graph = {}
    for path, tree in package_trees.items():
        names = [name for _, name in imported_names(path, tree)]
        graph[path] = {files.get(name, files.get(name.rpartition(".")[0])) for name in names} - {None, path}
    assert sum(map(len, graph.values())) > 1000, "imports were not found: the test looks in the wrong place"
    TopologicalSorter(graph).prepare()


def test_every_import_of_the_tests_finds_its_name():
    """Catches an import in a function, or in a test that few run, of what has moved or is gone."""
    for path in sorted((ROOT / "tests").glob("*.py")):
        for line, name in imported_names(path.name, ast.parse(path.read_text(encoding="utf-8"))):
            module, _, last = name.rpartition(".")
            if name.startswith("megatron_rl."):
                try:
                    is_there = hasattr(import_module(module), last) or find_spec(name)
                except ModuleNotFoundError as error:
                    is_there = not str(error.name).startswith("megatron_rl")  # else a trainer, which is not installed
                assert is_there, f"{path.name}:{line}: {name}"


def test_no_file_is_longer_than_a_head_holds():
    """House rule 12; `wc -l` of each module. A kernel file is read alone and may be longer."""
    paths = [path for folder in ("megatron_rl", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    limits = {path: MAX_KERNEL_LINES if path.stem.endswith("_triton") else MAX_LINES for path in counts}
    assert not {str(path): count for path, count in counts.items() if count > limits[path]}


OPTIONAL = ("triton", "megatron", "transformer_engine", "apex")


class Trap:
    """Touching an optional package raises, as a broken installation of it would."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OPTIONAL:
            raise RuntimeError(f"{name} was looked for")


def test_importing_the_package_needs_torch_alone(package_trees):
    """FB-30: nothing below the seam looks for Megatron, Triton, Transformer Engine or apex: impostors raise."""
    below = [path for path in package_trees if layer_of(package_of(path)) <= layer_of("__init__")]
    modules = [path.removesuffix(".py").removesuffix("__init__") for path in below if not path.endswith("_triton.py")]
    names = [f"megatron_rl.{module.replace('/', '.')}".rstrip(".") for module in modules]

    def import_with_traps() -> None:
        forget(*OPTIONAL)
        sys.meta_path.insert(0, Trap())
        for name in names:
            import_module(name)

    code, _, error = forked(import_with_traps)
    assert code == 0, error


def test_the_front_door_has_the_names_that_it_lists():
    """They are imported when they are asked for: a name without a place, or a list that fell behind, shows here."""
    import megatron_rl

    for name in megatron_rl.__all__:
        assert getattr(getattr(megatron_rl, name), "__name__", name) == name  # partial functions have none
    assert megatron_rl.declare.register_policy_loss is megatron_rl.register_policy_loss
    with pytest.raises(AttributeError, match="no attribute 'gspo_los'"):
        megatron_rl.gspo_los  # noqa: B018
