"""Shows what each correction, aggregation and loss leaves of the policy gradient where another policy sampled, without noise.

    python examples/correction_bias.py --plot correction_bias.png --csv correction_bias.csv    # a minute on one core

A response is written from three tokens, of which one stops it, up to four: 31 responses. Each prefix has its own distribution. All
responses are enumerated, and all lengths that a step of two prompts with two responses each can have. So no number here has noise.
The sampler's logits differ from the trainer's by normal noise, scaled to a gap: KL(sampler, trainer) of a response, in nats. The
advantage is the reward against the sampler's mean, as a large group gives it.

Each line is the mean over ten such problems of
    bias      distance of the expected gradient from the true one, over the true one's length
    cosine    of the two directions
    noise     standard deviation of a step, over the true gradient's length
An aggregation has its own scale, which the learning rate takes up: the figures are in units of what it makes of the true gradient
without a gap.
"""

import argparse
import csv
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_rl import CorrectionSettings, count_step, policy_loss, sample_token_weights
from megatron_rl.loss_hub import get_loss_aggregation, get_policy_loss, loss_aggregation_names, policy_loss_names

VOCABULARY, LENGTH, PROBLEMS = 3, 4, 10
PROMPT_IDS = (0, 0, 1, 1)  # of the samples of a step
GAPS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
NONE = CorrectionSettings()
BOUNDS = {"low": 0.5, "high": 2.0}
# What is compared: the published bounds where there are some, else within a factor of two.
CORRECTIONS = (
    NONE,
    CorrectionSettings(kind="tis"),
    CorrectionSettings(kind="icepop"),
    CorrectionSettings(kind="mask", **BOUNDS),
    CorrectionSettings(kind="tis", level="sequence_mean", high=2.0),
    CorrectionSettings(kind="icepop", level="sequence_mean", **BOUNDS),
    CorrectionSettings(kind="mask", level="sequence_mean", **BOUNDS),
    CorrectionSettings(kind="seq_mask_tis", level="sequence_mean", **BOUNDS),
    CorrectionSettings(kind="tis", level="sequence_sum", high=2.0),
    CorrectionSettings(kind="tis", level="sequence_sum", high=1e8),
    CorrectionSettings(kind="icepop", level="sequence_sum", **BOUNDS),
    CorrectionSettings(kind="mask", level="sequence_sum", **BOUNDS),
    CorrectionSettings(sequence_delta=0.1),
)
# Without row_mean, which is sample_mean where each sample is a rollout.
AGGREGATIONS = tuple(name for name in loss_aggregation_names() if "." not in name and not get_loss_aggregation(name).needs_rows)
# Where the loss is given the sampler's log-probabilities as the old ones: its own ratio corrects.
OLD_OF_SAMPLER = "sampler"


@dataclass(frozen=True)
class Line:
    """The figures of one combination. old: whose log-probabilities the loss is given as the old ones."""

    gap: float  # nats a response
    loss: str
    aggregation: str
    correction: CorrectionSettings
    old: str
    bias: float
    cosine: float
    noise: float


