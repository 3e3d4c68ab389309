"""What verl's own losses weigh a token, and the settings that say it."""

from __future__ import annotations

from typing import Any

from megatron_rl.aggregation_record import TOKEN_MEAN, Formula
from megatron_rl.hosts.closed_words import Words
from megatron_rl.hosts.settings import ABSENT, UNKNOWN, Settings
from megatron_rl.hosts.stock import MEANS_ARE_ADDED, OF_A_MICRO_BATCH, SAMPLE_MEAN, SELECTING, Stock, Term, is_on
from megatron_rl.hosts.verl_correction import BYPASS, CORRECTION, IS_V1, LOSS_TYPE

ACTOR, ESTIMATOR, SIZE = "actor_rollout_ref.actor.", "algorithm.adv_estimator", "ppo_mini_batch_size"
LOSS_MODE = f"{ACTOR}policy_loss.loss_mode"
AGG_MODE, DEFAULT_AGG_MODE = f"{ACTOR}loss_agg_mode", "token-mean"
SAMPLE_MEAN_MODE = "seq-mean-token-mean"
# What it adds to the policy's loss, and whether that stays beside it.
DISTILLATION, TASK_REWARDS = "distillation.enabled", "distillation.distillation_loss.use_task_rewards"
# What the terms of verl's own losses weigh a token.
STOCK_MODES = {
    "token-mean": TOKEN_MEAN,
    "token-sum": Formula(),
    SAMPLE_MEAN_MODE: SAMPLE_MEAN,
    "seq-mean-token-sum": Formula(N=-1),
    "seq-mean-token-sum-norm": Formula(N=-1, L=-1),
}
# verl's losses that weigh as loss_agg_mode says; None is its default, and any other name is one of the user's own.
STOCK_LOSSES = (None, "vanilla", "dppo_tv", "dppo_kl", "gpg", "dro", "cispo")
OTHER_LOSSES = ("gspo", "sapo", "geo_mean", *SELECTING, "bypass_mode")
MODULES = "VERL_USE_EXTERNAL_MODULES"  # an environment variable of verl: what each of its processes imports first
ESTIMATORS = (
    "gae",
    "grpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "opo",
    "grpo_passk",
    "gpg",
    "rloo_vectorized",
    "grpo_vectorized",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "gdpo",
)
# verl looks them up by name. It has no loss of the names grpo and ppo, which are those of its estimators.
WORDS = {
    LOSS_MODE: Words(
        names=(*filter(None, STOCK_LOSSES), *OTHER_LOSSES),
        adds=f"{MODULES}=<module that registers it>",
        meant=dict.fromkeys(("grpo", "ppo"), "vanilla"),
    ),
    AGG_MODE: Words(names=tuple(STOCK_MODES)),
    ESTIMATOR: Words(names=ESTIMATORS, adds=f"{MODULES}=<module that registers it>", beside_ours=True),
}


def weight_of_mode(settings: Settings) -> Formula | None:
    return _weight(settings, settings[AGG_MODE], settings[f"{ACTOR}loss_scale_factor"])


def _weight(settings: Settings, mode: object, factor: object) -> Formula | None:
    """Without a factor verl divides by the width of the mask. The old trainer pads a whole batch to one width: an L."""
    weight = STOCK_MODES.get(mode) if isinstance(mode, str) else None
    is_of_micro_batch = weight is not None and "L" in weight.powers and factor is None and settings[IS_V1] is not False
    return Formula(N=-1, L_b=-1) if is_of_micro_batch else weight


def terms(settings: Settings) -> dict[str, Term]:
    """KL and entropy, which verl averages by loss_agg_mode beside any loss; without those that are not known to be on."""
    weight, found = weight_of_mode(settings), {}
    if weight is not None and settings[f"{ACTOR}use_kl_loss"] is True:
        coefficient, kind = (_shown(settings[f"{ACTOR}kl_loss_{name}"]) for name in ("coef", "type"))
        found["KL"] = Term(f"{coefficient} x {kind}, averaged by loss_agg_mode={settings[AGG_MODE]}", weight)
    if weight is not None and settings[f"{ACTOR}entropy_coeff"] not in (0, None, UNKNOWN):
        found["entropy"] = Term(f"{settings[f'{ACTOR}entropy_coeff']}, averaged by loss_agg_mode={settings[AGG_MODE]}", weight)
    return found


