"""Our losses in ROLL: through its emulated Megatron strategy always, through its own forward step with a checkout.

ROLL_ROOT=... pytest -m host --require host tests/test_roll.py
"""

from __future__ import annotations

import math
import re
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import roll_cases as cases
import torch
from dense_row_cases import LOSSES, VOCABULARY, too_large
from forked import forked, in_fork
from host_checkouts import ROLL
from roll_cases import Case

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import roll
from megatron_rl.hosts.roll_loss import read_totals
from megatron_rl.testing.ranks import run_ranks

TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_loss_coef": 0.02}


ESTIMATES = {"k2": lambda gap: gap.square() / 2, None: lambda gap: gap.exp() - 1 - gap}


@pytest.mark.parametrize("estimator", ESTIMATES)
def test_kl_and_entropy_are_means_over_samples_with_the_hosts_coefficients(estimator):
    case = Case(loss="gspo", aggregation="constant", sizes=(3, 5))
    step = cases.make_step(case)
    given = TERMS | ({} if estimator is None else {"MEGATRON_RL_KL_ESTIMATOR": estimator})
    plain, found = (cases.run_step(case, step, cases.settings_of(case, **terms)) for terms in ({}, given))
    total = 0.0
    for index, sample in enumerate(step.samples):
        values = step.log_probs[index].clone().requires_grad_()
        mask = torch.tensor(sample.loss_mask, dtype=torch.float64)
        gap = torch.tensor(sample.old_log_probs, dtype=torch.float64) + 0.3 - values
        rest = -torch.expm1(values)  # the probability of the other tokens, which have equal parts of it
        entropy = -values.exp() * values - rest * (rest.log() - math.log(VOCABULARY - 1))
        term = 0.1 * ESTIMATES[estimator](gap) - 0.02 * entropy
        loss = (term * mask).sum() / max(mask.sum(), 1) / len(step.samples)
        loss.backward()
        assert torch.allclose(found.gradients[index] - plain.gradients[index], values.grad, rtol=1e-4, atol=1e-7)
        total += float(loss.detach())
    assert found.loss - plain.loss == pytest.approx(total, rel=1e-4)


def test_rolls_own_weights_multiply_ours():
    case = Case(loss="cispo", aggregation="token_mean", sizes=(3, 5))
    step, settings = cases.make_step(case), cases.settings_of(case)
    plain = cases.run_step(case, step, settings).loss
    step.columns["train_infer_is_weight"] = torch.full_like(step.columns["advantages"], 1.5)
    assert cases.run_step(case, step, settings).loss == pytest.approx(plain * 1.5, rel=1e-5)


def test_without_old_log_probs_the_ratio_is_one():
    case = Case(loss="grpo", aggregation="sample_mean")
    step = cases.make_step(case)
    step.columns["old_log_probs"] = torch.zeros_like(step.columns["old_log_probs"]).long()  # ROLL's placeholder
    found = cases.run_step(case, step, cases.settings_of(case, enable_old_logprobs_recompute=False))
    by_hand = [-s.advantage * bool(sum(s.loss_mask)) / len(step.samples) for s in step.samples]
    assert found.loss == pytest.approx(sum(by_hand), abs=1e-6)
    assert [log["actor/policykl@mean"] for log in found.metrics] == [pytest.approx(0.0, abs=1e-6)] * len(found.metrics)


# Refusals


@pytest.mark.parametrize(
    ("worker", "pipeline", "message"),
    [
        ({"pg_variant": None}, {}, "pg_variant=None does not name a loss and an aggregation.*Losses: .*gspo.*prompt_mean"),
        ({"MEGATRON_RL_DIVISOR": "8"}, {}, "MEGATRON_RL_DIVISOR=8.0 has no effect"),
        (
            {"MEGATRON_RL_KL_ESTIMATOR": "k1"},
            {},
            "KL_ESTIMATOR=k1 has no effect without a coefficient: set use_kl_loss: true and kl_loss_coef",
        ),
        (
            {"MEGATRON_RL_KL_ESTIMATOR": "k9"},
            {"use_kl_loss": True},
            "KL estimator 'k9' is not registered; known: k1",
        ),
        ({"MEGATRON_RL_CLIP_RATIO_C": "5"}, {}, "CLIP_RATIO_C=5.0 has no effect: set dual_clip_loss"),
        ({}, {"importance_sampling": "seq"}, "two losses in one launch; ours is gspo"),
        ({}, {"difficulty_loss_weight": True}, "in each micro-batch"),
        ({}, {"length_loss_weight": True}, "in each micro-batch"),
        ({}, {"rl_loss_coef": 0.5}, "change the learning rate"),
        ({}, {"loss_agg_mode": "token-mean"}, "set loss_agg_mode: seq-mean-token-mean"),
        ({"apply_loss_scale": False}, {}, "would average over micro-batches and ranks"),
        ({"strategy_args": SimpleNamespace(strategy_name="fsdp2_train", strategy_config={})}, {}, "set megatron_train"),
        (
            {"strategy_args": SimpleNamespace(strategy_name="megatron_train", strategy_config={"calculate_per_token_loss": True})},
            {},
            "mean over ranks",
        ),
        ({"pg_variant": "cispo.prompt_mean"}, {"rollout_batch_size": 16}, "a step of 16 of 32 samples.*cuts prompt"),
        (
            {"pg_variant": "cispo.prompt_mean", "use_dynamic_batching_in_train": True},
            {},
            "dynamic batching beside cispo.prompt_mean",
        ),
        ({}, {"enable_old_logprobs_recompute": False, "ppo_epochs": 2}, "no old log-probabilities"),
        ({}, {"enable_old_logprobs_recompute": False, "rollout_batch_size": 16}, "no old log-probabilities"),
    ],
)
def test_settings_that_are_not_honoured_are_refused(worker, pipeline, message):
    with pytest.raises(ConfigError, match=message):
        roll.read(cases.worker_config(**({"pg_variant": "cispo.token_mean"} | worker)), cases.pipeline_config(**pipeline))


