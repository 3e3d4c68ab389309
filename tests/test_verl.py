"""Our losses in verl: through an emulated ppo_loss always, through verl's own with a checkout.

VERL_ROOT=... pytest -m host --require host tests/test_verl.py
"""

from __future__ import annotations

import json
import math

import pytest
import verl_cases as cases
import verl_checkout
from forked import forked
from verl_cases import Case

from megatron_rl.hosts import verl

TOLERANCE = 1e-5
needs_checkout = pytest.mark.skipif(verl_checkout.ROOT is None, reason="needs VERL_ROOT")


def error_of(case: Case, ppo_loss=cases.emulated_ppo_loss, config=None, poison=None, estimators=None) -> float:
    samples, log_probs = cases.samples_of(case)
    loss, gradients = cases.truth(case, samples, log_probs)
    advantages = cases.given_advantages(case, samples, estimators)
    config = cases.emulated_config(case) if config is None else config
    return cases.largest_error(cases.run_step(case, samples, log_probs, advantages, ppo_loss, config, poison), loss, gradients)


@pytest.mark.parametrize("aggregation", cases.AGGREGATIONS)
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
def test_the_step_is_exact_in_each_layout_and_engine(loss, aggregation):
    found = {str(case): error_of(case) for case in cases.matrix([loss]) if case.aggregation == aggregation}
    assert found and max(found.values()) <= TOLERANCE, {name: error for name, error in found.items() if error > TOLERANCE}


# verl's own code


def load_verl():
    """(ppo_loss, actor config of a case, estimators) of the checkout, with our losses from the plugin. For a fork."""
    import megatron_rl.hosts.verl_plugin  # noqa: F401  # fills the tables when verl has loaded them

    tables = verl_checkout.load("verl.trainer.ppo.core_algos")
    tables.register_adv_est("known")(cases.known_estimator)
    verl.register(tables)
    own, configs = verl_checkout.load("verl.workers.utils.losses"), verl_checkout.load("verl.workers.config")

    def config_of(case: Case):
        loss = configs.PolicyLossConfig(loss_mode=case.mode)
        sizes = {"rollout_n": 4, "ppo_micro_batch_size_per_gpu": 1}
        strategy = case.engine.split()[0]
        return configs.ActorConfig(strategy=strategy, policy_loss=loss, **sizes, **cases.actor_settings(case))

    return own.ppo_loss, config_of, tables.ADV_ESTIMATOR_REGISTRY


def errors_by_verl(chosen: list[Case], poison: float | None = None) -> dict[str, float]:
    def work() -> int:
        ppo_loss, config_of, estimators = load_verl()
        found = {str(case): error_of(case, ppo_loss, config_of(case), poison, estimators) for case in chosen}
        print(json.dumps(found))
        return 0

    code, out, error = forked(work)
    assert code == 0, error[-2000:]
    return json.loads(out)


@pytest.mark.host
@needs_checkout
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
def test_verls_own_loss_path_is_exact_with_ours(loss):
    """Four aggregations, engines, layouts, ragged groups, a fully masked sample."""
    chosen = cases.matrix([loss])
    found = errors_by_verl(chosen)
    assert len(found) == len(chosen) == 60
    assert max(found.values()) <= TOLERANCE, {name: error for name, error in found.items() if not error <= TOLERANCE}


@pytest.mark.host
@needs_checkout
@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_verls_masked_values_change_nothing(poison):
    chosen = [case for case in cases.matrix(["grpo", "gspo", "cispo"]) if case.cp == case.dp == 2 and case.engine == "megatron"]
    found = errors_by_verl(chosen, poison)
    assert len(found) == 12
    assert max(found.values()) <= TOLERANCE, {name: error for name, error in found.items() if not error <= TOLERANCE}