@dataclass(frozen=True, eq=False)
class Problem:
    """Every response, with its probability of being drawn and its score. S responses of M tokens in all, F prefixes."""

    responses: list[tuple[int, ...]]
    rows: Tensor  # [M] the prefix of each token
    labels: Tensor  # [M]
    trainer: Tensor  # [F, V] logits
    sampler: Tensor  # [F, V] logits
    rewards: Tensor  # [S]

    @functools.cached_property
    def lengths(self) -> Tensor:  # [S]
        return torch.tensor([len(response) for response in self.responses])

    def log_probs(self, logits: Tensor) -> Tensor:  # [M]
        return torch.log_softmax(logits, 1)[self.rows, self.labels]

    def of_responses(self, of_tokens: Tensor) -> Tensor:  # [M, ...] -> [S, ...]: sums
        sample = torch.arange(len(self.responses)).repeat_interleave(self.lengths)
        return of_tokens.new_zeros(len(self.responses), *of_tokens.shape[1:]).index_add(0, sample, of_tokens)

    @functools.cached_property
    def drawn(self) -> Tensor:  # [S] probabilities
        return self.of_responses(self.log_probs(self.sampler)).exp()

    @functools.cached_property
    def drawn_lengths(self) -> Tensor:  # [S, lengths]: the probability of a response, in the column of its length
        return torch.nn.functional.one_hot(self.lengths).double() * self.drawn[:, None]

    @property
    def gap(self) -> float:
        """KL(sampler, trainer) of a response, in nats."""
        log_ratio = self.of_responses(self.log_probs(self.sampler) - self.log_probs(self.trainer))
        return float((self.drawn * log_ratio).sum())

    @functools.cached_property
    def advantages(self) -> Tensor:  # [S]
        return self.rewards - (self.drawn * self.rewards).sum()

    @functools.cached_property
    def truth(self) -> Tensor:  # [F V]
        """The gradient of the trainer's expected reward."""
        leaf = self.trainer.clone().requires_grad_()
        expected = (self.of_responses(self.log_probs(leaf)).exp() * self.rewards).sum()
        return torch.autograd.grad(expected, leaf)[0].flatten()

    def sample_gradients(self, loss: str, correction: CorrectionSettings, old: str) -> Tensor:  # [S, F V]
        """What a sample adds to the gradient of the objective where each of its tokens weighs 1: the package's own loss."""
        logits = self.trainer[self.rows].clone().requires_grad_()
        sampled = self.log_probs(self.sampler)
        bounds = torch.cat([torch.zeros(1), self.lengths.cumsum(0)]).int()
        anchor = sampled if old == OLD_OF_SAMPLER else self.log_probs(self.trainer)
        needs_sampler = correction.is_on or get_policy_loss(loss).anchor == "rollout"
        output = policy_loss(
            loss,
            logits,
            self.labels,
            anchor,
            self.advantages,
            torch.ones(len(self.labels), dtype=torch.bool),
            bounds,
            torch.ones(len(self.responses)),
            advantages_per="sample",
            correction=correction if correction.is_on else None,
            rollout_log_probs=sampled if needs_sampler else None,
        )
        output.loss.backward()
        of_tokens = torch.zeros(len(self.rows), *self.trainer.shape, dtype=torch.float64)
        of_tokens[torch.arange(len(self.rows)), self.rows] = -logits.grad.double()
        return self.of_responses(of_tokens).flatten(1)


