"""Our calls of Transformer Engine's and apex's matmul fit the functions that a checkout of each defines; neither is installed.

TE_ROOT=... APEX_ROOT=... pytest tests/test_accelerator_sources.py

Both swallow a call that does not fit (another matmul is taken then), so a renamed argument would cost speed without a word.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron_rl.ops.linear_head import accumulating_matmul

GEMM, BASE = "transformer_engine/pytorch/cpp_extensions/gemm.py", "transformer_engine/pytorch/module/base.py"
APEX_BINDING = "csrc/megatron/fused_weight_gradient_dense.cpp"
# As a release wrote them: with the workspace as an argument, and without.
WITH_WORKSPACE = "def general_gemm(A, B, workspace, out_dtype=None, accumulate=False, layout='TN', out=None, bias=None, \
use_split_accumulator=False, grad=False): ..."
WITHOUT = WITH_WORKSPACE.replace(" workspace,", "")
HAS_WORKSPACE = "def get_workspace(): ..."
INPUTS = "input_2d, at::Tensor& d_output_2d"
APEX = """void f(at::Tensor& input_2d, at::Tensor& d_output_2d, at::Tensor& d_weight);
m.def("wgrad_gemm_accum_fp32", &f, "wgrad gemm accum in fp32");"""


def root(variable: str):
    """The test parameter of a checkout, skipped with a reason without one."""
    path = os.environ.get(variable)
    reason = f"needs a checkout: set {variable} to its root"
    return pytest.param(path, id=variable, marks=pytest.mark.skipif(path is None, reason=reason))


def signature_of(source: str, name: str) -> ast.FunctionDef | None:
    """The function as it is defined, without its body, its types and its decorators."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == name]
    for function in found:
        function.returns, function.decorator_list = None, []
        for argument in (*function.args.args, *function.args.kwonlyargs):
            argument.annotation = None
    return found[-1] if found else None


def stand_in(source: str, name: str, body: str) -> Callable:
    """Takes what the source's function takes and does what `body` says."""
    function = signature_of(source, name)
    function.body = ast.parse(body).body
    names: dict = {"torch": torch}
    exec(compile(ast.fix_missing_locations(ast.Module([function], [])), name, "exec"), names)
    return names[name]


def transformer_engine(gemm: str, base: str) -> dict[str, ModuleType]:
    """A package whose general_gemm has that signature and does what it does for a weight gradient: out += B^T A."""
    body = "assert (layout, grad, accumulate, out_dtype) == ('NT', True, True, torch.float32)\nout.add_(B.float().t() @ A.float())"
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.module")
    modules = {name: ModuleType(name) for name in names}
    modules["transformer_engine.pytorch.cpp_extensions"] = extensions = ModuleType("cpp_extensions")
    extensions.general_gemm = stand_in(gemm, "general_gemm", body)
    modules["transformer_engine.pytorch.module.base"] = module = ModuleType("base")
    if signature_of(base, "get_workspace") is not None:
        module.get_workspace = stand_in(base, "get_workspace", "return torch.empty(0)")
    return modules


def add_product(hidden, gradient, out):
    out.add_(gradient.float().t() @ hidden.float())


def apex(binding: str = APEX, function: Callable = add_product) -> dict[str, ModuleType]:
    """The extension with its function's arguments in the order of the C++ source: d_weight += d_output^T input."""
    bound = re.search(r'm\.def\(\s*"wgrad_gemm_accum_fp32",\s*&(\w+)', binding)[1]
    declared = re.search(rf"void {bound}\(([^)]*)\)", binding)[1]
    names = [re.findall(r"\w+", argument)[-1] for argument in declared.split(",")]
    of_role = {"input": 0, "d_output": 1, "d_weight": 2}
    roles = [next(role for start, role in of_role.items() if name.startswith(start)) for name in names]
    module = ModuleType("fused_weight_gradient_mlp_cuda")

    def wgrad_gemm_accum_fp32(*arguments):
        function(*(arguments[roles.index(role)] for role in range(3)))

    module.wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp32
    return {"fused_weight_gradient_mlp_cuda": module}


@pytest.fixture
def is_taken(monkeypatch):
    """modules -> whether accumulating_matmul believes what it finds in them; it checks the numbers itself."""

    def look(modules: dict[str, ModuleType]) -> bool:
        for name in ("fused_weight_gradient_mlp_cuda", "transformer_engine"):
            monkeypatch.setitem(sys.modules, name, None)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return accumulating_matmul.__wrapped__(torch.bfloat16, torch.device("cpu")) is not None

    return look


@pytest.mark.parametrize(
    ("gemm", "base", "fits"),
    [
        pytest.param(WITH_WORKSPACE, HAS_WORKSPACE, True, id="with a workspace"),
        pytest.param(WITHOUT, "", True, id="without one"),
        pytest.param(WITHOUT.replace("accumulate", "add"), "", False, id="a renamed argument"),
        pytest.param(WITHOUT.replace("A, B", "B, A"), "", False, id="operands the other way round"),
        pytest.param(WITH_WORKSPACE, "", False, id="a workspace that is not where it was"),
    ],
)
def test_a_signature_that_our_call_does_not_fit_is_seen(is_taken, gemm, base, fits):
    """What the tests of checkouts below would say of such a release."""
    assert is_taken(transformer_engine(gemm, base)) == fits


@pytest.mark.parametrize(("binding", "fits"), [(APEX, True), (APEX.replace(INPUTS, "d_output_2d, at::Tensor& input_2d"), False)])
def test_arguments_of_apex_in_another_order_are_seen(is_taken, binding, fits):
    assert is_taken(apex(binding)) == fits


def raising(hidden, gradient, out):
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(raising, id="built for another device"),
        pytest.param(lambda hidden, gradient, out: out.copy_(gradient.float().t() @ hidden.float()), id="FB-87 does not add"),
        pytest.param(lambda hidden, gradient, out: out.add_((gradient.t() @ hidden).float()), id="FB-85 rounds to 16 bits"),
        pytest.param(lambda hidden, gradient, out: None, id="does nothing"),
    ],
)
def test_a_matmul_whose_numbers_are_wrong_is_not_believed(is_taken, function):
    """Neither is one that is not there: PyPI's empty transformer-engine has no such function."""
    empty = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    empty["transformer_engine.pytorch.cpp_extensions"] = ModuleType("cpp_extensions")
    assert not is_taken({}) and not is_taken(empty)
    assert not is_taken(apex(function=function))
    assert is_taken({**apex(function=function), **transformer_engine(WITHOUT, "")})


@pytest.mark.parametrize("checkout", [root("TE_ROOT")])
def test_our_call_fits_the_checkout_of_transformer_engine(is_taken, checkout):
    gemm, base = (Path(checkout, path).read_text(encoding="utf-8") for path in (GEMM, BASE))
    assert is_taken(transformer_engine(gemm, base))


@pytest.mark.parametrize("checkout", [root("APEX_ROOT")])
def test_our_call_fits_the_checkout_of_apex(is_taken, checkout):
    assert is_taken(apex(Path(checkout, APEX_BINDING).read_text(encoding="utf-8")))
