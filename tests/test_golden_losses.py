"""What the numbers must be: losses, corrections and estimators by hand, and losses by the peers' own functions from a checkout.

VERL_ROOT=... NEMO_RL_ROOT=... SLIME_ROOT=... MILES_ROOT=... pytest tests/test_golden_losses.py
"""

from __future__ import annotations

import ast
import functools
import math
import os
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_rl.declare import get_policy_loss
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.losses.kl import kl_estimate
from megatron_rl.policy_loss import importance_correction, policy_loss
from megatron_rl.testing import oracle

# Three responses of 2, 1 and 3 tokens.
LENGTHS = [2, 1, 3]
RATIOS = torch.tensor([1.5, 0.5, 4.0, 1.1, 0.6, 1.25], dtype=torch.float64)
LOG_PROBS = torch.tensor([-1.0, -0.5, -2.0, -0.2, -1.5, -3.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
OLD = LOG_PROBS - RATIOS.log()
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
OF_TOKENS = torch.tensor([0, 0, 1, 2, 2, 2])


def coefficients(name: str, sign: float = 1.0, weights: Tensor | None = None, **options) -> list[float]:
    """d loss / d log_probs of the six tokens through the front entry: each row has two logits, the label's and the rest's."""
    parameters = {parameter.name for parameter in get_policy_loss(name).parameters}
    given = {key: options.pop(key) for key in list(options) if key in parameters}
    p = LOG_PROBS.exp()
    logits = torch.stack([p.log(), (1 - p).log()], -1).requires_grad_()
    anchor = {"rollout_log_probs": OLD} if get_policy_loss(name).anchor == "rollout" else {}
    output = policy_loss(
        *(name, logits, torch.zeros(6, dtype=torch.int64), OLD, sign * ADVANTAGES, torch.ones(6, dtype=torch.bool)),
        torch.tensor([0, 2, 3, 6]),
        torch.ones(3, dtype=torch.float64) if weights is None else weights,
        loss_parameters=given,
        **anchor,
        **options,
    )
    output.loss.backward()
    return (logits.grad[:, 0] / (1 - p)).tolist()


def coefficients_of_the_oracle(name: str, sign: float, **options) -> list[float]:
    """Likewise, of testing/oracle.py. A paper that it misreads would be misread wherever a loss is compared with it."""
    loss, leaf = get_policy_loss(name), LOG_PROBS.clone().requires_grad_()
    low, high = loss.clip_bounds(options.pop("clip_ratio_low", None), options.pop("clip_ratio_high", None)) or (math.nan, math.nan)
    samples = [
        oracle.DenseSample(
            labels=[0] * len(own),
            mask=[True] * len(own),
            advantages=[sign * float(advantage)] * len(own),
            old=own.tolist(),
            rollout=own.tolist(),
            ref=None,
            importance=[1.0] * len(own),
            prompt="",
        )
        for own, advantage in zip(OLD.split(LENGTHS), ADVANTAGES, strict=True)
    ]
    of_tokens = {"aggregation": "constant", "divisor": 1 / len(samples)}  # each weighs 1
    settings = oracle.DenseSettings(loss=name, low=low, high=high, parameters=loss.resolve_parameters(options), **of_tokens)
    oracle.StepTerms(samples, oracle.Scores(leaf, torch.zeros(6)), settings).loss().backward()
    return leaf.grad.tolist()


# The geometric means of the ratios, 1 for a log-ratio of 0.
MEANS = [math.sqrt(0.75), 4.0, 0.825 ** (1 / 3)]
GMPO = [math.exp((0.4 + math.log(0.5)) / 2), 4.0, 0.825 ** (1 / 3)]  # log 1.5 is above 0.4
BY_HAND = {
    "grpo": ({**CLIP}, [0, -0.5, 4, -0.55, -0.3, -0.625]),
    "grpo, dual clip": ({**CLIP, "clip_ratio_c": 3.0}, [0, -0.5, 0, -0.55, -0.3, -0.625]),
    "grpo, dual clip above each ratio": ({**CLIP, "clip_ratio_c": 4.5}, [0, -0.5, 4, -0.55, -0.3, -0.625]),
    "gspo": ({**CLIP}, [-MEANS[0], -MEANS[0], 4, *[-MEANS[2] / 2] * 3]),
    "gspo, dual clip": ({**CLIP, "clip_ratio_c": 3.0}, [-MEANS[0], -MEANS[0], 0, *[-MEANS[2] / 2] * 3]),
    "gspo_token": ({**CLIP}, [-MEANS[0], -MEANS[0], 4, *[-MEANS[2] / 2] * 3]),
    "cispo": ({"clip_ratio_high": 0.28}, [-1.28, -0.5, 1.28, -0.55, -0.3, -0.625]),
    "gmpo": ({}, [0, -GMPO[0], 4, *[-GMPO[2] / 2] * 3]),
    "sapo": ({}, [-1.410022, -0.470007, 0.630445, -0.548627, -0.288313, -0.615335]),
    "dppo_tv": ({}, [-1.5, -0.5, 4, -0.55, -0.3, -0.625]),
    "dppo_tv, narrow": ({"divergence_high": 0.12}, [0, -0.5, 4, -0.55, -0.3, -0.625]),  # e^-1 - e^-1 / 1.5 = 0.1226
    "dppo_tv, truncated": ({"ratio_truncation": 1.2}, [-1.2, -0.5, 1.2, -0.55, -0.3, -0.6]),
    "dppo_kl": ({}, [-1.5, -0.5, 4, -0.55, -0.3, -0.625]),
    "dppo_kl, narrow": ({"divergence_high": 0.03}, [0, -0.5, 4, -0.55, -0.3, -0.625]),  # 0.0344, then 0.0170
    "dro": ({"log_ratio_penalty": 0.1}, [-a + 0.1 * math.log(r) for a, r in zip(ADVANTAGES[OF_TOKENS], RATIOS, strict=True)]),
    "reinforce": ({}, [-1, -1, 1, -0.5, -0.5, -0.5]),
    "topr": ({}, [-1, -1, 1, -0.5, -0.5, -0.5]),
    # The products of the ratios are 0.75, 4 and 0.825. W^2 e^(3 (1 - W)) where A >= 0, else W^3 e^(2 (1 - W)).
    "vespo": ({}, [*[-(0.75**2) * math.exp(0.75)] * 2, 64 * math.exp(-6), *[-(0.825**2) * math.exp(0.525) / 2] * 3]),
}
# With the signs of the advantages turned.
NEGATED = {
    "grpo": ({**CLIP}, [1.5, 0, -0, 0.55, 0, 0.625]),
    "grpo, dual clip": ({**CLIP, "clip_ratio_c": 1.2}, [0, 0, -0, 0.55, 0, 0]),
    "cispo": ({"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}, [1.28, 0.8, -1.28, 0.55, 0.4, 0.625]),
    # log 0.5 and log 0.6 are below -0.4, log 4 above 0.4.
    "gmpo": (
        {},
        [math.exp((math.log(1.5) - 0.4) / 2), 0, 0, *[math.exp((math.log(1.1 * 1.25) - 0.4) / 3) / 2 * x for x in (1, 0, 1)]],
    ),
    "dppo_tv": ({"divergence_low": 0.2}, [1.5, 0, -4, 0.55, 0.3, 0.625]),  # e^-0.5 - 2 e^-0.5 = -0.61, clipped at mu = 1: -0.39
    "topr": ({}, [1, 0.5, -1, 0.5, 0.3, 0.5]),
    "vespo": ({}, [*[0.75**3 * math.exp(0.5)] * 2, -16 * math.exp(-9), *[0.825**3 * math.exp(0.35) / 2] * 3]),
}
ROWS = [pytest.param(key, 1.0, *row, id=key) for key, row in BY_HAND.items()]
ROWS += [pytest.param(key, -1.0, *row, id=f"{key}, negated") for key, row in NEGATED.items()]


@pytest.mark.parametrize("of", [coefficients, coefficients_of_the_oracle], ids=["ours", "the oracle's"])
@pytest.mark.parametrize(("key", "sign", "options", "expected"), ROWS)
def test_the_coefficients_are_those_by_hand(key, sign, options, expected, of):
    """FB-50: a token is clipped on the side alone where its advantage pushes it, and low and high are not swapped."""
    found = of(key.partition(",")[0], sign, **options)
    assert found == pytest.approx([float(x) for x in expected], abs=6e-7 if key == "sapo" else 1e-12)


# Corrections

# Three samples: w = old / rollout probability by token, and the policy in training equal to the old one.
GAPS = torch.tensor([0.4, 1.0, 6.0, 1.0, 2.5, 0.9], dtype=torch.float64)


def corrected(advantages: Tensor, **settings):
    rollout, ones, bounds = torch.linspace(-3.0, -0.5, 6, dtype=torch.float64), torch.ones(6).bool(), torch.tensor([0, 2, 3, 6])
    old = rollout + GAPS.log()
    given = {"log_probs": old, "advantages": advantages[OF_TOKENS]}
    return importance_correction(CorrectionSettings(**settings), old, rollout, ones, bounds, **given)[0]


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"kind": "tis"}, [0.4, 1, 2, 1, 2, 0.9]),
        ({"kind": "tis", "low": 0.95}, [0.95, 1, 2, 1, 2, 0.95]),
        ({"kind": "icepop"}, [0, 1, 0, 1, 2.5, 0.9]),
        ({"kind": "mask", "low": 0.5, "high": 2.5}, [0, 1, 0, 1, 1, 1]),
        ({"kind": "tis", "level": "sequence_mean", "high": 1.2}, [0.4**0.5] * 2 + [1.2] * 4),
        ({"kind": "icepop", "level": "sequence_mean", "low": 0.7, "high": 1.4}, [0, 0, 0] + [2.25 ** (1 / 3)] * 3),
        ({"kind": "mask", "level": "sequence_sum", "low": 0.5, "high": 2.3}, [0, 0, 0, 1, 1, 1]),
        ({"kind": "tis", "level": "sequence_sum", "high": 2.0}, [0.4] * 2 + [2.0] * 4),
        # The mean of log(rollout / trained) is -log of the geometric mean: .458145, -1.791759, -.270310.
        # Masked by the geometric means .632456, 6 and 1.310371, or by the products .4, 6 and 2.25; the weights are the tokens' own.
        ({"kind": "seq_mask_tis", "level": "sequence_mean", "low": 0.6, "high": 1.4}, [0.4, 1, 0, 1, 2.5, 0.9]),
        ({"kind": "seq_mask_tis", "level": "sequence_sum", "low": 0.3, "high": 2.0}, [0.4, 1, 0, 0, 0, 0]),
        (
            {"kind": "seq_mask_tis", "level": "sequence_mean", "low": 0.6, "high": 1.4, "sequence_delta": 0.4},
            [0, 0, 0, 1, 2.5, 0.9],
        ),
        ({"sequence_delta": 0.4}, [0, 0, 1, 1, 1, 1]),
        ({"sequence_delta": 0.5}, [1, 1, 1, 1, 1, 1]),
        ({"kind": "tis", "sequence_delta": 0.4}, [0, 0, 2, 1, 2, 0.9]),
    ],
)
def test_weights_are_those_by_hand(settings, weights):
    """FB-121: the ratio of a sample is the product of its tokens' ratios or their geometric mean, never the sum of ratios."""
    found = corrected(-ADVANTAGES, **settings)
    # float64 exp of a log: a few roundings.
    torch.testing.assert_close(found.weights, torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=0)
    assert found.is_kept.tolist() == [weight != 0 for weight in weights]


