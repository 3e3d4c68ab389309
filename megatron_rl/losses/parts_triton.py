"""The Triton twin of parts_reference.py: three launches a loss, four with metrics, and the same one all-reduce. It must never wait
for the device, nor compile again because a size or a setting changed.

    document_sums -> all-reduce of [N, k] over cp -> loss_and_coefficients [-> document_statistics] -> finish
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.config import PolicyMetrics
from megatron_rl.layout.collectives import all_reduce_sum
from megatron_rl.loss_hub import PolicyLossEntry
from megatron_rl.losses.inputs import LossInputs
from megatron_rl.losses.part_kernels_triton import document_sums_kernel, loss_and_coefficients_kernel
from megatron_rl.losses.parts_reference import LossParts, LossSettings
from megatron_rl.losses.statistics_triton import document_statistics_kernel, finish_kernel
from megatron_rl.losses.sums import checked_tensors, raise_on_bad_data, read_sums, sum_columns
from megatron_rl.metrics import STATISTICS, PolicyStatistics

# Tokens that a program loads at once. Documents may be long and few: a big block keeps many loads in flight. 16 warps hold 4 tokens
# a thread, so that the thirteen accumulators of the statistics stay in registers. 512 threads may have 128 each, which is said
# because ptxas of Triton 3.6 would stop at 64 and spill.
BLOCK, NUM_WARPS, MAX_REGISTERS = 2048, 16, 128
# Documents that the last reduction loads at once.
FINISH_BLOCK = 256


@torch.no_grad()
def loss_parts_triton(
    entry: PolicyLossEntry,  # its surrogate is the built-in clipped_surrogate
    log_probs: Tensor,  # [T] float32
    entropy: Tensor | None,  # [T] float32
    inputs: LossInputs,
    settings: LossSettings,
    *,
    block: int = BLOCK,
) -> LossParts:
    """`loss_parts` of losses/parts.py, where equation, communication and errors stand."""
    assert log_probs.dtype == torch.float32, "the log-probabilities of float64 logits take the torch twin"
    columns = sum_columns(entry, inputs)
    shared, weighted = _kernel_arguments(columns, log_probs, inputs, settings, block)
    # Triton launches on the current device, whatever device its arguments are on.
    with torch.cuda.device_of(log_probs):
        sums = log_probs.new_empty(inputs.num_documents, len(columns), dtype=torch.float64)
        document_sums_kernel[(inputs.num_documents,)](
            **shared, **weighted, SUMS=sums, HAS_TOKEN_ADVANTAGES=inputs.advantages_per == "token"
        )
        sums = all_reduce_sum(sums, settings.cp_group)
        if not sums.is_cuda:
            tensors = checked_tensors(log_probs, inputs, settings.kl_coefficient)
            raise_on_bad_data(read_sums(columns, sums, inputs), tensors, inputs)
        shared |= {
            "SUMS": sums,
            # A sequence-level loss has one advantage a sample by now, in the sums if it was given [T].
            "HAS_TOKEN_ADVANTAGES": inputs.advantages_per == "token" and entry.level == "token",
            "lowest_ratio": 1.0 - settings.clip_ratio_low,
            "highest_ratio": 1.0 + settings.clip_ratio_high,
        }
        terms, coefficients, entropy_coefficients, num_nonfinite = _loss_and_coefficients(
            shared, weighted, entropy, inputs, settings
        )
        per_document = _document_statistics(shared, entropy, inputs.num_documents, settings)
        loss, (policy_loss, kl_loss, entropy_sum), statistics = _finish(terms, per_document, settings)
    return LossParts(
        loss,
        policy_loss,
        kl_loss if settings.kl_coefficient else None,
        entropy_sum if settings.entropy_coefficient else None,
        coefficients,
        entropy_coefficients,
        num_nonfinite,
        statistics,
    )


def _kernel_arguments(
    columns: tuple[str, ...], log_probs: Tensor, inputs: LossInputs, settings: LossSettings, block: int
) -> tuple[dict, dict]:
    """What all kernels over documents take, and what the two with a weighted term take beside it."""
    shared = {
        "LOG_PROBS": log_probs.contiguous(),
        "OLD_LOG_PROBS": _contiguous(inputs.old_log_probs),
        "ADVANTAGES": inputs.advantages.contiguous(),
        "LOSS_MASK": inputs.loss_mask.contiguous().view(torch.uint8),
        "CU_SEQLENS": inputs.cu_seqlens.contiguous(),
        "NUM_COLUMNS": len(columns),
        **{f"{name.upper()}_COLUMN": _index(columns, name) for name in ("log_ratio", "advantages")},
        "BLOCK": block,
        "num_warps": NUM_WARPS,
        "maxnreg": MAX_REGISTERS,
        "enable_fp_fusion": True,
    }
    weighted = {
        "IMPORTANCE_WEIGHTS": _contiguous(inputs.importance_weights),
        "REF_LOG_PROBS": _contiguous(inputs.ref_log_probs) if settings.kl_coefficient else None,
        "IMPORTANCE_COLUMN": _index(columns, "importance"),
    }
    return shared, weighted


def _loss_and_coefficients(
    shared: dict, weighted: dict, entropy: Tensor | None, inputs: LossInputs, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(terms [N, 3] float64, coefficients [T], entropy_coefficients [T] or None, num_nonfinite [N] int32)."""
    log_probs, has_entropy_term = shared["LOG_PROBS"], settings.entropy_coefficient != 0
    has_regularizer = has_entropy_term or settings.kl_coefficient != 0
    terms = log_probs.new_empty(inputs.num_documents, 3, dtype=torch.float64)
    coefficients = torch.empty_like(log_probs)
    entropy_coefficients = torch.empty_like(log_probs) if has_entropy_term else None
    num_nonfinite = log_probs.new_empty(inputs.num_documents, dtype=torch.int32)
    loss_and_coefficients_kernel[(inputs.num_documents + 1,)](
        **shared,
        **weighted,
        ENTROPIES=entropy.contiguous() if has_entropy_term else None,
        TOKEN_COUNTS=_contiguous(inputs.token_counts),
        TOKEN_WEIGHTS=inputs.token_weights.contiguous(),
        REGULARIZER_WEIGHTS=_contiguous(inputs.regularizer_weights) if has_regularizer else None,
        COEFFICIENTS=coefficients,
        ENTROPY_COEFFICIENTS=entropy_coefficients,
        NUM_NONFINITE=num_nonfinite,
        TERMS=terms,
        kl_coefficient=float(settings.kl_coefficient),
        entropy_coefficient=float(settings.entropy_coefficient),
        num_documents=inputs.num_documents,
        num_tokens=log_probs.numel(),
    )
    return terms, coefficients, entropy_coefficients, num_nonfinite


