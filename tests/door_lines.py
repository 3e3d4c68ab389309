"""Launch lines of the doors: what doctor approves of and says, and what it refuses. tests/test_door_lines.py judges them.

Misspelt names, switches for numbers, values in the place of groups and idle settings are tried in test_door_refusals.py.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.hosts import roll, skyrl, verl, verl_correction
from megatron_rl.hosts.verl import BATCH, CLASS_LINE, IS_V1, LOSS_CLASS, LOSS_MODE, MANAGER, MINI_BATCH

ACTOR = "actor_rollout_ref.actor"
LAUNCHER = "python -m megatron_rl.hosts.launch"
LINES = {
    "verl": f"-m verl.trainer.main_ppo {ACTOR}.policy_loss.loss_mode=megatron_rl.",
    "nemo_rl": "python -m megatron_rl.hosts.launch examples/run_grpo.py ++loss_fn.megatron_rl=",
    "skyrl": "python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=megatron_rl.hosts.skyrl "
    "trainer.algorithm.policy_loss_type=megatron_rl.",
}
YAML_OF_ROLL: dict[str, Any] = {
    "rollout_batch_size": 8,
    "num_return_sequences_in_group": 4,
    "enable_old_logprobs_recompute": True,
    "actor_train": {"worker_cls": roll.WORKER, "strategy_args": {"strategy_name": roll.STRATEGY}},
}
RATIO, REJECTION = "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_rs"
KL = [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1"]
MEAN_OF_KL = f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"
ONE_ROW = f"{ACTOR}.policy_loss.one_sample_per_rollout"
HEAD = "actor_rollout_ref.model.external_lib=megatron_rl.hosts.verl_log_probs"
UNCUT = verl_correction.uncut_weights()
TIS = [CLASS_LINE, f"+{ACTOR}.policy_loss.importance_correction=tis"]
ONE_MINI_BATCH = f"{BATCH}=256"
DOOR_OF_SKYRL = f"{skyrl.ENTRYPOINT}={skyrl.__name__}"
LOSS_OF_SKYRL, REDUCTION = skyrl.DOOR.choice.setting, skyrl.DOOR.choice.aggregation
LINE_OF_SKYRL = f"uv run -m {skyrl.ENTRY} {DOOR_OF_SKYRL}"
OURS = f"{LOSS_OF_SKYRL}=megatron_rl."
NO_KL, KL_OF_REWARDS = "trainer.algorithm.use_kl_loss=false", ["trainer.algorithm.use_kl_in_reward=true"]


def our_mode(name: str) -> str:
    return f"{LOSS_MODE}=megatron_rl.{name}"


def clips(host: str, low: object = None, high: object = None) -> str:
    """The host's own words for a clip."""
    names = {"verl": (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")}
    names |= {"nemo_rl": ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max")}
    names |= {"skyrl": ("trainer.algorithm.eps_clip_low", "trainer.algorithm.eps_clip_high")}
    return " ".join(f" {name}={value}" for name, value in zip(names[host], (low, high), strict=True) if value is not None)


CLASS = f" {verl.CLASS_LINE}"
OWN_CLIP = f"{CLASS} +{ACTOR}.policy_loss.clip_ratio_low=0.2 +{ACTOR}.policy_loss.clip_ratio_high="
RANGE = {"use_pg_clip_range": True}
# name: (host, the line or its end or the settings of a file, what is said of it)
RIGHT: dict[str, tuple[str, str | list[str] | dict[str, Any], str]] = {
    "verl, a mini-batch of the shell": (
        "verl",
        [our_mode("grpo.prompt_mean"), f"{MINI_BATCH}=$MINI", f"{BATCH}=512"],
        f"mini-batch {MINI_BATCH}: not known here, and a mini-batch .* cuts prompt groups; type {MINI_BATCH}=512$",
    ),
    "verl, sizes of a file": (
        "verl",
        ["--config-name=mine", our_mode("grpo.prompt_mean")],
        f"mini-batch {BATCH} and {MINI_BATCH}: not known here, .*; type {BATCH}=<prompts of a step> {MINI_BATCH}=<prompts of",
    ),
    "verl, squares of probabilities that v1 does not ask for": (
        "verl",
        [our_mode("grpo.token_mean"), f"{ACTOR}.calculate_sum_pi_squared=True"],
        "calculate_sum_pi_squared no effect of =True: only the old trainer asks for them; remove it, or set trainer.use_v1=False",
    ),
    # DAPO's and CISPO's numbers, typed: they act, with each loss
    "verl, grpo, 0.2/0.28": ("verl", "grpo.token_mean" + clips("verl", 0.2, 0.28), "clip 0.2/0.28"),
    "verl, grpo, high alone": ("verl", "grpo.token_mean" + clips("verl", None, 0.28), "clip 0.2/0.28"),
    "verl, gspo, its own": ("verl", "gspo.token_mean", "clip 0.0003/0.0004"),
    "verl, gspo, typed": ("verl", "gspo.token_mean" + clips("verl", 3e-4, 4e-4), "clip 0.0003/0.0004"),
    "verl, cispo, by our names": ("verl", f"cispo.token_mean{OWN_CLIP}0.28", "clip 0.2/0.28"),
    "verl, cispo, verl's": ("verl", f"cispo.token_mean{OWN_CLIP}0.2", "clip 0.2/0.2"),
    "verl, cispo, 1/4": ("verl", "cispo.token_mean" + clips("verl", 1.0, 4.0), "clip 1/4"),
    "verl, low of the shell": ("verl", "cispo.token_mean" + clips("verl", "$LOW", 0.28), "clip 1/0.28"),
    "nemo_rl, gspo, 0.2/0.28": ("nemo_rl", "gspo.sample_mean" + clips("nemo_rl", 0.2, 0.28), "clip 0.2/0.28"),
    "nemo_rl, cispo, 0.2/0.2": ("nemo_rl", "cispo.token_mean" + clips("nemo_rl", 0.2, 0.2), "clip 0.2/0.2"),
    "nemo_rl, gspo, its own": ("nemo_rl", "gspo.sample_mean", "clip 0.0003/0.0004"),
    "nemo_rl, grpo": ("nemo_rl", "grpo.prompt_mean" + clips("nemo_rl", 0.2, 0.28), "clip 0.2/0.28"),
    "nemo_rl, another script": ("nemo_rl", "grpo.token_mean policy.train_global_batch_size=64", "clip 0.2/0.2"),
    "nemo_rl, sizes": (
        "nemo_rl",
        "grpo.prompt_mean policy.train_global_batch_size=256 grpo.num_prompts_per_step=32 grpo.num_generations_per_prompt=8",
        r"1/\(P M_g\)",
    ),
    "skyrl, gspo, 0.2/0.28": ("skyrl", "gspo" + clips("skyrl", 0.2, 0.28), "clip 0.2/0.28"),
    "skyrl, cispo, 0.2/0.2": ("skyrl", "cispo" + clips("skyrl", 0.2, 0.2), "clip 0.2/0.2"),
    "skyrl, gspo, high alone": ("skyrl", "gspo" + clips("skyrl", None, 5e-4), "clip 0.0003/0.0005"),
    "skyrl, gspo, its own": ("skyrl", "gspo", "clip 0.0003/0.0004"),
    "skyrl, nested": ("skyrl", "sapo trainer.algorithm.sapo.tau_neg=1.5", "1.5"),
    "roll, gspo, its own": ("roll", {"actor_train.pg_variant": "gspo.token_mean"}, "clip 0.0003/0.0004"),
    "roll, gspo, 0.2/0.28": (
        "roll",
        {"actor_train.pg_variant": "gspo.token_mean", **RANGE, "pg_clip_low": 0.2, "pg_clip_high": 0.28},
        "clip 0.2/0.28",
    ),
    "roll, cispo, 0.2/0.2": (
        "roll",
        {"actor_train.pg_variant": "cispo.token_mean", **RANGE, "pg_clip_low": 0.2, "pg_clip_high": 0.2},
        "clip 0.2/0.2",
    ),
    "roll, grpo, high alone": ("roll", {"actor_train.pg_variant": "grpo.token_mean", **RANGE, "pg_clip_high": 0.28}, "0.2/0.28"),
    "roll, grpo, pg_clip": ("roll", {"actor_train.pg_variant": "grpo.token_mean", "pg_clip": 0.2, "lr": 1e-6}, "clip 0.2/0.2"),
    "roll, a name of one's own": (
        "roll",
        {"actor_train.pg_variant": "${pg_variant}", "pg_variant": "grpo.token_mean", "my_name": 3},
        "clip 0.2/0.2",
    ),
    "roll, both sides": ("roll", {"actor_train.pg_variant": "gspo.token_mean", "pg_clip": 1e-3}, "clip 0.001/0.001"),
    "verl, sample_mean": ("verl", [our_mode("grpo.sample_mean")], ""),
    "verl, verl's own name of it": ("verl", [our_mode("grpo.sample_mean"), f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"], ""),
    "verl, verl's own name of it, dynamic context parallelism": (
        "verl",
        [
            our_mode("grpo.sample_mean"),
            f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
            *(f"{ACTOR}.megatron.{name}" for name in ("context_parallel_size=2", "dynamic_context_parallel=True")),
        ],
        "",
    ),
    "verl, prompt_mean": ("verl", [our_mode("gspo.prompt_mean"), ONE_MINI_BATCH], ""),
    "verl, prompt_mean, a large mini-batch": ("verl", [our_mode("gspo.prompt_mean"), f"{MINI_BATCH}=1024"], ""),
    "verl, a size that only the shell knows": ("verl", [our_mode("gspo.prompt_mean"), f"{BATCH}=${{SIZE}}"], ""),
    "verl, defaults of a file that is not known": ("verl", [our_mode("gspo.prompt_mean"), "--config-name=mine"], ""),
    "verl, constant": ("verl", [our_mode("cispo.constant"), f"+{ACTOR}.loss_scale_factor=8192"], ""),
    "verl, an L that only the shell knows": ("verl", [our_mode("cispo.constant"), f"{ACTOR}.loss_scale_factor=$L"], ""),
    "verl, prompt_mean, cut groups that are accepted": (
        "verl",
        [our_mode("dro.prompt_mean"), CLASS_LINE, f"+{ACTOR}.policy_loss.allow_partial_prompt_groups=true"],
        r"256 of 1024 prompts a step$",
    ),
    "verl, by uv": (
        "verl",
        ["uv", "run", "python3", "-m", "verl.trainer.main_ppo", f"{ACTOR}.policy_loss.loss_mode=megatron_rl.grpo.token_mean"],
        "uv run its environment is verl's own: there uv pip install --no-deps ",
    ),
    "verl, a filled mini-batch": ("verl", [our_mode("gmpo.sample_mean"), f"{BATCH}=300"], ""),
    "verl, a rejection": ("verl", [our_mode("grpo.token_mean"), "algorithm.rollout_correction.rollout_rs=token_k1"], ""),
    "verl, the old trainer": ("verl", [our_mode("grpo.sample_mean"), f"{IS_V1}=false"], "a row is a whole rollout"),
    "verl, a manager of one's own, token_mean": (
        "verl",
        [our_mode("grpo.token_mean"), f"{IS_V1}=false", f"{MANAGER}=my.Manager"],
        "a rollout that comes in k rows .*my.Manager. weighs as in one",
    ),
    "verl, a manager of one's own, one row a rollout": (
        "verl",
        [our_mode("grpo.sample_mean"), f"{IS_V1}=false", f"{MANAGER}=my.Manager", CLASS_LINE, f"+{ONE_ROW}=true"],
        "a row is a whole rollout, as one_sample_per_rollout says",
    ),
    "verl, rejection, sample_mean": (
        "verl",
        [our_mode("grpo.sample_mean"), "algorithm.rollout_correction.rollout_rs=token_k1"],
        "",
    ),
    "verl, a loss of the sampler": ("verl", [our_mode("dppo_tv.token_mean"), *UNCUT], ""),
    "verl, a correction of ours": ("verl", [our_mode("gspo.sample_mean"), *TIS, *UNCUT], ""),
    "verl, a correction of verl's own": ("verl", [our_mode("gspo.sample_mean"), f"{RATIO}=token"], ""),
    "verl, verl's own IcePop": ("verl", [our_mode("gspo.sample_mean"), f"{RATIO}=token", f"{RATIO}_threshold=0.5_5.0"], ""),
    "verl, verl's own rejection": (
        "verl",
        [our_mode("gspo.sample_mean"), f"{REJECTION}=token_k1", f"{REJECTION}_threshold=0.5_2.0"],
        "",
    ),
    "verl, verl's own": ("verl", [f"{LOSS_MODE}=gspo"], ""),
    **{
        f"verl, somebody else's {name}": ("verl", [f"{LOSS_MODE}={name}"], "") for name in ("acme.grpo", "acme.token_mean", "a.b.c")
    },
    "verl, verl's clip_ratio beside the two that we read": (
        "verl",
        [our_mode("grpo.token_mean"), *(f"{ACTOR}.clip_ratio{side}=0.2" for side in ("", "_low", "_high"))],
        "",
    ),
    "verl, an estimate of KL that nothing uses": ("verl", [our_mode("grpo.token_mean"), f"{ACTOR}.kl_loss_type=none"], ""),
    "verl, an estimate of KL of ours": ("verl", [our_mode("grpo.token_mean"), *KL, f"{ACTOR}.kl_loss_type=unbiased"], ""),
    "verl, our mean of KL": ("verl", [our_mode("grpo.constant"), f"{ACTOR}.loss_scale_factor=8", *KL, MEAN_OF_KL], ""),
    "verl, nothing": ("verl", [], ""),
    "skyrl, prompt_mean": (
        "skyrl",
        f"{LINE_OF_SKYRL} {OURS}gspo {REDUCTION}=prompt_mean".split(),
        r"gspo.prompt_mean, .* 1/\(P M_g\), in the",
    ),
    "skyrl, constant": (
        "skyrl",
        f"{LINE_OF_SKYRL} {OURS}grpo {REDUCTION}=seq_mean_token_sum_norm trainer.algorithm.max_seq_len=8192".split(),
        r"1/\(L N\) = 1/\(8192 N\), in the advantages",
    ),
    "verl, a correction": (
        "verl",
        [our_mode("grpo.token_mean"), f"{RATIO}=token"],
        "=token: verl's own: its weights multiply our loss$",
    ),
    "verl, a correction beside one ratio of a sample": (
        "verl",
        [our_mode("gspo.token_mean"), f"{RATIO}=token"],
        "multiply our loss; a sample has one ratio, so its tokens share the mean of their weights$",
    ),
    "skyrl, a correction": (
        "skyrl",
        f"{LINE_OF_SKYRL} {OURS}cispo trainer.algorithm.off_policy_correction.tis_ratio_type=token".split(),
        "SkyRL's own: its weights multiply our loss",
    ),
    "skyrl, half of a switch": (
        "skyrl",
        f"{LINE_OF_SKYRL} {OURS}dppo_tv trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=0.5".split(),
        "megatron_rl.dppo_tv.token_mean",
    ),
    "skyrl, a clip of another loss": (
        "skyrl",
        f"{LINE_OF_SKYRL} {OURS}gspo trainer.algorithm.eps_clip_high=0.28".split(),
        "clip_ratio_low=0.0003, clip_ratio_high=0.28 with policy_loss=gspo will hardly ever clip",
    ),
    "skyrl, no regularisers": (
        "skyrl",
        f"{LINE_OF_SKYRL} {OURS}grpo trainer.algorithm.use_kl_loss=false".split(),
        "^(?!.*KL and entropy)",
    ),
    "skyrl, a value of the shell": (
        "skyrl",
        f"{LINE_OF_SKYRL} {OURS}grpo {REDUCTION}=$REDUCTION".split(),
        "loss_reduction is not known here",
    ),
    "skyrl, a loss of the shell": (
        "skyrl",
        f"{LINE_OF_SKYRL} {LOSS_OF_SKYRL}=$LOSS".split(),
        "not known here, so the loss is not judged",
    ),
    "skyrl, SkyRL's own": (
        "skyrl",
        f"python -m {skyrl.ENTRY} {LOSS_OF_SKYRL}=gspo".split(),
        "gspo is SkyRL's own: none of our losses",
    ),
}

VARIANT = "actor_train.pg_variant"
# A line of the text is of a problem.
WRONG: dict[str, tuple[str, str | list[str] | dict[str, Any], str]] = {
    # One side at the host's default beside a chosen one, where a worker does not know what was typed
    "verl, gspo, 0.2/0.28": (
        "verl",
        "gspo.token_mean" + clips("verl", 0.2, 0.28),
        "0.2 is the host's default.* type [^ ]*clip_ratio_low=0.0003 [^ ]*clip_ratio_high=0.0004 for that, or",
    ),
    "verl, cispo, 0.2/0.28": (
        "verl",
        "cispo.token_mean" + clips("verl", 0.2, 0.28),
        " type [^ ]*clip_ratio_low=1 for that, or .*policy_loss.clip_ratio_low=0.2 for 0.2",
    ),
    "verl, gmpo, high": ("verl", "gmpo.token_mean" + clips("verl", None, 0.28), "gmpo has 0.32968 of its own"),
    "verl, gspo, low": ("verl", "gspo.token_mean" + clips("verl", 1e-3), "clip_ratio_high=0.2 beside .*clip_ratio_low=0.001"),
    "verl, cispo, 0.2/0.2": ("verl", "cispo.token_mean" + clips("verl", 0.2, 0.2), "would train its own clip, 1/0.28"),
    "verl, a clip twice": ("verl", f"cispo.token_mean{OWN_CLIP}0.28" + clips("verl", 0.1), "the same thing with two values"),
    "verl, our names in verl's class": (
        "verl",
        f"cispo.token_mean +{ACTOR}.policy_loss.clip_ratio_low=0.2 +{ACTOR}.policy_loss.clip_ratio_high=0.3",
        "verl's own class has no such fields",
    ),
    "roll, no switch": ("roll", {VARIANT: "grpo.token_mean", "pg_clip_high": 0.28}, "no effect without use_pg_clip_range: true"),
    "roll, the other clip": (
        "roll",
        {VARIANT: "grpo.token_mean", **RANGE, "pg_clip_low": 0.1, "pg_clip_high": 0.2, "pg_clip": 0.3},
        "pg_clip=0.3 has no effect without dual_clip_loss: true",
    ),
    "roll, ROLL's default": ("roll", {VARIANT: "gspo.token_mean", "pg_clip": 0.2}, "its worker cannot tell that you wrote it"),
    "roll, half a range": ("roll", {VARIANT: "gspo.token_mean", **RANGE, "pg_clip_high": 4e-4}, "without pg_clip_low trains ROLL"),
    # Another name than ours
    "verl, a clip's name": ("verl", f"grpo.token_mean +{ACTOR}.eps_clip=0.28", "verl has no such setting"),
    "verl, L's name": ("verl", f"grpo.token_mean {ACTOR}.loss_scale=8", f"did you mean {ACTOR}.loss_scale_factor\\?"),
    # The right name in another section, or without its value
    **{
        f"{host}, {words}": (host, f"{loss} {words}", f"^{words.lstrip('+').partition('=')[0]}: .*{said}")
        for host, loss, words, said in (
            (
                "verl",
                "grpo.token_mean",
                "+clip_ratio_high=0.3",
                f"reads no such setting here: did you mean {ACTOR}.clip_ratio_high",
            ),
            ("verl", "grpo.token_mean", "actor_rollout_ref.clip_ratio_high=0.3", f"did you mean {ACTOR}.clip_ratio_high"),
            ("verl", "grpo.token_mean", "+algorithm.loss_agg_mode=token-mean", f"did you mean {ACTOR}.loss_agg_mode"),
            ("verl", "sapo.token_mean", f"+{ACTOR}.megatron.tau_neg=1", f"did you mean {ACTOR}.tau_neg"),
            ("skyrl", "grpo", "trainer.eps_clip_high=0.3", "did you mean trainer.algorithm.eps_clip_high"),
        )
    },
    **{
        f"verl, {loss}, {name}": (
            "verl",
            [our_mode(f"{loss}.sample_mean"), *(UNCUT if "dppo" in loss else ()), f"{ACTOR}.{name}=0.15"],
            f"no {what}; {remedy}$",
        )
        for loss, name, what, remedy in (
            ("dppo_tv", "clip_ratio_low", "clip", f"set .{ACTOR}.policy_loss.divergence_low=0.15"),
            ("dppo_kl", "clip_ratio_c", "clip_ratio_c", f"set .{ACTOR}.policy_loss.ratio_truncation=0.15"),
            ("reinforce", "clip_ratio_low", "clip", "remove it"),
        )
    },
    "verl, a clip that the loss has not": (  # alone: no class is to be set for it
        "verl",
        [our_mode("sapo.token_mean"), f"{ACTOR}.policy_loss.clip_ratio_high=0.3"],
        "sapo has no clip; remove it$",
    ),
    "verl, two words": ("verl", f"grpo.token_mean {ACTOR}.clip_ratio_high 0.3", f"type {ACTOR}.clip_ratio_high=0.3$"),
    "verl, no value": ("verl", f"grpo.token_mean +{ACTOR}.clip_ratio_high a=1", f"type .{ACTOR}.clip_ratio_high=VALUE$"),
    "verl, a parameter that verl names": (
        "verl",
        f"grpo.token_mean +{ACTOR}.policy_loss.clip_ratio_c=3",
        "set .*actor.clip_ratio_c",
    ),
    "nemo_rl, a clip's name": ("nemo_rl", "grpo.token_mean ++loss_fn.eps_clip_high=0.28", "NeMo-RL has no such setting"),
    # Another word for a side: never the other side.
    **{
        f"{host}, {name}": (host, f"{loss}{place}{name}=0.28", f"did you mean [a-z_.]*{meant}\\?")
        for host, loss, place, name, meant in (
            ("nemo_rl", "grpo.token_mean", " ++loss_fn.", "ratio_clip_high", "ratio_clip_max"),
            ("nemo_rl", "grpo.token_mean", " ++loss_fn.", "ratio_clip_low", "ratio_clip_min"),
            ("nemo_rl", "grpo.token_mean", " ++loss_fn.", "clip_ratio_low", "ratio_clip_min"),
            ("skyrl", "grpo", " trainer.algorithm.", "eps_clip_max", "eps_clip_high"),
            ("verl", "grpo.token_mean", f" +{ACTOR}.", "clip_ratio_min", "clip_ratio_low"),
        )
    },
    "nemo_rl, another worker": ("nemo_rl", "grpo.token_mean policy.megatron_cfg.enabled=false", "enabled is not true"),
    "nemo_rl, a part of a batch": (
        "nemo_rl",
        "grpo.prompt_mean policy.train_global_batch_size=64 grpo.num_prompts_per_step=32 grpo.num_generations_per_prompt=8",
        "must have all 256 samples",
    ),
    "nemo_rl, clipped advantages": (
        "nemo_rl",
        "grpo.prompt_mean ++grpo.advantage_clip_low=-1",
        "grpo.advantage_clip_low=-1 beside",
    ),
    "nemo_rl, a flag": ("nemo_rl", "grpo.token_mean --loss-aggregation constant", "--loss-aggregation: a flag of miles and slime"),
    "skyrl, L's name": ("skyrl", "grpo trainer.algorithm.max_seq_length=1", "did you mean trainer.algorithm.max_seq_len\\?"),
    "skyrl, a parameter's name": ("skyrl", "sapo trainer.algorithm.sapo.tau_negative=1", "trainer.algorithm.sapo.tau_neg\\?"),
    "skyrl, two in one": ("skyrl", "gspo.prompt_mean", "type .*policy_loss_type=megatron_rl.gspo .*loss_reduction=prompt_mean"),
    "roll, a name within a group": (
        "roll",
        {VARIANT: "grpo.token_mean", "actor_train.training_args": {"gradient_acumulation_steps": 4}},
        "did you mean .*s.gradient_accumulation_steps",
    ),
    "verl, an unknown aggregation": (
        "verl",
        [our_mode("gspo.mean")],
        "Aggregations: sample_mean, prompt_mean, token_mean, constant",
    ),
    "verl, a loss of the sampler": (
        "verl",
        [our_mode("dppo_tv.sample_mean")],
        "rollout_is=None, rollout_is_threshold=2.0: .*set .*token",
    ),
    "verl, weights that are cut": (
        "verl",
        [our_mode("dppo_tv.sample_mean"), UNCUT[0], f"{RATIO}_threshold=1e8"],
        "^rollout_correction: rollout_is_threshold=1",
    ),
    "verl, weights of IcePop": (
        "verl",
        [our_mode("dppo_tv.sample_mean"), UNCUT[0], f"{RATIO}_threshold=0.5_9.0e9"],
        "^rollout_correction: rollout_is_threshold=0.5",
    ),
    "verl, weights of samples": (
        "verl",
        [our_mode("dppo_tv.sample_mean"), UNCUT[1], f"{RATIO}=sequence"],
        "^rollout_correction: rollout_is=sequence: ",
    ),
    "verl, normalised weights": (
        "verl",
        [our_mode("dppo_tv.sample_mean"), *UNCUT, f"{RATIO}_batch_normalize=true"],
        "^rollout_correction: rollout_is_batch_normalize=true: ",
    ),
    "verl, no weights in bypass mode": (
        "verl",
        [our_mode("dppo_tv.sample_mean"), *UNCUT, "algorithm.rollout_correction.bypass_mode=true"],
        "^rollout_correction: bypass_mode=true: .*; set [^ ]*bypass_mode=False$",
    ),
    "verl, squares of probabilities without logits": (
        "verl",
        [
            our_mode("grpo.token_mean"),
            HEAD,
            "actor_rollout_ref.model.use_fused_kernels=True",
            f"{ACTOR}.calculate_sum_pi_squared=True",
        ]
        + ["trainer.use_v1=False"],
        "^use_fused_kernels: calculate_sum_pi_squared=True reads logits",
    ),
    "verl, squares of probabilities for an estimator, in v1": (
        "verl",
        [our_mode("grpo.token_mean"), f"{verl.ESTIMATOR}=optimal_token_baseline", f"{ACTOR}.calculate_sum_pi_squared=True"],
        "^algorithm.adv_estimator: .*=optimal_token_baseline needs .* only the old trainer asks for them: .*use_v1=False",
    ),
    "verl, squares of probabilities for an estimator, not asked for": (
        "verl",
        [our_mode("grpo.token_mean"), f"{verl.ESTIMATOR}=tir_optimal_token_baseline", "trainer.use_v1=False"],
        "^algorithm.adv_estimator: .* they are not asked for: .*set trainer.use_v1=False and .*calculate_sum_pi_squared=True$",
    ),
    "verl, weights that bypass_mode skips": (
        "verl",
        [our_mode("grpo.sample_mean"), f"{RATIO}=token", "algorithm.rollout_correction.bypass_mode=true"],
        "^rollout_correction: no effect of rollout_is=token with bypass_mode in the v1 trainer.*=False for weights$",
    ),
    "verl, no log-probabilities of the sampler": (
        "verl",
        [our_mode("dppo_tv.sample_mean"), *UNCUT, "actor_rollout_ref.rollout.calculate_log_probs=false"],
        "^rollout_correction: actor_rollout_ref.rollout.calculate_log_probs=false: .*; set [^ ]*calculate_log_probs=True$",
    ),
    "verl, a correction without weights": (
        "verl",
        [our_mode("grpo.sample_mean"), *TIS],
        "grpo.sample_mean with these settings compares",
    ),
    "verl, a correction in verl's own class": (
        "verl",
        [our_mode("grpo.sample_mean"), *UNCUT, TIS[1]],
        f"set {LOSS_CLASS}=megatron_rl.hosts",
    ),
    "verl, rows of a manager of one's own": (
        "verl",
        [our_mode("grpo.sample_mean"), f"{IS_V1}=false", f"{MANAGER}=my.Manager"],
        f"may come in several rows .{MANAGER}=my.Manager., and verl does not say which rows are of one.*type .{ONE_ROW}=True; else",
    ),
    "verl, rows of a manager of one's own in the v1 trainer": (
        "verl",
        [our_mode("grpo.row_mean"), f"{MANAGER}=my.Manager"],
        f"may come in several rows .{MANAGER}=my.Manager., and verl does not say which rows are of one.*type .{ONE_ROW}=True; else",
    ),
    "verl, a declaration that says nothing": (
        "verl",
        [our_mode("grpo.sample_mean"), f"{IS_V1}=false", CLASS_LINE, f"+{ONE_ROW}=true"],
        "one_sample_per_rollout=true has no effect: each row is a rollout; remove it",
    ),
    "verl, a declaration of another kind": (
        "verl",
        [our_mode("grpo.sample_mean"), CLASS_LINE, f"+{ONE_ROW}=1"],
        "one_sample_per_rollout=1 must be true or false",
    ),
    "verl, cut groups": (
        "verl",
        [our_mode("grpo.prompt_mean")],
        f"a mini-batch cuts prompt groups.*set {MINI_BATCH}=1024.*with {CLASS_LINE} .*allow_partial_prompt_groups=true",
    ),
    "verl, two aggregations": (
        "verl",
        [our_mode("grpo.token_mean"), f"{ACTOR}.loss_agg_mode=token-sum"],
        "set actor_rollout_ref.actor.loss_agg_mode=token-mean$",
    ),
    "verl, a mean of KL without KL": (
        "verl",
        [our_mode("grpo.token_mean"), MEAN_OF_KL],
        "set actor_rollout_ref.actor.loss_agg_mode=token-mean$",
    ),
    "verl, verl refuses it": (
        "verl",
        [
            our_mode("grpo.sample_mean"),
            f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
            "model_engine=megatron",
            f"+{ACTOR}.megatron.override_transformer_config.calculate_per_token_loss=True",
        ],
        "verl's first step raises with .*loss_agg_mode=seq-mean-token-mean; set actor_rollout_ref.actor.loss_agg_mode=token-mean$",
    ),
    "verl, another loss in the place of ours": (
        "verl",
        [our_mode("grpo.token_mean"), "algorithm.rollout_correction.bypass_mode=true", "trainer.use_v1=False"],
        "puts verl's own loss in the place of ours",
    ),
    "verl, a name without its prefix": (
        "verl",
        [f"{LOSS_MODE}=gspo.prompt_mean"],
        f"set {LOSS_MODE}=megatron_rl.gspo.prompt_mean$",
    ),
    "verl, a slip without its prefix": (
        "verl",
        [f"{LOSS_MODE}=gpso.prompt_mean"],
        f"set {LOSS_MODE}=megatron_rl.gspo.prompt_mean$",
    ),
    "verl, a name with a hyphen": (
        "verl",
        [f"{LOSS_MODE}=megatron-rl.gspo.token_mean"],
        f"set {LOSS_MODE}=megatron_rl.gspo.token_mean$",
    ),
    "verl, a flag of another host": ("verl", [our_mode("grpo.token_mean"), "--loss-aggregation"], "no setting of verl"),
    "verl, a clip that nobody reads": (
        "verl",
        [our_mode("grpo.token_mean"), f"{ACTOR}.clip_ratio=1e-3"],
        "set .*clip_ratio_low and .*high",
    ),
    "verl, an estimate of KL that verl has not": (
        "verl",
        [our_mode("grpo.token_mean"), *KL, f"{ACTOR}.kl_loss_type=k4"],
        "verl has no k4: set one of kl, k1.*unbiased comes with a loss of ours",
    ),
    "verl, an estimate of KL for rewards": (
        "verl",
        [our_mode("grpo.token_mean"), "algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=unbiased"],
        "verl has no unbiased for rewards: set one of kl, k1",
    ),
    "verl, an estimate of KL that verl itself raises for": (
        "verl",
        [our_mode("grpo.token_mean"), *KL, f"{ACTOR}.kl_loss_type=full"],
        "verl has no full: set one of kl, k1, abs, mse, k2, low_var_kl, k3, or",
    ),
    "verl, an estimate of KL of ours beside a loss of verl": (
        "verl",
        [f"{LOSS_MODE}=gspo", *KL, f"{ACTOR}.kl_loss_type=unbiased"],
        "verl has no unbiased: set one of kl, k1.*unbiased comes with a loss of ours",
    ),
    "verl, a loss in the place of its group": (
        "verl",
        [f"{ACTOR}.policy_loss=megatron_rl.gspo.prompt_mean", f"{ACTOR}.clip_ratio_low=0.1"],
        f"it is a group of settings.*did you mean {LOSS_MODE}=megatron_rl.gspo.prompt_mean\\?",
    ),
    "verl, 100,000 signs": ("verl", [our_mode("grpo.token_mean"), f"{ACTOR}.clip_ratio_low={'-' * 100_000}1"], "clip_ratio_low"),
    "skyrl, no door": (
        "skyrl",
        f"python -m {skyrl.ENTRY} {OURS}gspo".split(),
        f"without {DOOR_OF_SKYRL} SkyRL has no megatron_rl.gspo",
    ),
    "skyrl, a door that nobody reads": (
        "skyrl",
        f"python -m examples.mine {DOOR_OF_SKYRL} {OURS}gspo".split(),
        "read by skyrl.train.entr",
    ),
    "skyrl, a door and SkyRL's loss": ("skyrl", LINE_OF_SKYRL.split(), "policy_loss_type=regular: it is not a loss of megatron_rl"),
    "skyrl, a gap counted twice": (
        "skyrl",
        f"{LINE_OF_SKYRL} {OURS}dppo_tv trainer.algorithm.off_policy_correction.sequence_mask_metric=product".split(),
        "would be counted twice",
    ),
    "skyrl, an estimate of KL that SkyRL has not": (
        "skyrl",
        f"{LINE_OF_SKYRL} {OURS}grpo trainer.algorithm.kl_estimator_type=k3+".split(),
        "SkyRL has no k3\\+: set one of k1, k2, k3, abs",
    ),
    "skyrl, an estimate of KL for rewards that SkyRL has not": (
        "skyrl",
        [*f"{LINE_OF_SKYRL} {OURS}grpo {NO_KL}".split(), *KL_OF_REWARDS, "trainer.algorithm.kl_estimator_type=unbiased"],
        "SkyRL has no unbiased: set one of k1, k2, k3, abs",
    ),
    "skyrl, a plus": ("skyrl", f"{LINE_OF_SKYRL} {OURS}grpo +trainer.algorithm.mine=1".split(), "SkyRL refuses settings with a +"),
}
