"""The import order of the package and of the benchmarks, stated here and read from syntax trees, which it must never execute."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module

import pytest
from conftest import ROOT
from forked import forget, forked

from megatron_rl import arguments, loss_hub
from megatron_rl.__main__ import main
from megatron_rl.hosts import DOOR_NAMES, ROLLOUT_HOST_NAMES

# Bottom to top: a module imports what stands before it, and its own folder. `__init__` is megatron_rl itself; benchmarks/ lies
# beside the package, and the wheel does not hold it.
ORDER = (
    *("errors", "files", "config", "aggregation_record", "loss_hub", "layout", "ops", "aggregation"),
    *("corrections", "metrics", "step_metrics", "losses", "validation", "arguments", "accumulation_rounds", "accumulation"),
    *("lm_head", "__init__", "megatron", "hosts", "reducers", "hooks", "testing", "train", "commands", "__main__", "benchmarks"),
)
ROWS_WITH_MEGATRON = ("megatron", "testing", "train")
FILES_WITH_MEGATRON = ("layout/groups.py",)
# The command that runs what is in testing/: the others must not import it.
RUNS_TESTING = "commands/selftest.py"
FILES_WITHOUT_TORCH = (
    "errors.py",
    "config.py",
    *(f"files/{name}.py" for name in ("bounds", "json_values", "yaml_values", "safetensors_header", "plain_pickle")),
    "aggregation_record.py",
)
MAX_LINES, MAX_KERNEL_LINES = 600, 800


def row_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def imported_names(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of each import, wherever it stands: `from a.b import c` gives a.b.c."""
    package = [*([] if row_of(path) == "benchmarks" else ["megatron_rl"]), *path.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def layering_faults(path: str, tree: ast.Module) -> list[str]:
    own = row_of(path)
    if own not in ORDER:
        return [f"{path}: {own} has no place in ORDER"]
    faults = []
    for line, name in imported_names(path, tree):
        first, *rest = name.split(".")
        if first == "benchmarks":
            first, rest = "megatron_rl", ["benchmarks"]
        if first == "megatron_rl":
            target = rest[0] if rest and rest[0] in ORDER else "__init__"
            if own == "commands" and path != RUNS_TESTING and target == "testing":
                faults.append(f"{path}:{line}: {name} is support of tests: {RUNS_TESTING} alone runs it")
            if ORDER.index(target) > ORDER.index(own):
                faults.append(f"{path}:{line}: {own} imports {name}, but {target} stands above it")
        elif first == "megatron" and own not in ROWS_WITH_MEGATRON and path not in FILES_WITH_MEGATRON:
            faults.append(f"{path}:{line}: {name} belongs in {', '.join((*ROWS_WITH_MEGATRON, *FILES_WITH_MEGATRON))}")
        elif first == "torch" and path in FILES_WITHOUT_TORCH:
            faults.append(f"{path}:{line}: {name} in a file that works without torch")
    return faults


def test_modules_import_only_what_stands_below_them(package_trees, benchmark_trees):
    """Catches a layer that reaches up: a loss that reads flags, a kernel that knows Megatron, a package that needs benchmarks."""
    assert package_trees and benchmark_trees, "no module was found: the test looks in the wrong place"
    faults = [fault for path, tree in (package_trees | benchmark_trees).items() for fault in layering_faults(path, tree)]
    assert not faults, "\n".join(faults)


def test_no_file_imports_itself_through_others(package_trees):
    """At module level: an import in a function, or for types alone, runs later or never."""
    name_of = {path: f"megatron_rl.{path[:-3].replace('/', '.')}".removesuffix(".__init__") for path in package_trees}
    names = set(name_of.values())
    graph = {}
    for path, tree in package_trees.items():
        top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        found = {name if name in names else name.rpartition(".")[0] for _, name in imported_names(path, top)}
        graph[name_of[path]] = (found & names) - {name_of[path], "megatron_rl"}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the files


@pytest.mark.parametrize(
    ("path", "code", "expected"),
    [
        pytest.param("ops/log_probs.py", "import megatron_rl.losses.grpo", "losses stands above", id="plain import"),
        pytest.param("layout/groups.py", "from .. import hooks", "hooks stands above", id="relative, module as name"),
        pytest.param("config.py", "def f():\n    import megatron_rl.ops", "ops stands above", id="in a function"),
        pytest.param("losses/grpo.py", "from megatron.core import mpu", "belongs in", id="megatron.core in a loss"),
        pytest.param("config.py", "from torch import Tensor", "without torch", id="torch in config"),
        pytest.param("commands/explain/chain.py", "from megatron_rl.testing import ranks", "support of tests", id="an emulator"),
        pytest.param("utils.py", "", "no place in ORDER", id="a module without a room"),
    ],
)
def test_the_layering_check_finds_each_kind_of_fault(path, code, expected):
    """A check that cannot fail proves nothing."""
    (fault,) = layering_faults(path, ast.parse(code))
    assert expected in fault


def test_the_layering_check_allows_what_is_right():
    assert layering_faults("losses/grpo.py", ast.parse("from . import clipping\nfrom ..ops import y")) == []
    assert layering_faults("layout/groups.py", ast.parse("from megatron.core import parallel_state")) == []
    assert layering_faults("train/loop.py", ast.parse("from megatron_rl import __version__")) == []


# The list of hosts, the samplers of those with a parser of flags, and the launcher, whose door to NeMo-RL is of another kind.
FILES_WITH_HOSTS = {
    "hosts/__init__.py": (*ROLLOUT_HOST_NAMES, *DOOR_NAMES),
    "hosts/sampling.py": ROLLOUT_HOST_NAMES,
    "hosts/launch.py": ("nemo_rl",),
}


def named_hosts(path: str, tree: ast.Module) -> list[str]:
    """Where code asks which host it has: by name, class or module. Messages and docstrings may say it."""
    allowed = FILES_WITH_HOSTS.get(path, ())
    hosts = [host for host in ROLLOUT_HOST_NAMES if path != f"hosts/{host}.py" and host not in allowed]
    hosts += [host for host in DOOR_NAMES if not path.startswith(f"hosts/{host}") and host not in allowed]
    words, faults = {ast.Constant: "value", ast.Name: "id", ast.Attribute: "attr"}, []
    for node in ast.walk(tree):
        word = getattr(node, words[type(node)]) if type(node) in words else None
        if isinstance(word, str) and word.lower() in hosts:
            faults.append(f"{path}:{node.lineno}: names {word}: ask the host's object (hosts/base.py)")
    imported = [(line, name) for line, name in imported_names(path, tree) if any(f"hosts.{host}" in name for host in hosts)]
    return faults + [f"{path}:{line}: imports {name}" for line, name in imported]


def test_a_host_is_named_in_its_own_file_alone(package_trees):
    """A new host is a new file and a name in the list: nothing else asks which host it has."""
    faults = [fault for path, tree in package_trees.items() for fault in named_hosts(path, tree)]
    assert not faults, "\n".join(faults)


def test_the_check_for_named_hosts_finds_each_form():
    forms = ('if host == "miles":\n    pass', "is_new = host == Host.SLIME", "from .miles import HOST", 'host.name == "verl"')
    for code in (*forms, "from . import roll_loss"):
        assert len(named_hosts("hosts/checks.py", ast.parse(code))) == 1, code
    assert named_hosts("hosts/checks.py", ast.parse('"""miles and slime."""\nraise ValueError("run from miles")')) == []
    assert named_hosts("hosts/roll_loss.py", ast.parse("from . import roll")) == []


def test_no_file_is_longer_than_a_head_holds():
    """House rule 12; `wc -l` of each module. A kernel file is read alone and may be longer."""
    paths = [path for folder in ("megatron_rl", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    limits = {path: MAX_KERNEL_LINES if path.stem.endswith("_triton") else MAX_LINES for path in counts}
    assert not {str(path): count for path, count in counts.items() if count > limits[path]}


def test_every_folder_of_the_package_is_a_package():
    """Catches a folder without __init__.py: it imports from the checkout, and is missing from the wheel."""
    folders = {path.parent for path in (ROOT / "megatron_rl").rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


OPTIONAL = ("triton", "megatron", "transformer_engine", "apex")


class Trap:
    """Touching an optional package raises, as a broken installation of it would."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OPTIONAL:
            raise RuntimeError(f"{name} was looked for")


def test_importing_the_package_needs_torch_alone(package_trees):
    """FB-79, FB-30: nothing below the seam looks for Megatron, Triton, Transformer Engine or apex: impostors raise."""
    below = [path for path in package_trees if ORDER.index(row_of(path)) <= ORDER.index("__init__")]
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
        assert getattr(megatron_rl, name).__name__ == name
    assert megatron_rl.loss_hub.register_policy_loss is megatron_rl.register_policy_loss
    with pytest.raises(AttributeError, match="no attribute 'gspo_los'"):
        megatron_rl.gspo_los  # noqa: B018


def without_torch(words: str) -> tuple[int | None, str, str]:
    """`megatron-rl WORDS`, where torch cannot be imported."""

    def command() -> int:
        forget("torch")
        sys.modules["torch"] = None
        return import_module("megatron_rl.__main__").main(words.split())

    return forked(command)


def test_the_help_of_train_is_the_same_without_torch(monkeypatch, capsys):
    """Catches an import of torch on the way to the flags, and a loss whose parameter only its import shows."""
    monkeypatch.setattr(arguments, "parameters_in_sources", loss_hub.declared_parameters)
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    code, out, error = without_torch("train --help")
    assert (code, error) == (0, "") and "--divergence-low" in out
    assert out.split() == capsys.readouterr().out.split()


@pytest.mark.parametrize("words", ["train", "explain --response-lengths 1,2"])
def test_a_command_says_that_torch_is_missing(words):
    code, _, error = without_torch(words)
    assert code == 2 and "Traceback" not in error
    assert f"ConfigError: {words.split()[0]} needs torch" in error and "megatron-rl doctor" in error
