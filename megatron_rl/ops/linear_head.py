"""The three matmuls of a head, logits = X W^T, dX = G W and dW += G^T X, each at the precision it is asked for; never a loss.

16-bit products are exact in float32 and are summed there. What is rounded to 16 bits is the result, and only where its tensor
is 16-bit: logits unless float32 ones were asked for, and dX. dW never is: it is added to a float32 buffer.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# Of a product that cannot be written where it belongs: 8192 columns of a hidden size of 4096, tiles enough for any device.
TEMPORARY_BYTES = 128 * 1024**2
# out += gradient.T @ hidden, all of it in the kernel.
Accumulation = Callable[[Tensor, Tensor, Tensor], object]  # (hidden [n, H], gradient [n, V_tp], out [V_tp, H] float32), contiguous


def accumulator_dtype(weight: Tensor) -> torch.dtype:
    """Of the weight gradient's buffer: float32, or float64 for float64 weights."""
    return torch.promote_types(weight.dtype, torch.float32)


def logits_dtype(weight: Tensor, fp32_logits: bool) -> torch.dtype:
    return accumulator_dtype(weight) if fp32_logits else weight.dtype


def gradient_dtype(weight: Tensor, fp32_logits: bool) -> torch.dtype:
    """Of the logits' gradient. CUDA multiplies 16-bit operands; elsewhere float32 logits are multiplied as they are."""
    return weight.dtype if weight.is_cuda else logits_dtype(weight, fp32_logits)


def bytes_per_logit(weight: Tensor, fp32_logits: bool) -> int:
    """Of all chunk buffers together: the logits, and beside them a gradient of another dtype or its float32 copy on the CPU."""
    logits, gradient = logits_dtype(weight, fp32_logits), gradient_dtype(weight, fp32_logits)
    beside = gradient.itemsize if gradient != logits else 0
    copy = accumulator_dtype(weight).itemsize if gradient.itemsize < 4 and not weight.is_cuda else 0
    return logits.itemsize + beside + copy


def product_operand(tensor: Tensor, fp32_logits: bool) -> Tensor:
    """X or W as the matmuls take it: float32 logits of 16-bit operands are an upcast wherever no matmul has such an output."""
    return tensor if tensor.is_cuda else tensor.to(logits_dtype(tensor, fp32_logits))


def head_logits(
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V_tp, H]
    *,
    out: Tensor,  # [n, V_tp] in the operands' dtype or float32
) -> Tensor:
    """X W^T into `out`."""
    if out.dtype == hidden.dtype:
        return torch.mm(hidden, weight.t(), out=out)
    return _float32_product(hidden, weight.t(), out)


def hidden_gradient(
    gradient: Tensor,  # [n, V_tp]
    weight: Tensor,  # [V_tp, H]
) -> Tensor:  # [n, H] in the operands' dtype
    """G W: this shard's part of the sum over the vocabulary."""
    # With `out`, for autocast would multiply float32 operands as 16-bit ones.
    return torch.mm(gradient, weight, out=gradient.new_empty(gradient.shape[0], weight.shape[1]))


def add_weight_gradient(
    gradient: Tensor,  # [n, V_tp]
    hidden: Tensor,  # [n, H]
    *,
    out: Tensor,  # [V_tp, H] float32, or float64
) -> Tensor:
    """out += G^T X, summed in the dtype of `out` and never rounded to 16 bits on the way."""
    if gradient.dtype == hidden.dtype == out.dtype:
        return out.addmm_(gradient.t(), hidden)
    if not gradient.is_cuda:
        return out.addmm_(gradient.t().to(out.dtype), hidden.to(out.dtype))
    accumulation = accumulating_matmul(gradient.dtype, gradient.device) if out.is_contiguous() else None
    if accumulation is not None:
        accumulation(hidden.contiguous(), gradient.contiguous(), out)
        return out
    outputs = _float32_outputs(gradient.dtype, gradient.device)
    if "addmm" in outputs:
        return torch.addmm(out, gradient.t(), hidden, out_dtype=torch.float32, out=out)
    multiply = _float32_mm if "mm" in outputs else _upcast_mm
    for columns in blocks(out.shape[0], out.shape[1] * out.itemsize):
        out[columns].add_(multiply(gradient[:, columns].t(), hidden))
    return out


