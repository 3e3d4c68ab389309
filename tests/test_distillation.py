"""A teacher's distribution: values by hand, the tail, and what its gradient takes. Whole steps: tests/test_generated_steps.py."""

from __future__ import annotations

import ast
import functools
import gc
import itertools
import math
import os
import types
import weakref
from dataclasses import replace

import pytest
import test_layouts
import torch
from helpers import error_of, float32, pool_of
from linear_cases import VOCAB_SIZE, Seen, head_batch
from test_golden_losses import functions_of, source_of
from torch import Tensor

from megatron_rl import DistillationSettings, HeadTeacher, LogitsTeacher, TopKTeacher, linear_policy_loss
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import DataError
from megatron_rl.losses.distillation import DIVERGENCES
from megatron_rl.ops import distribution, log_probs_torch
from megatron_rl.policy_loss import policy_loss
from megatron_rl.testing.invariance import Layout, StepSample, TinyGPT, step_on_layout
from megatron_rl.testing.oracle import token_weights
from megatron_rl.testing.reference import (
    dense_samples,
    double_model,
    global_parameters,
    model_logits,
    ragged_samples,
    settings_of,
)
from megatron_rl.testing.selftest import AGGREGATIONS
from megatron_rl.validation.advice import numbers_in_words

# One token, V = 5, temperature 1: policy zs, teacher zt, and its two likeliest ids. Each value and gradient is written out in
# float64 by the definitions: p = softmax(zs), q = softmax(zt), and for the tail p_T = p_0 + p_2 + p_4.
POLICY, TEACHER, TOP_2 = [1.2, 0.3, -0.5, 0.0, -2.0], [0.2, 1.5, -1.0, 0.4, -0.3], [1, 3]
GOLDEN = {
    ("reverse_kl", "all"): (0.472754493, [0.406889977, -0.297727884, 0.027034400, -0.095793097, -0.040403396]),
    ("forward_kl", "all"): (0.443415707, [0.370717277, -0.329201607, 0.050291857, -0.023698253, -0.068109274]),
    ("reverse_kl", "top 2"): (0.295609576, [0.268585360, -0.260434289, 0.049066120, -0.068165322, 0.010948131]),
    ("forward_kl", "top 2"): (0.305039237, [0.288447498, -0.329201607, 0.052694606, -0.023698253, 0.011757756]),
    ("jsd", "all"): (0.108508710, [0.087443431, -0.071897395, 0.009631608, -0.013927231, -0.011250413]),
}


def divergence(policy: Tensor, teacher, name: str, **options) -> tuple[Tensor, Tensor]:  # [T, V] -> [T], gradient [T, V]
    """Each row a sample of one token of weight 1, whose policy term is 0."""
    size = policy.shape[0]
    leaf = policy.clone().requires_grad_()
    tensors = (torch.zeros(size, dtype=torch.int64), None, torch.zeros(size), torch.ones(size, dtype=torch.bool))
    bounds, settings = torch.arange(size + 1, dtype=torch.int32), DistillationSettings(divergence=name, **options)
    output = policy_loss("grpo", leaf, *tensors, bounds, torch.ones(size), distillation=settings, teacher=teacher)
    output.loss.backward()
    torch.testing.assert_close(output.divergences.sum(), output.loss.detach())
    return output.divergences, leaf.grad


def top(logits: Tensor, ids: list[int] | Tensor) -> TopKTeacher:  # [T, V]
    ids = torch.as_tensor(ids).expand(len(logits), -1)
    return TopKTeacher(ids, (logits - logits.logsumexp(-1, keepdim=True)).gather(1, ids))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("name", "ids"), GOLDEN)
def test_values_and_gradients_are_those_by_hand(name, ids, dtype, tolerance):
    policy, teacher = (torch.tensor([x], dtype=dtype) for x in (POLICY, TEACHER))
    value, gradient = divergence(policy, LogitsTeacher(teacher) if ids == "all" else top(teacher, TOP_2), name)
    wanted, wanted_gradient = GOLDEN[name, ids]
    assert float(value) == pytest.approx(wanted, abs=tolerance)
    assert gradient.tolist()[0] == pytest.approx(wanted_gradient, abs=tolerance)


