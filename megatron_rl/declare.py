"""Declares a policy loss and its parameters.

KL estimators and corrections are declared in losses/, aggregations where their weights are.
"""

from __future__ import annotations

import inspect
import keyword
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, get_args

from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND, SEQUENCE_CLIP_RATIO_WARNING, PolicyLossConfig, flag_fields
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.registry import Function, Registry, check_signature, check_triton_path, takes

Level = Literal["token", "sequence"]
Anchor = Literal["old", "rollout"]
# The names that `needs` of a loss may hold, beside what each loss is given: vectors that the caller passes, and those that the
# package computes.
PASSED_INPUTS = ("rollout_log_probs", "ref_log_probs")
COMPUTED_INPUTS = ("token_counts", "entropy", "mean_log_ratio")
FURTHER_INPUTS = (*PASSED_INPUTS, *COMPUTED_INPUTS)
_REMEDY = "declare a further number in parameters=(Parameter(...),), a further vector in needs=(...,)"


def checked_result(whose: str, name: str, value: object, like: Tensor, remedy: str = "") -> Tensor:
    """The value that `whose` function returned. Raises DataError unless it has shape, dtype, layout and device of `like`."""
    wanted, found = f"{tuple(like.shape)} {like.dtype}", type(value).__name__
    if isinstance(value, Tensor):
        found = f"{tuple(value.shape)} {value.dtype}"
        if (value.layout, value.device) != (like.layout, like.device):
            wanted, found = (f"{words} with {of.layout} on {of.device}" for words, of in ((wanted, like), (found, value)))
        if found == wanted:
            return value
    raise DataError(f"{whose} returned {found} as {name}: it must be {wanted}{remedy}")


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio bounded to +-20, so that nothing overflows. NaN passes through."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


@dataclass(frozen=True, slots=True)
class LossValue:
    """What a policy loss returns: [T], one per token, at level "token"; [N], one per sample, at level "sequence".

    value: is multiplied by the weights. Masked positions may hold anything.
    derivative: d value / d log-probability of the token; at level "sequence" d value / d mean log-probability of the sample.
        log_ratio and log_probs both move with the log-probability. `value` detaches each factor that is constant for the gradient,
        so autograd finds the same number: a check at launch compares the two. None: autograd. Beyond a log-ratio of +-20 the
        derivative through log_ratio is 0: one that is given is set to 0 there, where the function takes no log_probs.
    is_clipped: bool, what the metrics count as clipped. None: nothing is clipped.
    """

    value: Tensor
    derivative: Tensor | None = None
    is_clipped: Tensor | None = None


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
    anchor: Anchor
    token_clip: Callable[..., Any] | None

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
        low, high = (default if value is None else value for default, value in zip(self.clip_ratios, (low, high), strict=True))
        problems, is_open = [], self.clip_ratios[0] == 1
        if not (is_finite_number(low) and (0 <= low < 1 or (is_open and low == 1))):
            meant = f"; did you mean {low - 1:.6g}?" if is_finite_number(low) and 1 < low < 2 else ""
            bound = "1], where 1 is no bound" if is_open else "1)"
            problems.append(f"clip_ratio_low={low!r} must be in [0, {bound}: it is a distance below 1{meant}")
        if not (is_finite_number(high) and high >= 0):
            problems.append(f"clip_ratio_high={high!r} must be a finite number at or above 0: it is a distance above 1")
        if problems:
            raise ConfigError(problems)
        return low, high

    def resolve_parameters(self, given: Mapping[str, float]) -> dict[str, float]:
        """All parameters, in the order of the declaration. Raises ConfigError for unknown names or a value out of its range."""
        known = {parameter.name: parameter for parameter in self.parameters}
        has = f"its parameters are {', '.join(known)}" if known else "it has no parameters"
        why = f"has no effect, because policy loss {self.name!r} has no parameter"
        if unknown := [f"{name}={value} {why} {name!r}: {has}" for name, value in given.items() if name not in known]:
            raise ConfigError(unknown)
        return {name: parameter.check(given.get(name, parameter.default)) for name, parameter in known.items()}


