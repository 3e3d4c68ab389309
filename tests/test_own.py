"""A loss, an estimator, a correction of a user's own, by dotted path: through logits, kernels, heads, ranks, flags and hosts."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import CLIP, EXACT, ROOT, Batch, loop_entropy, loop_log_probs, pool_of, random_batch, run_loss, with_gradient, zigzag
from host_cases import HostCase
from host_cases import truth as truth_of_dense_step
from host_ranks import run_cases
from launches import counted_launches
from loss_backends import TRITON, over_backends
from nemo_rl_cases import master_config
from torch import Tensor
from trainer_cases import metrics_of, run_loop

from megatron_rl import register_correction, register_kl_estimator
from megatron_rl.arguments import add_megatron_rl_args, validate_megatron_rl_args
from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.declare import LossValue, clip_of, evaluate, get_policy_loss, register_policy_loss
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import nemo_rl
from megatron_rl.layout.groups import SINGLE
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.metrics.step import finalise_metrics
from megatron_rl.policy_loss import importance_correction, linear_policy_loss, policy_loss
from megatron_rl.policy_loss.api import loss_of_log_probs
from megatron_rl.testing.ranks import RankPool

pytestmark = pytest.mark.usefixtures("own_losses")
BATCH = random_batch([5, 1, 9, 3], seed=4)
ROLLOUT = BATCH.old_log_probs + 0.1 * torch.sin(torch.arange(len(BATCH.labels), dtype=torch.float64))
ROLLOUT = torch.where(BATCH.loss_mask, ROLLOUT, math.nan)  # what is masked may be anything


def front_door(name: str):
    return functools.partial(policy_loss, name)


def by_its_function(name: str, batch: Batch, **numbers: float) -> tuple[Tensor, Tensor]:
    """(loss, gradient) of the function itself, by autograd: of each token, or of a sample's means."""
    loss = get_policy_loss(name)
    clips = {} if loss.clip_ratios is None else CLIP
    numbers = clips | loss.resolve_parameters(numbers)

    def total(logits: Tensor) -> Tensor:
        found = logits[:0].sum()
        for document, advantage, weight in zip(batch.documents, batch.advantages, batch.token_weights, strict=True):
            own = [t for t in document if batch.loss_mask[t]]
            if not own:
                continue
            new, ones = loop_log_probs(logits[own], batch.labels[own]), torch.ones(len(own), dtype=torch.float64)
            log_ratio = new - batch.old_log_probs[own]
            known = {"token_counts": len(own) * ones, "mean_log_ratio": log_ratio.mean() * ones}
            known |= {"entropy": loop_entropy(logits[own]).detach(), "rollout_log_probs": ROLLOUT[own]}
            given = [log_ratio, advantage * ones, new]
            if loss.token_clip is not None:
                given[0] = loss.token_clip(*given[:2], **clips)
            vectors = {need: known[need] for need in loss.needs}
            if loss.level == "sequence":
                given = [vector.mean() * ones for vector in given]
                vectors = {need: vector.mean() * ones for need, vector in vectors.items()}
            returned = loss.function(*given[: 3 if loss.takes_log_probs else 2], **vectors, **numbers)
            found = found + weight * (returned.value if isinstance(returned, LossValue) else returned).sum()
        return found

    return with_gradient(total, batch.logits)


def assert_same(got, want, **tolerance) -> None:
    """(output, gradient) of a loss against (loss, gradient)."""
    torch.testing.assert_close(got[0].loss.detach(), want[0], **tolerance)
    torch.testing.assert_close(got[1], want[1], **tolerance)


def options_of(name: str, rollout: Tensor = ROLLOUT, **numbers: float) -> dict:
    loss = get_policy_loss(name)
    options = dict(CLIP) if loss.clip_ratios is not None else {}
    if "rollout_log_probs" in loss.needs:
        options |= {"rollout_log_probs": rollout}
    return options | {"loss_parameters": numbers}


