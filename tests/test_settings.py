"""Settings from a launch line or a merged YAML file: nothing is dropped, ignored or changed on the way, and each has an effect."""

from __future__ import annotations

import contextlib
import functools
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from typing import NamedTuple

import pytest
from helpers import error_of, pool_of
from loss_backends import HAS_TRITON, counted_launches
from test_forward_step import SeenShapes
from test_fused_head import most_rows
from trainer_cases import STILL, gradients_of, ragged_step, relative_difference, tiny_trainer, whole

from megatron_rl.arguments import add_megatron_rl_args, validate_megatron_rl_args
from megatron_rl.config import LaunchMethod, PolicyLossConfig, flag_fields
from megatron_rl.declare import clip_of, declared_parameters
from megatron_rl.errors import ConfigError
from megatron_rl.validation import field_of, flag_of

HIDDEN, VOCABULARY = 32, 246  # no other sizes of the tiny model's tensors
ALL = ("reducer", "custom_loss", "megatron_lm", "train")
NOT_REDUCER = ALL[1:]
OF_MEGATRON = ALL[2:]


class Effect(NamedTuple):
    """What a flag does: the field's value, the methods that honour it, and what of a step of `train` differs with it."""

    text: str | None  # on a launch line
    value: object
    methods: tuple[str, ...]
    changes: str  # "" where another test sees it
    beside: str = ""  # what the launch needs besides, with the flag and without
    is_bf16: bool = False
    has_experts: bool = False


TIS = "--importance-correction tis"
OF_GROUPS = "--samples-per-prompt 3"
EFFECTS = {
    "--policy-loss": Effect("gspo", "gspo", NOT_REDUCER, "gradient"),
    "--loss-aggregation": Effect("token_mean", "token_mean", ALL, "gradient"),
    "--loss-aggregation-divisor": Effect("16", 16.0, ALL, "gradient", "--loss-aggregation constant"),
    "--samples-per-prompt": Effect("3", 3, ALL, "error"),
    "--allow-partial-prompt-groups": Effect(None, True, ALL, "error", OF_GROUPS),
    "--one-sample-per-rollout": Effect(None, True, ("megatron_lm",), ""),  # tests/test_batch.py
    "--clip-ratio-low": Effect("0.02", 0.02, NOT_REDUCER, "gradient"),
    "--clip-ratio-high": Effect("0.02", 0.02, NOT_REDUCER, "gradient"),
    "--policy-temperature": Effect("0.5", 0.5, NOT_REDUCER, "gradient"),
    "--importance-correction": Effect("icepop", "icepop", NOT_REDUCER, "gradient"),
    "--importance-correction-level": Effect(
        *("sequence_mean", "sequence_mean", NOT_REDUCER, "gradient", f"{TIS} --importance-correction-high 1.5")
    ),
    "--importance-correction-low": Effect("0.95", 0.95, NOT_REDUCER, "gradient", TIS),
    "--importance-correction-high": Effect("1.1", 1.1, NOT_REDUCER, "gradient", TIS),
    "--off-policy-sequence-delta": Effect("0", 0.0, NOT_REDUCER, "gradient"),
    "--kl-coefficient": Effect("5e-1", 0.5, NOT_REDUCER, "gradient"),
    "--kl-estimator": Effect("k2", "k2", NOT_REDUCER, "gradient", "--kl-coefficient 0.5"),
    "--sampling-support": Effect("refuse", "refuse", ("custom_loss", "train"), ""),  # tests/test_train_loop.py
    "--entropy-coefficient": Effect(".5", 0.5, NOT_REDUCER, "gradient"),
    "--distillation": Effect("topk", "topk", OF_MEGATRON, "gradient"),
    "--distillation-divergence": Effect("forward_kl", "forward_kl", OF_MEGATRON, "gradient", "--distillation topk"),
    "--distillation-beta": Effect("0.9", 0.9, OF_MEGATRON, "gradient", "--distillation topk --distillation-divergence jsd"),
    "--distillation-coefficient": Effect("3", 3.0, OF_MEGATRON, "gradient", "--distillation topk"),
    "--policy-metrics": Effect("none", "none", NOT_REDUCER, "metrics"),
    "--policy-loss-backend": Effect("triton", "triton", NOT_REDUCER, "kernels"),
    "--fused-lm-head-loss": Effect(None, True, NOT_REDUCER, "rows of logits"),
    "--max-logits-bytes": Effect(
        *(str(8 * 4 * VOCABULARY), 8 * 4 * VOCABULARY, NOT_REDUCER, "rows of logits", "--fused-lm-head-loss")
    ),
    "--fp32-lm-head": Effect(None, True, ALL, "gradient", is_bf16=True),
    "--skip-old-log-probs": Effect(None, True, ("custom_loss",), ""),  # tests/test_hidden_states_proxy.py
    "--docs-per-step": Effect("64", 64, ("train",), ""),  # tests/test_accumulation.py
    "--empty-step": Effect("skip", "skip", ("train",), ""),  # tests/test_train_loop.py
    "--router-aux-loss": Effect("exact", "exact", OF_MEGATRON, "gradient", has_experts=True),
    "--gradient-divisor": Effect("num_samples", "num_samples", OF_MEGATRON, "gradient"),
    "--watchdog": Effect("raise", "raise", ("train",), ""),  # tests/test_watchdog.py
    # A parameter of own_losses.py, which is declared inside a test alone.
    "--scale": Effect("0.5", 0.5, NOT_REDUCER, "gradient", "--policy-loss own_losses.reinforce"),
}


