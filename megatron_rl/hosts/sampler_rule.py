"""The rule for samplers that keep a part of the vocabulary (top-p, top-k, min-p), or change the logits before they draw.

Of a token a of the kept set S, whose mass is M = sum_S pi, a sampler reports one of two log-probabilities:

    of the kept tokens          log mu(a) = log pi(a) - log M, so log pi(a) - log mu(a) = log M <= 0 on every token
    of the whole vocabulary     log pi(a)

Where the sampler's is of the kept tokens and the trainer's of the whole vocabulary, or the reverse, each importance weight is off
by M although nothing is off-policy. The ratio of two scores of the trainer's holds no M, whatever the sampler reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_rl.config import NO_CORRECTION
from megatron_rl.declare import POLICY_LOSSES, get_policy_loss
from megatron_rl.validation import flag_of


class Scores(StrEnum):
    """Over which tokens a log-probability is normalised."""

    KEPT = "among the tokens that it kept"
    WHOLE = "over the whole vocabulary"
    UNKNOWN = "over what is not known here"


# The modes of vLLM and of Megatron's engine. A raw score comes from the logits, before the temperature too.
MODES = {"processed_logprobs": Scores.KEPT, "raw_logprobs": Scores.WHOLE}
# Engines with one mode, as trainers name them.
ENGINES = {"sglang": Scores.WHOLE, "megatron": Scores.KEPT, "dynamo": Scores.KEPT}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """Settings are as typed, `top_p=0.9`, and only those that act. mode: the engine's logprobs_mode. kept: filters. changed:
    penalties and biases. drafted: what lets a token be drawn from another set than the one that comes with it. replayed: by it the
    trainer scores among the sampler's own sets. recomputes: the trainer keeps tokens by its own logits, and gives one outside its
    set the score 0.0. mixers: what mixes a token's score with other tokens', which matters there."""

    engine: str = "the sampler"
    mode: str | None = None
    kept: Sequence[str] = ()
    changed: Sequence[str] = ()
    drafted: Sequence[str] = ()
    replayed: str | None = None
    recomputes: bool = False
    mixers: Sequence[str] = ()

    @property
    def scores(self) -> Scores:
        return ENGINES.get(self.engine) or MODES.get(self.mode or "", Scores.UNKNOWN)


def sampler_problems(sampler: Sampler, readers: Sequence[str]) -> Iterator[str]:
    """Why the log-probabilities of sampler and trainer cannot be compared. readers: what of the launch compares, as it is typed."""
    kept, changed, read = ", ".join(sampler.kept), ", ".join(sampler.changed), " and ".join(readers)
    mode = "" if sampler.mode is None else f" (logprobs_mode={sampler.mode})"
    scores = f"the log-probabilities of {sampler.engine}{mode} are {sampler.scores}"
    if sampler.kept and sampler.replayed is not None:
        for setting in (*sampler.changed, *sampler.drafted):
            yield f"{setting} with {sampler.replayed}: a token need not be of the set that the trainer scores; remove one of them"
        if readers and sampler.scores != Scores.KEPT:
            yield f"{sampler.replayed} beside {read}: the trainer scores among the kept tokens, and {scores}; remove {read}"
        return
    if sampler.kept and sampler.recomputes:
        left_out = "a token that the trainer's own filter leaves out has log-probability 0.0"
        if sampler.scores != Scores.KEPT:
            yield f"{kept}: {left_out}, and {scores}, so such a token cannot be told from a sure one; turn {kept} off"
        elif readers or sampler.mixers:
            all_readers = " and ".join((*readers, *sampler.mixers))
            yield f"{kept} beside {all_readers}: {left_out}, and counts as a sure one; turn {kept} off"
    elif sampler.kept and readers and sampler.scores != Scores.WHOLE:
        yield (
            f"{kept} beside {read}: {scores}, and the trainer's are {Scores.WHOLE}, so every weight would be off by the kept mass; "
            f"turn {kept} off, or remove {read}"
        )
    if changed and readers and sampler.scores != Scores.WHOLE:
        yield f"{changed} beside {read}: {scores}, of logits that this changes, so every weight would be off; turn {changed} off"


def as_flag(name: str, value: object) -> str:
    return f"{flag_of(name)} {value}"


def typed_readers(value_of: Callable[[str], Any], spell: Callable[[str, Any], str] = as_flag) -> list[str]:
    """What of our settings compares with the policy that sampled, as `spell` writes a name and its value."""
    given = {name: value_of(name) for name in ("importance_correction", "off_policy_sequence_delta")}
    found = [spell(name, value) for name, value in given.items() if value not in (None, NO_CORRECTION)]
    loss = value_of("policy_loss")
    if loss in POLICY_LOSSES.names() and "rollout_log_probs" in get_policy_loss(loss).inputs_needed:
        found.append(spell("policy_loss", loss))
    return found