def test_only_samples_of_negative_advantage_are_dropped_as_off_policy():
    """FB-96: the sample decides, and the sign. The first one diverged by .458; with a positive advantage it stays."""
    for advantage in (0.0, 0.5, 1.0):
        assert corrected(torch.full((3,), advantage), sequence_delta=0.0).is_kept.all()


def test_an_exponent_is_bounded():
    """FB-115: a sum over thousands of tokens overflows float32 beyond e^88; it is bounded to e^20 before the clamp."""
    long = torch.full((4000,), 0.1)
    bounds = torch.tensor([0, 4000], dtype=torch.int32)
    settings = CorrectionSettings(kind="tis", level="sequence_sum", high=4.8e8)
    found, _ = importance_correction(settings, torch.zeros(4000), -long, torch.ones(4000, dtype=torch.bool), bounds)
    torch.testing.assert_close(found.weights, torch.full((4000,), 4.8e8))
    assert found.ratios.unique().tolist() == pytest.approx([math.exp(20)])


# Estimators of KL(policy, reference)

REFERENCE = torch.tensor([-1.2, -0.5, -1.0, -0.9, -1.5, -2.0], dtype=torch.float64)
# With d = log_prob - reference: .2, 0, -1, .7, 0, -1.
K3 = [math.exp(-d) + d - 1 for d in (0.2, 0.0, -1.0, 0.7, 0.0, -1.0)]
ESTIMATES = {
    "k1": ([0.2, 0, -1, 0.7, 0, -1], [1] * 6),
    "k2": ([0.02, 0, 0.5, 0.245, 0, 0.5], [0.2, 0, -1, 0.7, 0, -1]),
    "k3": (K3, [0.181269, 0, -1.718282, 0.503415, 0, -1.718282]),
    "k3+": (K3, [0.2, 0, -1, 0.7, 0, -1]),
    "unbiased": ([rho * k3 for rho, k3 in zip(RATIOS.tolist(), K3, strict=True)], [0.3, 0, -4, 0.77, 0, -1.25]),
}