def _float32_product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    if not left.is_cuda:
        return torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)
    outputs = _float32_outputs(left.dtype, left.device)
    if "mm out" in outputs:
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    multiply = _float32_mm if "mm" in outputs else _upcast_mm
    for columns in blocks(out.shape[1], max(left.shape) * out.itemsize):
        out[:, columns] = multiply(left, right[:, columns])
    return out


def _float32_mm(left: Tensor, right: Tensor) -> Tensor:
    return torch.mm(left, right, out_dtype=torch.float32)


def _upcast_mm(left: Tensor, right: Tensor) -> Tensor:
    return torch.mm(left.float(), right.float())


def blocks(num_columns: int, bytes_per_column: int) -> Iterator[slice]:
    """Consecutive columns whose product takes TEMPORARY_BYTES at most, or a single one's: what holds a whole one would hold the
    logits, or the weight gradient, a second time."""
    step = max(1, TEMPORARY_BYTES // max(bytes_per_column, 1))
    for start in range(0, num_columns, step):
        yield slice(start, min(start + step, num_columns))


@functools.cache
def _float32_outputs(dtype: torch.dtype, device: torch.device) -> frozenset[str]:
    """Which matmuls of this torch give float32 from 16-bit operands: tried once, and only believed when the numbers are right.

    The form with `out` was broken in some releases (pytorch#154086).
    """
    left = torch.linspace(-1, 1, 64 * 64, device=device).view(64, 64).to(dtype)
    exact = (left.double() @ left.double()).float()  # float32 matmuls may be TF32 here
    start = torch.ones_like(exact)
    forms: dict[str, Callable[[], Tensor]] = {
        "mm": lambda: torch.mm(left, left, out_dtype=torch.float32),
        "mm out": lambda: torch.mm(left, left, out_dtype=torch.float32, out=torch.zeros_like(exact)),
        "addmm": lambda: torch.addmm(start, left, left, out_dtype=torch.float32, out=start) - 1.0,
    }
    working = set()
    for name, form in forms.items():
        try:
            result = form()
        except (RuntimeError, TypeError):  # what a torch without the form raises
            continue
        # 1e-4: sums of 64 products of at most 1 differ by their order; a 16-bit result would be off by 1e-2.
        if result.dtype == torch.float32 and torch.allclose(result, exact, rtol=0, atol=1e-4):
            working.add(name)
    return frozenset(working)


@functools.cache
def accumulating_matmul(dtype: torch.dtype, device: torch.device) -> Accumulation | None:
    """apex's matmul that adds to a float32 buffer, or Transformer Engine's, which Megatron's own layers use; None where neither is.

    Believed when its numbers are right, as the forms of torch are.
    """
    gradient = torch.linspace(-1, 1, 64 * 64, device=device).view(64, 64).to(dtype)
    hidden = gradient[:, 32:].contiguous()  # of another width: a result that is the wrong way round shows
    exact = 1.0 + gradient.double().t() @ hidden.double()
    for find in (_apex_accumulation, _transformer_engine_accumulation):
        accumulation, out = find(), torch.ones(64, 32, device=device)
        if accumulation is None:
            continue
        try:
            accumulation(hidden, gradient, out)
        except (RuntimeError, TypeError):  # a build for another device, or a release with other arguments
            continue
        if torch.allclose(out.double(), exact, rtol=0, atol=1e-4):
            return accumulation
    return None


def _apex_accumulation() -> Accumulation | None:
    try:
        return importlib.import_module("fused_weight_gradient_mlp_cuda").wgrad_gemm_accum_fp32
    except ImportError:
        return None


def _transformer_engine_accumulation() -> Accumulation | None:
    """The call that its layers make for a weight gradient. Some releases want their workspace as an argument."""
    try:
        general_gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
        workspace = {}
        if "workspace" in inspect.signature(general_gemm).parameters:
            workspace = {"workspace": importlib.import_module("transformer_engine.pytorch.module.base").get_workspace()}
    # PyPI's empty meta package raises RuntimeError, a missing library OSError; releases before 2.0 have no such function.
    except (ImportError, AttributeError, RuntimeError, OSError):
        return None
    options = {"layout": "NT", "grad": True, "accumulate": True, "out_dtype": torch.float32, "use_split_accumulator": False}

    def accumulate(hidden: Tensor, gradient: Tensor, out: Tensor) -> None:
        general_gemm(hidden, gradient, **workspace, **options, out=out)

    return accumulate
