"""What is known of each loss that a model adds by itself: ADDED_LOSSES is the table, and says where its scale would be wrong.

Megatron's per-token contract sums every gradient over the step's tokens and divides by the tokens that the loss function counts. In
pretraining these are the same tokens. Here the loss counts response tokens alone. By the source of Megatron-Core 0.13 to 0.19:

    experts     auxiliary loss and z-loss are multiplied by the routed tokens, prompts and padding included: the gradient is
                x routed / response tokens
    MTP         is summed over the tokens of the loss_mask that the model is called with: x 1 with the response mask of miles and
                slime, x all / response tokens without a mask. miles and slime multiply their loss by cp, because each
                context-parallel rank counts whole samples, but MTP's is not: x 1/cp
    indexer     the loss of the sparse-attention indexer (DeepSeek sparse attention, since 0.16): 0.16 to 0.18 give it no scale at
                all, so the mean of each micro-batch counts in full, x micro-batches under the default contract; 0.19 scales it as
                experts' losses, with prompts and padding

Under the default contract (a count of 1 a micro-batch) the others keep Megatron's scale, a mean over micro-batches and ranks.
--router-aux-loss says what is wanted of losses of experts: host takes this scale, exact undoes it (megatron/router_losses.py),
refuse refuses them under each contract. The forward step of this package attaches no loss of MTP: megatron/multi_token.py computes
it with its own denominator. The indexer's is refused there: it is a mean over all positions, and Megatron's layers take neither a
padding mask nor packed rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from megatron_rl.config import Route, RouterAuxLoss
from megatron_rl.validation.routes import flag_of

# The settings that decide: names of a command line and of a TransformerConfig.
MODEL_SETTINGS = (
    "num_experts",
    "num_moe_experts",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "mtp_num_layers",
    "mtp_loss_scaling_factor",
    "enable_mtp_training",
    "context_parallel_size",
    "dsa_indexer_loss_coeff",
)
DEFAULT_MTP_FACTOR = 0.1
# The types of load balancing that add a loss, and so have a coefficient.
TYPES_WITH_A_LOSS = ("aux_loss", "seq_aux_loss", "global_aux_loss")
REMEDY_OF_HOSTS = (
    "remove --calculate-per-token-loss and add --custom-reward-post-process-path megatron_rl.hooks.reward_post_process, which "
    "gives token_mean without it"
)
HOSTS = (Route.REDUCER, Route.CUSTOM_LOSS)
REMEDY = "remove --calculate-per-token-loss: token_mean is exact without it"


def settings_of_model(config) -> dict[str, object]:
    """MODEL_SETTINGS of a TransformerConfig. It may differ from the arguments, because a bridge can change it."""
    given = vars(config)
    settings = {name: given[name] for name in MODEL_SETTINGS if name in given}
    scaled_by_user = [loss.switched_by for loss in ADDED_LOSSES if given.get(loss.scale_function) is not None]
    return settings | dict.fromkeys(scaled_by_user)


def auxiliary_loss_problems(settings: Mapping[str, object], route: Route) -> Iterator[str]:
    """A message for each loss of the model whose gradient --calculate-per-token-loss would rescale, or that is refused.

    settings: MODEL_SETTINGS that a launch or a model's config sets; beside them calculate_per_token_loss and router_aux_loss.
    """
    for loss in ADDED_LOSSES:
        yield from loss.problems(settings, route)


def expert_loss_problems(settings: Mapping[str, object], route: Route | None) -> Iterator[str]:
    """route None: a trainer whose user cannot choose the contract."""
    router_aux_loss, calculates_per_token_loss = settings.get("router_aux_loss"), settings.get("calculate_per_token_loss")
    if router_aux_loss in (RouterAuxLoss.HOST, RouterAuxLoss.EXACT):
        return
    if not (calculates_per_token_loss or router_aux_loss == RouterAuxLoss.REFUSE):
        return
    if num_experts_of(settings)[1] == 0:
        return
    found = active_losses(settings)
    exact = "" if route is None or route in HOSTS else " or add --router-aux-loss exact,"
    remedy = "" if route is None else f",{exact} or {_remedy(route)}"
    for name, of in found.items():
        given, zero = as_typed(name, settings[name], route), as_typed(name, None, route)
        if not calculates_per_token_loss:
            yield (
                f"{given}{of} with --router-aux-loss refuse: set {zero} to 0, or choose exact (as one rank on the whole step) or "
                "host (Megatron's scale, which depends on the layout)"
            )
            continue
        yield (
            f"{given}{of} does not go with calculate_per_token_loss=True: Megatron multiplies this loss by the tokens that it "
            "routes, prompts and padding included, and divides by response tokens, so its gradient is x routed tokens / response "
            f"tokens; set {zero} to 0{remedy}"
        )


def num_experts_of(settings: Mapping[str, object]) -> tuple[str, int | None]:
    """(the name that gives the number, the number): 0 for a dense model, None where a launch line hides the number."""
    names = [name for name in ("num_experts", "num_moe_experts") if name in settings]
    name = next((name for name in names if settings[name] is not None), "num_experts")
    is_hidden = not names and (
        size_of(settings.get("expert_model_parallel_size")) > 1
        or any(name.startswith("moe_") or name.endswith("routing_replay") for name in settings)
    )
    return name, None if is_hidden else size_of(settings.get(name), 0)


def size_of(value: object, absent: int = 1) -> int:
    """A value that cannot be read counts as absent: Megatron's parser refuses it."""
    found = number(value)
    return int(found) if math.isfinite(found) and found >= 1 else absent


