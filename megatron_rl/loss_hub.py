"""Holds the declarations of losses and aggregations, in the two registries that --policy-loss and --loss-aggregation read."""

from __future__ import annotations

import inspect
import keyword
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar

from megatron_rl.aggregation_record import COUNTS, AggregationRecord, declared_fields
from megatron_rl.config import SEQUENCE_CLIP_RATIO_WARNING, flag_fields
from megatron_rl.errors import ConfigError
from megatron_rl.registries.correction_settings import CorrectionSettings
from megatron_rl.registries.loss_value import LossValue as LossValue  # beside the decorator, where a loss's file takes it
from megatron_rl.registries.registry import Registry, takes
from megatron_rl.registries.signatures import check_called, check_signature, check_twin_path

if TYPE_CHECKING:
    from megatron_rl.config import PolicyLossConfig

Level = Literal["token", "sequence"]
Anchor = Literal["old", "rollout"]
Weigh = TypeVar("Weigh", bound=Callable[..., Any])
Function = TypeVar("Function", bound=Callable[..., Any])
_AGGREGATION_PARAMETERS = (("token_counts", "totals"), ("prompt_token_counts", "divisor"))
_DECLARE = "declare a further number in parameters=(Parameter(...),), a further vector in needs=(...,)"
# Letter of a formula -> the keyword that a function with this letter must have. Another function may have it.
_OF_ROLLOUTS = {letter: COUNTS[letter] for letter in ("M_j", "k_j")}
# The names that `needs` of a loss may hold, beside what each loss is given: vectors that the caller passes, and those that the
# package computes.
PASSED_INPUTS = ("rollout_log_probs", "ref_log_probs")
COMPUTED_INPUTS = ("token_counts", "entropy", "mean_log_ratio")
FURTHER_INPUTS = (*PASSED_INPUTS, *COMPUTED_INPUTS)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number that a loss takes beside the clip: a keyword of its function. Raises ConfigError for a default outside its range."""

    name: str
    default: float
    """math.inf: the parameter is off unless it is given."""
    help: str
    minimum: float = -math.inf
    maximum: float = math.inf
    is_above_minimum: bool = False
    """Whether the minimum itself is refused."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier() or keyword.iskeyword(self.name):
            raise ConfigError(f"Parameter name {self.name!r} must be a Python identifier and no reserved word: it is a keyword")
        if self.name in {field.name for field in flag_fields()}:
            raise ConfigError(f"Parameter name {self.name!r} is a setting already, and its flag exists: choose another name")
        self.check(self.default)

    def check(self, value: object) -> float:
        """The value as a float. Raises ConfigError outside the range; a default of math.inf is in it."""
        if value == self.default == math.inf:
            return math.inf
        if is_finite_number(value) and self.minimum <= value <= self.maximum:
            if not (self.is_above_minimum and value == self.minimum):
                return float(value)
        raise ConfigError(f"{self.name}={value!r} must be a finite number in {self.range_in_words()}: {self.help}")

    def range_in_words(self) -> str:
        """As in `(1, inf)` or `[0, 2]`."""
        end = ")" if math.isinf(self.maximum) else "]"
        return f"{'(' if self.is_above_minimum else '['}{self.minimum:g}, {self.maximum:g}{end}"


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy loss as it was declared; `register_policy_loss` says what each field means."""

    name: str
    level: Level
    function: Callable[..., Any]
    clip_ratios: tuple[float, float] | None
    triton: str | None
    needs: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    takes_log_probs: bool
    anchor: Anchor = "old"
    token_clip: Callable[..., Any] | None = None

    @property
    def reads_means(self) -> bool:
        """Whether it is computed after the sums over samples, because it reads a mean log-ratio."""
        return self.level == "sequence" or "mean_log_ratio" in self.needs

    @property
    def inputs_needed(self) -> tuple[str, ...]:
        """The vectors [T] that a caller must pass."""
        passed = tuple(name for name in self.needs if name in PASSED_INPUTS)
        anchors = ("rollout_log_probs",) if self.anchor == "rollout" else ()
        return (*passed, *(name for name in anchors if name not in passed))

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss reads the entropy of the policy, which only logits give."""
        return "entropy" in self.needs

    @property
    def clips_means(self) -> bool:
        """Whether the clip is for the ratio of a sample: at level "sequence", and where the default is as narrow as such a clip."""
        if self.clip_ratios is None or self.token_clip is not None:
            return False
        return self.level == "sequence" or max(self.clip_ratios) <= SEQUENCE_CLIP_RATIO_WARNING

    def clip_bounds(self, low: float | None, high: float | None) -> tuple[float, float] | None:
        """(low, high), each the default where None; None for a loss without a clip. Raises ConfigError for a wrong clip ratio."""
        if self.clip_ratios is None:
            given = {"clip_ratio_low": low, "clip_ratio_high": high}
            named = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
            if named:
                raise ConfigError(f"{named}: policy loss {self.name!r} has no clip; remove it")
            return None
        low = self.clip_ratios[0] if low is None else low
        high = self.clip_ratios[1] if high is None else high
        for problem in (clip_low_problem(low, self), clip_high_problem(high)):
            if problem is not None:
                raise ConfigError(problem)
        return low, high

    def resolve_parameters(self, given: Mapping[str, float]) -> dict[str, float]:
        """All parameters, in the order of the declaration. Raises ConfigError for an unknown name or a value out of its range."""
        known = [parameter.name for parameter in self.parameters]
        for name in given:
            if name not in known:
                has = f"its parameters are {', '.join(known)}" if known else "it has no parameters"
                raise ConfigError(f"policy loss {self.name!r} has no parameter {name!r}: {has}")
        return {parameter.name: parameter.check(given.get(parameter.name, parameter.default)) for parameter in self.parameters}


