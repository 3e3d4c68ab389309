"""House rules that a source text can show, each with a snippet that breaks it. Never executes what it reads."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

import pytest
import torch

Finding = tuple[int, str]  # line, what is wrong there

MAX_FUNCTION_LINES = 60
MAX_KERNEL_FILE_FUNCTION_LINES = 120
COLLECTIVES = frozenset(
    "all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced "
    "all_to_all all_to_all_single barrier broadcast broadcast_object_list gather gather_object irecv isend "
    "monitored_barrier recv recv_object_list reduce reduce_scatter reduce_scatter_tensor scatter scatter_object_list "
    "send send_object_list".split()
)


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def keyword_value(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def imports(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, local name, dotted name): `import torch.distributed as dist` gives "dist", "torch.distributed"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{node.module}.{alias.name}"


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """`dist.all_reduce` -> torch.distributed.all_reduce; "" for what is not a dotted name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        front = dotted(node.value, names)
        return f"{front}.{node.attr}" if front else ""
    return ""


def find_nan_to_num(tree: ast.Module, path: str) -> Iterator[Finding]:
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
        imported = isinstance(node, ast.alias) and node.name.startswith("nan_to_num")
        if imported or (name and name.startswith("nan_to_num")):
            yield node.lineno, "nan_to_num hides a fault: raise DataError where the value appears"


def find_zip_without_strict(tree: ast.Module, path: str) -> Iterator[Finding]:
    for call in calls(tree):
        is_zip = isinstance(call.func, ast.Name) and call.func.id == "zip"
        if is_zip and not is_constant(keyword_value(call, "strict"), True):
            yield call.lineno, "zip without strict=True drops the longer list's tail"


def find_collective_without_group(tree: ast.Module, path: str) -> Iterator[Finding]:
    names = {local: full for _, local, full in imports(tree)}
    for call in calls(tree):
        module, _, function = dotted(call.func, names).rpartition(".")
        if not module.startswith("torch.distributed") or function not in COLLECTIVES:
            continue
        group = keyword_value(call, "group")
        if group is None or is_constant(group, None):
            yield call.lineno, f"{function} without group= runs over the whole world"


def find_distributed_nn(tree: ast.Module, path: str) -> Iterator[Finding]:
    names = {local: full for _, local, full in imports(tree)}
    used = {(node.lineno, dotted(node, names)) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used.update((line, full) for line, _, full in imports(tree))
    for line in sorted({line for line, full in used if f"{full}.".startswith("torch.distributed.nn.")}):
        yield line, "torch.distributed.nn takes a group rank for a global one in its backward"


def find_bare_except(tree: ast.Module, path: str) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except: name the exception"


def find_default_for_an_argument(tree: ast.Module, path: str) -> Iterator[Finding]:
    for call in calls(tree):
        if isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) == 3:
            owner = dotted(call.args[0], {}).split(".")[-1]
            if owner.endswith("args") or owner == "namespace":
                yield call.lineno, f"getattr({owner}, ..., default) turns a dropped flag into a default: let it raise"


def find_long_functions(tree: ast.Module, path: str) -> Iterator[Finding]:
    limit = MAX_KERNEL_FILE_FUNCTION_LINES if path.endswith("_triton.py") else MAX_FUNCTION_LINES
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # Signature and docstring are read apart: shapes beside each tensor make both long on purpose.
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            length = node.end_lineno - first.lineno + 1
            if length > limit:
                yield node.lineno, f"{node.name} has {length} lines of code, at most {limit} fit in the head"


def find_modules_without_docstring(tree: ast.Module, path: str) -> Iterator[Finding]:
    if not ast.get_docstring(tree):
        yield 1, "a file opens with one sentence: what it is for and what it must never do"


