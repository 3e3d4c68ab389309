"""SkyRL: our losses in its own table of policy losses; its driver has put the aggregation into the advantages.

    python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=megatron_rl.hosts.skyrl \\
        trainer.algorithm.policy_loss_type=megatron_rl.<loss> trainer.algorithm.loss_reduction=<SkyRL's name of the aggregation> \\
        megatron_rl.importance_correction=tis megatron_rl.importance_correction_high=2

Words that begin with megatron_rl. are for the loss alone: the entrypoint takes them off the line, as SkyRL refuses what it does not
have, and they travel to the workers with the loss.

What SkyRL does with advantages, and with the number that a loss returns; D data-parallel ranks, M micro-batches, weights w_i:

    driver: A_i x w_i, over the mini-batch; worker: x M D; Megatron: x c / M; DDP: mean over D c ranks -> sum

So a loss returns the plain sum over tokens of what it is given, and must be proportional to the advantage. KL and entropy are
SkyRL's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import CorrectionSettings, ImportanceCorrection, LossAggregation, PolicyLossConfig, counted_twice
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.dense_rows import (
    CORRECTION_SETTINGS,
    is_proportional,
    loss_of_rows,
    read_config,
    signature_problem,
    tell_once,
)
from megatron_rl.hosts.given import Given
from megatron_rl.hosts.sampling import SamplingVerdict, judge_sampling, readers_of, value_at
from megatron_rl.hosts.sections import SKYRL
from megatron_rl.hosts.settings_line import read_overrides
from megatron_rl.loss_hub import PolicyLoss, get_loss_aggregation, get_policy_loss, needs_rollout_log_probs, policy_loss_names
from megatron_rl.step_metrics import finalise_metrics

PROBED = "NovaSky-AI/SkyRL a9564572e"
PREFIX, DOOR, ALGORITHM = "megatron_rl.", "trainer.override_entrypoint=", "trainer.algorithm."
ENTRY, UTILITIES = "skyrl.train.entrypoints.main_base", "skyrl.backends.skyrl_train.utils"
TABLES, CORRECTIONS = f"{UTILITIES}.ppo_utils", f"{UTILITIES}.off_policy_correction_utils"
# SkyRL's loss_reduction -> our aggregation.
REDUCTIONS = {
    "sequence_mean": LossAggregation.SAMPLE_MEAN,
    "prompt_mean": LossAggregation.PROMPT_MEAN,
    "token_mean": LossAggregation.TOKEN_MEAN,
    "seq_mean_token_sum_norm": LossAggregation.CONSTANT,
}
DIVISOR = "max_seq_len"
# Where a rollout is more than one row of the batch: a turn is one.
STEP_WISE = "generator.step_wise_trajectories"
SEVERAL_ROWS = f"{STEP_WISE}=true"
# Settings of SkyRL's algorithm that our losses read, and their defaults. Other parameters of a loss are words of ours.
CLIPS = {"eps_clip_low": 0.2, "eps_clip_high": 0.2}
# Our parameter -> (SkyRL's setting, its default).
PARAMETERS = {
    "clip_ratio_c": ("clip_ratio_c", 3.0),
    "sapo_temperature_positive": ("sapo.tau_pos", 1.0),
    "sapo_temperature_negative": ("sapo.tau_neg", 1.05),
}
ARGUMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    TABLES: {
        "ppo_policy_loss": ("log_probs", "old_log_probs", "advantages", "config", "loss_mask", "rollout_logprobs"),
        "apply_loss_reduction_to_advantages_minibatch": (
            *("advantages", "loss_mask", "loss_reduction", "micro_batch_size", "max_seq_len", "prompt_boundaries"),
        ),
    },
    CORRECTIONS: {
        "off_policy_correction_enabled": ("off_policy_correction",),
        "apply_off_policy_correction": ("loss", "old_log_probs", "rollout_logprobs", "loss_mask", "off_policy_correction"),
    },
}


def loss_names() -> list[str]:
    """The losses that SkyRL's scaled advantages can weigh."""
    return [name for name in policy_loss_names() if "." not in name and is_proportional(get_policy_loss(name))]


def own_words(words: Sequence[str]) -> dict[str, Any]:
    """The settings of the loss among the words of a launch line, megatron_rl.<setting>=<value>, by our names."""
    return {name.removeprefix(PREFIX): value for name, value in read_overrides([w for w in words if w.startswith(PREFIX)]).items()}


def typed_clips(words: Sequence[str]) -> tuple[str, ...]:
    """Those of CLIPS among the words of a launch line. SkyRL has its settings from there alone."""
    return tuple(name for name in CLIPS if f"{ALGORITHM}{name}" in read_overrides(words))


def own_settings(loss: PolicyLoss) -> tuple[str, ...]:
    """What words of ours may set: the correction, and the loss's parameters that SkyRL has no name for."""
    return (*CORRECTION_SETTINGS, *(one.name for one in loss.parameters if one.name not in PARAMETERS))


