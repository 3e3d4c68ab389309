"""The loss hub: the two registries that --loss-aggregation and --policy-loss are looked up in. It never computes a loss itself."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from megatron_rl.aggregation_record import AggregationRecord, declared_fields
from megatron_rl.errors import ConfigError

Level = Literal["token", "sequence"]
Weigh = TypeVar("Weigh", bound=Callable[..., Any])
# They register the built-in names. Imported at the first look into a registry, so that it does not matter who imported what.
_BUILT_IN_MODULES = ("megatron_rl.aggregation", "megatron_rl.losses.grpo", "megatron_rl.losses.gspo")
_AGGREGATION_PARAMETERS = (("token_counts", "totals"), ("prompt_token_counts", "divisor"))
_POLICY_LOSS_PARAMETERS = (
    ("log_probs", "old_log_probs", "advantages", "loss_mask", "cu_seqlens", "token_counts"),
    ("clip_ratio_low", "clip_ratio_high", "cp_group"),
)


@dataclass(frozen=True, slots=True)
class PolicyLossEntry:
    """A registered policy loss.

    level: "token" (one ratio per token) or "sequence" (one ratio per sample; takes one advantage per sample).
    values: (values [T], derivative of values by log_probs [T][, is_clipped [T] bool]).
    surrogate: for a loss that is a function of (log-ratio, advantage) alone, that function, with the derivative by the log-ratio;
        the losses driver then needs no collective beside its own. The log-ratio is the token's, or at level "sequence" the
        sample's mean. Without is_clipped, a token counts as clipped where its derivative is 0 and its advantage is not.
    """

    name: str
    level: Level
    values: Callable
    surrogate: Callable | None = None


_AGGREGATIONS: dict[str, AggregationRecord] = {}
_POLICY_LOSSES: dict[str, PolicyLossEntry] = {}


def register_loss_aggregation(
    name: str,
    *,
    formula: str | None = None,
    source: str = "",
    needs: tuple[str, ...] | None = None,
    takes_divisor: bool | None = None,
) -> Callable[[Weigh], Weigh]:
    """Decorator: `fn(token_counts [S], totals, *, prompt_token_counts [S] | None, divisor) -> weights [S]` under `name`.

    formula: the weight as a product of counts over a product of counts, as in "1 / (N m_i)": N samples, P prompts and T tokens of
        the step, m_i tokens of sample i, M_g of its prompt's samples, L the divisor. needs and takes_divisor follow from it.
        Without it explain and start lines say that the weight is not stated, and miles and slime need the reward hook.
    source: what is known by it, as in "GRPO, GSPO".
    needs: without a formula, the counts that the function reads beside token_counts, of aggregation_record.STEP_COUNTS.
    takes_divisor: without a formula, whether --loss-aggregation-divisor goes with it.

    Raises ConfigError when the name is taken by another function, or a field or the signature does not fit.
    """
    try:
        fields = declared_fields(formula, source, needs, takes_divisor)
    except ConfigError as error:
        raise ConfigError(f"loss aggregation {name!r}: {error}") from error

    def decorate(function: Weigh) -> Weigh:
        _check_signature("loss aggregation", name, function, *_AGGREGATION_PARAMETERS)
        _add(_AGGREGATIONS, "loss aggregation", name, AggregationRecord(name, function, *fields), _unwrap)
        return function

    return decorate


def register_policy_loss(name: str, level: Level = "token", *, surrogate: Callable | None = None):
    """Decorator: a policy loss `fn(log_probs, old_log_probs, advantages, loss_mask, cu_seqlens, token_counts, *, clip_ratio_low,
    clip_ratio_high, cp_group) -> (values [T], derivative of values by log_probs [T][, is_clipped [T] bool])` under `name`.

    The derivative is that of the document's summed values; masked positions may hold anything. At level "sequence" advantages are
    [N], else [T]. It is given copies, and what it returns is checked at each call.
    Raises ConfigError when the name is taken by another function, or level or signature do not fit.
    """
    if level not in ("token", "sequence"):
        raise ConfigError(f'level={level!r} of policy loss {name!r} must be "token" or "sequence"')

    def decorate(function: Callable) -> Callable:
        _check_signature("policy loss", name, function, *_POLICY_LOSS_PARAMETERS)
        entry = PolicyLossEntry(name, level, function, surrogate)
        _add(_POLICY_LOSSES, "policy loss", name, entry, lambda known: known.values)
        return function

    return decorate


def get_loss_aggregation(name: str) -> AggregationRecord:
    """The record; a name with a dot is imported as module.function, and registered without a formula where it was not."""
    return _get(_AGGREGATIONS, "loss aggregation", name, lambda function: register_loss_aggregation(name)(function))


def get_policy_loss(name: str) -> PolicyLossEntry:
    """The registered entry; a name with a dot is imported as module.function and registered at the level of its `level`
    attribute ("token" where it has none)."""

    def register(function: Callable) -> None:
        register_policy_loss(name, getattr(function, "level", "token"))(function)

    return _get(_POLICY_LOSSES, "policy loss", name, register)


def loss_aggregation_names() -> tuple[str, ...]:
    _register_built_in()
    return tuple(_AGGREGATIONS)


def policy_loss_names() -> tuple[str, ...]:
    _register_built_in()
    return tuple(_POLICY_LOSSES)


def import_dotted(path: str, purpose: str) -> Callable:
    """module.function, as the hosts load it: split on the last dot. ConfigError says which half failed."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ConfigError(f"{purpose} {path!r} has no dot: write module.function")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError) as error:  # a leading dot asks for a relative import: TypeError
        raise ConfigError(f"{purpose} {path!r}: module {module_name!r} cannot be imported ({error})") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{purpose} {path!r}: module {module_name!r} has no {attribute!r}; write module.function")
    function = getattr(module, attribute)
    if not callable(function):
        raise ConfigError(f"{purpose} {path!r} is {type(function).__name__}, not a function")
    return function


