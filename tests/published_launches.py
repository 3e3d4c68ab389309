"""Counts what doctor says of each launch that trainers publish: `python tests/published_launches.py`, with VERL_ROOT=...

A launch is a shell script, a Python script that starts a training, or a settings file of prime-rl. Nothing of them is run.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.commands.doctor.launch import judge_launches
from megatron_rl.errors import ConfigError

# Folders of machines and containers, and of agents' notes.
OTHERS = re.compile(r"(^|/)(docker|infra|k8s|\.\w+)/")
COMPOSING = "execute_train("
CHECKOUTS = [f"{name}_ROOT" for name in ("VERL", "NEMO_RL", "MILES", "SLIME", "ROLL", "SKYRL", "PRIME_RL", "TRL")]


def launches(root: Path) -> Iterator[str]:
    """The words of each, from the root of the checkout."""
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".sh", ".py", ".toml") and path.is_file()):
        name = path.relative_to(root).as_posix()
        if OTHERS.search(name):
            continue
        if path.suffix == ".sh":
            yield f"bash {name}"
        elif path.suffix == ".toml" and path.name != "pyproject.toml" and (root / "src" / "prime_rl").is_dir():
            yield f"uv run {'sft' if 'sft' in path.name else 'rl'} @ {name}"
        elif path.suffix == ".py":
            text = path.read_text(errors="replace")
            is_composed = COMPOSING in text and f"def {COMPOSING}" not in text
            if is_composed or re.match(r"examples/scripts/|examples/run_\w+\.py|research/.*/run_\w+\.py", name):
                yield f"python {name}"


def said(line: str) -> str:
    """judged, named, no training, or blocked; of several trainings the first that is not judged."""
    try:
        verdicts = [report.unjudged or "" for report in judge_launches(line.split(), None)]
    except ConfigError as error:
        return "no training" if "starts no training" in str(error) else "blocked"
    kinds = ["judged" if "own loss: " in one else "named" if "nothing was judged" in one else "blocked" for one in verdicts]
    return next((kind for kind in kinds if kind != "judged"), "judged")


def main() -> None:
    total = Counter[str]()
    for variable in CHECKOUTS:
        if os.environ.get(variable):
            os.chdir(os.environ[variable])
            found = Counter(map(said, launches(Path.cwd())))
            total += found
            print(variable, found.total(), dict(found), flush=True)
    print("all", total.total(), dict(total))


if __name__ == "__main__":
    main()
