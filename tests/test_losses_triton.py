"""The loss kernels on [T] and [N] numbers against their torch twin and float64 loops; interpreted here, compiled on a GPU."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields, replace

import pytest
import torch
from helpers import CLIP, KERNEL_DEVICE, PARAMETERS, clip_for, loop_sample, random_batch
from sass_gate import TorchOperations
from torch import Tensor

from benchmarks.launches import counted_launches
from megatron_rl.config import Backend
from megatron_rl.layout.groups import SINGLE
from megatron_rl.loss_hub import get_policy_loss, policy_loss_names
from megatron_rl.losses import gspo_loss
from megatron_rl.losses.api import reducer_of
from megatron_rl.losses.inputs import prepare_inputs
from megatron_rl.losses.reduce_torch import LossResult, reduce_loss_torch
from megatron_rl.losses.settings import LossKeywords, resolve_settings, with_defaults
from megatron_rl.metrics import PolicyStatistics
from megatron_rl.step_metrics import finalise_metrics

pytest.importorskip("triton")
import megatron_rl.losses.reduce_triton as reduce_triton
from megatron_rl.losses.reduce_triton import document_sums_kernel, reduce_loss_triton
from megatron_rl.testing.losses_by_hand import REFERENCES

pytestmark = pytest.mark.kernel
KINDS = tuple(name for name in policy_loss_names() if get_policy_loss(name).triton)
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
        token_advantages=torch.randn(size, generator=generator) if REFERENCES[kind][0] == "token" else spread,
        loss_mask=mask,
        advantages=advantages,
        token_weights=0.1 + torch.rand(documents, generator=generator),
        regularizer_weights=0.1 + torch.rand(documents, generator=generator),
    )
    if fully_masked is not None:
        mask[tokens.documents()[fully_masked]] = False
    return tokens


def run(twin, kind: str, tokens: Tokens, *, device: str = KERNEL_DEVICE, cp_group=SINGLE, **asked) -> LossResult:
    """One twin on what is asked for: per="token", counts, importance, kl, entropy, metrics."""
    per, to = asked.get("per", "sample"), lambda x: x.to(device)
    loss = get_policy_loss(kind)
    keywords = {
        **clip_for(kind),
        "loss_parameters": PARAMETERS.get(kind, {}),
        "rollout_log_probs": to(tokens.old_log_probs) if loss.anchor == "rollout" else None,
        "token_counts": asked.get("counts"),
        "advantages_per": per,
        "importance_weights": to(tokens.importance_weights) if asked.get("importance") else None,
        "ref_log_probs": to(tokens.ref_log_probs),
        "regularizer_weights": to(tokens.regularizer_weights),
        "kl_coefficient": asked.get("kl", 0.0),
        "entropy_coefficient": asked.get("entropy", 0.0),
        "metrics": asked.get("metrics", "none"),
        "check_ranks": False,
    }
    options = with_defaults(LossKeywords, loss, keywords)
    inputs = prepare_inputs(
        loss,
        options,
        SINGLE,
        num_tokens=tokens.log_probs.numel(),
        device=to(tokens.log_probs).device,
        dtype=tokens.log_probs.dtype,
        old_log_probs=to(tokens.old_log_probs),
        advantages=to(tokens.token_advantages if per == "token" else tokens.advantages),
        loss_mask=to(tokens.loss_mask),
        cu_seqlens=tokens.bounds(),
        token_weights=to(tokens.token_weights),
    )
    size = {"block": BLOCK} if twin is reduce_loss_triton else {}
    settings = resolve_settings(loss, options, SINGLE, cp_group, Backend.TRITON)
    return twin(loss, to(tokens.log_probs), to(tokens.entropy), inputs, settings, **size)


def numbers(parts: LossResult) -> dict[str, Tensor]:
    """What is not None, on the CPU."""
    found = {field.name: getattr(parts, field.name) for field in fields(parts)}
    if parts.metric_sums is not None:
        found["metric_sums"] = parts.metric_sums.values
    return {name: value.cpu() for name, value in found.items() if value is not None}


def assert_equal(got: LossResult, want: LossResult) -> None:
    got, want = numbers(got), numbers(want)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def loop_parts(kind: str, tokens: Tokens, asked: dict) -> dict[str, Tensor]:
    """loss, its terms and its derivatives, in float64 by loops that autograd differentiates."""
    leaf, entropy = (x.double().requires_grad_() for x in (tokens.log_probs, tokens.entropy))
    old = tokens.old_log_probs
    zero = leaf[:0].sum() + entropy[:0].sum()
    policy, kl, bonus = zero, zero, zero
    for i, document in enumerate(tokens.documents()):
        live = [t for t in document if tokens.loss_mask[t]]
        advantages = [tokens.token_advantages[t] if asked.get("per") == "token" else tokens.advantages[i] for t in live]
        values = loop_sample(kind, [leaf[t] for t in live], [old[t] for t in live], advantages, *CLIP.values())
        for t, (value, _, _) in zip(live, values, strict=True):
            weight = float(tokens.token_weights[i]) * (float(tokens.importance_weights[t]) if asked.get("importance") else 1.0)
            policy = policy + weight * value
            difference = float(tokens.ref_log_probs[t]) - leaf[t]
            kl = kl + float(tokens.regularizer_weights[i]) * (difference.exp() - difference - 1)
            bonus = bonus + float(tokens.regularizer_weights[i]) * entropy[t]
    loss = policy + asked.get("kl", 0.0) * kl - asked.get("entropy", 0.0) * bonus
    loss.backward()
    return {
        "loss": loss,
        "policy_loss": policy,
        "coefficients": leaf.grad,
        **({"kl_loss": kl} if asked.get("kl") else {}),
        **({"entropy": bonus, "entropy_coefficients": entropy.grad} if asked.get("entropy") else {}),
    }


def assert_as_exact(got: Tensor, reference: Tensor, truth: Tensor, name: str) -> None:
    """At most twice the reference's error, and 2^-20 for an exp that is good to 2 ulp where the other one happens to be exact."""
    scale = max(1.0, truth.abs().max().item())
    error, allowed = ((x.double() - truth).abs().max().item() for x in (got, reference))
    assert error <= 2 * allowed + scale * 2**-20, (name, error, allowed)


