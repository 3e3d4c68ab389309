"""Every registered KL estimator and correction against its declaration, and what one of a user may do and may not.

A new one of losses/kl.py or losses/corrections.py is tested here, and needs no further line.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from decimal import Context, Decimal, localcontext

import pytest
import torch
from helpers import CLIP, EXACT, KERNEL_DEVICE, names_forgotten, random_batch, run_loss
from loss_backends import HAS_TRITON, LOSSES, over_backends
from nemo_rl_cases import master_config
from torch import Tensor
from verl_cases import ActorConfig

from megatron_rl import KLValue, register_correction, register_kl_estimator
from megatron_rl.config import LOG_RATIO_BOUND, CorrectionLevel, PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import nemo_rl, skyrl, verl
from megatron_rl.losses.corrections import CORRECTIONS, CorrectionSettings, CorrectionValue
from megatron_rl.losses.kl import KL_ESTIMATORS, k3, kl_estimate
from megatron_rl.policy_loss import importance_correction, policy_loss
from megatron_rl.testing.layout_step import Layout
from megatron_rl.testing.reference import ragged_samples
from megatron_rl.validation import Settings, find_problems
from megatron_rl.validation.own_functions import estimator_problems
from megatron_rl.weights import loss_aggregation_names

NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
BOTH = pytest.mark.parametrize("registry", [KL_ESTIMATORS, CORRECTIONS], ids=lambda registry: registry.kind)
KINDS = [(name, level) for name in CORRECTIONS.names() for level in CORRECTIONS[name].bounds]
# Both sides of each are met by the ratios below.
BOUNDS = {CorrectionLevel.TOKEN: (0.8, 1.3), CorrectionLevel.SEQUENCE_MEAN: (0.96, 1.06), CorrectionLevel.SEQUENCE_SUM: (0.7, 1.5)}


def settings_of(name: str, level: str, **others) -> CorrectionSettings:
    low, high = BOUNDS[level]
    return CorrectionSettings(kind=name, level=level, low=low, high=high, **others)


# Estimators

# Those with an exp of the difference.
BOUNDED = ("k3", "k3+", "unbiased")


def differences(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:  # log_probs, ref_log_probs, log_ratio
    """At the bound of the exponents, on both sides of it and far beyond, in all combinations."""
    sizes = (0.0, 0.3, -0.3, 2.0, -2.0, 20.0, -20.0, 20.5, -20.5, 1e4, -1e4)
    difference, log_ratio = torch.tensor(list(itertools.product(sizes, sizes)), dtype=dtype).T.contiguous()
    return difference, torch.zeros_like(difference), log_ratio


def value_alone_of(estimator):
    def value_alone(*given):
        returned = estimator.function(*given)
        return returned.value if isinstance(returned, KLValue) else returned

    return replace(estimator, function=value_alone)


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_the_derivative_is_that_of_the_value_where_this_is_declared(name):
    """By autograd in float64, through the ratio too. Beyond the bound of the exponents a derivative is finite, and may be cut."""
    estimator, given = KL_ESTIMATORS[name], differences(torch.float64)
    value, derivative = kl_estimate(estimator, *given)
    same, of_value = kl_estimate(value_alone_of(estimator), *given)
    assert torch.equal(value, same) and value.isfinite().all() and derivative.isfinite().all() and derivative.any()
    if estimator.is_gradient_of_value:
        bound = LOG_RATIO_BOUND if name in BOUNDED else math.inf
        is_inside = (given[0].abs() <= bound) & (given[2].abs() <= bound)
        # At d = -20 autograd adds two parts of e^20 = 5e8 that cancel to 20: 5e8 x 2^-53 is 3e-9 of it.
        torch.testing.assert_close(derivative[is_inside], of_value[is_inside], rtol=1e-8, atol=1e-12)
    else:
        assert not torch.allclose(derivative, of_value), "then it may be declared"


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_exponents_stop_at_the_bound(name):
    far = torch.tensor([-1e3, -30.0, -LOG_RATIO_BOUND], dtype=torch.float64)
    value, _ = kl_estimate(name, far, torch.zeros_like(far), torch.zeros_like(far))
    assert len(set(value.tolist())) == (1 if name in BOUNDED else 3)


@pytest.mark.parametrize("name", [name for name in KL_ESTIMATORS.names() if KL_ESTIMATORS[name].triton])
@pytest.mark.kernel
@NEEDS_TRITON
def test_the_triton_twin_is_the_torch_function(name):
    from twin_kernel import kl_kernel

    from megatron_rl.policy_loss.reduce_triton import triton_of_estimator

    estimator, given = KL_ESTIMATORS[name], differences(torch.float32)
    want = kl_estimate(estimator, *given)
    got = [torch.full_like(given[0], math.nan, device=KERNEL_DEVICE) for _ in want]
    inputs = [x.to(KERNEL_DEVICE) for x in given]
    kl_kernel[(1,)](*inputs, *got, given[0].numel(), KL_FUNCTION=triton_of_estimator(estimator), BLOCK=128)
    for one, other in zip(got, want, strict=True):
        # Of float32: e^20 is good to 20 x 2^-24 and an ulp or two of exp.
        torch.testing.assert_close(one.cpu(), other, rtol=4e-6, atol=1e-6)


def k3_in_torch(log_probs: torch.Tensor, reference: torch.Tensor) -> list[torch.Tensor]:
    found = k3(log_probs, reference)
    return [found.value, found.derivative]


def k3_by_twin(log_probs: torch.Tensor, reference: torch.Tensor) -> list[torch.Tensor]:
    from twin_kernel import kl_kernel

    from megatron_rl.policy_loss.reduce_triton import triton_of_estimator

    inputs = [x.to(KERNEL_DEVICE) for x in (log_probs, reference, log_probs)]
    found = [torch.full_like(inputs[0], math.nan) for _ in range(2)]
    kl_kernel[(1,)](*inputs, *found, log_probs.numel(), KL_FUNCTION=triton_of_estimator(KL_ESTIMATORS["k3"]), BLOCK=128)
    return [part.cpu() for part in found]


# Of float32: a step is 1.2e-7 of a number, and a few of them are taken. A GPU's e^20 is good to 20 x 2^-24 and a step or two.
# Of float64: at 1e-6 the difference of e^d - 1 and d keeps 2^-53 / 1e-6 of its digits.
K3_IN = {
    "torch": (k3_in_torch, torch.float32, 1e-6),
    "torch, float64": (k3_in_torch, torch.float64, 1e-9),
    "triton": (k3_by_twin, torch.float32, 1e-6 if KERNEL_DEVICE == "cpu" else 4e-6),
}


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=(pytest.mark.kernel, NEEDS_TRITON) if name == "triton" else ()) for name in K3_IN]
)
def test_k3_keeps_its_digits_near_0_and_far_from_it(backend):
    """exp(d) - d - 1 and 1 - exp(d) of float32 numbers are 97 % and 2e-4 off at d = 1e-4: what two close policies are told by.
    The truth has 50 digits. Up to 1 the twin takes a series, so 1 and its neighbours are among the numbers."""
    estimate, dtype, tolerance = K3_IN[backend]
    one = torch.ones((), dtype=dtype)
    sizes = torch.cat([torch.logspace(-6, math.log10(20), 60, dtype=dtype).clamp(max=20), one.nextafter(0 * one)[None], one[None]])
    d = torch.cat([sizes, -sizes])
    with localcontext(Context(prec=50)):
        exact = [(Decimal(x).exp(), Decimal(x)) for x in d.tolist()]
        wanted = [[float(e - x - 1) for e, x in exact], [float(1 - e) for e, _ in exact]]
    for found, truth in zip(estimate(torch.zeros_like(d), d), wanted, strict=True):
        torch.testing.assert_close(found.double(), torch.tensor(truth, dtype=torch.float64), rtol=tolerance, atol=0)


@over_backends
@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_the_term_of_a_loss_is_the_declared_one(name, backend):
    """Value, and derivative by the logits, with the ratio to the old policy. Advantages of 0 leave the term alone."""
    batch = random_batch([5, 3], num_masked=(1, 0), seed=8)
    batch.advantages[:] = 0.0
    ref, weights = batch.old_log_probs + 0.4, torch.tensor([0.3, 0.9], dtype=torch.float64)
    options = {"kl_coefficient": 0.5, "kl_estimator": name, "ref_log_probs": ref, "regularizer_weights": weights}
    output, gradient = backend.run(LOSSES["grpo"], batch, **options, **CLIP)
    leaf = batch.logits.detach().clone().requires_grad_()
    log_probs = torch.log_softmax(leaf, -1).gather(1, batch.labels[:, None])[:, 0]
    value, derivative = kl_estimate(name, log_probs.detach(), ref, log_probs.detach() - batch.old_log_probs)
    factors = torch.where(batch.loss_mask, 0.5 * weights.repeat_interleave(torch.tensor([5, 3])), 0.0)
    (wanted,) = torch.autograd.grad((factors * derivative * log_probs).sum(), leaf)
    torch.testing.assert_close(output.loss.detach().double(), (factors * value).sum(), **backend.tolerance)
    torch.testing.assert_close(gradient, wanted, **backend.tolerance)


# Corrections


@pytest.mark.parametrize("name", CORRECTIONS.names())
def test_a_correction_gives_what_it_drops_the_factor_0(name):
    """Of ratios on both sides of the bounds, at them and at 1; what is dropped has factor 0, and nothing else has."""
    kind, (low, high) = CORRECTIONS[name], (0.5, 2.0)
    ratios = torch.tensor([math.exp(-20), 0.4, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, math.exp(20)], dtype=torch.float64)
    returned = kind.function(ratios.clone(), low, high)
    result = returned if isinstance(returned, CorrectionValue) else CorrectionValue(returned)
    is_kept = torch.ones_like(ratios, dtype=torch.bool) if result.is_kept is None else result.is_kept
    assert result.weights.isfinite().all() and (result.weights >= 0).all()
    assert torch.equal(is_kept, result.weights != 0)
    assert is_kept[2:7].all(), "bounds are inclusive"
    assert float(result.weights[4]) == 1.0, "where both policies agree nothing changes"


@pytest.mark.parametrize("name", CORRECTIONS.names())
def test_bounds_are_those_of_the_declaration(name):
    kind = CORRECTIONS[name]
    for level in CorrectionLevel:
        problems = list(CorrectionSettings(kind=name, level=level).problems())
        if None not in kind.bounds.get(level, (None,)):
            assert not problems and CorrectionSettings(kind=name, level=level).bounds == kind.bounds[level]
        elif level in kind.bounds:
            missing = [bound for bound, usual in zip(("low", "high"), kind.bounds[level], strict=True) if usual is None]
            assert all(f"--importance-correction-{bound}" in problems[0] for bound in missing)
        else:
            assert problems == [
                f"importance_correction={name} does not act at level {level}: choose "
                + " or ".join(f"--importance-correction-level {one}" for one in kind.bounds)
            ]


def ratios_of(labels: Tensor, documents: Tensor, dtype: torch.dtype) -> Tensor:  # [T] log(old / rollout)
    """By token and by sample, on both sides of the bounds."""
    return (0.3 * torch.sin(7.0 * labels.double()) + 0.08 * torch.sin(2.0 + 3.0 * documents.double())).to(dtype)


def corrected_loss(logits: Tensor, batch, *, name: str, level: str, delta: float | None, backend: str) -> Tensor:
    """Two losses, with a ratio of the token and of the sample."""
    weights = torch.full_like(batch.advantages, 1 / batch.num_tokens)
    packed = (batch.old_log_probs, batch.advantages, batch.loss_mask, batch.cu_seqlens, weights)
    # The sum over a sample knows its place in the step by its advantage alone.
    gaps = ratios_of(batch.labels, (37 * batch.advantages)[batch.document_ids], batch.old_log_probs.dtype)
    options = {
        "tp_group": batch.tp_group,
        "cp_group": batch.cp_group,
        "token_counts": batch.token_counts,
        "rollout_log_probs": batch.old_log_probs - gaps,
        "correction": settings_of(name, level, sequence_delta=delta),
        "advantages_per": "sample",
        "backend": backend,
    }
    return sum(policy_loss(loss, logits, batch.labels, *packed, **options).loss for loss in ("grpo", "gspo"))


class Corrected:
    """The loss of a pool's ranks, which must be found there by name."""

    def __init__(self, name: str, level: str, delta: float | None, backend: str):
        self.options = {"name": name, "level": level, "delta": delta, "backend": backend}

    def __call__(self, logits: Tensor, batch) -> Tensor:
        return corrected_loss(logits, batch, **self.options)


