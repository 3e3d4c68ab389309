"""`train --rollouts` on what NeMo-RL logs of a step, and on files that lack what a step needs, as the hosts write them."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import forked
from host_checkouts import NEMO_RL, PRIME_RL, ROLL, SKYRL, VERL
from test_train_options import options_of

from megatron_rl.__main__ import main
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.train.rollout_files import load_rollouts, record_of

PROMPTS = ([5, 1], [5, 1, 7])
SAMPLES = [
    # prompt, response, loss mask, sample mask, reward, advantage
    (0, [3, 2, 6], [1, 1, 1], 1.0, 1.0, 0.7),
    (0, [4], [1], 1.0, 0.0, -0.7),
    (1, [2, 8, 8, 3], [1, 0, 0, 1], 1.0, 0.5, 0.0),  # a tool's tokens
    (1, [6, 6], [1, 1], 0.0, 0.5, 0.0),  # dropped, as an overlong one
]


def columns(old: float = -1.5, sampler: float = -1.25) -> dict[str, list]:
    """What NeMo-RL hands to its logger: a row a sample, padded on the right, values of a response at its own tokens."""
    width = max(len(PROMPTS[prompt]) + len(response) for prompt, response, *_ in SAMPLES)

    def row(prompt: int, values: list) -> list:
        before = [type(values[0])(0)] * len(PROMPTS[prompt])
        return (before + values + [type(values[0])(0)] * width)[:width]

    def rows(values_of: Callable) -> list[list]:
        return [row(sample[0], values_of(sample)) for sample in SAMPLES]

    return {
        "content": [["text", "answer"] for _ in SAMPLES],
        "rewards": [sample[4] for sample in SAMPLES],
        "input_lengths": [len(PROMPTS[sample[0]]) + len(sample[1]) for sample in SAMPLES],
        "token_ids": [
            (PROMPTS[prompt] + response + [0] * width)[:width] for prompt, response, *_ in SAMPLES
        ],
        "token_loss_mask": rows(lambda sample: sample[2]),
        "sample_loss_mask": [sample[3] for sample in SAMPLES],
        "advantages": rows(lambda sample: [sample[5]] * len(sample[1])),
        "generation_logprobs": rows(lambda sample: [sampler - t / 8 for t in range(len(sample[1]))]),
        "prev_logprobs": rows(lambda sample: [old - t / 8 for t in range(len(sample[1]))] if old else [0.0] * len(sample[1])),
    }  # fmt: skip


def log(path: Path, **changed: list) -> Path:
    """As NeMo-RL's logger does: a line a sample, each value in a list of one."""
    logged = {**columns(), **changed}
    lines = [{name: [values[i]] for name, values in logged.items()} | {"idx": i} for i in range(len(SAMPLES))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


EXPECTED = [
    {
        "prompt_id": "0" if prompt == 0 else "2",
        "tokens": PROMPTS[prompt] + response,
        "response_length": len(response),
        "loss_mask": [int(value and kept) for value in mask],
        "reward": reward,
        "advantage": advantage,
        "old_log_probs": [-1.5 - t / 8 for t in range(len(response))],
        "rollout_log_probs": [-1.25 - t / 8 for t in range(len(response))],
        "index": index,
    }
    for index, (prompt, response, mask, kept, reward, advantage) in enumerate(SAMPLES)
]


def read(path: Path) -> list[list[dict]]:
    batches = [record_of(batch) for batch in load_rollouts(path, vocab_size=9)]
    assert [batch["rollout_index"] for batch in batches] == list(range(len(batches)))
    return [[{name: sample[name] for name in EXPECTED[0]} for sample in batch["samples"]] for batch in batches]


def test_a_step_that_nemo_rl_has_logged_is_a_rollout(tmp_path):
    """Catches log-probabilities that are shifted by a token, padding taken for tokens, and groups that are lost."""
    for step in (1, 2):  # its first step has this number
        log(tmp_path / f"train_data_step{step}.jsonl")
    assert read(tmp_path / "train_data_step{rollout_id}.jsonl") == [EXPECTED] * 2
    assert read(tmp_path / "train_data_step2.jsonl") == [EXPECTED]


def test_explain_reads_what_train_reads(tmp_path, capsys):
    """Four samples: 1 / (4 m_i) each; the last one is dropped, and counts in N."""
    log(tmp_path / "train_data_step1.jsonl")
    step = ["explain", "--rollouts", str(tmp_path / "train_data_step{rollout_id}.jsonl"), "--loss-aggregation", "sample_mean"]
    assert main([*step, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    counts = [sum(one["loss_mask"]) for one in EXPECTED]
    assert found["token_counts"] == counts and found["prompt_ids"] == [one["prompt_id"] for one in EXPECTED]
    assert found["aggregations"]["sample_mean"]["token_weights"] == pytest.approx([1 / (4 * m) if m else 0 for m in counts])
    verl = tmp_path / "verl.jsonl"
    verl.write_text('{"input": "a", "output": "b", "score": 1.0}\n')
    assert main(["explain", "--rollouts", str(verl)]) == 1 and "this is a file of verl" in capsys.readouterr().err


def test_old_log_probs_that_nemo_rl_did_not_measure_are_none(tmp_path):
    """Under force_on_policy_ratio it logs zeros, and each token would be a phantom."""
    [samples] = read(log(tmp_path / "a.jsonl", prev_logprobs=columns(old=0)["prev_logprobs"]))
    assert [sample["old_log_probs"] for sample in samples] == [None] * 4


def test_the_rewards_of_a_dynamic_batch_are_the_filtered_ones(tmp_path):
    filtered = columns()["rewards"]
    [samples] = read(log(tmp_path / "a.jsonl", rewards=[9.0] * 4, filtered_rewards=filtered))
    assert [sample["reward"] for sample in samples] == filtered


FAULTS = [
    pytest.param({"advantages": [[t / 8 for t in range(7)]] * 4}, "line 1: advantages: from 0.25 to 0.5 .*one here.*grpo", id="2"),
    pytest.param({"token_loss_mask": [[0] * 7] * 4}, "line 1: token_loss_mask: no token of the sample is unmasked", id="masked"),
    pytest.param({"input_lengths": [8] * 4}, "line 1: token_ids: 7 values for input_lengths 8", id="cut"),
    pytest.param({"rewards": [None] * 4}, "line 1: rewards: must be a list with one number in it", id="reward"),
    pytest.param({"token_ids": [[90] * 7] * 4}, "a.jsonl, sample 0: tokens: 90 at position 0", id="vocabulary"),
    pytest.param({"prev_logprobs": [["x"] * 7] * 4}, "a.jsonl, sample 0: old_log_probs: must be null or a list", id="words"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), FAULTS)
def test_a_log_that_cannot_be_trained_is_refused_with_its_line(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        read(log(tmp_path / "a.jsonl", **change))


@pytest.mark.host("NEMO_RL_ROOT")
def test_what_nemo_rl_s_logger_writes_is_what_is_read(tmp_path):
    def work() -> int:
        logger = NEMO_RL.load("nemo_rl.utils.logger")
        for step in (1, 2):
            logger.Logger.log_batched_dict_as_jsonl(
                SimpleNamespace(base_log_dir=str(tmp_path)), columns(), f"train_data_step{step}.jsonl"
            )
        return 0

    code, _, error = forked(work)
    assert code == 0, error
    assert read(tmp_path / "train_data_step{rollout_id}.jsonl") == [EXPECTED] * 2


# Files that are refused: what the host's own function writes, and what a line or the name has


def written_by_verl(folder: Path) -> Path:
    """Its function alone: the module takes twenty seconds."""
    source = VERL.source("verl/trainer/ppo/ray_trainer.py")
    named = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    scope = {"json": json, "os": os}
    exec(textwrap.dedent("    " + ast.get_source_segment(source, named["_write_generations"])), scope)
    extra = {"request_id": ["a", "b"], "acc": [1, 0]}
    scope["_write_generations"](["1+1="] * 2, ["2", "3"], ["2"] * 2, [1.0, 0.0], extra, str(folder), 1)
    return folder / "1.jsonl"


def written_by_roll(folder: Path) -> Path:
    utils = ROLL.load("roll.pipeline.rlvr.utils")
    utils.Timer = lambda **options: contextlib.nullcontext(SimpleNamespace(last=0.0))  # of a package that is stubbed
    data = {"global_step": [3, 3], "prompt": ["1+1="] * 2, "responses": ["2", "3"], "scores": [1.0, 0.0]}
    utils.write_to_json_process(str(folder), data | {"sampling_params": ["{}"] * 2}, utils.COLUMMNS_CONFIG)
    return folder / "rollout_dump_data.step_3.jsonl"


def written_by_prime_rl(folder: Path) -> Path:
    stubbed = (*PRIME_RL.stubbed, "prime_rl.configs", "prime_rl.trainer.rl.loss")
    export = replace(PRIME_RL, stubbed=stubbed).load("prime_rl.trainer.rl.token_export")
    of_tokens = dict.fromkeys(("advantages", "inference_logprobs"), torch.full((1, 3), -0.5))
    batch = {**of_tokens, "input_ids": torch.tensor([[1, 2, 3]]), "position_ids": torch.arange(3)[None], "env_names": ["a"] * 3}
    batch["loss_mask"] = torch.tensor([[False, True, True]])
    exporter = export.TokenExporter(folder, 0)
    export._compute_export_tensors = lambda *given: dict.fromkeys(
        ("log_importance_ratio", "importance_ratio", "mismatch_kl", "prob_delta", "is_masked", "is_masked_high", "is_masked_low")
    )
    exporter.export(1, 0, batch, {"logprobs": torch.zeros(1, 3), "entropy": torch.zeros(1, 3)}, [3], None)
    return folder / "token_exports" / "step_1" / "rank_0.jsonl"


def written_by_skyrl(folder: Path) -> Path:
    batch = SKYRL.load("skyrl.backends.skyrl_train.training_batch").TrainingInputBatch({"sequences": torch.ones(2, 3)})
    batch.metadata = {}
    batch.save(str(folder / "global_step_1_training_input.pkl"))
    return folder / "global_step_1_training_input.pkl"


LACKING = {
    # the host's checkout, what writes, a line of its own, what is said
    "verl": ("VERL_ROOT", written_by_verl, {"input": "1+1=", "output": "2", "score": 1.0}, r"verl \(trainer.rollout_data_dir\)"),
    "ROLL": ("ROLL_ROOT", written_by_roll, {"responses": [], "scores": [], "sampling_params": []}, r"ROLL \(rollout_dump_dir\)"),
    "prime-rl": (
        "PRIME_RL_ROOT",
        written_by_prime_rl,
        {"token_ids": [1], "inference_logprobs": [0.0], "trainer_logprobs": [0.0]},
        r"prime-rl \(enable_token_export\)",
    ),
    "SkyRL": ("SKYRL_ROOT", written_by_skyrl, "a.pkl", r"SkyRL \(trainer.dump_data_batch\)"),
    "TRL": (None, None, "completions_00001.parquet", r"TRL \(log_completions\)"),
}


def refusal_of(path: Path) -> str:
    with pytest.raises(ConfigError) as at_start:
        options_of(f"--rollouts {path}")
    with pytest.raises(DataError) as refused:
        load_rollouts(path)
    assert at_start.value.problems == (f"--rollouts {refused.value}",)
    return str(refused.value)


@pytest.mark.parametrize("host", LACKING)
def test_a_file_that_lacks_something_is_refused_before_the_run_with_what_to_write(tmp_path, host):
    _, _, line, name = LACKING[host]
    path = tmp_path / (line if isinstance(line, str) else "a.jsonl")
    path.write_text("x" if isinstance(line, str) else json.dumps(line) + "\n")
    said = refusal_of(path)
    assert name.replace("\\", "") in said and "write its samples as lines of --save-rollouts, whose form is in train/" in said


class Experience:
    """As OpenRLHF has it, which writes none: whoever saves his own gets objects of its class."""

    def __init__(self):
        self.sequences, self.info = torch.ones(2, 3), {}


@pytest.mark.parametrize(("sample", "name"), [(Experience(), "test_rollout_forms.Experience"), ([1, 2], "list")])
def test_objects_in_a_dump_are_named(tmp_path, sample, name):
    torch.save([sample], tmp_path / "0.pt")
    with pytest.raises(DataError, match=f"0.pt, sample 0: {name} in the place of a dict of .*; write its samples as lines of"):
        list(load_rollouts(tmp_path / "0.pt"))


@pytest.mark.parametrize(
    "host", [pytest.param(host, marks=pytest.mark.host(row[0])) for host, row in LACKING.items() if row[0] is not None]
)
def test_what_a_host_s_own_function_writes_is_known(tmp_path, host):
    _, write, _, name = LACKING[host]
    code, out, error = forked(lambda: print(write(tmp_path)))
    assert code == 0, error
    assert name.replace("\\", "") in refusal_of(Path(out.splitlines()[-1]))
