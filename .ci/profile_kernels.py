"""Profiles each row kernel in an ncu call of its own, so that the launches of one do not use up those of another.

    python3 .ci/profile_kernels.py --ncu /usr/local/cuda/bin/ncu --seconds 60    on a GPU
    python3 .ci/profile_kernels.py --dry-run                                     the benchmarks alone, on a CPU

For each kernel it prints what ncu printed, of its page the columns that were asked for, and then one line of JSON: kernel,
launches, reason (why there are none, or null). A kernel that is not profiled takes nothing from the others. Exit status 1 if one is
not profiled.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import ask  # noqa: E402

NCU_METRICS = {
    "gpu__time_duration.sum": "nanoseconds",
    "dram__bytes_read.sum": "bytes_read",
    "dram__bytes_write.sum": "bytes_written",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "smsp__inst_executed.sum": "warp_instructions",
    "launch__registers_per_thread": "registers",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
}
FACTORS = {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6}
# What ncu says where a user may not read the counters. It says so of every kernel.
WITHOUT_RIGHTS = "ERR_NVGPUCTRPERM"
REMEDY = "run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
RIGHTS = f"ncu may not read the GPU's counters ({WITHOUT_RIGHTS}): {REMEDY}"
# Where a benchmark says why it launched nothing: ncu knows no more than that it failed.
CAUSE = re.compile(r"^(left out: |[\w.]*Error: )")
LONGEST_CAUSE = 200
# The gate's launch comes first: on memory full of NaN, and right after the compiler. It is left out.
SKIPPED, PROFILED = 1, 2


@dataclass(frozen=True, slots=True)
class Profiled:
    """The benchmark that launches the kernel, and its case and provider."""

    kernel: str
    benchmark: str
    case: str
    provider: str

    def command(self, seconds: float | None) -> list[str]:
        limit = "0" if seconds is None else f"{max(seconds, 1.0):.0f}"
        chosen = ["--case", self.case, "--provider", self.provider, "--time-limit", limit]
        return [sys.executable, "-m", "benchmarks", self.benchmark, "--rounds", "1", *chosen]


HEAD_CASE = "gspo T 8192, H 4096, V 131072, bfloat16, 8 documents"
KERNELS = (
    Profiled("row_statistics_kernel", "losses", "gspo T 16384, V 128256, bfloat16", "ours, in place"),
    Profiled("logits_gradient_kernel", "losses", "gspo T 16384, V 128256, bfloat16", "ours, in place"),
    # At sequence level a coefficient needs the whole sample, and the loss stays two kernels.
    Profiled("one_read_kernel", "losses", "grpo T 16384, V 128256, bfloat16", "ours, in place, one read"),
    Profiled("unit_gradient_kernel", "head", HEAD_CASE, "ours"),
    Profiled("scaled_exp_kernel", "head", HEAD_CASE, "ours, scaled exp"),
)
DRY = (
    ["losses", "--case", "gradient kernel", "--provider", "twin"],
    ["head", "--shape", "40,8,70", "--case", "8 documents", "--provider", "ours"],
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Profiles each row kernel in an ncu call of its own.")
    parser.add_argument("--ncu", default="ncu", metavar="PATH")
    parser.add_argument("--seconds", type=float, metavar="NUMBER", help="Time for all kernels together. Default: no limit.")
    parser.add_argument("--dry-run", action="store_true", help="Without ncu: the smallest form of the benchmarks, on a CPU.")
    args = parser.parse_args(arguments)
    if args.dry_run:
        benches = [[sys.executable, "-m", "benchmarks", *bench, "--rounds", "1", "--device", "cpu"] for bench in DRY]
        return max(subprocess.run(bench).returncode for bench in benches)
    started, profiles = time.monotonic(), []
    for number, profiled in enumerate(KERNELS):
        if profiles and profiles[-1]["reason"] == RIGHTS:
            profiles.append({"kernel": profiled.kernel, "launches": [], "reason": RIGHTS})
            print(json.dumps(profiles[-1]), flush=True)
            continue
        left = None if args.seconds is None else args.seconds - (time.monotonic() - started)
        share = None if left is None else left / (len(KERNELS) - number)
        profiles.append(profile(profiled, args.ncu, share))
        print(json.dumps(profiles[-1]), flush=True)
    return int(any(one["reason"] is not None for one in profiles))


def profile(profiled: Profiled, ncu: str, seconds: float | None) -> dict[str, Any]:
    """The launches that ncu reports; where there are none, `reason` says what was seen last."""
    command = ncu_command(profiled, ncu, seconds)
    print(f"===== {profiled.kernel}: {' '.join(command)}", flush=True)
    answer = ask(command, seconds)
    print(with_asked_columns(answer.output), flush=True)
    launches, reason = read_launches(answer.output), None
    if WITHOUT_RIGHTS in answer.output:
        reason = RIGHTS
    elif not launches:
        seen = answer.error or "ncu saw no launch of it"
        cause = next((line[:LONGEST_CAUSE] for line in answer.output.splitlines() if CAUSE.match(line)), None)
        ends = f"its output ends: {' '.join(answer.output.split()[-20:])}"
        reason = f"{cause}; {seen}" if cause else f"{seen}; {ends}"
    return {"kernel": profiled.kernel, "launches": launches, "reason": reason}


def ncu_command(profiled: Profiled, ncu: str, seconds: float | None) -> list[str]:
    options = ["--clock-control", "none", "--csv", "--page", "raw", "--metrics", ",".join(NCU_METRICS)]
    options += ["--target-processes", "all", "--kernel-name", profiled.kernel]
    # Once its launches are profiled, the rest of the benchmark would only take time.
    options += ["--launch-skip", str(SKIPPED), "--launch-count", str(PROFILED), "--kill", "yes"]
    return [ncu, *options, *profiled.command(seconds)]


def first_of_page(lines: Sequence[str]) -> int:
    return next((number for number, line in enumerate(lines) if line.startswith('"') and '"Kernel Name"' in line), len(lines))


def with_asked_columns(output: str) -> str:
    """ncu's raw page has some hundred columns of the device beside the metrics, and a line of it tells a reader nothing."""
    lines = output.splitlines()
    first = first_of_page(lines)
    if first == len(lines):
        return output
    names = next(csv.reader(lines[first : first + 1]))
    asked = [number for number, name in enumerate(names) if name in ("ID", "Kernel Name", *NCU_METRICS)]
    for number in range(first, len(lines)):
        cells = next(csv.reader([lines[number]])) if lines[number].startswith('"') else []
        if len(cells) == len(names):
            lines[number] = "  ".join(cells[column] or "-" for column in asked)
    return "\n".join(lines)


def read_launches(output: str) -> list[dict[str, Any]]:
    """ncu's raw page: a line of names, a line of units, then a line for each launch. Bytes and nanoseconds.

    Warnings, and what the program itself prints, may come before and between.
    """
    lines = output.splitlines()
    rows = list(csv.DictReader(line for line in lines[first_of_page(lines) :] if line.startswith('"')))
    units, launches = (rows[0], rows[1:]) if rows else ({}, [])
    found = []
    for launch in launches:
        values = {
            name: float(launch[metric].replace(",", "")) * FACTORS.get(units[metric], 1.0)
            for metric, name in NCU_METRICS.items()
            if launch.get(metric)
        }
        found.append({"kernel": launch["Kernel Name"].split("(")[0], **values})
    return found


if __name__ == "__main__":
    sys.exit(main())
