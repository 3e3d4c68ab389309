"""The tables of tests/kernel_figures.md that the gate of machine code fills: a column for each Triton and target. `python
tests/pages.py tests/kernel_figures.md` writes them, and tests/test_kernel_code.py compares them with what it has compiled."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from other_tritons import TRITONS, environment_of

TESTS = Path(__file__).resolve().parent
PAGE = TESTS / "kernel_figures.md"
# The newest, and that of torch 2.10 and 2.11, which many images bring.
SHOWN = (TRITONS[-1], "3.6")
NAMES = {"bf16": "bf16", "fp32": "float32"}
ROWS, GRADIENT, RESCALE, ONE = (f"{name}_kernel" for name in ("row_statistics", "logits_gradient", "rescale", "one_read"))
# table -> what its first column says -> (launch, kernel).
TABLES: dict[str, dict[str, tuple[str, str]]] = {
    "a walk": {
        **{f"K1, {name}": (f"statistics {dtype}", ROWS) for dtype, name in NAMES.items()},
        **{f"K1 with entropy, {name}": (f"statistics {dtype}, entropy", ROWS) for dtype, name in NAMES.items()},
        **{f"K4, {name}": (f"gradient {dtype}", GRADIENT) for dtype, name in NAMES.items()},
        "K4, float32 logits, bf16 gradient": ("gradient fp32 into bf16", GRADIENT),
        **{f"K4 with entropy, {name}": (f"gradient {dtype}, entropy", GRADIENT) for dtype, name in NAMES.items()},
        **{f"`rescale`, {name}": (f"rescale {dtype}", RESCALE) for dtype, name in NAMES.items()},
    },
    "two walks": {
        "`one_read`, bf16": ("grpo, one read, bf16", ONE),
        "`one_read`, bf16, entropy, KL, importance weights": ("grpo, one read, bf16, everything", ONE),
        "`one_read`, float32": ("grpo, one read, fp32", ONE),
        "`one_read`, float32, entropy, KL, importance weights": ("grpo, one read, fp32, everything", ONE),
        "`one_read`, bf16, GSPO on-policy": ("gspo, one read, bf16, three rows, on-policy", ONE),
        "`one_read`, float32, entropy, KL, importance weights, short rows": ("grpo, one read, fp32, six rows, everything", ONE),
        "`one_read` without a loss, bf16": ("unit gradient bf16", ONE),
        "`one_read` without a loss, float32 into bf16": ("unit gradient fp32 into bf16, three rows", ONE),
        "`one_read` without a loss, float32, entropy, short rows": ("unit gradient fp32, six rows, entropy", ONE),
    },
    "a B200": {
        "K1, bf16": ("statistics bf16", ROWS),
        "K4, bf16": ("gradient bf16", GRADIENT),
        "`one_read`, bf16": ("grpo, one read, bf16", ONE),
        "`one_read` without a loss, bf16": ("unit gradient bf16", ONE),
    },
}
OF_B200 = "a B200"
HEADS = {
    "a walk": "registers, occupancy, instructions and exponentials a logit, KiB in flight on an SM",
    "two walks": "registers, instructions a logit in the first and second walk, KiB in flight on an SM",
    OF_B200: "registers, occupancy, instructions a logit, stack",
}


def cell(table: str, figures: Mapping) -> str:
    walks, registers, occupancy = figures["walks"], str(figures["registers"]), f"{100 * figures['occupancy']:g} %"
    instructions = " + ".join(f"{walk['instructions_per_logit']:.1f}" for walk in walks)
    in_flight = " and ".join(f"{size:.0f}" for size in sorted({walk["kib_in_flight"] for walk in walks})) + " KiB"
    stack = f"stack {figures['stack_bytes']} B"
    if table == "a walk":
        return ", ".join([registers, occupancy, instructions, f"{walks[0]['exponentials_per_logit']:.2f}", in_flight])
    if table == "two walks":
        return ", ".join([registers, instructions, in_flight])
    return ", ".join(filter(None, [registers, occupancy, instructions, stack]))


def accesses(figures: Mapping) -> str:
    """Of a thread and iteration, of each walk; the flags of an access are left out."""
    found: list[str] = []
    for walk in figures["walks"]:
        for kind, counts in (("LDG", walk["loads"]), ("STG", walk["stores"])):
            found += [f"{number} x {kind}.{access.split('.')[-1]}" for access, number in counts.items()]
    return ", ".join(found)


def described(gate: Mapping, target: int) -> dict[tuple[str, str], str]:
    """{(table, row): cell} of one run of the gate, for the rows that it compiled."""
    found = {}
    for table, rows in TABLES.items():
        if (table == OF_B200) == (target == 100):
            for row, (launch, kernel) in rows.items():
                if launch in gate["launched"]:
                    (figures,) = (f for i in set(gate["launched"][launch]) if (f := gate["figures"][i])["kernel"] == kernel)
                    found[table, row] = cell(table, figures)
                    found[table, f"{row}: accesses"] = accesses(figures)
    return found


def name_of(versions: list[str]) -> str:
    """["triton 3.9.0", "torch ...", "ptxas V12.9.86"] -> Triton 3.9.0, ptxas 12.9.86."""
    triton, _, ptxas = versions
    return f"{triton.capitalize()}, {ptxas.replace('V', '')}"


def lines(table: str, columns: Mapping[str, Mapping[tuple[str, str], str]]) -> Iterator[str]:
    """columns: {name of a Triton: described}."""
    has_accesses = table == "a walk"
    yield f"| {HEADS[table]} | {'loads, stores of a thread and iteration | ' * has_accesses}{' | '.join(columns)} |\n"
    yield "|---" * (1 + has_accesses + len(columns)) + "|\n"
    for row in TABLES[table]:
        cells = [column[table, row] for column in columns.values()]
        first = [next(iter(columns.values()))[table, f"{row}: accesses"]] * has_accesses
        yield f"| {' | '.join([row, *first, *cells])} |\n"


def on_page(name: str) -> dict[tuple[str, str], str]:
    """{(table, row): cell} of the column of that Triton; empty where the page has none."""
    found = {}
    for table, text in re.findall(r"<!-- table: (.+?) -->\n\n((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8")):
        head, _, *rows = ([word.strip() for word in line.strip("|").split("|")] for line in text.splitlines())
        if name in head:
            found |= {(table, row[0]): row[head.index(name)] for row in rows}
    return found


def tables() -> dict[str, list[str]]:
    """Compiles all of them: a minute and a half of CPU."""
    columns: dict[str, dict[tuple[str, str], str]] = {}
    for version in SHOWN:
        for target in (90, 100):
            wanted = {
                launch for table, rows in TABLES.items() if (table == OF_B200) == (target == 100) for launch, _ in rows.values()
            }
            command = [sys.executable, TESTS / "sass_gate.py", "--json", "--target", str(target), "--only", *sorted(wanted)]
            command += ["--code-of", ROWS, GRADIENT, RESCALE, ONE]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment_of(version))
            gate = json.loads(done.stdout)
            columns.setdefault(name_of(gate["versions"]), {}).update(described(gate, target))
    return {f"<!-- table: {table} -->": list(lines(table, columns)) for table in TABLES}
