"""How far a trainer's own loss is from its exact weights on a recorded step: numbers for doctor, and a picture."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_rl.aggregation_record import Formula
from megatron_rl.commands.explain.step import StepInput, read_step
from megatron_rl.hosts.settings import Size, StepSizes
from megatron_rl.hosts.step_sizes import cut, taken_as_one
from megatron_rl.hosts.stock import Stock, is_of_generation, local_letters, of_the_step, times_of_generation
from megatron_rl.train.plots import plot_weights
from megatron_rl.validation import flag_of
from megatron_rl.validation.checks import Row

# Of float64 weights: a smaller error is none.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Difference:
    """The weights of terms on a step against those of the mean over the whole step, of the samples with an unmasked token."""

    terms: str
    lengths: Tensor  # [S'] unmasked tokens
    ratios: Tensor  # [S'] float64, weight / exact weight
    error: float
    """|w - exact| / |exact| over all tokens: the relative error of the gradient where token gradients are independent and alike."""


# Orders of a step that are tried where the trainer shuffles it, and their samples together, which bound the memory.
MOST_ORDERS, MOST_SAMPLES = 1000, 2_000_000
# Errors that differ by less read the same.
SAME_ERROR = 0.005


def judge_step(stock: Stock, args: Namespace, step: StepInput | None = None) -> Iterator[Row]:
    """One row for each term that is not exact on any step, and the picture. step: None: it is read. Raises what read_step
    raises."""
    step = step or read_step(args)
    shares = cut([*map(len, step.masks)], stock.sizes)
    tokens, lengths = (torch.tensor([count(mask) for mask in step.masks]) for count in (lambda m: int(m.sum()), len))
    terms: dict[Formula, list[str]] = {}
    for name, weight in stock.terms.items():
        if local_letters(weight) or is_of_generation(weight):
            terms.setdefault(weight, []).append(name)
    where, found = f"{step.source}; {shares.words}{shares.other}", []
    if unknown := taken_as_one(stock.sizes):
        yield Row("this step", unknown, is_note=True)
    for weight, names in terms.items():
        listed = ", ".join(names)
        if is_of_generation(weight) and generations(tokens, shares.parts, stock.known) is None:
            times = times_of_generation(weight, stock.known)
            far = "not known without M_gen" if times is None else f"{times:.3g} times its exact weight, if it has its share of them"
            yield Row(
                "this step", f"{listed}: T_gen counts tokens of other steps too; a token weighs {far} ({where})", is_note=True
            )
            continue
        found.append(one := difference(listed, weight, tokens, lengths, shares.parts, stock.known))
        low, high = float(one.ratios.min()), float(one.ratios.max())
        far = f"a token weighs {low:.3g} to {high:.3g} times its exact weight, and the gradient is {one.error:.0%} off"
        if one.error < ROUNDING:
            far = "exact on this step, not on others"
        far += of_other_orders(stock, weight, tokens, lengths, shares.parts)
        yield Row("this step", f"{one.terms}: {far} ({where})", is_note=True)
    if stock.varies:
        text = f"what the notes say of the layout is not in {'these figures' if terms else 'a figure here'} ({where})"
        yield Row("this step", text, is_note=True)
    elif not terms:
        beside = ", but for what the notes say" if stock.remarks else ""
        yield Row("this step", f"each token has its exact weight{beside} ({where})", is_note=bool(beside))
    mean = float(tokens.double().mean())
    if stock.coefficients and stock.strength.powers and stock.strength.powers.keys() <= {"m", *stock.known} and mean:
        times = stock.strength.evaluate({**stock.known, "m": mean})
        pairs = stock.coefficients.items()
        strong = ", ".join(
            f"{name}={value:g} is as strong as {name}={value / times:.3g} under sample_mean" for name, value in pairs
        )
        shown = stock.strength.with_names({"m": f"{mean:.4g}", **{name: f"{value:g}" for name, value in stock.known.items()}})
        text = (
            f"the mean tokens of a sample are {mean:.4g} here, so {strong}; for the strength that b has there, type b x {times:.3g}"
        )
        text += f" = b x {shown}"
        yield Row("advice", text, is_note=True)
    yield from _lengths_that_cannot_be(int(lengths.max()), stock.sizes)
    longest, divisor = int(tokens.max()), stock.known.get("L")
    if divisor is not None and longest > divisor and any("L" in weight.powers for weight in stock.terms.values()):
        text = f"a response of {longest} tokens is longer than L = {divisor:g}: L is the longest one that the sampler may make"
        yield Row("this step", text, is_note=True)
    if args.plot is not None and not found:
        yield Row("plot", f"{args.plot} is not written: there is nothing to draw", is_note=True)
    elif args.plot is not None:
        panels = [(f"{one.terms}: the gradient is {one.error:.0%} off", one.lengths.tolist(), one.ratios.tolist()) for one in found]
        plot_weights(panels, args.plot, where)
        yield Row("plot", str(args.plot))


def _lengths_that_cannot_be(longest: int, sizes: StepSizes) -> Iterator[Row]:
    """Of a step that the launch does not make."""
    if sizes.longest is not None and longest > sizes.longest.value:
        text = f"a response of {longest} tokens cannot occur: {sizes.longest.in_words} is the longest one"
        yield Row("this step", text, is_note=True)
    budget = sizes.tokens
    if budget is not None and 0 < budget.value < longest and sizes.dealing is not None and sizes.dealing.work is not None:
        text = f"a response of {longest} tokens is more than the {budget.value} of {budget.source}, and the trainer raises"
        yield Row("this step", text, is_note=True)


def asked_sizes(args: Namespace) -> StepSizes:
    """Of the command's own flags."""
    flags = ("data_parallel_size", "micro_batch_size", "num_microbatches")
    values = {name: vars(args).get(name) for name in flags}
    data, micro_batch, number = (None if value is None else Size(value, flag_of(name)) for name, value in values.items())
    return StepSizes(data, micro_batch, number)


