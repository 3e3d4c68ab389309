"""A host is one object that says how a framework differs from the others; HostOptions and HostLaunch say what a launch asks for.

Each host has its own file beside this one. All other code asks the object, and names no host.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import import_module
from typing import Any

from torch import Tensor

from megatron_rl.aggregation_record import AggregationRecord, Formula
from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import HOST_NAMES, ROLLOUT_HOST_NAMES
from megatron_rl.hosts.batch import HostBatch, HostResponses, read_host_batch, read_host_responses
from megatron_rl.hosts.closed_words import closest, none_of, refused
from megatron_rl.hosts.dealing import Dealing
from megatron_rl.hosts.flags import host_config, is_mis, known_correction, normalised_weights, unjudged_correction
from megatron_rl.hosts.kept_ids import KeptIds
from megatron_rl.hosts.programs import SUPERVISED
from megatron_rl.hosts.step_sizes import MODEL_KINDS, SizeNames, whole_number
from megatron_rl.hosts.stock import MEAN_OF_RANK_SUMS, MTP_IS_NOT_JUDGED, OF_COUNTED_TOKENS, SAMPLE_MEAN, Stock, has_sample_ratio
from megatron_rl.layout.groups import Group
from megatron_rl.loss_hub import clip_of, get_loss_aggregation
from megatron_rl.registries.dotted import import_dotted
from megatron_rl.step_counts import StepTotals
from megatron_rl.validation import HOST_SWITCHES, config_warnings, flag_of
from megatron_rl.validation.auxiliary_losses import MODEL_SETTINGS
from megatron_rl.validation.checks import Row
from megatron_rl.validation.experts import EXPERT_SETTINGS
from megatron_rl.validation.model_settings import FURTHER_SETTINGS

INIT_LINE = "--custom-megatron-init-path megatron_rl.hooks.custom_megatron_init"
GUARD_LINE = "--custom-megatron-before-train-step-hook-path megatron_rl.hooks.before_train_step"
REDUCER_FLAG = "--custom-pg-loss-reducer-function-path"
REDUCER_LINE = f"{REDUCER_FLAG} megatron_rl.reducers.get_pg_loss_reducer"
REWARD_LINE = "--custom-reward-post-process-path megatron_rl.hooks.reward_post_process"
CONVERT_LINE = "--custom-convert-samples-to-train-data-path megatron_rl.hooks.convert_samples_to_train_data"
CUSTOM_LOSS_LINE = "--loss-type custom_loss --custom-loss-function-path megatron_rl.hooks.custom_loss"

DROPPED_BY_FSDP = "--train-backend fsdp drops the token count"
# miles divides what the step of an adapter has gathered by this, and a train batch by nothing.
BATCH_OF_AN_ADAPTER = "the rollout_batch_size x n_samples_per_prompt of each adapter's own file"
EXACT_BESIDE_FSDP = "--train-backend megatron, or no --calculate-per-token-loss, which is sample_mean"
# miles's example of Dr. GRPO, as it is published.
PUBLISHED_REDUCER, PUBLISHED_DIVISOR = "DrGRPO.custom_reducer.get_pg_loss_reducer", 1000.0

MODEL_SIZES = tuple(flag_of(f"{kind}_parallel_size") for kind in MODEL_KINDS)

# Converts (arguments, samples of a rollout batch) into the host's training data.
Converter = Callable[[Namespace, Sequence], dict]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLoss:
    """What the host's own policy loss does, as far as our loss reports the same metrics."""

    drops_masked_values: bool = True
    """Masked tokens are replaced before anything is computed; else their values are multiplied by 0, in the backward too."""
    always_has_entropy: bool = False
    """Entropy is computed and reported without a coefficient."""
    has_ess_ratio: bool = False
    """The effective sample size of the importance ratios is reported."""
    has_rollout_kl: bool = False
    """The KL between trained and sampled log-probabilities is reported, beside their absolute difference."""
    compares_trained_with_rollout: bool = True
    """Under --use-rollout-logprobs that difference is taken of the log-probabilities in training, else of the old ones."""
    needs_log_probs: bool = False
    """Old log-probabilities are in each batch, unless the settings say that they are not needed."""
    correction_functions: Mapping[str, str] = field(default_factory=dict)
    """The host's own values of --custom-tis-function-path -> our correction with the same weights. They leave the masks alone."""
    kept: KeptIds | None = None
    """How it hands a loss the ids that its sampler kept; None: it does not."""