CP_AND_DP = [Layout(context=2, data=2, num_microbatches=3), Layout(tensor=2, context=2)]


@pytest.mark.parametrize("delta", [None, 0.05], ids=["", "off-policy"])
@pytest.mark.parametrize(("name", "level"), KINDS)
def test_a_corrected_step_is_the_same_on_every_layout(assert_layout_invariant, name, level, delta):
    assert_layout_invariant(Corrected(name, level, delta, "torch"), layouts=CP_AND_DP)


@pytest.mark.parametrize(("name", "level"), [(name, [*CORRECTIONS[name].bounds][-1]) for name in CORRECTIONS.names()])
@pytest.mark.kernel
@pytest.mark.interpreter
@NEEDS_TRITON
def test_a_corrected_step_is_the_same_on_every_layout_in_triton(assert_layout_invariant, name, level):
    few = [ragged_samples()[index] for index in (2, 6, 7, 12)]  # interpreted kernels take time with each row
    # float32: sums of a few hundred terms
    loss = Corrected(name, level, 0.05, "triton")
    assert_layout_invariant(loss, samples=few, layouts=CP_AND_DP[1:], dtype=torch.float32, tolerance=2e-5)


@over_backends
@pytest.mark.parametrize(("name", "level"), KINDS)
def test_a_loss_multiplies_by_the_factors_of_the_function(name, level, backend):
    """A token-level loss with a correction is the same loss with its factors as importance weights."""
    batch = random_batch([6, 4, 8], num_masked=(1, 0, 2), seed=4)
    gaps = ratios_of(batch.labels, torch.arange(3).repeat_interleave(torch.tensor([6, 4, 8])), torch.float64)
    rollout = batch.old_log_probs - gaps
    settings = settings_of(name, level)
    found, _ = importance_correction(settings, batch.old_log_probs, rollout, batch.loss_mask, batch.cu_seqlens)
    assert 0 < int((found.weights != 1).sum()), "something is corrected"
    options = {"rollout_log_probs": backend.to(rollout), "correction": settings}
    got, wanted = (backend.run(LOSSES["grpo"], batch, **one, **CLIP) for one in (options, {"importance_weights": found.weights}))
    torch.testing.assert_close(got[0].loss, wanted[0].loss, **backend.tolerance)
    torch.testing.assert_close(got[1], wanted[1], **backend.tolerance)
    torch.testing.assert_close(got[0].correction.weights.cpu().double(), found.weights, **backend.tolerance)


