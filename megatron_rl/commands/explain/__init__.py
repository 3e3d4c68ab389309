"""`megatron-rl explain`: `command` is the door; `input`, `files` read, `weights`, `chain` compute, `report`, `plot` show."""

from megatron_rl.commands.explain.command import add_arguments, run

__all__ = ["add_arguments", "run"]
