"""Where the scale of a loss that a model adds by itself would be wrong.

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
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from megatron_rl.config import LaunchMethod, RouterAuxLoss

# The autograd Functions of megatron.core that attach such a loss to an activation. The schedule gives each a scale.
SCALERS = ("MoEAuxLossAutoScaler", "MTPLossAutoScaler", "DSAIndexerLossAutoScaler")
DEFAULT_MTP_FACTOR = 0.1
# The types of load balancing that add a loss, and so have a coefficient.
TYPES_WITH_A_LOSS = ("aux_loss", "seq_aux_loss", "global_aux_loss")
HOSTS = (LaunchMethod.REDUCER, LaunchMethod.CUSTOM_LOSS)


def auxiliary_loss_problems(settings: Mapping[str, object], method: LaunchMethod) -> Iterator[str]:
    """A message for each loss of the model whose gradient --calculate-per-token-loss would rescale, or that is refused.

    settings: the arguments of a launch or a model's config, with calculate_per_token_loss and router_aux_loss.
    """
    yield from router_loss_problems(settings, method)
    yield from _indexer_problems(settings, method)
    if method in HOSTS and settings.get("calculate_per_token_loss"):
        yield from _mtp_problems(settings)


def router_loss_problems(settings: Mapping[str, object], method: LaunchMethod) -> Iterator[str]:
    wanted, is_per_token = settings.get("router_aux_loss"), settings.get("calculate_per_token_loss")
    if wanted in (RouterAuxLoss.HOST, RouterAuxLoss.EXACT):
        return
    for name, of in active_losses(settings).items():
        if is_per_token:
            remedy = "remove --calculate-per-token-loss" if method in HOSTS else "add --router-aux-loss exact"
            yield (
                f"{name}={settings[name]!r}{of} does not go with calculate_per_token_loss=True: Megatron multiplies this loss by "
                "the tokens that it routes, prompts and padding included, and divides by response tokens, so its gradient is x "
                f"routed tokens / response tokens; set {name} to 0, or {remedy}"
            )
        elif wanted == RouterAuxLoss.REFUSE:
            yield f"{name}={settings[name]!r}{of} with --router-aux-loss refuse: set {name} to 0, or choose exact"


def active_losses(settings: Mapping[str, object]) -> dict[str, str]:
    """Each coefficient of routers that is not 0 -> the types of load balancing that it belongs to, in words."""
    if not num_experts_of(settings):
        return {}
    types = listed(settings.get("moe_router_load_balancing_type") or TYPES_WITH_A_LOSS[0])
    coefficients = listed(settings.get("moe_aux_loss_coeff"))
    # Each type has its own coefficient. Megatron refuses lists of different lengths later.
    pairs = zip(types, coefficients, strict=True) if len(types) == len(coefficients) else product(types, coefficients)
    at_work = dict.fromkeys(str(kind) for kind, value in pairs if kind in TYPES_WITH_A_LOSS and number(value))
    found = {"moe_aux_loss_coeff": f" of {' and '.join(at_work)}"} if at_work else {}
    if number(settings.get("moe_z_loss_coeff")):
        found["moe_z_loss_coeff"] = ""
    return found


def _mtp_problems(settings: Mapping[str, object]) -> Iterator[str]:
    """miles and slime build the layers without training them too."""
    factor = settings.get("mtp_loss_scaling_factor", DEFAULT_MTP_FACTOR)
    is_trained = number(settings.get("mtp_num_layers")) and number(factor) and settings.get("enable_mtp_training")
    if is_trained and number(settings.get("context_parallel_size", 1)) != 1:
        yield (
            f"mtp_loss_scaling_factor={factor!r} with mtp_num_layers={settings['mtp_num_layers']!r} does not go with "
            "calculate_per_token_loss=True: the host multiplies its own loss by context_parallel_size and not this one, so its "
            "gradient is x 1 / cp; set mtp_loss_scaling_factor to 0, or remove --calculate-per-token-loss"
        )


def _indexer_problems(settings: Mapping[str, object], method: LaunchMethod) -> Iterator[str]:
    """In hosts the installed Megatron-Core decides under the default contract: see unscaled_indexer_problem."""
    coefficient = settings.get("dsa_indexer_loss_coeff")
    if not number(coefficient):
        return
    if method not in HOSTS:
        yield (
            f"dsa_indexer_loss_coeff={coefficient!r}: the loss of the sparse-attention indexer is a mean over all positions of a "
            "micro-batch, padding included, so it depends on the layout; set it to 0"
        )
    elif settings.get("calculate_per_token_loss"):
        yield (
            f"dsa_indexer_loss_coeff={coefficient!r} does not go with calculate_per_token_loss=True: Megatron divides the loss of "
            "the sparse-attention indexer by response tokens, after the mean of each micro-batch (0.16 to 0.18) or the sum over "
            "prompts and padding too (0.19); set it to 0, or remove --calculate-per-token-loss"
        )


def unscaled_indexer_problem(settings: Mapping[str, object]) -> str | None:
    """Why the indexer trains x micro-batches where the installed Megatron-Core gives its loss no scale (scales_indexer_loss)."""
    coefficient = settings.get("dsa_indexer_loss_coeff")
    if not number(coefficient) or settings.get("calculate_per_token_loss"):
        return None
    return (
        f"dsa_indexer_loss_coeff={coefficient!r}: Megatron-Core 0.16 to 0.18 gives the loss of the sparse-attention indexer no "
        "scale, so its gradient is x the micro-batches of a rank; set it to 0, or install megatron-core 0.19 or later"
    )


def num_experts_of(settings: Mapping[str, object]) -> int:
    """0 for a dense model. A command line says num_experts, a TransformerConfig num_moe_experts."""
    return size_of(settings.get("num_experts") or settings.get("num_moe_experts"), 0)


def size_of(value: object, absent: int = 1) -> int:
    """A value that cannot be read counts as absent: Megatron's parser refuses it."""
    found = number(value)
    return int(found) if math.isfinite(found) and found >= 1 else absent


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
