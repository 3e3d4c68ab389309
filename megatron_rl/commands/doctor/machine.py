"""What the facts of a machine mean: which packages are fit, and what does not work without the others. It never looks itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from megatron_rl.commands.doctor.report import ABSENT, NOTE, OK, PROBLEM, Finding
from megatron_rl.config import TRITON_OF_TORCH

PYTHON = "3.11"
MEGATRON_VERSIONS = ("0.16", "0.17", "0.18", "0.19", "0.20")
PROBE_TOLERANCE = 1e-4
# A package -> what is done without it.
WITHOUT = {
    "triton": "no kernels, --policy-loss-backend auto takes torch",
    "transformer_engine": "Megatron's own layers are used",
    "flash_attn": "Megatron's own attention is used",
    "apex": "torch's Adam is used",
    "psutil": "only Megatron's checkpoints need it",
}
# Broken, they stop nothing that runs on a CPU.
OF_CUDA = ("triton", "transformer_engine", "flash_attn", "apex")
Facts = Mapping[str, Mapping]


def findings(facts: Facts) -> list[Finding]:
    return [*_python(facts), *_torch(facts), *_megatron(facts), *_others(facts)]


def _python(facts: Facts) -> Iterator[Finding]:
    shown = facts["python"]["version"]
    is_old = version(shown) < version(PYTHON)
    yield Finding("python", PROBLEM if is_old else OK, f"{shown}: {PYTHON} or later is needed" if is_old else shown)


def _torch(facts: Facts) -> Iterator[Finding]:
    torch = facts["torch"]
    if torch["state"] == "absent":
        yield Finding("torch", PROBLEM, "not installed, and everything needs it: choose a build at https://pytorch.org")
        return
    if torch["state"] == "broken":
        yield Finding("torch", PROBLEM, f"broken import: {torch['error']}")
        return
    yield Finding("torch", OK, torch["version"])
    yield from _tested("torch", torch["version"], TRITON_OF_TORCH)
    yield from (*_cuda(torch, facts["machine"]), *_nccl(torch))


def _tested(name: str, shown: str, tested: Iterable[str]) -> Iterator[Finding]:
    if version(shown) not in map(version, tested):
        yield Finding(name, NOTE, f"{shown} is none of {', '.join(tested)}, which are tested: run megatron-rl selftest")


def _cuda(torch: Mapping, machine: Mapping) -> Iterator[Finding]:
    built = f"built for CUDA {torch['cuda_build']}" if torch["cuda_build"] else "built without CUDA"
    if torch["rocm_build"] and torch["has_cuda"]:
        yield Finding("cuda", NOTE, f"ROCm {torch['rocm_build']}: no kernels, --policy-loss-backend auto takes torch")
    elif torch["has_cuda"] and "cuda_error" not in torch:
        yield Finding("cuda", OK, f"{torch['cuda_build']}, {len(torch['devices'])} x {torch['devices'][0]}")
    elif machine["has_nvidia_device"]:
        why = torch.get("cuda_error", "install a CUDA build")
        yield Finding("cuda", PROBLEM, f"there is an NVIDIA device, and torch, {built}, cannot use it: {why}")
    else:
        yield Finding("cuda", ABSENT, f"no device; torch is {built}")


def _nccl(torch: Mapping) -> Iterator[Finding]:
    if torch["has_nccl"]:
        yield Finding("nccl", OK, torch["nccl"])
    elif torch["has_cuda"]:
        yield Finding("nccl", PROBLEM, "this torch is built without it: ranks on GPUs cannot talk; install a torch with NCCL")
    else:
        yield Finding("nccl", ABSENT, "ranks use gloo" if torch["has_gloo"] else "and no gloo: one rank only")


def _megatron(facts: Facts) -> Iterator[Finding]:
    megatron = facts["megatron"]
    if megatron["state"] == "absent":
        yield Finding("megatron", ABSENT, "not installed: no train, no checkpoints, no Megatron-LM, selftest of the losses alone")
        return
    if megatron["state"] == "broken":
        yield Finding("megatron", PROBLEM, f"broken import: {megatron['error']}")
        return
    yield Finding("megatron", OK, f"megatron-core {megatron['version']}")
    yield from _tested("megatron", megatron["version"], MEGATRON_VERSIONS)
    if "ratio" in megatron and abs(megatron["ratio"] - 1.0) <= PROBE_TOLERANCE:
        text = f"gradient x {megatron['ratio']:.6f} of one process; selftest measures it on your ranks"
        yield Finding("schedule", OK, text)
    else:
        yield Finding("schedule", PROBLEM, megatron.get("contract", f"gradient x {megatron.get('ratio')} of the step's"))


def _others(facts: Facts) -> Iterator[Finding]:
    has_cuda = facts["torch"].get("has_cuda") and not facts["torch"]["rocm_build"]
    for name, without in WITHOUT.items():
        package, subject = facts[name], name.replace("_", " ")
        if package["state"] == "broken":
            is_idle = name in OF_CUDA and not has_cuda
            yield Finding(subject, NOTE if is_idle else PROBLEM, f"broken import: {package['error']}")
        elif package["state"] == "here":
            yield Finding(subject, OK, package.get("version", ""))
        elif name == "triton" and has_cuda:
            yield Finding(subject, PROBLEM, "not installed, and the backend auto refuses CUDA without it: pip install triton")
        elif name == "psutil" and facts["megatron"]["state"] == "here":
            yield Finding(subject, PROBLEM, "not installed, and Megatron's checkpoints hang without it: pip install psutil")
        else:
            yield Finding(subject, ABSENT, f"not installed: {without}")
    if facts["triton"]["state"] == "here" and has_cuda:
        yield from _tested("triton", facts["triton"]["version"], dict.fromkeys(TRITON_OF_TORCH.values()))


def version(text: str) -> tuple[int, int]:
    """Major and minor, what follows does not matter; (0, 0) for what is no version."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