EVERYTHING = {"importance": True, "kl": 0.7, "entropy": 0.3, "metrics": "with_entropy"}
COUNTS = make_tokens("grpo").counts()
ROWS = [
    pytest.param({}, id="nothing asked for"),
    pytest.param({"counts": COUNTS}, id="counts given: one column less"),
    pytest.param({"per": "token"}, id="FB-65 advantages per token"),
    pytest.param({"per": "token", "importance": True, "counts": COUNTS}, id="per token, weighted, counted: other columns"),
    pytest.param({"importance": True}, id="importance weights"),
    pytest.param({"kl": 0.7}, id="FB-93 KL alone: no entropy is read"),
    pytest.param({"entropy": 0.3}, id="entropy alone: no reference is read"),
    pytest.param({"entropy": 0.3, "metrics": "basic"}, id="entropy as a term but not as a metric"),
    pytest.param({"metrics": "basic", "per": "token"}, id="metrics of advantages per token"),
    pytest.param({**EVERYTHING, "counts": COUNTS}, id="everything, counts given"),
    pytest.param({**EVERYTHING, "per": "token"}, id="everything, per token"),
]


def pairs(rows: list) -> list:
    """(kind, row): everything, with counts, for each loss; everything, per token, at both levels; the others for one loss each."""
    found = []
    for number, row in enumerate(rows):
        (asked,) = row.values
        kinds = [KINDS[number % len(KINDS)]]
        if "kl" in asked and "entropy" in asked:
            kinds = KINDS if "counts" in asked else ("grpo", "gspo")
        found += [pytest.param(kind, asked, id=f"{kind}, {row.id}") for kind in kinds]
    return found


def can_clip(kind: str) -> bool:
    """Whether the reference clips one of four tokens that moved far."""
    low, high = clip_for(kind).values() if clip_for(kind) else (0.0, 0.0)
    far = [(torch.tensor(-1.0), -1.0 - move, advantage) for move in (-3.0, 3.0) for advantage in (-1.0, 1.0)]
    return any(loop_sample(kind, [new], [old], [advantage], low, high)[0][1] for new, old, advantage in far)


@pytest.mark.parametrize(("kind", "asked"), pairs(ROWS))
def test_the_kernels_are_as_exact_as_the_torch_twin(kind, asked):
    """FB-63, FB-64, FB-80: loss, terms, coefficients against a loop, metric sums against the twin in float64, for
    each optional input; lengths around a block, no token, one masked altogether, a tail. A second run has the same bits."""
    tokens = make_tokens(kind)
    got, reference = (numbers(run(twin, kind, tokens, **asked)) for twin in (reduce_loss_triton, reduce_loss_torch))
    doubled = replace(tokens.change(Tensor.double), **{n: getattr(tokens, n).double() for n in ("advantages", "token_weights")})
    exact = numbers(run(reduce_loss_torch, kind, doubled, device="cpu", **asked))
    truth = loop_parts(kind, tokens, asked) | ({"metric_sums": exact["metric_sums"]} if "metrics" in asked else {})
    assert got.keys() == reference.keys() == {*truth, "num_nonfinite"}
    for name, value in truth.items():
        assert (got[name].dtype, got[name].shape) == (reference[name].dtype, reference[name].shape), name
        assert_as_exact(got[name], reference[name], value.detach(), name)
    assert torch.equal(got["num_nonfinite"], torch.zeros(len(LENGTHS), dtype=torch.int32))
    assert (got["coefficients"][~tokens.loss_mask] == 0).all()
    if "metrics" in asked:
        found = finalise_metrics(PolicyStatistics(got["metric_sums"], has_entropy=False))
        assert not can_clip(kind) or 0.05 < found["policy/clipped_ratio_fraction"] < 0.8, (
            "the test means nothing without a clipped token"
        )
    if "kl" in asked and "entropy" in asked:
        again = numbers(run(reduce_loss_triton, kind, tokens, **asked))
        assert all(torch.equal(again[name], value) for name, value in got.items())


