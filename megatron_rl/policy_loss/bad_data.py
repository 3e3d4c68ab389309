"""Words the errors of a micro-batch whose numbers cannot be trained. Good data do not come here."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_rl.declare import POLICY_LOSSES, PolicyLoss
from megatron_rl.errors import DataError
from megatron_rl.policy_loss.inputs import DocumentSums, LossInputs, checked_tensors, given


def bad_data(
    loss: PolicyLoss,
    sums: DocumentSums,  # for which has_bad_data is True
    log_probs: Tensor,  # [T]
    inputs: LossInputs,
    kl_coefficient: float,
    results: Mapping[str, Tensor] | None = None,  # [T] each: the results of the loss
) -> DataError:
    """For token_counts that differ from the mask's, advantages that vary inside a sample, and values that are not finite."""
    results = results or {}
    if sums.is_miscounted is not None and bool(sums.is_miscounted.any()):
        document = int(sums.is_miscounted.nonzero()[0])
        told = given(inputs.token_counts)[document].item()
        return DataError(
            f"token_counts says {told:g} for document {_named(document, inputs)}, and loss_mask "
            f"has {int(sums.counts[document])} unmasked tokens over all context-parallel ranks: pass count_step's counts, or None"
        )
    if sums.advantages_vary is not None and bool(sums.advantages_vary.any()):
        document = int(sums.advantages_vary.nonzero()[0])
        return DataError(
            f"advantages vary inside document {_named(document, inputs)}: a sequence-level loss takes one advantage per sample; "
            "average them in the rollout, or use a token-level loss (grpo)"
        )
    document = int((sums.num_nonfinite > 0).nonzero()[0])
    tensors = checked_tensors(loss, log_probs, inputs, kl_coefficient)
    here = inputs.loss_mask & (inputs.token_documents == document)
    # A result is named only where its inputs are finite.
    found = [[name for name, tensor in some.items() if bool((here & ~torch.isfinite(tensor)).any())] for some in (tensors, results)]
    names = found[0] or found[1]
    where = f"in {', '.join(names)}" if names else "on another context-parallel rank"
    remedy = "A label outside the vocabulary gives -inf log_probs; mask the token or drop the sample"
    if names and not found[0] and not POLICY_LOSSES.is_built_in(loss.name):
        first = here & torch.stack([~torch.isfinite(tensor) for tensor in results.values()]).any(0)
        at = _pair_in_words(tensors["log_probs"] - tensors["old_log_probs"], tensors["advantages"], first)
        remedy = f"Its inputs are finite, {at}: in {loss.name} write bounded_exp for exp, and keep divisors above 0"
    return DataError(
        f"document {_named(document, inputs)} of the micro-batch has {int(sums.num_nonfinite[document])} unmasked tokens with a "
        f"value that is not finite, {where}; {int((sums.num_nonfinite > 0).sum())} documents are affected. {remedy}"
    )


def nonfinite_loss(
    loss: PolicyLoss, is_bad: Tensor, log_ratio: Tensor | None = None, advantages: Tensor | None = None
) -> DataError:
    """is_bad: [*] of tokens or samples, somewhere True; log_ratio, advantages: [*], where they are at hand."""
    where = ""
    if log_ratio is not None and advantages is not None:
        where = f": guard it, {_pair_in_words(log_ratio, advantages, is_bad)}"
    return DataError(f"policy loss {loss.name!r} returned values or derivatives that are not finite, from finite inputs{where}")


def _named(document: int, inputs: LossInputs) -> int:
    return document if inputs.document_numbers is None else inputs.document_numbers[document]


def _pair_in_words(log_ratio: Tensor, advantages: Tensor, is_bad: Tensor) -> str:  # [*] each, is_bad somewhere True
    first = int(is_bad.nonzero()[0])
    return f"first at log-ratio {float(log_ratio[first]):.6g} and advantage {float(advantages[first]):.6g}"
