"""Our losses in verl: through an emulated ppo_loss always, through verl's own with a checkout.

VERL_ROOT=... pytest -m host --require host tests/test_verl.py
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import math
import pickle
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
import verl_cases as cases
from adapter_cases import CORRECTIONS, SAMPLER_GAP
from dense_row_cases import AGGREGATIONS, largest_error, samples_of, truth
from forked import in_fork
from helpers import names_forgotten
from host_checkouts import VERL
from verl_cases import ActorConfig, Case

from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import StepTotals
from megatron_rl.declare import register_policy_loss
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import dense_rows, model_notes, verl, verl_loss, verl_plugin, verl_step
from megatron_rl.hosts.choice import value_at
from megatron_rl.hosts.dense_rows import RowCounts
from megatron_rl.layout.groups import SINGLE
from megatron_rl.testing.ranks import run_ranks

TOLERANCE = 1e-5
ROLLOUT_TOLERANCE = 1e-6  # float32 numbers against a float64 step
ICEPOP = {"importance_correction": "icepop", "importance_correction_low": 0.5, "importance_correction_high": 2.0}


def error_of(case: Case, ppo_loss: Any, config: Any, weights_of: Any = cases.uncut_weights) -> float:
    samples, log_probs = samples_of(case)
    advantages = cases.given_advantages(samples)
    found = cases.run_step(case, samples, log_probs, advantages, ppo_loss, config, None, weights_of)
    return largest_error(found, *truth(case, samples, log_probs))


def test_weights_that_were_cut_are_refused():
    mode, cut = "megatron_rl.dppo_tv.sample_mean", torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    for weights, expected in ((None, "gives no rollout_is_weights"), (cut, "has set some rollout_is_weights to 0")):
        with pytest.raises(ConfigError, match=expected):
            call(mode, rollout_is_weights=weights)
    call(mode, rollout_is_weights=cut, response_mask=cut.bool())


def read_settings(mode: str, **settings: Any) -> PolicyLossConfig:
    """Ours, as a worker reads them from its actor config."""
    policy_loss = {"loss_mode": f"megatron_rl.{mode}", **settings.pop("policy_loss", {})}
    return verl.read(ActorConfig(policy_loss=policy_loss, **settings)).config


@pytest.mark.parametrize(
    ("mode", "settings", "said"),
    [
        # verl fills in 0.2 for any loss; a ratio of a sample never gets there.
        ("gspo.sample_mean", {}, "clip 0.0003/0.0004, clip_ratio_c 3 (the loss's own clip)"),
        ("gspo.sample_mean", {"clip_ratio_high": 2e-3}, "clip 0.0003/0.002, clip_ratio_c 3 (low: the loss's own)"),
        # verl's clip_ratio_c belongs to another loss here.
        ("cispo.sample_mean", {"clip_ratio_low": 1.0, "clip_ratio_high": 0.3}, "clip 1/0.3"),
    ],
)
def test_the_clip_of_a_loss_is_its_own_where_verl_has_its_defaults(mode, settings, said):
    assert dense_rows.numbers(read_settings(mode, **settings)) == said


def test_parameters_have_verls_names_where_it_has_one():
    sapo = read_settings("sapo.token_mean", tau_neg=1.5)
    assert sapo.loss_parameters == {"sapo_temperature_positive": 1.0, "sapo_temperature_negative": 1.5}
    dro = read_settings("dro.token_mean", policy_loss={"dro_beta": 0.3})
    assert dro.loss_parameters == {"log_ratio_penalty": 0.3}


# One call of a loss: two samples, three tokens


EACH = object()


def plain_rows(mask: torch.Tensor) -> RowCounts:
    """Of a mini-batch of 8 rows with 10 tokens of 8 prompts, each a rollout."""
    tokens = mask.sum(-1).long()
    return RowCounts(StepTotals(num_samples=8, num_prompts=8, num_tokens=10), tokens, tokens, None)


def call(mode: str, *, info: dict | None = None, config: ActorConfig | None = None, rows: Any = EACH, **changes):
    """(loss, metrics, gradient). The rows are as many as the mask's; `changes` replace arguments of the call."""
    config = ActorConfig(policy_loss={}) if config is None else config
    config.policy_loss["loss_mode"] = mode
    config.global_batch_info = {"dp_size": 2} | (info or {})
    mask = changes.get("response_mask", torch.ones(2, 3, dtype=torch.bool))
    verl_loss.RUNS.of(config).rows = plain_rows(mask) if rows is EACH else rows
    given = {
        "old_log_prob": torch.full(mask.shape, -1.1),
        "log_prob": torch.full(mask.shape, -1.0, requires_grad=True),
        "advantages": torch.linspace(1.0, -0.5, mask.shape[0])[:, None].expand(mask.shape),
        "response_mask": mask,
        "loss_agg_mode": config.loss_agg_mode,
        "config": config,
    }
    given |= changes
    loss, metrics = cases.verl_tables()[mode](**given)
    return loss.detach(), metrics, torch.autograd.grad(loss, given["log_prob"])[0]


