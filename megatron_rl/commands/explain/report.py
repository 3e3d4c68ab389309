"""What `megatron-rl explain` prints: tables with rich on a terminal, plain ones elsewhere, or JSON. It never computes a weight."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.commands.explain.chain import Chain, Layout
from megatron_rl.commands.explain.input import StepInput
from megatron_rl.commands.explain.peers import Equivalent
from megatron_rl.commands.explain.weights import KNOWN_AS, Counts, Weighing

STAYS = "<- differs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    step: StepInput
    counts: Counts
    weighings: list[Weighing]
    policy_loss: str
    losses: Tensor | None  # [S]
    host: str | None
    route: str | None
    layout: Layout
    chain: Chain | None
    problems: list[str]
    """Why the launch would be refused."""
    launch_lines: list[str]
    equivalents: list[Equivalent]
    shows_equivalents: bool
    gradient_divisor_factor: float
    clip_grad: float
    warnings: list[str]
    left_out: list[str]
    plot: str | None


def as_text(explanation: Explanation, max_rows: int) -> None:
    """Prints it."""
    print(headline(explanation))
    print_table(*weight_table(explanation, max_rows))
    for line in remarks(explanation):
        print(line)
    if explanation.chain is not None:
        print(f"\n{chain_headline(explanation)}")
        print_table(*chain_table(explanation.chain))
        print(verdict(explanation.chain))
    for line in explanation.launch_lines:
        print(f"needs {line}")
    for line in explanation.problems:
        print(f"REFUSED: {line}")
    if explanation.shows_equivalents:
        print()
        for equivalent in explanation.equivalents:
            print(equivalent)
        print(deepspeed_line(explanation))
    if explanation.plot is not None:
        print(f"\nwrote {explanation.plot}")
    print()
    for line in explanation.left_out:
        print(f"left out: {line}")


def headline(explanation: Explanation) -> str:
    totals = explanation.counts.totals
    prompts = "unknown prompts" if totals.num_prompts is None else f"{totals.num_prompts} prompts"
    masked = f", {explanation.counts.num_masked} fully masked" if explanation.counts.num_masked else ""
    samples = f"N = {totals.num_samples} samples of {prompts}{masked}"
    return f"one step, from {explanation.step.source}: {samples}, T = {totals.num_tokens} unmasked tokens"


def weight_table(explanation: Explanation, max_rows: int) -> tuple[list[str], list[list[str]]]:
    """A row a sample: the weight of a token, and the sample's share of all weight; then prompts, sums and names."""
    weighings, counts = explanation.weighings, explanation.counts
    prompts, num_samples = explanation.step.prompts, counts.totals.num_samples
    header = ["", "prompt", "tokens", *(title(weighing) for weighing in weighings)]
    rows = []
    for index in range(min(num_samples, max_rows)):
        cells = [f"{weighing.token_weights[index]:.4g} {weighing.shares[index]:6.1%}" for weighing in weighings]
        tokens = f"{int(counts.tokens[index])}/{explanation.step.masks[index].numel()}"
        rows.append([f"sample {index}", "?" if prompts is None else str(prompts[index]), tokens, *cells])
    if num_samples > max_rows:
        rows.append([f"{num_samples - max_rows} more", "", "", *[""] * len(weighings)])
    if prompts is not None:
        rows += prompt_rows(explanation, max_rows)
    rows.append(["sum of weights", "", str(counts.totals.num_tokens), *(f"{weighing.total:.4g}" for weighing in weighings)])
    rows.append(["gradient", "", "", *(f"x {weighing.gradient_scale:.4g}" for weighing in weighings)])
    if explanation.losses is not None:
        rows.append(["loss", "", "", *(f"{weighing.loss(explanation.losses):.6g}" for weighing in weighings)])
    rows.append(["known as", "", "", *(KNOWN_AS.get(weighing.name, "your own") for weighing in weighings)])
    return header, rows


def title(weighing: Weighing) -> str:
    return weighing.name if weighing.divisor is None else f"{weighing.name} {weighing.divisor:g}"


def prompt_rows(explanation: Explanation, max_rows: int) -> list[list[str]]:
    prompts, counts = explanation.step.prompts, explanation.counts
    shares = [weighing.prompt_shares(prompts) for weighing in explanation.weighings]
    tokens = dict(zip(prompts, counts.prompt_tokens.tolist(), strict=True))
    names = list(tokens)
    rows = [[f"prompt {name}", "", str(tokens[name]), *(f"{of_one[name]:6.1%}" for of_one in shares)] for name in names[:max_rows]]
    if len(names) > max_rows:
        rows.append([f"{len(names) - max_rows} more", "", "", *[""] * len(shares)])
    return rows


def remarks(explanation: Explanation) -> list[str]:
    lines = [
        "sample: weight of a token, share of the sample; gradient: its scale against sample_mean, which Adam hides, and which "
        "clipping and the weight of KL and entropy terms do not hide"
    ]
    for weighing in explanation.weighings:
        if weighing.is_assumed:
            lines.append(
                f"constant: L = {weighing.divisor:g}, the longest response, because none is given; training has no default"
            )
    if len(explanation.weighings) == 1 and abs(explanation.weighings[0].gradient_scale - 1) > 1e-6:
        strength = 1 / explanation.weighings[0].gradient_scale
        lines.append(f"KL and entropy terms stay averaged by sample_mean: {strength:.4g} x as strong relative to the policy term")
    if explanation.policy_loss == "gspo":
        lines.append("gspo: one ratio a sample, which weighs W_i = w_i m_i: share x sum of weights")
    return lines


