"""verl: what its settings choose of our losses, and what it does with the number that one returns.

    actor_rollout_ref.actor.policy_loss.loss_mode=megatron_rl.<loss>.<aggregation>

D data-parallel ranks, c context-parallel ranks, M micro-batches:

    Megatron             verl: x M, Megatron: x c / M, mean over D c ranks; each c rank has the gradient of its own tokens
    Megatron, per token  verl: x R / D, Megatron: sums, then / R;  R: the tokens that the model was given
    FSDP                 mean over D ranks
                         -> (1 / D) sum over ranks and micro-batches

So a loss returns D sum_i w_i S_i of its micro-batch, w_i from the counts of the whole mini-batch, which verl_step takes before the
first micro-batch. KL and entropy terms stay verl's own; verl's table of KL estimates gets ours, of which it lacks `unbiased`.

verl hands the sampler's log-probabilities to no loss, but it hands over u = exp(old - sampled) under rollout_is=token. Where
nothing cuts u, sampled = old - log u: so our corrections, dppo_tv and dppo_kl compare with the sampler. `verl_loss` has the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from megatron_rl.declare import declared_parameters, get_policy_loss
from megatron_rl.errors import ConfigError
from megatron_rl.formula import Formula
from megatron_rl.hosts.choice import (
    CORRECTION_SETTINGS,
    DIVISOR,
    PARTIAL_GROUPS,
    Given,
    Launch,
    Offer,
    Reader,
    make_launch,
    typed_if,
    value_at,
)
from megatron_rl.hosts.contract import AVERAGED, SUMMED, TIMES_CP, Contract, Stage
from megatron_rl.hosts.dense_rows import EACH_ROW, ONE_SAMPLE, Rollouts, numbers
from megatron_rl.hosts.sampler_rule import Sampler
from megatron_rl.hosts.start_check import CHECK_VARIABLE
from megatron_rl.losses.kl import KL_ESTIMATORS
from megatron_rl.validation.own_functions import estimator_problems
from megatron_rl.weights import AggregationRecord, get_loss_aggregation

TITLE, PROBED, PREFIX = "verl", "verl-project/verl 1dda039b9", "megatron_rl."
COUNTS_ROLLOUTS, WHY_NOT_PER_TOKEN = True, None
TABLES, ENGINES, MAIN = "verl.trainer.ppo.core_algos", "verl.workers.engine.base", "verl.trainer.main_ppo"
CONTRACT = Contract(
    TITLE,
    PROBED,
    {
        f"{TABLES}:register_policy_loss": ("name",),
        f"{TABLES}:compute_policy_loss_vanilla": (
            *("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights"),
        ),
        f"{TABLES}:kl_penalty": ("logprob", "ref_logprob", "kl_penalty"),
        f"{ENGINES}:BaseEngine.train_batch": ("self", "data", "loss_function"),
    },
)
ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "algorithm.rollout_correction."
LOSS_MODE, BATCH, MINI_BATCH = f"{ACTOR}policy_loss.loss_mode", "data.train_batch_size", "ppo_mini_batch_size"
# verl has one name for a loss and its aggregation, and its table has those that are declared.
OFFER = Offer(title=TITLE, setting=LOSS_MODE, prefix=PREFIX, gives=lambda record: True)
# Our field -> verl's setting of it in the actor, and verl's default, which is not told from a typed value.
THEIRS = {
    "clip_ratio_low": ("clip_ratio_low", 0.2),
    "clip_ratio_high": ("clip_ratio_high", 0.2),
    "clip_ratio_c": ("clip_ratio_c", 3.0),
    "sapo_temperature_positive": ("tau_pos", 1.0),
    "sapo_temperature_negative": ("tau_neg", 1.05),
    "log_ratio_penalty": ("policy_loss.dro_beta", None),
    DIVISOR: ("loss_scale_factor", None),
}
# verl's class of policy_loss has no field for what it has no name for, and verl ends with an error; this one has.
POLICY_LOSS_CLASS = "megatron_rl.hosts.verl_config.PolicyLoss"
CLASS_LINE = f"{ACTOR}policy_loss._target_={POLICY_LOSS_CLASS}"
ACCEPT_PARTIAL_GROUPS = f"{CLASS_LINE} +{ACTOR}policy_loss.{PARTIAL_GROUPS}=true"
# verl's names of the means of its KL and entropy. Our aggregation -> verl's name of it.
TOKEN_MEAN, SAMPLE_MEAN = "token-mean", "seq-mean-token-mean"
AGG_MODES = {"sample_mean": SAMPLE_MEAN, "constant": "seq-mean-token-sum-norm"}
# verl's estimates of KL. Those of ours that it has too have the same names.
KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
IS_V1, BYPASS, SCORES = "trainer.use_v1", f"{CORRECTION}bypass_mode", f"{ROLLOUT}calculate_log_probs"
WEIGHING, THRESHOLD, NORMALIZES = (f"{CORRECTION}rollout_is{name}" for name in ("", "_threshold", "_batch_normalize"))
# With these verl hands over exp(old - sampled). verl itself bounds it at e^20, so a larger threshold cuts nothing.
UNCUT_WEIGHTS = {WEIGHING: "token", THRESHOLD: 1e9}
LEAST_UNCUT_THRESHOLD = math.exp(20)
# The v1 trainer names the session of each row; a manager of the user's own may not.
SESSIONS = Rollouts(several="an agent loop with several outputs", ids="uid and session_id")
MANAGER = f"{ROLLOUT}agent.agent_loop_manager_class"


def stages(weight: Formula, record: AggregationRecord, *, per_token: bool) -> tuple[list[Stage], list[Stage]]:
    loss: Stage = ("loss", weight * Formula(dp=1), "dp x the weight, from counts of the step")
    if not per_token:
        return [loss], [("verl", Formula(M=1), "multiplies by micro-batches"), TIMES_CP, AVERAGED[1]]
    routed = "T_all: the tokens that the model is given; here those of the responses"
    finalize: Stage = ("finalize", Formula(T_all=-1), "divides by the tokens that all ranks have counted")
    return [loss], [("verl", Formula(T_all=1, dp=-1), routed), *SUMMED, finalize]


# The settings


def own_names() -> list[str]:
    """Our settings below actor.policy_loss: what verl has no name for."""
    return sorted({*declared_parameters(), *CORRECTION_SETTINGS, ONE_SAMPLE, PARTIAL_GROUPS} - THEIRS.keys())


def is_added_estimator(kind: object) -> bool:
    """Whether verl has no estimate of KL of that name and we have: one of ours, or module.function of one."""
    is_verls = isinstance(kind, str) and kind.removesuffix("+") in KL_TYPES
    return not is_verls and KL_ESTIMATORS.find(kind) is not None


def is_ours(actor: Any) -> bool:
    return str(value_at(actor, "policy_loss.loss_mode")).startswith(PREFIX)


def read(actor: Any, whole: Any = None) -> Launch:
    """actor: that section of verl's config, in a worker. whole: all of it, in validate_config, before Ray; what only it has is
    judged there. Raises one ConfigError with every problem."""
    at, driver = Reader(actor, ACTOR), Reader(whole)
    mode = at("policy_loss.loss_mode")
    loss, aggregation = OFFER.choose(mode)
    record, declared = get_loss_aggregation(aggregation), get_policy_loss(loss)
    parameters = {one.name for one in declared.parameters}
    # verl's default of a parameter acts; that of a clip does not, as it would be the same for each kind of ratio.
    theirs = {field: at.given(name, None if field in parameters else own) for field, (name, own) in THEIRS.items()}
    ours = {name: Given(f"{ACTOR}policy_loss.{name}", at(f"policy_loss.{name}")) for name in own_names()}
    ours = {name: one for name, one in ours.items() if one.value is not None}
    is_corrected = not ours.keys().isdisjoint({"importance_correction", "off_policy_sequence_delta"})
    needs_sampler = is_corrected or "rollout_log_probs" in declared.inputs_needed
    terms = [f"KL {at('kl_loss_coef')} ({at('kl_loss_type')})"] if at.switch("use_kl_loss") else []
    terms += [f"entropy {at('entropy_coeff')}"] if at.number("entropy_coeff") else []
    mean = str(at("loss_agg_mode") or TOKEN_MEAN)
    means = (TOKEN_MEAN, AGG_MODES.get(record.name, TOKEN_MEAN), SAMPLE_MEAN if terms else TOKEN_MEAN)
    problems, corrections = list[str](), list[str]()
    if at.switch("use_kl_loss") and is_added_estimator(at("kl_loss_type")):
        problems += estimator_problems(KL_ESTIMATORS[at("kl_loss_type")])
    if mean not in means:
        allowed = " or ".join(dict.fromkeys(means))
        problems.append(
            f"{ACTOR}loss_agg_mode={mean} beside {mode}: two aggregations, and verl's acts on its terms only; set {allowed}"
        )
    if whole is not None:
        problems += problems_of_launch(at, driver, record, ours, mode if needs_sampler else None)
        is_weighed = driver(WEIGHING) is not None and not driver.switch(BYPASS) and driver.switch(SCORES, True)
        corrections += [f"{WEIGHING}={driver(WEIGHING)}"] if is_weighed and not needs_sampler else []
    return make_launch(
        f"loss_mode={mode} in verl",
        loss,
        aggregation,
        readers=[at, driver],
        theirs=theirs,
        ours=ours,
        offers=[PARTIAL_GROUPS],
        corrections=corrections,
        compares=typed_if({f"{CORRECTION}rollout_rs": (), BYPASS: (False,)}, driver),
        sampler=None if whole is None else sampler_of(driver),
        terms=f"{' and '.join(terms)} averaged by verl, {mean}" if terms else "no KL and no entropy in the loss",
        rollouts=rollouts_of(driver),
        token_mean_host=TITLE,
        problems=problems,
    )


def problems_of_launch(
    at: Reader, driver: Reader, record: AggregationRecord, ours: dict[str, Given], compared: str | None
) -> Iterator[str]:
    """compared: the loss mode, where it compares with the sampler by verl's uncut weights."""
    if driver.switch(BYPASS) and not driver.switch(IS_V1, True):
        yield f"{BYPASS}=true of the old trainer puts verl's own loss in the place of ours; remove it, or {IS_V1}=false"
    batch, mini_batch = driver(BATCH), at(MINI_BATCH)
    accepts = PARTIAL_GROUPS in ours and ours[PARTIAL_GROUPS].value
    if (record.needs is None or record.needs_prompts) and batch != mini_batch and not accepts:
        yield (
            f"{ACTOR}{MINI_BATCH}={mini_batch} of {BATCH}={batch}: verl deals samples to ranks by length, so a mini-batch cuts "
            f"prompt groups; set {ACTOR}{MINI_BATCH}={batch}, or accept cut groups with {ACCEPT_PARTIAL_GROUPS}"
        )
    needed = {**UNCUT_WEIGHTS, NORMALIZES: False, BYPASS: False, SCORES: True}
    is_right = {
        WEIGHING: driver(WEIGHING) == "token",
        THRESHOLD: (driver.number(THRESHOLD, 2.0) or 0) >= LEAST_UNCUT_THRESHOLD,
        NORMALIZES: not driver.switch(NORMALIZES),
        BYPASS: not driver.switch(BYPASS),
        SCORES: driver.switch(SCORES, True),
    }
    wrong = [name for name in needed if not is_right[name]]
    if compared is not None and wrong:
        yield (
            f"{', '.join(f'{name}={driver(name)}' for name in wrong)}: {compared} compares with the sampler, which it knows from "
            f"verl's uncut weights; set {' '.join(f'{name}={needed[name]}' for name in wrong)}"
        )


