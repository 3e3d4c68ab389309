"""Reads on the host what decides the rows of a fused head: bounds of the documents and unmasked rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.layout.groups import Group, all_gather_stack, group_device
from megatron_rl.policy_loss.inputs import LossInputs, check_cu_seqlens


@dataclass(frozen=True, slots=True)
class ScheduleCopies:
    """CPU copies of this rank's slice that the schedule needs."""

    bounds: list[int]  # N + 1
    loss_mask: Tensor  # [T] bool, False on padding

    @property
    def num_documents(self) -> int:
        return len(self.bounds) - 1

    def rows_of_documents(self, rows: Tensor) -> list[Tensor]:  # rows [k] ascending -> N parts
        """The rows of each document, without padding."""
        cuts = torch.searchsorted(rows, torch.tensor(self.bounds)).tolist()
        return [rows[start:stop] for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]


def read_host_copies(
    loss_mask: Tensor,  # [T] as the caller gave it
    cu_seqlens: Tensor,  # [N + 1] as the caller gave it
    inputs: LossInputs,
) -> ScheduleCopies:
    """The host copies: without a synchronisation where loss_mask and cu_seqlens are on the CPU, else with one.

    Raises DataError for wrong bounds from the device, which prepare_inputs did not read.
    """
    if loss_mask.is_cuda or cu_seqlens.is_cuda:
        # The tensors of `inputs` are checked and on the device; the mask is already False on padding.
        bounds, mask = read_together(inputs.cu_seqlens, inputs.loss_mask)
        check_cu_seqlens(bounds, mask.numel())
    else:
        bounds = cu_seqlens
        mask = loss_mask.bool() & (torch.arange(loss_mask.numel()) < cu_seqlens[-1])
    return ScheduleCopies(bounds.tolist(), mask)


def read_together(*tensors: Tensor) -> list[Tensor]:  # 1-d, integer or bool, on one device -> the same on the CPU
    """Copies all tensors at once, because each copy waits for all work that is queued on the device."""
    packed = torch.cat([tensor.long() for tensor in tensors]).cpu()
    parts = packed.split([tensor.numel() for tensor in tensors])
    return [part.to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


def check_document_lengths(document_lengths: Sequence[int] | None, copies: ScheduleCopies, cp_size: int) -> None:
    """Raises DataError unless there is one length for each document, not below the tokens that this rank has of it."""
    if document_lengths is None:
        return
    if isinstance(document_lengths, Tensor) or any(not isinstance(length, int) for length in document_lengths):
        raise DataError("document_lengths must be a list of host ints, the whole documents' lengths: pass .tolist() of a tensor")
    if len(document_lengths) != copies.num_documents:
        raise DataError(f"document_lengths has {len(document_lengths)} entries for {copies.num_documents} documents")
    local = [stop - start for start, stop in zip(copies.bounds[:-1], copies.bounds[1:], strict=True)]
    for document, (length, here) in enumerate(zip(document_lengths, local, strict=True)):
        if here > length or (cp_size == 1 and here != length):
            raise DataError(
                f"document_lengths[{document}]={length} but cu_seqlens gives {here} tokens on this rank: pass the lengths of "
                "whole documents, the same list on every cp rank"
            )


def document_sizes(
    copies: ScheduleCopies,
    live_rows: Sequence[Tensor],  # N
    document_lengths: Sequence[int] | None,
    token_counts: Tensor | None,  # [N]
    cp_group: Group,
    device: torch.device,
) -> tuple[list[int], Tensor | None]:
    """(rows of each document on the cp rank that holds most of it, token counts [N] over all cp ranks).

    Both are equal on all cp ranks. Under cp, document_lengths replace the sizes (as equal slices), without a synchronisation.
    Communication: one all-gather of [2, N] over cp unless lengths and counts are both given; none at size 1.
    """
    sizes = [rows.numel() for rows in live_rows]
    counts = [int(copies.loss_mask[start:stop].sum()) for start, stop in zip(copies.bounds[:-1], copies.bounds[1:], strict=True)]
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