FLAGS = [flag_of(field.name) for field in flag_fields()]


def parse(*argv: str) -> Namespace:
    return add_megatron_rl_args(ArgumentParser(allow_abbrev=False)).parse_args(argv)


def from_yaml(**settings: object) -> Namespace:
    """A host's own arguments with a merged file on top: only the keys of the file are there."""
    return Namespace(**{"loss_aggregation": "sample_mean", "lr": 1e-6, "model_name": "m", **settings})


def test_the_parser_comes_back_and_an_unset_flag_is_none():
    """Megatron uses what its extra_args_provider returns; a default here would hide a host's own flag."""
    parser = ArgumentParser()
    assert add_megatron_rl_args(parser) is parser
    values = vars(parser.parse_args([]))
    assert set(values) == {field.name for field in flag_fields()} | set(declared_parameters())
    assert set(values.values()) == {None}


def test_the_loss_on_the_launch_line_gives_the_parser_its_flags(monkeypatch):
    monkeypatch.delitem(sys.modules, "own_losses", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--policy-loss", "own_losses.truncated", "--ratio-cap", "2.5"])
    assert add_megatron_rl_args(ArgumentParser()).parse_args().ratio_cap == 2.5


def setting_of(config: PolicyLossConfig, flag: str) -> object:
    """A field, or a parameter of the loss."""
    return getattr(config, field_of(flag), config.loss_parameters.get(field_of(flag)))


def argv_of(flag: str) -> list[str]:
    effect = EFFECTS[flag]
    return [*effect.beside.split(), flag, *([] if effect.text is None else [effect.text])]


@pytest.mark.parametrize("flag", dict.fromkeys([*FLAGS, *EFFECTS]))
def test_each_flag_is_honoured_or_refused_by_name(flag, own_losses):
    """FB-69: a flag that is accepted and has no effect. A new flag without a row in EFFECTS fails here, and a row whose flag was
    renamed: scripts in other people's repositories spell these flags."""
    effect, args = EFFECTS[flag], parse(*argv_of(flag))
    for method in LaunchMethod:
        if method not in effect.methods:
            with pytest.raises(ConfigError, match=f"would be ignored.*{flag}"):
                validate_megatron_rl_args(args, method)
            continue
        config, without = (setting_of(one, flag) for one in (validate_megatron_rl_args(args, method), PolicyLossConfig()))
        assert config == effect.value and without != effect.value, method
        assert type(config) is type(effect.value), method


def test_a_launcher_that_drops_our_flags_is_found_out():
    """slime ignores unknown flags, so --loss-aggregation constant would train sample_mean without a word."""
    with pytest.raises(ConfigError, match="dropped --loss-aggregation.*megatron_rl.hosts.launch"):
        validate_megatron_rl_args(Namespace(lr=1e-6, samples_per_prompt=8))


def test_a_key_with_dashes_is_found_out():
    """A YAML key is set on args as it is spelled: with dashes nobody would ever read it."""
    args = from_yaml(**{"clip-ratio-low": 0.1, "watchdog": None})
    with pytest.raises(ConfigError, match="clip-ratio-low=0.1 has no effect.*write clip_ratio_low"):
        validate_megatron_rl_args(args)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("loss_aggregation_divisor", "8192", 8192.0),
        ("kl_coefficient", "1e-3", 1e-3),  # YAML 1.1 reads it as text
        ("policy_temperature", " .7 ", 0.7),
        ("samples_per_prompt", "8", 8),
        ("allow_partial_prompt_groups", "False", False),
        ("policy_metrics", "none", "none"),  # the name is not a missing value
        ("clip_ratio_high", None, None),
    ],
)
def test_text_from_a_yaml_file_is_read(name, text, value):
    needed = {"loss_aggregation_divisor": {"loss_aggregation": "constant"}}.get(name, {"samples_per_prompt": "8"})
    found = getattr(validate_megatron_rl_args(from_yaml(**{**needed, name: text})), name)
    assert found == value and type(found) is type(value)


