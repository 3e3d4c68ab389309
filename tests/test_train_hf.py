"""`megatron-rl train --hf-checkpoint`: a model of Hugging Face's format in, prompts as text or messages, the same format out."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from forked import forked
from helpers import ROOT, error_of
from test_train_command import Command
from test_train_options import options_of, parse, write_prompts

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.train.hf_tokenizer import HFTokenizer
from megatron_rl.train.option_rules import LEARNING_RATES, train_options
from megatron_rl.train.tasks import make_task
from megatron_rl.train.trainer import PolicyTrainer

pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install -e '.[train]'")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[train]'")
pytestmark = pytest.mark.megatron

CHARACTERS = "0123456789+=?abc "
VOCABULARY = 24  # more columns than tokens, as most models have
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
SMALL = "--num-rollouts 2 --prompts-per-rollout 2 --samples-per-prompt 4 --max-new-tokens 4 --no-tensorboard --lr 1e-2"


def reward_of_digits(prompt, response, record):
    """Text in: a share of digits, so that groups have a signal."""
    assert isinstance(response, str) and set(response) <= set(CHARACTERS), response
    assert prompt == record["prompt"]
    return sum(character.isdigit() for character in response) / 4


def save_tokenizer(folder, *, has_end=True, has_template=True):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = {"<end>": 0, "<stop>": 1, **{character: number for number, character in enumerate(CHARACTERS, 2)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **({"eos_token": "<end>"} if has_end else {}))
    made.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    if has_template:
        made.chat_template = TEMPLATE
    made.save_pretrained(folder)


def small_model(kind="Qwen3", **more):
    """transformers' model of random weights, float32. more: further settings, or others."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "eos_token_id": 0,
    }
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes | more)).float()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = small_model(initializer_range=0.1)
    model.generation_config.eos_token_id = [0, 1]
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


MESSAGES = [[{"role": "system", "content": "abc "}, {"role": "user", "content": f"{number}+1"}] for number in range(3)]


def test_a_model_of_a_folder_trains_alike_on_one_rank_and_on_two_and_is_saved(checkpoint, tmp_path):
    file = write_prompts(tmp_path / "prompts.jsonl", "1+2=", MESSAGES[1])
    before = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).state_dict()
    saved = []
    for name, layout, num_ranks in (("one", "", 1), ("two", "--tensor-model-parallel-size 2", 2)):
        folder = tmp_path / name
        arguments = (
            f"--hf-checkpoint {checkpoint} --prompts {file} --reward test_train_hf.reward_of_digits {SMALL} {layout} "
            f"--output-dir {folder / 'run'} --save-hf {folder / 'hf'}"
        )
        command = Command(arguments, folder, num_ranks)
        assert command.wait() == [0] * num_ranks, command.output()
        saved.append(transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32).state_dict())
        assert transformers.AutoTokenizer.from_pretrained(folder / "hf").chat_template == TEMPLATE
    one, two = saved
    assert any(not torch.equal(one[name], before[name]) for name in before)
    for name in one:
        # Adam divides a gradient by its own size: where that is 1e-7, rounding decides the step. Steps here are 4 of 1e-2.
        torch.testing.assert_close(two[name], one[name], atol=1e-3, rtol=0)


def stops_the_run_once(prompt, response, record):
    """As a scheduler does that takes the machine away, in the first rollout of a folder."""
    if not Path("stopped").exists():
        Path("stopped").touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return reward_of_digits(prompt, response, record)


