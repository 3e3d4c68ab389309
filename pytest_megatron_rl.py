"""pytest plugin, loaded by its entry point wherever megatron_rl is installed: is the gradient of a loss the same in every layout?

    def test_my_loss(assert_layout_invariant):
        assert_layout_invariant(my_loss)

It stands beside the package because importing megatron_rl imports torch: a run that uses no fixture of it must not pay for it. It
adds no option, no marker and no hook. docs/testing.md describes the fixtures.
"""

from __future__ import annotations

import pytest

# Enough for two sizes of two.
NUM_RANKS = 4


@pytest.fixture(scope="session")
def megatron_rl_ranks():
    """A megatron_rl.testing.ranks.RankPool of gloo ranks on this machine, without Megatron; forked at its first call."""
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

    use_megatron=True: on ranks whose parallel_state has the layout.
    """

    def check(loss, *, use_megatron: bool = False, **options) -> None:
        __tracebackhide__ = True
        from megatron_rl.testing.loss_property import assert_layout_invariant

        ranks = request.getfixturevalue("megatron_rl_megatron_ranks" if use_megatron else "megatron_rl_ranks")
        assert_layout_invariant(ranks, loss, **options)

    return check
