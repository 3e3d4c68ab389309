"""SkyRL: our losses in its own table of policy losses; its driver has put the aggregation into the advantages.

    trainer.override_entrypoint=megatron_rl.hosts.skyrl trainer.algorithm.policy_loss_type=megatron_rl.<loss>

Words that begin with megatron_rl. are for the loss only: the entrypoint takes them off the line, as SkyRL refuses what it does not
have, and they travel to the workers with the loss.

What SkyRL does with advantages, and with the number that a loss returns; D data-parallel ranks, M micro-batches, weights w_i:

    driver: A_i x w_i, over the mini-batch; worker: x M D; Megatron: x c / M; DDP: mean over D c ranks -> sum

SkyRL's driver counts rows. Where a trajectory is several rows, `skyrl_driver` makes the weights of trajectories of theirs. So a
loss returns the plain sum over tokens of what it is given, and must be proportional to the advantage. KL and entropy are SkyRL's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_rl.declare import get_policy_loss
from megatron_rl.errors import ConfigError
from megatron_rl.formula import Formula
from megatron_rl.hosts.choice import DIVISOR, Given, Launch, Offer, Reader, make_launch, read_word, typed_if
from megatron_rl.hosts.contract import AVERAGED, TIMES_CP, Contract, Stage
from megatron_rl.hosts.dense_rows import EACH_ROW, Rollouts, loss_of_rows, metrics_of
from megatron_rl.hosts.heads.skyrl import InWorkers
from megatron_rl.hosts.run import Run
from megatron_rl.hosts.sampler_rule import Sampler
from megatron_rl.hosts.skyrl_driver import METHODS, TRAINER, count_trajectories
from megatron_rl.hosts.start_check import end_after_check, end_with_problems
from megatron_rl.losses.corrections import needs_rollout_log_probs
from megatron_rl.weights import AggregationRecord

TITLE, PROBED = "SkyRL", "NovaSky-AI/SkyRL a9564572e"
COUNTS_ROLLOUTS, WHY_NOT_PER_TOKEN = True, "SkyRL's factors are made for the mean over ranks"
PREFIX, ENTRYPOINT, ALGORITHM = "megatron_rl.", "trainer.override_entrypoint", "trainer.algorithm."
ENTRY, UTILITIES = "skyrl.train.entrypoints.main_base", "skyrl.backends.skyrl_train.utils"
TABLES, CORRECTIONS = f"{UTILITIES}.ppo_utils", f"{UTILITIES}.off_policy_correction_utils"
CONTRACT = Contract(
    TITLE,
    PROBED,
    {
        f"{TABLES}:ppo_policy_loss": ("log_probs", "old_log_probs", "advantages", "config", "loss_mask", "rollout_logprobs"),
        f"{TABLES}:apply_loss_reduction_to_advantages_minibatch": (
            *("advantages", "loss_mask", "loss_reduction", "micro_batch_size", "max_seq_len", "prompt_boundaries"),
        ),
        f"{CORRECTIONS}:off_policy_correction_enabled": ("off_policy_correction",),
        f"{CORRECTIONS}:apply_off_policy_correction": (
            *("loss", "old_log_probs", "rollout_logprobs", "loss_mask", "off_policy_correction"),
        ),
    },
)
LOSS, REDUCTION, STEP_WISE = f"{ALGORITHM}policy_loss_type", f"{ALGORITHM}loss_reduction", "generator.step_wise_trajectories"
# SkyRL's name of an aggregation -> ours. It is told the other name of row_mean, and has the same weights where a trajectory is one
# row.
ROW_MEAN, SEQUENCE_MEAN = "row_mean", "sequence_mean"
REDUCTIONS = {
    SEQUENCE_MEAN: "sample_mean",
    "prompt_mean": "prompt_mean",
    "token_mean": "token_mean",
    "seq_mean_token_sum_norm": "constant",
    ROW_MEAN: "row_mean",
}
# Two settings choose, and the advantages carry the weights.
CARRIED = tuple(REDUCTIONS.values())
OFFER = Offer(title=TITLE, setting=LOSS, prefix=PREFIX, gives=lambda record: record.name in CARRIED, carried=CARRIED)
# Our field -> SkyRL's setting of it and its default.
SETTINGS: dict[str, tuple[str, float | None]] = {
    "clip_ratio_low": ("eps_clip_low", 0.2),
    "clip_ratio_high": ("eps_clip_high", 0.2),
    "clip_ratio_c": ("clip_ratio_c", 3.0),
    "sapo_temperature_positive": ("sapo.tau_pos", 1.0),
    "sapo_temperature_negative": ("sapo.tau_neg", 1.05),
    DIVISOR: ("max_seq_len", None),
}
# SkyRL's correction is on where one of the first is set, or both of the last.
SWITCHES = ("tis_ratio_type", "sequence_mask_metric", "outlier_token_is_threshold_low", "outlier_token_is_threshold_high")
MASK_SWITCHES = ("token_mask_is_threshold_low", "token_mask_is_threshold_high")
# What computes log-probabilities: ours, whichever loss trains, or SkyRL's.
LOG_PROBS, OURS, THEIRS = f"{PREFIX}log_probs", "megatron_rl", "skyrl"
# Its sampler.
SAMPLING, REPLAY = "generator.sampling_params.", f"{ALGORITHM}enable_sample_support_replay"
FILTERS = {"top_p": (1.0,), "top_k": (-1, 0), "min_p": (0.0,)}
PENALTIES = {"repetition_penalty": (1.0,), "presence_penalty": (0.0,), "frequency_penalty": (0.0,), "logit_bias": ("",)}


@dataclass(frozen=True, slots=True)
class Words:
    """Of the launch line, what SkyRL is not told, and what a worker cannot know. settings: ours, by our names."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    reduction: str | None = None
    is_step_wise: bool = False


