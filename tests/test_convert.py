"""convert_samples_to_train_data: two keys replaced in what the host's own converter emits, prompt_mean exactly, refusals.

The hosts' converters are stand-ins here, reached under the hosts' own names; test_host_matrix.py reaches those of checkouts.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from types import ModuleType

import pytest
from rollout_cases import HOOKS, RolloutSample, launch, make_samples, step_s

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.companions import convert_samples_to_train_data

OURS = "--loss-aggregation prompt_mean"


def train_data_of(args: Namespace, samples: list, reward_function) -> dict:
    """What any host's converter emits, and a key that only this one knows."""
    raw = [sample.get_reward_value(args) for sample in samples]
    _, rewards = reward_function(args, samples) if reward_function else (raw, [10 * reward for reward in raw])
    masks = [
        [0] * s.response_length if s.remove_sample else [1] * s.response_length if s.loss_mask is None else s.loss_mask
        for s in samples
    ]
    return {
        "rewards": rewards,
        "loss_masks": masks,
        "rollout_ids": [sample.index for sample in samples],
        "rollout_mask_sums": [sum(mask) for mask in masks],
        "of_this_version": ["kept"] * len(samples),
    }


def miles_module() -> ModuleType:
    module = ModuleType("miles.ray.rollout.train_data_conversion")

    def convert(
        args, samples, metadata, custom_convert_samples_to_train_data_func, custom_reward_post_process_func
    ):  # as miles declares it
        assert custom_convert_samples_to_train_data_func is None, "the hook would call itself for ever"
        assert metadata == {}
        return train_data_of(args, samples, custom_reward_post_process_func)

    module.convert_samples_to_train_data = convert
    return module


class Manager:
    """A method of slime's rollout manager, whose engines a conversion must not need."""

    def __init__(self, args):
        raise AssertionError("starts the inference engines")

    def _post_process_rewards(self, args, samples):
        hook = self.custom_reward_post_process_func
        return hook(args, samples) if hook else None

    def _convert_samples_to_train_data(self, samples):
        assert self.custom_convert_samples_to_train_data_func is None, "the hook would call itself for ever"
        has_hook = self.custom_reward_post_process_func is not None
        return train_data_of(self.args, samples, self._post_process_rewards if has_hook else None)


class ActorClass:
    """ray.remote gives an instance of a class made of this and the decorated class."""

    def __init__(self):
        pass


@pytest.fixture(params=["miles", "slime", "slime, not wrapped by ray"])
def host(request, monkeypatch) -> str:
    module = ModuleType("slime.ray.rollout")
    wrapped = type("ActorClass(Manager)", (ActorClass, Manager), {})()
    module.RolloutManager = Manager if "not wrapped" in request.param else wrapped
    put_modules(monkeypatch, miles_module(), module)
    return request.param.partition(",")[0]


def put_modules(monkeypatch, *modules: ModuleType) -> None:
    for module in modules:
        names = module.__name__.split(".")
        for end in range(1, len(names)):
            monkeypatch.setitem(sys.modules, ".".join(names[:end]), ModuleType(names[end - 1]))
        monkeypatch.setitem(sys.modules, module.__name__, module)


def args_of(host: str, **options) -> Namespace:
    """2 prompts a step, which --global-batch-size counts on this route."""
    return launch(host, "convert", OURS, **{"global_batch_size": 2, **options})


def test_prompts_stand_for_rollouts_and_the_rest_is_the_hosts(host):
    """FB-17: M_7 = 6, M_9 = 1 of step S; everything else, keys of the host's version included, is as the host emits it."""
    args, samples = args_of(host), step_s()
    data = convert_samples_to_train_data(args, samples)
    assert data.pop("rollout_ids") == [7, 7, 9, 9]
    assert data.pop("rollout_mask_sums") == [6, 6, 1, 1]
    own = train_data_of(args, step_s(), None)
    assert data == {key: own[key] for key in ("rewards", "loss_masks", "of_this_version")}
    assert all(type(number) is int for number in convert_samples_to_train_data(args, samples)["rollout_ids"])


def test_counts_are_those_of_the_masks_that_will_be_trained(host):
    """A removed sample and one without a mask; groups of 2 rollouts, one of them of two segments, not side by side."""
    samples = [
        RolloutSample(4, 0, 3, rollout_id=1),
        RolloutSample(5, 1, 4, rollout_id=2, remove_sample=True),
        RolloutSample(4, 2, 2, loss_mask=[1, 0], rollout_id=1),
        RolloutSample(5, 3, 2, rollout_id=3),
        RolloutSample(4, 4, 1, loss_mask=[0], rollout_id=4),
    ]
    data = convert_samples_to_train_data(args_of(host), samples)
    assert data["rollout_ids"] == [4, 5, 4, 5, 4]
    assert data["rollout_mask_sums"] == [4, 2, 4, 2, 4]