@pytest.mark.parametrize("kind", ["grpo", "gspo", "dppo_kl"])
def test_no_log_ratio_is_too_large(kind):
    """Each twin at such ratios: test_loss_contract.py.

    FB-59: exp before clip, or 0 x inf; A = 0 gives exactly 0, and a saturated ratio no gradient of the ratio."""
    cases = [(log_ratio, a) for log_ratio in (-1e4, -100.0, 100.0, 1e4) for a in (-1.0, 0.0, 1.0)]
    tokens = make_tokens(kind, [1] * len(cases), tail=0, fully_masked=None)
    tokens = replace(
        tokens,
        log_probs=torch.full_like(tokens.log_probs, -1.0),
        old_log_probs=-1.0 - torch.tensor([log_ratio for log_ratio, _ in cases]),
        loss_mask=torch.ones_like(tokens.loss_mask),
        advantages=torch.tensor([a for _, a in cases]),
    )
    parts = run(reduce_loss_triton, kind, tokens, metrics="basic")
    assert torch.isfinite(parts.metric_sums.values).all()
    truth = loop_parts(kind, tokens, {})
    assert (parts.coefficients.cpu()[truth["coefficients"] == 0] == 0).all()
    torch.testing.assert_close(parts.coefficients.cpu().double(), truth["coefficients"], rtol=1e-6, atol=0)
    # e^20 in float32: the exponent's own rounding is 20 x 2^-24, an ulp or two of exp beside it.
    assert parts.loss.item() == pytest.approx(truth["loss"].item(), rel=4e-6, abs=1e-6)
    zeros = replace(tokens, advantages=torch.zeros(len(cases)))
    if not get_policy_loss(kind).zero_advantage_has_no_gradient:
        return
    assert run(reduce_loss_triton, kind, zeros).loss.item() == 0.0


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
        want = run(reduce_loss_triton, "gspo", plain, **asked, **given)
        assert_equal(run(reduce_loss_triton, "gspo", changed, **asked, **{n: x.int() for n, x in given.items()}), want)


def test_varying_advantages_are_counted_where_nobody_looks(monkeypatch):
    """1e-3 in one token; the device counts the whole document, without the CPU's look at it."""
    for name in ("raise_on_bad_data", "raise_on_nonfinite"):
        monkeypatch.setattr(reduce_triton, name, lambda *arguments: None)
    tokens = make_tokens("gspo")
    varying = tokens.token_advantages.clone()
    varying[next(t for t in tokens.documents()[4] if tokens.loss_mask[t])] += 1e-3
    found = run(reduce_loss_triton, "gspo", replace(tokens, token_advantages=varying), per="token").num_nonfinite
    assert found.tolist() == [0, 0, 0, 0, COUNTS[4], 0, 0]


def test_a_loss_without_a_twin_launches_no_kernel():
    """A loss that is a function of torch tensors alone is computed in torch, whatever the backend."""
    alone = replace(get_policy_loss("gspo"), triton=None)
    with counted_launches() as launches:
        got = run(lambda _, *others: reducer_of(alone, others[-1])(alone, *others), "gspo", make_tokens("gspo"))
    assert launches == []
    assert_equal(got, run(reduce_loss_torch, "gspo", make_tokens("gspo")))


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


@pytest.mark.kernel
@pytest.mark.skipif(torch.cuda.is_available(), reason="a compiled kernel keeps the number that it was compiled with")
@pytest.mark.parametrize("num_columns", [33, 63, 64])
def test_the_last_of_many_columns_is_the_maximum_that_the_table_says(monkeypatch, num_columns):
    """A row of the table that is a maximum is never summed in silence: not the 33rd one; the 64th, without a bit, is refused."""
    monkeypatch.setattr(reduce_triton, "NUM_METRIC_SUMS", reduce_triton.tl.constexpr(num_columns))
    monkeypatch.setattr(reduce_triton, "MAX_COLUMNS", reduce_triton.tl.constexpr(1 << (num_columns - 1)))
    found = torch.zeros(num_columns).double()
    with pytest.raises(Exception, match="63 bits") if num_columns > 63 else contextlib.nullcontext():
        reduce_triton.finish_kernel[(1 + num_columns,)](
            TERMS=torch.ones(2, 3).double(),
            DOCUMENT_METRIC_SUMS=torch.ones(2, num_columns).double(),
            LOSS=torch.zeros(()),
            TERMS_OUT=torch.zeros(3),
            METRIC_SUMS=found,
            kl_coefficient=0.0,
            entropy_coefficient=0.0,
            num_documents=2,
            BLOCK=4,
        )
        assert found.tolist()[-1] == 1.0
