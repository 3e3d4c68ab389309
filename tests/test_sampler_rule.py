"""The rule for samplers that keep a part of the vocabulary: what is refused, and beside what. Each host's test has its settings."""

from __future__ import annotations

from functools import partial

import pytest

from megatron_rl.config import PolicyLossConfig
from megatron_rl.hosts.sampler_rule import Sampler, sampler_problems, typed_readers

TOP_P, TIS, UNBIASED = ("top_p=0.8",), ("importance_correction=tis",), ("kl_estimator=unbiased",)
PENALTY, DRAFT = ("repetition_penalty=1.1",), ("speculative_config",)
KEPT, WHOLE = "processed_logprobs", "raw_logprobs"
REPLAYED = {"kept": TOP_P, "mode": KEPT, "replayed": "replay=true"}
FILTERED = {"kept": TOP_P, "mode": KEPT, "recomputes": True}
ROWS = {
    # name: (the sampler, what reads its scores, the problem or None)
    "nothing is left out": ({"mode": KEPT}, TIS, None),
    "a kept set that nobody compares with": ({"kept": TOP_P, "mode": KEPT}, (), None),
    "scores over the whole vocabulary": ({"kept": TOP_P, "mode": WHOLE}, TIS, None),
    "an engine of the whole vocabulary": ({"kept": TOP_P, "engine": "sglang"}, TIS, None),
    "scores of the kept tokens": (
        {"kept": TOP_P, "mode": KEPT},
        TIS,
        "top_p=0.8 beside importance_correction=tis: the log-probabilities of vllm (logprobs_mode=processed_logprobs) are among",
    ),
    "scores of an unknown set": ({"kept": TOP_P}, TIS, "beside importance_correction=tis: the log-probabilities of vllm are"),
    "a penalty": ({"changed": PENALTY}, TIS, "repetition_penalty=1.1 beside importance_correction=tis: "),
    "a penalty, and scores before it": ({"changed": PENALTY, "mode": WHOLE}, TIS, None),
    "a penalty that nobody compares with": ({"changed": PENALTY}, (), None),
    "replayed sets": (REPLAYED | {"mixers": UNBIASED}, TIS, None),
    "replayed sets with a penalty": (
        *(REPLAYED | {"changed": PENALTY}, ()),
        "repetition_penalty=1.1 with replay=true: a token need not be of the set",
    ),
    "replayed sets of a draft": (
        *(REPLAYED | {"drafted": DRAFT}, ()),
        "speculative_config with replay=true: a token need not be of the set",
    ),
    "replayed sets, and scores over the whole vocabulary": (
        *(REPLAYED | {"mode": WHOLE}, TIS),
        "replay=true beside importance_correction=tis: the trainer scores among the kept tokens",
    ),
    "a trainer that filters too": (FILTERED, (), None),
    "a trainer that filters too, compared": (
        *(FILTERED, TIS),
        "top_p=0.8 beside importance_correction=tis: a token that the trainer's own filter leaves out",
    ),
    "a trainer that filters too, mixed": (
        *(FILTERED | {"mixers": UNBIASED}, ()),
        "top_p=0.8 beside kl_estimator=unbiased: a token that the trainer's own filter leaves out",
    ),
    "a trainer that filters too, and raw scores": (
        *(FILTERED | {"mode": WHOLE}, ()),
        "such a token cannot be told from a sure one; turn top_p=0.8 off",
    ),
}


@pytest.mark.parametrize(("sampler", "readers", "problem"), ROWS.values(), ids=ROWS)
def test_a_sampler_is_refused_beside_what_it_makes_wrong(sampler, readers, problem):
    """FB-114, FB-161"""
    found = [*sampler_problems(Sampler(**({"engine": "vllm"} | sampler)), readers)]
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0]), found


@pytest.mark.parametrize(
    ("settings", "words", "typed"),
    [
        ({}, [], []),
        ({"importance_correction": "tis"}, ["importance_correction=tis"], ["--importance-correction tis"]),
        ({"off_policy_sequence_delta": 0.1}, ["off_policy_sequence_delta=0.1"], ["--off-policy-sequence-delta 0.1"]),
        ({"policy_loss": "dppo_tv"}, ["policy_loss=dppo_tv"], ["--policy-loss dppo_tv"]),
    ],
)
def test_what_compares_with_the_sampler_is_named(settings, words, typed):
    of_config = partial(getattr, PolicyLossConfig(**settings))
    assert typed_readers(of_config, "{}={}".format) == words and typed_readers(settings.get) == typed