def test_weights_of_verl_multiply_each_token():
    weights = torch.tensor([[0.5, 2.0, 1.0], [0.0, 1.0, 3.0]])
    _, _, plain = call("megatron_rl.grpo.token_mean")
    _, _, weighed = call("megatron_rl.grpo.token_mean", rollout_is_weights=weights)
    assert torch.allclose(weighed, plain * weights)


@pytest.mark.parametrize("loss", ["grpo", "dppo_tv"])
def test_the_unbiased_estimate_of_kl_is_of_the_policy_that_sampled(loss):
    """verl's KL term comes right after our loss of the same micro-batch; dppo compares with the sampler, exp(0.2) away."""
    generator = torch.Generator().manual_seed(0)
    new, old, ref = torch.randn(3, 2, 3, generator=generator, dtype=torch.float64) / 4 - 1
    mask = torch.tensor([[True, True, False], [True, True, True]])
    new[0, 2] = ref[0, 2] = math.nan
    log_prob = new.float().requires_grad_()
    weights = torch.full((2, 3), math.exp(0.2))
    config = ActorConfig(policy_loss={}, kl_loss_type="unbiased")
    call(
        f"megatron_rl.{loss}.token_mean",
        config=config,
        **{"log_prob": log_prob, "old_log_prob": old.float(), "response_mask": mask, "rollout_is_weights": weights},
    )
    estimate = cases.filled_tables().kl_penalty
    found = estimate(logprob=log_prob, ref_logprob=ref.float(), kl_penalty="unbiased")
    rho, gap = (new - old + (0.2 if loss == "dppo_tv" else 0.0)).exp(), new - ref
    value = torch.where(mask, rho * ((-gap).exp() - 1 + gap), 0.0)
    gradient = torch.where(mask, rho * gap, 0.0)
    assert torch.allclose(found.double(), value, rtol=1e-5, atol=1e-6)  # float32 inputs
    assert torch.allclose(torch.autograd.grad(found.sum(), log_prob)[0].double(), gradient, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="kl_penalty=unbiased is megatron_rl's, for actor.kl_loss_type beside one of its"):
        estimate(logprob=log_prob.clone(), ref_logprob=ref.float(), kl_penalty="unbiased")  # of no call of ours
    assert torch.equal(estimate(log_prob, ref.float(), "k1")[1], log_prob[1] - ref.float()[1])


def test_two_trainers_of_a_process_have_their_own_kl_terms_and_their_state_goes_with_them():
    """Each has called its loss before either computes its KL term; rho = exp(new - old) by hand."""
    tables = cases.filled_tables()
    gc.collect()
    before, ref = len([*verl_loss.RUNS]), torch.full((2, 3), -1.5)
    configs = [ActorConfig(policy_loss={}, kl_loss_type="unbiased") for _ in range(2)]
    leaves = [torch.full((2, 3), value, requires_grad=True) for value in (-1.0, -2.0)]
    for config, leaf, old in zip(configs, leaves, (-1.1, -2.5), strict=True):
        call("megatron_rl.grpo.token_mean", config=config, log_prob=leaf, old_log_prob=torch.full((2, 3), old))
    assert len([*verl_loss.RUNS]) == before + 2
    for leaf, rho, gap in zip(leaves, (math.exp(0.1), math.exp(0.5)), (0.5, -0.5), strict=True):
        found = tables.kl_penalty(leaf, ref, "unbiased")
        expected = torch.full((2, 3), rho * (math.exp(-gap) - 1 + gap))
        assert torch.allclose(found, expected, rtol=1e-5)  # float32 inputs
    del configs, config
    gc.collect()
    assert len([*verl_loss.RUNS]) == before