def as_typed(name: str, value: object, route: Route | None) -> str:
    """A setting as the user gave it: `--name value` where all settings are flags, elsewhere `name=value`. Value None: its name."""
    if route == Route.TRAIN:
        return flag_of(name) if value is None or value is True else f"{flag_of(name)} {value}"
    return name if value is None else f"{name}={value!r}"


def active_losses(settings: Mapping[str, object]) -> dict[str, str]:
    """Each coefficient of routers that is not 0 -> the types of load balancing that it belongs to, in words."""
    types = listed(settings.get("moe_router_load_balancing_type") or TYPES_WITH_A_LOSS[0])
    coefficients = listed(settings.get("moe_aux_loss_coeff"))
    # Each type has its own coefficient. Megatron refuses lists of different lengths later.
    pairs = zip(types, coefficients, strict=True) if len(types) == len(coefficients) else product(types, coefficients)
    at_work = dict.fromkeys(str(kind) for kind, value in pairs if kind in TYPES_WITH_A_LOSS and number(value))
    found = {"moe_aux_loss_coeff": f" of {' and '.join(at_work)}"} if at_work else {}
    if number(settings.get("moe_z_loss_coeff")):
        found["moe_z_loss_coeff"] = ""
    return found


def mtp_problems(settings: Mapping[str, object], route: Route) -> Iterator[str]:
    if route not in HOSTS or not trains_mtp(settings):
        return
    if (
        settings.get("calculate_per_token_loss")
        and hosts_train_mtp(settings)
        and number(settings.get("context_parallel_size", 1)) != 1
    ):
        yield (
            f"mtp_loss_scaling_factor={mtp_factor(settings)!r} with mtp_num_layers={settings['mtp_num_layers']!r} does not go "
            "with calculate_per_token_loss=True: the host multiplies its own loss by context_parallel_size and not this one, so "
            f"its gradient is x 1 / cp; set mtp_loss_scaling_factor to 0, or {REMEDY_OF_HOSTS}"
        )


def indexer_loss_problems(settings: Mapping[str, object], route: Route) -> Iterator[str]:
    """In hosts the installed Megatron-Core decides under the default contract: see unscaled_indexer_problem."""
    name = "dsa_indexer_loss_coeff"
    if not number(settings.get(name)):
        return
    if route not in HOSTS:
        yield (
            f"{as_typed(name, settings[name], route)}: the loss of the sparse-attention indexer is a mean over all positions of a "
            "micro-batch, padding included, so it depends on the layout, and Megatron-Core's layers take no padding mask; set "
            f"{as_typed(name, None, route)} to 0"
        )
    elif settings.get("calculate_per_token_loss"):
        yield (
            f"{as_typed(name, settings[name], route)} does not go with calculate_per_token_loss=True: Megatron divides the loss of "
            "the sparse-attention indexer by response tokens, after the mean of each micro-batch (0.16 to 0.18) or the sum over "
            f"prompts and padding too (0.19); set {as_typed(name, None, route)} to 0, or {_remedy(route)}"
        )


