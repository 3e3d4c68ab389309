"""A step of samples as a host lays it out over its ranks, its loss by loops in float64, and hooks.custom_loss run on it."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from helpers import loop_entropy, loop_log_probs, loop_sample, zigzag
from host_cases import ICEPOP as FUNCTIONS
from torch import Tensor

from megatron_rl.hosts.loss import custom_loss

VOCAB_SIZE = 8
DIVISOR = 16.0
TEMPERATURE = 0.7
TIS_CLIP = 1.2
# (total, response, mask): a partial mask, one token, a prompt longer than several chunks, a prompt of one token.
SHAPES = [
    (9, 5, [1, 0, 1, 1, 0]),
    (6, 1, [1]),
    (23, 3, [1, 1, 1]),
    (14, 13, [0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]),
    (12, 6, [1] * 6),
]
MASKED = (8, 4, [0, 0, 0, 0])


# Where the hosts' batches have what their samplers kept.
KEYS = {
    "miles": ("rollout_sampling_mask_ids", "rollout_sampling_mask_offsets"),
    "slime": ("rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
}


@dataclass
class Sample:
    """`values` holds [response] float64 numbers that float32 represents, NaN where the mask is 0."""

    total: int
    mask: list[int]
    tokens: Tensor  # [total]
    logits: Tensor  # [total, V] float64
    values: dict[str, Tensor]
    rollout: int
    kept: list[list[int]] | None = None
    """What the sampler kept at each response token: nothing at a masked one, which is a tool's."""

    @property
    def prompt(self) -> int:
        return self.total - len(self.mask)

    def unmasked(self) -> list[int]:
        return [j for j, bit in enumerate(self.mask) if bit]

    def over_kept(self, rows: Tensor, index: list[int]) -> Tensor:  # [n, V] of these response tokens
        """-inf outside of what was kept, where that is known."""
        if self.kept is None:
            return rows
        outside = torch.ones_like(rows, dtype=torch.bool)
        for row, j in enumerate(index):
            outside[row, self.kept[j] or list(range(VOCAB_SIZE))] = False
        return rows.masked_fill(outside, -math.inf)

    def scores(self, rows: Tensor, index: list[int]) -> Tensor:  # [n, V] of these response tokens -> [n] log-probabilities
        labels = self.tokens[self.prompt + torch.tensor(index, dtype=torch.int64)]
        return loop_log_probs(self.over_kept(rows, index), labels, temperature=TEMPERATURE)


