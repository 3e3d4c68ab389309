"""What the packages of this machine say of themselves, each asked in a separate process; a broken one stops no other.

It only looks: what a fact means is decided in machine.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from megatron_rl.hosts import ROLLOUT_HOST_NAMES

Facts = dict[str, object]
# Asked by an import; the hosts only whether they are there.
PROBED = ("torch", "numpy", "psutil", "triton", "transformer_engine", "flash_attn", "apex", "megatron")
# Megatron-Core on a cold disk takes 10 s, and Transformer Engine from a network disk a minute; what needs longer than this hangs.
SECONDS = 120.0
# After this many seconds, print what the command is waiting for.
SIGN_OF_LIFE = 1.0
# Before the answer, so that whatever a package prints at import does not matter.
MARK = "megatron_rl doctor: "

# Megatron-Core as our commands load it: without CUDA, Transformer Engine is hidden from it. The probe runs in one process.
MEGATRON = """
from megatron_rl.megatron.cpu import hide_transformer_engine
hide_transformer_engine()
import megatron.core
facts["version"] = megatron.core.__version__
import megatron.core.models.gpt, megatron.core.optimizer, megatron.core.pipeline_parallel
try:
    facts["has_training"] = importlib.util.find_spec("megatron.training") is not None
except (ImportError, ValueError):
    facts["has_training"] = False
from megatron_rl.errors import ConfigError
from megatron_rl.megatron.probe import probe_schedule
from megatron_rl.megatron.ranks import initialize_ranks
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)
initialize_ranks(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1)
try:
    facts["ratio"] = probe_schedule().ratio
except ConfigError as error:
    facts["contract"] = str(error)
from megatron_rl.megatron.installed import expert_replicas_drift
try:
    facts["replicas_drift"] = expert_replicas_drift()
except Exception as error:
    facts["replicas_drift"] = None
from megatron_rl.megatron.installed import scales_indexer_loss
try:
    facts["scales_indexer_loss"] = scales_indexer_loss()
except Exception as error:
    facts["scales_indexer_loss"] = None
"""
DETAILS = {
    "torch": """
import torch
import torch.distributed as dist
cuda = torch.cuda.is_available()
facts |= {
    "cuda_build": torch.version.cuda,
    "rocm_build": torch.version.hip,
    "has_cuda": cuda,
    "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if cuda else [],
    "has_nccl": dist.is_available() and dist.is_nccl_available(),
    "has_gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else None,
    "compute": [list(torch.cuda.get_device_capability(index)) for index in range(torch.cuda.device_count())] if cuda else [],
    "archs": torch.cuda.get_arch_list() if cuda else [],
}
if torch.version.cuda and not cuda:
    try:
        torch.cuda.init()
    except Exception as error:
        facts["cuda_error"] = one_line(error)
if importlib.util.find_spec("numpy") is not None:
    try:
        torch.zeros(1).numpy()
    except Exception as error:
        facts["numpy_error"] = one_line(error)
""",
    "numpy": "import numpy",
    "psutil": "import psutil",
    "triton": "import triton",
    # PyPI's meta package brings a distribution of this name alone: what it imports comes from the others.
    "transformer_engine": """
names = {dist.metadata["Name"] or "" for dist in importlib.metadata.distributions()}
facts["distributions"] = sorted({n.lower().replace("_", "-") for n in names if n.lower().startswith("transformer")
                                 and "engine" in n.lower()})
import transformer_engine
import transformer_engine.pytorch
""",
    "flash_attn": "import flash_attn",
    # NVIDIA's has these folders however it was built; the web toolkit of that name on PyPI has none of them.
    "apex": """
folders = importlib.util.find_spec("apex").submodule_search_locations or []
wanted = ("normalization", "optimizers", "multi_tensor_apply", "transformer")
facts["is_nvidia"] = any(os.path.isdir(os.path.join(folder, name)) for folder in folders for name in wanted)
import apex
""",
    "megatron": MEGATRON,
}
LOOK_UP = """
module, _, attribute = name.rpartition(".")
found = getattr(importlib.import_module(module), attribute)
facts["kind"] = "" if callable(found) else type(found).__name__
"""
# Where the package keeps no __version__, its distribution's.
PROBE = f"""
import importlib, importlib.metadata, importlib.util, json, logging, os, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
name, details = sys.argv[1:]
facts = {{"state": "here"}}
def one_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
try:
    facts["version"] = importlib.metadata.version({{"megatron": "megatron-core"}}.get(name, name))
except importlib.metadata.PackageNotFoundError:
    pass
try:
    exec(details)
except BaseException as error:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    facts |= {{"state": "broken", "error": f"{{type(error).__name__}}: {{one_line(error)}}", "missing": missing}}
if "version" not in facts and name in sys.modules:
    facts["version"] = str(getattr(sys.modules[name], "__version__", ""))
print({MARK!r} + json.dumps(facts), flush=True)
os._exit(0)
"""


def collect_facts() -> dict[str, Facts]:
    """{name: facts}: state is "here", "broken" (error says why) or "absent"; beside it version and what DETAILS adds."""
    launched = {name: _launch(name, DETAILS[name]) for name in PROBED if _is_there(name)}
    started = time.monotonic()
    facts: dict[str, Facts] = {
        name: _answer(launched[name], name, started) if name in launched else {"state": "absent"} for name in PROBED
    }
    facts |= {name: {"state": "here" if _is_there(name) else "absent"} for name in ROLLOUT_HOST_NAMES}
    facts["python"] = {"state": "here", "version": ".".join(map(str, sys.version_info[:3]))}
    facts["machine"] = {
        "has_nvidia_device": os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/nvidia0"),
        "hides_devices": os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"),
        "interprets_triton": os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"),
    }
    return facts


def look_up(path: str, first_on_path: Iterable[str] = ()) -> Facts:
    """module.function, as the hosts' loaders find it: kind is the type of what is no function. Where the import takes its time,
    standard error says so."""
    return _answer(_launch(path, LOOK_UP, first_on_path), path, time.monotonic())


def _is_there(name: str) -> bool:
    try:
        spec = find_spec({"megatron": "megatron.core"}.get(name, name))
        # A namespace has no origin: a folder of that name, as a checkout's, with nothing to import.
        return spec is not None and spec.origin is not None
    except (ImportError, ValueError):
        return False


def _launch(name: str, details: str, first_on_path: Iterable[str] = ()) -> subprocess.Popen:
    path = [*first_on_path, *(entry or os.getcwd() for entry in sys.path)]
    environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-P", "-c", PROBE, name, details]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _answer(process: subprocess.Popen, name: str, started: float) -> Facts:
    """Waits until SECONDS after `started`, which packages that are asked together share."""

    def seconds_left(limit: float) -> float:
        return max(started + limit - time.monotonic(), 0.1)

    try:
        try:
            out, error = process.communicate(timeout=seconds_left(min(SIGN_OF_LIFE, SECONDS)))
        except subprocess.TimeoutExpired:
            print(f"doctor: still importing {name}, for at most {SECONDS:g} s", file=sys.stderr, flush=True)
            out, error = process.communicate(timeout=seconds_left(SECONDS))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        look = f"`{sys.executable} -v -c 'import {name.partition('.')[0]}'` shows where"
        return {"state": "broken", "error": f"its import hangs: no answer in {SECONDS:g} s; {look}"}
    for line in out.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    last = (error.strip().splitlines() or ["no message"])[-1]
    how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
    return {"state": "broken", "error": f"its import ended the process ({how}): {last}"}