def test_a_stopped_run_writes_no_folder_and_its_own_line_goes_on_and_writes_it(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write_prompts(tmp_path / "prompts.jsonl", "1+2=", "3+4=")
    line = f"--hf-checkpoint {checkpoint} --prompts {file} {SMALL} --reward test_train_hf.stops_the_run_once"
    line += " --output-dir out --save-hf hf"
    stopped = Command(line, tmp_path / "logs")
    assert stopped.wait() == [143] and not Path("hf").exists()
    assert "| Qwen3ForCausalLM of 2 layers x 32, float32, lr 0.01 | 2 prompts x 4 samples" in stopped.output()
    assert "--save-hf hf is written when the run is complete: --resume goes on" in stopped.output()
    with monkeypatch.context() as patch:
        patch.setattr(PolicyTrainer, "save_hf", lambda trainer, folder: signal.raise_signal(signal.SIGINT))
        killed = Command(f"{line} --resume", tmp_path / "logs")
        assert killed.wait() == [1]
    assert "RunError: stopped by Ctrl-C; if a checkpoint is there, the same line with --resume goes on" in killed.output()
    assert "Traceback" not in killed.output() and not Path("hf").exists()
    assert Command(f"{line} --resume", tmp_path / "logs").wait() == [0]
    assert [path.name for path in Path().glob("hf*")] == ["hf"]


def test_the_lines_of_the_page_make_a_small_model_and_train_it(tmp_path, monkeypatch):
    """docs/images/tiny_hf_model.py runs them whole, on three seeds."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.chdir(tmp_path)
    example = importlib.import_module("examples.tiny_hf_model")
    page = (ROOT / "docs" / "training.md").read_text().partition("### A small one that learns\n")[2]
    make, train = page.partition("```bash\n")[2].partition("```")[0].replace("\\\n", " ").splitlines()
    monkeypatch.setattr(sys, "argv", make.split()[1:])
    example.main()
    words = train.removeprefix("python -m megatron_rl train ")
    command = Command(f"{words} --num-rollouts 1 --prompts-per-rollout 2 --no-tensorboard", tmp_path / "logs")
    assert command.wait() == [0], command.output()
    assert Path("runs/tiny_hf/model-00001-of-00001.safetensors").is_file()
    assert [example.next_letter([], answer, {"answer": "d"}) for answer in ("d", "d e", "e d", "")] == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("save_hf", "message"),
    [
        ("there", "--save-hf there: there is there already; name a new folder, as in --save-hf runs/train/hf"),
        ("half", "--save-hf half: half.partial is there already; name a new folder"),
        ("runs", "--save-hf runs: --output-dir would be inside; name a new folder"),
    ],
)
def test_a_place_for_the_model_must_be_new(checkpoint, tmp_path, monkeypatch, save_hf, message):
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("half.partial").mkdir()
    assert message in error_of(lambda: train_options({**vars(parse(f"--hf-checkpoint {checkpoint}")), "save_hf": save_hf}))


def test_the_tokenizer_encodes_text_and_messages_and_knows_every_end(checkpoint):
    tokenizer = HFTokenizer.of_folder(checkpoint)
    assert tokenizer.end_tokens == (0, 1)  # the tokenizer's, and that of generation_config.json
    assert tokenizer.decode(tokenizer.encode("1+2=")) == "1+2="
    assert tokenizer.encode(MESSAGES[0]) == tokenizer.encode("abc 0+1=")


def test_a_response_is_cut_at_the_first_end_and_shown_as_text(checkpoint, tmp_path):
    file = write_prompts(tmp_path / "prompts.jsonl", "1+2=")
    task = make_task(prompts=file, reward="test_train_hf.reward_of_digits", hf_checkpoint=checkpoint, vocab_size=VOCABULARY)
    tokenizer = HFTokenizer.of_folder(checkpoint)
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
        return error_of(lambda: HFTokenizer.of_folder(tmp_path))

    code, out, error = forked(lambda: print(read()))
    assert code == 0 and "ValueError: " in out, out + error
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [([{"role": "user"}], "must be text, or"), ([1, "2"], "must be text, or"), ([VOCABULARY], "token 24 is not below 24")],
)
def test_prompts_that_are_neither_text_nor_messages_nor_ids_are_refused_with_their_line(checkpoint, tmp_path, prompt, problem):
    file = write_prompts(tmp_path / "prompts.jsonl", "1+2=", prompt)
    with pytest.raises(DataError, match=f"line 2: prompt: {problem}"):
        make_task(prompts=file, reward="test_train_hf.reward_of_digits", hf_checkpoint=checkpoint, vocab_size=VOCABULARY)


def options(*flags):
    return options_of(" ".join(map(str, flags)))


def test_the_folder_decides_the_sizes_and_the_learning_rate_is_small(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # runs/train is the default folder of a run
    file = write_prompts(tmp_path / "prompts.jsonl", "1+2=")
    own = ("--prompts", file, "--reward", "test_train_hf.reward_of_digits")
    found = options("--hf-checkpoint", checkpoint, *own)
    assert (found.num_layers, found.hidden_size, found.num_attention_heads, found.vocab_size) == (2, 32, 4, VOCABULARY)
    assert found.lr == LEARNING_RATES["hf_checkpoint"]
    assert options(*own).lr == LEARNING_RATES["prompts"]
    assert options().lr == LEARNING_RATES["task"]
    assert options("--lr", 0.5).lr == 0.5


def test_a_run_of_a_folder_needs_prompts_and_decides_no_size(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match="needs --prompts FILE with --reward, or --rollouts FILE(.|\n)*--num-layers 3 has no effect with"
    ):
        options("--hf-checkpoint", checkpoint, "--num-layers", 3)
