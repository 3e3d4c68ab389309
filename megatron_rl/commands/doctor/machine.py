"""What the facts of a machine mean: which packages are fit, what to do about the others, and what of this package works. It never
looks itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from megatron_rl.commands.doctor.report import ABSENT, NOTE, OK, PROBLEM, Capability, Finding
from megatron_rl.hosts import ROLLOUT_HOST_NAMES

PYTHON = (3, 11)
PROBE_TOLERANCE = 1e-4
MEGATRON_VERSIONS = ((0, 13), (0, 19))
# The interpreter of earlier ones fails on loops with this numpy.
INTERPRETER_VERSION, INTERPRETER_NUMPY = (3, 7), (2, 4)
REQUIRABLE = ("cuda", "megatron", "nccl", "psutil", "transformer_engine", "apex", "triton", "numpy")
INSTALL = {
    "megatron": "pip install 'megatron_rl[megatron]'",
    "psutil": "pip install psutil",
    "triton": "pip install 'megatron_rl[triton]'",
    "numpy": "pip install numpy",
    "transformer_engine": "install NVIDIA's build: pip install 'transformer-engine[pytorch]' beside a CUDA toolkit",
    "apex": "build https://github.com/NVIDIA/apex",
}
Facts = Mapping[str, Mapping]


def findings(facts: Facts, required: frozenset[str] = frozenset()) -> list[Finding]:
    """In the order of this file; what is `required` and absent is a problem."""
    return [_required(finding) if _key(finding) in required else finding for judge in JUDGES for finding in judge(facts)]


def _key(finding: Finding) -> str:
    return finding.subject.replace(" ", "_")


def _required(finding: Finding) -> Finding:
    if finding.status != ABSENT:
        return finding
    remedy = INSTALL.get(_key(finding))
    return Finding(finding.subject, PROBLEM, f"{finding.text}, and --require asks for it" + (f": {remedy}" if remedy else ""))


def _python(facts: Facts) -> Iterator[Finding]:
    shown = str(facts["python"]["version"])
    if version(shown) < PYTHON:
        yield Finding("python", PROBLEM, f"{shown}: megatron_rl needs {'.'.join(map(str, PYTHON))} or later")
    else:
        yield Finding("python", OK, shown)


def _torch(facts: Facts) -> Iterator[Finding]:
    torch = facts["torch"]
    if torch["state"] == "here":
        yield Finding("torch", OK, f"{torch['version']}")
    elif torch["state"] == "absent":
        yield Finding("torch", PROBLEM, "not installed, and everything needs it: choose a build at https://pytorch.org")
    else:
        text = f"cannot be imported: {torch['error']}; reinstall it: a library is missing, or another torch's is in its place"
        yield Finding("torch", PROBLEM, text)


def _cuda(facts: Facts) -> Iterator[Finding]:
    torch, machine = facts["torch"], facts["machine"]
    built = torch.get("cuda_build")
    if torch["state"] != "here":
        return
    if torch["has_cuda"]:
        devices, archs = torch["devices"], torch["archs"]
        yield Finding("cuda", OK, f"{built}, {len(devices)} x {devices[0]}")
        unfit = sorted({name for name, at in zip(devices, torch["compute"], strict=True) if not has_kernels(at, archs)})
        if unfit:
            text = f"this torch has no kernels for {', '.join(unfit)}, only {', '.join(archs)}: install a newer build"
            yield Finding("cuda", PROBLEM, text)
    elif not machine["has_nvidia_device"] or machine["hides_devices"]:
        yield Finding("cuda", ABSENT, f"no device; torch is built {f'for CUDA {built}' if built else 'without it'}")
    elif not built:
        text = "there is an NVIDIA device and this torch is built without CUDA: install a CUDA build"
        yield Finding("cuda", PROBLEM, text)
    else:
        why = f" ({torch['cuda_error']})" if torch.get("cuda_error") else ""
        remedy = "the driver is older than that CUDA, or the device is taken"
        yield Finding("cuda", PROBLEM, f"there is an NVIDIA device and torch for CUDA {built} cannot use it{why}: {remedy}")


def has_kernels(compute: Sequence[int], archs: Sequence[str]) -> bool:
    """sm_ runs on the same major version from its own minor on, compute_ is compiled for anything later; sm_90a and compute_90a are
    for 9.0 alone. A build that does not say has them."""
    major, minor = compute
    for arch in archs:
        kind, _, digits = arch.partition("_")
        number = int(re.sub(r"\D", "", digits) or 0)
        if digits.endswith("a") and number != 10 * major + minor:
            continue
        if number <= 10 * major + minor and (kind == "compute" or number // 10 == major):
            return True
    return not archs


def _nccl(facts: Facts) -> Iterator[Finding]:
    torch = facts["torch"]
    if torch["state"] != "here":
        return
    if not torch["has_cuda"]:
        yield Finding("nccl", ABSENT, "ranks use gloo" if torch["has_gloo"] else "and no gloo: one rank only")
    elif torch["has_nccl"]:
        yield Finding("nccl", OK, str(torch["nccl"]))
    else:
        yield Finding("nccl", PROBLEM, "this torch is built without it: ranks on GPUs cannot talk; install a torch with NCCL")


def _triton(facts: Facts) -> Iterator[Finding]:
    triton, numpy, has_cuda = facts["triton"], facts["numpy"], bool(facts["torch"].get("has_cuda"))
    if triton["state"] == "here":
        yield Finding("triton", OK, str(triton["version"]))
        is_old = version(triton["version"]) < INTERPRETER_VERSION and version(numpy.get("version", "0")) >= INTERPRETER_NUMPY
        if not has_cuda and is_old:
            text = "its interpreter fails on loops with numpy 2.4: pip install 'triton>=3.7' to test kernels"
            yield Finding("triton", NOTE, text)
        if has_cuda and facts["machine"]["interprets_triton"]:
            text = "TRITON_INTERPRET is set: kernels would run in the interpreter, 1000 times slower; unset it"
            yield Finding("triton", PROBLEM, text)
    elif triton["state"] == "broken":
        status = PROBLEM if has_cuda else NOTE
        yield Finding("triton", status, f"cannot be imported ({triton['error']}): install the one of this torch")
    elif has_cuda:
        text = "not installed: --policy-loss-backend auto refuses CUDA without it; install the one of this torch, or pass torch"
        yield Finding("triton", PROBLEM, text)
    else:
        yield Finding("triton", ABSENT, "not installed")


def _megatron(facts: Facts) -> Iterator[Finding]:
    megatron = facts["megatron"]
    shown, (low, high) = megatron.get("version", ""), MEGATRON_VERSIONS
    if megatron["state"] == "absent":
        yield Finding("megatron", ABSENT, "not installed")
        return
    if megatron["state"] == "broken":
        yield Finding("megatron", PROBLEM, f"megatron-core {shown} cannot be used: {megatron['error']}")
        return
    training = "with" if megatron["has_training"] else "without"
    yield Finding("megatron", OK, f"megatron-core {shown}, {training} megatron.training")
    if not low <= version(shown) <= high:
        text = f"{shown} is outside 0.13 to 0.19, which are tested; the probe below and at start decide"
        yield Finding("megatron", NOTE, text)
    if "ratio" not in megatron or abs(megatron["ratio"] - 1.0) > PROBE_TOLERANCE:
        yield Finding("schedule", PROBLEM, megatron.get("contract", f"gradient x {megatron.get('ratio')} of the step's"))
    else:
        text = f"gradient x {megatron['ratio']:.6f} of one process; selftest measures it on your ranks"
        yield Finding("schedule", OK, text)


def _transformer_engine(facts: Facts) -> Iterator[Finding]:
    subject, engine = "transformer engine", facts["transformer_engine"]
    shown, error = engine.get("version", ""), engine.get("error", "")
    # PyPI's brings no distribution but its own and refuses to be imported; a build that lacks a library raises OSError.
    is_alone = engine.get("distributions", []) in ([], ["transformer-engine"])
    if engine["state"] == "here":
        yield Finding(subject, OK, str(shown))
    elif engine["state"] == "absent":
        yield Finding(subject, ABSENT, "not installed: Megatron's own layers are used")
    elif is_alone and error.startswith(("RuntimeError", "AssertionError")):
        text = (
            f"{shown} is PyPI's empty meta package ({error.partition(':')[0]} at import): every `import megatron.core.models` "
            f"outside our commands dies with it; pip uninstall transformer-engine, or {INSTALL['transformer_engine']}"
        )
        yield Finding(subject, PROBLEM, text.strip())
    elif facts["torch"].get("has_cuda"):
        yield Finding(subject, PROBLEM, f"cannot be imported ({error}): megatron.core dies with it; reinstall it")
    else:
        text = f"needs CUDA ({error}): our commands hide it from Megatron, an import of your own may die with it"
        yield Finding(subject, NOTE, text)


def _apex(facts: Facts) -> Iterator[Finding]:
    apex = facts["apex"]
    if apex["state"] == "absent":
        # Megatron's optimiser tries Transformer Engine's Adam first, then apex's, then torch's.
        adam = "Transformer Engine's" if facts["transformer_engine"]["state"] == "here" else "torch's"
        yield Finding("apex", ABSENT, f"not installed: {adam} Adam is used")
    elif not apex.get("is_nvidia"):
        text = (
            f"{apex.get('version', '')} is the web toolkit of that name from PyPI, not NVIDIA's: whoever looks for apex finds it "
            f"and nothing in it; pip uninstall apex, or {INSTALL['apex']}"
        )
        yield Finding("apex", PROBLEM, text.strip())
    elif apex["state"] == "broken":
        yield Finding("apex", PROBLEM, f"cannot be imported ({apex['error']}): rebuild it for this torch, or uninstall it")
    else:
        yield Finding("apex", OK, str(apex.get("version", "")))


def _numpy(facts: Facts) -> Iterator[Finding]:
    numpy, unfit = facts["numpy"], facts["torch"].get("numpy_error")
    if numpy["state"] == "here" and unfit:
        text = f"{numpy['version']}, which this torch cannot use ({unfit}): pip install 'numpy<2', or a newer torch"
        yield Finding("numpy", PROBLEM, text)
    elif numpy["state"] == "here":
        yield Finding("numpy", OK, str(numpy["version"]))
    elif numpy["state"] == "broken":
        yield Finding("numpy", PROBLEM, f"cannot be imported ({numpy['error']}): pip install --force-reinstall numpy")
    else:
        yield Finding("numpy", ABSENT, "not installed")


def _psutil(facts: Facts) -> Iterator[Finding]:
    """FB-78: dist_checkpointing's writers need it, do not say so, and hang."""
    psutil = facts["psutil"]
    if psutil["state"] == "here":
        yield Finding("psutil", OK, str(psutil["version"]))
    elif facts["megatron"]["state"] != "absent" or psutil["state"] == "broken":
        why = f"cannot be imported ({psutil['error']})" if psutil["state"] == "broken" else "not installed"
        text = f"{why}: Megatron's checkpoints need it, do not say so and hang for ever; {INSTALL['psutil']}"
        yield Finding("psutil", PROBLEM, text)
    else:
        yield Finding("psutil", ABSENT, "not installed")


