"""Runs `megatron-rl COMMAND`, also `python -m megatron_rl COMMAND`. Its code is in commands/main.py."""

from __future__ import annotations

import sys

from megatron_rl.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
