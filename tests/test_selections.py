"""Selections of a step's tokens: exact over the whole step, whatever ranks and micro-batches hold it."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import error_of, names_forgotten, pool_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated_ranks import Meeting, SimulatedGroup, groups_of_ranks, on_simulated_ranks

from megatron_rl import register_token_selection, select_tokens
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE, ParallelGroups, resolve_groups
from megatron_rl.layout.step_order import ordered_bits, value_of_bits
from megatron_rl.registries.selection_settings import TokenSelectionSettings
from megatron_rl.registries.token_selections import get_token_selection, token_selection_names
from megatron_rl.selections import ELSEWHERE

pool = pool_of(4)
TOP, KL_COV, CLIP_COV = "top_entropy", "kl_cov", "clip_cov"


def chosen(kind, share=0.5, **others):
    return TokenSelectionSettings(kind=kind, share=share, **others)


def golden_step():
    """16 tokens whose order of covariances was published with that of two micro-batches of 8: {3, 6} and {6, 10}."""
    torch.manual_seed(0)
    log_probs, advantages = -torch.rand(16, dtype=torch.float64) * 3, torch.randn(16, dtype=torch.float64)
    entropy = torch.rand(16, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 2
    return log_probs, advantages, entropy


class Cut:
    """A step whose tokens lie on ranks: each rank has some of the samples, and of each a slice of its tokens."""

    def __init__(self, lengths, rank_of_token):
        self.lengths, self.rank_of_token = list(lengths), np.asarray(rank_of_token)
        self.samples = np.repeat(np.arange(len(self.lengths)), self.lengths)
        self.positions = np.concatenate([np.zeros(0, int), *(np.arange(length) for length in self.lengths)])

    def of(self, rank, size, ids, **vectors):
        """The arguments of select_tokens on a rank: all samples, in turns of the rank's own, some without a token."""
        order = [*range(rank % max(len(self.lengths), 1), len(self.lengths)), *range(rank % max(len(self.lengths), 1))]
        mine = [np.flatnonzero((self.samples == sample) & (self.rank_of_token % size == rank)) for sample in order]
        tokens = np.concatenate([np.zeros(0, int), *mine]).astype(int)
        bounds = torch.tensor([0, *(len(part) for part in mine)]).cumsum(0)
        return tokens, {
            "cu_seqlens": bounds,
            "sample_ids": [ids[sample] for sample in order],
            "positions": torch.from_numpy(self.positions[tokens]),
            **{name: values[torch.from_numpy(tokens)] for name, values in vectors.items()},
        }


def selected_on(size, cut, ids, setting, loss_mask, **vectors):
    """(the selected tokens of the step, in its order, and what each rank says of it) on simulated ranks."""
    num_tokens = len(cut.samples)

    def on_rank(groups):
        tokens, arguments = cut.of(groups.dp.rank(), size, ids, loss_mask=loss_mask, **vectors)
        found = select_tokens(setting, arguments.pop("loss_mask"), group=groups.dp, **arguments)
        return tokens, found

    answers = on_simulated_ranks(on_rank, groups_of_ranks(dp=size))
    whole = np.zeros(num_tokens, bool)
    for tokens, found in answers:
        whole[tokens] = found.is_selected.numpy()
    return whole, [(found.num_selected, found.num_tokens, found.threshold) for _, found in answers]


