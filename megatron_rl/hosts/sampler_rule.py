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

from megatron_rl.config import NO_CORRECTION, PolicyLossConfig
from megatron_rl.loss_hub import get_policy_loss, policy_loss_names
from megatron_rl.registries.correction_settings import CorrectionSettings
from megatron_rl.validation import flag_of


class Scores(StrEnum):
    """Over which tokens a log-probability is normalised."""

    KEPT = "among the tokens that it kept"
    WHOLE = "over the whole vocabulary"
    UNKNOWN = "over what is not known here"


# The modes of vLLM and of Megatron's engine. A raw score comes from the logits, before the temperature too.
MODES = {"processed_logprobs": Scores.KEPT, "raw_logprobs": Scores.WHOLE}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """A launch's sampler. Settings are as typed, `top_p=0.9`, and only those that change sampling.

    kept: filters that leave tokens out. changed: penalties and biases. drafted: what lets a token be drawn from another set than
    the one that comes with it. scores, engine: what its log-probabilities are of, and whose they are. replayed: the setting by
    which the trainer scores among the sampler's own sets. recomputes: the trainer keeps tokens by its own logits, and gives one
    outside its set the score 0.0.
    """

    kept: Sequence[str] = ()
    changed: Sequence[str] = ()
    drafted: Sequence[str] = ()
    scores: Scores = Scores.UNKNOWN
    engine: str = "the sampler"
    replayed: str | None = None
    recomputes: bool = False


def sampler_problems(sampler: Sampler, readers: Sequence[str], mixers: Sequence[str] = ()) -> Iterator[str]:
    """Why the log-probabilities of sampler and trainer cannot be compared.

    readers: what of the launch compares with the sampler, as it is typed. mixers: what mixes a token's score with other tokens';
    it matters where the trainer gives some tokens the score 0.0.
    """
    kept, changed, read = ", ".join(sampler.kept), ", ".join(sampler.changed), " and ".join(readers)
    scores = f"the log-probabilities of {sampler.engine} are {sampler.scores}"
    if sampler.kept and sampler.replayed is not None:
        for setting in (*sampler.changed, *sampler.drafted):
            yield (
                f"{setting} with {sampler.replayed}: a token need not be drawn from the logits and the set that the trainer "
                "scores; remove one of them"
            )
        if readers and sampler.scores != Scores.KEPT:
            yield (
                f"{sampler.replayed} beside {read}: the trainer scores among the kept tokens, and {scores}, so every weight is off "
                f"by the kept mass; remove {read}"
            )
        return
    if sampler.kept and sampler.recomputes:
        why = "the trainer keeps tokens by the same settings, and a token that it leaves out has log-probability 0.0"
        if sampler.scores != Scores.KEPT:
            yield f"{kept}: {why}; {scores}, so such a token cannot be told from a sure one; turn {kept} off"
        elif readers or mixers:
            all_readers = " and ".join((*readers, *mixers))
            yield f"{kept} beside {all_readers}: {why}, and counts there as one of probability 1; turn {kept} off"
    elif sampler.kept and readers and sampler.scores != Scores.WHOLE:
        yield (
            f"{kept} beside {read}: the sampler keeps a part of the vocabulary, and {scores}; the trainer's are {Scores.WHOLE}, so "
            f"every weight would be off by the kept mass although nothing is off-policy; turn {kept} off, or remove {read}"
        )
    if changed and readers and sampler.scores != Scores.WHOLE:
        yield (
            f"{changed} beside {read}: {scores}, of logits that this changes, so every weight would be off by that; turn {changed} "
            f"off, or remove {read}"
        )


def readers_of(config: PolicyLossConfig) -> list[str]:
    """What of our loss compares with the policy that sampled, in words."""
    correction, loss = CorrectionSettings.of(config), get_policy_loss(config.policy_loss)
    found = []
    if correction.has_factor:
        found.append(f"importance_correction={correction.kind}")
    if correction.sequence_delta is not None:
        found.append(f"off_policy_sequence_delta={correction.sequence_delta}")
    if "rollout_log_probs" in loss.inputs_needed:
        found.append(f"the policy loss {loss.name}")
    return found


def typed_readers(value_of: Callable[[str], Any]) -> list[str]:
    """The same of our flags, whose values are not checked yet, as typed."""
    given = {name: value_of(name) for name in ("importance_correction", "off_policy_sequence_delta")}
    found = [f"{flag_of(name)} {value}" for name, value in given.items() if value not in (None, NO_CORRECTION)]
    loss = value_of("policy_loss")
    if loss in policy_loss_names() and "rollout_log_probs" in get_policy_loss(loss).inputs_needed:
        found.append(f"--policy-loss {loss}")
    return found
