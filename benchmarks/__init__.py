"""Benchmarks of megatron_rl, run from a checkout: `python -m benchmarks --help`. The wheel does not hold them."""