def test_a_reference_that_is_not_finite_is_refused_by_the_unbiased_estimate():
    log_prob = torch.full((2, 3), -1.0, requires_grad=True)
    config = ActorConfig(policy_loss={}, kl_loss_type="unbiased")
    call("megatron_rl.grpo.token_mean", config=config, log_prob=log_prob)
    with pytest.raises(DataError, match="the KL estimate unbiased is not finite"):
        cases.filled_tables().kl_penalty(log_prob, torch.full((2, 3), math.nan), "unbiased")


def test_the_metrics_have_verls_names_and_are_numbers():
    _, metrics, _ = call("megatron_rl.grpo.sample_mean")
    assert metrics == {"actor/pg_clipfrac": 0.0, "actor/ppo_kl": pytest.approx(-0.1)}
    masked = torch.zeros(2, 3, dtype=torch.bool)
    loss, metrics, gradient = call("megatron_rl.grpo.token_mean", response_mask=masked)
    assert float(loss) == 0 and metrics == {"actor/pg_clipfrac": 0.0, "actor/ppo_kl": 0.0} and not gradient.any()


@pytest.mark.parametrize(
    ("mode", "changes", "expected"),
    [
        pytest.param("grpo.sample_mean", {"info": {"dp_size": None}}, "has no dp_size", id="no dp_size"),
        pytest.param("grpo.sample_mean", {"clip_ratio_low": True}, "clip_ratio_low=True must be a number", id="a clip is a switch"),
        pytest.param("grpo.sample_mean", {"loss_agg_mode": "token-sum"}, "two aggregations", id="verl's aggregation"),
        pytest.param("grpo.sample_mean", {"policy_loss": {"ratio_truncation": 5.0}}, "=5.0 has no effect", id="of another loss"),
        pytest.param("grpo.constant", {}, "actor.loss_scale_factor=None: constant needs its L", id="no L"),
        pytest.param(
            "dppo_kl.sample_mean", {"policy_loss": {"importance_correction": "tis"}}, "counted twice", id="corrected twice"
        ),
    ],
)
def test_a_setting_that_would_train_another_weight_is_refused_by_name(mode, changes, expected):
    info = changes.get("info")
    settings = {name: value for name, value in changes.items() if name != "info"}
    with pytest.raises(ConfigError, match=expected):
        call(f"megatron_rl.{mode}", info=info, config=ActorConfig(**{"policy_loss": {}, **settings}))


SAMPLE_MEAN = verl.read(ActorConfig(policy_loss={"loss_mode": "megatron_rl.grpo.sample_mean"}))


def test_rows_that_verl_adds_to_fill_a_batch_are_in_no_count():
    """Three rows of two rollouts, and two that verl has added; 1/(R M_j) by hand."""
    data = {
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0]]),
        "uid": ["a", "a", "a", "pad7", "pad7"],
        "session_id": [0, 0, 1, 0, 1],
    }
    totals, counts = verl_step.count_mini_batch(SAMPLE_MEAN, data, SINGLE, None)
    assert (totals.num_samples, totals.num_rollouts, totals.num_tokens) == (3, 2, 6)
    rows = verl_step.rows_of(SAMPLE_MEAN, totals, counts)
    assert rows.rollouts.tokens.tolist() == [3, 3, 3, 0, 0] and rows.rollouts.rows.tolist() == [2, 2, 1, 0, 0]
    gradient = weighed(rows, data["response_mask"].bool())
    expected = torch.tensor([1 / 6, 1 / 6, 1 / 6, 0, 0])[:, None] * data["response_mask"]
    assert torch.allclose(gradient.abs(), 2 * expected * math.exp(0.1), atol=1e-7)  # x D


def weighed(rows: RowCounts, mask: torch.Tensor) -> torch.Tensor:
    config = ActorConfig(policy_loss={})
    return call("megatron_rl.grpo.sample_mean", config=config, rows=rows, response_mask=mask, advantages=torch.ones(mask.shape))[2]


