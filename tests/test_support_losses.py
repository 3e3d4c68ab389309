"""Losses over the ids that a sampler kept: what the generated steps do not see. Bits, devices, ranks of processes, bad values.

tests/test_generated_steps.py has losses, aggregations, corrections and KL terms with sets on each layout.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from helpers import CLIP, KERNEL_DEVICE, Batch, random_batch, without_needless_clip
from simulated_cuda import simulated_cuda
from simulated_ranks import groups_of_ranks, on_simulated_ranks
from test_log_probs import ON_BACKENDS, ON_TRITON
from torch import Tensor

from megatron_rl.declare import policy_loss_names
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.metrics.step import finalise_metrics, report_pairs
from megatron_rl.ops.assumed_scale import AssumedScale
from megatron_rl.ops.backends import is_interpreted
from megatron_rl.policy_loss import policy_loss
from megatron_rl.policy_loss.api import PolicyLossOutput
from megatron_rl.testing.ranks import run_ranks

V, SOME = 11, ("grpo", "gspo", "gspo_token")


@pytest.fixture(params=ON_BACKENDS)
def backend(request) -> str:
    return request.param


def float32(batch: Batch) -> Batch:
    names = ("logits", "old_log_probs", "advantages", "token_weights")
    return replace(batch, **{name: getattr(batch, name).float() for name in names})


def sets_of(batch: Batch, size: int) -> SamplingSupport:
    """So many ids a row, the label among them."""
    return SamplingSupport.from_lists([[(int(label) + 3 * i) % V for i in range(size)] for label in batch.labels])


def every_term(batch: Batch) -> dict:
    return {
        "importance_weights": 1.2 + torch.cos(batch.old_log_probs),
        "ref_log_probs": batch.old_log_probs - 0.1,
        "kl_coefficient": 0.2,
        "entropy_coefficient": 0.1,
        "regularizer_weights": 0.5 + torch.arange(len(batch.documents), dtype=batch.logits.dtype),
        "metrics": "with_entropy",
        "temperature": 0.7,
    }


def run(name: str, batch: Batch, backend: str = "torch", **options) -> tuple[PolicyLossOutput, Tensor]:
    leaf = batch.logits.to(KERNEL_DEVICE).clone().requires_grad_()
    there = {
        key: value.to(KERNEL_DEVICE) if isinstance(value, Tensor | SamplingSupport) else value for key, value in options.items()
    }
    arguments = [value.to(KERNEL_DEVICE) for value in batch.arguments()]
    output = without_needless_clip(policy_loss, name, leaf * 1, *arguments, backend=backend, **CLIP, **there)
    output.loss.backward()
    return output, leaf.grad.cpu()


@pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize("terms", ["alone", "every term"])
@pytest.mark.parametrize(
    ("name", "backend"),
    # Interpreted kernels take seconds: a loss of tokens, one of samples, one without a twin.
    [*((name, "torch") for name in policy_loss_names()), *(pytest.param(name, "triton", marks=ON_TRITON) for name in SOME)],
)
def test_sets_of_the_whole_vocabulary_change_nothing(name, terms, inplace, backend):
    """Two orders of the additions of a row."""
    batch = float32(random_batch([6, 3, 8]))
    options = {"inplace": inplace} | ({"metrics": "basic"} if terms == "alone" else every_term(batch))
    want, gradient = run(name, batch, backend, **options)
    got, of_sets = run(name, batch, backend, sampling_support=sets_of(batch, V), **options)
    near = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    for field in ("loss", "policy_loss", "kl_loss", "entropy", "log_probs", "num_nonfinite"):
        wanted, found = getattr(want, field), getattr(got, field)
        assert (found is None) == (wanted is None), field
        if found is not None:
            near(found, wanted)
    near(of_sets, gradient)
    near(got.metrics.values, want.metrics.values)
    metrics = finalise_metrics(got.metrics)
    assert metrics["policy/kept_ids"] == V and metrics["policy/outside_support"] == 0


def truncated(top_p: float = 0.8) -> tuple[Batch, SamplingSupport, Tensor]:
    """A batch whose tokens are drawn from what top-p keeps, and the sampler's log-probabilities over it."""
    generator = torch.Generator().manual_seed(0)
    batch = float32(random_batch([40, 60, 50], num_masked=(0, 0, 0)))
    logits = 3 * torch.randn(150, V, generator=generator)
    p, ids = logits.softmax(-1).sort(-1, descending=True)
    sizes = ((p.cumsum(-1) - p) < top_p).sum(-1)
    support = SamplingSupport.from_lists([row[:size].tolist() for row, size in zip(ids, sizes.tolist(), strict=True)])
    kept = torch.where(torch.arange(V) < sizes[:, None], p, 0.0)
    drawn = torch.multinomial(kept, 1, generator=generator)
    sampled = (kept / kept.sum(-1, keepdim=True)).gather(1, drawn)[:, 0].log()
    return replace(batch, logits=logits, labels=ids.gather(1, drawn)[:, 0], old_log_probs=sampled), support, kept.sum(-1)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_the_ratio_to_the_sampler_of_the_same_weights_is_1(name, backend):
    """Two float32 softmaxes of one row. Without the sets the ratio is the kept mass."""
    batch, support, mass = truncated()
    output, _ = run(name, batch, backend, sampling_support=support, metrics="with_entropy")
    metrics = finalise_metrics(output.metrics)
    assert metrics["policy/ratio_new_old"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["policy/clipped_ratio_fraction"] == 0.0
    means = [float(part.mean()) for part in mass.split([40, 60, 50])]
    without, _ = run("grpo", batch, backend, metrics="basic")
    assert finalise_metrics(without.metrics)["policy/ratio_new_old"] == pytest.approx(sum(means) / 3, abs=1e-6)


def test_tokens_with_one_id_have_no_gradient_and_are_counted(backend):
    batch = float32(random_batch([4, 6], num_masked=(1, 0)))
    sizes = [1 if t % 2 else 3 for t in range(10)]
    kept = [[(int(label) + 2 * i) % V for i in range(size)] for label, size in zip(batch.labels, sizes, strict=True)]
    output, gradient = run("reinforce", batch, backend, sampling_support=SamplingSupport.from_lists(kept), metrics="basic")
    is_single = torch.tensor(sizes) == 1
    assert not gradient[is_single].any() and not output.log_probs.cpu()[is_single].any()
    assert gradient[~is_single & batch.loss_mask].any(1).all()
    metrics = finalise_metrics(output.metrics)
    assert metrics["policy/num_tokens"] == 9
    assert metrics["policy/kept_ids"] == pytest.approx(((1 + 3 + 1) / 3 + (3 * 3 + 3 * 1) / 6) / 2)
    assert "policy/kept_ids" in report_pairs(output.metrics, 1)


def test_an_announced_or_assumed_factor_changes_no_bit_and_is_checked(backend):
    """One kernel that reads each row once has no sets: two kernels make the gradient, with any factor."""
    batch = float32(random_batch([5, 4]))
    shared = {"sampling_support": sets_of(batch, 3)} | every_term(batch)
    _, want = run("grpo", batch, backend, **shared)
    for factor in (1.0, AssumedScale()):
        assert torch.equal(run("grpo", batch, backend, loss_scale=factor, **shared)[1], want)
    if KERNEL_DEVICE == "cpu":
        with pytest.raises(ConfigError, match="loss_scale=2.0 was announced and backward delivers 1.0"):
            run("grpo", batch, backend, loss_scale=2.0, **shared)


@pytest.mark.skipif(KERNEL_DEVICE == "cuda", reason="on CUDA nothing is read")
def test_a_logit_outside_the_set_is_read_where_the_entropy_is(backend):
    batch = float32(random_batch([5, 4], num_masked=(0, 0)))
    batch.logits[6, (int(batch.labels[6]) + 1) % V] = math.nan
    support, terms = sets_of(batch, 3), every_term(batch)
    with pytest.raises(DataError, match="document 1 of the micro-batch has 1 unmasked tokens .* not finite, in entropy"):
        run("grpo", batch, backend, sampling_support=support, **terms)
    without = terms | {"entropy_coefficient": 0.0, "metrics": "basic"}
    output, gradient = run("grpo", batch, backend, sampling_support=support, **without)
    assert output.loss.isfinite() and gradient.isfinite().all()


@pytest.mark.skipif(KERNEL_DEVICE == "cuda", reason="on CUDA nothing is read")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_kept_logit_that_is_not_finite_is_named(value, backend):
    """-inf is a probability of 0: of the token that was drawn it is an error, of another one it is none."""
    batch = float32(random_batch([5, 4], num_masked=(0, 0)))
    label = int(batch.labels[6])
    batch.logits[6, label] = value
    with pytest.raises(DataError, match="document 1 of the micro-batch has 1 unmasked tokens .* not finite, in log_probs"):
        run("grpo", batch, backend, sampling_support=sets_of(batch, 3))
    batch.logits[6, label], batch.logits[6, (label + 3) % V] = 0.5, -math.inf
    output, gradient = run("grpo", batch, backend, sampling_support=sets_of(batch, 3))
    assert output.loss.isfinite() and gradient.isfinite().all() and gradient[6, (label + 3) % V] == 0


INTERPRETED = [pytest.mark.kernel, pytest.mark.skipif(not is_interpreted(), reason="Triton is not in its interpreter here")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("size", [1, 3, V])
@pytest.mark.parametrize("terms", ["alone", "every term"])
@pytest.mark.parametrize(("name", "on"), [("grpo", "torch"), ("gspo", "torch"), pytest.param("grpo", "triton", marks=INTERPRETED)])
def test_a_device_is_never_waited_for(name, on, terms, size):
    batch, want, gradient = float32(random_batch([5, 0, 4])), None, None
    options = {"metrics": "basic", "backend": on} | ({} if terms == "alone" else every_term(batch))
    support = sets_of(batch, size)
    want, gradient = run(name, batch, **options | {"backend": "torch"}, sampling_support=support)
    with simulated_cuda() as seen:
        there = {key: value.to("cuda") if isinstance(value, Tensor | SamplingSupport) else value for key, value in options.items()}
        arguments, leaf = [value.to("cuda") for value in batch.arguments()], batch.logits.to("cuda").requires_grad_()
        on_device = support.to(torch.device("cuda"))
        seen.clear()
        groups = {"tp_group": SINGLE, "cp_group": SINGLE}
        output = policy_loss(name, leaf * 1, *arguments, **groups, **CLIP, **there, sampling_support=on_device)
        output.loss.backward()
        assert seen == []
        loss, found = output.loss.detach().cpu(), leaf.grad.cpu()
    # Two orders of float32 additions over 9 tokens.
    torch.testing.assert_close(loss, want.loss.detach().cpu(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("kept", [[], [8, 9], [0, 0, 3], [0, 11], [-1, 0]], ids=str)
def test_on_a_device_a_wrong_set_counts_as_not_finite(kept):
    """Nothing raises there: the step is stopped by the count. Of a masked token nothing counts."""
    batch = float32(random_batch([5, 4], num_masked=(0, 1)))
    batch.labels[2] = batch.labels[5] = 0
    sets = [[int(label), (int(label) + 1) % V] for label in batch.labels]
    sets[2] = sets[5] = kept
    with simulated_cuda() as seen:
        support = SamplingSupport.from_lists(sets).to(torch.device("cuda"))
        arguments, logits = [value.to("cuda") for value in batch.arguments()], batch.logits.to("cuda")
        seen.clear()
        output = policy_loss(
            "grpo", logits, *arguments, tp_group=SINGLE, cp_group=SINGLE, metrics="basic", sampling_support=support, backend="torch"
        )
        assert seen == []
        assert output.num_nonfinite.cpu().tolist() == [1, 0]
        outside = int(output.metrics.support[-1].cpu())
    assert outside == (kept == [8, 9])


def step_of_rank(rank: int, on: str, batch: Batch, kept: list[list[int]]) -> tuple[float, Tensor]:
    """tp 2 x cp 2 in zigzag order: ranks 0 and 1 share a softmax."""
    import torch.distributed as dist

    pairs = [[dist.new_group(list(ranks)) for ranks in of_kind] for of_kind in (((0, 1), (2, 3)), ((0, 2), (1, 3)))]
    tp, cp = pairs[0][rank // 2], pairs[1][rank % 2]
    positions = [zigzag_of(document, cp.rank()) for document in batch.documents]
    flat = [t for document in positions for t in document]
    own = batch.take(positions)
    width = 6  # 12 columns, of which 11 are real
    logits = torch.cat([own.logits, torch.full((len(flat), 1), math.nan)], 1)[:, tp.rank() * width :][:, :width]
    leaf = logits.clone().requires_grad_()
    terms = {name: value for name, value in every_term(own).items()}
    options = {"vocab_size": V, "tp_group": tp, "cp_group": cp, "backend": on}
    support = SamplingSupport.from_lists(kept).take(torch.tensor(flat, dtype=torch.int64))
    output = policy_loss("gspo", leaf, *own.arguments(), sampling_support=support, **CLIP, **terms, **options)
    output.loss.backward()
    gradient = torch.zeros(len(batch.labels), 2 * width)
    gradient[flat, tp.rank() * width : (tp.rank() + 1) * width] = leaf.grad
    return float(output.loss.detach()) if tp.rank() == 0 else 0.0, gradient[:, :V]


def zigzag_of(document: list[int], rank: int) -> list[int]:
    chunk = len(document) // 4
    return document[rank * chunk : (rank + 1) * chunk] + document[(3 - rank) * chunk : (4 - rank) * chunk]


def test_ranks_of_processes_have_the_step_of_one():
    batch = float32(random_batch([8, 16, 4]))
    kept = [ids.tolist() for ids in sets_of(batch, 4).ids.split(4)]
    want, gradient = run("gspo", batch, sampling_support=SamplingSupport.from_lists(kept), **every_term(batch))
    ranks = run_ranks(functools.partial(step_of_rank, on="torch", batch=batch, kept=kept), 4, use_megatron=False)
    # Orders of float32 additions.
    assert sum(loss for loss, _ in ranks) == pytest.approx(float(want.loss.detach()), rel=1e-5)
    torch.testing.assert_close(sum(part for _, part in ranks), gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 2}, "sizes of sampling_support"),
        ({"size": None}, "whether sampling_support is given"),
    ],
    ids=str,
)
def test_ranks_with_other_sets_are_named(changes, message):
    batch = float32(random_batch([4, 4]))
    terms = {k: v for k, v in every_term(batch).items() if k != "metrics"}

    def one(groups) -> None:
        own = changes if groups.tp.rank() else {}
        size = own.get("size", 3)
        support = {} if size is None else {"sampling_support": sets_of(batch, size)}
        shard = torch.cat([batch.logits, batch.logits[:, :1]], 1)[:, 6 * groups.tp.rank() :][:, :6]
        options = {"tp_group": groups.tp, "cp_group": groups.cp, "check_ranks": True, "vocab_size": V}
        policy_loss("grpo", shard, *batch.arguments(), **options, **terms, **support)

    with pytest.raises(DataError, match=f"{message} differs between tensor-parallel ranks"):
        on_simulated_ranks(one, groups_of_ranks(tp=2))
