"""SkyRL: our losses in its own table of policy losses; its driver has put the aggregation into the advantages.

    python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=megatron_rl.hosts.skyrl \\
        trainer.algorithm.policy_loss_type=megatron_rl.<loss> trainer.algorithm.loss_reduction=<SkyRL's name of the aggregation> \\
        megatron_rl.importance_correction=tis megatron_rl.importance_correction_high=2

Words that begin with megatron_rl. are for the loss alone: the entrypoint takes them off the line, as SkyRL refuses what it does not
have, and they travel to the workers with the loss.

What SkyRL does with advantages, and with the number that a loss returns; D data-parallel ranks, M micro-batches, weights w_i:

    driver: A_i x w_i, over the mini-batch; worker: x M D; Megatron: x c / M; DDP: mean over D c ranks -> sum

SkyRL's driver counts rows. Where a trajectory is several rows, `skyrl_driver` makes the weights of trajectories of theirs. So a
loss returns the plain sum over tokens of what it is given, and must be proportional to the advantage. KL and entropy are SkyRL's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_rl.aggregation_record import TOKEN_MEAN, Formula
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.closed_words import Words
from megatron_rl.hosts.dealing import Dealing
from megatron_rl.hosts.dense_rows import loss_of_rows, step_line
from megatron_rl.hosts.door import (
    AVERAGED,
    TIMES_CP,
    Choice,
    Deviation,
    Door,
    Found,
    Kind,
    Line,
    LogProbs,
    Own,
    Prompts,
    ReadFile,
    Rollouts,
    Setting,
    names,
    plug,
)
from megatron_rl.hosts.door_line import check_log_probs, name_problems, read_launch
from megatron_rl.hosts.door_settings import OnceRead, losses
from megatron_rl.hosts.model_names import ModelNames
from megatron_rl.hosts.programs import SUPERVISED, TRAINS_NOTHING, Programs, program_word
from megatron_rl.hosts.run import Run
from megatron_rl.hosts.sampling import NO_ADDEND, NO_FACTOR, OFF, Filter, Replay, Sampler
from megatron_rl.hosts.settings import ABSENT, Settings, read_overrides, value_at
from megatron_rl.hosts.skyrl_log_probs import InWorkers
from megatron_rl.hosts.step_sizes import MODEL_KINDS, SizeNames, whole_steps
from megatron_rl.hosts.stock import (
    MEAN_OF_SAMPLE_MEANS,
    MEAN_OF_TOKEN_MEANS,
    OF_A_MICRO_BATCH,
    SAMPLE_MEAN,
    SELECTING,
    Stock,
    Term,
    exact_setting,
)
from megatron_rl.loss_hub import needs_rollout_log_probs
from megatron_rl.metrics.step import finalise_metrics
from megatron_rl.validation.checks import Row, check

PREFIX, ENTRYPOINT, ALGORITHM = "megatron_rl.", "trainer.override_entrypoint", "trainer.algorithm."
ESTIMATOR, WITH_DEVIATION = f"{ALGORITHM}advantage_estimator", f"{ALGORITHM}grpo_norm_by_std"
ENTRY, UTILITIES = "skyrl.train.entrypoints.main_base", "skyrl.backends.skyrl_train.utils"
TABLES, CORRECTIONS = f"{UTILITIES}.ppo_utils", f"{UTILITIES}.off_policy_correction_utils"
# What computes log-probabilities: ours, whichever loss trains, or SkyRL's.
LOG_PROBS, OURS, THEIRS = f"{PREFIX}log_probs", "megatron_rl", "skyrl"
STRATEGY = "trainer.strategy"
# SkyRL's own examples, which add trainers, rewards and advantages, and no loss; tests/test_stock.py looks.
EXAMPLES = r"examples\.train(_\w+)?\.[\w.]*main_\w+"
CORRECTION = f"{ALGORITHM}off_policy_correction"
# SkyRL's correction is on where one of the first is set, or both of the last.
SWITCHES = ("tis_ratio_type", "sequence_mask_metric", "outlier_token_is_threshold_low", "outlier_token_is_threshold_high")
MASK_SWITCHES = ("token_mask_is_threshold_low", "token_mask_is_threshold_high")
STEP_WISE, REDUCTION = "generator.step_wise_trajectories", f"{ALGORITHM}loss_reduction"
# Ours alone: SkyRL is told the other name, and has the same weights where a trajectory is one row.
ROW_MEAN, SEQUENCE_MEAN = "row_mean", "sequence_mean"
REPLAY, MORE_SAMPLING = f"{ALGORITHM}enable_sample_support_replay", "generator.sampling_params.additional_kwargs."
# SkyRL's estimates of KL that have the name, value and gradient of ours.
KL_ESTIMATORS = ("k1", "k2", "k3")
KL_TYPES = (*KL_ESTIMATORS, "abs")


def corrections(settings: Settings) -> list[str]:
    def is_set(name: str) -> bool:
        return settings[f"{CORRECTION}.{name}"] is not None

    return [CORRECTION] if any(map(is_set, SWITCHES)) or all(map(is_set, MASK_SWITCHES)) else []


@check()
def estimate_of_kl_is_known(found: Found) -> Iterator[Row]:
    switches = ("use_kl_loss", "use_kl_in_reward")
    kind = found.settings[f"{ALGORITHM}kl_estimator_type"]
    if any(found.settings[ALGORITHM + name] for name in switches) and kind not in KL_TYPES:
        yield Row("kl_estimator_type", f"SkyRL has no {kind}: set one of {', '.join(KL_TYPES)}", is_wrong=True)


# What the policy term of SkyRL's own losses weighs a token.
STOCK_REDUCTIONS = {
    "token_mean": TOKEN_MEAN,
    "token_mean_legacy": MEAN_OF_TOKEN_MEANS,
    "sequence_mean": SAMPLE_MEAN,
    "prompt_mean": Formula(P=-1, M_g=-1),
    "seq_mean_token_sum_norm": Formula(N=-1, L=-1),
}
# A mean over the tokens of a micro-batch, weighed by its share of the samples.
SHARE_OF_TOKEN_MEANS = Formula(N_b=1, N=-1, T_b=-1)
# SkyRL's losses that weigh so; another name is one of the user's own, or of supervised training.
STOCK_LOSSES = "regular dual_clip gspo cispo rollout_is clip_cov kl_cov sapo importance_sampling dppo".split()
WORDS = {
    f"{ALGORITHM}policy_loss_type": Words(
        names=(*STOCK_LOSSES, "cross_entropy"), adds=f"{ENTRYPOINT}=<your own>", meant=dict.fromkeys(("grpo", "ppo"), "regular")
    ),
    REDUCTION: Words(names=tuple(STOCK_REDUCTIONS)),
}


def stock(settings: Settings) -> Stock | None:
    weight, loss = STOCK_REDUCTIONS.get(str(settings[f"{ALGORITHM}loss_reduction"])), settings[f"{ALGORITHM}policy_loss_type"]
    if weight is None or loss not in STOCK_LOSSES:
        return None
    of_terms = regularizers(settings)
    return Stock(
        weight,
        of_terms.get("KL"),
        of_terms.get("entropy"),
        exact_setting(f"{ALGORITHM}loss_reduction={{}}", STOCK_REDUCTIONS, weight),
        varies=(OF_A_MICRO_BATCH.format(loss),) if loss in SELECTING else (),
        value=SAMPLE_MEAN if settings.value_of(ESTIMATOR) == "gae" else None,
    )


def regularizers(settings: Settings) -> dict[str, Formula]:
    """What KL and entropy weigh a token: SkyRL computes them beside any loss, as means of a micro-batch. FSDP's workers weigh each
    by its share of the samples; Megatron's schedule weighs all alike, which is the same where micro-batches have as many samples,
    and not where they have a budget of tokens.
    """
    is_by_samples = settings.value_of("trainer.max_tokens_per_microbatch") in (ABSENT, None, -1)
    is_by_share = settings[STRATEGY] != "megatron"
    kl = SAMPLE_MEAN if is_by_samples or is_by_share else MEAN_OF_SAMPLE_MEANS
    entropy = MEAN_OF_TOKEN_MEANS if is_by_samples or not is_by_share else SHARE_OF_TOKEN_MEANS
    of_terms = {"KL": kl, "entropy": entropy}
    return {name: one for name, one in of_terms.items() if settings[f"{ALGORITHM}use_{name.lower()}_loss"] is not False}


def terms(found: Found) -> dict[str, Term]:
    settings, beside = found.settings, dict[str, Term]()
    for name, weight in regularizers(settings).items():
        coefficient = settings.one(f"{ALGORITHM}{name.lower()}_loss_coef").value
        beside[name] = Term("its coefficient is not known here" if coefficient is None else f"{coefficient}", weight)
    return beside


def read_line(words: Sequence[str], read_file: ReadFile) -> Line:
    """All of SkyRL's settings are on the line, the first door counts, and words with a + are refused."""
    start = words.index(ENTRY) + 1 if ENTRY in words else 0
    rows = [
        Row(word.partition("=")[0], "SkyRL refuses settings with a +: remove it", is_wrong=True)
        for word in words[start:]
        if word.startswith("+")
    ]
    given = read_overrides([word for word in words[start:] if not word.startswith("+")])
    doors = [word.partition("=")[2] for word in words[start:] if word.startswith(f"{ENTRYPOINT}=")]
    name = given.get(f"{ALGORITHM}policy_loss_type")
    if __name__ not in doors[:1] and str(name).startswith(PREFIX):
        rows.append(Row(ENTRYPOINT, f"without {ENTRYPOINT}={__name__} SkyRL has no {name}: add it", is_wrong=True))
    elif __name__ in doors[:1] and ENTRY not in words:
        rows.append(Row(ENTRYPOINT, f"it is read by {ENTRY} alone: start -m {ENTRY}", is_wrong=True))
    elif doors and __name__ not in doors:
        rows.append(Row("entrypoint", f"{ENTRYPOINT}={doors[0]} is not known here: it may train another loss", is_note=True))
    elif ENTRY not in words and not str(name).startswith(PREFIX):
        further = [one for one in given if one.startswith(ALGORITHM) and one not in DOOR.known_names]
        text, unseen = program_word(words), f"what it makes of {', '.join(further)} is not judged"
        if re.fullmatch(EXAMPLES, text):  # its loss is SkyRL's, and what else it does is no part of the loss
            rows += [Row("settings", f"{text}: {unseen}", is_note=True)] if further else []
        else:
            text += " is an entrypoint of your own: it may train another loss" + f", and {unseen}" * bool(further)
            rows.append(Row("entrypoint", f"{text}. Our losses need -m {ENTRY}", is_note=True))
        given = {one: value for one, value in given.items() if one not in further}
    is_partial = any(row.subject == "entrypoint" for row in rows)
    return Line(Settings.of_names(given, DOOR.all_defaults, typed=given), rows, is_partial=is_partial)


