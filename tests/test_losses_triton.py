"""The loss kernels on [T] and [N] numbers against their torch twin and float64 loops; interpreted here, compiled on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch
from helpers import KERNEL_DEVICE, PARAMETERS, clip_for, random_batch
from launches import counted_launches
from sass_gate import TorchOperations
from torch import Tensor

from megatron_rl.config import Backend
from megatron_rl.declare import get_policy_loss
from megatron_rl.layout.groups import SINGLE
from megatron_rl.policy_loss import gspo_loss
from megatron_rl.policy_loss.api import reduce
from megatron_rl.policy_loss.inputs import LossBatch, LossOptions, checked_options, prepared
from megatron_rl.policy_loss.reduce_torch import reduce_torch

pytest.importorskip("triton")
from megatron_rl.policy_loss.reduce_triton import document_sums_kernel, reduce_triton

pytestmark = pytest.mark.kernel
# Small, so that documents of a few tokens have several blocks; some of the ratios are clipped.
BLOCK = 8
# No token, one, one less than a block, a block, one more, two and a bit, and one that is masked altogether.
LENGTHS, FULLY_MASKED, TAIL = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3, 5], 6, BLOCK + 3


@dataclass(frozen=True)
class Tokens:
    """Everything that a loss can be given, float32."""

    lengths: list[int]
    log_probs: Tensor  # [T]
    old_log_probs: Tensor  # [T]
    ref_log_probs: Tensor  # [T]
    entropy: Tensor  # [T]
    importance_weights: Tensor  # [T]
    token_advantages: Tensor  # [T]
    loss_mask: Tensor  # [T]
    advantages: Tensor  # [N]
    token_weights: Tensor  # [N]
    regularizer_weights: Tensor  # [N]

    def documents(self) -> list[list[int]]:
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        return [list(range(start, start + length)) for start, length in zip(starts, self.lengths, strict=True)]

    def bounds(self) -> Tensor:
        return torch.tensor([sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)], dtype=torch.int32)

    def counts(self) -> Tensor:
        return torch.tensor([int(self.loss_mask[document].sum()) for document in self.documents()])

    def change(self, function) -> Tokens:
        """Each tensor of one number a token through `function`, but the mask."""
        names = ("log_probs", "old_log_probs", "ref_log_probs", "entropy", "importance_weights", "token_advantages")
        return replace(self, **{name: function(getattr(self, name)) for name in names})


def make_tokens(kind: str, lengths=LENGTHS, *, tail: int = TAIL, fully_masked: int | None = FULLY_MASKED) -> Tokens:
    """Random tokens, about a third of them masked; [T] advantages vary inside a sample for a token-level loss alone."""
    generator = torch.Generator().manual_seed(len(lengths))
    size, documents = sum(lengths) + tail, len(lengths)
    log_probs, noise, other = (torch.randn(size, generator=generator) for _ in range(3))
    log_probs = -2 + log_probs
    advantages, shifts = (torch.randn(documents, generator=generator) for _ in range(2))
    per_token, padding = torch.tensor(lengths, dtype=torch.int64), torch.zeros(tail)
    spread, shift = (torch.cat([x.repeat_interleave(per_token), padding]) for x in (advantages, shifts))
    mask = torch.rand(size, generator=generator) < 0.7
    tokens = Tokens(
        lengths=lengths,
        log_probs=log_probs,
        old_log_probs=log_probs + 0.1 * noise + 0.4 * shift,
        ref_log_probs=log_probs + 0.3 * other,
        entropy=torch.rand(size, generator=generator),
        importance_weights=0.5 + torch.rand(size, generator=generator),
        token_advantages=torch.randn(size, generator=generator) if get_policy_loss(kind).level == "token" else spread,
        loss_mask=mask,
        advantages=advantages,
        token_weights=0.1 + torch.rand(documents, generator=generator),
        regularizer_weights=0.1 + torch.rand(documents, generator=generator),
    )
    if fully_masked is not None:
        mask[tokens.documents()[fully_masked]] = False
    return tokens


def run(reducer, kind: str, tokens: Tokens, *, device: str = KERNEL_DEVICE, cp_group=SINGLE, **asked) -> dict[str, Tensor]:
    """What a reducer makes of what is asked for, on the CPU: per="token", counts, importance, kl, entropy, metrics."""
    per, to = asked.get("per", "sample"), lambda x: x.to(device)
    loss = get_policy_loss(kind)
    options = LossOptions(
        **clip_for(kind),
        loss_parameters=PARAMETERS.get(kind, {}),
        kl_coefficient=asked.get("kl", 0.0),
        entropy_coefficient=asked.get("entropy", 0.0),
        metrics=asked.get("metrics", "none"),
    )
    batch = LossBatch(
        old_log_probs=to(tokens.old_log_probs),
        advantages=to(tokens.token_advantages if per == "token" else tokens.advantages),
        loss_mask=to(tokens.loss_mask),
        cu_seqlens=tokens.bounds(),
        token_weights=to(tokens.token_weights),
        token_counts=asked.get("counts"),
        importance_weights=to(tokens.importance_weights) if asked.get("importance") else None,
        ref_log_probs=to(tokens.ref_log_probs),
        rollout_log_probs=to(tokens.old_log_probs) if loss.anchor == "rollout" else None,
        regularizer_weights=to(tokens.regularizer_weights),
    )
    options = replace(checked_options(loss, options, batch, tokens.log_probs), backend=Backend.TRITON, cp_group=cp_group)
    log_probs = to(tokens.log_probs)
    size = {"num_tokens": log_probs.numel(), "device": log_probs.device, "dtype": log_probs.dtype}
    batch = prepared(loss, batch, **size, advantages_per=per)
    block = {"block": BLOCK} if reducer is reduce_triton else {}
    output, coefficients = reducer(loss, log_probs, to(tokens.entropy), batch, options, **block)
    found = {field.name: getattr(output, field.name) for field in fields(output)} | {
        "c": coefficients.log_probs,
        "e": coefficients.entropy,
    }
    found["metrics"] = None if output.metrics is None else output.metrics.values
    return {name: value.cpu() for name, value in found.items() if value is not None}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


EVERYTHING = {"importance": True, "kl": 0.7, "entropy": 0.3, "metrics": "with_entropy"}
COUNTS = make_tokens("grpo").counts()


def test_dtypes_and_strides_of_the_callers_tensors_do_not_matter():
    """FB-80: bf16, float64, int32 counts and strided or expanded tensors give what plain ones of the same numbers give."""
    tokens = make_tokens("gspo").change(lambda x: x.bfloat16().float())
    tokens = replace(tokens, advantages=tokens.advantages.bfloat16().float())
    odd = replace(
        tokens,
        log_probs=torch.stack([tokens.log_probs] * 2, 1)[:, 1],
        old_log_probs=tokens.old_log_probs.bfloat16(),
        ref_log_probs=tokens.ref_log_probs.double(),
        importance_weights=torch.stack([tokens.importance_weights] * 2, 1)[:, 0],
        loss_mask=tokens.loss_mask.long(),
        advantages=tokens.advantages.bfloat16(),
        token_weights=tokens.token_weights.double(),
    )
    ones = replace(tokens, importance_weights=torch.ones_like(tokens.importance_weights))
    expanded = replace(tokens, importance_weights=torch.ones(1).expand_as(tokens.importance_weights))
    for changed, plain, asked, counts in ((odd, tokens, EVERYTHING, COUNTS), (expanded, ones, {"importance": True}, None)):
        given = {} if counts is None else {"counts": counts}
        want = run(reduce_triton, "gspo", plain, **asked, **given)
        assert_equal(run(reduce_triton, "gspo", changed, **asked, **{n: x.int() for n, x in given.items()}), want)


def test_varying_advantages_are_counted():
    """1e-3 in one token: the whole document."""
    tokens = make_tokens("gspo")
    varying = tokens.token_advantages.clone()
    varying[next(t for t in tokens.documents()[4] if tokens.loss_mask[t])] += 1e-3
    found = run(reduce_triton, "gspo", replace(tokens, token_advantages=varying), per="token")["num_nonfinite"]
    assert found.tolist() == [0, 0, 0, 0, COUNTS[4], 0, 0]


def test_a_loss_without_a_twin_launches_no_kernel():
    """A loss that is a function of torch tensors alone is computed in torch, whatever the backend."""
    alone = replace(get_policy_loss("gspo"), triton=None)
    with counted_launches() as launches:
        got = run(lambda _, *others: reduce(alone, *others), "gspo", make_tokens("gspo"))
    assert launches == []
    assert_equal(got, run(reduce_torch, "gspo", make_tokens("gspo")))


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_backward_is_a_multiplication_for_each_coefficient_and_one_kernel(monkeypatch, coefficient):
    """The first `ones_like` is autograd's own. tests/test_kernel_code.py counts what forward launches beside its kernels."""
    batch = random_batch([3, 4], num_masked=(1, 0))
    batch = replace(batch, logits=batch.logits.float().to(KERNEL_DEVICE), labels=batch.labels.to(KERNEL_DEVICE))
    batch = replace(batch, **{n: getattr(batch, n).to(KERNEL_DEVICE) for n in ("old_log_probs", "advantages", "loss_mask")})
    options = {"entropy_coefficient": coefficient, "regularizer_weights": batch.token_weights, "backend": "triton"}
    output = gspo_loss(batch.logits.requires_grad_(), *batch.arguments(), **options)
    launches: list[str] = []
    operations: list[str] = []
    # The interpreter is made of torch operations: nothing is executed.
    monkeypatch.setattr(type(document_sums_kernel), "run", lambda kernel, *a, **k: launches.append(kernel.fn.__name__))
    with TorchOperations(operations):
        output.loss.backward()
    # Fresh memory is filled with NaN by conftest.py.
    found = [name for name in operations if not name.startswith("fill_")]
    assert launches == ["logits_gradient_kernel"]
    assert found == ["ones_like.default"] + ["mul.Tensor"] * (2 if coefficient else 1)
