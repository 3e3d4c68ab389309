"""`megatron-rl bench`: `command` is the door; `losses`, `head` and `cpu` are its kinds, the rest measures and reports for them."""

from megatron_rl.commands.bench.command import add_arguments, run

__all__ = ["add_arguments", "run"]