@pytest.mark.parametrize(
    ("sessions", "num_rollouts", "said"),
    [
        (None, None, "| step of 4 samples | on 2 data-parallel ranks | weight of a token 1/(N m_i) = 1/(4 m_i) | a row"),
        ([0, 1, 0, 1], 4, "step of 4 samples | on 2 data-parallel ranks | weight of a token 1/(N m_i) = 1/(4 m_i) | a row"),
        ([0, 0, 0, 0], 2, "of 2 rollouts | on 2 data-parallel ranks | weight of a token 1/(R M_j) = 1/(2 M_j) | a rollout"),
    ],
)
def test_the_rows_of_a_session_are_a_rollout(sessions, num_rollouts, said, capsys):
    data = {"response_mask": torch.ones(4, 3), "uid": ["a", "a", "b", "b"]} | ({} if sessions is None else {"session_id": sessions})
    totals, counts = verl_step.count_mini_batch(SAMPLE_MEAN, data, SINGLE, None)
    assert totals.num_rollouts == num_rollouts
    weighed(verl_step.rows_of(SAMPLE_MEAN, totals, counts), data["response_mask"].bool())
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "settings", "change", "error", "message"),
    [
        ("grpo.prompt_mean", {}, {"uid": None}, ConfigError, "verl's batch has no uid, which megatron_rl.grpo.prompt_mean needs"),
        ("grpo.prompt_mean", {}, {}, DataError, "prompt 'a' has 1 of samples_per_prompt=2 .*rollout.n"),
        (
            "grpo.sample_mean",
            {"one_sample_per_rollout": True},
            {},
            DataError,
            "3 rows of 2 rollouts, and one_sample_per_rollout=true",
        ),
    ],
)
def test_a_mini_batch_that_cannot_be_counted_is_refused(mode, settings, change, error, message):
    data = {"response_mask": torch.ones(3, 2), "uid": ["a", "a", "b"], "session_id": [0, 0, 0]} | change
    data = {name: column for name, column in data.items() if column is not None}
    launch = verl.read(ActorConfig(policy_loss={"loss_mode": f"megatron_rl.{mode}", **settings}))
    with pytest.raises(error, match=message):
        verl_step.count_mini_batch(launch, data, SINGLE, 2)


def test_a_mini_batch_without_a_token_weighs_nothing():
    mask = torch.zeros(2, 3)
    for sessions in ({}, {"session_id": [0, 0]}):
        data = {"response_mask": mask, "uid": ["a", "a"], **sessions}
        totals, counts = verl_step.count_mini_batch(SAMPLE_MEAN, data, SINGLE, None)
        assert not weighed(verl_step.rows_of(SAMPLE_MEAN, totals, counts), mask.bool()).any()


def test_a_loss_that_nobody_has_counted_for_is_refused():
    with pytest.raises(ConfigError, match="BaseEngine.train_batch has not counted its step"):
        call("megatron_rl.grpo.token_mean", rows=None)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    with pytest.raises(DataError, match=r"have \[2, 3\] unmasked tokens, and \[3, 3\] when the step was counted"):
        call("megatron_rl.grpo.token_mean", rows=plain_rows(torch.ones(2, 3)), response_mask=mask)


def test_verls_engine_counts_where_our_loss_trains(monkeypatch):
    """The loss has the counts of its rows while it runs; another loss gets verl's own function. The model is looked at before."""
    calls, config = [], ActorConfig(policy_loss={"loss_mode": "megatron_rl.grpo.sample_mean"})
    run = verl_loss.RUNS.of(config)

    class BaseEngine:
        def train_batch(self, data, loss_function):
            loss_function(model_output={}, data={name: column[1:] for name, column in data.items()}, dp_group=None)

        def get_data_parallel_group(self):
            return SINGLE

        tf_config = types.SimpleNamespace(tensor_model_parallel_size=2)

    def ppo_loss(config, model_output, data, dp_group=None):
        calls.append((run.rows, sorted(data)))

    engines = types.SimpleNamespace(__name__="engines", BaseEngine=BaseEngine)
    verl_step.count_in(engines)
    data = {"response_mask": torch.ones(3, 2), "uid": ["a", "a", "b"], "session_id": [0, 0, 0]}
    BaseEngine().train_batch(data, functools.partial(ppo_loss, config=config))
    ((rows, names),) = calls
    assert rows.tokens.tolist() == [2, 2] and rows.rollouts.tokens.tolist() == [4, 2] and verl_step.COUNTS in names
    assert run.rows is None
    drifts = {"tensor_model_parallel_size": 2}.items()
    monkeypatch.setattr(model_notes, "release_problems", lambda found: ["it drifts"] * (drifts <= found.items()))
    with pytest.raises(ConfigError, match="it drifts"):
        BaseEngine().train_batch(data, functools.partial(ppo_loss, config=config))
    own = ActorConfig(policy_loss={"loss_mode": "vanilla"})
    data = {name: column for name, column in data.items() if name != verl_step.COUNTS}
    BaseEngine().train_batch(data, functools.partial(ppo_loss, config=own))
    assert calls[1][0] is None and verl_step.COUNTS not in data
    engines.BaseEngine.train_batch = lambda self, batch: None
    with pytest.raises(ConfigError, match=r"BaseEngine.train_batch takes \(self, batch\), ours is made for"):
        verl_step.count_in(engines)


