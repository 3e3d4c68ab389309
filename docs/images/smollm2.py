"""Draws smollm2.png: the lines of docs/training.md, "A pretrained one that learns", as they are there, on three seeds.

python docs/images/smollm2.py    # with the packages of its first line; an hour on two free cores; prints the last mean rewards
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent.parent
SEEDS = (0, 1, 2)


def documented_lines(title: str) -> list[list[str]]:
    """The words of the lines that start Python, without `python`, in the section's first block."""
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    block = page.partition(f"### {title}\n")[2].partition("```bash\n")[2].partition("```")[0].replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in block.splitlines() if line.startswith("python")]


def run(arguments: list[str], folder: Path) -> None:
    """Python with these arguments in the folder, on one thread."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, check=True, capture_output=True)


def rows_in(run_folder: Path) -> list[dict]:
    """A row of each rollout."""
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return list({row["rollout"]: row for row in rows}.values())


def smooth(values: list[float], window: int) -> list[float]:
    """The mean over the last `window` rollouts."""
    parts = [values[max(0, last - window + 1) : last + 1] for last in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def draw(path: Path, rows_of_seed: dict[int, list[dict]], window: int) -> None:
    """Reward and groups without signal over rollouts, a line a seed; the last mean rewards are printed."""
    figure = Figure(figsize=(8, 2.8))
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    for seed, rows in rows_of_seed.items():
        for axis, metric in zip(axes, ("rollout/reward", "rollout/groups_without_signal"), strict=True):
            axis.plot(smooth([row[metric] for row in rows], window), linewidth=1.2, label=f"seed {seed}")
        print(f"seed {seed}: mean reward {smooth([row['rollout/reward'] for row in rows], window)[-1]:.3f}", flush=True)
    for axis, title in zip(axes, ("Mean reward", "Prompt groups without signal"), strict=True):
        axis.set(xlabel="rollout", ylim=(0, 1))
        axis.set_title(f"{title}, mean of {window} rollouts", fontsize=9)
        axis.grid(color="#e5e7eb", linewidth=0.6)
        axis.tick_params(labelsize=7)
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    canvas.draw()
    size = canvas.get_width_height()
    picture = torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8).view(*size[::-1], 4)
    Image.fromarray(picture.numpy()).convert("RGB").quantize(32).save(path, optimize=True)


def main() -> None:
    make, train = documented_lines("A pretrained one that learns")
    rows_of_seed = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")
        run(make, folder)
        for seed in SEEDS:
            run([*train, "--seed", str(seed), "--output-dir", f"run{seed}", "--save-hf", f"trained{seed}"], folder)
            rows_of_seed[seed] = rows_in(folder / f"run{seed}")
        draw(Path(__file__).with_suffix(".png"), rows_of_seed, window=5)


if __name__ == "__main__":
    main()
