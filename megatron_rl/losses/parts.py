"""From log-probabilities to a rank's part of the step's loss and its derivative; nothing here is differentiated or reads a flag.

The logits path and the fused head call the same function: it sees [T] and [N] tensors only, and picks the twin.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl.config import Backend
from megatron_rl.loss_hub import PolicyLossEntry
from megatron_rl.losses.inputs import LossInputs
from megatron_rl.losses.parts_reference import LossParts, LossSettings, loss_parts_reference
from megatron_rl.losses.surrogate import clipped_surrogate

__all__ = ["LossParts", "LossSettings", "loss_parts"]


def loss_parts(
    entry: PolicyLossEntry,
    log_probs: Tensor,  # [T]
    entropy: Tensor | None,  # [T]
    inputs: LossInputs,
    settings: LossSettings,
) -> LossParts:
    """loss = sum_t w_i m_t u_t value_t + kl_coefficient sum_t v_i m_t k3_t - entropy_coefficient sum_t v_i m_t H_t.

    Importance weights u: a token-level loss multiplies value and coefficient by u_t. At sequence level the value is shared, so
    the sample's weight becomes W_i = w_i sum_t m_t u_t and each token's coefficient (W_i / m_i) value'(s_i) s_i, never times u_t.
    settings.backend TRITON: three launches for a loss made of the built-in clipped surrogate. A registered loss with another
    surrogate, or with none, is a function of torch tensors: it keeps the torch twin, on whatever device the tensors are.

    Communication: one all-reduce over cp of [N, k], at cp size 1 none; k <= 4 (non-finite, log-ratio, count, importance) and two
    more where a sequence-level loss is given [T] advantages, which must then be shown equal over all cp ranks.
    Raises, on the CPU and after that all-reduce, so on all tp and cp ranks together: DataError for non-finite unmasked tokens and
    for advantages that vary inside a sample. On CUDA num_nonfinite tells, without a synchronisation.
    """
    if settings.backend == Backend.TRITON and entry.surrogate is clipped_surrogate:
        from megatron_rl.losses.parts_triton import loss_parts_triton

        return loss_parts_triton(entry, log_probs, entropy, inputs, settings)
    return loss_parts_reference(entry, log_probs, entropy, inputs, settings)
