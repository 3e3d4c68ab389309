"""What the loss of a launch line weighs on a step, for `megatron-rl explain ... -- LAUNCH LINE`: doctor judges the line."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl.aggregation_record import Formula
from megatron_rl.arguments import given_settings
from megatron_rl.commands.doctor.launch import judge_launch
from megatron_rl.commands.doctor.recorded_step import asked_sizes, exact_weights, judge_step, token_weights
from megatron_rl.commands.doctor.report import LaunchReport, as_text
from megatron_rl.commands.explain.report import columns
from megatron_rl.commands.explain.step import StepInput, read_step
from megatron_rl.commands.explain.weights import short
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.step_sizes import Cut, cut
from megatron_rl.hosts.stock import Stock
from megatron_rl.validation import flag_of
from megatron_rl.validation.checks import Row

# Flags of a layout, or of a launch of ours, that a line says itself.
OF_THE_LINE = (
    *("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"),
    *("route", "companion", "calculate_per_token_loss"),
)


@dataclass(slots=True)
class LossOfLine:
    """report: doctor's. terms: weights of each term, on the step."""

    step: StepInput
    report: LaunchReport
    cut: Cut
    known: Mapping[str, float]  # Stock.known
    shuffles: str  # Stock.shuffles
    has_sample_ratio: bool  # Stock.has_sample_ratio
    terms: dict[str, tuple[Formula, Tensor, Tensor]] = field(default_factory=dict)  # (weight, of each sample [S], exact [S])


def check_flags(args: Namespace) -> None:
    """No flag beside the line does nothing. Raises ConfigError."""
    of_loss = [name for name, value in given_settings(args).items() if value is not None and value is not False]
    given = [name for name in OF_THE_LINE if vars(args)[name]] + of_loss
    if given:
        raise ConfigError(f"{', '.join(map(flag_of, given))} beside a launch line: the line says what trains; remove one of them")


def run(args: Namespace) -> int:
    """Prints the weights. Exit code 0; 1 where doctor finds a problem on the line."""
    check_flags(args)
    found = loss_of_line(args)
    print(as_json(found) if args.json else "\n".join(lines_of(found, args.rows)))
    return 1 if any(finding.status == "PROBLEM" for finding in found.report.findings) else 0


def loss_of_line(args: Namespace) -> LossOfLine:
    """Raises ConfigError for a line whose loss is not known here, and what reading them raises."""
    step = read_step(args)
    found: list[Stock] = []

    def of_step(stock: Stock) -> Iterator[Row]:
        found.append(stock)
        yield from judge_step(stock, Namespace(plot=None), step)

    report = judge_launch(args.launch_line, args.host, of_step=of_step, asked=asked_sizes(args))
    if not found:
        wrong = [f"{row.subject}: {row.text}" for row in report.findings if row.status == "PROBLEM"]
        why = report.unjudged or "; ".join(wrong) or "what the line trains is not known here"
        raise ConfigError(f"{why}. `megatron-rl doctor --launch-only -- LINE` judges the line")
    if len({*step.rollout_keys}) < len(step.masks):
        raise ConfigError(
            "the step has rollouts of several samples, and the weights of a line are shown for samples that are rollouts: give "
            "--host and the flags of the loss in the place of the line"
        )
    of_line, parts = found[0], cut([*map(len, step.masks)], found[0].sizes)
    shown = LossOfLine(step, report, parts, of_line.known, of_line.shuffles, of_line.has_sample_ratio)
    tokens, lengths = (torch.tensor([count_of(mask) for mask in step.masks]) for count_of in (lambda m: int(m.sum()), len))
    for name, weight in found[0].terms.items():
        if "P" in weight.powers and step.prompts is None:
            raise ConfigError(f"the {name} term weighs {weight}: give --prompt-ids a,a,b, or a step whose samples have prompts")
        own, exact = (
            one(weight, tokens, lengths, shown.cut.parts, step.prompts, known=shown.known) for one in (token_weights, exact_weights)
        )
        shown.terms[name] = (weight, own, exact)
    return shown


