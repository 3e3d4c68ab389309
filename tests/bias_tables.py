"""The tables of docs/corrections.md that examples/correction_bias.py computes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from test_correction_bias import example

from megatron_rl.loss_hub import get_policy_loss, policy_loss_names

# Nats a response: a gap of engines, and one of some updates.
SMALL, LARGE = 0.03, 0.3
# The correction that the table of aggregations shows beside none.
LEAST_BIAS = next(one for one in example.CORRECTIONS if example.name_of(one) == "tis, sequence_sum, high 2")


@functools.cache
def tables() -> Mapping[str, list[str]]:
    return {"bias by correction": [*_corrections()], "bias by loss": [*_losses()], "bias by aggregation": [*_aggregations()]}


def line_of(gap: float, loss: str, correction: object, old: str, aggregation: str = "constant"):
    return next(line for line in example.mean_lines(gap, loss, correction, old) if line.aggregation == aggregation)


def _corrections() -> Iterator[str]:
    heads = [f"{what} at {gap:g}" for gap in (SMALL, LARGE) for what in ("bias", "cosine", "noise")]
    yield f"| correction | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}\n"
    for correction in example.CORRECTIONS:
        lines = [line_of(gap, "grpo", correction, "trainer") for gap in (SMALL, LARGE)]
        cells = [f"{line.bias:.2f} | {line.cosine:.2f} | {line.noise:.1f}" for line in lines]
        yield f"| {example.name_of(correction)} | {' | '.join(cells)} |\n"


def _losses() -> Iterator[str]:
    """Losses with the same figures share a row."""
    yield f"| loss | bias at {SMALL:g} | cosine | bias at {LARGE:g} | cosine |\n|---|---|---|---|---|\n"
    rows: dict[str, list[str]] = {}
    for loss in policy_loss_names():
        old = example.OLD_OF_SAMPLER if get_policy_loss(loss).anchor == "old" else "trainer"
        lines = [line_of(gap, loss, example.NONE, old) for gap in (SMALL, LARGE)]
        rows.setdefault(" | ".join(f"{line.bias:.2f} | {line.cosine:.2f}" for line in lines), []).append(f"`{loss}`")
    for cells in sorted(rows):
        yield f"| {', '.join(rows[cells])} | {cells} |\n"


def _aggregations() -> Iterator[str]:
    heads = ["no gap", f"none at {LARGE:g}", f"{example.name_of(LEAST_BIAS)} at {LARGE:g}"]
    yield f"| aggregation | {' | '.join(heads)} |\n|---|---|---|---|\n"
    for aggregation in ("sample_mean", "prompt_mean", "token_mean", "constant"):
        pairs = ((0.0, example.NONE), (LARGE, example.NONE), (LARGE, LEAST_BIAS))
        lines = [line_of(gap, "grpo", correction, "trainer", aggregation) for gap, correction in pairs]
        yield f"| `{aggregation}` | {' | '.join(f'{line.bias:.2f}, cosine {line.cosine:.2f}' for line in lines)} |\n"
