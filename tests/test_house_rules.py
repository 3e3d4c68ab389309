"""House rules that a source text can show, each with a snippet that breaks it. Never executes what it reads."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache

import mutants
import pytest

COLLECTIVES = frozenset(
    "all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced "
    "all_to_all all_to_all_single barrier broadcast broadcast_object_list gather gather_object irecv isend "
    "monitored_barrier recv recv_object_list reduce reduce_scatter reduce_scatter_tensor scatter scatter_object_list "
    "send send_object_list".split()
)


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def calls(tree: ast.Module, name: str = "") -> Iterator[ast.Call]:
    """All, or those of one name."""
    found = (node for node in nodes(tree) if isinstance(node, ast.Call))
    return (call for call in found if not name or (isinstance(call.func, ast.Name) and call.func.id == name))


def keyword_of(call: ast.Call, name: str) -> str:
    """The source of a keyword's value, "None" without it."""
    return next((ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == name), "None")


@cache
def imports(tree: ast.Module) -> dict[str, tuple[int, str]]:
    """{local name: (line, dotted name)}: `import torch.distributed as dist` gives "dist", "torch.distributed"."""
    found = {}
    for node in nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            front = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found |= {alias.asname or alias.name: (node.lineno, front + alias.name) for alias in node.names}
    return found


def dotted(node: ast.expr, names: dict[str, tuple[int, str]]) -> str:
    """`dist.all_reduce` -> torch.distributed.all_reduce; "" for what is not a dotted name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, (0, node.id))[1]
    front = dotted(node.value, names) if isinstance(node, ast.Attribute) else ""
    return f"{front}.{node.attr}" if front else ""


def find_nan_to_num(tree: ast.Module) -> Iterator[int]:
    """It hides a fault: DataError where the value appears."""
    yield from (line for line, name in imports(tree).values() if "nan_to_num" in name)
    yield from (node.lineno for node in nodes(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("nan_to_num"))


def find_zip_without_strict(tree: ast.Module) -> Iterator[int]:
    """It drops the longer list's tail."""
    yield from (call.lineno for call in calls(tree, "zip") if keyword_of(call, "strict") != "True")


def find_collective_without_group(tree: ast.Module) -> Iterator[int]:
    """It runs over the whole world."""
    names = imports(tree)
    for call in calls(tree):
        module, _, function = dotted(call.func, names).rpartition(".")
        if function in COLLECTIVES and module.startswith("torch.distributed") and keyword_of(call, "group") == "None":
            yield call.lineno


def find_distributed_nn(tree: ast.Module) -> Iterator[int]:
    """It takes a group rank for a global one in its backward."""
    names = imports(tree)
    used = [(node.lineno, dotted(node, names)) for node in nodes(tree) if isinstance(node, ast.Attribute)]
    yield from (line for line, name in [*used, *names.values()] if f"{name}.".startswith("torch.distributed.nn."))


def find_default_for_an_argument(tree: ast.Module) -> Iterator[int]:
    """It turns a dropped flag into a default."""
    for call in calls(tree, "getattr"):
        owner = ast.unparse(call.args[0])
        if len(call.args) == 3 and (owner.endswith("args") or owner == "namespace"):
            yield call.lineno


OVER_THE_WORLD = "from torch import distributed as d\nd.broadcast(x, src=0, group=None)"
NAMED_GROUP = "import torch.distributed as dist\ndist.all_reduce(x, group=g)\ntorch.gather(x, 0, i)\ndist.get_rank()"
DISTRIBUTED_NN = "import torch.distributed as dist\ndist.nn.all_gather(x)"
# name, checker, a snippet that breaks the rule, one that keeps it
RULES: list[tuple[str, Callable[[ast.Module], Iterator[int]], str, str]] = [
    ("no nan_to_num", find_nan_to_num, "x.nan_to_num_(0.0)", "torch.isnan(x)"),
    ("zip is strict", find_zip_without_strict, "zip(a, b)", "zip(a, b, strict=True)"),
    ("FB-44 a collective names its group", find_collective_without_group, OVER_THE_WORLD, NAMED_GROUP),
    ("no torch.distributed.nn", find_distributed_nn, DISTRIBUTED_NN, NAMED_GROUP),
    ("no default for an argument", find_default_for_an_argument, "getattr(self.args, name, None)", "getattr(args, 'x')"),
]


@pytest.mark.parametrize(("name", "find", "bad", "good"), RULES, ids=[rule[0] for rule in RULES])
def test_the_package_keeps_the_rule(name, find, bad, good, package_trees, benchmark_trees):
    """The faults that these forms cause are told in the table of field bugs. A check that cannot fail proves nothing."""
    found = [f"{path}:{line}: {name}" for path, tree in (package_trees | benchmark_trees).items() for line in find(tree)]
    assert not found, "\n".join(found)
    assert list(find(ast.parse(bad))) and not list(find(ast.parse(good)))


def test_each_mutant_has_its_line_once():
    """So a change of the package renews its rows: `python tests/mutants.py` reads the same list."""
    for mutant in mutants.read_list():
        mutant.applied(mutants.source(mutant.path))
