"""verl's own training worker, whole, leaves the parameters that our trainer leaves on the same rollouts: FSDP and Megatron engines.

VERL_ROOT=... pytest -m host --require host tests/test_verl_engines.py

It needs what verl imports: tensordict, hydra-core, transformers, accelerate, peft, codetiming, datasets, dill, fastapi, orjson,
pandas, pillow, ray, uvicorn. tests/verl_engines.py lists what is replaced. Red here means that verl has changed what it calls, or
that our loss gets another scale from its engine.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from test_hf import save_tokenizer, small_model
from test_whole_host import VOCABULARY, group_of, samples_of
from verl_engines import BETA2, CLIP_GRAD, EPS, GROUP_SIZE, LR, EngineLayout, Rollout, VerlRun, run_verl, weights_in

from megatron_rl.config import PolicyLossConfig
from megatron_rl.testing.ranks import run_ranks
from megatron_rl.train.hf_weights import read_hf_model
from megatron_rl.train.rollouts import Sample
from megatron_rl.train.trainer import PolicyTrainer, TrainerSettings

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[train]'")
NEEDED = "tensordict hydra accelerate peft codetiming datasets dill fastapi orjson pandas PIL ray uvicorn".split()
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.host("VERL_ROOT"),
    pytest.mark.megatron,
    pytest.mark.skipif(bool(MISSING), reason=f"verl's own requirements are not installed: {', '.join(MISSING)}"),
]

PROMPTS, ROLLOUTS, DIVISOR, TEMPERATURE = 3, 3, 16, 0.9
SPECIAL = 2  # ids in front, of which transformers gives padding no gradient
CLIPS = {"grpo": (0.2, 0.28), "gspo": (0.04, 0.03), "cispo": (1.0, 0.28)}
NO_DUAL_CLIP = {"clip_ratio_c": 1e9}
# Of what the steps have moved. Float32, three steps; a sample that counts twice is 0.1.
LIMIT = 1e-5
AGGREGATIONS = ("sample_mean", "prompt_mean", "token_mean", "constant")
FSDP = EngineLayout(engine="fsdp2", micro_batch_size=12)
MEGATRON = replace(FSDP, engine="megatron")
TP, PP, CP = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
LAYOUTS = [
    FSDP,
    replace(FSDP, micro_batch_size=3),
    replace(FSDP, world_size=2, micro_batch_size=2),
    replace(FSDP, world_size=2, micro_batch_size=None),
    MEGATRON,
    replace(MEGATRON, world_size=2, micro_batch_size=2),
    replace(MEGATRON, world_size=2, micro_batch_size=None),
    replace(MEGATRON, world_size=2, micro_batch_size=3, parallel={CP: 2}),
    replace(MEGATRON, world_size=4, micro_batch_size=3, parallel={CP: 2}),
    replace(MEGATRON, world_size=2, micro_batch_size=4, parallel={TP: 2}),
    replace(MEGATRON, world_size=2, micro_batch_size=3, parallel={PP: 2}),
    replace(MEGATRON, world_size=2, micro_batch_size=2, remove_padding=False),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    small_model(
        vocab_size=VOCABULARY + SPECIAL, head_dim=16, eos_token_id=0, initializer_range=0.1, tie_word_embeddings=False
    ).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@functools.cache
def rollouts() -> list[list[Sample]]:
    """Ragged prompts and responses, masked tokens in their middle, and a sample without an unmasked token."""
    numbers, made = random.Random(5), []
    for _ in range(ROLLOUTS):
        samples = samples_of([record for group in range(PROMPTS) for record in group_of(numbers, group, True)])
        made.append([replace(one, tokens=one.tokens + SPECIAL, old_log_probs=random_log_probs(numbers, one)) for one in samples])
    return made


def random_log_probs(numbers: random.Random, sample: Sample) -> list[float]:
    return [numbers.gauss(-3.2, 0.3) for _ in range(sample.response_length)]


def as_rollout(samples: list[Sample]) -> Rollout:
    prompts = max(len(sample.tokens) - sample.response_length for sample in samples)
    width = max(sample.response_length for sample in samples)
    rows = {name: torch.zeros(len(samples), prompts + width, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    of_response = {name: torch.zeros(len(samples), width) for name in ("response_mask", "old_log_probs")}
    for row, sample in enumerate(samples):
        start = prompts - (len(sample.tokens) - sample.response_length)
        rows["input_ids"][row, start : start + len(sample.tokens)] = sample.tokens
        rows["attention_mask"][row, start : start + len(sample.tokens)] = 1
        of_response["response_mask"][row, : sample.response_length] = sample.loss_mask.float()
        of_response["old_log_probs"][row, : sample.response_length] = sample.old_log_probs
    positions = (rows["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    halves = {"prompts": rows["input_ids"][:, :prompts], "responses": rows["input_ids"][:, prompts:]}
    tensors = {**rows, **halves, **of_response, "position_ids": positions}
    tensors["response_mask"] = tensors["response_mask"].long()
    if samples[0].ref_log_probs is not None:
        tensors["ref_log_prob"] = torch.zeros(len(samples), width)
        for row, sample in enumerate(samples):
            tensors["ref_log_prob"][row, : sample.response_length] = sample.ref_log_probs
    return Rollout(
        tensors=tensors,
        rewards=torch.tensor([sample.reward for sample in samples]),
        prompt_ids=[sample.prompt_id for sample in samples],
        temperature=TEMPERATURE,
    )


def verl_run(loss: str, aggregation: str, mini_batches: int = 1, **actor: Any) -> VerlRun:
    low, high = CLIPS[loss]
    divisor = {"loss_scale_factor": DIVISOR} if aggregation == "constant" else {}
    return VerlRun(
        loss_mode=f"megatron_rl.{loss}.{aggregation}",
        actor={"clip_ratio_low": low, "clip_ratio_high": high, **({} if loss == "cispo" else NO_DUAL_CLIP), **divisor, **actor},
        mini_batches=mini_batches,
    )


def truth_on_rank(
    rank: int, folder: str, rows: list[tuple[str, str]], steps: list[list[Sample]], **regularizers: Any
) -> list[dict[str, torch.Tensor]]:
    """The weights that our trainer leaves, by their names in the folder's format."""
    found, model = [], read_hf_model(folder)
    for loss, aggregation in rows:
        low, high = CLIPS[loss]
        config = PolicyLossConfig(
            policy_loss=loss,
            loss_aggregation=aggregation,
            loss_aggregation_divisor=DIVISOR if aggregation == "constant" else None,
            clip_ratio_low=low,
            clip_ratio_high=high,
            policy_temperature=TEMPERATURE,
            samples_per_prompt=None if aggregation != "prompt_mean" else GROUP_SIZE,
            **regularizers,
        )
        settings = TrainerSettings(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            vocab_size=model.vocab_size,
            max_sequence_length=64,
            lr=LR,
            adam_beta2=BETA2,
            adam_eps=EPS,
            clip_grad=CLIP_GRAD,
            hf_model=model,
        )
        trainer = PolicyTrainer(settings, config, torch.device("cpu"))
        for samples in steps:
            trainer.step([samples])
        saved = Path(mkdtemp(dir=folder), "saved")
        trainer.save_hf(saved)
        found.append(weights_in(saved))
    return found