def test_a_policy_with_more_mass_in_the_top_k_than_the_teacher_has_a_positive_value():
    """FB-132: without the tail it is -0.230347179, and a clamp at 0 would take its gradient."""
    policy, teacher = (torch.tensor([x], dtype=torch.float64) for x in ([-3.0, 2.5, -3.0, 1.4, -3.0], TEACHER))
    value, gradient = divergence(policy, top(teacher, TOP_2), "forward_kl")
    assert float(value) == pytest.approx(0.731340921, abs=1e-9) and gradient.abs().max() > 0.1


def test_a_sampled_teacher_is_an_advantage():
    """log q - log p of the label: 0.941455678 for action 1, constant, through the policy loss; the ratio is 1."""
    leaf = torch.tensor([POLICY], dtype=torch.float64, requires_grad=True)
    label, one = torch.tensor([1]), torch.ones(1, dtype=torch.bool)
    log_q = torch.tensor([TEACHER], dtype=torch.float64).log_softmax(-1)[:, 1]
    given = (label, None, torch.zeros(1), one, torch.tensor([0, 1], dtype=torch.int32), torch.ones(1))
    policy_loss("grpo", leaf, *given, distillation=DistillationSettings(), teacher_log_probs=log_q).loss.backward()
    p = leaf.detach().softmax(-1)
    torch.testing.assert_close(leaf.grad, 0.941455678 * (p - torch.eye(5)[1]), rtol=0, atol=1e-9)


def test_the_mean_of_a_sampled_teacher_over_the_policy_is_the_gradient_of_the_reverse_kl():
    """By enumeration of the actions."""
    policy, teacher = (torch.tensor([x], dtype=torch.float64) for x in (POLICY, TEACHER))
    p, gap = policy.softmax(-1)[0], (teacher.log_softmax(-1) - policy.log_softmax(-1))[0]
    mean = sum(p[a] * gap[a] * (p - torch.eye(5)[a]) for a in range(5))
    torch.testing.assert_close(mean, divergence(policy, LogitsTeacher(teacher), "reverse_kl")[1][0], rtol=0, atol=1e-12)


