"""What a loss has to know of whole documents: the columns of its one reduction over cp, which both twins of the loss read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.layout.packing import spread
from megatron_rl.loss_hub import PolicyLoss
from megatron_rl.losses.inputs import LossInputs, given

# Relative standard deviation above which a sample's [T] advantages count as varying: float64 sums of equal numbers stay below 1e-7.
ADVANTAGE_VARIATION = 1e-5
# Of every loss.
FIRST_COLUMNS = ("num_nonfinite", "counts")


@dataclass(frozen=True, slots=True)
class DocumentStats:
    """Sums of each document over all cp ranks, [N] float64 each; None where the loss does not need it."""

    num_nonfinite: Tensor
    counts: Tensor
    means: dict[str, Tensor]  # of a sequence-level loss, in the dtype of log_probs: those of mean_columns
    importance: Tensor | None
    advantages: Tensor | None  # one per document, from [T] input
    advantages_vary: Tensor | None  # [N] bool
    is_miscounted: Tensor | None  # [N] bool: the caller's token_counts are others


def stats_columns(loss: PolicyLoss, inputs: LossInputs) -> tuple[str, ...]:
    """The k columns of the reduced [N, k] tensor, in an order that depends on settings alone: it is the same on every rank."""
    columns = list(FIRST_COLUMNS)
    if loss.level == "sequence":
        columns += mean_columns(loss)
        if inputs.importance_weights is not None:
            columns.append("importance")
        if inputs.advantages_per == "token":
            columns += ["advantages", "squared_advantages"]
    return tuple(columns)


def mean_columns(loss: PolicyLoss) -> tuple[str, ...]:
    """What a sequence-level loss takes the mean of over a sample's tokens."""
    return ("log_ratio", *(("log_probs",) if loss.takes_log_probs else ()), *loss.needs)


def mean(sums: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:  # [N]
    """0 for a fully masked document, which has no token to carry it."""
    return torch.where(counts > 0, sums / counts.clamp(min=1), 0.0).to(dtype)


def read_stats(
    loss: PolicyLoss,
    reduced: Tensor,  # [N, k] float64, in the order of stats_columns
    inputs: LossInputs,
    dtype: torch.dtype,
) -> DocumentStats:
    """The reduced columns by name, and what follows from them. dtype: that of the log-probabilities and of the means."""
    columns = stats_columns(loss, inputs)
    sums = dict(zip(columns, reduced.unbind(-1), strict=True))
    num_nonfinite, counts = sums["num_nonfinite"], sums["counts"]
    mean_advantages = vary = is_miscounted = None
    # CUDA must not look: a document with a fault counts as non-finite, which stops the step before the optimiser.
    if "advantages" in sums:
        mean_advantages = sums["advantages"] / counts.clamp(min=1)
        mean_square = sums["squared_advantages"] / counts.clamp(min=1)
        vary = (mean_square - mean_advantages.square()) > ADVANTAGE_VARIATION**2 * mean_square
        num_nonfinite = num_nonfinite + torch.where(vary, counts, 0.0)
    if inputs.token_counts is not None:
        is_miscounted = inputs.token_counts != counts
        num_nonfinite = num_nonfinite + torch.where(is_miscounted, counts.clamp(min=1), 0.0)
    means = {name: mean(sums[name], counts, dtype) for name in mean_columns(loss)} if loss.level == "sequence" else {}
    return DocumentStats(num_nonfinite, counts, means, sums.get("importance"), mean_advantages, vary, is_miscounted)


def checked_tensors(
    loss: PolicyLoss, log_probs: Tensor, inputs: LossInputs, kl_coefficient: float
) -> dict[str, Tensor]:  # [T] each
    """What has to be finite on every unmasked token, by its name in messages."""
    dtype = log_probs.dtype
    old_log_probs = log_probs if inputs.old_log_probs is None else inputs.old_log_probs.to(dtype)
    advantages = inputs.advantages.to(dtype)
    if inputs.advantages_per == "sample":
        advantages = spread(advantages, inputs.token_documents)
    tensors = {"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages}
    # In the dtype that the loss computes in: 1e300 is finite in float64 alone.
    if inputs.importance_weights is not None:
        tensors["importance_weights"] = inputs.importance_weights.to(dtype)
    if kl_coefficient:
        tensors["ref_log_probs"] = given(inputs.ref_log_probs).to(dtype)
    return tensors | further_inputs(loss, inputs, dtype)


def further_inputs(loss: PolicyLoss, inputs: LossInputs, dtype: torch.dtype) -> dict[str, Tensor]:  # [T] each
    """What the loss needs beside the inputs of every loss."""
    return {name: given(getattr(inputs, name)).to(dtype) for name in loss.needs}


def raise_on_bad_data(
    stats: DocumentStats,
    tensors: dict[str, Tensor],  # [T] each: checked_tensors
    inputs: LossInputs,
    results: dict[str, Tensor] | None = None,  # [T] each: what a registered loss made of them
) -> None:
    """DataError for non-finite unmasked tokens, for advantages that vary inside a sample and for token_counts that are not the
    ranks' own. On CUDA it looks at nothing.

    To be called after the all-reduce: its numbers are those of all cp ranks, which therefore raise together.
    """
    if stats.num_nonfinite.is_cuda or not bool((stats.num_nonfinite > 0).any()):
        return
    if stats.is_miscounted is not None and bool(stats.is_miscounted.any()):
        document = int(stats.is_miscounted.nonzero()[0])
        told = given(inputs.token_counts)[document].item()
        raise DataError(
            f"token_counts says {told:g} for document {_named(document, inputs)}, and loss_mask "
            f"has {int(stats.counts[document])} unmasked tokens over all context-parallel ranks: pass count_step's counts, or None"
        )
    if stats.advantages_vary is not None and bool(stats.advantages_vary.any()):
        document = int(stats.advantages_vary.nonzero()[0])
        raise DataError(
            f"advantages vary inside document {_named(document, inputs)}: a sequence-level loss takes one advantage per sample; "
            "average them in the rollout, or use a token-level loss (grpo)"
        )
    document = int((stats.num_nonfinite > 0).nonzero()[0])
    here = inputs.loss_mask & (inputs.token_documents == document)
    # A result is to blame only where its inputs are not.
    found = [
        [name for name, tensor in some.items() if bool((here & ~torch.isfinite(tensor)).any())] for some in (tensors, results or {})
    ]
    names = found[0] or found[1]
    where = f"in {', '.join(names)}" if names else "on another context-parallel rank"
    raise DataError(
        f"document {_named(document, inputs)} of the micro-batch has {int(stats.num_nonfinite[document])} unmasked tokens with a "
        f"value that is not finite, {where}; {int((stats.num_nonfinite > 0).sum())} documents are affected. A label outside the "
        "vocabulary gives -inf log_probs; mask the token or drop the sample"
    )


def _named(document: int, inputs: LossInputs) -> int:
    return document if inputs.document_numbers is None else inputs.document_numbers[document]
