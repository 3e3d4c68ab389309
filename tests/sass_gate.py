"""Compiles kernels for sm_90 or sm_100 on a machine without a GPU and reads the machine code; it must never run a kernel.

    python tests/sass_gate.py                         figures of each binary that make_launches asks for, as JSON
    python tests/sass_gate.py --target 100            of a B200 in place of an H100 or H200

No figure of a kernel is written down here: launchers get tensors without storage, and Triton, told of such a device, says what
it would compile. A size that is specialised on shows as one more binary. A look at a value raises, as it would wait on a GPU.

The process must not have imported Triton with TRITON_INTERPRET=1, and compiles into an empty cache. ptxas, cuobjdump and
nvdisasm come with Triton's wheel. Exit status 3: Triton or its tools are not here, the reason on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatron_rl import grpo_loss, gspo_loss
from megatron_rl.declare import POLICY_LOSSES, get_policy_loss
from megatron_rl.layout.groups import GATHER_INTO_ONE, SINGLE
from megatron_rl.losses.kl import KL_ESTIMATORS
from megatron_rl.ops.backends import resolve_backend, vocab_shard
from megatron_rl.ops.log_probs import row_kernels
from megatron_rl.ops.scale import AssumedScale
from megatron_rl.policy_loss import api
from megatron_rl.policy_loss import policy_loss as public_function

NOT_HERE = 3
WARP = 32
# --target: multiprocessors and bytes of L2 of an H100 and an H200, and of a B200.
DEVICES = {90: (132, 50 << 20), 100: (148, 126 << 20)}
ADDRESS = 1 << 20  # what torch's allocator gives at least, fake tensors start here
# A multiprocessor of each of them: the registers, threads, blocks and shared memory that a kernel's blocks take.
SM_REGISTERS, SM_THREADS, SM_BLOCKS, SM_SHARED_BYTES = 65536, 2048, 32, 227 * 1024
# A register file is dealt out to warps in units of 256, a block takes 1 KiB of shared memory for itself.
REGISTER_UNIT, SHARED_PER_BLOCK = 8, 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--code-of", nargs="+", metavar="TEXT", help="read the code of the kernels with TEXT in their name alone")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--target", type=int, choices=tuple(DEVICES), default=90, help="compute capability times ten")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(TRITON_CACHE_DIR=cache, OMP_NUM_THREADS="1", TRITON_DISABLE_LINE_INFO="1")
        if reason := why_not_here():
            print(reason, file=sys.stderr)
            return NOT_HERE
        recorded = {name: record(launch, options.target) for name, launch in make_launches().items()}
        jobs: dict[str, tuple[str, Binary]] = {}
        for name, binaries in recorded.items():
            for binary in binaries:
                jobs.setdefault(binary.key(), (name, binary))
        number = {key: index for index, key in enumerate(jobs)}
        figures = read_all(list(jobs.values()), options.processes, options.code_of, options.target)
        launched = {name: [number[binary.key()] for binary in binaries] for name, binaries in recorded.items()}
        print(json.dumps({"launched": launched, "figures": figures}))
    return 0


def tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def why_not_here() -> str:
    """Empty where the gate can run."""
    if os.environ.pop("TRITON_INTERPRET", "0") == "1" and "triton" in sys.modules:
        raise SystemExit("sass_gate.py: Triton was imported as an interpreter in this process; start a fresh one")
    try:
        import triton.compiler  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    missing = [name for name in ("ptxas", "cuobjdump", "nvdisasm") if not (tools() / name).is_file()]
    return f"this build of Triton carries no {', '.join(missing)}" if missing else ""


def read_all(jobs: list[tuple[str, Binary]], processes: int, code_of: list[str] | None, target: int) -> list[dict]:
    """In `processes` processes: almost all of the time is the compiler's, on one core each."""
    global _jobs  # forked workers see them; a JITFunction does not travel through a pipe
    _jobs = [(*job, target, code_of is None or any(text in job[1].kernel for text in code_of)) for job in jobs]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return pool.map(_read, range(len(jobs)), chunksize=1)


def _read(index: int) -> dict:
    return read_binary(*_jobs[index])


