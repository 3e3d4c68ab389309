"""What verl refuses in or before its first update, and what it makes of a batch without whole mini-batches."""

from __future__ import annotations

import ast
import math
import random
import re
import types
from typing import Any

import pytest
import torch
from forked import forked
from host_checkouts import VERL
from test_door_lines import judged
from test_golden_losses import functions_of, source_of

from megatron_rl.hosts import verl_refusals
from megatron_rl.hosts.settings import Settings
from megatron_rl.hosts.verl import CLASS_LINE, DOOR, MAIN
from megatron_rl.hosts.verl_refusals import BATCH, MINI_BATCH, ROLLOUTS, refusals
from megatron_rl.hosts.verl_stock import ACTOR, STOCK_MODES

OURS = f"{ACTOR}policy_loss.loss_mode=megatron_rl.gspo.sample_mean"
PROMPTS = OURS.replace("sample_mean", "prompt_mean")
CUT = f"{CLASS_LINE} +{ACTOR}policy_loss.allow_partial_prompt_groups=true"
SAMPLES, MEGATRON = f"{ACTOR}loss_agg_mode=seq-mean-token-mean", "model_engine=megatron"
CP, TP, PP = (f"{ACTOR}megatron.{kind}_parallel_size" for kind in ("context", "tensor_model", "pipeline_model"))
PADDED, CHUNKS = "actor_rollout_ref.model.use_remove_padding=False", f"{ACTOR}entropy_from_logits_with_chunking=True"
KL, ENTROPY = f"{ACTOR}use_kl_loss=True", f"{ACTOR}entropy_coeff=0.001"
OLD, DYNAMIC = "trainer.use_v1=False", f"{ACTOR}use_dynamic_bsz=True"
PER_TOKEN = f"+{ACTOR}megatron.override_transformer_config.calculate_per_token_loss=True"


CRITIC, MODEL = verl_refusals.CRITIC, verl_refusals.MODEL


def sizes(batch: int, mini_batch: int, rollouts: int = 16) -> str:
    return f"{BATCH}={batch} {MINI_BATCH}={mini_batch} {ROLLOUTS}={rollouts}"


