"""The commands of `megatron-rl`, a module or folder each: `add_arguments`, `run(args) -> exit code`. Nothing imports from here."""
