"""NeMo-RL: our losses in the place of its ClippedPGLossFn, with the step's weights, and prompt_mean by its advantages.

    python -m megatron_rl.hosts.launch examples/run_grpo.py --config ... ++loss_fn.megatron_rl=<loss>.<aggregation>

What NeMo-RL's Megatron worker does with the number that a loss returns, c context-parallel ranks, M micro-batches:

    NeMo-RL: x 1 / c, x M / c; Megatron: x c / M; the gather of log-probabilities adds c equal gradients; DDP: sums over D ranks
    -> sum over ranks and micro-batches; with packing NeMo-RL may call a loss once a sequence, and adds

So a loss returns sum_i w_i S_i of what it is given, w_i from the counts of the whole global batch, which NeMo-RL hands over. KL is
NeMo-RL's own, with its formula and its own mean, or ours where an estimator is chosen. The metrics are NeMo-RL's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_rl.aggregation import StepTotals, regularizer_weights
from megatron_rl.config import (
    LARGEST_RATIO,
    CorrectionSettings,
    ImportanceCorrection,
    KLEstimator,
    PolicyLossConfig,
    counted_twice,
)
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.dense_rows import (
    CORRECTION_SETTINGS,
    carry_prompt_weights,
    has_counts_for,
    is_carried,
    is_proportional,
    kl_of_tokens,
    loss_of_rows,
    marked_rows,
    read_config,
    read_name,
    signature_problem,
    tell_once,
)
from megatron_rl.hosts.given import Given, not_numbers
from megatron_rl.hosts.sampling import UNSCORED, SamplingVerdict, judge_recomputed_sampling, readers_of, value_at
from megatron_rl.hosts.sections import NEMO_RL
from megatron_rl.hosts.settings_line import read_overrides
from megatron_rl.loss_hub import get_loss_aggregation, get_policy_loss
from megatron_rl.step_metrics import finalise_metrics

PACKAGE, TRAINER = "nemo_rl", "nemo_rl.algorithms.grpo"
PROBED = "NVIDIA-NeMo/RL 7ea279abf"
KEY = "megatron_rl"
DIVISOR = "loss_aggregation_divisor"
# Settings of NeMo-RL's loss that ours reads, and their defaults.
CLIPS = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.2}
# Our parameter -> NeMo-RL's setting. The others are set by megatron_rl_<parameter>.
PARAMETERS = {"clip_ratio_c": "ratio_clip_c"}
# Settings that choose another loss, and what ours has for it.
OTHER_LOSSES = {
    "use_cispo": "++loss_fn.megatron_rl=cispo.<aggregation>",
    "disable_ppo_ratio": "++loss_fn.megatron_rl=reinforce.<aggregation>",
    "sequence_level_importance_ratios": "++loss_fn.megatron_rl=gspo.<aggregation>",
}
# NeMo-RL's truncation of sampling weights -> our correction. None: weights without bounds.
CORRECTIONS = {None: ImportanceCorrection.TIS, "tis": ImportanceCorrection.TIS, "icepop": ImportanceCorrection.ICEPOP}
# Our KL estimator takes the place of these settings of NeMo-RL's KL, and their defaults. The coefficient stays NeMo-RL's.
KL_ESTIMATOR, KL_PENALTY = f"{KEY}_kl_estimator", ("reference_policy_kl_penalty", 0.01)
KL_SETTINGS = {
    "reference_policy_kl_type": "k3",
    "use_on_policy_kl_approximation": False,
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
}
# A score of 0.0 beside one of the sampler's above this is that of a sure token, rounded.
SURE = -1e-3
GLOBAL_BATCH = "train_global_batch_size"
SIZES = ("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", f"policy.{GLOBAL_BATCH}")
# What NeMo-RL writes into advantages after its estimator.
AFTER_THE_ESTIMATOR = ("advantage_clip_low", "advantage_clip_high", "invalid_tool_call_advantage", "malformed_thinking_advantage")
# [B, S] each; position t is of token t, so that [:, 1:] belongs to the log-probabilities of next tokens.
COLUMNS = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
UNFILTERED = "curr_logprobs_unfiltered"
LOSS_ARGUMENTS = ("self", "next_token_logprobs", "data", "global_valid_seqs", "global_valid_toks")
LOSS_ATTRIBUTES = ("input_type", "loss_type", "use_fused_linear_logprobs", "metric_normalizations", "reference_policy_kl_penalty")


@dataclass(frozen=True, slots=True)
class NemoSettings:
    config: PolicyLossConfig
    is_on_policy: bool  # force_on_policy_ratio: the batch's old log-probabilities are placeholders
    has_unscored: bool = False
    """Tokens may have the score 0.0 because NeMo-RL's trainer leaves them out of its distribution."""
    warnings: tuple[str, ...] = ()

    @property
    def correction(self) -> CorrectionSettings:
        return CorrectionSettings.of(self.config)

    @property
    def has_companion(self) -> bool:
        return is_carried(self.config.loss_aggregation)

    def __str__(self) -> str:
        return f"{self.config.policy_loss}.{self.config.loss_aggregation}"


