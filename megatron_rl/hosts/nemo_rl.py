"""NeMo-RL: our losses in the place of its ClippedPGLossFn, with the step's weights, and prompt_mean by its advantages.

    python -m megatron_rl.hosts.launch examples/run_grpo.py --config ... ++loss_fn.megatron_rl=<loss>.<aggregation>

What NeMo-RL's Megatron worker does with the number that a loss returns, c context-parallel ranks, M micro-batches:

    NeMo-RL: x 1 / c, x M / c; Megatron: x c / M; the gather of log-probabilities adds c equal gradients; DDP: sums over D ranks
    -> sum over ranks and micro-batches; with packing NeMo-RL may call a loss once a sequence, and adds

So a loss returns sum_i w_i S_i of what it is given, w_i from the counts of the whole global batch, which NeMo-RL hands over. KL is
NeMo-RL's own, with its formula and its own mean. So are the metrics.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.aggregation import StepTotals, weigh_tokens
from megatron_rl.config import (
    CorrectionSettings,
    ImportanceCorrection,
    LossAggregation,
    PolicyLossConfig,
    PolicyMetrics,
    counted_twice,
)
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.verl import is_proportional, mark, marked_rows, numbers
from megatron_rl.layout.groups import SINGLE
from megatron_rl.loss_hub import get_loss_aggregation, get_policy_loss, loss_aggregation_names, policy_loss_names
from megatron_rl.losses import PolicyLossOutput, loss_of_log_probs
from megatron_rl.step_metrics import finalise_metrics

PACKAGE, TRAINER = "nemo_rl", "nemo_rl.algorithms.grpo"
PROBED = "NVIDIA-NeMo/RL 7ea279abf"
KEY = "megatron_rl"
DIVISOR = "loss_aggregation_divisor"
# Settings of NeMo-RL's loss that ours read, and their defaults: a value that is its default is nobody's choice.
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
# What NeMo-RL writes into advantages after its estimator.
AFTER_THE_ESTIMATOR = ("advantage_clip_low", "advantage_clip_high", "invalid_tool_call_advantage", "malformed_thinking_advantage")
# [B, S] each; position t is of token t, so that [:, 1:] belongs to the log-probabilities of next tokens.
COLUMNS = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
UNFILTERED = "curr_logprobs_unfiltered"
LOSS_ARGUMENTS = ("self", "next_token_logprobs", "data", "global_valid_seqs", "global_valid_toks")
LOSS_ATTRIBUTES = ("input_type", "loss_type", "use_fused_linear_logprobs", "metric_normalizations", "reference_policy_kl_penalty")
# Where the exponents of a correction end: weights without bounds of NeMo-RL's.
LARGEST_RATIO = math.exp(20.0)


@dataclass(frozen=True, slots=True)
class NemoSettings:
    config: PolicyLossConfig
    is_on_policy: bool  # force_on_policy_ratio: the batch's old log-probabilities are placeholders

    @property
    def correction(self) -> CorrectionSettings:
        return CorrectionSettings.of(self.config)

    @property
    def has_companion(self) -> bool:
        """Advantages carry the aggregation, because NeMo-RL tells a loss nothing of prompts."""
        return self.config.loss_aggregation == LossAggregation.PROMPT_MEAN

    def __str__(self) -> str:
        return f"{self.config.policy_loss}.{self.config.loss_aggregation}"


# Settings


def read_settings(loss_fn: Any) -> NemoSettings:
    """From NeMo-RL's loss_fn settings: a mapping, or its config model. Raises one ConfigError with every problem."""
    given = dict(loss_fn)
    names = _read_name(given.get(KEY))
    loss, record = get_policy_loss(names[0]), get_loss_aggregation(names[1])
    ours = {name.removeprefix(f"{KEY}_"): value for name, value in given.items() if name.startswith(f"{KEY}_")}
    declared = {parameter.name for parameter in loss.parameters}
    parameters = {name: ours[name] for name in ours if name in declared - PARAMETERS.keys() and ours[name] is not None}
    parameters |= {name: given[theirs] for name, theirs in PARAMETERS.items() if name in declared and given.get(theirs) is not None}
    clips: list[float | None] = [given.get(name, default) for name, default in CLIPS.items()]
    if loss.clip_ratios is None or all(given.get(name, default) == default for name, default in CLIPS.items()):
        clips = [None, None]
    truncation = given.get("truncated_importance_sampling_type")
    correction: dict[str, Any] = {}
    if given.get("use_importance_sampling_correction") and truncation in CORRECTIONS:
        correction = {
            "importance_correction": CORRECTIONS[truncation].value,
            "importance_correction_low": given.get("truncated_importance_sampling_ratio_min") or 0.0,
            "importance_correction_high": given.get("truncated_importance_sampling_ratio") if truncation else LARGEST_RATIO,
        }
    config = PolicyLossConfig(
        policy_loss=names[0],
        loss_aggregation=names[1],
        loss_aggregation_divisor=ours.get(DIVISOR) if record.takes_divisor else None,
        clip_ratio_low=clips[0],
        clip_ratio_high=clips[1],
        loss_parameters=parameters,
        policy_metrics=PolicyMetrics.BASIC,
        **correction,
    )
    settings = NemoSettings(config, bool(given.get("force_on_policy_ratio")))
    problems = [*_setting_problems(settings, given, ours), *settings.correction.problems()]
    try:
        loss.clip_bounds(*clips)
        loss.resolve_parameters(parameters)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return settings