NO_NUMBERS = [True, "8k", "nan", "inf", float("nan"), float("inf"), "1e999", 10**400, "", "1_000", "0x10", "true", [8], "-"]
NONSENSE = {
    **dict.fromkeys(("loss_aggregation_divisor", "clip_ratio_low", "policy_temperature", "kl_coefficient"), NO_NUMBERS),
    "samples_per_prompt": [True, "8k", 8.0, "8.0", "", 0, -1, [8], "9" * 30],
    "allow_partial_prompt_groups": ["yes", "1", 1, 0, "on", ""],
}


@pytest.mark.parametrize("name", NONSENSE)
def test_what_is_no_number_no_count_or_no_switch_is_refused(name):
    """FB-12: a divisor of True or "8k" is a mistake, not 1 or 8."""
    given = {"loss_aggregation": "constant", "loss_aggregation_divisor": 1, "samples_per_prompt": 8}
    for value in NONSENSE[name]:
        with pytest.raises(ConfigError, match=f"{name}=.* must be"):
            validate_megatron_rl_args(from_yaml(**given | {name: value}))


@pytest.mark.parametrize(
    ("argv", "ratios"),
    [
        ([], (0.2, 0.2)),
        (["--policy-loss", "gspo", "--clip-ratio-high", "1e-3"], (3e-4, 1e-3)),
        (["--clip-ratio-low", "0"], (0.0, 0.2)),  # a value, not unset
        (["--policy-loss", "cispo"], (1.0, 0.28)),  # without a lower bound
    ],
)
def test_the_clip_default_is_that_of_the_loss(argv, ratios):
    """FB-72: one default of 0.2 for every loss, under which GSPO never clips."""
    assert clip_of(validate_megatron_rl_args(parse(*argv))) == ratios


# What of a step differs

# With a loss of the router whose mean over two micro-batches is not the mean over their tokens.
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_z_loss_coeff": 1.0}
pool = pool_of(1)


def step_of(config, is_bf16, has_experts):
    """What can be seen of one step of two micro-batches."""
    experts = EXPERTS if has_experts else {}
    trainer = tiny_trainer(config, vocab_size=VOCABULARY, hidden_size=HIDDEN, bf16=is_bf16, experts=experts, **STILL)
    # Near log(1 / 246) = -5.5, and equal for every setting: the policy's own would move with some of them.
    old = [replace(s, old_log_probs=[-5.5 + 0.1 * (-1) ** t for t in range(len(s.loss_mask))]) for s in ragged_step()]
    step = [
        replace(
            s,
            ref_log_probs=[value - 0.2 for value in s.old_log_probs],
            rollout_log_probs=[value + 0.3 * (t % 2) - 0.1 for t, value in enumerate(s.old_log_probs)],
        )
        for s in old
    ]
    if config.distillation == "topk":
        rows = {"teacher_topk_ids": [0, 3], "teacher_topk_log_probs": [-0.5, -2.0]}
        step = [replace(s, **{name: [row] * len(s.loss_mask) for name, row in rows.items()}) for s in step]
    metrics, seen = {}, SeenShapes()
    with seen, counted_launches() if HAS_TRITON else contextlib.nullcontext([]) as launches:
        error = error_of(lambda: metrics.update(trainer.step([step[:3], step[3:]])))
    return {
        "error": error,
        "metrics": sorted(metrics),
        "gradient": whole([gradients_of(trainer)]) if not error else {},
        "kernels": bool(launches) or "triton" in error,
        "rows of logits": most_rows(seen, VOCABULARY),
    }


def config_of(*argv: str) -> PolicyLossConfig:
    import own_losses

    own_losses.declare()
    return validate_megatron_rl_args(parse(*argv), LaunchMethod.TRAIN)


@functools.cache
def step_without(beside, is_bf16, has_experts):
    """Of what several rows share."""
    return step_of(config_of(*beside.split()), is_bf16, has_experts)


def steps_on_rank(rank, flag):
    """(without the flag, with it)."""
    effect = EFFECTS[flag]
    beside = effect.beside + " --loss-aggregation-divisor 8" * ("constant" in effect.beside)
    return step_without(beside, *effect[5:]), step_of(config_of(*argv_of(flag)), *effect[5:])


@pytest.mark.megatron
@pytest.mark.parametrize("flag", [flag for flag, effect in EFFECTS.items() if effect.changes])
def test_a_setting_changes_what_its_row_says(pool, flag):
    """FB-69: accepted, written into the configuration, and read by nobody."""
    [(without, with_it)], changes = pool.run(steps_on_rank, flag), EFFECTS[flag].changes
    assert with_it["error"] == without["error"] == "" or changes in ("error", "kernels")
    if changes == "gradient":
        assert relative_difference(with_it["gradient"], without["gradient"]) > 1e-3
    else:
        assert with_it[changes] != without[changes]
    if flag == "--max-logits-bytes":
        assert with_it["rows of logits"] <= 8
