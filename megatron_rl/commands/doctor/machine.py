"""What the facts of a machine mean: which packages are fit, and what to do about those that are not. It never looks itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron_rl.commands.doctor.findings import ABSENT, NOTE, OK, PROBLEM, Finding

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
JUDGES: list[Callable[[Facts], Iterator[Finding]]] = []


def judge(function: Callable[[Facts], Iterator[Finding]]):
    JUDGES.append(function)
    return function


def findings(facts: Facts, required: frozenset[str] = frozenset()) -> list[Finding]:
    """In the order of this file; what is `required` and absent is a problem."""
    found = [finding for judge_one in JUDGES for finding in judge_one(facts)]
    return [_required(finding) if finding.subject.replace(" ", "_") in required else finding for finding in found]


def _required(finding: Finding) -> Finding:
    if finding.status != ABSENT:
        return finding
    remedy = INSTALL.get(finding.subject.replace(" ", "_"))
    return Finding(finding.subject, PROBLEM, f"{finding.text}, and --require asks for it" + (f": {remedy}" if remedy else ""))


@judge
def _python(facts: Facts) -> Iterator[Finding]:
    shown = str(facts["python"]["version"])
    if version(shown) < PYTHON:
        yield Finding("python", PROBLEM, f"{shown}: megatron_rl needs {'.'.join(map(str, PYTHON))} or later")
    else:
        yield Finding("python", OK, shown)


@judge
def _torch(facts: Facts) -> Iterator[Finding]:
    torch = facts["torch"]
    if torch["state"] == "here":
        yield Finding("torch", OK, f"{torch['version']}")
    elif torch["state"] == "absent":
        yield Finding("torch", PROBLEM, "not installed, and everything needs it: choose a build at https://pytorch.org")
    else:
        text = f"cannot be imported: {torch['error']}; reinstall it: a library is missing, or another torch's is in its place"
        yield Finding("torch", PROBLEM, text)


@judge
def _cuda(facts: Facts) -> Iterator[Finding]:
    torch, machine = facts["torch"], facts["machine"]
    built = torch.get("cuda_build")
    if torch["state"] != "here":
        return
    if torch["has_cuda"]:
        devices = torch["devices"]
        yield Finding("cuda", OK, f"{built}, {len(devices)} x {devices[0]}")
        unfit = sorted({name for name, at in zip(devices, torch["compute"], strict=True) if not has_kernels(at, torch["archs"])})
        if unfit:
            text = f"this torch has no kernels for {', '.join(unfit)}, only {', '.join(torch['archs'])}: install a newer build"
            yield Finding("cuda", PROBLEM, text)
    elif machine["has_nvidia_device"] and not machine["hides_devices"]:
        if not built:
            text = "there is an NVIDIA device and this torch is built without CUDA: install a CUDA build"
        else:
            why = f" ({torch['cuda_error']})" if torch.get("cuda_error") else ""
            remedy = "the driver is older than that CUDA, or the device is taken"
            text = f"there is an NVIDIA device and torch for CUDA {built} cannot use it{why}: {remedy}"
        yield Finding("cuda", PROBLEM, text)
    else:
        yield Finding("cuda", ABSENT, f"no device; torch is built {f'for CUDA {built}' if built else 'without it'}")


def has_kernels(compute: Sequence[int], archs: Sequence[str]) -> bool:
    """sm_ runs on the same major version from its own minor on, compute_ is compiled for anything later; sm_90a and compute_90a are
    for 9.0 alone."""
    if not archs:  # a build that does not say
        return True
    major, minor = compute
    for arch in archs:
        kind, _, digits = arch.partition("_")
        number = int(re.sub(r"\D", "", digits) or 0)
        if digits.endswith("a") and number != 10 * major + minor:
            continue
        if kind == "compute" and number <= 10 * major + minor:
            return True
        if kind != "compute" and number // 10 == major and number % 10 <= minor:
            return True
    return False


@judge
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


@judge
def _triton(facts: Facts) -> Iterator[Finding]:
    triton, torch, numpy = facts["triton"], facts["torch"], facts["numpy"]
    has_cuda = bool(torch.get("has_cuda"))
    if triton["state"] == "here":
        yield Finding("triton", OK, str(triton["version"]))
        is_old = version(triton["version"]) < INTERPRETER_VERSION and version(numpy.get("version", "0")) >= INTERPRETER_NUMPY
        if not has_cuda and is_old:
            yield Finding(
                "triton", NOTE, "its interpreter fails on loops with numpy 2.4: pip install 'triton>=3.7' to test kernels"
            )
        if has_cuda and facts["machine"]["interprets_triton"]:
            yield Finding(
                "triton", PROBLEM, "TRITON_INTERPRET is set: kernels would run in the interpreter, 1000 times slower; unset it"
            )
    elif triton["state"] == "broken":
        yield Finding(
            "triton", PROBLEM if has_cuda else NOTE, f"cannot be imported ({triton['error']}): install the one of this torch"
        )
    elif has_cuda:
        text = "not installed: --policy-loss-backend auto refuses CUDA without it; install the one of this torch, or pass torch"
        yield Finding("triton", PROBLEM, text)
    else:
        yield Finding("triton", ABSENT, "not installed")


@judge
def _megatron(facts: Facts) -> Iterator[Finding]:
    megatron = facts["megatron"]
    if megatron["state"] == "absent":
        yield Finding("megatron", ABSENT, "not installed")
        return
    shown = megatron.get("version", "")
    if megatron["state"] == "broken":
        yield Finding("megatron", PROBLEM, f"megatron-core {shown} cannot be used: {megatron['error']}")
        return
    low, high = MEGATRON_VERSIONS
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


@judge
def _transformer_engine(facts: Facts) -> Iterator[Finding]:
    engine, has_cuda = facts["transformer_engine"], bool(facts["torch"].get("has_cuda"))
    if engine["state"] == "here":
        yield Finding("transformer engine", OK, str(engine.get("version", "")))
    elif engine["state"] == "absent":
        yield Finding("transformer engine", ABSENT, "not installed: Megatron's own layers are used")
    elif is_meta_package(engine):
        text = (
            f"{engine.get('version', '')} is PyPI's empty meta package ({engine['error'].partition(':')[0]} at import): every "
            "`import megatron.core.models` outside our commands dies with it; pip uninstall transformer-engine, or "
            f"{INSTALL['transformer_engine']}"
        )
        yield Finding("transformer engine", PROBLEM, text.strip())
    elif has_cuda:
        yield Finding(
            "transformer engine", PROBLEM, f"cannot be imported ({engine['error']}): megatron.core dies with it; reinstall it"
        )
    else:
        text = f"needs CUDA ({engine['error']}): our commands hide it from Megatron, an import of your own may die with it"
        yield Finding("transformer engine", NOTE, text)


def is_meta_package(engine: Mapping) -> bool:
    """PyPI's brings no distribution but its own and refuses to be imported; a build that lacks a library raises OSError."""
    is_alone = engine.get("distributions", []) in ([], ["transformer-engine"])
    return is_alone and engine["error"].startswith(("RuntimeError", "AssertionError"))


@judge
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


@judge
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


@judge
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


def version(text: str) -> tuple[int, int]:
    """Major and minor, what follows does not matter; (0, 0) for what is no version."""
    match = re.match(r"(\d+)\.(\d+)", str(text))
    return (int(match[1]), int(match[2])) if match else (0, 0)