# Registration


def test_a_loss_of_ones_own_is_in_verls_table_by_its_declared_name():
    tables = cases.emulated_tables()
    with names_forgotten():
        register_policy_loss("halved")(lambda log_ratio, advantages: -advantages * log_ratio / 2)
        verl_loss.register(tables)
    assert {"megatron_rl.halved.constant", "megatron_rl.halved.prompt_mean"} <= tables.POLICY_LOSS_REGISTRY.keys()


def test_tables_of_another_contract_are_refused(capsys):
    tables = cases.emulated_tables()
    del tables.register_policy_loss
    verl_plugin.fill(tables)
    said = capsys.readouterr().err
    assert said.startswith("megatron_rl: none of its losses can train in verl: ") and "register_policy_loss is missing" in said
    assert tables.POLICY_LOSS_REGISTRY == {}


# The whole config, in the driver


MODE, ROLLOUT = "actor_rollout_ref__actor__policy_loss__loss_mode", "actor_rollout_ref__rollout__"
CORRECTION = "algorithm__rollout_correction__"
UNCUT = {f"{CORRECTION}rollout_is": "token", f"{CORRECTION}rollout_is_threshold": 1e9}
OF_ICEPOP = {
    MODE: "gspo.sample_mean",
    "actor_rollout_ref__actor__policy_loss__importance_correction": "icepop",
    "actor_rollout_ref__actor__policy_loss__importance_correction_low": 0.5,
    **UNCUT,
}
CUT = {"actor_rollout_ref__actor__ppo_mini_batch_size": 64}
MANAGER = {f"{ROLLOUT}agent__agent_loop_manager_class": "mine.Manager"}
TOP_P = {f"{ROLLOUT}top_p": 0.7}
# Settings, and the problem; None: none.
WHOLE: dict[str, tuple[dict[str, Any], str | None]] = {
    "a slip": ({MODE: "grpo.token_maen"}, "loss_mode=megatron_rl.grpo.token_maen does not name a loss and an aggregation"),
    "a switch that is text": ({"actor_rollout_ref__actor__use_kl_loss": "false"}, "use_kl_loss='false' is text"),
    "uncut weights": ({MODE: "dppo_tv.sample_mean", **UNCUT}, None),
    "weights that are cut": (
        {MODE: "dppo_tv.sample_mean", f"{CORRECTION}rollout_is": "token"},
        "rollout_is_threshold=None: megatron_rl.dppo_tv.sample_mean compares with the sampler, .*set .*threshold=1000000000.0",
    ),
    "normalised, bypassed and no weights": (
        {
            **OF_ICEPOP,
            f"{CORRECTION}rollout_is_batch_normalize": True,
            f"{CORRECTION}bypass_mode": True,
            f"{ROLLOUT}calculate_log_probs": False,
        },
        "set .*batch_normalize=False .*bypass_mode=False .*calculate_log_probs=True",
    ),
    "the old trainer's own loss": (
        {f"{CORRECTION}bypass_mode": True, "trainer__use_v1": False},
        "bypass_mode=true of the old trainer puts verl's own loss in the place of ours",
    ),
    "cut groups": ({MODE: "grpo.prompt_mean", **CUT}, "ppo_mini_batch_size=64 of data.train_batch_size=256: .*cuts prompt groups"),
    "cut groups that are accepted": (
        {MODE: "grpo.prompt_mean", **CUT, "actor_rollout_ref__actor__policy_loss__allow_partial_prompt_groups": True},
        None,
    ),
    "rows of a manager of one's own": ({MODE: "grpo.sample_mean", **MANAGER}, "manager_class=mine.Manager.* set .*one_sample"),
    "rows that are said to be rollouts": (
        {MODE: "grpo.row_mean", **MANAGER, "actor_rollout_ref__actor__policy_loss__one_sample_per_rollout": True},
        None,
    ),
    # FB-114
    "a kept set, corrected": ({**OF_ICEPOP, **TOP_P}, "top_p=0.7 beside importance_correction=icepop: .*turn .*top_p=0.7 off"),
    "a kept set, verl's weights": ({**UNCUT, **TOP_P}, "top_p=0.7 beside algorithm.rollout_correction.rollout_is=token: "),
    "a kept set, verl's rejection": (
        {f"{CORRECTION}rollout_rs": "token_k1", f"{ROLLOUT}top_k": 20},
        "top_k=20 beside algorithm.rollout_correction.rollout_rs=token_k1: ",
    ),
    "a kept set, raw scores": (
        {**OF_ICEPOP, **TOP_P, f"{ROLLOUT}engine_kwargs": {"vllm": {"logprobs_mode": "raw_logprobs"}}},
        None,
    ),
    "a kept set, SGLang": ({**OF_ICEPOP, **TOP_P, f"{ROLLOUT}name": "sglang"}, None),
    "a kept set, another engine": ({**OF_ICEPOP, **TOP_P, f"{ROLLOUT}name": "trtllm"}, "trtllm are over what is not known"),
    "a penalty": ({**OF_ICEPOP, f"{ROLLOUT}repetition_penalty": 1.1}, "repetition_penalty=1.1 beside "),
}