def rollouts_of(driver: Reader) -> Rollouts:
    if (manager := driver(MANAGER)) is not None:
        return Rollouts(several=f"{MANAGER}={manager}")
    return SESSIONS if driver.switch(IS_V1, True) else EACH_ROW  # the old trainer makes a row of each rollout


def sampler_of(driver: Reader) -> Sampler:
    engine = str(driver(f"{ROLLOUT}name"))
    mode = driver(f"{ROLLOUT}engine_kwargs.vllm.logprobs_mode") or driver(f"{ROLLOUT}logprobs_mode", "processed_logprobs")
    return Sampler(
        engine=engine,
        mode=str(mode) if engine == "vllm" else None,
        kept=typed_if({f"{ROLLOUT}top_p": (1.0,), f"{ROLLOUT}top_k": (-1, 0)}, driver),
        changed=typed_if({f"{ROLLOUT}repetition_penalty": (1.0,)}, driver),
    )


# A launch line


def compose(words: Sequence[str]) -> Any:
    """verl's config of a line of verl.trainer.main_ppo, by hydra. Raises ConfigError for another program, another folder of configs
    and what hydra refuses."""
    hydra, parser = import_module("hydra"), import_module("hydra._internal.utils").get_args_parser()
    refused = import_module("hydra.errors").HydraException
    args = parser.parse_args(words[words.index(MAIN) + 1 :] if MAIN in words else [])
    if MAIN not in words or args.config_path or args.config_dir:
        raise ConfigError(
            f"a line of {MAIN} with a config of verl's own folder can be read here, and this is another one: start it with "
            f"{CHECK_VARIABLE}=1 in its environment, which stops it after the same check"
        )
    try:
        with hydra.initialize_config_module("verl.trainer.config", version_base=None):
            return hydra.compose(args.config_name or "ppo_trainer", args.overrides)
    except refused as error:
        raise ConfigError(str(error)) from error


def check(config: Any) -> list[str]:
    """Raises one ConfigError with every problem."""
    actor = value_at(config, ACTOR.removesuffix("."))
    if not is_ours(actor):
        return [f"{LOSS_MODE}={value_at(actor, 'policy_loss.loss_mode')}: verl's own loss trains"]
    launch = read(actor, config)
    return [f"{launch.title} | {numbers(launch.config)} | {launch.terms}"]
