"""`megatron-rl explain` in this process, for its tests. Starts nothing and writes nothing."""

from __future__ import annotations

import contextlib
import io
import json
import math

from megatron_rl.__main__ import main
from megatron_rl.train.rollout_files import save_rollouts
from megatron_rl.train.rollouts import RolloutBatch, Sample

# Step S of tests/helpers.py; the last response has no unmasked token.
S = ["--response-lengths", "2,4,1,3", "--prompt-ids", "a,a,b,b", "--loss-masks", "11,1111,1,000"]
STEP = ["--response-lengths", "2,4,1,3", "--prompt-ids", "a,a,b,b"]
LAYOUT = ["--context-parallel-size", "2", "--data-parallel-size", "2", "--num-microbatches", "3"]
CONSTANT = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "8"]
PROMPT_MEAN = ["--loss-aggregation", "prompt_mean"]
PER_TOKEN = ["--loss-aggregation", "token_mean", "--calculate-per-token-loss"]
# Some weights and 1 / M are float32: a rounding each, over at most seven factors.
CLOSE = {"rel": 1e-6}


# w = old / rollout probability of each response token, and its loss mask.
MISMATCH = [([0.4, 1.0], [1, 1]), ([6.0], [1]), ([1.0, 2.5, 0.9], [1, 1, 1]), ([1.1, 9.0, 1.0], [1, 0, 1])]


def mismatched_samples() -> list[Sample]:
    """Two prompts, two samples each, that another engine has sampled."""
    return [
        Sample(
            prompt_id="aabb"[index],
            tokens=[1] * (1 + len(ratios)),
            response_length=len(ratios),
            loss_mask=mask,
            reward=0.0,
            advantage=1.0 - index % 2 * 2,
            old_log_probs=[-3.0 + math.log(ratio) for ratio in ratios],
            rollout_log_probs=[-3.0] * len(ratios),
            index=index,
        )
        for index, (ratios, mask) in enumerate(MISMATCH)
    ]


def save_mismatch(path: str = "mismatch.jsonl") -> None:
    save_rollouts(path, RolloutBatch(samples=mismatched_samples(), rollout_index=0))


def explain(*arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        code = main(["explain", *arguments])
    return code, out.getvalue(), error.getvalue()


def explain_json(*arguments: str, code: int = 0) -> dict:
    """The object of --json of a command that ends with that exit code and says nothing else."""
    found, out, error = explain(*arguments, "--json")
    assert (found, error) == (code, ""), error or out
    return json.loads(out)


def chain_of(*arguments: str, code: int = 0) -> tuple[dict, list[str]]:
    found = explain_json(*arguments, code=code)
    assert found["is_sound"] == (code == 0)
    return found["chain"], found["problems"]


def stages(chain: dict) -> dict[str, str]:
    return {factor["stage"]: factor["formula"] for factor in chain["factors"]}
