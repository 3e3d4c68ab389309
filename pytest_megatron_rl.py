"""A pytest plugin that tests whether a loss has the same gradient in every layout. Installing megatron_rl registers it.

    def test_my_loss(assert_layout_invariant):
        assert_layout_invariant(my_loss)

pytest loads it in every run, so it lies beside the package: a run without its fixtures imports neither the package nor torch. It
adds no option, no marker and no hook. docs/testing.md describes the fixtures.
"""

from __future__ import annotations

import pytest

# Enough for a layout of two sizes of two ranks.
NUM_RANKS = 4


@pytest.fixture(scope="session")
def megatron_rl_ranks():
    """A megatron_rl.testing.ranks.RankPool of gloo ranks on this machine, without Megatron; the first call forks them."""
    from megatron_rl.testing.ranks import RankPool

    with RankPool(NUM_RANKS, use_megatron=False) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def megatron_rl_megatron_ranks():
    """The same with Megatron-Core's parallel_state initialised for the layout of each call."""
    from megatron_rl.testing.ranks import RankPool

    with RankPool(NUM_RANKS) as ranks:
        yield ranks


@pytest.fixture
def assert_layout_invariant(request: pytest.FixtureRequest):
    """megatron_rl.testing.loss_property.assert_layout_invariant on this session's ranks: call it with a loss of (logits, batch).

    use_megatron=True: on ranks where parallel_state has the layout.
    """

    def check(loss, *, use_megatron: bool = False, **options) -> None:
        __tracebackhide__ = True
        from megatron_rl.testing.loss_property import assert_layout_invariant

        ranks = request.getfixturevalue("megatron_rl_megatron_ranks" if use_megatron else "megatron_rl_ranks")
        assert_layout_invariant(ranks, loss, **options)

    return check
