"""The same step in other frameworks' words: the tables of docs/hosts/migration.md as data. It must never weight a token.

Each row was read in the framework's source, at the commit that the page names.
"""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass

SAMPLE, PROMPT, TOKEN, CONSTANT = "sample_mean", "prompt_mean", "token_mean", "constant"


@dataclass(frozen=True, slots=True)
class Scale:
    """Our divisor for the L that the other framework is given: a formula of L, N samples, dp ranks and M micro-batches a rank."""

    formula: str
    factor: str | None
    """The gradient there, relative to ours with the same L; None: there is no L."""

    @property
    def needs_step(self) -> bool:
        return self.formula.endswith("/ N")

    def value(self, divisor: float, samples: int, ranks: int, microbatches: int) -> float:
        letters = self.formula.removesuffix(" / N").split()
        above = math.prod({"1": 1.0, "L": divisor, "dp": ranks, "M": microbatches}[letter] for letter in letters)
        return above / samples if self.needs_step else above


SAME = Scale("L", "1")
ONE = Scale("1", None)
ONE_BY_SAMPLES = Scale("1 / N", None)
BY_SAMPLES = Scale("L / N", "N: it does not divide by samples")
BY_SAMPLES_A_RANK = Scale("L dp / N", "N / dp")
BY_MICRO_BATCH = Scale("L M dp / N", "the micro-batch size, N / (M dp)")


@dataclass(frozen=True, slots=True)
class Peer:
    """setting of a framework -> our aggregation; None: there is no equal, and note says why, or it is another of our flags. `code`
    in the page's quotes."""

    framework: str
    setting: str
    aggregation: str | None
    scale: Scale | None = None
    note: str = ""
    flags: str | None = None
    """For a setting that is no aggregation."""


OF_A_BATCH = "the mean of a batch depends on the layout; `token_mean` does not"
OUT_OF_N = "fully masked samples are out of N there, in N here"
PUBLISHED_DAPO = "DAPO as published is `prompt_mean`"
PEERS = (
    Peer("verl", "`loss_agg_mode=seq-mean-token-mean`", SAMPLE, note=f"legacy workers, before 0.8: {OUT_OF_N}"),
    Peer("verl", "`loss_agg_mode=token-mean`", TOKEN, note="legacy workers, before 0.8, average the means of micro-batches"),
    Peer("verl", "`loss_agg_mode=token-sum`, from 0.9", CONSTANT, ONE_BY_SAMPLES, "1 a token"),
    Peer("verl", "`loss_agg_mode=seq-mean-token-sum`", CONSTANT, ONE),
    Peer(
        "verl",
        "`loss_agg_mode=seq-mean-token-sum-norm`, from 0.7.1",
        CONSTANT,
        SAME,
        "L is `loss_scale_factor`, else the padded response length",
    ),
    Peer("verl", "`loss_agg_mode=seq-mean-token-sum-norm`, 0.7.0, engine workers", CONSTANT, BY_SAMPLES_A_RANK),
    Peer("verl", "`loss_agg_mode=seq-mean-token-sum-norm`, to 0.7.0, legacy workers", CONSTANT, BY_MICRO_BATCH),
    Peer("TRL", "`loss_type=grpo`", SAMPLE),
    Peer(
        "TRL",
        "`loss_type=dapo`",
        TOKEN,
        note=f"the tokens of a step where `steps_per_generation` is `gradient_accumulation_steps`; {PUBLISHED_DAPO}",
    ),
    Peer("TRL", "`loss_type=dr_grpo`", CONSTANT, SAME, "L is `max_completion_length`"),
    Peer("TRL", "`loss_type=luspo`", CONSTANT, ONE, "with `importance_sampling_level=sequence`"),
    Peer("TRL", "`loss_type=bnpo`", None, note=OF_A_BATCH),
    Peer("Liger", "`loss_type=grpo`", SAMPLE, note="of the batch that it is handed"),
    Peer("Liger", "`loss_type=dapo`", TOKEN, note=f"of `num_items_in_batch`, else of the batch over all ranks; {PUBLISHED_DAPO}"),
    Peer("Liger", "`loss_type=dr_grpo`", CONSTANT, SAME, "L is `max_completion_length`; of the batch that it is handed"),
    Peer("Liger", "`loss_type=luspo`", CONSTANT, ONE, "of the batch that it is handed"),
    Peer("Liger", "`loss_type=bnpo`", None, note=OF_A_BATCH),
    Peer("OpenRLHF", "`policy_loss_type=ppo`", TOKEN, note="before 0.10.4 the mean of the means of micro-batches"),
    Peer("OpenRLHF", "`policy_loss_type=gspo`", SAMPLE, note=f"{OUT_OF_N}; before 0.10.4 the mean of the means of micro-batches"),
    Peer("NeMo-RL", "`token_level_loss=True`", TOKEN),
    Peer("NeMo-RL", "`token_level_loss=False`", SAMPLE, note="samples with `sample_mask` 0 are out of N there, in N here"),
    Peer("open-instruct", '`loss_denominator="token"`', TOKEN),
    Peer("open-instruct", "`loss_denominator=L`", CONSTANT, BY_SAMPLES),
    Peer("open-instruct", "`masked_mean_denominator=L`, before its #1161", CONSTANT, BY_MICRO_BATCH, "`masked_mean_axis` unset"),
    Peer("open-instruct", "`masked_mean_denominator` unset, before its #1161", None, note=OF_A_BATCH),
    Peer("SkyRL", "`loss_reduction=sequence_mean`", SAMPLE),
    Peer("SkyRL", "`loss_reduction=token_mean`", TOKEN),
    Peer("SkyRL", "`loss_reduction=prompt_mean`, from 0.3", PROMPT),
    Peer("SkyRL", "`loss_reduction=seq_mean_token_sum_norm`", CONSTANT, SAME, "L is `max_seq_len`"),
    Peer("SkyRL", "`loss_reduction=token_mean_legacy`", None, note=OF_A_BATCH),
    Peer("ROLL", "`loss_agg_mode=seq-mean-token-mean`", SAMPLE, note=OUT_OF_N),
    Peer("ROLL", "`loss_agg_mode=token-mean`", TOKEN),
    Peer("ROLL", "`loss_agg_mode=seq-mean-token-sum`", CONSTANT, ONE, OUT_OF_N),
    Peer("ROLL", "`loss_agg_mode=seq-mean-token-sum-norm`", CONSTANT, BY_SAMPLES, "L is the padded length"),
    Peer("prime-rl", "its losses", TOKEN),
    Peer("AReaL", "its actor loss", TOKEN),
    Peer("Fast-LLM", "loss `grpo`", TOKEN),
    Peer("Fast-LLM", "loss `gspo`", CONSTANT, ONE, "since its #544"),
    Peer(
        "Fast-LLM",
        "`normalize_by_documents=True`, its #502",
        CONSTANT,
        ONE,
        "GRPO and GSPO alike; it divides the gradient by the documents once more, as `--gradient-divisor num_samples` does",
    ),
    Peer(
        "PipelineRL",
        "`--quantization bf16_last_layer_fp32` of its vLLM",
        None,
        note="the sampler's head is float32, and the trainer's must be; in miles and slime the host's model computes the logits",
        flags="--fp32-lm-head",
    ),
    Peer("miles, slime", "without flags", SAMPLE, note="where a rollout has one sample; else its tokens stand for a sample's"),
    Peer(
        "miles, slime",
        "`--calculate-per-token-loss`",
        TOKEN,
        note="there one token more for each fully masked sample; the reward hook gives the exact one",
    ),
    Peer("miles, slime", "a reducer of sum / L", CONSTANT, SAME, "where it sums its own slice of each sample"),
    Peer("miles, slime", "`--pg-loss-divisor L` of miles#1328", CONSTANT, SAME),
    Peer("Megatron-LM", "`train_rl.py --calculate-per-token-loss`", TOKEN, note="there one token more for each empty bin"),
    Peer("Megatron-LM", "`train_rl.py`", None, note="the mean of a bin depends on the packing; `token_mean` is what one bin gives"),
    Peer("Dr. GRPO", "the authors' code", CONSTANT, SAME, "L is the generation budget"),
    Peer("DAPO", "as published; ScaleRL's prompt average", PROMPT),
)
DEEPSPEED = "DeepSpeed"
FRAMEWORKS = (*dict.fromkeys(name for peer in PEERS for name in peer.framework.split(", ")), DEEPSPEED)