RULES: list[tuple[str, Callable[[ast.Module, str], Iterator[Finding]], list[str], str]] = [
    # name, checker, snippets that break the rule, one that keeps it
    (
        "FB-58 no nan_to_num",
        find_nan_to_num,
        ["torch.nan_to_num(x)", "x.nan_to_num_(0.0)", "from torch import nan_to_num as clean"],
        "torch.isnan(x)",
    ),
    (
        "FB-61 zip is strict",
        find_zip_without_strict,
        ["zip(a, b)", "zip(a, b, strict=False)", "zip(a, b, strict=maybe)"],
        "zip(a, b, strict=True)",
    ),
    (
        "FB-44 a collective names its group",
        find_collective_without_group,
        [
            "import torch\ntorch.distributed.all_reduce(x)",
            "import torch.distributed as dist\ndist.barrier()",
            "from torch import distributed as d\nd.broadcast(x, src=0, group=None)",
            "from torch.distributed import all_gather as g\ng(parts, x)",
            "import torch.distributed as dist\ndist.all_reduce(x, dist.ReduceOp.SUM, tp_group)",
        ],
        "import torch.distributed as dist\ndist.all_reduce(x, group=g)\ntorch.gather(x, 0, i)\ndist.get_rank()",
    ),
    (
        "FB-31 no torch.distributed.nn",
        find_distributed_nn,
        [
            "import torch\ntorch.distributed.nn.functional.all_gather(x)",
            "import torch.distributed as dist\ndist.nn.all_gather(x)",
            "import torch.distributed.nn.functional as F",
            "from torch.distributed.nn.functional import all_gather",
            "from torch.distributed import nn",
        ],
        "import torch\nimport torch.distributed as dist\ntorch.nn.functional.relu(x)\ndist.all_gather(p, x, group=g)",
    ),
    (
        "no bare except",
        find_bare_except,
        ["try:\n    f()\nexcept:\n    pass"],
        "try:\n    f()\nexcept OSError:\n    pass",
    ),
    (
        "FB-70 no default for an argument",
        find_default_for_an_argument,
        ["getattr(args, 'x', 1)", "getattr(self.args, name, None)", "getattr(host_args, 'x', 0)"],
        "getattr(args, 'x')\ngetattr(model, 'module', None)",
    ),
    (
        "functions fit in the head",
        find_long_functions,
        ["def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES + 1)],
        "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES,
    ),
    ("a file says what it is for", find_modules_without_docstring, ["x = 1"], '"""For this, never for that."""\nx = 1'),
]
IDS = [rule[0] for rule in RULES]


@pytest.mark.parametrize(("name", "find", "bad", "good"), RULES, ids=IDS)
def test_the_package_keeps_the_rule(name, find, bad, good, package_trees, benchmark_trees):
    """The faults that these forms cause are told in the table of field bugs; review does not see every one of them."""
    found = [f"{path}:{line}: {why}" for path, tree in (package_trees | benchmark_trees).items() for line, why in find(tree, path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("name", "find", "bad", "good"), RULES, ids=IDS)
def test_the_rule_finds_what_breaks_it_and_allows_what_keeps_it(name, find, bad, good):
    """A check that cannot fail proves nothing."""
    for snippet in bad:
        assert list(find(ast.parse(snippet), "losses/grpo.py")), snippet
    assert list(find(ast.parse(good), "losses/grpo.py")) == []


def test_a_kernel_file_may_have_longer_functions():
    kernel = ast.parse("def f():\n" + "    x = 1\n" * MAX_KERNEL_FILE_FUNCTION_LINES)
    assert list(find_long_functions(kernel, "ops/log_probs.py"))
    assert list(find_long_functions(kernel, "ops/log_probs_triton.py")) == []


def test_fresh_memory_of_the_package_is_nan():
    """FB-84: catches an output element that nobody writes, which shows by chance alone while memory is clean."""
    allocations = (
        "[torch.empty(3, dtype=dtype, requires_grad=True), torch.empty_like(like), like.new_empty(2, 3), "
        "torch.empty(0, dtype=dtype), torch.empty(3, dtype=torch.int64)]"
    )
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        module = {"__name__": "megatron_rl.ops.some_kernel", "torch": torch, "dtype": dtype}
        *floating, _ = eval(allocations, module, {"like": torch.zeros(4, dtype=dtype)})
        assert all(bool(tensor.isnan().all()) for tensor in floating)