ROWS = torch.randn(2, 200, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_tail_loses_no_more_than_it_must(name):
    """At least 0 and at most all columns' (a coarser partition), more with each id; all ids are all columns, bit for bit. 1e-9: the
    teacher's tail of 3e-6 is 1 - the sum of the others, which leaves 3e-11 of it."""
    policy, teacher = ROWS
    whole = divergence(policy, LogitsTeacher(teacher), name)
    before, order = torch.zeros(len(policy)).double(), teacher.argsort(-1, descending=True)
    for count in (1, 3, 11):
        value, _ = divergence(policy, top(teacher, order[:, :count]), name)
        assert bool((value >= before - 1e-9).all() and (value <= whole[0] + 1e-9).all())
        before = value
    for got, want in zip(divergence(policy, top(teacher, torch.arange(12)), name), whole, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("teacher", [LogitsTeacher(ROWS[1, :4]), top(ROWS[1, :4], [0, 7, 3])], ids=["all", "top 3"])
def test_the_gradient_is_that_of_finite_differences(name, teacher):
    def value(policy):
        size = len(policy)
        given = (torch.zeros(size, dtype=torch.int64), None, torch.zeros(size), torch.ones(size, dtype=torch.bool))
        temperature = 1.6 if isinstance(teacher, LogitsTeacher) else 1.0
        settings = DistillationSettings(divergence=name, coefficient=0.7, teacher_temperature=temperature)
        options = {"distillation": settings, "teacher": teacher, "temperature": 0.8}
        return policy_loss("grpo", policy, *given, torch.arange(size + 1, dtype=torch.int32), torch.ones(size), **options).loss

    torch.autograd.gradcheck(value, ROWS[0, :4].clone().requires_grad_())


def test_a_mass_near_one_keeps_its_digits_and_what_a_server_cannot_say_is_a_constant():
    """p_T of 1e-9 by 1 - sum in K has one digit in float32; q_T of 0, and -inf inside K, are at least 1e-7."""
    policy = torch.tensor([[20.0, 0.0, -1.0, -2.0]])
    teacher = TopKTeacher(torch.tensor([[0, 1]]), torch.tensor([[0.0, -math.inf]]))
    value, gradient = divergence(policy, teacher, "forward_kl")
    p = policy.double().softmax(-1)[0]
    wanted = -p[0].log() + 1e-7 * (1e-7 / p[1]).log() + 1e-7 * (1e-7 / (p[2] + p[3])).log()
    assert float(value) == pytest.approx(float(wanted), rel=1e-2, abs=1e-10)  # -log p_0 of 3e-9 is below float32's step at 1
    tail = gradient[0, 2:].double()
    torch.testing.assert_close(tail, (p * (1 - 1e-7 / (p[2] + p[3])))[2:], rtol=1e-5, atol=0)


def test_a_tail_below_the_smallest_number_keeps_its_gradient():
    """p_T is 3 e^-110: 0 in float32, and its logarithm is exact. Each column has -1/3 of q_T = 1/2."""
    policy = torch.tensor([[0.0, -110.0, -110.0, -110.0]])
    value, gradient = divergence(policy, TopKTeacher(torch.tensor([[0]]), torch.tensor([[math.log(0.5)]])), "forward_kl")
    assert float(value) == pytest.approx(0.5 * (110 - math.log(3)) - math.log(2), rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor([[0.5, -1 / 6, -1 / 6, -1 / 6]]))


def test_a_teacher_that_was_written_to_is_noticed_and_nothing_is_kept():
    size, teacher = 4, torch.randn(4, 8)
    leaf = torch.randn(size, 8, requires_grad=True)
    tensors = (torch.zeros(size, dtype=torch.int64), None, torch.zeros(size), torch.ones(size, dtype=torch.bool))
    given = (*tensors, torch.arange(size + 1), torch.ones(size))
    output = policy_loss("grpo", leaf, *given, distillation=DistillationSettings(), teacher=LogitsTeacher(teacher))
    teacher.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.loss.backward()
    gone = weakref.ref(teacher)
    gc.disable()
    del teacher, output
    found, _ = gone(), gc.enable()
    assert found is None


def test_a_teachers_head_multiplies_each_row_once_in_forward_and_gradient(monkeypatch):
    """Four matmuls: three of the policy's, one of the teacher's. In memory are two chunks, and some rows of scratch."""
    case, multiply, sizes = head_batch(), distribution.teacher_product, []
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(n, case.hidden.shape[1], generator=generator, dtype=torch.float64) for n in (len(case.hidden), VOCAB_SIZE)
    )

    def counted(rows, head):
        sizes.append(len(rows))
        return multiply(rows, head)

    monkeypatch.setattr(distribution, "teacher_product", counted)
    leaf, batch = case.hidden.clone().requires_grad_(), case.batch
    bounds = torch.tensor([0, *(len(document) for document in batch.documents)]).cumsum(0).int()
    given = (batch.labels, batch.old_log_probs, batch.advantages, batch.loss_mask, bounds, batch.token_weights)
    options = {"distillation": DistillationSettings(), "teacher": HeadTeacher(hidden, weight)}
    row_bytes, rows = 8 * VOCAB_SIZE, 12
    for module in (distribution, log_probs_torch):  # scratch of one row
        monkeypatch.setattr(module, "CPU_CHUNK_BYTES", row_bytes)
    with Seen(case.hidden.shape[1], VOCAB_SIZE) as seen:
        output = linear_policy_loss("grpo", leaf, case.weight, *given, max_logits_bytes=rows * row_bytes, **options)
        output.loss.backward()
    assert sum(sizes) == int(batch.loss_mask.sum()) and max(sizes) <= rows < sum(sizes)
    assert seen.peak_bytes <= 2 * rows * row_bytes, "chunks have 9 rows, which leaves 6 for scratch"


def test_bad_ids_on_a_gpu_are_counted(monkeypatch):
    """Where nobody reads the device the loss counts their rows as not finite."""

    case = float32(head_batch([2, 2]).batch)
    ids = torch.tensor([[0, 1], [2, 2], [0, 1], [0, 99]])
    monkeypatch.setattr("megatron_rl.policy_loss.api.check_teacher", lambda *given: None)
    batch = replace(case, loss_mask=torch.ones(4, dtype=torch.bool))
    given = (batch.labels, batch.old_log_probs, batch.advantages, batch.loss_mask, torch.tensor([0, 2, 4]), batch.token_weights)
    with pytest.raises(DataError, match="1 unmasked tokens .* in divergence from the teacher; 2 documents"):
        policy_loss(
            "grpo",
            batch.logits,
            *given,
            distillation=DistillationSettings(),
            teacher=TopKTeacher(ids, torch.full((4, 2), -1.0)),
        )


# What peers compute, by their own functions from checkouts named by VERL_ROOT and NEMO_RL_ROOT. They compute in float32.
NEAR = ROWS / 3


def by_verl(policy: Tensor, teacher: TopKTeacher) -> Tensor:
    """Of each row the sum over K of q (log q - log p), before their clamp at 0."""
    of_one_rank = {"F": torch.nn.functional, "get_ulysses_sequence_parallel_world_size": lambda: 1}
    tree = source_of("VERL_ROOT", "verl/trainer/distillation/fsdp/losses.py")
    found = functions_of(tree, "compute_forward_kl_topk", "kl_divergence", **of_one_rank)
    log_probs, ids = (torch.nested.nested_tensor([x], layout=torch.jagged) for x in (teacher.log_probs, teacher.ids))
    config = types.SimpleNamespace(distillation_loss=types.SimpleNamespace(log_prob_min_clamp=None))
    return found.compute_forward_kl_topk(policy[None], log_probs, ids, config, "thd")["distillation_losses"][0]


def by_nemo(kind: str, policy: Tensor, teacher: TopKTeacher) -> Tensor:
    """The sum over the rows. They renormalise p and q over K."""
    rows = [torch.cat([x, x[:1]])[None] for x in (policy, teacher.log_probs, teacher.ids)]  # they drop the last one
    name = "get_distillation_topk_logprobs_from_logits"
    topk = functions_of(source_of("NEMO_RL_ROOT", "nemo_rl/distributed/model_utils.py"), name)
    log_p, log_q, _ = vars(topk)[name](*rows, zero_outside_topk=False, calculate_entropy=False)
    tree = source_of("NEMO_RL_ROOT", "nemo_rl/algorithms/loss/loss_functions.py")
    loss = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "DistillationLossFn")
    of_loss = types.SimpleNamespace(kl_type=kind, zero_outside_topk=False, mixed_kl_weight=0.5)
    call = vars(functions_of(ast.Module([loss], []), "__call__"))["__call__"]
    return call(of_loss, log_p, log_q, None, {"input_ids": log_p}, None, None)[0] * len(policy)