def _shown(value: object) -> str:
    return "not known here" if value is UNKNOWN else str(value)


def stock(settings: Settings) -> Stock | None:
    """verl's losses divide by counts of the mini-batch; some choose an aggregation of their own."""
    loss, weight, exact = settings[LOSS_MODE], weight_of_mode(settings), None
    if weight is None:
        return None
    if "L_b" in weight.powers:
        exact = f"{ACTOR}loss_scale_factor=<longest response>"
    policy, remarks, varies = weight, [], []
    if settings[BYPASS] is True and settings[IS_V1] is False:
        remarks.append("bypass_mode of the old trainer puts REINFORCE or PPO with a clip in the place of loss_mode")
        is_weighed = settings[LOSS_TYPE] != "ppo_clip" and settings[f"{CORRECTION}rollout_is"] is not None
        if is_weighed and settings[f"{CORRECTION}rollout_is_batch_normalize"] is True:
            varies.append(
                "rollout_is_batch_normalize divides by a mean over each micro-batch there, so the step depends on the layout"
            )
    elif loss in ("gspo", "sapo"):
        policy = SAMPLE_MEAN
    elif loss == "geo_mean":
        policy = Formula(dp=-1, N_b=-1, m_i=-1)
        varies.append(MEANS_ARE_ADDED.format("geo_mean"))
    elif loss in SELECTING:
        varies.append(OF_A_MICRO_BATCH.format(loss))
    elif loss not in STOCK_LOSSES:
        return None
    value = stock_of_critic(settings)
    if value is not None and has_own_mini_batch(settings):
        remarks.append(f"critic.{SIZE}: T and N of the value term are those of the critic's own mini-batch")
    if settings.value_of(DISTILLATION) is True and settings.value_of(TASK_REWARDS) is False:  # in the place of other terms
        return Stock(None, distillation=weight, exact=exact, remarks=tuple(remarks), value=value)
    terms = (policy, *_kl_and_entropy(settings, weight))
    distilled = weight if settings.value_of(DISTILLATION) is True else None
    return Stock(*terms, exact, tuple(remarks), tuple(varies), distilled, value)


def regularizers(settings: Settings) -> Stock | None:
    """verl's terms beside a loss of ours."""
    weight = STOCK_MODES.get(str(settings[AGG_MODE] or DEFAULT_AGG_MODE))
    return None if weight is None else Stock(None, *_kl_and_entropy(settings, weight))


def _kl_and_entropy(settings: Settings, weight: Formula) -> tuple[Formula | None, Formula | None]:
    has_kl = settings[f"{ACTOR}use_kl_loss"] is not False and is_on(settings, f"{ACTOR}kl_loss_coef")
    has_entropy = is_on(settings, f"{ACTOR}entropy_coeff")
    return weight if has_kl else None, weight if has_entropy else None


def has_critic(settings: Settings) -> bool:
    enabled = settings.value_of("critic.enable")
    return (settings[ESTIMATOR] == "gae" if enabled in (ABSENT, None) else enabled) is True


def of_critic(settings: Settings, name: str) -> Any:
    """The critic takes the actor's value where it has none of its own."""
    value = settings.value_of(f"critic.{name}")
    return settings[f"{ACTOR}{name}"] if value is ABSENT else value


def has_own_mini_batch(settings: Settings) -> bool:
    """Whether a critic trains on mini-batches of another size than the actor's."""
    return has_critic(settings) and of_critic(settings, SIZE) not in (None, settings[f"{ACTOR}{SIZE}"])


def stock_of_critic(settings: Settings) -> Formula | None:
    if not has_critic(settings):
        return None
    return _weight(settings, of_critic(settings, "loss_agg_mode"), of_critic(settings, "loss_scale_factor"))