def judged(**settings: Any) -> list[str]:
    config = cases.whole_config(**settings)
    policy_loss = config["actor_rollout_ref"]["actor"]["policy_loss"]
    policy_loss["loss_mode"] = f"megatron_rl.{policy_loss.get('loss_mode', 'grpo.token_mean')}"
    return verl.check(config)


@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_config_is_judged_in_the_driver(name):
    settings, problem = WHOLE[name]
    if problem is None:
        (said,) = judged(**settings)
        assert said.startswith("loss_mode=megatron_rl.") and " in verl | " in said
        return
    with pytest.raises(ConfigError, match=problem) as refused:
        judged(**settings)
    assert len(refused.value.problems) == 1


def test_verls_own_check_ends_a_launch_with_a_problem_and_each_one_that_is_only_checked(monkeypatch, capsys):
    """FB-114: verl drops an exception of a plugin, so the end is a SystemExit."""
    asked: list[Any] = []
    checks = types.SimpleNamespace(validate_config=lambda config, use_critic: asked.append(use_critic))
    verl_plugin.judge(checks)
    slip = cases.whole_config(**{MODE: "megatron_rl.grpo.token_maen"})
    with pytest.raises(SystemExit, match="^megatron_rl: ConfigError: .*token_maen does not name a loss"):
        checks.validate_config(slip, use_critic=False)
    assert asked == []
    checks.validate_config(cases.whole_config(**{MODE: "vanilla"}), use_critic=False)
    assert asked == [False] and capsys.readouterr().err == ""
    monkeypatch.setenv("MEGATRON_RL_CHECK", "1")
    with pytest.raises(SystemExit) as ended:
        checks.validate_config(cases.whole_config(**{MODE: "megatron_rl.grpo.token_mean"}), use_critic=True)
    assert ended.value.code == 0 and asked == [False, True]
    assert capsys.readouterr().err.startswith("megatron_rl: loss_mode=megatron_rl.grpo.token_mean in verl | clip 0.2/0.2")


