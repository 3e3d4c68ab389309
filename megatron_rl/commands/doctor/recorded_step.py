"""How far a trainer's own loss is from its exact weights on a recorded step: numbers for doctor, and a picture."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.aggregation_record import Formula
from megatron_rl.commands.explain.step import StepInput, read_step
from megatron_rl.hosts.stock import Stock, local_letters, of_the_step
from megatron_rl.train.plots import plot_weights
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
    """One row for each term that depends on the layout, and the picture. step: None: it is read. Raises what read_step raises."""
    step = step or read_step(args)
    data, size = args.data_parallel_size or 1, args.micro_batch_size or 1
    tokens, lengths = (torch.tensor([count(mask) for mask in step.masks]) for count in (lambda m: int(m.sum()), len))
    parts = microbatches(len(step.masks), data, size)
    terms: dict[Formula, list[str]] = {}
    for name, weight in stock.terms.items():
        if local_letters(weight):
            terms.setdefault(weight, []).append(name)
    found = [difference(", ".join(names), weight, tokens, lengths, parts) for weight, names in terms.items()]
    where = f"{step.source}; data-parallel size {data}, micro-batch size {size}"
    for one in found:
        low, high = float(one.ratios.min()), float(one.ratios.max())
        far = f"a token weighs {low:.3g} to {high:.3g} times its exact weight, and the gradient is {one.error:.0%} off"
        yield Row("this step", f"{one.terms}: {far} ({where})", is_note=True)
    if not found:
        beside = ", but for what the notes say" if stock.remarks else ""
        yield Row("this step", f"each token has its exact weight{beside} ({where})", is_note=bool(beside))
    if args.plot is not None and not found:
        yield Row("plot", f"{args.plot} is not written: with exact weights there is nothing to draw", is_note=True)
    elif args.plot is not None:
        panels = [(f"{one.terms}: the gradient is {one.error:.0%} off", one.lengths.tolist(), one.ratios.tolist()) for one in found]
        plot_weights(panels, args.plot, where)
        yield Row("plot", str(args.plot))


def microbatches(num_samples: int, data_parallel_size: int, micro_batch_size: int) -> list[list[list[int]]]:
    """The samples of each micro-batch of each rank: runs of the file, in its order."""
    share = -(-num_samples // data_parallel_size)
    ranks = [list(range(num_samples))[rank * share : (rank + 1) * share] for rank in range(data_parallel_size)]
    return [[row[place : place + micro_batch_size] for place in range(0, len(row), micro_batch_size)] for row in ranks]


def difference(
    terms: str, weight: Formula, tokens: Tensor, lengths: Tensor, parts: Sequence[Sequence[Sequence[int]]]
) -> Difference:
    has_tokens = tokens > 0
    own, exact = (one(weight, tokens, lengths, parts)[has_tokens] for one in (token_weights, exact_weights))
    live = tokens[has_tokens].double()
    error = ((live * (own - exact).square()).sum() / (live * exact.square()).sum()).sqrt()
    return Difference(terms, tokens[has_tokens], own / exact, float(error))


def exact_weights(
    weight: Formula,
    tokens: Tensor,  # [S]
    lengths: Tensor,  # [S]
    parts: Sequence[Sequence[Sequence[int]]],
    prompts: Sequence[Hashable] | None = None,
    divisor: float | None = None,
) -> Tensor:  # [S] float64
    """What token_weights has of the mean over the whole step."""
    if "L_b" in weight.powers:  # the divisor that is meant is a constant of the run: here the longest of the step
        lengths = torch.full_like(lengths, int(lengths.max()))
    else:
        weight = of_the_step(weight)
    return token_weights(weight, tokens, lengths, parts, prompts, divisor)


def token_weights(
    weight: Formula,
    tokens: Tensor,  # [S] unmasked
    lengths: Tensor,  # [S] padded by the trainer to the longest of a micro-batch
    parts: Sequence[Sequence[Sequence[int]]],  # samples of each micro-batch of each rank
    prompts: Sequence[Hashable] | None = None,  # of each sample; needed where the formula has P
    divisor: float | None = None,  # L; None: 1
) -> Tensor:  # [S] float64
    """The formula on a step: counts of the step, and of the micro-batch that a sample is in."""
    present = int((tokens > 0).sum())
    step = {"N": len(tokens), "T": int(tokens.sum()), "N+": present, "T'": int(tokens.clamp(min=1).sum()), "L": divisor or 1}
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
            values = {**step, **local, "M": len(of_rank), "dp": len(parts)}
            for sample in samples:
                if tokens[sample]:
                    of_prompt = {} if prompts is None else {"P": len(groups), "M_g": groups[prompts[sample]]}
                    found[sample] = weight.evaluate(values | of_prompt | {"m_i": int(tokens[sample])})
    return found
