"""The hosts' own training actors, whole, leave the parameters that `megatron-rl train` leaves on the same recorded rollouts.

MILES_ROOT=... SLIME_ROOT=... MEGATRON_LM_ROOT=... pytest -m host --require host tests/test_whole_host.py

MEGATRON_LM_ROOT is a checkout of Megatron-LM at the tag of the installed megatron-core: the hosts call megatron.training, which no
package has. tests/whole_host.py lists what is replaced. Red here means that a host has changed what it calls, or that a hook
trains something else than our command.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import trainer_cases
from forked import forked
from host_checkouts import roots_by_environment
from whole_host import MEGATRON_ROOT, run_whole

from megatron_rl.commands import main as command_line
from megatron_rl.testing.ranks import run_ranks
from megatron_rl.train.rollout_files import save_rollouts
from megatron_rl.train.rollouts import RolloutBatch, Sample, group_advantages
from megatron_rl.train.trainer import PolicyTrainer

ROOTS = roots_by_environment()
pytestmark = [
    pytest.mark.host,
    pytest.mark.megatron,
    pytest.mark.skipif(MEGATRON_ROOT not in os.environ, reason=f"needs a checkout of Megatron-LM: set {MEGATRON_ROOT} to its root"),
]
VOCABULARY, GROUP_SIZE, PROMPTS, STEPS, ROLLOUTS = 12, 4, 4, 2, 2
DIVISOR = 16
# Adam's first step is the sign of a gradient. Of 3 to 8 this seed alone has no entry so near 0 that rounding decides its sign: with
# the others our command is up to 5e-5 from itself in other micro-batches.
SEED = 7
LIMIT = 1e-5
CLIPS = {"grpo": (0.2, 0.28), "gspo": (0.04, 0.03), "cispo": (0.2, 0.28)}
# miles has no estimator of the other's name.
ESTIMATORS = ("grpo", "gspo")
LAYOUTS = {
    "dp2": "",
    "cp2": "--context-parallel-size 2",
    "tp2": "--tensor-model-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
    "dp2 in dynamic batches": "--use-dynamic-batch-size --max-tokens-per-gpu 40",
    "tp2 with sp": "--tensor-model-parallel-size 2 --sequence-parallel",
}
REDUCER = "--custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer"
CUSTOM_LOSS = (
    "--loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_loss "
    "--custom-megatron-before-train-step-hook-path megatron_rl.hooks.before_train_step"
)
# 8 rows of 12 float32 columns, 16 of 6.
FUSED = f"{CUSTOM_LOSS} --fused-lm-head-loss --max-logits-bytes 400"
DOORS = {"stock": "", "reducer": REDUCER, "custom_loss": CUSTOM_LOSS, "fused": FUSED}
# The one host with the reentrant form of torch's checkpoint, the other with the other one.
DOORS["fused, recomputed"] = f"{FUSED} --recompute-loss-function"
REWARD_HOOK = "--custom-reward-post-process-path megatron_rl.hooks.reward_post_process"
INIT_HOOK = "--custom-megatron-init-path megatron_rl.hooks.custom_megatron_init"
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --lr 3e-3 --clip-grad 1.0"
OF_HOST = f"""
    {MODEL} --adam-beta2 0.95 --weight-decay 0 --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 1
    --tokenizer-type NullTokenizer --seq-length 64 --init-method-std 0.05 --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --lr-decay-style constant --transformer-impl local --spec whole_host layer_spec --no-rope-fusion --no-masked-softmax-fusion
    --no-persist-layer-norm --no-gradient-accumulation-fusion --distributed-backend gloo --data-pad-size-multiplier 4
    --actor-num-nodes 1 --actor-num-gpus-per-node 2 --num-gpus-per-node 2 --hf-checkpoint unused --debug-train-only
    --rollout-batch-size {PROMPTS} --n-samples-per-prompt {GROUP_SIZE} --num-rollout {ROLLOUTS}
    --micro-batch-size 2 --disable-rollout-global-dataset
