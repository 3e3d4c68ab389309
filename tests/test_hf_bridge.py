"""Models of Hugging Face folders through Megatron-Bridge: which loader takes a folder, and that Bridge's model is transformers'.

The whole way runs where megatron-bridge is installed, with tests/te_stand_in.py in the place of Transformer Engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from test_train_hf import CHARACTERS, SMALL, VOCABULARY, save_tokenizer, small_model
from test_train_options import options_of, write_prompts

from megatron_rl.errors import ConfigError
from megatron_rl.train import hf_bridge
from megatron_rl.train.hf_bridge import BRIDGED, BridgedModel, read_model
from megatron_rl.train.hf_model import HFModel

safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install -e '.[hf]'")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
TESTS = Path(__file__).parent
WITHOUT_BRIDGE = "needs megatron-bridge: pip install megatron-bridge"


def save_model(folder, kind, **more):
    """Norms, heads, base and epsilon are no defaults, so that each one that is left out is seen."""
    model = small_model(kind, head_dim=16, rope_theta=500.0, rms_norm_eps=1e-3, initializer_range=0.2, **more)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("gemma"), "Gemma")
    settings = json.loads((folder / "config.json").read_text())
    base = (settings.pop("rope_parameters", None) or {}).get("rope_theta", 500.0)  # as transformers 5 writes it
    (folder / "config.json").write_text(json.dumps(settings | {"rope_theta": base}))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"), "Llama")


@pytest.mark.megatron
def test_the_loader_is_chosen_by_the_architecture(gemma, llama, monkeypatch):
    monkeypatch.setattr(hf_bridge, "bridge_problem", lambda: None)
    assert isinstance(read_model(llama, None), HFModel) and isinstance(read_model(llama, "own"), HFModel)
    for loader in (None, "bridge"):
        model = read_model(gemma, loader)
        assert isinstance(model, BridgedModel) and (model.num_layers, model.num_query_groups, model.vocab_size) == (
            2,
            2,
            VOCABULARY,
        )
    with pytest.raises(ConfigError, match=r"architectures=\['GemmaForCausalLM'\] is not known here"):
        read_model(gemma, "own")
    with pytest.raises(ConfigError, match=r"bridge: .*LlamaForCausalLM.*proved GemmaForCausalLM, and --hf-loader own loads"):
        read_model(llama, "bridge")


@pytest.mark.megatron
@pytest.mark.parametrize("loader", [None, "bridge"])
def test_a_machine_without_the_package_says_what_to_install(gemma, monkeypatch, loader):
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(ConfigError, match=r"megatron-bridge is not installed: install megatron-bridge with transformer-engine"):
        read_model(gemma, loader)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("name", "value"), [("rope_scaling", {"type": "linear", "factor": 2.0}), ("hidden_act", "gelu"), ("tie_word_embeddings", False)]
)
def test_a_setting_that_bridge_leaves_out_is_refused(gemma, tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(hf_bridge, "bridge_problem", lambda: None)
    for path in gemma.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((gemma / "config.json").read_text()) | {name: value}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=f"{name}=.* is not computed here; it must be {BRIDGED['GemmaForCausalLM'][name][0]!r}"):
        read_model(tmp_path, None)


@pytest.mark.megatron
def test_a_layout_that_is_not_proved_is_refused_by_the_flag(gemma, tmp_path, monkeypatch):
    monkeypatch.setattr(hf_bridge, "bridge_problem", lambda: None)
    file = write_prompts(tmp_path / "prompts.jsonl", "1+2=")
    line = f"--hf-checkpoint {gemma} --prompts {file} --reward test_train_hf.reward_of_digits"
    assert options_of(line, 2).hidden_size == 32
    with pytest.raises(ConfigError, match=r"--tensor-model-parallel-size 2 with a model of Megatron-Bridge"):
        options_of(f"{line} --tensor-model-parallel-size 2", 2)


def has_bridge() -> bool:
    try:
        return find_spec("megatron.bridge") is not None
    except ModuleNotFoundError:
        return False


def run(command):
    """Its stderr, and whether it ended well. The stand-in of Transformer Engine is there before Megatron-Core."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.stderr, done.returncode == 0


