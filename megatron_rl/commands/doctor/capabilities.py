"""What of this package works on a machine and what does not, from the facts that were found; it never looks itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.commands.doctor.machine import INSTALL, Facts

YES, PARTLY, NO = "yes", "partly", "no"
SEE_ABOVE = {"absent": "{} is not installed", "broken": "{} is broken, see above"}


@dataclass(frozen=True, slots=True)
class Capability:
    name: str
    answer: str  # yes, partly, no
    why: str


def capabilities(facts: Facts) -> list[Capability]:
    """What of this package works here, and what does not and why."""
    torch = facts["torch"]
    if torch["state"] != "here":
        why = SEE_ABOVE[torch["state"]].format("torch")
        return [Capability("doctor", YES, ""), Capability("everything else", NO, why)]
    has_cuda = bool(torch["has_cuda"])
    is_interpreted = bool(facts["machine"]["interprets_triton"])
    return [
        Capability("losses, aggregations, fused head (torch)", YES, "on CUDA and on the CPU" if has_cuda else "on the CPU"),
        _triton_kernels(has_cuda, facts["triton"], is_interpreted),
        Capability("explain, launch-config, doctor", YES, "they need torch alone"),
        *_with_megatron(facts),
        _with_extras(facts),
        _hosts(facts),
        _named("pytest fixtures", facts, "pytest", "assert_layout_invariant, on gloo ranks", "pip install pytest"),
    ]


def _with_megatron(facts: Facts) -> list[Capability]:
    torch, megatron = facts["torch"], facts["megatron"]
    has_megatron = megatron["state"] == "here" and "ratio" in megatron
    without = INSTALL["megatron"] if megatron["state"] == "absent" else SEE_ABOVE["broken"].format("megatron-core")
    ranks = "gloo, any number of ranks on the CPU"
    if torch["has_cuda"]:
        ranks = f"NCCL, one rank on each of {len(torch['devices'])} devices"
    if not has_megatron:
        has_gloo = PARTLY if megatron["state"] == "absent" else NO
        alone = "the losses alone, without schedule, DDP and optimiser: " if has_gloo == PARTLY else ""
        return [
            Capability("train, make_forward_step", NO, without),
            Capability("selftest", has_gloo, alone + without),
            Capability("checkpoints", NO, without),
            Capability("Megatron-LM: call_pretrain", NO, without),
        ]
    has_psutil = facts["psutil"]["state"] == "here"
    return [
        Capability("train, make_forward_step", YES, ranks),
        Capability("selftest", YES, ranks),
        Capability("checkpoints", YES if has_psutil else NO, "" if has_psutil else INSTALL["psutil"]),
        Capability(
            "Megatron-LM: call_pretrain",
            YES if megatron["has_training"] else NO,
            "" if megatron["has_training"] else "megatron.training is not here: run from a checkout of Megatron-LM",
        ),
    ]


def _with_extras(facts: Facts) -> Capability:
    missing = [name for name in ("rich", "matplotlib", "tensorboard") if facts[name]["state"] != "here"]
    answer = PARTLY if 0 < len(missing) < 3 else NO if missing else YES
    return Capability(
        "progress bar, plots, TensorBoard",
        answer,
        f"without {', '.join(missing)}: pip install 'megatron_rl[train]'" if missing else "",
    )


def _hosts(facts: Facts) -> Capability:
    hosts = [name for name in ("miles", "slime") if facts[name]["state"] == "here"]
    found, missing = f"{' and '.join(hosts)} can be imported", "neither can be imported from here: run from a checkout of theirs"
    return Capability("miles and slime: hosts.launch", YES if hosts else NO, found if hosts else missing)


def _named(name: str, facts: Facts, package: str, with_it: str, remedy: str) -> Capability:
    is_here = facts[package]["state"] == "here"
    return Capability(name, YES if is_here else NO, with_it if is_here else remedy)


def _triton_kernels(has_cuda: bool, triton: Mapping, is_interpreted: bool) -> Capability:
    name = "Triton kernels"
    if triton["state"] != "here":
        return Capability(name, NO, SEE_ABOVE[triton["state"]].format("Triton"))
    if has_cuda:
        return Capability(name, YES, "taken by --policy-loss-backend auto")
    if is_interpreted:
        return Capability(name, PARTLY, "interpreted, because TRITON_INTERPRET is set: for tests")
    return Capability(name, NO, "no CUDA: auto takes torch; TRITON_INTERPRET=1 interprets them in tests")