"""


@dataclass(frozen=True)
class WholeCase:
    door: str
    loss: str
    aggregation: str

    def __str__(self) -> str:
        return f"{self.door} {self.loss} {self.aggregation}"

    @property
    def aggregation_flags(self) -> str:
        divisor = f" --loss-aggregation-divisor {DIVISOR}" if self.aggregation == "constant" else ""
        return f"--loss-aggregation {self.aggregation}{divisor}"

    @property
    def data(self) -> str:
        """A host that divides by the step's tokens counts one for a fully masked sample, and our hooks refuse it."""
        return "without_masked_sample" if self.aggregation == "token_mean" else "with_masked_sample"

    def of_host(self, folder: Path) -> list[str]:
        low, high = CLIPS[self.loss]
        estimator = self.loss if self.loss in ESTIMATORS else f"grpo --policy-loss {self.loss}"
        words = f"{OF_HOST} --advantage-estimator {estimator} --eps-clip {low} --eps-clip-high {high} {DOORS[self.door]}"
        words += f" --load-debug-rollout-data {folder}/{self.data}/{{rollout_id}}.pt --ref-load {folder}"
        words += f" --custom-config-path {folder}/fp32.yaml"
        if self.door != "stock":
            words += f" {self.aggregation_flags} {INIT_HOOK}"
        words += f" --num-steps-per-rollout {STEPS}"
        words += {"prompt_mean": f" {REWARD_HOOK}", "token_mean": " --calculate-per-token-loss"}.get(self.aggregation, "")
        return words.split()

    def of_train(self, folder: Path) -> list[str]:
        low, high = CLIPS[self.loss]
        return f"""
            {MODEL} --vocab-size {VOCABULARY} --rollouts {folder}/{self.data}.jsonl --steps-per-rollout {STEPS} --no-bf16
            --policy-loss {self.loss} --clip-ratio-low {low} --clip-ratio-high {high} --samples-per-prompt {GROUP_SIZE}
            --output-dir {folder}/{self.loss}-{self.aggregation} --no-tensorboard
            {self.aggregation_flags}
        """.split()


AGGREGATIONS = ("sample_mean", "prompt_mean", "constant")
CASES = [WholeCase("stock", loss, "sample_mean") for loss in ESTIMATORS]
CASES += [WholeCase(door, loss, name) for door in ("reducer", "custom_loss") for loss in ESTIMATORS for name in AGGREGATIONS]
CASES += [WholeCase(door, "grpo", "token_mean") for door in ("stock", "reducer", "custom_loss", "fused")]
ROWS = [(layout, case) for layout in ("dp2", "cp2", "tp2", "pp2") for case in CASES]
ROWS += [
    (layout, WholeCase("fused", loss, "constant" if loss == "gspo" else "sample_mean"))
    for layout in ("dp2", "cp2", "tp2 with sp", "pp2")
    for loss in CLIPS
]
ROWS += [("tp2 with sp", WholeCase("fused, recomputed", "gspo", "constant"))]
ROWS += [
    (layout, case)
    for layout in ("dp2 in dynamic batches", "tp2 with sp")
    for case in (WholeCase("reducer", "grpo", "constant"), WholeCase("custom_loss", "gspo", "prompt_mean"))
]
HOSTS = sorted(ROOTS) or ["slime"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """The same rollouts for the hosts (one file a rollout) and for our command (one line a rollout)."""
    for name in ("models.gpt.gpt_layer_specs", "optimizer", "pipeline_parallel"):  # once, and not in each fork
        importlib.import_module(f"megatron.core.{name}")
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "fp32.yaml").write_text("bf16: false\n")
    for data in ("with_masked_sample", "without_masked_sample"):
        (folder / data).mkdir()
        numbers = random.Random(SEED)
        for rollout in range(ROLLOUTS):
            groups = range(rollout * PROMPTS, (rollout + 1) * PROMPTS)
            records = [record for group in groups for record in group_of(numbers, group, data == "with_masked_sample")]
            torch.save({"rollout_id": rollout, "samples": records}, folder / data / f"{rollout}.pt")
            save_rollouts(folder / f"{data}.jsonl", RolloutBatch(samples=samples_of(records), rollout_index=rollout))
    return folder


