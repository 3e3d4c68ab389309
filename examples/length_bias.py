"""Shows how an aggregation changes lengths: a toy policy that learns only when to stop, trained with each aggregation.

    python examples/length_bias.py --plot length_bias.png      # half a minute on one core; the picture needs matplotlib

A coin decides whether an answer is right or wrong. The policy sees this verdict as a masked token, like the result of a tool, and
writes until it stops. The reward is only the verdict. So no length is better than another, and the expected gradient on the
probability to stop is 0. If a length changes, the aggregation is the reason. Half of the prompts ask for long answers.

"Understanding R1-Zero-Like Training" (Dr. GRPO), arXiv:2503.20783, section 3.1: the division by the length of a response makes
long wrong answers cheap and short right answers valuable.
"""

import argparse
import math
import statistics
from dataclasses import dataclass, field
from itertools import cycle

import torch
from torch import Tensor

from megatron_rl import count_step, grpo_loss, sample_token_weights
from megatron_rl.loss_hub import get_loss_aggregation, loss_aggregation_names
from megatron_rl.train.rollouts import group_advantages

PROMPTS, SAMPLES = 16, 8
SHORT, LONG = 0, 1  # kinds of prompts: their answers have 4 and 16 tokens on average at the start
START_LENGTHS = (4.0, 16.0)
WRONG, RIGHT = 0, 1
WRITE, STOP = 0, 1  # the vocabulary
MAX_LENGTH = 256  # longer answers are cut: 16 times the mean at the start
# The divisor of constant is the mean length at the start, so all aggregations begin with weights of one sum.
DIVISOR = statistics.fmean(START_LENGTHS)
# Colours of Okabe and Ito, 2008. A line that lies on another one is dashed.
STYLES = [("#d55e00", "-"), ("#cc79a7", "--"), ("#009e73", "-"), ("#0072b2", "--")]
# row_mean is sample_mean here: each sample is a rollout.
AGGREGATIONS = [name for name in loss_aggregation_names() if not get_loss_aggregation(name).needs_rows]
LOOKS = dict(zip(AGGREGATIONS, cycle(STYLES), strict=False))


@dataclass
class Curves:
    """The numbers of one run, one for each step. share_of_short: the part of all weight that prompts with short answers have."""

    wrong: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    share_of_short: list[float] = field(default_factory=list)