def is_finite_number(value: object) -> TypeGuard[float]:
    """An int must be one that a float holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss", "register_policy_loss")


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
    triton: `module.function` of its Triton version, a @triton.jit function that computes the same inside the kernels:
        fn(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio[, vectors, parameters])
            -> value, derivative, is_clipped
        on float32 blocks; the bounds are 1 - clip_ratio_low and 1 + clip_ratio_high. If the loss declares `needs` or `parameters`,
        it has seven arguments: vectors and parameters are tuples in the declared order, None where nothing is declared.
        None: the loss is computed in torch on the logits' device.
    needs: further vectors by keyword, constants for the gradient; [T], and at level "sequence" [N]:
        "rollout_log_probs", "ref_log_probs": as the caller passes them, at level "sequence" their means. A call without is refused.
        "token_counts": m_i, the unmasked tokens of the sample over all cp ranks.
        "entropy": of the trained policy at the token, in nats; at level "sequence" its mean. A call
        that has log-probabilities and no logits is refused.
        "mean_log_ratio": at level "token" the sample's mean of log_ratio over all cp ranks. Such a loss has no Triton version.
    parameters: numbers by keyword.
    anchor: the policy that log_ratio compares with: "old" (old_log_probs), or "rollout" (rollout_log_probs, which a call needs).
        An importance correction is refused with "rollout": such a ratio holds the correction already.
    token_clip: at level "sequence" `fn(log_ratio [T], advantages [T], *, ...) -> [T]`, with the keywords of the loss: the
        log-ratios of which log_ratio is the mean. Where it gives a token another number, the token is clipped, without gradient.
    Raises ConfigError when another function has the name, or when the declaration or the signature is wrong.
    """
    POLICY_LOSSES.check_name(name)
    needs, parameters = tuple(needs), tuple(parameters)
    needed_inputs = [("needs", need, FURTHER_INPUTS) for need in needs]
    for field, value, known in (("level", level, get_args(Level)), ("anchor", anchor, get_args(Anchor)), *needed_inputs):
        if value not in known:
            raise ConfigError(f"{field}={value!r} of policy loss {name!r} is none of {', '.join(known)}")
    if "mean_log_ratio" in needs and (level == "sequence" or triton is not None):
        raise ConfigError(
            f'policy loss {name!r}: "mean_log_ratio" is for level "token" (at "sequence" log_ratio is the mean), without triton, '
            "whose kernels have no mean of tokens"
        )
    if token_clip is not None and (level == "token" or triton is not None):
        raise ConfigError(f'policy loss {name!r}: token_clip is for level "sequence" without triton; leave it out')
    check_triton_path("policy loss", name, triton)

    def decorate(function: Function) -> Function:
        takes_log_probs = takes(function, "log_probs")
        positional = ("log_ratio", "advantages", "log_probs")[: 2 + takes_log_probs]
        clips = () if clip_ratios is None else ("clip_ratio_low", "clip_ratio_high")
        keywords = (*clips, *needs, *(parameter.name for parameter in parameters))
        if len({*positional, *keywords}) < len(positional) + len(keywords):
            raise ConfigError(f"policy loss {name!r} declares a name twice among {', '.join((*positional, *keywords))}")
        check_signature("policy loss", name, function, positional, keywords, _REMEDY)
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
            *(name, level, function, clip_ratios, triton, needs, parameters, takes_log_probs, anchor, token_clip),
        )
        loss.clip_bounds(None, None)  # the defaults are a clip
        POLICY_LOSSES.add(name, loss)
        return function

    return decorate


def get_policy_loss(name: str) -> PolicyLoss:
    """The declaration of that name. A name with a dot is imported as module.function, and its module must declare it.

    Raises ConfigError for an unknown name, for a function that cannot be imported, and for one that is not declared.
    """
    return POLICY_LOSSES[str(name)]


def clip_of(config: PolicyLossConfig) -> tuple[float, float] | None:
    """(clip_ratio_low, clip_ratio_high) of the configured loss, with its defaults; None for a loss without a clip."""
    return get_policy_loss(config.policy_loss).clip_bounds(config.clip_ratio_low, config.clip_ratio_high)


def declared_parameters() -> dict[str, dict[str, Parameter]]:
    """The parameters that registered losses declare: name of the parameter -> name of the loss -> the parameter."""
    found: dict[str, dict[str, Parameter]] = {}
    for name in POLICY_LOSSES.names():
        loss = POLICY_LOSSES[name]
        for parameter in loss.parameters:
            found.setdefault(parameter.name, {})[loss.name] = parameter
    return found
