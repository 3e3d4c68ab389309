"""The init hook on real process groups and the installed Megatron: one line when a launch is sound, one error when it is not."""

from __future__ import annotations

import contextlib
import copy
import io
import re
import sys
import warnings
from argparse import Namespace
from functools import partial

import pytest
import torch
from helpers import error_of, pool_of
from launch_settings import CUSTOM_LOSS, REDUCER
from launch_settings import REWARD as HOOK

from megatron_rl.errors import ConfigError
from megatron_rl.hosts import checks, model_notes
from megatron_rl.hosts.checks import check_launch
from megatron_rl.hosts.training_hooks import (
    custom_megatron_init,
    shift_in_words,
    step_in_words,
    summary,
    trained_in_words,
    weight_of_a_token,
)
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.megatron.probe import ProbeResult

REWARD = {**HOOK, "global_batch_size": 128, "rollout_batch_size": 16, "n_samples_per_prompt": 8}
CONSTANT = {"loss_aggregation": "constant", "loss_aggregation_divisor": 8192.0, **REDUCER, "global_batch_size": 128}
TOKEN_MEAN = {"loss_aggregation": "token_mean", "calculate_per_token_loss": True, **REDUCER}
ONCE = "rollouts (one of several samples counts once)"
pool = pool_of(4)


def init_on_rank(
    rank: int, settings: dict, of_rank: dict | None = None, argv: list[str] | None = None
) -> tuple[str, str, bool, str]:
    """(what it printed, what it raised, whether the arguments are as before, its warnings); `of_rank` for rank 1 alone."""
    args = Namespace(**settings, **(of_rank if rank == 1 and of_rank else {}))
    before, sys.argv = copy.deepcopy(vars(args)), ["train.py", *(argv or [])]
    with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = error_of(lambda: custom_megatron_init(args))
    told = [str(warning.message) for warning in caught if str(warning.message).startswith("megatron_rl")]
    return out.getvalue(), error, vars(args) == before, "\n".join(told)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("settings", "layout", "contract"),
    [
        pytest.param(CONSTANT, {"context_parallel_size": 2, "tensor_model_parallel_size": 2}, "unit: (loss x D x M, 1)", id="unit"),
        pytest.param(TOKEN_MEAN, {"context_parallel_size": 2}, "per-token: (loss x T, tokens)", id="per-token"),
    ],
)
def test_a_sound_launch_prints_one_line_on_rank_0_and_changes_nothing(pool, settings, layout, contract):
    """FB-74: the arguments are as before; FB-16: the installed schedule has been executed under the launch's contract."""
    results = pool.run(init_on_rank, {**settings, **layout}, **layout)
    assert [error for _, error, _, _ in results] == [""] * 4
    assert all(is_unchanged for _, _, is_unchanged, _ in results)
    printed = [out for out, _, _, _ in results]
    assert printed[1:] == ["", "", ""]
    (line,) = printed[0].splitlines()
    assert line.startswith(f"megatron_rl: loss_aggregation={settings['loss_aggregation']} by our reducer | step of ")
    assert " | weight of a token 1/" in line and re.search(r"\| host \w+ \| Megatron-Core \d+\.\d+", line)
    sizes = {"data": 1 if "tensor_model_parallel_size" in layout else 2, **layout}
    named = f"dp {sizes['data']} x cp 2 x tp {sizes.get('tensor_model_parallel_size', 1)} x pp 1"
    assert line.endswith(f"| contract {contract}, ratio 1 on {named} | PASS")


REFUSED = [
    pytest.param({**CONSTANT, "context_parallel_size": 2}, None, "-size 2 and the cp process group has 1 ranks", id="cp"),
    pytest.param({**CONSTANT, "tensor_model_parallel_size": 4}, None, "--tensor-model-parallel-size 4 and the tp process", id="tp"),
    ({**REDUCER}, ["--loss-aggregation", "constant"], "--loss-aggregation is on the command line and not in args"),
    pytest.param({"loss_aggregation": "sample_mean"}, None, "has no effect", id="FB-69 nothing of ours is at work"),
]


@pytest.mark.megatron
@pytest.mark.parametrize(("settings", "argv", "says"), REFUSED)
def test_a_launch_of_a_wrong_scale_stops_on_every_rank_before_any_data(pool, settings, argv, says):
    """slime drops our flags without a word."""
    for out, error, is_unchanged, _ in pool.run(init_on_rank, settings, None, argv, world_size=2):
        assert error.startswith("ConfigError") and re.search(says, error), error
        assert out == "" and is_unchanged