# The overrides -> what a problem says, or what else is said behind "+"; None: neither a problem nor a word of it.
OVERRIDES: dict[str, tuple[str, str | None]] = {
    "samples, filled": (
        f"{SAMPLES} algorithm.adv_estimator=grpo {sizes(100, 32)}",
        "mini-batch: .*=32 does not divide .*=100: verl fills the batch with padding rows, and the last of 4 mini-batches has the "
        "samples of about 4 prompts. verl's N counts the padding, so its policy term has about 4/32 of the mean there; set "
        "data.train_batch_size=96 or 128",
    ),
    "tokens, filled": (sizes(100, 32), "+of about 4 prompts: an update of full size from fewer samples; set .*=96 or 128"),
    "ours, filled": (f"{OURS} {sizes(100, 32)}", "+of about 4 prompts: an update of full size from fewer samples"),
    "ours, filled, KL of samples": (
        f"{OURS} {SAMPLES} {KL} {ENTROPY} {sizes(100, 32)}",
        "its KL and entropy terms have about 4/32",
    ),
    "a batch below a mini-batch": (f"{SAMPLES} {DYNAMIC} {sizes(100, 256)}", "the mini-batch has .* 100 prompts.*100/256 .*=100$"),
    "the same, of micro-batches": (sizes(100, 256), "verl refuses a batch below a mini-batch; set .*ppo_mini_batch_size=100"),
    "whole prompts, the old trainer": (f"{PROMPTS} {OLD} {sizes(128, 48)}", "48 of 128 .* cuts prompt groups; set .*size=128, or"),
    "whole prompts, filled, KL of samples": (f"{PROMPTS} {SAMPLES} {KL} {sizes(128, 48)}", "48 of 128 .* cuts prompt groups; set"),
    "cut prompts, the old trainer": (f"{PROMPTS} {CUT} {OLD} {sizes(128, 48)}", "the old trainer raises .*; set .*=96 or 144"),
    "the old trainer": (f"{OLD} {sizes(100, 32)}", "the old trainer raises at the first update, after a rollout; set .*=96 or 128"),
    "several mini-batches": (sizes(1024, 256), "+256 of 1024 prompts a step: verl deals samples to ranks by length"),
    "several mini-batches of ours": (f"{OURS} {sizes(1024, 256)}", "+256 of 1024 prompts a step: verl deals samples"),
    "one mini-batch": (sizes(256, 256), None),
    "smaller ones of the critic": (
        f"{CRITIC}=64 {sizes(256, 256)}",
        "+64 of 256 prompts a step of critic.ppo_mini_batch_size: verl deals .* those of the critic's own mini-batch",
    ),
    "larger ones of the critic": (f"{CRITIC}=256 {sizes(256, 64)}", "+64 of 256 prompts a step: .*the critic's own mini-batch"),
    "those of the critic are the actor's": (f"{CRITIC}=256 {sizes(256, 256)}", None),
    "no critic": (f"{CRITIC}=96 algorithm.adv_estimator=grpo {sizes(256, 256)}", None),
    "those of the critic, not known": (f"{CRITIC}=$SIZE {sizes(256, 256)}", "+which samples share one is not judged"),
    "the critic, filled": (
        f"{CRITIC}=16 critic.loss_agg_mode=seq-mean-token-mean {sizes(124, 32)}",
        "critic.ppo_mini_batch_size=16 does not divide .*=124: .*the last of 8 .* its value term has about 12/16 of the mean",
    ),
    "the critic, the old trainer": (f"{OLD} {CRITIC}=24 {sizes(64, 32)}", "=24 does not divide .*the old trainer raises"),
    "the critic, a batch below a mini-batch": (
        f"{CRITIC}=256 {sizes(64, 64)}",
        "critic.ppo_mini_batch_size=256 does not divide .*verl refuses a batch below a mini-batch",
    ),
    "ranks": (
        sizes(1024, 300, 5),
        "300 x .*n=5 = 1500 samples are no multiple of 8 data-parallel ranks.*set .*mini_batch_size=304",
    ),
    "ranks and ours": (f"{OURS} {sizes(9, 3, 5)}", "3 x .*n=5 = 15 samples are no multiple of 8 data-parallel ranks.*=8$"),
    "ranks of Megatron": (f"{MEGATRON} {TP}=2 {CP}=4 {sizes(9, 3, 5)}", None),
    "ranks of another engine": (f"model_engine=veomni {sizes(9, 3, 5)}", None),
    "groups of ranks": (
        f"{MEGATRON} {TP}=2 {PP}=2 {CP}=3 trainer.nnodes=2 {sizes(9, 9)}",
        "16 ranks of .* are no multiple of 12 of",
    ),
    "groups of another engine": (f"{TP}=3 {sizes(8, 8)}", None),
    "per token": (
        f"{MEGATRON} {PER_TOKEN} {SAMPLES}",
        "calculate_per_token_loss=True: verl's first step raises with .*token-mean;",
    ),
    "per token, padded": (f"{MEGATRON} {PER_TOKEN} {PADDED}", "verl's first step raises with .*use_remove_padding=False"),
    "by cp ranks": (f"{MEGATRON} {CP}=2", "+Qwen3.5: there verl counts .*, rounded down: off by at most 2 tokens"),
    "by the model": (f"{MEGATRON} {SAMPLES} {CP}=2", "+Qwen3-VL and Qwen3.5: there verl's first step raises"),
    "by the model, ours": (f"{OURS} {MEGATRON} {SAMPLES} {CP}=2", "+raises with .*; set .*loss_agg_mode=token-mean "),
    "another model": (f"{MEGATRON} {SAMPLES} {CP}=2 {MODEL}path=/models/Qwen3-8B", None),
    "another model, per token": (f"{MEGATRON} {PER_TOKEN} {SAMPLES} {MODEL}path=/models/Qwen3-8B", "verl's first step raises"),
    **{
        f"by the model, {name}": (f"{MEGATRON} {SAMPLES} {CP}=2 {MODEL}path={name}", "+there verl's first step raises")
        for name in ("Qwen/Qwen3-VL-30B-A3B", "Qwen3.5-35B-A3B", "$MODEL_PATH", "/qwen3-8b/mine")
    },
    "by the model, padded": (f"{MEGATRON} {PADDED} {CP}=2", "+raises with .*use_remove_padding=False; set it to True"),
    "another bridge": (f"{MEGATRON} {SAMPLES} {CP}=2 {ACTOR}megatron.vanilla_mbridge=True", None),
    "cp of another engine": (f"{SAMPLES} {CP}=2 {PADDED}", None),
    "dynamic cp": (f"{MEGATRON} {CP}=2 {ACTOR}megatron.dynamic_context_parallel=True {PADDED}", "needs .*use_remove_padding=True"),
    "chunks": (f"{MEGATRON} {CHUNKS} {ENTROPY}", "more than 2048 tokens on a rank raises; set it to False, or .*verl_log_probs"),
    "chunks, by its file": (
        f"--config-name=ppo_megatron_trainer.yaml {CHUNKS} {ENTROPY}",
        "more than 2048 tokens on a rank raises",
    ),
    "chunks without entropy": (f"{MEGATRON} {CHUNKS}", None),
    "chunks of FSDP": (f"{CHUNKS} {ENTROPY}", None),
    "text for a switch": ("algorithm.norm_adv_by_std_in_grpo=Flase", "'Flase' is text, which verl may take for true"),
    "text for a switch beside ours": (f"{OURS} algorithm.use_kl_in_reward=off", "'off' is text, which verl may take for true"),
    "an estimator": ("algorithm.adv_estimator=gpro", "adv_estimator=gpro is none of gae, grpo.*; set algorithm.adv_estimator=grpo"),
    "an estimator beside ours": (f"{OURS} algorithm.adv_estimator=gpro", "adv_estimator=gpro is none of gae, grpo"),
    "a slip of our prefix": (OURS.replace("megatron_rl.", "megatron_rl_"), "set .*loss_mode=megatron_rl.gspo.sample_mean"),
    "our prefix in one word": (OURS.replace("megatron_rl.", "megatronrl."), "set .*loss_mode=megatron_rl.gspo.sample_mean"),
    "chunks of ours": (f"{MEGATRON} {CHUNKS} {ENTROPY} {verl_refusals.EXTERNAL_LIB}={verl_refusals.LOG_PROBS}", None),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_doctor_says_what_verl_refuses_and_fills(name):
    line, expected = OVERRIDES[name]
    problems, said = judged("verl", ["python3", "-m", MAIN, *line.split()])
    if expected is None or expected.startswith("+"):
        assert not problems and (expected is None or re.search(expected[1:], said)), (problems, said)
        silent = ("raises", "fills") if expected is None else ()
        assert not any(word in said for word in silent), said
    else:
        assert len(problems) == 1 and re.search(expected, problems[0]), problems
        assert "the same on every layout" not in said, said


def test_mini_batches_of_padding_alone_are_a_problem():
    """lcm(256, 96) = 768: of the actor's three mini-batches one has the 256 prompts, and of the critic's eight three have them."""
    problems, _ = judged("verl", ["python3", "-m", MAIN, *f"{CRITIC}=96 {sizes(256, 256)}".split()])
    assert len(problems) == 2 and all("256 prompts of data.train_batch_size to 768" in text for text in problems), problems
    assert f"2 of the 3 of {MINI_BATCH}=256 have" in problems[0] and f"5 of the 8 of {CRITIC}=96 have" in problems[1]


def test_a_critic_without_a_length_divides_by_the_padded_one_of_a_micro_batch():
    for factor, weight in (
        ("", "1/(N L_b)"),
        ("critic.loss_scale_factor=8", "1/(N L)"),
        (f"{ACTOR}loss_scale_factor=8", "1/(N L)"),
    ):
        line = f"critic.loss_agg_mode=seq-mean-token-sum-norm {factor} {sizes(256, 256)}"
        said = judged("verl", ["python3", "-m", MAIN, *line.split()])[1]
        assert f"value verl's own: a token weighs {weight}" in said, said


def test_the_old_trainer_divides_by_the_width_of_the_batch():
    """verl/workers/utils/padding.py keeps response_mask as wide as the batch's responses are padded."""
    for trainer, weight in (("", "1/(N L_b)"), (OLD, "1/(N L);")):
        line = f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm {trainer} {sizes(256, 256)}"
        said = judged("verl", ["python3", "-m", MAIN, *line.split()])[1]
        assert f"policy verl's own: a token weighs {weight}" in said, said


def test_fully_async_takes_whole_mini_batches():
    main = "verl.experimental.fully_async_policy.fully_async_main"
    line = ["python3", "-m", main, f"{BATCH}=0", f"{MINI_BATCH}=32", "async_training.require_batches=3"]
    problems, said = judged("verl", line)
    assert not problems and "32 of 96 prompts a step" in said, (problems, said)


# verl's own code


def wrong(given: dict[str, Any]) -> list[str]:
    settings = Settings.of_names(given, DOOR.all_defaults)
    return [row.text for row in refusals(settings, is_ours=False) if row.is_wrong]


@pytest.mark.host("VERL_ROOT")
@pytest.mark.parametrize(("batch", "size", "rollouts"), [(100, 32, 16), (96, 32, 16), (1024, 300, 5), (20, 32, 2)])
@pytest.mark.parametrize("mode", STOCK_MODES)
def test_verls_weights_in_a_filled_batch_are_as_doctor_says(mode, batch, size, rollouts):
    """The gradient of the last mini-batch against the mean over its real samples, by verl's multiple of rows and agg_loss."""
    trainer = functions_of(source_of("VERL_ROOT", "verl/trainer/ppo/v1/trainer_base.py"), "_get_required_batch_multiple", math=math)
    config = types.SimpleNamespace(
        actor_rollout_ref=types.SimpleNamespace(
            rollout=types.SimpleNamespace(n=rollouts), actor=types.SimpleNamespace(ppo_mini_batch_size=size)
        ),
        trainer=types.SimpleNamespace(critic_warmup=0),
    )
    multiple = trainer._get_required_batch_multiple(types.SimpleNamespace(use_critic=False, global_steps=1, config=config), 4)
    filled, rows = -batch * rollouts % multiple, size * rollouts
    real = rows - filled  # of the last mini-batch
    aggregate = VERL.load("verl.trainer.ppo.core_algos").agg_loss

    def gradient(number: int, samples: int) -> torch.Tensor:
        """Of rows of 3 tokens, `number` of them real; samples: verl's global_batch_size."""
        values, mask = torch.zeros(rows, 3, requires_grad=True), torch.zeros(rows, 3)
        mask[:number] = 1
        aggregate(values, mask, mode, 1, int(mask.sum()), samples, 7).backward()
        return values.grad[0, 0]

    share = float(gradient(real, rows) / gradient(real, real))
    found = [text for text in wrong({BATCH: batch, MINI_BATCH: size, ROLLOUTS: rollouts, f"{ACTOR}loss_agg_mode": mode} | USED)]
    if share == pytest.approx(1):
        assert not found, found
    else:
        assert share == pytest.approx(real / rows) and f"about {batch % size}/{size} of the mean there" in found[0], (share, found)


USED = {f"{ACTOR}use_dynamic_bsz": True, "trainer.n_gpus_per_node": 4}


@pytest.mark.host("VERL_ROOT")
@pytest.mark.parametrize(
    ("batch", "actor", "critic", "empty"),
    [(256, 256, 96, (2, 5)), (256, 256, 64, (0, 0)), (124, 32, 16, (0, 0)), (100, 32, 16, (0, 1))],
)
def test_verl_fills_a_batch_to_the_mini_batches_of_actor_and_critic(batch, actor, critic, empty):
    """And the critic's loss counts the samples of its own mini-batch, as its worker is told."""
    source = source_of("VERL_ROOT", "verl/trainer/ppo/v1/trainer_base.py")
    trainer = functions_of(
        source,
        "_get_required_batch_multiple",
        "_update_critic",
        math=math,
        rename_dict=lambda *_: {"critic/mfu": 0},
        reduce_metrics=dict,
    )
    config = types.SimpleNamespace(
        actor_rollout_ref=types.SimpleNamespace(
            rollout=types.SimpleNamespace(n=4, temperature=1.0), actor=types.SimpleNamespace(ppo_mini_batch_size=actor)
        ),
        critic=types.SimpleNamespace(ppo_mini_batch_size=critic, ppo_epochs=1, data_loader_seed=1, shuffle=False),
        trainer=types.SimpleNamespace(critic_warmup=0),
    )
    worker = types.SimpleNamespace(train_mini_batch=lambda batch: types.SimpleNamespace(get=lambda: {"metrics": {}}))
    fake = types.SimpleNamespace(use_critic=True, global_steps=1, config=config, critic_wg=worker)
    rows = batch * 4 + -batch * 4 % trainer._get_required_batch_multiple(fake, 4)
    given = types.SimpleNamespace(extra_info={})
    trainer._update_critic(fake, given, {})
    assert given.extra_info["global_batch_size"] == critic * 4
    assert tuple(rows // (size * 4) - -(-batch // size) for size in (actor, critic)) == empty
    found = wrong({BATCH: batch, MINI_BATCH: actor, CRITIC: critic, ROLLOUTS: 4, **USED})
    assert [
        f"and {number} of the {rows // (size * 4)} of" in str(found) for number, size in zip(empty, (actor, critic), strict=True)
    ] == [number > 0 for number in empty]


@pytest.mark.host("VERL_ROOT")
def test_the_last_mini_batch_of_verl_has_the_padding():
    """verl deals the rows by their work, and each rank cuts mini-batches out of its own in their order."""
    balancing = VERL.load("verl.utils.seqlen_balancing")
    rng = random.Random(1)
    lengths = [rng.randint(200, 8000) for _ in range(1600)] + [2] * 448
    work = balancing.calculate_workload(torch.tensor(lengths))
    for ranks in (1, 2, 4):
        parts = balancing.get_seqlen_balanced_partitions(work, k_partitions=ranks, equal_size=True)
        share = 512 // ranks
        cut = [sum(row < 1600 for part in parts for row in part[n * share : (n + 1) * share]) for n in range(4)]
        assert cut == [512, 512, 512, 64], (ranks, cut)


@pytest.mark.host("VERL_ROOT")
@pytest.mark.parametrize("case", [(300, 5, 8), (304, 5, 8), (3, 5, 8), (8, 5, 8), (3, 16, 8)], ids=str)
def test_verls_workers_refuse_a_mini_batch_that_ranks_do_not_divide(case):
    size, rollouts, ranks = case
    tree = source_of("VERL_ROOT", "verl/workers/engine_workers.py")
    (method,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "train_mini_batch"]
    (refusal,) = [n for n in ast.walk(method) if isinstance(n, ast.Assert) and "get_data_parallel_size() == 0" in ast.unparse(n)]
    worker = types.SimpleNamespace(engine=types.SimpleNamespace(get_data_parallel_size=lambda: ranks))
    test = compile(ast.Expression(refusal.test), "checkout", "eval")
    is_taken = eval(test, {"self": worker, "mini_batch_size": size * rollouts})
    found = wrong({BATCH: size, MINI_BATCH: size, ROLLOUTS: rollouts, "trainer.n_gpus_per_node": ranks})
    assert is_taken == (not found), found


@pytest.mark.host("VERL_ROOT")
def test_verls_entropy_in_chunks_has_no_gradient_over_several():
    def work():
        import torch.distributed as dist
        from megatron.core import parallel_state

        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        entropy = VERL.load("verl.utils.megatron.tensor_parallel").vocab_parallel_entropy_with_chunking
        for tokens, raises in ((8, False), (9, True)):
            logits = torch.randn(1, tokens, 4, requires_grad=True)
            try:
                entropy(logits * 1.0, chunk_size=8).sum().backward()
            except RuntimeError as error:
                assert raises and "modified by an inplace operation" in str(error), error
            else:
                assert not raises

    code, _, error = forked(work)
    assert code == 0, error[-3000:]