# Names


@BOTH
def test_an_unknown_name_raises_everywhere(registry):
    field = {"KL estimator": "kl_estimator", "importance correction": "importance_correction"}[registry.kind]
    message = f"{registry.kind} 'k9' is not registered; known: {', '.join(registry.names())}"
    with pytest.raises(ConfigError, match="is not registered"):
        registry["k9"]
    assert any(message in problem for problem in find_problems(Settings(config=PolicyLossConfig(**{field: "k9"}))))
    batch, ones = random_batch([3]), torch.ones(2, dtype=torch.float64)
    calls = {
        "kl_estimator": (
            lambda: kl_estimate("k9", ones, ones, ones),
            lambda: run_loss(LOSSES["grpo"], batch, kl_estimator="k9", **CLIP),
        ),
        "importance_correction": (
            lambda: importance_correction(CorrectionSettings(kind="k9"), ones, ones, ones.bool(), torch.tensor([0, 2])),
            lambda: run_loss(
                LOSSES["grpo"], batch, correction=CorrectionSettings(kind="k9"), rollout_log_probs=batch.old_log_probs, **CLIP
            ),
        ),
    }
    for call in calls[field]:
        with pytest.raises(ConfigError, match="'k9' is not registered"):
            call()


def test_hosts_map_to_registered_names():
    assert set(nemo_rl.KINDS.values()) <= set(CORRECTIONS.names())
    assert {*skyrl.REDUCTIONS.values(), *verl.AGG_MODES} <= set(loss_aggregation_names())


