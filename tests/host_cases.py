"""One step of a host's training, its cases and its truth by the oracle. Nothing of the package's losses or weights here."""

from __future__ import annotations

import functools
import math
import random
from argparse import Namespace
from dataclasses import dataclass

import torch
from rollout_cases import COMPANIONS, DOORS, launch
from torch import Tensor

from megatron_rl.testing import oracle
from megatron_rl.testing.oracle import DenseSettings, StepTerms, scores_of

VOCAB_SIZE = 7
DIVISOR = 24.0
GROUP_SIZE = 3
CLIPS = {"grpo": (0.2, 0.28), "gspo": (0.04, 0.03), "cispo": (0.2, 0.28)}
ROLLOUT_GAP = 0.9  # rollout_log_probs are the old ones plus this times sin(token + sample)
ICEPOP = {
    "miles": "miles.backends.training_utils.loss_hub.corrections.icepop_function",
    "slime": "slime.backends.megatron_utils.loss.icepop_function",
}
DOOR_OF = {"default": "host's reducer", "reducer": "our reducer", "custom_loss": "custom_loss"}
# (prompt, response) of 4 prompts' samples: one-token responses, a prompt of one token, prompts that fill whole cp chunks.
SHAPES = [(3, 9), (1, 14), (12, 3), (4, 1), (2, 12), (5, 8), (15, 1), (9, 7), (4, 4), (6, 10), (11, 2), (3, 11)]
FULLY_MASKED = 5
# The order in which samples are dealt to dp ranks and micro-batches: groups straddle both.
ORDER = [0, 3, 7, 10, 4, 8, 1, 11, 5, 2, 9, 6]


@dataclass(frozen=True)
class HostCase:
    """A launch on a host: which hook, what it is asked for, how the step is laid out."""

    host: str  # miles, slime
    door: str  # default (the host's own reducer), reducer, custom_loss
    aggregation: str
    estimator: str = "grpo"
    companion: str = ""  # reward
    per_token: bool = False
    layout: str = "thd"  # bshd, allgather
    size: int = 0  # samples of a micro-batch, 0 for all
    options: tuple[tuple[str, object], ...] = ()  # of the host, beside its defaults
    segments: bool = False  # a rollout of several samples
    ref_gap: float = 0.4  # ref_log_probs are the old ones plus this times sin(token + sample)

    def __str__(self) -> str:
        words = [self.host, self.door, self.aggregation, self.estimator, self.companion, "per-token" * self.per_token]
        words += [self.layout, f"{self.size or 'all'} in a micro-batch", *(f"{name}={value}" for name, value in self.options)]
        words += ["segments"] * self.segments
        return " ".join(word for word in words if word)

    @property
    def has_masked_sample(self) -> bool:
        """Under per-token a fully masked sample counts as a phantom token, so the host divides by another number."""
        return not self.per_token

    def step(self) -> DenseStep:
        return dense_step(self.has_masked_sample, self.segments)

    def truth(self) -> tuple[float, Tensor]:
        return truth(self.aggregation, self.estimator, self.has_masked_sample, self.segments)


@dataclass(frozen=True)
class DenseSample:
    group: int
    rollout: int
    prompt: int
    tokens: list[int]
    mask: list[int]
    reward: float
    start: int  # its first row in the dense logits

    @property
    def response(self) -> int:
        return len(self.tokens) - self.prompt


@dataclass(frozen=True)
class DenseStep:
    samples: list[DenseSample]
    has_segments: bool
    logits: Tensor  # [all tokens, V] float64, representable in float32
    old_log_probs: list[Tensor]  # [response] each, the same


@functools.cache
def dense_step(has_masked_sample: bool, has_segments: bool = False) -> DenseStep:
    """has_segments: the first two samples of each prompt are one rollout, with one reward."""
    numbers, generator = random.Random(5), torch.Generator().manual_seed(11)
    samples, start = [], 0
    for index, (prompt, response) in enumerate(SHAPES):
        mask = [int(numbers.random() < (0.7 if response > 3 else 1.0)) for _ in range(response)]
        if index == FULLY_MASKED:
            mask = [0] * response if has_masked_sample else [1] * response
        tokens = [numbers.randrange(VOCAB_SIZE) for _ in range(prompt + response)]
        group, place = divmod(index, GROUP_SIZE)
        reward, is_segment = numbers.gauss(0.0, 1.0), has_segments and place == 1
        reward = samples[-1].reward if is_segment else reward
        samples.append(DenseSample(group, index - is_segment, prompt, tokens, mask, reward, start))
        start += prompt + response
    logits = torch.randn(start, VOCAB_SIZE, generator=generator).double()
    old = []
    for sample in samples:
        exact = sample_log_probs(sample, logits)
        noise = 0.3 * torch.randn(sample.response, generator=generator)
        old.append((exact + noise).float().double())
    return DenseStep(samples, has_segments, logits, old)


