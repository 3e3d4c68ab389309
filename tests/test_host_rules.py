"""The rules of a launch in miles or slime: each refused once, with its message, and launches that all of them allow.

For samplers of any host that keep a part of the vocabulary: what is refused, and beside what. Each host's test has its settings.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from functools import partial

import pytest
from host_steps import ICEPOP_OF
from launch_settings import CUSTOM_LOSS, REDUCER, REWARD

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import checks
from megatron_rl.hosts.args import read_launch, rollout_hosts
from megatron_rl.hosts.checks import CHECKS, MIS_FUNCTION, NOISE, READERS, REPLAYS, check_launch, dropped_flags, launch_warnings
from megatron_rl.hosts.sampler_rule import Sampler, sampler_problems, typed_readers

ONE_STEP = {"global_batch_size": 32, "rollout_batch_size": 8, "n_samples_per_prompt": 4}
TWO_STEPS = {**ONE_STEP, "global_batch_size": 16}
SAMPLE_MEAN, PROMPT_MEAN, TOKEN_MEAN = ({"loss_aggregation": name} for name in ("sample_mean", "prompt_mean", "token_mean"))
CONSTANT = {"loss_aggregation": "constant", "loss_aggregation_divisor": 8192.0}
PER_TOKEN = {"calculate_per_token_loss": True}
CUSTOM_TIS = {"use_tis": True, "custom_tis_function_path": "user.rejection"}
MIS_MEAN = {"use_tis": True, "custom_tis_function_path": f"examples.{MIS_FUNCTION}", "tis_batch_normalize": True}
FROM_ROLLOUT = {"use_rollout_logprobs": True}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
MILES = {"true_on_policy_mode": False}
THEIR_LOSS = {"loss_type": "custom_loss", "custom_loss_function_path": "user.loss"}
CORRECTED = {"importance_correction": "mask", "importance_correction_low": 0.5, "importance_correction_high": 2.0}
REDUCED, OUR_LOSS = {**SAMPLE_MEAN, **REDUCER}, {**SAMPLE_MEAN, **CUSTOM_LOSS}
IN_ACTORS = {"custom_megatron_init_path": "megatron_rl.hooks.custom_megatron_init"}
FUSED = {**OUR_LOSS, **IN_ACTORS, "fused_lm_head_loss": True}
FP32 = {**REDUCED, **MILES, **IN_ACTORS, "fp32_lm_head": True}
SKIPPED = {**OUR_LOSS, **MILES, **IN_ACTORS, "skip_old_log_probs": True}
REPLAY = {"sampling_support": "replay"}
REPLAYED = {**OUR_LOSS, **MILES, **REPLAY, "rollout_top_p": 0.9, "rollout_top_k": 20}
REPLAYED_BY_SLIME = {**OUR_LOSS, **REPLAY, "rollout_top_p": 0.9}
BY_TOKENS = {**TOKEN_MEAN, **REDUCER, **PER_TOKEN}
BY_REWARD = {**PROMPT_MEAN, **REWARD, **TWO_STEPS}

# rule: [(settings, regular expression for flag, reason and remedy)]
REFUSED = {
    "names_are_spelled_right": [
        ({**REDUCED, "loss_agregation": "constant"}, "loss_agregation='constant' .* did you mean loss_aggregation?"),
    ],
    "settings_are_valid": [
        ({"loss_aggregation": "constant", **REDUCER}, "needs --loss-aggregation-divisor"),
        ({**OUR_LOSS, "advantage_estimator": "cispo", "eps_clip_c": 3.0}, "--eps-clip-c: clip_ratio_c=3.0 has no effect"),
        ({**OUR_LOSS, **KL, "kl_loss_type": "k4"}, "--kl-loss-type: --kl-estimator: .* 'k4' is not registered; known: k1"),
        ({**OUR_LOSS, **KL, "kl_loss_type": "k2", "use_unbiased_kl": True}, "'k2 with --use-unbiased-kl' is not registered"),
    ],
    "backend_is_megatron": [({**OUR_LOSS, "train_backend": "fsdp"}, "--train-backend fsdp: .*use --train-backend megatron")],
    "something_of_ours_is_at_work": [
        (SAMPLE_MEAN, "has no effect.*add --custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer"),
    ],
    "hook_is_at_its_own_flag": [
        (
            {**REDUCED, "custom_reward_post_process_path": "megatron_rl.hooks:custom_loss"},
            "megatron_rl.hooks:custom_loss is no hook for this place: write .*hooks.reward_post_process, or remove it",
        )
    ],
    "our_functions_are_called": [
        ({**REDUCED, **CUSTOM_LOSS}, "never calls it; remove one of them"),
        ({**REDUCED, "loss_type": "sft_loss"}, "--loss-type sft_loss never calls .*: remove it, or train with"),
        ({**OUR_LOSS, "loss_type": "policy_loss"}, "has no effect with --loss-type policy_loss: pass --loss-type custom_loss"),
        ({**OUR_LOSS, "custom_loss_function_path": None}, "--loss-type custom_loss has no function: add --custom-loss-function"),
    ],
    "aggregation_is_given_its_counts": [
        (
            {**PROMPT_MEAN, **REDUCER},
            "prompt_mean needs num_prompts, .* 1/.P M_g., .*; add --custom-reward-post-process-p[a-z_. -]*$",
        ),
        ({**TOKEN_MEAN, **CUSTOM_LOSS}, "token_mean needs num_tokens, .*; add .*, or --calculate-per-token-loss$"),
    ],
    "rollouts_are_one_sample": [
        (
            {**REDUCED, "custom_generate_function_path": "user.agent", "rollout_function_path": "user.f"},
            "--custom-generate-function-path user.agent, --rollout-function-path user.f may return several .*; add --custom-reward",
        ),
    ],
    "dynamic_batches_are_counted_in_rollouts": [
        (
            {**CONSTANT, **REDUCER, **MILES, "custom_generate_function_path": "user.agent", "use_dynamic_global_batch_size": True},
            "--use-dynamic-global-batch-size with --custom-generate-function-path user.agent: miles then .*; remove it",
        )
    ],
    "rows_are_packed_under_context_parallelism": [
        (
            {**REDUCED, "qkv_format": "bshd", "context_parallel_size": 2},
            "--qkv-format bshd with --context-parallel-size 2.*; use --loss-type custom_loss",
        )
    ],
    "counts_are_of_the_whole_step": [
        ({**BY_TOKENS, "multi_lora": True}, "no hook gets the counts of an adapter's step; choose sample_mean or constant"),
        ({**BY_REWARD, "multi_lora": True}, "multi-LoRA with .*has its own N.*; remove it"),
        ({**BY_TOKENS, "indep_dp": True}, "indep_dp=True .*by its own tokens; choose another, or"),
    ],
    "group_sizes_agree": [
        (
            {**REDUCED, "samples_per_prompt": 8, "n_samples_per_prompt": 4},
            "--samples-per-prompt 8 and --n-samples-per-prompt 4 are the same .* remove --sampl",
        )
    ],
    "tokens_stay_as_counted": [
        ({**BY_TOKENS, **CUSTOM_TIS}, "user.rejection with .*token_mean: it may reject.*remove it"),
        (
            {**BY_REWARD, **CUSTOM_TIS, "use_tis": False, "get_mismatch_metrics": True},
            "user.rejection with .*reward_post_process",
        ),
    ],
    "weights_stay_as_they_are_cut": [
        ({**REDUCED, **MIS_MEAN}, "tis_batch_normalize: true divides .* write tis_batch_normalize: f")
    ],
    "reward_hook_has_a_use": [
        ({**BY_REWARD, **SAMPLE_MEAN}, "reward_post_process has nothing to do with --loss-aggregation sample_mean.*remove it"),
        ({**REWARD, **TWO_STEPS, **REDUCER}, "weights that no --loss-aggregation asks for.*add --loss-aggregation prompt_mean"),
    ],
    "advantage_is_the_weighted_reward": [
        ({**BY_REWARD, **settings}, f"{said} with .*reward_post_process: .*; remove one of them")
        for settings, said in (
            ({"advantage_estimator": "ppo"}, "--advantage-estimator ppo"),
            ({"kl_coef": 0.1}, "--kl-coef 0.1"),
            ({"use_opd": True}, "--use-opd"),
            ({"custom_advantage_function_path": "user.f"}, "--custom-advantage-function-path user.f"),
            ({"normalize_advantages": True}, "--normalize-advantages"),
            (PER_TOKEN, "--calculate-per-token-loss"),
            ({**CUSTOM_LOSS, "policy_loss": "dro"}, "--policy-loss dro"),
            ({"loss_type": "sft_loss"}, "--loss-type sft_loss"),
            ({"custom_pg_loss_reducer_function_path": "user.reducer"}, "user.reducer"),
            (THEIR_LOSS, "--custom-loss-function-path user.loss"),
        )
    ],
    "steps_hold_whole_groups": [
        ({**BY_REWARD, "global_batch_size": 14}, "14 is no multiple of --n-samples-per-prompt 4: .*choose a multiple of 4"),
        ({**BY_REWARD, "allow_partial_prompt_groups": True}, "several steps .*; set --num-steps-per-rollout 1"),
    ],
    "weights_are_equal_in_every_step": [
        ({**BY_REWARD, **TOKEN_MEAN}, "--global-batch-size 16 of 32 samples .*; set --num-steps-per-rollout 1")
    ],
    "loss_options_of_the_host_are_honoured": [
        ({**OUR_LOSS, "get_mismatch_metrics": True}, "--get-mismatch-metrics is not implemented .*policy_loss and megatron_rl.r"),
        ({**OUR_LOSS, "true_on_policy_mode": True}, "--true-on-policy-mode is not implemented"),
    ],
    "custom_correction_is_known": [
        ({**OUR_LOSS, **CUSTOM_TIS, **MILES}, "path user.rejection .*does not call it; known are mil.*icepop_function; remove it"),
        ({**OUR_LOSS, "use_tis": True, "custom_tis_function_path": ICEPOP_OF["miles"]}, "known are slime"),
    ],
    "correction_is_counted_once": [
        ({**OUR_LOSS, "use_tis": True, **FROM_ROLLOUT}, "--use-tis with --use-rollout-logprobs: .*counted twice; remove --use-tis"),
        ({**OUR_LOSS, **CORRECTED, **FROM_ROLLOUT}, "--importance-correction mask with --use-rollout-logprobs: .*counted twice"),
    ],
    "sampler_and_trainer_score_alike": [
        (
            {**OUR_LOSS, **MILES, **CORRECTED, "rollout_top_p": 0.9},
            "--rollout-top-p 0.9 beside --importance-correction mask: .*or",
        ),
        ({**OUR_LOSS, **MILES, "use_opsm": True, "rollout_top_k": 20}, "--rollout-top-k 20 beside --use-opsm: .*or remove --use-o"),
        ({**REDUCED, **MILES, **FROM_ROLLOUT, "rollout_top_p": 0.9}, "--rollout-top-p 0.9 beside --use-rollout-logprobs: .*probs$"),
        (
            {**OUR_LOSS, "rollout_top_p": 0.9},
            "--rollout-top-p 0.9: the trainer computes old .*off by the kept mass; set .*or add --sampling-support replay",
        ),
        ({**OUR_LOSS, "use_tis": True, "rollout_top_k": 20}, "--rollout-top-k 20 beside --use-tis: .*turn --rollout-top-k 20 off"),
    ],
    "sets_are_handed_over": [
        (
            {**OUR_LOSS, **MILES, **REPLAY},
            "replay with the whole vocabulary: miles returns .*--rollout-top-p or --rollout-top-k",
        ),
        (
            {**OUR_LOSS, **REPLAY, "rollout_top_k": 20},
            "replay with --rollout-top-k 20: slime returns .*only where --rollout-top-p",
        ),
    ],
    "tokens_are_drawn_from_their_sets": [
        (
            {**REPLAYED, "sglang_speculative_algorithm": "EAGLE"},
            "--sglang-speculative-algorithm with --sampling-support replay: .*; remove one of them",
        ),
    ],
    "reference_is_scored_so": [
        ({**REPLAYED, **KL}, "--use-kl-loss with .*: miles measures ref_log_probs over the whole vocabulary.*; remove one of them"),
        ({**REPLAYED, "kl_coefficient": 0.1}, "--kl-coefficient with .*; remove one of them"),
        ({**REPLAYED, "kl_coef": 0.1}, "--kl-coef with .*; remove one of them"),
    ],
    "head_is_placed": [
        ({**FP32, "custom_megatron_init_path": None}, "--fp32-lm-head has no effect without our init hook"),
    ],
    "head_computes_what_the_loss_reads": [
        ({**FUSED, "mtp_num_layers": 1}, "--fused-lm-head-loss with --mtp-num-layers 1: .*would get no logits; remove"),
        ({**FP32, "enable_mtp_training": True}, "--fp32-lm-head with --enable-mtp-training: the losses of multi-token prediction"),
        ({**FUSED, "fp16": True}, "--fused-lm-head-loss with --fp16: .*train in bfloat16, or remove"),
        ({**FP32, "true_on_policy_mode": True}, "--fp32-lm-head with --true-on-policy-mode: .*remove one of them"),
    ],
    "forward_can_be_left_out": [
        ({**SKIPPED, "custom_megatron_init_path": None}, "--skip-old-log-probs has no effect without our init hook, .*: add --cus"),
        *(
            ({**SKIPPED, **settings}, f"{said} with --skip-old-log-probs: .*; change one of them")
            for settings, said in (
                (FROM_ROLLOUT, "--use-rollout-logprobs"),
                ({"num_steps_per_rollout": 2}, "--num-steps-per-rollout 2"),
                (TWO_STEPS, "--global-batch-size 16 of 32 samples"),
                *(({name: True}, f"--{name.replace('_', '-')}") for name in (*READERS, *REPLAYS)),
                *(({name: 0.1}, f"--{name.replace('_', '-')} 0.1") for name in ("hidden_dropout", *NOISE)),
            )
        ),
    ],
}
# Launches that no rule says anything against.
ALLOWED = [
    *({**REDUCED, "rollout_function_path": path} for host in rollout_hosts() for path in host.rollout_functions),
    *({**REDUCER, **mode} for mode in (SAMPLE_MEAN, CONSTANT)),
    {**CONSTANT, **REDUCER, "n_samples_per_prompt": 4, "loss_scale": 1.0, "kl_coef": 0.1, "entropy_coef": 0.1, "clip_grad": 1.0},
    {**REDUCED, "loss_agregation": None},
    {**REDUCED, **REWARD, **TWO_STEPS, "custom_generate_function_path": "user.agent"},
    {**CONSTANT, **REDUCER, "custom_generate_function_path": "user.agent"},
    {**OUR_LOSS, "rollout_function_path": "user.multi_agent"},
    {**REDUCED, "loss_type": "custom_loss", "custom_loss_function_path": "user.delegates"},
    {**REDUCED, "samples_per_prompt": "4", "n_samples_per_prompt": 4},
    *({**OUR_LOSS, "qkv_format": "bshd", "context_parallel_size": 2}, {**REDUCED, "multi_lora": True}),
    *({**CONSTANT, **REDUCER, **others} for others in ({"multi_lora": True}, {"indep_dp": True}, CUSTOM_TIS)),
    *({**REDUCED, **MIS_MEAN, "tis_batch_normalize": False}, {**BY_TOKENS, **CUSTOM_TIS, "use_tis": False}),
    *(BY_TOKENS, BY_REWARD, {**BY_REWARD, **REDUCER}, {**TOKEN_MEAN, **REWARD, **ONE_STEP, **REDUCER}),
    {**PROMPT_MEAN, **REWARD, **TWO_STEPS, **MILES, "use_tis": True, "custom_tis_function_path": ICEPOP_OF["miles"]},
    {**BY_REWARD, "advantage_estimator": "cispo", "use_tis": True, "use_kl_loss": True, "kl_loss_coef": 0.1},
    {**BY_REWARD, **ONE_STEP, "samples_per_prompt": 4, "allow_partial_prompt_groups": True},
    {**BY_REWARD, **CUSTOM_LOSS, "policy_loss": "sapo"},
    {**BY_REWARD, **REDUCER, "custom_generate_function_path": "user.agent"},
    *({**OUR_LOSS, **MILES, "use_tis": True, "custom_tis_function_path": ICEPOP_OF["miles"]}, {**OUR_LOSS, "use_opsm": True}),
    *({**OUR_LOSS, "use_opsm": True, **FROM_ROLLOUT}, {**REDUCED, "use_tis": True, **FROM_ROLLOUT}),
    *({**OUR_LOSS, "use_kl_loss": True, "kl_loss_type": name} for name in ("k1", "k2", "k3", "low_var_kl", None)),
    *({**OUR_LOSS, "use_kl_loss": True, "use_unbiased_kl": True}, {**REDUCED, "eps_clip_c": 3.0}),
    *(FUSED, FP32, {**FUSED, "custom_megatron_init_path": "user.init"}, {**FP32, "fp16": True}, {**FUSED, "mtp_num_layers": 0}),
    *(SKIPPED, {**SKIPPED, **ONE_STEP}, {**SKIPPED, **TWO_STEPS, "num_steps_per_rollout": 1}),
    {**SKIPPED, **TWO_STEPS, "use_dynamic_global_batch_size": True},  # the rollout says it
    {**SKIPPED, "use_kl_loss": True, "use_tis": True, "normalize_advantages": True, "use_critic": True},
    {**SKIPPED, "use_routing_replay": True, "use_rollout_routing_replay": True, "hidden_dropout": 0.0},
    *(REPLAYED, {**REPLAYED, **CORRECTED}, {**REPLAYED_BY_SLIME, **KL, "use_unbiased_kl": True, "kl_coef": 0.1}),
    {**REPLAYED_BY_SLIME, "use_tis": True, "use_opsm": True, "rollout_top_k": 20},
    {**REDUCED, **MILES, "rollout_top_p": 0.9, "rollout_top_k": 20},
    {**OUR_LOSS, **MILES, "rollout_top_p": 0.9, "rollout_top_k": 20, "importance_correction": "none"},
    {**OUR_LOSS, **MILES, **CORRECTED, "rollout_top_p": 1.0, "rollout_top_k": -1},
    {**REDUCED, "use_tis": True, "rollout_top_p": 0.9},  # slime's own loss knows the kept tokens
    {**OUR_LOSS, "rollout_top_k": 20},
]


def rows(cases):
    return [pytest.param(name, *row, id=f"{name} {index}") for name, list_ in cases.items() for index, row in enumerate(list_)]


@pytest.mark.parametrize(("name", "settings", "says"), rows(REFUSED))
def test_the_rule_refuses_and_says_why_and_what_to_do(name, settings, says):
    """FB-08, FB-11, FB-26, FB-39, FB-69, FB-114: a launch of a wrong scale, or with a dead half, never starts."""
    messages = list(vars(checks)[name](read_launch(Namespace(**settings))))
    with pytest.raises(ConfigError, match=says) as caught:
        check_launch(Namespace(**settings))
    assert len(messages) == 1 and messages[0] in caught.value.problems


@pytest.mark.parametrize("settings", ALLOWED, ids=range(len(ALLOWED)))
def test_a_sound_launch_is_allowed(settings):
    check_launch(Namespace(**settings))


def test_each_check_has_a_row_that_it_refuses():
    """tests/test_init_hook.py has those of a training actor."""
    assert sorted(one.__name__ for one in CHECKS) == sorted(REFUSED)


def test_a_launch_of_a_thousand_names_may_be_judged_often(monkeypatch):
    """Launcher, init hook, loss and the reward hook judge it: a name is compared with ours once in a process."""
    compared = []
    monkeypatch.setattr(checks, "get_close_matches", lambda name, *others, **options: compared.append(name) or [])
    args = Namespace(**REDUCED, **{f"an_option_of_somebody_{number}": number for number in range(1000)})
    for _ in range(3):
        check_launch(args)
    assert len(compared) == len(set(compared)) >= 1000


def test_four_faults_give_one_error_with_four_remedies_and_change_nothing():
    """FB-74: one error a launch, not one a restart."""
    settings = {**PROMPT_MEAN, **REDUCER, **CUSTOM_TIS, "samples_per_prompt": 8, "n_samples_per_prompt": 4}
    args = Namespace(**settings, train_backend="fsdp")
    problems = pytest.raises(ConfigError, check_launch, args).value.problems
    assert len(problems) == len(set(problems)) == 4
    assert vars(args) == copy.deepcopy({**settings, "train_backend": "fsdp"})


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["train.py", "--loss-aggregation", "constant"], ["--loss-aggregation"]),
        (["--loss-aggregation=constant", "--loss-aggregation-divisor=1"], ["--loss-aggregation", "--loss-aggregation-divisor"]),
        (["train.py", "--lr", "1"], []),
    ],
)
def test_flags_that_the_launcher_dropped_are_found_on_the_command_line(words, found):
    """slime drops unknown flags and trains its default."""
    problems = list(dropped_flags(Namespace(lr=1), words))
    assert [problem.split()[0] for problem in problems] == found
    assert all("; start with python -m megatron_rl.hosts.launch" in problem for problem in problems)
    assert list(dropped_flags(Namespace(loss_aggregation="constant", loss_aggregation_divisor=1.0), words)) == []


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--loss_aggregation", "--loss-aggregation"),
        ("--loss-aggregation-div=8192", "--loss-aggregation-divisor"),
        ("--loss-agregation", "--loss-aggregation"),
        ("--entropy-coef", None),
        ("--kl-loss-coef", None),
        ("loss_aggregation", None),
    ],
)
def test_a_slip_that_the_launcher_dropped_is_found_on_the_command_line(word, meant):
    """slime drops --loss_aggregation constant, under our launcher too, and trains sample_mean; its own are no slips."""
    problems = list(dropped_flags(Namespace(lr=1), ["train.py", word, "constant"]))
    assert problems == ([f"{word.partition('=')[0]} has no effect: did you mean {meant}?"] if meant else [])


def test_the_advice_of_validation_is_told_of_our_loss_only():
    """With the reducer KL and entropy are the host's own."""
    coefficients = {**CONSTANT, "entropy_coef": 0.01}
    (warning,) = launch_warnings(check_launch(Namespace(**coefficients, **CUSTOM_LOSS)))
    assert warning.startswith("entropy_coefficient=0.01 with loss_aggregation=constant")
    assert launch_warnings(check_launch(Namespace(**coefficients, **REDUCER))) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"use_tis": True}, {"importance_correction": "tis", "importance_correction_low": 0.0, "importance_correction_high": 2.0}),
        ({"use_tis": True, "importance_correction_high": "3"}, {"importance_correction_high": 3.0}),
        (
            {**MILES, "use_tis": True, "custom_tis_function_path": ICEPOP_OF["miles"].replace(".ice", ":ice"), "tis_clip": 5.0},
            {"importance_correction": "icepop", "importance_correction_low": 0.0, "importance_correction_high": 5.0},
        ),
        ({"tis_clip": 5.0, "custom_tis_function_path": "user.f"}, {"importance_correction": "none"}),
        ({"use_opsm": True}, {"off_policy_sequence_delta": 1e-4}),
        ({"use_opsm": True, "off_policy_sequence_delta": 0.1}, {"off_policy_sequence_delta": 0.1}),
        ({"opsm_delta": 0.1}, {"off_policy_sequence_delta": None}),
        (KL, {"kl_estimator": "k1"}),
        ({**KL, "kl_loss_type": "low_var_kl"}, {"kl_estimator": "k3"}),
        ({**KL, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True}, {"kl_estimator": "unbiased"}),
        ({**KL, "kl_estimator": "k3+"}, {"kl_estimator": "k3+"}),
        ({**KL, "kl_loss_coef": 0.0, "kl_loss_type": "k2"}, {"kl_estimator": "k3"}),
        ({"advantage_estimator": "cispo", "eps_clip": 10.0}, {"policy_loss": "cispo", "clip_ratio_low": 1.0}),
    ],
    ids=str,
)
def test_a_flag_of_the_host_gives_the_setting_that_is_unset(settings, expected):
    defaults = {"eps_clip": 0.2, "tis_clip": 2.0, "tis_clip_low": 0, "opsm_delta": 1e-4, "kl_loss_type": "k1"}
    config = check_launch(Namespace(**{**OUR_LOSS, **defaults, **settings})).config
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("name", ["own_reinforce", "own_losses.reinforce"])
def test_the_clip_of_a_host_does_not_reach_a_loss_without_one(name, own_losses):
    config = check_launch(Namespace(**OUR_LOSS, policy_loss=name, eps_clip=0.2)).config
    assert (config.policy_loss, config.clip_ratio_low, config.clip_ratio_high) == (name, None, None)


