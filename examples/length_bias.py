"""Shows how an aggregation changes lengths: a toy policy that learns only when to stop, trained with each aggregation.

    python examples/length_bias.py length_bias.png      # half a minute on one core; needs matplotlib

A coin decides whether an answer is right or wrong. The policy sees this verdict as a masked token, like the result of a tool, and
writes until it stops. The reward is only the verdict. So no length is better than another, and the expected gradient on the
probability to stop is 0. If a length changes, the aggregation is the reason. Half of the prompts ask for long answers.

"Understanding R1-Zero-Like Training" (Dr. GRPO), arXiv:2503.20783, section 3.1: the division by the length of a response makes
long wrong answers cheap and short right answers valuable.
"""

import math
import sys

import torch
from torch import Tensor

from megatron_rl import count_step, grpo_loss, sample_token_weights
from megatron_rl.train.rollouts import group_advantages

AGGREGATIONS = ("sample_mean", "prompt_mean", "token_mean", "constant")
PANELS = ("length of wrong answers, x start", "length of right answers, x start", "weight of the short prompts")
PROMPTS, SAMPLES, STEPS, SEEDS = 16, 8, 150, 5
START_LENGTHS = (4.0, 16.0)  # of the two kinds of prompts, on average
DIVISOR = 10.0  # of constant: the mean of both, so all aggregations begin with weights of one sum
WRITE, STOP = 0, 1  # the vocabulary
MAX_LENGTH = 256  # longer answers are cut: 16 times the mean at the start


def train(aggregation: str, seed: int, steps: int = STEPS) -> Tensor:  # [steps, 3]: a column for each panel
    """Trains one policy. Recorded lengths are means that follow from its probabilities; samples give only the gradient."""
    generator = torch.Generator().manual_seed(seed)
    # The whole policy: a logit to stop for each kind of prompt and each verdict, wrong or right.
    stop_logits = torch.tensor([[-math.log(length - 1)] * 2 for length in START_LENGTHS], requires_grad=True)
    optimizer = torch.optim.SGD([stop_logits], lr=1.0)
    kinds = torch.arange(PROMPTS).remainder(2).repeat_interleave(SAMPLES)  # [N]
    prompt_ids = torch.arange(PROMPTS).repeat_interleave(SAMPLES).tolist()
    rows = []
    for _ in range(steps):
        verdicts = torch.randint(0, 2, (len(kinds),), generator=generator)
        lengths, is_cut = sample_lengths(stop_logits.detach()[kinds, verdicts], generator)
        advantages = torch.tensor(group_advantages(verdicts.tolist(), prompt_ids))
        totals, token_counts, prompt_counts, _ = count_step([torch.ones(length) for length in lengths], prompt_ids)
        divisor = DIVISOR if aggregation == "constant" else None
        weights = sample_token_weights(aggregation, token_counts, totals, prompt_token_counts=prompt_counts, divisor=divisor)
        optimizer.zero_grad()
        step_loss(stop_logits[kinds, verdicts], lengths, is_cut, advantages, weights).backward()
        optimizer.step()
        ratios = (1 / torch.sigmoid(stop_logits.detach())) / torch.tensor(START_LENGTHS)[:, None]
        of_samples = weights * token_counts
        rows.append([*ratios.mean(0).tolist(), float(of_samples[kinds == 0].sum() / of_samples.sum())])
    return torch.tensor(rows)


def sample_lengths(stop_logits: Tensor, generator: torch.Generator) -> tuple[list[int], Tensor]:  # [N] -> N ints, [N] bool
    """Number of tokens up to the first stop, which counts too: geometric, cut at MAX_LENGTH without a stop."""
    uniform = torch.rand(stop_logits.shape, generator=generator, dtype=torch.float64)
    stops = torch.sigmoid(stop_logits.double())
    lengths = 1 + (torch.log1p(-uniform) / torch.log1p(-stops)).floor().long()
    return lengths.clamp(max=MAX_LENGTH).tolist(), lengths > MAX_LENGTH


def step_loss(stop_logits: Tensor, lengths: list[int], is_cut: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """GRPO on the packed step, on-policy; [N] each. One sample is its masked verdict and its tokens WRITE ... WRITE STOP."""
    documents = torch.tensor(lengths) + 1
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), documents.cumsum(0, dtype=torch.int32)])
    labels = torch.full((int(cu_seqlens[-1]),), WRITE)
    labels[cu_seqlens[1:].long() - 1] = torch.where(is_cut, WRITE, STOP)
    loss_mask = torch.ones(len(labels), dtype=torch.bool)
    loss_mask[cu_seqlens[:-1].long()] = False
    stop = stop_logits.repeat_interleave(documents)
    logits = torch.stack([torch.zeros_like(stop), stop], dim=-1)
    return grpo_loss(logits, labels, None, advantages, loss_mask, cu_seqlens, weights).loss


def main() -> None:
    from matplotlib.figure import Figure

    torch.set_num_threads(1)  # tensors have a few hundred numbers: more threads would only wait for each other
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    for aggregation in AGGREGATIONS:
        curves = torch.stack([train(aggregation, seed) for seed in range(SEEDS)])  # [SEEDS, STEPS, 3]
        print(f"{aggregation:12}", ", ".join(f"{title} {curves[:, -1, panel].mean():.2f}" for panel, title in enumerate(PANELS)))
        for panel, axis in enumerate(axes):
            axis.fill_between(range(STEPS), curves[..., panel].amin(0), curves[..., panel].amax(0), alpha=0.15)
            axis.plot(curves[..., panel].mean(0), label=aggregation)
            axis.set(title=PANELS[panel], xlabel="step", yscale="linear" if panel == 2 else "log")
    axes[0].legend(frameon=False)
    figure.savefig(sys.argv[1], dpi=120)


if __name__ == "__main__":
    main()