# Of a user


@pytest.fixture
def forgets():
    """What a test registers is gone after it."""
    with names_forgotten():
        yield


OWN = '''
from megatron_rl import bounded_exp, register_correction, register_kl_estimator


@register_kl_estimator("{name}_jeffreys")
def jeffreys(log_probs, ref_log_probs):
    """d (1 - exp(-d)) / 2, half the symmetric divergence."""
    difference = log_probs - ref_log_probs
    return difference * (1 - bounded_exp(-difference)) / 2


@register_correction("{name}_root")
def root(ratios, low, high):
    return ratios.clamp(low, high).sqrt()


def undeclared(log_probs, ref_log_probs):
    return log_probs
'''


@pytest.fixture
def own_terms(tmp_path, monkeypatch, forgets):
    name = f"own_terms_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN.replace("{name}", name))
    monkeypatch.syspath_prepend(tmp_path)
    return name


@over_backends
def test_an_own_estimator_by_dotted_path_trains(own_terms, backend):
    """Autograd gives its derivative, and without a twin the loss runs in torch."""
    batch = random_batch([5, 3], num_masked=(1, 0), seed=8)
    ref, weights = batch.old_log_probs + 0.4, torch.tensor([0.3, 0.9], dtype=torch.float64)
    options = {"kl_coefficient": 0.5, "ref_log_probs": ref, "regularizer_weights": weights}
    found = backend.run(LOSSES["grpo"], batch, kl_estimator=f"{own_terms}.jeffreys", **options, **CLIP)
    parts = [backend.run(LOSSES["grpo"], batch, kl_estimator=name, **options, **CLIP) for name in ("k1", "k3", "k2")]
    assert all(not torch.equal(found[1], part[1]) for part in parts)
    d = batch.old_log_probs - ref
    value, derivative = kl_estimate(f"{own_terms}.jeffreys", batch.old_log_probs, ref, d)
    torch.testing.assert_close(derivative, ((1 - (-d).exp()) + d * (-d).exp()) / 2, **EXACT)
    torch.testing.assert_close(value, d * (1 - (-d).exp()) / 2, **EXACT)


