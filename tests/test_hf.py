"""Folders of Hugging Face: logits as `transformers` computes them on each layout, back to the same bits, refusals, whole runs."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from forked import forked
from helpers import error_of, pool_of
from test_train_command import Command, options_of, parse, write_prompts

from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import all_gather_stack, broadcast_from_last, resolve_groups
from megatron_rl.megatron.model import transformer_config
from megatron_rl.megatron.rotary import Llama3, Rotary
from megatron_rl.testing.layout_step import Layout
from megatron_rl.train.hf_tokenizer import HFTokenizer
from megatron_rl.train.hf_weights import build_hf_model, read_hf_model, save_hf_checkpoint
from megatron_rl.train.option_rules import LEARNING_RATES, train_options
from megatron_rl.train.tasks import make_task

safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install -e '.[train]'")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[train]'")
pytestmark = pytest.mark.megatron

pool = pool_of(4)
SIZES = {
    "vocab_size": 99,  # no multiple of two: the last tensor-parallel rank holds a padded column
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # of 0.02 the logits would be so flat that a wrong layer hides
}
# Of the 8 frequencies of a head some are kept, one is mixed and some are divided.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 256
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32}
MODELS = {
    "llama": ("Llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 16, "head_dim": 32}),
    "qwen2": ("Qwen2", {"rope_theta": 1000000.0}),
    "qwen3, tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "experts": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "experts, not normalised": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [0]}),
}
# Both compute in float32, in another order; a wrong head, a wrong rotation or a missing bias moves logits of this size by 0.1.
TOLERANCE = 1e-4
TOKENS = torch.randint(99, (2, 12), generator=torch.Generator().manual_seed(0))
DENSE = (Layout(), Layout(tensor=2, pipeline=2))
OF_EXPERTS = (Layout(), Layout(tensor=2, sequence_parallel=True, data=2, expert=2))
CASES = [(name, layout) for name in MODELS for layout in (OF_EXPERTS if "experts" in name else DENSE)]
CASES += [
    ("llama", Layout(tensor=2, sequence_parallel=True)),
    ("qwen2", Layout(tensor=4)),  # half of a key head a rank
    ("llama, tied", Layout(data=2, num_microbatches=1)),
    ("experts", Layout(data=4, expert=2)),
    ("experts", Layout(tensor=2, sequence_parallel=True, pipeline=2, expert=2, expert_tensor=1)),
]


def small_model(kind="Qwen3", **more):
    """transformers' model of random weights, float32. more: further settings, or others."""
    torch.manual_seed(1)
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**{**SIZES, **more})).float()


