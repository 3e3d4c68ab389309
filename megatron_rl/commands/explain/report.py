"""What `megatron-rl explain` prints: tables, and the object of --json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from torch import Tensor

from megatron_rl.commands.explain.chain import Chain, Factor
from megatron_rl.commands.explain.launch import OWN_REDUCER
from megatron_rl.commands.explain.step import LaunchLayout, StepInput
from megatron_rl.commands.explain.weights import Corrected, Weighing, shift_lines, short
from megatron_rl.config import PolicyLossConfig, RejectedTokens
from megatron_rl.errors import printable
from megatron_rl.hosts.rewards import HostCounts
from megatron_rl.hosts.training_hooks import corrections_in_words
from megatron_rl.kept_counts import correction_of, counts_kept_before, divides_by_kept, why_before
from megatron_rl.loss_hub import get_policy_loss
from megatron_rl.registries.correction_settings import CorrectionSettings
from megatron_rl.registries.selection_settings import TokenSelectionSettings
from megatron_rl.step_counts import StepTotals


@dataclass(kw_only=True, slots=True)
class Explanation:
    step: StepInput
    counts: HostCounts
    weighings: list[Weighing]
    assumes_divisor: bool
    """No divisor was given: it is the longest response."""
    host: str | None
    route: str | None
    companion: str | None = None
    layout: LaunchLayout
    chain: Chain | None = None
    corrected: Corrected | None = None
    problems: list[str] = field(default_factory=list)
    """Why the launch would be refused."""
    warnings: list[str]
    launch_lines: list[str] = field(default_factory=list)
    left_out: list[str]

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


def as_text(explanation: Explanation, max_rows: int) -> str:
    chain, config = explanation.chain, explanation.weighings[0].config
    lines = [headline(explanation), *columns(weight_table(explanation, max_rows)), *remarks(explanation)]
    if corrections := list(corrections_in_words(CorrectionSettings.of(config))):
        lines += [
            "",
            f"correction: {', '.join(corrections)}; rejected tokens are {config.rejected_tokens}{who_counts(explanation)}",
        ]
    selection = TokenSelectionSettings.of(config)
    if selection.is_on:
        tokens = _plural(selection.number_of(explanation.counts.totals.num_tokens), "token")
        lines += ["", f"token selection {selection.in_words()}; at most {tokens} of this step, and the weights count all of T"]
    if explanation.corrected is not None:
        lines += [*columns(token_table(explanation.corrected, max_rows)), kept_line(explanation.corrected)]
    if chain is not None:
        lines += ["", chain_headline(explanation), *columns(chain_table(chain)), verdict(chain)]
    if explanation.launch_lines:
        lines.append(f"hooks on the launch line: {' '.join(explanation.launch_lines)}")
    lines += [f"REFUSED: {line}" for line in explanation.problems]
    if explanation.left_out:
        lines += ["", *(f"left out: {line}" for line in explanation.left_out)]
    if not explanation.is_sound:
        why = "this launch would be refused" if explanation.problems else "the gradient is not what was asked for"
        lines.append(f"exit code 1: {why}")
    return "\n".join(map(printable, lines))


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
    """A row a sample: the weight of a token (for GSPO of the ratio too) and the sample's share; then prompts, sums and names."""
    weighings, counts, step = explanation.weighings, explanation.counts, explanation.step
    named = ["prompt", "rollout"] if counts.has_fan_out else ["prompt"]
    blank = [""] * len(named)
    rows = [["", *named, "tokens", *(weighing.title for weighing in weighings)]]
    for index in range(min(counts.num_samples, max_rows)):
        names = ["?" if step.prompts is None else str(step.prompts[index]), str(step.rollout_keys[index])][: len(named)]
        cells = [_cell(weighing, index, explanation.has_sample_ratio) for weighing in weighings]
        rows.append([f"sample {index}", *names, f"{int(counts.tokens[index])}/{step.masks[index].numel()}", *cells])
    rows += _more(counts.num_samples - max_rows, rows[0])
    if step.prompts is not None and counts.prompt_tokens is not None:
        shares = [weighing.shares_of(step.prompts) for weighing in weighings]
        tokens_of = dict(zip(step.prompts, counts.prompt_tokens.tolist(), strict=True))
        for name in list(tokens_of)[:max_rows]:
            rows.append([f"prompt {name}", *blank, str(tokens_of[name]), *(f"{of_one[name]:6.1%}" for of_one in shares)])
        rows += _more(len(tokens_of) - max_rows, rows[0])
    if counts.has_fan_out:
        rows += _rollout_rows(explanation, max_rows, rows[0])
    rows.append(["sum of weights", *blank, str(counts.totals.num_tokens), *(short(weighing.total) for weighing in weighings)])
    rows.append(["against sample_mean", *blank, "", *(f"x {short(weighing.gradient_scale)}" for weighing in weighings)])
    longest = longest_response(explanation)
    if any(weighing.divisor not in (None, longest) for weighing in weighings):
        ratios = ("" if weighing.divisor is None else f"x {short(longest / weighing.divisor)}" for weighing in weighings)
        rows.append([f"against L = {longest}, longest", *blank, "", *ratios])
    return [*rows, ["known as", *blank, "", *(weighing.record.source or "your own" for weighing in weighings)]]