@pytest.mark.megatron
def test_a_problem_of_one_rank_stops_the_others_too(pool):
    """A node with a broken installation: its peers would wait in the probe until their timeout."""
    broken = {"samples_per_prompt": 4, "n_samples_per_prompt": 8}
    results = pool.run(init_on_rank, CONSTANT, broken, world_size=2)
    assert results[0][1].startswith("ConfigError: another rank refused this launch")
    assert "--samples-per-prompt 4 and --n-samples-per-prompt 8 are the same thing" in results[1][1]


def test_every_problem_of_a_launch_is_in_one_error():
    """FB-74: settings, launch and groups, in a process where nothing is initialised."""
    settings = {"loss_aggregation": "constant", **REDUCER, "context_parallel_size": 4, "qkv_format": "bshd"}
    problems = pytest.raises(ConfigError, custom_megatron_init, Namespace(**settings)).value.problems
    found = ("needs --loss-aggregation-divisor", "--qkv-format bshd", "cp process group has 1 ranks")
    assert [part in problem for problem, part in zip(problems, found, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"policy_loss_backend": "triton"}, "no triton on this device"),
        ({"num_experts": 4, "expert_tensor_parallel_size": 2}, "Megatron-Core .* adds the gradients of different shards"),
    ],
)
def test_an_actor_judges_its_kernels_and_the_release_that_trains_its_experts(settings, says, monkeypatch):
    def check_backend(backend: str, device: torch.device) -> None:
        if backend != "auto":
            raise ConfigError(f"no {backend} on this device")

    monkeypatch.setattr(model_notes, "check_backend", check_backend)
    monkeypatch.setattr(model_notes, "expert_replicas_drift", lambda: True)
    monkeypatch.setattr(checks, "group_problems", lambda args: [])
    args = Namespace(loss_aggregation="sample_mean", **CUSTOM_LOSS, **settings)
    check_launch(args)
    (problem,) = pytest.raises(ConfigError, partial(check_launch, in_actor=True), args).value.problems
    assert re.search(says, problem), problem


@pytest.mark.parametrize("value", ["1", "true", "0", None])
def test_a_sampler_that_scores_the_whole_vocabulary_is_refused_where_kept_ids_are_replayed(value, monkeypatch):
    monkeypatch.delenv("SGLANG_RETURN_ORIGINAL_LOGPROB", raising=False)
    if value is not None:
        monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", value)
    launch = {**CUSTOM_LOSS, "loss_aggregation": "sample_mean", "rollout_batch_size": 8, "rollout_top_p": 0.9}
    args = Namespace(**launch, sampling_support="replay")
    if value in ("1", "true"):
        with pytest.raises(ConfigError, match=f"SGLANG_RETURN_ORIGINAL_LOGPROB={value} with --sampling-support replay: .*unset it"):
            check_launch(args, in_actor=True)
    else:
        check_launch(args, in_actor=True)


def test_the_line_says_what_scores_are_over():
    launch = {**CUSTOM_LOSS, "loss_aggregation": "sample_mean", "rollout_batch_size": 8, "rollout_top_p": 0.9}
    launch |= {"sampling_support": "replay", "use_kl_loss": True, "kl_loss_coef": 0.1}
    line = trained_in_words(check_launch(Namespace(**launch)))
    assert "| log-probabilities over the kept ids of rollout_top_p_token_ids, KL over the same |" in line


def test_the_line_says_what_dropout_does_to_the_first_ratio():
    launch = {**CUSTOM_LOSS, "loss_aggregation": "sample_mean", "hidden_dropout": 0.1, "attention_dropout": 0.0}
    line = trained_in_words(check_launch(Namespace(**launch)))
    assert "| hidden_dropout 0.1: the first ratio is not 1 |" in line and "attention_dropout" not in line


SAMPLE_MEAN = {"loss_aggregation": "sample_mean", **REDUCER}
OF_PROMPT = "x 1 on average, x m_i/(mean tokens of its prompt's samples) for sample i"
PROMPT_MEAN = {"loss_aggregation": "prompt_mean"}