def of_other_orders(
    stock: Stock, weight: Formula, tokens: Tensor, lengths: Tensor, parts: Sequence[Sequence[Sequence[int]]]
) -> str:
    """What is said of the error where the trainer shuffles the samples of a rank before it cuts them; empty where that changes
    nothing. Of a generation that is not a step, other samples are in the step too: no figure."""
    if not stock.shuffles or all(len(of_rank) == 1 for of_rank in parts):
        return ""
    words = f" in this order; {stock.shuffles}"
    if is_of_generation(weight):
        return words
    errors = errors_of_orders(weight, tokens, lengths, parts, stock.known)
    middle, low, high = float(errors.median()), float(errors.min()), float(errors.max())
    if high - low < SAME_ERROR:
        return ""
    return f"{words}: {middle:.0%} in the median of {len(errors)} shuffles, {low:.0%} to {high:.0%}"


def errors_of_orders(
    weight: Formula, tokens: Tensor, lengths: Tensor, parts: Sequence[Sequence[Sequence[int]]], known: Mapping[str, float]
) -> Tensor:  # [orders] float64
    """The error of `difference` for random orders of each rank's samples, the same ones in each call."""
    num_orders = max(1, min(MOST_ORDERS, MOST_SAMPLES // len(tokens)))
    generator, order = torch.Generator().manual_seed(0), torch.arange(len(tokens)).repeat(num_orders, 1)
    for of_rank in parts:
        of_all = torch.tensor([sample for samples in of_rank for sample in samples], dtype=torch.int64)
        order[:, of_all] = of_all[torch.rand(num_orders, len(of_all), generator=generator).argsort(-1)]
    of_orders = tokens[order]
    own, exact = (one(weight, of_orders, lengths[order], parts, known=known) for one in (token_weights, exact_weights))
    return _error(own, exact, of_orders)


def _error(own: Tensor, exact: Tensor, tokens: Tensor) -> Tensor:  # [...] of [..., S]
    return ((tokens * (own - exact).square()).sum(-1) / (tokens * exact.square()).sum(-1)).sqrt()


def generations(tokens: Tensor, parts: Sequence[Sequence[Sequence[int]]], known: Mapping[str, float]) -> list[Tensor] | None:
    """The tokens [..., 1] of the generation that each micro-batch of a rank is of; None: one step does not say."""
    counts = {len(of_rank) for of_rank in parts}
    size = max(counts) * generation_share(known, max(counts)) if "M_gen" in known else 0
    if len(counts) > 1 or size < 1 or max(counts) % size:
        return None
    of_all = [_total(tokens[..., [sample for of_rank in parts for sample in of_rank[index]]]) for index in range(max(counts))]
    firsts = [int(index - index % size) for index in range(max(counts))]
    return [torch.cat(of_all[first : first + int(size)], -1).sum(-1, keepdim=True) for first in firsts]


def generation_share(known: Mapping[str, float], num_microbatches: int) -> float:
    """M_gen / M on a step of so many micro-batches a rank. A generation of less than a step keeps its micro-batches, as a
    micro-batch keeps its samples; any other one is as many steps as on the line."""
    share = known.get("M_gen", 1) / known.get("M", 1)
    return share if share >= 1 else known.get("M_gen", 1) / num_microbatches


def difference(
    terms: str,
    weight: Formula,
    tokens: Tensor,
    lengths: Tensor,
    parts: Sequence[Sequence[Sequence[int]]],
    known: Mapping[str, float] = MappingProxyType({}),
) -> Difference:
    has_tokens = tokens > 0
    own, exact = (one(weight, tokens, lengths, parts, known=known)[has_tokens] for one in (token_weights, exact_weights))
    live = tokens[has_tokens].double()
    return Difference(terms, tokens[has_tokens], own / exact, float(_error(own, exact, live)))


def exact_weights(
    weight: Formula,
    tokens: Tensor,  # [..., S]
    lengths: Tensor,  # [..., S]
    parts: Sequence[Sequence[Sequence[int]]],
    prompts: Sequence[Hashable] | None = None,
    *,
    known: Mapping[str, float] = MappingProxyType({}),
) -> Tensor:  # [..., S] float64
    """What token_weights has of the mean over the whole step."""
    if "L_b" in weight.powers:  # the divisor that is meant is a constant of the run: here the longest of the step
        lengths = torch.full_like(lengths, int(lengths.max()))
    else:
        weight = of_the_step(weight)
    return token_weights(weight, tokens, lengths, parts, prompts, known=known)


def token_weights(
    weight: Formula,
    tokens: Tensor,  # [..., S] unmasked
    lengths: Tensor,  # [..., S] padded by the trainer to the longest of a micro-batch
    parts: Sequence[Sequence[Sequence[int]]],  # samples of each micro-batch of each rank
    prompts: Sequence[Hashable] | None = None,  # of each sample; needed where the formula has P
    *,
    known: Mapping[str, float] = MappingProxyType({}),  # Stock.known
) -> Tensor:  # [..., S] float64
    """The formula on a step: counts of the step, and of the micro-batch that a sample is in. L is 1 where it is not known. Of a
    generation of several steps this one has its share."""
    tokens, lengths = tokens.double(), lengths.double()
    share, of_generations = generation_share(known, max(map(len, parts))), generations(tokens, parts, known)
    values: dict[str, Any] = {
        "N": tokens.shape[-1],
        "T": _total(tokens),
        "N+": _total(tokens > 0).double(),
        "T'": _total(tokens.clamp(min=1)),
        "L": known.get("L", 1),
        "dp": len(parts),
        "m_i": tokens,
        **{name: torch.zeros_like(tokens) for name in ("T_k", "T_b", "N_b", "L_b", "M_gen", "T_gen", "M")},
    }
    for of_rank in parts:
        for index, samples in enumerate(of_rank):
            beside = [sample for others in parts for sample in (others[index] if index < len(others) else ())]
            of_part = {
                "T_k": _total(tokens[..., beside]),
                "T_b": _total(tokens[..., samples]),
                "N_b": len(samples),
                "L_b": lengths[..., samples].amax(-1, keepdim=True),
                "M_gen": len(of_rank) * share,
                "T_gen": values["T"] * share if of_generations is None else of_generations[index],
                "M": len(of_rank),
            }
            for name, value in of_part.items():
                values[name][..., samples] = value
    if prompts is not None:
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        groups = torch.tensor([numbers[prompt] for prompt in prompts])
        values |= {"P": len(numbers), "M_g": tokens.new_zeros(len(numbers)).index_add(0, groups, tokens)[groups]}
    found = torch.as_tensor(weight.evaluate(values), dtype=torch.float64)
    return torch.where(tokens > 0, found, 0.0)


def _total(values: Tensor) -> Tensor:  # [..., 1]
    return values.sum(-1, keepdim=True)
