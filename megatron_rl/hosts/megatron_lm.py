"""Megatron-LM: our flags beside its own, pretrain() in each of its signatures, and packed bins. No argument is changed.

Prompts are recorded before packing. A row without a prompt is padding, and no count contains it.
"""

from __future__ import annotations

import contextlib
import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_rl.arguments import add_megatron_rl_args, validate_megatron_rl_args
from megatron_rl.config import LARGEST_RATIO, PolicyLossConfig, PolicyMetrics, Route
from megatron_rl.errors import ConfigError, DataError, name_of
from megatron_rl.hosts.actor_checks import release_problems
from megatron_rl.hosts.base import MODEL_SIZES, Host, HostOptions
from megatron_rl.hosts.flags import validated, with_host_values
from megatron_rl.hosts.host_run import current_args
from megatron_rl.hosts.published import CLIP_HIGH_OF_DAPO, with_clip_of_dapo
from megatron_rl.hosts.step_sizes import PROCESSES, SizeNames
from megatron_rl.hosts.stock import MEAN_OF_TOKEN_MEANS, OF_COUNTED_TOKENS, Stock
from megatron_rl.hosts.train_rl_checks import CORRECTION_FLAG, TRAIN_RL_CHECKS, TrainRl
from megatron_rl.hosts.training_hooks import head_in_words, shift_in_words, start_line, tell_start, terms_in_words
from megatron_rl.layout.groups import ParallelGroups, maxima_anywhere, resolve_groups
from megatron_rl.loss_hub import clip_of, get_loss_aggregation
from megatron_rl.megatron.batch import PolicyBatch, PolicySample, StepContext, make_packed_batch, weigh_samples
from megatron_rl.megatron.forward_step import MicrobatchReport, PolicyForwardStep, check_finite
from megatron_rl.megatron.head import HeadSettings
from megatron_rl.megatron.kept_tokens import hook_finalize
from megatron_rl.megatron.model import model_config_of
from megatron_rl.megatron.probe import probe_schedule
from megatron_rl.megatron.responses import response_log_probs
from megatron_rl.megatron.router_losses import check_routers
from megatron_rl.megatron.samples import count_further_tokens, count_routed_tokens, unweighted
from megatron_rl.metrics.custom import named_metrics
from megatron_rl.metrics.step import step_metrics
from megatron_rl.step_counts import StepTotals
from megatron_rl.validation import config_warnings, flag_of
from megatron_rl.validation.checks import Asker, problems_of, warnings_of
from megatron_rl.validation.model_settings import model_notes

ArgsProvider = Callable[[ArgumentParser], ArgumentParser]


class MegatronLM(Host):
    """Its own loop calls our forward step, which counts the whole step itself: no total is left to the host."""

    name = "megatron_lm"
    package = "megatron"
    routes = (Route.MEGATRON_LM,)
    own_options = ("perform_rl_step", "grpo_group_size", "grpo_prompts_per_step")
    script_name = "train_rl|pretrain"
    parser_defaults: Mapping[str, object] = {}
    without_deviation = ""
    sizes = SizeNames(micro_batch="--micro-batch-size", ranks=(PROCESSES,), shared=MODEL_SIZES)

    def stock(self, options: HostOptions) -> Stock:
        """Of train_rl.py: the sum over a bin, divided by its tokens, or by all that ranks have counted. All terms are in it."""
        weight = OF_COUNTED_TOKENS if options["calculate_per_token_loss"] else MEAN_OF_TOKEN_MEANS
        return Stock(weight, weight, weight, "--calculate-per-token-loss")

    def recognises(self, names: Mapping[str, object]) -> bool:
        """True: it is asked last."""
        return True

    def config(self, args: Namespace, route: Route) -> PolicyLossConfig:
        return megatron_lm_config(args) if route == Route.MEGATRON_LM else super().config(args, route)

    def warnings(self, config: PolicyLossConfig, args: Namespace) -> list[str]:
        return launch_warnings(config, args)


HOST = MegatronLM()
# The first of our flags: a parser that has it has all of them.
OWN_FLAG = "--loss-aggregation"
# Our field -> train_rl.py's option for the same thing, and its default: the user may not have typed a value equal to it.
SAME_THING: dict[str, tuple[str, float]] = {
    "clip_ratio_low": ("grpo_clamp_eps_lower", 0.01),
    "clip_ratio_high": ("grpo_clamp_eps_upper", 0.01),
    "policy_temperature": ("rl_default_temperature", 1.0),
    "kl_coefficient": ("grpo_kl_beta", 0.001),
    "entropy_coefficient": ("grpo_entropy_term_weight", 0.0),
}