class Host:
    """One framework. A subclass overrides what is different there; the rest is common to all.

    What a host does with what a loss returns, D data-parallel x context-parallel ranks and M micro-batches:

        not per token   the host: x M D / N, Megatron: / (M D)   ->  (1/N) sum of the results over ranks and micro-batches
        per token       the host: x cp, Megatron: / (cp T)       ->  (1/T) sum of the results over ranks and micro-batches
    """

    name: str
    package: str
    """What its training scripts import."""
    routes: tuple[Route, ...] = (Route.REDUCER, Route.CUSTOM_LOSS)
    """How a launch of this host may reach our loss; which flag acts where is validation.ROUTES_OF_FLAG."""
    script_name: str = ""
    """A regular expression that names of this host's scripts match; empty: a name says nothing."""
    training_package: str | None = None
    """Its modules model and actor, of a training actor, in which our head is placed; None: the host gives our code the model."""
    parser_module: str | None = None
    """Where its scripts take parse_args from; None: it needs no launcher of megatron_rl."""
    refuses_unknown_flags: bool = True
    """Its parser ends the launch at an unknown flag; else it drops the flag."""
    own_options: tuple[str, ...] = ()
    """Options that no other host has."""
    option_names: Mapping[str, str] = {}
    """Name of an option in OPTIONS -> the name that this host has for it, where they differ. Options of Megatron have one name."""
    marks: tuple[str, ...] = ()
    """Options that tell this host from those after it in HOST_NAMES."""
    parser_defaults: Mapping[str, object] = {
        "advantage_estimator": "grpo",
        "eps_clip": 0.2,
        "kl_loss_type": "k1",
        "n_samples_per_prompt": 1,
        "rollout_batch_size": None,
    }
    """Its parser's defaults for options that our checks read."""
    choices: Mapping[str, tuple[str, ...]] = {}
    """Flags of the loss of which its parser takes these words alone."""
    turned_off: tuple[str, ...] = (
        "disable_grpo_std_normalization",
        "disable_rewards_normalization",
        "disable_compute_advantages_and_returns",
        "no_check_for_nan_in_loss_and_grad",
    )
    """Its flags whose option has another name, by theirs: a slip of one is told."""
    rollout_functions: tuple[str, ...] = ()
    """The host's own values of --rollout-function-path: each function makes one sample of a rollout."""
    loss: HostLoss = HostLoss()
    without_deviation: str = "--disable-grpo-std-normalization"
    """What leaves the deviation of a group's rewards out of the advantages; empty: nothing does."""
    sizes: SizeNames = SizeNames(
        micro_batch="--micro-batch-size",
        ranks=("--actor-num-nodes", "--actor-num-gpus-per-node"),
        shared=MODEL_SIZES,
        by_tokens={"--use-dynamic-batch-size": "--max-tokens-per-gpu"},
        dealing=lambda value_of: Dealing("the host packs them first-fit"),
        of_budget=("--context-parallel-size",),
        defaults={"--actor-num-nodes": 1, "--actor-num-gpus-per-node": 8},
    )
    """The flags that say how a step is cut, for a step that doctor and explain are given."""

    def sizes_of(self, options: HostOptions) -> SizeNames:
        """Of one launch: FSDP has no parallelism but of data."""
        return replace(self.sizes, shared=(), of_budget=()) if options["train_backend"] == "fsdp" else self.sizes

    def __str__(self) -> str:
        return self.name

    def refused_words(self, flags: Iterable[tuple[str, Sequence[str]]]) -> Iterator[Row]:
        """Of flags with their values: those that its parser does not take."""
        for flag, values in flags:
            words = self.choices.get(flag, ())
            if words and len(values) == 1 and values[0] not in words:
                yield refused(str(self), flag, none_of(flag, values[0], words, closest(values[0], words)))

    def filled_in(self, values: Mapping[str, object]) -> dict[str, object]:
        """What its parser sets from other options: the size of a step that is given as a number of steps."""
        names = ("rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout")
        prompts, size, steps = (whole_number(values.get(name)) for name in names)
        if values.get("global_batch_size") is not None or prompts is None or size is None or steps is None:
            return {}
        return {"global_batch_size": prompts * size // steps or None}

    def recognises(self, names: Mapping[str, object]) -> bool:
        """Whether options of these names are a launch of this host."""
        return any(mark in names for mark in self.marks)

    def denominators(self, options: HostOptions) -> StepTotals:
        """The step's totals for our losses: 1 where the host divides by the total afterwards (rollouts, or tokens per token), None
        where the loss cannot know it (prompts)."""
        return StepTotals(num_samples=1, num_prompts=None, num_tokens=1)

    def batch(
        self, batch: Mapping, logits: Tensor, options: HostOptions, cp_group: Group, kept: KeptIds | None = None, tp_size: int = 1
    ) -> HostBatch:
        """The host's micro-batch as flat rows. Communication and errors: see batch.read_host_batch."""
        is_contiguous, is_padded = options["allgather_cp"] and cp_group.size() > 1, options["qkv_format"] == "bshd"
        return read_host_batch(
            batch, logits, cp_group, is_padded=is_padded, is_contiguous=is_contiguous, kept=kept, tp_size=tp_size
        )

    def responses(self, batch: Mapping, logits: Tensor, options: HostOptions, cp_group: Group) -> HostResponses:
        """The response tokens of a micro-batch without a loss. See batch.read_host_responses."""
        is_contiguous = options["allgather_cp"] and cp_group.size() > 1
        return read_host_responses(batch, logits, cp_group, is_padded=options["qkv_format"] == "bshd", is_contiguous=is_contiguous)

    def measured(self, found: dict[str, list[Tensor]], logits: Tensor) -> Any:
        """What its get_log_probs_and_entropy returns for these lists."""
        return found

    def rollout_key(self, position: int, index: int | None):
        """The rollout of a sample without a rollout_id, as the host counts. DataError where it would count several as one."""
        if index is None:
            raise DataError(
                f"sample {position} has neither rollout_id nor index: the host would count all such samples as one rollout; set "
                "one of them where the rollout function makes its samples"
            )
        return index

    def takes_checkpoint_coefficient(self, options: HostOptions) -> bool:
        """Whether the model's auxiliary loss has the coefficient of the checkpoint's config.json; else the arguments decide."""
        return False

    def reason_for_split_by_samples(self, options: HostOptions, is_multimodal: bool) -> str | None:
        """Why steps are cut without looking at rollouts; None: they are cut by rollout."""
        return None

    def config(self, args: Namespace, route: Route) -> PolicyLossConfig:
        """Our settings on a route of this host. Raises one ConfigError with every problem."""
        if companion_of(args) == "convert":
            # The converter makes each prompt one rollout: the batch size then counts prompts, and no step cuts a group.
            args = Namespace(**{**vars(args), "global_batch_size": None})
        return host_config(args, HostOptions(args), route)

    def warnings(self, config: PolicyLossConfig, args: Namespace) -> list[str]:
        """What is said at start of a launch that calls our forward step."""
        return config_warnings(config)

    def stock(self, options: HostOptions) -> Stock | str | None:
        """What its own loss weighs a token, or why that is not judged; None: not known here. It divides by the rollouts of the
        step, or Megatron by the tokens that all ranks have counted."""
        if options["loss_type"] == "sft_loss":
            return f"--loss-type sft_loss {SUPERVISED}"
        if options["loss_type"] != "policy_loss":
            return None
        reducer = options["custom_pg_loss_reducer_function_path"]
        weight, dropped = OF_COUNTED_TOKENS if options["calculate_per_token_loss"] else SAMPLE_MEAN, ""
        if drops_token_count(options):
            weight, dropped = MEAN_OF_RANK_SUMS, DROPPED_BY_FSDP
        kl = weight if options["use_kl_loss"] and options["kl_loss_coef"] else None
        policy, known, remarks = (None if reducer else weight), dict[str, float](), list[str]()
        if reducer and str(reducer).replace(":", ".").endswith(PUBLISHED_REDUCER):
            is_sum, cp_size = options["calculate_per_token_loss"], options["context_parallel_size"]
            policy, known = (weight, known) if is_sum else (Formula(L=-1, N=-1), {"L": PUBLISHED_DIVISOR})
            remarks += [f"{reducer} ends a run with --context-parallel-size {cp_size}: it takes 1 alone"] if cp_size != 1 else []
        elif reducer and not names_ours(reducer, "get_pg_loss_reducer"):
            return f"the policy term is reduced by {reducer}, which is not known here"
        normalised = normalised_weights(options)
        if (unjudged := unjudged_correction(options)) is not None:
            remarks.append(unjudged)
        elif normalised is None and options["use_tis"] and is_mis(options):
            remarks.append(f"{options['custom_tis_function_path']} weighs and rejects tokens by what is in their own sample")
        remarks += remarks_on_the_model(options)
        entropy, value = (weight if is_on else None for is_on in (options["entropy_coef"], options["advantage_estimator"] == "ppo"))
        varies = () if normalised is None else (normalised,)
        of_samples = has_sample_ratio(options["advantage_estimator"])
        return Stock(
            policy,
            kl=kl,
            entropy=entropy,
            value=value,
            exact=EXACT_BESIDE_FSDP if dropped else None,
            known=known,
            remarks=tuple(remarks),
            varies=varies,
            has_sample_ratio=of_samples,
            dropped=dropped,
        )

    def converter(self) -> Converter | None:
        """The host's own conversion of samples; None: it has none. ConfigError where this version keeps it elsewhere."""
        return None


def drops_token_count(options: HostOptions) -> bool:
    """The FSDP backend of miles does nothing with the count that a loss returns, and takes a mean over its ranks."""
    return options["train_backend"] == "fsdp" and options["calculate_per_token_loss"]


def remarks_on_the_model(options: HostOptions) -> list[str]:
    """What a model adds to whichever loss trains it."""
    of_adapters = [f"multi-LoRA: N is {BATCH_OF_AN_ADAPTER}, and a step here is one of an adapter"] if options["multi_lora"] else []
    return of_adapters + ([MTP_IS_NOT_JUDGED.format("--enable-mtp-training")] if options["enable_mtp_training"] else [])


@cache
def known_hosts() -> tuple[Host, ...]:
    """All hosts, in the order in which they are asked whether a launch is theirs."""
    return tuple(import_module(f"megatron_rl.hosts.{name}").HOST for name in HOST_NAMES)


def host_named(name: str) -> Host:
    return next(host for host in known_hosts() if host.name == name)


def rollout_hosts() -> tuple[Host, ...]:
    """The hosts that call our reducer or our loss; the others call our forward step."""
    return tuple(host_named(name) for name in ROLLOUT_HOST_NAMES)


def import_of_host(module_name: str, attribute: str, host: Host) -> Any:
    """A module of the host that has this attribute. ConfigError where it is missing: the reward hook does not need it."""
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{module_name} of {host} cannot be imported ({error}): use {REWARD_LINE} instead") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{module_name} of this {host} has no {attribute}: use {REWARD_LINE} instead")
    return module