JUDGES = (_python, _torch, _cuda, _nccl, _triton, _megatron, _transformer_engine, _apex, _numpy, _psutil)


def version(text: str) -> tuple[int, int]:
    """Major and minor, what follows does not matter; (0, 0) for what is no version."""
    match = re.match(r"(\d+)\.(\d+)", str(text))
    return (int(match[1]), int(match[2])) if match else (0, 0)


# What of this package works

YES, PARTLY, NO = "yes", "partly", "no"
SEE_ABOVE = {"absent": "{} is not installed", "broken": "{} is broken, see above"}


def capabilities(facts: Facts) -> list[Capability]:
    """What of this package works here, and what does not and why."""
    torch = facts["torch"]
    if torch["state"] != "here":
        why = SEE_ABOVE[torch["state"]].format("torch")
        return [Capability("doctor", YES, ""), Capability("everything else", NO, why)]
    has_cuda, is_here = torch["has_cuda"], {name for name, fact in facts.items() if fact.get("state") == "here"}
    hosts = [name for name in ROLLOUT_HOST_NAMES if name in is_here]
    missing = [name for name in ("rich", "matplotlib", "tensorboard") if name not in is_here]
    found, absent = f"{' and '.join(hosts)} can be imported", "neither can be imported from here: run from a checkout of theirs"
    return [
        Capability("losses, aggregations, fused head (torch)", YES, "on CUDA and on the CPU" if has_cuda else "on the CPU"),
        Capability("Triton kernels", *_kernels(facts)),
        Capability("explain, launch-config, doctor", YES, "they need torch alone"),
        *_with_megatron(facts),
        Capability(
            "progress bar, plots, TensorBoard",
            {0: YES, 3: NO}.get(len(missing), PARTLY),
            f"without {', '.join(missing)}: pip install 'megatron_rl[train]'" if missing else "",
        ),
        Capability("miles and slime: hosts.launch", YES if hosts else NO, found if hosts else absent),
        Capability("pytest fixtures", YES, "assert_layout_invariant, on gloo ranks")
        if "pytest" in is_here
        else Capability("pytest fixtures", NO, "pip install pytest"),
    ]