def compose_extra_args_provider(provider: ArgsProvider | None = None) -> ArgsProvider:
    """`provider`'s flags and ours, for extra_args_provider and for a host's add_custom_arguments; flags that the parser has
    already are not added again. Raises ConfigError when `provider` does not return the parser."""

    def add_args(parser: ArgumentParser) -> ArgumentParser:
        if provider is not None:
            parser = provider(parser)
            if not isinstance(parser, ArgumentParser):
                raise ConfigError(f"{name_of(provider)} returned {type(parser).__name__}: an arguments provider returns the parser")
        known = {flag for action in parser._actions for flag in action.option_strings}
        return parser if OWN_FLAG in known else add_megatron_rl_args(parser)

    return add_args


def megatron_lm_config(args: Namespace | None = None) -> PolicyLossConfig:
    """Our settings from Megatron-LM's arguments (None: its global ones).

    Under --perform-rl-step (train_rl.py) train_rl's own flag gives the value where our flag for the same thing is unset. Raises one
    ConfigError with every problem: what validate_megatron_rl_args finds, two values for the same thing, what our forward step
    would leave out of train_rl's loss, and prompt_mean over steps that cut prompt groups.
    """
    args = current_args() if args is None else args
    given, options = vars(args), HostOptions(args)
    if not options["perform_rl_step"]:
        return validate_megatron_rl_args(args, Route.MEGATRON_LM)
    known = {field: (option, default) for field, (option, default) in SAME_THING.items() if option in given}
    theirs = {field: (flag_of(option), given[option], given[option] != default) for field, (option, default) in known.items()}
    if options["rl_inference_logprobs_is_correction"]:
        theirs |= _correction_of_train_rl(given)
    merged, problems = with_host_values(given, theirs)
    launch = TrainRl(given, merged, options)
    problems += problems_of(TRAIN_RL_CHECKS, launch, Asker.VALIDATION)
    if (
        launch.counts_prompts
        and launch.allows_cut_groups
        and given.get("samples_per_prompt") is None
        and given.get("grpo_group_size")
    ):
        merged["allow_partial_prompt_groups"] = None  # train_rl's group size is the declared one; no other size is checked
    return validated(merged, Route.MEGATRON_LM, problems)


def _correction_of_train_rl(given: dict) -> dict[str, tuple[str, Any, bool]]:
    """train_rl's loss multiplies the clipped objective by exp(old - inference log-probability), truncated where a coefficient is
    given. Without a coefficient the flag also says that bins carry the sampler's log-probabilities, for another correction."""
    bound = given.get("rl_importance_sampling_truncation_coef")
    theirs: dict[str, tuple[str, Any, bool]] = {"importance_correction": (CORRECTION_FLAG, "tis", bound is not None)}
    if given.get("importance_correction") in (None, "tis"):
        value = LARGEST_RATIO if bound is None else bound  # a bound that truncates nothing
        theirs["importance_correction_high"] = (flag_of("rl_importance_sampling_truncation_coef"), value, bound is not None)
    return theirs


def launch_warnings(config: PolicyLossConfig, args: Namespace) -> list[str]:
    """config_warnings, what the model's settings do to a step, and what train_rl.py's sampling does to it."""
    notes = model_notes(vars(args), Route.MEGATRON_LM)
    of_dapo = with_clip_of_dapo(
        "--loss-aggregation prompt_mean",
        config.policy_loss,
        config.loss_aggregation,
        clip_of(config),
        f"--clip-ratio-high {CLIP_HIGH_OF_DAPO}",
    )
    warnings, options = [*config_warnings(config), *of_dapo, *(note.text for note in notes if note.is_note)], HostOptions(args)
    if options["perform_rl_step"]:
        warnings += warnings_of(TRAIN_RL_CHECKS, TrainRl(vars(args), asdict(config), options), Asker.VALIDATION)
    return warnings