def group_of(numbers: random.Random, group: int, has_masked_sample: bool) -> list[dict]:
    """The samples of a prompt: ragged responses, masked tokens, in the second group a sample without unmasked tokens."""
    prompt = [numbers.randrange(VOCABULARY) for _ in range(numbers.randrange(1, 9))]
    records = []
    for place in range(GROUP_SIZE):
        length = numbers.randrange(1, 14)
        mask = [int(numbers.random() < 0.8) for _ in range(length)]
        if (group, place) == (1, 2):
            mask = [0] * length
        if not has_masked_sample and not any(mask):
            mask = [1] * length
        records.append(
            {
                "group_index": group,
                "index": group * GROUP_SIZE + place,
                "tokens": prompt + [numbers.randrange(VOCABULARY) for _ in range(length)],
                "response_length": length,
                "loss_mask": mask,
                "reward": numbers.gauss(0.0, 1.0),
                "status": "completed",
            }
        )
    return records


def samples_of(records: list[dict]) -> list[Sample]:
    prompt_ids = [str(record["group_index"]) for record in records]
    advantages = group_advantages([record["reward"] for record in records], prompt_ids)
    names = ("tokens", "response_length", "loss_mask", "reward", "index")
    return [
        Sample(prompt_id=prompt, advantage=advantage, old_log_probs=None, **{name: record[name] for name in names})
        for record, prompt, advantage in zip(records, prompt_ids, advantages, strict=True)
    ]


@pytest.fixture(scope="module")
def trained(recorded):
    """(loss, aggregation) -> trained_by_command of its case."""
    return functools.cache(lambda *case: trained_by_command(WholeCase("", *case).of_train(recorded)))


def trained_by_command(words: list[str]) -> tuple[dict, dict, list[float]]:
    """What `megatron-rl train` leaves on one rank: initial weights, last weights, gradient norms."""
    folder = Path(words[words.index("--output-dir") + 1])

    def child() -> int:
        seen = {}

        def of_trainer(trainer):
            return trainer_cases.whole([trainer_cases.weights_of(trainer)], VOCABULARY)

        def make(trainer, *given) -> None:
            initialise(trainer, *given)
            seen["first"] = of_trainer(trainer)

        def save(trainer, *given):
            torch.save((seen["first"], of_trainer(trainer)), folder.with_suffix(".pt"))
            return keep(trainer, *given)

        initialise, keep = PolicyTrainer.__init__, PolicyTrainer.save
        with mock.patch.object(PolicyTrainer, "__init__", make), mock.patch.object(PolicyTrainer, "save", save):
            return command_line.main(["train", *words])

    code, _, error = forked(child)
    assert code == 0, error
    with open(folder / "metrics.jsonl") as rows:
        norms = [json.loads(row)["grad_norm"] for row in rows]
    return (*torch.load(folder.with_suffix(".pt")), norms)


def trained_by_host(host: str, words: list[str]) -> list[tuple[dict, list[dict]]]:
    """New ranks for each launch: a host leaves its process groups, each with threads, and its functions in torch.distributed."""
    return run_ranks(run_whole, 2, host, ROOTS[host], os.environ[MEGATRON_ROOT], words, use_megatron=False)


def difference_of(of_ranks: list[dict], first: dict, last: dict) -> float:
    """The norm of the difference of the parameters over the norm of what the steps have moved."""
    found = trainer_cases.whole(of_ranks, VOCABULARY)
    moved, expected = ({name: weights[name] - value for name, value in first.items()} for weights in (found, last))
    return trainer_cases.relative_difference(moved, expected)


@pytest.mark.parametrize(("host", "layout", "case"), [(host, *row) for host in HOSTS for row in ROWS], ids=str)
def test_a_host_trains_what_our_command_trains(recorded, trained, host, layout, case):
    """Adam hides the scale of a gradient, so the norm that the host reports before it clips is compared too, step by step."""
    runs = trained_by_host(host, [*case.of_host(recorded), *LAYOUTS[layout].split()])
    first, last, norms = trained(case.loss, case.aggregation)
    difference = difference_of([weights for weights, _ in runs], first, last)
    (steps,) = (steps for _, steps in runs if steps)
    of_norms = max(abs(step["train/grad_norm"] / norm - 1) for step, norm in zip(steps, norms, strict=True))
    print(f"difference of the parameters {difference:.1e}, of a gradient norm {of_norms:.1e}")
    assert len(norms) == STEPS * ROLLOUTS
    assert of_norms < LIMIT, (steps, norms)
    assert difference < LIMIT