def test_our_class_of_settings_has_a_field_for_each_that_verl_has_no_name_for(monkeypatch):
    """A loss that is declared later has its own there without a list; a worker gets the object pickled."""
    configs = types.ModuleType("verl.workers.config")
    configs.PolicyLossConfig = dataclasses.make_dataclass("PolicyLossConfig", [("loss_mode", str, "vanilla")])
    for name in ("verl", "verl.workers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "verl.workers.config", configs)
    monkeypatch.setitem(sys.modules, "megatron_rl.hosts.verl_config", None)  # what is imported next is gone after the test
    del sys.modules["megatron_rl.hosts.verl_config"]
    made = importlib.import_module("megatron_rl.hosts.verl_config")
    fields = {one.name for one in dataclasses.fields(made.PolicyLoss)}
    assert {"vespo_power_negative", "vespo_decay_negative", "importance_correction"} <= fields
    assert "clip_ratio_c" not in fields and verl.read(ActorConfig(made.PolicyLoss("megatron_rl.vespo.token_mean"))).config
    chosen = pickle.loads(pickle.dumps(made.PolicyLoss(loss_mode="megatron_rl.vespo.token_mean", vespo_power_negative=2.0)))
    assert chosen.vespo_power_negative == 2.0 and chosen.vespo_decay_negative is None


# verl's own code


def load_verl():
    """(ppo_loss, actor config of a case) of the checkout, with our losses from the plugin. For a fork."""
    import megatron_rl.hosts.verl_plugin  # noqa: F401  # fills the tables when verl has loaded them

    tables = VERL.load("verl.trainer.ppo.core_algos")
    verl_loss.register(tables)
    own, configs = VERL.load("verl.workers.utils.losses"), VERL.load("verl.workers.config")

    def config_of(case: Case, **settings):
        from megatron_rl.hosts.verl_config import PolicyLoss

        loss = PolicyLoss(loss_mode=case.mode, **settings) if settings else configs.PolicyLossConfig(loss_mode=case.mode)
        sizes = {"rollout_n": 4, "ppo_micro_batch_size_per_gpu": 1}
        strategy = case.engine.split()[0]
        return configs.ActorConfig(strategy=strategy, policy_loss=loss, **sizes, **cases.actor_settings(case))

    return own.ppo_loss, config_of


def weights_of_verl(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As the trainers compute them with the overrides that our loss asks for."""
    compute = VERL.load("verl.trainer.ppo.rollout_corr_helper").compute_rollout_correction_weights
    return compute(log_ratio, mask, **{name.removeprefix(verl.CORRECTION): value for name, value in verl.UNCUT_WEIGHTS.items()})[0]


def errors_by_verl(rank: int, chosen: list[Case]) -> dict[str, float]:
    ppo_loss, config_of = load_verl()
    return {str(case): error_of(case, ppo_loss, config_of(case)) for case in chosen}


@pytest.mark.host("VERL_ROOT")
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
def test_verls_own_loss_path_is_exact_with_ours(loss):
    """Five aggregations, engines, layouts, ragged groups, a fully masked sample."""
    chosen = cases.matrix([loss])
    (found,) = run_ranks(errors_by_verl, 1, chosen, use_megatron=False)
    assert len(found) == len(chosen) == 75
    assert max(found.values()) <= TOLERANCE, {name: error for name, error in found.items() if not error <= TOLERANCE}


@pytest.mark.host("VERL_ROOT")
def test_verls_own_loss_path_weighs_rollouts_of_several_rows_once():
    """FB-141: rows of a rollout on any rank and micro-batch, against 1/(R M_j), 1/(R k_j m_i), 1/(L R) by hand in float64."""
    chosen = cases.rollout_matrix()
    (found,) = run_ranks(errors_by_verl, 1, chosen, use_megatron=False)
    print(f"worst {max(found.values()):.1e} of {len(found)}")
    assert len(found) == len(chosen) == 23
    assert max(found.values()) <= ROLLOUT_TOLERANCE, {name: error for name, error in found.items() if not error <= 1e-6}


@pytest.mark.host("VERL_ROOT")
def test_verls_own_weights_and_config_carry_our_corrections_and_losses_of_the_sampler():
    """Its rollout correction computes the weights, and its config holds our settings in the class that a launch line names."""
    corrected = Case(loss="cispo", aggregation="token_mean", dp=2, cp=2, sizes=(1, 3), num_samples=14)
    compared = [Case(loss=loss, aggregation=one, sizes=(1, 5, 3, 7)) for loss in ("dppo_tv", "dppo_kl") for one in AGGREGATIONS]

    def work() -> None:
        ppo_loss, config_of = load_verl()
        from megatron_rl.hosts.verl_config import PolicyLoss

        samples, log_probs = samples_of(corrected)
        below = [replace(one, rollout_log_probs=[value - SAMPLER_GAP for value in one.old_log_probs]) for one in samples]

        def loss_of(samples: Any, **settings: Any) -> float:
            given = (samples, log_probs, cases.given_advantages(samples), ppo_loss, config_of(corrected, **settings), None)
            return cases.run_step(corrected, *given, weights_of_verl).loss

        for own, factor in CORRECTIONS:
            assert loss_of(below, **own) == pytest.approx(loss_of(samples) * factor, rel=TOLERANCE, abs=1e-9), own  # float32
        for case in compared:
            assert error_of(case, ppo_loss, config_of(case, ratio_truncation=20.0), weights_of_verl) <= TOLERANCE, case
        assert {*verl.own_names()} <= {one.name for one in dataclasses.fields(PolicyLoss)}

    in_fork(work)


@pytest.mark.host("VERL_ROOT")
def test_verls_own_loss_path_has_our_estimate_of_kl():
    def work() -> None:
        ppo_loss, config_of = load_verl()
        case = Case(loss="grpo", aggregation="token_mean")
        samples, log_probs = samples_of(case)
        advantages = cases.given_advantages(samples)
        without, with_kl = (dataclasses.replace(config_of(case), use_kl_loss=has_kl) for has_kl in (False, True))
        with_kl = dataclasses.replace(with_kl, kl_loss_coef=0.1, kl_loss_type="unbiased")

        def asked(config, output, data):  # the reference is 0.3 above the old policy
            return ppo_loss(config, output, cases.Batch(data | {"ref_log_prob": data["old_log_probs"] + 0.3}))

        given = (case, samples, log_probs, advantages)
        plain, found = (cases.run_step(*given, call, config) for call, config in ((ppo_loss, without), (asked, with_kl)))
        num_tokens = sum(sum(sample.loss_mask) for sample in samples)
        for index, sample in enumerate(samples):
            gap = log_probs[index].double() - torch.tensor(sample.old_log_probs, dtype=torch.float64)
            expected = 0.1 * gap.exp() * (gap - 0.3) * torch.tensor(sample.loss_mask) / num_tokens
            assert torch.allclose((found.gradients[index] - plain.gradients[index]).double(), expected, rtol=1e-4, atol=1e-7)

    in_fork(work)


@pytest.mark.host("VERL_ROOT")
def test_hydra_makes_our_class_and_the_config_that_is_judged():
    """As verl's workers make their actor config; with verl's own class the same line is refused."""
    pytest.importorskip("hydra", reason="hydra-core is verl's own requirement, and not ours")
    line = [
        verl.CLASS_LINE,
        *(f"+{verl.ACTOR}policy_loss.{name}={value}" for name, value in ICEPOP.items()),
        f"{verl.ACTOR}ppo_micro_batch_size_per_gpu=1",
        f"{verl.LOSS_MODE}=megatron_rl.gspo.sample_mean",
    ]

    def composed(*words: str):
        return verl.compose(["python3", "-m", verl.MAIN, "--config-name", "ppo_megatron_trainer", *words])

    def work() -> None:
        make = VERL.load("verl.utils.config", without=("hydra", "omegaconf")).omega_conf_to_dataclass
        actor = make(composed(*line).actor_rollout_ref.actor)
        settings = verl.read(actor).config
        assert {name: getattr(settings, name) for name in ICEPOP} == ICEPOP
        with pytest.raises(Exception, match="unexpected keyword argument 'importance_correction"):
            make(composed(*line[1:]).actor_rollout_ref.actor)
        # What verl's main gives to validate_config, whatever file it is from.
        mode, rollout = f"{verl.LOSS_MODE}=megatron_rl.", "actor_rollout_ref.rollout"
        weights = "algorithm.rollout_correction.rollout_is=token"
        for words, problem in (
            ([f"{mode}gspo.token_mean"], None),
            ([f"{mode}gspoo.token_mean"], "does not name a loss and an aggregation"),
            ([f"{mode}grpo.prompt_mean"], "ppo_mini_batch_size=256 of data.train_batch_size=1024"),
            ([f"{mode}dppo_tv.token_mean", weights], "rollout_is_threshold=2.0: "),
            ([f"{mode}grpo.token_mean", weights, f"{rollout}.top_p=0.8"], f"{rollout}.top_p=0.8 beside {weights}: "),
        ):
            whole = composed(*words)
            if problem is None:
                assert len(verl.check(whole)) == 1, words
                continue
            with pytest.raises(ConfigError) as refused:
                verl.check(whole)
            assert len(refused.value.problems) == 1 and problem in str(refused.value), refused.value
        with pytest.raises(ConfigError, match="Could not override 'data.no'"):
            composed("data.no=1")
        with pytest.raises(ConfigError, match="this is another one: start it with MEGATRON_RL_CHECK=1"):
            verl.compose(["python3", "-m", "mine.main_ppo", f"{mode}grpo.token_mean"])

    in_fork(work)


@pytest.mark.host("VERL_ROOT")
def test_verls_contract_is_the_one_that_was_probed():
    """Red here: verl has moved; read what the line did, then what our loss makes of it."""
    others = {"clip_ratio": 0.2, "loss_agg_mode": verl.TOKEN_MEAN, "ppo_mini_batch_size": 256}
    expected = dict(verl.THEIRS.values()) | others

    def work() -> None:
        load_verl()
        verl_step.count_in(VERL.load("verl.workers.engine.base"))
        actor = VERL.load("verl.workers.config").ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
        assert {name: value_at(actor, name) for name in expected} == expected

    in_fork(work)
