"""Which launches of the package the gate records: the kernels of rows and of losses, by the names that test_kernel_code.py uses.

Called under sass_gate.record alone, where tensors have no storage and no kernel runs; it must never look at a value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl import grpo_loss, gspo_loss
from megatron_rl.declare import get_policy_loss, policy_loss_names
from megatron_rl.layout.groups import GATHER_INTO_ONE, SINGLE
from megatron_rl.losses.kl import KL_ESTIMATORS
from megatron_rl.ops.backends import resolve_backend, vocab_shard
from megatron_rl.ops.log_probs import row_kernels
from megatron_rl.ops.scale import AssumedScale
from megatron_rl.policy_loss import api
from megatron_rl.policy_loss import policy_loss as front_door

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Enough rows to fill every multiprocessor, and the vocabulary of Qwen; few rows are split.
ROWS, FEW_ROWS, COLUMNS = 4096, 16, 151936
# (rows, columns, row stride, offset of the first row): multiples of 16, of 8 alone, of nothing; one row; columns of a wider
# tensor from an odd address on; more than 2^31 elements; a shard narrower than one tile.
SIZES = [
    *((4096, 151936, 151936, 0), (4096, 151928, 151928, 0), (4096, 50257, 50257, 0), (1, 50257, 50257, 0), (4097, 50257, 50263, 5)),
    *((70000, 32768, 32768, 0), (4096, 1, 1, 0), (4096, 1000, 1000, 0)),
]
TEMPERATURES = (1.0, 0.7)
TWINS = [name for name in policy_loss_names() if get_policy_loss(name).triton]


class PretendedPair:
    """A group of two ranks whose collectives leave memory as it is."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


