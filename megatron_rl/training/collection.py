"""Collects rollouts, from the policy and a task or from a file. Each rank gets the same batch. Nothing is trained here."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from megatron_rl.config import Overlong, RouterReplay
from megatron_rl.errors import DataError
from megatron_rl.layout.groups import SINGLE, all_gather_objects, finish_together
from megatron_rl.megatron.generation import SamplingSettings
from megatron_rl.megatron.routes import RouteShape
from megatron_rl.megatron.trainer import COLLECTIVE_TIMEOUT, PolicyTrainer
from megatron_rl.training.noise import gumbel_noise
from megatron_rl.training.options import TrainOptions
from megatron_rl.training.reward_guard import TimeLimit, keeps_process_alive, keeps_settings_of_torch
from megatron_rl.training.rollout_files import load_rollouts
from megatron_rl.training.rollouts import Microbatches, Prompt, RolloutBatch, Sample, group_advantages
from megatron_rl.training.tasks import Task

# Bound on the logits of one sampling forward; more rows than this take several forwards.
SAMPLING_LOGITS_BYTES = 1024**3


class SampledRollouts:
    """Rollouts sampled from the policy itself. Prompts and noise are functions of (seed, rollout, sample, position) alone."""

    def __init__(self, trainer: PolicyTrainer, task: Task, options: TrainOptions, samples_per_prompt: int):
        self._trainer, self._task, self._options = trainer, task, options
        self._samples_per_prompt = samples_per_prompt
        row_bytes = 4 * trainer.settings.max_sequence_length * trainer.settings.vocab_size // trainer.groups.tp.size()
        self._settings = SamplingSettings(
            max_new_tokens=task.max_new_tokens,
            end_tokens=task.end_tokens,
            temperature=trainer.config.policy_temperature,
            vocab_size=trainer.settings.vocab_size,
            rows_per_forward=max(1, SAMPLING_LOGITS_BYTES // row_bytes),
        )
        is_replayed = options.router_replay == RouterReplay.ROLLOUT
        self._records_routes = is_replayed or (options.check_router_replay and options.router_replay == RouterReplay.NONE)
        timeout = COLLECTIVE_TIMEOUT + datetime.timedelta(seconds=options.reward_timeout)
        is_alone = dist.get_world_size() == 1
        self._reward_group = SINGLE if is_alone else dist.new_group(backend="gloo", timeout=timeout)

    def get(self, rollout_index: int, *, policy_version: int | None = None) -> RolloutBatch:
        """policy_version: that of the policy now; the samples carry it.

        A reward may be slow, paid for or random: one rank of each model replica computes it, and sends it to the others.
        Communication: sampling's, finish_together's, and one all-gather of this rank's responses, rewards and routes over all.
        """
        num_prompts, groups = self._options.prompts_per_rollout, self._trainer.groups
        first = rollout_index * num_prompts
        prompts = [self._task.make_prompt(first + index, self._options.seed) for index in range(num_prompts)]
        of_sample = [prompt for prompt in prompts for _ in range(self._samples_per_prompt)]
        mine = range(groups.dp.rank(), len(of_sample), groups.dp.size())
        recorder = self._trainer.route_recorder() if self._records_routes else None
        responses = self._trainer.sample(
            [of_sample[index].tokens for index in mine],
            list(mine),
            self._settings,
            partial(gumbel_noise, self._options.seed, rollout_index),
            recorder,
        )
        is_leader = groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0
        share = list(zip(mine, responses, strict=True)) if is_leader else []
        with TimeLimit(self._options.reward_timeout) as limit, keeps_settings_of_torch():
            if self._options.reward_batched:
                rewards = partial(self._rewards, limit, rollout_index, [(i, of_sample[i], response) for i, response in share])
                found = [one for of_rank in finish_together([rewards] if share else [], self._reward_group) for one in of_rank]
            else:
                work = [partial(self._reward, limit, rollout_index, i, of_sample[i], response) for i, response in share]
                found = finish_together(work, self._reward_group)
        routes = {} if recorder is None or not is_leader else {mine[n]: of.tolist() for n, of in recorder.samples.items()}
        everyone = all_gather_objects((found, routes))
        rewarded = sorted(itertools.chain.from_iterable(found for found, _ in everyone))
        known = {index: of for _, routes in everyone for index, of in routes.items()}
        rewarded = [(index, response, reward - self._penalty(response)) for index, response, reward in rewarded]
        is_masked = self._options.overlong == Overlong.MASK
        cut = {index for index, response, _ in rewarded if is_masked and self._is_cut(response)}
        advantages = group_advantages(
            [reward for _, _, reward in rewarded],
            [of_sample[index].prompt_id for index, _, _ in rewarded],
            self._options.advantage_normalization,
        )
        batch = _make_batch(rollout_index, of_sample, rewarded, advantages, policy_version, known, cut)
        return replace(batch, vocab_size=self._trainer.settings.vocab_size)

    def _is_cut(self, response: list[int]) -> bool:
        return len(response) == self._settings.max_new_tokens and response[-1] not in self._settings.end_tokens

    def _penalty(self, response: list[int]) -> float:
        """Yu et al., "DAPO", arXiv:2503.14476, equation 13: 0 before the buffer, 1 at its end."""
        buffer = self._options.overlong_buffer
        if self._options.overlong != Overlong.PENALTY or buffer is None:
            return 0.0
        return min(max(len(response) - (self._settings.max_new_tokens - buffer), 0) / buffer, 1.0)

    def _rewards(
        self, limit: TimeLimit, rollout_index: int, share: list[tuple[int, Prompt, list[int]]]
    ) -> list[tuple[int, list[int], float]]:
        place = f"the reward {self._options.reward}, rollout {rollout_index}, {len(share)} samples,"
        prompts, responses = [prompt for _, prompt, _ in share], [response for _, _, response in share]
        with keeps_process_alive(place):
            rewards = limit.call(partial(self._task.rewards, prompts, responses), place)
        return [(index, response, reward) for (index, _, response), reward in zip(share, rewards, strict=True)]

    def _reward(
        self, limit: TimeLimit, rollout_index: int, index: int, prompt: Prompt, response: list[int]
    ) -> tuple[int, list[int], float]:
        name = self._options.reward or "of the task"
        place = f"the reward {name}, rollout {rollout_index}, sample {index}, prompt {prompt.prompt_id!r},"
        with keeps_process_alive(place):
            return index, response, limit.call(partial(self._task.reward, prompt, response), place)


class Evaluation:
    """One response to each prompt of --eval-prompts, with the same noise each time, so that only the policy differs."""

    def __init__(self, trainer: PolicyTrainer, task: Task, options: TrainOptions, num_prompts: int):
        plain = replace(
            options,
            prompts_per_rollout=num_prompts,
            seed=options.seed + 1,
            router_replay=RouterReplay.NONE.value,
            check_router_replay=False,
            overlong=Overlong.KEEP.value,
        )
        self._rollouts = SampledRollouts(trainer, task, plain, 1)

    def measure(self) -> dict[str, float]:
        """Mean reward and mean length of the responses, in tokens. Communication and errors: those of SampledRollouts.get."""
        samples = self._rollouts.get(0).samples
        return {
            "eval/reward": sum(sample.reward for sample in samples) / len(samples),
            "eval/response_length": sum(len(sample.loss_mask) for sample in samples) / len(samples),
        }


class ReplayedRollouts:
    """The rollouts of a file, in its order; a resumed run skips those that it has trained on."""

    def __init__(
        self,
        path: str,
        *,
        vocab_size: int,
        first: int,
        has_sampler: bool = False,
        router_replay: str = RouterReplay.NONE,
        route_shape: RouteShape | None = None,
    ):
        """has_sampler: refuse samples without rollout_log_probs. route_shape: refuse samples without the routes that router_replay,
        or a comparison with the sampler's, needs; None: routes are left out."""
        self._path, self._vocab_size, self._has_sampler = path, vocab_size, has_sampler
        self._router_replay, self._route_shape = router_replay, route_shape
        self._batches: Iterator[RolloutBatch] = itertools.islice(self._load(), first, None)

    def get(self, rollout_index: int, *, policy_version: int | None = None) -> RolloutBatch | None:
        """None after the last rollout. policy_version has no effect: the file's samples have their own, or none."""
        batch = next(self._batches, None)
        if batch is not None:
            self._check_index(batch, rollout_index)
        return batch

    def from_start(self) -> Iterator[RolloutBatch]:
        """The whole file again, whatever `get` has returned."""
        for rollout_index, batch in enumerate(self._load()):
            self._check_index(batch, rollout_index)
            yield batch

    def _load(self) -> Iterator[RolloutBatch]:
        for batch in load_rollouts(self._path, vocab_size=self._vocab_size, route_shape=self._route_shape):
            is_kept = self._route_shape is not None
            yield batch if is_kept else replace(batch, samples=[replace(sample, routes=None) for sample in batch.samples])

    def _check_index(self, batch: RolloutBatch, due: int) -> None:
        if batch.rollout_index != due:
            raise DataError(f"{self._path} holds rollout {batch.rollout_index} where rollout {due} is due: it was cut or edited")
        if self._has_sampler and any(sample.rollout_log_probs is None for sample in batch.samples):
            raise DataError(
                f"{self._path}, rollout {due}: no rollout_log_probs, which the correction compares with: record the "
                "sampling engine's log-probabilities, or remove --importance-correction and --off-policy-sequence-delta"
            )
        if self._route_shape is None or all(sample.routes is not None for sample in batch.samples):
            return
        if self._router_replay != RouterReplay.OLD_LOG_PROBS:
            raise DataError(
                f"{self._path}, rollout {due}: no routes, which --router-replay rollout and --check-router-replay need: record "
                "those of the sampling engine, choose --router-replay old_log_probs, or remove the flag"
            )
        if any(sample.old_log_probs is not None for sample in batch.samples):
            raise DataError(
                f"{self._path}, rollout {due}: old_log_probs and no routes: --router-replay old_log_probs needs the routes of the "
                "forward that measured them; give both, or old_log_probs: null, and this policy measures both"
            )


