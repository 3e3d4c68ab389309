"""--distillation through the real GPTModel, schedule, DDP and finalize_model_grads: any layout has the gradient of one process."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from helpers import error_of, pool_of

from megatron_rl.config import PolicyLossConfig
from megatron_rl.testing.invariance import Layout, StepSample, TinyGPT, step_on_layout
from megatron_rl.testing.reference import double_model, global_parameters, model_logits, ragged_samples
from megatron_rl.validation.advice import numbers_in_words

pytestmark = pytest.mark.megatron

TINY, K = TinyGPT(num_layers=2), 3
# A float32 gradient is 3e-7 to 6e-7 from the truth; without the teacher of one token of 113 it is 1e-3.
TOLERANCE = 1e-5
TOPK = PolicyLossConfig(distillation="topk", distillation_coefficient=0.7, loss_aggregation="prompt_mean")
SAMPLED = replace(TOPK, distillation="sampled", loss_aggregation="token_mean")
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


def truth_on_rank(rank: int, config: PolicyLossConfig) -> tuple[float, float, dict[str, torch.Tensor]]:
    """(policy loss, distillation, gradient) in float64 by the definitions: the weights of prompt_mean or token_mean, the reverse KL
    of K ids and one bucket for the others, and advantages A + coefficient (log q - log p) at the ratio 1."""
    samples = taught_samples()
    model = double_model(TINY, samples)
    counts = [sum(sample.loss_mask) for sample in samples]
    prompts = [sample.prompt_id for sample in samples]
    live = {name: sum(c for c, p in zip(counts, prompts, strict=True) if p == name) for name in prompts}
    policy, distillation = torch.zeros(2, dtype=torch.float64)
    for sample, logits in zip(samples, model_logits(model, samples, TINY), strict=True):
        weight = 1 / sum(counts) if config.loss_aggregation == "token_mean" else 1 / (len(live) * live[sample.prompt_id])
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
    return functools.cache(lambda config: pool.run(truth_on_rank, config, world_size=1)[0])


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


@pytest.mark.parametrize(("layout", "config", "head"), LAYOUTS, ids=str)
def test_any_layout_has_the_gradient_of_one_process(pool, truth_of, layout, config, head):
    policy, distillation, gradient = truth_of(config)
    found = step_on_layout(pool, layout, taught_samples(), replace(config, **head), TINY)
    norm = sum(float(value.square().sum()) for value in gradient.values()) ** 0.5
    difference = sum(float((found.gradient[name] - value).square().sum()) for name, value in gradient.items()) ** 0.5
    assert found.gradient.keys() == gradient.keys() and difference < TOLERANCE * norm
    assert found.loss == pytest.approx(policy + distillation, rel=TOLERANCE, abs=TOLERANCE)
    names = {"policy/distillation", "policy/teacher_mass"} & found.metrics.keys()
    assert len(names) == (2 if config.distillation == "topk" else 0) and names <= found.reported.keys()


def test_a_start_line_says_the_term():
    assert numbers_in_words(TOPK) == "clip 0.2/0.2, distillation 0.7 x reverse_kl, topk"


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


@pytest.mark.parametrize(("config", "fields", "message"), REFUSED)
def test_a_step_without_the_teacher_that_the_flag_asks_for_is_refused(pool, config, fields, message):
    [found] = pool.run(error_on_rank, config, fields, world_size=1)
    assert found.startswith(message)