def longest_response(explanation: Explanation) -> int:
    return max(mask.numel() for mask in explanation.step.masks)


def _rollout_rows(explanation: Explanation, max_rows: int, header: list[str]) -> list[list[str]]:
    """A row a rollout of several samples: its tokens, its samples that have one, and its share."""
    weighings, counts, keys = explanation.weighings, explanation.counts, explanation.step.rollout_keys
    firsts = {key: index for index, key in reversed([*enumerate(keys)]) if keys.count(key) > 1}
    shares = [weighing.shares_of(keys) for weighing in weighings]
    rows = []
    for key in sorted(firsts, key=firsts.__getitem__)[:max_rows]:
        tokens, num_rows = int(counts.rollout_tokens[firsts[key]]), int(counts.rollout_rows[firsts[key]])
        rows.append([f"rollout {key}", "", f"k = {num_rows}", str(tokens), *(f"{of_one[key]:6.1%}" for of_one in shares)])
    return rows + _more(len(firsts) - max_rows, header)


def _more(count: int, header: list[str]) -> list[list[str]]:
    return [[f"{count} more", *[""] * (len(header) - 1)]] if count > 0 else []


def _cell(weighing: Weighing, index: int, has_sample_ratio: bool) -> str:
    of_ratio = f"  W {short(float(weighing.sample_weights[index]))}" if has_sample_ratio else ""
    return f"{short(float(weighing.token_weights[index]))}{of_ratio} {weighing.shares[index]:6.1%}"


def remarks(explanation: Explanation) -> list[str]:
    of_ratio = "W_i = w_i m_i of the sample's one ratio, " if explanation.has_sample_ratio else ""
    lines = [f"sample: weight of a token, {of_ratio}share of the sample"]
    if explanation.counts.has_fan_out:
        several = "a rollout of several samples counts once, as in train, miles and slime; k: its samples with an unmasked token"
        lines.append(f"{several}; M_roll, M_j: the tokens of them all")
    for one in explanation.weighings:
        if explanation.assumes_divisor and one.divisor is not None:
            lines.append(f"{one.name}: L = {one.divisor:g}, the longest response, because none is given; training has no default")
    # Where nothing of megatron_rl is at work, the terms move with the loss.
    if explanation.route == OWN_REDUCER and explanation.companion is None:
        return lines
    return lines + shift_lines(explanation.weighings)


def token_table(corrected: Corrected, max_rows: int) -> list[list[str]]:
    """The tokens whose w is furthest from 1, in their order."""
    rows = [["", "w", *(f"{title}: weight x factor" for title in corrected.weights)]]
    for index in sorted(corrected.ratios.log().abs().argsort(descending=True, stable=True)[:max_rows].tolist()):
        (sample, position), factor = corrected.tokens[index], float(corrected.factors[index])
        cells = [
            f"{short(w)} x {short(factor)} = {short(w * factor)}" for w in (float(x[index]) for x in corrected.weights.values())
        ]
        rows.append([f"sample {sample}, token {position}", short(float(corrected.ratios[index])), *cells])
    return rows