def make_problem(seed: int, gap: float, *, vocabulary: int = VOCABULARY, length: int = LENGTH) -> Problem:
    """The last token of the vocabulary stops a response. gap 0: the sampler is the trainer."""
    going_on = [*itertools.product(range(vocabulary - 1), repeat=length)]
    stopped = [(*start, vocabulary - 1) for n in range(length) for start in itertools.product(range(vocabulary - 1), repeat=n)]
    responses = [*stopped, *going_on]
    prefixes = {prefix: number for number, prefix in enumerate(dict.fromkeys(r[:t] for r in responses for t in range(len(r))))}
    generator = torch.Generator().manual_seed(seed)
    trainer, noise = torch.randn(2, len(prefixes), vocabulary, generator=generator, dtype=torch.float64)
    rewards = torch.randn(len(responses), generator=generator, dtype=torch.float64)
    rows = torch.tensor([prefixes[response[:t]] for response in responses for t in range(len(response))])
    labels = torch.tensor([token for response in responses for token in response])

    def with_noise(scale: float) -> Problem:
        return Problem(responses, rows, labels, trainer, trainer + scale * noise, rewards)

    low, high = 0.0, 20.0
    for _ in range(60 if gap else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if with_noise(middle).gap < gap else (low, middle)
    return with_noise(low)


@dataclass(frozen=True)
class StepWeights:
    """Expectations over the lengths of a step, by length: of sum_i w_i, of sum_i w_i^2, and of sum_{i != j} w_i w_j."""

    first: Tensor  # [lengths]
    squared: Tensor  # [lengths]
    pairs: Tensor  # [lengths, lengths]


@functools.cache
def weights_by_lengths(aggregation: str, longest: int, prompt_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:  # [steps, N] each
    """Of every step that there is: the lengths of its samples, and their weights, which the package's own functions make."""
    steps = [*itertools.product(range(1, longest + 1), repeat=len(prompt_ids))]
    weights = []
    for lengths in steps:
        totals, counts, prompt_counts = count_step(None, prompt_ids, token_counts=lengths)
        divisor = 1.0 if aggregation == "constant" else None
        weights.append(sample_token_weights(aggregation, counts, totals, prompt_token_counts=prompt_counts, divisor=divisor))
    return torch.tensor(steps), torch.stack(weights).double()


@functools.cache
def step_weights(problem: Problem, aggregation: str, prompt_ids: tuple[int, ...]) -> StepWeights:
    longest = int(problem.lengths.max())
    steps, weights = weights_by_lengths(aggregation, longest, prompt_ids)
    chances = problem.drawn_lengths.sum(0)[steps].prod(1)  # [steps]
    is_length = torch.nn.functional.one_hot(steps, longest + 1).double() * weights[..., None]  # [steps, N, lengths]
    total = is_length.sum(1)  # [steps, lengths]
    squared = (is_length.square().sum(1) * chances[:, None]).sum(0)
    products = (total * chances[:, None]).T @ total
    return StepWeights((total * chances[:, None]).sum(0), squared, products - torch.diag(squared))


def moments(problem: Problem, gradients: Tensor, aggregation: str, prompt_ids: tuple[int, ...]) -> tuple[Tensor, float]:
    """Mean [F V] and summed variance of a step's gradient.

    The weights of a step are a function of its lengths. Given these its samples are independent. So the mean gradient g and mean
    square q of each length are enough:  E|sum_i w_i g_i|^2 = E[ sum_i w_i^2 q(m_i) + sum_{i != j} w_i w_j g(m_i) g(m_j) ].
    """
    of_step, shares = step_weights(problem, aggregation, prompt_ids), problem.drawn_lengths.sum(0).clamp(min=1e-300)
    means = (problem.drawn_lengths.T @ gradients) / shares[:, None]
    squares = (problem.drawn_lengths.T @ gradients.square().sum(1)) / shares
    mean = of_step.first @ means
    square = (of_step.pairs * (means @ means.T)).sum() + of_step.squared @ squares
    return mean, float(square - mean.square().sum())


@functools.cache
def unit_of(same: Problem, aggregation: str, prompt_ids: tuple[int, ...]) -> float:
    """What the aggregation makes of the true gradient's length, without a gap."""
    mean, _ = moments(same, same.sample_gradients("reinforce", NONE, "trainer"), aggregation, prompt_ids)
    return float(mean @ same.truth / same.truth.square().sum())


def figures(
    problem: Problem, same: Problem, loss: str, correction: CorrectionSettings, old: str, prompt_ids: tuple[int, ...] = PROMPT_IDS
) -> Iterator[tuple[str, float, float, float]]:
    """(aggregation, bias, cosine, noise) of each aggregation. same: the problem without a gap."""
    gradients, size = problem.sample_gradients(loss, correction, old), float(problem.truth.norm())
    for aggregation in AGGREGATIONS:
        unit = unit_of(same, aggregation, prompt_ids)
        mean, variance = moments(problem, gradients, aggregation, prompt_ids)
        bias = float((mean / unit - problem.truth).norm()) / size
        cosine = float(torch.cosine_similarity(mean, problem.truth, dim=0))
        yield aggregation, bias, cosine, math.sqrt(max(variance, 0.0)) / unit / size


def combinations() -> Iterator[tuple[str, CorrectionSettings, str]]:
    """(loss, correction, whose log-probabilities are the old ones)."""
    for loss in policy_loss_names():
        for correction in CORRECTIONS:
            if get_policy_loss(loss).anchor == "old" or not correction.has_factor:
                yield loss, correction, "trainer"
        if get_policy_loss(loss).anchor == "old":
            yield loss, NONE, OLD_OF_SAMPLER


@functools.cache
def problems_of(gap: float, count: int) -> list[tuple[Problem, Problem]]:
    """Each with the same problem without a gap."""
    return [(make_problem(seed, gap), make_problem(seed, 0.0)) for seed in range(count)]


def mean_lines(gap: float, loss: str, correction: CorrectionSettings, old: str, count: int = PROBLEMS) -> list[Line]:
    """A line for each aggregation: the means over the problems."""
    found: dict[str, list[list[float]]] = {}
    for problem, same in problems_of(gap, count):
        for aggregation, *numbers in figures(problem, same, loss, correction, old):
            found.setdefault(aggregation, []).append(numbers)
    return [
        Line(gap, loss, aggregation, correction, old, *torch.tensor(rows).mean(0).tolist()) for aggregation, rows in found.items()
    ]


def name_of(correction: CorrectionSettings) -> str:
    if correction == NONE:
        return "none"
    if not correction.has_factor:
        return f"sequence delta {correction.sequence_delta:g}"
    low, high = correction.bounds
    bounds = f"high {high:g}" if low == 0 else f"[{low:g}, {high:g}]"
    return f"{correction.kind}, {correction.level}, {bounds}"


def plot(lines: list[Line], path: str) -> None:
    """Above: corrections of a first update. Below: losses whose ratio is to the sampler."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    curves: tuple[dict[str, list[Line]], ...] = ({}, {})
    for line in (line for line in lines if line.aggregation == "constant"):
        is_own = line.old == OLD_OF_SAMPLER or get_policy_loss(line.loss).anchor == "rollout"
        if is_own and line.correction == NONE:
            curves[1].setdefault(line.loss, []).append(line)
        if line.loss == "grpo" and not is_own:
            curves[0].setdefault(name_of(line.correction), []).append(line)
    titles = (("bias", "Bias"), ("cosine", "Cosine to the true gradient"), ("noise", "Noise of a step of four responses"))
    # Colours of Okabe and Ito, 2008; each with three kinds of lines.
    styles = [*itertools.product(("-", "--", ":"), ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00"))]
    heads = ("First update, grpo, constant", "The loss's own ratio is to the sampler")
    for panels, of_panel, head in zip(figure.subplots(2, 3), curves, heads, strict=True):
        for panel, (field, title) in zip(panels, titles, strict=True):
            for (kind, color), (name, rows) in zip(styles, of_panel.items(), strict=False):
                x = [line.gap for line in rows]
                panel.plot(x, [getattr(line, field) for line in rows], kind, color=color, linewidth=1.6, label=name)
            panel.set_xscale("log")
            panel.set_title(title, loc="left", fontsize=11)
            panel.set_xlabel("gap: nats a response")
            panel.spines[["top", "right"]].set_visible(False)
            if field == "bias":
                panel.set_yscale("symlog", linthresh=0.01)
                panel.set_ylim(bottom=0)
            elif field == "noise":
                panel.set_yscale("log")
        panels[2].legend(frameon=False, fontsize=7.5, loc="center left", bbox_to_anchor=(1.0, 0.5), title=head)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--gaps", type=float, nargs="+", default=GAPS, metavar="NATS")
    parser.add_argument("--plot", metavar="PNG")
    parser.add_argument("--csv", metavar="CSV", help="every loss x aggregation x correction")
    args = parser.parse_args()
    from tqdm import tqdm

    torch.set_num_threads(1)  # tensors have a few hundred numbers: more threads would only wait for each other
    lines = []
    with tqdm(total=len(args.gaps) * len([*combinations()]), desc="gap x loss x correction", disable=None) as bar:
        for gap in args.gaps:
            for combination in combinations():
                lines += mean_lines(gap, *combination, args.problems)
                bar.update()
    gap = args.gaps[-2] if len(args.gaps) > 1 else args.gaps[0]
    print(f"grpo, constant, first update, {gap:g} nats a response, mean of {args.problems} problems: bias, cosine, noise")
    for line in lines:
        if (line.gap, line.loss, line.aggregation, line.old) == (gap, "grpo", "constant", "trainer"):
            print(f"{name_of(line.correction):38} {line.bias:6.2f} {line.cosine:6.2f} {line.noise:7.2f}")
    if args.csv:
        with open(args.csv, "w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(field.name for field in fields(Line))
            table.writerows((vars(line) | {"correction": name_of(line.correction)}).values() for line in lines)
    if args.plot:
        plot(lines, args.plot)


if __name__ == "__main__":
    main()