def call_pretrain(pretrain, *, dataset_provider, model_provider, model_type, forward_step, extra_args_provider=None, **options):
    """Megatron-LM's `pretrain` with our flags in its parser, in the signature that the given function has.

        up to 0.17   pretrain(..., extra_args_provider=, args_defaults=) parses by itself
        from 0.18    pretrain(cfg_container, ...): parse_and_validate_args and pretrain_cfg_container_from_args are in its package

    options: args_defaults; model_config_from_args, the function that turns arguments into a model configuration (0.19 and later:
    gpt_config_from_args); and pretrain's own keywords, which must exist. Our flags are checked before the model is built, and in
    0.18 and later right after parsing. Raises ConfigError for any other signature.
    """
    parameters = inspect.signature(pretrain).parameters
    provider = compose_extra_args_provider(extra_args_provider)
    args_defaults = options.pop("args_defaults", {})
    model_config_from_args = options.pop("model_config_from_args", None)
    call = {
        "train_valid_test_dataset_provider": dataset_provider,
        "model_provider": _checked_provider(model_provider),
        "model_type": model_type,
        "forward_step_func": forward_step,
        **options,
    }
    if "cfg_container" in parameters:
        if "cfg_container" not in options:
            call["cfg_container"] = _parsed_container(pretrain, provider, args_defaults, model_config_from_args)
    elif "extra_args_provider" in parameters:
        if model_config_from_args is not None:
            raise ConfigError("model_config_from_args needs Megatron-LM 0.18 or later: this pretrain parses by itself; remove it")
        call |= {"extra_args_provider": provider, "args_defaults": args_defaults}
    else:
        raise ConfigError(
            f"{name_of(pretrain)}({', '.join(parameters)}) is no pretrain of Megatron-LM 0.13 to 0.20: neither cfg_container nor "
            "extra_args_provider; call it yourself, with compose_extra_args_provider at its parser"
        )
    unknown = sorted(call.keys() - parameters.keys())
    if unknown:
        raise ConfigError(f"{name_of(pretrain)} of this Megatron-LM takes no {', '.join(unknown)}: it has {', '.join(parameters)}")
    return pretrain(**call)


def _parsed_container(pretrain, provider: ArgsProvider, args_defaults: dict, model_config_from_args):
    package = pretrain.__module__.rpartition(".")[0]
    parse = import_module(f"{package}.arguments").parse_and_validate_args
    args = parse(extra_args_provider=provider, args_defaults=args_defaults)
    megatron_lm_config(args)
    make_container = import_module(f"{package}.argument_utils").pretrain_cfg_container_from_args
    return make_container(args) if model_config_from_args is None else make_container(args, model_config_from_args(args))


def announce(config: PolicyLossConfig, *, calculate_per_token_loss: bool, args: Namespace | None = None) -> None:
    """Probes the installed schedule on the groups that are up, and prints one line, and the warnings, on rank 0.

    Communication: the probe's steps. Raises ConfigError when a step's gradient would have a wrong scale.
    """
    probe = probe_schedule(calculate_per_token_loss=calculate_per_token_loss)
    groups, record = resolve_groups(), get_loss_aggregation(config.loss_aggregation)
    # N, P and T are counted anew for each step; its metrics hold them.
    weight = f"weight of a token {record.weight_in_words({'L': config.loss_aggregation_divisor})}"
    losses = f"policy_loss={config.policy_loss}, loss_aggregation={config.loss_aggregation}"
    parts = [
        losses,
        weight,
        shift_in_words(config, (config.kl_coefficient, config.entropy_coefficient)),
        head_in_words(config, groups.tp.size()),
        terms_in_words(config),
    ]
    told = config_warnings(config) if args is None else launch_warnings(config, args)
    tell_start(start_line(parts, HOST, probe, groups), told)


def _checked_provider(model_provider):
    """The provider, which first checks Megatron's arguments and arithmetic; None where a model configuration builds the model."""
    if model_provider is None:
        return None
    announced: list[bool] = []

    def build(*positional, **named):
        args = current_args()
        config, options = megatron_lm_config(args), HostOptions(args)
        if dist.is_initialized() and not announced:  # a model has several chunks under interleaved pipelining
            announced.append(True)
            if problems := list(release_problems(vars(args))):
                raise ConfigError(problems)
            announce(config, calculate_per_token_loss=options["calculate_per_token_loss"], args=args)
        model = model_provider(*positional, **named)
        if dist.is_initialized() and isinstance(model, nn.Module):
            is_packed = options["rl_use_sequence_packing"]
            check_routers(config.router_aux_loss, model, model_config_of(model), is_packed=is_packed)
        return model

    # A functools.partial, which Megatron-LM's scripts pass, has no name to take over.
    return wraps(model_provider)(build)


# Packed bins, as train_rl.py has: the forward step takes bins, weights them, and returns Megatron's 3-tuple. Counts are of
# the whole step, not of a bin or a micro-batch, and rows of padding are not counted.

