"""Golden values: what each generated step was, bit by bit, before a change that must not move it.

    python tests/golden_core.py             writes tests/golden/core.pt
    python tests/golden_core.py --drop k3+  removes cases by a word of the key; others stay

The file has the cases themselves, so that a name which comes or goes changes no other. test_golden_losses.py compares: a change
that moves numbers on purpose puts a word of the keys, a bound and the reason into its BOUNDS.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from dataclasses import asdict
from pathlib import Path

import conftest  # noqa: F401  # kernels are interpreted
import torch
from generated_steps import CASES, Case, Door, Split, step_of
from simulated_ranks import on_simulated_ranks
from test_generated_steps import groups_of, run_rank, small_kernels
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.testing.oracle import DenseSettings

FILE = Path(__file__).parent / "golden" / "core.pt"
Values = dict[str, Tensor]  # by name: everything that a case gives


def key_of(case: Case) -> str:
    settings = case.settings
    words = ("step", case.loss, case.number, case.shape, settings.aggregation, settings.correction, settings.kl_estimator)
    return " | ".join(map(str, [*words, *str(case.door).split()]))


def case_of(stored: dict) -> Case:
    parts = {"settings": DenseSettings, "split": Split, "door": Door}
    return Case(**stored | {name: of(**stored[name]) for name, of in parts.items()})


def values_of(case: Case) -> Values:
    """The values of all ranks, one behind the other."""
    step, (groups, own) = step_of(case), groups_of(case.split)
    with small_kernels() if case.door.backend == "triton" else contextlib.nullcontext():
        answers = on_simulated_ranks(
            lambda of_rank: run_rank(case, step, of_rank, *own[id(of_rank)]), groups, [one for of in own.values() for one in of]
        )
    found: dict[str, list[Tensor]] = {}
    for answer in answers:
        tensors = {name: getattr(answer, name) for name in ("logits", "hidden", "weight", "log_probs")}
        for name, value in (tensors | answer.parts | answer.metrics).items():
            found.setdefault(name, []).append(torch.as_tensor(0.0 if value is None else value, dtype=torch.float64).flatten())
    return {name: torch.cat(values) for name, values in found.items()}


def machine() -> dict[str, str]:
    """Two of one description compute the same bits: another torch or processor sums and vectorises in another order."""
    return {"torch": str(torch.__version__), "cpu": torch.backends.cpu.get_cpu_capability()}


def save(made_on: dict[str, str], cases: dict[str, dict], values: dict[str, Values]) -> None:
    """One tensor of each dtype, and where in it the values of a case are: a tensor of a file costs 300 bytes."""
    parts: dict[str, list[Tensor]] = {}
    sizes: dict[str, int] = {}
    places: dict[str, list[tuple[str, str, int, int]]] = {}
    for key, of_case in values.items():
        places[key] = []
        for name, value in of_case.items():
            dtype = str(value.dtype)
            start = sizes.get(dtype, 0)
            sizes[dtype] = start + value.numel()
            parts.setdefault(dtype, []).append(value.flatten())
            places[key].append((name, dtype, start, sizes[dtype]))
    joined = {dtype: torch.cat(tensors) for dtype, tensors in parts.items()}
    torch.save({"machine": made_on, "cases": cases, "places": places, "values": joined}, FILE)
    print(f"{FILE}: {len(values)} cases, {FILE.stat().st_size / 2**20:.1f} MiB")


def load() -> tuple[dict[str, str], dict[str, dict], dict[str, Values]]:
    """(the machine, the cases by key, their values)."""
    stored = torch.load(FILE, weights_only=True)
    parts = stored["values"]
    values = {
        key: {name: parts[dtype][start:end] for name, dtype, start, end in places} for key, places in stored["places"].items()
    }
    return stored["machine"], stored["cases"], values


def difference(stored: Values, found: Values) -> tuple[bool, float, str]:
    """(whether all bits are equal, the largest relative difference, whose). Relative to the largest element of a vector. Losses and
    metrics are sums of terms of both signs and of size 0.1 and more: their differences are relative to that at least. A metric that
    came later is not compared."""
    if missing := sorted(stored.keys() - found.keys()):
        return False, math.inf, f"names {missing}"
    is_equal, worst = True, (0.0, "")
    for name, value in stored.items():
        other = found[name].flatten()
        if value.dtype != other.dtype or value.shape != other.shape:
            return False, math.inf, f"{name}: {value.dtype} {tuple(value.shape)}, {other.dtype} {tuple(other.shape)}"
        is_equal &= value.numpy().tobytes() == other.numpy().tobytes()
        value, other = value.double(), other.double()
        is_same = (value == other) | (value.isnan() & other.isnan())
        apart = largest((value - other)[~is_same]) / max(largest(value[value.isfinite()]), 0.1)
        worst = max(worst, (math.inf if math.isnan(apart) else apart, name))
    return is_equal, *worst


def largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drop", metavar="WORD")
    word = parser.parse_args().drop
    if word is not None:
        made_on, cases, values = load()
        cases = {key: case for key, case in cases.items() if word not in key.split(" | ")}
    else:
        made_on, cases, values = machine(), {key_of(case): asdict(case) for case in CASES}, {}
        for key, case in cases.items():
            with contextlib.suppress(DataError):  # a vocabulary of one on two ranks is refused
                values[key] = values_of(case_of(case))
        cases = {key: cases[key] for key in values}
    save(made_on, cases, {key: values[key] for key in cases})


if __name__ == "__main__":
    main()