def test_own_terms_are_settings_like_the_others(own_terms):
    config = PolicyLossConfig(
        kl_coefficient=0.1,
        kl_estimator=f"{own_terms}.jeffreys",
        importance_correction=f"{own_terms}.root",
        importance_correction_low=0.5,
        importance_correction_high=2.0,
    )
    assert find_problems(Settings(config=config)) == []
    w = torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64)
    zeros, mask = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.bool)
    found, _ = importance_correction(CorrectionSettings.of(config), w.log(), zeros, mask, torch.tensor([0, 3]))
    torch.testing.assert_close(found.weights, w.clamp(0.5, 2.0).sqrt(), **EXACT)
    assert find_problems(Settings(config=PolicyLossConfig(kl_coefficient=0.1, kl_estimator=f"{own_terms}.undeclared")))[0] == (
        f"--kl-estimator: KL estimator '{own_terms}.undeclared' is not declared: decorate undeclared with "
        "@megatron_rl.register_kl_estimator"
    )


def negated(log_probs, ref_log_probs):
    d = log_probs - ref_log_probs
    return KLValue(d.square() / 2, -d)


def detached(log_probs, ref_log_probs):
    return (log_probs - ref_log_probs).detach().square()


def capped(log_probs, ref_log_probs):
    """It acts on few tokens: those that are far from the reference."""
    d = log_probs - ref_log_probs
    return torch.minimum(d.square(), d.detach().abs().max())


