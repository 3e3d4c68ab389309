"""The equations: one file a policy loss, its Triton version beside it; KL estimators and corrections. Each file is imported here,
so that the registries are full.

A Triton version takes float32 blocks and returns value, derivative, is_clipped; `register_policy_loss` says what its arguments are.
"""

from megatron_rl.losses import (  # noqa: F401
    cispo,
    corrections,
    distillation,
    dppo,
    dro,
    gmpo,
    grpo,
    gspo,
    gspo_token,
    kl,
    reinforce,
    sapo,
    topr,
    vespo,
)