@dataclass
class Case:
    """One launch: a layout of rows, a host, its settings, and which of the oracle's terms they turn on."""

    layout: str = "thd"
    host: str = "miles"
    settings: dict = field(default_factory=dict)
    shapes: list = field(default_factory=lambda: [*SHAPES[:3], MASKED, *SHAPES[3:]])
    rollouts: list[int] | None = None
    without: tuple[str, ...] = ("rollout_log_probs",)
    ref_noise: float = 0.4

    @property
    def keeps(self) -> bool:
        """--sampling-support replay: each sample comes with what its sampler kept."""
        return self.settings.get("sampling_support") == "replay"

    def samples(self) -> list[Sample]:
        generator = torch.Generator().manual_seed(7)
        rollouts = list(range(len(self.shapes))) if self.rollouts is None else self.rollouts
        samples = []
        for number, (total, response, mask) in enumerate(self.shapes):
            logits = torch.randn(total, VOCAB_SIZE, generator=generator, dtype=torch.float64)
            tokens = torch.randint(VOCAB_SIZE, (total,), generator=generator)
            values = {"advantages": torch.full((response,), (1.5, -0.75, 0.5, -2.0, 1.0, -0.25)[number])}
            one = Sample(total, mask, tokens, logits, {}, rollouts[number])
            one.kept = [self.set_of(int(tokens[one.prompt + j]), j, bit) for j, bit in enumerate(mask)] if self.keeps else None
            exact = one.scores(one.logits[one.prompt - 1 : total - 1], list(range(response)))
            for name, noise in (("log_probs", 0.2), ("ref_log_probs", self.ref_noise), ("rollout_log_probs", 0.3)):
                values[name] = exact + noise * torch.randn(response, generator=generator, dtype=torch.float64)
            junk = (math.nan, -math.inf, math.inf, 1e30)[number % 4]
            hidden = torch.tensor(mask) == 0
            rounded = {key: value.float().double().masked_fill(hidden, junk) for key, value in values.items()}
            samples.append(Sample(total, mask, tokens, logits, rounded, rollouts[number], one.kept))
        return samples

    @staticmethod
    def set_of(token: int, place: int, bit: int) -> list[int]:
        """Of one id, of a few on one or both tensor-parallel shards, in the order of a sampler, and of all."""
        size = (3, 1, 4, VOCAB_SIZE, 2)[place % 5]
        return [(token + 3 * k) % VOCAB_SIZE for k in range(size)] if bit else []

    def args(self) -> Namespace:
        values = {
            "loss_type": "custom_loss",
            "custom_loss_function_path": "megatron_rl.hooks.custom_loss",
            "loss_aggregation": "sample_mean",
            "advantage_estimator": "grpo",
            "eps_clip": 0.1,
            "eps_clip_high": 0.15,
            "rollout_temperature": TEMPERATURE,
            "calculate_per_token_loss": False,
            "rollout_batch_size": 6,
            "qkv_format": "bshd" if self.layout.endswith("bshd") else "thd",
            "allgather_cp": self.layout.startswith("allgather"),
            "kl_loss_type": "k1",
        }
        if self.host == "miles":
            values |= {"observe_training_entropy": False, "true_on_policy_mode": False, "skip_actor_forward_only": False}
        return Namespace(**values | self.settings)

    @property
    def num_rollouts(self) -> int:
        return len(self.shapes) if self.rollouts is None else len(set(self.rollouts))


