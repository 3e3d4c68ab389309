"""Transformer Engine's and apex's matmul are taken where their numbers are right; neither is installed here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from megatron_rl.ops.linear_head import accumulating_matmul


def transformer_engine(has_workspace: bool = True) -> dict[str, ModuleType]:
    """A package whose general_gemm does out += B^T A, as for a weight gradient. Some releases need the workspace as an argument."""

    def gemm(A, B, out_dtype=None, accumulate=False, layout="TN", out=None, bias=None, use_split_accumulator=False, grad=False):
        assert (layout, grad, accumulate, out_dtype) == ("NT", True, True, torch.float32)
        out.add_(B.float().t() @ A.float())

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.module")
    modules = {name: ModuleType(name) for name in names}
    modules["transformer_engine.pytorch.cpp_extensions"] = extensions = ModuleType("cpp_extensions")
    modules["transformer_engine.pytorch.module.base"] = base = ModuleType("base")
    extensions.general_gemm = gemm
    if has_workspace:
        extensions.general_gemm = lambda A, B, workspace, **options: gemm(A, B, **options)
        base.get_workspace = lambda: torch.empty(0)
    return modules


def add_product(hidden, gradient, out):
    out.add_(gradient.float().t() @ hidden.float())


def apex(function: Callable = add_product) -> dict[str, ModuleType]:
    """The extension: d_weight += d_output^T input, its arguments in the order of the C++ source."""
    module = ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = function
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


@pytest.mark.parametrize("has_workspace", [False, True])
def test_the_functions_of_each_release_are_taken(is_taken, has_workspace):
    """Both swallow a call that does not fit, and a slower matmul is taken then."""
    assert is_taken(transformer_engine(has_workspace)) and is_taken(apex())


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
    assert is_taken({**apex(function=function), **transformer_engine()})