def _register_built_in() -> None:
    for module in _BUILT_IN_MODULES:
        importlib.import_module(module)


def _get(registry: dict, kind: str, name: str, register: Callable):
    if not isinstance(name, str):
        raise ConfigError(f"{kind} {name!r} must be a name: a registered one, or module.function")
    _register_built_in()
    if name not in registry:
        if "." not in name:
            raise ConfigError(
                f"{kind} {name!r} is not registered; known: {', '.join(registry)}. A name with a dot is imported as module.function"
            )
        function = import_dotted(name, kind)
        # The module may register the function under a plain name when it is imported; the dotted one is then a second name.
        same = next((value for value in registry.values() if _unwrap(value) is function), None)
        if same is not None:
            registry[name] = same
        else:
            register(function)
    return registry[name]


def _unwrap(value: AggregationRecord | PolicyLossEntry) -> Callable:
    return value.values if isinstance(value, PolicyLossEntry) else value.function


def _add(registry: dict, kind: str, name: str, value, function_of: Callable) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{kind} name {name!r} must be a non-empty string")
    if function_of(value).__module__ not in _BUILT_IN_MODULES:
        _register_built_in()  # else a name of theirs would be free for whoever comes first
    known = registry.get(name)
    if known is not None and function_of(known) is not function_of(value):
        raise ConfigError(f"{kind} {name!r} is already registered by {function_of(known).__module__}; choose another name")
    registry[name] = value


def _check_signature(kind: str, name: str, function: Callable, positional: tuple[str, ...], keywords: tuple[str, ...]) -> None:
    """A loss that lacks one argument would fail in the middle of a run (FB-73): it fails at registration instead."""
    try:
        inspect.signature(function).bind(*positional, **dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        wanted = f"({', '.join(positional)}, *, {', '.join(keywords)})"
        raise ConfigError(f"{kind} {name!r} must accept {wanted}: {error}") from error
