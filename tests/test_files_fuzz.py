"""Changes files at random and reads each as the commands do: a value or a named error, within bounds of memory and time.

The suite reads some of each kind. `FUZZ_CASES=10000 pytest tests/test_files_fuzz.py` reads so many of each.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import forked
from safetensors.torch import save

from megatron_rl.errors import ConfigError, DataError, RunError
from megatron_rl.train.hf_weights import read_hf_model
from megatron_rl.train.rollout_files import load_rollouts
from megatron_rl.train.user_tasks import _read_records

pytestmark = pytest.mark.megatron
NUM_CASES = int(os.environ.get("FUZZ_CASES", "40"))
NAMED = (ConfigError, DataError, RunError)
# More memory than the process has, and CPU time of one case: a case takes milliseconds, so that only what never ends is killed.
MEMORY, SECONDS = 2**30, 120
TOKENS = (
    *(b"0", b"-1", b"1e999", b"NaN", b"null", b"[]", b"{}", b"9" * 5000, b"9223372036854775808", b"[" * 100, b"{" * 100),
    *(b"\\ud800", b"\xff\xfe", b"\x00", b"\x1b[2J", b"*a", b"&a ", b"!!int ", b"<<: ", b"/dev/zero", b'"', b"\n"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 10**7, 2**31, 10**30, 0.5, 1e-320, float("nan"), float("inf"), "", "\x1b[2J\n", "\ud800"),
    *([], {}, [1], ["full_attention"], [None], {"a": 1}, [[[[]]]], {"rope_theta": 5}),
)
Change = Callable[[random.Random, bytes], bytes]


def with_bytes_changed(rng: random.Random, content: bytes) -> bytes:
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 16))):
        place, length = rng.randrange(len(found) + 1), rng.choice((1, 2, 8, 1000))
        match rng.randrange(4):
            case 0:
                found[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                del found[place : place + length]
            case 2:
                found[place:place] = rng.choice(TOKENS)
            case 3:
                other = rng.randrange(len(found) + 1)
                found[place:place] = found[other : other + length] * rng.choice((1, 30))
    return bytes(found)


def of_json(rng: random.Random, content: bytes) -> bytes:
    """Another value in a place of it, or a place less; or bytes."""
    if rng.randrange(3) == 0:
        return with_bytes_changed(rng, content)
    value = json.loads(content)
    for _ in range(rng.choice((1, 1, 2))):
        places = [*places_of(value)]
        if places:
            container, key = rng.choice(places)
            if rng.randrange(4) == 0:
                del container[key]
            else:
                container[key] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(value).encode()


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from places_of(inner)


MODEL = {
    **{"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    **{"tie_word_embeddings": False, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4},
    **{"num_key_value_heads": 1, "intermediate_size": 12, "vocab_size": 10, "max_position_embeddings": 16, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e6, "rope_scaling": {"rope_type": "default"}},
}
LAYER = {
    **{"self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8)},
    **{"input_layernorm": (8,), "post_attention_layernorm": (8,)},
    **{"mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12)},
}
SHAPES = {"model.embed_tokens": (10, 8), "model.norm": (8,), "lm_head": (10, 8)}
SHAPES |= {f"model.layers.0.{name}": shape for name, shape in LAYER.items()}
FOLDER: dict[str, tuple[bytes, Change]] = {
    "config.json": (json.dumps(MODEL).encode(), of_json),
    "model.safetensors.index.json": (
        json.dumps({"weight_map": {f"{name}.weight": "model.safetensors" for name in SHAPES}}).encode(),
        of_json,
    ),
    "model.safetensors": (
        save({f"{name}.weight": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}),
        with_bytes_changed,
    ),
}


def read_model() -> None:
    read_hf_model("")


ROW = {"prompt_id": "a", "tokens": [1, 2, 3], "response_length": 2, "loss_mask": [1, 1], "reward": 0.5, "advantage": -0.7}
ROW |= {"old_log_probs": [-1.0, -2.0], "routes": [[[0, 1], [1, 0]]]}
ROLLOUT = {"vocab_size": 9, "run_id": "a", "samples": [ROW | {"index": 0}, ROW | {"index": 1}], "rollout_index": 0}
PROMPT = {"prompt": [{"role": "user", "content": "1+2="}], "answer": 3, "prompt_id": "a"}
# What is written into an empty folder, one of them changed, and how it is read.
KINDS: dict[str, tuple[Callable[[], dict[str, tuple[bytes, Change]]], Callable[[], object]]] = {
    "model": (lambda: FOLDER, read_model),
    "rollouts": (
        lambda: {"r.jsonl": (json.dumps(ROLLOUT).encode() + b"\n", of_json)},
        lambda: list(load_rollouts("r.jsonl", vocab_size=9)),
    ),
    "prompts": (
        lambda: {"p.jsonl": (json.dumps(PROMPT).encode() + b"\n", of_json)},
        lambda: _read_records("p.jsonl"),
    ),
}


def outcome(kind: str, number: int | None) -> str:
    """value, the name of the error, or the traceback of one without a name. None: nothing is changed."""
    files_of, read = KINDS[kind]
    rng, files = random.Random(f"{kind} {number}"), files_of()
    for path in Path().iterdir():
        path.unlink()
    changed = rng.choice([*files]) if number is not None else None
    for name, (content, change) in files.items():
        Path(name).write_bytes(change(rng, content) if name == changed else content)
    try:
        read()
    except NAMED as error:
        return type(error).__name__
    except Exception:
        return traceback.format_exc()
    return "value"


def read_cases(kind: str) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in range(NUM_CASES):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of CPU time; its signal ends the process, in C too
        print(f"{kind} {number}", outcome(kind, number), flush=True)  # the last line is before the case that ended the process


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_a_value_or_a_named_error(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert outcome(kind, None) == "value", "a seed that is refused by itself would hide what lies behind the refusal"
    code, out, error = forked(lambda: read_cases(kind), seconds=600 + NUM_CASES)
    assert code == 0 and "Traceback" not in out, f"exit code {code}: {out[-6000:]} {error}"
    assert out.count("Error") > NUM_CASES // 8, "changes that nobody sees"
