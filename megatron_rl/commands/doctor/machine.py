"""What the facts of a machine mean: which packages are fit, and what of this package works with them. It never looks itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

OK, ABSENT, NOTE, PROBLEM = "ok", "absent", "note", "PROBLEM"
YES, PARTLY, NO = "yes", "partly", "no"
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


@dataclass(frozen=True, slots=True)
class Finding:
    """status: ok, absent (and not needed), note, or PROBLEM: it would stop or falsify training."""

    subject: str
    status: str
    text: str


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
    yield Finding("python", OK, str(facts["python"]["version"]))


@judge
def _torch(facts: Facts) -> Iterator[Finding]:
    torch, machine = facts["torch"], facts["machine"]
    if torch["state"] != "here":
        yield Finding("torch", PROBLEM, f"cannot be imported: {torch.get('error', 'not installed')}")
        return
    yield Finding("torch", OK, f"{torch['version']}")
    if torch["has_cuda"]:
        devices = torch["devices"]
        yield Finding("cuda", OK, f"{torch['cuda_build']}, {len(devices)} x {devices[0]}")
        if torch["has_nccl"]:
            yield Finding("nccl", OK, str(torch["nccl"]))
        else:
            yield Finding("nccl", PROBLEM, "this torch is built without it: ranks on GPUs cannot talk; install a torch with NCCL")
        return
    if machine["has_nvidia_device"] and not machine["hides_devices"]:
        why = (
            "this torch is built without CUDA" if not torch["cuda_build"] else f"torch for CUDA {torch['cuda_build']} cannot use it"
        )
        remedy = "install a CUDA build" if not torch["cuda_build"] else "the driver is older than that CUDA, or the device is taken"
        yield Finding("cuda", PROBLEM, f"there is an NVIDIA device and {why}: {remedy}")
    else:
        built = f"torch is built for CUDA {torch['cuda_build']}" if torch["cuda_build"] else "torch is built without it"
        yield Finding("cuda", ABSENT, f"no device; {built}")
    yield Finding("nccl", ABSENT, "ranks use gloo" if torch["has_gloo"] else "and no gloo: one rank only")


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
        yield Finding("apex", ABSENT, "not installed: torch's Adam is used")
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
    numpy = facts["numpy"]
    if numpy["state"] == "here":
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


@dataclass(frozen=True, slots=True)
class Capability:
    name: str
    answer: str  # yes, partly, no
    why: str


def capabilities(facts: Facts) -> list[Capability]:
    """What of this package works here, and what does not and why."""
    torch, megatron, triton = facts["torch"], facts["megatron"], facts["triton"]
    has_cuda = bool(torch.get("has_cuda"))
    has_megatron = megatron["state"] == "here" and "ratio" in megatron
    no_megatron = INSTALL["megatron"] if megatron["state"] == "absent" else "megatron-core is broken, see above"
    missing = [name for name in ("rich", "matplotlib", "tensorboard") if facts[name]["state"] != "here"]
    hosts = [name for name in ("miles", "slime") if facts[name]["state"] == "here"]
    return [
        Capability("losses, aggregations, fused head (torch)", YES, "on CUDA and on the CPU" if has_cuda else "on the CPU"),
        _triton_kernels(has_cuda, triton, bool(facts["machine"]["interprets_triton"])),
        Capability("explain, launch-config, doctor", YES, "they need torch alone"),
        Capability(
            "train, selftest, make_forward_step", YES if has_megatron else NO, _ranks(torch) if has_megatron else no_megatron
        ),
        _checkpoints(has_megatron, facts["psutil"]["state"] == "here", no_megatron),
        Capability(
            "progress bar, curves, TensorBoard",
            PARTLY if 0 < len(missing) < 3 else NO if missing else YES,
            f"without {', '.join(missing)}: pip install 'megatron_rl[train]'" if missing else "",
        ),
        Capability(
            "miles and slime: hosts.launch",
            YES if hosts else NO,
            f"{' and '.join(hosts)} can be imported"
            if hosts
            else "neither can be imported from here: run from a checkout of theirs",
        ),
    ]


def _triton_kernels(has_cuda: bool, triton: Mapping, is_interpreted: bool) -> Capability:
    name = "Triton kernels"
    if triton["state"] != "here":
        return Capability(name, NO, "Triton is not installed" if triton["state"] == "absent" else "Triton is broken, see above")
    if has_cuda:
        return Capability(name, YES, "taken by --policy-loss-backend auto")
    if is_interpreted:
        return Capability(name, PARTLY, "interpreted, because TRITON_INTERPRET is set: for tests")
    return Capability(name, NO, "no CUDA: auto takes torch; TRITON_INTERPRET=1 interprets them in tests")


def _checkpoints(has_megatron: bool, has_psutil: bool, no_megatron: str) -> Capability:
    if not has_megatron:
        return Capability("checkpoints", NO, no_megatron)
    return Capability("checkpoints", YES, "") if has_psutil else Capability("checkpoints", NO, INSTALL["psutil"])


def _ranks(torch: Mapping) -> str:
    if torch["has_cuda"]:
        return f"NCCL, one rank on each of {len(torch['devices'])} devices"
    return "gloo, any number of ranks on the CPU"


def version(text: str) -> tuple[int, int]:
    """Major and minor, what follows does not matter; (0, 0) for what is no version."""
    match = re.match(r"(\d+)\.(\d+)", str(text))
    return (int(match[1]), int(match[2])) if match else (0, 0)
