"""What the trainers' own losses weigh a token: one formula for each of their aggregations, and what it makes of a typed step.

Counts of the step are the same on every layout. Counts of one micro-batch, T_b, N_b and L_b, change with its size and with the
number of ranks: such a loss is a mean of the means of micro-batches. tests/test_explain_stock.py holds each row against the
trainer's own code. KL, entropy, value and distillation terms are left out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from megatron_rl.aggregation_record import Formula
from megatron_rl.errors import ConfigError

TOKEN_MEAN, SAMPLE_MEAN, CONSTANT = Formula(T=-1), Formula(N=-1, m_i=-1), Formula(L=-1, N=-1)
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
# A count of one micro-batch -> the step's, with the numbers that divide a mean of means.
WHOLE = {"T_b": ("T", "M", "dp"), "N_b": ("N", "dp")}
Layout = Sequence[Sequence[Sequence[int]]]  # the samples of each micro-batch of each rank


def read_layout(text: str) -> tuple[list[int], Layout]:
    """(response lengths, layout) of "3100,900|2500,700||400|60": `|` between micro-batches, `||` between ranks."""
    lengths: list[int] = []
    layout: list[list[list[int]]] = []
    try:
        for rank in text.split("||"):
            layout.append([])
            for micro_batch in rank.split("|"):
                own = [int(length) for length in micro_batch.split(",")]
                layout[-1].append([*range(len(lengths), len(lengths) + len(own))])
                lengths += own
    except ValueError:
        raise ConfigError(
            f"--micro-batches {text}: give response lengths, as in '3100,900|2500,700', with | between micro-batches and || "
            "between ranks"
        ) from None
    return lengths, layout


def stock_weight(name: str) -> tuple[str, Formula]:
    """(title, weight) of HOST:NAME. Raises ConfigError, which lists what there is."""
    host, _, aggregation = name.partition(":")
    if host not in STOCK:
        raise ConfigError(f"--stock {name}: {host!r} is none of {', '.join(STOCK)}; give HOST:NAME, as verl:token-mean")
    if aggregation not in STOCK[host]:
        raise ConfigError(f"--stock {name}: {host} has {', '.join(STOCK[host])}; give --stock {host}:NAME")
    return name, STOCK[host][aggregation]


def exact_formula(weight: Formula) -> Formula:
    """The mean over the whole step that a mean of means stands for."""
    for count, (whole, *numbers) in WHOLE.items():
        power = weight.powers.get(count, 0)
        if power:
            weight = weight.without(count, *numbers) * Formula({whole: power})
    return weight


def weights_of(
    weight: Formula,
    tokens: Tensor,  # [S] unmasked
    lengths: Tensor,  # [S], padded by the trainer to the longest of a micro-batch
    layout: Layout,
    *,
    divisor: float | None,  # L; None: the longest response
    prompts: Sequence[Hashable] | None = None,
) -> Tensor:  # [S] float64, 0 of a sample without a token
    if "P" in weight.powers and prompts is None:
        raise ConfigError(f"the weight is {weight}, and which samples share a prompt is not known: give --prompt-ids a,a,b")
    tokens, lengths = tokens.double(), lengths.double()
    of_part = {name: torch.zeros_like(tokens) for name in ("M", "T_b", "N_b", "L_b")}
    for rank in layout:
        for samples in rank:
            part, longest = tokens[samples].sum().item(), lengths[samples].max().item()
            for name, value in {"M": len(rank), "T_b": part, "N_b": len(samples), "L_b": longest}.items():
                of_part[name][samples] = value
    values = {
        **of_part,
        "N": len(tokens),
        "T": tokens.sum(),
        "N+": (tokens > 0).sum().double(),
        "T'": tokens.clamp(min=1).sum(),
        "L": divisor or lengths.max(),
        "dp": len(layout),
        "m_i": tokens,
    }
    if prompts is not None:
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        groups = torch.tensor([numbers[prompt] for prompt in prompts])
        values |= {"P": len(numbers), "M_g": tokens.new_zeros(len(numbers)).index_add(0, groups, tokens)[groups]}
    return torch.where(tokens > 0, torch.as_tensor(weight.evaluate(values), dtype=torch.float64), 0.0)


def exact_weights(weight: Formula, tokens: Tensor, lengths: Tensor, layout: Layout, **given: object) -> Tensor:  # as weights_of
    if "L_b" in weight.powers:  # the divisor that is meant is a constant of the run: here the longest response
        lengths = torch.full_like(lengths, int(lengths.max()))
    return weights_of(exact_formula(weight), tokens, lengths, layout, **given)  # type: ignore[arg-type]


def gradient_error(own: Tensor, exact: Tensor, tokens: Tensor) -> float:
    """By how much the gradient is off where tokens have independent gradients of one size: the norm of the difference over the norm
    of the exact one."""
    return float(((tokens * (own - exact).square()).sum() / (tokens * exact.square()).sum()).sqrt())