def stages(weight: Formula, record: AggregationRecord, *, per_token: bool) -> tuple[list[Stage], list[Stage]]:
    driver: Stage = ("driver", weight, "SkyRL scales the sample's advantage, by counts of the mini-batch")
    worker: Stage = ("SkyRL", Formula(M=1, dp=1), "multiplies by micro-batches and data-parallel ranks")
    return [driver, ("loss", Formula(), "adds the tokens")], [worker, TIMES_CP, AVERAGED[1]]


# The settings


def losses() -> list[str]:
    """Those by name that can be trained there."""
    return list(dict.fromkeys(loss for loss, _ in OFFER.pairs()))


def choose(loss: object, reduction: object) -> tuple[str, str]:
    """(loss, aggregation). Raises ConfigError, which lists what there is."""
    names, problems = {f"{PREFIX}{name}": name for name in losses()}, []
    if loss not in names:
        problems.append(f"{LOSS}={loss} is not proportional to the advantage, which has the weights, as {', '.join(names)} are")
    if reduction not in REDUCTIONS:
        problems.append(f"{REDUCTION}={reduction} has not the weights of an aggregation of ours, as {', '.join(REDUCTIONS)} have")
    if problems:
        raise ConfigError(problems)
    return names[str(loss)], REDUCTIONS[str(reduction)]


def read(algorithm: Any, words: Words, whole: Any = None) -> Launch:
    """algorithm: that section of SkyRL's config, in a worker. whole: all of it, in the driver, before Ray. Raises one ConfigError
    with every problem."""
    at, driver = Reader(algorithm, ALGORITHM), Reader(whole)
    loss, aggregation = choose(at("policy_loss_type"), words.reduction or at("loss_reduction"))
    parameters = {parameter.name for parameter in get_policy_loss(loss).parameters}
    # SkyRL's default of a parameter acts; that of a clip does not, as it would be the same for each kind of ratio.
    theirs = {field: at.given(name, None if field in parameters else own) for field, (name, own) in SETTINGS.items()}
    ours = {name: Given(PREFIX + name, value) for name, value in words.settings.items()}
    is_on = [at(f"off_policy_correction.{name}") is not None for name in (*SWITCHES, *MASK_SWITCHES)]
    corrections = [f"{ALGORITHM}off_policy_correction"] if any(is_on[: len(SWITCHES)]) or all(is_on[len(SWITCHES) :]) else []
    return make_launch(
        f"policy_loss_type={PREFIX}{loss} in SkyRL",
        loss,
        aggregation,
        readers=[at, driver],
        theirs=theirs,
        ours=ours,
        corrections=corrections,
        sampler=None if whole is None else sampler_of(driver),
        terms="KL and entropy are SkyRL's, means over micro-batches",
        rollouts=Rollouts(several=f"{STEP_WISE}=true", ids="trajectory") if words.is_step_wise else EACH_ROW,
        token_mean_host=TITLE,
    )


