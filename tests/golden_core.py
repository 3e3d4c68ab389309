"""Golden values: what each generated step was, bit by bit, before a change that must not move it.

    python tests/golden_core.py                  writes tests/golden/core.pt
    python tests/golden_core.py --compare        recomputes all: which kinds of cases are bitwise equal, and the largest difference
    python tests/golden_core.py --compare gspo   the cases whose key has this word
    python tests/golden_core.py --drop k3+       removes cases by a word of the key; others stay

The file has the cases themselves, so that a name which comes or goes changes no other. golden_layouts.py has layouts of
Megatron-Core and emulated trainers. A change that moves numbers on purpose puts a word of the keys, a bound and the reason into
BOUNDS of test_golden_losses.py.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import conftest  # noqa: F401  # kernels are interpreted
import golden_layouts
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


def values_of_step(case: Case) -> Values:
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


def values_of(cases: Mapping[str, dict]) -> Iterator[tuple[str, Values]]:
    """cases: by key; a layout and a host need no more than the key."""
    yield from ((key, values_of_step(case_of(case))) for key, case in cases.items() if case)
    rest = [key for key, case in cases.items() if not case]
    if rest:
        yield from golden_layouts.values_of(rest)


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
        if name == "digest":
            continue
        value, other = value.double(), other.double()
        is_same = (value == other) | (value.isnan() & other.isnan())
        apart = largest((value - other)[~is_same]) / max(largest(value[value.isfinite()]), 0.1)
        worst = max(worst, (math.inf if math.isnan(apart) else apart, name))
    return is_equal, *worst


def largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def compare(word: str) -> None:
    """A line for each loss and backend, and for each other kind."""
    made_on, cases, stored = load()
    if made_on != machine():
        print(f"made on {made_on}, and this is {machine()}: last bits may differ")
    rows: dict[str, list[tuple[bool, float, str]]] = {}
    for key, values in values_of({key: case for key, case in cases.items() if word in ("", *key.split(" | "))}):
        words = key.split(" | ")
        is_equal, gap, name = difference(stored[key], values)
        kind = " | ".join([*words[:2], *{"torch", "triton"}.intersection(words)])
        rows.setdefault(kind, []).append((is_equal, gap, f"{name} of {key}"))
    for kind, found in rows.items():
        num_equal, (_, gap, where) = sum(row[0] for row in found), max(found, key=lambda row: row[1])
        print(f"{kind}: {num_equal} of {len(found)} bitwise equal" + f"; up to {gap:.1e}, {where}" * (num_equal < len(found)))


def all_values() -> tuple[dict[str, dict], dict[str, Values]]:
    """Of the generated steps that are computed: a vocabulary of one on two ranks is refused."""
    cases: dict[str, dict] = {key_of(case): asdict(case) for case in CASES} | dict.fromkeys(golden_layouts.KEYS, {})
    values = {}
    for key, case in cases.items():
        with contextlib.suppress(DataError):
            values |= dict(values_of({key: case}))
    return {key: cases[key] for key in values}, values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", nargs="?", const="", metavar="WORD")
    parser.add_argument("--drop", metavar="WORD")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # Megatron-Core's, of what a machine without a GPU lacks
    if args.compare is not None:
        compare(args.compare)
    elif args.drop is not None:
        made_on, cases, values = load()
        cases = {key: case for key, case in cases.items() if args.drop not in key.split(" | ")}
        save(made_on, cases, {key: values[key] for key in cases})
    else:
        save(machine(), *all_values())


if __name__ == "__main__":
    main()
