"""What ROLL alone has of our losses: through its emulated Megatron strategy, through its own forward step with a checkout.

ROLL_ROOT=... pytest -m host --require host tests/test_roll.py
"""

from __future__ import annotations

import math
import sys
import types
from types import SimpleNamespace
from typing import Any

import own_log_probs
import pytest
import roll_cases as cases
import torch
from adapter_cases import LOSSES, VOCABULARY, RowCase, emulated, largest_error, too_large
from forked import forked, in_fork
from host_checkouts import ROLL
from roll_cases import ADAPTER

from megatron_rl.errors import ConfigError
from megatron_rl.hosts import roll
from megatron_rl.hosts.heads import log_probs, placed_rows
from megatron_rl.hosts.roll_loss import read_totals
from megatron_rl.testing.ranks import run_ranks


def test_the_entropy_term_is_a_mean_over_samples_with_the_hosts_coefficient():
    case = RowCase(loss="gspo", aggregation="constant", sizes=(3, 5))
    step = ADAPTER.step(case)
    plain, found = (ADAPTER.run(case, step, **terms) for terms in ({}, {"entropy_loss_coef": 0.02}))
    total = 0.0
    for index, sample in enumerate(step.samples):
        values = step.log_probs[index].clone().requires_grad_()
        rest = -torch.expm1(values)  # the probability of the other tokens, which have equal parts of it
        entropy = -values.exp() * values - rest * (rest.log() - math.log(VOCABULARY - 1))
        mask = torch.tensor(sample.loss_mask)
        loss = (-0.02 * entropy * mask).sum() / max(mask.sum(), 1) / len(step.samples)
        loss.backward()
        torch.testing.assert_close(found.gradients[index] - plain.gradients[index], values.grad, rtol=1e-4, atol=1e-7)
        total += float(loss.detach())
    assert found.loss - plain.loss == pytest.approx(total, rel=1e-4)


# Our head

TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_loss_coef": 0.02}
WITH_HEAD = [
    RowCase(loss=loss, aggregation="prompt_mean", **layout)
    for loss in ("gspo", "cispo")
    for layout in (
        {"sizes": (3, 5)},
        {"tp": 2, "sizes": (6, 2)},
        {"cp": 2, "sizes": (2, 4), "num_samples": 6},
        {"tp": 2, "cp": 2, "sizes": (2, 4), "num_samples": 6},
    )
]


def results_of_logits_and_head(rank: int, case: RowCase, forward_step: Any) -> list[cases.Result]:
    step = ADAPTER.step(case)
    return [ADAPTER.run(case, step, forward_step=forward_step, **TERMS, **own) for own in ({}, cases.FUSED)]


@pytest.mark.megatron
@pytest.mark.parametrize("is_rolls", [False, pytest.param(True, marks=pytest.mark.host("ROLL_ROOT"))])
@pytest.mark.parametrize("case", WITH_HEAD, ids=str)
def test_a_step_of_hidden_states_is_that_of_logits(case, is_rolls):
    """tp, cp, KL and entropy terms, chunks of a few rows; ROLL's own forward step."""
    forward_step = roll_forward_step if is_rolls else cases.emulated_forward_step
    layout = {"tensor_model_parallel_size": case.tp, "context_parallel_size": case.cp, "timeout": 300}
    parts = run_ranks(results_of_logits_and_head, case.tp * case.cp, case, forward_step, **layout)
    of_logits, of_head = map(cases.added_up, zip(*parts, strict=True))
    assert largest_error(of_head, of_logits.loss, of_logits.gradients) < 1e-5  # float32, in chunks of other rows


def test_a_plain_tensor_in_the_place_of_hidden_states_is_refused(monkeypatch):
    """What a host's function of autograd may make of them."""
    case = RowCase(loss="grpo", aggregation="token_mean")
    monkeypatch.setattr(cases.Strategy, "logits", lambda self, data: torch.zeros(*data.batch["input_ids"].shape, VOCABULARY))
    with pytest.raises(ConfigError, match="FUSED_LM_HEAD_LOSS=true: the loss is given a plain tensor"):
        ADAPTER.run(case, ADAPTER.step(case), **cases.FUSED)


# Refusals


def test_a_call_without_the_counts_of_the_step_is_refused():
    data = cases.Data({"final_response_mask": torch.ones(1, 1)}, {"global_valid_samples": {"default": 1}, "batch_num_tokens": {}})
    with pytest.raises(ConfigError, match="no 'final_response_mask', which our weights need"):
        read_totals(data)


# The worker

EMULATED_ROLL = """
class Dispatch: ONE_TO_ALL = 1
def register(dispatch_mode): return lambda function: function
class Strategy:
    models_unwrapped = ()
    def train_step(self, batch, loss_func): return "trained"
    def inner_forward_step(self, loss_func, data_iterator, model): pass
    def _get_feature_on_this_cp_rank(self, feature, feature_name="input_ids"): pass
class ActorWorker:
    def __init__(self, worker_config): self.worker_config = worker_config
    def initialize(self, pipeline_config): self.strategy = Strategy(); print("made the model")
    def loss_func(self, data, output_tensor): return "ROLL's own loss"
"""


def started(old: str = "", new: str = "", **settings: object) -> tuple[int | None, str, str]:
    """Our worker on an emulated ROLL, in which `old` is `new`."""

    def work() -> None:
        worker = started_with(cases.worker_config("gspo.prompt_mean"), old, new, **settings)
        print(worker.loss.launch, worker.strategy.train_step.__wrapped__.__name__)

    return forked(work)


