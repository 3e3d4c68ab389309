"""Places our head in the model that miles or slime builds: --fused-lm-head-loss and --fp32-lm-head in a host.

The init hook runs before the host has a model. It puts a function around the host's own that builds the model, and that function
gives the output layer of the actor's model another forward. No class of Megatron changes, nor a file of the host.

    which forward                                          fused              fp32              both
    trains: gradients are enabled, model.train()           a HiddenStatesProxy          float32 logits    a HiddenStatesProxy
    measures old and reference log-probabilities:
    gradients are off, model.eval()                        a HiddenStatesProxy          float32 logits    a HiddenStatesProxy
    any other, such as gradients and model.eval()          the layer's own    float32 logits    float32 logits

Old and new log-probabilities then come from logits of one precision, so that the first ratio of a step is 1. What the hosts measure
them with gets a function around it, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.args import BUILDER, MEASURE, Host, head_places
from megatron_rl.hosts.contract import Replaced
from megatron_rl.hosts.heads.hidden_states_proxy import HiddenStatesProxy, make_proxy
from megatron_rl.hosts.heads.proxy_log_probs import proxy_log_probs
from megatron_rl.hosts.host_run import RUNS
from megatron_rl.layout.agreement import maxima_anywhere
from megatron_rl.layout.groups import Group, ParallelGroups, resolve_groups
from megatron_rl.megatron.head import (
    HeadInputs,
    HeadSettings,
    flags_of,
    forward_through,
    is_sharded_behind_forward,
    layer_problems,
    own_forward,
    setting_problems,
    sharded_problem,
    unfound_problem,
)
from megatron_rl.megatron.model import find_output_layer, model_config_of
from megatron_rl.ops.fp32_head import fp32_head_logits

ACTOR = "actor"


def take_over(host: Host, settings: HeadSettings) -> None:
    """From now on each actor's model of this host gets the head that its run asks for, and our function measures what the model's
    output carries. A second call changes nothing. `problems` of these functions must have found none."""
    makers: dict[Replaced, Callable[..., Any]] = {BUILDER: _with_placed_head, MEASURE: partial(_measuring_proxies, host)}
    for one in head_places(is_fused=settings.is_fused):
        one.put_around(host.training_package, makers[one])


def _with_placed_head(build: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(build)

    def setup_model_and_optimizer(*positional: Any, **named: Any) -> Any:
        given = signature.bind(*positional, **named)
        given.apply_defaults()
        run, built = RUNS.of(given.arguments["args"]), build(*positional, **named)
        if run.head.is_on and given.arguments["role"] == ACTOR:
            place_head(built[0], run.head)
            run.has_head = True
        return built

    return setup_model_and_optimizer


def _measuring_proxies(host: Host, own: Callable[..., Any]) -> Callable[..., Any]:
    def get_log_probs_and_entropy(logits: Tensor, **named: Any) -> Any:
        if not isinstance(logits, HiddenStatesProxy):
            return own(logits, **named)
        return host.measured(proxy_log_probs(logits, **named), logits)

    return get_log_probs_and_entropy


def place_head(
    models: Sequence[nn.Module],
    settings: HeadSettings,
    forward_of: Callable[[Any, HeadSettings, Group], Callable[..., Any]] | None = None,
    *,
    knows_mtp: bool = False,
) -> None:
    """Gives the output layer of these parts of a model, where this stage has it, the forward of `settings`.

    forward_of(layer, settings, tp group): another forward, for a host that takes another proxy. knows_mtp: as in place_rows.

    Communication: one all-reduce of one number over dp-cp, pp and tp each, so that a fault of the last stage stops all.
    Raises ConfigError where the head does not fit the model.
    """
    groups = resolve_groups()
    problems = list(_problems(models, settings, groups, knows_mtp))
    if maxima_anywhere(torch.tensor([len(problems)]), groups) != [0] and not problems:
        problems = ["another rank refused its output layer, and this one agrees with it: see the message of that rank"]
    if problems:
        raise ConfigError(problems)
    for layer in _output_layers(models):
        layer.forward = (forward_of or _forward_of)(layer, settings, groups.tp)


def _problems(models: Sequence[nn.Module], settings: HeadSettings, groups: ParallelGroups, knows_mtp: bool) -> Iterator[str]:
    for model in models:
        config, flags = model_config_of(model), flags_of(settings)
        yield from setting_problems(settings, config)
        if config.mtp_num_layers and not knows_mtp:
            yield (
                f"{flags} with mtp_num_layers={config.mtp_num_layers}: multi-token prediction calls the output layer again for its "
                f"losses, which would get no logits; remove --mtp-num-layers or {flags}"
            )
    if settings.is_fused and any(map(is_sharded_behind_forward, models)):
        yield sharded_problem(settings)
    layers = _output_layers(models)
    if groups.pp.rank() == groups.pp.size() - 1 and not layers:
        yield unfound_problem(models[-1], settings)
    for layer in layers:
        yield from layer_problems(layer, settings, groups.tp)


def _output_layers(models: Iterable[nn.Module]) -> list[Any]:
    return [layer for layer in map(find_output_layer, models) if layer is not None]


def _forward_of(layer: Any, settings: HeadSettings, tp_group: Group) -> Callable[..., Any]:
    return forward_through(layer, _output_of(layer, settings, tp_group))


def _output_of(layer: Any, settings: HeadSettings, tp_group: Group) -> Any:  # HeadInputs -> Tensor
    own = own_forward(layer)

    def output(inputs: HeadInputs) -> Tensor:
        has_gradients = torch.is_grad_enabled()
        trains, measures = layer.training and has_gradients, not (layer.training or has_gradients)
        if settings.is_fused and (trains or measures):
            return make_proxy(inputs, tp_group)
        if settings.is_fp32:
            is_sharded = inputs.is_sequence_parallel
            return fp32_head_logits(inputs.hidden, inputs.weight, tp_group=tp_group, sequence_parallel=is_sharded)
        logits: Tensor = own(inputs.hidden, weight=inputs.weight)[0]
        return logits

    return output