# Settings


def read_settings(loss_fn: Any, typed: Mapping[str, Any] = MappingProxyType({})) -> NemoSettings:
    """From NeMo-RL's loss_fn settings: a mapping, or its config model. typed: what the launch line says of loss_fn. Raises one
    ConfigError with every problem."""
    # NeMo-RL's model has made 1.0 of a number that was typed as true.
    settings = dict(loss_fn) | {name: value for name, value in typed.items() if isinstance(value, bool)}
    remedy = f"Add ++loss_fn.{KEY}=<loss>.<aggregation> to the launch line"
    loss_name, aggregation = read_name(f"loss_fn.{KEY}", settings.get(KEY), remedy, has_counts_for)
    loss, record = get_policy_loss(loss_name), get_loss_aggregation(aggregation)

    def given(name: str, default: Any = None) -> Given:
        added = "++" if name.startswith(KEY) else ""  # hydra adds a key that NeMo-RL's settings do not have
        return Given(f"{added}loss_fn.{name}", settings.get(name, default), default, True if name in typed else None)

    own = [parameter.name for parameter in loss.parameters if parameter.name not in PARAMETERS]
    ours = {name: given(f"{KEY}_{name}") for name in CORRECTION_SETTINGS}
    correction = {name: setting.value for name, setting in ours.items() if setting.is_chosen}
    truncation, has_theirs = settings.get("truncated_importance_sampling_type"), settings.get("use_importance_sampling_correction")
    twice = [f"{ours[name].name}={value}" for name, value in correction.items() if has_theirs]
    if has_theirs and truncation in CORRECTIONS:
        correction = {
            "importance_correction": CORRECTIONS[truncation].value,
            "importance_correction_low": settings.get("truncated_importance_sampling_ratio_min") or 0.0,
            "importance_correction_high": settings.get("truncated_importance_sampling_ratio") if truncation else LARGEST_RATIO,
        }
    estimator, penalty = given(KL_ESTIMATOR), given(*KL_PENALTY).value
    low, high = (given(*clip) for clip in CLIPS.items())
    has_penalty = isinstance(penalty, int | float) and not isinstance(penalty, bool) and 0 < penalty < float("inf")
    config, problems = read_config(
        f"{loss_name}.{aggregation}",
        loss_name,
        aggregation,
        (low, high),
        {name: given(theirs) for name, theirs in PARAMETERS.items()} | {name: given(f"{KEY}_{name}") for name in own},
        given(f"{KEY}_{DIVISOR}"),
        "{name}={value} on the launch line",
        [given(*KL_PENALTY)],
        kl_coefficient=float(penalty) if estimator.is_chosen and has_penalty else 0.0,
        kl_estimator=estimator.value if estimator.is_chosen else KLEstimator.K3,
        **correction,
    )
    if estimator.is_chosen:
        if estimator.value not in tuple(KLEstimator):
            problems.append(f"{estimator.name}={estimator.value} is not one of {', '.join(KLEstimator)}")
        if settings.get("use_kl_in_reward"):
            problems.append(
                f"{estimator.name}={estimator.value} has no effect beside loss_fn.use_kl_in_reward=true, which puts the KL into "
                "the rewards by NeMo-RL's own estimate; remove one of them"
            )
        elif not has_penalty:
            problems.append(
                f"{estimator.name}={estimator.value} needs a coefficient: set loss_fn.{KL_PENALTY[0]} to a number above 0, it is "
                f"{penalty}; or remove the estimator"
            )
        for theirs in (given(*setting) for setting in KL_SETTINGS.items()):
            if theirs.is_chosen:
                problems.append(f"{theirs.name}={theirs.value} has no effect beside {estimator.name}={estimator.value}; remove it")
    found = NemoSettings(config, bool(settings.get("force_on_policy_ratio")))
    if twice:
        problems.append(
            f"{', '.join(twice)} beside loss_fn.use_importance_sampling_correction: two corrections; remove one of them"
        )
    # A newer NeMo-RL may have more fields; any other name it keeps, and nobody reads it.
    fields = {*NEMO_RL.names, *getattr(type(loss_fn), "model_fields", ())}
    others = {f"loss_fn.{name}": value for name, value in settings.items() if name not in fields and not name.startswith(KEY)}
    problems += [f"{row.subject}={others[row.subject]}: {row.text}" for row in NEMO_RL.judge(others, (KEY,))]
    problems += not_numbers(given(name) for name in settings if name in NEMO_RL.numbers)
    allowed = [*sorted(own), *CORRECTION_SETTINGS, "kl_estimator", *([DIVISOR] if record.takes_divisor else [])]
    for key in sorted(key for key in settings if key.startswith(f"{KEY}_")):
        name = key.removeprefix(f"{KEY}_")
        if name not in (*allowed, DIVISOR):
            known = PARAMETERS | {"kl_coefficient": KL_PENALTY[0]}
            instead = f"set loss_fn.{known[name]}" if name in known else f"{found} has {', '.join(allowed)}"
            problems.append(f"loss_fn.{key}={settings[key]} has no effect: {instead}")
    problems += [*_setting_problems(found, settings), *found.correction.problems()]
    if problems:
        raise ConfigError(problems)
    return found