def who_counts(explanation: Explanation) -> str:
    """Where a step under --rejected-tokens dropped counts the tokens that are kept, by aggregation."""
    found: dict[str, list[str]] = {}
    for one in (one for one in explanation.weighings if one.config.rejected_tokens == RejectedTokens.DROPPED):
        found.setdefault(kept_in_words(one.config, one.counts.totals_of_samples), []).append(one.name)
    return "".join(f"; {' and '.join(names)}: {words}" for words, names in found.items())


def kept_in_words(config: PolicyLossConfig, totals: StepTotals) -> str:
    if counts_kept_before(config, totals):
        return f"kept tokens are counted before the step, {why_before(config)}"
    if divides_by_kept(config):
        return "T / K multiplies the gradient after the last backward, K are the kept tokens of the step"
    return "m_i counts kept tokens in the forward pass" if correction_of(config, totals).keeps_sample_weight else "no count changes"


def kept_line(corrected: Corrected) -> str:
    kept = [sample for (sample, _), factor in zip(corrected.tokens, corrected.factors.tolist(), strict=True) if factor]
    line = f"kept: {len(kept)} of {len(corrected.tokens)} tokens, in {len(set(kept))} of {len({s for s, _ in corrected.tokens})}"
    changes = ", ".join(f"{title} x {short(change)}" for title, change in corrected.dropped_against_counted.items())
    return f"{line} samples; the policy term under --rejected-tokens dropped against counted: {changes or 'none is left'}"


def chain_headline(explanation: Explanation) -> str:
    layout = explanation.layout
    num_ranks = layout.tensor * layout.context * layout.pipeline * layout.data
    route = f" by {explanation.route}" if explanation.route else ""
    sizes = f"tp {layout.tensor} x cp {layout.context} x pp {layout.pipeline} x dp {layout.data}"
    return (
        f"{explanation.host}, {explanation.weighings[0].name}{route}: ranks {num_ranks} = {sizes}, micro-batches a rank "
        f"M = {layout.num_microbatches}; tp and pp are in no factor"
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
    if not chain.left_over.powers:
        return "EXACT: the net weight is what was asked for"
    equal = ", equal on this step alone" if chain.is_equal_here else ""
    return f"DIFFERS: the gradient is {chain.left_over} = {as_range(chain.ratio)} x what was asked for{equal}"


def columns(rows: list[list[str]]) -> Iterator[str]:
    """Of equal width."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def as_json(explanation: Explanation) -> str:
    """docs/explain.md names every key."""
    step, counts, weighings = explanation.step, explanation.counts, explanation.weighings
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
        "aggregations": {weighing.name: _weighing_keys(weighing, explanation) for weighing in weighings},
        "policy_loss": explanation.policy_loss,
        "layout": asdict(explanation.layout) if explanation.host is not None else None,
        "chain": None if explanation.chain is None else _chain_keys(explanation.chain, explanation),
        "correction": None if explanation.corrected is None else asdict(explanation.corrected),
        "launch_lines": explanation.launch_lines,
        "problems": explanation.problems,
        "warnings": explanation.warnings,
        "left_out": explanation.left_out,
        "is_sound": explanation.is_sound,
    }
    return json.dumps(found, default=lambda value: value.tolist() if isinstance(value, Tensor) else str(value))


def _weighing_keys(weighing: Weighing, explanation: Explanation) -> dict:
    prompts = explanation.step.prompts
    shares = None if prompts is None else {str(name): share for name, share in weighing.shares_of(prompts).items()}
    return {
        "divisor": weighing.divisor,
        "divisor_is_assumed": explanation.assumes_divisor and weighing.divisor is not None,
        "longest_over_divisor": None if weighing.divisor is None else longest_response(explanation) / weighing.divisor,
        "token_weights": weighing.token_weights,
        "sample_weights": weighing.sample_weights,
        "sample_shares": weighing.shares,
        "prompt_shares": shares,
        "sum_of_weights": weighing.total,
        "gradient_scale": weighing.gradient_scale,
        "regularizer_strength": 1 / weighing.gradient_scale,
        "known_as": weighing.record.source or None,
    }


def _chain_keys(chain: Chain, explanation: Explanation) -> dict:
    launch = {"host": explanation.host, "route": explanation.route, "companion": explanation.companion}
    return {**launch, **asdict(chain), "is_exact": chain.is_exact}
