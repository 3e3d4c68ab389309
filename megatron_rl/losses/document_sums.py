"""Says what a loss sums over each document, in the one reduction over cp, and reads the sums.

Both twins of the loss (reduce_torch, reduce_triton) write the same columns. What the ranks of a document hold together is checked
here, after the reduction, so that all of them raise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.loss_hub import PolicyLoss
from megatron_rl.losses.inputs import LossInputs, checked_tensors, given

# Relative standard deviation above which a sample's [T] advantages vary. For equal numbers float64 sums give less than 1e-7.
ADVANTAGE_VARIATION = 1e-5
# The columns that every loss has.
FIRST_COLUMNS = ("num_nonfinite", "counts")


@dataclass(frozen=True, slots=True)
class DocumentSums:
    """Sums of each document over all cp ranks, [N] float64 each; None where the loss does not need it."""

    num_nonfinite: Tensor
    counts: Tensor
    correction_sums: dict[str, Tensor]  # by the names of corrections.correction_columns
    means: dict[str, Tensor]  # mean_columns in the dtype of log_probs; empty unless the loss is sequence-level
    importance: Tensor | None
    advantages: Tensor | None  # one per document, from [T] input
    advantages_vary: Tensor | None  # [N] bool
    is_miscounted: Tensor | None  # [N] bool: the caller's token_counts differ


def sum_columns(loss: PolicyLoss, inputs: LossInputs) -> tuple[str, ...]:
    """The k columns of the reduced [N, k] tensor. Their order depends only on settings, so it is the same on every rank."""
    columns = list(FIRST_COLUMNS)
    if loss.level == "sequence":
        columns += mean_columns(loss)
        if inputs.importance_weights is not None:
            columns.append("importance")
        if inputs.advantages_per == "token":
            columns += ["advantages", "squared_advantages"]
    return tuple(columns) if inputs.correction is None else (*columns, *inputs.correction.columns)


def mean_columns(loss: PolicyLoss) -> tuple[str, ...]:
    """The vectors whose mean over a sample's tokens a sequence-level loss needs."""
    further = (name for name in loss.needs if name != "token_counts")
    return ("log_ratio", *(("log_probs",) if loss.takes_log_probs else ()), *further)


def vectors_of_samples(loss: PolicyLoss, sums: DocumentSums, dtype: torch.dtype) -> dict[str, Tensor]:  # [N] each
    """The further inputs that a sequence-level loss declares: the counts, and the means of the others."""
    return {name: sums.counts.to(dtype) if name == "token_counts" else sums.means[name] for name in loss.needs}


def mean_of_documents(sums: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:  # [N]
    """sums / counts; 0 for a fully masked document."""
    return torch.where(counts > 0, sums / counts.clamp(min=1), 0.0).to(dtype)


def read_sums(
    loss: PolicyLoss,
    reduced: Tensor,  # [N, k] float64, in the order of sum_columns
    inputs: LossInputs,
    dtype: torch.dtype,
) -> DocumentSums:
    """Reads the reduced columns by name and computes means and errors from them. dtype: of the log-probabilities and the means."""
    column = dict(zip(sum_columns(loss, inputs), reduced.unbind(-1), strict=True))
    num_nonfinite, counts = column["num_nonfinite"], column["counts"]
    mean_advantages = vary = is_miscounted = None
    # Reading a flag on CUDA would synchronise. So a wrong document counts as non-finite, which stops the step before the optimiser.
    if "advantages" in column:
        mean_advantages = column["advantages"] / counts.clamp(min=1)
        mean_square = column["squared_advantages"] / counts.clamp(min=1)
        vary = (mean_square - mean_advantages.square()) > ADVANTAGE_VARIATION**2 * mean_square
        num_nonfinite = num_nonfinite + torch.where(vary, counts, 0.0)
    if inputs.token_counts is not None:
        is_miscounted = inputs.token_counts != counts
        num_nonfinite = num_nonfinite + torch.where(is_miscounted, counts.clamp(min=1), 0.0)
    names_of_means = mean_columns(loss) if loss.level == "sequence" else ()
    names_of_correction = () if inputs.correction is None else inputs.correction.columns
    return DocumentSums(
        num_nonfinite=num_nonfinite,
        counts=counts,
        correction_sums={name: column[name] for name in names_of_correction},
        means={name: mean_of_documents(column[name], counts, dtype) for name in names_of_means},
        importance=column.get("importance"),
        advantages=mean_advantages,
        advantages_vary=vary,
        is_miscounted=is_miscounted,
    )


def raise_on_bad_data(
    loss: PolicyLoss,
    sums: DocumentSums,
    log_probs: Tensor,  # [T]
    inputs: LossInputs,
    kl_coefficient: float,
    results: dict[str, Tensor] | None = None,  # [T] each: the results of the loss
) -> None:
    """Raises DataError for non-finite unmasked tokens, for advantages that vary inside a sample and for token_counts that differ
    from the mask's. On CUDA it reads nothing.

    Call it after the all-reduce: its numbers are then equal on all cp ranks, so that these raise together.
    """
    if sums.num_nonfinite.is_cuda or not bool((sums.num_nonfinite > 0).any()):
        return
    if sums.is_miscounted is not None and bool(sums.is_miscounted.any()):
        document = int(sums.is_miscounted.nonzero()[0])
        told = given(inputs.token_counts)[document].item()
        raise DataError(
            f"token_counts says {told:g} for document {_named(document, inputs)}, and loss_mask "
            f"has {int(sums.counts[document])} unmasked tokens over all context-parallel ranks: pass count_step's counts, or None"
        )
    if sums.advantages_vary is not None and bool(sums.advantages_vary.any()):
        document = int(sums.advantages_vary.nonzero()[0])
        raise DataError(
            f"advantages vary inside document {_named(document, inputs)}: a sequence-level loss takes one advantage per sample; "
            "average them in the rollout, or use a token-level loss (grpo)"
        )
    document = int((sums.num_nonfinite > 0).nonzero()[0])
    here = inputs.loss_mask & (inputs.token_documents == document)
    tensors = checked_tensors(loss, log_probs, inputs, kl_coefficient)
    # A result is named only where its inputs are finite.
    found = [
        [name for name, tensor in some.items() if bool((here & ~torch.isfinite(tensor)).any())] for some in (tensors, results or {})
    ]
    names = found[0] or found[1]
    where = f"in {', '.join(names)}" if names else "on another context-parallel rank"
    raise DataError(
        f"document {_named(document, inputs)} of the micro-batch has {int(sums.num_nonfinite[document])} unmasked tokens with a "
        f"value that is not finite, {where}; {int((sums.num_nonfinite > 0).sum())} documents are affected. A label outside the "
        "vocabulary gives -inf log_probs; mask the token or drop the sample"
    )


def _named(document: int, inputs: LossInputs) -> int:
    return document if inputs.document_numbers is None else inputs.document_numbers[document]


def raise_on_nonfinite(loss: PolicyLoss, is_bad: Tensor) -> None:
    """Raises DataError where the loss returned non-finite results for finite inputs. On CUDA it reads nothing."""
    if not is_bad.is_cuda and bool(is_bad.any()):
        raise DataError(f"policy loss {loss.name!r} returned values or derivatives that are not finite, from finite inputs")