def logits_of(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return type(model).__name__, model(TOKENS).logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name -> (folder, the logits of transformers)."""
    found = {}
    for name, (kind, settings) in MODELS.items():
        model, folder = small_model(kind, **settings), tmp_path_factory.mktemp("hf")
        for values in model.parameters():  # norms and biases too: their initial values are 1 and 0
            torch.nn.init.normal_(values, float(values.dim() == 1), 0.15)
        model.save_pretrained(folder)
        found[name] = folder, logits_of(folder)[1]
    return found


def logits_on_rank(rank, folder, sequence_parallel, saved):
    model, groups = read_hf_model(folder), resolve_groups()
    config = transformer_config(**model.transformer_options(), sequence_parallel=sequence_parallel)
    gpt = build_hf_model(model, config, max_sequence_length=TOKENS.shape[1], use_transformer_engine=False)
    hidden_shape = (TOKENS.shape[1] // (groups.tp.size() if sequence_parallel else 1), TOKENS.shape[0], model.hidden_size)
    if groups.pp.rank():
        received = torch.empty(hidden_shape)
        torch.distributed.recv(received, group=groups.pp, group_src=groups.pp.rank() - 1)
        gpt.set_input_tensor(received)
    with torch.no_grad():
        output = gpt(TOKENS, torch.arange(TOKENS.shape[1]).expand(len(TOKENS), -1), None)
    if groups.pp.rank() < groups.pp.size() - 1:
        torch.distributed.send(output, group=groups.pp, group_dst=groups.pp.rank() + 1)
        output = torch.zeros(*TOKENS.shape, -(-model.vocab_size // groups.tp.size()))
    logits = broadcast_from_last(output.contiguous(), groups.pp)
    save_hf_checkpoint(model, [gpt], saved)
    return torch.cat(list(all_gather_stack(logits, groups.tp)), -1)[..., : model.vocab_size]


def tensors_of(folder):
    files = [safetensors.load_file(path) for path in folder.glob("*.safetensors")]
    found = {name: values for tensors in files for name, values in tensors.items()}
    assert len(found) == sum(map(len, files)), "a tensor is in two files"
    return found


def check_on_layout(pool, folder, expected, layout, saved):
    """The logits of each rank, and the bits of the folder that the ranks save: a file of each pipeline stage."""
    given = (folder, layout.sequence_parallel, saved)
    for logits in pool.run(logits_on_rank, *given, world_size=layout.world_size, **layout.model_parallel):
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)
    before, after = tensors_of(folder), tensors_of(saved)
    assert after.keys() == before.keys()
    assert [key for key, values in after.items() if values.dtype != before[key].dtype or not torch.equal(values, before[key])] == []


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_logits_are_those_of_transformers_and_the_saved_folder_the_same_bits(pool, folders, tmp_path, name, layout):
    folder, expected = folders[name]
    check_on_layout(pool, folder, expected, layout, tmp_path / "saved")
    read_hf_model(tmp_path / "saved")
    kind, logits = logits_of(tmp_path / "saved")
    assert kind == f"{MODELS[name][0]}ForCausalLM" and torch.equal(logits, expected)


# Refusals


def changed(folder, tmp_path, settings, tensors=None):
    """The folder with other settings, as transformers 4 spells them, and other tensors."""
    config = json.loads((folder / "config.json").read_text())
    if {"rope_theta", "rope_scaling"} & set(settings):
        config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, **settings}))
    weights = safetensors.load_file(folder / "model.safetensors")
    safetensors.save_file((tensors or (lambda known: known))(weights), tmp_path / "model.safetensors")
    return tmp_path


def without_norm(known):
    return {key: value for key, value in known.items() if key != "model.norm.weight"}


def renamed(known):
    return {key.replace("layers.1.mlp.up_proj", "layers.1.mlp.wide_proj"): value for key, value in known.items()}


YARN, TWO_BASES = {"type": "yarn", "factor": 4.0}, {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}
REFUSED = [
    # model, settings, tensors, what is said
    ("qwen2", {"architectures": ["GPT2LMHeadModel"]}, None, "architectures=.*GPT2.* is not known here; known are LlamaForCausalLM"),
    ("llama", {"attention_bias": True}, None, "attention_bias=True must be False"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, None, "layer_types has sliding_attention; only full_att"),
    ("qwen2", {"rope_scaling": YARN}, None, "have factor, type with rope_type='yarn', which"),
    ("qwen2", TWO_BASES, None, "rope_theta=1000000.0 and rope_theta=10000.0"),
    ("qwen2", {}, without_norm, "missing for Qwen2ForCausalLM .*: model.norm.weight; fetch the folder again"),
    ("experts", {"decoder_sparse_step": 2}, None, r"missing .*: model\.layers\.0\.mlp\.down_proj\.weight"),
    ("qwen2", {}, renamed, "not known for Qwen2ForCausalLM .*: model.layers.1.mlp.wide_proj.weight; a variant that is not"),
    ("qwen2", {"intermediate_size": 100}, None, r"6 tensors of another shape .*gate_proj.weight \(96, 64\) instead of \(100, 64\)"),
]


@pytest.mark.parametrize(("name", "settings", "tensors", "message"), REFUSED, ids=[row[-1] for row in REFUSED])
def test_a_folder_that_is_no_such_model_is_refused_from_its_settings_and_headers(
    folders, tmp_path, name, settings, tensors, message
):
    folder = changed(folders[name][0], tmp_path, settings, tensors)
    assert re.search(message, error_of(lambda: read_hf_model(folder)))


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": LLAMA3},
    ],
    ids=["transformers 4", "transformers 5", "the base beside the scaling"],
)
def test_each_spelling_of_rotary_positions_is_the_same_model(folders, tmp_path, settings):
    """10000 in the place of the base is another model, without an error."""
    found = read_hf_model(changed(folders["llama"][0], tmp_path, settings))
    assert found.rotary == Rotary(base=500000.0, llama3=Llama3(factor=8.0, original_length=256))


def test_what_is_not_said_has_the_default_of_transformers(folders, tmp_path):
    folder = changed(folders["mistral"][0], tmp_path, {"max_position_embeddings": 8192})
    config = json.loads((folder / "config.json").read_text())
    left_out = ("tie_word_embeddings", "sliding_window", "rope_parameters")
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if name not in left_out}))
    found = read_hf_model(folder)
    assert (found.tie_embeddings, found.longest, found.rotary) == (False, transformers.MistralConfig().sliding_window, Rotary())
    assert read_hf_model(changed(folder, tmp_path, {"sliding_window": None})).longest == 8192


def length_errors_on_rank(rank, folder, lengths):
    model = read_hf_model(folder)
    config = transformer_config(**model.transformer_options())
    return [error_of(lambda length=length: build_hf_model(model, config, max_sequence_length=length)) for length in lengths]


@pytest.mark.parametrize(("name", "longest"), [("llama", 64), ("mistral", 16)])
def test_a_sequence_beyond_the_positions_or_the_window_is_refused(pool, folders, name, longest):
    [(allowed, refused)] = pool.run(length_errors_on_rank, folders[name][0], (longest, longest + 1), world_size=1)
    assert not allowed and f"sequences of {longest + 1} tokens are longer than {longest}, the least of" in refused


# Runs: prompts as text or messages

CHARACTERS = "0123456789+=?abc "
VOCABULARY = 24  # more columns than tokens, as most models have
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
SMALL = "--num-rollouts 2 --prompts-per-rollout 2 --samples-per-prompt 4 --max-new-tokens 4 --no-tensorboard --lr 1e-2"
REWARD = f"{__name__}.reward_of_digits"


def reward_of_digits(prompt, response, record):
    """Text in: a share of digits, so that groups have a signal."""
    assert isinstance(response, str) and set(response) <= set(CHARACTERS), response
    assert prompt == record["prompt"]
    return sum(character.isdigit() for character in response) / 4


def save_tokenizer(folder):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = {"<end>": 0, "<stop>": 1, **{character: number for number, character in enumerate(CHARACTERS, 2)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    made.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = small_model(vocab_size=VOCABULARY, head_dim=16, initializer_range=0.1)
    model.generation_config.eos_token_id = [0, 1]
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    """A file, in a folder of its own: runs/train is the default folder of a run."""
    monkeypatch.chdir(tmp_path)
    return write_prompts(tmp_path / "prompts.jsonl", "1+2=", MESSAGES)


MESSAGES = [{"role": "system", "content": "abc "}, {"role": "user", "content": "1+1"}]


def test_a_model_of_a_folder_trains_alike_on_one_rank_and_on_two_and_is_saved(checkpoint, prompts, tmp_path):
    before = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).state_dict()
    saved = []
    for name, layout, num_ranks in (("one", "", 1), ("two", "--tensor-model-parallel-size 2", 2)):
        folder = tmp_path / name
        arguments = f"--hf-checkpoint {checkpoint} --prompts {prompts} --reward {REWARD} {SMALL} {layout}"
        command = Command(f"{arguments} --output-dir {folder / 'run'} --save-hf {folder / 'hf'}", folder, num_ranks)
        assert command.wait() == [0] * num_ranks, command.output()
        saved.append(transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32).state_dict())
        assert transformers.AutoTokenizer.from_pretrained(folder / "hf").chat_template == TEMPLATE
    one, two = saved
    assert any(not torch.equal(one[name], before[name]) for name in before)
    for name in one:
        # Adam divides a gradient by its own size: where that is 1e-7, rounding decides the step. Steps here are 4 of 1e-2.
        torch.testing.assert_close(two[name], one[name], atol=1e-3, rtol=0)


def test_a_place_for_the_model_must_be_new(checkpoint, prompts):
    Path("half.partial").mkdir()
    message = error_of(lambda: train_options({**vars(parse(f"--hf-checkpoint {checkpoint}")), "save_hf": "half"}))
    assert "--save-hf half: half.partial is there already; name a new folder" in message


def test_a_tokenizer_reads_text_and_messages_and_a_response_is_cut_at_the_first_end(checkpoint, prompts):
    tokenizer = HFTokenizer.from_folder(checkpoint)
    assert tokenizer.end_tokens == (0, 1)  # the tokenizer's, and that of generation_config.json
    assert tokenizer.decode(tokenizer.encode("1+2=")) == "1+2="
    assert tokenizer.encode(MESSAGES) == tokenizer.encode("abc 1+1=")
    task = make_task(prompts=prompts, reward=REWARD, hf_checkpoint=checkpoint, vocab_size=VOCABULARY)
    assert task.vocab_size == VOCABULARY
    assert task.reward(task.make_prompt(0, 0), [*tokenizer.encode("12a"), 1, *tokenizer.encode("3"), 0]) == 0.5


def test_a_tokenizer_runs_no_code_of_its_folder_whatever_stdin_says(tmp_path):
    """transformers asks there, once a rank: `yes | megatron-rl train` would answer."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')")
    settings = {"auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]}, "tokenizer_class": "EvilTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))

    def read() -> str:
        sys.stdin = io.StringIO("y\n" * 9)
        return error_of(lambda: HFTokenizer.from_folder(tmp_path))

    code, out, error = forked(lambda: print(read()))
    assert code == 0 and "ValueError: " in out, out + error
    assert not (tmp_path / "was_run").exists()


def test_the_folder_decides_the_sizes_and_the_learning_rate_is_small(checkpoint, prompts):
    own = f"--prompts {prompts} --reward {REWARD}"
    found = options_of(f"--hf-checkpoint {checkpoint} {own}")
    assert (found.num_layers, found.hidden_size, found.num_attention_heads, found.vocab_size) == (2, 64, 4, VOCABULARY)
    assert found.lr == LEARNING_RATES["hf_checkpoint"]
    assert options_of(own).lr == LEARNING_RATES["prompts"]
    needs = "needs --prompts FILE with --reward, or --rollouts FILE(.|\n)*--num-layers 3 has no effect with"
    with pytest.raises(ConfigError, match=needs):
        options_of(f"--hf-checkpoint {checkpoint} --num-layers 3")
