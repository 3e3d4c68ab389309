"""Launches of miles and slime as a parser stores them; a step of samples as they lay it out; its loss and metrics by the oracle."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from helpers import zigzag
from torch import Tensor

from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.declare import get_policy_loss
from megatron_rl.hosts.loss import custom_loss
from megatron_rl.testing.oracle import (
    ESTIMATORS,
    ONE_RATIO_A_SAMPLE,
    DenseSample,
    DenseSettings,
    Scores,
    StepTerms,
    k3,
    token_weights,
)

# Arguments of a launch as a host's parser stores them, and samples of a rollout process

# Settings that name each of our functions.
REDUCER = {"custom_pg_loss_reducer_function_path": "megatron_rl.reducers.get_pg_loss_reducer"}
CUSTOM_LOSS = {
    "loss_type": "custom_loss",
    "custom_loss_function_path": "megatron_rl.hooks.custom_loss",
    "advantage_estimator": "grpo",
}
REWARD = {"custom_reward_post_process_path": "megatron_rl.hooks.reward_post_process", "advantage_estimator": "grpo"}


@dataclass
class RolloutSample:
    """The fields of a host's Sample that its converters and our hook read."""

    group_index: int | str | None
    index: int | None
    response_length: int
    reward: object = 1.0
    loss_mask: list[int] | None = None
    rollout_id: int | None = None
    remove_sample: bool = False
    tokens: list[int] = field(default_factory=list)
    multimodal_train_inputs: dict | None = None

    def get_reward_value(self, args: Namespace) -> object:
        return self.reward[args.reward_key] if args.reward_key else self.reward


def launch(host: str, ours: str, **options) -> Namespace:
    """`ours` is what a user types of our flags, `options` the host's that are not as here. 2 prompts of 2 rollouts, one step."""
    shared = dict(
        advantage_estimator="grpo", allgather_cp=False, calculate_per_token_loss=False, custom_advantage_function_path=None,
        custom_convert_samples_to_train_data_path=None, custom_loss_function_path=None, custom_pg_loss_reducer_function_path=None,
        custom_reward_post_process_path=None, custom_tis_function_path=None, entropy_coef=0.0, eps_clip=0.2, eps_clip_high=0.2,
        eps_clip_c=None, get_mismatch_metrics=False, global_batch_size=4, grpo_std_normalization=True, kl_coef=0.0,
        kl_loss_coef=0.0, kl_loss_type="k3", log_probs_chunk_size=-1, loss_type="policy_loss", n_samples_per_prompt=2,
        normalize_advantages=False, num_steps_per_rollout=None, opsm_delta=0.1, recompute_loss_function=False, reward_key=None,
        rewards_normalization=True, rollout_batch_size=2, rollout_temperature=1.0, rollout_top_p=1.0, tis_clip=1.5,
        tis_clip_low=0.5, use_dynamic_batch_size=False, use_dynamic_global_batch_size=False, use_kl_loss=False, use_opd=False,
        use_opsm=False, use_rollout_logprobs=False, use_tis=False, use_unbiased_kl=False,
    )  # fmt: skip
    if host == "miles":
        shared.update(
            allow_partial_train_step=False, cp_comm_type="p2p", delay_split_train_data_by_dp=False, indep_dp=False,
            multi_lora=False, multi_lora_n_adapters=0, observe_training_entropy=False, qkv_format="thd",
            skip_actor_forward_only=False, train_backend="megatron", true_on_policy_mode=False,
        )  # fmt: skip
    flags = vars(add_megatron_rl_args(ArgumentParser()).parse_args(ours.split()))
    return Namespace(**flags | shared | options)


# The step