def chain_headline(explanation: Explanation) -> str:
    layout = explanation.layout
    ranks = layout.tensor * layout.context * layout.pipeline * layout.data
    route = f" by {explanation.route}" if explanation.route else ""
    return (
        f"{explanation.host}, {explanation.weighings[0].name}{route}: ranks {ranks} = tp {layout.tensor} x cp {layout.context} x "
        f"pp {layout.pipeline} x dp {layout.data}, micro-batches a rank M = {layout.num_microbatches}; tp and pp are in no factor"
    )


def chain_table(chain: Chain) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            factor.stage,
            str(factor.formula),
            number(factor.values[chain.net_weights != 0]),
            STAYS if factor.differs else "",
            factor.does,
        ]
        for factor in chain.factors
    ]
    rows.append(["net", str(chain.net), number(chain.net_weights[chain.net_weights != 0]), "", f"asked for: {chain.asked}"])
    return ["", "factor", "here", "", ""], rows


def number(values: Tensor) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:.4g}" if high - low <= 1e-6 * abs(high) else f"{low:.4g} .. {high:.4g}"


def verdict(chain: Chain) -> str:
    if not chain.left_over.powers:
        return "EXACT: the net weight is what was asked for"
    equal = ", equal on this step alone" if chain.is_exact else ""
    return f"DIFFERS: the gradient is {chain.left_over} = {number(chain.ratio)} x what was asked for{equal}"


def deepspeed_line(explanation: Explanation) -> str:
    factor, clip = explanation.gradient_divisor_factor, explanation.clip_grad
    return (
        f"DeepSpeed (accumulation x world = N): same loss, gradient norm x {factor:.4g}; to clip alike: --gradient-divisor "
        f"num_samples --clip-grad {clip:g}, or no divisor and --clip-grad {clip / factor:g}"
    )


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """rich on a terminal that has it, else columns of equal width."""
    if sys.stdout.isatty() and _print_rich(header, rows):
        return
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_rich(header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=None, pad_edge=False, header_style="bold")
    for cell in header:
        table.add_column(Text(cell))
    for row in rows:
        table.add_row(*map(Text, row), style="bold red" if STAYS in row else None)
    Console().print(table)
    return True


def as_json(explanation: Explanation) -> dict:
    counts, totals, prompts = explanation.counts, explanation.counts.totals, explanation.step.prompts
    weighings = explanation.weighings
    return {
        "source": explanation.step.source,
        "num_samples": totals.num_samples,
        "num_prompts": totals.num_prompts,
        "num_tokens": totals.num_tokens,
        "num_masked_samples": counts.num_masked,
        "prompt_ids": prompts,
        "token_counts": counts.tokens.tolist(),
        "response_lengths": [mask.numel() for mask in explanation.step.masks],
        "aggregations": {weighing.name: _weighing_json(weighing, explanation) for weighing in weighings},
        "gradient_scale_from_to": {
            one.name: {other.name: other.gradient_scale / one.gradient_scale for other in weighings} for one in weighings
        },
        "chain": None if explanation.chain is None else _chain_json(explanation.chain, explanation),
        "launch_lines": explanation.launch_lines,
        "problems": explanation.problems,
        "equivalents": [
            {"framework": one.framework, "setting": one.setting, "flags": one.flags, "note": one.note}
            for one in explanation.equivalents
        ],
        "deepspeed": {
            "gradient_factor": explanation.gradient_divisor_factor,
            "clip_grad_with_divisor": explanation.clip_grad,
            "clip_grad_without_divisor": explanation.clip_grad / explanation.gradient_divisor_factor,
        },
        "warnings": explanation.warnings,
        "left_out": explanation.left_out,
        "plot": explanation.plot,
    }


def _weighing_json(weighing: Weighing, explanation: Explanation) -> dict:
    prompts = explanation.step.prompts
    shares = None if prompts is None else {str(name): share for name, share in weighing.prompt_shares(prompts).items()}
    return {
        "divisor": weighing.divisor,
        "divisor_is_assumed": weighing.is_assumed,
        "token_weights": weighing.token_weights.tolist(),
        "sample_weights": weighing.sample_weights.tolist(),
        "sample_shares": weighing.shares.tolist(),
        "prompt_shares": shares,
        "sum_of_weights": weighing.total,
        "gradient_scale": weighing.gradient_scale,
        "regularizer_strength": 1 / weighing.gradient_scale,
        "loss": None if explanation.losses is None else weighing.loss(explanation.losses),
        "known_as": KNOWN_AS.get(weighing.name),
    }


def _chain_json(chain: Chain, explanation: Explanation) -> dict:
    return {
        "host": explanation.host,
        "route": explanation.route,
        "factors": [
            {
                "stage": one.stage,
                "formula": str(one.formula),
                "values": one.values.tolist(),
                "differs": one.differs,
                "does": one.does,
            }
            for one in chain.factors
        ],
        "net": str(chain.net),
        "asked": str(chain.asked),
        "left_over": str(chain.left_over),
        "net_weights": chain.net_weights.tolist(),
        "ratio": chain.ratio.tolist(),
        "is_exact": chain.is_exact and not chain.left_over.powers,
    }
