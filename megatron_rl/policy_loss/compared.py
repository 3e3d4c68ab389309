"""Adds to an agreement what ranks that compute one loss must have in common. Entered only where ranks compare."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.declare import PolicyLoss
from megatron_rl.layout.groups import Agreement
from megatron_rl.ops.support import compare_supports
from megatron_rl.policy_loss.inputs import LossInputs
from megatron_rl.policy_loss.settings import LossSettings


def compare_inputs(agreement: Agreement, loss: PolicyLoss, inputs: LossInputs, settings: LossSettings) -> None:
    """Adds the values that must be equal on ranks that compute one loss: over tp all of them; over cp the [N] ones."""
    agreement.add("policy loss", loss.name)
    for name, value in settings.keywords.items():
        agreement.add(name, value)
    agreement.add("correction", str(inputs.correction))
    for name in ("kl_coefficient", "entropy_coefficient", "metrics", "backend"):
        agreement.add(name, getattr(settings, name))
    compare_supports(agreement, inputs.sampling_support, inputs.loss_mask)
    agreement.add("kl_estimator", None if settings.kl_estimator is None else settings.kl_estimator.name)
    agreement.add("number of documents", inputs.num_documents)
    agreement.add("cu_seqlens", inputs.cu_seqlens, is_sliced=True)
    agreement.add("advantages_per", inputs.advantages_per)
    for name in ("old_log_probs", "importance_weights", "ref_log_probs", "rollout_log_probs"):
        agreement.add(name, _live(getattr(inputs, name), inputs.loss_mask), is_sliced=True)
    if inputs.advantages_per == "token":
        agreement.add("advantages", _live(inputs.advantages, inputs.loss_mask), is_sliced=True)
    else:
        agreement.add("advantages", inputs.advantages)
    for name in ("token_weights", "token_counts", "regularizer_weights"):
        agreement.add(name, getattr(inputs, name))


def _live(values: Tensor | None, loss_mask: Tensor) -> Tensor | None:
    """The values with 0 at masked tokens, which may hold anything."""
    return None if values is None else torch.where(loss_mask, values, 0)
