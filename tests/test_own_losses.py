"""A loss of a user's own, in a module of their own: through logits, kernels, the fused head, ranks and the launch line."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import textwrap
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import (
    CLIP,
    EXACT,
    KERNEL_DEVICE,
    Batch,
    assert_same,
    by_loop,
    loop_entropy,
    loop_log_probs,
    loop_sample,
    random_batch,
    run_loss,
    with_gradient,
    zigzag,
)
from host_cases import CLIPS, HostCase
from host_cases import truth as truth_of_dense_step
from host_ranks import run_cases
from launches import counted_launches
from linear_cases import budget, by_logits, head_batch, on_device, run, seen, worst_error
from loss_backends import KERNEL, TRITON, over_backends
from nemo_rl_cases import master_config
from trainer_cases import metrics_of, run_loop

from megatron_rl.arguments import add_megatron_rl_args, validate_megatron_rl_args
from megatron_rl.config import Route
from megatron_rl.declare import clip_of, evaluate, get_policy_loss, register_policy_loss
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import nemo_rl
from megatron_rl.layout.groups import SINGLE
from megatron_rl.metrics.step import finalise_metrics
from megatron_rl.policy_loss import linear_policy_loss, policy_loss
from megatron_rl.policy_loss.api import loss_of_log_probs
from megatron_rl.testing.ranks import RankPool

pytestmark = pytest.mark.usefixtures("own_losses")
BATCH = random_batch([5, 1, 9, 3], seed=4)
NO_CLIP = {"clip_ratio_low": None, "clip_ratio_high": None}


def front_door(name: str):
    return functools.partial(policy_loss, name)


def fused(name: str):
    return lambda *arguments, **options: linear_policy_loss(name, *arguments, **options)


def loop_of(name: str, batch: Batch, logits: torch.Tensor, rollout: torch.Tensor | None = None) -> torch.Tensor:
    """The losses of own_losses.py as loops over samples that autograd differentiates."""
    total = logits[:0].sum()
    for document, advantage, weight in zip(batch.documents, batch.advantages, batch.token_weights, strict=True):
        own = [t for t in document if batch.loss_mask[t]]
        if not own:
            continue
        new = loop_log_probs(logits[own], batch.labels[own])
        log_ratio = new - batch.old_log_probs[own]
        if name == "own_gmpo":
            values = -advantage * torch.stack([x.clamp(-0.1, 0.15) for x in log_ratio]).mean().exp() * torch.ones_like(new)
        elif name == "own_centred_on_the_sample":
            values = -(1 + (log_ratio - log_ratio.mean()) ** 2).detach() * advantage * new
        elif name == "own_truncated":
            values = -(new - rollout[own]).detach().exp().clamp(max=1.1) * advantage * new
        else:
            if name == "own_reinforce_of_samples":
                new, log_ratio = (x.mean() * torch.ones_like(new) for x in (new, log_ratio))
            values = -advantage * new * (1 + log_ratio**2)
        total = total + weight * values.sum()
    return total


def clip_of_call(name: str) -> dict:
    return NO_CLIP if get_policy_loss(name).clip_ratios is None else CLIP


@pytest.mark.parametrize("name", ["own_reinforce", "own_reinforce_of_samples", "own_gmpo", "own_centred_on_the_sample"])
@over_backends
def test_a_loss_without_a_derivative_has_autograds(name, backend):
    """At each level, with the whole sample in between; with kernels around it, which it has no part in."""
    want = with_gradient(lambda logits: loop_of(name, BATCH, logits), BATCH.logits)
    got = backend.run(front_door(name), BATCH, metrics="basic", **clip_of_call(name))
    assert_same(got, want, **backend.tolerance)
    fraction = finalise_metrics(got[0].metrics)["policy/clipped_ratio_fraction"]
    assert (0 < fraction < 1) if name == "own_gmpo" else fraction == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
@over_backends
def test_beyond_the_bound_of_the_log_ratio_nothing_trains_whatever_a_derivative_says(level, backend):
    """e^20 squared were a gradient of 1e17. Log-ratios of 25 in one sample, and of -25 in another."""
    first, second, *_ = BATCH.documents
    old = loop_log_probs(BATCH.logits, BATCH.labels)
    old[first], old[second] = old[first] - 25, old[second] + 25
    _, gradient = backend.run(front_door(f"own_unbounded_{level}"), replace(BATCH, old_log_probs=old))
    assert not gradient[[*first, *second]].any() and gradient.any()


def test_beyond_the_bound_a_derivative_by_the_log_probability_stays():
    """A = 2, log-ratio x, log-probability -3: of -e^x A log_prob it is -A e^x, and -A e^x (1 - 3) up to the bound."""

    def both(log_ratio, advantages, log_probs):
        return -log_ratio.exp() * advantages * log_probs

    register_policy_loss("both")(both)
    x = torch.tensor([-25.0, -20.0, 1.0, 20.0, 25.0], dtype=torch.float64)
    found = evaluate(get_policy_loss("both"), x, torch.full_like(x, 2.0), torch.full_like(x, -3.0), {}, {})
    torch.testing.assert_close(found.derivative, -2 * x.exp() * torch.tensor([1.0, -2.0, -2.0, -2.0, 1.0]).double(), **EXACT)


def on_a_cp_rank(rank: int, name: str):
    import own_losses

    own_losses.declare()
    positions = [zigzag(document, rank, 2) for document in BATCH.documents]
    groups = {"cp_group": dist.group.WORLD, "tp_group": SINGLE, "advantages_per": "sample"}
    output, gradient = run_loss(front_door(name), BATCH.take(positions), metrics="basic", **groups, **clip_of_call(name))
    return output.loss.detach(), [t for document in positions for t in document], gradient


@pytest.mark.parametrize("name", ["own_gmpo", "own_centred_on_the_sample", "own_reinforce_of_samples"])
def test_a_sample_on_two_ranks_is_one_sample(name):
    """FB-109: the mean over the sample, and the gradient through it, of each rank's own tokens."""
    with RankPool(2, use_megatron=False) as pool:
        answers = pool.run(on_a_cp_rank, name)
    want, gradient = with_gradient(lambda logits: loop_of(name, BATCH, logits), BATCH.logits)
    torch.testing.assert_close(sum(answer[0] for answer in answers), want, **EXACT)
    for _, flat, part in answers:
        torch.testing.assert_close(part, gradient[flat], **EXACT)


