"""How far a trainer's own loss is from its exact weights on a recorded step: numbers for doctor, and a picture."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_rl.aggregation_record import Formula
from megatron_rl.commands.explain.step import StepInput, read_step
from megatron_rl.hosts.settings import Size, StepSizes
from megatron_rl.hosts.step_sizes import cut
from megatron_rl.hosts.stock import Stock, is_of_generation, local_letters, of_the_step, times_of_generation
from megatron_rl.train.plots import plot_weights
from megatron_rl.validation import flag_of
from megatron_rl.validation.checks import Row


@dataclass(frozen=True, slots=True)
class Difference:
    """The weights of terms on a step against those of the mean over the whole step, of the samples with an unmasked token."""

    terms: str
    lengths: Tensor  # [S'] unmasked tokens
    ratios: Tensor  # [S'] float64, weight / exact weight
    error: float
    """|w - exact| / |exact| over all tokens: the relative error of the gradient where token gradients are independent and alike."""


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
        yield Row("this step", f"{one.terms}: {far} ({where})", is_note=True)
    if stock.varies:
        text = f"what the notes say of the layout is not in {'these figures' if terms else 'a figure here'} ({where})"
        yield Row("this step", text, is_note=True)
    elif not terms:
        beside = ", but for what the notes say" if stock.remarks else ""
        yield Row("this step", f"each token has its exact weight{beside} ({where})", is_note=bool(beside))
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


def asked_sizes(args: Namespace) -> StepSizes:
    """Of the command's own flags."""
    flags = ("data_parallel_size", "micro_batch_size", "num_microbatches")
    values = {name: vars(args).get(name) for name in flags}
    data, micro_batch, number = (None if value is None else Size(value, flag_of(name)) for name, value in values.items())
    return StepSizes(data, micro_batch, number)


def generations(tokens: Tensor, parts: Sequence[Sequence[Sequence[int]]], known: Mapping[str, float]) -> list[int] | None:
    """The tokens of the generation that each micro-batch of a rank is of; None: one step does not say."""
    counts = {len(of_rank) for of_rank in parts}
    size = max(counts) * generation_share(known, max(counts)) if "M_gen" in known else 0
    if len(counts) > 1 or size < 1 or max(counts) % size:
        return None
    of_all = [sum(int(tokens[of_rank[index]].sum()) for of_rank in parts) for index in range(max(counts))]
    firsts = [int(index - index % size) for index in range(max(counts))]
    return [sum(of_all[first : first + int(size)]) for first in firsts]


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
    error = ((live * (own - exact).square()).sum() / (live * exact.square()).sum()).sqrt()
    return Difference(terms, tokens[has_tokens], own / exact, float(error))


def exact_weights(
    weight: Formula,
    tokens: Tensor,  # [S]
    lengths: Tensor,  # [S]
    parts: Sequence[Sequence[Sequence[int]]],
    prompts: Sequence[Hashable] | None = None,
    *,
    known: Mapping[str, float] = MappingProxyType({}),
) -> Tensor:  # [S] float64
    """What token_weights has of the mean over the whole step."""
    if "L_b" in weight.powers:  # the divisor that is meant is a constant of the run: here the longest of the step
        lengths = torch.full_like(lengths, int(lengths.max()))
    else:
        weight = of_the_step(weight)
    return token_weights(weight, tokens, lengths, parts, prompts, known=known)


def token_weights(
    weight: Formula,
    tokens: Tensor,  # [S] unmasked
    lengths: Tensor,  # [S] padded by the trainer to the longest of a micro-batch
    parts: Sequence[Sequence[Sequence[int]]],  # samples of each micro-batch of each rank
    prompts: Sequence[Hashable] | None = None,  # of each sample; needed where the formula has P
    *,
    known: Mapping[str, float] = MappingProxyType({}),  # Stock.known
) -> Tensor:  # [S] float64
    """The formula on a step: counts of the step, and of the micro-batch that a sample is in. L is 1 where it is not known. Of a
    generation of several steps this one has its share."""
    present = int((tokens > 0).sum())
    step = {"N": len(tokens), "T": int(tokens.sum()), "N+": present, "T'": int(tokens.clamp(min=1).sum()), "L": known.get("L", 1)}
    share, of_generations = generation_share(known, max(map(len, parts))), generations(tokens, parts, known)
    groups: dict[Hashable, int] = {}
    for prompt, count in () if prompts is None else zip(prompts, tokens.tolist(), strict=True):
        groups[prompt] = groups.get(prompt, 0) + count
    found = torch.zeros(len(tokens), dtype=torch.float64)
    for of_rank in parts:
        for index, samples in enumerate(of_rank):
            beside = [sample for others in parts for sample in (others[index] if index < len(others) else ())]
            local = {
                "T_k": int(tokens[beside].sum()),
                "T_b": int(tokens[samples].sum()),
                "N_b": len(samples),
                "L_b": int(lengths[samples].max()),
            }
            num_generated = int(tokens.sum()) * share if of_generations is None else of_generations[index]
            of_generation = {"M_gen": len(of_rank) * share, "T_gen": num_generated}
            values = {**step, **local, **of_generation, "M": len(of_rank), "dp": len(parts)}
            for sample in samples:
                if tokens[sample]:
                    of_prompt = {} if prompts is None else {"P": len(groups), "M_g": groups[prompts[sample]]}
                    found[sample] = weight.evaluate(values | of_prompt | {"m_i": int(tokens[sample])})
    return found