def typed_of(words: Sequence[str]) -> dict[str, Any]:
    """The settings of loss_fn among the words of a launch line."""
    found = read_overrides(words)
    return {name.removeprefix("loss_fn."): value for name, value in found.items() if name.startswith("loss_fn.")}


def _setting_problems(settings: NemoSettings, given: Mapping[str, Any]) -> Iterator[str]:
    loss = get_policy_loss(settings.config.policy_loss)
    for name, instead in OTHER_LOSSES.items():
        if given.get(name):
            yield f"loss_fn.{name}=true beside {KEY}={settings}: two losses in one launch; remove it. Ours has {instead}"
    if given.get("positive_example_nll_weight"):
        yield (
            f"loss_fn.positive_example_nll_weight={given['positive_example_nll_weight']}: NeMo-RL divides this term by the tokens "
            "of a micro-batch, so its weight depends on the micro-batch size; remove it"
        )
    truncation = given.get("truncated_importance_sampling_type")
    if given.get("use_importance_sampling_correction"):
        if truncation not in CORRECTIONS:
            yield (
                f"loss_fn.truncated_importance_sampling_type={truncation}: beside this switch our losses have "
                f"{', '.join(filter(None, CORRECTIONS))}, or null for weights without bounds; set one of these, or turn it off and "
                f"set ++loss_fn.{KEY}_importance_correction"
            )
    if settings.correction.kind != ImportanceCorrection.NONE and loss.anchor == "rollout":
        has_theirs = given.get("use_importance_sampling_correction")
        setting = "loss_fn.use_importance_sampling_correction=true" if has_theirs else f"++loss_fn.{KEY}_importance_correction"
        yield counted_twice(settings.correction.kind, loss.name, setting)
    if settings.has_companion and not is_proportional(loss):
        yield (
            f"{settings}: in NeMo-RL the advantages carry {settings.config.loss_aggregation}, which is right for a loss that is "
            f"proportional to the advantage, as grpo and gspo are; {loss.name} is not: choose another one"
        )


