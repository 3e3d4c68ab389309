"""Makes the process groups of a run: torch's, and Megatron-Core's parallel_state."""

from __future__ import annotations

import datetime
import os
import socket

import torch
import torch.distributed as dist

from megatron_rl.megatron.cpu import install_cpu_support, quiet_megatron

# A rank that waits longer for the others has lost one of them.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)
# The network interface of Linux that other machines cannot reach.
LOOPBACK = "lo"


def join_ranks() -> torch.device:
    """Makes the process group (NCCL with CUDA, else gloo) from torchrun's environment, or for one process. Returns its device.

    A single process listens only on the loopback address, so that other machines cannot reach it. It needs no Megatron.
    """
    store: dist.Store | None = None  # None and -1: torch reads the environment
    rank = world_size = -1
    if "RANK" not in os.environ:
        os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
        # torch's default store would listen on all interfaces.
        store, rank, world_size = dist.HashStore(), 0, 1
        if LOOPBACK in (name for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # No device_id: with it torch splits NCCL's subgroups from this group, and a rank outside one of Megatron's gloo groups
        # would wait in a split that the members of that group do not make.
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, store=store, rank=rank, world_size=world_size)
    return device


def initialize_ranks(
    *,
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    context_parallel_size: int,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    seed: int = 0,
) -> torch.device:
    """Makes the process group, as join_ranks, and parallel_state, from torchrun's environment or for one process.

    Without CUDA it installs the package's CPU support. Warnings of Megatron's and torch's modules are silent from here on. Returns
    the device of this rank. Communication: the making of groups.
    """
    quiet_megatron()
    device = join_ranks()
    if device.type == "cpu":
        torch.set_num_threads(1)
        install_cpu_support()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
    )
    model_parallel_cuda_manual_seed(seed + 1)
    return device
