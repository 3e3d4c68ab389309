"""The same step in other frameworks' words: the tables of docs/hosts/migration.md as data. It must never weight a token.

Each row was read in the framework's source, at the commit that the page names.
"""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

# Our divisor for the L that another framework is given, a formula of L, N samples, dp ranks and M micro-batches a rank -> the
# gradient there, relative to ours with the same L; None: there is no L.
FACTOR_OF_DIVISOR = {
    "L": "1",
    "1": None,
    "1 / N": None,
    "L / N": "N: it does not divide by samples",
    "L dp / N": "N / dp",
    "L M dp / N": "the micro-batch size, N / (M dp)",
}
# framework | setting, `code` in the page's quotes | our aggregation, another of our flags, or - | our divisor, or - | note
SETTINGS = """\
verl | `loss_agg_mode=seq-mean-token-mean` | sample_mean | - | \
    legacy workers, before 0.8: fully masked samples are out of N there, in N here
verl | `loss_agg_mode=token-mean` | token_mean | - | legacy workers, before 0.8, average the means of micro-batches
verl | `loss_agg_mode=token-sum`, from 0.9 | constant | 1 / N | 1 a token
verl | `loss_agg_mode=seq-mean-token-sum` | constant | 1 |
verl | `loss_agg_mode=seq-mean-token-sum-norm`, from 0.7.1 | constant | L | \
    L is `loss_scale_factor`, else the padded response length
verl | `loss_agg_mode=seq-mean-token-sum-norm`, 0.7.0, engine workers | constant | L dp / N |
verl | `loss_agg_mode=seq-mean-token-sum-norm`, to 0.7.0, legacy workers | constant | L M dp / N |
TRL | `loss_type=grpo` | sample_mean | - |
TRL | `loss_type=dapo` | token_mean | - | \
    the tokens of a step where `steps_per_generation` is `gradient_accumulation_steps`; DAPO as published is `prompt_mean`
TRL | `loss_type=dr_grpo` | constant | L | L is `max_completion_length`
TRL | `loss_type=luspo` | constant | 1 | with `importance_sampling_level=sequence`
TRL | `loss_type=bnpo` | - | - | the mean of a batch depends on the layout; `token_mean` does not
Liger | `loss_type=grpo` | sample_mean | - | of the batch that it is handed
Liger | `loss_type=dapo` | token_mean | - | \
    of `num_items_in_batch`, else of the batch over all ranks; DAPO as published is `prompt_mean`
Liger | `loss_type=dr_grpo` | constant | L | L is `max_completion_length`; of the batch that it is handed
Liger | `loss_type=luspo` | constant | 1 | of the batch that it is handed
Liger | `loss_type=bnpo` | - | - | the mean of a batch depends on the layout; `token_mean` does not
OpenRLHF | `policy_loss_type=ppo` | token_mean | - | before 0.10.4 the mean of the means of micro-batches
OpenRLHF | `policy_loss_type=gspo` | sample_mean | - | \
    fully masked samples are out of N there, in N here; before 0.10.4 the mean of the means of micro-batches
NeMo-RL | `token_level_loss=True` | token_mean | - |
NeMo-RL | `token_level_loss=False` | sample_mean | - | samples with `sample_mask` 0 are out of N there, in N here
open-instruct | `loss_denominator="token"` | token_mean | - |
open-instruct | `loss_denominator=L` | constant | L / N |
open-instruct | `masked_mean_denominator=L`, before its #1161 | constant | L M dp / N | `masked_mean_axis` unset
open-instruct | `masked_mean_denominator` unset, before its #1161 | - | - | \
    the mean of a batch depends on the layout; `token_mean` does not
SkyRL | `loss_reduction=sequence_mean` | sample_mean | - |
SkyRL | `loss_reduction=token_mean` | token_mean | - |
SkyRL | `loss_reduction=prompt_mean`, from 0.3 | prompt_mean | - |
SkyRL | `loss_reduction=seq_mean_token_sum_norm` | constant | L | L is `max_seq_len`
SkyRL | `loss_reduction=token_mean_legacy` | - | - | the mean of a batch depends on the layout; `token_mean` does not
ROLL | `loss_agg_mode=seq-mean-token-mean` | sample_mean | - | fully masked samples are out of N there, in N here
ROLL | `loss_agg_mode=token-mean` | token_mean | - |
ROLL | `loss_agg_mode=seq-mean-token-sum` | constant | 1 | fully masked samples are out of N there, in N here
ROLL | `loss_agg_mode=seq-mean-token-sum-norm` | constant | L / N | L is the padded length
prime-rl | its losses | token_mean | - |
AReaL | its actor loss | token_mean | - |
Fast-LLM | loss `grpo` | token_mean | - |
Fast-LLM | loss `gspo` | constant | 1 | since its #544
Fast-LLM | `normalize_by_documents=True`, its #502 | constant | 1 | \
    GRPO and GSPO alike; it divides the gradient by the documents once more, as `--gradient-divisor num_samples` does
PipelineRL | `--quantization bf16_last_layer_fp32` of its vLLM | --fp32-lm-head | - | \
    the sampler's head is float32, and the trainer's must be; in miles and slime the host's model computes the logits
miles, slime | without flags | sample_mean | - | where a rollout has one sample; else its tokens stand for a sample's
miles, slime | `--calculate-per-token-loss` | token_mean | - | \
    there one token more for each fully masked sample; the reward hook gives the exact one
miles, slime | a reducer of sum / L | constant | L | where it sums its own slice of each sample
miles, slime | `--pg-loss-divisor L` of miles#1328 | constant | L |
Megatron-LM | `train_rl.py --calculate-per-token-loss` | token_mean | - | there one token more for each empty bin
Megatron-LM | `train_rl.py` | - | - | the mean of a bin depends on the packing; `token_mean` is what one bin gives
Dr. GRPO | the authors' code | constant | L | L is the generation budget
DAPO | as published; ScaleRL's prompt average | prompt_mean | - |
DeepSpeed | its division of the gradient by accumulation x world | --gradient-divisor num_samples | - | \
    for a loss that is divided already, where that is N; without the flag, or where there is none, your clipping value x N
"""