@pytest.mark.parametrize(
    ("loss", "worker", "is_weighed", "is_filtered", "recomputes", "message"),
    [
        ("grpo", {}, False, True, False, "drops tokens after it has counted them"),
        ("grpo", {"MEGATRON_RL_IMPORTANCE_CORRECTION": "tis"}, True, False, True, "two corrections in one launch"),
        ("grpo", {"MEGATRON_RL_IMPORTANCE_CORRECTION": "tis"}, False, True, True, None),
        ("dppo_tv", {}, True, False, True, "counted twice"),
        ("grpo", {}, True, True, True, None),
    ],
)
def test_one_gap_is_corrected_once(loss, worker, is_weighed, is_filtered, recomputes, message):
    correction = SimpleNamespace(is_weight=SimpleNamespace(enabled=is_weighed), filters=[SimpleNamespace(enabled=is_filtered)])
    pipeline = cases.pipeline_config(train_infer_correction=correction, enable_old_logprobs_recompute=recomputes)
    worker = cases.worker_config(f"{loss}.token_mean", **worker)
    if message is None:
        roll.read(worker, pipeline)
        return
    with pytest.raises(ConfigError, match=message):
        roll.read(worker, pipeline)


def test_another_pipeline_is_refused():
    with pytest.raises(ConfigError, match="is not of ROLL's RLVR pipeline"):
        pipeline = cases.pipeline_config()
        del pipeline.num_return_sequences_in_group
        roll.read(cases.worker_config("grpo.token_mean"), pipeline)


@pytest.mark.parametrize(
    ("loss", "change", "error", "message"),
    [
        ("grpo", lambda step: step.columns["old_log_probs"].fill_(math.nan), DataError, "not finite"),
        ("dppo_tv", lambda step: step.columns.pop("infer_logprobs"), ConfigError, "set actor_infer.generating_args.logprobs: 1"),
    ],
)
def test_a_batch_that_cannot_be_weighed_is_refused(loss, change, error, message):
    case = Case(loss=loss, aggregation="token_mean")
    step = cases.make_step(case)
    change(step)
    with pytest.raises(error, match=message):
        cases.run_step(case, step, cases.settings_of(case))


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
        return 0

    return forked(work)


def started_with(config: Any, old: str = "", new: str = "", **settings: object) -> Any:
    """Our worker, for a fork."""
    assert old in EMULATED_ROLL
    for path in ("roll", "roll.distributed.scheduler.decorator", "roll.pipeline.rlvr.actor_worker"):
        names = path.split(".")
        for end in range(1, len(names) + 1):
            module = types.ModuleType(".".join(names[:end]))
            module.__path__ = []
            exec(EMULATED_ROLL.replace(old, new, 1), vars(module))
            sys.modules.setdefault(module.__name__, module)
    from megatron_rl.hosts.roll_worker import ActorWorker

    worker = ActorWorker(config)
    worker.initialize(cases.pipeline_config(**settings))
    return worker


def test_our_worker_reads_its_settings_before_the_model_is_made():
    code, out, error = started()
    assert (code, out.split("\n")[:2]) == (0, ["made the model", "gspo.prompt_mean train_step"]), error
    code, out, error = started(rl_loss_coef=2.0, length_loss_weight=True)
    assert (code, out) == (1, "") and "rl_loss_coef=2.0" in error and "length_loss_weight=True" in error


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("batch, loss_func", "batch", "Strategy.train_step takes"),
    ],
)
def test_another_contract_is_refused(old, new, message):
    code, _, error = started(old, new)
    assert code == 1 and re.search(message, error), error


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


def results_by_roll(rank: int, chosen: list[Case]) -> list[cases.Result]:
    return cases.results_on_rank(rank, chosen, roll_forward_step)


@pytest.mark.host("ROLL_ROOT")
@pytest.mark.megatron
def test_rolls_own_forward_step_is_exact_with_ours():
    """Four aggregations, three losses, rows and packing, dp, cp, tp and micro-batches, ragged groups, fully masked samples."""

    def run(chosen, *, world_size, **layout):
        return run_ranks(results_by_roll, world_size, chosen, timeout=300, **layout)

    found = cases.errors_of(cases.matrix(LOSSES), run)
    print(f"worst {max(found.values()):.1e} of {len(found)}")
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
