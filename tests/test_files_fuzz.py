"""Changes files at random and reads each as the commands do: a value or a named error, within bounds of memory and time.

The suite reads some of each kind. `FUZZ_CASES=10000 pytest tests/test_files_fuzz.py` reads so many of each, from FUZZ_SEED on.
A fault prints its kind and number: `python tests/test_files_fuzz.py KIND NUMBER` in an empty folder makes that case and reads it.
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import random
import re
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import forked
from safetensors.torch import save

from megatron_rl.errors import ConfigError, DataError, RunError
from megatron_rl.train import checkpoint_files
from megatron_rl.train.hf_checkpoint import read_hf_model
from megatron_rl.train.hf_tokenizer import _end_tokens
from megatron_rl.train.rollout_files import load_rollouts
from megatron_rl.train.user_tasks import _read_records

pytestmark = pytest.mark.megatron
NUM_CASES, FIRST = int(os.environ.get("FUZZ_CASES", "40")), int(os.environ.get("FUZZ_SEED", "0"))
NAMED = (ConfigError, DataError, RunError)
# More memory than the process has, and CPU time of one case: a case takes milliseconds, so that only what never ends is killed.
MEMORY, SECONDS = 2**30, 120

# What is changed: bytes at any place, words of the text, and values of JSON

TOKENS = (
    *(b"0", b"-1", b"1e999", b"NaN", b"-Infinity", b"null", b"true", b"[]", b"{}", b'""', b"9" * 400, b"9" * 5000, b"1.5"),
    *(b"2147483648", b"9223372036854775808", b"[" * 100, b"{" * 100, b"]" * 100, b"$(" * 50, b"\\u0000", b"\\ud800", b"\xff\xfe"),
    *(
        b"\x00",
        b"\x1b[2J",
        b"*a",
        b"&a ",
        b"!!int ",
        b"<<: ",
        b"../",
        b"/dev/zero",
        b"${A}",
        b"$A$A",
        b"`",
        b"'",
        b'"',
        b"\n",
        b"\r\n",
    ),
    *(b"\n", b"\r\n", b"PK\x01\x02", b"PK\x05\x06", b"\xff\xff\xff\xff", b"\x00\x00\x00\x80"),
    *(b"q\x00", b"h\x00", b"(", b"t", b"e", b"R", b"b", b"s", b"a", b"2", b"0"),  # of pickle, in a checkpoint
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 10**7, 2**31, 2**63, 10**30, 0.5, -1.0, 1e-320, 1e300, float("nan"), float("inf")),
    *("", "x", "1", "false", "\x1b[2J\n", "\ud800", "a" * 5000),
    *([], {}, [1], ["full_attention"], [None], {"a": 1}, [[[[]]]], {"rope_theta": 5}),
)


def with_bytes_changed(rng: random.Random, content: bytes) -> bytes:
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        place, other = rng.randrange(len(found) + 1), rng.randrange(len(found) + 1)
        length = rng.choice((1, 1, 2, 4, 8, 64, 1000))
        match rng.randrange(6):
            case 0:
                found[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                del found[place : place + length]
            case 2:
                found[place:place] = rng.choice(TOKENS)
            case 3:
                found[place : place + length] = found[other : other + length]
            case 4:
                words = [*re.finditer(rb"[\w.+-]+", found[place : place + 200])]
                if words:
                    word = rng.choice(words)
                    found[place + word.start() : place + word.end()] = rng.choice(TOKENS)
            case 5:
                found[place:place] = found[other : other + length] * rng.choice((1, 2, 30))
    return bytes(found)


def with_value_changed(rng: random.Random, content: bytes) -> bytes:
    """Of JSON: another value in a place, a place less, or one more."""
    value = json.loads(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = [*places_of(value)]
        if not places:
            break
        container, key = rng.choice(places)
        match rng.randrange(4):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[rng.choice((*container, "x", "\x1b"))] = copy.deepcopy(rng.choice(VALUES))
            case _:
                container[key] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(value).encode()


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from places_of(inner)


def of_json(rng: random.Random, content: bytes) -> bytes:
    return rng.choice((with_value_changed, with_value_changed, with_bytes_changed))(rng, content)


# The kinds: what is written into an empty folder, and read


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def checkpoint(rng: random.Random) -> None:
    """With right checksums, which whoever changes the files makes too."""
    from torch.distributed.checkpoint import metadata as of_torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensor, thing = saved(torch.arange(6.0)), saved({"a": [1, 2]})
    chunk = of_torch.ChunkStorageMetadata(torch.Size([0]), torch.Size([6]))
    kinds = {
        "w": of_torch.TensorStorageMetadata(of_torch.TensorProperties(torch.float32), torch.Size([6]), [chunk]),
        "o": of_torch.BytesStorageMetadata(),
    }
    places = {
        of_torch.MetadataIndex("w", torch.Size([0])): _StorageInfo("__0_0.distcp", 0, len(tensor)),
        of_torch.MetadataIndex("o"): _StorageInfo("__0_0.distcp", len(tensor), len(thing)),
    }
    files = {
        ".metadata": pickle.dumps(of_torch.Metadata(kinds, storage_data=places)),
        "__0_0.distcp": tensor + thing,
        "common.pt": saved({"counters": {"step": 1}}),
        "metadata.json": b'{"sharded_backend": "torch_dist", "common_backend": "torch"}',
    }
    name = rng.choice([*files])
    for file, content in files.items():
        change = of_json if file == "metadata.json" else with_bytes_changed
        Path(file).write_bytes(change(rng, content) if file == name else content)
    checkpoint_files.write_checksums(Path(), checkpoint_files.checksums_of(Path(), files))


def read_checkpoint() -> None:
    checkpoint_files.find_problems(Path())


MODEL = {"architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False} | {
    **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4},
    **{"intermediate_size": 12, "vocab_size": 10, "max_position_embeddings": 16, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e6, "rope_scaling": {"rope_type": "default"}, "layer_types": ["full_attention"], "norm_topk_prob": True},
    **{"num_experts": 2, "moe_intermediate_size": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
EXPERT = {"gate_proj": (4, 8), "up_proj": (4, 8), "down_proj": (8, 4)}
LAYER = {
    **{"self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8)},
    **{"self_attn.q_norm": (4,), "self_attn.k_norm": (4,), "input_layernorm": (8,), "post_attention_layernorm": (8,)},
    "mlp.gate": (2, 8),
    **{f"mlp.experts.{expert}.{name}": shape for expert in (0, 1) for name, shape in EXPERT.items()},
}
SHAPES = {"model.embed_tokens": (10, 8), "model.norm": (8,), "lm_head": (10, 8)}
SHAPES |= {f"model.layers.0.{name}": shape for name, shape in LAYER.items()}
WEIGHTS = save({f"{name}.weight": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()})


def folder_of_a_model(rng: random.Random) -> None:
    length = int.from_bytes(WEIGHTS[:8], "little")

    def with_header_changed(rng: random.Random, content: bytes) -> bytes:
        header = of_json(rng, content[8 : 8 + length])
        return struct.pack("<Q", len(header)) + header + content[8 + length :]

    weight_map = {"weight_map": {f"{name}.weight": "model.safetensors" for name in SHAPES}}
    files = {
        "config.json": (json.dumps(MODEL).encode(), of_json),
        "model.safetensors.index.json": (json.dumps(weight_map).encode(), of_json),
        "generation_config.json": (b'{"eos_token_id": [0, 1], "do_sample": true}', of_json),
        "model.safetensors": (WEIGHTS, rng.choice((with_bytes_changed, with_header_changed))),
    }
    name = rng.choice([*files])
    for file, (content, change) in files.items():
        if file == name or file != "model.safetensors.index.json":
            Path(file).write_bytes(change(rng, content) if file == name else content)


def read_model() -> None:
    _end_tokens(Path(), 0)
    read_hf_model("")


ROW = {"prompt_id": "a", "tokens": [1, 2, 3], "response_length": 2, "loss_mask": [1, 1], "reward": 0.5, "advantage": -0.7}
ROW |= {"old_log_probs": [-1.0, -2.0], "routes": [[[0, 1], [1, 0]]]}
ROLLOUT = {"vocab_size": 9, "num_parts": 1, "digest": 5, "samples": [ROW | {"index": 0}, ROW | {"index": 1}]}


def rollouts(rng: random.Random) -> None:
    lines = [json.dumps(ROLLOUT | {"rollout_index": index}).encode() for index in range(2)]
    changed = rng.randrange(2)
    lines[changed] = of_json(rng, lines[changed])
    Path("r.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def read_rollouts() -> None:
    list(load_rollouts("r.jsonl", vocab_size=9))


def prompts(rng: random.Random) -> None:
    messages = [{"role": "user", "content": "1+2="}]
    lines = [json.dumps({"prompt": prompt, "answer": 3, "prompt_id": name}) for prompt, name in ((messages, "a"), ("1", "b"))]
    changed = rng.randrange(2)
    written = [of_json(rng, line.encode()) if number == changed else line.encode() for number, line in enumerate(lines)]
    Path("p.jsonl").write_bytes(b"\n".join(written) + b"\n")


def read_prompts() -> None:
    list(_read_records(Path("p.jsonl"), takes_messages=True))


KINDS: dict[str, tuple[Callable[[random.Random], None], Callable[[], None]]] = {
    "checkpoint": (checkpoint, read_checkpoint),
    "model": (folder_of_a_model, read_model),
    "rollouts": (rollouts, read_rollouts),
    "prompts": (prompts, read_prompts),
}


def outcome(kind: str, number: int) -> str:
    """value, the name of the error, or the traceback of one without a name."""
    make, read = KINDS[kind]
    for path in Path().iterdir():
        path.unlink()
    make(random.Random(f"{kind} {number}"))
    try:
        read()
    except NAMED as error:
        return type(error).__name__
    except Exception:
        return traceback.format_exc()
    return "value"


def read_cases(kind: str) -> int:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    counts: dict[str, int] = {}
    for number in range(FIRST, FIRST + NUM_CASES):
        print(f"\n{kind} {number}", end=" ", flush=True)  # the last line names the case that ended the process
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of CPU time; its signal ends the process, in C too
        found = outcome(kind, number)
        counts[found if len(found) < 40 else "fault"] = counts.get(found if len(found) < 40 else "fault", 0) + 1
        if len(found) >= 40:
            print(found, flush=True)
    print(f"\n{json.dumps(counts)}", file=sys.stderr)
    return 1 if "fault" in counts else 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_a_value_or_a_named_error(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, error = forked(lambda: read_cases(kind), seconds=600 + NUM_CASES)
    faults = [case for case in out.split(f"\n{kind} ") if "\n" in case]
    assert code == 0, f"exit code {code}, {len(faults)} faults, the last case is {out[-12:]!r}: {''.join(faults)[:6000]}"
    print(kind, error)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_changed_is_a_value_before(kind, tmp_path, monkeypatch):
    """A seed that is refused by itself would hide what lies behind the refusal."""
    monkeypatch.chdir(tmp_path)
    for name in ("with_bytes_changed", "of_json"):
        monkeypatch.setitem(globals(), name, lambda rng, content: content)
    assert [outcome(kind, number) for number in range(4)] == ["value"] * 4


if __name__ == "__main__":
    print(outcome(sys.argv[1], int(sys.argv[2])))