def _why_not(short: str) -> str:
    """Why a name behind our prefix is no loss in SkyRL."""
    loss, _, aggregation = short.rpartition(".")
    reductions = {str(ours): theirs for theirs, ours in REDUCTIONS.items()}
    if loss in loss_names() and aggregation in reductions:
        remedy = f"type {ALGORITHM}policy_loss_type={PREFIX}{loss} {ALGORITHM}loss_reduction={reductions[aggregation]}"
        return f"in SkyRL the aggregation is loss_reduction, and no part of this name; {remedy}"
    if "." in short:
        return "SkyRL's workers import megatron_rl, and no module of yours: a loss of your own is not offered"
    if short in policy_loss_names():
        return "it is not proportional to the advantage, which carries the weights in SkyRL"
    return "there is no such loss"


def read_settings(
    algorithm: Any, own: Mapping[str, Any], *, is_corrected: bool, typed: Collection[str] | None = None
) -> PolicyLossConfig:
    """Our settings from SkyRL's algorithm config and our own words. Raises one ConfigError with every problem.

    is_corrected: SkyRL's off_policy_correction is on. typed: those of CLIPS on the launch line; None: not known."""
    name, reduction = str(algorithm.policy_loss_type), algorithm.loss_reduction
    if name.removeprefix(PREFIX) not in loss_names() or not name.startswith(PREFIX):
        why = _why_not(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else "it is not a loss of megatron_rl; choose one"
        raise ConfigError(
            f"trainer.algorithm.policy_loss_type={name}: {why}. Losses: {', '.join(PREFIX + n for n in loss_names())}"
        )
    if reduction not in REDUCTIONS:
        raise ConfigError(
            f"trainer.algorithm.loss_reduction={reduction}: ours are {', '.join(REDUCTIONS)}; token_mean_legacy divides by the "
            "tokens of a micro-batch, so its weights depend on the micro-batch size"
        )
    loss, record = get_policy_loss(name.removeprefix(PREFIX)), get_loss_aggregation(REDUCTIONS[reduction])

    def given(setting: str, default: Any = None) -> Given:
        is_typed = None if typed is None or setting not in CLIPS else setting in typed
        return Given(f"{ALGORITHM}{setting}", functools.reduce(getattr, setting.split("."), algorithm), default, is_typed)

    low, high = (given(*clip) for clip in CLIPS.items())
    config, problems = read_config(
        f"loss_reduction={reduction}",
        loss.name,
        record.name,
        (low, high),
        {ours: given(*theirs) for ours, theirs in PARAMETERS.items()}
        | {name: Given(f"{PREFIX}{name}", own.get(name)) for name in own_settings(loss) if name not in CORRECTION_SETTINGS},
        given(DIVISOR) if record.takes_divisor else Given(DIVISOR, None),
        "{name}={value} on the launch line",
        **{name: value for name, value in own.items() if name in CORRECTION_SETTINGS},
    )
    for name in own:
        if name not in own_settings(loss):
            theirs = f"set trainer.algorithm.{PARAMETERS[name][0]}" if name in PARAMETERS else f"{loss.name} has "
            allowed = "" if name in PARAMETERS else ", ".join(f"{PREFIX}{one}" for one in own_settings(loss))
            problems.append(f"{PREFIX}{name}={own[name]} has no effect: {theirs}{allowed}")
    correction = CorrectionSettings.of(config)
    problems += correction.problems()
    if is_corrected and correction.is_on:
        problems.append(
            f"{PREFIX}importance_correction={correction.kind} beside trainer.algorithm.off_policy_correction: two corrections in "
            "one launch; remove one of them"
        )
    if loss.anchor == "rollout" and is_corrected:
        problems.append(counted_twice("", loss.name, "trainer.algorithm.off_policy_correction"))
    elif loss.anchor == "rollout" and correction.kind != ImportanceCorrection.NONE:
        problems.append(counted_twice(correction.kind, loss.name, f"{PREFIX}importance_correction={correction.kind}"))
    if problems:
        raise ConfigError(problems)
    return config


def judge_sampler(config: PolicyLossConfig, value_of: Callable[[str], Any], *, is_corrected: bool) -> SamplingVerdict:
    """value_of: a setting of SkyRL by its dotted name; None: not set."""
    theirs = ["trainer.algorithm.off_policy_correction"] * is_corrected
    return judge_sampling("skyrl", value_of, [*readers_of(config), *theirs])


def corrects(algorithm: Any) -> bool:
    return bool(import_module(CORRECTIONS).off_policy_correction_enabled(algorithm.off_policy_correction))


def compute_loss(
    name: str,  # of ours
    log_probs: Tensor,  # [S, R] with gradient: whole responses, on each context-parallel rank
    old_log_probs: Tensor,  # [S, R]
    advantages: Tensor,  # [S, R] with the weights in them
    config: Any,
    loss_mask: Tensor | None = None,  # [S, R]
    rollout_logprobs: Tensor | None = None,  # [S, R]
    *,
    own: Mapping[str, Any] | None = None,  # words of ours
    typed: Collection[str] | None = None,  # see read_settings
) -> tuple[Tensor, dict[str, float]]:  # 0-d with gradient, SkyRL's names of metrics
    """SkyRL's policy loss of one micro-batch: sum_i sum_t m_it u_it l_it, u: SkyRL's own off-policy correction, or ours.

    Masked values may be anything. Communication: none. Synchronises once, as SkyRL's own losses do for their metrics.
    Raises ConfigError for settings that are not honoured, and without the sampler's log-probabilities where they are needed.
    """
    is_weighed = corrects(config)
    settings = read_settings(config, own or {}, is_corrected=is_weighed, typed=typed)
    needs_sampler = needs_rollout_log_probs(settings)
    mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
    weights, metrics, sampled = None, {}, None
    if is_weighed or needs_sampler:
        if rollout_logprobs is None:
            raise ConfigError(
                f"SkyRL's batch has no rollout_logprobs, which {PREFIX}{name} or a correction needs: set "
                "generator.sampling_params.logprobs=1"
            )
        sampled = torch.where(mask, rollout_logprobs, 0.0)
    if is_weighed:
        old = torch.where(mask, old_log_probs, 0.0)
        given = (torch.ones_like(old), old, sampled, mask.float(), config.off_policy_correction)
        weights, kept, metrics = import_module(CORRECTIONS).apply_off_policy_correction(*given)
        weights = weights * kept
    rows = (log_probs, old_log_probs, advantages, mask)
    output = loss_of_rows(settings, None, *rows, importance_weights=weights, rollout_log_probs=sampled if needs_sampler else None)
    regularizers = "KL and entropy are SkyRL's, means over micro-batches"
    tell_once(f"policy_loss_type={PREFIX}{name} in SkyRL", settings, None, regularizers, several=SEVERAL_ROWS)
    found = finalise_metrics(output.metrics) if output.metrics is not None else {}
    return output.loss, {"clip_ratio": found.get("policy/clipped_ratio_fraction", 0.0), **metrics}


# The door


def contract_problems() -> Iterator[str]:
    """What SkyRL lacks of the contract that our losses are written for."""
    for path, functions in ARGUMENTS.items():
        module = import_module(path)
        for name, arguments in functions.items():
            found = getattr(module, name, None)
            problem = f"{path} has no {name}" if found is None else signature_problem(name, found, arguments)
            if problem:
                yield f"{problem} ({PROBED})"


def register(registry: Any, own: Mapping[str, Any], typed: Collection[str] | None = None) -> None:
    """Adds our losses to SkyRL's PolicyLossRegistry. It sends them, with our words, to workers, which must have this package."""
    for name in loss_names():
        registry.register(f"{PREFIX}{name}", functools.partial(compute_loss, name, own=own, typed=typed))


def main() -> None:
    """What SkyRL's entrypoint calls for trainer.override_entrypoint: the same entrypoint, with our losses in its table.

    Ends the process, with every problem, before Ray starts; with MEGATRON_RL_CHECK=1 with doctor's report and exit code.
    """
    launch = import_module("megatron_rl.hosts.launch")  # not at the top: SkyRL's workers import this module, and need no launcher
    if launch.is_check():
        raise SystemExit(launch.report(ENTRY, sys.argv[1:]))
    own, typed = own_words(sys.argv[1:]), typed_clips(sys.argv[1:])
    sys.argv[1:] = [word for word in sys.argv[1:] if not word.startswith((DOOR, PREFIX))]
    entry, tables = import_module(ENTRY), import_module(TABLES)
    try:
        if problems := [*contract_problems()]:
            raise ConfigError(problems)
        # Other versions of SkyRL may have more names; this one refuses those that it does not have.
        rows = SKYRL.judge(read_overrides(sys.argv[1:]), may_have_more=True)
        if problems := [f"{row.subject}: {row.text}" for row in rows if row.is_wrong]:
            raise ConfigError(problems)
        config = entry.SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
        is_corrected = corrects(config.trainer.algorithm)
        settings = read_settings(config.trainer.algorithm, own, is_corrected=is_corrected, typed=typed)
        sampling = judge_sampler(settings, functools.partial(value_at, config), is_corrected=is_corrected)
        if sampling.problems:
            raise ConfigError(sampling.problems)
    except ConfigError as error:
        raise SystemExit("\n".join(f"megatron_rl: ConfigError: {problem}" for problem in error.problems)) from None
    for text in sampling.warnings:
        print(f"megatron_rl: {text}", file=sys.stderr, flush=True)
    register(tables.PolicyLossRegistry, own, typed)
    entry.main()