def reward_function(options: HostOptions) -> Callable | None:
    """The function of --custom-reward-post-process-path, for a host's own conversion."""
    path = options["custom_reward_post_process_path"]
    return import_dotted(path, "--custom-reward-post-process-path") if path else None


# Of miles and slime; their estimators differ.
CHOICES = {"--loss-type": ("policy_loss", "sft_loss", "custom_loss"), "--kl-loss-type": ("k1", "k2", "k3", "low_var_kl")}
ESTIMATORS = ("grpo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")

# A host's option -> its value where it is absent. Any other name is a programming error. Where a host lacks an option, the value
# says what that host always does.
OPTIONS: dict[str, object] = {
    **HOST_SWITCHES,
    "advantage_estimator": None,
    "context_parallel_size": 1,
    "cp_comm_type": None,
    "custom_advantage_function_path": None,
    "custom_convert_samples_to_train_data_path": None,
    "custom_generate_function_path": None,
    "custom_loss_function_path": None,
    "custom_megatron_before_log_prob_hook_path": None,
    "custom_megatron_before_train_step_hook_path": None,
    "custom_megatron_init_path": None,
    "custom_pg_loss_reducer_function_path": None,
    "custom_reward_post_process_path": None,
    "custom_tis_function_path": None,
    "entropy_coef": 0.0,
    "eps_clip": None,
    "eps_clip_c": None,
    "eps_clip_high": None,
    "global_batch_size": None,
    "hf_checkpoint": None,
    "kl_coef": 0.0,
    "kl_loss_coef": 0.0,
    "kl_loss_type": None,
    "loss_type": "policy_loss",
    "lora_dropout": 0.0,
    "lora_rank": 0,
    "megatron_to_hf_mode": "raw",
    "moe_aux_loss_coeff": None,
    "moe_input_jitter_eps": 0.0,
    "multimodal_keys": None,
    "n_samples_per_prompt": None,
    "num_steps_per_rollout": None,
    "opsm_delta": 1e-4,
    "pipeline_model_parallel_size": 1,
    "ref_load": None,
    "qkv_format": "thd",  # slime knows no other
    "rollout_batch_size": None,
    "rollout_data_postprocess_path": None,
    "rollout_function_path": None,
    "rollout_max_response_len": None,
    "rollout_temperature": 1.0,
    "rollout_top_k": -1,
    "rollout_top_p": 1.0,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    # Of SGLang, which both hosts add to their parser.
    "sglang_speculative_algorithm": None,
    # In the file of --custom-config-path, for flags.MIS_FUNCTION.
    "rs_level": "token",
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": None,
    "tis_level": "token",
    "tis_lower_bound": None,
    "tis_mode": "truncate",
    "tis_upper_bound": None,
    "tensor_model_parallel_size": 1,
    "train_backend": "megatron",
}


