"""What the packages of this machine say of themselves, each asked in a separate process; a broken one stops no other.

It only looks: what a fact means is decided in machine.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Any

Facts = dict[str, Any]
# Megatron-Core on a cold disk takes 10 s, and Transformer Engine from a network disk a minute; what needs longer than this hangs.
SECONDS = 120.0
# Before the answer, so that whatever a package prints at import does not matter.
MARK = "megatron_rl doctor: "
# A package -> what its process runs.
DETAILS = {
    "torch": """
import torch
import torch.distributed as dist
cuda = torch.cuda.is_available()
nccl = dist.is_available() and dist.is_nccl_available()
facts |= {
    "cuda_build": torch.version.cuda,
    "rocm_build": torch.version.hip,
    "has_cuda": cuda,
    "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if cuda else [],
    "has_nccl": cuda and nccl,
    "has_gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and nccl else None,
}
if torch.version.cuda:
    try:
        for index in range(max(1, torch.cuda.device_count())):
            torch.ones(2, device=f"cuda:{index}").sum().item()
    except Exception as error:
        facts["cuda_error"] = one_line(error)
""",
    "psutil": "import psutil",
    "triton": "import triton",
    "transformer_engine": "import transformer_engine.pytorch",
    "flash_attn": "import flash_attn",
    "apex": "import apex",
    # As our commands load it: without CUDA, Transformer Engine is hidden from it. The probe runs in one process.
    "megatron": """
from megatron_rl.megatron.cpu import hide_transformer_engine
hide_transformer_engine()
import megatron.core
facts["version"] = megatron.core.__version__
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
""",
}
# Its version is that of its distribution, else its __version__.
PROBE = f"""
import importlib.metadata, json, logging, os, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
name, details = sys.argv[1:]
facts = {{"state": "here"}}
def one_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
try:
    facts["version"] = importlib.metadata.version(name)
except importlib.metadata.PackageNotFoundError:
    pass
try:
    exec(details)
except BaseException as error:
    facts |= {{"state": "broken", "error": f"{{type(error).__name__}}: {{one_line(error)}}"}}
if "version" not in facts and name in sys.modules:
    facts["version"] = str(getattr(sys.modules[name], "__version__", ""))
print({MARK!r} + json.dumps(facts), flush=True)
os._exit(0)
"""


def collect_facts() -> dict[str, Facts]:
    """{name: facts}: state is "here", "broken" (error says why) or "absent"; beside it version and what DETAILS adds."""
    launched = {name: _launch(name) for name in DETAILS if _is_there(name)}
    end = time.monotonic() + SECONDS  # which all share
    facts: dict[str, Facts] = {name: _answer(launched[name], end) if name in launched else {"state": "absent"} for name in DETAILS}
    facts["python"] = {"version": ".".join(map(str, sys.version_info[:3]))}
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    facts["machine"] = {"has_nvidia_device": os.path.exists("/dev/nvidiactl") and not is_hidden}
    return facts


def _is_there(name: str) -> bool:
    try:
        spec = find_spec({"megatron": "megatron.core"}.get(name, name))
        # A namespace has no origin: a folder of that name, as a checkout's, with nothing to import.
        return spec is not None and spec.origin is not None
    except (ImportError, ValueError):
        return False


def _launch(name: str) -> subprocess.Popen:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", PROBE, name, DETAILS[name]],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _answer(process: subprocess.Popen, end: float) -> Facts:
    try:
        out, error = process.communicate(timeout=max(end - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"state": "broken", "error": f"its import hangs: no answer in {SECONDS:g} s"}
    for line in out.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    last = (error.strip().splitlines() or ["no message"])[-1]
    return {"state": "broken", "error": f"its import ended the process with {process.returncode}: {last}"}
