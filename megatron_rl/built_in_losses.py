"""The names and parameters of the built-in losses, for a help text that imports no torch.

Generated from the declarations in losses/: python tests/pages.py megatron_rl/built_in_losses.py
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import math  # noqa: F401

from megatron_rl.loss_hub import Parameter

BUILT_IN_LOSSES: dict[str, tuple[Parameter, ...]] = {
    'cispo': (
    ),
    'dppo_kl': (
        Parameter(name='divergence_low', default=0.05, help='a token with A < 0 whose probability fell by more than this KL divergence has no gradient', minimum=0.0),
        Parameter(name='divergence_high', default=0.05, help='a token with A > 0 whose probability rose by more than this KL divergence has no gradient', minimum=0.0),
        Parameter(name='ratio_truncation', default=20.0, help='the largest importance ratio of a token', minimum=0.0, is_above_minimum=True),
    ),
    'dppo_tv': (
        Parameter(name='divergence_low', default=0.15, help='a token with A < 0 whose probability fell by more than this total variation has no gradient', minimum=0.0),
        Parameter(name='divergence_high', default=0.15, help='a token with A > 0 whose probability rose by more than this total variation has no gradient', minimum=0.0),
        Parameter(name='ratio_truncation', default=20.0, help='the largest importance ratio of a token', minimum=0.0, is_above_minimum=True),
    ),
    'dro': (
        Parameter(name='log_ratio_penalty', default=0.05, help='tau, the factor of half the squared log-ratio', minimum=0.0, is_above_minimum=True),
    ),
    'gmpo': (
    ),
    'grpo': (
        Parameter(name='clip_ratio_c', default=math.inf, help='dual clip: for A < 0 the ratio is clipped at this number too, so that one token has at most this many times the gradient of REINFORCE; 3 is usual', minimum=1.0, is_above_minimum=True),
    ),
    'gspo': (
        Parameter(name='clip_ratio_c', default=math.inf, help='dual clip: for A < 0 the ratio is clipped at this number too, so that one token has at most this many times the gradient of REINFORCE; 3 is usual', minimum=1.0, is_above_minimum=True),
    ),
    'gspo_token': (
        Parameter(name='clip_ratio_c', default=math.inf, help='dual clip: for A < 0 the ratio is clipped at this number too, so that one token has at most this many times the gradient of REINFORCE; 3 is usual', minimum=1.0, is_above_minimum=True),
    ),
    'reinforce': (
    ),
    'sapo': (
        Parameter(name='sapo_temperature_positive', default=1.0, help='the temperature of tokens with A > 0; a larger one fades the gradient out nearer to the ratio 1', minimum=0.0, is_above_minimum=True),
        Parameter(name='sapo_temperature_negative', default=1.05, help='the temperature of tokens with A < 0; the paper takes it above the other one', minimum=0.0, is_above_minimum=True),
    ),
    'topr': (
    ),
    'vespo': (
        Parameter(name='vespo_power_positive', default=2.0, help='the power of the ratio of samples with A >= 0, c1 in the paper', minimum=0.0),
        Parameter(name='vespo_decay_positive', default=3.0, help='the decay of samples with A >= 0 above the ratio 1, c2 in the paper', minimum=0.0),
        Parameter(name='vespo_power_negative', default=3.0, help='the power of the ratio of samples with A < 0, c1 in the paper', minimum=0.0),
        Parameter(name='vespo_decay_negative', default=2.0, help='the decay of samples with A < 0 above the ratio 1, c2 in the paper', minimum=0.0),
    ),
}