def judge_sampling(settings: NemoSettings, value_of: Callable[[str], Any]) -> SamplingVerdict:
    """value_of: a setting of NeMo-RL by its dotted name; None: not set."""
    loss, config = get_policy_loss(settings.config.policy_loss), settings.config
    readers = readers_of(config)
    if loss.level != "token":
        readers.append(f"the policy loss {loss.name}, whose ratio is of more than one token")
    if config.kl_coefficient and config.kl_estimator == KLEstimator.UNBIASED:
        readers.append(f"++loss_fn.{KL_ESTIMATOR}={config.kl_estimator}")
    return judge_recomputed_sampling(value_of, readers)


def check_launch(master_config: Any, typed: Mapping[str, Any] = MappingProxyType({})) -> NemoSettings:
    """The settings of a whole launch. typed: see read_settings. Raises one ConfigError with every problem."""
    problems: list[str] = []
    settings = None
    try:
        settings = read_settings(master_config.loss_fn, typed)
        sampling = judge_sampling(settings, functools.partial(value_at, master_config))
        problems += sampling.problems
        settings = replace(settings, has_unscored=sampling.keeps_a_part, warnings=sampling.warnings)
    except ConfigError as error:
        problems += error.problems
    policy, grpo = master_config.policy, master_config.grpo
    sizes = (grpo.num_prompts_per_step, grpo.num_generations_per_prompt, policy.get(GLOBAL_BATCH))
    problems += not_numbers(Given(name, size) for name, size in zip(SIZES, sizes, strict=True))
    if not (policy.get("megatron_cfg") or {}).get("enabled"):
        problems.append(
            "policy.megatron_cfg.enabled is not true: our losses are made for NeMo-RL's Megatron worker, and other workers "
            "multiply a loss by other factors; set policy.megatron_cfg.enabled=true and policy.dtensor_cfg.enabled=false"
        )
    if settings is not None and settings.has_companion:
        for name in AFTER_THE_ESTIMATOR:
            if getattr(grpo, name, None) is not None:
                problems.append(
                    f"grpo.{name}={getattr(grpo, name)} beside {settings}: NeMo-RL writes it into the advantages after they have "
                    f"the weights of prompt groups; set grpo.{name}=null, or another aggregation"
                )
        batch = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
        if policy[GLOBAL_BATCH] != batch:
            problems.append(
                f"policy.{GLOBAL_BATCH}={policy[GLOBAL_BATCH]} beside {settings}: an optimiser step must "
                f"have all {batch} samples of a batch, because a smaller one cuts prompt groups; set it to {batch}"
            )
    if problems or settings is None:
        raise ConfigError(problems)
    return settings


# The loss


