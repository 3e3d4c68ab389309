"""What is refused of --skip-old-log-probs, before there is data; skipped_log_probs leaves the forward out."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.arguments import read_switch
from megatron_rl.config import Route
from megatron_rl.hosts.base import INIT_LINE, HostLaunch
from megatron_rl.hosts.host_places import OF_OLD_LOG_PROBS, host_problems
from megatron_rl.validation import flag_of
from megatron_rl.validation.auxiliary_losses import number
from megatron_rl.validation.checks import Asker, check
from megatron_rl.validation.model_settings import DROPOUTS

FLAG = "--skip-old-log-probs"
REMEDY = f"no forward can be left out; remove {FLAG}"
OR_FORWARD = f"or remove {FLAG}"
# What reads old log-probabilities, or what the forward that measures them leaves -> what for.
READERS = {
    "keep_old_actor": "the old log-probabilities are those of another policy than the one in training",
    "kl_coef": "the KL in the reward is an estimate from the old log-probabilities; use --use-kl-loss with --kl-loss-coef",
    "use_opd": "distillation adds a KL of the old log-probabilities to the advantages",
    "custom_advantage_function_path": "the function may read the old log-probabilities",
    "rollout_data_postprocess_path": "the function may read the old log-probabilities",
    "custom_megatron_before_log_prob_hook_path": "the hook is called before the forward that is left out",
    "log_correct_samples": "the entropy of right answers is taken from the old log-probabilities",
    "use_rollout_entropy": "this entropy is measured by the forward that is left out",
}
# A replay of what that forward records -> its form that replays what the sampler has recorded.
REPLAYS = {"use_routing_replay": "use_rollout_routing_replay", "use_indexer_replay": "use_rollout_indexer_replay"}
# In the forward that trains, and not in the one that measures.
NOISE = ("lora_dropout", "moe_input_jitter_eps")


def skips(launch: HostLaunch) -> bool:
    return launch.route == Route.CUSTOM_LOSS and read_switch(launch.options.ours("skip_old_log_probs")) is True


@check(when=skips)
def forward_can_be_left_out(launch: HostLaunch) -> Iterator[str]:
    """A function of the user's own at the init hook's flag may call ours; if not, our loss sees what was measured."""
    options, backend = launch.options, launch.options["train_backend"]
    if options.host.training_package is None:
        yield f"{FLAG} in {options.host}: no hook of ours is called where it measures them; remove {FLAG}"
    elif backend != "megatron":
        yield (
            f"--train-backend {backend} with {FLAG}: the backend calls no init hook, which leaves the forward out; use "
            f"--train-backend megatron, {OR_FORWARD}"
        )
    elif options["custom_megatron_init_path"] is None:
        yield f"{FLAG} has no effect without our init hook, which leaves the forward out: add {INIT_LINE}"
    if options["use_rollout_logprobs"]:
        yield (
            f"--use-rollout-logprobs with {FLAG}: the ratio of the loss is to the sampler then, and no forward is run for it; "
            "remove one of them"
        )


@check(when=skips)
def rollout_is_one_step(launch: HostLaunch) -> Iterator[str]:
    """Where the launch says it; else the first rollout does."""
    options = launch.options
    steps, samples, step = options["num_steps_per_rollout"], options.samples_of_batch, options["global_batch_size"]
    given = None
    if steps not in (None, 1):
        given = f"--num-steps-per-rollout {steps}"
    elif steps is None and None not in (samples, step) and step != samples and not options["use_dynamic_global_batch_size"]:
        if not launch.has_converter():
            given = f"--global-batch-size {step} of a rollout batch of {samples} samples"
    if given is not None:
        yield (
            f"{given} with {FLAG}: from the second step on the policy in training is not the old one; make a rollout one step "
            f"(--num-steps-per-rollout 1), {OR_FORWARD}"
        )


@check(when=skips)
def nothing_reads_old_log_probs(launch: HostLaunch) -> Iterator[str]:
    options = launch.options
    for name, why in READERS.items():
        if options[name]:
            value = "" if options[name] is True else f" {options[name]}"
            yield f"{flag_of(name)}{value} with {FLAG}: {why}; remove {flag_of(name)}, {OR_FORWARD}"
    for name, instead in REPLAYS.items():
        if options[name] and not options[instead]:
            yield (
                f"{flag_of(name)} with {FLAG}: it replays what the forward that is left out records; use {flag_of(instead)}, "
                f"{OR_FORWARD}"
            )


@check(when=skips)
def both_forwards_are_the_same(launch: HostLaunch) -> Iterator[str]:
    """The step's own log-probabilities are those that the forward would measure, to rounding, without noise alone."""
    given = {name: launch.options.of_model.get(name) for name in DROPOUTS} | {name: launch.options[name] for name in NOISE}
    for name, value in given.items():
        if number(value):
            yield (
                f"{flag_of(name)} {number(value):g} with {FLAG}: the forward that trains is random there, and the one that "
                f"measures is not; set {flag_of(name)} 0, {OR_FORWARD}"
            )


@check(asked_by=(Asker.INIT_HOOK,), when=skips)
def host_measures_as_known(launch: HostLaunch) -> Iterator[str]:
    if launch.options.host.training_package is not None:
        yield from host_problems(launch.options.host, OF_OLD_LOG_PROBS, REMEDY)


def is_left_out_for_free(launch: HostLaunch) -> bool:
    """Whether our loss trains the same without that forward, where a rollout is one step."""
    needs = (forward_can_be_left_out, rollout_is_one_step, nothing_reads_old_log_probs)
    return launch.has_our_loss() and not any(text for one in needs for text in one.find(launch))
