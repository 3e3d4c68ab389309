"""What is asked of a launch of Megatron-LM's train_rl.py with our forward step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_rl.arguments import read_switch
from megatron_rl.config import NO_CORRECTION, NO_SELECTION
from megatron_rl.hosts.base import HostOptions
from megatron_rl.hosts.sampling import SAMPLERS, SamplingVerdict, flags_that_read, judge_sampling
from megatron_rl.validation import flag_of
from megatron_rl.validation.checks import check, checks_in

CORRECTION_FLAG = "--rl-inference-logprobs-is-correction"


@dataclass(frozen=True, slots=True)
class TrainRl:
    """A launch of train_rl.py. given: its arguments. merged: with its values for our settings."""

    given: dict[str, Any]
    merged: dict[str, Any]
    options: HostOptions

    @property
    def counts_prompts(self) -> bool:
        return self.options.record is not None and self.options.record.needs_prompts

    @property
    def allows_cut_groups(self) -> bool:
        return bool(read_switch(self.given.get("allow_partial_prompt_groups")))


@check()
def bins_are_packed(launch: TrainRl) -> Iterator[str]:
    if not launch.options["rl_use_sequence_packing"]:
        yield (
            "--perform-rl-step without --rl-use-sequence-packing: megatron_rl.hosts.megatron_lm reads packed bins; add "
            "--rl-use-sequence-packing"
        )


@check()
def bins_hold_the_samplers_scores(launch: TrainRl) -> Iterator[str]:
    """train_rl.py packs the sampler's log-probabilities under one flag alone."""
    asked = {name: launch.given.get(name) for name in ("importance_correction", "off_policy_sequence_delta")}
    asked = {name: value for name, value in asked.items() if value not in (None, NO_CORRECTION)}
    if asked and not launch.options["rl_inference_logprobs_is_correction"]:
        named = ", ".join(f"{flag_of(name)} {value}" for name, value in asked.items())
        yield (
            f"{named} compares with the sampler, and train_rl.py packs the sampler's log-probabilities only with "
            f"{CORRECTION_FLAG}: add it"
        )


@check()
def tokens_are_not_selected(launch: TrainRl) -> Iterator[str]:
    if launch.merged.get("token_selection") not in (None, NO_SELECTION):
        yield (
            f"--token-selection {launch.merged['token_selection']} with --perform-rl-step: the scores are of the policy before the "
            "step, and train_rl.py measures none there; remove it, or train in a loop of your own with "
            "megatron.step_selection.select_step_tokens"
        )


@check()
def sampler_and_trainer_score_alike(launch: TrainRl) -> Iterator[str]:
    yield from _sampling(launch).problems


@check(is_warning=True)
def sampler_is_the_policy(launch: TrainRl) -> Iterator[str]:
    yield from _sampling(launch).warnings


def _sampling(launch: TrainRl) -> SamplingVerdict:
    return judge_sampling(SAMPLERS["megatron_lm"], launch.given.get, flags_that_read(launch.merged.get))


@check(when=lambda launch: launch.counts_prompts and not launch.allows_cut_groups)
def steps_hold_prompt_groups(launch: TrainRl) -> Iterator[str]:
    """train_rl.py splits rows over ranks, packs them, and gives a step its share of the bins: only all bins hold whole groups.

    --grpo-iterations uses the same bins again. Where one of the three sizes is unset, nothing is checked.
    """
    given = launch.given
    step, prompts, size = (given.get(name) for name in ("global_batch_size", "grpo_prompts_per_step", "grpo_group_size"))
    if not (step and prompts and size) or step == prompts * size:
        return
    iterations = f" in each of --grpo-iterations {given['grpo_iterations']} passes" if given.get("grpo_iterations") else ""
    yield (
        f"--global-batch-size {step} with --loss-aggregation {given['loss_aggregation']}: a collection is --grpo-prompts-per-step "
        f"{prompts} x --grpo-group-size {size} = {prompts * size} samples, and a step takes its share of the packed "
        f"bins{iterations}, whatever prompts they hold, so it cuts prompt groups; set --global-batch-size {prompts * size}, or "
        "accept cut groups with --allow-partial-prompt-groups"
    )


TRAIN_RL_CHECKS = checks_in(__name__)
