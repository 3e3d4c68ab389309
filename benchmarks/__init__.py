"""Benchmarks of megatron_rl, run from a checkout: `python -m benchmarks losses|head|cpu`. The wheel does not hold them."""
