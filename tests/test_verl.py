"""What verl alone has of our losses: through emulated tables always, through verl's own loss and config with a checkout.

VERL_ROOT=... pytest -m host --require host tests/test_verl.py
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from adapter_cases import CORRECTIONS, LOSSES, TOLERANCE, Call, RowCase, Step, check_kl, rollout_cases
from forked import in_fork
from helpers import names_forgotten
from host_checkouts import VERL
from verl_cases import ADAPTER, ActorConfig, Batch, emulated_tables, filled_tables, mode_of, one_call, whole_config

from megatron_rl.declare import register_policy_loss
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import model_notes, verl, verl_loss, verl_plugin, verl_step
from megatron_rl.hosts.choice import value_at
from megatron_rl.hosts.dense_rows import RowCounts
from megatron_rl.layout.groups import SINGLE
from megatron_rl.testing.ranks import run_ranks

ROLLOUT_TOLERANCE = 1e-6  # float32 numbers against a float64 step


# One call of a loss: two samples, three tokens


def test_the_unbiased_estimate_of_kl_is_of_the_policy_that_sampled():
    """verl's KL term comes right after the loss of the same micro-batch; dppo compares with the sampler, exp(0.2) away. Two
    trainers of a process have called their losses before either computes its term."""
    generator = torch.Generator().manual_seed(0)
    new, old, ref = torch.randn(3, 2, 3, generator=generator, dtype=torch.float64) / 4 - 1
    mask = torch.tensor([[True, True, False], [True, True, True]])
    new[0, 2] = ref[0, 2] = math.nan
    given = {"old_log_prob": old.float(), "response_mask": mask, "rollout_is_weights": torch.full((2, 3), math.exp(0.2))}
    estimate, gaps = filled_tables().kl_penalty, {"grpo": 0.0, "dppo_tv": 0.2}
    leaves = {loss: new.float().requires_grad_() for loss in gaps}
    for loss, leaf in leaves.items():
        config = ActorConfig(kl_loss_type="unbiased")
        one_call(f"megatron_rl.{loss}.token_mean", config=config, log_prob=leaf, **given)
    for loss, leaf in leaves.items():
        found = estimate(logprob=leaf, ref_logprob=ref.float(), kl_penalty="unbiased")
        rho, gap = (new - old + gaps[loss]).exp(), new - ref
        value = torch.where(mask, rho * ((-gap).exp() - 1 + gap), 0.0)
        gradient = torch.where(mask, rho * gap, 0.0)
        assert torch.allclose(found.double(), value, rtol=1e-5, atol=1e-6)  # float32 inputs
        assert torch.allclose(torch.autograd.grad(found.sum(), leaf)[0].double(), gradient, rtol=1e-5, atol=1e-6)
    assert torch.equal(estimate(leaf, ref.float(), "k1")[1], leaf[1] - ref.float()[1])


def test_the_metrics_have_verls_names_and_are_numbers():
    _, metrics, _ = one_call("megatron_rl.grpo.sample_mean")
    assert metrics == {"actor/pg_clipfrac": 0.0, "actor/ppo_kl": pytest.approx(-0.1)}
    masked = torch.zeros(2, 3, dtype=torch.bool)
    loss, metrics, gradient = one_call("megatron_rl.grpo.token_mean", response_mask=masked)
    assert float(loss) == 0 and metrics == {"actor/pg_clipfrac": 0.0, "actor/ppo_kl": 0.0} and not gradient.any()


# The counts of a mini-batch


def test_rollouts_of_several_rows_weigh_once():
    """FB-141: rows of a rollout on any rank and micro-batch, against 1/(R M_j), 1/(R k_j m_i), 1/(L R) in float64."""
    found = {str(case): ADAPTER.error(case) for case in rollout_cases(["gspo", "cispo", "dro"])}
    assert max(found.values()) <= ROLLOUT_TOLERANCE, found


SAMPLE_MEAN = verl.read(ActorConfig({"loss_mode": "megatron_rl.grpo.sample_mean"}))


def weighed(rows: RowCounts, mask: torch.Tensor) -> torch.Tensor:
    return one_call("megatron_rl.grpo.sample_mean", rows=rows, response_mask=mask, advantages=torch.ones(mask.shape))[2]


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


def test_a_mini_batch_without_a_token_weighs_nothing():
    mask = torch.zeros(2, 3)
    for sessions in ({}, {"session_id": [0, 0]}):
        data = {"response_mask": mask, "uid": ["a", "a"], **sessions}
        totals, counts = verl_step.count_mini_batch(SAMPLE_MEAN, data, SINGLE, None)
        assert not weighed(verl_step.rows_of(SAMPLE_MEAN, totals, counts), mask.bool()).any()


def test_verls_engine_counts_where_our_loss_trains(monkeypatch):
    """The loss has the counts of its rows while it runs; another loss gets verl's own function. The model is looked at before."""
    calls, config = [], ActorConfig({"loss_mode": "megatron_rl.grpo.sample_mean"})
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
    own = ActorConfig({"loss_mode": "vanilla"})
    data = {name: column for name, column in data.items() if name != verl_step.COUNTS}
    BaseEngine().train_batch(data, functools.partial(ppo_loss, config=own))
    assert calls[1][0] is None and verl_step.COUNTS not in data