def write(config: PolicyLossConfig, given: dict[str, Any]) -> dict[str, Any]:
    kl: dict[str, Any] = {"use_kl_loss": bool(config.kl_coefficient)}  # SkyRL's default is a KL term
    if config.kl_coefficient:
        kl |= {"kl_loss_coef": config.kl_coefficient, "kl_estimator_type": str(config.kl_estimator)}
    return {ENTRYPOINT: __name__, **given, **{ALGORITHM + name: value for name, value in kl.items()}}


def trains_ours(settings: Settings, *, has_our_entrypoint: bool) -> bool:
    """Our entrypoint may be there for our log-probabilities alone."""
    is_chosen = str(settings[f"{ALGORITHM}policy_loss_type"]).startswith(PREFIX)
    return is_chosen or (has_our_entrypoint and settings[LOG_PROBS] == THEIRS)


BATCH, MINI_BATCH = "trainer.train_batch_size", "trainer.policy_mini_batch_size"

DOOR = Door(
    name="skyrl",
    title="SkyRL",
    probed="NovaSky-AI/SkyRL a9564572e",
    settings=(
        Setting(f"{ALGORITHM}eps_clip_low", Kind.NUMBER, "clip_ratio_low", 0.2),
        Setting(f"{ALGORITHM}eps_clip_high", Kind.NUMBER, "clip_ratio_high", 0.2),
        Setting(f"{ALGORITHM}clip_ratio_c", Kind.NUMBER, "clip_ratio_c", 3.0),
        Setting(f"{ALGORITHM}sapo.tau_pos", Kind.NUMBER, "sapo_temperature_positive", 1.0),
        Setting(f"{ALGORITHM}sapo.tau_neg", Kind.NUMBER, "sapo_temperature_negative", 1.05),
        Setting(f"{ALGORITHM}max_seq_len", Kind.NUMBER, "loss_aggregation_divisor"),
        Setting(f"{ALGORITHM}policy_loss_type", default="regular"),
        Setting(LOG_PROBS, default=THEIRS),
        Setting(REDUCTION, default="token_mean"),
        Setting(f"{ALGORITHM}use_kl_loss", Kind.SWITCH, default=True),
        Setting(f"{ALGORITHM}use_kl_in_reward", Kind.SWITCH, default=False),
        Setting(f"{ALGORITHM}kl_loss_coef", Kind.NUMBER, default=0.001),
        Setting(f"{ALGORITHM}kl_estimator_type", default="k3"),
        Setting(f"{ALGORITHM}use_entropy_loss", Kind.SWITCH, default=False),
        Setting(f"{ALGORITHM}entropy_loss_coef", Kind.NUMBER, default=0.01),
        *names(
            ALGORITHM,
            Kind.NUMBER,
            "temperature zero_variance_filter_tol lambd gamma value_clip kl_ctrl.kl_target kl_ctrl.horizon "
            "dynamic_sampling.max_sample_batches dynamic_sampling.min_replace_ratio",
        ),
        *names(
            f"{CORRECTION}.",
            Kind.NUMBER,
            "token_tis_ratio_clip_high sequence_tis_ratio_clip_high geo_mask_high geo_mask_low product_mask_high product_mask_low "
            "outlier_token_is_threshold_low outlier_token_is_threshold_high token_mask_is_threshold_low "
            "token_mask_is_threshold_high",
        ),
        *names(f"{CORRECTION}.", Kind.OTHER, "tis_ratio_type sequence_mask_metric"),
        *names(
            ALGORITHM,
            Kind.NUMBER,
            {
                "cispo.cispo_eps_clip_low": f"set {ALGORITHM}eps_clip_low",
                "cispo.cispo_eps_clip_high": f"set {ALGORITHM}eps_clip_high",
                "dppo.delta_low": f"set {PREFIX}divergence_low",
                "dppo.delta_high": f"set {PREFIX}divergence_high",
                "tis_imp_ratio_cap": f"set {CORRECTION}.token_tis_ratio_clip_high",
                **dict.fromkeys(("clip_cov.clip_ratio", "clip_cov.clip_cov_lb", "clip_cov.clip_cov_ub"), "remove it"),
                **dict.fromkeys(("kl_cov.kl_cov_frac", "kl_cov.ppo_kl_coef"), "remove it"),
            },
        ),
        *names(
            ALGORITHM,
            Kind.OTHER,
            {
                "cispo.cispo_anchor": "a loss of ours has one anchor; choose another loss, or remove it",
                "dppo.dppo_type": f"choose {PREFIX}dppo_tv or {PREFIX}dppo_kl",
                "use_tis": f"set {CORRECTION}.tis_ratio_type",
            },
        ),
        Setting(ESTIMATOR, default="grpo"),
        Setting(WITH_DEVIATION, default=True),
        *names(
            ALGORITHM,
            Kind.OTHER,
            "advantage_batch_normalize value_head_prefix zero_variance_filter kl_ctrl.type "
            "dynamic_sampling.type kl_ctrl off_policy_correction sapo dynamic_sampling clip_cov kl_cov cispo dppo",
        ),
    ),
    sections=(ALGORITHM,),
    choice=Choice(
        setting=f"{ALGORITHM}policy_loss_type",
        prefix=PREFIX,
        aggregation=REDUCTION,
        names={
            SEQUENCE_MEAN: "sample_mean",
            "prompt_mean": "prompt_mean",
            "token_mean": "token_mean",
            "seq_mean_token_sum_norm": "constant",
            ROW_MEAN: "row_mean",
        },
        remedy=f"{ENTRYPOINT}={__name__} and {ALGORITHM}policy_loss_type={PREFIX}<loss> choose one",
        why_not={
            "token_mean_legacy": "it divides by the tokens of a micro-batch, so its weights depend on the micro-batch size",
        },
    ),
    own=Own(prefix=PREFIX),
    is_ours=lambda settings: trains_ours(settings, has_our_entrypoint=settings[ENTRYPOINT] == __name__),
    log_probs=LogProbs(setting=LOG_PROBS, value=OURS, theirs=THEIRS, backend=(STRATEGY, "megatron")),
    defaults={STEP_WISE: False, STRATEGY: "fsdp"},
    corrections=corrections,
    rollouts=lambda settings: (
        Rollouts(several=f"{STEP_WISE}=true", ids="trajectory") if settings[STEP_WISE] is True else Rollouts()
    ),
    counts_rollouts=True,
    deviation=Deviation(
        without={WITH_DEVIATION: False},
        divides=lambda settings: settings[WITH_DEVIATION] is True and settings[ESTIMATOR] == "grpo",
    ),
    sampler=Sampler(
        filters={
            "generator.sampling_params.top_p": Filter(1.0, (1.0,)),
            "generator.sampling_params.top_k": Filter(-1, (-1, 0)),
            "generator.sampling_params.min_p": Filter(0.0, (0.0,)),
        },
        engines={"vLLM": None},
        modes=("generator.inference_engine.engine_init_kwargs.logprobs_mode",),
        longest="generator.sampling_params.max_generate_length",
        turns="generator.max_turns",
        # Releases that do not have it refuse the setting.
        replay=Replay(by={REPLAY: OFF}, told=f"{REPLAY}=true and generator.inference_engine.enable_return_sample_support_set=true"),
        reshaped={
            f"{MORE_SAMPLING}repetition_penalty": NO_FACTOR,
            **dict.fromkeys((f"{MORE_SAMPLING}presence_penalty", f"{MORE_SAMPLING}frequency_penalty"), NO_ADDEND),
            f"{MORE_SAMPLING}logit_bias": OFF,
        },
        unsettled={"generator.inference_engine.speculative_config": OFF, "trainer.mtp.enabled": OFF},
    ),
    stock=stock,
    refuses=lambda settings: whole_steps("SkyRL", settings, (BATCH,), (MINI_BATCH,), {BATCH: 1024, MINI_BATCH: 256}),
    sizes=SizeNames(
        micro_batch="trainer.micro_train_batch_size_per_gpu",
        ranks=tuple(f"trainer.placement.policy_num_{of}" for of in ("nodes", "gpus_per_node")),
        shared=tuple(f"trainer.policy.megatron_config.{kind}_parallel_size" for kind in MODEL_KINDS),
        by_tokens={"trainer.max_tokens_per_microbatch": "trainer.max_tokens_per_microbatch"},
        dealing=lambda value_of: Dealing("SkyRL deals them by length"),
    ),
    checks=(estimate_of_kl_is_known,),
    words=WORDS,
    terms=terms,
    imports=(ENTRYPOINT,),
    megatron="trainer.strategy=megatron",
    # Without Megatron's own loss of multi-token prediction, which its workers turn off.
    model=ModelNames(
        sections=("trainer.policy.megatron_config.", "trainer.policy.megatron_config.transformer_config_kwargs."),
        own={"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "sequence_parallel": True},
        backend=(STRATEGY, "megatron"),
    ),
    prompts=Prompts.BY_DRIVER,
    step=(("SkyRL", Formula(M=1, dp=1), "multiplies by micro-batches and data-parallel ranks"), TIMES_CP, AVERAGED[1]),
    why_not_per_token="SkyRL's factors are made for the mean over ranks",
    starts=ENTRY,
    recognises=lambda words: any(word == ENTRY or word.startswith((f"{ENTRYPOINT}=", ALGORITHM)) for word in words),
    programs=Programs(
        names={
            r"skyrl\.train\.main_sft|main_sft_\w+": SUPERVISED,
            r"skyrl\.train\.entrypoints\.(main_generate|serve)": TRAINS_NOTHING,
            r"skyrl\.tinker\.api": "serves a trainer, and each call of its client names the loss",
            r"main_harbor_generate": TRAINS_NOTHING,
            EXAMPLES: None,
        }
    ),
    read_line=read_line,
    write=write,
    estimators=KL_ESTIMATORS,
    contract={
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


class SkyrlLoss:
    """An entry of SkyRL's PolicyLossRegistry. It is pickled to the workers, which must have this package."""

    def __init__(self, name: str, own: Mapping[str, Any] | None = None, typed: Sequence[str] | None = None):
        """own: words of ours by their whole names, and what a worker cannot know. typed: the names on the launch line; None: not
        known."""
        self.name, self.own, self.typed = name, dict(own or {}), typed
        self.reader, self.run = OnceRead(DOOR), Run()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.own, self.typed)

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
        found = self.reader.read(settings_of(config, self.own, self.typed))
        mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
        needs_sampler, weights, metrics, sampled = needs_rollout_log_probs(found.config), None, {}, None
        theirs = import_module(CORRECTIONS)
        is_weighed = theirs.off_policy_correction_enabled(config.off_policy_correction)
        if needs_sampler or is_weighed:
            if rollout_logprobs is None:
                raise ConfigError(
                    f"SkyRL's batch has no rollout_logprobs, which {PREFIX}{self.name} or a correction needs: set "
                    "generator.sampling_params.logprobs=1"
                )
            sampled = torch.where(mask, rollout_logprobs, 0.0)
        if is_weighed:
            old = torch.where(mask, old_log_probs, 0.0)
            given = (torch.ones_like(old), old, sampled, mask.float(), config.off_policy_correction)
            weights, kept, metrics = theirs.apply_off_policy_correction(*given)
            weights = weights * kept
        rows = (log_probs, old_log_probs, advantages, mask)
        sampled = sampled if needs_sampler else None
        output = loss_of_rows(found.config, None, *rows, importance_weights=weights, rollout_log_probs=sampled)
        regularizers = "KL and entropy are SkyRL's, means over micro-batches"
        title = f"policy_loss_type={PREFIX}{self.name} in SkyRL"
        words = (title, found.config, None, regularizers)
        self.run.tell(title, lambda: step_line(*words, of_token_mean=DOOR.of_token_mean, rollouts=found.rollouts))
        policy = finalise_metrics(output.metrics) if output.metrics is not None else {}
        return output.loss, {"clip_ratio": policy.get("policy/clipped_ratio_fraction", 0.0), **metrics}


def settings_of(tree: Any, own: Mapping[str, Any], typed: Sequence[str] | None, section: str = ALGORITHM) -> Settings:
    """tree: SkyRL's config, or the section of it that a loss is given. The others: see SkyrlLoss."""

    def value_of(name: str) -> Any:
        if name in own or name.startswith(PREFIX):
            return own.get(name, ABSENT)
        return value_at(tree, name.removeprefix(section)) if name.startswith(section) else ABSENT

    return Settings(value_of, DOOR.all_defaults, typed=typed, given=own)


def register(registry: Any, own: Mapping[str, Any], typed: Sequence[str] | None = None) -> None:
    """Adds our losses to SkyRL's PolicyLossRegistry, which sends them, with our words, to its workers; and our log-probabilities,
    where they are asked for."""
    for name in losses(DOOR):
        registry.register(f"{PREFIX}{name}", SkyrlLoss(name, own, typed))
    if own.get(LOG_PROBS, THEIRS) != THEIRS:
        registry.register(LOG_PROBS, InWorkers(DOOR.title, DOOR.probed))


def check_launch(settings: Settings) -> tuple[str, ...]:
    """The warnings of a launch behind our entrypoint. Raises one ConfigError with every problem."""
    has_loss = trains_ours(settings, has_our_entrypoint=True)
    check_log_probs(DOOR, settings, trains_ours=has_loss)
    return read_launch(DOOR, settings, may_have_more=True).warnings if has_loss else ()


def main() -> None:
    """What SkyRL's entrypoint calls for trainer.override_entrypoint: the same entrypoint, with our losses in its table.

    Ends the process, with every problem, before Ray starts; with MEGATRON_RL_CHECK=1 with doctor's report and exit code.
    """
    launch = import_module("megatron_rl.hosts.launch")  # not at the top: SkyRL's workers import this module, and need no launcher
    if launch.is_check():
        raise SystemExit(launch.report(ENTRY, sys.argv[1:]))
    given = read_overrides(sys.argv[1:])
    own, typed = {name: value for name, value in given.items() if name.startswith(PREFIX)}, tuple(given)
    sys.argv[1:] = [word for word in sys.argv[1:] if not word.startswith((f"{ENTRYPOINT}=", PREFIX))]
    if given.get(REDUCTION) == ROW_MEAN:
        own[REDUCTION] = ROW_MEAN
        sys.argv[1:] = [f"{REDUCTION}={SEQUENCE_MEAN}" if word.startswith(f"{REDUCTION}=") else word for word in sys.argv[1:]]
    entry, tables = import_module(ENTRY), import_module(TABLES)
    line = Settings.of_names(read_overrides(sys.argv[1:]), DOOR.all_defaults)
    try:
        # Before SkyRL reads the line, which refuses names too, without what was meant. Other versions may have more names.
        if problems := [*DOOR.contract_problems(), *name_problems(DOOR, line, may_have_more=True)]:
            raise ConfigError(problems)
        config = entry.SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
        own[STEP_WISE] = value_at(config, STEP_WISE) is True  # for the workers, whose losses are given one section
        settings = settings_of(config, own, typed, section="")
        warnings = check_launch(settings)
        counts_trajectories = own[STEP_WISE] and trains_ours(settings, has_our_entrypoint=True)
        driver = plug("skyrl_driver") if counts_trajectories else None
        if driver is not None and (problems := driver.contract_problems(import_module(driver.TRAINER))):
            raise ConfigError(problems)
    except ConfigError as error:
        raise SystemExit("\n".join(f"megatron_rl: ConfigError: {problem}" for problem in error.problems)) from None
    for text in warnings:
        print(f"megatron_rl: {text}", file=sys.stderr, flush=True)
    register(tables.PolicyLossRegistry, own, typed)
    if driver is not None:
        vars(entry)["skyrl_entrypoint"] = driver.Entrypoint(own)
    entry.main()
