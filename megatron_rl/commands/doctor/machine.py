"""What the facts of a machine mean: which packages are fit, what does not work without the others, and what to do. It never looks
itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from megatron_rl.commands.doctor.report import ABSENT, NOTE, OK, PROBLEM, Finding
from megatron_rl.config import TRITON_OF_TORCH
from megatron_rl.hosts import ROLLOUT_HOST_NAMES

PYTHON = (3, 11)
PROBE_TOLERANCE = 1e-4
MEGATRON_VERSIONS = ((0, 13), (0, 19))
TORCH_VERSIONS = ("2.11", "2.13", "2.14")
# The interpreter of earlier ones fails on loops with this numpy.
INTERPRETER_VERSION, INTERPRETER_NUMPY = (3, 7), (2, 4)
Facts = Mapping[str, Mapping]


def findings(facts: Facts) -> list[Finding]:
    """In the order of this file."""
    return [finding for judge in JUDGES for finding in judge(facts)]


def _package(
    name: str, facts: Facts, remedy: str, *, absent: tuple[str, str] = (ABSENT, "not installed"), broken: str = PROBLEM
) -> Finding:
    """What each package has to say. absent: status and text; remedy, broken: of one that is there and cannot be imported."""
    package, subject = facts[name], name.replace("_", " ")
    if package["state"] == "broken":
        return Finding(subject, broken, f"cannot be imported ({package['error']}): {remedy}")
    return Finding(subject, *(absent if package["state"] == "absent" else (OK, str(package.get("version", "")))))


def _python(facts: Facts) -> Iterator[Finding]:
    shown = str(facts["python"]["version"])
    is_old = version(shown) < PYTHON
    text = f"{shown}: megatron_rl needs {'.'.join(map(str, PYTHON))} or later" if is_old else shown
    yield Finding("python", PROBLEM if is_old else OK, text)


def _torch(facts: Facts) -> Iterator[Finding]:
    absent = (PROBLEM, "not installed, and everything needs it: choose a build at https://pytorch.org")
    yield _package("torch", facts, "reinstall it: a library is missing, or another torch's is in its place", absent=absent)
    if facts["torch"]["state"] == "here":
        shown = facts["torch"]["version"]
        if version(shown) not in map(version, TORCH_VERSIONS):
            text = f"{shown} is none of {', '.join(TORCH_VERSIONS)}, which are tested; megatron-rl selftest measures it"
            yield Finding("torch", NOTE, text)
        is_cuda = facts["torch"]["has_cuda"] and not facts["torch"]["rocm_build"]
        if is_cuda:
            yield from _outside("torch", facts["torch"], [*TRITON_OF_TORCH])
        yield from (*_cuda(facts["torch"], facts["machine"]), *_nccl(facts["torch"]))


def _outside(name: str, package: Mapping, tested: Sequence[str]) -> Iterator[Finding]:
    """What the kernels have never been compiled with. An older one is a problem, because `auto` takes them on CUDA."""
    oldest, newest = (f(tested, key=version) for f in (min, max))
    shown, why = package["version"], f"the kernels are compiled in tests for {name} {oldest} to {newest}"
    if version(shown) < version(oldest):
        remedy = "install torch 2.8 or later, which brings its Triton, or pass --policy-loss-backend torch"
        yield Finding(name, PROBLEM, f"{shown} is older than {oldest}, and {why}: {remedy}")
    if version(shown)[:2] > version(newest):
        remedy = "megatron-rl selftest shows whether they run; --policy-loss-backend torch needs none"
        yield Finding(name, NOTE, f"{shown} is newer than {newest}, and {why}: {remedy}")


def _cuda(torch: Mapping, machine: Mapping) -> Iterator[Finding]:
    built = torch["cuda_build"]
    if torch["rocm_build"] and torch["has_cuda"]:
        text = f"ROCm {torch['rocm_build']}, {len(torch['devices'])} x {torch['devices'][0]}: no kernels, auto takes torch"
        yield Finding("cuda", NOTE, text)
    elif torch["has_cuda"]:
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


def _nccl(torch: Mapping) -> Iterator[Finding]:
    if not torch["has_cuda"]:
        yield Finding("nccl", ABSENT, "ranks use gloo" if torch["has_gloo"] else "and no gloo: one rank only")
    elif torch["has_nccl"]:
        yield Finding("nccl", OK, str(torch["nccl"]))
    else:
        yield Finding("nccl", PROBLEM, "this torch is built without it: ranks on GPUs cannot talk; install a torch with NCCL")


def _triton(facts: Facts) -> Iterator[Finding]:
    triton, numpy, torch = facts["triton"], facts["numpy"], facts["torch"]
    has_cuda = bool(torch.get("has_cuda")) and not torch.get("rocm_build")
    refused = "not installed: --policy-loss-backend auto refuses CUDA without it; install the one of this torch, or pass torch"
    absent = (PROBLEM, refused) if has_cuda else (ABSENT, "not installed: no kernels, auto takes torch")
    yield _package("triton", facts, "install the one of this torch", absent=absent, broken=PROBLEM if has_cuda else NOTE)
    if triton["state"] != "here":
        return
    if has_cuda:
        yield from _outside("triton", triton, [*TRITON_OF_TORCH.values()])
    is_old = version(triton["version"]) < INTERPRETER_VERSION and version(numpy.get("version", "0")) >= INTERPRETER_NUMPY
    if not has_cuda and is_old:
        text = "its interpreter fails on loops with numpy 2.4: pip install 'triton>=3.7' to test kernels"
        yield Finding("triton", NOTE, text)
    if has_cuda and facts["machine"]["interprets_triton"]:
        text = "TRITON_INTERPRET is set: kernels would run in the interpreter, 1000 times slower; unset it"
        yield Finding("triton", PROBLEM, text)


def _megatron(facts: Facts) -> Iterator[Finding]:
    megatron = facts["megatron"]
    shown, (low, high) = megatron.get("version", ""), MEGATRON_VERSIONS
    if megatron["state"] == "absent":
        yield Finding("megatron", ABSENT, "not installed: no train, no checkpoints, no Megatron-LM, selftest of the losses alone")
        return
    if megatron["state"] == "broken":
        yield Finding("megatron", PROBLEM, f"megatron-core {shown} cannot be used: {megatron['error']}")
        return
    training = "with megatron.training" if megatron["has_training"] else "alone: Megatron-LM's own scripts need its checkout"
    yield Finding("megatron", OK, f"megatron-core {shown}, {training}")
    if not low <= version(shown) <= high:
        text = f"{shown} is outside 0.13 to 0.19, which are tested; the probe below and at start decide"
        yield Finding("megatron", NOTE, text)
    if "ratio" not in megatron or abs(megatron["ratio"] - 1.0) > PROBE_TOLERANCE:
        yield Finding("schedule", PROBLEM, megatron.get("contract", f"gradient x {megatron.get('ratio')} of the step's"))
    else:
        text = f"gradient x {megatron['ratio']:.6f} of one process; selftest measures it on your ranks"
        yield Finding("schedule", OK, text)
    if megatron.get("replicas_drift"):
        text = (
            "with tensor parallelism and one expert-parallel and expert-tensor-parallel rank this Megatron-Core does not add the "
            "gradients of an expert's replicas, which drift apart: such a launch is refused"
        )
        yield Finding("experts", NOTE, text)


def _transformer_engine(facts: Facts) -> Iterator[Finding]:
    engine = facts["transformer_engine"]
    error, has_cuda = engine.get("error", ""), facts["torch"].get("has_cuda")
    # PyPI's brings no distribution but its own and refuses to be imported; a build that lacks a library raises OSError.
    is_alone = engine.get("distributions", []) in ([], ["transformer-engine"])
    absent = (ABSENT, "not installed: Megatron's own layers are used")
    found = _package("transformer_engine", facts, "megatron.core dies with it; reinstall it", absent=absent)
    if engine["state"] == "broken" and is_alone and error.startswith(("RuntimeError", "AssertionError")):
        text = (
            f"{engine.get('version', '')} is PyPI's empty meta package ({error.partition(':')[0]} at import): every `import "
            "megatron.core.models` outside our commands dies with it; pip uninstall transformer-engine, or install NVIDIA's build: "
            "pip install 'transformer-engine[pytorch]' beside a CUDA toolkit"
        )
        found = Finding(found.subject, PROBLEM, text.strip())
    elif engine["state"] == "broken" and not has_cuda:
        text = f"needs CUDA ({error}): our commands hide it from Megatron, an import of your own may die with it"
        found = Finding(found.subject, NOTE, text)
    yield found


def _flash_attn(facts: Facts) -> Iterator[Finding]:
    """Built for one torch: beside another its library lacks symbols."""
    has_cuda = facts["torch"].get("has_cuda")
    remedy = (
        "Transformer Engine and transformers die with it, and Megatron then goes on without Transformer Engine; build it for this "
        "torch: pip install --no-build-isolation --force-reinstall --no-deps flash-attn, or pip uninstall flash-attn"
    )
    absent = (ABSENT, "not installed: Megatron's own attention is used, or Transformer Engine's")
    yield _package("flash_attn", facts, remedy, absent=absent, broken=PROBLEM if has_cuda else NOTE)


def _apex(facts: Facts) -> Iterator[Finding]:
    apex = facts["apex"]
    if apex["state"] != "absent" and not apex.get("is_nvidia"):
        text = (
            f"{apex.get('version', '')} is the web toolkit of that name from PyPI, not NVIDIA's: whoever looks for apex finds it "
            "and nothing in it; pip uninstall apex, or build https://github.com/NVIDIA/apex"
        )
        yield Finding("apex", PROBLEM, text.strip())
        return
    # Megatron's optimiser tries Transformer Engine's Adam first, then apex's, then torch's.
    adam = "Transformer Engine's" if facts["transformer_engine"]["state"] == "here" else "torch's"
    absent = (ABSENT, f"not installed: {adam} Adam is used")
    yield _package("apex", facts, "rebuild it for this torch, or uninstall it", absent=absent)


def _numpy(facts: Facts) -> Iterator[Finding]:
    found, unfit = _package("numpy", facts, "pip install --force-reinstall numpy"), facts["torch"].get("numpy_error")
    if found.status == OK and unfit:
        text = f"{found.text}, which this torch cannot use ({unfit}): pip install 'numpy<2', or a newer torch"
        found = Finding("numpy", PROBLEM, text)
    yield found


def _psutil(facts: Facts) -> Iterator[Finding]:
    """dist_checkpointing's writers need it, do not say so, and hang."""
    remedy = "Megatron's checkpoints need it, do not say so and hang for ever; pip install psutil"
    is_needed = facts["megatron"]["state"] != "absent"
    absent = (PROBLEM, f"not installed: {remedy}") if is_needed else (ABSENT, "not installed")
    yield _package("psutil", facts, remedy, absent=absent)


def _hosts(facts: Facts) -> Iterator[Finding]:
    """They are found from their own checkouts."""
    hosts = [name for name in ROLLOUT_HOST_NAMES if facts[name]["state"] == "here"]
    none = f"none of {', '.join(ROLLOUT_HOST_NAMES)} can be imported from here: run from a checkout of theirs"
    text = f"{' and '.join(hosts)} can be imported" if hosts else none
    yield Finding("hosts", OK if hosts else ABSENT, text)


JUDGES = (_python, _torch, _triton, _megatron, _transformer_engine, _flash_attn, _apex, _numpy, _psutil, _hosts)


def version(text: str) -> tuple[int, int]:
    """Major and minor, what follows does not matter; (0, 0) for what is no version."""
    match = re.match(r"(\d+)\.(\d+)", str(text))
    return (int(match[1]), int(match[2])) if match else (0, 0)