# The plugin


def test_a_loss_of_ones_own_is_in_verls_table_and_tables_of_another_contract_are_refused(capsys):
    tables = emulated_tables()
    with names_forgotten():
        register_policy_loss("halved")(lambda log_ratio, advantages: -advantages * log_ratio / 2)
        verl_loss.register(tables)
    assert {"megatron_rl.halved.constant", "megatron_rl.halved.prompt_mean"} <= tables.POLICY_LOSS_REGISTRY.keys()
    tables = emulated_tables()
    del tables.register_policy_loss
    verl_plugin.fill(tables)
    said = capsys.readouterr().err
    assert said.startswith("megatron_rl: none of its losses can train in verl: ") and "register_policy_loss is missing" in said
    assert tables.POLICY_LOSS_REGISTRY == {}


def test_verls_own_check_ends_a_launch_with_a_problem_and_each_one_that_is_only_checked(monkeypatch, capsys):
    """FB-114: verl drops an exception of a plugin, so the end is a SystemExit."""
    asked: list[Any] = []
    checks = types.SimpleNamespace(validate_config=lambda config, use_critic: asked.append(use_critic))
    verl_plugin.judge(checks)
    with pytest.raises(SystemExit, match="^megatron_rl: ConfigError: .*token_maen does not name a loss"):
        checks.validate_config(whole_config({verl.LOSS_MODE: "megatron_rl.grpo.token_maen"}), use_critic=False)
    assert asked == []
    checks.validate_config(whole_config({verl.LOSS_MODE: "vanilla"}), use_critic=False)
    assert asked == [False] and capsys.readouterr().err == ""
    monkeypatch.setenv("MEGATRON_RL_CHECK", "1")
    with pytest.raises(SystemExit) as ended:
        checks.validate_config(whole_config({}), use_critic=True)
    assert ended.value.code == 0 and asked == [False, True]
    assert capsys.readouterr().err.startswith("megatron_rl: loss_mode=megatron_rl.grpo.token_mean in verl | clip 0.2/0.2")


# verl's own code


class Own:
    """ppo_loss and the actor config of the checkout, with our losses from the plugin. For a fork."""

    def __init__(self):
        import megatron_rl.hosts.verl_plugin  # noqa: F401  # fills the tables when verl has loaded them

        verl_loss.register(VERL.load("verl.trainer.ppo.core_algos"))
        self.loss, self.configs = VERL.load("verl.workers.utils.losses").ppo_loss, VERL.load("verl.workers.config")

    def start(self, case: RowCase, step: Step, own: Mapping[str, Any], **of_actor: Any) -> Call:
        from megatron_rl.hosts.verl_config import PolicyLoss

        def ppo_loss(config, rows, data):
            return self.loss(config, {"log_probs": torch.cat(rows)}, Batch(data, ref_log_prob=data["old_log_probs"] + 0.3))

        policy_loss = (PolicyLoss if own else self.configs.PolicyLossConfig)(loss_mode=mode_of(case), **own)
        sizes = {"strategy": "megatron", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 1}
        config = self.configs.ActorConfig(policy_loss=policy_loss, **sizes, **ADAPTER.given_numbers(case), **of_actor)
        return ADAPTER.by(ppo_loss, config, case, step)


