"""A micro-batch without documents, through every front door, level, correction, backend and cp size: zeros, and no rank waits."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import KERNEL_DEVICE, pool_of
from loss_backends import HAS_TRITON

from megatron_rl import CorrectionSettings, importance_correction, linear_log_probs, linear_policy_loss, vocab_parallel_log_probs
from megatron_rl.declare import get_policy_loss
from megatron_rl.layout.groups import resolve_groups
from megatron_rl.metrics.step import finalise_metrics
from megatron_rl.policy_loss import policy_loss
from megatron_rl.policy_loss.api import loss_of_log_probs

pool = pool_of(2)
# One of each level; dppo_tv compares with the sampler.
KINDS = ("grpo", "dppo_tv", "gspo")
DOORS = ("logits", "log-probabilities", "head")
BY_SAMPLE = CorrectionSettings(kind="icepop", level="sequence_mean", low=0.9, high=1.1)
V, H = 6, 3


def outcome(door: str, kind: str, rows: int, has_all: bool, backend: str, groups) -> str | None:
    """What is wrong with the result of `rows` rows of padding; None: nothing."""
    dtype, device = torch.float32, KERNEL_DEVICE
    labels, bounds, none = torch.zeros(rows, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), torch.zeros(0)
    rows_of = {name: torch.full((rows,), -1.5) for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs")}
    options = {"tp_group": groups.tp, "cp_group": groups.cp, "metrics": "basic", "backend": backend, "advantages_per": "sample"}
    options |= {"rollout_log_probs": rows_of["rollout_log_probs"]}
    if get_policy_loss(kind).anchor != "rollout":
        options["correction"] = BY_SAMPLE
    if has_all:
        options |= {"kl_coefficient": 0.1, "ref_log_probs": rows_of["ref_log_probs"], "regularizer_weights": none}
        options |= {"token_counts": torch.zeros(0, dtype=torch.int64), "importance_weights": torch.ones(rows)}
    packed = (rows_of["old_log_probs"], none, torch.ones(rows, dtype=torch.bool), bounds, none)
    options, packed = _on(device, options), [tensor.to(device) for tensor in packed]
    width = V // groups.tp.size()
    if door == "logits":
        leaves = [torch.randn(rows, width, dtype=dtype, device=device).requires_grad_()]
        output = policy_loss(kind, leaves[0], labels.to(device), *packed, **options)
    elif door == "log-probabilities":
        leaves = [torch.full((rows,), -1.0, dtype=dtype, device=device).requires_grad_()]
        output = loss_of_log_probs(kind, leaves[0], *packed, **options)
    else:
        sizes = ((rows, H), (width, H))
        leaves = [torch.randn(*size, dtype=dtype, device=device).requires_grad_() for size in sizes]
        output = linear_policy_loss(kind, *leaves, labels.to(device), *packed, **options)
    output.loss.backward()
    numbers = [output.loss.item(), output.policy_loss.item(), *(float(leaf.grad.abs().sum()) for leaf in leaves)]
    if any(numbers) or output.num_nonfinite.numel() or output.metrics.values[0]:
        return f"{numbers}, {output.num_nonfinite}, {output.metrics}"
    if not all(map(torch.isfinite, map(torch.tensor, finalise_metrics(output.metrics).values()))):
        return f"metrics {finalise_metrics(output.metrics)}"
    return None


def _on(device: str, options: dict) -> dict:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def of_rank(rank: int, backend: str) -> list[str]:
    """Each case in which this rank has something else than zeros."""
    groups, problems = resolve_groups(), []
    # has_all: with counts and lengths, which save a collective.
    for case in itertools.product(DOORS, KINDS, (0, 4), (False, True), (backend,)):
        try:
            problem = outcome(*case, groups)
        except Exception as error:  # of any type: the case is named
            problem = f"{type(error).__name__}: {error}"
        problems += [] if problem is None else [f"{case}: {problem}"]
    return problems


def of_other_doors(rank: int) -> None:
    """The functions that give log-probabilities and corrections."""
    groups = resolve_groups()
    width, bounds = V // groups.tp.size(), torch.zeros(1, dtype=torch.int32)
    for rows in (0, 4):
        labels, mask = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.bool)
        leaf = torch.randn(rows, width).requires_grad_()
        log_probs = vocab_parallel_log_probs(leaf, labels, loss_mask=mask, tp_group=groups.tp)
        log_probs.sum().backward()
        assert log_probs.shape == (rows,) and not leaf.grad.any()
        hidden, weight = torch.randn(rows, H), torch.randn(width, H)
        assert linear_log_probs(hidden, weight, labels, loss_mask=mask, tp_group=groups.tp).shape == (rows,)
        vectors = (torch.zeros(rows), torch.zeros(rows), mask, bounds)
        correction, sums = importance_correction(BY_SAMPLE, *vectors, cp_group=groups.cp)
        assert correction.weights.shape == (rows,) and not sums[sums.isfinite()].any()  # a maximum of nothing is -inf


BACKENDS = [
    pytest.param("torch", id="torch"),
    pytest.param("triton", id="triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_without_documents_gives_zeros(backend):
    """FB-25."""
    assert of_rank(0, backend) == []


@pytest.mark.megatron
@pytest.mark.parametrize("size", ["tensor_model_parallel_size", "context_parallel_size"])
def test_ranks_without_documents_give_zeros(size, pool):
    """FB-25. The collectives of each case must be the same on both ranks: else one waits here."""
    if KERNEL_DEVICE == "cuda":
        pytest.skip("a process that has used CUDA cannot be forked")
    assert pool.run(of_rank, "torch", **{size: 2}) == [[], []]
    pool.run(of_other_doors, **{size: 2})
