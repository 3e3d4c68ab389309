"""What our adapters take for granted of each host, in a checkout: lines that no test runs, and what flags of miles and slime mean.

Red here: the host has moved; read what a line did, then look at what our adapter makes of it. Other tests run the hosts' workers,
losses and schedules, and a start refuses a function of another signature; the lines are of drivers, parsers and samplers.

VERL_ROOT=... NEMO_RL_ROOT=... SLIME_ROOT=... pytest -m host --require host tests/test_host_contracts.py
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import pool_of
from host_checkouts import roots_by_environment
from host_emulator import run_cases
from host_steps import ICEPOP_OF, OWN_LOSS, PER_TOKEN, SHAPES, Case

# What a weight rests on, and what is said of samplers that keep a part of the vocabulary: host -> file -> exact text.
LINES: dict[str, dict[str, tuple[str, ...]]] = {
    "verl": {
        "verl/trainer/ppo/ray_trainer.py": (
            'adv_kwargs["index"] = data.non_tensor_batch["uid"]',
            '"token_level_rewards": data.batch["token_level_rewards"],',
            "global_batch_size=ppo_mini_batch_size,",
            "ppo_mini_batch_size = ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n",
        ),
        "verl/trainer/main_ppo.py": (
            "from verl.utils.config import validate_config",
            "validate_config(\n        config=config,",
        ),
        "verl/trainer/ppo/v1/trainer_base.py": (
            '"global_batch_size": ppo_mini_batch_size,',
            "data, is_metrics = compute_rollout_correction_and_add_to_batch(data, rollout_corr_config)",
            'rollout_corr_config is not None and "rollout_log_probs" in data.batch and not bypass_recomputing_logprobs',
        ),
        "verl/trainer/ppo/v1/agent_loop_tq.py": ('field["loss_mask"] = field["response_mask"]',),
        "verl/trainer/ppo/padding_utils.py": (
            "prompts = torch.full((1,), eos_token_id, dtype=torch.int64)",
            "response_mask = torch.zeros_like(prompts)",
            'pad_uid = f"pad{uuid.uuid4().hex}"',
        ),
        "verl/trainer/config/ppo_trainer.yaml": ("use_v1: true",),
        "verl/trainer/config/algorithm/rollout_correction.yaml": (
            *("rollout_is: null", "rollout_is_threshold: 2.0", "rollout_is_batch_normalize: false"),
        ),
        "verl/trainer/config/rollout/rollout.yaml": (
            *("calculate_log_probs: True", "\ntop_k: -1\n", "\ntop_p: 1\n", "\nlogprobs_mode: processed_logprobs\n"),
        ),
        "verl/experimental/agent_loop/agent_loop.py": ("top_p=config.top_p,", "top_k=config.top_k,"),
    },
    "nemo_rl": {
        "nemo_rl/models/megatron/setup.py": (
            *("model_cfg.calculate_per_token_loss = True", "average_in_collective=False"),
            'config["megatron_cfg"].get("use_fused_linear_logprobs", False)',
        ),
        "nemo_rl/models/megatron/data.py": (
            'local_valid_seqs = torch.sum(batch["sample_mask"])',
            'batch["token_mask"][:, 1:] * batch["sample_mask"].unsqueeze(-1)',
            "torch.distributed.all_reduce(to_reduce, group=dp_group)",
        ),
        "nemo_rl/algorithms/grpo.py": (
            "loss_fn = ClippedPGLossFn(",
            "adv_estimator = _create_advantage_estimator(master_config)",
            "mask = token_mask * sample_mask.unsqueeze(-1)",
        ),
        "nemo_rl/algorithms/utils.py": ("logprobs = torch.where(mask.bool(), logprobs, 0.0)",),
    },
    "roll": {
        "roll/distributed/strategy/megatron_strategy.py": (
            "micro_batch.meta_info['loss_scale'] = num_microbatches * mpu.get_data_parallel_world_size()",
            # Nobody reads the logits after the loss, which may write over them.
            "loss, metrics = loss_func(data, output_tensor)\n                if self.worker_config.apply_loss_scale:",
        ),
        "roll/distributed/strategy/strategy.py": (
            'num_valid = torch.tensor(len(batch), device=batch.batch["input_ids"].device)',
            'out["default"] = num_valid',
            "dist.all_reduce(num, op=dist.ReduceOp.SUM, group=dp_group)",
        ),
        "mcore_adapter/src/mcore_adapter/models/model_factory.py": ("[cp_rank, (2 * cp_size - cp_rank - 1)]",),
        "roll/pipeline/rlvr/rlvr_pipeline.py": (
            "batch.meta_info[\"loss_mask_keys\"] = ['response_mask', 'final_response_mask']",
            "if self.pipeline_config.enable_old_logprobs_recompute:",
        ),
        "roll/configs/generating_args.py": (
            "top_p: Optional[float] = field(\n        default=0.7,",
            "top_k: Optional[int] = field(\n        default=50,",
        ),
    },
    "skyrl": {
        "skyrl/train/utils/utils.py": ("assert cfg.trainer.train_batch_size % cfg.trainer.policy_mini_batch_size == 0,",),
        "skyrl/train/config/config.py": (
            *("train_batch_size: int = 1024", "policy_mini_batch_size: int = 256"),
            *("    top_p: float = 1.0\n", "    min_p: float = 0.0\n", "    top_k: int = -1\n"),
        ),
        "skyrl/backends/skyrl_train/workers/megatron/megatron_model_wrapper.py": (
            "grad_sum_correction_factor = num_microbatches * dp_size",
            "policy_loss * grad_sum_correction_factor",
            "rollout_logprobs=rollout_action_logprobs",
        ),
    },
    "miles": {
        "miles/utils/arguments.py": ('"--rollout-top-p", type=float, default=1.0', '"--rollout-top-k", type=int, default=-1')
    },
    "slime": {
        "slime/utils/arguments.py": ('"--rollout-top-p", type=float, default=1.0', '"--rollout-top-k", type=int, default=-1'),
        "slime/backends/megatron_utils/actor.py": ("use_rollout_top_p_replay=True",),
        "slime/backends/megatron_utils/loss.py": ("if args.rollout_top_p == 1.0:",),
    },
    "megatron_lm": {
        "megatron/training/arguments.py": (
            "'--rl-default-top-p', type=float, default=0,",
            "'--rl-default-top-k', type=int, default=-1,",
        ),
    },
}


@pytest.mark.parametrize("host", [pytest.param(name, marks=pytest.mark.host(f"{name.upper()}_ROOT")) for name in LINES])
def test_the_lines_that_an_adapter_rests_on_are_there(host):
    root = Path(os.environ[f"{host.upper()}_ROOT"])
    moved = [(file, line) for file, lines in LINES[host].items() for line in lines if line not in (root / file).read_text()]
    assert moved == []


ROOTS, MARKS = roots_by_environment(), [pytest.mark.host, pytest.mark.megatron]
HOSTS = [pytest.param(host, marks=MARKS) for host in sorted(ROOTS) or ["miles"]]
pool = pool_of(2)


# The hosts' flags in our loss, against their own loss. tests/test_hosts.py has the float64 truth.

EXACT, ACTS = 1e-6, 1e-3  # relative to the largest gradient of float32
GSPO, CISPO = {"advantage_estimator": "gspo"}, {"advantage_estimator": "cispo"}
SAMPLER = {"use_opsm": True, "opsm_delta": 0.05, "use_rollout_logprobs": True}
LOW_VAR, UNBIASED = {"kl_loss_type": "low_var_kl"}, {"use_unbiased_kl": True}
TIS, ICEPOP = {"use_tis": True}, {"use_tis": True, "custom_tis_function_path": "icepop"}
# Where the reference is far from the policy.
BEYOND = "beyond the clamp"
FLAGS: dict[str, dict] = {
    "tis": TIS,
    "tis, gspo, per token": TIS | GSPO | PER_TOKEN,
    "icepop": ICEPOP,
    "icepop, gspo": ICEPOP | GSPO,
    "OPSM of the sampler": SAMPLER,
    "OPSM of the sampler, gspo, per token": SAMPLER | GSPO | PER_TOKEN,
    "k1": {"kl_loss_type": "k1"},
    "k2": {"kl_loss_type": "k2"} | PER_TOKEN,
    f"k3 {BEYOND} of low_var_kl": {"kl_loss_type": "k3"},
    "low_var_kl": LOW_VAR,
    "unbiased": {"kl_loss_type": "k3"} | UNBIASED,
    "unbiased by the token's ratio": LOW_VAR | UNBIASED | GSPO,
    "cispo": CISPO,
    "cispo without a lower bound, tis": {"eps_clip": 5.0} | TIS | CISPO,
    **{f"dual clip, {loss}": {"eps_clip_c": 1.02, "advantage_estimator": loss} for loss in ("grpo", "gspo")},
}


def case_of(host: str, name: str, settings: dict) -> Case:
    if "kl_loss_type" in settings:
        settings = settings | {"use_kl_loss": True, "kl_loss_coef": 0.3}
    if "custom_tis_function_path" in settings:
        settings = settings | {"custom_tis_function_path": ICEPOP_OF[host]}
    case = Case(host=host, settings=settings, without=(), ref_noise=3.5 if BEYOND in name else 0.4, size=3)
    return replace(case, shapes=SHAPES) if settings.get("calculate_per_token_loss") else case


def without_flags(case: Case) -> Case:
    kept = {name: value for name, value in case.settings.items() if name in GSPO | PER_TOKEN}
    return replace(case, settings=kept if kept.get("advantage_estimator") != "cispo" else {})


@pytest.mark.parametrize("host", HOSTS)
def test_a_flag_of_the_host_has_its_meaning_in_our_loss(pool, host):
    """A correction weighs no KL term; KL's ratio is the token's under GSPO; samples that are dropped stay in the denominators."""
    rows = {name: case_of(host, name, settings) for name, settings in FLAGS.items()}
    rows = {name: case for name, case in rows.items() if host == "slime" or "cispo" not in name}  # miles has none
    own_losses = [replace(case, settings=case.settings | OWN_LOSS) for case in rows.values()]
    cases = [*rows.values(), *own_losses, *map(without_flags, rows.values())]
    found = pool.run(run_cases, ROOTS, cases, world_size=2, context_parallel_size=2)[0]
    assert not [result for result in found if isinstance(result, str)], found
    for number, name in enumerate(rows):
        ours, own, plain = found[number :: len(rows)]
        largest = own.gradient.abs().max()
        assert float((ours.gradient - plain.gradient).abs().max() / largest) > ACTS, f"{name}: the flag has to act"
        gap = float((own.gradient - ours.gradient).abs().max() / largest)
        assert gap <= 2 * EXACT, name
        assert ours.loss == pytest.approx(own.loss, rel=2 * EXACT, abs=2e-7), name
        assert list(ours.metrics) == list(own.metrics), name
        # The host divides dropped tokens, masked ones too, by the unmasked ones: its opsm_clipfrac may be beyond 1.
        for metric in ours.metrics.keys() - {"opsm_clipfrac"}:
            assert ours.metrics[metric] == pytest.approx(own.metrics[metric], rel=3e-6, abs=2e-6), f"{name}: {metric}"