def needs(variable: str):
    return pytest.mark.skipif(not os.environ.get(variable), reason=f"needs {variable}, the root of a checkout")


@needs("VERL_ROOT")
@pytest.mark.parametrize("count", [3, 12])
def test_the_forward_kl_is_verls_sum_and_the_tail(count):
    """verl has no tail; with all ids none is missing."""
    policy, teacher = NEAR[0].clone().requires_grad_(), top(NEAR[1], NEAR[1].topk(count).indices)
    wanted = by_verl(policy, teacher)
    if count < 12:
        q, p = (1 - x.sum(-1) for x in (teacher.log_probs.exp(), policy.softmax(-1).gather(1, teacher.ids)))
        wanted = wanted + q * (q / p).log()
    value, gradient = divergence(NEAR[0], teacher, "forward_kl")
    torch.testing.assert_close(value, wanted.detach().double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted.sum(), policy)[0].double(), rtol=0, atol=1e-6)


@needs("NEMO_RL_ROOT")
@pytest.mark.parametrize("kind", ["forward", "reverse"])
@pytest.mark.parametrize("count", [3, 12])
def test_the_kl_is_nemo_rls_over_a_vocabulary_of_its_top_k(kind, count):
    """NeMo-RL asks for logits and renormalises: what it compares is our divergence of a policy that has no other ids."""
    ids = NEAR[1].topk(count).indices
    policy, teacher = (logits.gather(1, ids) for logits in NEAR)
    leaf, own = policy.clone().requires_grad_(), torch.arange(count).expand_as(ids)
    wanted = by_nemo(kind, leaf, TopKTeacher(own, teacher))
    value, gradient = divergence(policy, LogitsTeacher(teacher), f"{kind}_kl")
    torch.testing.assert_close(value.sum(), wanted.detach().double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, leaf)[0].double(), rtol=0, atol=1e-6)


OPD = {"SLIME_ROOT": "slime/backends/megatron_utils/loss.py", "MILES_ROOT": "miles/backends/training_utils/loss_hub/opd.py"}