def unscaled_indexer_problem(settings: Mapping[str, object]) -> str | None:
    """Why the indexer trains x micro-batches where the installed Megatron-Core gives its loss no scale (scales_indexer_loss)."""
    coefficient = settings.get("dsa_indexer_loss_coeff")
    if not number(coefficient) or settings.get("calculate_per_token_loss"):
        return None
    return (
        f"dsa_indexer_loss_coeff={coefficient!r}: Megatron-Core 0.16 to 0.18 gives the loss of the sparse-attention indexer no "
        "scale, so its gradient is x the micro-batches of a rank; set --dsa-indexer-loss-coeff 0, or install megatron-core 0.19 "
        "or later"
    )


class AddedLoss(NamedTuple):
    """A loss that a model adds by itself: an autograd Function of megatron.core attaches its gradient to an activation, and the
    schedule gives this Function a scale. No loss function sees it."""

    name: str
    scaler: str
    """The Function, which has a set_loss_scale."""
    coefficients: tuple[str, ...]
    switched_by: str
    """The field of TransformerConfig without which there is none."""
    scale_function: str
    """The field, since Megatron-Core 0.19, with which the user's function scales it."""
    in_hosts: str
    """What it is under both contracts; docs/moe.md shows this and the next."""
    in_forward_step: str
    problems: Callable[[Mapping[str, object], Route], Iterator[str]]


ROUTER_LOSS = AddedLoss(
    name="losses of routers",
    scaler="MoEAuxLossAutoScaler",
    coefficients=("moe_aux_loss_coeff", "moe_z_loss_coeff"),
    switched_by="num_moe_experts",
    scale_function="moe_grad_scale_func",
    in_hosts="default contract: a mean over micro-batches and ranks; per token: refused",
    in_forward_step="as `--router-aux-loss` says",
    problems=expert_loss_problems,
)
MTP_LOSS = AddedLoss(
    name="multi-token prediction",
    scaler="MTPLossAutoScaler",
    coefficients=("mtp_loss_scaling_factor",),
    switched_by="mtp_num_layers",
    scale_function="mtp_grad_scale_func",
    in_hosts="default contract: a mean over micro-batches and ranks; per token: as the policy loss, and refused with "
    "context parallelism",
    in_forward_step="exact",
    problems=mtp_problems,
)
INDEXER_LOSS = AddedLoss(
    name="indexer of sparse attention",
    scaler="DSAIndexerLossAutoScaler",
    coefficients=("dsa_indexer_loss_coeff",),
    switched_by="dsa_indexer_loss_coeff",
    scale_function="experimental_attention_variant_loss_scale_func",
    in_hosts="default contract: refused with Megatron-Core 0.16 to 0.18, which give it no scale (x micro-batches), a mean over "
    "micro-batches and ranks with 0.19; per token: refused",
    in_forward_step="refused: a mean over all positions, without a padding mask",
    problems=indexer_loss_problems,
)
# A test looks for each such Function of the installed Megatron-Core in this table; megatron/attached.py for each that a model uses.
ADDED_LOSSES = (ROUTER_LOSS, MTP_LOSS, INDEXER_LOSS)


def hosts_train_mtp(settings: Mapping[str, object]) -> bool:
    """In miles and slime, which build the layers without training them too."""
    return trains_mtp(settings) and bool(settings.get("enable_mtp_training"))


def trains_mtp(settings: Mapping[str, object]) -> bool:
    return bool(number(settings.get("mtp_num_layers")) and number(mtp_factor(settings)))


def mtp_factor(settings: Mapping[str, object]) -> object:
    return settings.get("mtp_loss_scaling_factor", DEFAULT_MTP_FACTOR)


def _remedy(route: Route) -> str:
    return REMEDY_OF_HOSTS if route in HOSTS else REMEDY


def listed(value: object) -> list[object]:
    """The value as a list. A YAML file may give a list as text; an unset coefficient is 0."""
    if isinstance(value, str):
        return re.findall(r"[^\s,'\"\[\]]+", value)
    return list(value) if isinstance(value, list | tuple) else [0.0 if value is None else value]


def number(value: Any) -> float:
    """The value as a float: 0 for None, NaN for a value that cannot be read."""
    if value is None:
        return 0.0
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