def _with_megatron(facts: Facts) -> Iterator[Capability]:
    torch, megatron = facts["torch"], facts["megatron"]
    is_absent, has_psutil = megatron["state"] == "absent", facts["psutil"]["state"] == "here"
    if megatron["state"] == "here" and "ratio" in megatron:
        on_cpu = "gloo, any number of ranks on the CPU"
        ranks = f"NCCL, one rank on each of {len(torch['devices'])} devices" if torch["has_cuda"] else on_cpu
        has_training, elsewhere = megatron["has_training"], "megatron.training is not here: run from a checkout of Megatron-LM"
        yield Capability("train, make_forward_step", YES, ranks)
        yield Capability("selftest", YES, ranks)
        yield Capability("checkpoints", YES if has_psutil else NO, "" if has_psutil else INSTALL["psutil"])
        yield Capability("Megatron-LM: call_pretrain", YES if has_training else NO, "" if has_training else elsewhere)
        return
    why = INSTALL["megatron"] if is_absent else SEE_ABOVE["broken"].format("megatron-core")
    alone = "the losses alone, without schedule, DDP and optimiser: " if is_absent else ""
    yield Capability("train, make_forward_step", NO, why)
    yield Capability("selftest", PARTLY if is_absent else NO, alone + why)
    yield Capability("checkpoints", NO, why)
    yield Capability("Megatron-LM: call_pretrain", NO, why)


def _kernels(facts: Facts) -> tuple[str, str]:
    """Of Triton: (answer, why)."""
    if facts["triton"]["state"] != "here":
        return NO, SEE_ABOVE[facts["triton"]["state"]].format("Triton")
    if facts["torch"]["has_cuda"]:
        return YES, "taken by --policy-loss-backend auto"
    if facts["machine"]["interprets_triton"]:
        return PARTLY, "interpreted, because TRITON_INTERPRET is set: for tests"
    return NO, "no CUDA: auto takes torch; TRITON_INTERPRET=1 interprets them in tests"
