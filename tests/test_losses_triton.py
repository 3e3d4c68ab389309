"""The loss kernels on [T] and [N] numbers against their torch twin and float64 loops; interpreted here, compiled on a GPU."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, fields, replace

import pytest
import torch
import torch.distributed as dist
from helpers import KERNEL_DEVICE, REFERENCES, counted_collectives, counted_launches, error_of, loop_sample, random_batch, zigzag
from loss_backends import LOSSES
from sass_record import TorchOperations
from torch import Tensor

from megatron_rl.config import Backend
from megatron_rl.layout.groups import SINGLE
from megatron_rl.loss_hub import get_policy_loss, policy_loss_names
from megatron_rl.losses.inputs import prepare_inputs
from megatron_rl.losses.options import LossOptions, resolve_options
from megatron_rl.losses.reduce_torch import LossResult, reduce_loss_torch, reducer_of
from megatron_rl.metrics import STATISTICS, PolicyStatistics, combine_statistics, finalise_metrics
from megatron_rl.testing.ranks import RankPool

pytest.importorskip("triton")
import megatron_rl.losses.reduce_triton as reduce_triton
from megatron_rl.losses.reduce_triton import document_stats_kernel, reduce_loss_triton

pytestmark = pytest.mark.kernel
KINDS = tuple(name for name in policy_loss_names() if get_policy_loss(name).triton)
# Small, so that documents of a few tokens have several blocks; some of the ratios are clipped.
BLOCK, LOW, HIGH = 8, 0.1, 0.15
# No token, one, one less than a block, a block, one more, two and a bit, and one that is masked altogether.
LENGTHS, FULLY_MASKED, TAIL = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3, 5], 6, BLOCK + 3


@dataclass(frozen=True)
class Tokens:
    """Everything that a loss can be given, float32."""

    lengths: list[int]
    log_probs: Tensor  # [T]
    old_log_probs: Tensor | None  # [T]
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


def run(twin, kind: str, tokens: Tokens, *, device: str = KERNEL_DEVICE, cp_group=SINGLE, low: float = LOW, **asked) -> LossResult:
    """One twin on what is asked for: per="token", counts, importance, kl, entropy, metrics, high."""
    per, to = asked.get("per", "sample"), lambda x: None if x is None else x.to(device)
    options = LossOptions(
        clip_ratio_low=low,
        clip_ratio_high=asked.get("high", HIGH),
        token_counts=asked.get("counts"),
        advantages_per=per,
        importance_weights=to(tokens.importance_weights) if asked.get("importance") else None,
        ref_log_probs=to(tokens.ref_log_probs),
        regularizer_weights=to(tokens.regularizer_weights),
        kl_coefficient=asked.get("kl", 0.0),
        entropy_coefficient=asked.get("entropy", 0.0),
        metrics=asked.get("metrics", "none"),
        check_ranks=False,
    )
    inputs = prepare_inputs(
        tokens.log_probs.numel(),
        torch.device(device) if device == "cpu" else to(tokens.log_probs).device,
        tokens.log_probs.dtype,
        to(tokens.old_log_probs),
        to(tokens.token_advantages if per == "token" else tokens.advantages),
        to(tokens.loss_mask),
        tokens.bounds(),
        to(tokens.token_weights),
        options,
        ranks_must_agree=False,
    )
    loss, size = get_policy_loss(kind), {"block": BLOCK} if twin is reduce_loss_triton else {}
    settings = resolve_options(loss, options, SINGLE, cp_group, Backend.TRITON)
    return twin(loss, to(tokens.log_probs), to(tokens.entropy), inputs, settings, **size)


def numbers(parts: LossResult) -> dict[str, Tensor]:
    """What is not None, on the CPU."""
    found = {field.name: getattr(parts, field.name) for field in fields(parts)}
    if parts.statistics is not None:
        found["statistics"] = parts.statistics.values
    return {name: value.cpu() for name, value in found.items() if value is not None}


def assert_equal(got: LossResult, want: LossResult) -> None:
    got, want = numbers(got), numbers(want)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def loop_parts(kind: str, tokens: Tokens, asked: dict) -> dict[str, Tensor]:
    """loss, its terms and its derivatives, in float64 by loops that autograd differentiates; on-policy old ones are constants."""
    leaf, entropy = (x.double().requires_grad_() for x in (tokens.log_probs, tokens.entropy))
    old = tokens.log_probs if tokens.old_log_probs is None else tokens.old_log_probs
    zero = leaf[:0].sum() + entropy[:0].sum()
    policy, kl, bonus = zero, zero, zero
    for i, document in enumerate(tokens.documents()):
        live = [t for t in document if tokens.loss_mask[t]]
        advantages = [tokens.token_advantages[t] if asked.get("per") == "token" else tokens.advantages[i] for t in live]
        values = loop_sample(kind, [leaf[t] for t in live], [old[t] for t in live], advantages, LOW, HIGH)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", ROWS)
def test_the_kernels_are_as_exact_as_the_torch_twin(kind, asked):
    """FB-34, FB-62, FB-63, FB-64, FB-80: loss, terms, coefficients against a loop, statistics against the twin in float64, for each
    optional input; lengths around a block, no token at all, one masked altogether, a tail."""
    tokens = make_tokens(kind)
    got, reference = (numbers(run(twin, kind, tokens, **asked)) for twin in (reduce_loss_triton, reduce_loss_torch))
    doubled = replace(tokens.change(Tensor.double), **{n: getattr(tokens, n).double() for n in ("advantages", "token_weights")})
    exact = numbers(run(reduce_loss_torch, kind, doubled, device="cpu", **asked))
    truth = loop_parts(kind, tokens, asked) | ({"statistics": exact["statistics"]} if "metrics" in asked else {})
    assert got.keys() == reference.keys() == {*truth, "num_nonfinite"}
    for name, value in truth.items():
        assert (got[name].dtype, got[name].shape) == (reference[name].dtype, reference[name].shape), name
        assert_as_exact(got[name], reference[name], value.detach(), name)
    assert torch.equal(got["num_nonfinite"], torch.zeros(len(LENGTHS), dtype=torch.int32))
    assert (got["coefficients"][~tokens.loss_mask] == 0).all()
    if "metrics" in asked:
        found = finalise_metrics(PolicyStatistics(got["statistics"], has_entropy=False))
        assert 0.05 < found["policy/clipped_ratio_fraction"] < 0.8, "the test means nothing without a clipped token"


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_the_ratio_is_exactly_one(kind):
    """FB-39: no old log-probabilities: values -A, coefficients -w A, nothing is clipped even at distance 0."""
    tokens = replace(make_tokens(kind), old_log_probs=None)
    parts = run(reduce_loss_triton, kind, tokens, metrics="basic", low=0.0, high=0.0)
    wanted = torch.zeros_like(tokens.log_probs)
    for i, document in enumerate(tokens.documents()):
        wanted[document] = -tokens.token_weights[i] * tokens.advantages[i] * tokens.loss_mask[document]
    assert torch.equal(parts.coefficients.cpu(), wanted)
    values = dict(zip(STATISTICS, parts.statistics.values.tolist(), strict=True))
    assert (
        values["ratio_new_old_sum"]
        == values["num_ratios"]
        == pytest.approx(5 if REFERENCES[kind][0] == "sequence" else COUNTS.sum().item())
    )
    assert values["clipped_ratio_fraction"] == values["kl_new_old"] == 0.0


@pytest.mark.parametrize("kind", ["grpo", "gspo", "cispo"])
def test_value_by_hand(kind):
    """FB-06, FB-62: log-ratios (0, log 2), clip 0.2 / 0.25, w = 1/2; A = 1 and A = -1 as two documents.

    GRPO: A = 1: values -1, -1.25; derivatives -1, 0. A = -1: values 1, 2; derivatives 1, 2.
    CISPO: weights 1 and 1.25 on both documents, which have the same log-probabilities: the values cancel, the derivatives do not.
    GSPO: s = sqrt 2. A = 1: -1.25 twice, clipped. A = -1: sqrt 2 twice, derivative sqrt 2 for each token.
    """
    new = torch.tensor([-1.0, -1.0 + math.log(2)] * 2)
    tokens = replace(
        make_tokens(kind, [2, 2], tail=0, fully_masked=None),
        log_probs=new,
        old_log_probs=torch.full((4,), -1.0),
        loss_mask=torch.ones(4, dtype=torch.bool),
        advantages=torch.tensor([1.0, -1.0]),
        token_weights=torch.full((2,), 0.5),
    )
    parts = run(reduce_loss_triton, kind, tokens, low=0.2, high=0.25)
    root = math.sqrt(2)
    loss, coefficients = {
        "grpo": (0.5 * (-2.25 + 3), [-0.5, 0.0, 0.5, 1.0]),
        "gspo": (0.5 * (-2.5 + 2 * root), [0.0, 0.0, root / 2, root / 2]),
        "cispo": (0.0, [-0.5, -0.625, 0.5, 0.625]),
    }[kind]
    # float32: the logarithm of 2 and an exponential.
    assert parts.loss.item() == pytest.approx(loss, abs=1e-6)
    assert parts.coefficients.tolist() == pytest.approx(coefficients, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per", ["sample", "token"])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e30])
def test_masked_positions_and_padding_may_hold_anything(kind, per, junk):
    """FB-56, FB-57, FB-63: bit-equal to clean input, for every input and output; masked documents' numbers too."""
    clean = make_tokens(kind)
    dirty = clean.change(lambda x: torch.where(clean.loss_mask & (torch.arange(len(x)) < sum(LENGTHS)), x, junk))
    numbers_of_masked = {name: getattr(clean, name).clone() for name in ("advantages", "token_weights", "regularizer_weights")}
    numbers_of_masked["advantages"][FULLY_MASKED] = junk
    if KERNEL_DEVICE == "cuda":  # On the CPU weights that are not finite are refused before.
        numbers_of_masked["token_weights"][FULLY_MASKED] = numbers_of_masked["regularizer_weights"][FULLY_MASKED] = junk
    dirty = replace(dirty, **numbers_of_masked)
    assert_equal(
        run(reduce_loss_triton, kind, dirty, per=per, **EVERYTHING), run(reduce_loss_triton, kind, clean, per=per, **EVERYTHING)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_tail_of_any_length_is_zero_and_changes_nothing(kind):
    """FB-63: the program behind the last document writes each of its elements (fresh memory is NaN here)."""
    size = sum(LENGTHS)
    want = numbers(run(reduce_loss_triton, kind, make_tokens(kind, tail=0), **EVERYTHING))
    for tail in (1, 2 * BLOCK + 1):
        tokens = make_tokens(kind, tail=0).change(lambda x, tail=tail: torch.cat([x, torch.full((tail,), math.nan)]))
        tokens = replace(tokens, loss_mask=torch.cat([tokens.loss_mask, torch.ones(tail, dtype=torch.bool)]))
        got = numbers(run(reduce_loss_triton, kind, tokens, **EVERYTHING))
        for name in ("coefficients", "entropy_coefficients"):
            assert (got[name][size:] == 0).all()
            got[name] = got[name][:size]
        assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("kind", KINDS)
def test_no_log_ratio_is_too_large(kind):
    """FB-59: exp before clip, or 0 x inf; A = 0 gives exactly 0, and a saturated ratio no gradient of the ratio."""
    cases = [(log_ratio, a) for log_ratio in (-1e4, -100.0, 100.0, 1e4) for a in (-1.0, 0.0, 1.0)]
    tokens = make_tokens(kind, [2] * len(cases), tail=0, fully_masked=None)
    log_ratios = torch.tensor([log_ratio for log_ratio, _ in cases for _ in range(2)])
    tokens = replace(
        tokens,
        log_probs=torch.full_like(tokens.log_probs, -1.0),
        old_log_probs=-1.0 - log_ratios,
        loss_mask=torch.ones_like(tokens.loss_mask),
        advantages=torch.tensor([a for _, a in cases]),
    )
    parts = run(reduce_loss_triton, kind, tokens, metrics="basic")
    assert torch.isfinite(parts.statistics.values).all()
    truth = loop_parts(kind, tokens, {})
    assert (parts.coefficients.cpu()[truth["coefficients"] == 0] == 0).all()
    torch.testing.assert_close(parts.coefficients.cpu().double(), truth["coefficients"], rtol=1e-6, atol=0)
    # e^20 in float32: the exponent's own rounding is 20 x 2^-24, an ulp or two of exp beside it.
    assert parts.loss.item() == pytest.approx(truth["loss"].item(), rel=4e-6, abs=1e-6)
    zeros = replace(tokens, advantages=torch.zeros(len(cases)))
    assert run(reduce_loss_triton, kind, zeros).loss.item() == 0.0


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
@pytest.mark.parametrize(("log_ratio", "advantage"), [(0.3, 1.0), (-0.3, -1.0)])
def test_a_ratio_exactly_on_the_edge_keeps_its_coefficient(kind, log_ratio, advantage):
    """FB-62: low != high, both signs; one step of float32 beyond the edge it is gone. The edge is the kernel's own ratio."""
    tokens = replace(
        make_tokens(kind, [1], tail=0, fully_masked=None),
        log_probs=torch.tensor([-1.0]),
        old_log_probs=torch.tensor([-1.0 - log_ratio]),
        loss_mask=torch.ones(1, dtype=torch.bool),
        advantages=torch.tensor([advantage]),
    )
    wide = run(reduce_loss_triton, kind, tokens, metrics="basic", low=0.9, high=9.0)
    edge = dict(zip(STATISTICS, wide.statistics.values.tolist(), strict=True))["ratio_new_old_sum"]
    assert edge == pytest.approx(math.exp(log_ratio), rel=1e-6)
    for step, is_alive in ((0.0, True), (2.0**-23 if advantage > 0 else 2.0**-24, False)):
        clip = {"low": 0.01, "high": edge - 1 - step} if advantage > 0 else {"low": 1 - edge - step, "high": 0.01}
        assert bool((run(reduce_loss_triton, kind, tokens, **clip).coefficients != 0).all()) == is_alive, step


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_and_strides_of_the_callers_tensors_do_not_matter(kind):
    """FB-80: bf16, float64, int32 counts and strided or expanded tensors give what plain ones of the same numbers give."""
    tokens = make_tokens(kind)
    tokens = replace(
        tokens.change(lambda x: x.bfloat16().float()), **{n: getattr(tokens, n).bfloat16().float() for n in ("advantages",)}
    )
    want = run(reduce_loss_triton, kind, tokens, **EVERYTHING, counts=COUNTS)
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
    assert_equal(run(reduce_loss_triton, kind, odd, **EVERYTHING, counts=COUNTS.int()), want)
    ones = replace(tokens, importance_weights=torch.ones_like(tokens.importance_weights))
    expanded = replace(tokens, importance_weights=torch.ones(1).expand_as(tokens.importance_weights))
    assert_equal(run(reduce_loss_triton, kind, expanded, importance=True), run(reduce_loss_triton, kind, ones, importance=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[3, 2], [0, 0], []], ids=["all masked", "no token", "no document"])
def test_nothing_to_do_gives_zeros(kind, lengths):
    """FB-25, FB-45, FB-55: no 0 / 0, and the neutral element of each statistic."""
    tokens = make_tokens(kind, lengths, tail=2, fully_masked=None)
    tokens = replace(tokens, loss_mask=torch.zeros_like(tokens.loss_mask))
    got = run(reduce_loss_triton, kind, tokens, **EVERYTHING)
    assert_equal(got, run(reduce_loss_torch, kind, tokens, **EVERYTHING))
    assert got.loss.item() == 0.0 and (got.coefficients == 0).all()


def test_two_runs_give_the_same_bits():
    """FB-83: sums have one order; atomic additions do not."""
    tokens = make_tokens("gspo")
    assert_equal(run(reduce_loss_triton, "gspo", tokens, **EVERYTHING), run(reduce_loss_triton, "gspo", tokens, **EVERYTHING))


FAULTS = ("log_probs", "old_log_probs", "advantages", "token_advantages", "importance_weights", "ref_log_probs")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("tensor", FAULTS)
def test_a_value_that_is_not_finite_is_counted_and_on_the_cpu_raises(kind, value, tensor):
    """FB-58, FB-41: the words of the torch twin, after the all-reduce; on CUDA the same count and no look."""
    tokens, asked = make_tokens(kind), {"per": "token" if tensor == "token_advantages" else "sample", "importance": True, "kl": 0.1}
    bad = getattr(tokens, tensor).clone()
    document = tokens.documents()[4]
    bad[4 if tensor == "advantages" else next(t for t in document if tokens.loss_mask[t])] = value
    tokens = replace(tokens, **{tensor: bad})
    if KERNEL_DEVICE == "cuda":
        got, want = (run(twin, kind, tokens, **asked).num_nonfinite for twin in (reduce_loss_triton, reduce_loss_torch))
        assert torch.equal(got, want) and got[4] > 0 and (got > 0).sum() == 1
        return
    got, want = (error_of(lambda twin=twin: run(twin, kind, tokens, **asked)) for twin in (reduce_loss_triton, reduce_loss_torch))
    assert got == want != ""
    assert got.startswith(f"DataError: document 4 of the micro-batch has {COUNTS[4] if tensor == 'advantages' else 1} unmasked")


def test_advantages_that_vary_inside_a_sample_stop_a_sequence_level_loss():
    """FB-68: 1e-3 in one token; on the device the whole document counts as non-finite."""
    tokens = make_tokens("gspo")
    token = next(t for t in tokens.documents()[4] if tokens.loss_mask[t])
    varying = tokens.token_advantages.clone()
    varying[token] += 1e-3
    tokens = replace(tokens, token_advantages=varying)
    with contextlib.nullcontext() if KERNEL_DEVICE == "cuda" else pytest.raises(ValueError, match="vary inside document 4"):
        assert run(reduce_loss_triton, "gspo", tokens, per="token").num_nonfinite[4] == COUNTS[4]


def look_at_nothing(patch) -> None:
    """As on CUDA."""
    for name in ("raise_on_bad_data", "raise_on_nonfinite"):
        patch.setattr(reduce_triton, name, lambda *arguments: None)


def test_varying_advantages_are_counted_where_nobody_looks(monkeypatch):
    """FB-68: the device's count without the CPU's look at it."""
    look_at_nothing(monkeypatch)
    tokens = make_tokens("gspo")
    varying = tokens.token_advantages.clone()
    varying[next(t for t in tokens.documents()[4] if tokens.loss_mask[t])] += 1e-3
    found = run(reduce_loss_triton, "gspo", replace(tokens, token_advantages=varying), per="token").num_nonfinite
    assert found.tolist() == [0, 0, 0, 0, COUNTS[4], 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_cost_one_launch_and_nothing_where_nobody_asks(kind):
    first, last = ["document_stats_kernel", "loss_and_coefficients_kernel"], ["finish_kernel"]
    for asked, more in (
        ({}, []),
        ({"metrics": "basic"}, ["document_statistics_kernel"]),
        (EVERYTHING, ["document_statistics_kernel"]),
    ):
        with counted_launches() as launches:
            run(reduce_loss_triton, kind, make_tokens(kind), **asked)
        assert launches == first + more + last


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_without_a_twin_is_computed_in_torch(kind):
    """It is a function of torch tensors: no kernel computes it, whatever the backend."""
    alone = replace(get_policy_loss(kind), triton=None)
    with counted_launches() as launches:
        got = run(lambda _, *others: reducer_of(alone, others[-1])(alone, *others), kind, make_tokens(kind))
    assert launches == []
    assert_equal(got, run(reduce_loss_torch, kind, make_tokens(kind)))


@pytest.mark.parametrize("loss", [LOSSES[kind] for kind in KINDS], ids=KINDS)
@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_backward_is_a_multiplication_for_each_coefficient_and_one_kernel(monkeypatch, loss, coefficient):
    """The first `ones_like` is autograd's own. tests/test_kernel_code.py counts what forward launches beside its kernels."""
    batch = random_batch([3, 4], num_masked=(1, 0))
    batch = replace(batch, logits=batch.logits.float().to(KERNEL_DEVICE), labels=batch.labels.to(KERNEL_DEVICE))
    batch = replace(batch, **{n: getattr(batch, n).to(KERNEL_DEVICE) for n in ("old_log_probs", "advantages", "loss_mask")})
    options = {"entropy_coefficient": coefficient, "regularizer_weights": batch.token_weights, "backend": "triton"}
    output = loss(batch.logits.requires_grad_(), *batch.arguments(), **options)
    launches: list[str] = []
    operations: list[str] = []
    # The interpreter is made of torch operations: nothing is executed.
    monkeypatch.setattr(type(document_stats_kernel), "run", lambda kernel, *a, **k: launches.append(kernel.fn.__name__))
    with TorchOperations(operations):
        output.loss.backward()
    # Fresh memory is filled with NaN by conftest.py.
    found = [name for name in operations if not name.startswith("fill_")]
    assert launches == ["logits_gradient_kernel"]
    assert found == ["ones_like.default"] + ["mul.Tensor"] * (2 if coefficient else 1)


class PretendedGroup:
    """A cp rank of two in this process."""

    def __init__(self, rank: int):
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2


def slice_of(tokens: Tokens, cp_rank: int) -> tuple[Tokens, list[int]]:
    """This cp rank's tokens of each document, and their positions; documents of one token lie on one rank."""
    dealt = [zigzag(document, cp_rank, 2) for document in tokens.documents()]
    flat = [t for document in dealt for t in document]
    mine = tokens.change(lambda x: x[flat])
    return replace(mine, lengths=[len(document) for document in dealt], loss_mask=tokens.loss_mask[flat]), flat


def assert_ranks_are_the_whole(ranks: list[tuple[dict[str, Tensor], list[int]]], whole: dict[str, Tensor]) -> None:
    # Halves of a float64 sum: one rounding to float32 each.
    for name in ("loss", "policy_loss", "kl_loss", "entropy"):
        torch.testing.assert_close(sum(found[name] for found, _ in ranks), whole[name], rtol=1e-6, atol=1e-6)
    for found, flat in ranks:
        for name in ("coefficients", "entropy_coefficients"):
            torch.testing.assert_close(found[name], whole[name][flat], rtol=1e-6, atol=1e-7)
        assert torch.equal(found["num_nonfinite"], whole["num_nonfinite"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per", ["sample", "token"])
def test_the_slices_of_two_cp_ranks_add_up_to_the_whole(monkeypatch, kind, per):
    """FB-28, FB-67: in one process, on any device: the sums of both ranks, added, are what each of them reads."""
    tokens, seen = make_tokens(kind, tail=0), []
    asked = {**EVERYTHING, "per": per, "counts": tokens.counts() if per == "token" else None}
    whole = run(reduce_loss_triton, kind, tokens, **asked)
    slices = [slice_of(tokens, rank) for rank in range(2)]

    def run_all(reduce) -> list[LossResult]:
        monkeypatch.setattr(reduce_triton, "all_reduce_sum", reduce)
        return [run(reduce_loss_triton, kind, own, cp_group=PretendedGroup(r), **asked) for r, (own, _) in enumerate(slices)]

    with monkeypatch.context() as alone:  # one rank's sums look like bad data
        look_at_nothing(alone)
        run_all(lambda sums, group: seen.append(sums.clone()) or sums)
    parts = run_all(lambda sums, group: seen[0] + seen[1])
    assert seen[0].dtype == torch.float64
    assert_ranks_are_the_whole([(numbers(p), flat) for p, (_, flat) in zip(parts, slices, strict=True)], numbers(whole))
    combined = combine_statistics([p.statistics for p in parts])
    torch.testing.assert_close(combined.values, whole.statistics.values, rtol=1e-6, atol=1e-6)


def on_a_cp_rank(rank: int, kind: str) -> tuple[dict[str, Tensor], list[int], list, str]:
    own, flat = slice_of(make_tokens(kind, tail=0), rank)
    with counted_collectives() as calls:
        parts = run(reduce_loss_triton, kind, own, cp_group=dist.group.WORLD, **EVERYTHING)
    bad = own.log_probs.clone()
    if rank == 1:
        bad[own.loss_mask.nonzero()[0]] = math.nan
    told = error_of(lambda: run(reduce_loss_triton, kind, replace(own, log_probs=bad), cp_group=dist.group.WORLD))
    return numbers(parts), flat, [(name, shape) for name, shape, _ in calls], told


@pytest.mark.skipif(KERNEL_DEVICE == "cuda", reason="gloo ranks are forked, which a process that has used CUDA cannot be")
def test_gloo_ranks_reduce_once_and_raise_together():
    """FB-27, FB-58: one all-reduce of [N, k]; a NaN on one rank stops both, and neither waits for the other."""
    with RankPool(2, use_megatron=False) as pool:
        for kind in KINDS:
            width = 2 if REFERENCES[kind][0] == "token" else 4  # not finite, counts; log-ratio, importance
            ranks = pool.run(on_a_cp_rank, kind)
            whole = numbers(run(reduce_loss_triton, kind, make_tokens(kind, tail=0), **EVERYTHING))
            assert_ranks_are_the_whole([(found, flat) for found, flat, _, _ in ranks], whole)
            assert [calls for _, _, calls, _ in ranks] == [[("all_reduce", (len(LENGTHS), width))]] * 2
            assert all(" unmasked tokens with a value that is not finite" in told for _, _, _, told in ranks)
            assert "in log_probs" in ranks[1][3] and "on another context-parallel rank" in ranks[0][3]


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [LOSSES[kind] for kind in KINDS], ids=KINDS)
def test_a_cuda_graph_replays_loss_and_gradient(loss):
    """No launch waits for the host, allocates outside the pool or looks at a value: capture would fail."""
    batch = random_batch([5, 1, 9, 3], vocab_size=1000, seed=50)
    static = batch.logits.float().cuda().requires_grad_()
    arguments = [x.cuda() if x.dtype != torch.float64 else x.float().cuda() for x in batch.arguments()]

    def step():
        static.grad = None
        output = loss(static, *arguments, metrics="basic", tp_group=SINGLE, cp_group=SINGLE)
        output.loss.backward()
        return output.loss, static.grad

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        static.copy_(random_batch([5, 1, 9, 3], vocab_size=1000, seed=51).logits)
    graph.replay()
    replayed = [x.detach().clone() for x in captured]
    assert all(torch.equal(found, want) for found, want in zip(replayed, step(), strict=True))
