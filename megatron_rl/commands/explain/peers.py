"""The same step in other frameworks' words: the rows of docs/hosts/migration.md as data. It must never weight a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.config import LossAggregation

SAMPLE, PROMPT, TOKEN, CONSTANT = LossAggregation


@dataclass(frozen=True, slots=True)
class Scale:
    """Our divisor for the L that the other framework is given: formula, and number for a step of N samples on dp ranks."""

    formula: str
    value: Callable[[float, int, int], float]


SAME = Scale("L", lambda divisor, samples, ranks: divisor)
ONE = Scale("1", lambda divisor, samples, ranks: 1.0)
BY_SAMPLES = Scale("L / N", lambda divisor, samples, ranks: divisor / samples)
BY_SAMPLES_A_RANK = Scale("L dp / N", lambda divisor, samples, ranks: divisor * ranks / samples)


@dataclass(frozen=True, slots=True)
class Peer:
    """setting of a framework -> our aggregation; None: there is no equal, and note says why."""

    framework: str
    setting: str
    aggregation: LossAggregation | None
    scale: Scale | None = None
    note: str = ""


OF_A_MICRO_BATCH = "there a mean over each micro-batch: equal where micro-batches hold equally many"
PEERS = (
    Peer(
        "verl",
        "loss_agg_mode=seq-mean-token-mean",
        SAMPLE,
        note="without global batch information masked samples are out of N there",
    ),
    Peer("verl", "loss_agg_mode=token-mean", TOKEN, note="older engines averaged micro-batches"),
    Peer("verl", "loss_agg_mode=seq-mean-token-sum", CONSTANT, ONE),
    Peer("verl", "loss_agg_mode=seq-mean-token-sum-norm", CONSTANT, BY_SAMPLES, "releases that restore dp"),
    Peer("verl", "loss_agg_mode=seq-mean-token-sum-norm", CONSTANT, BY_SAMPLES_A_RANK, "releases that divide by dp"),
    Peer("TRL", "loss_type=grpo", SAMPLE),
    Peer("TRL", "loss_type=dapo", TOKEN, note="the published DAPO is prompt_mean"),
    Peer("TRL", "loss_type=dr_grpo", CONSTANT, SAME, "equal where batches are full"),
    Peer("TRL", "loss_type=luspo", CONSTANT, ONE),
    Peer("TRL", "loss_type=bnpo", None, note="a mean over one rank's batch depends on the layout; token_mean does not"),
    Peer("Liger", "loss_type=grpo", SAMPLE),
    Peer("Liger", "loss_type=dapo", TOKEN, note="the published DAPO is prompt_mean"),
    Peer("Liger", "loss_type=bnpo", None, note="a mean over one rank's batch depends on the layout; token_mean does not"),
    Peer("OpenRLHF", "policy_loss_type=ppo", TOKEN, note=OF_A_MICRO_BATCH + " tokens"),
    Peer("OpenRLHF", "policy_loss_type=gspo", SAMPLE, note=OF_A_MICRO_BATCH + " samples"),
    Peer("NeMo-RL", "token_level_loss=True", TOKEN),
    Peer("NeMo-RL", "token_level_loss=False", SAMPLE, note="masked samples are out of N there, in N here"),
    Peer("open-instruct", 'loss_denominator="token"', TOKEN),
    Peer("open-instruct", "loss_denominator=L", CONSTANT, BY_SAMPLES, "there not divided by samples"),
    Peer("Fast-LLM", "GSPO, normalize_by_documents", CONSTANT, ONE),
    Peer("miles, slime", "without flags", SAMPLE, note="where a rollout has one sample"),
    Peer("miles, slime", "--calculate-per-token-loss", TOKEN, note="there +1 token for each fully masked sample"),
    Peer("Megatron-LM", "train_rl.py", None, note="a mean over bins depends on the packing; token_mean is what one bin gives"),
    Peer("Dr. GRPO", "the authors' code", CONSTANT, SAME, "L is the generation budget there"),
    Peer("DAPO", "as published; ScaleRL's prompt average", PROMPT),
)
FRAMEWORKS = tuple(dict.fromkeys(peer.framework for peer in PEERS))


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
            return f"{self.framework} {self.setting} has no equal here{note}"
        return f"to reproduce {self.framework} {self.setting} use {self.flags}{note}"


def equivalents(
    frameworks: Sequence[str], aggregations: Sequence[str | None], divisor: float, num_samples: int, dp_size: int
) -> list[Equivalent]:
    """Of these frameworks and aggregations, None for settings without an equal. divisor: the L that is given there."""
    found = []
    for peer in PEERS:
        if peer.framework not in frameworks or peer.aggregation not in aggregations:
            continue
        flags, setting = None, peer.setting
        if peer.aggregation is not None:
            flags = f"--loss-aggregation {peer.aggregation}"
        if peer.scale is not None:
            value = peer.scale.value(divisor, num_samples, dp_size)
            flags += f" --loss-aggregation-divisor {value:g}"
            if peer.scale is not ONE:
                setting += f" at L = {divisor:g}"
                flags += f" [{peer.scale.formula}]" if peer.scale is not SAME else ""
        found.append(Equivalent(peer.framework, setting, flags, peer.note))
    return found