# By row index before packing: the prompt, or the rollout. None: a row of padding.
NameOfRow = Sequence[int | str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBin:
    """One packed row of S positions, its n sequences side by side, as load_packed_data_by_index gives it; rows may be [1, S]."""

    tokens: Tensor  # [S] or [1, S]
    loss_mask: Tensor  # [S - 1], shifted: entry q says whether token q + 1 is trained
    advantages: Tensor  # [n]
    old_log_probs: Tensor | None  # [S - 1], entry q of token q + 1; None: on-policy
    ref_log_probs: Tensor | None  # [S - 1]
    seq_starts: Sequence[int]  # n entries; one more, the end, is ignored
    seq_lengths: Sequence[int]  # n
    seq_indices: Sequence[int]  # n, rows before packing
    rollout_log_probs: Tensor | None = None  # [S - 1], by the engine that sampled; for metrics and corrections


@dataclass(frozen=True, kw_only=True, slots=True)
class BinSample:
    """One sequence: its first token is the prompt, all others the response, of which the mask trains some."""

    tokens: list[int]
    loss_mask: list[int]
    prompt_id: int | str
    advantage: float
    start: int  # its first position in the bin
    rollout_id: int | str | None = None
    old_log_probs: list[float] | None = None
    ref_log_probs: list[float] | None = None
    rollout_log_probs: list[float] | None = None
    policy_version: int | None = None
    routes: None = None
    kept_ids: None = None
    kept_mass: None = None


def samples_of_bin(packed: PackedBin, prompt_of_row: NameOfRow, rollout_of_row: NameOfRow | None = None) -> list[BinSample]:
    """The bin's sequences without padding. rollout_of_row: None: each row is a rollout.

    Raises DataError for a row without a recorded prompt, a padding row with an unmasked token, a sequence shorter than two tokens
    or past the bin's end, lists of different lengths, and an unmasked position that predicts no token of its own sequence.
    """
    tokens = packed.tokens.flatten().tolist()
    names = ("loss_mask", "old_log_probs", "ref_log_probs", "rollout_log_probs")
    given = {name: getattr(packed, name) for name in names}
    rows = {name: _row(values, len(tokens), name) for name, values in given.items() if values is not None}
    advantages = packed.advantages.flatten().float().tolist()
    number = len(packed.seq_indices)
    sizes = {"seq_lengths": len(packed.seq_lengths), "advantages": len(advantages)}
    wrong = {name: size for name, size in sizes.items() if size != number}
    if wrong or len(packed.seq_starts) not in (number, number + 1):
        raise DataError(
            f"a bin of {number} seq_indices has {wrong | {'seq_starts': len(packed.seq_starts)}}: one of each a sequence"
        )
    samples, num_explained = [], 0
    starts = list(packed.seq_starts)[:number]
    for row, start, length, advantage in zip(packed.seq_indices, starts, packed.seq_lengths, advantages, strict=True):
        row, start, length = int(row), int(start), int(length)
        predicting = slice(start, start + max(length - 1, 0))
        num_unmasked = sum(value != 0 for value in rows["loss_mask"][predicting])
        prompt_id = _name_of(row, "prompt_of_row", prompt_of_row)
        rollout_id = None if rollout_of_row is None else _name_of(row, "rollout_of_row", rollout_of_row)
        if prompt_id is None:
            if num_unmasked:
                raise DataError(
                    f"row {row} has {num_unmasked} unmasked tokens and no prompt: record the prompt of each row that trains"
                )
            continue
        if length < 2 or start + length > len(tokens):
            raise DataError(
                f"row {row} has {length} tokens from position {start} of a bin of {len(tokens)}: a prompt and a response of at "
                "least one token each must lie in the bin"
            )
        num_explained += num_unmasked
        of_sample: dict[str, Any] = {name: values[predicting] for name, values in rows.items()}
        part = tokens[start : start + length]
        if rollout_of_row is not None and rollout_id is None:
            raise DataError(f"row {row} has the prompt {prompt_id!r} and no rollout: record the rollout of each row that trains")
        of_sample |= {"prompt_id": prompt_id, "rollout_id": rollout_id}
        samples.append(BinSample(tokens=part, advantage=advantage, start=start, **of_sample))
    num_unmasked = sum(value != 0 for value in rows["loss_mask"])
    if num_unmasked != num_explained:
        raise DataError(
            f"{num_unmasked - num_explained} unmasked positions of a bin predict no token of their own sequence: the first token "
            "of a sequence and padding cannot be trained; the mask must be shifted by one"
        )
    return samples


class PackedForwardStep:
    """`forward_step(data_iterator, model)` for packed bins on any layout, logits [1, S, V / tp]: nothing is gathered over tp.

    The report that Megatron's train_step logs holds the means and sums of docs/metrics.md; `metrics` has all of them.
    On a step's first micro-batch it takes all of the step's items from the iterator and counts them; `reports` are of the
    step before. It puts `check` in front of the finalize_model_grads_func that it finds in the model's config: all ranks refuse
    the optimiser step after a non-finite token. Where the config has none, call `check` before the optimiser.

    Communication: count_step's two exchanges over dp, which excludes cp, before a step; one number over dp-cp, pp and tp after it.
    """

    def __init__(
        self,
        read_bin: Callable[[object], PackedBin],  # an item of the iterator -> its bin
        prompt_of_row: Callable[[], NameOfRow],  # of the current collection of rollouts
        num_microbatches: Callable[[], int],  # Megatron's get_num_microbatches
        *,
        vocab_size: int,  # the true one, without padding
        rollout_of_row: Callable[[], NameOfRow] | None = None,  # None: each row is one, which one_sample_per_rollout must say
        config: PolicyLossConfig | None = None,  # None: from Megatron-LM's arguments
        groups: ParallelGroups | None = None,  # None: from the model
    ):
        self._read_bin, self._prompt_of_row, self._num_microbatches = read_bin, prompt_of_row, num_microbatches
        self._vocab_size, self._config, self._groups = vocab_size, config, groups
        self._rollout_of_row = rollout_of_row
        self._forward_step: PolicyForwardStep | None = None
        self._waiting: dict[int, list[PolicyBatch]] = {}  # by model chunk
        self.reports: list[MicrobatchReport] = []
        self._groups_of_step: ParallelGroups | None = None

    @property
    def config(self) -> PolicyLossConfig:
        if self._config is None:
            self._config = megatron_lm_config()
        return self._config

    def __call__(self, data_iterator: Iterator, model):
        if self._forward_step is None:
            self._forward_step = PolicyForwardStep(
                self.config, vocab_size=self._vocab_size, groups=self._groups, reports_metrics=True
            )
        waiting = self._waiting.get(id(model)) or self._next_step(data_iterator, model)
        self._waiting[id(model)] = waiting[1:]
        return self._forward_step(iter(waiting[:1]), model)

    def check(self) -> None:
        """Each rank calls it between the schedule and the optimiser step; DataError on all ranks after a non-finite token.

        On the CPU the loss has raised before. Synchronises once.
        """
        self.reports = [] if self._forward_step is None else self._forward_step.take_reports()
        counts = [report.num_nonfinite.sum() for report in self.reports]
        worst = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)
        if maxima_anywhere(worst[None], self._groups_of_step or resolve_groups()) != [0]:
            check_finite(self.reports)
            raise DataError("another rank met an unmasked token that is not finite: the optimiser step is refused; see its message")

    def metrics(self) -> dict[str, float]:
        """All metrics of the step before, with what train_step cannot carry: minima, maxima, effective sample size, and what needs
        rollout_log_probs. Empty at --policy-metrics none.

        Communication: as metrics.step.step_metrics; every rank calls it, after the step. Synchronises once.
        """
        if self.config.policy_metrics == PolicyMetrics.NONE:
            return {}
        has_entropy = self.config.policy_metrics == PolicyMetrics.WITH_ENTROPY
        groups = self._groups_of_step or resolve_groups()
        statistics = [report.statistics for report in self.reports if report.statistics is not None]
        custom = named_metrics(self.config.custom_policy_metrics)
        return step_metrics(statistics, groups, has_entropy=has_entropy, custom=custom)

    def log_probs(self, model, bins: Sequence[PackedBin]) -> list[Tensor]:  # of each bin [S - 1] float32, 0 outside sequences
        """Log-probabilities by the model as it is, with the loss's own temperature and rounding: old_log_probs of ratio 1."""
        groups = resolve_groups(model) if self._groups is None else self._groups
        prompts, context = self._prompt_of_row(), StepContext(totals=StepTotals(1, None, 1), num_microbatches=1)
        rows = [samples_of_bin(packed, prompts) for packed in bins]
        plain = [[unweighted(sample) for sample in samples] for samples in rows]
        batches = [_batch(packed, samples, context, groups) for packed, samples in zip(bins, plain, strict=True)]
        lengths = [[(len(sample.tokens), len(sample.tokens) - 1) for sample in samples] for samples in rows]
        values = response_log_probs(
            model,
            batches,
            lengths,
            temperature=self.config.policy_temperature,
            vocab_size=self._vocab_size,
            backend=self.config.policy_loss_backend,
            groups=groups,
            head=HeadSettings.of(self.config, knows_mtp=True),
        )
        filled = []
        for packed, samples, of_bin in zip(bins, rows, values, strict=True):
            whole = torch.zeros(packed.tokens.numel() - 1)
            for sample, row in zip(samples, of_bin, strict=True):
                whole[sample.start : sample.start + row.numel()] = row
            filled.append(whole)
        return filled

    def _next_step(self, data_iterator: Iterator, model) -> list[PolicyBatch]:
        self._groups_of_step = groups = resolve_groups(model) if self._groups is None else self._groups
        self._check_before_finalize(model_config_of(model))
        bins: list[PackedBin] = []
        wanted = self._num_microbatches()
        with contextlib.suppress(StopIteration):
            while len(bins) < wanted:
                bins.append(self._read_bin(next(data_iterator)))  # Megatron-LM's RerunDataIterator has no __iter__
        if not bins or len(bins) != wanted:
            raise DataError(f"the iterator ended after {len(bins)} of the step's {wanted} micro-batches: a step needs all of them")
        rollouts = None if self._rollout_of_row is None else self._rollout_of_row()
        return batches_of_step(self.config, bins, self._prompt_of_row(), groups, rollouts, model_config_of(model))

    def _check_before_finalize(self, model_config) -> None:
        """The schedule calls finalize on each rank after the last backward, and not in a forward-only pass."""
        hook_finalize(model_config, check=self.check)