def lines_of(found: LossOfLine, max_rows: int) -> Iterator[str]:
    step, masks = found.step, found.step.masks
    place = {
        sample: f"{rank}.{index}"
        for rank, of_rank in enumerate(found.cut.parts)
        for index, samples in enumerate(of_rank)
        for sample in samples
    }
    num_tokens = int(sum(mask.sum() for mask in masks))
    yield f"one step, from {step.source}: {len(masks)} samples, {num_tokens} unmasked tokens{found.cut.other}"
    numbers = {"L": 1} | {name: f"{count:g}" for name, count in found.known.items()}
    # Terms of one weight share a column.
    names: dict[Formula, list[str]] = {}
    for name, (weight, _, _) in found.terms.items():
        names.setdefault(weight, []).append(name)
    shown = {weight: [letter for letter in ("L", "M_gen") if letter in weight.powers] for weight in names}
    titles = [
        f"{'about ' * ('M_gen' in shown[weight])}"
        + ", ".join([*listed[:-1], f"{listed[-1]} {weight}", *(f"{one} = {numbers.get(one, 'M')}" for one in shown[weight])])
        for weight, listed in names.items()
    ]
    weights = [found.terms[listed[0]] for listed in names.values()]
    header = ["", "prompt", f"rank.micro-batch{' in this order' * bool(found.shuffles)}", "tokens", *titles]
    rows = [header]
    tokens = torch.tensor([int(mask.sum()) for mask in masks])
    totals = [float((own * tokens).sum()) for _, own, _ in weights]
    of_ratio = [found.has_sample_ratio and "policy" in listed for listed in names.values()]
    for index, mask in enumerate(masks[:max_rows]):
        prompt = "?" if step.prompts is None else str(step.prompts[index])
        cells = [
            _cell(float(own[index]), float(exact[index]), int(tokens[index]), total, has_ratio)
            for (_, own, exact), total, has_ratio in zip(weights, totals, of_ratio, strict=True)
        ]
        rows.append([f"sample {index}", prompt, place[index], f"{int(tokens[index])}/{len(mask)}", *cells])
    if len(masks) > max_rows:
        rows.append([f"{len(masks) - max_rows} more", *[""] * (len(header) - 1)])
    rows.append(["sum of weights", "", "", str(num_tokens), *map(short, totals)])
    yield from columns(rows)
    with_ratio = "W_i = w_i m_i of the sample's one ratio, " if any(of_ratio) else ""
    is_off = any("  x " in cell for row in rows for cell in row)
    exact_too = ", and how many times its exact weight, where that is another one" if is_off else ""
    yield f"sample: weight of a token, {with_ratio}share of the sample{exact_too}"
    yield ""
    yield as_text([], [found.report]).replace("doctor: ", "", 1)


def _cell(own: float, exact: float, num_tokens: int, total: float, has_ratio: bool) -> str:
    is_equal = exact == 0 or abs(own / exact - 1) < 1e-9
    of_ratio = f"  W {short(own * num_tokens)}" if has_ratio else ""
    share = own * num_tokens / total if total else 0.0
    return f"{short(own)}{of_ratio} {share:6.1%}" + ("" if is_equal else f"  x {own / exact:.3g}")


def as_json(found: LossOfLine) -> str:
    """docs/explain.md names the keys."""
    terms = {
        name: {"formula": str(weight), "weights": own.tolist(), "exact_weights": exact.tolist()}
        for name, (weight, own, exact) in found.terms.items()
    }
    rows = [{"subject": row.subject, "status": row.status, "text": row.text} for row in found.report.findings]
    tokens = [int(mask.sum()) for mask in found.step.masks]
    return json.dumps(
        {"source": found.step.source, "tokens": tokens, "own_loss": terms, "findings": rows, "said": found.report.unjudged}
    )