def with_old_log_probs(trainer: PolicyTrainer, microbatches: Microbatches) -> Microbatches:
    """The samples with the policy's own log-probabilities before the first step, where they have none yet.

    Under --router-replay old_log_probs with the routes of this forward too.
    """
    if all(sample.old_log_probs is not None for samples in microbatches for sample in samples):
        return microbatches
    recorder = trainer.route_recorder() if trainer.settings.router_replay == RouterReplay.OLD_LOG_PROBS else None
    values = trainer.log_probs(microbatches, recorder=recorder)
    measured = [[replace(sample, old_log_probs=row) for sample, row in pairs] for pairs in _paired(microbatches, values)]
    if recorder is None:
        return measured
    numbers = itertools.count()
    return [[replace(sample, routes=recorder.samples[next(numbers)].tolist()) for sample in samples] for samples in measured]


def with_rollout_log_probs(trainer: PolicyTrainer, microbatches: Microbatches) -> Microbatches:
    """The samples with the sampler's log-probabilities. Where none are given the trainer's own engine sampled: they are its own."""
    if all(sample.rollout_log_probs is not None for samples in microbatches for sample in samples):
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


def merge_samples(microbatches: Sequence[Sequence[Sample]], batch: RolloutBatch) -> RolloutBatch:
    """The whole batch with what each data-parallel rank added to its own samples. One all-gather of objects over all ranks."""
    everyone = all_gather_objects([sample for samples in microbatches for sample in samples])
    known = {sample.index: sample for samples in everyone for sample in samples}
    return replace(batch, samples=[known[sample.index] for sample in batch.samples])


def _paired(microbatches: Microbatches, values: list[list[list[float]]]) -> list[list[tuple[Sample, list[float]]]]:
    """Each sample with its row."""
    return [list(zip(samples, rows, strict=True)) for samples, rows in zip(microbatches, values, strict=True)]


def _make_batch(
    rollout_index: int,
    prompts: list[Prompt],
    found: list[tuple[int, list[int], float]],
    advantages: list[float],
    policy_version: int | None,
    routes: dict[int, list[list[list[int]]]],
    masked: Collection[int],
) -> RolloutBatch:
    samples = [
        Sample(
            prompt_id=prompts[index].prompt_id,
            tokens=[*prompts[index].tokens, *response],
            response_length=len(response),
            loss_mask=[int(index not in masked)] * len(response),
            reward=float(reward),
            advantage=advantage,
            old_log_probs=None,
            index=index,
            policy_version=policy_version,
            routes=routes.get(index),
        )
        for (index, response, reward), advantage in zip(found, advantages, strict=True)
    ]
    return RolloutBatch(samples=samples, rollout_index=rollout_index)