class NemoLoss:
    """What NeMo-RL calls in the place of ClippedPGLossFn. It is pickled to the workers, which must have this package."""

    def __init__(self, own: Any, settings: NemoSettings, samples_per_step: int):
        """own: NeMo-RL's loss object of the same settings, for KL and metrics. samples_per_step: of all ranks, for prompt_mean."""
        self.own, self.settings, self.samples_per_step = own, settings, samples_per_step
        # What NeMo-RL's workers, wrappers and metrics read of a loss.
        for name in LOSS_ATTRIBUTES:
            setattr(self, name, getattr(own, name))

    def __call__(
        self,
        next_token_logprobs: Tensor,  # [B, S - 1] with gradient: whole samples, on each context-parallel rank
        data: Mapping[str, Any],  # token_mask, advantages and log-probabilities [B, S]; sample_mask [B]
        global_valid_seqs: Tensor,  # N of the global batch
        global_valid_toks: Tensor,  # T of the global batch
    ) -> tuple[Tensor, dict[str, Any]]:  # 0-d with gradient, NeMo-RL's metrics, which it adds up
        """sum_i w_i sum_t m_it u_it l_it + KL, u: the sampling correction.

        Masked values may be anything. Communication: none. Synchronises as NeMo-RL's own loss does for its metrics.
        Raises DataError for counts that are not those of the step, and for rows whose weight would be wrong.
        """
        config, correction = self.settings.config, self.settings.correction
        whole_mask = (data["token_mask"] * data["sample_mask"][:, None]).bool()
        mask = whole_mask[:, 1:]
        totals = self._read_step(data, mask, global_valid_seqs, global_valid_toks)
        data = {**data, **{name: torch.where(whole_mask, data[name], 0.0) for name in COLUMNS if name in data}}
        log_probs = torch.where(mask, next_token_logprobs, 0.0)
        advantages, counted = data["advantages"][:, 1:], totals
        old = log_probs.detach() if self.settings.is_on_policy else data["prev_logprobs"][:, 1:]
        if self.settings.has_companion:
            self._check_marks(advantages, mask)
            totals = StepTotals(num_samples=self.samples_per_step, num_prompts=None, num_tokens=totals.num_tokens)
        policy_loss = get_policy_loss(config.policy_loss)
        needs_sampler = correction.is_on or "rollout_log_probs" in policy_loss.inputs_needed
        sampled = data["generation_logprobs"][:, 1:] if needs_sampler else None
        unscored = self._unscored(log_probs, data, mask)
        scored = mask if unscored is None else mask & ~unscored
        rows = (log_probs, old, advantages, scored)
        output = loss_of_rows(config, totals, *rows, rollout_log_probs=sampled, counted=mask)
        kl, metrics = self._kl_and_metrics(log_probs, data, unscored, global_valid_seqs, global_valid_toks)
        if config.kl_coefficient:
            unfiltered = torch.where(mask, data[UNFILTERED], 0.0) if UNFILTERED in data else log_probs
            # As in policy_loss: the importance ratio of `unbiased` has the loss's own denominator.
            behind = sampled if sampled is not None and policy_loss.anchor == "rollout" else old
            kl = self._our_kl(unfiltered, data["reference_policy_logprobs"][:, 1:], behind, mask, counted)
            metrics["kl_penalty"] = kl.item() / config.kl_coefficient
        loss = output.loss if kl is None else output.loss + kl
        clipped = finalise_metrics(output.metrics).get("policy/clipped_ratio_fraction", 0.0) if output.metrics else 0.0
        metrics["loss"] = loss.item()
        # NeMo-RL adds what its calls return, so each call has its share of the step's tokens.
        metrics["clipped_ratio_fraction"] = clipped * int(scored.sum()) / totals.num_tokens
        if unscored is not None:
            metrics[UNSCORED] = int(unscored.sum()) / totals.num_tokens
        self.tell(totals)
        return loss, metrics

    def tell(self, totals: StepTotals) -> None:
        config = self.settings.config
        penalty, mean = self.own.reference_policy_kl_penalty, self.own.loss_type.value.replace("_level", "")
        regularizers = f"KL is NeMo-RL's, {penalty:g} x mean over {mean}s" if penalty else "no KL in the loss"
        if config.kl_coefficient:
            regularizers = f"KL {config.kl_coefficient:g} ({config.kl_estimator}) x mean over samples"
        tell_once(f"{KEY}={self.settings} in NeMo-RL", self.settings.config, totals, regularizers)

    def _unscored(self, log_probs: Tensor, data: Mapping[str, Any], mask: Tensor) -> Tensor | None:  # [B, S - 1] bool
        """The unmasked tokens that NeMo-RL's trainer has left out of its distribution, before this step or in it: their score is
        0.0, the sampler's is not. None: it leaves none out.

        Of a token that is the only one of both sets, the sampler's score is 0 too. Where it is the only one of the trainer's set
        alone it counts as left out: its score is a constant there."""
        if not self.settings.has_unscored:
            return None
        is_left_out = log_probs == 0
        if not self.settings.is_on_policy:
            is_left_out = is_left_out | (data["prev_logprobs"][:, 1:] == 0)
        return mask & is_left_out & (data["generation_logprobs"][:, 1:] < SURE)

    def _kl_and_metrics(
        self,
        log_probs: Tensor,
        data: dict[str, Any],
        unscored: Tensor | None,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """NeMo-RL's own loss at advantages of 0: nothing but its KL, with gradient, is left of it. None: it has no KL, or ours.

        In its metrics a token without a score has the sampler's, so that no ratio comes from it."""
        has_kl = self.own.reference_policy_kl_penalty != 0 and not self.settings.config.kl_coefficient
        mask = (data["token_mask"] * data["sample_mask"][:, None]).bool()[:, 1:]
        unfiltered = torch.where(mask, data[UNFILTERED], 0.0) if UNFILTERED in data else log_probs
        silent = {**data, "advantages": torch.zeros_like(data["advantages"]), UNFILTERED: unfiltered}
        current = log_probs.detach()
        if unscored is not None:
            sampled = data["generation_logprobs"]
            is_left_out = torch.nn.functional.pad(unscored, (1, 0))
            silent["prev_logprobs"] = torch.where(is_left_out, sampled, data["prev_logprobs"])
            current = torch.where(unscored, sampled[:, 1:], current)
        with nullcontext() if has_kl else torch.no_grad():
            loss, metrics = self.own(current, silent, global_valid_seqs, global_valid_toks)
        return (loss if has_kl else None), dict(metrics)

    def _our_kl(self, log_probs: Tensor, ref_log_probs: Tensor, sampled: Tensor, mask: Tensor, totals: StepTotals) -> Tensor:
        """The coefficient times the mean over the step's samples, 0-d with gradient."""
        config = self.settings.config
        kl = torch.where(mask, kl_of_tokens(config.kl_estimator, log_probs, ref_log_probs, sampled), 0.0).sum(-1)
        found = config.kl_coefficient * (regularizer_weights(mask.sum(-1), totals) * kl).sum()
        if not bool(found.isfinite()):
            raise DataError(
                "the KL term is not finite: reference_policy_logprobs has an unmasked value that is not, or is too far away for "
                f"the estimator {config.kl_estimator}; mask the token or drop the sample"
            )
        return found

    def _read_step(self, data: Mapping[str, Any], mask: Tensor, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> StepTotals:
        counted = [data["sample_mask"].sum(), mask.sum(), global_valid_seqs, global_valid_toks]
        samples, tokens, num_samples, num_tokens = (round(float(count)) for count in counted)
        if samples > num_samples or tokens > num_tokens:
            raise DataError(
                f"NeMo-RL gives a step of {num_samples} samples and {num_tokens} tokens to a call with {samples} samples and "
                f"{tokens} tokens: these are the placeholders of a trainer that sends a step in parts, which no weight can be made "
                "from; start examples/run_grpo.py"
            )
        return StepTotals(num_samples=max(num_samples, 1), num_prompts=None, num_tokens=max(num_tokens, 1))

    def _check_marks(self, advantages: Tensor, mask: Tensor) -> None:
        is_marked, has_advantage = marked_rows(advantages, mask, self.samples_per_step)
        if not bool((is_marked | ~has_advantage).all()):
            raise DataError(
                f"the advantages of {self.settings} do not have the weights of their prompt groups in a step of "
                f"{self.samples_per_step} samples: start the script through python -m megatron_rl.hosts.launch, and leave "
                "advantages, masks and batch as NeMo-RL's estimator has left them"
            )


# prompt_mean: the weights of prompt groups in NeMo-RL's advantages


def weigh_prompts(
    advantages: Tensor,  # [B, S]: the whole batch
    mask: Tensor,  # [B, S]
    prompt_ids: Tensor,  # [B, ...]: the tokens of each sample's prompt, equal rows are one prompt
) -> Tensor:  # [B, S] float32
    """P counts the prompts that have a trained token: NeMo-RL leaves samples that it drops out of N as well."""
    token_counts = mask[:, 1:].bool().sum(-1)
    _, group = torch.unique(prompt_ids.to(mask.device), dim=0, return_inverse=True)
    num_prompts = max(group[token_counts > 0].unique().numel(), 1)
    return carry_prompt_weights(advantages, mask, token_counts, group, num_prompts)


def with_prompt_weights(estimator: Any) -> Any:
    """NeMo-RL's estimator, whose advantages have the weights of prompt groups."""
    compute = estimator.compute_advantage

    def compute_advantage(*, prompt_ids: Tensor, mask: Tensor, **others: Any) -> Tensor:
        return weigh_prompts(compute(prompt_ids=prompt_ids, mask=mask, **others), mask, prompt_ids)

    estimator.compute_advantage = compute_advantage
    return estimator


# The door


def contract_problems(trainer: ModuleType) -> Iterator[str]:
    """What NeMo-RL's trainer lacks of the contract that our loss is written for."""
    expected = {
        "ClippedPGLossFn.__call__": LOSS_ARGUMENTS,
        "ClippedPGLossFn.__init__": ("self", "cfg", "use_fused_linear_logprobs"),
        "_create_advantage_estimator": ("master_config",),
        "setup": ("master_config",),
    }
    for path, arguments in expected.items():
        try:
            found: Any = functools.reduce(getattr, path.split("."), trainer)
        except AttributeError:
            yield f"{trainer.__name__} has no {path}"
            continue
        if problem := signature_problem(path, found, arguments, takes_more=path == "setup"):
            yield problem


@contextmanager
def loss_in_setup(refuse: Callable[[ConfigError], int], calls: list[str]) -> Iterator[None]:
    """NeMo-RL's `setup` makes our loss; each call is noted in `calls`, and one with problems ends the process by `refuse`.

    Undone at the end. Raises ConfigError for a NeMo-RL that cannot be imported, or has another contract."""
    try:
        trainer: Any = import_module(TRAINER)
    except ImportError as error:
        raise ConfigError(
            f"{TRAINER} cannot be imported ({error}): start the launcher as NeMo-RL's scripts, with uv run"
        ) from error
    if problems := [f"{problem} ({PROBED})" for problem in contract_problems(trainer)]:
        raise ConfigError(problems)
    own_loss, setup, create = trainer.ClippedPGLossFn, trainer.setup, trainer._create_advantage_estimator

    @functools.wraps(setup)
    def setup_with_our_loss(master_config: Any, *positional: Any, **named: Any) -> Any:
        calls.append(PACKAGE)
        try:
            settings = check_launch(master_config, typed_of(sys.argv[1:]))
        except ConfigError as error:
            sys.exit(refuse(error))
        for text in settings.warnings:
            print(f"megatron_rl: {text}", file=sys.stderr, flush=True)
        samples = master_config.policy[GLOBAL_BATCH]
        trainer.ClippedPGLossFn = lambda *given, **options: NemoLoss(own_loss(*given, **options), settings, samples)
        if settings.has_companion:
            trainer._create_advantage_estimator = lambda config: with_prompt_weights(create(config))
        return setup(master_config, *positional, **named)

    trainer.setup = setup_with_our_loss
    try:
        yield
    finally:
        trainer.ClippedPGLossFn, trainer.setup, trainer._create_advantage_estimator = own_loss, setup, create
