"""What `megatron-rl explain` prints: tables with rich on a terminal, plain ones elsewhere, and the object of --json."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from torch import Tensor

from megatron_rl.commands.explain.chain import Chain, Layout
from megatron_rl.commands.explain.launch import CONVERT, OWN_REDUCER
from megatron_rl.commands.explain.peers import Equivalent
from megatron_rl.commands.explain.step import StepInput
from megatron_rl.commands.explain.weights import Weighing, from_to, shift_lines, short
from megatron_rl.errors import printable
from megatron_rl.hosts.companions import RolloutCounts
from megatron_rl.loss_hub import get_policy_loss

DIFFERS = "<- differs"
DEFAULT_CLIP_GRAD = 1.0


@dataclass(frozen=True, slots=True)
class DeepSpeed:
    """Its division by accumulation x world, where both are N together. Only a loss that is divided already is divided twice."""

    gradient_factor: float
    clip_grad_with_divisor: float | None
    """None where --gradient-divisor does not go: in miles and slime."""
    clip_grad_without_divisor: float

    @classmethod
    def of(cls, num_samples: int, clip_grad: float | None, *, has_flag: bool) -> DeepSpeed:
        factor, clip = 1 / num_samples, DEFAULT_CLIP_GRAD if clip_grad is None else clip_grad
        return cls(factor, clip if has_flag else None, clip / factor)

    def __str__(self) -> str:
        clip = f"--clip-grad {self.clip_grad_without_divisor:g}"
        if self.clip_grad_with_divisor is not None:
            clip = f"--gradient-divisor num_samples --clip-grad {self.clip_grad_with_divisor:g}, or no divisor and {clip}"
        return (
            "DeepSpeed, given a loss that is divided by the step's counts, divides the gradient by accumulation x world once more: "
            f"where that is N, the same loss and a gradient norm x {short(self.gradient_factor)}; to clip alike: {clip}"
        )


@dataclass(kw_only=True, slots=True)
class Explanation:
    step: StepInput
    counts: RolloutCounts
    weighings: list[Weighing]
    losses: Tensor | None = None  # [S]
    host: str | None
    route: str | None
    companion: str | None = None
    layout: Layout
    chain: Chain | None = None
    problems: list[str] = field(default_factory=list)
    """Why the launch would be refused."""
    warnings: list[str]
    launch_lines: list[str] = field(default_factory=list)
    equivalents: list[Equivalent] = field(default_factory=list)
    deepspeed: DeepSpeed | None = None
    left_out: list[str]
    plot: str | None

    @property
    def policy_loss(self) -> str:
        return self.weighings[0].config.policy_loss

    @property
    def has_sample_ratio(self) -> bool:
        """The loss has one ratio a sample, and not one a token."""
        return get_policy_loss(self.policy_loss).level == "sequence"

    @property
    def is_sound(self) -> bool:
        """No launch was asked about, or the one that was would start and train what it was asked for."""
        return not self.problems and (self.chain is None or self.chain.is_exact)


def as_text(explanation: Explanation, max_rows: int) -> None:
    """Prints it."""
    say(headline(explanation))
    if explanation.step.is_given:
        print_table(*weight_table(explanation, max_rows))
        for line in remarks(explanation):
            say(line)
    if explanation.chain is not None:
        print()
        say(chain_headline(explanation))
        print_table(*chain_table(explanation.chain, explanation.step))
        say(verdict(explanation.chain, explanation.step))
        if explanation.companion == CONVERT:
            print("with the converter --global-batch-size counts prompts, and KL, entropy and clip fraction are prompt means too")
    if explanation.launch_lines:
        say(f"hooks on the launch line: {' '.join(explanation.launch_lines)}")
    for line in explanation.problems:
        say(f"REFUSED: {line}")
    others = [*explanation.equivalents, *([] if explanation.deepspeed is None else [explanation.deepspeed])]
    if others:
        print()
    for one in others:
        say(str(one))
    if explanation.plot is not None:
        print()
        say(f"wrote {explanation.plot}")
    if explanation.left_out:
        print()
    for line in explanation.left_out:
        say(f"left out: {line}")
    if not explanation.is_sound:
        print(
            f"exit code 1: {'this launch would be refused' if explanation.problems else 'the gradient is not what was asked for'}"
        )


def say(line: str) -> None:
    print(printable(line))


def headline(explanation: Explanation) -> str:
    if not explanation.step.is_given:
        return "no step is given: formulas alone"
    counts, totals = explanation.counts, explanation.counts.totals
    prompts = "unknown prompts" if totals.num_prompts is None else _plural(totals.num_prompts, "prompt")
    masked = f", {counts.num_masked} fully masked" if counts.num_masked else ""
    samples = f"N = {_plural(totals.num_samples, 'sample')}"
    if counts.has_fan_out:
        samples = f"N = {_plural(totals.num_samples, 'rollout')} with {counts.num_samples} samples"
    tokens = _plural(totals.num_tokens, "unmasked token")
    return f"one step, from {explanation.step.source}: {samples} of {prompts}{masked}, T = {tokens}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def weight_table(explanation: Explanation, max_rows: int) -> tuple[list[str], list[list[str]]]:
    """A row a sample: the weight of a token, for GSPO that of the ratio, and the sample's share; then prompts, sums and names."""
    weighings, counts, step = explanation.weighings, explanation.counts, explanation.step
    named = ["prompt", *(["rollout"] if counts.has_fan_out else [])]
    rows = []

    def add(label: str, tokens: str, cells: Iterable[str], names: Sequence[str] = [""] * len(named)) -> None:
        rows.append([label, *names, tokens, *cells])

    def add_rest(count: int) -> None:
        if count > max_rows:
            add(f"{count - max_rows} more", "", [""] * len(weighings))

    for index in range(min(counts.num_samples, max_rows)):
        names = ["?" if step.prompts is None else str(step.prompts[index]), str(step.rollout_keys[index])]
        tokens = f"{int(counts.tokens[index])}/{step.masks[index].numel()}"
        cells = (_cell(weighing, index, explanation.has_sample_ratio) for weighing in weighings)
        add(f"sample {index}", tokens, cells, names[: len(named)])
    add_rest(counts.num_samples)
    if step.prompts is not None and counts.prompt_tokens is not None:
        shares = [weighing.prompt_shares(step.prompts) for weighing in weighings]
        tokens_of = dict(zip(step.prompts, counts.prompt_tokens.tolist(), strict=True))
        for name in list(tokens_of)[:max_rows]:
            add(f"prompt {name}", str(tokens_of[name]), (f"{of_one[name]:6.1%}" for of_one in shares))
        add_rest(len(tokens_of))
    add("sum of weights", str(counts.totals.num_tokens), (short(weighing.total) for weighing in weighings))
    add("gradient", "", (f"x {short(weighing.gradient_scale)}" for weighing in weighings))
    if explanation.losses is not None:
        add("loss", "", [f"{weighing.loss(explanation.losses):.6g}" for weighing in weighings])
    add("known as", "", (weighing.record.source or "your own" for weighing in weighings))
    return ["", *named, "tokens", *(weighing.title for weighing in weighings)], rows


