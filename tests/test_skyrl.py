"""What SkyRL alone has of our losses: an emulated driver and worker always, its own driver's code with a checkout.

SKYRL_ROOT=... pytest -m host --require host tests/test_skyrl.py
"""

from __future__ import annotations

import pickle
import sys
import types

import own_log_probs
import pytest
import skyrl_cases as cases
import torch
from adapter_cases import LOSSES, rollout_cases, too_large
from forked import forked
from host_checkouts import SKYRL

from megatron_rl.hosts import skyrl, skyrl_driver
from megatron_rl.hosts.heads import log_probs
from megatron_rl.hosts.heads import skyrl as skyrl_head
from megatron_rl.testing.ranks import run_ranks


@pytest.fixture(autouse=True)
def skyrl_modules(request, monkeypatch):
    if not any(request.node.iter_markers("host")):
        for name, module in cases.emulated_skyrl().items():
            monkeypatch.setitem(sys.modules, name, module)


# The start


def started(*words: str, old: str = "", new: str = "") -> tuple[int | None, str, str]:
    def work() -> None:
        sys.modules.update(cases.emulated_skyrl(old, new))
        sys.argv[1:] = [f"trainer.override_entrypoint={skyrl.__name__}", *words]
        skyrl.main()
        return 0

    return forked(work)


STEP_WISE = ("config.trainer = cls()", "config.trainer = cls(); config.generator = {'step_wise_trajectories': True}")


def test_the_entrypoint_registers_our_losses_and_starts_skyrls(monkeypatch):
    words = ["trainer.algorithm.policy_loss_type=megatron_rl.gspo", "trainer.algorithm.loss_reduction=prompt_mean"]
    code, out, error = started(*words, "megatron_rl.off_policy_sequence_delta=0.1")  # SkyRL would refuse it
    assert (code, out) == (0, f"trains {words} {len(skyrl.losses())}\n"), error
    code, out, error = started("trainer.algorithm.policy_loss_type=megatron_rl.gspoo")
    assert (code, out) == (1, "") and "=megatron_rl.gspoo is not proportional" in error and "Traceback" not in error, error
    monkeypatch.setenv("MEGATRON_RL_CHECK", "1")
    code, out, error = started(*words)
    assert (code, out) == (0, "") and "MEGATRON_RL_CHECK: the launch has no problem, and ends here" in error


def test_the_entrypoint_counts_trajectories_of_several_rows():
    """In the process that SkyRL trains in, where the launch has such rows. SkyRL knows no row_mean: it is told sequence_mean."""
    words = ["trainer.algorithm.policy_loss_type=megatron_rl.grpo", "trainer.algorithm.loss_reduction=row_mean"]
    told = [words[0], "trainer.algorithm.loss_reduction=sequence_mean"]
    of_driver = f" {skyrl.Words({}, skyrl.ROW_MEAN, True)}"
    for old, new, own in (("", "", ""), (*STEP_WISE, of_driver)):
        code, out, error = started(*words, old=old, new=new)
        assert (code, out) == (0, f"trains {told} {len(skyrl.losses())}{own}\n"), error


def test_trajectories_by_hand():
    """Rows of 1, 5, 3 and 0 tokens of two trajectories and one without a token; the weights over those of rows."""
    assert skyrl_driver.trajectories_of([False, True, True, True]) == [0, 0, 1, 2]
    counts, trajectories = torch.tensor([1, 5, 3, 0]), [0, 0, 1, 2]
    found = skyrl_driver.factors_of("sample_mean", counts, trajectories, None)
    assert found.tolist() == pytest.approx([(1 / 18) * 4, (1 / 18) * 20, (1 / 9) * 12, 1])
    assert skyrl_driver.factors_of("row_mean", counts, trajectories, None).tolist() == pytest.approx([2 / 3, 2 / 3, 4 / 3, 1])
    assert skyrl_driver.factors_of("constant", counts, trajectories, 8.0).tolist() == pytest.approx([4 / 3, 4 / 3, 4 / 3, 1])
    assert skyrl_driver.factors_of("constant", counts * 0, trajectories, 8.0).tolist() == [1.0] * 4


def test_trajectories_of_several_rows_weigh_once():
    """FB-141: against 1/(R M_j), 1/(R k_j m_i), 1/(L R) in float64; what counts no rollouts stays as SkyRL made it."""
    found = {str(case): cases.ADAPTER.error(case) for case in rollout_cases(["gspo", "cispo"])}
    assert len(found) == 22 and max(found.values()) <= 1e-6, found  # float32 numbers


def test_a_registered_loss_can_be_sent_to_workers():
    known: dict[str, object] = {}
    words = skyrl.Words({"importance_correction_high": 2.5}, skyrl.ROW_MEAN, True)
    skyrl.register(types.SimpleNamespace(register=known.__setitem__), words)
    function = pickle.loads(pickle.dumps(known["megatron_rl.gspo"]))
    assert isinstance(function, skyrl.SkyrlLoss) and function.name == "gspo"
    assert function.words == words


def test_skyrls_table_carries_them_where_they_are_asked_for():
    for is_there in (False, True):
        entries = {}
        table = types.SimpleNamespace(register=lambda name, entry, entries=entries: entries.update({name: entry}))
        skyrl.register(table, skyrl.Words(), has_log_probs=is_there)
        assert (skyrl.LOG_PROBS in entries) == is_there
    with pytest.raises(TypeError, match="it is no policy loss"):
        entries[skyrl.LOG_PROBS]()


# SkyRL's own code


def tables_of_skyrl():
    """Its module of losses, with ours in its registry, and without a correction of its own. For a rank that ends with the test."""
    tables = SKYRL.load(skyrl.TABLES)
    skyrl.register(tables.PolicyLossRegistry, skyrl.Words())
    SKYRL.load(skyrl.CORRECTIONS).off_policy_correction_enabled = lambda off_policy_correction: False
    return tables


def errors_of_scale(rank: int) -> dict[str, float]:
    tables = tables_of_skyrl()
    skyrl.CONTRACT.check()
    assert set(skyrl.losses()) <= {name.removeprefix("megatron_rl.") for name in tables.PolicyLossRegistry.list_available()}
    scale = tables.apply_loss_reduction_to_advantages_minibatch
    adapter = cases.SkyRL(scale)
    return {str(case): adapter.error(case) for case in adapter.matrix(LOSSES)}


@pytest.mark.host("SKYRL_ROOT")
def test_skyrls_own_scaled_advantages_and_registry_are_exact_with_ours():
    """Five aggregations, three losses, dp, cp and micro-batches, ragged groups, fully masked samples."""
    (found,) = run_ranks(errors_of_scale, 1, use_megatron=False, timeout=300)
    assert len(found) == 90 and not too_large(found)


def functions_replaced_in_skyrl(rank: int) -> bool:
    module = SKYRL.load(skyrl_head.MODULE)
    own_log_probs.install("SkyRL")  # refuses other signatures, and callers that call others
    return hasattr(module._fused_lm_head_logprob_apply, log_probs.MARK)


@pytest.mark.host("SKYRL_ROOT")
def test_our_log_probabilities_fit_skyrl():
    assert run_ranks(functions_replaced_in_skyrl, 1, use_megatron=False) == [True]