def _document_statistics(shared: dict, entropy: Tensor | None, num_documents: int, settings: LossSettings) -> Tensor | None:
    """[N, K] float64; None, and no launch, where no metric is asked for."""
    if settings.metrics == PolicyMetrics.NONE:
        return None
    statistics = shared["LOG_PROBS"].new_empty(num_documents, len(STATISTICS), dtype=torch.float64)
    document_statistics_kernel[(num_documents,)](
        **shared,
        ENTROPIES=entropy.contiguous() if settings.metrics == PolicyMetrics.WITH_ENTROPY else None,
        STATISTICS_OUT=statistics,
        # Documents are whole on every cp rank's list: cp rank 0 alone counts them.
        document_share=1.0 if settings.cp_group.rank() == 0 else 0.0,
    )
    return statistics


def _finish(
    terms: Tensor, per_document: Tensor | None, settings: LossSettings
) -> tuple[Tensor, tuple[Tensor, ...], PolicyStatistics | None]:
    """(loss 0-d, (policy, kl and entropy sums), statistics). The loss has its own storage: the schedule divides it in place."""
    loss, sums = terms.new_empty((), dtype=torch.float32), terms.new_empty(3, dtype=torch.float32)
    values = None if per_document is None else terms.new_empty(len(STATISTICS))
    finish_kernel[(1 if values is None else 1 + len(STATISTICS),)](
        TERMS=terms,
        STATISTICS_IN=per_document,
        LOSS=loss,
        TERMS_OUT=sums,
        STATISTICS_OUT=values,
        kl_coefficient=float(settings.kl_coefficient),
        entropy_coefficient=float(settings.entropy_coefficient),
        num_documents=terms.shape[0],
        BLOCK=FINISH_BLOCK,
        enable_fp_fusion=True,
    )
    has_entropy = settings.metrics == PolicyMetrics.WITH_ENTROPY
    return loss, sums.unbind(), None if values is None else PolicyStatistics(values, has_entropy)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _index(columns: tuple[str, ...], name: str) -> int:
    return columns.index(name) if name in columns else -1