@pytest.mark.parametrize("lengths", [[16], [8, 8], [3, 5, 2, 6], [1] * 16])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_published_tokens_are_selected_for_any_cut(lengths, size):
    """verl selects 2 of each micro-batch's 8 tokens where 2 of 16 are meant, or by each one's means."""
    log_probs, advantages, entropy = golden_step()
    generator = torch.Generator().manual_seed(size)
    cut = Cut(lengths, torch.randint(size, (16,), generator=generator).numpy())
    ids, live = list(range(len(lengths))), torch.ones(16, dtype=torch.bool)
    vectors = {"log_probs": log_probs, "advantages": advantages, "entropy": entropy}
    found, told = selected_on(size, cut, ids, chosen(KL_COV, 0.125), live, **vectors)
    assert np.flatnonzero(found).tolist() == [3, 6] and {row[:2] for row in told} == {(2, 16)}
    assert told[0][2] == pytest.approx(0.485194875, abs=1e-7) and len(set(told)) == 1
    found, _ = selected_on(size, cut, ids, chosen(TOP, 0.25), live, **vectors)
    assert np.flatnonzero(found).tolist() == [5, 7, 8, 12]


def test_a_covariance_is_centred_by_the_unmasked_tokens_of_the_step_by_hand():
    """log_probs -1, -2, -3 and advantages 1, 0, 2 have the means -2 and 1: products 0, 0, -1. A masked token is in neither mean."""
    live = torch.tensor([True, True, False, True])
    vectors = {"log_probs": torch.tensor([-1.0, -2.0, 9e9, -3.0]), "advantages": torch.tensor([1.0, 0.0, math.nan, 2.0])}
    found = select_tokens(chosen(KL_COV, 0.67), live, torch.tensor([0, 4]), [0], group=SINGLE, **vectors)
    assert found.is_selected.tolist() == [True, True, False, False] and found.threshold == 0.0 and found.num_tokens == 3
    assert found.old_kl_coefficients.tolist() == [1.0, 1.0, 0.0, 0.0] and found.importance_weights is None


def expected(setting, scores, live, samples, positions, ids):
    """By a sort of all tokens: (score, sample id, position), whole numbers beside float32."""
    low, high = setting.bounds
    taken = {"largest": -1.0, "smallest": 1.0}[setting.declared.taken]
    can = [t for t in range(len(scores)) if live[t] and low <= scores[t] <= high]
    order = sorted(can, key=lambda t: (taken * float(scores[t]), ids[samples[t]], positions[t]))
    share, total = Fraction(str(setting.share)), int(live.sum())
    number = min(max(math.floor(share * total), 1) if share and total else 0, len(order))
    whole = np.zeros(len(scores), bool)
    whole[order[:number]] = True
    return whole, number


FEW = st.sampled_from([-math.pi, -1.5, -0.0, 0.0, 1e-42, 0.5, 0.5000001, 3e38])  # many ties, and neighbours of float32


@st.composite
def steps(draw):
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    total = sum(lengths)
    size = draw(st.integers(1, 4))
    return {
        "size": size,
        "cut": Cut(lengths, draw(st.lists(st.integers(0, size - 1), min_size=total, max_size=total))),
        "scores": draw(st.lists(FEW, min_size=total, max_size=total)),
        "live": draw(st.lists(st.sampled_from([True, True, False]), min_size=total, max_size=total)),
        "ids": draw(st.lists(st.integers(0, draw(st.sampled_from([9, 2**40]))), min_size=6, max_size=6, unique=True)),
        "share": draw(st.sampled_from([0, 0.0, 0.1, 0.29, 0.5, 0.7, 1, 1.0])),
        "low": draw(st.sampled_from([None, None, -1.5, 0.5])),
        "kind": draw(st.sampled_from([TOP, "lowest_advantage"])),
    }


