"""Collects rollouts from the policy and a task, and measures their log-probabilities. Nothing is trained here.

A data-parallel rank holds the samples that it samples and trains. Of all others it knows the headers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron_rl.config import PolicyLossConfig, RouterReplay
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.layout.groups import all_reduce_max, group_device, world_group
from megatron_rl.losses.corrections import needs_rollout_log_probs
from megatron_rl.megatron.model import model_config_of
from megatron_rl.train.generation import SamplingSettings, gumbel_noise
from megatron_rl.train.key_value_cache import cache_bytes, can_cache
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.rollouts import Microbatches, Prompt, RolloutBatch, Sample, SampleHeader, SharedRollout, group_advantages
from megatron_rl.train.sampling_filter import KeptTokens
from megatron_rl.train.tasks import Task
from megatron_rl.train.trainer import PolicyTrainer
from megatron_rl.train.user_tasks import PromptFileTask

Response = tuple[int, Prompt, list[int]]  # number of the sample, its prompt, the sampled tokens
# Of a sampling forward: rows that take more go through several forwards. On CUDA an eighth of the device's memory.
SAMPLING_BYTES, SHARE_OF_DEVICE = 2 * 1024**3, 8


def rows_per_forward(trainer: PolicyTrainer, max_new_tokens: int, *, records_routes: bool) -> int:
    """How many samples are sampled at once: by the logits of their last positions, the activations of a layer in the longest
    forward, and the keys and values. The same on all ranks. Communication: an all-reduce of a number over all of them."""
    model, config, length = trainer.model, model_config_of(trainer.model), trainer.settings.max_sequence_length
    keeps_keys = can_cache(model) and not records_routes
    longest = length - max_new_tokens if keeps_keys else length  # a prompt, or the whole sequence for each token
    tp_size, element = trainer.groups.tp.size(), next(model.parameters()).element_size()
    row_bytes = 4 * trainer.settings.vocab_size // tp_size
    row_bytes += max(longest, 1) * (4 * config.hidden_size + 2 * config.ffn_hidden_size // tp_size) * element
    row_bytes += cache_bytes(model, length) if keeps_keys else 0
    device, memory = trainer.device, SAMPLING_BYTES
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory // SHARE_OF_DEVICE
    world = world_group()
    most = torch.tensor([-(memory // row_bytes)], device=group_device(world))
    return max(1, -int(all_reduce_max(most, world)))


class SampledRollouts:
    """Rollouts sampled from the policy itself. Prompts and noise are functions of (seed, rollout, sample, position) alone."""

    def __init__(self, trainer: PolicyTrainer, task: Task, options: TrainOptions, samples_per_prompt: int):
        self._trainer, self._task, self._options = trainer, task, options
        self._samples_per_prompt = samples_per_prompt
        self._records_routes = options.router_replay == RouterReplay.ROLLOUT
        self._settings = SamplingSettings(
            max_new_tokens=task.max_new_tokens,
            end_tokens=task.end_tokens,
            temperature=trainer.config.policy_temperature,
            vocab_size=trainer.settings.vocab_size,
            rows_per_forward=rows_per_forward(trainer, task.max_new_tokens, records_routes=self._records_routes),
            top_p=options.top_p,
        )

    def get(self, rollout_index: int, *, policy_version: int | None = None) -> SharedRollout:
        """policy_version: the policy's now; the samples carry it.

        A reward may be paid for or random: one rank of each model replica computes it, and sends it to the others. The tokens stay
        where they were sampled.
        Communication: sampling's, and on_all_ranks' of three numbers a sample.
        """
        num_prompts, dp, seed = self._options.prompts_per_rollout, self._trainer.groups.dp, self._options.seed
        first = rollout_index * num_prompts
        prompts = [self._task.make_prompt(first + index, self._options.seed) for index in range(num_prompts)]
        sample_prompts = [prompt for prompt in prompts for _ in range(self._samples_per_prompt)]
        mine = [index for index in range(len(sample_prompts)) if self._dp_rank_of(index) == dp.rank()]
        recorder = self._trainer.route_recorder() if self._records_routes else None
        kept = KeptTokens(len(mine)) if self._options.top_p < 1.0 else None
        own_prompts, noise = [sample_prompts[index].tokens for index in mine], partial(gumbel_noise, seed, rollout_index)
        responses = self._trainer.sample(own_prompts, mine, self._settings, noise, recorder, kept)
        share = [(index, sample_prompts[index], response) for index, response in zip(mine, responses, strict=True)]
        rewarded = sorted(itertools.chain.from_iterable(on_all_ranks(partial(self._rewards_of, share))))
        rewards, names = [reward for _, reward, _ in rewarded], [prompt.prompt_id for prompt in sample_prompts]
        advantages = group_advantages(rewards, names, self._options.advantage_normalization)
        headers = [
            SampleHeader(
                prompt_id=names[index],
                index=index,
                response_length=length,
                reward=reward,
                advantage=advantages[index],
                dp_rank=self._dp_rank_of(index),
            )
            for index, reward, length in rewarded
        ]
        samples = [
            Sample(
                prompt_id=prompt.prompt_id,
                tokens=torch.tensor([*prompt.tokens, *response]),
                response_length=len(response),
                loss_mask=torch.ones(len(response), dtype=torch.bool),
                reward=rewards[index],
                advantage=advantages[index],
                old_log_probs=None,
                index=index,
                policy_version=policy_version,
                routes=None if recorder is None else recorder.samples[place],
                **({} if kept is None else kept.fields(place)),
            )
            for place, (index, prompt, response) in enumerate(share)
        ]
        own = RolloutBatch(samples=samples, rollout_index=rollout_index, vocab_size=self._trainer.settings.vocab_size)
        return SharedRollout(headers=headers, own=own)

    def lines_about(self, rollout: SharedRollout, number: int) -> list[str]:
        """A line about each of the first `number` samples that this rank holds: prompt, response and reward."""
        index, lines = rollout.own.rollout_index, []
        for sample in rollout.own.samples[:number]:
            place = index * self._options.prompts_per_rollout + sample.index // self._samples_per_prompt
            prompt = self._task.make_prompt(place, self._options.seed)
            shown = self._task.shown(prompt, sample.tokens[len(prompt.tokens) :].tolist())
            lines.append(f"rollout {index}, reward {sample.reward:.3f}: {shown[0]!r} -> {shown[1]!r}")
        return lines

    def _dp_rank_of(self, index: int) -> int:
        """--docs-per-step deals whole prompt groups to the ranks; else they take samples in turn."""
        is_dealt = self._trainer.config.docs_per_step is not None
        return (index // self._samples_per_prompt if is_dealt else index) % self._trainer.groups.dp.size()

    def _rewards_of(self, share: list[Response]) -> list[tuple[int, float, int]]:
        """(index, reward, length) of this data-parallel rank's responses, on the first rank of each model replica."""
        groups = self._trainer.groups
        if not groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0:
            return []
        return [(index, self._task.reward(prompt, response), len(response)) for index, prompt, response in share]


