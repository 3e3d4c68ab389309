"""What is refused of --fused-lm-head-loss and --fp32-lm-head in a host, before there is a model; placed_head judges the model."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.arguments import read_switch
from megatron_rl.config import Route
from megatron_rl.hosts.base import INIT_LINE, HostLaunch
from megatron_rl.hosts.host_places import HEAD_REMEDY, host_problems, of_head
from megatron_rl.megatron.head import HeadSettings
from megatron_rl.validation.auxiliary_losses import number
from megatron_rl.validation.checks import Asker, check


def _flags(launch: HostLaunch) -> str:
    fields = {"--fused-lm-head-loss": "fused_lm_head_loss", "--fp32-lm-head": "fp32_lm_head"}
    return " and ".join(flag for flag, name in fields.items() if read_switch(launch.options.ours(name)) is True)


def has_head(launch: HostLaunch) -> bool:
    """In a host that calls our hooks; the others call our forward step, which replaces the head by itself."""
    return Route.CUSTOM_LOSS in launch.options.host.routes and bool(_flags(launch))


def is_fused(launch: HostLaunch) -> bool:
    return has_head(launch) and read_switch(launch.options.ours("fused_lm_head_loss")) is True


@check(when=has_head)
def head_is_placed(launch: HostLaunch) -> Iterator[str]:
    """A function of the user's own at this flag may call our hook; whether it did is asked at the first micro-batch."""
    backend, host = launch.options["train_backend"], launch.options.host
    if host.training_package is None:
        yield f"{_flags(launch)} in {host}: no hook of ours is called where it builds its model; remove {_flags(launch)}"
    elif backend != "megatron":
        yield (
            f"--train-backend {backend} with {_flags(launch)}: the backend calls no init hook, which places our head in the model; "
            f"use --train-backend megatron, or remove {_flags(launch)}"
        )
    elif launch.options["custom_megatron_init_path"] is None:
        yield f"{_flags(launch)} has no effect without our init hook, which places our head in the model: add {INIT_LINE}"


@check(when=has_head)
def head_computes_no_other_losses(launch: HostLaunch) -> Iterator[str]:
    layers = number(launch.options.of_model.get("mtp_num_layers"))
    if layers or launch.options["enable_mtp_training"]:
        given = f"--mtp-num-layers {layers:g}" if layers else "--enable-mtp-training"
        yield (
            f"{_flags(launch)} with {given}: multi-token prediction calls the output layer again for its losses, which would get "
            f"no logits; remove {given} or {_flags(launch)}"
        )


@check(when=is_fused)
def head_keeps_small_gradients(launch: HostLaunch) -> Iterator[str]:
    if launch.options["fp16"]:
        yield (
            "--fused-lm-head-loss with --fp16: the gradient of hidden states is computed before the host's factor and loss scale "
            "are known, and float16 would round most of it to 0; train in bfloat16, or remove --fused-lm-head-loss"
        )


@check(when=has_head)
def sampler_computes_the_same_logits(launch: HostLaunch) -> Iterator[str]:
    if launch.options["true_on_policy_mode"]:
        yield (
            f"{_flags(launch)} with --true-on-policy-mode: the logits are computed by the sampler's kernels there, and ours are "
            "others; remove one of them"
        )


@check(when=is_fused, is_warning=True)
def recomputed_head_is_computed_twice(launch: HostLaunch) -> Iterator[str]:
    if launch.options["recompute_loss_function"]:
        yield (
            "--recompute-loss-function with --fused-lm-head-loss saves no memory, because there are no logits to keep, and "
            "computes the head a second time in backward; remove --recompute-loss-function"
        )


@check(asked_by=(Asker.INIT_HOOK,), when=has_head)
def host_builds_its_model_as_known(launch: HostLaunch) -> Iterator[str]:
    if launch.options.host.training_package is not None:
        yield from host_problems(launch.options.host, of_head(HeadSettings(is_fused=is_fused(launch))), HEAD_REMEDY)
