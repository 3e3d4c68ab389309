"""Machines that doctor is shown, as facts; nothing here is looked up on the machine that runs the test."""

from __future__ import annotations

from copy import deepcopy

HERE = {"state": "here"}
ABSENT = {"state": "absent"}
BROKEN = {"state": "broken", "error": "OSError: y"}
CPU_MACHINE = {
    "python": {"version": "3.11.9"},
    "machine": {"has_nvidia_device": False},
    "torch": {
        **HERE,
        "version": "2.13.0+cpu",
        "cuda_build": None,
        "rocm_build": None,
        "has_cuda": False,
        "devices": [],
        "has_nccl": False,
        "has_gloo": True,
        "nccl": None,
    },
    "psutil": {**HERE, "version": "7.2.2"},
    "triton": {**HERE, "version": "3.9.0"},
    "transformer_engine": ABSENT,
    "flash_attn": ABSENT,
    "apex": ABSENT,
    "megatron": {**HERE, "version": "0.16.1", "ratio": 1.0},
}
CUDA_TORCH = {
    "cuda_build": "13.0",
    "has_cuda": True,
    "devices": ["NVIDIA H200"] * 2,
    "has_nccl": True,
    "nccl": "2.29.7",
}


def machine(base: dict = CPU_MACHINE, **changes: dict) -> dict:
    """A machine that differs in some packages: a dict without a state changes facts, one with a state replaces them."""
    facts = deepcopy(base)
    for name, change in changes.items():
        facts[name] = change if "state" in change else {**facts[name], **change}
    return facts


GPU_MACHINE = machine(torch=CUDA_TORCH, machine={"has_nvidia_device": True})
# The one of docs/tools.md.
SICK_MACHINE = machine(
    GPU_MACHINE,
    flash_attn={"state": "broken", "error": "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEa"},
    psutil=ABSENT,
    transformer_engine={**HERE, "version": "2.9.0"},
    triton={**HERE, "version": "3.7.0"},
)
