"""Says which rank owns which tokens: process groups, packed documents, context-parallel slices. It computes no loss."""

from __future__ import annotations

from megatron_rl.layout.context_parallel import local_cu_seqlens, local_positions, response_spans, slice_response
from megatron_rl.layout.groups import SINGLE, ParallelGroups, document_ids, document_sums, resolve_group, resolve_groups

__all__ = [
    "SINGLE",
    "ParallelGroups",
    "document_ids",
    "document_sums",
    "local_cu_seqlens",
    "local_positions",
    "resolve_group",
    "resolve_groups",
    "response_spans",
    "slice_response",
]
