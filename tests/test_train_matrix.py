"""Prompts of each kind through all that `megatron-rl train` does with them: one row a kind, and the same two runs in each row.

Row: text, token ids, a text file, chat messages or token ids for a model of a Hugging Face folder. Runs: one that samples,
evaluates, records and saves; the recorded rollouts replayed.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from test_train_command import Command, imported_megatron, in_an_empty_directory  # noqa: F401  # fixtures of every test here
from test_train_hf import MESSAGES, VOCABULARY, save_tokenizer
from test_train_options import write_prompts
from trainer_cases import metrics_of

from megatron_rl.errors import DataError
from megatron_rl.train.hf_tokenizer import HFTokenizer
from megatron_rl.train.rollout_files import load_rollouts
from megatron_rl.train.tasks import make_task

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[train]'")
pytestmark = pytest.mark.megatron

SMALL = "--prompts-per-rollout 2 --samples-per-prompt 3 --lr 1e-2 --no-tensorboard"
# Routes of the sampler, replayed and compared in each forward.
REPLAY = "--router-replay rollout"
TEXTS, IDS = ["12", "3+4", "a"], [[3, 1], [2], [5, 5, 4]]
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.1, "eos_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True}


@dataclass(frozen=True)
class Row:
    prompts: list
    held_out: list
    """--eval-prompts; a tokenizer takes all kinds in one file."""
    flags: str = ""
    architecture: str = ""
    settings: tuple = ()


OF_ALL_KINDS = ["1+1", MESSAGES[0], [4, 4]]
ROWS = {
    "text": Row(TEXTS, ["21+", "a3"], "--hidden-size 32"),
    "ids, experts": Row(IDS, [[1, 2, 3]], f"--hidden-size 32 --num-experts 4 {REPLAY}"),
    "text, Llama": Row(TEXTS, OF_ALL_KINDS, architecture="Llama"),
    "chat, Qwen3 with experts": Row(MESSAGES, OF_ALL_KINDS, REPLAY, architecture="Qwen3Moe", settings=tuple(EXPERTS.items())),
    "ids, Qwen3": Row(IDS, OF_ALL_KINDS, architecture="Qwen3", settings=(("head_dim", 8),)),
}


def reward(prompt, response, record):
    """A prompt of ids has a response of ids, any other has text; the number tells both apart from the others."""
    assert prompt == record["prompt"]
    is_ids = isinstance(prompt, list) and isinstance(prompt[0], int)
    assert type(response) is (list if is_ids else str)
    return sum(token % 3 if is_ids else ord(token) % 3 for token in response) / 8 + len(prompt) / 16


def model_folder(row: Row, folder: Path) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{row.architecture}Config")(**SIZES, **dict(row.settings))
    getattr(transformers, f"{row.architecture}ForCausalLM")(config).float().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def log_probs_by_transformers(folder: Path, tokens: torch.Tensor, response_length: int) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        scores = model(tokens[None]).logits[0].log_softmax(-1)
    return scores[:-1].gather(-1, tokens[1:, None])[-response_length:, 0]


def rows_of(run: str) -> list[dict]:
    return [{name: value for name, value in row.items() if not name.startswith("eval/")} for row in metrics_of(run)]


@pytest.mark.parametrize("name", ROWS)
def test_all_that_a_run_does_with_prompts_of_a_kind(name, tmp_path):
    row = ROWS[name]
    source = f"--prompts {write_prompts(tmp_path / 'p.jsonl', *row.prompts)} --reward test_train_matrix.reward --max-new-tokens 4"
    source += f" --eval-prompts {write_prompts(tmp_path / 'e.jsonl', *row.held_out)} --save-interval 1"
    model = f"--hf-checkpoint {model_folder(row, tmp_path / 'model')}" if row.architecture else ""

    def run(given: str, output: str, of_run: str) -> None:
        save_hf = f"--save-hf hf_{output}" if row.architecture and "--num-rollouts 1" not in of_run else ""
        command = Command(f"{SMALL} {row.flags} {model} {given} {save_hf} --output-dir {output} {of_run}", tmp_path / "logs")
        assert command.wait() == [0], command.output()

    run(source, "whole", "--num-rollouts 2 --save-rollouts whole.jsonl")
    run("--rollouts whole.jsonl", "replayed", "")

    assert len(rows_of("whole")) == 4 and max(step["grad_norm"] for step in rows_of("whole")) > 0
    assert rows_of("replayed") == rows_of("whole")
    assert all(step["eval/reward"] > 0 for step in metrics_of("whole"))
    if not row.architecture:
        return
    weights = [Path(f"hf_{output}/model-00001-of-00001.safetensors").read_bytes() for output in ("whole", "replayed")]
    assert weights[0] == weights[1]
    first = next(load_rollouts("whole.jsonl"))
    for sample in first.samples[:3]:  # the model that is given sampled the first rollout
        found = log_probs_by_transformers(tmp_path / "model", sample.tokens, sample.response_length)
        torch.testing.assert_close(found, sample.old_log_probs, atol=1e-4, rtol=0)


FOLDER = {"hf_checkpoint": "model", "vocab_size": VOCABULARY}
OTHERS = [
    # prompts, what is evaluated, further settings of the task, what is said
    pytest.param(TEXTS, [IDS[0]], {}, "line 1: prompt: must be text, .* as the first", id="text, then ids"),
    pytest.param(IDS, ["1"], {}, "line 1: prompt: must be text, or a list of token ids", id="ids, then text"),
    pytest.param(TEXTS, ["1", "b"], {}, "line 2: prompt: --prompts, which makes the vocabulary, has no 'b'", id="other text"),
    pytest.param(TEXTS, MESSAGES, {}, "line 1: prompt: .*; with --hf-checkpoint either, or a list of messages", id="chat alone"),
    pytest.param(IDS, [[6]], {}, "line 1: prompt: token 6 is not below 6, the vocabulary of the model", id="other ids"),
    pytest.param(MESSAGES, [[VOCABULARY]], FOLDER, "line 1: prompt: token 24 is not below 24", id="no such id"),
]


@pytest.mark.parametrize(("prompts", "held_out", "given", "message"), OTHERS)
def test_prompts_to_evaluate_that_the_run_cannot_read_are_refused(tmp_path, prompts, held_out, given, message):
    if given:
        save_tokenizer(tmp_path / "model")
    task = make_task(prompts=write_prompts(tmp_path / "p.jsonl", *prompts), reward="test_train_matrix.reward", **given)
    with pytest.raises(DataError, match=f"e.jsonl.*{message}"):
        task.with_prompts_of(write_prompts(tmp_path / "e.jsonl", *held_out))


def test_ids_to_evaluate_may_be_any_of_the_model(tmp_path):
    task = make_task(prompts=write_prompts(tmp_path / "p.jsonl", *IDS), reward="test_train_matrix.reward")
    found = task.with_prompts_of(write_prompts(tmp_path / "e.jsonl", [6]), 7)
    assert (task.vocab_size, found.vocab_size) == (6, 7)


def test_a_prompt_that_a_tokenizer_makes_nothing_of_is_refused(tmp_path, monkeypatch):
    save_tokenizer(tmp_path / "model")
    monkeypatch.setattr(HFTokenizer, "encode", lambda tokenizer, prompt: [])
    with pytest.raises(DataError, match="p.jsonl, line 1: prompt: it has no token"):
        make_task(prompts=write_prompts(tmp_path / "p.jsonl", *TEXTS), reward="test_train_matrix.reward", **FOLDER)


def test_the_lines_of_the_page_make_a_small_model_and_train_it(tmp_path, monkeypatch):
    """docs/images/tiny_hf_model.py runs them whole, on three seeds."""
    root = Path(__file__).parent.parent
    monkeypatch.syspath_prepend(root)
    example = importlib.import_module("examples.tiny_hf_model")
    page = (root / "docs" / "training.md").read_text().partition("### A small one that learns\n")[2]
    make, train = page.partition("```bash\n")[2].partition("```")[0].replace("\\\n", " ").splitlines()
    monkeypatch.setattr(sys, "argv", make.split()[1:])
    example.main()
    words = train.removeprefix("python -m megatron_rl train ")
    command = Command(f"{words} --num-rollouts 1 --prompts-per-rollout 2 --no-tensorboard", tmp_path / "logs")
    assert command.wait() == [0], command.output()
    assert "Qwen3ForCausalLM of 2 layers x 64, float32, lr 0.001 | 2 prompts x 32 samples" in command.output()
    assert example.next_letter([], "d", {"answer": "d"}) == 1.0 and Path("runs/tiny_hf/model-00001-of-00001.safetensors").is_file()
    assert [example.next_letter([], answer, {"answer": "d"}) for answer in ("d e", "e d", "")] == [0.5, 0.0, 0.0]
