"""The init hook on real process groups and the installed Megatron, the check before the host's optimiser step, the state of a run.

The check stops every rank or none, costs one look a step, and needs no data. Neither of two trainers of one process, as an actor
and a critic, sees the other's settings, verdicts, guard or lines.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import re
import sys
import warnings
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import counted_collectives, error_of, pool_of, set_global_args
from host_steps import CUSTOM_LOSS, REDUCER
from torch import nn

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import checks, model_notes
from megatron_rl.hosts.checks import check_launch
from megatron_rl.hosts.host_run import RUNS, torch_optimizers
from megatron_rl.hosts.reducer import get_pg_loss_reducer
from megatron_rl.hosts.run import Run, Runs
from megatron_rl.hosts.training_hooks import before_train_step, custom_megatron_init

pool = pool_of(4)


# The init hook

OF_CONSTANT = {"loss_aggregation": "constant", "loss_aggregation_divisor": 8192.0, **REDUCER, "global_batch_size": 128}
TOKEN_MEAN = {"loss_aggregation": "token_mean", "calculate_per_token_loss": True, **REDUCER}


def init_on_rank(rank: int, settings: dict, of_rank: dict | None = None, argv: list[str] | None = None) -> tuple[str, str, bool]:
    """(what it printed, what it raised, whether the arguments are as before); `of_rank` for rank 1 alone."""
    args = Namespace(**settings, **(of_rank if rank == 1 and of_rank else {}))
    before, sys.argv = copy.deepcopy(vars(args)), ["train.py", *(argv or [])]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        error = error_of(lambda: custom_megatron_init(args))
    return out.getvalue(), error, vars(args) == before


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("settings", "layout", "contract"),
    [
        (OF_CONSTANT, {"context_parallel_size": 2, "tensor_model_parallel_size": 2}, "unit: (loss x D x M, 1)"),
        (TOKEN_MEAN, {"context_parallel_size": 2}, "per-token: (loss x T, tokens)"),
    ],
    ids=["unit", "per-token"],
)
def test_a_sound_launch_prints_one_line_on_rank_0_and_changes_nothing(pool, settings, layout, contract):
    """FB-74: the arguments are as before; FB-16: the installed schedule has been executed under the launch's contract."""
    results = pool.run(init_on_rank, {**settings, **layout}, **layout)
    assert results[1:] == [("", "", True)] * 3 and results[0][1:] == ("", True)
    (line,) = results[0][0].splitlines()
    assert line.startswith(f"megatron_rl: loss_aggregation={settings['loss_aggregation']} by our reducer | step of ")
    assert " | weight of a token 1/" in line and re.search(r"\| host \w+ \| Megatron-Core \d+\.\d+", line)
    sizes = {"data": 1 if "tensor_model_parallel_size" in layout else 2, **layout}
    named = f"dp {sizes['data']} x cp 2 x tp {sizes.get('tensor_model_parallel_size', 1)} x pp 1"
    assert line.endswith(f"| contract {contract}, ratio 1 on {named} | PASS")


REFUSED = [
    pytest.param({**OF_CONSTANT, "context_parallel_size": 2}, None, "-size 2 and the cp process group has 1 ranks", id="cp"),
    ({**REDUCER}, ["--loss-aggregation", "constant"], "--loss-aggregation is on the command line and not in args"),
    pytest.param({"loss_aggregation": "sample_mean"}, None, "has no effect", id="FB-69 nothing of ours is at work"),
]


@pytest.mark.megatron
@pytest.mark.parametrize(("settings", "argv", "says"), REFUSED)
def test_a_launch_of_a_wrong_scale_stops_on_every_rank_before_any_data(pool, settings, argv, says):
    """slime drops our flags without a word."""
    for out, error, is_unchanged in pool.run(init_on_rank, settings, None, argv, world_size=2):
        assert error.startswith("ConfigError") and re.search(says, error), error
        assert out == "" and is_unchanged


@pytest.mark.megatron
def test_a_problem_of_one_rank_stops_the_others_too(pool):
    """A node with a broken installation: its peers would wait in the probe until their timeout."""
    broken = {"samples_per_prompt": 4, "n_samples_per_prompt": 8}
    results = pool.run(init_on_rank, OF_CONSTANT, broken, world_size=2)
    assert results[0][1].startswith("ConfigError: another rank refused this launch")
    assert "--samples-per-prompt 4 and --n-samples-per-prompt 8 are the same thing" in results[1][1]


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


OUR_LOSS = {**CUSTOM_LOSS, "loss_aggregation": "sample_mean", "kl_loss_type": "k3"}
REPLAY = {"rollout_batch_size": 8, "rollout_top_p": 0.9, "sampling_support": "replay"}


@pytest.mark.parametrize("value", ["true", "0"])
def test_a_sampler_that_scores_the_whole_vocabulary_is_refused_where_kept_ids_are_replayed(value, monkeypatch):
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", value)
    refused = pytest.raises(ConfigError, match="SGLANG_RETURN_ORIGINAL_LOGPROB=true with --sampling-support replay: .*unset it")
    with refused if value == "true" else contextlib.nullcontext():
        check_launch(Namespace(**OUR_LOSS, **REPLAY), in_actor=True)