def unbounded(log_probs, ref_log_probs):
    return (5 * (ref_log_probs - log_probs)).exp()


def column(log_probs, ref_log_probs):
    return (log_probs - ref_log_probs)[:, None]


def written(log_probs, ref_log_probs):
    return log_probs.sub_(ref_log_probs).square()


def constant(log_probs, ref_log_probs):
    return KLValue(log_probs - ref_log_probs, torch.zeros_like(log_probs))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (negated, "returns a derivative that its value does not have"),
        (detached, "has no derivative by log_probs"),
        (constant, "has derivative 0 everywhere"),
        (capped, "depends at one token on the others"),
        (unbounded, "is not finite for"),
        (column, r"returned (4096, 1) torch.float32 as its value"),
        (written, "writes into its inputs"),
    ],
)
def test_a_wrong_estimator_is_named_at_launch(forgets, function, message):
    register_kl_estimator("own")(function)
    (problem,) = find_problems(Settings(config=PolicyLossConfig(kl_coefficient=0.1, kl_estimator="own")))
    assert message in problem and problem.startswith("kl_estimator=own")


def test_a_gradient_of_another_value_may_be_declared(forgets):
    register_kl_estimator("own", is_gradient_of_value=False)(negated)
    assert find_problems(Settings(config=PolicyLossConfig(kl_coefficient=0.1, kl_estimator="own"))) == []


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_no_built_in_estimator_contradicts_its_declaration(name):
    assert list(estimator_problems(KL_ESTIMATORS[name])) == []


def infinite(ratios, low, high):
    return 1 / (ratios - ratios)


def lowered(ratios, low, high):
    return torch.where(ratios > 1e3, ratios.min(), ratios).clamp(low, high)


def counted(ratios, low, high):
    return CorrectionValue(ratios, (ratios <= high).int())


def halved(ratios, low, high):
    return ratios.clamp(low, high)[::2]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (infinite, "is not finite"),
        (lowered, "depends at one token on the others"),
        (counted, "returned (4096,) torch.int32 as is_kept: it must be (4096,) torch.bool"),
        (halved, "returned (2048,) torch.float32 as its weights"),
    ],
)
def test_a_wrong_correction_is_named_at_launch(forgets, function, message):
    register_correction("own")(function)
    bounds = {"importance_correction_low": 0.5, "importance_correction_high": 2.0}
    (problem,) = find_problems(Settings(config=PolicyLossConfig(importance_correction="own", **bounds)))
    assert message in problem and problem.startswith("importance_correction=own")


def test_a_token_has_the_factor_of_its_sample_times_its_own(forgets):
    bounds = {"sequence_mean": (0.0, None)}
    register_correction("own", bounds=bounds, weigh_tokens=lambda ratios: ratios.sqrt())(lambda ratios, low, high: ratios / 4)
    w, zeros = torch.tensor([4.0, 1.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    settings = CorrectionSettings(kind="own", level="sequence_mean", high=3.0)
    found, _ = importance_correction(settings, w.log(), zeros, torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]))
    # The geometric mean of w is 2, and 2 / 4 x (2, 1).
    torch.testing.assert_close(found.weights, torch.tensor([1.0, 0.5], dtype=torch.float64), **EXACT)