def rollout_of(batch: Batch) -> torch.Tensor:
    return batch.old_log_probs + 0.1 * torch.sin(torch.arange(len(batch.labels), dtype=torch.float64))


@over_backends
def test_further_vectors_and_parameters_reach_the_function_and_its_twin(backend):
    rollout = rollout_of(BATCH)
    want = with_gradient(lambda logits: loop_of("own_truncated", BATCH, logits, rollout), BATCH.logits)
    vectors = {"rollout_log_probs": backend.to(rollout)}
    with counted_launches() as launches:
        got = backend.run(front_door("own_truncated"), BATCH, metrics="basic", **vectors)
    assert ("loss_and_coefficients_kernel" in launches) == (backend is TRITON)
    assert_same(got, want, **backend.tolerance)
    assert 0 < finalise_metrics(got[0].metrics)["policy/clipped_ratio_fraction"] < 1
    # A weight beyond its cap in each token is the cap; the second parameter multiplies it.
    given = {"loss_parameters": {"scale": 0.5, "ratio_cap": 1}, "rollout_log_probs": vectors["rollout_log_probs"] - 5}
    half = backend.run(front_door("own_truncated"), BATCH, **given)
    plain = with_gradient(lambda logits: loop_of("own_truncated", BATCH, logits, rollout - 5) / 2.2, BATCH.logits)
    assert_same(half, plain, **backend.tolerance)


def test_what_is_masked_of_a_further_vector_may_be_anything():
    rollout = rollout_of(BATCH)
    dirty = torch.where(BATCH.loss_mask, rollout, math.nan)
    clean, got = (run_loss(front_door("own_truncated"), BATCH, rollout_log_probs=x) for x in (rollout, dirty))
    assert torch.equal(clean[0].loss, got[0].loss) and torch.equal(clean[1], got[1])


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=KERNEL)])
def test_further_vectors_and_parameters_through_the_fused_head(backend):
    case = head_batch([9, 4, 0, 6], seed=8)
    options = {"rollout_log_probs": rollout_of(case.batch), "loss_parameters": {"ratio_cap": 1.05}, **NO_CLIP}
    want = by_logits("own_truncated", case, **options)
    if backend == "triton":
        case, options = on_device(case.to(torch.float32), options, KERNEL_DEVICE)
    got = run(fused("own_truncated"), case, backend=backend, max_logits_bytes=budget(case, 3), **options)
    assert max(worst_error(got, want).values()) < (1e-12 if backend == "torch" else 2e-6)


# What the package computes for a loss: counts and entropies

HEEDING = ("own_heeding", "own_heeding_of_samples")