# The line of a sound launch. What it says of weights is that of `explain`, in tests/test_explain.py.
# The guard


class Wrapped:
    """Megatron's optimiser as the guard sees it: the torch one, or a chain, behind an attribute."""

    def __init__(self, *parts, optimizer=None):
        if parts:
            self.chained_optimizers = list(parts)
        self.optimizer = optimizer

    def step(self):
        for found in torch_optimizers(self):
            found.step()


def make_model(per_token: bool = False) -> nn.Module:
    """Three layers deep, as DDP and Float16Module wrap it."""
    inner = nn.Linear(1, 1, bias=False)
    inner.config = SimpleNamespace(calculate_per_token_loss=per_token)
    outer = nn.Module()
    outer.module = inner
    return outer


class Trainer:
    """A host's arguments and optimiser; its parameter is 1, and each step takes 0.5 from it."""

    def __init__(self, optimizer=NotImplemented, **args):
        self.args = Namespace(**{"calculate_per_token_loss": False, **args})
        self.parameter = nn.Parameter(torch.ones(1))
        self.parameter.grad = torch.ones(1)
        own = Wrapped(Wrapped(optimizer=torch.optim.SGD([self.parameter], lr=0.5)))
        self.optimizer = own if optimizer is NotImplemented else optimizer
        self.guard = RUNS.of(self.args).guard

    def begin(self, step_id: int = 0, model=None) -> None:
        before_train_step(self.args, 7, step_id, [make_model()] if model is None else model, self.optimizer, None)


def test_a_clean_step_is_taken_and_a_step_with_non_finite_tokens_is_not():
    """The parameter has not moved when the error is raised, and the error names the step. A second registration would look, and on
    several ranks communicate, twice a step."""
    trainer = Trainer()
    (inner,) = torch_optimizers(trainer.optimizer)
    trainer.begin()
    trainer.guard.record_nonfinite(torch.zeros(3, dtype=torch.int32))
    trainer.optimizer.step()
    assert trainer.parameter.item() == 0.5
    trainer.begin(1)
    assert len(vars(inner)["_optimizer_step_pre_hooks"]) == 1
    trainer.guard.record_nonfinite(torch.tensor([0, 2, 0], dtype=torch.int32))
    trainer.guard.record_nonfinite(torch.tensor(1, dtype=torch.int32))
    with pytest.raises(DataError, match="rollout 7, step 1: 3 non-finite .* is refused on all of them. Look at logits, log_probs"):
        trainer.optimizer.step()
    assert trainer.parameter.item() == 0.5


def test_the_reducer_records_non_finite_unmasked_tokens_for_an_armed_guard():
    """On the reducer launch method too; a masked NaN is none of them, and without the guard the reducer records nothing."""
    trainer = Trainer(loss_aggregation="sample_mean")
    set_global_args(trainer.args)
    reducer = get_pg_loss_reducer([5, 4], [3, 2], [torch.tensor([1, 0, 1]), torch.tensor([1, 1])])
    bad, masked = torch.tensor([1.0, 2.0, math.inf, math.nan, 1.0]), torch.tensor([1.0, math.nan, 1.0, 1.0, 1.0])
    reducer(bad)  # nothing is armed
    trainer.begin()
    reducer(masked)
    trainer.optimizer.step()
    assert trainer.parameter.item() == 0.5
    trainer.begin(1)
    reducer(bad.requires_grad_())
    with pytest.raises(DataError, match="rollout 7, step 1: 2 non-finite unmasked tokens"):
        trainer.optimizer.step()
    assert trainer.parameter.item() == 0.5


def test_a_step_that_the_host_skipped_is_looked_at_by_the_next_call():
    """The hosts skip the optimiser when the gradient norm is not finite: the bad data would go by in silence."""
    trainer = Trainer()
    trainer.begin(3)
    trainer.guard.record_nonfinite(torch.tensor(2))
    with pytest.raises(DataError, match="rollout 7, step 3: 2 non-finite"):
        trainer.begin(4)


@pytest.mark.parametrize("optimizer", [None, Wrapped(optimizer=None), Wrapped(Wrapped(optimizer=None))])
def test_without_an_optimiser_the_loss_is_told_to_look_itself(optimizer):
    """miles with --debug-disable-optimizer, a rank whose parameters are all frozen."""
    trainer = Trainer(optimizer)
    assert not trainer.guard.is_armed
    with pytest.warns(UserWarning, match="no torch optimiser on this rank: nothing stops its step"):
        trainer.begin()
    assert not trainer.guard.is_armed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.begin(1)


# The arguments, the config of a chunk of the model behind one that is sound, the problems.
MODELS = {
    "FB-15 per token in the model": (
        *({}, {"calculate_per_token_loss": True}),
        ["is False in the arguments and True in the model's config.*add it, or set --context-parallel-size 1"],
    ),
    "FB-102 random routers": (
        {},
        {"num_moe_experts": 8, "moe_input_jitter_eps": 0.01},
        ["moe_input_jitter_eps=0.01: random noise"],
    ),
}