def is_finite_number(value: object) -> TypeGuard[float]:
    """An int must be one that a float holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def clip_low_problem(value: object, loss: PolicyLoss | None) -> str | None:
    """Why the value is not a valid clip_ratio_low of the loss (of any loss: None), or None where it is valid."""
    is_open = loss is not None and loss.clip_ratios is not None and loss.clip_ratios[0] == 1
    if is_finite_number(value) and (0 <= value < 1 or (is_open and value == 1)):
        return None
    bound = "1], where 1 is no bound" if is_open else "1)"
    return f"clip_ratio_low={value!r} must be in [0, {bound}: it is a distance below 1"


def clip_high_problem(value: object) -> str | None:
    """Why the value is not a valid clip_ratio_high, or None where it is valid."""
    if is_finite_number(value) and value >= 0:
        return None
    return f"clip_ratio_high={value!r} must be a finite number at or above 0: it is a distance above 1"


POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss", "losses", "register_policy_loss")
AGGREGATIONS: Registry[AggregationRecord] = Registry(
    "loss aggregation",
    "aggregation",
    "register_loss_aggregation",
    declare=lambda name, function: register_loss_aggregation(name)(function),
)


def register_loss_aggregation(
    name: str,
    *,
    formula: str | None = None,
    source: str = "",
    needs: tuple[str, ...] | None = None,
    takes_divisor: bool | None = None,
) -> Callable[[Weigh], Weigh]:
    """Decorator: registers `fn(token_counts [S], totals, *, prompt_token_counts [S] | None, divisor) -> weights [S]` as `name`.

    A function with the keywords rollout_token_counts or rows_of_rollout gets M_j or k_j too, [S]; they are m_i and 1 where each
    sample is a rollout. Its totals have num_rollouts in any case.

    formula: the weight as a product of counts over a product of counts, as in "1 / (R M_j)": N samples, R rollouts, P prompts and T
        tokens of the step, m_i tokens of sample i, M_j of its rollout's samples, k_j of which have a token, M_g tokens of its
        prompt's samples, L the divisor. needs and takes_divisor follow from it.
        Without it explain and start lines say that the weight is not stated, and miles and slime need the reward hook.
    source: the algorithms that use it, as in "GRPO, GSPO".
    needs: without a formula, the counts that the function reads besides token_counts, of aggregation_record.STEP_COUNTS.
    takes_divisor: without a formula, whether it uses --loss-aggregation-divisor.

    Raises ConfigError when another function has the name, or when a field or the signature is wrong.
    """
    check_called(AGGREGATIONS.decorator, name)
    try:
        fields = declared_fields(formula, source, needs, takes_divisor)
    except ConfigError as error:
        raise ConfigError(f"loss aggregation {name!r}: {error}") from error

    def decorate(function: Weigh) -> Weigh:
        powers = {} if fields[0] is None else fields[0].powers
        of_rollouts = (keyword for letter, keyword in _OF_ROLLOUTS.items() if letter in powers or takes(function, keyword))
        positional, keywords = _AGGREGATION_PARAMETERS
        check_signature("loss aggregation", name, function, positional, (*keywords, *of_rollouts))
        AGGREGATIONS.add(name, AggregationRecord(name, function, *fields))
        return function

    return decorate


def register_policy_loss(
    name: str,
    level: Level = "token",
    *,
    clip_ratios: tuple[float, float] | None = None,
    triton: str | None = None,
    needs: tuple[str, ...] = (),
    parameters: tuple[Parameter, ...] = (),
    anchor: Anchor = "old",
    token_clip: Callable[..., Any] | None = None,
) -> Callable[[Function], Function]:
    """Decorator: registers a function as the policy loss `name`. The package knows nothing else of the loss.

        fn(log_ratio, advantages[, log_probs], *, clip_ratio_low, clip_ratio_high, ...) -> value, or LossValue

    The function is elementwise. At level "token" its vectors are [T]. At level "sequence" they are [N]: log_ratio is the sample's
    mean log-ratio over all cp ranks, log_probs its mean log-probability. A function without the argument log_probs does not get
    them. The package does the rest: mask, weights, sums, gradient, metrics, every backend, head and host.

    clip_ratios: the default (clip_ratio_low, clip_ratio_high), which are then keywords. Low 1.0 allows "no lower bound".
        None: the loss has no clip, gets no clip, and the two flags are refused.
    triton: `module.function` of its twin, a @triton.jit function that computes the same inside the kernels:
        twin(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio[, vectors, parameters])
            -> value, derivative, is_clipped
        on float32 blocks; the bounds are 1 - clip_ratio_low and 1 + clip_ratio_high. If the loss declares `needs` or `parameters`,
        the twin has seven arguments: vectors and parameters are tuples in the declared order, None where nothing is declared.
        None: the loss is computed in torch on the logits' device.
    needs: further vectors by keyword, constants for the gradient; [T], and at level "sequence" [N]:
        "rollout_log_probs", "ref_log_probs": as the caller passes them, at level "sequence" their means. A call without is refused.
        "token_counts": m_i, the unmasked tokens of the sample over all cp ranks.
        "entropy": of the trained policy at the token, in nats, over what entropy_score says; at level "sequence" its mean. A call
        that has log-probabilities and no logits is refused.
        "mean_log_ratio": at level "token" the sample's mean of log_ratio over all cp ranks. Such a loss has no twin.
    parameters: numbers by keyword.
    anchor: the policy that log_ratio compares with: "old" (old_log_probs), or "rollout" (rollout_log_probs, which a call needs).
        An importance correction is refused with "rollout": such a ratio holds the correction already.
    token_clip: at level "sequence" `fn(log_ratio [T], advantages [T], *, ...) -> [T]`, with the keywords of the loss: the
        log-ratios of which log_ratio is the mean. Where it gives a token another number, the token is clipped, without gradient.
    Raises ConfigError when another function has the name, or when the declaration or the signature is wrong.
    """
    check_called(POLICY_LOSSES.decorator, name)
    if level not in ("token", "sequence"):
        raise ConfigError(f'level={level!r} of policy loss {name!r} must be "token" or "sequence"')
    if anchor not in ("old", "rollout"):
        raise ConfigError(f'anchor={anchor!r} of policy loss {name!r} must be "old" or "rollout"')
    for field, values, kind in (("parameters", parameters, Parameter), ("needs", needs, str)):
        if not isinstance(values, tuple | list) or not all(isinstance(value, kind) for value in values):
            raise ConfigError(f"{field}={values!r} of policy loss {name!r} must be a tuple of {kind.__name__}")
    needs, parameters = tuple(needs), tuple(parameters)
    for need in needs:
        if need not in FURTHER_INPUTS:
            raise ConfigError(f"needs={needs!r} of policy loss {name!r}: {need!r} is none of {', '.join(FURTHER_INPUTS)}")
    if "mean_log_ratio" in needs and (level == "sequence" or triton is not None):
        raise ConfigError(
            f'policy loss {name!r}: "mean_log_ratio" is for level "token" (at "sequence" log_ratio is the mean), without triton, '
            "whose kernels have no mean of tokens"
        )
    if token_clip is not None and (level == "token" or triton is not None):
        raise ConfigError(f'policy loss {name!r}: token_clip is for level "sequence" without triton; leave it out')
    check_twin_path("policy loss", name, triton)

    def decorate(function: Function) -> Function:
        takes_log_probs = takes(function, "log_probs")
        positional = ("log_ratio", "advantages", "log_probs")[: 2 + takes_log_probs]
        clips = () if clip_ratios is None else ("clip_ratio_low", "clip_ratio_high")
        keywords = (*clips, *needs, *(parameter.name for parameter in parameters))
        if len({*positional, *keywords}) < len(positional) + len(keywords):
            raise ConfigError(f"policy loss {name!r} declares a name twice among {', '.join((*positional, *keywords))}")
        check_signature("policy loss", name, function, positional, keywords, _DECLARE)
        if token_clip is not None:
            numbers = (*clips, *(parameter.name for parameter in parameters))
            check_signature("token_clip of policy loss", name, token_clip, ("log_ratio", "advantages"), numbers)
        first = next(iter(inspect.signature(function).parameters))
        if first in ("ratio", "ratios", "rho"):
            raise ConfigError(
                f"policy loss {name!r}: the first argument is the log-ratio, and {first} looks like a ratio; name it log_ratio, "
                "and write bounded_exp(log_ratio)"
            )
        loss = PolicyLoss(
            *(name, level, function, clip_ratios, triton, needs, parameters, takes_log_probs),
            anchor=anchor,
            token_clip=token_clip,
        )
        loss.clip_bounds(None, None)  # the defaults are a clip
        POLICY_LOSSES.add(name, loss)
        return function

    return decorate


def get_loss_aggregation(name: str) -> AggregationRecord:
    """The record of that name. A name with a dot is imported as module.function, and registered without a formula if it was not.

    Raises ConfigError for an unknown name and for a function that cannot be imported.
    """
    return AGGREGATIONS.find(name)


def get_policy_loss(name: str) -> PolicyLoss:
    """The declaration of that name. A name with a dot is imported as module.function, and its module must declare it.

    Raises ConfigError for an unknown name, for a function that cannot be imported, and for one that is not declared.
    """
    return POLICY_LOSSES.find(name)


def clip_of(config: PolicyLossConfig) -> tuple[float, float] | None:
    """(clip_ratio_low, clip_ratio_high) of the configured loss, with its defaults; None for a loss without a clip."""
    return get_policy_loss(config.policy_loss).clip_bounds(config.clip_ratio_low, config.clip_ratio_high)


def needs_rollout_log_probs(config: PolicyLossConfig) -> bool:
    """Whether the configured loss or its correction compares with the policy that sampled."""
    return CorrectionSettings.of(config).is_on or "rollout_log_probs" in get_policy_loss(config.policy_loss).inputs_needed


def declared_parameters() -> dict[str, dict[str, Parameter]]:
    """The parameters that registered losses declare: name of the parameter -> name of the loss -> the parameter."""
    return _by_parameter({loss.name: loss.parameters for loss in map(POLICY_LOSSES.find, POLICY_LOSSES.names())})


def parameters_without_torch(built_in: Mapping[str, tuple[Parameter, ...]]) -> dict[str, dict[str, Parameter]]:
    """What declared_parameters finds, for a help text: it imports no file of losses/, and so no torch.

    built_in: the parameters of the built-in losses by name, which are those of built_in_losses.py.
    """
    return _by_parameter(dict(built_in) | {name: loss.parameters for name, loss in POLICY_LOSSES.records.items()})


def _by_parameter(losses: Mapping[str, tuple[Parameter, ...]]) -> dict[str, dict[str, Parameter]]:
    found: dict[str, dict[str, Parameter]] = {}
    for loss, parameters in losses.items():
        for parameter in parameters:
            found.setdefault(parameter.name, {})[loss] = parameter
    return found


def clip_in_words(config: PolicyLossConfig) -> str:
    """The clip as text for start lines, as in `clip 0.2/0.2`. A loss of a user's own may say what it clips by bounds of its own."""
    clip = clip_of(config)
    if clip is None:
        return "no clip" if is_built_in(config.policy_loss) else "no clip bounds (clipped as the loss says)"
    return f"clip {clip[0]:g}/{clip[1]:g}"


def numbers_in_words(config: PolicyLossConfig) -> str:
    """The clip and the parameters of the loss that are not off as text, as in `clip 0.2/0.2, ratio_cap 3`."""
    values = get_policy_loss(config.policy_loss).resolve_parameters(config.loss_parameters)
    return ", ".join([clip_in_words(config), *(f"{name} {value:g}" for name, value in values.items() if math.isfinite(value))])


def is_built_in(policy_loss: str) -> bool:
    """Whether the loss of that name is a file of losses/."""
    return POLICY_LOSSES.is_built_in(policy_loss)


def loss_aggregation_names() -> tuple[str, ...]:
    return AGGREGATIONS.names()


def policy_loss_names() -> tuple[str, ...]:
    return POLICY_LOSSES.names()