@pytest.mark.parametrize("estimator", ESTIMATES)
def test_value_and_derivative_of_an_estimator_are_those_by_hand(estimator):
    """FB-92: where the policy is below the reference descent raises it."""
    value, derivative = kl_estimate(estimator, LOG_PROBS, REFERENCE, RATIOS.log())
    torch.testing.assert_close(value, torch.tensor(ESTIMATES[estimator][0], dtype=torch.float64), rtol=1e-9, atol=1e-12)
    # Six decimals were written down.
    torch.testing.assert_close(derivative, torch.tensor(ESTIMATES[estimator][1], dtype=torch.float64), rtol=0, atol=5e-7)


# What follows runs code of checkouts: functions are taken out of their files, and nothing is imported.


def source_of(variable: str, path: str) -> ast.Module:
    return ast.parse((Path(os.environ[variable]) / path).read_text())


def functions_of(tree: ast.Module, *names: str, **others) -> types.SimpleNamespace:
    """The functions without their decorators and annotations."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    assert {node.name for node in found} == set(names), "the checkout has the functions"
    for node in found:
        node.decorator_list, node.returns = [], None
        for argument in (*node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
    scope = {"torch": torch, "math": math, **others}
    exec(compile(ast.Module(found, []), "checkout", "exec"), scope)
    return types.SimpleNamespace(**{name: scope[name] for name in names})


def statements_of(tree: ast.Module, method: str, keep: Callable[[str], bool], **scope) -> dict:
    """Runs the top-level statements of a method whose source `keep` wants, and returns their variables."""
    body = next(node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == method)
    kept = [node for node in body if keep(ast.unparse(node))]
    assert kept, "the checkout has the statements"
    scope = {"torch": torch, **scope}
    exec(compile(ast.Module(kept, []), "checkout", "exec"), scope)
    return scope


def rows(values: Tensor) -> Tensor:  # [6] -> [3, 3], padded
    return torch.nn.utils.rnn.pad_sequence(values.split(LENGTHS), batch_first=True)


MASK = rows(torch.ones(6, dtype=torch.float64))


class VerlConfig(dict):
    """Attributes for what verl reads as attributes, keys for what it reads by get."""

    clip_ratio, clip_ratio_low, clip_ratio_high = 0.2, 0.2, 0.28
    tau_pos, tau_neg = 1.0, 1.05
    global_batch_info: dict = {}
    policy_loss = types.SimpleNamespace(dro_beta=0.1)


def by_verl(name: str, advantages: Tensor, log_probs: Tensor, **numbers) -> Tensor:
    masked_mean = types.SimpleNamespace(masked_mean=lambda x, mask: (x * mask).sum() / mask.sum())

    def agg_loss(loss_mat, loss_mask, loss_agg_mode, **others):
        return (loss_mat * loss_mask).sum()

    function = f"compute_policy_loss_{name}"
    scope = {"verl_F": masked_mean, "agg_loss": agg_loss, "AlgoConfig": type("AlgoConfig", (), {}), "ActorConfig": VerlConfig}
    found = functions_of(source_of("VERL_ROOT", "verl/trainer/ppo/core_algos.py"), function, **scope)
    config = VerlConfig(numbers)
    for key, value in numbers.items():
        setattr(config, key, value)
    given = (rows(OLD), rows(log_probs), rows(advantages), MASK)
    loss = getattr(found, function)(*given, config=config)[0]
    return loss * len(LENGTHS) if name == "geo_mean" else loss  # a mean over the rows, not an aggregation


def by_slime(name: str, advantages: Tensor, log_probs: Tensor, *numbers: float) -> Tensor:
    tree = source_of("SLIME_ROOT", "slime/utils/ppo_utils.py")
    found = functions_of(tree, "compute_policy_loss", "compute_cispo_loss", "compute_gspo_kl")
    divergence = OLD - log_probs
    if name == "gspo":
        new, old, ones = (list(x.split(LENGTHS)) for x in (log_probs, OLD, torch.ones(6)))
        divergence = found.compute_gspo_kl(new, old, new, ones)
    if name == "cispo":
        return found.compute_cispo_loss(divergence, log_probs, advantages, *numbers)[0].sum()
    return found.compute_policy_loss(divergence, advantages, *numbers)[0].sum()


def by_miles(advantages: Tensor, log_probs: Tensor, *numbers: float) -> Tensor:
    tree = source_of("MILES_ROOT", "miles/backends/training_utils/loss_hub/math_utils.py")
    scope = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    found = functions_of(tree, "compute_policy_loss", "_safe_exp_neg_ppo_kl", "_safe_clamp_log_ratio", **scope)
    return found.compute_policy_loss(OLD - log_probs, advantages, *numbers)[0].sum()


def by_nemo(advantages: Tensor, log_probs: Tensor, **numbers) -> Tensor:
    """ClippedPGLossFn from the ratio to the clipped loss."""
    tree = source_of("NEMO_RL_ROOT", "nemo_rl/algorithms/loss/loss_functions.py")
    loss = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "ClippedPGLossFn")
    switches = ("force_on_policy_ratio", "disable_ppo_ratio", "sequence_level_importance_ratios", "use_cispo")
    this = types.SimpleNamespace(**dict.fromkeys(switches, False), ratio_clip_min=0.2, ratio_clip_max=0.28, ratio_clip_c=None)
    vars(this).update(numbers)
    given = {
        "self": this,
        **{"curr_logprobs": rows(log_probs), "prev_logprobs": rows(OLD), "advantages": rows(advantages), "token_mask": MASK},
        "masked_mean": lambda x, mask, dim: (x * mask).sum(dim) / mask.sum(dim),
    }
    heads = ("if self.force_on_policy_ratio", "if self.use_cispo:", "if self.ratio_clip_c is not None")
    found = statements_of(ast.Module([loss], []), "__call__", lambda text: text.startswith(heads), **given)
    return (found["clip_loss"] * MASK).sum()


DUAL = {**CLIP, "clip_ratio_c": 3.0}
WIDE = {"clip_ratio_low": 1.0, "clip_ratio_high": 0.28}
TV, KL = ({"divergence_low": b, "divergence_high": b, "ratio_truncation": 2.0} for b in (0.12, 0.03))
MEAN = {"weights": torch.tensor([1 / n for n in LENGTHS], dtype=torch.float64)}
# What a peer computes in float32 (SAPO's temperatures in verl, miles's ratio) or adds to a denominator: verl's GMPO adds
# 1e-8 in three places, for a sample of one token at ratio 4 (2 + ln 4) 1e-8 of a coefficient of 4.
ROUNDED = {"verl sapo": 2e-7, "miles grpo": 1e-6, "verl geo_mean": 1.4e-7}
VERL, SLIME, MILES, NEMO_RL = "VERL_ROOT", "SLIME_ROOT", "MILES_ROOT", "NEMO_RL_ROOT"
VERLS_GMPO = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
VERLS_TV, VERLS_KL = ({"clip_ratio_low": b, "clip_ratio_high": b, "clip_ratio_c": 2.0} for b in (0.12, 0.03))
# Ours with its options; the checkout; its function.
PEERS = {
    "verl vanilla": ("grpo", DUAL, VERL, functools.partial(by_verl, "vanilla", clip_ratio_c=3.0)),
    "verl gspo": ("gspo_token", CLIP, VERL, functools.partial(by_verl, "gspo")),
    "verl cispo": ("cispo", CLIP, VERL, functools.partial(by_verl, "cispo")),
    "verl sapo": ("sapo", {}, VERL, functools.partial(by_verl, "sapo")),
    "verl geo_mean": ("gmpo", MEAN, VERL, functools.partial(by_verl, "geo_mean", **VERLS_GMPO)),
    "verl dppo_tv": ("dppo_tv", TV, VERL, functools.partial(by_verl, "dppo_tv", **VERLS_TV)),
    "verl dppo_kl": ("dppo_kl", KL, VERL, functools.partial(by_verl, "dppo_kl", **VERLS_KL)),
    "verl dro": ("dro", {"log_ratio_penalty": 0.1}, VERL, functools.partial(by_verl, "dro")),
    "slime grpo": ("grpo", DUAL, SLIME, lambda *given: by_slime("grpo", *given, 0.2, 0.28, 3.0)),
    "slime gspo": ("gspo", DUAL, SLIME, lambda *given: by_slime("gspo", *given, 0.2, 0.28, 3.0)),
    "slime cispo": ("cispo", WIDE, SLIME, lambda *given: by_slime("cispo", *given, 1.0, 0.28)),
    "miles grpo": ("grpo", DUAL, MILES, lambda *given: by_miles(*given, 0.2, 0.28, 3.0)),
    "nemo-rl grpo": ("grpo", DUAL, NEMO_RL, functools.partial(by_nemo, ratio_clip_c=3.0)),
    "nemo-rl gspo": ("gspo", CLIP, NEMO_RL, functools.partial(by_nemo, sequence_level_importance_ratios=True)),
    "nemo-rl cispo": ("cispo", CLIP, NEMO_RL, functools.partial(by_nemo, use_cispo=True)),
    "nemo-rl reinforce": ("reinforce", {}, NEMO_RL, functools.partial(by_nemo, disable_ppo_ratio=True)),
}


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["", "negated"])
@pytest.mark.parametrize(
    ("name", "options", "theirs", "tolerance"),
    [
        pytest.param(
            *(name, options, function, ROUNDED.get(key, 1e-12)),
            id=key,
            marks=pytest.mark.skipif(not os.environ.get(variable), reason=f"needs {variable}, the root of a checkout"),
        )
        for key, (name, options, variable, function) in PEERS.items()
    ],
)
def test_the_coefficients_are_those_of_the_peers_own_function(name, options, theirs, tolerance, sign):
    log_probs = LOG_PROBS.clone().requires_grad_()
    (want,) = torch.autograd.grad(theirs(sign * ADVANTAGES[OF_TOKENS], log_probs), log_probs)
    found = coefficients(name, sign, **options)
    assert found == pytest.approx(want.tolist(), abs=tolerance)