def _cell(weighing: Weighing, index: int, has_sample_ratio: bool) -> str:
    of_ratio = f"  W {short(float(weighing.sample_weights[index]))}" if has_sample_ratio else ""
    return f"{short(float(weighing.token_weights[index]))}{of_ratio} {weighing.shares[index]:6.1%}"


def remarks(explanation: Explanation) -> list[str]:
    of_ratio = "W_i = w_i m_i of the sample's one ratio, " if explanation.has_sample_ratio else ""
    lines = [f"sample: weight of a token, {of_ratio}share of the sample; gradient: its size against sample_mean"]
    if explanation.counts.has_fan_out:
        lines.append("a rollout of several samples has one share of N, as miles and slime count; M_roll: the tokens of them all")
    for weighing in explanation.weighings:
        if weighing.is_assumed:
            lines.append(
                f"{weighing.name}: L = {weighing.divisor:g}, the longest response, because none is given; training has no default"
            )
    # Where nothing of ours is at work, and with the converter, the terms move with the loss.
    if explanation.companion == CONVERT or (explanation.route == OWN_REDUCER and explanation.companion is None):
        return lines
    return lines + shift_lines(explanation.weighings)


def chain_headline(explanation: Explanation) -> str:
    layout = explanation.layout
    route = f" by {explanation.route}" if explanation.route else ""
    sizes = f"tp {layout.tensor} x cp {layout.context} x pp {layout.pipeline} x dp {layout.data}"
    return (
        f"{explanation.host}, {explanation.weighings[0].name}{route}: ranks {layout.num_ranks} = {sizes}, micro-batches a rank "
        f"M = {layout.num_microbatches}; tp and pp are in no factor"
    )