def rows_of(layout: str, samples: list[Sample], cp_rank: int, cp_size: int, longest: int) -> list[list[tuple | None]]:
    """The rank's rows of logits: (sample, position), None for padding; one list for each row of the batch dimension."""
    if layout == "allgather":
        stream = [(n, q) for n, sample in enumerate(samples) for q in range(sample.total)]
        width = -(-(len(stream) + 2) // cp_size)
        stream += [None] * (width * cp_size - len(stream))
        return [stream[cp_rank * width : (cp_rank + 1) * width]]
    documents = []
    for n, sample in enumerate(samples):
        wanted = longest if layout.endswith("bshd") else sample.total
        unit = cp_size if layout == "allgather bshd" else 2 * cp_size if cp_size > 1 else 1
        document = [(n, q) for q in range(sample.total)] + [None] * (-(-wanted // unit) * unit - sample.total)
        if layout == "allgather bshd":
            width = len(document) // cp_size
            documents.append(document[cp_rank * width : (cp_rank + 1) * width])
        else:
            documents.append(zigzag(document, cp_rank, cp_size) if cp_size > 1 else document)
    return documents if layout.endswith("bshd") else [[row for document in documents for row in document] + [None] * 3]


def host_batch(case: Case, samples: list[Sample], all_samples: list[Sample], cp_rank: int, cp_size: int) -> dict:
    """As the hosts' get_batch hands it over: an absent key is None, lists hold the rank's tokens in zigzag order."""
    longest = -(-max(sample.total for sample in all_samples) // 4) * 4
    lists_layout = "bshd" if case.layout.endswith("bshd") else "thd"
    rows = [row for line in rows_of(lists_layout, samples, cp_rank, cp_size, longest) for row in line if row]
    counts = Counter()
    for sample in all_samples:
        counts[sample.rollout] += sum(sample.mask)
    batch = {
        "unconcat_tokens": [sample.tokens for sample in samples],
        "total_lengths": [sample.total for sample in samples],
        "response_lengths": [len(sample.mask) for sample in samples],
        "loss_masks": [torch.tensor(sample.mask, dtype=torch.int32) for sample in samples],
        "rollout_mask_sums": [torch.tensor(float(counts[sample.rollout])) for sample in samples],
        "max_seq_lens": [longest] * len(samples) if lists_layout == "bshd" else None,
        "opd_reverse_kl": None,
    }
    if case.keeps:
        ids, offsets = KEYS[case.host]
        batch[ids] = [torch.tensor([one for kept in sample.kept for one in kept], dtype=torch.int32) for sample in samples]
        batch[offsets] = [torch.tensor([0, *accumulate(map(len, sample.kept))]) for sample in samples]
    for key in ("advantages", "log_probs", "ref_log_probs", "rollout_log_probs"):
        own = [
            [q + 1 - sample.prompt for n, q in rows if n == number and sample.prompt - 1 <= q < sample.total - 1]
            for number, sample in enumerate(samples)
        ]
        lists = [
            sample.values[key][torch.tensor(kept, dtype=torch.int64)].float() for sample, kept in zip(samples, own, strict=True)
        ]
        batch[key] = None if key in case.without else lists
    return batch


def host_logits(case: Case, samples: list[Sample], all_samples: list[Sample], leaves: list[Tensor], cp_rank: int, cp_size: int):
    """[rows, S, V] from one leaf [total, V] a sample; NaN wherever a row predicts no unmasked token."""
    longest = -(-max(sample.total for sample in all_samples) // 4) * 4

    def row(entry) -> Tensor:
        if entry is not None:
            sample, response_index = samples[entry[0]], entry[1] + 1 - samples[entry[0]].prompt
            if response_index in sample.unmasked():
                return leaves[entry[0]][entry[1]]
        return leaves[0][0] * 0 + math.nan  # in the graph, as everything that a model puts out

    lines = rows_of(case.layout, samples, cp_rank, cp_size, longest)
    return torch.stack([torch.stack([row(entry) for entry in line]) for line in lines])


_ANSWERS: dict[str, tuple] = {}


def oracle(case: Case) -> tuple[Tensor, list[Tensor], dict[str, float]]:
    """The oracle's answer, computed once for each case: the loops take longer than what they judge."""
    if repr(case) not in _ANSWERS:
        _ANSWERS[repr(case)] = _oracle(case)
    loss, gradients, metrics = _ANSWERS[repr(case)]
    return loss, gradients, dict(metrics)


def _oracle(case: Case) -> tuple[Tensor, list[Tensor], dict[str, float]]:
    """(the step's loss, its gradient by each sample's logits, the step's metrics), written as the hosts' documents say it."""
    args, samples = case.args(), case.samples()
    leaves = [sample.logits.clone().requires_grad_() for sample in samples]
    of_rollout = Counter()
    for sample in samples:
        of_rollout[sample.rollout] += sum(sample.mask)
    num_tokens, settings = sum(of_rollout.values()), vars(args)
    sums: Counter = Counter()
    for sample, leaf in zip(samples, leaves, strict=True):
        tokens = sample.unmasked()
        if not tokens:
            continue
        mean = 1.0 / num_tokens if args.calculate_per_token_loss else 1.0 / (case.num_rollouts * of_rollout[sample.rollout])
        has_companion = "custom_reward_post_process_path" in settings
        weight = 1.0 / (case.num_rollouts * DIVISOR) if args.loss_aggregation == "constant" and not has_companion else mean
        index = torch.tensor(tokens)
        rows = leaf[sample.prompt - 1 + index]
        new, entropies = sample.scores(rows, tokens), loop_entropy(rows, temperature=TEMPERATURE)
        recorded = {key: [float(sample.values[key][j]) for j in tokens] for key in sample.values}
        old = recorded["rollout_log_probs"] if settings.get("use_rollout_logprobs") else recorded["log_probs"]
        if "log_probs" in case.without and not settings.get("use_rollout_logprobs"):
            old = new.tolist()
        advantages, clip = recorded["advantages"], (settings["eps_clip"], settings["eps_clip_high"])
        found = loop_sample(settings["advantage_estimator"], list(new), old, advantages, *clip)
        factors, corrected = token_factors(settings, recorded, old, new.tolist())
        ratios = [float(log_ratio.detach().exp()) for _, _, log_ratio in found]
        effective = sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios))
        num_counted = len(ratios) / num_tokens if args.calculate_per_token_loss else 1.0 / case.num_rollouts
        sums["ess_ratio"] += effective * num_counted
        for k, (value, is_clipped, log_ratio) in enumerate(found):
            if settings.get("eps_clip_c") is not None and advantages[k] < 0:
                value = value.clamp(max=-settings["eps_clip_c"] * advantages[k])
            sums["pg_loss"] += weight * factors[k] * value
            sums["entropy_loss"] += mean * entropies[k]
            sums["kl_loss"] += mean * kl_value(settings, new[k], recorded["ref_log_probs"][k], old[k])
            sums["pg_clipfrac"] += mean * float(is_clipped)
            sums["ppo_kl"] -= mean * float(log_ratio.detach())
            sums["ois"] += mean * ratios[k]
            for name, of_tokens in corrected.items():
                sums[name] += mean * of_tokens[k]
            compared = float(new[k].detach()) if case.host == "slime" and settings.get("use_rollout_logprobs") else old[k]
            sums["train_rollout_logprob_abs_diff"] += mean * abs(compared - recorded["rollout_log_probs"][k])
            back = old[k] - recorded["rollout_log_probs"][k]
            sums["train_rollout_kl"] += mean * (math.exp(back) - back - 1)
            if sample.kept is not None:
                sums["kept_ids"] += mean * len(sample.kept[tokens[k]])
    loss = sums["pg_loss"] - settings.get("entropy_coef", 0.0) * sums["entropy_loss"]
    if settings.get("use_kl_loss"):
        loss = loss + settings["kl_loss_coef"] * sums["kl_loss"]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    gradients = [torch.zeros_like(leaf) if part is None else part for leaf, part in zip(leaves, gradients, strict=True)]
    metrics = {"loss": float(loss.detach()), **{key: float(torch.as_tensor(value).detach()) for key, value in sums.items()}}
    return loss.detach(), gradients, metrics


def kl_value(settings: dict, log_prob: Tensor, ref: float, old: float) -> Tensor:  # 0-d each
    """Autograd differentiates the ratio too, so that `unbiased` has the derivative ratio x difference."""
    difference, kind = log_prob - ref, settings.get("kl_estimator") or settings["kl_loss_type"]
    k3 = (-difference).exp() + difference - 1
    if settings.get("use_unbiased_kl"):
        return (log_prob - old).exp() * k3
    return {"k1": difference, "k2": difference.square() / 2}.get(kind, k3)


def token_factors(
    settings: dict, recorded: dict[str, list[float]], old: list[float], new: list[float]
) -> tuple[list[float], dict[str, list[float]]]:
    """(the correction's factor of each token of a sample, the values of the metrics tis, ... at each token)."""
    bounds = settings.get("tis_clip_low", 0.0), settings.get("tis_clip", math.inf)
    kind = "none" if not settings.get("use_tis") else "tis"
    kind = "icepop" if "icepop" in settings.get("custom_tis_function_path", "") else kind
    if "importance_correction" in settings:
        kind = settings["importance_correction"]
        bounds = settings["importance_correction_low"], settings["importance_correction_high"]
    rollout, number = recorded["rollout_log_probs"], len(old)
    logs = [before - sampled for before, sampled in zip(old, rollout, strict=True)]
    if settings.get("importance_correction_level") == "sequence_mean":
        logs = [sum(logs) / number] * number
    ratios, (low, high) = [math.exp(log) for log in logs], bounds
    is_outside = [not low <= ratio <= high for ratio in ratios]
    factors = {
        "none": [1.0] * number,
        "tis": [min(max(ratio, low), high) for ratio in ratios],
        "icepop": [0.0 if outside else ratio for ratio, outside in zip(ratios, is_outside, strict=True)],
        "mask": [0.0 if outside else 1.0 for outside in is_outside],
    }[kind]
    divergence = sum(sampled - now for sampled, now in zip(rollout, new, strict=True)) / number
    is_dropped = bool(settings.get("use_opsm")) and recorded["advantages"][0] < 0 and divergence > settings["opsm_delta"]
    assert not is_dropped or divergence - settings["opsm_delta"] > 1e-5, "float32 would decide this"
    metrics = {
        "tis": ratios,
        "tis_abs": [abs(ratio - 1) for ratio in ratios],
        "tis_clipfrac": [float(outside) for outside in is_outside],
        "opsm_clipfrac": [float(is_dropped)] * number,
    }
    return [0.0] * number if is_dropped else factors, metrics


def micro_batches(case: Case, size: int, dp_rank: int = 0, dp_size: int = 1) -> list[list[int]]:
    """This data-parallel rank's sample numbers, `size` a micro-batch."""
    own = list(range(len(case.shapes)))[dp_rank::dp_size]
    return [own[start : start + size] for start in range(0, len(own), size)]


GSPO = {"advantage_estimator": "gspo"}
CONSTANT = {"loss_aggregation": "constant", "loss_aggregation_divisor": DIVISOR}
PER_TOKEN = {"loss_aggregation": "token_mean", "calculate_per_token_loss": True}
TIS = {"use_tis": True, "tis_clip": TIS_CLIP, "tis_clip_low": 0}
ICEPOP = {host: TIS | {"tis_clip_low": 0.8, "custom_tis_function_path": path} for host, path in FUNCTIONS.items()}
OPSM = {"use_opsm": True, "opsm_delta": 0.02}
# What the sampler kept. miles measures the reference over the whole vocabulary, so it has no KL term beside it.
REPLAY = {
    "miles": {"sampling_support": "replay", "rollout_top_p": 0.9, "rollout_top_k": 5},
    "slime": {"sampling_support": "replay", "rollout_top_p": 0.9},
}
TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl", "entropy_coef": 0.2}
REWARD = {
    "loss_aggregation": "prompt_mean",
    "custom_reward_post_process_path": "megatron_rl.hooks.reward_post_process",
    "global_batch_size": 6,
    "n_samples_per_prompt": 1,
}


def never(values):
    raise AssertionError("the host's reducer takes zigzag order")


def run_part(case: Case, size: int, cp_rank: int = 0, cp_size: int = 1, dp_rank: int = 0, dp_size: int = 1, tp_rank=0, tp_size=1):
    """(sum of this rank's losses, gradient by each sample's logits, summed metrics, the keys of each micro-batch)."""
    args, samples = case.args(), case.samples()
    leaves = [sample.logits.clone().requires_grad_() for sample in samples]
    total, metrics, keys = 0.0, {}, []
    for numbers in micro_batches(case, size, dp_rank, dp_size):
        own = [samples[number] for number in numbers]
        logits = host_logits(case, own, samples, [leaves[number] for number in numbers], cp_rank, cp_size)
        shard = logits.shape[-1] // tp_size
        logits = logits[..., tp_rank * shard : (tp_rank + 1) * shard]
        loss, log = custom_loss(args, host_batch(case, own, samples, cp_rank, cp_size), logits, never)
        assert loss.requires_grad and loss.dim() == 0
        (loss + 0 * torch.where(logits.isnan(), 0, logits).sum()).backward()  # every rank meets the backward
        total += float(loss.detach())
        keys.append(list(log))
        for name, value in log.items():
            assert value.dim() == 0 and not value.requires_grad and value.dtype == torch.float32
            metrics[name] = metrics.get(name, 0.0) + float(value)
    return total, [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves], metrics, keys


def one(case: Case, change=None, cp_rank: int = 0, cp_size: int = 1, **settings):
    """custom_loss on the whole step in one micro-batch; `change(batch, logits)` damages the batch first, or gives other logits."""
    samples = case.samples()
    leaves = [sample.logits.clone().requires_grad_() for sample in samples]
    logits = host_logits(case, samples, samples, leaves, cp_rank, cp_size)
    batch = host_batch(case, samples, samples, cp_rank, cp_size)
    if change is not None:
        changed = change(batch, logits)
        logits = logits if changed is None else changed
    args = case.args()
    vars(args).update(settings)
    return *custom_loss(args, batch, logits, never), leaves