def sample_log_probs(sample: DenseSample, logits: Tensor) -> Tensor:  # [all tokens, V] -> [response]
    first = sample.start + sample.prompt - 1
    labels = sample.tokens[sample.prompt :]
    return scores_of(logits[first : first + sample.response], labels, DenseSettings()).log_probs


def normalised_rewards(step: DenseStep) -> list[float]:
    """Over the rollouts of each prompt: minus the mean, by the unbiased standard deviation."""
    found = []
    for sample in step.samples:
        peers = list({other.rollout: other.reward for other in step.samples if other.group == sample.group}.values())
        mean = sum(peers) / len(peers)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in peers) / (len(peers) - 1))
        found.append((sample.reward - mean) / (deviation + 1e-6))
    return found


@functools.cache
def truth(aggregation: str, estimator: str, has_masked_sample: bool, has_segments: bool = False) -> tuple[float, Tensor]:
    """(loss of the step, its gradient by the dense logits)."""
    step = dense_step(has_masked_sample, has_segments)
    logits, (low, high) = step.logits.clone().requires_grad_(), CLIPS[estimator]
    settings = DenseSettings(loss=estimator, low=low, high=high, aggregation=aggregation, divisor=DIVISOR)
    samples, rows, labels = [], [], []
    for sample, old, advantage in zip(step.samples, step.old_log_probs, normalised_rewards(step), strict=True):
        kept, response = [t for t in range(sample.response) if sample.mask[t]], sample.tokens[sample.prompt :]
        rows += [sample.start + sample.prompt - 1 + t for t in kept]
        labels += [response[t] for t in kept]
        samples.append(
            oracle.DenseSample(
                labels=response,
                mask=list(map(bool, sample.mask)),
                advantages=[advantage] * sample.response,
                old=old.tolist(),
                rollout=None,
                ref=None,
                importance=[1.0] * sample.response,
                prompt=sample.group,
                rollout_id=sample.rollout,
            )
        )
    loss = StepTerms(samples, scores_of(logits[rows], labels, settings), settings).loss()
    (gradient,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), gradient


def host_args(case: HostCase) -> Namespace:
    """The arguments of that launch: those of the rollout process and what training reads beside them, both hosts' defaults."""
    ours = "" if case.door == "default" and not case.companion else f"--loss-aggregation {case.aggregation}"
    ours += f" --loss-aggregation-divisor {DIVISOR}" if case.aggregation == "constant" and ours else ""
    low, high = CLIPS[case.estimator]
    shared = dict(
        advantage_estimator=case.estimator, allgather_cp=case.layout == "allgather", calculate_per_token_loss=case.per_token,
        custom_reward_post_process_path=None, eps_clip=low, eps_clip_high=high, global_batch_size=len(SHAPES),
        log_probs_chunk_size=-1, n_samples_per_prompt=GROUP_SIZE, num_steps_per_rollout=1, opsm_delta=0.1,
        recompute_loss_function=False, rollout_batch_size=len(SHAPES) // GROUP_SIZE, rollout_top_p=1.0, tis_clip=1.5,
        tis_clip_low=0.5, use_opsm=False, use_rollout_logprobs=False, use_unbiased_kl=False,
    )  # fmt: skip
    if case.host == "miles":
        shared.update(cp_comm_type="p2p", multi_lora_n_adapters=0, qkv_format="bshd" if case.layout == "bshd" else "thd")
        shared["skip_actor_forward_only"] = False
    if case.segments:  # the flags count rollouts
        shared.update(n_samples_per_prompt=GROUP_SIZE - 1, global_batch_size=len(SHAPES) // GROUP_SIZE * (GROUP_SIZE - 1))
    args = launch(case.host, "reward", ours, **{**shared, **DOORS[DOOR_OF[case.door]], **COMPANIONS.get(case.companion, {})})
    vars(args).update(dict(case.options))
    if args.custom_tis_function_path == "icepop":
        args.custom_tis_function_path = ICEPOP[case.host]
    return args
