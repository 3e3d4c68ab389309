"""What a schedule has to know on the host, and the documents of one bin as inputs of a loss; it must never change a value.

The host's part: bounds of the documents, which rows are unmasked, which have advantage 0. What is on the CPU already costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.layout.collectives import all_gather_stack, group_device
from megatron_rl.layout.groups import Group
from megatron_rl.layout.packing import check_cu_seqlens
from megatron_rl.losses.inputs import LossInputs


@dataclass(frozen=True, slots=True)
class HostFacts:
    """About this rank's slice, on the CPU."""

    bounds: list[int]  # N + 1
    loss_mask: Tensor  # [T] bool, False on padding
    has_no_advantage: Tensor | None  # [T] bool: advantage 0, so no policy gradient; None: not looked at

    @property
    def num_documents(self) -> int:
        return len(self.bounds) - 1

    def rows_of_documents(self, rows: Tensor) -> list[Tensor]:  # rows [k] ascending -> N parts
        """The rows of each document; padding belongs to none."""
        cuts = torch.searchsorted(rows, torch.tensor(self.bounds)).tolist()
        return [rows[start:stop] for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]


def read_host_facts(
    loss_mask: Tensor,  # [T] as the caller gave it
    cu_seqlens: Tensor,  # [N + 1] as the caller gave it
    inputs: LossInputs,
    advantages: Tensor,  # [N] or [T] as the caller gave it
) -> HostFacts:
    """Where loss_mask and cu_seqlens are on the CPU nothing is waited for; else ONE synchronisation brings what is on the device.

    Advantages on the device come along with it, and are not looked at where there is none. Raises DataError for bounds that came
    from the device and are none: prepare_inputs could not look at them.
    """
    if loss_mask.is_cuda or cu_seqlens.is_cuda:
        # Those of `inputs` are checked and on the device; the mask is already False on padding.
        bounds, mask, zeros = read_together(inputs.cu_seqlens, inputs.loss_mask, inputs.advantages == 0)
        check_cu_seqlens(bounds, mask.numel())
    else:
        bounds, zeros = cu_seqlens, None if advantages.is_cuda else advantages == 0
        mask = loss_mask.bool() & (torch.arange(loss_mask.numel()) < cu_seqlens[-1])
    bounds = bounds.tolist()
    if zeros is not None and inputs.advantages_per == "sample":
        padding = torch.ones(mask.numel() - bounds[-1], dtype=torch.bool)
        zeros = torch.cat([zeros.repeat_interleave(torch.tensor(bounds).diff()), padding])
    return HostFacts(bounds, mask, zeros)


def read_together(*tensors: Tensor) -> list[Tensor]:  # 1-d, integer or bool, on one device -> the same on the CPU
    """One copy for all: the first would wait for everything that is queued on the device, and each further one again."""
    packed = torch.cat([tensor.long() for tensor in tensors]).cpu()
    parts = packed.split([tensor.numel() for tensor in tensors])
    return [part.to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


def check_document_lengths(document_lengths: Sequence[int] | None, facts: HostFacts, cp_size: int) -> None:
    """Raises DataError unless there is one length a document and none is below what this rank holds of it."""
    if document_lengths is None:
        return
    if isinstance(document_lengths, Tensor) or any(not isinstance(length, int) for length in document_lengths):
        raise DataError("document_lengths must be a list of host ints, the whole documents' lengths: pass .tolist() of a tensor")
    if len(document_lengths) != facts.num_documents:
        raise DataError(f"document_lengths has {len(document_lengths)} entries for {facts.num_documents} documents")
    local = [stop - start for start, stop in zip(facts.bounds[:-1], facts.bounds[1:], strict=True)]
    for document, (length, here) in enumerate(zip(document_lengths, local, strict=True)):
        if here > length or (cp_size == 1 and here != length):
            raise DataError(
                f"document_lengths[{document}]={length} but cu_seqlens gives {here} tokens on this rank: lengths are those of "
                "whole documents, the same list on every cp rank"
            )


def document_sizes(
    facts: HostFacts,
    live_rows: Sequence[Tensor],  # N
    document_lengths: Sequence[int] | None,
    token_counts: Tensor | None,  # [N]
    cp_group: Group,
    device: torch.device,
) -> tuple[list[int], Tensor | None]:
    """(rows of each document on the cp rank that holds most of it, token counts [N] over all cp ranks).

    Equal on all cp ranks. Communication: one all-gather of [2, N] over cp unless lengths and counts are both given; none at size 1.
    document_lengths stand in for the sizes under cp, as equal slices: then nothing comes back to the host.
    """
    sizes = [rows.numel() for rows in live_rows]
    counts = [int(facts.loss_mask[start:stop].sum()) for start, stop in zip(facts.bounds[:-1], facts.bounds[1:], strict=True)]
    if cp_group.size() == 1:
        return sizes, token_counts if token_counts is not None else torch.tensor(counts, dtype=torch.int64).to(
            device, non_blocking=True
        )
    if document_lengths is not None:
        sizes = [-(-length // cp_group.size()) for length in document_lengths]
    if document_lengths is None or token_counts is None:
        here = torch.tensor([sizes, counts], dtype=torch.int64).to(group_device(cp_group))
        gathered = all_gather_stack(here, cp_group)
        token_counts = gathered[:, 1].sum(0).to(device, non_blocking=True) if token_counts is None else token_counts
        sizes = gathered[:, 0].amax(0).tolist() if document_lengths is None else sizes
    return sizes, token_counts


def bin_inputs(
    inputs: LossInputs, documents: tuple[int, ...], bounds: Sequence[int]
) -> tuple[LossInputs, slice | Tensor]:  # and the tokens [T_bin] of them, masked ones as well
    """The inputs of these documents alone, as a micro-batch of their own."""
    if len(documents) == len(bounds) - 1:
        return inputs, slice(None)
    device = inputs.loss_mask.device
    starts, stops = [bounds[i] for i in documents], [bounds[i + 1] for i in documents]
    lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
    if all(stop == start for stop, start in zip(stops[:-1], starts[1:], strict=True)):
        tokens: slice | Tensor = slice(starts[0], stops[-1])
    else:
        tokens = torch.cat([torch.arange(start, stop) for start, stop in zip(starts, stops, strict=True)])
        tokens = tokens.to(device, non_blocking=True)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(inputs.cu_seqlens.dtype)
    numbers = torch.tensor(documents).to(device, non_blocking=True)

    def of(values: Tensor | None, index: slice | Tensor) -> Tensor | None:
        return None if values is None else values[index]

    return replace(
        inputs,
        old_log_probs=of(inputs.old_log_probs, tokens),
        advantages=of(inputs.advantages, numbers if inputs.advantages_per == "sample" else tokens),
        loss_mask=of(inputs.loss_mask, tokens),
        cu_seqlens=cu_seqlens.to(device, non_blocking=True),
        token_weights=of(inputs.token_weights, numbers),
        token_counts=of(inputs.token_counts, numbers),
        importance_weights=of(inputs.importance_weights, tokens),
        ref_log_probs=of(inputs.ref_log_probs, tokens),
        regularizer_weights=of(inputs.regularizer_weights, numbers),
        document_numbers=documents,
    ), tokens
