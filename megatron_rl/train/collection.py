"""Collects rollouts from the policy and a task, and measures their log-probabilities. Nothing is trained here.

A data-parallel rank holds the samples that it samples and trains. Of all others it knows the headers.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron_rl.config import NO_SELECTION, PolicyLossConfig, RouterReplay
from megatron_rl.kept_counts import counts_kept_before
from megatron_rl.layout.agreement import on_all_ranks
from megatron_rl.layout.groups import all_reduce_max, group_device, world_group
from megatron_rl.loss_hub import needs_rollout_log_probs
from megatron_rl.megatron.model import model_config_of
from megatron_rl.megatron.step_selection import StepSelection, select_step_tokens
from megatron_rl.registries.selection_settings import TokenSelectionSettings
from megatron_rl.step_counts import StepTotals
from megatron_rl.train.generation import SamplingSettings, gumbel_noise
from megatron_rl.train.key_value_cache import cache_bytes, can_cache
from megatron_rl.train.options import TrainOptions
from megatron_rl.train.rollouts import (
    Microbatches,
    Prompt,
    RolloutBatch,
    Sample,
    SampleHeader,
    SharedRollout,
    group_advantages,
)
from megatron_rl.train.sampling_filter import KeptTokens
from megatron_rl.train.tasks import Task
from megatron_rl.train.trainer import PolicyTrainer

Response = tuple[int, Prompt, list[int]]  # number of the sample, its prompt, the sampled tokens
# Of a sampling forward: rows that take more go through several forwards. On CUDA an eighth of the device's memory.
SAMPLING_BYTES, SHARE_OF_DEVICE = 2 * 1024**3, 8
# Of a vocabulary id where top-p sorts whole rows: logits, twice, and sorted; ids; float64 masses and sums; flags.
SORTED_BYTES = 3 * 4 + 8 + 3 * 8 + 4


def rows_per_forward(trainer: PolicyTrainer, max_new_tokens: int, *, records_routes: bool, sorts_rows: bool = False) -> int:
    """How many samples are sampled at once: by the logits of their last positions, the activations of a layer in the longest
    forward, the keys and values, and with sorts_rows what top-p needs of whole rows. The same on all ranks.
    Communication: an all-reduce of a number over all of them."""
    model, config, length = trainer.model, model_config_of(trainer.model), trainer.settings.max_sequence_length
    keeps_keys = can_cache(model) and not records_routes
    longest = length - max_new_tokens if keeps_keys else length  # a prompt, or the whole sequence for each token
    tp_size, element = trainer.groups.tp.size(), next(model.parameters()).element_size()
    row_bytes = 4 * trainer.settings.vocab_size // tp_size
    row_bytes += max(longest, 1) * (4 * config.hidden_size + 2 * config.ffn_hidden_size // tp_size) * element
    row_bytes += cache_bytes(model, length) if keeps_keys else 0
    row_bytes += SORTED_BYTES * trainer.settings.vocab_size if sorts_rows else 0
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
        self._keeps_ids = options.top_p < 1.0
        self._settings = SamplingSettings(
            max_new_tokens=task.max_new_tokens,
            end_tokens=task.end_tokens,
            temperature=trainer.config.policy_temperature,
            vocab_size=trainer.settings.vocab_size,
            rows_per_forward=rows_per_forward(
                trainer, task.max_new_tokens, records_routes=self._records_routes, sorts_rows=self._keeps_ids
            ),
            top_p=options.top_p,
        )

    def get(self, rollout_index: int, *, policy_version: int | None = None) -> SharedRollout:
        """policy_version: the policy's now; the samples carry it.

        A reward may be paid for or random: one rank of each model replica computes it, and sends it to the others. The tokens stay
        where they were sampled.
        Communication: sampling's, and on_all_ranks' of three numbers a sample.
        """
        num_prompts, dp = self._options.prompts_per_rollout, self._trainer.groups.dp
        first = rollout_index * num_prompts
        prompts = [self._task.make_prompt(first + index, self._options.seed) for index in range(num_prompts)]
        of_sample = [prompt for prompt in prompts for _ in range(self._samples_per_prompt)]
        mine = [index for index in range(len(of_sample)) if self._dp_rank_of(index) == dp.rank()]
        recorder = self._trainer.route_recorder() if self._records_routes else None
        kept = KeptTokens(len(mine)) if self._keeps_ids else None
        responses = self._trainer.sample(
            [of_sample[index].tokens for index in mine],
            mine,
            self._settings,
            partial(gumbel_noise, self._options.seed, rollout_index),
            recorder,
            kept,
        )
        share = [(index, of_sample[index], response) for index, response in zip(mine, responses, strict=True)]
        rewarded = sorted(itertools.chain.from_iterable(on_all_ranks(partial(self._rewards_of, share))))
        rewards = [reward for _, reward, _ in rewarded]
        advantages = group_advantages(rewards, [prompt.prompt_id for prompt in of_sample], self._options.advantage_normalization)
        headers = [
            SampleHeader(
                prompt_id=prompt.prompt_id,
                index=index,
                response_length=length,
                reward=reward,
                advantage=advantages[index],
                dp_rank=self._dp_rank_of(index),
            )
            for prompt, (index, reward, length) in zip(of_sample, rewarded, strict=True)
        ]
        samples = [
            self._sample(headers[index], prompt, response, policy_version, None if recorder is None else recorder.samples[place])
            for place, (index, prompt, response) in enumerate(share)
        ]
        if kept is not None:
            samples = [replace(sample, **kept.fields(place)) for place, sample in enumerate(samples)]
        own = RolloutBatch(
            samples=samples,
            rollout_index=rollout_index,
            vocab_size=self._trainer.settings.vocab_size,
        )
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

    def _sample(
        self, header: SampleHeader, prompt: Prompt, response: list[int], policy_version: int | None, routes: Tensor | None
    ) -> Sample:
        return Sample(
            prompt_id=prompt.prompt_id,
            tokens=torch.tensor([*prompt.tokens, *response]),
            response_length=len(response),
            loss_mask=torch.ones(len(response), dtype=torch.bool),
            reward=header.reward,
            advantage=header.advantage,
            old_log_probs=None,
            index=header.index,
            policy_version=policy_version,
            routes=routes,
        )


class Evaluation:
    """One response to each prompt of --eval-prompts, with the same noise each time, so that only the policy differs."""

    def __init__(self, trainer: PolicyTrainer, task: Task, options: TrainOptions, num_prompts: int):
        plain = replace(
            options,
            prompts_per_rollout=num_prompts,
            seed=options.seed + 1,
            router_replay=RouterReplay.NONE.value,
        )
        self._rollouts = SampledRollouts(trainer, task, plain, 1)

    def measure(self) -> dict[str, float]:
        """Mean reward and mean length of the responses, in tokens. Communication and errors: as SampledRollouts.get."""
        samples = self._rollouts.get(0).headers
        return {
            "eval/reward": sum(sample.reward for sample in samples) / len(samples),
            "eval/response_length": sum(sample.response_length for sample in samples) / len(samples),
        }


# The counts of some step with a rollout of several samples.
OF_SEVERAL_SAMPLES = StepTotals(num_samples=2, num_prompts=None, num_tokens=2, num_rollouts=1)


def reader_of_old_log_probs(options: TrainOptions, config: PolicyLossConfig) -> str | None:
    """The flag that reads the old log-probabilities of a rollout's first step before that step; None: there is none.

    Without one the first step takes its own, as constants, and no forward measures them. --docs-per-step over recorded rollouts
    takes each step for a first one.
    """
    if options.save_rollouts is not None:
        return "--save-rollouts"
    if options.router_replay == RouterReplay.OLD_LOG_PROBS:  # the routes of that forward
        return f"--router-replay {options.router_replay}"
    if counts_kept_before(config):
        return f"--rejected-tokens {config.rejected_tokens}"
    # The sampler is the trainer's own engine. With --top-p it reports its log-probabilities itself.
    if options.rollouts is None and needs_rollout_log_probs(config) and options.top_p == 1.0:
        has_delta = config.off_policy_sequence_delta is not None
        return "--off-policy-sequence-delta" if has_delta else f"--policy-loss {config.policy_loss}"
    return None


def counts_kept_of_rollouts(trainer: PolicyTrainer, microbatches: Microbatches) -> bool:
    """Whether the kept tokens of this step are counted before it because its rollouts have several samples.

    Communication: one all-reduce of a number over dp, where the settings make that possible.
    """
    config, dp = trainer.config, trainer.groups.dp
    if config.off_policy_sequence_delta is not None or not counts_kept_before(config, OF_SEVERAL_SAMPLES):
        return False
    is_given = any(sample.rollout_id is not None for samples in microbatches for sample in samples)
    return bool(all_reduce_max(torch.tensor([int(is_given)], device=group_device(dp)), dp))


def with_old_log_probs(trainer: PolicyTrainer, microbatches: Microbatches) -> Microbatches:
    """The samples with the policy's own log-probabilities before the first step, where they have none yet.

    Under --router-replay old_log_probs with the routes of this forward too. Communication: _lack's, and trainer.log_probs'.
    """
    if not _lack("old_log_probs", trainer, microbatches):
        return microbatches
    recorder = trainer.route_recorder() if trainer.settings.router_replay == RouterReplay.OLD_LOG_PROBS else None
    values = trainer.log_probs(microbatches, recorder=recorder)
    measured = [[replace(sample, old_log_probs=row) for sample, row in pairs] for pairs in _paired(microbatches, values)]
    if recorder is None:
        return measured
    numbers = itertools.count()
    return [[replace(sample, routes=recorder.samples[next(numbers)]) for sample in samples] for samples in measured]


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
    values = trainer.log_probs(microbatches, of_reference=True)
    return [[replace(sample, ref_log_probs=row) for sample, row in pairs] for pairs in _paired(microbatches, values)]


def selection_of(trainer: PolicyTrainer, microbatches: Microbatches, *, seed: int) -> StepSelection | None:
    """The tokens of the step that --token-selection selects by the policy as it is now; None without one.

    seed: of the step, for random tokens. Communication: trainer.log_probs', one forward of each micro-batch, and select_tokens'
    over dp.
    """
    if trainer.config.token_selection == NO_SELECTION:
        return None
    replays_routes = trainer.settings.router_replay != RouterReplay.NONE
    with_entropy = "entropy" in TokenSelectionSettings.of(trainer.config).declared.needs
    measured = trainer.log_probs(microbatches, with_entropy=with_entropy, replays_routes=replays_routes)
    pairs = [pair for of_microbatch in _paired(microbatches, measured) for pair in of_microbatch]
    return select_step_tokens(
        trainer.config,
        [sample for sample, _ in pairs],
        [sample.number for sample, _ in pairs],
        trainer.groups,
        log_probs=[row[0] if with_entropy else row for _, row in pairs],
        entropy=[row[1] for _, row in pairs] if with_entropy else None,
        seed=seed,
    )


def _lack(name: str, trainer: PolicyTrainer, microbatches: Microbatches) -> bool:
    """Whether a sample of the step has none, on any data-parallel rank.

    A rank without samples has to measure where the others do: its experts take part in their forward.
    Communication: one all-reduce of a number over dp.
    """
    dp = trainer.groups.dp
    is_missing = any(getattr(sample, name) is None for samples in microbatches for sample in samples)
    return bool(all_reduce_max(torch.tensor([int(is_missing)], device=group_device(dp)), dp))


def _paired(microbatches: Microbatches, values: list[list[Tensor]]) -> list[list[tuple[Sample, Tensor]]]:
    """Each sample with its row."""
    return [list(zip(samples, rows, strict=True)) for samples, rows in zip(microbatches, values, strict=True)]