def chain_table(chain: Chain, step: StepInput) -> tuple[list[str], list[list[str]]]:
    """With a step numbers, without one what the layout alone makes of the formulas."""
    has_weight = chain.net_weights != 0
    rows = []
    for factor in chain.factors:
        here = number(factor.values[has_weight]) if step.is_given else factor.formula.with_numbers(chain.known)
        rows.append([factor.stage, str(factor.formula), here, DIFFERS if factor.differs else "", factor.does])
    here = number(chain.net_weights[has_weight]) if step.is_given else chain.net.with_numbers(chain.known)
    rows.append(["net", str(chain.net), here, "", f"asked for: {chain.asked}"])
    return ["", "factor", "here", "", ""], rows


def number(values: Tensor) -> str:
    low, high = float(values.min()), float(values.max())
    return short(low) if high - low <= 1e-6 * abs(high) else f"{short(low)} .. {short(high)}"


def verdict(chain: Chain, step: StepInput) -> str:
    if not chain.left_over.powers:
        return "EXACT: the net weight is what was asked for"
    here = f" = {number(chain.ratio)}" if step.is_given else ""
    equal = ", equal on this step alone" if step.is_given and chain.is_equal_here else ""
    return f"DIFFERS: the gradient is {chain.left_over}{here} x what was asked for{equal}"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """rich on a terminal that has it, else columns of equal width."""
    rows = [[printable(cell) for cell in row] for row in rows]
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
        table.add_row(*map(Text, row), style="bold red" if DIFFERS in row else None)
    Console().print(table)
    return True


def as_json(explanation: Explanation) -> str:
    """docs/explain.md names every key. Without a step there is no number of one."""
    step, counts, weighings = explanation.step, explanation.counts, explanation.weighings
    of_step = {
        "source": step.source,
        "num_samples": counts.num_samples,
        "num_rollouts": counts.totals.num_samples,
        "num_prompts": counts.totals.num_prompts,
        "num_tokens": counts.totals.num_tokens,
        "num_masked_samples": counts.num_masked,
        "mean_tokens": weighings[0].mean_tokens,
        "prompt_ids": step.prompts,
        "rollout_ids": step.rollouts,
        "token_counts": counts.tokens,
        "response_lengths": [mask.numel() for mask in step.masks],
        "aggregations": {weighing.name: _weighing_keys(weighing, explanation) for weighing in weighings},
        "gradient_scale_from_to": from_to(weighings),
    }
    found = {
        **(of_step if step.is_given else dict.fromkeys(of_step)),
        "policy_loss": explanation.policy_loss,
        "layout": asdict(explanation.layout) if explanation.host is not None else None,
        "chain": None if explanation.chain is None else _chain_keys(explanation.chain, explanation),
        "launch_lines": explanation.launch_lines,
        "problems": explanation.problems,
        "warnings": explanation.warnings,
        "equivalents": [asdict(one) for one in explanation.equivalents],
        "deepspeed": None if explanation.deepspeed is None else asdict(explanation.deepspeed),
        "left_out": explanation.left_out,
        "plot": explanation.plot,
        "is_sound": explanation.is_sound,
    }
    return json.dumps(found, default=lambda value: value.tolist() if isinstance(value, Tensor) else str(value))


def _weighing_keys(weighing: Weighing, explanation: Explanation) -> dict:
    prompts = explanation.step.prompts
    shares = None if prompts is None else {str(name): share for name, share in weighing.prompt_shares(prompts).items()}
    return {
        "divisor": weighing.divisor,
        "divisor_is_assumed": weighing.is_assumed,
        "token_weights": weighing.token_weights,
        "sample_weights": weighing.sample_weights,
        "sample_shares": weighing.shares,
        "prompt_shares": shares,
        "sum_of_weights": weighing.total,
        "gradient_scale": weighing.gradient_scale,
        "regularizer_strength": 1 / weighing.gradient_scale,
        "loss": None if explanation.losses is None else weighing.loss(explanation.losses),
        "known_as": weighing.record.source or None,
    }


def _chain_keys(chain: Chain, explanation: Explanation) -> dict:
    launch = {"host": explanation.host, "route": explanation.route, "companion": explanation.companion}
    keys = {**launch, **asdict(chain), "is_exact": chain.is_exact}
    if not explanation.step.is_given:
        keys |= {"net_weights": None, "ratio": None}
        keys["factors"] = [factor | {"values": None} for factor in keys["factors"]]
    return keys