def rows_of(rows: int, columns: int, stride: int, offset: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(offset + rows * stride, dtype=dtype, device="cuda").as_strided((rows, columns), (stride, 1), offset)


def large(dtype: str, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    return rows_of(rows, columns, columns, 0, DTYPES[dtype])


def column(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(rows, dtype=dtype, device="cuda")


def statistics(
    logits: Tensor, *, with_entropy: bool = False, has_mask: bool = True, group=SINGLE, temperature: float = 1.0, vocab_size=None
) -> None:
    shard = vocab_shard(logits.shape[1], temperature, vocab_size, group)
    mask = column(logits.shape[0], torch.bool) if has_mask else None
    kernels = row_kernels(resolve_backend("auto", logits))
    with mock.patch.object(dist, GATHER_INTO_ONE, lambda *tensors, group: None):
        kernels.forward(logits, column(logits.shape[0], torch.int64), mask, shard, group, with_entropy=with_entropy)


def gradient(
    logits: Tensor,
    *,
    with_entropy: bool = False,
    has_mask: bool = True,
    has_coefficients: bool = True,
    out: Tensor | None = None,
    temperature: float = 1.0,
) -> None:
    rows = logits.shape[0]
    row_kernels(resolve_backend("auto", logits)).gradient(
        logits,
        column(rows, torch.int64),
        column(rows, torch.bool) if has_mask else None,
        *(column(rows) for _ in range(3)),
        column(rows) if has_coefficients else None,
        column(rows) if with_entropy else None,
        vocab_shard(logits.shape[1], temperature, None, SINGLE),
        out=logits if out is None else out,
    )


def unit_gradient(logits: Tensor, *, out: Tensor | None = None, with_entropy: bool = False, temperature: float = 1.0) -> None:
    shard = vocab_shard(logits.shape[1], temperature, None, SINGLE)
    labels, run = column(logits.shape[0], torch.int64), row_kernels(resolve_backend("auto", logits)).unit_gradient
    assert run is not None
    assert run(logits, labels, shard, with_entropy=with_entropy, out=logits if out is None else out) is not None


def rescale(gradient: Tensor) -> None:
    """The backward of a loss whose factor was assumed."""
    from megatron_rl.ops.rescale_triton import rescale as run

    run(gradient, *(torch.empty((), device="cuda") for _ in range(3)))


def sparse_head(dtype: torch.dtype, *, hidden_size: int = 4096, num_pairs: int = 65536) -> None:
    """The products of pairs and both gradients. Only their host numbers count."""
    from megatron_rl.ops.linear_log_probs import pair_kernels
    from megatron_rl.ops.support import Pairs

    kernels, rows = pair_kernels(resolve_backend("auto", column(1))), column(ROWS, torch.int64)
    numbers = (column(num_pairs, torch.int64) for _ in range(3))
    pairs = Pairs(rows, *numbers, column(ROWS + 1, torch.int64), column(num_pairs, torch.bool), column(ROWS + 1, torch.int64))
    hidden, weight, gradient = (torch.empty(size, hidden_size, dtype=dtype, device="cuda") for size in (ROWS, COLUMNS, ROWS))
    g = kernels.multiply(hidden, weight, pairs, max_bytes=0)
    kernels.add_hidden(g, pairs, weight, out=gradient, max_bytes=0)
    of_weight = torch.empty(COLUMNS, hidden_size, device="cuda")
    kernels.add_weight(g, pairs, hidden, out=of_weight, max_bytes=0)


def policy_loss(
    function,
    *,
    rows: int = ROWS,
    documents: int = 16,
    everything=False,
    per_token=False,
    has_sampler=False,
    logits: Tensor | None = None,
    **options,
):
    """The loss's forward: the statistics' launches, then the loss's."""
    if has_sampler:
        options |= {"rollout_log_probs": column(rows)}
    if everything:
        options |= {"ref_log_probs": column(rows), "importance_weights": column(rows), "regularizer_weights": column(documents)}
        options |= {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}
    with mock.patch.object(dist, "all_reduce", lambda tensor, *, group: None):
        function(
            large("bf16", rows) if logits is None else logits,
            column(rows, torch.int64),
            column(rows),
            column(rows if per_token else documents),
            column(rows, torch.bool),
            column(documents + 1, torch.int32),
            column(documents),
            advantages_per="token" if per_token else "sample",
            tp_group=SINGLE,
            **{"cp_group": SINGLE, **options},
        )


def on_policy(function):
    return lambda logits, labels, old_log_probs, *tensors, **options: function(logits, labels, None, *tensors, **options)


def one_read(function, *, dtype: str = "bf16", columns: int = COLUMNS, loss_scale: AssumedScale | float = 2.0, **options) -> None:
    """The loss's forward where its factor is announced or assumed, on logits that get their gradient in place."""
    logits = large(dtype, columns=columns).requires_grad_()
    # A torch without CUDA builds no graph of tensors there.
    without_graph = mock.patch.object(api._WithLogitsGradient, "apply", lambda logits, result, *others: result.loss)
    with mock.patch.object(torch, "is_grad_enabled", lambda: True), without_graph:
        policy_loss(function, logits=logits, inplace=True, loss_scale=loss_scale, **options)


def each_size(function: Callable[..., None]) -> None:
    """What the launches of one configuration differ in while a program runs."""
    for size in SIZES:
        for temperature in TEMPERATURES:
            function(rows_of(*size, torch.bfloat16), temperature=temperature)


def make_launches() -> dict[str, Callable[[], None]]:
    pair = PretendedPair()
    launches: dict[str, Callable[[], None]] = {
        "statistics bf16": lambda: statistics(large("bf16")),
        "statistics bf16, entropy": lambda: statistics(large("bf16"), with_entropy=True),
        "statistics fp32, entropy": lambda: statistics(large("fp32"), with_entropy=True),
        "statistics bf16, no mask": lambda: statistics(large("bf16"), has_mask=False),
        "statistics bf16, split": lambda: statistics(large("bf16", FEW_ROWS)),
        "statistics bf16, entropy, split, shards": lambda: statistics(large("bf16", FEW_ROWS), group=pair, with_entropy=True),
        "statistics of each size": lambda: each_size(statistics),
        "gradient bf16": lambda: gradient(large("bf16")),
        "gradient bf16, entropy": lambda: gradient(large("bf16"), with_entropy=True),
        "gradient fp32, entropy": lambda: gradient(large("fp32"), with_entropy=True),
        "gradient bf16, entropy, no mask": lambda: gradient(large("bf16"), has_mask=False, with_entropy=True),
        "gradient bf16, entropy alone": lambda: gradient(large("bf16"), with_entropy=True, has_coefficients=False),
        "gradient fp32 into bf16": lambda: gradient(large("fp32"), out=large("bf16")),
        "gradient of each size": lambda: each_size(gradient),
        # In the head: one row and, with entropy in float32, six that a multiprocessor has under way at once.
        "unit gradient bf16": lambda: unit_gradient(large("bf16")),
        "unit gradient fp32, six rows, entropy": lambda: unit_gradient(large("fp32", columns=12800), with_entropy=True),
        "unit gradient fp32 into bf16, three rows": lambda: unit_gradient(
            large("fp32", columns=16384), out=large("bf16", columns=16384)
        ),
        "rescale bf16": lambda: rescale(large("bf16")),
        "rescale fp32": lambda: rescale(large("fp32")),
        "rescale of each size": lambda: [rescale(rows_of(*size, torch.bfloat16)) for size in SIZES],
        "sparse head bf16": lambda: sparse_head(torch.bfloat16),
        "sparse head fp32": lambda: sparse_head(torch.float32),
        "sparse head of each size": lambda: [
            sparse_head(torch.bfloat16, hidden_size=hidden_size, num_pairs=num_pairs)
            for hidden_size, num_pairs in ((4096, 1), (5120, 70001), (2056, 65536))
        ],
        # One, three and six rows that a multiprocessor has under way at once.
        "grpo, one read, bf16": lambda: one_read(grpo_loss),
        "grpo, one read, bf16, assumed": lambda: one_read(grpo_loss, loss_scale=AssumedScale()),
        "grpo, one read, bf16, everything": lambda: one_read(grpo_loss, everything=True),
        "gspo, one read, bf16, three rows, on-policy": lambda: one_read(on_policy(gspo_loss), columns=50257),
        "grpo, one read, fp32, six rows, everything": lambda: one_read(grpo_loss, dtype="fp32", columns=12800, everything=True),
        "grpo, one read of each size": lambda: [
            one_read(grpo_loss, columns=columns, temperature=temperature, clip_ratio_high=0.2 + temperature / 10)
            for columns in (COLUMNS, 151928, 151931)
            for temperature in TEMPERATURES
        ],
        # What the loss itself has no part in, with one of them.
        "grpo, cp": lambda: policy_loss(grpo_loss, cp_group=PretendedPair(), check_ranks=False),
        "gspo, everything": lambda: policy_loss(gspo_loss, everything=True),
        "gspo, advantages per token": lambda: policy_loss(gspo_loss, per_token=True),
        "gspo of each size": lambda: [
            policy_loss(gspo_loss, rows=rows, documents=documents, clip_ratio_high=high)
            for rows, documents, high in ((4096, 16, 0.2), (4097, 1, 0.3), (70000, 33, 0.2))
        ],
    }
    for name in TWINS:
        options = {"has_sampler": get_policy_loss(name).anchor == "rollout"}
        launches[name] = functools.partial(policy_loss, functools.partial(front_door, name), **options)
    for name in KL_ESTIMATORS.names():
        launches[f"grpo, KL {name}"] = functools.partial(policy_loss, grpo_loss, everything=True, kl_estimator=name)
    return launches


LAUNCHES = make_launches()
