"""What the trainers' own losses weigh a token: one formula for each of their aggregations, and what it makes of a typed step.

Counts of the step are the same on every layout. M and dp (micro-batches of a rank, ranks) and T_b, N_b and L_b (counts of one
micro-batch) are not: such a loss is a mean of means. tests/test_explain.py holds each row against the trainer's own code. KL,
entropy, value and distillation terms are left out.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence

from megatron_rl.commands.explain.report import columns
from megatron_rl.commands.explain.weights import short
from megatron_rl.errors import ConfigError
from megatron_rl.formula import Formula
from megatron_rl.weights import TOKEN_MEAN, formula_value

SAMPLE_MEAN, CONSTANT = Formula(N=-1, m_i=-1), Formula(L=-1, N=-1)
PROMPT_MEAN = Formula(P=-1, M_g=-1)
SAMPLE_SUM, OF_PRESENT_SAMPLES, COUNTED_TOKENS = Formula(N=-1), Formula({"N+": -1, "m_i": -1}), Formula({"T'": -1})
MEAN_OF_TOKEN_MEANS, MEAN_OF_SAMPLE_MEANS = Formula(M=-1, dp=-1, T_b=-1), Formula(dp=-1, N_b=-1, m_i=-1)
# Trainer -> its name of an aggregation, or the setting -> the weight of a token in its policy term.
STOCK: dict[str, dict[str, Formula]] = {
    "miles": {
        "default": SAMPLE_MEAN,
        "calculate_per_token_loss": COUNTED_TOKENS,
        "calculate_per_token_loss on fsdp": Formula(dp=-1),
        "dr_grpo reducer": CONSTANT,
    },
    "slime": {"default": SAMPLE_MEAN, "calculate_per_token_loss": COUNTED_TOKENS, "dr_grpo reducer": CONSTANT},
    "verl": {
        "token-mean": TOKEN_MEAN,
        "seq-mean-token-mean": SAMPLE_MEAN,
        "seq-mean-token-sum": SAMPLE_SUM,
        "seq-mean-token-sum-norm": CONSTANT,
        "seq-mean-token-sum-norm without loss_scale_factor": Formula(L_b=-1, N=-1),
        "geo_mean": MEAN_OF_SAMPLE_MEANS,
    },
    "nemo_rl": {"token_level_loss=true": TOKEN_MEAN, "token_level_loss=false": OF_PRESENT_SAMPLES},
    "roll": {
        "token-mean": TOKEN_MEAN,
        "seq-mean-token-mean": OF_PRESENT_SAMPLES,
        "seq-mean-token-sum": Formula({"N+": -1}),
        "seq-mean-token-sum-norm": Formula(L_b=-1),
    },
    "skyrl": {
        "token_mean": TOKEN_MEAN,
        "token_mean_legacy": MEAN_OF_TOKEN_MEANS,
        "sequence_mean": SAMPLE_MEAN,
        "prompt_mean": PROMPT_MEAN,
        "seq_mean_token_sum_norm": CONSTANT,
    },
    "prime_rl": {"default": TOKEN_MEAN},
    "trl": {
        "grpo": SAMPLE_MEAN,
        "bnpo": MEAN_OF_TOKEN_MEANS,
        "dr_grpo": CONSTANT,
        "dapo": TOKEN_MEAN,
        "luspo": SAMPLE_SUM,
    },
    "megatron_lm": {"default": MEAN_OF_TOKEN_MEANS, "calculate_per_token_loss": COUNTED_TOKENS},
}
# A weight that depends on the layout -> the mean over the whole step that it stands for.
WHOLE = {
    MEAN_OF_TOKEN_MEANS: TOKEN_MEAN,
    MEAN_OF_SAMPLE_MEANS: SAMPLE_MEAN,
    Formula(dp=-1): TOKEN_MEAN,
    Formula(L_b=-1, N=-1): CONSTANT,
    Formula(L_b=-1): Formula(L=-1),
}
Layout = list[list[list[int]]]  # the unmasked tokens of each sample of each micro-batch of each rank


def stock_table(args: Namespace) -> Iterator[str]:
    """The trainer's own weights beside the exact ones, and by how much the gradient is off."""
    weight, layout = stock_weight(args.stock), read_layout(args.micro_batches)
    exact = WHOLE.get(weight, weight)
    given = args.loss_aggregation_divisor, None if args.prompt_ids is None else args.prompt_ids.split(",")
    own_weights, exact_weights = weights_of(weight, layout, *given), weights_of(exact, layout, *given)
    places = [
        (f"{rank}.{number}", tokens)
        for rank, rank_parts in enumerate(layout)
        for number, part in enumerate(rank_parts)
        for tokens in part
    ]
    rows = [["", "rank.micro-batch", "tokens", f"{args.stock} {weight}", f"exact {exact}", "ratio"]]
    for sample, ((place, tokens), own, right) in enumerate(zip(places, own_weights, exact_weights, strict=True)):
        ratio = f"x {short(own / right)}" if tokens else ""
        rows.append([f"sample {sample}", place, str(tokens), short(own), short(right), ratio])
    yield from columns(rows[: args.rows + 1])
    if weight == exact:
        yield "EXACT: the weight is the same on every layout"
    else:
        error = gradient_error(own_weights, exact_weights, [tokens for _, tokens in places])
        yield f"NOT exact: the weight depends on the layout; of independent tokens this one is {error:.0%} off"


