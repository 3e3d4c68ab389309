"""What SkyRL alone has of our losses: an emulated driver and worker always, its own driver's code with a checkout.

SKYRL_ROOT=... pytest -m host --require host tests/test_skyrl.py
"""

from __future__ import annotations

import pickle
import sys
import types
from dataclasses import replace

import own_log_probs
import pytest
import skyrl_cases as cases
import torch
from adapter_cases import LOSSES, rollout_cases, too_large
from forked import forked
from host_checkouts import SKYRL
from linear_cases import relative

from megatron_rl.hosts import skyrl, skyrl_driver
from megatron_rl.hosts.dense_rows import Rollouts
from megatron_rl.hosts.heads import log_probs
from megatron_rl.hosts.heads import skyrl as skyrl_head
from megatron_rl.layout.groups import resolve_groups
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


def test_another_trainer_of_skyrl_is_refused_before_ray_starts():
    def work() -> int:
        modules = cases.emulated_skyrl(*STEP_WISE)
        del modules[skyrl_driver.TRAINER].RayPPOTrainer._normalize_advantages
        sys.modules.update(modules)
        sys.argv[1:] = ["trainer.algorithm.policy_loss_type=megatron_rl.grpo", "trainer.algorithm.loss_reduction=sequence_mean"]
        skyrl.main()
        return 0

    code, out, error = forked(work)
    assert (code, out) == (1, "") and "RayPPOTrainer._normalize_advantages is missing, and NovaSky-AI/SkyRL" in error


def test_trajectories_by_hand():
    """Rows of 1, 5, 3 and 0 tokens of two trajectories and one without a token; the weights over those of rows."""
    assert skyrl_driver.trajectories_of([False, True, True, True]) == [0, 0, 1, 2]
    counts, trajectories = torch.tensor([1, 5, 3, 0]), [0, 0, 1, 2]
    found = skyrl_driver.factors_of("sample_mean", counts, trajectories, None)
    assert found.tolist() == pytest.approx([(1 / 18) * 4, (1 / 18) * 20, (1 / 9) * 12, 1])
    assert skyrl_driver.factors_of("row_mean", counts, trajectories, None).tolist() == pytest.approx([2 / 3, 2 / 3, 4 / 3, 1])
    assert skyrl_driver.factors_of("constant", counts, trajectories, 8.0).tolist() == pytest.approx([4 / 3, 4 / 3, 4 / 3, 1])
    assert skyrl_driver.factors_of("constant", counts * 0, trajectories, 8.0).tolist() == [1.0] * 4


def test_advantages_of_an_aggregation_that_counts_no_rollouts_stay_as_skyrl_made_them():
    class RayPPOTrainer:
        cfg = types.SimpleNamespace(trainer=types.SimpleNamespace(algorithm=None))

        def convert_to_training_input(self, generator_output, uids): ...

        def _normalize_advantages(self, data, mini_batch_boundaries, prompt_boundaries=None):
            return data

    launch = skyrl.read(cases.algorithm_config("megatron_rl.grpo", "prompt_mean"), skyrl.Words())
    launch = replace(launch, rollouts=Rollouts(several="turns", ids="them"))
    skyrl_driver.count_trajectories(types.SimpleNamespace(RayPPOTrainer=RayPPOTrainer), lambda algorithm: launch)
    assert RayPPOTrainer()._normalize_advantages("data", [(0, 1)]) == "data"


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


def errors_of_trajectories(rank: int) -> dict[str, float]:
    tables_of_skyrl()
    trainer = SKYRL.load(skyrl_driver.TRAINER)
    owner, found = trainer.RayPPOTrainer, {}
    own = owner.convert_to_training_input, owner._normalize_advantages
    for case in rollout_cases(["gspo", "cispo"]):
        owner.convert_to_training_input, owner._normalize_advantages = own
        found[str(case)] = cases.SkyRL(trainer=trainer).error(case)
    return found


@pytest.mark.host("SKYRL_ROOT")
def test_skyrls_own_trainer_weighs_trajectories_of_several_rows_once():
    """FB-141: through its batch, its padding and its scaled advantages, against 1/(R M_j), 1/(R k_j m_i), 1/(L R) by hand."""
    (found,) = run_ranks(errors_of_trajectories, 1, use_megatron=False, timeout=300)
    assert len(found) == 22 and max(found.values()) <= 1e-6, found  # float32 numbers against a float64 step


def calls_of_skyrl(rank: int) -> None:
    """SkyRL's functions of packed rows with its autograd functions and with ours."""
    module, group = SKYRL.load(skyrl_head.MODULE), resolve_groups().tp
    alone = [torch.distributed.new_group([each]) for each in range(group.size())][rank]
    rows, width, columns, size = 2, 8, 20, 6
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, columns, (1, rows * width), generator=generator)
    hidden, weight = (torch.randn(each, size, generator=generator) for each in (rows * width, columns))
    shard = columns // group.size()
    bounds = torch.tensor([0, width, 2 * width], dtype=torch.int32)
    place = {"vocab_start_index": rank * shard, "vocab_end_index": (rank + 1) * shard, "cp_group": alone, "group": group}

    def values_and_gradients(source: str) -> list[torch.Tensor]:
        leaves = [hidden[None].clone().requires_grad_(), weight.chunk(group.size())[rank].clone().requires_grad_()]
        if source == "logits":
            leaves = [(hidden @ weight.T)[None].chunk(group.size(), -1)[rank].clone().requires_grad_()]
        given = leaves if source == "hidden" else [leaves[0] * 1.0]
        function = vars(module)[f"from_parallel_{source}_to_logprobs_packed_sequences"]
        values = function(*given, tokens, bounds, width, **place, chunk_size=3)
        (values * torch.linspace(-1, 1, values.numel()).view_as(values)).sum().backward()
        return [values.detach(), *(leaf.grad for leaf in leaves)]

    theirs = [values_and_gradients(source) for source in ("logits", "hidden")]
    own_log_probs.install("SkyRL")
    for source, expected in zip(("logits", "hidden"), theirs, strict=True):
        for ours, own in zip(values_and_gradients(source), expected, strict=True):
            assert ours.shape == own.shape and relative(ours, own) < 1e-5, source  # sums of 20 columns in two orders
    assert hasattr(module._fused_lm_head_logprob_apply, log_probs.MARK)


@pytest.mark.host("SKYRL_ROOT")
@pytest.mark.megatron
@pytest.mark.parametrize("tp", [1, 2])
def test_skyrl_has_its_own_numbers_by_our_functions(tp):
    run_ranks(calls_of_skyrl, tp, tensor_model_parallel_size=tp)
