"""Puts our reducer in the place of a host's own inside the host's published tests; imported at the start of their processes.

PYTHONPATH=<folder with a sitecustomize.py that calls install()>:tests:. python -m pytest <a test file of the host>
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from argparse import Namespace

CP_UTILS = ("slime.backends.megatron_utils.cp_utils", "miles.backends.training_utils.cp_utils")
CALLS = "REDUCER_CALLS"  # names a file that gets one line for each call, so that a test of nothing is seen


def install() -> None:
    from host_harness import StubFinder

    sys.meta_path[:0] = [Retargeter(), StubFinder()]


class Retargeter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the host's cp_utils as it is and then replaces its factory of reducers."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in CP_UTILS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        self.loader.exec_module(module)
        module.get_sum_of_sample_mean = lambda *args, **kwargs: our_reducer(module, *args, **kwargs)


def our_reducer(module, total_lengths, response_lengths, loss_masks, *rest, **kwargs):
    """slime passes denominators before the per-token flag, miles by keyword: each is the divisor of `constant` on its sample."""
    import torch

    first, second = (*rest, None, None)[:2]
    is_slime = module.__name__.startswith("slime")
    per_token = kwargs.get("calculate_per_token_loss", (second if is_slime else first) or False)
    divisors = kwargs.get("denominators", kwargs.get("sample_denoms", first if is_slime else None))
    with open(os.environ[CALLS], "a") as calls:
        calls.write(f"{os.getpid()}\n")
    if per_token or divisors is None:
        settings = {"loss_aggregation": "token_mean" if per_token else "sample_mean", "calculate_per_token_loss": per_token}
        return factory(module, settings)(total_lengths, response_lengths, loss_masks, per_token)
    parts = []
    for sample, divisor in enumerate(divisors):
        settings = {"loss_aggregation": "constant", "loss_aggregation_divisor": max(float(divisor), 1.0)}
        one = slice(sample, sample + 1)
        parts.append(factory(module, settings)(total_lengths[one], response_lengths[one], loss_masks[one], False))
    sizes = [local_size(module, total, response) for total, response in zip(total_lengths, response_lengths, strict=True)]
    return lambda values: torch.stack([part(x) for part, x in zip(parts, values.split(sizes), strict=True)]).sum()


def factory(module, settings: dict):
    """get_pg_loss_reducer with these arguments, on the cp rank that the test has mocked."""
    from megatron_rl.hosts import loss
    from megatron_rl.hosts.base import remember_args

    remember_args(Namespace(**{"loss_aggregation_divisor": None, "calculate_per_token_loss": False, **settings}))
    loss.resolve_group = lambda group, name: MockedGroup(*cp_rank_and_size(module))
    return loss.get_pg_loss_reducer


def local_size(module, total: int, response: int) -> int:
    from megatron_rl.layout.context_parallel import response_spans

    rank, size = cp_rank_and_size(module)
    return response if size == 1 else sum(end - start for start, end in response_spans(total, response, rank, size))


def cp_rank_and_size(module) -> tuple[int, int]:
    if hasattr(module, "mpu"):
        return module.mpu.get_context_parallel_rank(), module.mpu.get_context_parallel_world_size()
    state = module.get_parallel_state()
    return state.cp.rank, state.cp.size


class MockedGroup:
    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size