@pytest.mark.parametrize("root", [pytest.param(root, marks=needs(root)) for root in OPD])
def test_the_use_opd_of_miles_and_slime_is_a_sampled_teacher(root):
    """Their advantages in our loss, and our teacher beside advantages without one."""
    batch = float32(head_batch().batch)
    labels, old, _, *given = batch.arguments()
    scores = functions_of(source_of(root, OPD[root]), "apply_opd_kl_to_advantages")
    advantages, teacher = torch.linspace(-1, 1, len(labels)), old - torch.linspace(0, 1, len(labels))
    theirs = [advantages.clone()]
    scores.apply_opd_kl_to_advantages(types.SimpleNamespace(opd_kl_coef=0.3), {"teacher_log_probs": [teacher]}, theirs, [old])
    ours = {"distillation": DistillationSettings(coefficient=0.3), "teacher_log_probs": teacher}
    found = []
    for values, options in ((theirs[0], {}), (advantages, ours)):
        leaf = batch.logits.clone().requires_grad_()
        policy_loss("grpo", leaf, labels, old, values, *given, advantages_per="token", **options).loss.backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found, rtol=0, atol=1e-7)


# --distillation through the real GPTModel, schedule, DDP and finalize_model_grads: any layout has the gradient of one process.


TINY, K = TinyGPT(num_layers=2), 3
# Of 230 steps in float32 none is farther than 2.9e-7 from the truth; without the teacher of one token of 113 it is 1e-3.
TOLERANCE = 1e-6
TOPK = PolicyLossConfig(distillation="topk", distillation_coefficient=0.7, loss_aggregation="prompt_mean")
SAMPLED = replace(TOPK, distillation="sampled", loss_aggregation="token_mean")
DIVISORS = {name: 8.0 if name == "constant" else None for name in AGGREGATIONS}
FUSED = {"fused_lm_head_loss": True, "max_logits_bytes": 1500}
pool = pool_of(4)


def taught_samples() -> list[StepSample]:
    """On-policy, each with both kinds of teacher. At masked tokens there is what a server may give for no answer."""
    generator = torch.Generator().manual_seed(0)
    step = []
    for sample in ragged_samples():
        size = len(sample.loss_mask)
        scores = torch.randn(size, TINY.true_vocab_size, generator=generator).mul(3).log_softmax(-1)
        best = scores.topk(K)
        labels, is_masked = torch.tensor(sample.tokens[-size:])[:, None], torch.tensor(sample.loss_mask)[:, None] == 0
        teacher = {
            "teacher_log_probs": scores.gather(1, labels).masked_fill(is_masked, torch.nan)[:, 0],
            "teacher_topk_ids": best.indices.masked_fill(is_masked, -1),
            "teacher_topk_log_probs": best.values.masked_fill(is_masked, torch.nan),
        }
        step.append(replace(sample, **{name: values.tolist() for name, values in teacher.items()}))
    return step


def truth_on_rank(rank: int, config: PolicyLossConfig, tiny: TinyGPT) -> tuple[float, float, dict[str, torch.Tensor]]:
    """(policy loss, distillation, gradient) in float64 by the definitions: the weights of the oracle, the reverse KL of K ids and
    one bucket for the others, and advantages A + coefficient (log q - log p) at the ratio 1."""
    samples = taught_samples()
    model = double_model(tiny, samples)
    counts = [sum(sample.loss_mask) for sample in samples]
    weights = token_weights(dense_samples(samples), counts, settings_of(config))
    policy, distillation = torch.zeros(2, dtype=torch.float64)
    for sample, weight, logits in zip(samples, weights, model_logits(model, samples, tiny), strict=True):
        log_p = logits.log_softmax(-1)
        for t, is_live in enumerate(sample.loss_mask):
            if not is_live:
                continue
            score, advantage = log_p[t, sample.tokens[t - len(sample.loss_mask)]], sample.advantage
            if config.distillation == "sampled":
                advantage += config.distillation_coefficient * (sample.teacher_log_probs[t] - float(score.detach()))
            else:
                ids, log_q = sample.teacher_topk_ids[t], torch.tensor(sample.teacher_topk_log_probs[t], dtype=torch.float64)
                others = [v for v in range(TINY.true_vocab_size) if v not in ids]
                log_p_b = torch.cat([log_p[t, ids], log_p[t, others].logsumexp(-1)[None]])
                log_q_b = torch.cat([log_q, torch.log1p(-log_q.exp().sum())[None]])
                divergence = (log_p_b.exp() * (log_p_b - log_q_b)).sum()
                distillation = distillation + config.distillation_coefficient * weight * divergence
            policy = policy - weight * advantage * (score - score.detach()).exp()
    parameters = global_parameters(model)
    gradients = torch.autograd.grad(policy + distillation, list(parameters.values()))
    return float(policy.detach()), float(distillation), {name: g.cpu() for name, g in zip(parameters, gradients, strict=True)}