class Peer(NamedTuple):
    """setting of a framework -> our aggregation. flags: ours; None: nothing here gives the same, and note says why."""

    framework: str
    setting: str
    aggregation: str | None
    flags: str | None
    divisor: str | None
    note: str


def _peer(line: str) -> Peer:
    framework, setting, here, divisor, note = (cell.strip() for cell in line.split("|"))
    if here == "-" or here.startswith("--"):
        return Peer(framework, setting, None, None if here == "-" else here, None, note)
    return Peer(framework, setting, here, f"--loss-aggregation {here}", None if divisor == "-" else divisor, note)


PEERS = [_peer(line) for line in SETTINGS.splitlines()]
FRAMEWORKS = tuple(dict.fromkeys(name for peer in PEERS for name in peer.framework.split(", ")))


def framework(text: str) -> str:
    """argparse's type of --framework: capitals, blanks and dashes do not matter."""
    names = {_letters(name): name for name in FRAMEWORKS}
    if _letters(text) not in names:
        raise ArgumentTypeError(f"{text!r} is not known: give one of {', '.join(FRAMEWORKS)}")
    return names[_letters(text)]


def _letters(text: str) -> str:
    return re.sub(r"[^a-z]", "", text.lower())


def title(framework: str, setting: str) -> str:
    is_option = set("=-.") & set(setting.partition(" ")[0])
    return f"{framework}{' ' if is_option else ', '}{setting}"


def divisor_here(formula: str, divisor: float, samples: int, ranks: int, microbatches: int) -> float:
    """A formula of FACTOR_OF_DIVISOR in numbers."""
    above, _, below = formula.partition(" / ")
    value = math.prod({"1": 1.0, "L": divisor, "dp": ranks, "M": microbatches}[letter] for letter in above.split())
    return value / samples if below else value


def equivalents(
    frameworks: Sequence[str],
    aggregations: Sequence[str | None],
    divisor: float,
    sizes: tuple[int, int, int] | None,  # N samples, dp ranks, M micro-batches a rank; None where there is no step
) -> Iterator[dict[str, str | None]]:
    """framework, setting, flags and note in plain text, for the rows of these frameworks and aggregations; None: those without an
    aggregation. divisor: the L that is given there."""
    for peer in PEERS:
        if peer.aggregation not in aggregations or not set(peer.framework.split(", ")) & set(frameworks):
            continue
        flags, setting = peer.flags, peer.setting
        if peer.divisor is not None:
            needs_step = peer.divisor.endswith("/ N")
            has_number = sizes is not None or not needs_step
            value = (
                f"{divisor_here(peer.divisor, divisor, *(sizes or (1, 1, 1))):g}" if has_number else peer.divisor.replace(" ", "")
            )
            flags = f"{flags} --loss-aggregation-divisor {value}" + (f" [{peer.divisor}]" if needs_step and has_number else "")
            setting += f" at L = {divisor:g}" if FACTOR_OF_DIVISOR[peer.divisor] is not None else ""
        yield {
            "framework": peer.framework,
            "setting": setting.replace("`", ""),
            "flags": flags,
            "note": peer.note.replace("`", ""),
        }


def in_words(equivalent: Mapping[str, str | None]) -> str:
    name, note = title(equivalent["framework"] or "", equivalent["setting"] or ""), equivalent["note"]
    remark = f" ({note})" if note else ""
    if equivalent["flags"] is None:
        return f"{name} has no equal here{remark}"
    return f"to reproduce {name} use {equivalent['flags']}{remark}"