@given(steps())
@settings(max_examples=150, deadline=None)
def test_the_selection_is_that_of_a_sort_of_the_whole_step(step):
    with names_forgotten():

        @register_token_selection("lowest_advantage", effect="left_out", taken="smallest")
        def lowest_advantage(advantages):
            return advantages

        cut, live = step["cut"], torch.tensor(step["live"], dtype=torch.bool)
        scores = torch.tensor(step["scores"], dtype=torch.float32)
        setting = chosen(step["kind"], step["share"], low=step["low"])
        name = "entropy" if step["kind"] == TOP else "advantages"
        found, told = selected_on(step["size"], cut, step["ids"], setting, live, **{name: scores})
        want, number = expected(setting, scores.numpy(), live.numpy(), cut.samples, cut.positions, step["ids"])
    assert found.tolist() == want.tolist()
    last = (min if step["kind"] == TOP else max)(scores[torch.from_numpy(want)].tolist(), default=None)
    assert set(told) == {(number, int(live.sum()), last)}


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=9))
@example([0.0, -0.0, math.inf, -math.inf])
def test_bits_are_in_the_order_of_their_values_and_go_back(values):
    bits = ordered_bits(torch.tensor(values, dtype=torch.float32))
    assert bits.min() >= 0 and bits.max() < 2**32
    for one, bit in zip(values, bits.tolist(), strict=True):
        assert value_of_bits(bit) == one
        assert [(one < other, one == other) for other in values] == [(bit < b, bit == b) for b in bits.tolist()]


