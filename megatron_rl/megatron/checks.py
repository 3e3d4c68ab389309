"""Says once a model what its config and its layers must not have, and what its forward must not attach."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatron_rl.config import LaunchMethod, PolicyLossConfig, RouterAuxLoss
from megatron_rl.errors import ConfigError
from megatron_rl.layout.groups import resolve_group
from megatron_rl.megatron.model import find_gpt_model, model_config_of
from megatron_rl.megatron.router_losses import REPLACED_METHODS, router_losses, takes_padding_mask
from megatron_rl.megatron.samples import trained_mtp_layers
from megatron_rl.validation.auxiliary_losses import SCALERS, auxiliary_loss_problems
from megatron_rl.validation.model_settings import model_problems
from megatron_rl.weights import TOKEN_MEAN, get_loss_aggregation

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

# Settings of a model that a training loop may set after the model is built.
SET_LATE = ("calculate_per_token_loss", "mtp_grad_scale_func", "moe_grad_scale_func", "moe_aux_loss_coeff", "moe_z_loss_coeff")
# Bare models, with the settings that they were checked for.
_checked: weakref.WeakKeyDictionary[nn.Module, tuple[object, ...]] = weakref.WeakKeyDictionary()


def check_model(config: PolicyLossConfig, model: nn.Module, *, is_packed: bool) -> None:
    """Call it when the model is built; without the call the first training forward does the same. Rank 0 warns of --router-aux-loss
    host. Raises one ConfigError for all that would make a loss wrong in this model."""
    bare, model_config = find_gpt_model(model), model_config_of(model)
    settings = (config, is_packed, *(getattr(model_config, name, None) for name in SET_LATE))
    if _checked.get(bare) == settings:
        return
    problems = [*contract_problems(config, model_config)]
    losses = router_losses(model_config)
    if losses and config.router_aux_loss == RouterAuxLoss.EXACT:
        problems += exact_problems(losses, model, model_config, is_packed=is_packed)
    if problems:
        raise ConfigError(problems)
    _checked[bare] = settings
    is_first_rank = resolve_group(None, "dp_cp").rank() == resolve_group(None, "tp").rank() == 0 and bare.pre_process
    if losses and is_first_rank and config.router_aux_loss != RouterAuxLoss.EXACT:
        warnings.warn(
            f"--router-aux-loss host keeps Megatron's scale of {', '.join(losses)}, which depends on the layout: a mean over "
            "micro-batches and ranks, under --calculate-per-token-loss x routed tokens / response tokens; choose exact for the "
            "value of one rank on the whole step",
            stacklevel=2,
        )


def contract_problems(config: PolicyLossConfig, model_config: TransformerConfig) -> Iterator[str]:
    """calculate_per_token_loss in the model's config with another aggregation than token_mean, losses that the model adds by
    itself, and what is wrong on its layout. The config may have changed after the arguments were parsed."""
    settings = vars(model_config) | {"router_aux_loss": config.router_aux_loss}
    yield from auxiliary_loss_problems(settings, LaunchMethod.MEGATRON_LM)
    yield from model_problems(vars(model_config), has_own_groups=True)
    given = f"mtp_num_layers={model_config.mtp_num_layers!r}"
    if trained_mtp_layers(model_config) and settings.get("mtp_grad_scale_func") is not None:  # since Megatron-Core 0.19
        yield f"{given} with mtp_grad_scale_func in the model's config: nothing is attached that it could scale; remove it"
    if trained_mtp_layers(model_config) and settings.get("use_mup"):
        yield (
            f"{given} with use_mup=True: Megatron-Core scales the logits of the policy, and those of MTP would not be; set "
            "mtp_loss_scaling_factor=0"
        )
    if model_config.calculate_per_token_loss and get_loss_aggregation(config.loss_aggregation).formula != TOKEN_MEAN:
        yield (
            f"--loss-aggregation {config.loss_aggregation} with calculate_per_token_loss=True in the model's config: Megatron "
            "divides by the step's tokens, which is token_mean. Remove --calculate-per-token-loss, or choose token_mean"
        )


def exact_problems(
    losses: dict[str, float], model: nn.Module | type[nn.Module], config: TransformerConfig, *, is_packed: bool
) -> Iterator[str]:
    """Why --router-aux-loss exact is not possible for these losses of the model."""
    from megatron.core.transformer.moe.router import TopKRouter

    exact = "--router-aux-loss exact"
    if not takes_padding_mask(model):
        yield f"{exact}: the model gives its routers no padding mask, so padding would be counted; choose host"
    for name, expected in REPLACED_METHODS.items():
        method = getattr(TopKRouter, name, None)
        found = () if method is None else tuple(inspect.signature(method).parameters)[1:]
        if found != expected:
            yield (
                f"{exact} replaces TopKRouter.{name}({', '.join(expected)}), and the installed Megatron-Core has "
                f"({', '.join(found)}): choose host or refuse, or install megatron-core 0.16 to 0.19"
            )
    if getattr(config, "moe_grad_scale_func", None) is not None:
        yield f"{exact} with moe_grad_scale_func in the model's config: both scale these losses; remove one"
    if vars(config).get("mtp_use_repeated_layer") and trained_mtp_layers(config) > 1:
        yield (
            f"{exact} with mtp_use_repeated_layer=True: one router would have the loss of several layers; choose host or "
            "refuse, or build each layer"
        )
    if is_packed and "seq_aux_loss" in losses:
        yield (
            f"{exact} with seq_aux_loss (--moe-aux-loss-coeff {losses['seq_aux_loss']}) and packed rows: Megatron gives its router "
            "no bounds of samples, and balances the whole row as one sample; pad the samples, or use aux_loss"
        )


def check_attached(outputs: Iterable[Tensor]) -> bool:
    """Raises ConfigError where the graph of a forward has an autograd Function with a set_loss_scale, as Megatron's have, that
    SCALERS does not know: its scale may depend on the layout. False: there is no graph to look at.

    outputs: what the forward has made on this rank. A layer that backward recomputes hides what it attaches. No synchronisation.
    """
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, unknown = set(), set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        function: Any = getattr(type(node), "_forward_cls", None)  # torch has no public name for the Function of a node
        if hasattr(function, "set_loss_scale") and function.__name__ not in SCALERS:
            unknown.add(function.__name__)
        waiting += [following for following, _ in getattr(node, "next_functions", ()) if following is not None]
    if unknown:
        raise ConfigError(
            f"the model attaches a loss by {' and '.join(sorted(unknown))}, which this package does not know, and its scale may "
            f"change with the layout: switch it off in the model's config. Known are {', '.join(SCALERS)}"
        )
    return bool(seen)