def train(aggregation: str, seed: int, *, steps: int = 150, learning_rate: float = 1.0) -> Curves:
    """Trains one policy. Recorded lengths are means that follow from its probabilities; samples give only the gradient."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.tensor([[-math.log(length - 1)] * 2 for length in START_LENGTHS])
    stop_logits = start.clone().requires_grad_()  # [kind, verdict]: the whole policy
    optimizer = torch.optim.SGD([stop_logits], lr=learning_rate)
    curves = Curves()
    kinds = torch.arange(PROMPTS).remainder(2).repeat_interleave(SAMPLES)  # [N]
    prompt_ids = torch.arange(PROMPTS).repeat_interleave(SAMPLES).tolist()
    for _ in range(steps):
        verdicts = torch.randint(0, 2, (len(kinds),), generator=generator)
        lengths, is_cut = sample_lengths(stop_logits.detach()[kinds, verdicts], generator)
        advantages = torch.tensor(group_advantages(verdicts.tolist(), prompt_ids))
        totals, token_counts, prompt_counts = count_step([torch.ones(length) for length in lengths], prompt_ids)
        divisor = DIVISOR if aggregation == "constant" else None
        weights = sample_token_weights(aggregation, token_counts, totals, prompt_token_counts=prompt_counts, divisor=divisor)
        optimizer.zero_grad()
        step_loss(stop_logits, kinds, verdicts, lengths, is_cut, advantages, weights).backward()
        optimizer.step()
        record(curves, stop_logits.detach(), weights * token_counts, kinds)
    return curves


def sample_lengths(stop_logits: Tensor, generator: torch.Generator) -> tuple[list[int], Tensor]:  # [N] -> N ints, [N] bool
    """Number of tokens up to the first stop, which counts too: geometric, cut at MAX_LENGTH without a stop."""
    uniform = torch.rand(stop_logits.shape, generator=generator, dtype=torch.float64)
    stops = torch.sigmoid(stop_logits.double())
    lengths = 1 + (torch.log1p(-uniform) / torch.log1p(-stops)).floor().long()
    return lengths.clamp(max=MAX_LENGTH).tolist(), lengths > MAX_LENGTH


def step_loss(
    stop_logits: Tensor,  # [kind, verdict]
    kinds: Tensor,  # [N]
    verdicts: Tensor,  # [N]
    lengths: list[int],
    is_cut: Tensor,  # [N] bool
    advantages: Tensor,  # [N]
    weights: Tensor,  # [N]
) -> Tensor:
    """GRPO on the packed step, on-policy. One sample is its masked verdict and its tokens WRITE ... WRITE STOP."""
    documents = torch.tensor(lengths) + 1
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), documents.cumsum(0, dtype=torch.int32)])
    num_tokens = int(cu_seqlens[-1])
    labels = torch.full((num_tokens,), WRITE)
    labels[cu_seqlens[1:].long() - 1] = torch.where(is_cut, WRITE, STOP)
    loss_mask = torch.ones(num_tokens, dtype=torch.bool)
    loss_mask[cu_seqlens[:-1].long()] = False
    stop = stop_logits[kinds, verdicts].repeat_interleave(documents)
    logits = torch.stack([torch.zeros_like(stop), stop], dim=-1)
    return grpo_loss(logits, labels, None, advantages, loss_mask, cu_seqlens, weights).loss


def record(curves: Curves, stop_logits: Tensor, sample_weights: Tensor, kinds: Tensor) -> None:
    """Adds the mean length over the kinds, relative to the start: 1 is unchanged."""
    ratios = (1 / torch.sigmoid(stop_logits)) / torch.tensor(START_LENGTHS)[:, None]  # [kind, verdict]
    curves.wrong.append(float(ratios[:, WRONG].mean()))
    curves.right.append(float(ratios[:, RIGHT].mean()))
    curves.share_of_short.append(float(sample_weights[kinds == SHORT].sum() / sample_weights.sum()))


def plot(runs: dict[str, list[Curves]], path: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {"wrong": "Length of wrong answers (x start)", "right": "Length of right answers (x start)"}
    titles["share_of_short"] = "Share of the short prompts in all weight"
    for panel, (name, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for aggregation, of_seeds in runs.items():
            values = torch.tensor([vars(curves)[name] for curves in of_seeds])
            x, (color, line) = range(1, values.shape[1] + 1), LOOKS[aggregation]
            panel.fill_between(x, values.amin(0), values.amax(0), color=color, alpha=0.15, linewidth=0)
            panel.plot(x, values.mean(0), color=color, linestyle=line, linewidth=1.8, label=aggregation)
        if name == "share_of_short":
            panel.set_ylim(0, 1)
        else:
            panel.axhline(1, color="#111827", linewidth=0.8, linestyle="--")
            panel.set_yscale("log", base=2)
            panel.yaxis.set_major_formatter("{x:g}")
        panel.set_title(title, fontsize=11, loc="left")
        panel.set_xlabel("step")
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plot", metavar="PNG")
    args = parser.parse_args()
    torch.set_num_threads(1)  # tensors have a few hundred numbers: more threads would only wait for each other
    runs = {}
    print(f"lengths after {args.steps} steps, x start: mean (least .. most) of {args.seeds} seeds")
    for aggregation in AGGREGATIONS:
        runs[aggregation] = [train(aggregation, seed, steps=args.steps) for seed in range(args.seeds)]
        cells = []
        for name in ("wrong", "right"):
            last = [vars(curves)[name][-1] for curves in runs[aggregation]]
            cells.append(f"{name} {statistics.fmean(last):5.2f} ({min(last):.2f} .. {max(last):.2f})")
        share = statistics.fmean(curves.share_of_short[0] for curves in runs[aggregation])
        print(f"{aggregation:12}  {'   '.join(cells)}   weight of the short prompts at the first step {share:.0%}", flush=True)
    if args.plot:
        plot(runs, args.plot)


if __name__ == "__main__":
    main()
