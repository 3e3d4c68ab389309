"""What `megatron-rl explain` prints: tables, and the object of --json."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from megatron_rl.commands.explain.chain import Chain, Factor, Layout
from megatron_rl.commands.explain.step import StepInput
from megatron_rl.commands.explain.weights import Weighing, shift_lines, short
from megatron_rl.errors import printable
from megatron_rl.hosts.rewards import HostCounts


@dataclass(kw_only=True, slots=True)
class Explanation:
    step: StepInput
    counts: HostCounts
    weighings: list[Weighing]
    assumes_divisor: bool
    """No divisor was given: it is the longest response."""
    host: str | None
    layout: Layout
    chain: Chain | None
    warnings: list[str]
    left_out: list[str]

    @property
    def is_sound(self) -> bool:
        """No launch was asked about, or the one that was would train what it was asked for."""
        return self.chain is None or self.chain.is_exact


def as_text(explanation: Explanation, max_rows: int) -> str:
    chain = explanation.chain
    lines = [headline(explanation), *columns(weight_table(explanation, max_rows)), *remarks(explanation)]
    if chain is not None:
        lines += ["", chain_headline(explanation), *columns(chain_table(chain)), verdict(chain)]
    return "\n".join(map(printable, [*lines, "", *(f"left out: {line}" for line in explanation.left_out)]))


def headline(explanation: Explanation) -> str:
    counts, totals = explanation.counts, explanation.counts.totals
    prompts = "unknown prompts" if totals.num_prompts is None else _plural(totals.num_prompts, "prompt")
    masked = f", {counts.num_masked} fully masked" if counts.num_masked else ""
    samples = _plural(totals.num_samples, "sample")
    if counts.has_fan_out:
        samples = f"{_plural(totals.num_samples, 'rollout')} with {counts.num_samples} samples"
    tokens = _plural(totals.num_tokens, "unmasked token")
    return f"one step, from {explanation.step.source}: N = {samples} of {prompts}{masked}, T = {tokens}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def weight_table(explanation: Explanation, max_rows: int) -> list[list[str]]:
    """A row a sample: the weight of a token and the sample's share; then prompts, rollouts, sums and names."""
    weighings, counts, step = explanation.weighings, explanation.counts, explanation.step
    named = ["prompt", "rollout"] if counts.has_fan_out else ["prompt"]
    blank = [""] * len(named)
    rows = [["", *named, "tokens", *(weighing.title for weighing in weighings)]]
    for index in range(min(counts.num_samples, max_rows)):
        names = ["?" if step.prompts is None else str(step.prompts[index]), str(step.rollout_keys[index])][: len(named)]
        cells = [f"{short(float(one.token_weights[index]))} {one.shares[index]:6.1%}" for one in weighings]
        rows.append([f"sample {index}", *names, f"{int(counts.tokens[index])}/{step.masks[index].numel()}", *cells])
    rows += _more(counts.num_samples - max_rows, rows[0])

    def group_rows(kind: str, keys: Sequence[Hashable], tokens: Tensor) -> Iterator[list[str]]:
        tokens_of = dict(zip(keys, tokens.tolist(), strict=True))
        shares = [weighing.shares_of(keys) for weighing in weighings]
        for key in [*tokens_of][:max_rows]:
            yield [f"{kind} {key}", *blank, str(tokens_of[key]), *(f"{share[key]:6.1%}" for share in shares)]
        yield from _more(len(tokens_of) - max_rows, rows[0])

    if step.prompts is not None and counts.prompt_tokens is not None:
        rows += group_rows("prompt", step.prompts, counts.prompt_tokens)
    if counts.has_fan_out:
        rows += group_rows("rollout", step.rollout_keys, counts.rollout_tokens)
    rows.append(["sum of weights", *blank, str(counts.totals.num_tokens), *(short(weighing.total) for weighing in weighings)])
    rows.append(["against sample_mean", *blank, "", *(f"x {short(weighing.gradient_scale)}" for weighing in weighings)])
    return [*rows, ["known as", *blank, "", *(weighing.record.source or "your own" for weighing in weighings)]]


def _more(count: int, header: list[str]) -> list[list[str]]:
    return [[f"{count} more", *[""] * (len(header) - 1)]] if count > 0 else []


def remarks(explanation: Explanation) -> list[str]:
    lines = ["sample: weight of a token, share of the sample"]
    if explanation.counts.has_fan_out:
        lines.append("a rollout of several samples counts once in N; M_roll, M_j: the tokens of them all")
    for one in explanation.weighings:
        if explanation.assumes_divisor and one.divisor is not None:
            lines.append(f"{one.name}: L = {one.divisor:g}, the longest response, because none is given; training has no default")
    return lines + shift_lines(explanation.weighings)


def chain_headline(explanation: Explanation) -> str:
    tensor, context, pipeline, data, num_microbatches = explanation.layout.values()
    return (
        f"{explanation.host}, {explanation.weighings[0].name}: ranks {tensor * context * pipeline * data} = tp {tensor} x "
        f"cp {context} x pp {pipeline} x dp {data}, micro-batches a rank M = {num_microbatches}; tp and pp are in no factor"
    )


def chain_table(chain: Chain) -> list[list[str]]:
    net = Factor("net", chain.net, chain.net_weights, differs=False, does=f"asked for: {chain.asked}")
    has_weight, rows = chain.net_weights != 0, [["", "factor", "here", "", ""]]
    for one in (*chain.factors, net):
        rows.append([one.stage, str(one.formula), as_range(one.values[has_weight]), "<- differs" if one.differs else "", one.does])
    return rows


def as_range(values: Tensor) -> str:
    low, high = float(values.min()), float(values.max())
    return short(low) if high - low <= 1e-6 * abs(high) else f"{short(low)} .. {short(high)}"


def verdict(chain: Chain) -> str:
    if chain.is_exact:
        return "EXACT: the net weight is what was asked for"
    return f"DIFFERS: the gradient is {chain.left_over} = {as_range(chain.ratio)} x what was asked for"


def columns(rows: list[list[str]]) -> Iterator[str]:
    """Of equal width."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def as_json(explanation: Explanation) -> str:
    """What --json prints."""
    step, counts, weighings, chain = explanation.step, explanation.counts, explanation.weighings, explanation.chain
    found = {
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
        "aggregations": {weighing.name: _weighing_keys(weighing, step.prompts) for weighing in weighings},
        "host": explanation.host,
        "layout": explanation.layout,
        "chain": None if chain is None else {**asdict(chain), "is_exact": chain.is_exact},
        "warnings": explanation.warnings,
        "left_out": explanation.left_out,
    }
    return json.dumps(found, default=lambda value: value.tolist() if isinstance(value, Tensor) else str(value))


def _weighing_keys(weighing: Weighing, prompts: Sequence[Hashable] | None) -> dict:
    return {
        "divisor": weighing.divisor,
        "token_weights": weighing.token_weights,
        "sample_shares": weighing.shares,
        "prompt_shares": None if prompts is None else {str(name): share for name, share in weighing.shares_of(prompts).items()},
        "sum_of_weights": weighing.total,
        "gradient_scale": weighing.gradient_scale,
        "known_as": weighing.record.source or None,
    }