def loop_of_heeding(name: str, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    total = logits[:0].sum()
    for document, advantage, weight in zip(batch.documents, batch.advantages, batch.token_weights, strict=True):
        own = [t for t in document if batch.loss_mask[t]]
        if not own:
            continue
        new, entropy = loop_log_probs(logits[own], batch.labels[own]), loop_entropy(logits[own]).detach()
        if name == "own_heeding_of_samples":
            new, entropy = (x.mean() * torch.ones_like(new) for x in (new, entropy))
        total = total - weight * ((1 + 0.1 * len(own)) * entropy * advantage * new).sum()
    return total


@pytest.mark.parametrize("name", HEEDING)
@over_backends
def test_a_loss_gets_the_counts_and_entropies_that_it_needs(name, backend):
    """At each level, in torch, in kernels and through the head, with metrics and without an entropy term."""
    want = with_gradient(lambda logits: loop_of_heeding(name, BATCH, logits), BATCH.logits)
    with counted_launches() as launches:
        got = backend.run(front_door(name), BATCH, metrics="basic")
    assert ("loss_and_coefficients_kernel" in launches) == (backend is TRITON)
    assert_same(got, want, **backend.tolerance)


@pytest.mark.parametrize("name", HEEDING)
def test_the_fused_head_gives_counts_and_entropies(name):
    """In chunks of three rows a document is in several."""
    case = head_batch([9, 4, 0, 6], seed=8)
    want = by_logits(name, case, **NO_CLIP)
    got = run(fused(name), case, max_logits_bytes=budget(case, 3), **NO_CLIP)
    assert max(worst_error(got, want).values()) < 1e-12


def heeding_on_a_rank(rank: int):
    """Of cp ranks, the first one without a token of a short sample; and of tp ranks, whose entropy needs both shards."""
    import own_losses

    own_losses.declare()
    halves = [document[len(document) // 2 * rank : len(document) // 2 if rank == 0 else None] for document in BATCH.documents]
    part, wide = BATCH.take(halves), replace(BATCH, logits=torch.nn.functional.pad(BATCH.logits, (0, 1), value=-1.0))
    shard = replace(wide, logits=wide.logits[:, 6 * rank : 6 * rank + 6])
    found = {}
    for name in HEEDING:
        over_cp = {"cp_group": dist.group.WORLD, "tp_group": SINGLE, "advantages_per": "sample"}
        over_tp = {"tp_group": dist.group.WORLD, "cp_group": SINGLE, "advantages_per": "sample"}
        output, gradient = run_loss(front_door(name), part, **over_cp)
        sharded, columns = run_loss(front_door(name), shard, **over_tp)
        found[name] = (output.loss.detach(), [t for half in halves for t in half], gradient, sharded.loss.detach(), columns)
    return found


def test_counts_and_entropies_are_right_over_ranks():
    """FB-109: token_counts count all cp ranks, and an entropy has all columns of the vocabulary."""
    with RankPool(2, use_megatron=False) as pool:
        answers = pool.run(heeding_on_a_rank)
    wide = torch.nn.functional.pad(BATCH.logits, (0, 1), value=-1.0)
    for name in HEEDING:
        want, gradient = with_gradient(lambda logits, name=name: loop_of_heeding(name, BATCH, logits), BATCH.logits)
        torch.testing.assert_close(sum(answer[name][0] for answer in answers), want, **EXACT)
        want_wide, of_wide = with_gradient(lambda logits, name=name: loop_of_heeding(name, BATCH, logits), wide)
        for rank, answer in enumerate(answers):
            _, flat, part, loss, columns = answer[name]
            torch.testing.assert_close(part, gradient[flat], **EXACT)
            torch.testing.assert_close(loss, want_wide, **EXACT)
            torch.testing.assert_close(columns, of_wide[:, 6 * rank : 6 * rank + 6], **EXACT)


def test_a_call_without_logits_has_no_entropy():
    log_probs = loop_log_probs(BATCH.logits, BATCH.labels)
    with pytest.raises(ConfigError, match="'own_heeding' needs the entropy of each token, .* call policy_loss"):
        loss_of_log_probs("own_heeding", log_probs, *BATCH.arguments()[1:])


def test_wrong_counts_of_the_caller_are_refused():
    """A token-level loss reads them before the reduction that checks them."""
    counts = torch.tensor([int(BATCH.loss_mask[document].sum()) for document in BATCH.documents])
    right = run_loss(front_door("own_heeding"), BATCH, token_counts=counts)
    torch.testing.assert_close(right[0].loss, run_loss(front_door("own_heeding"), BATCH)[0].loss, rtol=0, atol=0)
    with pytest.raises(DataError, match="token_counts says"):
        policy_loss("own_heeding", BATCH.logits, *BATCH.arguments(), token_counts=counts + 1)


def test_an_adapter_that_hands_over_rows_refuses_a_loss_of_entropies():
    with pytest.raises(ConfigError, match="own_heeding needs the entropy of each token, and NeMo-RL hands over log-probabilities"):
        nemo_rl.OFFER.choose("own_losses.heeding.sample_mean")


ROLLOUT = {"rollout_log_probs": rollout_of(BATCH)}
BEYOND, BELOW = {**ROLLOUT, "loss_parameters": {"scale": 2.5}}, {**ROLLOUT, "loss_parameters": {"ratio_cap": 0.5}}
REFUSED = [
    ("own_truncated", {}, r"'own_truncated' needs rollout_log_probs \[T\]"),
    ("own_truncated", BELOW, r"ratio_cap=0.5 .* \[1, inf\)"),
    ("own_truncated", BEYOND, r"scale=2.5 .* \[0, 2\]"),
    ("own_truncated", {**ROLLOUT, "loss_parameters": {"scale": "1"}}, "scale='1'"),
    ("own_truncated", {**ROLLOUT, "loss_parameters": {"cap": 1.0}}, "no parameter 'cap': its parameters are ratio_cap, scale"),
    ("cispo", {"loss_parameters": {"cap": 1.0}}, "'cispo' has no parameter 'cap': it has no parameters"),
    ("own_truncated", {**ROLLOUT, "clip_ratio_low": 0.1}, "clip_ratio_low=0.1: policy loss 'own_truncated' has no clip"),
    ("grpo", {"clip_ratio_c": 3.0}, "takes no keyword clip_ratio_c: .*; parameters of a loss are in loss_parameters"),
    ("grpo", {"temprature": 1.0}, "takes no keyword temprature: it takes .* temperature"),
    ("grpo", {"clip_ratio_low": 1.0}, r"clip_ratio_low=1.0 must be in \[0, 1\)"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_loss_cannot_take_is_refused_by_name(name, options, message):
    for call, operands in ((policy_loss, (BATCH.logits,)), (linear_policy_loss, (BATCH.logits, torch.eye(11).double()))):
        with pytest.raises(ConfigError, match=message):
            call(name, *operands, *BATCH.arguments(), **options)


def config_of(*argv: str):
    parser = add_megatron_rl_args(ArgumentParser(allow_abbrev=False))
    return validate_megatron_rl_args(parser.parse_args(argv), Route.TRAIN)


def test_a_launch_line_names_the_loss_its_parameters_and_its_clip():
    config = config_of("--policy-loss", "own_losses.truncated", "--scale", "0.5", "--ratio-cap=3")
    assert config.loss_parameters == {"scale": 0.5, "ratio_cap": 3.0}
    assert clip_of(config) is None
    assert config_of("--policy-loss", "own_losses.truncated").loss_parameters == {}
    assert get_policy_loss("own_losses.truncated") is get_policy_loss("own_truncated")


def test_trainers_that_hand_over_rows_ask_a_loss_of_ones_own_too():
    """Of verl, NeMo-RL, ROLL and SkyRL, whose settings no launch rule judges, NeMo-RL: all have one reader."""
    nemo_rl.read(master_config({"megatron_rl": "own_reinforce.sample_mean"}))
    with pytest.raises(ConfigError, match="policy_loss=own_centred depends at one token on the others"):
        nemo_rl.read(master_config({"megatron_rl": "own_centred.sample_mean"}))


# A file of a user; the name of the built-in loss is taken.
CISPO = """
from megatron_rl import LossValue, bounded_exp, register_policy_loss

@register_policy_loss(
    "cispo of mine",
    level="token",
    clip_ratios=(1.0, 0.28),
    triton="my_cispo_triton.cispo",
)
def cispo(log_ratio, advantages, log_probs, *, clip_ratio_low, clip_ratio_high):
    ratio = bounded_exp(log_ratio)
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    is_clipped = (ratio != weight) & (advantages != 0)
    return LossValue(-weight.detach() * advantages * log_probs, derivative=-weight * advantages, is_clipped=is_clipped)
"""
CISPO_TRITON = """
import triton
import triton.language as tl

from megatron_rl.ops.loss_triton import bounded, bounded_exp

@triton.jit
def cispo(log_ratio, advantages, log_probs, lowest_ratio, highest_ratio):
    ratio = bounded_exp(log_ratio)
    weight = bounded(ratio, lowest_ratio, highest_ratio)
    return -weight * advantages * log_probs, -weight * advantages, (ratio != weight) & (advantages != 0)
"""


@pytest.fixture
def cispo(tmp_path, monkeypatch):
    """The dotted name of a loss in a module that is not imported yet."""
    for name, text in (("my_cispo", CISPO), ("my_cispo_triton", CISPO_TRITON)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_cispo.cispo"
    for name in ("my_cispo", "my_cispo_triton"):
        sys.modules.pop(name, None)


def cispo_clip_fraction(batch: Batch) -> float:
    """At CLIP's distances: the mean over samples of the mean over tokens, by the reference."""
    shares, log_probs = [], loop_log_probs(batch.logits, batch.labels)
    for document, advantage in zip(batch.documents, batch.advantages, strict=True):
        own = [t for t in document if batch.loss_mask[t]]
        found = loop_sample("cispo", list(log_probs[own]), list(batch.old_log_probs[own]), [advantage] * len(own), 0.1, 0.15)
        shares += [sum(is_clipped for _, is_clipped, _ in found) / len(own)] if own else []
    return sum(shares) / len(shares)


@over_backends
def test_cispo_in_a_file_of_ones_own_has_gradients_metrics_and_kernels(cispo, backend):
    with counted_launches() as launches:
        got = backend.run(front_door(cispo), BATCH, metrics="basic", **CLIP)
    assert_same(got, by_loop("cispo", BATCH), **backend.tolerance)
    fraction = finalise_metrics(got[0].metrics)["policy/clipped_ratio_fraction"]
    assert fraction == pytest.approx(cispo_clip_fraction(BATCH), rel=1e-6) and 0.1 < fraction < 0.9
    assert ("loss_and_coefficients_kernel" in launches) == (backend is TRITON)
    assert get_policy_loss(cispo) is get_policy_loss("cispo of mine")
    assert clip_of(config_of("--policy-loss", cispo)) == (1.0, 0.28)


def test_cispo_in_a_file_of_ones_own_costs_the_fused_head_three_matmuls(cispo):
    case = head_batch([9, 4, 0, 6], seed=8)
    with seen(case) as record:
        got = run(fused(cispo), case, max_logits_bytes=budget(case, 3))
    assert record.rows == dict.fromkeys(("logits", "hidden", "weight"), int(case.batch.loss_mask.sum()))
    assert max(worst_error(got, by_logits("cispo", case)).values()) < 1e-12


def train_and_host_step(rank: int, folder: Path, config, builtin, case: HostCase):
    found = []
    for name, settings in (("own", config), ("built-in", builtin)):
        options = {"num_rollouts": 2, "lr": 1e-2}
        _, weights = run_loop(folder / name, settings, options)
        found.append((weights, metrics_of(folder / name)))
    return found, run_cases(rank, {}, [case])[0]


@pytest.mark.megatron
def test_cispo_in_a_file_of_ones_own_trains_in_train_and_in_an_emulated_host(cispo, tmp_path):
    """In train as the built-in one, bit for bit; in the host the step of dense logits by the reference."""
    flags = ("--clip-ratio-high", "0.001", "--samples-per-prompt", "4")
    ours, builtin = (config_of("--policy-loss", name, *flags) for name in (cispo, "cispo"))
    case = HostCase("slime", "custom_loss", "sample_mean", options=(("policy_loss", cispo),), size=2)
    with RankPool(1) as pool:
        ((own, host),) = pool.run(train_and_host_step, tmp_path, ours, builtin, case)
    for name, weight in own[0][0].items():
        assert torch.equal(weight[-1], own[1][0][name][-1]), name
    assert own[0][1] == own[1][1] and any(row["policy/clipped_ratio_fraction"] > 0 for row in own[0][1])
    assert not isinstance(host, str), host
    assert CLIPS["cispo"] == CLIPS[case.estimator]  # the host's flags
    _, gradient = truth_of_dense_step(case.aggregation, "cispo", case.has_masked_sample)
    assert float((host.gradient - gradient).abs().max() / gradient.abs().max()) < 1e-6
    _, other = truth_of_dense_step(case.aggregation, case.estimator, case.has_masked_sample)
    assert not torch.allclose(gradient, other)


def test_the_command_finds_a_module_in_the_folder_where_it_is_typed(tmp_path):
    """A console script has its own folder in front, and not the current one."""
    (tmp_path / "mine.py").write_text(
        "from megatron_rl import register_policy_loss\n\n@register_policy_loss('mine')\ndef mine(log_ratio, advantages):\n"
        "    return -advantages * log_ratio.exp()\n"
    )
    script = tmp_path / "bin" / "megatron-rl"
    script.parent.mkdir()
    script.write_text("import sys\nfrom megatron_rl.__main__ import main\nsys.exit(main())\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    command = [sys.executable, script, "explain", "--policy-loss", "mine.mine", "--response-lengths", "3,4"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
