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
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import counted_collectives, error_of, pool_of, set_global_args
from host_steps import CUSTOM_LOSS, REDUCER, REWARD, RolloutSample, launch
from torch import nn

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import ROLLOUT_HOST_NAMES, checks, model_notes
from megatron_rl.hosts.checks import check_launch
from megatron_rl.hosts.host_run import RUNS, torch_optimizers
from megatron_rl.hosts.reducer import get_pg_loss_reducer
from megatron_rl.hosts.rewards import reward_post_process
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
    def resolve_backend(backend: str, logits: torch.Tensor) -> None:
        if backend != "auto":
            raise ConfigError(f"no {backend} on this device")

    monkeypatch.setattr(model_notes, "resolve_backend", resolve_backend)
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
    trainer.begin(2)  # of a caller who goes on after the error
    trainer.optimizer.step()
    assert trainer.parameter.item() == 0.0


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


# reward_post_process: what tests/test_hosts.py does not train: weights by hand where the host drops or masks samples, rewards


DIVISOR = 8
MODES = {
    "prompt_mean": "--loss-aggregation prompt_mean",
    "token_mean": "--loss-aggregation token_mean",
    "constant": f"--loss-aggregation constant --loss-aggregation-divisor {DIVISOR}",
}


def make_samples(counts: list[int], prompts: list, **fields: list) -> list[RolloutSample]:
    """One sample an entry: `counts` unmasked tokens among twice as many, its prompt, and further fields."""
    samples = []
    for index, (count, prompt) in enumerate(zip(counts, prompts, strict=True)):
        mask = [1] * count + [0] * max(count, 3)
        rest = {name: values[index] for name, values in fields.items()}
        samples.append(RolloutSample(prompt, **{"index": 100 + index, "response_length": len(mask), "loss_mask": mask, **rest}))
    return samples


def step_s(**fields: list) -> list[RolloutSample]:
    """Step S: m = (2, 4, 1, 0), prompts (7, 7, 9, 9), so N = 4, P = 2, T = 7, M_7 = 6, M_9 = 1."""
    return make_samples([2, 4, 1, 0], [7, 7, 9, 9], **fields)


@dataclass
class Rollouts:
    samples: list[RolloutSample]
    host: str = "miles"
    mode: str = "prompt_mean"
    options: dict = field(default_factory=dict)

    def rewards(self) -> list[float]:
        return reward_post_process(launch(self.host, MODES.get(self.mode, self.mode), **REWARD | self.options), self.samples)[1]

    def weights(self) -> list[float]:
        """Without the host's normalisation a reward of 1 becomes the sample's weight."""
        return replace(self, options={"rewards_normalization": False} | self.options).rewards()


def groups(*prompts, **fields) -> list[RolloutSample]:
    """Samples of these prompts, one unmasked token each."""
    return make_samples([1] * len(prompts), list(prompts), **fields)