def negated_rewards(args, samples):
    raw = [sample.get_reward_value(args) for sample in samples]
    return raw, [-reward for reward in raw]


def test_a_users_own_reward_hook_still_runs(host):
    args = args_of(host, custom_reward_post_process_path=f"{__name__}.negated_rewards")
    assert convert_samples_to_train_data(args, step_s(reward=[1.0, 2.0, 3.0, 4.0]))["rewards"] == [-1.0, -2.0, -3.0, -4.0]


SETTINGS = [
    (
        {"custom_reward_post_process_path": HOOKS + "reward_post_process"},
        "remove one of them",
        {"custom_reward_post_process_path": f"{__name__}.negated_rewards"},
    ),
    pytest.param({"custom_convert_samples_to_train_data_path": "a.b"}, "know that each prompt is one rollout", {}, id="a wrapper"),
    pytest.param({"global_batch_size": None}, "--global-batch-size is not set", {"global_batch_size": 1}, id="no batch size"),
]


@pytest.mark.parametrize(("refused", "message", "allowed"), SETTINGS)
def test_a_setting_that_ignores_or_replaces_rollout_ids_is_refused(host, refused, message, allowed):
    with pytest.raises(ConfigError, match=message):
        convert_samples_to_train_data(args_of(host, **refused), step_s())
    convert_samples_to_train_data(args_of(host, **allowed), step_s())


def test_multimodal_samples_are_refused_in_miles_and_scheduled_by_rollout_in_slime(host):
    samples = step_s(multimodal_train_inputs=[None, {"pixels": 1}, None, None])
    if host == "miles":
        with pytest.raises(ConfigError, match="samples with multimodal_train_inputs with --custom-convert"):
            convert_samples_to_train_data(args_of(host), samples)
    else:
        convert_samples_to_train_data(args_of(host), samples)


DATA = [
    pytest.param(lambda: make_samples([1] * 4, ["a", "a", "b", "b"]), "group_index 'a': it becomes a rollout id", id="a name"),
    pytest.param(
        lambda: make_samples([1] * 2, [1, 1]), "1 prompts do not fill one step of --global-batch-size 2", id="FB-07 too few"
    ),
    pytest.param(lambda: step_s(reward=[float("nan"), 1.0, 1.0, 1.0]), "after the host's normalisation", id="FB-17 a NaN of n = 1"),
]


@pytest.mark.parametrize(("refused", "message"), DATA)
def test_samples_that_make_no_prompts_are_refused(host, refused, message):
    with pytest.raises(DataError, match=message):
        convert_samples_to_train_data(args_of(host), refused())


def without_rollouts(args, samples, metadata, custom_convert_samples_to_train_data_func, custom_reward_post_process_func):
    return {"rewards": [], "loss_masks": []}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"convert_samples_to_train_data": lambda args, samples: {}}, "takes other arguments"),
        ({}, "has no convert_samples_to_train_data"),
        ({"convert_samples_to_train_data": without_rollouts}, "emits no rollout_ids, rollout_mask_sums"),
    ],
)
def test_another_version_of_miles_is_refused_with_the_other_hook_as_the_way_out(monkeypatch, names, message):
    module = ModuleType("miles.ray.rollout.train_data_conversion")
    vars(module).update(names)
    put_modules(monkeypatch, module)
    with pytest.raises(ConfigError, match=f"{message}.*megatron_rl.hooks.reward_post_process"):
        convert_samples_to_train_data(args_of("miles"), step_s())


def test_another_version_of_slime_that_needs_more_of_its_manager_is_refused(monkeypatch):
    class Other(Manager):
        def _convert_samples_to_train_data(self, samples):
            return self.engines

    module = ModuleType("slime.ray.rollout")
    module.RolloutManager = Other
    put_modules(monkeypatch, module)
    with pytest.raises(ConfigError, match="needs its manager's engines"):
        convert_samples_to_train_data(args_of("slime"), step_s())


def test_a_host_that_cannot_be_imported_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "slime", None)
    with pytest.raises(ConfigError, match="slime.ray.rollout of slime cannot be imported"):
        convert_samples_to_train_data(args_of("slime"), step_s())
