"""Draws own_prompts.png: the run on one's own prompts of docs/training.md, with the defaults of the command, on three seeds.

python docs/images/own_prompts.py    # three minutes on a CPU; prints the last mean rewards
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent.parent
SEEDS, ROLLOUTS, WINDOW = (0, 1, 2), 400, 20
REWARD = "def exact_match(prompt, response, record):\n    return float(response == record['answer'])\n"


def rows_of(folder: Path, seed: int) -> list[dict]:
    flags = f"--prompts prompts.jsonl --reward rewards.exact_match --num-rollouts {ROLLOUTS} --seed {seed} --output-dir run{seed}"
    run(["-m", "megatron_rl", "train", *flags.split(), "--no-tensorboard"], folder)
    return rows_in(folder / f"run{seed}")


def run(arguments: list[str], folder: Path) -> None:
    """Python with these arguments in the folder, on one thread."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, check=True, capture_output=True)


def rows_in(run_folder: Path) -> list[dict]:
    """A row of each rollout."""
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return list({row["rollout"]: row for row in rows}.values())


def smooth(values: list[float]) -> list[float]:
    """The mean over the last WINDOW rollouts."""
    return [sum(values[max(0, i - WINDOW + 1) : i + 1]) / len(values[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(values))]


def draw(path: Path, rows_of_seed: dict[int, list[dict]]) -> None:
    """Reward and groups without signal over rollouts, a line a seed; the last mean rewards are printed."""
    figure = Figure(figsize=(8, 2.8))
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    for seed, rows in rows_of_seed.items():
        for axis, metric in zip(axes, ("rollout/reward", "rollout/groups_without_signal"), strict=True):
            axis.plot(smooth([row[metric] for row in rows]), linewidth=1.2, label=f"seed {seed}")
        print(f"seed {seed}: mean reward {smooth([row['rollout/reward'] for row in rows])[-1]:.3f}", flush=True)
    for axis, title in zip(axes, ("Mean reward", "Prompt groups without signal"), strict=True):
        axis.set(xlabel="rollout", ylim=(0, 1))
        axis.set_title(f"{title}, mean of {WINDOW} rollouts", fontsize=9)
        axis.grid(color="#e5e7eb", linewidth=0.6)
        axis.tick_params(labelsize=7)
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    canvas.draw()
    size = canvas.get_width_height()
    picture = torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8).view(*size[::-1], 4)
    Image.fromarray(picture.numpy()).convert("RGB").quantize(32).save(path, optimize=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in sums), encoding="utf-8")
        (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
        draw(Path(__file__).with_suffix(".png"), {seed: rows_of(folder, seed) for seed in SEEDS})


if __name__ == "__main__":
    main()
