"""Launches kernels as on a GPU, with a driver that has no device: compiler, loading, launcher and arguments are Triton's own.

    python tests/first_launch.py                              each kernel once, for sm_90 and sm_100
    python tests/first_launch.py --every 100                  for sm_100 every launch of tests/kernel_launches.py
    PYTHONPATH=.tritons/3.6:. python tests/first_launch.py    with another Triton

Tensors have no storage, and libcuda is tests/fake_cuda.c. So an option that this Triton does not know, a kernel that it does not
compile, a C launcher that it cannot build and an argument that the launcher refuses show here, and not in the first minute on a
GPU. No instruction of a kernel runs. Prints JSON. Exit status 3: Triton, its tools or a C compiler are not here, the reason on
stderr.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

from sass_gate import DEVICES, NOT_HERE, load_launches, pretended_device, tools, versions, why_not_here

TESTS = Path(__file__).resolve().parent
# Each kernel at least once, and each kind of argument: tuples, None, a loss's twin, tensor maps, splits.
ONCE = (
    "statistics bf16, split",
    "gradient bf16",
    "unit gradient bf16",
    "rescale bf16",
    "sparse head bf16",
    "grpo, one read, bf16, everything",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, nargs="*", default=[], help="of these targets every launch, and not each kernel once")
    parser.add_argument("--launches", type=Path, help="a file with LAUNCHES in place of the package's: all of them are launched")
    parser.add_argument("--targets", type=int, nargs="+", choices=tuple(DEVICES), default=list(DEVICES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(TRITON_CACHE_DIR=f"{folder}/cache", OMP_NUM_THREADS="1", TRITON_LIBCUDA_PATH=folder)
        reason = why_not_here() or ("" if shutil.which("gcc") else "there is no gcc, which Triton builds its launchers with")
        if reason:
            print(reason, file=sys.stderr)
            return NOT_HERE
        log = build_driver(Path(folder))
        launches = load_launches(options.launches or TESTS / "kernel_launches.py")
        once = launches if options.launches else {name: launches[name] for name in ONCE}
        found = {target: run(launches if target in options.every else once, target, log) for target in options.targets}
        print(json.dumps({"versions": versions(), "seconds": time.process_time() + children_seconds(), "targets": found}))
    return 0


def children_seconds() -> float:
    """CPU seconds of ptxas and gcc."""
    times = os.times()
    return times.children_user + times.children_system


def build_driver(folder: Path) -> Path:
    """Loads fake_cuda.c under the name of NVIDIA's library; -> the file that it writes to."""
    library, log = folder / "libcuda.so.1", folder / "log"
    include = tools().parent / "include"
    command = ["gcc", "-shared", "-fPIC", "-w", f"-I{include}", "-Wl,-soname,libcuda.so.1", "-o", library, TESTS / "fake_cuda.c"]
    subprocess.run(command, check=True)
    (folder / "libcuda.so").symlink_to(library)  # the name that the linker looks for
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["FAKE_CUDA_LOG"] = str(log)
    return log


def run(launches: dict[str, Callable[[], None]], target: int, log: Path) -> dict[str, object]:
    """{launch: what the driver was asked, or the error}."""
    os.environ["FAKE_CUDA_TARGET"] = str(target)
    ctypes.CDLL(None).setenv(b"FAKE_CUDA_TARGET", str(target).encode(), 1)
    found: dict[str, object] = {}
    for name, launch in launches.items():
        log.write_text("")
        try:
            with fake_device(target):
                launch()
        except Exception as error:  # the report of all launches says which ones fail, and how
            cause = error.__cause__ or error
            found[name] = f"{type(error).__name__}: {cause}"
        else:
            found[name] = [json.loads(line) for line in log.read_text().splitlines()]
    return found


@contextmanager
def fake_device(target: int) -> Iterator[None]:
    """pretended_device, with Triton's own launcher and functions of the driver."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    from megatron_rl.ops.backends import cache_bytes, num_processors

    with pretended_device(target):
        # One device for each target: Triton keeps what it compiled by the device's number.
        driver.active.get_current_device = lambda: target
        driver.active.utils = nvidia.CudaUtils()
        driver.active.launcher_cls = nvidia.CudaLauncher
        num_processors.cache_clear()
        cache_bytes.cache_clear()
        # Triton 3.4 and 3.5 put a tensor map into a tensor of the host, which has no storage here either.
        memory = (ctypes.c_char * 256)()
        aligned = (ctypes.addressof(memory) + 63) // 64 * 64
        holder = getattr(nvidia, "TmaDescKernelParam", None)
        with mock.patch.object(holder, "tma_desc_cpu_ptr", lambda map: aligned) if holder else nullcontext():
            yield


if __name__ == "__main__":
    sys.exit(main())
