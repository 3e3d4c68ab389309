"""Asks the installed Megatron-Core whether it adds the gradients of an expert's replicas on tensor-parallel ranks."""

from __future__ import annotations

from functools import cache

import torch


@cache
def expert_replicas_drift() -> bool:
    """Whether replicas of experts drift apart at tensor parallelism 2, expert parallelism 1 and expert tensor parallelism 1.

    Megatron adds the gradients of a parameter with `allreduce` over data-parallel ranks alone, of one without it over all ranks
    that hold the expert. Needs parallel_state, of any sizes.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=2,
        add_bias_linear=False,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_tensor_parallel_size=1,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
    )
    size = 16 * max(1, torch.distributed.get_world_size())  # a multiple of whatever shares an expert here
    layer = ColumnParallelLinear(8, size, config=config, init_method=torch.nn.init.zeros_, bias=False, is_expert=True)
    return bool(vars(layer.weight).get("allreduce", True))
