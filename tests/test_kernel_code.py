"""The machine code of the kernels, compiled for sm_90 without a GPU: bounds that a fast kernel keeps. It must never run a kernel.

tests/sass_gate.py says how the figures come about and for which launches. A bound finds cliffs, such as loads
of two bytes, spills or a shuffle per logit, not the last 5 %. EVERY_LAUNCH=1, which the nightly job sets, compiles with the Triton
of each supported torch; git ignores .tritons/, where pip installs the others, 5 seconds and about 600 MB each.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_rl.config import TRITON_OF_TORCH
from megatron_rl.declare import POLICY_LOSSES, get_policy_loss

TESTS = Path(__file__).resolve().parent
TRITONS = sorted(set(TRITON_OF_TORCH.values()))
EVERY = os.environ.get("EVERY_LAUNCH", "0") not in ("", "0")
NOT_HERE = 3  # sass_gate.NOT_HERE
TRITON_LOSSES = tuple(name for name in POLICY_LOSSES.names() if get_policy_loss(name).triton)


@dataclass(frozen=True)
class Bounds:
    """What the hot loop of a kernel that works on logits may cost. `instructions` has its reason where it is given."""

    instructions: float
    # The special function unit takes 16 exponentials a cycle: 58 % of them are used up at one exponential a logit and 4.3 TB/s.
    # One more for each lane and tile, to rescale by, is 0.125 at 8 logits.
    exponentials: float = 1.15
    # 4.3e12 B/s / 132 SMs x 700 ns from memory: 23 KB are under way in each SM at any time, or the memory waits.
    kib_in_flight: float = 24.0
    has_clamp: bool = False


def violations(figures: dict, bounds: Bounds) -> list[str]:
    """In words; empty for a kernel that keeps its bounds, in each of its walks."""
    walks = "one walk and not two" if figures["kernel"] in TWO_WALKS and len(figures["walks"]) != 2 else "no walk"
    missing = [walks] * (not figures["walks"] or walks != "no walk")
    found = [problem for walk in figures["walks"] for problem in violations_of_walk(walk, bounds)]
    return missing + found + spills(figures)


def violations_of_walk(figures: dict, bounds: Bounds) -> list[str]:
    wide = [name for name in {**figures["loads"], **figures["stores"]} if ".128" not in name]
    found = {
        # A thread with 8 neighbouring logits of 16 bits takes them in one access; a mask in the loop makes that 8 accesses.
        f"accesses below 128 bits: {wide}": bool(wide),
        # A maximum or a sum across lanes belongs behind the loop, once a row: in it each costs a round through shared memory.
        "shuffles in the loop": figures["shuffles"] > 0,
        "barriers in the loop": figures["barriers"] > 0,
        "instructions a logit": figures["instructions_per_logit"] > bounds.instructions,
        "exponentials a logit": figures["exponentials_per_logit"] > bounds.exponentials,
        "bytes in flight": figures["kib_in_flight"] < bounds.kib_in_flight,
        # A maximum that drops NaN lets a NaN logit vanish from the entropy. An interpreter may keep it: only machine code shows it.
        "the clamp drops NaN": bounds.has_clamp and figures["nan_maxima_per_logit"] < 1,
    }
    return [name for name, is_violated in found.items() if is_violated]


def spills(figures: dict) -> list[str]:
    """A spilled register is a trip to memory for each logit, and none of these kernels needs a local array."""
    return ["stack or local memory"] * bool(figures["stack_bytes"] or figures["local_accesses"])


@dataclass(frozen=True)
class Gate:
    figures: list[dict]
    launched: dict[str, list[int]]  # launch -> its binaries, in order, as indices of `figures`

    def kernels(self, launch: str) -> list[str]:
        return [self.figures[index]["kernel"].removesuffix("_kernel") for index in self.launched[launch]]

    def figures_of(self, launch: str, kernel: str) -> dict:
        (figures,) = {
            index: self.figures[index] for index in self.launched[launch] if self.figures[index]["kernel"] == kernel
        }.values()
        return figures


def installed() -> str | None:
    """The Triton that this process imports, "3.9"."""
    try:
        return ".".join(importlib.metadata.version("triton").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return None


def environment_of(version: str) -> dict[str, str]:
    """Of a process that imports this Triton, compiled and not interpreted. Skips where it cannot be installed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"PYTHONPATH": os.pathsep.join([*path_of(version), str(TESTS.parent)])}