def _read_name(name: object) -> tuple[str, str]:
    """(loss, aggregation). Raises ConfigError, which lists what there is."""
    losses = [loss for loss in policy_loss_names() if "." not in loss]
    records = [get_loss_aggregation(one) for one in loss_aggregation_names() if "." not in one]
    aggregations = [
        one.name for one in records if one.needs is not None and (not one.needs_prompts or one.name == LossAggregation.PROMPT_MEAN)
    ]
    why = "it has one of each, as in gspo.prompt_mean"
    if isinstance(name, str):
        loss, _, aggregation = name.rpartition(".")
        if aggregation in aggregations and (loss in losses or "." in loss):
            get_policy_loss(loss)  # imports a loss of the user
            return loss, aggregation
        unknown = {"loss": loss, "aggregation": aggregation}
        known = {"loss": losses, "aggregation": aggregations}
        why = " and ".join(f"{unknown[kind] or 'nothing'!r} is no {kind}" for kind in known if unknown[kind] not in known[kind])
    raise ConfigError(
        f"loss_fn.{KEY}={name} does not name a loss and an aggregation: {why}. Losses: {', '.join(losses)}, or module.function. "
        f"Aggregations: {', '.join(aggregations)}. Add ++loss_fn.{KEY}=<loss>.<aggregation> to the launch line"
    )


