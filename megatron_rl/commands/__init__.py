"""The commands of `megatron-rl`: a module each, with `add_arguments` and `run(args) -> exit code`; nothing imports from here."""
