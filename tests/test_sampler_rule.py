"""The rule for samplers that keep a part of the vocabulary: what is refused, and beside what. Each host's test has its settings."""

from __future__ import annotations

import pytest

from megatron_rl.config import PolicyLossConfig
from megatron_rl.hosts.sampler_rule import Sampler, Scores, readers_of, sampler_problems, typed_readers

TOP_P, TIS, UNBIASED = ("top_p=0.8",), ("importance_correction=tis",), ("kl_estimator=unbiased",)
PENALTY, DRAFT = ("repetition_penalty=1.1",), ("speculative_config",)
ROWS = {
    # name: (sampler, what reads its scores, what mixes tokens, the problem or None)
    "nothing is left out": (Sampler(scores=Scores.KEPT), TIS, (), None),
    "a kept set that nobody compares with": (Sampler(kept=TOP_P, scores=Scores.KEPT), (), (), None),
    "scores over the whole vocabulary": (Sampler(kept=TOP_P, scores=Scores.WHOLE), TIS, (), None),
    "scores of the kept tokens": (
        *(Sampler(kept=TOP_P, scores=Scores.KEPT), TIS, ()),
        "top_p=0.8 beside importance_correction=tis: the sampler keeps a part of the vocabulary",
    ),
    "scores of an unknown set": (Sampler(kept=TOP_P), TIS, (), "top_p=0.8 beside importance_correction=tis: "),
    "a penalty": (Sampler(changed=PENALTY), TIS, (), "repetition_penalty=1.1 beside importance_correction=tis: "),
    "a penalty, and scores before it": (Sampler(changed=PENALTY, scores=Scores.WHOLE), TIS, (), None),
    "a penalty that nobody compares with": (Sampler(changed=PENALTY), (), (), None),
    "replayed sets": (Sampler(kept=TOP_P, scores=Scores.KEPT, replayed="replay=true"), TIS, UNBIASED, None),
    "replayed sets with a penalty": (
        *(Sampler(kept=TOP_P, changed=PENALTY, scores=Scores.KEPT, replayed="replay=true"), (), ()),
        "repetition_penalty=1.1 with replay=true: a token need not be drawn from",
    ),
    "replayed sets of a draft": (
        *(Sampler(kept=TOP_P, drafted=DRAFT, scores=Scores.KEPT, replayed="replay=true"), (), ()),
        "speculative_config with replay=true: a token need not be drawn from",
    ),
    "replayed sets, and scores over the whole vocabulary": (
        *(Sampler(kept=TOP_P, scores=Scores.WHOLE, replayed="replay=true"), TIS, ()),
        "replay=true beside importance_correction=tis: the trainer scores among the kept tokens",
    ),
    "a trainer that filters too": (Sampler(kept=TOP_P, scores=Scores.KEPT, recomputes=True), (), (), None),
    "a trainer that filters too, compared": (
        *(Sampler(kept=TOP_P, scores=Scores.KEPT, recomputes=True), TIS, ()),
        "top_p=0.8 beside importance_correction=tis: the trainer keeps tokens by the same settings",
    ),
    "a trainer that filters too, mixed": (
        *(Sampler(kept=TOP_P, scores=Scores.KEPT, recomputes=True), (), UNBIASED),
        "top_p=0.8 beside kl_estimator=unbiased: the trainer keeps tokens by the same settings",
    ),
    "a trainer that filters too, and raw scores": (
        *(Sampler(kept=TOP_P, scores=Scores.WHOLE, recomputes=True), (), ()),
        "such a token cannot be told from a sure one; turn top_p=0.8 off",
    ),
}


@pytest.mark.parametrize(("sampler", "readers", "mixers", "problem"), ROWS.values(), ids=ROWS)
def test_a_sampler_is_refused_beside_what_it_makes_wrong(sampler, readers, mixers, problem):
    """FB-114, FB-161"""
    found = [*sampler_problems(sampler, readers, mixers)]
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0]), found


@pytest.mark.parametrize(
    ("settings", "words", "typed"),
    [
        ({}, [], []),
        ({"importance_correction": "tis"}, ["importance_correction=tis"], ["--importance-correction tis"]),
        ({"off_policy_sequence_delta": 0.1}, ["off_policy_sequence_delta=0.1"], ["--off-policy-sequence-delta 0.1"]),
        ({"policy_loss": "dppo_tv"}, ["the policy loss dppo_tv"], ["--policy-loss dppo_tv"]),
    ],
)
def test_what_compares_with_the_sampler_is_named(settings, words, typed):
    assert readers_of(PolicyLossConfig(**settings)) == words and typed_readers(settings.get) == typed