def read_layout(text: str) -> Layout:
    """Of "3100,900|2500,700||400|60": `|` between micro-batches, `||` between ranks."""
    try:
        return [[[int(length) for length in part.split(",")] for part in rank.split("|")] for rank in text.split("||")]
    except ValueError:
        raise ConfigError(f"--micro-batches {text}: give response lengths, as in '3100,900|2500,700||400,60'") from None


def stock_weight(name: str) -> Formula:
    """The weight of HOST:NAME. Raises ConfigError, which lists what there is."""
    host, _, aggregation = name.partition(":")
    if host not in STOCK:
        raise ConfigError(f"--stock {name}: {host!r} is none of {', '.join(STOCK)}; give HOST:NAME, as verl:token-mean")
    if aggregation not in STOCK[host]:
        raise ConfigError(f"--stock {name}: {host} has {', '.join(STOCK[host])}; give --stock {host}:NAME")
    return STOCK[host][aggregation]


def weights_of(weight: Formula, layout: Layout, divisor: float | None, prompts: Sequence[str] | None) -> list[float]:
    """Of each sample, 0 where it has no token. divisor: L; None: the longest response. prompts: of each sample."""
    samples = [(len(rank), part, count) for rank in layout for part in rank for count in part]
    tokens = [count for _, _, count in samples]
    if prompts is None and "P" not in weight.powers:
        prompts = [""] * len(tokens)
    if prompts is None or len(prompts) != len(tokens):
        raise ConfigError(f"--stock weighs {weight}: give the prompt of each of the {len(tokens)} responses, as --prompt-ids a,a,b")
    prompt_tokens = Counter[str]()
    for prompt, count in zip(prompts, tokens, strict=True):
        prompt_tokens[prompt] += count
    step_counts: dict[str, float] = {
        **{"N": len(tokens), "N+": sum(count > 0 for count in tokens), "P": len(prompt_tokens), "dp": len(layout)},
        **{"T": sum(tokens), "T'": sum(max(count, 1) for count in tokens), "L": divisor or max(tokens)},
    }
    weights = []
    for (num_parts, part, count), prompt in zip(samples, prompts, strict=True):
        part_counts = {"M": num_parts, "T_b": sum(part), "N_b": len(part), "L_b": max(part)}
        sample_counts = {"m_i": count, "M_g": prompt_tokens[prompt]}
        weights.append(formula_value(weight, step_counts | part_counts | sample_counts) if count else 0.0)
    return weights


def gradient_error(own: Sequence[float], exact: Sequence[float], tokens: Sequence[int]) -> float:
    """By how much the gradient is off where tokens have independent gradients of one size: the norm of the difference over the norm
    of the exact one."""
    difference = sum(count * (one - other) ** 2 for one, other, count in zip(own, exact, tokens, strict=True))
    return math.sqrt(difference / sum(count * other**2 for other, count in zip(exact, tokens, strict=True)))
