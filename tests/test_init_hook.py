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
from megatron_rl.hosts.training_hooks import custom_megatron_init, summary
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
    args = Namespace(**OUR_LOSS, **REPLAY)
    if value in ("1", "true"):
        with pytest.raises(ConfigError, match=f"SGLANG_RETURN_ORIGINAL_LOGPROB={value} with --sampling-support replay: .*unset it"):
            check_launch(args, in_actor=True)
    else:
        check_launch(args, in_actor=True)


# The line of a sound launch

SAMPLE_MEAN = {"loss_aggregation": "sample_mean", **REDUCER}
OUR_LOSS = {**CUSTOM_LOSS, "loss_aggregation": "sample_mean", "kl_loss_type": "k3"}
OF_CONSTANT = {**CONSTANT, "kl_loss_type": "k3"}
BY_OUR_LOSS = {**OF_CONSTANT, **dict.fromkeys(REDUCER), **CUSTOM_LOSS}
DYNAMIC, BY_EIGHT = {"use_dynamic_global_batch_size": True}, {"n_samples_per_prompt": 8}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.01}
REPLAY = {"rollout_batch_size": 8, "rollout_top_p": 0.9, "sampling_support": "replay"}
GSPO = {**OUR_LOSS, **KL, "advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4, "rollout_temperature": 0.7}
OFF_POLICY = {"use_tis": True, "use_opsm": True, "opsm_delta": 0.01, "use_unbiased_kl": True}
# The launch, and parts of its line.
LINES = [
    # Weight of a token, and what changes against sample_mean.
    (SAMPLE_MEAN, ["weight of a token 1/(N m_i) |", "weights against sample_mean x 1 |"]),
    ({**SAMPLE_MEAN, "global_batch_size": 128}, ["weight of a token 1/(N m_i) = 1/(128 m_i) |"]),
    ({**OUR_LOSS, "global_batch_size": 128}, ["weight of a token 1/(N M_roll) = 1/(128 M_roll) |"]),
    # 1 / (8192 x 128) = 1 / 1048576 = 9.5367e-07
    (CONSTANT, ["token 1/(L N) = 1/(8192 N) = 1/(8192 x 128) = 9.537e-07 |", "sample_mean x m/8192 (m: mean tokens of a sample)"]),
    ({**CONSTANT, **DYNAMIC}, ["weight of a token 1/(L N) = 1/(8192 N) |"]),
    (TOKEN_MEAN, ["token 1/T |", "sample_mean x 1 on average, x m_i/(mean tokens of the step's samples) for sample i"]),
    # 128 samples in groups of 8 are 16 prompts.
    (
        {"loss_aggregation": "prompt_mean", **REDUCER, **REWARD},
        ["token 1/(P M_g) = 1/(16 M_g)", "x 1 on average, x m_i/(mean tokens of its prompt's samples) for sample i"],
    ),
    # KL and entropy where they are trained: with the reducer they are the host's own, of the host's coefficients.
    (OF_CONSTANT, ["clipping does not | host slime"]),
    ({**OF_CONSTANT, "kl_loss_coef": 0.01}, ["clipping does not | host slime"]),  # --use-kl-loss is off
    ({**OF_CONSTANT, **KL, "entropy_coef": 0.1}, ["; KL and entropy x 8192/m beside it | host slime"]),
    ({**BY_OUR_LOSS, "entropy_coef": 0.1}, ["clipping does not; entropy x 8192/m beside it | host slime"]),
    (BY_OUR_LOSS, ["clipping does not | host slime"]),
    # How much a step holds. 128 samples in groups of 8; 12 are no whole groups of 8.
    (SAMPLE_MEAN, ["| step of as many samples as come |"]),
    (CONSTANT, [f"| step of 128 {ONCE} |"]),
    ({**CONSTANT, **BY_EIGHT}, [f"| step of 128 {ONCE}, 16 prompts |"]),
    ({**SAMPLE_MEAN, "global_batch_size": 12, **BY_EIGHT}, [f"| step of 12 {ONCE} |"]),
    ({**CONSTANT, **DYNAMIC, **BY_EIGHT}, ["| step of as many samples as come |"]),
    ({**CONSTANT, "multi_lora": True, **BY_EIGHT}, ["| step of an adapter's own batch, whose rollouts are N |"]),
    # What our loss was told: nothing else says which of the host's flags have arrived.
    (GSPO, [" by custom_loss | gspo, clip 0.0003/0.0004, KL 0.01, entropy 0, temperature 0.7 applied | step of "]),
    (
        {**GSPO, **OFF_POLICY},
        ["KL 0.01 (unbiased), entropy 0, tis by token in [0, 2], samples beyond 0.01 dropped, temperature 0.7 applied"],
    ),
    ({**OUR_LOSS, **REPLAY, **KL}, ["| log-probabilities over the kept ids of rollout_top_p_token_ids, KL over the same |"]),
    (
        {**OUR_LOSS, "hidden_dropout": 0.1, "attention_dropout": 0.0},
        ["applied | hidden_dropout 0.1: the first ratio is not 1 | step"],
    ),
]


@pytest.mark.parametrize(("settings", "parts"), LINES, ids=range(len(LINES)))
def test_the_line_tells_what_is_trained(settings, parts):
    line = summary(check_launch(Namespace(**settings)), ProbeResult(1.0, "unit", "0.16.1"), ParallelGroups())
    for part in parts:
        assert part in line
    if "our reducer" in line:  # the host's loss has its own
        assert "clip 0" not in line and "temperature" not in line