@pytest.mark.parametrize("size", [1, 3])
def test_random_tokens_are_those_of_the_bounds_and_do_not_depend_on_the_cut(size):
    """Of 400 tokens with a covariance of +-2 those of +2 can be drawn. Another seed draws others."""
    advantages = torch.tensor([1.0, -1.0]).repeat(200)
    log_probs = torch.tensor([-1.0, -1.0, -5.0, -5.0]).repeat(100)
    cut, ids = Cut([50] * 8, np.arange(400) // 7), list(range(8))
    vectors, live = {"log_probs": log_probs, "advantages": advantages}, torch.ones(400, dtype=torch.bool)
    found, told = selected_on(size, cut, ids, chosen(CLIP_COV, 0.1), live, **vectors)
    assert found.sum() == 40 and {row for row in told} == {(40, 400, None)}
    assert set(((log_probs + 3) * advantages)[torch.from_numpy(found)].tolist()) == {2.0}
    alone = select_tokens(chosen(CLIP_COV, 0.1), live, torch.arange(0, 401, 50), ids, group=SINGLE, **vectors)
    assert alone.is_selected.tolist() == found.tolist()
    assert torch.equal(alone.importance_weights, 1 - alone.is_selected.float())
    others = select_tokens(chosen(CLIP_COV, 0.1), live, torch.arange(0, 401, 50), ids, group=SINGLE, seed=1, **vectors)
    # Of 200 tokens each draw takes 40: by chance they share 8.
    assert 0 < int((alone.is_selected & others.is_selected).sum()) < 20
    below = select_tokens(chosen(CLIP_COV, 0.1, high=1.9), live, torch.arange(0, 401, 50), ids, group=SINGLE, **vectors)
    assert below.num_selected == 0 and below.threshold is None
    all_of_bounds = select_tokens(chosen(CLIP_COV, 1.0), live, torch.arange(0, 401, 50), ids, group=SINGLE, **vectors)
    assert all_of_bounds.num_selected == 200


@pytest.mark.parametrize(
    ("kind", "has_ties", "largest_id", "number"),
    [
        *((TOP, False, 9, 2), (KL_COV, False, 9, 3), (CLIP_COV, False, 9, 3)),
        *((TOP, True, 9, 3), (TOP, True, 2**27, 4), (KL_COV, True, 2**27, 5), (KL_COV, True, 2**40, 6)),
    ],
)
def test_few_all_reduces_are_made_and_none_of_them_of_tokens(kind, has_ties, largest_id, number, monkeypatch):
    """Three as a rule, and five at most where the largest id and position have 32 bits together, here 28 and 4."""
    seen, exchange = [[], []], SimulatedGroup.exchange

    def watched(group, name, value, *rest):
        seen[group.own_rank].append((name, value.numel()))
        return exchange(group, name, value, *rest)

    def on_rank(groups):
        entropy = torch.full((16,), 0.5) if has_ties else torch.arange(16.0) + groups.dp.rank() / 2
        vectors = {"log_probs": -entropy, "entropy": entropy, "advantages": torch.linspace(-1, 1, 16) * (not has_ties)}
        ids, bounds = [largest_id - groups.dp.rank()], {"low": -99.0, "high": 99.0}
        live, cu_seqlens = torch.ones(16, dtype=torch.bool), torch.tensor([0, 16])
        return select_tokens(chosen(kind, 0.25, **bounds), live, cu_seqlens, ids, **vectors, group=groups.dp)

    monkeypatch.setattr(SimulatedGroup, "exchange", watched)
    assert {found.num_selected for found in on_simulated_ranks(on_rank, groups_of_ranks(dp=2))} == {8}
    assert seen[0] == seen[1] and len(seen[0]) == number
    assert {name for name, _ in seen[0]} == {"all_reduce RedOpType.SUM"}
    assert [size for _, size in seen[0]][:1] == ([2**16 + 2 + 128] if kind == TOP else [4])
    assert all(size == 2**16 for _, size in seen[0][1 + (kind != TOP) :])


@pytest.mark.parametrize("share", [0, 0.0])
def test_a_share_of_nothing_takes_one_all_reduce_and_no_token(share):
    live, vectors = torch.ones(3, dtype=torch.bool), {"entropy": torch.ones(3)}
    found = select_tokens(chosen(TOP, share), live, torch.tensor([0, 3]), [0], group=SINGLE, **vectors)
    assert (found.num_selected, found.num_tokens, found.threshold) == (0, 3, None) and not found.importance_weights.any()


def test_a_share_counts_as_it_is_written_and_takes_a_token_at_least():
    """0.29 x 100 is 28.999999999999996 in float64."""
    found = {(share, tokens): chosen(TOP, share).number_of(tokens) for share in (0.29, 2e-4, 1.0, 0) for tokens in (0, 1, 100)}
    assert found == {
        **{(0.29, 0): 0, (0.29, 1): 1, (0.29, 100): 29},
        **{(2e-4, 0): 0, (2e-4, 1): 1, (2e-4, 100): 1},
        **{(1.0, 0): 0, (1.0, 1): 1, (1.0, 100): 100},
        **{(0, 0): 0, (0, 1): 0, (0, 100): 0},
    }
    assert chosen(TOP, 1e-5).number_of(3 * 10**9) == 30000


def test_tokens_of_one_id_and_position_are_taken_together():
    """Ids that are not unique: no order is between them, so the number does not depend on one."""
    found = select_tokens(
        chosen(TOP, 0.25), torch.ones(4, dtype=torch.bool), torch.tensor([0, 2, 4]), [7, 7], entropy=torch.ones(4), group=SINGLE
    )
    assert found.is_selected.tolist() == [True, False, True, False] and found.num_selected == 2


def of_two_tokens(rank=1, dp=SINGLE, *, setting=None, **changes):
    """The changes are those of rank 1."""
    arguments = {
        **{"loss_mask": torch.tensor([True, True]), "cu_seqlens": torch.tensor([0, 2]), "sample_ids": [4]},
        **{"log_probs": -torch.ones(2), "entropy": torch.ones(2), "advantages": torch.ones(2)},
    }
    arguments |= changes if rank == 1 else {}
    return select_tokens(setting or chosen(KL_COV), arguments.pop("loss_mask"), group=dp, **arguments)


WRONG = {
    "NaN": ({"log_probs": torch.tensor([-1.0, math.nan])}, "log_probs is nan at an unmasked token, number 1 of sample 4: "),
    "inf": ({"advantages": torch.tensor([math.inf, 0.0])}, "advantages is inf at an unmasked token, number 0 of sample 4: "),
    "entropy": ({"entropy": torch.full((2,), math.nan), "setting": chosen(TOP)}, "entropy is nan at an unmasked token"),
    "ids": ({"sample_ids": [1, 2]}, r"sample_ids must be [N=1], one a sample, got (2,)"),
    "id": ({"sample_ids": [-3]}, "sample_ids holds -3: ids are at least 0"),
    "positions": ({"positions": torch.arange(3)}, "positions must be [T=2], got (3,)"),
    "position": ({"positions": torch.tensor([-1, 0])}, "positions has numbers below 0: they count the tokens of a sample from 0"),
    "shape": ({"log_probs": torch.ones(3)}, "log_probs must be [T=2], one a token, got (3,)"),
    "bits": (
        {"sample_ids": [2**62], "positions": torch.tensor([0, 9]), "log_probs": -torch.ones(2)},
        "the largest sample id has 63 bits and the largest position 4: together at most 63 are ordered",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tokens_of_a_rank_are_refused_on_all(case):
    changes, message = WRONG[case]
    assert message in error_of(lambda: of_two_tokens(**changes))
    answers = on_simulated_ranks(
        lambda groups: error_of(lambda: of_two_tokens(groups.dp.rank(), groups.dp, **changes)), groups_of_ranks(dp=2)
    )
    other = message if case == "bits" else ELSEWHERE  # the ids of all ranks together are too long
    assert message in answers[1] and other in answers[0]


def test_missing_inputs_and_settings_are_refused():
    for changes, message in (
        ({"log_probs": None}, "token_selection=kl_cov needs log_probs: pass it"),
        ({"entropy": None, "setting": chosen(TOP)}, "token_selection=top_entropy needs entropy: pass it"),
        ({"setting": chosen("none", None)}, "token_selection=none selects nothing"),
        ({"setting": chosen(TOP, 1.5)}, "token_selection_share=1.5 must be a number in [0, 1]"),
    ):
        with pytest.raises(ConfigError) as raised:
            of_two_tokens(**changes)
        assert message in str(raised.value)


def test_a_masked_token_may_hold_anything_and_padding_too():
    found = of_two_tokens(
        loss_mask=torch.tensor([True, False, True]),
        log_probs=torch.tensor([-1.0, math.nan, math.nan]),
        entropy=None,
        advantages=torch.ones(3),
        cu_seqlens=torch.tensor([0, 2]),
        setting=chosen(KL_COV, 1.0),
    )
    assert found.is_selected.tolist() == [True, False, False] and found.num_tokens == 1


# A selection of a user


@pytest.fixture
def registry():
    with names_forgotten():
        yield


def test_a_score_that_is_wrong_is_refused(registry):
    @register_token_selection("scalar", effect="left_out")
    def scalar(entropy):
        return entropy.sum()

    @register_token_selection("endless", effect="left_out")
    def endless(entropy):
        return entropy / 0.0

    with pytest.raises(DataError, match=r"token selection 'scalar' returned \(\) torch.float64 as its score: it must be \(2,\)"):
        of_two_tokens(setting=chosen("scalar"))
    with pytest.raises(DataError, match="token selection 'endless' returned a score that is not finite, from finite inputs"):
        of_two_tokens(setting=chosen("endless"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"effect": "dropped"}, "effect='dropped' of token selection 'mine' is not one of trained_alone, left_out, penalized"),
        ({"effect": "left_out", "taken": "first"}, "taken='first' of token selection 'mine' is not one of largest, smallest"),
        ({"effect": "left_out", "bounds": (2, 1)}, "bounds=(2, 1) of token selection 'mine' must be (low, high) with low <= high"),
    ],
)
def test_a_wrong_declaration_is_refused(options, message, registry):
    with pytest.raises(ConfigError) as raised:
        register_token_selection("mine", **options)(lambda entropy: entropy)
    assert message in str(raised.value)


def test_a_score_of_unknown_inputs_is_refused(registry):
    with pytest.raises(ConfigError, match="token selection 'mine' has the argument 'ratios': a score reads log_probs, entropy"):
        register_token_selection("mine", effect="left_out")(lambda ratios: ratios)
    with pytest.raises(ConfigError, match="token selection 'mine' must be a function with a signature"):
        register_token_selection("mine", effect="left_out")(3)


def test_every_selection_of_the_package_is_declared():
    assert {name: get_token_selection(name).effect for name in token_selection_names() if "." not in name} == {
        **{"none": "nothing", "top_entropy": "trained_alone", "clip_cov": "left_out", "kl_cov": "penalized"},
    }


def test_the_start_says_what_is_selected():
    assert chosen(TOP, 0.2).in_words() == "top_entropy: 0.2 of the step's tokens trained alone"
    of_penalty = "kl_cov: 0.002 of the step's tokens with scores in [0, inf] with a KL penalty x 1"
    assert chosen(KL_COV, 2e-3, low=0.0).in_words() == of_penalty
    assert TokenSelectionSettings().in_words() == ""


# Ranks


def on_gloo_rank(rank, ids, lengths):
    """Context-parallel slices of this data-parallel rank's samples: their own positions, and the group of both."""
    groups = resolve_groups()
    log_probs, advantages, entropy = golden_step()
    cut = Cut(lengths, np.repeat(np.arange(len(lengths)) % 2, lengths) * 2 + np.arange(16) % 2)
    place = 2 * groups.dp.rank() + groups.cp.rank()
    found = {}
    for kind, share in ((KL_COV, 0.125), (TOP, 0.25), (CLIP_COV, 0.5)):
        vectors = {"log_probs": log_probs, "advantages": advantages, "entropy": entropy, "loss_mask": torch.ones(16).bool()}
        tokens, arguments = cut.of(place, 4, ids, **vectors)
        selection = select_tokens(chosen(kind, share, **({"low": 0.0} if kind == CLIP_COV else {})), **arguments)
        found[kind] = tokens[selection.is_selected.numpy()].tolist()
    return found


@pytest.mark.megatron
def test_real_ranks_of_two_groups_select_the_same(pool):
    """The group is Megatron's data-parallel one with context parallelism, which is found without being named."""
    ids, lengths = [3, 0, 2], [6, 7, 3]
    answers = pool.run(on_gloo_rank, ids, lengths, context_parallel_size=2)
    found = {kind: sorted(token for answer in answers for token in answer[kind]) for kind in (KL_COV, TOP, CLIP_COV)}
    log_probs, advantages, _ = golden_step()
    alone = select_tokens(
        chosen(CLIP_COV, 0.5, low=0.0),
        torch.ones(16, dtype=torch.bool),
        torch.tensor([0, 6, 13, 16]),
        ids,
        log_probs=log_probs,
        advantages=advantages,
        group=SINGLE,
    )
    assert found == {KL_COV: [3, 6], TOP: [5, 7, 8, 12], CLIP_COV: alone.is_selected.nonzero()[:, 0].tolist()}


@pytest.mark.slow
def test_a_thousand_ranks_select_a_share_of_the_tokens_of_all():
    """By hand: token t of rank r has the entropy 16 r + t, so the last ranks have the largest ones."""
    meeting = Meeting(list(range(1024)))

    def on_rank(groups):
        rank = groups.dp.rank()
        entropy = 16.0 * rank + torch.arange(16.0)
        live = torch.ones(16, dtype=torch.bool)
        return select_tokens(chosen(TOP, 0.01), live, torch.tensor([0, 16]), [rank], entropy=entropy, group=groups.dp)

    answers = on_simulated_ranks(on_rank, [ParallelGroups(dp=SimulatedGroup(meeting, rank)) for rank in range(1024)])
    assert {(found.num_selected, found.num_tokens, found.threshold) for found in answers} == {(163, 16384, 16384.0 - 163)}
    assert [int(found.is_selected.sum()) for found in answers] == [*[0] * 1013, 3, *[16] * 10]