def _setting_problems(settings: NemoSettings, given: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    loss, record = get_policy_loss(settings.config.policy_loss), get_loss_aggregation(settings.config.loss_aggregation)
    declared = {parameter.name for parameter in loss.parameters}
    for name, instead in OTHER_LOSSES.items():
        if given.get(name):
            yield f"loss_fn.{name}=true beside {KEY}={settings}: two losses in one launch; remove it. Ours has {instead}"
    if given.get("positive_example_nll_weight"):
        yield (
            f"loss_fn.positive_example_nll_weight={given['positive_example_nll_weight']}: NeMo-RL divides this term by the tokens "
            "of a micro-batch, so its weight depends on the micro-batch size; remove it"
        )
    if loss.clip_ratios is None:
        for name, default in CLIPS.items():
            if given.get(name, default) != default:
                yield f"loss_fn.{name}={given[name]} has no effect: {loss.name} has no clip; remove it"
    for parameter, theirs in PARAMETERS.items():
        if parameter not in declared and given.get(theirs) is not None:
            yield f"loss_fn.{theirs}={given[theirs]} has no effect: {loss.name} has no {parameter}; remove it"
    allowed = [*sorted(declared - PARAMETERS.keys()), *([DIVISOR] if record.takes_divisor else [])]
    for name in ours.keys() - set(allowed):
        instead = f"set loss_fn.{PARAMETERS[name]}" if name in PARAMETERS else f"{settings} has {', '.join(allowed) or 'none'}"
        yield f"loss_fn.{KEY}_{name}={ours[name]} has no effect: {instead}"
    divisor = ours.get(DIVISOR)
    if record.takes_divisor and divisor is None:
        yield f"{settings} needs its L: set ++loss_fn.{KEY}_{DIVISOR}, for Dr. GRPO the longest response in tokens"
    elif record.takes_divisor and not (isinstance(divisor, int | float) and 0 < divisor < float("inf")):
        yield f"loss_fn.{KEY}_{DIVISOR}={divisor!r} must be a number above 0: it is the L of {settings}"
    truncation = given.get("truncated_importance_sampling_type")
    if given.get("use_importance_sampling_correction"):
        if truncation not in CORRECTIONS:
            yield (
                f"loss_fn.truncated_importance_sampling_type={truncation}: our losses have {', '.join(filter(None, CORRECTIONS))}, "
                "or null for weights without bounds; set one of these"
            )
        if loss.anchor == "rollout":
            yield counted_twice(ImportanceCorrection.TIS, loss.name)
    if settings.has_companion and (loss.inputs_needed or not is_proportional(loss)):
        yield (
            f"{settings}: in NeMo-RL the advantages carry {record.name}, which is right for a loss that is proportional to the "
            f"advantage, as grpo, gspo and cispo are; {loss.name} is not known to be; choose another aggregation"
        )


def check_launch(master_config: Any) -> NemoSettings:
    """The settings of a whole launch. Raises one ConfigError with every problem."""
    problems: list[str] = []
    settings = None
    try:
        settings = read_settings(master_config.loss_fn)
    except ConfigError as error:
        problems += error.problems
    policy, grpo = master_config.policy, master_config.grpo
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
        if policy["train_global_batch_size"] != batch:
            problems.append(
                f"policy.train_global_batch_size={policy['train_global_batch_size']} beside {settings}: an optimiser step must "
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
        """sum_i w_i sum_t m_it u_it l_it + NeMo-RL's KL, u: the sampling correction.

        Masked values may be anything. Communication: none. Synchronises as NeMo-RL's own loss does for its metrics.
        Raises DataError for counts that are not those of the step, and for rows whose weight would be wrong.
        """
        config = self.settings.config
        whole_mask = (data["token_mask"] * data["sample_mask"][:, None]).bool()
        mask = whole_mask[:, 1:]
        totals = self._read_step(data, mask, global_valid_seqs, global_valid_toks)
        token_counts = mask.sum(-1)
        data = {**data, **{name: torch.where(whole_mask, data[name], 0.0) for name in COLUMNS if name in data}}
        log_probs = torch.where(mask, next_token_logprobs, 0.0)
        advantages = data["advantages"][:, 1:]
        old = log_probs.detach() if self.settings.is_on_policy else data["prev_logprobs"][:, 1:]
        if self.settings.has_companion:
            self._check_marks(advantages, mask, token_counts)
            totals = StepTotals(num_samples=self.samples_per_step, num_prompts=None, num_tokens=totals.num_tokens)
        aggregation = LossAggregation.SAMPLE_MEAN.value if self.settings.has_companion else config.loss_aggregation
        num_rows, width = mask.shape
        correction = self.settings.correction
        needs_sampler = correction.is_on or "rollout_log_probs" in get_policy_loss(config.policy_loss).inputs_needed
        output = loss_of_log_probs(
            config.policy_loss,
            log_probs.flatten(),
            old.flatten(),
            advantages.flatten(),
            mask.flatten(),
            torch.arange(num_rows + 1, dtype=torch.int32, device=mask.device) * width,
            weigh_tokens(aggregation, token_counts, totals, divisor=config.loss_aggregation_divisor),
            clip_ratio_low=config.clip_ratio_low,
            clip_ratio_high=config.clip_ratio_high,
            loss_parameters=config.loss_parameters,
            rollout_log_probs=data["generation_logprobs"][:, 1:].flatten() if needs_sampler else None,
            correction=correction if correction.is_on else None,
            advantages_per="token",
            token_counts=token_counts,
            metrics=config.policy_metrics,
            tp_group=SINGLE,  # each rank of tp and cp has the same whole rows
            cp_group=SINGLE,
        )
        _stop_on_nonfinite(output)
        kl, metrics = self._kl_and_metrics(log_probs, data, global_valid_seqs, global_valid_toks)
        loss = output.loss if kl is None else output.loss + kl
        clipped = finalise_metrics(output.metrics).get("policy/clipped_ratio_fraction", 0.0) if output.metrics else 0.0
        metrics["loss"] = loss.item()
        # NeMo-RL adds what its calls return, so each call has its share of the step's tokens.
        metrics["clipped_ratio_fraction"] = clipped * int(token_counts.sum()) / totals.num_tokens
        _tell_once(self.settings, totals, self)
        return loss, metrics

    def _kl_and_metrics(
        self, log_probs: Tensor, data: dict[str, Any], global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """NeMo-RL's own loss at advantages of 0: nothing but its KL, with gradient, is left of it. None: it has no KL."""
        has_kl = self.own.reference_policy_kl_penalty != 0
        mask = (data["token_mask"] * data["sample_mask"][:, None]).bool()[:, 1:]
        unfiltered = torch.where(mask, data[UNFILTERED], 0.0) if UNFILTERED in data else log_probs
        silent = {**data, "advantages": torch.zeros_like(data["advantages"]), UNFILTERED: unfiltered}
        with nullcontext() if has_kl else torch.no_grad():
            loss, metrics = self.own(log_probs.detach(), silent, global_valid_seqs, global_valid_toks)
        return (loss if has_kl else None), dict(metrics)

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

    def _check_marks(self, advantages: Tensor, mask: Tensor, token_counts: Tensor) -> None:
        is_marked, has_advantage = marked_rows(advantages, mask, token_counts, self.samples_per_step)
        if not bool((is_marked | ~has_advantage).all()):
            raise DataError(
                f"the advantages of {self.settings} do not have the weights of their prompt groups in a step of "
                f"{self.samples_per_step} samples: start the script through python -m megatron_rl.hosts.launch, and leave "
                "advantages, masks and batch as NeMo-RL's estimator has left them"
            )


def _stop_on_nonfinite(output: PolicyLossOutput) -> None:
    if output.num_nonfinite.is_cuda and bool((output.num_nonfinite > 0).any()):  # on the CPU the loss has raised by itself
        samples = torch.nonzero(output.num_nonfinite > 0).flatten().tolist()
        raise DataError(
            f"samples {samples} of the micro-batch have {int(output.num_nonfinite.sum())} unmasked tokens with a value that is not "
            "finite, in their log-probabilities or advantages: mask them or drop the samples"
        )


_told: set[str] = set()


def _tell_once(settings: NemoSettings, totals: StepTotals, loss: NemoLoss) -> None:
    """One line at the first step of this process, on the first rank."""
    if str(settings) in _told or (dist.is_initialized() and dist.get_rank() != 0):
        return
    _told.add(str(settings))
    record, divisor = get_loss_aggregation(settings.config.loss_aggregation), settings.config.loss_aggregation_divisor
    known = {"L": divisor, "N": totals.num_samples}
    if record.needs is not None and "num_tokens" in record.needs:
        known["T"] = totals.num_tokens
    penalty, mean = loss.own.reference_policy_kl_penalty, loss.own.loss_type.value.replace("_level", "")
    correction = settings.correction
    bounds = correction.bounds if correction.is_on else (0.0, 0.0)
    parts = [
        f"megatron_rl: {KEY}={settings} in NeMo-RL",
        numbers(settings.config),
        *([f"sampling weights {correction.kind} {bounds[0]:g} to {bounds[1]:g}"] if correction.is_on else []),
        f"step of {totals.num_samples} samples",
        f"weight of a token {record.weight_in_words(known)}" + (", in the advantages" if settings.has_companion else ""),
        f"learning rate against sample_mean {record.learning_rate_shift(divisor)}",
        f"KL is NeMo-RL's, {penalty:g} x mean over {mean}s" if penalty else "no KL in the loss",
    ]
    print(" | ".join(parts), file=sys.stderr, flush=True)


# prompt_mean: the weights of prompt groups in NeMo-RL's advantages


def weigh_prompts(
    advantages: Tensor,  # [B, S]: the whole batch
    mask: Tensor,  # [B, S]
    prompt_ids: Tensor,  # [B, ...]: the tokens of each sample's prompt, equal rows are one prompt
) -> Tensor:  # [B, S] float32
    """Advantages that turn sample_mean over B samples into prompt_mean, by (B / P) m_i / M_g, with a mark that the loss knows. P
    counts the prompts that have a trained token: NeMo-RL leaves samples that it drops out of N as well."""
    is_kept = mask.bool()
    token_counts = is_kept[:, 1:].sum(-1)
    _, group = torch.unique(prompt_ids.to(mask.device), dim=0, return_inverse=True)
    of_group = torch.zeros(int(group.max()) + 1, dtype=token_counts.dtype, device=mask.device).index_add(0, group, token_counts)
    num_samples, num_prompts = len(token_counts), int((of_group > 0).sum())
    totals = StepTotals(num_samples=num_samples, num_prompts=max(num_prompts, 1), num_tokens=int(token_counts.sum()))
    weights = weigh_tokens(LossAggregation.PROMPT_MEAN, token_counts, totals, prompt_token_counts=of_group[group])
    factors = (weights * token_counts * num_samples)[:, None]
    return mark(torch.where(is_kept, advantages.float() * factors, 0.0), token_counts, num_samples)


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
        taken = tuple(inspect.signature(found).parameters)
        if taken[: len(arguments)] != arguments or (path != "setup" and len(taken) != len(arguments)):
            yield f"{path} takes ({', '.join(taken)}), and ({', '.join(arguments)}) was probed"


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
            settings = check_launch(master_config)
        except ConfigError as error:
            sys.exit(refuse(error))
        samples = master_config.policy["train_global_batch_size"]
        trainer.ClippedPGLossFn = lambda *given, **options: NemoLoss(own_loss(*given, **options), settings, samples)
        if settings.has_companion:
            trainer._create_advantage_estimator = lambda config: with_prompt_weights(create(config))
        return setup(master_config, *positional, **named)

    trainer.setup = setup_with_our_loss
    try:
        yield
    finally:
        trainer.ClippedPGLossFn, trainer.setup, trainer._create_advantage_estimator = own_loss, setup, create