def sampler_of(driver: Reader) -> Sampler:
    return Sampler(
        engine="vLLM",
        mode=str(driver("generator.inference_engine.engine_init_kwargs.logprobs_mode", "raw_logprobs")),
        kept=typed_if({f"{SAMPLING}{name}": off for name, off in FILTERS.items()}, driver),
        changed=typed_if({f"{SAMPLING}additional_kwargs.{name}": off for name, off in PENALTIES.items()}, driver),
        drafted=typed_if({"generator.inference_engine.speculative_config": (), "trainer.mtp.enabled": (False,)}, driver),
        replayed=f"{REPLAY}=true" if driver.switch(REPLAY) else None,
    )


# The loss


class SkyrlLoss:
    """An entry of SkyRL's PolicyLossRegistry. It is pickled to the workers, which must have this package."""

    def __init__(self, name: str, words: Words):
        self.name, self.words, self.run = name, words, Run()
        self.config: Any = None
        self.launch: Launch | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.words)

    def __call__(
        self,
        log_probs: Tensor,  # [S, R] with gradient: whole responses, on each context-parallel rank
        old_log_probs: Tensor,  # [S, R]
        advantages: Tensor,  # [S, R] with the weights in them
        config: Any,
        loss_mask: Tensor | None = None,  # [S, R]
        rollout_logprobs: Tensor | None = None,  # [S, R]
    ) -> tuple[Tensor, dict[str, float]]:  # 0-d with gradient, SkyRL's names of metrics
        """SkyRL's policy loss of one micro-batch: sum_i sum_t m_it u_it l_it, u: SkyRL's own off-policy correction, or ours.

        Masked values may be anything. Communication: none. Synchronises once, as SkyRL's own losses do for their metrics.
        Raises ConfigError for settings that are not honoured, and without the sampler's log-probabilities where they are needed.
        """
        if self.launch is None or self.config is not config:
            self.config, self.launch = config, read(config, self.words)
        launch = self.launch
        mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
        needs_sampler, weights, metrics = needs_rollout_log_probs(launch.config), None, {}
        theirs = import_module(CORRECTIONS)
        is_weighed = theirs.off_policy_correction_enabled(config.off_policy_correction)
        if rollout_logprobs is None:
            if needs_sampler or is_weighed:
                raise ConfigError(f"SkyRL's batch has no rollout_logprobs, which {launch} needs: set {SAMPLING}logprobs=1")
        elif is_weighed:
            old, sampled = (torch.where(mask, values, 0.0) for values in (old_log_probs, rollout_logprobs))
            given = (torch.ones_like(old), old, sampled, mask.float(), config.off_policy_correction)
            weights, kept, metrics = theirs.apply_off_policy_correction(*given)
            weights = weights * kept
        output = loss_of_rows(
            launch.config,
            None,
            *(log_probs, old_log_probs, advantages, mask),
            importance_weights=weights,
            rollout_log_probs=rollout_logprobs if needs_sampler else None,
        )
        launch.tell(self.run, None)
        clipped = metrics_of(output).get("policy/clipped_ratio_fraction", 0.0)
        return output.loss, {"clip_ratio": clipped, **metrics}


def register(registry: Any, words: Words, *, has_log_probs: bool = False) -> None:
    """Adds our losses to SkyRL's PolicyLossRegistry, which sends them, with our words, to its workers; and our log-probabilities,
    where they are asked for."""
    for name in losses():
        registry.register(f"{PREFIX}{name}", SkyrlLoss(name, words))
    if has_log_probs:
        registry.register(LOG_PROBS, InWorkers(TITLE, PROBED))


# The start