def errors_by_verl(rank: int, chosen: list[RowCase]) -> dict[str, float]:
    start = Own().start
    return {str(case): ADAPTER.error(case, start=start) for case in chosen}


@pytest.mark.host("VERL_ROOT")
@pytest.mark.parametrize(
    ("chosen", "tolerance"),
    [(ADAPTER.matrix(LOSSES), TOLERANCE), (rollout_cases(["gspo", "cispo", "dro"]), ROLLOUT_TOLERANCE)],
    ids=["layouts", "rollouts of several rows"],
)
def test_verls_own_loss_path_is_exact_with_ours(chosen, tolerance):
    """Five aggregations, layouts, ragged groups, a fully masked sample."""
    (found,) = run_ranks(errors_by_verl, 1, chosen, use_megatron=False, timeout=300)
    assert len(found) == len(chosen) >= 23 and max(found.values()) <= tolerance, found


def with_weights_of_verl(step: Step) -> Step:
    """As the trainers compute them with the overrides that our loss asks for."""
    compute = VERL.load("verl.trainer.ppo.rollout_corr_helper").compute_rollout_correction_weights
    settings = {name.removeprefix(verl.CORRECTION): value for name, value in verl.UNCUT_WEIGHTS.items()}
    log_ratio, mask = step.columns["rollout_is_weights"].log(), step.columns["response_mask"]
    weights = compute(torch.where(mask.bool(), log_ratio, 0.0), mask, **settings)[0]
    return dataclasses.replace(step, columns=step.columns | {"rollout_is_weights": weights})


@pytest.mark.host("VERL_ROOT")
def test_verls_own_weights_and_config_carry_our_corrections_and_losses_of_the_sampler():
    """Its rollout correction computes the weights, and its config holds our settings in the class that a launch line names."""
    corrected = RowCase(loss="cispo", aggregation="token_mean", dp=2, cp=2, sizes=(1, 3), num_samples=14)
    compared = ADAPTER.others([loss for loss, _ in ADAPTER.modes() if not loss.startswith("dppo_")])

    def work() -> None:
        start, settings = Own().start, {"ratio_truncation": 20.0}
        plain, below = ADAPTER.step(corrected), with_weights_of_verl(ADAPTER.below(corrected))
        expected = ADAPTER.run(corrected, plain, start=start).loss
        for own, factor in CORRECTIONS:
            found = ADAPTER.run(corrected, below, start=start, own=own).loss
            assert found == pytest.approx(expected * factor, rel=TOLERANCE, abs=1e-9), own  # float32
        for case in compared:
            step = with_weights_of_verl(ADAPTER.step(case))
            assert ADAPTER.error(case, step, start=start, own=settings) <= TOLERANCE, case

    in_fork(work)


@pytest.mark.host("VERL_ROOT")
def test_verls_own_loss_path_has_our_estimate_of_kl():
    def work() -> None:
        start, case = Own().start, RowCase(loss="grpo", aggregation="token_mean")
        step, terms = ADAPTER.step(case), {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "unbiased"}
        plain, found = (ADAPTER.run(case, step, start=start, **given) for given in ({}, terms))
        check_kl(plain, found, step, "unbiased", is_over_tokens=True)

    in_fork(work)


@pytest.mark.host("VERL_ROOT")
def test_verls_contract_is_the_one_that_was_probed():
    """Red here: verl has moved; read what the line did, then what our loss makes of it."""
    others = {"clip_ratio": 0.2, "loss_agg_mode": verl.TOKEN_MEAN, "ppo_mini_batch_size": 256}
    expected = dict(verl.THEIRS.values()) | others

    def work() -> None:
        Own()
        verl_step.count_in(VERL.load("verl.workers.engine.base"))
        actor = VERL.load("verl.workers.config").ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
        assert {name: value_at(actor, name) for name in expected} == expected

    in_fork(work)
