"""Kills one rank of `megatron-rl train` at a random moment, over and over, and measures when the others end and whom they name.

    python tests/peer_kills.py --kills 25 --folder /tmp/kills [--layouts dp2 tp2 ...] [--seed 0]

Prints one line a layout: kills, by what the victim did, the longest time to the end of the last rank, and what went wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

for name, value in {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}.items():
    os.environ.setdefault(name, value)
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

SIZES = "--prompts-per-rollout 4 --samples-per-prompt 4 --hidden-size 32 --no-tensorboard --no-plot --num-rollouts 100000"
LAYOUTS = {  # name: ranks, flags
    "dp2": (2, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "cp2": (2, "--context-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "ep2": (2, "--num-experts 4 --expert-model-parallel-size 2"),
    "dp2, a save each rollout": (2, "--save-interval 1"),
    "tp2, a save each rollout": (2, "--tensor-model-parallel-size 2 --save-interval 1"),
    "tp2 x dp2": (4, "--tensor-model-parallel-size 2"),
}
SECONDS_TO_END = 15.0
GIVE_UP_SECONDS = 120.0


def kill_one(layout: str, folder: Path, draw: random.Random) -> tuple[str, float, str | None]:
    """(what the run did, seconds until the last rank has ended, what is wrong)."""
    from helpers import wait_until
    from test_train_command import Command

    num_ranks, flags = LAYOUTS[layout]
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "out"
    command = Command(f"{SIZES} {flags} --output-dir {out}", folder / "logs", num_ranks)
    saves = out / "checkpoints"
    try:
        rows = draw.randrange(1, 8)  # of the metrics file, which says that the run is under way
        metrics = out / "metrics.jsonl"
        wait_until(lambda: (metrics.exists() and metrics.read_bytes().count(b"\n") >= rows) or not command.ranks[0].is_alive())
        if "save" in layout and draw.random() < 0.8:
            wait_until(lambda: any(saves.glob("*.partial")) or not command.ranks[0].is_alive())
        time.sleep(draw.random() * 0.3)  # any place of the step
        victim = draw.randrange(num_ranks)
        state = "a save" if any(saves.glob("*.partial")) else "a step"
        os.kill(command.ranks[victim].pid, signal.SIGKILL)
        began = time.monotonic()
        left = [rank for number, rank in enumerate(command.ranks) if number != victim]
        while any(rank.exitcode is None for rank in left) and time.monotonic() - began < GIVE_UP_SECONDS:
            time.sleep(0.02)
        seconds = time.monotonic() - began
        named = f"rank {victim} on host {os.uname().nodename} ended"
        problems = []
        for number, rank in enumerate(command.ranks):
            if number != victim and rank.exitcode is None:
                problems.append(f"rank {number} lives")
            elif number != victim and (named not in command.output(rank=number) or rank.exitcode != 1):
                problems.append(f"rank {number}, exit code {rank.exitcode}, says {command.output(rank=number)[-300:]!r}")
        return state, seconds, "; ".join(problems) or None
    finally:
        command.kill_all()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, help="of each layout")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--folder", type=Path, required=True, help="for logs and checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    from megatron_rl.megatron.cpu import import_megatron

    import_megatron()
    import torch._dynamo  # noqa: F401  # an optimiser's first step imports it

    num_wrong = 0
    print("| layout | ranks | kills | in a step, in a save | longest, mean time to the end of the others | over 15 s | not named |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for layout in options.layouts:
        draw, states, times, wrong = random.Random(f"{options.seed} {layout}"), Counter(), [], []
        for number in range(options.kills):
            folder = options.folder / f"{layout.replace(', ', '-').replace(' ', '-')}-{number}"
            state, seconds, problem = kill_one(layout, folder, draw)
            states[state] += 1
            times.append(seconds)
            wrong += [] if problem is None else [f"{folder}: {problem}"]
            if problem is None:
                shutil.rmtree(folder)
        late = sum(seconds > SECONDS_TO_END for seconds in times)
        by_state = f"{states['a step']}, {states['a save']}"
        spent = f"{max(times):.2f} s, {sum(times) / len(times):.2f} s"
        print(f"| {layout} | {LAYOUTS[layout][0]} | {options.kills} | {by_state} | {spent} | {late} | {len(wrong)} |", flush=True)
        for line in wrong:
            print(f"  {line}", file=sys.stderr, flush=True)
        num_wrong += late + len(wrong)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