class HostOptions:
    """A read-only view of the options of a launch in a host. Only this class reads a host's Namespace.

    host: None: the one that recognises them.
    """

    def __init__(self, args: Namespace, host: Host | None = None):
        self._args, self._values = args, vars(args)
        if host is not None:
            self.host = host

    def __getitem__(self, name: str):
        """The option's value; OPTIONS' where the host has no such option. A switch has the truth value that the host sees.
        KeyError for a name outside OPTIONS."""
        absent = OPTIONS[name]
        value = self._values.get(self._own_name(name), absent)
        if name in HOST_SWITCHES:
            return bool(value)
        return absent if value is None else value

    def has(self, name: str) -> bool:
        return self._own_name(name) in self._values

    def _own_name(self, name: str) -> str:
        return self.host.option_names.get(name, name)

    def flag(self, name: str) -> str:
        """The flag of an option in this host, for messages."""
        return flag_of(self._own_name(name))

    @property
    def correction_functions(self) -> Mapping[str, str]:
        """Of HostLoss."""
        return self.host.loss.correction_functions

    def names(self) -> list[str]:
        """Names of all parsed arguments, known to us or not."""
        return list(self._values)

    def config(self, route: Route) -> PolicyLossConfig:
        return self.host.config(self._args, route)

    def ours(self, field: str):
        """One of our settings as the launch gave it, not converted and not checked; None where it is unset or was dropped."""
        return self._values.get(field)

    @property
    def of_model(self) -> dict[str, object]:
        """The settings of the model that the launch gives, by which its losses, experts and layers are judged; not checked."""
        names = (*MODEL_SETTINGS, *EXPERT_SETTINGS, *FURTHER_SETTINGS)
        return {name: self._values[name] for name in names if name in self._values}

    @property
    def aggregation(self) -> Any:  # not checked
        given = self.ours("loss_aggregation")
        return PolicyLossConfig().loss_aggregation if given is None else given

    @property
    def record(self) -> AggregationRecord | None:
        """The record of the aggregation; None for a wrong name, which validation reports."""
        try:
            return get_loss_aggregation(self.aggregation)
        except ConfigError:
            return None

    @property
    def samples_of_batch(self) -> int | None:
        """Samples of a rollout batch; None where the arguments do not say."""
        prompts, size = self["rollout_batch_size"], self["n_samples_per_prompt"]
        return prompts * size if prompts and size else None

    @property
    def is_one_step(self) -> bool:
        """One optimiser step takes the whole rollout batch. False where the arguments do not say."""
        if self["use_dynamic_global_batch_size"]:
            return self["num_steps_per_rollout"] in (None, 1)
        return self.samples_of_batch is not None and self["global_batch_size"] == self.samples_of_batch

    @cached_property
    def host(self) -> Host:
        return next(host for host in known_hosts() if host.recognises(self._values))


