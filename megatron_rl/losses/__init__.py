"""The equations: one file a policy loss, and its Triton version beside it; KL estimators and corrections. It imports what declares
a name, so that the registries are full."""

from megatron_rl.losses import (  # noqa: F401
    cispo,
    corrections,
    dppo_kl,
    dppo_tv,
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
