"""Draws losses.png: value and coefficient of each registered loss over the ratio, by the functions that train.

python docs/images/losses.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from megatron_rl.declare import POLICY_LOSSES, PolicyLoss, get_policy_loss
from megatron_rl.policy_loss.reduce_torch import LossValues, evaluate

# A token of probability 0.3 after the step, and the ratios that the sampler's probability then gives.
LOG_PROB = -1.2
RATIOS = torch.linspace(0.3, 2.5, 441, dtype=torch.float64)
# GSPO's own clip, 3e-4, would be a line here: its picture has GRPO's.
WIDE = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
COLORS = {1.0: "#2563eb", -1.0: "#dc2626"}


def values_of(loss: PolicyLoss, advantage: float, **parameters: float) -> LossValues:
    """Each ratio is a sample of one token, so that level "sequence" is in the picture too."""
    keywords = loss.resolve_parameters(parameters)
    if loss.clip_ratios is not None:
        default = dict(zip(WIDE, loss.clip_ratios, strict=True))
        keywords |= WIDE if loss.clips_means else default
    log_ratio, ones = RATIOS.log(), torch.ones_like(RATIOS)
    log_probs = LOG_PROB * ones
    known = {"token_counts": ones, "mean_log_ratio": log_ratio}
    vectors = {name: known[name] for name in loss.needs}
    clipped = log_ratio if loss.token_clip is None else loss.token_clip(log_ratio, advantage * ones, **keywords)
    found = evaluate(loss, clipped, advantage * ones, log_probs, keywords, vectors)
    return found._replace(derivative=torch.where(clipped == log_ratio, found.derivative, 0.0))


def without_steps(values: Tensor) -> Tensor:
    """A jump is a gap in the line."""
    jumps = values.diff().abs() > 0.15
    return torch.where(torch.cat([jumps, jumps[-1:]]), torch.nan, values)


def main() -> Path:
    panels: list[tuple[str, str, dict[str, float]]] = [(name, name, {}) for name in POLICY_LOSSES.names()]
    at = [name for name, _, _ in panels].index("grpo") + 1
    panels.insert(at, ("grpo, clip_ratio_c 2", "grpo", {"clip_ratio_c": 2.0}))
    figure = Figure(figsize=(13, 7.2))
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(3, 5, sharex=True).flat
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, name, parameters) in zip(axes, panels, strict=False):
        for advantage, color in COLORS.items():
            found = values_of(get_policy_loss(name), advantage, **parameters)
            axis.plot(RATIOS, without_steps(found.value), color=color, linewidth=1, linestyle="--")
            axis.plot(RATIOS, without_steps(found.derivative), color=color, linewidth=1.6)
        axis.set_title(title, fontsize=9)
        axis.axvline(1.0, color="#9ca3af", linewidth=0.6)
        axis.axhline(0.0, color="#9ca3af", linewidth=0.6)
        axis.tick_params(labelsize=7)
    legend = "ratio     blue: A = 1, red: A = -1     solid: coefficient of the log-probability, dashed: value"
    figure.text(0.5, 0.015, legend, ha="center")
    figure.tight_layout(rect=(0, 0.035, 1, 1))
    path = Path(__file__).with_name("losses.png")
    figure.set_dpi(72)
    canvas.draw()
    # Few colours: a third of the bytes.
    Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB").quantize(32).save(path, optimize=True)
    return path


if __name__ == "__main__":
    print(main())
