"""Draws metrics.png: eight metrics of the demo with GSPO and with GRPO.

python docs/images/metrics.py    # two minutes on a CPU; the runs go to runs/gspo and runs/grpo
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_rl.train.plots import STYLE
from megatron_rl.train.writers import read_metrics

LINES = {"gspo": {"color": "#0369a1"}, "grpo": {"color": "#c2410c", "linestyle": "--"}}
TRAIN = "train --preset demo --policy-metrics with_entropy --num-rollouts 60 --target-reward 2 --overwrite"
# A metric -> its title, and whether it is of the second step on each rollout: at the first each ratio is 1.
METRICS = {
    "ratio_new_old": ("ratio_new_old, second step on a rollout", True),
    "effective_sample_size": ("effective_sample_size, second step", True),
    "kl_new_old": ("kl_new_old (nats per token), second step", True),
    "clipped_ratio_fraction": ("clipped_ratio_fraction, second step", True),
    "entropy": ("entropy (nats)", False),
    "new_logprobs": ("new_logprobs (nats)", False),
}
SMALLEST_KL = 1e-7  # of the logarithmic axis


def run(loss: str) -> list[dict]:
    folder = Path("runs") / loss
    command = f"-m megatron_rl {TRAIN} --policy-loss {loss} --output-dir {folder}"
    subprocess.run([sys.executable, *command.split()], check=True)
    return read_metrics(folder / "metrics.jsonl")


def series(rows: list[dict], name: str, of_second: bool) -> tuple[list[int], list[float]]:
    chosen = rows[1::2] if of_second else rows[::2]
    return [row["step"] for row in chosen], [row[f"policy/{name}"] for row in chosen]


def main() -> Path:
    runs = {loss: run(loss) for loss in LINES}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 9.46), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(4, 2, sharex=True).flatten()
        for panel, (name, (title, of_second)) in zip(panels, METRICS.items(), strict=False):
            for loss, style in LINES.items():
                steps, values = series(runs[loss], name, of_second)
                panel.plot(
                    steps, [max(value, SMALLEST_KL) for value in values] if name == "kl_new_old" else values, label=loss, **style
                )
            panel.set_title(title)
        panels[0].legend(frameon=False)
        panels[2].set_yscale("log")
        for name, color in (("min_advantage", "#0369a1"), ("advantage", "black"), ("max_advantage", "#0369a1")):
            panels[6].plot(*series(runs["gspo"], name, False), color=color)
        panels[6].set_title("min_advantage, advantage, max_advantage (gspo)")
        for name, style in (("clipped_low", ":"), ("clipped_high", "-")):
            panels[7].plot(*series(runs["gspo"], name, True), style, color="#0369a1")
        panels[7].set_title("clipped_low (dotted), clipped_high (gspo), second step")
        for panel in panels[6:]:
            panel.set_xlabel("Optimiser step")
            panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        path = Path(__file__).with_suffix(".png")
        figure.savefig(path)
    return path


if __name__ == "__main__":
    print(main())
