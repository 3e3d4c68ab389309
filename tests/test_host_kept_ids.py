"""slime's own loss over the ids that its sampler kept, beside ours: its samples, its conversion, its policy loss.

SLIME_ROOT=... pytest -m host --require host tests/test_host_kept_ids.py
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from itertools import accumulate
from unittest import mock

import host_ranks
import pytest
from helpers import pool_of
from host_cases import VOCAB_SIZE, HostCase
from host_harness import own_train_data
from host_ranks import run_cases
from test_host_matrix import ROOTS

KEYS = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
# float32 sums in two orders over 7 columns, of gradients of size 0.1
LIMIT = 2e-6
KL = (("use_kl_loss", True), ("kl_loss_coef", 0.3), ("kl_loss_type", "k2"), ("entropy_coef", 0.1))
TIS = (("use_tis", True),)
pool = pool_of(2)


def kept_of(sample, index: int) -> list[list[int]]:
    """Sets of 1 to 7 ids; now and then one lacks its token, as at the edge of a set; nothing was sampled at a masked token."""
    sets = []
    for place, bit in enumerate(sample.mask):
        token, size = sample.tokens[sample.prompt + place], 1 + (3 * place + index) % VOCAB_SIZE
        first = 1 if (place + index) % 9 == 8 and size > 1 else 0
        sets.append([(token + k) % VOCAB_SIZE for k in range(first, size)] if bit else [])
    return sets


def of_slime(own):
    """The batch with what slime's own conversion makes of its samples."""

    def micro_batch(host, args, case, step, data, numbers):
        rows, batch = own(host, args, case, step, data, numbers)
        kind = importlib.import_module("slime.utils.types").Sample
        samples = []
        for index, sample in enumerate(step.samples):
            kept = kept_of(sample, index)
            sets = {KEYS[0]: [one for ids in kept for one in ids], KEYS[1]: [0, *accumulate(map(len, kept))]}
            samples.append(kind(index=index, tokens=sample.tokens, response_length=sample.response, reward=0.0, **sets))
        converted = own_train_data("slime", args, samples)
        importlib.import_module("slime.observability.rollout_data_utils").tensorize_rollout_data_for_training(converted)
        return rows, batch | {key: [converted[key][number] for number in numbers] for key in KEYS if key in converted}

    return micro_batch


def run_with_sets(rank: int, roots: dict[str, str], cases: list[HostCase]) -> list:
    own = host_ranks.train_data

    def without_sets(host, args, step):
        """Rewards and counts, of samples that have no sets."""
        return own(host, Namespace(**vars(args) | {"rollout_top_p": 1.0}), step)

    replaced = {"micro_batch": of_slime(host_ranks.micro_batch), "train_data": without_sets}
    with mock.patch.multiple(host_ranks, **replaced):
        return run_cases(rank, roots, cases)


@pytest.mark.host("SLIME_ROOT")
@pytest.mark.parametrize("cp_size", [1, 2])
def test_slime_and_our_loss_train_the_same_over_kept_ids(pool, cp_size):
    """Zigzag, and --allgather-cp: value, gradient and metrics, with a KL over the same ids, an entropy over all, and TIS."""
    top_p, replay = (("rollout_top_p", 0.9),), (("sampling_support", "replay"),)
    launches = [("thd", TIS), ("thd", KL), ("allgather" if cp_size > 1 else "thd", KL + TIS)]
    cases = []
    for layout, terms in launches:
        shared = {"host": "slime", "aggregation": "sample_mean", "layout": layout, "size": 3}
        cases += [
            HostCase(door="default", options=top_p + terms, **shared),
            HostCase(door="custom_loss", options=top_p + replay + terms, **shared),
            HostCase(door="default", options=terms, **shared),
        ]
    layout = {"world_size": cp_size, "context_parallel_size": cp_size}
    for results in pool.run(run_with_sets, {"slime": ROOTS["slime"]}, cases, **layout):
        assert not [result for result in results if isinstance(result, str)], results
        for theirs, ours, of_all in zip(results[::3], results[1::3], results[2::3], strict=True):
            size = theirs.gradient.abs().max()
            assert (ours.gradient - theirs.gradient).abs().max() < LIMIT * size
            assert (of_all.gradient - theirs.gradient).abs().max() > 0.1 * size  # without sets it is another gradient
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-5, abs=1e-6)
            for name in ("pg_loss", "pg_clipfrac", "ppo_kl", "entropy_loss"):
                assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-5, abs=1e-6), name
            assert ours.metrics["kept_ids"] > 1
