"""Draws one_step.png: how far the gradient of one step is from the right one, on the 22 layouts of tests/test_layouts.py.

python docs/images/one_step.py    # a minute on a CPU; prints the numbers that it draws

Both rows of a layout are the same GRPO step with token_mean, on the same Megatron-Core. "A mean of means" divides the loss of each
micro-batch by the tokens that this rank has in it, and lets schedule and DDP average, as a first loop of one's own does.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import test_layouts as layouts  # noqa: E402

from megatron_rl.megatron.forward_step import PolicyForwardStep  # noqa: E402
from megatron_rl.testing import layout_step  # noqa: E402
from megatron_rl.testing.invariance import step_on_layout  # noqa: E402
from megatron_rl.testing.ranks import RankPool  # noqa: E402
from megatron_rl.testing.reference import LossTruth, ragged_samples  # noqa: E402

LOSS, AGGREGATION = "grpo", "token_mean"
COLORS = {"megatron_rl": "#2563eb", "a mean of means": "#dc2626"}


class MeanOfMeans(PolicyForwardStep):
    """Divides the loss of each micro-batch by this rank's own tokens in it. Schedule and DDP then average."""

    def _finish(self, output, batch, model_config, groups, *further):
        divisor = max(int(batch.loss.loss_mask.sum()), 1) * groups.dp_cp.size() * batch.context.num_microbatches
        of_means = replace(output, loss=output.loss * batch.context.totals.num_tokens / divisor)
        return super()._finish(of_means, batch, model_config, groups, *further)


def truth_on_rank(rank: int, model: layout_step.TinyGPT) -> LossTruth:
    return layouts.truth_of_losses(ragged_samples(), model, [(LOSS, AGGREGATION)])[LOSS]


def errors() -> dict[str, list[float]]:
    """Of the whole gradient, relative to its norm, by layout."""
    config = layouts.config_of(LOSS, AGGREGATION, policy_metrics="none")
    ours, of_means, truths = [], [], {}
    with RankPool(4, timeout=240.0) as pool:
        for layout in all_layouts():
            model = layouts.model_of(layout)
            if model not in truths:
                truths[model] = pool.run(truth_on_rank, model, world_size=1)[0]
            truth = truths[model]
            ours.append((truth, step_on_layout(pool, layout, truth.samples, config, model)))
    # Ranks are forked from this process, and see what is patched here.
    patched = mock.patch.object(layout_step, "PolicyForwardStep", MeanOfMeans)
    without_factor = mock.patch.object(layout_step.LayoutModel, "declares_factor", False)
    with patched, without_factor, RankPool(4, timeout=240.0) as pool:
        for layout, (truth, _) in zip(all_layouts(), ours, strict=True):
            of_means.append(step_on_layout(pool, layout, truth.samples, config, layouts.model_of(layout)))
    right = [truth.by_aggregation[AGGREGATION] for truth, _ in ours]
    return {
        "megatron_rl": [found.gradient_error(truth) for (_, found), truth in zip(ours, right, strict=True)],
        "a mean of means": [found.gradient_error(truth) for found, truth in zip(of_means, right, strict=True)],
    }


def all_layouts() -> list[layout_step.Layout]:
    return [row.values[0] for row in layouts.LAYOUTS]


def name_of(layout: layout_step.Layout) -> str:
    shorter = {
        "sequence_parallel": "SP",
        "distributed_optimizer": "distributed optimiser",
        "average_in_collective": "averaged in the collective",
    }
    name = str(layout).replace("one rank", "1 rank")
    for flag, word in {**shorter, "overlap_grad_reduce": "overlapped"}.items():
        name = name.replace(flag, word)
    return name


def main() -> Path:
    names, found = [name_of(layout) for layout in all_layouts()], errors()
    for label, values in found.items():
        print(f"{label}: {min(values):.1e} to {max(values):.1e}")
        for name, value in zip(names, values, strict=True):
            print(f"    {name:40s} {value:.2e}")
    order = sorted(range(len(names)), key=lambda index: found["a mean of means"][index])
    figure = Figure(figsize=(9, 4.6))
    canvas = FigureCanvasAgg(figure)
    axis = figure.subplots()
    for label, values in found.items():
        axis.plot([values[index] for index in order], range(len(order)), "o", color=COLORS[label], markersize=4.5, label=label)
    axis.set(xscale="log", xlim=(3e-8, 10), yticks=range(len(order)))
    axis.set_yticklabels([names[index] for index in order], fontsize=6.5)
    axis.set_xticks([1e-7, 1e-5, 1e-3, 1e-2, 1e-1, 1, 10], ["1e-7", "1e-5", "0.1 %", "1 %", "10 %", "100 %", "1000 %"], fontsize=8)
    axis.set_xlabel("relative error of the whole gradient", fontsize=8)
    axis.set_title("one GRPO step (token_mean) on 22 layouts of a real Megatron-Core, against float64 on one process", fontsize=9)
    axis.grid(axis="both", color="#e5e7eb", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.legend(frameon=False, fontsize=8, loc="center")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.tight_layout()
    canvas.draw()
    path = Path(__file__).with_suffix(".png")
    picture = Image.fromarray(
        torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8).view(*canvas.get_width_height()[::-1], 4).numpy()
    )
    picture.convert("RGB").quantize(32).save(path, optimize=True)
    return path


if __name__ == "__main__":
    main()