def test_a_file_whose_second_declaration_is_wrong_says_so_at_each_import(tmp_path, monkeypatch, forgets):
    """Its first one was registered when the second raised, and is registered once more when the file is imported again."""
    name = f"two_of_{tmp_path.name}"
    text = "from megatron_rl import register_kl_estimator\n"
    for one, wrong in (("first", ""), ("second", ", triton='twin'")):
        text += f"\n\n@register_kl_estimator('{one}'{wrong})\ndef {one}(log_probs, ref_log_probs):\n    return log_probs\n"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        with pytest.raises(ConfigError, match="must be the text module.function"):
            KL_ESTIMATORS[f"{name}.second"]


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: register_kl_estimator("own")(lambda log_probs: log_probs), r"must accept \(log_probs, ref_log_probs\)"),
        (lambda: register_kl_estimator("k3")(negated), "'k3' is already registered by megatron_rl.losses.kl"),
        (lambda: register_kl_estimator("own", triton="twin"), "must be the text module.function, or None"),
        (lambda: register_kl_estimator("own", triton=negated), "must be the text module.function, or None"),
        (lambda: register_kl_estimator("")(negated), "must be a non-empty string"),
        (lambda: register_correction("own")(lambda ratios: ratios), r"must accept \(ratios, low, high\)"),
        (lambda: register_correction("tis")(halved), "'tis' is already registered by megatron_rl.losses.corrections"),
        (
            lambda: register_correction("own", bounds={"turn": (0, 2)}),
            r"bounds=\{'turn': \(0, 2\)\} .* must be of levels, token, seq",
        ),
        (lambda: register_correction("own", bounds={}), r"bounds=\{\} .* must be of levels, token, sequence_mean"),
        (lambda: register_correction("own", weigh_tokens=abs), "acts at levels of samples: leave token out"),
    ],
)
def test_a_wrong_declaration_is_refused(forgets, declare, message):
    with pytest.raises(ConfigError, match=message):
        declare()


def test_a_value_that_is_not_finite_stops_a_loss(forgets):
    """It is told after the one reduction, on each rank; and so is an estimator's wrong shape."""
    register_kl_estimator("own")(lambda log_probs, ref_log_probs: log_probs.log())
    batch = random_batch([3])
    options = {"kl_coefficient": 0.5, "ref_log_probs": batch.old_log_probs, "regularizer_weights": torch.ones(1)}
    with pytest.raises(DataError, match="not finite, in what policy loss grpo or KL estimator own returns for finite inputs"):
        run_loss(LOSSES["grpo"], batch, kl_estimator="own", **options, **CLIP)
    register_kl_estimator("column")(column)
    with pytest.raises(DataError, match=r"KL estimator 'column' returned \(3, 1\) torch.float64 as its value"):
        run_loss(LOSSES["grpo"], batch, kl_estimator="column", **options, **CLIP)


def test_a_registry_says_what_a_dotted_name_lacks(forgets):
    for name, message in (("no_such_module.f", "cannot be imported"), ("math.no_such", "has no 'no_such'"), (3, "must be a name")):
        with pytest.raises(ConfigError, match=message):
            KL_ESTIMATORS[name]


def test_an_own_estimator_of_a_whole_batch_is_refused_in_a_trainers_config(forgets):
    """Of verl, which computes the term itself, too."""
    register_kl_estimator("centred")(lambda log_probs, ref_log_probs, log_ratio: log_probs - log_probs.mean())
    actor = vars(ActorConfig(policy_loss={"loss_mode": "megatron_rl.grpo.token_mean"}))
    actor |= {"use_kl_loss": True, "kl_loss_type": "centred"}
    settings = {"megatron_rl": "grpo.token_mean", "megatron_rl_kl_estimator": "centred", "reference_policy_kl_penalty": 0.1}
    for read, config in ((verl.read, actor), (nemo_rl.read, master_config(settings))):
        with pytest.raises(ConfigError, match="kl_estimator=centred depends at one token on the others"):
            read(config)