@pytest.mark.parametrize(
    ("settings", "weight", "shift"),
    [
        (SAMPLE_MEAN, "1/(N m_i)", "x 1"),
        ({**SAMPLE_MEAN, "global_batch_size": 128}, "1/(N m_i) = 1/(128 m_i)", "x 1"),
        ({"loss_aggregation": "sample_mean", **CUSTOM_LOSS, "global_batch_size": 128}, "1/(N M_roll) = 1/(128 M_roll)", "x 1"),
        # 1 / (8192 x 128) = 1 / 1048576 = 9.5367e-07
        (CONSTANT, "1/(L N) = 1/(8192 N) = 1/(8192 x 128) = 9.537e-07", "x m/8192 (m: mean tokens of a sample)"),
        ({**CONSTANT, "use_dynamic_global_batch_size": True}, "1/(L N) = 1/(8192 N)", "x m/8192 (m: mean tokens of a sample)"),
        (TOKEN_MEAN, "1/T", "x 1 on average, x m_i/(mean tokens of the step's samples) for sample i"),
        # 128 samples in groups of 8 are 16 prompts.
        ({**PROMPT_MEAN, **REDUCER, **REWARD}, "1/(P M_g) = 1/(16 M_g)", OF_PROMPT),
    ],
)
def test_the_line_tells_weight_and_shift(settings, weight, shift):
    launch = check_launch(Namespace(**settings))
    assert weight_of_a_token(launch) == weight
    assert re.fullmatch(f"weights against sample_mean {re.escape(shift)}(: Adam hides it.*)?", shift_in_words(launch.config))


BY_OUR_LOSS = {**dict.fromkeys(REDUCER), **CUSTOM_LOSS}


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        (CONSTANT, "clipping does not"),
        ({**CONSTANT, "kl_loss_coef": 0.01}, "clipping does not"),  # --use-kl-loss is off
        ({**CONSTANT, "kl_loss_coef": 0.01, "use_kl_loss": True, "entropy_coef": 0.1}, "; KL and entropy x 8192/m beside it"),
        ({**CONSTANT, **BY_OUR_LOSS, "entropy_coef": 0.1}, "clipping does not; entropy x 8192/m beside it"),
        ({**CONSTANT, **BY_OUR_LOSS}, "clipping does not"),
    ],
)
def test_the_line_tells_of_kl_and_entropy_where_they_are_trained(settings, end):
    """With the reducer they are the host's own, of the host's coefficients."""
    launch = check_launch(Namespace(**{"kl_loss_type": "k3", **settings}))
    line = summary(launch, ProbeResult(1.0, "unit", "0.16.1"), ParallelGroups())
    assert f"{end} | host slime" in line


@pytest.mark.parametrize(
    ("settings", "step"),
    [
        (SAMPLE_MEAN, "step of as many samples as come"),
        (CONSTANT, f"step of 128 {ONCE}"),
        # 128 samples in groups of 8; 12 are no whole groups of 8.
        ({**CONSTANT, "n_samples_per_prompt": 8}, f"step of 128 {ONCE}, 16 prompts"),
        ({**SAMPLE_MEAN, "global_batch_size": 12, "n_samples_per_prompt": 8}, f"step of 12 {ONCE}"),
        ({**CONSTANT, "use_dynamic_global_batch_size": True, "n_samples_per_prompt": 8}, "step of as many samples as come"),
        ({**CONSTANT, "multi_lora": True, "n_samples_per_prompt": 8}, "step of an adapter's own batch, whose rollouts are N"),
    ],
)
def test_the_line_tells_how_much_a_step_holds(settings, step):
    assert step_in_words(check_launch(Namespace(**settings))) == step


def test_the_line_tells_what_our_loss_was_told():
    """Clip, temperature and coefficients come from the host's own flags, and nothing else says which have arrived."""
    of_host = {"eps_clip": 3e-4, "eps_clip_high": 4e-4, "rollout_temperature": 0.7, "use_kl_loss": True, "kl_loss_coef": 0.01}
    settings = {**CUSTOM_LOSS, "advantage_estimator": "gspo", "loss_aggregation": "sample_mean", "kl_loss_type": "k3", **of_host}
    line = summary(check_launch(Namespace(**settings)), ProbeResult(1.0, "unit", "0.16.1"), ParallelGroups())
    assert " by custom_loss | gspo, clip 0.0003/0.0004, KL 0.01, entropy 0, temperature 0.7 applied | step of " in line
    corrected = {**settings, "use_tis": True, "use_opsm": True, "opsm_delta": 0.01, "use_unbiased_kl": True}
    line = summary(check_launch(Namespace(**corrected)), ProbeResult(1.0, "unit", "0.16.1"), ParallelGroups())
    assert "KL 0.01 (unbiased), entropy 0, tis by token in [0, 2], samples beyond 0.01 dropped, temperature 0.7 applied" in line
    line = summary(check_launch(Namespace(**CONSTANT)), ProbeResult(1.0, "unit", "0.16.1"), ParallelGroups())
    assert "clip 0" not in line and "temperature" not in line  # the host's loss has its own