def names_ours(path: object, function: str) -> bool:
    """Whether a host's path leads to our function of that name, in the dotted form or the colon form."""
    parts = path.replace(":", ".").split(".") if isinstance(path, str) else [""]
    return parts[0] == "megatron_rl" and parts[-1] == function


def companion_of(args: Namespace | HostOptions) -> str | None:
    """Which of our hooks gives samples their weights before training: "reward", "convert" or none.

    With both on the launch line it is "convert", because a host's converter replaces the step that calls the reward hook.
    """
    options = args if isinstance(args, HostOptions) else HostOptions(args)
    if names_ours(options["custom_convert_samples_to_train_data_path"], "convert_samples_to_train_data"):
        return "convert"
    return "reward" if names_ours(options["custom_reward_post_process_path"], "reward_post_process") else None


@dataclass(frozen=True)
class HostLaunch:
    """A launch, as checks see it. route: our function that reduces the loss. Where the host's own reducer does it, on samples that
    a companion has weighted, the settings of the reducer route hold."""

    options: HostOptions
    route: Route
    has_reducer: bool
    """Our reducer is on the launch line, or is the caller."""

    @cached_property
    def config(self) -> PolicyLossConfig:
        """Our settings. Raises one ConfigError with every problem of theirs."""
        return self.options.config(self.route)

    @property
    def kl_and_entropy(self) -> tuple[float, float]:
        """The coefficients that act: our loss's, or those of the host's own."""
        options = self.options
        if self.has_our_loss():
            return self.config.kl_coefficient, self.config.entropy_coefficient
        return options["kl_loss_coef"] if options["use_kl_loss"] else 0.0, options["entropy_coef"]

    @property
    def loss_and_clip(self) -> tuple[str, tuple[float, float] | None]:
        """The loss, ours or the host's own, and its clip low and high; None: it has none."""
        if self.has_our_loss():
            return self.config.policy_loss, clip_of(self.config)
        low, high = self.options["eps_clip"], self.options["eps_clip_high"]
        return self.options["advantage_estimator"], None if low is None else (low, low if high is None else high)

    @property
    def aggregation(self) -> object:
        return self.options.aggregation

    @property
    def record(self) -> AggregationRecord | None:
        return self.options.record

    @property
    def companion(self) -> str | None:
        return companion_of(self.options)

    def weighed(self, config: PolicyLossConfig) -> Stock:
        """What a token weighs in each term. Beside our weights KL and entropy are the host's own; under the converter they are
        prompt means too."""
        ours = replace(Stock.of_ours(config), remarks=tuple(remarks_on_the_model(self.options)))
        own = self.options.host.stock(self.options)
        if self.has_our_loss() or not isinstance(own, Stock):
            return ours
        kl, entropy = (ours.policy if term is not None and self.has_converter() else term for term in (own.kl, own.entropy))
        return replace(ours, kl=kl, entropy=entropy, has_sample_ratio=has_sample_ratio(self.loss_and_clip[0]))

    def has_companion(self) -> bool:
        return self.companion is not None

    def has_reward_hook(self) -> bool:
        return self.companion == "reward"

    def has_converter(self) -> bool:
        return self.companion == "convert"

    def has_our_loss(self) -> bool:
        return self.route == Route.CUSTOM_LOSS

    @property
    def companion_line(self) -> str:
        return REWARD_LINE if self.companion == "reward" else CONVERT_LINE

    @property
    def is_per_token(self) -> bool:
        return self.options["calculate_per_token_loss"]

    @property
    def masks_change_later(self) -> bool:
        """A custom importance-sampling function may reject tokens after the counts were taken; the host's own do not, and our loss
        calls none: it has the weights of flags.MIS_FUNCTION itself, and keeps the counts."""
        if self.has_our_loss() and is_mis(self.options):
            return False
        is_at_work = self.options["use_tis"] or self.options["get_mismatch_metrics"]
        return bool(is_at_work and self.options["custom_tis_function_path"] and known_correction(self.options) is None)

    @property
    def own_rollout_functions(self) -> dict[str, str]:
        """The user's own functions, by option: each may return several samples for one rollout."""
        paths = {name: self.options[name] for name in ("custom_generate_function_path", "rollout_function_path")}
        of_hosts = {path for host in known_hosts() for path in host.rollout_functions}
        return {name: path for name, path in paths.items() if path and path not in of_hosts}

    @property
    def is_alone(self) -> bool:
        """Nothing of megatron_rl reduces the loss or weights the samples."""
        return self.route == Route.REDUCER and not self.has_reducer and self.companion is None


def read_launch(args: Namespace, route: Route | None = None) -> HostLaunch:
    """`route`: the caller, where the reducer or custom_loss calls; None: the launch line says it."""
    options = HostOptions(args)
    if route is None:
        is_custom_loss = options["loss_type"] == "custom_loss" and names_ours(options["custom_loss_function_path"], "custom_loss")
        has_reducer = names_ours(options["custom_pg_loss_reducer_function_path"], "get_pg_loss_reducer")
        return HostLaunch(options, Route.CUSTOM_LOSS if is_custom_loss else Route.REDUCER, has_reducer)
    return HostLaunch(options, route, has_reducer=route == Route.REDUCER)