def read_binary(launch: str, binary: Binary, target: int, has_code: bool) -> dict[str, object]:
    """One binary's machine code. has_code False: registers and stack alone. The disassembler takes longer than the compiler, and
    a spill is on the stack."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=binary.function, signature=binary.signature, constexprs=binary.constants, attrs=binary.attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", target, WARP), options=binary.options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", tool("cuobjdump", "--dump-resource-usage", cubin))
        # Code alone; without its analysis of data flow, half as slow.
        sass = tool("nvdisasm", "-c", "-ndf", cubin) if has_code else ""
    registers, stack, shared = map(int, usage.groups())
    dtype = next(kind[1:] for kind in binary.signature.values() if isinstance(kind, str) and kind.startswith("*"))
    everything = Counter(family(instruction) for instruction in instructions(sass))
    threads = binary.options["num_warps"] * WARP
    blocks = blocks_per_sm(registers, shared, threads)
    return {
        "launch": launch,
        "kernel": binary.kernel,
        "dtype": dtype,
        "num_warps": binary.options["num_warps"],
        "registers": registers,
        "stack_bytes": stack,
        "local_accesses": everything["LDL"] + everything["STL"],
        # In the order of the code.
        "walks": [walk_of(loop, {"bf16": 2, "fp16": 2}.get(dtype, 4), blocks * threads) for loop in hot_loops(sass)],
    }


def walk_of(loop: list[str], logit_bytes: int, threads: int) -> dict[str, object]:
    """An innermost loop that reads logits and takes exponentials of them, or writes them."""
    count = Counter(family(instruction) for instruction in loop)
    loads = [instruction for instruction in loop if family(instruction) == "LDG"]
    logits = sum(map(bytes_of, loads)) / logit_bytes  # of one thread in one iteration, whatever ptxas unrolled
    return {
        "loads": dict(Counter(loads)),
        "stores": dict(Counter(instruction for instruction in loop if family(instruction) == "STG")),
        "shuffles": count["SHFL"],
        "barriers": count["BAR"],
        "instructions_per_logit": len(loop) / logits,
        "exponentials_per_logit": count["MUFU"] / logits,
        "nan_maxima_per_logit": sum(x.startswith("FMNMX.NAN") for x in loop) / logits,
        "kib_in_flight": threads * sum(map(bytes_of, loads)) / 1024,
    }


def tool(name: str, *arguments: object) -> str:
    return subprocess.run([str(tools() / name), *map(str, arguments)], capture_output=True, text=True, check=True).stdout


INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)")


def instructions(sass: str) -> list[str]:
    return INSTRUCTION.findall(sass)


def hot_loops(sass: str) -> list[list[str]]:
    """The innermost loops that load, and take exponentials or store. A loop: from a label to the branch that returns to it."""
    lines, labels, bodies = sass.split("\n"), {}, []
    for number, text in enumerate(lines):
        if label := re.match(r"^(\.L_x_\d+):", text):
            labels[label.group(1)] = number
        branch = re.search(r"BRA[^;]*?`\((\.L_x_\d+)\)", text)
        if branch and labels.get(branch.group(1), number) < number:
            bodies.append((labels[branch.group(1)], number))
    inner = [a for a in bodies if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in bodies)]
    loops = [instructions("\n".join(lines[start : end + 1])) for start, end in inner]
    found = [{family(instruction) for instruction in loop} for loop in loops]
    return [loop for loop, names in zip(loops, found, strict=True) if "LDG" in names and names & {"MUFU", "STG"}]


def family(instruction: str) -> str:
    return instruction.split(".")[0]


def bytes_of(instruction: str) -> int:
    width = re.search(r"\.(64|128)\b", instruction)
    return int(width.group(1)) // 8 if width else 2 if ".U16" in instruction else 4


def blocks_per_sm(registers: int, shared: int, threads: int) -> int:
    by_registers = SM_REGISTERS // (-(-registers // REGISTER_UNIT) * REGISTER_UNIT * threads)
    by_shared = SM_SHARED_BYTES // (shared + SHARED_PER_BLOCK)
    return min(by_registers, by_shared, SM_THREADS // threads, SM_BLOCKS)


# What a launch asks for


@dataclass(frozen=True)
class Binary:
    """What one launch would compile, as Triton says it."""

    kernel: str
    signature: dict[str, str | tuple]  # of an argument that is a tuple, a tuple
    constants: dict[str, object]
    attributes: dict[tuple, list]
    options: dict[str, object]
    function: object

    def key(self) -> str:
        return repr(
            [self.kernel, self.signature, *map(sorted, (self.constants.items(), self.attributes.items(), self.options.items()))]
        )


def record(launch: Callable[[], None], target: int) -> list[Binary]:
    """The binaries that `launch` asks for, in its order, repeated ones too."""
    from triton.runtime.jit import JITFunction

    found: list[Binary] = []

    def describe(function, hook, key, signature, *others) -> bool:
        # Triton calls it just before it compiles. Its own hook writes the constants as JSON, which fails for a loss before 3.7.
        constants, options, configs, _ = others[-4:]
        names = list(signature)
        found.append(
            Binary(
                kernel=function.__name__,
                signature=dict(signature),
                constants={names[path[0]]: getattr(value, "value", value) for path, value in constants.items()},
                attributes=dict(configs[0]),
                options=dict(options.__dict__),
                function=function,
            )
        )
        return True  # Triton then neither compiles nor launches

    with mock.patch.object(JITFunction, "_call_hook", describe), pretended_device(target):
        launch()
    return found


@contextlib.contextmanager
def pretended_device(target: int) -> Iterator[None]:
    """Tensors on "cuda" without storage, and a driver that answers for such a device. Looking at a value raises."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    pretended = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", target, WARP),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    multiprocessors, l2_bytes = DEVICES[target]
    properties = SimpleNamespace(multi_processor_count=multiprocessors, L2_cache_size=l2_bytes)
    replaced = [
        (FakeTensor, "__getitem__", indexed),
        (FakeTensor, "data_ptr", lambda tensor: ADDRESS + tensor.storage_offset() * tensor.element_size()),
        (torch.cuda, "get_device_properties", lambda *device: properties),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device", contextlib.nullcontext),
        (torch.cuda, "device_of", contextlib.nullcontext),
        (torch.cuda, "current_device", lambda: 0),
        # A torch built for CUDA, 2.11 and before, makes a real tensor on the device here, and asks for a driver.
        (fake_tensor, "init_gpu_context", lambda device: None),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        holder = "_active" if hasattr(driver, "_active") else "active"  # Triton 3.4
        stack.enter_context(mock.patch.object(driver, holder, pretended))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(FakeTensorMode())
        stack.enter_context(torch.no_grad())
        yield


def indexed(tensor: torch.Tensor, index: object) -> torch.Tensor:
    """tensor[index] of numbers, slices, vectors and an ellipsis: a torch without CUDA stumbles over the device in its own."""
    parts, dimension = index if isinstance(index, tuple) else (index,), 0
    for number, part in enumerate(parts):
        if part is Ellipsis:
            dimension = tensor.dim() - (len(parts) - number - 1)
        elif isinstance(part, int):
            tensor = tensor.select(dimension, part)
        elif isinstance(part, torch.Tensor):
            tensor, dimension = torch.ops.aten.index_select(tensor, dimension, part), dimension + 1
        else:
            start, stop, step = part.indices(tensor.shape[dimension])
            tensor = torch.ops.aten.slice(tensor, dimension, start, stop, step)
            dimension += 1
    return tensor


# Which launches of the package are compiled: the kernels of rows and of losses, by the names that test_kernel_code.py uses. Called
# under `record` alone, where tensors have no storage and no kernel runs; they must never look at a value.

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Enough rows to fill every multiprocessor, and the vocabulary of Qwen; few rows are split.
ROWS, FEW_ROWS, COLUMNS = 4096, 16, 151936
# (rows, columns, row stride, offset of the first row): multiples of 16, of 8 alone, of nothing; one row; columns of a wider
# tensor from an odd address on; more than 2^31 elements; a shard narrower than one tile.
SIZES = [
    *((4096, 151936, 151936, 0), (4096, 151928, 151928, 0), (4096, 50257, 50257, 0), (1, 50257, 50257, 0), (4097, 50257, 50263, 5)),
    *((70000, 32768, 32768, 0), (4096, 1, 1, 0), (4096, 1000, 1000, 0)),
]
TEMPERATURES = (1.0, 0.7)
TRITON_LOSSES = [name for name in POLICY_LOSSES.names() if get_policy_loss(name).triton]


class PretendedPair:
    """A group of two ranks whose collectives leave memory as it is."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


def rows_of(rows: int, columns: int, stride: int, offset: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(offset + rows * stride, dtype=dtype, device="cuda").as_strided((rows, columns), (stride, 1), offset)


def large(dtype: str, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    return rows_of(rows, columns, columns, 0, DTYPES[dtype])


def column(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(rows, dtype=dtype, device="cuda")


def statistics(logits: Tensor, *, with_entropy: bool = False, group=SINGLE, temperature: float = 1.0) -> None:
    shard = vocab_shard(logits.shape[1], temperature, None, group)
    kernels, mask = row_kernels(resolve_backend("auto", logits)), column(logits.shape[0], torch.bool)
    with mock.patch.object(dist, GATHER_INTO_ONE, lambda *tensors, group: None):
        kernels.forward(logits, column(logits.shape[0], torch.int64), mask, shard, group, with_entropy=with_entropy)


def gradient(logits: Tensor, *, with_entropy: bool = False, out: Tensor | None = None, temperature: float = 1.0) -> None:
    rows = logits.shape[0]
    row_kernels(resolve_backend("auto", logits)).gradient(
        logits,
        column(rows, torch.int64),
        column(rows, torch.bool),
        *(column(rows) for _ in range(4)),
        column(rows) if with_entropy else None,
        vocab_shard(logits.shape[1], temperature, None, SINGLE),
        out=logits if out is None else out,
    )


def unit_gradient(logits: Tensor, *, out: Tensor | None = None, with_entropy: bool = False, temperature: float = 1.0) -> None:
    shard = vocab_shard(logits.shape[1], temperature, None, SINGLE)
    labels, run = column(logits.shape[0], torch.int64), row_kernels(resolve_backend("auto", logits)).unit_gradient
    assert run is not None
    assert run(logits, labels, shard, with_entropy=with_entropy, out=logits if out is None else out) is not None


def rescale(gradient: Tensor) -> None:
    """The backward of a loss whose factor was assumed."""
    from megatron_rl.ops.rescale_triton import rescale as run

    run(gradient, *(torch.empty((), device="cuda") for _ in range(3)))


def sparse_head(dtype: torch.dtype, *, hidden_size: int = 4096, num_pairs: int = 65536) -> None:
    """The products of pairs and both gradients. Only their host numbers count."""
    from megatron_rl.ops.linear_log_probs import pair_kernels
    from megatron_rl.ops.support import Pairs

    kernels, rows = pair_kernels(resolve_backend("auto", column(1))), column(ROWS, torch.int64)
    numbers = (column(num_pairs, torch.int64) for _ in range(3))
    pairs = Pairs(rows, *numbers, column(ROWS + 1, torch.int64), column(num_pairs, torch.bool), column(ROWS + 1, torch.int64))
    hidden, weight, gradient = (torch.empty(size, hidden_size, dtype=dtype, device="cuda") for size in (ROWS, COLUMNS, ROWS))
    g = kernels.multiply(hidden, weight, pairs, max_bytes=0)
    kernels.add_hidden(g, pairs, weight, out=gradient, max_bytes=0)
    of_weight = torch.empty(COLUMNS, hidden_size, device="cuda")
    kernels.add_weight(g, pairs, hidden, out=of_weight, max_bytes=0)


def policy_loss(
    function,
    *,
    rows: int = ROWS,
    documents: int = 16,
    everything=False,
    has_sampler=False,
    logits: Tensor | None = None,
    **options,
):
    """The loss's forward: the statistics' launches, then the loss's."""
    if has_sampler:
        options |= {"rollout_log_probs": column(rows)}
    if everything:
        options |= {"ref_log_probs": column(rows), "importance_weights": column(rows), "regularizer_weights": column(documents)}
        options |= {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}
    function(
        large("bf16", rows) if logits is None else logits,
        column(rows, torch.int64),
        column(rows),
        column(documents),
        column(rows, torch.bool),
        column(documents + 1, torch.int32),
        column(documents),
        advantages_per="sample",
        tp_group=SINGLE,
        cp_group=SINGLE,
        **options,
    )


def on_policy(function):
    return lambda logits, labels, old_log_probs, *tensors, **options: function(logits, labels, None, *tensors, **options)


def one_read(function, *, dtype: str = "bf16", columns: int = COLUMNS, loss_scale: AssumedScale | float = 2.0, **options) -> None:
    """The loss's forward where its factor is declared or assumed, on logits that get their gradient in place."""
    logits = large(dtype, columns=columns).requires_grad_()
    # A torch without CUDA builds no graph of tensors there.
    without_graph = mock.patch.object(api._WithLogitsGradient, "apply", lambda logits, result, *others: result.loss)
    with mock.patch.object(torch, "is_grad_enabled", lambda: True), without_graph:
        policy_loss(function, logits=logits, inplace=True, loss_scale=loss_scale, **options)


def each_size(function: Callable[..., None]) -> None:
    """What the launches of one configuration differ in while a program runs."""
    for size in SIZES:
        for temperature in TEMPERATURES:
            function(rows_of(*size, torch.bfloat16), temperature=temperature)


def make_launches() -> dict[str, Callable[[], None]]:
    pair = PretendedPair()
    launches: dict[str, Callable[[], None]] = {
        "statistics bf16": lambda: statistics(large("bf16")),
        "statistics bf16, entropy": lambda: statistics(large("bf16"), with_entropy=True),
        "statistics fp32, entropy": lambda: statistics(large("fp32"), with_entropy=True),
        "statistics bf16, split": lambda: statistics(large("bf16", FEW_ROWS)),
        "statistics bf16, entropy, split, shards": lambda: statistics(large("bf16", FEW_ROWS), group=pair, with_entropy=True),
        "statistics of each size": lambda: each_size(statistics),
        "gradient bf16": lambda: gradient(large("bf16")),
        "gradient bf16, entropy": lambda: gradient(large("bf16"), with_entropy=True),
        "gradient fp32, entropy": lambda: gradient(large("fp32"), with_entropy=True),
        "gradient fp32 into bf16": lambda: gradient(large("fp32"), out=large("bf16")),
        "gradient of each size": lambda: each_size(gradient),
        # In the head: one row and, with entropy in float32, six that a multiprocessor has under way at once.
        "unit gradient bf16": lambda: unit_gradient(large("bf16")),
        "unit gradient fp32, six rows, entropy": lambda: unit_gradient(large("fp32", columns=12800), with_entropy=True),
        "unit gradient fp32 into bf16, three rows": lambda: unit_gradient(
            large("fp32", columns=16384), out=large("bf16", columns=16384)
        ),
        "rescale bf16": lambda: rescale(large("bf16")),
        "rescale fp32": lambda: rescale(large("fp32")),
        "rescale of each size": lambda: [rescale(rows_of(*size, torch.bfloat16)) for size in SIZES],
        "sparse head bf16": lambda: sparse_head(torch.bfloat16),
        "sparse head fp32": lambda: sparse_head(torch.float32),
        "sparse head of each size": lambda: [
            sparse_head(torch.bfloat16, hidden_size=hidden_size, num_pairs=num_pairs)
            for hidden_size, num_pairs in ((4096, 1), (5120, 70001), (2056, 65536))
        ],
        # One, three and six rows that a multiprocessor has under way at once.
        "grpo, one read, bf16": lambda: one_read(grpo_loss),
        "grpo, one read, bf16, assumed": lambda: one_read(grpo_loss, loss_scale=AssumedScale()),
        "grpo, one read, bf16, everything": lambda: one_read(grpo_loss, everything=True),
        "gspo, one read, bf16, three rows, on-policy": lambda: one_read(on_policy(gspo_loss), columns=50257),
        "grpo, one read, fp32, six rows, everything": lambda: one_read(grpo_loss, dtype="fp32", columns=12800, everything=True),
        "grpo, one read of each size": lambda: [
            one_read(grpo_loss, columns=columns, temperature=temperature, clip_ratio_high=0.2 + temperature / 10)
            for columns in (COLUMNS, 151928, 151931)
            for temperature in TEMPERATURES
        ],
        # What the loss itself has no part in, with one of them.
        "gspo, everything": lambda: policy_loss(gspo_loss, everything=True),
        "gspo of each size": lambda: [
            policy_loss(gspo_loss, rows=rows, documents=documents, clip_ratio_high=high)
            for rows, documents, high in ((4096, 16, 0.2), (4097, 1, 0.3), (70000, 33, 0.2))
        ],
    }
    for name in TRITON_LOSSES:
        options = {"has_sampler": get_policy_loss(name).anchor == "rollout"}
        launches[name] = functools.partial(policy_loss, functools.partial(public_function, name), **options)
    for name in KL_ESTIMATORS.names():
        launches[f"grpo, KL {name}"] = functools.partial(policy_loss, grpo_loss, everything=True, kl_estimator=name)
    return launches


if __name__ == "__main__":
    sys.exit(main())