# Name -> the shares of clipped tokens that may be.
OWN = {
    "own_reinforce": (0, 0),
    "own_reinforce_of_samples": (0, 0),
    "own_gmpo": (0.01, 0.99),
    "own_centred_on_the_sample": (0, 0),
    "own_truncated": (0.01, 0.99),
    "own_heeding": (0, 0),
    "own_heeding_of_samples": (0, 0),
}
NUMBERS = {"own_truncated": {"scale": 0.5, "ratio_cap": 1.05}, "own_reinforce": {"scale": 0.7}}


@pytest.mark.parametrize(
    ("name", "numbers"),
    [*((name, {}) for name in OWN), *NUMBERS.items()],
    ids=lambda value: value if isinstance(value, str) else "",
)
@over_backends
def test_a_loss_is_its_function(name, numbers, backend):
    """At each level, with what it needs and its parameters; its Triton version where it has one, kernels around it where not."""
    options = options_of(name, backend.to(ROLLOUT), **numbers)
    with counted_launches() as launches:
        got = backend.run(front_door(name), BATCH, metrics="basic", **options)
    assert_same(got, by_its_function(name, BATCH, **numbers), **backend.tolerance)
    assert ("loss_and_coefficients_kernel" in launches) == (backend is TRITON and get_policy_loss(name).triton is not None)
    low, high = OWN[name]
    assert low <= finalise_metrics(got[0].metrics)["policy/clipped_ratio_fraction"] <= high


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


ranks = pool_of(2, use_megatron=False)
WIDE = replace(BATCH, logits=torch.nn.functional.pad(BATCH.logits, (0, 1), value=-1.0))  # for two shards of equal size


def on_a_rank(rank: int):
    """Of cp ranks, the second one without a token of the sample of one token; and of tp ranks, whose entropy needs both shards."""
    import own_losses

    own_losses.declare()
    positions = [zigzag(document, rank, 2) for document in BATCH.documents]
    flat = [t for document in positions for t in document]
    part = BATCH.take(positions)
    shard = replace(WIDE, logits=WIDE.logits[:, 6 * rank : 6 * rank + 6])
    found = {}
    for name in OWN:
        over_cp = {"cp_group": dist.group.WORLD, "tp_group": SINGLE, "advantages_per": "sample"}
        over_tp = {"tp_group": dist.group.WORLD, "cp_group": SINGLE, "advantages_per": "sample"}
        output, gradient = run_loss(front_door(name), part, **over_cp, **options_of(name, ROLLOUT[flat]))
        sharded, columns = run_loss(front_door(name), shard, **over_tp, **options_of(name))
        found[name] = (output.loss.detach(), gradient, sharded.loss.detach(), columns)
    return flat, found


def test_a_loss_is_its_function_over_ranks(ranks):
    """FB-109: the means, counts and entropies of whole samples, and the gradient through them, of each rank's own tokens."""
    answers = ranks.run(on_a_rank)
    for name in OWN:
        loss, gradient = by_its_function(name, BATCH)
        of_wide, gradient_of_wide = by_its_function(name, WIDE)
        torch.testing.assert_close(sum(found[name][0] for _, found in answers), loss, **EXACT)
        for rank, (flat, found) in enumerate(answers):
            torch.testing.assert_close(found[name][1], gradient[flat], **EXACT)
            torch.testing.assert_close(found[name][2], of_wide, **EXACT)
            torch.testing.assert_close(found[name][3], gradient_of_wide[:, 6 * rank : 6 * rank + 6], **EXACT)


# What it cannot take