def trained(folder, line, num_ranks=1):
    """The model that `train` saves, and its stderr."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    start = [sys.executable, *(torchrun if num_ranks > 1 else []), TESTS / "te_stand_in.py"]
    said, is_done = run([*start, *f"train {line} --output-dir {folder}/run --save-hf {folder}/hf".split()])
    assert is_done, said
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    assert transformers.AutoTokenizer.from_pretrained(folder / "hf").vocab_size == len(CHARACTERS) + 2
    return model, said


@pytest.mark.skipif(not has_bridge(), reason=WITHOUT_BRIDGE)  # not marked megatron: that allows no skip
def test_a_model_of_bridge_trains_alike_on_one_rank_and_on_two_and_is_saved(gemma, tmp_path):
    """From flags to files: sampling, steps and the saved folder."""
    file = write_prompts(tmp_path / "prompts.jsonl", "1+2=", "3+4=")
    line = f"--hf-checkpoint {gemma} --prompts {file} --reward test_train_hf.reward_of_digits"
    before = safetensors.load_file(gemma / "model.safetensors")
    one, said = trained(tmp_path / "one", f"{line} {SMALL}")
    assert "GemmaForCausalLM is built, loaded and saved by Megatron-Bridge" in said
    assert any(not torch.equal(tensor, before[name]) for name, tensor in one.state_dict().items() if name in before)
    two, _ = trained(tmp_path / "two", f"{line} {SMALL}", 2)
    for name, tensor in one.state_dict().items():
        # As for a model of our own loader: Adam divides a gradient by its own size, and 1e-7 of rounding may decide a step.
        torch.testing.assert_close(two.state_dict()[name], tensor, atol=1e-3, rtol=0)


LOGITS = """
import sys, torch
import te_stand_in
te_stand_in.install()
from megatron_rl.megatron.cpu import install_cpu_support
install_cpu_support()
from megatron.core import parallel_state
from megatron_rl.train.hf_bridge import build_model, config_of, read_model, save_model
folder, given, logits, saved = sys.argv[1:]
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model = read_model(folder, None)
gpt = build_model(model, config_of(model, bf16=False, sequence_parallel=False), max_sequence_length=32)
ids = torch.load(given)
torch.save(gpt(ids, torch.arange(ids.shape[1]).expand_as(ids), None).detach(), logits)
save_model(model, gpt, saved)
"""


@pytest.mark.skipif(not has_bridge(), reason=WITHOUT_BRIDGE)  # not marked megatron: that allows no skip
def test_logits_are_those_of_transformers_and_the_saved_weights_the_same_bits(gemma, tmp_path):
    ids = torch.randint(VOCABULARY, (2, 17))
    torch.save(ids, tmp_path / "ids")
    said, is_done = run([sys.executable, "-c", LOGITS, gemma, tmp_path / "ids", tmp_path / "logits", tmp_path / "hf"])
    assert is_done, said
    model = transformers.AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32)
    # Both are float32: rounding alone, which is 2e-6 of logits up to 7.
    torch.testing.assert_close(torch.load(tmp_path / "logits"), model(ids).logits.detach(), atol=1e-4, rtol=0)
    before, after = (safetensors.load_file(folder / "model.safetensors") for folder in (gemma, tmp_path / "hf"))
    assert before.keys() == after.keys() and all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.skipif(not has_bridge(), reason=WITHOUT_BRIDGE)  # not marked megatron: that allows no skip
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.layers.0.mlp.gate_proj.bias": torch.zeros(48)}, "has no place for: model.layers.0.mlp.gate_proj.bias; a variant"),
        ({"model.layers.1.mlp.down_proj.weight": None}, "left without a number: decoder.layers.1.mlp.linear_fc2.weight; after"),
        ({"model.layers.1.mlp.down_proj.weight": torch.zeros(32, 47)}, "Megatron-Bridge cannot load it"),
        ({"model.norm.weight": torch.full((32,), torch.nan)}, "left without a number: decoder.final_layernorm.weight"),
    ],
    ids=["beyond", "missing", "misshapen", "nan"],
)
def test_a_tensor_that_bridge_would_pass_over_is_refused(gemma, tmp_path, tensors, message):
    for path in gemma.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    all_of_them = safetensors.load_file(gemma / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in all_of_them.items() if tensor is not None}
    safetensors.save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.save(torch.zeros(1, 4, dtype=torch.long), tmp_path / "ids")
    said, is_done = run([sys.executable, "-c", LOGITS, tmp_path, tmp_path / "ids", tmp_path / "logits", tmp_path / "hf"])
    assert not is_done and message in said, said
