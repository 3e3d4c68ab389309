"""Fills the console blocks of docs/explain.md with what their commands print, and docs/images/explain.png: nothing there is typed.

python tests/explain_page.py
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from megatron_rl.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURE = ROOT / "docs" / "explain.md", ROOT / "docs" / "images" / "explain.png"
BLOCK = re.compile(r"```console\n\$ megatron-rl (.*)\n(?:[^`].*\n|\n)*```\n")


def filled(page: str) -> str:
    """The page with each block's output as it is now; run it in a folder that pictures may go to."""
    return BLOCK.sub(lambda found: f"```console\n$ megatron-rl {found[1]}\n{output_of(found[1])}```\n", page)


def output_of(command: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        main(shlex.split(command))
    return shown.getvalue()


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        PAGE.write_text(filled(text), encoding="utf-8")
        shutil.copy("weights.png", PICTURE)
