"""The commands of `megatron-rl`; each module has `add_arguments(parser)` and `run(args) -> exit code`. Nothing imports from here."""