@pytest.mark.parametrize(("args", "config", "says"), MODELS.values(), ids=MODELS)
def test_a_model_that_is_not_what_the_arguments_say_is_refused(args, config, says):
    """A bridge forces per-token loss for some models under context parallelism, and takes coefficients of a checkpoint's config:
    no argument shows it."""
    is_per_token = args.get("calculate_per_token_loss", False)
    chunks = [make_model(is_per_token), make_model(is_per_token)]
    vars(chunks[1].module.config).update(config)
    with pytest.raises(ConfigError) as caught:
        Trainer(**args).begin(model=chunks)
    for problem, pattern in zip(caught.value.problems, says, strict=True):
        assert re.search(pattern, problem)


def steps_on_rank(rank: int, bad_rank: int) -> tuple[list[str], float, list[int]]:
    """(what each of two steps raised, the parameter, collectives of each step): the second step is bad on one rank alone."""
    trainer = Trainer()
    errors, numbers = [], []
    for step in range(2):
        with counted_collectives() as calls:
            trainer.begin(step)
            if step == 1 and rank == bad_rank:
                trainer.guard.record_nonfinite(torch.tensor(5))
            errors.append(error_of(trainer.optimizer.step))
        numbers.append(len(calls))
    return errors, trainer.parameter.item(), numbers


LAYOUTS = [
    pytest.param({"context_parallel_size": 2, "tensor_model_parallel_size": 2}, 0, id="cp2 tp2"),
    pytest.param({"pipeline_model_parallel_size": 2}, 3, id="dp2 pp2, the last stage alone computes losses"),
]


@pytest.mark.megatron
@pytest.mark.parametrize(("layout", "bad_rank"), LAYOUTS)
def test_no_rank_steps_when_one_of_them_saw_a_non_finite_token(pool, layout, bad_rank):
    """FB-41: a rank that stepped alone would hold other weights than its replicas, and one that raised alone hang them."""
    for errors, parameter, numbers in pool.run(steps_on_rank, bad_rank, **layout):
        assert errors[0] == ""
        assert errors[1].startswith("DataError: rollout 7, step 1: 5 non-finite unmasked tokens on one of the ranks")
        assert parameter == 0.5
        assert numbers == [4, 2], "one all-reduce for each of two groups a step, and as many once, to agree that all are armed"


def frozen_on_rank(rank: int, frozen: int) -> tuple[bool, str]:
    trainer = Trainer(Wrapped(optimizer=None)) if rank == frozen else Trainer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.begin()
        trainer.begin(1)
    return trainer.guard.is_armed, error_of(trainer.optimizer.step)


@pytest.mark.megatron
def test_a_rank_without_parameters_disarms_all(pool):
    """Else the others would wait for it in the all-reduce before their step."""
    assert pool.run(frozen_on_rank, 1, world_size=2) == [(False, ""), (False, "")]


def real_step_on_rank(rank: int) -> tuple[list[str], bool]:
    """Megatron's own DDP and optimiser, as a host builds them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_rl.megatron.model import transformer_config

    config = transformer_config(num_layers=1, hidden_size=4, num_attention_heads=1)
    module = nn.Linear(4, 4)
    module.config = config
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), module)
    settings = OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=True, clip_grad=1.0)
    trainer = Trainer(get_megatron_optimizer(settings, [model]))
    errors = []
    for step in range(2):
        model.zero_grad_buffer()
        trainer.begin(step, [model])
        before = module.weight.detach().clone()
        model(torch.ones(2, 4)).sum().backward()
        model.finish_grad_sync()
        if step == 1 and rank == 0:
            trainer.guard.record_nonfinite(torch.tensor(1))
        errors.append(error_of(trainer.optimizer.step))
    return errors, torch.equal(before, module.weight)


@pytest.mark.megatron
def test_megatrons_own_optimiser_does_not_step(pool):
    """Catches a wrapper that the guard does not see through: the distributed optimiser inside a chain."""
    for errors, is_unmoved in pool.run(real_step_on_rank, world_size=2):
        assert errors[0] == "" and errors[1].startswith("DataError: rollout 7, step 1")
        assert is_unmoved


# A state for each trainer


class Config(dict):
    """Equal to another of the same numbers, and without a hash, as a trainer's config."""


def test_equal_owners_have_a_run_each_which_goes_with_them():
    runs, actor, critic = Runs(Run), Config(), Config()
    assert actor == critic and runs.of(actor) is not runs.of(critic)
    assert runs.of(actor) is runs.of(actor)
    runs.of(actor).told.add("a line")
    for _ in range(20):  # the number of a freed object is given out again
        actor = Config()
        gc.collect(0)  # what was made here; the whole heap takes half a second
        assert not runs.of(actor).told and len([*runs]) == 2
        runs.of(actor).told.add("a line")


def told_on_rank(rank: int) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        Run().warn("careful")
    return printed.getvalue()


@pytest.mark.megatron
def test_one_rank_of_those_that_have_the_loss_tells(pool):
    """Ranks 2 and 3 are the last stage, and 2 the first of its tensor-parallel ranks."""
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assert pool.run(told_on_rank, **layout) == ["", "", "megatron_rl: careful\n", ""]
