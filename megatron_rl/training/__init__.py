"""What `megatron-rl train` is made of: tasks, rollouts, noise, files, flags; it must never change a loss or a weight.

Only `training.loop` needs Megatron-Core. Everything else here runs with torch alone, most of it without.
"""
