"""What `megatron-rl train` is made of: tasks, rollouts, noise, files, flags. It changes no loss and no weight.

Only `training.loop` needs Megatron-Core. Everything else here runs with torch alone.
"""