SAMPLED = {"rollout_log_probs": ROLLOUT}
COUNTS = torch.tensor([int(BATCH.loss_mask[document].sum()) for document in BATCH.documents])
REFUSED = [
    ("own_truncated", {}, r"'own_truncated' needs rollout_log_probs \[T\]"),
    ("own_truncated", {**SAMPLED, "loss_parameters": {"ratio_cap": 0.5}}, r"ratio_cap=0.5 .* \[1, inf\)"),
    ("own_truncated", {**SAMPLED, "loss_parameters": {"scale": 2.5}}, r"scale=2.5 .* \[0, 2\]"),
    ("own_truncated", {**SAMPLED, "loss_parameters": {"scale": "1"}}, "scale='1'"),
    ("own_truncated", {**SAMPLED, "loss_parameters": {"cap": 1.0}}, "no parameter 'cap': its parameters are ratio_cap, scale"),
    ("cispo", {"loss_parameters": {"cap": 1.0}}, "'cispo' has no parameter 'cap': it has no parameters"),
    ("own_truncated", {**SAMPLED, "clip_ratio_low": 0.1}, "clip_ratio_low=0.1: policy loss 'own_truncated' has no clip"),
    ("own_heeding", {"token_counts": COUNTS + 1}, "token_counts says"),  # read before the reduction that checks them
    # The same gap would be corrected twice.
    ("own_anchored", {**SAMPLED, "correction": CorrectionSettings(kind="tis")}, "own_anchored.*counted twice"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_loss_cannot_take_is_refused_by_name(name, options, message):
    for call, operands in ((policy_loss, (BATCH.logits,)), (linear_policy_loss, (BATCH.logits, torch.eye(11).double()))):
        with pytest.raises((ConfigError, DataError), match=message):
            call(name, *operands, *BATCH.arguments(), **options)


def test_who_has_no_logits_refuses_a_loss_of_entropies():
    with pytest.raises(ConfigError, match="'own_heeding' needs the entropy of each token, .* call policy_loss"):
        loss_of_log_probs("own_heeding", BATCH.old_log_probs, *BATCH.arguments()[1:])
    with pytest.raises(ConfigError, match="own_heeding needs the entropy of each token, and NeMo-RL hands over log-probabilities"):
        nemo_rl.OFFER.choose("own_losses.heeding.sample_mean")


def test_trainers_that_hand_over_rows_ask_a_function_of_ones_own_too():
    """Of verl, NeMo-RL, ROLL and SkyRL, whose settings no launch rule judges, NeMo-RL: all have one reader."""
    kl = {"megatron_rl": "grpo.token_mean", "reference_policy_kl_penalty": 0.1, "megatron_rl_kl_estimator": "own_centred_kl"}
    nemo_rl.read(master_config({"megatron_rl": "own_reinforce.sample_mean"}))
    for settings, named in (({"megatron_rl": "own_centred.sample_mean"}, "policy_loss"), (kl, "kl_estimator")):
        with pytest.raises(ConfigError, match=f"{named}=own_centred.* depends at one token on the others"):
            nemo_rl.read(master_config(settings))


# Estimators and corrections


@over_backends
def test_an_own_estimator_by_dotted_path_trains(backend):
    """Autograd gives its derivative, and without a Triton version the loss runs in torch. Advantages of 0 leave the term alone."""
    batch = replace(BATCH, advantages=0 * BATCH.advantages)
    ref, weights = batch.old_log_probs + 0.4, batch.token_weights
    options = {"kl_coefficient": 0.5, "ref_log_probs": ref, "regularizer_weights": weights}
    got = backend.run(front_door("grpo"), batch, kl_estimator="own_losses.jeffreys", **options, **CLIP)

    def term(logits: Tensor) -> Tensor:
        d = loop_log_probs(logits, batch.labels) - ref
        of_tokens = weights.repeat_interleave(torch.tensor([len(document) for document in batch.documents]))
        return (torch.where(batch.loss_mask, d * (1 - (-d).exp()) / 2, 0.0) * of_tokens).sum() / 2

    assert_same(got, with_gradient(term, batch.logits), **backend.tolerance)


def test_a_correction_of_ones_own_weighs_tokens_and_samples():
    w, zeros = torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)

    def weights_of(settings: CorrectionSettings, *bounds: int) -> list[float]:
        given = (w.log(), zeros, torch.ones(3, dtype=torch.bool), torch.tensor(bounds))
        return importance_correction(settings, *given)[0].weights.tolist()

    bounds = {"importance_correction_low": 0.5, "importance_correction_high": 2.0}
    settings = CorrectionSettings.of(PolicyLossConfig(importance_correction="own_losses.root", **bounds))
    assert weights_of(settings, 0, 3) == pytest.approx([0.5**0.5, 1.0, 2.0**0.5], rel=1e-12)
    levels = {"sequence_mean": (0.0, None)}
    register_correction("own", bounds=levels, weigh_tokens=lambda ratios: ratios.sqrt())(lambda ratios, low, high: ratios / 4)
    # The geometric means of w are 1/2 and 4: 1/8 x (1/2, 1), and 1 x 2.
    found = weights_of(CorrectionSettings(kind="own", level="sequence_mean", high=3.0), 0, 2, 3)
    assert found == pytest.approx([1 / 16, 1 / 8, 2.0], rel=1e-12)


@pytest.mark.parametrize(
    ("value_of", "message"),
    [
        (lambda x, reference: x.log(), "not finite, in what policy loss grpo or KL estimator own returns for finite inputs"),
        (lambda x, reference: (x - reference)[:, None], r"KL estimator 'own' returned \(18, 1\) torch.float64 as its value"),
    ],
)
def test_a_wrong_value_of_an_estimator_stops_a_loss(value_of, message):
    """What is not finite is told after the one reduction, on each rank."""
    register_kl_estimator("own")(lambda log_probs, ref_log_probs: value_of(log_probs, ref_log_probs))
    options = {"kl_coefficient": 0.5, "ref_log_probs": BATCH.old_log_probs, "regularizer_weights": torch.ones(4)}
    with pytest.raises(DataError, match=message):
        run_loss(front_door("grpo"), BATCH, kl_estimator="own", **options, **CLIP)


def test_a_loss_of_ones_own_that_is_not_finite_is_named_and_not_the_labels():
    register_policy_loss("divided")(lambda log_ratio, advantages: -advantages * log_ratio / 0.0)
    with pytest.raises(DataError, match="in what policy loss divided returns for finite inputs.* write bounded_exp") as error:
        run_loss(front_door("divided"), BATCH)
    assert "label" not in str(error.value)


# By flags, in train and in a host


def config_of(*argv: str):
    parser = add_megatron_rl_args(ArgumentParser(allow_abbrev=False))
    return validate_megatron_rl_args(parser.parse_args(argv), Route.TRAIN)


def test_a_launch_line_names_the_loss_its_parameters_and_its_clip():
    config = config_of("--policy-loss", "own_losses.truncated", "--scale", "0.5", "--ratio-cap=3")
    assert config.loss_parameters == {"scale": 0.5, "ratio_cap": 3.0}
    assert clip_of(config) is None
    assert config_of("--policy-loss", "own_losses.truncated").loss_parameters == {}
    assert get_policy_loss("own_losses.truncated") is get_policy_loss("own_truncated")


def train_and_host_step(rank: int, folder: Path, config, builtin, case: HostCase):
    found = []
    for name, settings in (("own", config), ("built-in", builtin)):
        options = {"num_rollouts": 2, "lr": 1e-2}
        _, weights = run_loop(folder / name, settings, options)
        found.append((weights, metrics_of(folder / name)))
    return found, run_cases(rank, {}, [case])[0]


@pytest.mark.megatron
def test_cispo_in_a_file_of_ones_own_trains_in_train_and_in_an_emulated_host(tmp_path):
    """In train as the built-in one, bit for bit; in the host the step of dense logits by the reference."""
    name, flags = "own_losses.own_cispo", ("--clip-ratio-high", "0.001", "--samples-per-prompt", "4")
    ours, builtin = (config_of("--policy-loss", loss, *flags) for loss in (name, "cispo"))
    assert clip_of(config_of("--policy-loss", name)) == (1.0, 0.28)
    case = HostCase("slime", "custom_loss", "sample_mean", options=(("policy_loss", name),), size=2)
    with RankPool(1) as pool:
        ((own, host),) = pool.run(train_and_host_step, tmp_path, ours, builtin, case)
    for parameter, weight in own[0][0].items():
        assert torch.equal(weight[-1], own[1][0][parameter][-1]), parameter
    assert own[0][1] == own[1][1] and any(row["policy/clipped_ratio_fraction"] > 0 for row in own[0][1])
    assert not isinstance(host, str), host
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
    command = [sys.executable, script, "explain", "--policy-loss", "mine.mine", "--response-lengths", "3,4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
