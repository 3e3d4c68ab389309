"""convert_samples_to_train_data: two keys replaced in what the host's own converter emits, prompt_mean exactly, refusals.

The hosts' converters are stand-ins here, reached under the hosts' own names; real ones are in test_rollout_hosts.py.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from types import ModuleType

import pytest
from rollout_cases import DOORS, HOOKS, RolloutSample, launch, make_samples, step_s

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import companions
from megatron_rl.hosts.companions import convert_samples_to_train_data

HOSTS = ("miles", "slime")
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


def test_the_hosts_mean_of_the_converted_rollouts_is_prompt_mean(host):
    """FB-17: (1/2) (S_7 / 6 + S_9 / 1) with token losses 1, 2, 3 is 7/3; sample means would give 1.5."""
    data = convert_samples_to_train_data(args_of(host), step_s())
    sums = [sum(mask) * loss for mask, loss in zip(data["loss_masks"], [1, 2, 3, 0], strict=True)]
    parts = [value / max(d, 1) for value, d in zip(sums, data["rollout_mask_sums"], strict=True)]
    assert sum(parts) / len(set(data["rollout_ids"])) == pytest.approx(7 / 3)


def negated_rewards(args, samples):
    raw = [sample.get_reward_value(args) for sample in samples]
    return raw, [-reward for reward in raw]


def test_a_users_own_reward_hook_still_runs(host):
    args = args_of(host, custom_reward_post_process_path=f"{__name__}.negated_rewards")
    assert convert_samples_to_train_data(args, step_s(reward=[1.0, 2.0, 3.0, 4.0]))["rewards"] == [-1.0, -2.0, -3.0, -4.0]


def test_what_changes_is_said_once(host, capsys, monkeypatch):
    monkeypatch.setattr(companions, "_printed", set())
    for _ in range(2):
        convert_samples_to_train_data(args_of(host), step_s())
    (line,) = capsys.readouterr().out.splitlines()
    assert "--global-batch-size 2 counts prompts" in line and "entropy, KL and clip fraction" in line


SETTINGS = [
    # options that are refused, what the message says, options that are allowed
    pytest.param({"loss_aggregation": "token_mean"}, "gives prompt_mean alone", {}, id="another aggregation"),
    pytest.param({"calculate_per_token_loss": True}, "calculate.per.token.loss", {}, id="FB-13 per token"),
    pytest.param(
        {"custom_reward_post_process_path": HOOKS + "reward_post_process"},
        "remove one of them",
        {"custom_reward_post_process_path": f"{__name__}.negated_rewards"},
        id="both hooks",
    ),
    pytest.param(DOORS["our reducer"], "a custom reducer never sees them", DOORS["custom_loss"], id="our reducer"),
    pytest.param(
        {"custom_pg_loss_reducer_function_path": "a.b"}, "a reducer sees no rollout_mask_sums", {}, id="a foreign reducer"
    ),
    pytest.param({"loss_type": "custom_loss", "custom_loss_function_path": "a.b"}, "is unknown", {}, id="a foreign loss"),
    pytest.param({"custom_convert_samples_to_train_data_path": "a.b"}, "know that each prompt is one rollout", {}, id="a wrapper"),
    pytest.param(
        {"num_steps_per_rollout": 2},  # 4 samples in 2 steps: the 2 of --global-batch-size counts samples
        "--num-steps-per-rollout 2",
        {"num_steps_per_rollout": None},
        id="FB-07 steps given in samples",
    ),
    pytest.param({"use_dynamic_global_batch_size": True}, "--use-dynamic-global-batch-size", {}, id="FB-07 a dynamic batch"),
    pytest.param({"multi_lora": True}, "multi-LoRA", {"multi_lora": False}, id="multi-LoRA"),
    pytest.param(
        {"use_tis": True, "custom_tis_function_path": "a.b"}, "--custom-tis-function-path", {"use_tis": True}, id="FB-08 late masks"
    ),
    pytest.param({"global_batch_size": None}, "--global-batch-size is not set", {"global_batch_size": 1}, id="no batch size"),
    pytest.param({"samples_per_prompt": 3}, "same thing with two values", {"samples_per_prompt": 2}, id="two group sizes"),
]


@pytest.mark.parametrize(("refused", "message", "allowed"), SETTINGS)
def test_a_setting_that_ignores_or_replaces_rollout_ids_is_refused(host, refused, message, allowed):
    with pytest.raises(ConfigError, match=message):
        convert_samples_to_train_data(args_of(host, **refused), step_s())
    convert_samples_to_train_data(args_of(host, **allowed), step_s())


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ({"delay_split_train_data_by_dp": True}, "--delay-split-train-data-by-dp"),
        ({"indep_dp": True}, "--indep-dp"),
        ({"train_backend": "fsdp"}, "--train-backend fsdp"),
    ],
)
def test_a_split_of_miles_that_looks_at_no_rollout_id_is_refused(monkeypatch, refused, message):
    put_modules(monkeypatch, miles_module())
    with pytest.raises(ConfigError, match=message):
        convert_samples_to_train_data(args_of("miles", **refused), step_s())
    convert_samples_to_train_data(args_of("miles"), step_s())


def test_multimodal_samples_are_refused_in_miles_and_scheduled_by_rollout_in_slime(host):
    samples = step_s(multimodal_train_inputs=[None, {"pixels": 1}, None, None])
    if host == "miles":
        with pytest.raises(ConfigError, match="samples with multimodal_train_inputs with --custom-convert"):
            convert_samples_to_train_data(args_of(host), samples)
    else:
        convert_samples_to_train_data(args_of(host), samples)


def test_a_group_size_is_not_held_against_a_step_counted_in_prompts(host):
    """1 prompt a step is no multiple of 2 samples a prompt, and needs to be none."""
    args = args_of(host, global_batch_size=1, samples_per_prompt=2)
    assert convert_samples_to_train_data(args, step_s())["rollout_mask_sums"] == [6, 6, 1, 1]


def test_arguments_of_no_host_are_refused():
    args = args_of("slime")
    del args.rollout_batch_size
    with pytest.raises(ConfigError, match="is a hook of miles and slime"):
        convert_samples_to_train_data(args, step_s())


DATA = [
    pytest.param(lambda: make_samples([1] * 4, [None] * 4), "4 of 4 samples have no group_index", id="FB-17 no group"),
    pytest.param(lambda: make_samples([1] * 4, [1, 1, 2, None]), "first is sample 3", id="FB-17 mixed None"),
    pytest.param(lambda: make_samples([1] * 4, ["a", "a", "b", "b"]), "group_index 'a': it becomes a rollout id", id="a name"),
    pytest.param(lambda: make_samples([1] * 3, [1, 1, 2]), "prompt 2 has 1 of samples_per_prompt=2", id="FB-17 incomplete"),
    pytest.param(
        lambda: make_samples([1] * 2, [1, 1]), "1 prompts do not fill one step of --global-batch-size 2", id="FB-07 too few"
    ),
    pytest.param(lambda: step_s(reward=[float("nan"), 1.0, 1.0, 1.0]), "after the host's normalisation", id="FB-17 a NaN of n = 1"),
    pytest.param(lambda: make_samples([0] * 4, [1, 1, 2, 2]), "not a single unmasked token", id="nothing to learn from"),
]


@pytest.mark.parametrize(("refused", "message"), DATA)
def test_samples_that_make_no_prompts_are_refused(host, refused, message):
    with pytest.raises(DataError, match=message):
        convert_samples_to_train_data(args_of(host), refused())


def test_incomplete_groups_pass_where_they_are_allowed(host):
    args = args_of(host)
    args.samples_per_prompt, args.allow_partial_prompt_groups = "2", True
    assert convert_samples_to_train_data(args, make_samples([1] * 3, [1, 1, 2]))["rollout_mask_sums"] == [2, 2, 1]


def other_signature(module: ModuleType) -> None:
    module.convert_samples_to_train_data = lambda args, samples: {}


def moved_away(module: ModuleType) -> None:
    del module.convert_samples_to_train_data


def without_rollouts(module: ModuleType) -> None:
    def convert(args, samples, metadata, custom_convert_samples_to_train_data_func, custom_reward_post_process_func):
        return {"rewards": [], "loss_masks": []}

    module.convert_samples_to_train_data = convert


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_signature, "takes other arguments"),
        (moved_away, "has no convert_samples_to_train_data"),
        (without_rollouts, "emits no rollout_ids, rollout_mask_sums"),
    ],
)
def test_another_version_of_miles_is_refused_with_the_other_hook_as_the_way_out(monkeypatch, change, message):
    module = miles_module()
    change(module)
    put_modules(monkeypatch, module)
    with pytest.raises(ConfigError, match=message) as caught:
        convert_samples_to_train_data(args_of("miles"), step_s())
    assert "megatron_rl.hooks.reward_post_process" in str(caught.value)


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