def batches_of_step(
    config: PolicyLossConfig,
    bins: Sequence[PackedBin],
    prompt_of_row: NameOfRow,
    groups: ParallelGroups,
    rollout_of_row: NameOfRow | None = None,  # None: each row is a rollout
    model_config: Any = None,  # a TransformerConfig, needed where the model trains multi-token prediction
) -> list[PolicyBatch]:
    """One PolicyBatch for each of this data-parallel rank's bins of a whole step, weighted by the whole step's counts.

    Raises ConfigError where rows may be turns of one rollout, the aggregation counts rollouts, and nothing says which they are."""
    if (
        rollout_of_row is None
        and not config.one_sample_per_rollout
        and get_loss_aggregation(config.loss_aggregation).counts_rollouts
    ):
        raise ConfigError(
            f"loss_aggregation={config.loss_aggregation} counts rollouts, and a rollout may be several rows of a bin, one for each "
            "turn: give PackedForwardStep rollout_of_row, as take_rollouts(...).rollout_of_row; or, if each rollout is one row, "
            "--one-sample-per-rollout"
        )
    if rollout_of_row is not None and config.one_sample_per_rollout:
        raise ConfigError("--one-sample-per-rollout has no effect beside rollout_of_row, which names each row's rollout: remove it")
    samples = [samples_of_bin(packed, prompt_of_row, rollout_of_row) for packed in bins]
    mine = [sample for of_bin in samples for sample in of_bin]
    weighted, totals = weigh_samples(config, mine, groups)
    in_order = iter(weighted)
    context = StepContext(
        totals=totals,
        num_microbatches=len(bins),
        num_routed_tokens=count_routed_tokens(config, mine, groups),
        num_further_tokens=None if model_config is None else count_further_tokens(model_config, mine, groups),
    )
    return [_batch(packed, [next(in_order) for _ in of_bin], context, groups) for packed, of_bin in zip(bins, samples, strict=True)]


def _batch(packed: PackedBin, samples: Sequence[PolicySample], context: StepContext, groups: ParallelGroups) -> PolicyBatch:
    """Rows keep the bin's length, so that shapes agree over a pipeline."""
    return make_packed_batch(samples, context, row_length=packed.tokens.numel(), cp_group=groups.cp, device=packed.tokens.device)


def _name_of(row: int, title: str, name_of_row: NameOfRow) -> int | str | None:
    if not 0 <= row < len(name_of_row):
        raise DataError(f"row {row} has no entry in {title}, which holds {len(name_of_row)}: one a row, None where it only pads")
    return name_of_row[row]


def _row(values: Tensor, num_tokens: int, name: str) -> list:
    if values.numel() != num_tokens - 1:
        raise DataError(
            f"{name} has {values.numel()} entries for a bin of {num_tokens} tokens: it is shifted, one for each token but the first"
        )
    return values.flatten().tolist()
