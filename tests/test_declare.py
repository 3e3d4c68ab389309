"""The registries: what may be registered, and how a name is found."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from megatron_rl import register_correction, register_kl_estimator
from megatron_rl.config import PolicyLossConfig
from megatron_rl.count import StepTotals
from megatron_rl.declare import Parameter, get_policy_loss, import_dotted, policy_loss_names, register_policy_loss
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import nemo_rl, skyrl, verl
from megatron_rl.losses.corrections import CORRECTIONS
from megatron_rl.losses.kl import KL_ESTIMATORS
from megatron_rl.testing import oracle
from megatron_rl.validation.advice import clip_of_a_mean_clips, numbers_in_words
from megatron_rl.weights import get_loss_aggregation, loss_aggregation_names, register_loss_aggregation, sample_token_weights

# The default clips of published numbers; another loss need not be here.
CLIPS = {
    "grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 0.28),
    "gspo_token": (3e-4, 4e-4),
    "gmpo": (1 - math.exp(-0.4), math.exp(0.4) - 1),
    **dict.fromkeys(("sapo", "dppo_tv", "dppo_kl", "dro", "reinforce", "topr", "vespo")),
}


def root_mean(token_counts, totals, *, prompt_token_counts, divisor):
    return 1.0 / (totals.num_samples * token_counts.sqrt())


def values(log_ratio, advantages):
    return -advantages * log_ratio


def kl(log_probs, ref_log_probs):
    return log_probs - ref_log_probs


def test_the_registries_start_with_the_built_in_names():
    assert {name for name in oracle.LOSSES if get_policy_loss(name).level == "sequence"} == oracle.ONE_RATIO_A_SAMPLE.keys()
    assert {name: get_policy_loss(name).clip_ratios for name in CLIPS} == CLIPS
    assert set(nemo_rl.KINDS.values()) <= set(CORRECTIONS.names())
    assert {*skyrl.REDUCTIONS.values(), *verl.AGG_MODES} <= set(loss_aggregation_names())


def test_a_users_aggregation_is_found_by_its_name():
    """FB-04: what is registered is as good as a built-in: same lookup, same masking of empty samples, same dtype."""
    register_loss_aggregation("root")(root_mean)
    weights = sample_token_weights("root", torch.tensor([4, 0, 1]), StepTotals(3, None, 5))
    assert weights.tolist() == pytest.approx([1 / 6, 0.0, 1 / 3]) and weights.dtype == torch.float32
    assert "root" in loss_aggregation_names()


def test_a_users_functions_are_reachable_by_dotted_name(own_losses):
    """A flag value with a dot is imported as module.function; test_own.py computes with them."""
    odd = get_loss_aggregation("own_losses.odd")
    assert (odd.formula, odd.needs, odd.takes_divisor) == (None, None, None)
    assert get_policy_loss("own_losses.heeding") is get_policy_loss("own_heeding")
    assert {"own_losses.heeding", "own_heeding"} <= set(policy_loss_names())


def test_a_dotted_name_of_a_registered_function_is_a_second_name_for_it():
    """Registering twice under two names would be two losses with two default clips."""
    entry = get_policy_loss("megatron_rl.losses.gspo.gspo")
    assert entry is get_policy_loss("gspo")
    assert get_loss_aggregation("megatron_rl.weights.token_mean") is get_loss_aggregation("token_mean")


def add_loss(*arguments, function=values, **options):
    return lambda: register_policy_loss(*arguments, **options)(function)


UNDECLARED = "is not declared: decorate bounded_log_ratio with @megatron_rl.register_"
REFUSED = [  # (message, call)
    ("policy loss 'ppo' is not registered; known: .*gspo", lambda: get_policy_loss("ppo")),
    ("known: sample_mean, prompt_mean", lambda: get_loss_aggregation("sum")),
    ("module 'no_such_module' cannot be imported", lambda: get_policy_loss("no_such_module.f")),
    ("has no 'nothing'", lambda: get_policy_loss("own_losses.nothing")),
    ("is Parameter, not a function", lambda: get_policy_loss("own_losses.SCALE")),
    (
        "is not declared: decorate bounded_log_ratio with @megatron_rl.register_loss",
        lambda: get_loss_aggregation("own_losses.bounded_log_ratio"),
    ),
    (
        "is not declared: decorate bounded_log_ratio with @megatron_rl.register_pol",
        lambda: get_policy_loss("own_losses.bounded_log_ratio"),
    ),
    (
        'register_policy_loss of values has no name: write @megatron_rl.register_policy_loss\\("values"',
        lambda: register_policy_loss(values),
    ),
    ("register_loss_aggregation of root_mean has no name", lambda: register_loss_aggregation(root_mean)),
    (
        "has log_probs at the place of log_ratio: write .log_ratio, advantages, log_probs.",
        add_loss("x", function=lambda log_probs, old_log_probs, advantages: None),
    ),
    ("has advantages at the place of log_ratio", add_loss("x", function=lambda advantages, log_ratio: None)),
    (
        r"'cap'; declare a further number in parameters=\(Parameter\(...\),\), a further vector in needs=",
        add_loss("x", function=lambda log_ratio, advantages, cap: None),
    ),
    ("'plain' has no dot", lambda: import_dotted("plain", "--reward")),
    ("level='turn' of policy loss 'x' is none of token, sequence", add_loss("x", level="turn")),
    (
        "needs='rewards' of policy loss 'x' is none of rollout_log_probs, ref_log_probs, token_counts, entropy, mean_log_ratio",
        add_loss("x", needs=("rewards",)),
    ),
    ("triton='twin' of policy loss 'x' must be the text", add_loss("x", triton="twin")),
    ("triton=3 of policy loss 'x' must be the text module.function", add_loss("x", triton=3)),
    ("'lambda' must be a Python identifier and no reserved word", lambda: Parameter("lambda", 3.0, "a reserved word")),
    ("without triton, whose kernels have no mean of tokens", add_loss("x", needs=("mean_log_ratio",), triton="m.twin")),
    ('"at "sequence" log_ratio is the mean'[1:], add_loss("x", "sequence", needs=("mean_log_ratio",))),
    ('token_clip is for level "sequence" without triton', add_loss("x", token_clip=max)),
    (r"token_clip of policy loss 'x' must accept \(log_ratio, advantages\)", add_loss("x", "sequence", token_clip=lambda x: x)),
    ('token_clip is for level "sequence" without triton', add_loss("x", "sequence", triton="m.twin", token_clip=max)),
    ("declares a name twice among log_ratio, advantages", add_loss("x", parameters=(Parameter("log_ratio", 1.0, "a taken name"),))),
    (r"cap=3.0 must be a finite number in \[-inf, 2\]", lambda: Parameter("cap", 3.0, "a cap", maximum=2.0)),
    ("must be a Python identifier", lambda: Parameter("a cap", 3.0, "a cap")),
    ("'clip_ratio_low' is a setting already", lambda: Parameter("clip_ratio_low", default=0.2, help="")),
    ("clip_ratio_high=-1.0", add_loss("x", clip_ratios=(0.2, -1.0), function=get_policy_loss("grpo").function)),
    ("must be a non-empty string", add_loss("")),
    ("must be a non-empty string", lambda: register_loss_aggregation(3)(root_mean)),
    ("already registered by megatron_rl.losses.grpo", add_loss("grpo")),
    ("already registered by megatron_rl.weights", lambda: register_loss_aggregation("constant")(root_mean)),
    (
        r"policy loss 'x' must accept \(log_ratio, advantages, \*, clip_ratio_low, clip_ratio_high\)",
        add_loss("x", clip_ratios=(0.2, 0.2)),
    ),
    (r"must accept \(log_probs, ref_log_probs\)", lambda: register_kl_estimator("x")(lambda log_probs: log_probs)),
    ("'k3' is already registered by megatron_rl.losses.kl", lambda: register_kl_estimator("k3")(kl)),
    ("must be the text module.function, or None", lambda: register_kl_estimator("x", triton="twin")),
    ("must be the text module.function, or None", lambda: register_kl_estimator("x", triton=kl)),
    ("must be a non-empty string", lambda: register_kl_estimator("")(kl)),
    (
        "is not declared: decorate bounded_log_ratio with @megatron_rl.register_kl_est",
        lambda: KL_ESTIMATORS["own_losses.bounded_log_ratio"],
    ),
    ("must be a name", lambda: KL_ESTIMATORS[3]),
    (r"\['grpo'\].* is not registered", lambda: get_policy_loss(["grpo"])),
    (r"\['mine'\].* is not registered", lambda: get_loss_aggregation(["mine"])),
    (r"must accept \(ratios, low, high\)", lambda: register_correction("x")(lambda ratios: ratios)),
    ("'tis' is already registered by megatron_rl.losses.corrections", lambda: register_correction("tis")(lambda w, low, high: w)),
    (
        r"bounds=\{'turn': \(0, 2\)\} .* must be of levels, token, seq",
        lambda: register_correction("x", bounds={"turn": (0, 2)}),
    ),
    (r"bounds=\{\} .* must be of levels, token, sequence_mean", lambda: register_correction("x", bounds={})),
    ("acts at levels of samples: leave token out", lambda: register_correction("x", weigh_tokens=abs)),
    (
        r"loss aggregation 'x' must accept \(token_counts, totals, \*, prompt_token_counts, divisor\)",
        lambda: register_loss_aggregation("x")(lambda token_counts: None),
    ),
]


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_what_cannot_work_is_refused_with_a_message(own_losses, message, call):
    """FB-73: a function that lacks arguments fails at registration, not in the middle of a run."""
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_cell_of_a_notebook_may_be_run_again():
    def defined(sign: int) -> Callable:
        def mine(log_ratio, advantages):
            return sign * advantages * log_ratio

        return register_policy_loss("of a cell")(mine)

    defined(1)
    again = defined(-1)
    assert get_policy_loss("of a cell").function is again
    with pytest.raises(ConfigError, match="already registered by test_declare"):
        register_policy_loss("of a cell")(values)


def test_registering_the_same_function_again_changes_nothing():
    """A module that is imported twice registers twice."""
    for _ in range(2):
        register_loss_aggregation("root")(root_mean)
        register_policy_loss("plain")(values)
    assert get_policy_loss("plain").function is values


def test_a_file_whose_second_declaration_is_wrong_says_so_at_each_import(tmp_path, monkeypatch):
    """Its first one was registered when the second raised, and is registered once more when the file is imported again."""
    text = "from megatron_rl import register_kl_estimator\n"
    for one, wrong in (("first", ""), ("second", ", triton='twin'")):
        text += f"\n\n@register_kl_estimator('{one}'{wrong})\ndef {one}(log_probs, ref_log_probs):\n    return log_probs\n"
    (tmp_path / "two_of_a_user.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        with pytest.raises(ConfigError, match="must be the text module.function"):
            KL_ESTIMATORS["two_of_a_user.second"]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.ones(3), r"returned \(3,\) torch.float32: it must return a floating point tensor \[S=2\]"),
        (torch.ones(2, 1), r"returned \(2, 1\) torch.float32"),
        (torch.tensor(1.0), r"returned \(\) torch.float32"),
        (torch.ones(2, dtype=torch.int64), r"returned \(2,\) torch.int64"),
        ([1.0, 1.0], "returned list"),
        (None, "returned NoneType"),
        (torch.tensor([1.0, float("nan")]), "gives a weight that is negative or not finite"),
        (torch.tensor([1.0, -0.5]), "gives a weight that is negative or not finite"),
    ],
)
def test_weights_of_a_users_aggregation_are_checked(returned, message):
    register_loss_aggregation("odd")(lambda token_counts, totals, *, prompt_token_counts, divisor: returned)
    with pytest.raises(ValueError, match=message):
        sample_token_weights("odd", torch.tensor([1, 2]), StepTotals(2, None, 3))


def test_an_aggregation_that_writes_into_its_counts_harms_nothing():
    """The counts decide afterwards which samples are empty."""

    @register_loss_aggregation("writes")
    def writes(token_counts, totals, *, prompt_token_counts, divisor):
        weights = 1.0 / token_counts
        token_counts.zero_()
        return weights

    counts = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert sample_token_weights("writes", counts, StepTotals(2, None, 3)).tolist() == [1.0, 0.5]
    assert counts.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("name", policy_loss_names())
def test_a_loss_is_not_warned_of_its_own_clip(name):
    assert list(clip_of_a_mean_clips(PolicyLossConfig(policy_loss=name))) == []


def test_the_numbers_of_a_loss_in_words():
    """A loss without bounds may clip as it says itself."""
    assert numbers_in_words(PolicyLossConfig(policy_loss="reinforce")) == "no clip bounds"
    parameters = {"clip_ratio_c": 3.0}
    assert numbers_in_words(PolicyLossConfig(loss_parameters=parameters)) == "clip 0.2/0.2, clip_ratio_c 3"
    assert numbers_in_words(PolicyLossConfig()) == "clip 0.2/0.2"
