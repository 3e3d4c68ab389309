"""A step of samples as a host lays it out over its ranks, its loss by the oracle, and hooks.custom_loss run on it."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from helpers import zigzag
from host_cases import ICEPOP as FUNCTIONS
from torch import Tensor

from megatron_rl.hosts.loss import custom_loss
from megatron_rl.testing.oracle import ESTIMATORS, DenseSample, DenseSettings, Scores, StepTerms, k3, token_weights

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
        return (self.over_kept(rows, index) / TEMPERATURE).log_softmax(-1).gather(-1, labels[:, None])[:, 0]


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
    """(the step's loss, its gradient by each sample's logits, the step's metrics under the hosts' names); computed once a case."""
    if repr(case) not in _ANSWERS:
        _ANSWERS[repr(case)] = _oracle(case)
    loss, gradients, metrics = _ANSWERS[repr(case)]
    return loss, gradients, dict(metrics)


def _oracle(case: Case) -> tuple[Tensor, list[Tensor], dict[str, float]]:
    samples, settings = case.samples(), vars(case.args())
    leaves = [sample.logits.clone().requires_grad_() for sample in samples]
    step = [dense_sample(case, sample) for sample in samples]
    of_policy, mean_of = dense_settings(settings)
    rows = [leaf[sample.prompt - 1 + torch.tensor(sample.unmasked()).long()] for sample, leaf in zip(samples, leaves, strict=True)]
    new = torch.cat([sample.scores(of_one, sample.unmasked()) for sample, of_one in zip(samples, rows, strict=True)])
    log_p = torch.log_softmax(torch.cat(rows) / TEMPERATURE, -1)
    scores = Scores(new, -(log_p.exp() * log_p).sum(-1), new)
    terms = StepTerms(step, scores, of_policy)
    is_clipped = StepTerms(step, scores, replace(of_policy, parameters={})).is_clipped  # the hosts do not count the dual clip
    counts = [len(tokens) for tokens in terms.of_samples]
    weights = token_weights(step, counts, replace(of_policy, aggregation=mean_of))
    of_tokens = torch.tensor([weights[owner] for owner in terms.owners], dtype=torch.float64)

    def mean(values: Tensor) -> Tensor:
        return (of_tokens * values).sum()

    log_ratio = terms.log_ratio
    if of_policy.loss == "gspo":
        log_ratio = torch.cat([log_ratio[tokens].mean().expand(len(tokens)) for tokens in terms.of_samples if tokens])
    kl, trained = ESTIMATORS[of_policy.kl_estimator](new, terms.given("ref"), terms.log_ratio)
    entropy, kl = mean(scores.entropy), mean(kl.detach() + trained - trained.detach())
    loss = terms.policy - settings.get("entropy_coef", 0.0) * entropy
    loss = loss + settings["kl_loss_coef"] * kl if settings.get("use_kl_loss") else loss
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    gradients = [torch.zeros_like(leaf) if part is None else part for leaf, part in zip(leaves, gradients, strict=True)]
    ratios, (low, high) = log_ratio.exp(), terms.bounds
    of_samples = [sum(ratios[tokens]) ** 2 / ratios[tokens].square().sum() / len(tokens) for tokens in terms.of_samples if tokens]
    sizes = [len(tokens) / len(new) if mean_of == "token_mean" else 1 / case.num_rollouts for tokens in terms.of_samples if tokens]
    compared = new if case.host == "slime" and settings.get("use_rollout_logprobs") else terms.old
    metrics = {
        "loss": loss,
        "pg_loss": terms.policy,
        "entropy_loss": entropy,
        "kl_loss": kl,
        "pg_clipfrac": mean(is_clipped.double()),
        "ppo_kl": -mean(log_ratio),
        "ess_ratio": sum(size * one for size, one in zip(sizes, of_samples, strict=True)),
        "ois": mean(ratios),
        "tis": mean(terms.ratios),
        "tis_abs": mean((terms.ratios - 1).abs()),
        "tis_clipfrac": mean(((terms.ratios < low) | (terms.ratios > high)).double()),
        "opsm_clipfrac": mean(terms.is_off_policy.double()),
        "train_rollout_logprob_abs_diff": mean((compared - terms.rollout).abs()),
        "train_rollout_kl": mean(k3(terms.rollout - terms.old)),
    }
    if case.keeps:
        sizes = [len(sample.kept[place]) for sample in samples for place in sample.unmasked()]
        metrics["kept_ids"] = mean(torch.tensor(sizes).double())
    return loss.detach(), gradients, {name: float(value.detach()) for name, value in metrics.items()}


def dense_sample(case: Case, sample: Sample) -> DenseSample:
    given = {name: values.tolist() for name, values in sample.values.items()}
    of_rollout = case.settings.get("use_rollout_logprobs")
    is_on_policy = "log_probs" in case.without and not of_rollout
    return DenseSample(
        labels=sample.tokens[sample.prompt :].tolist(),
        mask=list(map(bool, sample.mask)),
        advantages=given["advantages"],
        old=None if is_on_policy else given["rollout_log_probs" if of_rollout else "log_probs"],
        rollout=given["rollout_log_probs"],
        ref=given["ref_log_probs"],
        importance=[1.0] * len(sample.mask),
        prompt=sample.rollout,
        rollout_id=sample.rollout,
    )


def dense_settings(settings: dict) -> tuple[DenseSettings, str]:
    """What the hosts' flags mean, and the aggregation of all terms but the policy's. With the reward companion the rewards have
    the weights, and the host takes its own mean."""
    mean_of = "token_mean" if settings["calculate_per_token_loss"] else "sample_mean"
    is_constant = settings["loss_aggregation"] == "constant" and "custom_reward_post_process_path" not in settings
    correction, bounds = "none", (settings.get("tis_clip_low", 0.0), settings.get("tis_clip", math.inf))
    if settings.get("use_tis"):
        correction = "icepop" if "icepop" in settings.get("custom_tis_function_path", "") else "tis"
    if "importance_correction" in settings:
        correction = settings["importance_correction"]
        bounds = settings["importance_correction_low"], settings["importance_correction_high"]
    estimator = settings.get("kl_estimator") or settings["kl_loss_type"].replace("low_var_kl", "k3")
    found = DenseSettings(
        loss=settings["advantage_estimator"],
        low=settings["eps_clip"],
        high=settings["eps_clip_high"],
        parameters={"clip_ratio_c": settings["eps_clip_c"]} if "eps_clip_c" in settings else {},
        aggregation="constant" if is_constant else mean_of,
        divisor=DIVISOR,
        correction=correction,
        level=settings.get("importance_correction_level", "token"),
        bounds=bounds,
        sequence_delta=settings["opsm_delta"] if settings.get("use_opsm") else None,
        kl_estimator="unbiased" if settings.get("use_unbiased_kl") else estimator,
    )
    return found, mean_of


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