def split_words(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any], str | None]:
    """(the words for SkyRL; ours by our names; the reduction that SkyRL is not told)."""
    row_mean = f"{REDUCTION}={ROW_MEAN}"
    ours = [word.removeprefix(PREFIX).partition("=") for word in arguments if word.startswith(PREFIX)]
    theirs = [word for word in arguments if not word.startswith((PREFIX, f"{ENTRYPOINT}="))]
    told = [f"{REDUCTION}={SEQUENCE_MEAN}" if word == row_mean else word for word in theirs]
    return told, {name: read_word(text) for name, _, text in ours}, ROW_MEAN if row_mean in theirs else None


def compose(words: Sequence[str]) -> Any:
    """What `check` takes, of a launch line. SkyRL is imported."""
    config = import_module("skyrl.train.config")
    start = next((index + 1 for index, word in enumerate(words) if word.startswith("skyrl.")), 0)
    return _composed(config.SkyRLTrainConfig, words[start:])


def _composed(config_class: Any, arguments: Sequence[str]) -> tuple[Any, Words, str]:
    """(SkyRL's config, what it is not told, what computes log-probabilities)."""
    theirs, ours, reduction = split_words(arguments)
    log_probs = str(ours.pop("log_probs", THEIRS))
    config = config_class.from_cli_overrides(theirs)
    return config, Words(ours, reduction, Reader(config).switch(STEP_WISE)), log_probs


def trains_ours(config: Any) -> bool:
    return str(config.trainer.algorithm.policy_loss_type).startswith(PREFIX)


def check(composed: tuple[Any, Words, str]) -> list[str]:
    """Raises one ConfigError with every problem."""
    config, words, log_probs = composed
    if log_probs not in (OURS, THEIRS):
        raise ConfigError(f"{LOG_PROBS}={log_probs} is neither {OURS} nor {THEIRS}")
    if log_probs == OURS and (strategy := Reader(config)("trainer.strategy")) != "megatron":
        raise ConfigError(f"{LOG_PROBS}={OURS} with trainer.strategy={strategy}: it acts in Megatron workers; remove it")
    if trains_ours(config):
        launch = read(config.trainer.algorithm, words, config)
        return [f"{launch.title}, {launch.config.loss_aggregation}"]
    if log_probs == THEIRS:
        raise ConfigError(f"{ENTRYPOINT}={__name__} has no effect: set {LOSS}={PREFIX}<loss>, or {LOG_PROBS}={OURS}")
    idle = [f"{PREFIX}{name}={value}" for name, value in words.settings.items()]
    idle += [f"{REDUCTION}={ROW_MEAN}"] * bool(words.reduction)
    if idle:
        raise ConfigError([f"{word} has no effect on SkyRL's own loss; remove it" for word in idle])
    return [f"{LOG_PROBS}={log_probs}, and SkyRL's own loss"]


class Entrypoint:
    """In the place of SkyRL's remote function of the same name: the same work, with trajectories counted."""

    def __init__(self, words: Words):
        self.words = words

    def remote(self, cfg: Any) -> Any:
        return import_module("ray").remote(num_cpus=1)(train).remote(cfg, self.words)


def train(cfg: Any, words: Words) -> None:
    """As SkyRL's entrypoint, in a process of its own. Raises ConfigError for a SkyRL with another contract."""
    trainer = import_module(TRAINER)
    CONTRACT.check(METHODS, trainer)
    count_trajectories(trainer, partial(read, words=words))
    import_module(ENTRY).BasePPOExp(cfg).run()


def main() -> None:
    """What SkyRL's entrypoint calls for trainer.override_entrypoint: the same entrypoint, with our losses in its table.

    Ends the process, with every problem, before Ray starts; with MEGATRON_RL_CHECK=1 without one too.
    """
    entry, tables = import_module(ENTRY), import_module(TABLES)
    arguments = sys.argv[1:]
    sys.argv[1:] = split_words(arguments)[0]
    try:
        CONTRACT.check()
        config, words, log_probs = _composed(entry.SkyRLTrainConfig, arguments)
        lines = check((config, words, log_probs))
        counts = words.is_step_wise and trains_ours(config)
        if counts:
            CONTRACT.check(METHODS, import_module(TRAINER))
    except ConfigError as error:
        end_with_problems(error)
    end_after_check(lines)
    register(tables.PolicyLossRegistry, words, has_log_probs=log_probs == OURS)
    if counts:
        vars(entry)["skyrl_entrypoint"] = Entrypoint(words)
    entry.main()