def differences(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> float:
    """The norm of the difference over the norm of what the steps have moved."""
    assert found.keys() == truth.keys() == before.keys()
    moved = sum(float((truth[name] - value).double().square().sum()) for name, value in before.items())
    return (sum(float((found[name] - value).double().square().sum()) for name, value in truth.items()) / moved) ** 0.5


ROWS = [(loss, aggregation) for loss in CLIPS for aggregation in AGGREGATIONS]


@pytest.fixture(scope="module")
def truth(folder):
    return run_ranks(truth_on_rank, 1, str(folder), ROWS, rollouts(), timeout=300)[0]


@pytest.fixture(scope="module")
def before(folder):
    return weights_in(folder)


def trained_by_verl(
    folder: Path, layout: EngineLayout, runs: list[VerlRun], batches: list[Rollout] | None = None
) -> list[dict[str, torch.Tensor]]:
    """batches: of the steps; None: of rollouts()."""
    batches = [as_rollout(samples) for samples in rollouts()] if batches is None else batches
    arguments = (os.environ["VERL_ROOT"], str(folder), layout, runs, batches)
    return run_ranks(run_verl, layout.world_size, *arguments, use_megatron=False, timeout=600)[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_verls_training_worker_leaves_the_parameters_of_our_trainer(folder, truth, before, layout):
    found = trained_by_verl(folder, layout, [verl_run(*row) for row in ROWS])
    errors = {row: differences(weights, expected, before) for row, weights, expected in zip(ROWS, found, truth, strict=True)}
    print(f"largest difference {max(errors.values()):.1e}")
    assert max(errors.values()) < LIMIT, errors


def cut_into_rows(samples: list[Sample]) -> Rollout:
    """Each sample as one row to three of the same tokens, of which each trains a part, dealt anywhere; and rows that verl adds."""
    rows, sessions = [], []
    for index, sample in enumerate(samples):
        number, mask = 1 + index % 3, sample.loss_mask
        for part in range(number):
            own = torch.zeros_like(mask)
            cut = slice(part * len(mask) // number, (part + 1) * len(mask) // number)
            own[cut] = mask[cut]
            rows.append(replace(sample, loss_mask=own))
            sessions.append(index % GROUP_SIZE)
    numbers = {"reward": 0.0, "advantage": 0.0, "old_log_probs": [0.0], "index": len(rows)}
    rows += [Sample(prompt_id="pad5", tokens=[0, 0], response_length=1, loss_mask=[0], **numbers)] * 4
    order = random.Random(7).sample(range(len(rows)), len(rows))
    rows, sessions = [rows[row] for row in order], [[*sessions, *range(4)][row] for row in order]
    whole = as_rollout(rows)
    advantages = torch.tensor([row.advantage for row in rows])[:, None] * whole.tensors["response_mask"]
    return replace(whole, sessions=sessions, advantages=advantages)


OF_ROWS = [
    replace(FSDP, world_size=2, micro_batch_size=2),
    replace(MEGATRON, world_size=2, micro_batch_size=None),
    replace(MEGATRON, world_size=4, micro_batch_size=2, parallel={CP: 2}),
]


@pytest.mark.parametrize("layout", OF_ROWS, ids=str)
def test_rollouts_cut_into_rows_leave_the_parameters_of_whole_ones(folder, truth, before, layout):
    """FB-141: a rollout's rows on both data-parallel ranks, in any micro-batch; a rollout without a token; rows that verl adds."""
    rows = [("grpo", aggregation) for aggregation in AGGREGATIONS] + [("cispo", "sample_mean")]
    batches = [cut_into_rows(samples) for samples in rollouts()]
    found = trained_by_verl(folder, layout, [verl_run(*row) for row in rows], batches)
    errors = {row: differences(weights, truth[ROWS.index(row)], before) for row, weights in zip(rows, found, strict=True)}
    print(f"largest difference {max(errors.values()):.1e}")
    assert max(errors.values()) < LIMIT, errors
    uncounted_batches = [replace(batch, sessions=None) for batch in batches]
    (uncounted,) = trained_by_verl(folder, layout, [verl_run(*rows[0])], uncounted_batches)
    assert differences(uncounted, truth[0], before) > 1e3 * LIMIT  # else the cut would say nothing


WITH_OURS = [
    replace(FSDP, world_size=2, micro_batch_size=2, has_our_log_probs=True),
    *(
        replace(MEGATRON, world_size=2, micro_batch_size=3, parallel={size: 2}, has_our_log_probs=True, is_fused=is_fused)
        for size in (CP, PP)
        for is_fused in (False, True)
    ),
    replace(MEGATRON, world_size=2, micro_batch_size=4, parallel={TP: 2}, has_our_log_probs=True, is_fused=True),
]


@pytest.mark.parametrize("layout", WITH_OURS, ids=str)
def test_verls_training_worker_leaves_the_same_parameters_by_our_log_probabilities_and_our_head(folder, truth, before, layout):
    rows = [(loss, "sample_mean") for loss in CLIPS]
    found = trained_by_verl(folder, layout, [verl_run(*row) for row in rows])
    for row, weights in zip(rows, found, strict=True):
        assert differences(weights, truth[ROWS.index(row)], before) < LIMIT, row


# verl's own functions of logits, ours, and our head.
BY = ({}, {"has_our_log_probs": True}, {"has_our_log_probs": True, "is_fused": True})


def by_own_loss(
    folder: Path, layout: EngineLayout, *ways: dict, temperature: float | torch.Tensor
) -> list[dict[str, torch.Tensor]]:
    """The weights that verl's worker leaves of its own loss and an entropy bonus, in each of these ways."""
    run = VerlRun(loss_mode="vanilla", actor={"entropy_coeff": 0.3, "clip_ratio_low": 0.1})
    batches = [replace(as_rollout(samples), temperature=temperature) for samples in rollouts()]
    return [trained_by_verl(folder, replace(layout, **way), [run], batches)[0] for way in ways]


MIXED = torch.tensor([0.7, 1.3, 1.0] * 4)
OF_TWO_TEMPERATURES = [
    replace(FSDP, world_size=2, micro_batch_size=3, backend="torch"),
    replace(MEGATRON, world_size=2, micro_batch_size=3, parallel={CP: 2}),
    replace(MEGATRON, world_size=2, micro_batch_size=4, parallel={TP: 2}),
    replace(MEGATRON, micro_batch_size=4, remove_padding=False),
]


@pytest.mark.parametrize("layout", OF_TWO_TEMPERATURES, ids=str)
def test_verls_batch_of_two_temperatures_is_trained_by_our_functions_and_head_as_by_its_logits(folder, before, layout):
    """verl refuses its own head for it, and for rows with padding; its fused kernel needs CUDA."""
    theirs, *ours = by_own_loss(folder, layout, *BY, temperature=MIXED)
    assert [differences(one, theirs, before) < LIMIT for one in ours] == [True] * 2
    (one,) = by_own_loss(folder, layout, BY[0], temperature=0.7)
    assert differences(one, theirs, before) > 1e3 * LIMIT  # else the temperature would say nothing


OF_MTP = [
    replace(MEGATRON, micro_batch_size=4, has_mtp=True),
    replace(MEGATRON, world_size=2, micro_batch_size=3, parallel={CP: 2}, has_mtp=True),
    replace(MEGATRON, world_size=2, micro_batch_size=4, parallel={TP: 2}, has_mtp=True),
]


@pytest.mark.parametrize("layout", OF_MTP, ids=str)
def test_verls_loss_of_mtp_is_trained_beside_our_head_as_beside_its_logits(folder, layout):
    """verl turns its own head off for MTP. The loss of MTP has verl's weight, and trains its layer and the trunk."""
    theirs, ours = by_own_loss(folder, layout, BY[0], BY[2], temperature=MIXED)
    run = VerlRun(loss_mode="vanilla", actor={})
    (start,) = trained_by_verl(folder, layout, [run], [])
    assert differences(ours, theirs, start) < LIMIT
    assert any("mtp" in name and not torch.equal(value, start[name]) for name, value in theirs.items())


@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
def test_a_batch_of_several_mini_batches_is_several_steps_of_our_trainer(folder, before, engine):
    """Each rank cuts its mini-batches out of its own part of the batch. prompt_mean refuses such a batch."""
    layout = replace(FSDP, engine=engine, world_size=2, micro_batch_size=3)
    rows = [(loss, aggregation) for loss, aggregation in ROWS if aggregation != "prompt_mean"]
    found = trained_by_verl(folder, layout, [verl_run(*row, mini_batches=2) for row in rows])
    steps = [samples[part : part + 3] + samples[part + 6 : part + 9] for samples in rollouts() for part in (0, 3)]
    expected = run_ranks(truth_on_rank, 1, str(folder), rows, steps, timeout=300)[0]
    errors = {row: differences(*weights, before) for row, *weights in zip(rows, found, expected, strict=True)}
    assert max(errors.values()) < LIMIT, errors


@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
def test_verls_kl_term_by_our_estimator_is_that_of_our_trainer(folder, truth, before, engine):
    """kl_loss_type=unbiased, the mean over samples as ours is; two data-parallel ranks and micro-batches."""
    numbers = random.Random(6)
    steps = [
        [replace(sample, ref_log_probs=torch.tensor(random_log_probs(numbers, sample))) for sample in samples]
        for samples in rollouts()
    ]
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "unbiased", "loss_agg_mode": "seq-mean-token-mean"}
    layout = replace(FSDP, engine=engine, world_size=2, micro_batch_size=2)
    (found,) = trained_by_verl(folder, layout, [verl_run("grpo", "sample_mean", **kl)], list(map(as_rollout, steps)))
    ours = partial(truth_on_rank, kl_coefficient=0.3, kl_estimator="unbiased")
    ((expected,),) = run_ranks(ours, 1, str(folder), [("grpo", "sample_mean")], steps, timeout=300)
    assert differences(found, expected, before) < LIMIT
    assert differences(truth[0], expected, before) > 1e3 * LIMIT  # without KL it is another model


def test_each_aggregation_and_loss_trains_another_model(truth, before):
    """Else the comparison above would say nothing of them."""
    for number, first in enumerate(truth):
        for second in truth[:number]:
            assert differences(first, second, before) > 1e3 * LIMIT