def path_of(version: str) -> list[str]:
    """What comes first on the path."""
    if version == installed():
        return []
    folder = TESTS.parent / ".tritons" / version
    folder.parent.mkdir(exist_ok=True)
    with open(folder.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            options = "--quiet --disable-pip-version-check --no-deps --no-compile --retries 1 --upgrade".split()
            command = [sys.executable, "-m", "pip", "install", *options, "--target", folder, f"triton=={version}.*"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
                pytest.skip(f"pip cannot install triton=={version}.* into .tritons/: {errors[-1]}")
            (folder / "complete").touch()
    return [str(folder)]


@pytest.fixture(scope="module")
def gate(shared) -> Gate:
    described = shared("test_kernel_code", lambda: run_gate(installed(), "--code-of", *HOT, *PAIRS, "rows"))
    return Gate(**json.loads(described))


def run_gate(triton: str | None, *options: str) -> str:
    """In a process of its own: this one has told Triton to interpret, which it cannot unlearn. The Triton version of each
    registered loss and estimator too: the interpreter runs what may not compile."""
    if triton is None:
        pytest.skip("Triton is not installed")
    command = [sys.executable, TESTS / "sass_gate.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment_of(triton))
    if done.returncode == NOT_HERE:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not EVERY, reason="EVERY_LAUNCH=1 compiles with each Triton")
@pytest.mark.parametrize(("number", "triton"), [*enumerate(TRITONS)])
def test_each_launch_compiles_with_the_triton_of_each_torch(number, triton):
    """The compiler's front is the same for an H100 and a B200: each Triton compiles for one of them."""
    figures = json.loads(run_gate(triton, "--target", ("90", "100")[number % 2], "--code-of", "nothing"))["figures"]
    assert {one["kernel"] for one in figures} == {*HOT, *PAIRS, *SMALL}


# 132 SMs x 128 lanes x 1.755 GHz issue 2.96e13 instructions a second; at 4.3 TB/s 2.15e12 bf16 logits are read, or half as many
# read and written: 13.8 and 27.6 instructions a logit. A third of them (with entropy, which must stay hidden behind the same read,
# a fifth) stays free for what is around the loop and for stalls. float32 logits have twice the budget and need no conversion.
STATISTICS, STATISTICS_WITH_ENTROPY = Bounds(instructions=9.0), Bounds(instructions=11.0, has_clamp=True)
GRADIENT, GRADIENT_WITH_ENTROPY = Bounds(instructions=18.0), Bounds(instructions=18.0, has_clamp=True)
# Each of the two walks that a row takes: both together have the budget of a logit that is read and written, 27.6.
ONE_READ, ONE_READ_WITH_ENTROPY = Bounds(instructions=11.5), Bounds(instructions=13.0, has_clamp=True)

# A number is read, multiplied and written, and a bf16 one is converted twice: 3.9.
RESCALE = Bounds(instructions=5.0)

TWO_WALKS = ("one_read_kernel",)
HOT = {
    "row_statistics_kernel": [
        *((f"statistics bf16{which}", STATISTICS) for which in ("", ", split")),
        *((f"statistics {which}", STATISTICS_WITH_ENTROPY) for which in ("bf16, entropy", "fp32, entropy")),
        ("statistics bf16, entropy, split, shards", STATISTICS_WITH_ENTROPY),
    ],
    "logits_gradient_kernel": [
        *((f"gradient {which}", GRADIENT) for which in ("bf16", "fp32 into bf16")),
        *((f"gradient {which}", GRADIENT_WITH_ENTROPY) for which in ("bf16, entropy", "fp32, entropy")),
    ],
    "one_read_kernel": [
        *((f"grpo, one read, bf16{which}", ONE_READ) for which in ("", ", assumed")),
        ("gspo, one read, bf16, three rows, on-policy", ONE_READ),
        *((f"grpo, one read, {which}, everything", ONE_READ_WITH_ENTROPY) for which in ("bf16", "fp32, six rows")),
        *((f"unit gradient {which}", ONE_READ) for which in ("bf16", "fp32 into bf16, three rows", "fp32, six rows, entropy")),
    ],
    "rescale_kernel": [(f"rescale {dtype}", RESCALE) for dtype in ("bf16", "fp32")],
}


@pytest.mark.parametrize(
    ("kernel", "launch", "bounds"),
    [pytest.param(kernel, launch, bounds, id=launch) for kernel, rows in HOT.items() for launch, bounds in rows],
)
def test_a_kernel_that_works_on_logits_keeps_its_bounds(gate, kernel, launch, bounds):
    assert violations(gate.figures_of(launch, kernel), bounds) == []


# Registers of a thread. What works on [T] and [N] numbers is bounded by launches, not by them; what must not happen is a spill, and
# a block of 16 warps that does not start: 65536 / 512 = 128. list_rows has half as many: two of its blocks start.
SMALL = {
    "combine_kernel": 64,
    **{f"{name}_kernel": 128 for name in "list_rows document_sums loss_and_coefficients finish".split()},
}
# 72 registers leave 7 programs on a multiprocessor.
PAIRS = {"gather_product_kernel": 72, "scatter_product_kernel": 64}


@pytest.mark.parametrize("kernel", [*SMALL, *PAIRS])
def test_a_kernel_of_small_numbers_or_pairs_keeps_its_registers_without_spills(gate, kernel):
    binaries = [figures for figures in gate.figures if figures["kernel"] == kernel]
    assert binaries and not any(map(spills, binaries)), binaries
    assert max(figures["registers"] for figures in binaries) <= (SMALL | PAIRS)[kernel]


def test_each_kernel_of_the_package_is_compiled_here(gate):
    """Catches a new kernel that the gate has not been told to launch."""
    sources = (TESTS.parent / "megatron_rl").rglob("*_triton.py")
    written = {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(encoding="utf-8"), re.M)}
    assert {figures["kernel"] for figures in gate.figures} == written == {*HOT, *PAIRS, *SMALL}


@pytest.mark.parametrize(
    ("launch", "known"),
    [
        ("statistics of each size", ["statistics bf16", "statistics bf16, split"]),
        ("gradient of each size", ["gradient bf16"]),
        ("gspo of each size", ["gspo"]),
        ("grpo, one read of each size", ["grpo, one read, bf16"]),
        ("rescale of each size", ["rescale bf16"]),
        ("sparse head of each size", ["sparse head bf16"]),
    ],
)
def test_no_size_and_no_setting_has_a_binary_of_its_own(gate, launch, known):
    """Vocabularies that are multiples of 16, of 8 and of nothing, one row, views, temperatures, clips: one compilation. So
    the figures above are those of each vocabulary."""
    assert set(gate.launched[launch]) <= {index for name in known for index in gate.launched[name]}


LOSS = ["list_rows", "row_statistics", "document_sums", "loss_and_coefficients", "finish"]
LAUNCHED = {
    **dict.fromkeys(("statistics bf16", "statistics bf16, entropy"), ["list_rows", "row_statistics"]),
    "statistics bf16, split": ["list_rows", "row_statistics", "combine"],
    "statistics bf16, entropy, split, shards": ["list_rows", "row_statistics", "combine", "combine"],
    "gradient bf16": ["logits_gradient"],
    "unit gradient bf16": ["one_read"],
    "rescale bf16": ["rescale"],
    "sparse head bf16": ["gather_product", "scatter_product", "scatter_product"],
    **dict.fromkeys((*TRITON_LOSSES, "gspo, everything"), LOSS),
    **dict.fromkeys(("grpo, one read, bf16", "grpo, one read, bf16, assumed"), ["one_read", *LOSS[2:]]),
    "grpo, one read, bf16, everything": ["one_read", *LOSS[2:]],
}


@pytest.mark.parametrize("launch", LAUNCHED)
def test_a_launch_on_a_gpu_takes_the_kernels_of_the_table_in_the_docs(gate, launch):
    """Its tensors have no values: a look at one, which would synchronise on a GPU, would have raised."""
    assert gate.kernels(launch) == LAUNCHED[launch]