def started_with(config: Any, old: str = "", new: str = "", **settings: object) -> Any:
    """Our worker, for a fork."""
    assert old in EMULATED_ROLL
    paths = ("roll.distributed.scheduler.decorator", "roll.pipeline.rlvr.actor_worker")
    for name, module in emulated(EMULATED_ROLL.replace(old, new, 1), *paths).items():
        sys.modules.setdefault(name, module)
    from megatron_rl.hosts.roll_worker import ActorWorker

    worker = ActorWorker(config)
    worker.initialize(cases.pipeline_config(**settings))
    return worker


def test_our_worker_reads_its_settings_before_the_model_is_made():
    code, out, error = started()
    assert (code, out.split("\n")[:2]) == (0, ["made the model", "gspo.prompt_mean train_step"]), error
    code, out, error = started(rl_loss_coef=2.0, length_loss_weight=True)
    assert (code, out) == (1, "") and "rl_loss_coef=2.0" in error and "length_loss_weight=True" in error


def test_another_contract_is_refused():
    code, _, error = started("batch, loss_func", "batch")
    assert code == 1 and "Strategy.train_step takes" in error, error


@pytest.mark.parametrize(
    ("variant", "variables", "is_ours", "is_replaced", "placed"),
    [
        ("gspo.prompt_mean", {}, True, False, []),
        ("gspo.prompt_mean", {"MEGATRON_RL_LOG_PROBS": "megatron_rl"}, True, True, []),
        ("gspo.prompt_mean", cases.FUSED, True, True, [((), f"{roll.HEAD}=true")]),  # a stage without an output layer
        ("ppo", {"MEGATRON_RL_LOG_PROBS": "megatron_rl"}, False, True, []),
        (None, {"MEGATRON_RL_LOG_PROBS": "megatron_rl"}, False, True, []),
        ("gspo.prompt_mean", {"MEGATRON_RL_LOG_PROBS": "roll"}, True, False, []),
    ],
)
def test_our_worker_of_roll_has_our_log_probabilities_and_head_with_our_loss_or_rolls(
    variant, variables, is_ours, is_replaced, placed, monkeypatch
):
    found = []
    monkeypatch.setattr(placed_rows, "place_head", lambda models, settings, *_, **__: found.append((models, settings.setting)))

    def work():
        modules = own_log_probs.modules_of("ROLL")
        worker = started_with(cases.worker_config(variant, **variables))
        assert (worker.loss is not None) == is_ours and found == placed
        if is_ours:
            assert worker.loss.launch.config.fused_lm_head_loss == bool(placed)
        else:
            assert worker.loss_func("data", "logits") == "ROLL's own loss"
        replaced = modules["mcore_adapter.parallel_functions.vocab_parallel"].vocab_parallel_logprobs
        assert hasattr(replaced, log_probs.MARK) == is_replaced

    in_fork(work)


# ROLL's own code


def roll_forward_step(strategy, loss_func, data_iterator, model):
    """ROLL's inner_forward_step, with its packing; the slices of context-parallel ranks are the emulator's."""
    module = ROLL.load("roll.distributed.strategy.megatron_strategy")
    module.current_platform = SimpleNamespace(device_type="cpu")
    own = module.MegatronTrainStrategy
    strategy.is_multimodal = strategy.enable_router_replay = False
    strategy.worker_config = SimpleNamespace(apply_loss_scale=True)
    for name in ("_pack_sequences", "_get_pad_factor"):
        setattr(strategy, name, types.MethodType(getattr(own, name), strategy))

    def own_model(**given):
        return model()

    data = next(data_iterator)
    strategy.seq_length = data.batch["input_ids"].shape[1]
    return own.inner_forward_step(strategy, loss_func, iter([data]), own_model)


def results_by_roll(rank: int, chosen: list[RowCase]) -> list[cases.Result]:
    return cases.results_on_rank(rank, chosen, roll_forward_step)


@pytest.mark.host("ROLL_ROOT")
@pytest.mark.megatron
def test_rolls_own_forward_step_is_exact_with_ours():
    """Four aggregations, three losses, rows and packing, dp, cp, tp and micro-batches, ragged groups, fully masked samples."""

    def run(chosen, *, world_size, **layout):
        return run_ranks(results_by_roll, world_size, chosen, timeout=300, **layout)

    found = cases.errors_of(ADAPTER.matrix(LOSSES), run)
    assert len(found) == 72 and not too_large(found)


@pytest.mark.host("ROLL_ROOT")
def test_our_worker_and_settings_fit_roll():
    def work() -> int:
        strategy = ROLL.load("roll.distributed.strategy.megatron_strategy").MegatronTrainStrategy
        from megatron_rl.hosts.roll_worker import ActorWorker, RollWorker

        roll.CONTRACT.check()
        roll.CONTRACT.check(roll.STRATEGY_CONTRACT, strategy)
        assert ROLL.source("roll/distributed/strategy/megatron_strategy.py").count("self._unpack_sequences(") == 1
        assert "self.models_unwrapped = self.model.get_models()" in ROLL.source("roll/distributed/strategy/megatron_strategy.py")
        assert issubclass(ActorWorker, RollWorker)
        decorator = ROLL.load("roll.distributed.scheduler.decorator")
        assert hasattr(ActorWorker.initialize, decorator.BIND_WORKER_METHOD_FLAG)  # so that ROLL's clusters call it
        config = ROLL.load("roll.pipeline.rlvr.rlvr_config")
        for given, owner in ((cases.pipeline_config(), config.RLVRConfig), (cases.worker_config(""), config.WorkerConfig)):
            fields = owner.__dataclass_fields__
            assert vars(given).keys() <= fields.keys()
        defaults = {name: config.RLVRConfig.__dataclass_fields__[name].default for name in roll.ONLY}
        assert defaults == {name: only for name, (only, _) in roll.ONLY.items()}

    in_fork(work)
