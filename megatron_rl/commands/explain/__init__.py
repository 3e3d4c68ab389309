"""`megatron-rl explain`: `command` is the door; `step` reads, `weights` and `chain` compute, `report` and `plot` show."""

from megatron_rl.commands.explain.command import add_arguments, run

__all__ = ["add_arguments", "run"]