# Samplers of any host


TOP_P, TIS, UNBIASED = ("top_p=0.8",), ("importance_correction=tis",), ("kl_estimator=unbiased",)
PENALTY, DRAFT = ("repetition_penalty=1.1",), ("speculative_config",)
KEPT, WHOLE = "processed_logprobs", "raw_logprobs"
OF_REPLAY = {"kept": TOP_P, "mode": KEPT, "replayed": "replay=true"}
OF_FILTER = {"kept": TOP_P, "mode": KEPT, "recomputes": True}
ROWS = {
    # name: (the sampler, what reads its scores, the problem or None)
    "nothing is left out": ({"mode": KEPT}, TIS, None),
    "a kept set that nobody compares with": ({"kept": TOP_P, "mode": KEPT}, (), None),
    "scores over the whole vocabulary": ({"kept": TOP_P, "mode": WHOLE}, TIS, None),
    "an engine of the whole vocabulary": ({"kept": TOP_P, "engine": "sglang"}, TIS, None),
    "scores of the kept tokens": (
        {"kept": TOP_P, "mode": KEPT},
        TIS,
        "top_p=0.8 beside importance_correction=tis: the log-probabilities of vllm (logprobs_mode=processed_logprobs) are among",
    ),
    "scores of an unknown set": ({"kept": TOP_P}, TIS, "beside importance_correction=tis: the log-probabilities of vllm are"),
    "a penalty": ({"changed": PENALTY}, TIS, "repetition_penalty=1.1 beside importance_correction=tis: "),
    "a penalty, and scores before it": ({"changed": PENALTY, "mode": WHOLE}, TIS, None),
    "a penalty that nobody compares with": ({"changed": PENALTY}, (), None),
    "replayed sets": (OF_REPLAY | {"mixers": UNBIASED}, TIS, None),
    "replayed sets with a penalty": (
        *(OF_REPLAY | {"changed": PENALTY}, ()),
        "repetition_penalty=1.1 with replay=true: a token need not be of the set",
    ),
    "replayed sets of a draft": (
        *(OF_REPLAY | {"drafted": DRAFT}, ()),
        "speculative_config with replay=true: a token need not be of the set",
    ),
    "replayed sets, and scores over the whole vocabulary": (
        *(OF_REPLAY | {"mode": WHOLE}, TIS),
        "replay=true beside importance_correction=tis: the trainer scores among the kept tokens",
    ),
    "a trainer that filters too": (OF_FILTER, (), None),
    "a trainer that filters too, compared": (
        *(OF_FILTER, TIS),
        "top_p=0.8 beside importance_correction=tis: a token that the trainer's own filter leaves out",
    ),
    "a trainer that filters too, mixed": (
        *(OF_FILTER | {"mixers": UNBIASED}, ()),
        "top_p=0.8 beside kl_estimator=unbiased: a token that the trainer's own filter leaves out",
    ),
    "a trainer that filters too, and raw scores": (
        *(OF_FILTER | {"mode": WHOLE}, ()),
        "such a token cannot be told from a sure one; turn top_p=0.8 off",
    ),
}


@pytest.mark.parametrize(("sampler", "readers", "problem"), ROWS.values(), ids=ROWS)
def test_a_sampler_is_refused_beside_what_it_makes_wrong(sampler, readers, problem):
    """FB-114, FB-161"""
    found = [*sampler_problems(Sampler(**({"engine": "vllm"} | sampler)), readers)]
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0]), found


@pytest.mark.parametrize(
    ("settings", "words", "typed"),
    [
        ({}, [], []),
        ({"importance_correction": "tis"}, ["importance_correction=tis"], ["--importance-correction tis"]),
        ({"off_policy_sequence_delta": 0.1}, ["off_policy_sequence_delta=0.1"], ["--off-policy-sequence-delta 0.1"]),
        ({"policy_loss": "dppo_tv"}, ["policy_loss=dppo_tv"], ["--policy-loss dppo_tv"]),
    ],
)
def test_what_compares_with_the_sampler_is_named(settings, words, typed):
    of_config = partial(getattr, PolicyLossConfig(**settings))
    assert typed_readers(of_config, "{}={}".format) == words and typed_readers(settings.get) == typed
