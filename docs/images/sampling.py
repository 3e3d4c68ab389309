"""Draws sampling.png: what corrections do to tokens of a sampler with top-p 0.8 that has the trainer's own weights.

python docs/images/sampling.py    # half a minute on a CPU; prints the numbers that it draws

Nothing is off-policy here, so each factor should be 1. The trainer scores each token twice: over the whole vocabulary, and over the
ids that the sampler kept.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from megatron_rl import CorrectionSettings, SamplingSupport, importance_correction, vocab_parallel_log_probs
from megatron_rl.layout.groups import SINGLE
from megatron_rl.train.sampling_filter import kept_by_top_p

TOP_P = 0.8
SAMPLES, LENGTH, VOCABULARY = 64, 200, 2000
# Logits of one deviation of 3: the kept sets have 47 ids in the mean.
SPREAD = 3.0
COLORS = {"whole vocabulary": "#dc2626", "kept ids": "#2563eb"}
CORRECTIONS = {
    "tis": CorrectionSettings(kind="tis"),
    "icepop": CorrectionSettings(kind="icepop"),
    "mask, sequence_mean\n0.99 to 1.01": CorrectionSettings(kind="mask", level="sequence_mean", low=0.99, high=1.01),
    "tis, sequence_sum": CorrectionSettings(kind="tis", level="sequence_sum", high=2.0),
}


def scores() -> tuple[dict[str, Tensor], Tensor]:
    """The trainer's log-probabilities of the sampled tokens, by what they are over, and the sampler's own; [T] each."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(SAMPLES * LENGTH, VOCABULARY, generator=generator) * SPREAD
    is_kept = kept_by_top_p(logits, TOP_P)
    sampler = logits.masked_fill(~is_kept, -torch.inf).log_softmax(-1)
    tokens = torch.multinomial(sampler.exp(), 1, generator=generator)[:, 0]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), is_kept.sum(-1).cumsum(0)])
    support = SamplingSupport(is_kept.nonzero()[:, 1].int(), offsets)
    of_kept = vocab_parallel_log_probs(logits, tokens, tp_group=SINGLE, sampling_support=support)
    of_all = vocab_parallel_log_probs(logits, tokens, tp_group=SINGLE)
    print(f"kept ids: {support.sizes.double().mean():.1f} in the mean")
    return {"whole vocabulary": of_all, "kept ids": of_kept}, sampler.gather(1, tokens[:, None])[:, 0]


def mean_factors(trainer: Tensor, sampler: Tensor) -> list[float]:
    """Of each correction, over all tokens; 0 where it drops one."""
    bounds = torch.arange(0, trainer.numel() + 1, LENGTH, dtype=torch.int32)
    mask = torch.ones(trainer.numel(), dtype=torch.bool)
    found = [importance_correction(settings, trainer, sampler, mask, bounds)[0] for settings in CORRECTIONS.values()]
    return [float(correction.weights.double().mean()) for correction in found]


def main() -> Path:
    by_score, sampler = scores()
    figure = Figure(figsize=(6.8, 3.3), dpi=140)  # few inches, so that text stays legible on a narrow screen
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    for number, (name, trainer) in enumerate(by_score.items()):
        log_ratio = (trainer - sampler).double()
        factors = mean_factors(trainer, sampler)
        print(f"{name}: mean weight {log_ratio.exp().mean():.4f}, |weight - 1| up to {(log_ratio.exp() - 1).abs().max():.1e}")
        print(
            *(f"    {label.splitlines()[0]:20s} {factor:.4f}" for label, factor in zip(CORRECTIONS, factors, strict=True)), sep="\n"
        )
        places = [place + 0.38 * number for place in range(len(factors))]
        left.barh(places, factors, height=0.34, color=COLORS[name], label=f"scored over the {name}")
        for place, factor in zip(places, factors, strict=True):
            left.text(factor + 0.015, place, f"{factor:.2f}" if factor > 0.005 else "0", va="center", fontsize=7.5)
        product = log_ratio.view(SAMPLES, LENGTH).cumsum(1).mean(0)
        print(f"    product over {LENGTH} tokens: {product[-1].exp():.1e}")
        right.plot(range(1, LENGTH + 1), product.exp(), color=COLORS[name], linewidth=2)
    left.set(xlim=(0, 1.16), yticks=[place + 0.19 for place in range(len(CORRECTIONS))])
    left.set_yticklabels(list(CORRECTIONS), fontsize=8)
    left.invert_yaxis()
    left.set_title("mean factor of a token: 1 is right", fontsize=8.5)
    right.set(yscale="log", xlim=(0, LENGTH), ylim=(1e-21, 1e2))
    right.set_xlabel("tokens of the response", fontsize=8)
    right.set_title("product over a response", fontsize=8.5)
    for axis in (left, right):
        axis.tick_params(labelsize=8)
        axis.grid(axis="x" if axis is left else "both", color="#e5e7eb", linewidth=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.legend(*left.get_legend_handles_labels(), frameon=False, fontsize=8, loc="lower center", ncols=2)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    canvas.draw()
    path = Path(__file__).with_suffix(".png")
    picture = Image.fromarray(
        torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8).view(*canvas.get_width_height()[::-1], 4).numpy()
    )
    picture.convert("RGB").quantize(32).save(path, optimize=True)
    return path


if __name__ == "__main__":
    main()
