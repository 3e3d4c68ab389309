"""Why bash cannot read a script, in its own words. `bash -n` parses and runs nothing; without a bash nothing is said."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from megatron_rl.files.bounds import read_regular

_SAID = re.compile(rb"line (\d+): (syntax error[^\n]*|unexpected EOF[^\n]*)")
# What reads a script instead of bash.
_OTHER_SHELL = re.compile(rb"#!.*\b(zsh|ksh|csh|tcsh|fish|python\S*)\b")
SECONDS = 10.0


def syntax_problem(script: Path, largest: int) -> str | None:
    """None: bash reads it, what it says is no error of syntax, or the script is larger than `largest` or not to be read."""
    bash = shutil.which("bash")
    try:
        text = read_regular(script, largest)
    except OSError:
        return None
    if bash is None or _OTHER_SHELL.match(text):
        return None
    said = None
    # Where a script switches extended patterns on, other lines are right than at the start of bash.
    for options in [[], ["-O", "extglob"]] if b"extglob" in text else [[]]:
        try:
            ended = subprocess.run(
                [bash, *options, "-n"], input=text, capture_output=True, check=False, timeout=SECONDS, env={"LC_ALL": "C"}
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        said = _SAID.search(ended.stderr)
        if ended.returncode == 0 or said is None:
            return None
    if said is None:
        return None
    line = text.splitlines()[int(said[1]) - 1 :][:1]
    return f"bash cannot read it: line {int(said[1])}, {said[2].decode(errors='replace')}{_hint(*line)}; see bash -n {script}"


def _hint(line: bytes = b"") -> str:
    if name := re.match(rb"\s*(\w+)(\s+=\s*|\s*=\s+)\(", line):
        return f": write {name[1].decode()}=( without a blank"
    return ": does an array above it lack its )?" if re.match(rb"\s*\w+=\(", line) else ""
