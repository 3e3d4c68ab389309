"""`megatron-rl doctor`: `command` is the door; `probes` looks, `machine` judges what it saw, `words` and `launch` a launch line."""

from megatron_rl.commands.doctor.command import add_arguments, run

__all__ = ["add_arguments", "run"]
