"""build_gpt_model: logits and every parameter's gradient are those of one rank, in every layout."""

from __future__ import annotations

import pytest
import torch
from gpt_cases import CLASSIC, CP, MODERN, PP, TP, VPP, Case, assembled_gradients, assembled_logits, run_case

from megatron_rl.testing.ranks import RankPool

pytestmark = pytest.mark.megatron

CASES = [
    pytest.param(Case(2, {TP: 2}), id="TP2"),
    pytest.param(Case(2, {TP: 2}, CLASSIC, tie_embeddings=True), id="TP2 tied"),
    pytest.param(Case(2, {TP: 2}, sequence_parallel=True), id="TP2+SP"),
    pytest.param(Case(2, {TP: 2}, CLASSIC, is_packed=True, sequence_parallel=True), id="TP2+SP packed, biases"),
    pytest.param(Case(4, {TP: 4}, CLASSIC), id="TP4"),
    pytest.param(Case(2, {PP: 2}), id="PP2, micro-batches of unlike length"),
    pytest.param(Case(2, {PP: 2}, CLASSIC, is_packed=True, tie_embeddings=True), id="PP2 packed tied"),
    pytest.param(Case(2, {PP: 2, VPP: 2}, num_layers=4, num_microbatches=4, is_packed=True), id="FB-53 PP2xVPP2 overlapped"),
    pytest.param(Case(4, {PP: 4, VPP: 2}, num_layers=8, num_microbatches=4), id="FB-53 PP4xVPP2"),
    pytest.param(Case(4, {PP: 2, TP: 2}, sequence_parallel=True), id="PP2xTP2+SP"),
    pytest.param(Case(2, {CP: 2}), id="FB-21 CP2"),
    pytest.param(Case(4, {CP: 4}, CLASSIC), id="CP4"),
    pytest.param(Case(2, {CP: 2}, is_packed=True), id="FB-28 CP2 packed"),
    pytest.param(Case(4, {CP: 4}, is_packed=True), id="CP4 packed"),
    pytest.param(Case(4, {CP: 2, TP: 2}, sequence_parallel=True), id="CP2xTP2+SP"),
    pytest.param(Case(4, {CP: 2, TP: 2}, is_packed=True, sequence_parallel=True), id="FB-28 CP2xTP2+SP packed"),
    pytest.param(Case(4, {CP: 2, PP: 2}, is_packed=True), id="CP2xPP2 packed"),
    pytest.param(Case(2, {TP: 2}, dtype=torch.float32), id="TP2 in float32"),
]


@pytest.fixture(scope="module")
def pool():
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def on_one_rank(pool):
    """The answer to a case that is on one rank, computed once, and all of them without another layout in between."""
    cases = {repr(case := row.values[0].on_one_rank()): case for row in CASES}
    return {name: pool.run(run_case, case, world_size=1) for name, case in cases.items()}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_one_rank(pool, on_one_rank, case):
    """FB-03, FB-21: in float64, so that a step which quietly computes in float32 shows as well as a wrong sum."""
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if case.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    is_gated = case.style is MODERN
    expected = on_one_rank[repr(case.on_one_rank())]
    actual = pool.run(run_case, case, world_size=case.world_size, **case.model_parallel)
    for index in range(case.num_microbatches):
        torch.testing.assert_close(assembled_logits(actual, index), assembled_logits(expected, index), **tolerance)
    whole = assembled_gradients(expected, is_gated)
    assert all(gradient.abs().max() > 1e-3 for gradient in whole.values())  # a zero would hide a lost gradient
    torch.testing.assert_close(assembled_gradients(actual, is_gated), whole, **tolerance)
