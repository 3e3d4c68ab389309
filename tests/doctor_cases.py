"""Machines that doctor is shown, as facts; nothing here is looked up on the machine that runs the test."""

from __future__ import annotations

from copy import deepcopy

from megatron_rl.hosts import ROLLOUT_HOST_NAMES

HERE = {"state": "here"}
ABSENT = {"state": "absent"}
EMPTY_ENGINE = {
    "state": "broken",
    "version": "2.9.0",
    "distributions": ["transformer-engine"],
    "error": "RuntimeError: Found empty `transformer-engine` meta package installed.",
}
WEB_TOOLKIT = {"state": "broken", "version": "0.9.10.dev0", "is_nvidia": False, "error": "ImportError: cannot import name ..."}

CPU_MACHINE = {
    "python": {"state": "here", "version": "3.11.9"},
    "machine": {"has_nvidia_device": False, "hides_devices": False, "interprets_triton": False},
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
        "compute": [],
        "archs": [],
    },
    "numpy": {**HERE, "version": "2.4.6"},
    "psutil": {**HERE, "version": "7.2.2"},
    "triton": {**HERE, "version": "3.9.0"},
    "transformer_engine": ABSENT,
    "flash_attn": ABSENT,
    "apex": ABSENT,
    "megatron": {**HERE, "version": "0.16.1", "has_training": False, "ratio": 1.0},
    **dict.fromkeys(ROLLOUT_HOST_NAMES, ABSENT),
}
CUDA_TORCH = {
    "cuda_build": "13.0",
    "has_cuda": True,
    "devices": ["NVIDIA H200"] * 2,
    "has_nccl": True,
    "nccl": "2.29.7",
    "compute": [[9, 0]] * 2,
    "archs": ["sm_80", "sm_90", "sm_100"],
}


def machine(base: dict = CPU_MACHINE, **changes: dict) -> dict:
    """A machine that differs in some packages: a dict without a state changes facts, one with a state replaces them."""
    facts = deepcopy(base)
    for name, change in changes.items():
        facts[name] = change if "state" in change else {**facts[name], **change}
    return facts


GPU_MACHINE = machine(torch=CUDA_TORCH, machine={"has_nvidia_device": True})
# The one of docs/doctor.md: what a pip install of wrong names leaves behind.
SICK_MACHINE = machine(apex=WEB_TOOLKIT, transformer_engine=EMPTY_ENGINE, psutil=ABSENT, triton=ABSENT)