class Evaluation:
    """One response to each prompt of --eval-prompts, with the same noise each time, so that only the policy differs."""

    def __init__(self, trainer: PolicyTrainer, task: PromptFileTask, options: TrainOptions):
        plain = replace(options, prompts_per_rollout=len(task.prompts), seed=options.seed + 1, router_replay=RouterReplay.NONE)
        self._rollouts = SampledRollouts(trainer, task, plain, 1)

    def measure(self) -> dict[str, float]:
        """Mean reward and mean length of the responses, in tokens. Communication and errors: as SampledRollouts.get."""
        samples = self._rollouts.get(0).headers
        return {
            "eval/reward": sum(sample.reward for sample in samples) / len(samples),
            "eval/response_length": sum(sample.response_length for sample in samples) / len(samples),
        }


def reads_old_log_probs(options: TrainOptions, config: PolicyLossConfig) -> bool:
    """Whether something reads the old log-probabilities of a rollout's first step before that step.

    If not, the first step takes its own, as constants, and no forward measures them. --docs-per-step over recorded rollouts takes
    each step for a first one.
    """
    return (
        options.save_rollouts is not None
        or options.router_replay == RouterReplay.OLD_LOG_PROBS  # the routes of that forward
        # The sampler is the trainer's own engine. With --top-p it reports its log-probabilities itself.
        or (options.rollouts is None and options.top_p == 1.0 and needs_rollout_log_probs(config))
    )


def with_old_log_probs(trainer: PolicyTrainer, microbatches: Microbatches) -> Microbatches:
    """The samples with the policy's own log-probabilities before the first step, where they have none yet.

    Under --router-replay old_log_probs with the routes of this forward too. Communication: _lack's, and trainer.log_probs'.
    """
    if not _lack("old_log_probs", trainer, microbatches):
        return microbatches
    recorder = trainer.route_recorder() if trainer.settings.router_replay == RouterReplay.OLD_LOG_PROBS else None
    measured = _with(microbatches, "old_log_probs", trainer.log_probs(microbatches, recorder=recorder))
    if recorder is None:
        return measured
    numbers = itertools.count()
    return _with(measured, "routes", [[recorder.samples[next(numbers)] for _ in samples] for samples in measured])


def with_rollout_log_probs(trainer: PolicyTrainer, microbatches: Microbatches) -> Microbatches:
    """The samples with the sampler's log-probabilities. Where none are given the trainer's own engine sampled: they are its own.

    Communication: _lack's, and with_old_log_probs'.
    """
    if not _lack("rollout_log_probs", trainer, microbatches):
        return microbatches
    measured = with_old_log_probs(trainer, microbatches)
    return [
        [s if s.rollout_log_probs is not None else replace(s, rollout_log_probs=s.old_log_probs) for s in samples]
        for samples in measured
    ]


def with_ref_log_probs(trainer: PolicyTrainer, microbatches: Microbatches) -> Microbatches:
    """The samples with the reference policy's log-probabilities."""
    return _with(microbatches, "ref_log_probs", trainer.log_probs(microbatches, with_reference=True))


def _lack(name: str, trainer: PolicyTrainer, microbatches: Microbatches) -> bool:
    """Whether a sample of the step has none, on any data-parallel rank.

    A rank without samples has to measure where the others do: its experts take part in their forward.
    Communication: one all-reduce of a number over dp.
    """
    is_here = any(getattr(sample, name) is None for samples in microbatches for sample in samples)
    dp = trainer.groups.dp
    return bool(all_reduce_max(torch.tensor([int(is_here)], device=group_device(dp)), dp))


def _with(microbatches: Microbatches, name: str, values: Sequence[Sequence[Any]]) -> Microbatches:
    """Each sample with its row in the field of this name."""
    return [
        [replace(sample, **{name: row}) for sample, row in zip(samples, rows, strict=True)]
        for samples, rows in zip(microbatches, values, strict=True)
    ]