def framework(text: str) -> str:
    """argparse's type of --framework: capitals, blanks and dashes do not matter."""
    names = {_letters(name): name for name in FRAMEWORKS}
    if _letters(text) not in names:
        raise ArgumentTypeError(f"{text!r} is not known: give one of {', '.join(FRAMEWORKS)}")
    return names[_letters(text)]


def _letters(text: str) -> str:
    return re.sub(r"[^a-z]", "", text.lower())


@dataclass(frozen=True, slots=True)
class Equivalent:
    """flags None: nothing here gives the same."""

    framework: str
    setting: str
    flags: str | None
    note: str

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        if self.flags is None:
            return f"{title(self.framework, self.setting)} has no equal here{note}"
        return f"to reproduce {title(self.framework, self.setting)} use {self.flags}{note}"


def equivalents(
    frameworks: Sequence[str],
    aggregations: Sequence[str | None],
    divisor: float,
    sizes: tuple[int, int, int] | None,  # N samples, dp ranks, M micro-batches a rank; None where there is no step
) -> list[Equivalent]:
    """Of these frameworks and aggregations, None for settings without an equal. divisor: the L that is given there."""
    found = []
    for peer in PEERS:
        if peer.aggregation not in aggregations or not set(peer.framework.split(", ")) & set(frameworks):
            continue
        flags, setting, scale = peer.flags, _plain(peer.setting), peer.scale
        if peer.aggregation is not None:
            flags = f"--loss-aggregation {peer.aggregation}"
        if scale is not None and flags is not None:
            has_number = sizes is not None or not scale.needs_step
            value = f"{scale.value(divisor, *(sizes or (1, 1, 1))):g}" if has_number else scale.formula.replace(" ", "")
            flags += f" --loss-aggregation-divisor {value}"
            flags += f" [{scale.formula}]" if scale.needs_step and has_number else ""
            setting += f" at L = {divisor:g}" if scale.factor is not None else ""
        found.append(Equivalent(peer.framework, setting, flags, _plain(peer.note)))
    return found


def title(framework: str, setting: str) -> str:
    is_option = set("=-.") & set(setting.partition(" ")[0])
    return f"{framework}{' ' if is_option else ', '}{setting}"


def _plain(text: str) -> str:
    return text.replace("`", "")
