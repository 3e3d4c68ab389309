"""What scale_for_schedule refuses, and what belongs to Megatron's schedule alone; tests/test_layouts.py has its arithmetic."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl import StepTotals
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.megatron.schedule import delivered_factor, microbatch_multiple, scale_for_schedule

PER_TOKEN = SimpleNamespace(calculate_per_token_loss=True, grad_scale_func=None)
UNIT = SimpleNamespace(calculate_per_token_loss=False, grad_scale_func=None)
TOTALS = StepTotals(num_samples=2, num_prompts=None, num_tokens=9)


def call(num_local_tokens, *, num_microbatches=2, config=PER_TOKEN):
    shared = {"totals": TOTALS, "config": config, "groups": ParallelGroups()}
    return scale_for_schedule(torch.ones(()), num_microbatches, num_local_tokens=num_local_tokens, **shared)


COUNTS = [
    0,
    5,
    2**31 - 1,
    5.0,
    np.int64(5),
    torch.tensor(5),
    torch.tensor([5]),
    torch.tensor(5.0),
    torch.tensor(5, dtype=torch.int32),
]


@pytest.mark.parametrize("count", COUNTS, ids=repr)
def test_a_count_of_any_type_reaches_the_schedule_as_int32(count):
    num_tokens = call(count)[1]
    assert num_tokens.dtype == torch.int32 and num_tokens.shape == () and num_tokens.item() == int(count)


@pytest.mark.parametrize("config", [PER_TOKEN, UNIT], ids=["per-token", "unit"])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "CPU tensor"])
@pytest.mark.parametrize("count", [2.7, math.nan, math.inf, -math.inf, -1, 2**31, True], ids=repr)
def test_a_count_that_int32_cannot_hold_is_refused_by_name(count, as_tensor, config):
    """2.7 would become 2, and NaN and 2**31 -2147483648: a wrong denominator without a word."""
    given = torch.tensor(count, dtype=torch.float64 if isinstance(count, float) else None) if as_tensor else count
    with pytest.raises(DataError, match=f"^num_local_tokens={count!r} must be a whole number from 0 to 2147483647: Megatron adds"):
        call(given, config=config)


def test_what_is_no_count_is_refused_by_name():
    with pytest.raises(DataError, match=r"num_local_tokens has shape \(2,\): it must be one number"):
        call(torch.tensor([3, 4]))
    for given in ("5", None):
        with pytest.raises(DataError, match=f"num_local_tokens={given!r} must be a whole number"):
            call(given)


@pytest.mark.parametrize("number", [1.5, math.nan, math.inf, 2.0, 0, -1, True, "2", None, torch.tensor(2)], ids=repr)
def test_a_number_of_micro_batches_that_is_none_is_refused_by_name(number):
    with pytest.raises(
        ConfigError, match=r"num_microbatches=.* must be at least 1, a whole number: pass the number given to the schedule"
    ):
        call(5, num_microbatches=number)
    with pytest.raises(ConfigError, match="num_microbatches="):
        delivered_factor(number, totals=TOTALS, config=UNIT, groups=ParallelGroups())


def test_numpy_counts_micro_batches_too():
    assert call(5, num_microbatches=np.int64(2), config=UNIT)[0].item() == 2.0


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("settings", "multiple"),
    [
        ({}, 1),
        ({"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}, 1),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32},
            2,
        ),
        (
            {
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "pipeline_dtype": torch.float32,
                "microbatch_group_size_per_vp_stage": 3,
            },
            3,
        ),
    ],
    ids=["no pipeline", "pipeline", "interleaved", "interleaved, groups of 3"],
)
def test_the_number_of_micro_batches_suits_the_pipeline(settings, multiple):
    """Interleaved stages take micro-batches in groups; another number of them stops in Megatron's schedule."""
    from megatron.core.model_parallel_config import ModelParallelConfig

    assert microbatch_multiple(ModelParallelConfig(**settings)) == multiple