def whole_samples(**fields: list) -> list[RolloutSample]:
    """Two prompts of two samples of three tokens."""
    return [RolloutSample(index // 2, index, 3, **{name: of[index] for name, of in fields.items()}) for index in range(4)]


SIX, PARTIAL = groups(1, 1, 2, 2, 3, 3), "--loss-aggregation prompt_mean --samples-per-prompt 2 --allow-partial-prompt-groups"
UNLIKE = groups(1, 1, 2, 2, 3, 3, 4, 5)
KEEPS_REST = {"allow_partial_train_step": True, "use_dynamic_batch_size": True}
ONE_PROMPT = {"global_batch_size": 3, "n_samples_per_prompt": 3, "rollout_batch_size": 1}
MINUTE = {"index": [None] * 4, "rollout_id": [5, 5, None, None]}
WEIGHTS = {
    # 3 groups of 2 rollouts, one token each, steps of 4 rollouts: the third group is dropped, T = 4.
    "slime drops the rest": (Rollouts(SIX, "slime"), [1, 1, 1, 1, 0, 0]),
    "miles drops the rest": (Rollouts(SIX), [1, 1, 1, 1, 0, 0]),
    # A partial step of 2 rollouts, kept only with dynamic micro-batches: prompt_mean has N / P = 2 there too.
    "FB-07 no dynamic micro-batches": (Rollouts(SIX, options={"allow_partial_train_step": True}), [1, 1, 1, 1, 0, 0]),
    "FB-07 miles keeps it": (Rollouts(SIX, options=KEEPS_REST), [1] * 6),
    # The hook runs before the host clears the mask of a removed sample: 2 x 3/6, 2 x 3/6, 2 x 3/3.
    "a sample that the host will remove": (Rollouts(whole_samples(remove_sample=[False, False, False, True])), [1, 1, 2, 0]),
    "a fully masked sample": (Rollouts(whole_samples(loss_mask=[[1] * 3] * 3 + [[0] * 3])), [1, 1, 2, 0]),
    # Two of one prompt's four samples are segments of one rollout: N = 3, and 3 x M_roll / 6 with M_roll = 2 for all.
    "FB-11 miles: index stands in": (
        *(Rollouts(make_samples([1, 1, 2, 2], [1] * 4, rollout_id=[5, 5, None, None]), options=ONE_PROMPT), [1] * 4),
    ),
    "FB-11 slime: a fresh number": (Rollouts(make_samples([1, 1, 2, 2], [1] * 4, **MINUTE), "slime", options=ONE_PROMPT), [1] * 4),
    # (N/P) m_i / M_g = 8/5 x 1/2 and 8/5 x 1/1
    "unlike groups in one step": (
        *(Rollouts(UNLIKE, "slime", PARTIAL, {"global_batch_size": 8, "rollout_batch_size": 4}), [0.8] * 6 + [1.6] * 2),
    ),
    "FB-17 a constant needs no prompts": (Rollouts(groups(*[None] * 4), mode="constant"), [1 / 8] * 4),
}


@pytest.mark.parametrize(("rollouts", "expected"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_by_hand(rollouts, expected):
    before = copy.deepcopy(rollouts.samples)
    assert rollouts.weights() == pytest.approx(expected) and rollouts.samples == before


@pytest.mark.parametrize("host", ROLLOUT_HOST_NAMES)
@pytest.mark.parametrize(("by_deviation", "unit"), [(True, 0.5**0.5), (False, 1.0)])
def test_rewards_are_normalised_by_group_index_with_one_reward_a_rollout(host, by_deviation, unit):
    """FB-11, FB-17: prompt 5 has rollouts of rewards 1, in two segments, and 3: mean 2, deviation sqrt(2). Prompt 6 has one: 0."""
    options = {"global_batch_size": 3, "grpo_std_normalization": by_deviation, **REDUCER}
    samples = make_samples([1, 2, 1, 1], [5, 6, 5, 5], rollout_id=[10, 20, 11, 10], reward=[1.0, 5.0, 3.0, 1.0])
    found = Rollouts(samples, host, "--loss-aggregation constant --loss-aggregation-divisor 1", options).rewards()
    assert found == pytest.approx([-unit, 0.0, unit, -unit], abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_zero_token_sample_leaves_the_other_samples_weights_unchanged(mode):
    """FB-18: w_i / (N d_i), what a token weighs after the host's mean, does not move; a constant's w_i does not either."""
    ours = MODES[mode] + " --samples-per-prompt 3 --allow-partial-prompt-groups"
    options = {"n_samples_per_prompt": 3, "use_dynamic_global_batch_size": True}
    samples = make_samples([2, 4, 1, 3], [7, 7, 9, 9])
    without = Rollouts(samples, mode=ours, options=options).weights()
    *with_it, placeholder = Rollouts([*samples, RolloutSample(9, 3, 0)], mode=ours, options=options).weights()
    per_n = (1, 1) if mode == "constant" else (4, 5)
    assert placeholder == 0.0
    assert [weight / per_n[1] for weight in with_it] == pytest.approx([weight / per_n[0] for weight in without], rel=1e-6)


S, TWO_STEPS = Rollouts(step_s()), {"global_batch_size": 2, "rollout_batch_size": 1}
SPLIT, DYNAMIC = {"delay_split_train_data_by_dp": True}, {"use_dynamic_global_batch_size": True}
IMAGES, EIGHT = step_s(multimodal_train_inputs=[{"pixels": 1}] * 4), {"rollout_batch_size": 4}
FIVE = {"rollout_id": [1, 1, 2, 3, 4]}
# What is refused, the message, what is allowed beside it.
REFUSED_REWARDS = {
    # A setting that would undo the weights. FB-07: a rollout that the host drops must not count in a denominator.
    "a wrapper": (replace(S, options={"custom_reward_post_process_path": "a.b"}), "would not know that samples are weighted", S),
    "a split by samples": (replace(S, options=SPLIT | TWO_STEPS), "-data-by-dp: miles then splits", replace(S, options=SPLIT)),
    "images": (
        *(Rollouts(IMAGES, options=TWO_STEPS), "samples with multimodal_train_inputs: miles then splits samples"),
        Rollouts(IMAGES, "slime", options=TWO_STEPS),
    ),
    "FB-11 a dynamic step of segments": (
        *(Rollouts(groups(1, 1, 1, 2, 2, **FIVE), options=DYNAMIC), "-dynamic-global-batch-size with 5 samples of 4 rollouts"),
        replace(S, options=DYNAMIC),
    ),
    # The flags alone do not show it: four samples come where they promise one step of two.
    "token_mean over several steps": (
        *(Rollouts(step_s(), "slime", "token_mean", TWO_STEPS), "the rollout batch makes 2 steps of --global-batch-size 2: token_"),
        Rollouts(step_s(), "slime", "constant", TWO_STEPS),
    ),
    "a prompt group cut by a step": (
        *(Rollouts(groups(1, 1, 2, 3, 3, 2, 4, 4), options=EIGHT), "prompt group 2 has samples in step 0 and step 1"),
        Rollouts(groups(1, 2, 2, 1, 3, 4, 4, 3), options=EIGHT),
    ),
    # N / P would differ from step to step.
    "unlike groups": (Rollouts(UNLIKE, "slime", PARTIAL), "step 0 has 4 rollouts of 2 prompts, step 1 has 4 of 3", S),
    # Samples that cannot be weighted.
    "FB-17 no prompt": (Rollouts(groups(1, None, 2, 2)), r"1 of 4 .* no group_index \(the first is sample 1\)", S),
    "FB-17 part of a group": (Rollouts(groups(1, 2, 2, 3)), "prompt 1 has 1 of samples_per_prompt=2", Rollouts(groups(1, 2, 2, 1))),
    "too many": (Rollouts(groups(1, 1, 1, 2)), "prompt 1 has 3 samples", S),
    "a mask of another length": (Rollouts([RolloutSample(1, 0, 2, loss_mask=[1])]), "mask of 1 for a response_length of 2", S),
    "FB-07 too few rollouts": (Rollouts(groups(1, 1, 2)), "3 rollouts do not fill one step", S),
    "FB-11 a rollout of two prompts": (
        *(Rollouts(groups(1, 1, 2, 2, rollout_id=[1, 2, 1, 2])), r"rollout 1 has samples of the prompt groups \['1', '2'\]"),
        Rollouts(groups(1, 1, 2, 2, rollout_id=[1, 2, 3, 4])),
    ),
    "FB-11 segments that disagree": (
        *(Rollouts(groups(1, 1, 1, 2, 2, **FIVE, reward=[1, 2, 1, 1, 1])), "segments of one rollout share one"),
        Rollouts(groups(1, 1, 1, 2, 2, **FIVE, reward=[2, 2, 1, 1, 1])),
    ),
    # Without rollout_id and index miles counts all such samples as one rollout; slime numbers them.
    "samples that miles cannot tell apart": (
        *(Rollouts(step_s(index=[100, 101, 102, None])), "sample 3 has neither rollout_id nor index"),
        Rollouts(step_s(index=[100, 101, 102, None]), "slime"),
    ),
    "nothing to learn from": (Rollouts(make_samples([0] * 4, [1, 1, 2, 2])), "not a single unmasked token", S),
    "FB-18 NaN": (Rollouts(step_s(reward=[1, math.nan, 0, 0])), "reward nan", Rollouts(step_s(reward=[1, 0, True, 2]))),
}


@pytest.mark.parametrize(("refused", "message", "allowed"), REFUSED_REWARDS.values(), ids=REFUSED_REWARDS)
def test_what_cannot_be_weighted_is_refused(refused, message, allowed):
    with pytest.raises((ConfigError, DataError), match=message):
        refused.rewards()
    allowed.rewards()