@pytest.fixture(scope="module")
def truth_of(pool):
    return functools.cache(lambda config, tiny: pool.run(truth_on_rank, config, tiny, world_size=1)[0])


IDLE = Layout(data=2, num_microbatches=9)  # for 16 samples: each rank has a micro-batch without one
LAYOUTS = [
    (Layout(num_microbatches=4), TOPK, {}),
    (IDLE, TOPK, {}),
    (IDLE, TOPK, FUSED),
    (Layout(context=2, num_microbatches=2), TOPK, {}),
    (Layout(tensor=2, sequence_parallel=True, num_microbatches=2), TOPK, FUSED),
    (Layout(tensor=2, num_microbatches=2), TOPK, {}),
    (Layout(pipeline=2, num_microbatches=2), TOPK, {}),
    (Layout(packed=True, context=2, data=2, num_microbatches=2), TOPK, FUSED),
    (IDLE, SAMPLED, {}),
    (Layout(packed=True, context=2, tensor=2, num_microbatches=2), SAMPLED, FUSED),
]
if os.environ.get("EVERY_COMBINATION") == "1":
    configs = [replace(TOPK, loss_aggregation=name, loss_aggregation_divisor=divisor) for name, divisor in DIVISORS.items()]
    layouts = [row.values[0] for row in test_layouts.LAYOUTS]
    LAYOUTS += [*itertools.product(layouts, configs, ({}, FUSED))]


@pytest.mark.megatron
@pytest.mark.parametrize(("layout", "config", "head"), LAYOUTS, ids=str)
def test_any_layout_has_the_gradient_of_one_process(pool, truth_of, layout, config, head):
    tiny = TinyGPT(num_layers=max(2, layout.pipeline * (layout.virtual_pipeline or 1)))
    policy, distillation, gradient = truth_of(config, tiny)
    found = step_on_layout(pool, layout, taught_samples(), replace(config, **head), tiny)
    norm = sum(float(value.square().sum()) for value in gradient.values()) ** 0.5
    difference = sum(float((found.gradient[name] - value).square().sum()) for name, value in gradient.items()) ** 0.5
    assert found.gradient.keys() == gradient.keys() and difference < TOLERANCE * norm
    assert found.loss == pytest.approx(policy + distillation, rel=TOLERANCE, abs=TOLERANCE)
    names = {"policy/distillation", "policy/teacher_mass"} & found.metrics.keys()
    assert len(names) == (2 if config.distillation == "topk" else 0) and names <= found.reported.keys()


@pytest.mark.megatron
def test_a_start_line_says_the_term():
    assert numbers_in_words(TOPK) == "clip 0.2/0.2, distillation 0.7 x reverse_kl, topk"
    jsd = replace(TOPK, distillation_divergence="jsd", distillation_beta=0.3)
    assert numbers_in_words(jsd) == "clip 0.2/0.2, distillation 0.7 x jsd with beta 0.3, topk"


def error_on_rank(rank, config, fields):
    from megatron_rl.testing.layout_step import LayoutModel

    samples = [replace(sample, **fields) for sample in taught_samples()]
    return error_of(lambda: LayoutModel(Layout(), 64, TINY).step(config, samples))


MISSING = (
    "DataError: the samples of a micro-batch have no {}, which --distillation {} needs: record the teacher's, or remove the flag"
)
REFUSED = [
    (SAMPLED, {"teacher_log_probs": None}, MISSING.format("teacher_log_probs", "sampled")),
    (TOPK, {"teacher_topk_log_probs": None}, MISSING.format("teacher_topk_log_probs", "topk")),
    (
        PolicyLossConfig(),
        {"teacher_topk_ids": None, "teacher_topk_log_probs": None},
        "DataError: the samples of a micro-batch have teacher_log_probs without --distillation, which would train nothing: add it",
    ),
]


@pytest.mark.megatron
@pytest.mark.parametrize(("config", "fields", "message"), REFUSED)
def test_a_step_without_the_teacher_that_the_flag_asks_for_is_refused(pool, config, fields, message):
    [found] = pool.run(error_on_rank, config, fields, world_size=1)
    assert found.startswith(message)
