"""The commands of `megatron-rl`: one module or folder each: `add_arguments` and `run(args) -> exit code`. Nothing imports from here."""