VOCAB_SIZE = 8
DIVISOR = 16.0
TEMPERATURE = 0.7
# (total, response, mask): a partial mask, one token, a prompt longer than several chunks, a prompt of one token.
SHAPES = [
    (9, 5, [1, 0, 1, 1, 0]),
    (6, 1, [1]),
    (23, 3, [1, 1, 1]),
    (14, 13, [0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]),
    (12, 6, [1] * 6),
]
MASKED = (8, 4, [0, 0, 0, 0])
REWARDS = (1.5, -0.75, 0.5, -2.0, 1.0, -0.25)
# Where the hosts' batches have what their samplers kept.
KEYS = {
    "miles": ("rollout_sampling_mask_ids", "rollout_sampling_mask_offsets"),
    "slime": ("rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
}


@dataclass(frozen=True)
class Sample:
    """`values` holds [response] float64 numbers that float32 represents, junk where the mask is 0."""

    total: int
    mask: list[int]
    tokens: Tensor  # [total]
    logits: Tensor  # [total, V] float64
    values: dict[str, Tensor]
    group: int
    rollout: int
    kept: list[list[int]] | None = None
    """What the sampler kept at each response token: nothing at a masked one, which is a tool's."""

    @property
    def prompt(self) -> int:
        return self.total - len(self.mask)

    def unmasked(self) -> list[int]:
        return [j for j, bit in enumerate(self.mask) if bit]

    def scores(self, rows: Tensor, index: list[int]) -> Tensor:  # [n, V] of these response tokens -> [n] log-probabilities
        """-inf outside of what was kept, where that is known."""
        if self.kept is not None:
            outside = torch.ones_like(rows, dtype=torch.bool)
            for row, j in enumerate(index):
                outside[row, self.kept[j] or list(range(VOCAB_SIZE))] = False
            rows = rows.masked_fill(outside, -math.inf)
        labels = self.tokens[self.prompt + torch.tensor(index, dtype=torch.int64)]
        return (rows / TEMPERATURE).log_softmax(-1).gather(-1, labels[:, None])[:, 0]


@dataclass(frozen=True)
class Case:
    """One launch: a layout of rows, a host, settings as its parser has them; it trains our loss where these do not say another."""

    layout: str = "thd"  # bshd, allgather
    host: str = "miles"
    settings: dict = field(default_factory=dict)
    shapes: list = field(default_factory=lambda: [*SHAPES[:3], MASKED, *SHAPES[3:]])
    rollouts: list[int] | None = None  # of each sample; None: each is one
    without: tuple[str, ...] = ("rollout_log_probs",)
    ref_noise: float = 0.4
    size: int = 0  # samples of a micro-batch, 0 for all

    @property
    def keeps(self) -> bool:
        """--sampling-support replay: each sample comes with what its sampler kept."""
        return self.settings.get("sampling_support") == "replay"

    @property
    def has_our_loss(self) -> bool:
        return self.args().loss_type == "custom_loss"

    @property
    def groups(self) -> list[int]:
        """The prompt of each sample: three have one, where the samples are so many."""
        size = 1 if len(self.shapes) % 3 else 3
        return [number // size for number in range(len(self.shapes))]

    @property
    def num_rollouts(self) -> int:
        return len(self.shapes) if self.rollouts is None else len(set(self.rollouts))

    def samples(self) -> list[Sample]:
        generator, has_our_loss = torch.Generator().manual_seed(7), self.has_our_loss
        rollouts = list(range(len(self.shapes))) if self.rollouts is None else self.rollouts
        samples = []
        for number, (total, response, mask) in enumerate(self.shapes):
            logits = torch.randn(total, VOCAB_SIZE, generator=generator, dtype=torch.float64).float().double()
            tokens = torch.randint(VOCAB_SIZE, (total,), generator=generator)
            values = {"advantages": torch.full((response,), REWARDS[number])}
            prompt = total - response
            kept = [kept_by_sampler(int(tokens[prompt + j]), j, bit) for j, bit in enumerate(mask)] if self.keeps else None
            one = Sample(total, mask, tokens, logits, {}, self.groups[number], rollouts[number], kept)
            exact = one.scores(logits[prompt - 1 : total - 1], list(range(response)))
            for name, noise in (("log_probs", 0.2), ("ref_log_probs", self.ref_noise), ("rollout_log_probs", 0.3)):
                values[name] = exact + noise * torch.randn(response, generator=generator, dtype=torch.float64)
            # What our loss must not read. The hosts' own losses read it.
            junk = (math.nan, -math.inf, math.inf, 1e30)[number % 4] if has_our_loss else 1.0
            hidden = torch.tensor(mask) == 0
            samples.append(replace(one, values={key: v.float().double().masked_fill(hidden, junk) for key, v in values.items()}))
        return samples

    def args(self) -> Namespace:
        num_prompts = len(set(self.groups))
        options = CUSTOM_LOSS | {
            "allgather_cp": self.layout.startswith("allgather"),
            "eps_clip": 0.1,
            "eps_clip_high": 0.15,
            "global_batch_size": self.num_rollouts,
            "kl_loss_type": "k1",
            "loss_aggregation": "sample_mean",
            "n_samples_per_prompt": self.num_rollouts // num_prompts,
            "num_steps_per_rollout": 1,
            "rewards_normalization": False,
            "rollout_batch_size": num_prompts,
            "rollout_temperature": TEMPERATURE,
        }
        if self.layout.endswith("bshd"):
            options["qkv_format"] = "bshd"
        return launch(self.host, "", **options | self.settings)


def kept_by_sampler(token: int, place: int, bit: int) -> list[int]:
    """Of one id, of a few on one or both tensor-parallel shards, in the order of a sampler, and of all."""
    size = (3, 1, 4, VOCAB_SIZE, 2)[place % 5]
    return [(token + 3 * k) % VOCAB_SIZE for k in range(size)] if bit else []


GSPO = {"advantage_estimator": "gspo"}
CONSTANT = {"loss_aggregation": "constant", "loss_aggregation_divisor": DIVISOR}
PER_TOKEN = {"loss_aggregation": "token_mean", "calculate_per_token_loss": True}
TIS = {"use_tis": True, "tis_clip": 1.2, "tis_clip_low": 0}
ICEPOP_OF = {
    "miles": "miles.backends.training_utils.loss_hub.corrections.icepop_function",
    "slime": "slime.backends.megatron_utils.loss.icepop_function",
}
ICEPOP = {host: TIS | {"tis_clip_low": 0.8, "custom_tis_function_path": path} for host, path in ICEPOP_OF.items()}
OPSM = {"use_opsm": True, "opsm_delta": 0.02}
# What the sampler kept. miles measures the reference over the whole vocabulary, so it has no KL term beside it.
REPLAY = {
    "miles": {"sampling_support": "replay", "rollout_top_p": 0.9, "rollout_top_k": 5},
    "slime": {"sampling_support": "replay", "rollout_top_p": 0.9},
}
TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl", "entropy_coef": 0.2}
SKIPPED = {"skip_old_log_probs": True, "custom_megatron_init_path": "megatron_rl.hooks.custom_megatron_init"}
# The host's own loss, and who sums it.
OWN_LOSS = {"loss_type": "policy_loss", "custom_loss_function_path": None}
REDUCED_BY = {"host": OWN_LOSS, "reducer": OWN_LOSS | REDUCER, "custom_loss": {}}
# A generate function of the user's may give several samples for one rollout.
AGENT = {"custom_generate_function_path": "user.agent"}
SEGMENTS = [0, 0, 1, 2, 2, 3]


# The batch of a rank


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


def longest_row(samples: list[Sample]) -> int:
    return -(-max(sample.total for sample in samples) // 4) * 4


def host_batch(case: Case, samples: list[Sample], all_samples: list[Sample], cp_rank: int, cp_size: int) -> dict:
    """As the hosts' get_batch hands it over: an absent key is None, lists hold the rank's tokens in zigzag order."""
    longest = longest_row(all_samples)
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
        "rollout_mask_sums": torch.tensor([float(counts[sample.rollout]) for sample in samples]),
        "max_seq_lens": [longest] * len(samples) if lists_layout == "bshd" else None,
        "opd_reverse_kl": None,
        "packed_seq_params": None,
        "values": None,
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
    return batch | {"returns": batch["advantages"]}


def host_logits(
    case: Case,
    samples: list[Sample],
    all_samples: list[Sample],
    leaves: list[Tensor],  # [total, V] of each sample
    cp_rank: int,
    cp_size: int,
    junk: Tensor | None = None,  # [V]
) -> Tensor:  # [rows, S, V]
    """`junk`, NaN if it is not given, wherever a row predicts no unmasked token."""
    starts = [0, *accumulate(sample.total for sample in samples)]

    def row(entry: tuple | None) -> int:
        is_read = entry is not None and entry[1] + 1 - samples[entry[0]].prompt in samples[entry[0]].unmasked()
        return starts[entry[0]] + entry[1] if is_read else starts[-1]

    rows = [[row(entry) for entry in line] for line in rows_of(case.layout, samples, cp_rank, cp_size, longest_row(all_samples))]
    junk = leaves[0][0] * 0 + math.nan if junk is None else junk  # in the graph, as everything that a model puts out
    return torch.cat([*leaves, junk[None]])[torch.tensor(rows)]


def micro_batches(case: Case, size: int, dp_rank: int = 0, dp_size: int = 1) -> list[list[int]]:
    """This data-parallel rank's sample numbers, `size` a micro-batch: prompts and rollouts are cut."""
    own = list(range(len(case.shapes)))[dp_rank::dp_size]
    return [own[start : start + size] for start in range(0, len(own), size)]


# The truth


@dataclass(frozen=True)
class Truth:
    loss: float
    gradient: Tensor  # [all tokens, V]
    metrics: dict[str, float]  # under the hosts' names


_ANSWERS: dict[str, Truth] = {}


def oracle(case: Case) -> Truth:
    """The whole step; computed once a case."""
    if repr(case) not in _ANSWERS:
        _ANSWERS[repr(case)] = truth_of(case, case.samples(), vars(case.args()))
    return _ANSWERS[repr(case)]


def truth_of(case: Case, samples: list[Sample], settings: dict) -> Truth:
    table = torch.cat([sample.logits for sample in samples]).requires_grad_()
    leaves = table.split([sample.total for sample in samples])
    step = [dense_sample(case, sample) for sample in samples]
    of_policy, mean_of = dense_settings(settings)
    rows = [leaf[sample.prompt - 1 + torch.tensor(sample.unmasked()).long()] for sample, leaf in zip(samples, leaves, strict=True)]
    new = torch.cat([sample.scores(of_one, sample.unmasked()) for sample, of_one in zip(samples, rows, strict=True)])
    log_p = torch.log_softmax(torch.cat(rows) / TEMPERATURE, -1)
    scores = Scores(new, -(log_p.exp() * log_p).sum(-1))
    terms = StepTerms(step, scores, of_policy)
    without_dual_clip = replace(of_policy, parameters=of_policy.parameters | {"clip_ratio_c": math.inf})
    is_clipped = StepTerms(step, scores, without_dual_clip).is_clipped  # as the hosts count
    counts = [len(tokens) for tokens in terms.of_samples]
    weights = token_weights(step, counts, replace(of_policy, aggregation=mean_of))
    of_tokens = torch.tensor([weights[owner] for owner in terms.owners], dtype=torch.float64)

    def mean(values: Tensor) -> Tensor:
        return (of_tokens * values).sum()

    log_ratio = terms.new - terms.old
    if of_policy.loss in ONE_RATIO_A_SAMPLE:
        log_ratio = torch.cat([log_ratio[tokens].mean().expand(len(tokens)) for tokens in terms.of_samples if tokens])
    kl, trained = ESTIMATORS[of_policy.kl_estimator](new, terms.given("ref"), terms.log_ratio)
    entropy, kl = mean(scores.entropy), mean(kl.detach() + trained - trained.detach())
    loss = terms.policy - settings["entropy_coef"] * entropy
    loss = loss + settings["kl_loss_coef"] * kl if settings["use_kl_loss"] else loss
    (gradient,) = torch.autograd.grad(loss, table)
    ratios, (low, high) = log_ratio.exp(), terms.bounds
    of_samples = [sum(ratios[tokens]) ** 2 / ratios[tokens].square().sum() / len(tokens) for tokens in terms.of_samples if tokens]
    sizes = [len(tokens) / len(new) if mean_of == "token_mean" else 1 / case.num_rollouts for tokens in terms.of_samples if tokens]
    compared = new if case.host == "slime" and settings["use_rollout_logprobs"] else terms.old
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
    return Truth(float(loss.detach()), gradient, {name: float(value.detach()) for name, value in metrics.items()})


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
        prompt=sample.group,
        rollout_id=sample.rollout,
    )


def dense_settings(settings: dict) -> tuple[DenseSettings, str]:
    """What the hosts' flags mean, and the aggregation of all terms but the policy's: the host's own."""
    correction, bounds = "none", (settings["tis_clip_low"], settings["tis_clip"])
    if settings["use_tis"]:
        correction = "icepop" if "icepop" in str(settings["custom_tis_function_path"]) else "tis"
    if settings["importance_correction"]:
        correction = settings["importance_correction"]
        bounds = settings["importance_correction_low"], settings["importance_correction_high"]
    name, dual_clip = settings["policy_loss"] or settings["advantage_estimator"], settings["eps_clip_c"]
    loss, clip = get_policy_loss(name), (settings["eps_clip"], settings["eps_clip_high"])
    low, high = clip if clip[0] else loss.clip_bounds(None, None) or (math.nan, math.nan)
    found = DenseSettings(
        loss=name,
        low=low,
        high=high,
        parameters=loss.resolve_parameters({"clip_ratio_c": dual_clip} if dual_clip else {}),
        aggregation=settings["loss_aggregation"],
        divisor=DIVISOR,
        correction=correction,
        level=settings["importance_correction_level"] or "token",
        bounds=bounds,
        sequence_delta=settings["opsm_delta"] if settings["use_opsm"] else None,
        kl_estimator="unbiased" if settings["use_unbiased_kl"] else settings["kl_loss_type"].replace("low_var_kl", "k3"),
    )
    return found, "token_mean" if settings["calculate_per_token_loss"] else "sample_mean"


# Our loss, called by hand


def never(values):
    raise AssertionError("the host's reducer takes zigzag order")


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
