"""Calls with one wrong argument each and launches that a rule refuses; the golden table of what is said: tests/messages.txt.

`python tests/pages.py tests/messages.txt` writes the table. A row needs no pattern: whoever changes a message sees it in the table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from inspect import signature

import refused_hosts
import torch
from helpers import CLIP, S_PROMPTS, names_forgotten, s_masks
from torch import Tensor

from megatron_rl import Parameter, register_correction, register_loss_aggregation, register_policy_loss
from megatron_rl.config import LaunchMethod, PolicyLossConfig
from megatron_rl.count import StepTotals, count_step
from megatron_rl.declare import POLICY_LOSSES, get_policy_loss
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.losses.distillation import DistillationSettings
from megatron_rl.ops.distribution import LogitsTeacher, TopKTeacher
from megatron_rl.ops.linear_log_probs import linear_log_probs
from megatron_rl.ops.log_probs import vocab_parallel_log_probs
from megatron_rl.policy_loss import api, grpo_loss, importance_correction, linear_gspo_loss, value_loss
from megatron_rl.validation import Settings, config_warnings
from megatron_rl.validation.rules import RULES
from megatron_rl.weights import sample_token_weights

ONES, TOO_LONG = torch.ones(5), torch.full((5,), 1e300, dtype=torch.float64)
INT64, DOUBLE = torch.int64, torch.float64
PACKED = {
    "labels": torch.zeros(5, dtype=INT64),
    "old_log_probs": torch.zeros(5),
    "advantages": torch.ones(2),
    "loss_mask": torch.ones(5, dtype=torch.bool),
    "cu_seqlens": torch.tensor([0, 2, 5], dtype=torch.int32),
    "token_weights": torch.ones(2),
}


def loss_of_logits(**changes):
    """2 documents of 2 and 3 tokens."""
    return grpo_loss(**{"logits": torch.zeros(5, 4), **PACKED, **changes})


def loss_with_teacher(ids=(0, 1), log_probs=(-1.0, -2.0), **changes):
    """Of 4 ids. The top K are the same at each token; others are settings."""
    teacher = TopKTeacher(torch.tensor(ids).expand(5, -1), torch.tensor(log_probs).expand(5, -1))
    settings = {name: changes.pop(name) for name in [*changes] if name in DistillationSettings.__slots__}
    return loss_of_logits(**{"teacher": teacher, "distillation": DistillationSettings(**settings), **changes})


def loss_of_hidden(**changes):
    head = {"hidden": torch.zeros(5, 6, requires_grad=True), "weight": torch.zeros(16, 6), "max_logits_bytes": 10**6}
    return linear_gspo_loss(**{**head, **PACKED, **CLIP, **changes})


def loss_of_log_probs(**changes):
    others = {name: value for name, value in PACKED.items() if name != "labels"}
    return api.loss_of_log_probs("grpo", torch.zeros(5, requires_grad=True), **others | changes)


def log_probs_of_hidden(**changes):
    arguments = {"hidden": torch.zeros(5, 6), "weight": torch.zeros(16, 6), "labels": PACKED["labels"], **changes}
    return linear_log_probs(**arguments)


def log_probs_of_logits(**changes):
    return vocab_parallel_log_probs(**{"logits": torch.zeros(8, 16), "labels": torch.zeros(8, dtype=INT64), **changes})


def loss_of_values(**changes):
    others = {name: PACKED[name] for name in ("loss_mask", "cu_seqlens", "token_weights")}
    given = {"values": torch.zeros(5, requires_grad=True), "returns": ONES, "old_values": ONES, "clip": 0.2}
    return value_loss(**given | others | changes)


VECTORS = ("old_log_probs", "rollout_log_probs", "log_probs", "advantages")


def correction_of(**changes):
    """The settings are arguments too."""
    given = {name: torch.zeros(3) for name in VECTORS} | {"loss_mask": torch.ones(3, dtype=torch.bool)}
    given |= {"cu_seqlens": torch.tensor([0, 3], dtype=torch.int32)}
    settings = {name: value for name, value in changes.items() if name not in given}
    return importance_correction(
        CorrectionSettings(**(settings or {"kind": "tis"})), **given | dict(changes.items() - settings.items())
    )


def weights_of_a_step(aggregation="sample_mean", totals=StepTotals(4, 2, 7), token_counts=(2, 4, 1, 0), **others):  # noqa: B008
    """Step S."""
    others = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in others.items()}
    if aggregation == "prompt_mean" and "prompt_token_counts" not in others:
        others["prompt_token_counts"] = torch.tensor([6, 6, 1, 1])
    if aggregation == "constant":
        others = {"divisor": 8.0} | others
    return sample_token_weights(aggregation, torch.tensor(token_counts), totals, **others)


def weights_of_rollouts(totals=StepTotals(7, 2, 15, 4), **others):  # noqa: B008
    """7 rows of 4 rollouts, the last one without a token."""
    given = {"rollout_token_counts": [6, 6, 3, 6, 6, 6, 0]} | others
    given = {name: torch.tensor(value) for name, value in given.items() if value is not None}
    return sample_token_weights("sample_mean", torch.tensor([2, 4, 3, 1, 1, 4, 0]), totals, **given)


def totals_of_a_step(num_samples=4, num_prompts=2, num_tokens=7, num_rollouts=4):
    return StepTotals(num_samples, num_prompts, num_tokens, num_rollouts)


def counts_of_a_step(**changes):
    """Step S."""
    return count_step(**{"loss_masks": s_masks(), "prompt_ids": S_PROMPTS} | changes)


def of_ones_own(log_ratio, advantages):
    """A loss that is right."""


def loss_of_ones_own(name="x", level="token", function=of_ones_own, **declared):
    register_policy_loss(name, level, **declared)(function)


def correction_of_ones_own(name="x", function=lambda ratios, low, high: ratios, **declared):
    register_correction(name, **declared)(function)


def aggregation_of_ones_own(
    name="x", function=lambda token_counts, totals, *, prompt_token_counts, divisor: token_counts, **declared
):
    found = register_loss_aggregation(name, **declared)
    if "formula" not in declared:
        found(function)


def each(name: str, *values: object) -> Iterator[dict]:
    yield from ({name: value} for value in values)


def bounds(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


KEPT = SamplingSupport.from_lists([[0, 2]] * 5)
# Entry -> what is wrong in the call: what would train on a wrong scale or be dropped. torch raises of the rest.
REFUSED: dict[Callable, list[dict]] = {
    weights_of_a_step: [
        {"aggregation": "prompt_mean", "prompt_token_counts": None},
        {"aggregation": "prompt_mean", "totals": StepTotals(4, None, 7)},
        {"aggregation": "token_mean", "totals": StepTotals(4, 2, 0)},
        *({"aggregation": "constant", "divisor": value} for value in (None, 0, math.nan, True, 1e-40)),
        {"aggregation": "sample_mean", "divisor": 8},
        *({"aggregation": "prompt_mean", "prompt_token_counts": counts} for counts in ([6, 6], [20, 40, 1, 1], [6, 3, 1, 1])),
        *each("token_counts", [2, 4, 2], [1] * 5, [1.5, 1], [-1, 1]),
    ],
    weights_of_rollouts: [
        *each("rollout_token_counts", None, [6, 6], [6, 1, 3, 6, 6, 6, 0], [16] * 7),
        {"rows_of_rollout": [2, 2, 1, 3, 3, 3, 0], "rollout_token_counts": None, "totals": StepTotals(7, 2, 15)},
        *each("rows_of_rollout", [1, 1, 0, 2, 2, 2, -1], [0] * 7),
    ],
    totals_of_a_step: [*each("num_prompts", 2.5, 5, 0), *each("num_tokens", math.nan), *each("num_rollouts", 5, 1)],
    counts_of_a_step: [
        *each("loss_masks", [[1, 1]], [torch.ones(1, 2)]),
        {"loss_masks": [torch.ones(2), torch.tensor([1.0, 0.5])], "prompt_ids": None},
        *each("token_counts", [2, 4, 1, 0]),
        *({"token_counts": [1.0, value], "loss_masks": None} for value in (0.5, -1)),
        *each("prompt_ids", ["a", "b"], ["a", "a", "b", None], ["a", "a", "b", 1.0]),
        *({"samples_per_prompt": 2, "prompt_ids": [*ids]} for ids in ("aabc", "abcd", "aaaa")),
        {"samples_per_prompt": 2, "prompt_ids": [*"aaac"], "allow_partial_prompt_groups": True},
        {"rollout_ids": [*"AABA"], "prompt_ids": [*"aabb"]},
    ],
    loss_of_logits: [
        *each("logits", torch.zeros(1, 5, 4)),
        *each("loss_mask", ONES, torch.tensor([1, 2, 1, 0, 1])),
        *each("old_log_probs", torch.zeros(6), torch.zeros(5, device="meta"), ONES.bool()),
        *each("token_weights", torch.ones(3), torch.tensor([1, math.nan]), torch.tensor([1, 1]), torch.tensor([0.5, -0.5])),
        *each("importance_weights", torch.ones(2), TOO_LONG, ONES.long(), -ONES),
        *each("advantages", torch.ones(3), torch.ones(2, 1), torch.tensor([True, False])),
        *each("advantages_per", "token", "turn"),
        *each("cu_seqlens", bounds(0, 2, 6), bounds(0, 3, 2), bounds(1, 5)),
        *each("token_counts", torch.ones(3), torch.tensor([20, 20]), torch.tensor([2.5, 2]), torch.tensor([-2, 2])),
        {"ref_log_probs": TOO_LONG, "kl_coefficient": 0.1, "regularizer_weights": torch.ones(2)},
        *each("clip_ratio_low", 1.3, -0.1, math.nan),
        *each("clip_ratio_high", -0.1, True, 1e300),
        *each("kl_coefficient", -0.1, math.nan, "0.1", 0.1),
        *each("entropy_coefficient", math.inf, 0.1),
        *each("kl_estimator", "k4"),
        *each("temperature", 0.0, ONES),
        *each("correction", "tis", CorrectionSettings(kind="tis")),
        *each("loss_scale", 0.0, torch.ones(2)),
        {"advantages": ONES, "cu_seqlens": bounds(0, 2, 2, 3, 4, 5), "token_weights": ONES},
        *each("loss_parameters", {"sapo_temperature_positive": 1.0}, {"clip_ratio_c": 0.5}),
        *each("sampling_support", *(SamplingSupport.from_lists(sets) for sets in ([[0]] * 4, [[0]] * 4 + [[]]))),
        *each("sampling_support", *(SamplingSupport.from_lists([[0, 2]] * 4 + [ids]) for ids in ([1, 2], [0, 2, 2], [0, 4]))),
    ],
    loss_with_teacher: [
        *each("ids", (0, 4), (0, -1), (2, 2), (0, 1, 2)),
        {"ids": (0, 1, 2, 3, 4), "log_probs": (-2.0,) * 5},
        *each("log_probs", (-0.1, -0.2), (-1.0, 0.5), (-1.0, math.nan)),
        *each("divergence", "kl"),
        *each("beta", 0.3),
        {"divergence": "jsd", "beta": 1.0},
        *each("coefficient", 0.0),
        *each("teacher_temperature", math.inf),
        *each("teacher_temperature", 0.7),
        *each("teacher", None, ONES, LogitsTeacher(torch.zeros(5, 3)), LogitsTeacher(torch.zeros(1, 4))),
        *each("teacher_log_probs", ONES),
        *each("distillation", None),
        *each("sampling_support", SamplingSupport.from_lists([[0, 2]] * 5)),
    ],
    loss_of_hidden: [
        *each("weight", torch.zeros(16, 6, dtype=DOUBLE)),
        *each("vocab_size", 17),
        *each("max_logits_bytes", 63),
        *each("advantages", torch.arange(5.0)),
        *each("sampling_support", SamplingSupport.from_lists([[0, 2]] * 4 + [[1, 2]])),
    ],
    loss_of_log_probs: [
        *each("sampling_support", KEPT),
        *each("temperature", 0.7),
        {"entropy_coefficient": 0.1, "regularizer_weights": torch.ones(2)},
        {"distillation": DistillationSettings(), "teacher": LogitsTeacher(torch.zeros(1, 4))},
    ],
    # FB-73: a function that lacks arguments fails at registration, not in the middle of a run.
    loss_of_ones_own: [
        *each("name", "grpo"),
        *each("function", lambda log_probs, old_log_probs, advantages: None, lambda log_ratio, advantages, cap: None),
        {"needs": ("mean_log_ratio",), "level": "sequence"},
        {"level": "sequence", "triton": "m.version", "token_clip": of_ones_own},
        *each("parameters", (Parameter("log_ratio", 1.0, "a taken name"),)),
        {"clip_ratios": (0.2, -1.0), "function": get_policy_loss("grpo").function},
    ],
    correction_of_ones_own: [*each("function", lambda ratios: None), *each("bounds", {"turn": (0, 2)})],
    aggregation_of_ones_own: [
        *each("function", lambda token_counts: None),
        *each("formula", "1 / (N m_j)", "1 / N / m_i", "1 / (N + m_i)", ""),
        {"formula": "1 / N", "needs": ("num_samples",)},
        {"formula": "1 / (L N)", "takes_divisor": True},
    ],
    log_probs_of_hidden: [
        *each("loss_mask", ONES),
        *each("temperature", 0, torch.ones(3), torch.linspace(0, 1, 5)),
        *each("sampling_support", SamplingSupport.from_lists([[0, 2]] * 4 + [[]])),
        {"sampling_support": KEPT, "hidden": torch.zeros(5, 6, requires_grad=True)},
        {"sampling_support": KEPT, "temperature": ONES},
    ],
    log_probs_of_logits: [
        *each("loss_mask", torch.ones(8)),
        {"inplace": True, "logits": torch.zeros(1, 16).expand(8, 16)},
        *each("temperature", 0.0),
        *each("vocab_size", 17),
        *each("sampling_support", KEPT),
    ],
    loss_of_values: [
        *({name: torch.zeros(5, 1)} for name in ("values", "returns", "old_values")),  # FB-116
        *each("token_weights", torch.ones(3), torch.tensor([0.5, -0.5])),
        *each("loss_mask", torch.tensor([1, 2, 1, 0, 1])),
        *each("cu_seqlens", bounds(1, 2, 5)),
        *each("clip", 0.0, math.inf, "0.2", None),
        *each("old_values", None, ONES * math.nan),
        *each("returns", ONES.bool(), TOO_LONG),
        *each("values", ONES * 1e30),
    ],
    correction_of: [
        *each("cu_seqlens", bounds(0, 5), bounds(1, 3)),
        *each("rollout_log_probs", torch.full((3,), math.nan), torch.full((3,), -1e39, dtype=torch.float64)),  # -inf in float32
        *each("loss_mask", torch.full((3,), 0.5)),
        *({name: torch.zeros(3, 1)} for name in VECTORS),  # FB-116: a column against a row gives a matrix with a finite mean
        *each("kind", "ticepop", "mask"),
        *({"kind": "tis", "high": value} for value in (-1.0, math.inf, 1e9)),
        {"kind": "icepop", "low": 3.0, "high": 2.0},
        {"kind": "mask", "low": 0.0, "high": 0.2},
        {"kind": "icepop", "level": "sequence_mean", "low": 0.9},
        {"kind": "tis", "level": "sequence_sum"},
        {"sequence_delta": 0.1, "log_probs": None},
    ],
} | refused_hosts.REFUSED

# Launches

CONSTANT = {"loss_aggregation": "constant"}
PROMPT_MEAN = {"loss_aggregation": "prompt_mean"}
TOKEN_MEAN = {"loss_aggregation": "token_mean"}
GROUPS_OF_4 = {**PROMPT_MEAN, "samples_per_prompt": 4}
PER_TOKEN = {**TOKEN_MEAN, "calculate_per_token_loss": True}
GSPO = {"policy_loss": "gspo"}
RATIO_BOUNDS = {"importance_correction_low": 0.5, "importance_correction_high": 2.0}
PLAIN = {"policy_loss": "own_losses.reinforce"}  # it has a parameter and no clip
ANCHORED = "own_losses.anchored"  # its ratio compares with the sampler
TIS = {"importance_correction": "tis"}
TOPK, SAMPLED = ({"distillation": kind} for kind in ("topk", "sampled"))
EXPERTS = {"num_experts": 8}
TP_2 = {"tensor_model_parallel_size": 2}
PARALLEL = {**TP_2, "sequence_parallel": True}
LOCAL = {"transformer_impl": "local"}
SEVERAL = {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"]}
LATENT = {"multi_latent_attention": True}
IN_HOST = {"method": LaunchMethod.REDUCER}
IN_TRAIN = {"method": LaunchMethod.TRAIN}
MTP = {**PER_TOKEN, **IN_HOST, "mtp_num_layers": 1, "enable_mtp_training": True, "context_parallel_size": 2}
OWN = {"loss_aggregation": "own_losses.odd"}

# rule: fields of PolicyLossConfig, the launch method, and arguments of the launch. tests/messages.txt has what is said.
REFUSED_BY_RULES: dict[str, list[dict]] = {
    "host_switches_are_true_or_false": [{"calculate_per_token_loss": "false"}, {"use_tis": 1}],
    "names_are_registered": [
        {"loss_aggregation": "geometric"},
        {"policy_loss": "dr_grpo"},
        {"importance_correction": "ppo"},
        {"loss_aggregation": "own_losses.bounded_log_ratio"},
    ],
    "own_function_problems": [
        {"policy_loss": "own_losses.detached"},
        {"policy_loss": "own_losses.centred"},
        {"kl_estimator": "own_losses.negated", "kl_coefficient": 0.1},
        {"importance_correction": "own_losses.normalised", **RATIO_BOUNDS},
    ],
    "divisor_goes_with_constant": [
        CONSTANT,
        {**TOKEN_MEAN, "loss_aggregation_divisor": 8192.0},
        *({**CONSTANT, "loss_aggregation_divisor": value} for value in (0.0, float("nan"), "8k")),
    ],
    "numbers_fit_the_loss": [
        {"clip_ratio_low": 1.0},
        {"clip_ratio_high": float("inf")},
        {**PLAIN, "clip_ratio_low": 0.1},
        {**PLAIN, "loss_parameters": {"scale": 3.0}},
        {**PLAIN, "loss_parameters": {"cap": 1.0}},
        {"policy_loss": "dppo_tv", "loss_parameters": {"ratio_truncation": 0.0}},
    ],
    "entropy_of_a_loss_is_known": [{"policy_loss": "own_losses.heeding", "method": LaunchMethod.CUSTOM_LOSS}],
    "corrections_fit": [{"importance_correction": "mask"}, {**TIS, "policy_loss": ANCHORED}],
    "distillation_fits": [
        {**TOPK, "distillation_beta": 0.3},
        {**TOPK, "distillation_divergence": "jsd", "distillation_beta": 1.0},
        {**TOPK, "distillation_coefficient": "a"},
        {**SAMPLED, "distillation_divergence": "forward_kl"},
        {**SAMPLED, **GSPO},
        {**TOPK, "sampling_support": "replay", **IN_TRAIN},
    ],
    "settings_are_read": [
        {"kl_estimator": "k2"},
        {"distillation_divergence": "jsd"},
        {"distillation_beta": 0.3},
        {"distillation_coefficient": 2.0},
        {"allow_partial_prompt_groups": True},
        {"max_logits_bytes": 2**30},
        {"watchdog": "warn", "policy_metrics": "none", "set_flags": frozenset({"--watchdog"})},
    ],
    "numbers_are_in_range": [
        {"policy_temperature": 0.0},
        {"kl_coefficient": -0.1},
        {"entropy_coefficient": False},
        {"samples_per_prompt": 0},
        {"docs_per_step": 1.5},
    ],
    "choices_are_listed": [{"gradient_divisor": 8}, {"watchdog": False}, {**TOPK, "distillation_divergence": "kl"}],
    "switches_are_true_or_false": [{"allow_partial_prompt_groups": "maybe"}],
    "per_token_loss_is_token_mean": [{**PER_TOKEN, **PROMPT_MEAN}],
    "the_model_keeps_the_step": [
        {**PER_TOKEN, **EXPERTS, "moe_aux_loss_coeff": 0.001},
        {**EXPERTS, "moe_z_loss_coeff": 1e-3, "router_aux_loss": "refuse"},
        {**PER_TOKEN, **EXPERTS, **SEVERAL, **IN_HOST, "moe_aux_loss_coeff": [0.0, 0.01]},
        {"dsa_indexer_loss_coeff": 0.01},
        {**PER_TOKEN, **IN_HOST, "dsa_indexer_loss_coeff": 0.01},
        MTP,
        {"num_experts": 6, "expert_model_parallel_size": 4},
        {**EXPERTS, **TP_2},
        {**EXPERTS, "moe_expert_capacity_factor": 1.5},
        {**EXPERTS, "moe_expert_rank_capacity_factor": 1.5},
        {**EXPERTS, "moe_input_jitter_eps": "0.01"},
        {**EXPERTS, "moe_router_force_load_balancing": True},
        {**EXPERTS, "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]},
        {**EXPERTS, **PARALLEL, **LOCAL, "add_bias_linear": True},
        {"hybrid_context_parallel": True},
        {**LATENT, **TP_2},
        {**LATENT, **PARALLEL, **LOCAL},
    ],
    "steps_hold_whole_prompt_groups": [{**GROUPS_OF_4, "global_batch_size": 30}],
    "flags_have_an_effect": [
        {"docs_per_step": 64, "method": LaunchMethod.MEGATRON_LM},
        {"policy_loss": "grpo", "set_flags": frozenset({"--policy-loss"}), **IN_HOST},
        {**TOPK, "method": LaunchMethod.CUSTOM_LOSS},
    ],
}
ALLOWED_BY_RULES: dict[str, list[dict]] = {
    "host_switches_are_true_or_false": [{"use_tis": True, "rewards_normalization": False, "calculate_per_token_loss": None}],
    "names_are_registered": [OWN, GSPO],
    "own_function_problems": [
        PLAIN,
        {"policy_loss": "own_losses.detached", "clip_ratio_low": 0.3},  # another rule says what is wrong
    ],
    "divisor_goes_with_constant": [{**CONSTANT, "loss_aggregation_divisor": 8192.0}, {**OWN, "loss_aggregation_divisor": 2.0}],
    "numbers_fit_the_loss": [
        {"clip_ratio_low": 0.0, "clip_ratio_high": 0},
        {"policy_loss": "cispo", "clip_ratio_low": 1.0},
        {**PLAIN, "loss_parameters": {"scale": 0.5}},
    ],
    "entropy_of_a_loss_is_known": [
        {"policy_loss": "own_losses.heeding"},
        {"policy_loss": "own_losses.heeding", "method": LaunchMethod.CUSTOM_LOSS, "policy_metrics": "none"},
    ],
    "corrections_fit": [{"off_policy_sequence_delta": 0.1, "policy_loss": ANCHORED}],
    "distillation_fits": [
        {**TOPK, **GSPO, "distillation_divergence": "jsd", "distillation_beta": 0.3},
        SAMPLED,
        {**SAMPLED, "sampling_support": "refuse", **IN_TRAIN},
        {"distillation": "full"},  # another rule says what is wrong
    ],
    "settings_are_read": [
        {"kl_estimator": "k3+", "kl_coefficient": 0.1, **IN_TRAIN},
        {"allow_partial_prompt_groups": True, "samples_per_prompt": 4},
        {"fused_lm_head_loss": True, "max_logits_bytes": 2**20},
        {"policy_metrics": "none"},
    ],
    "numbers_are_in_range": [{"policy_temperature": 1e-3, "samples_per_prompt": 1, "max_logits_bytes": 1}],
    "choices_are_listed": [{"policy_metrics": "with_entropy", "watchdog": "raise", "gradient_divisor": "num_samples"}],
    "switches_are_true_or_false": [{"fp32_lm_head": True}],
    "per_token_loss_is_token_mean": [PER_TOKEN],
    "the_model_keeps_the_step": [
        {**PER_TOKEN, **EXPERTS, "moe_z_loss_coeff": 1e-3, "router_aux_loss": "exact"},
        {**PER_TOKEN, **EXPERTS, "moe_aux_loss_coeff": 1e-3, "router_aux_loss": "host"},
        {**PER_TOKEN, **EXPERTS, "moe_router_load_balancing_type": "[none, aux_loss]", "moe_aux_loss_coeff": "[0.01, 0.0]"},
        {**PER_TOKEN, "num_experts": 0, "moe_aux_loss_coeff": 0.001, "moe_expert_capacity_factor": 1.5, **TP_2},
        *(
            {**MTP, **off}
            for off in ({"mtp_loss_scaling_factor": 0.0}, {"context_parallel_size": 1}, {"enable_mtp_training": False})
        ),
        {**EXPERTS, **PARALLEL, "expert_model_parallel_size": 4, "moe_expert_capacity_factor": -1, "moe_input_jitter_eps": 0},
        {**EXPERTS, "moe_expert_rank_capacity_factor": 2.0, "moe_flex_dispatcher_backend": "ncclep"},
        {**EXPERTS, **PARALLEL, "add_bias_linear": True, "transformer_impl": "transformer_engine"},
        {**LATENT, **PARALLEL},
    ],
    "steps_hold_whole_prompt_groups": [
        {**GROUPS_OF_4, "global_batch_size": 30, "allow_partial_prompt_groups": True},
        {**GROUPS_OF_4, **TOKEN_MEAN, "global_batch_size": 30},
    ],
    "flags_have_an_effect": [{"watchdog": "raise", "gradient_divisor": "num_samples", "docs_per_step": 64, **IN_TRAIN}],
}
WARNED = [
    {**GSPO, "clip_ratio_high": 0.2},
    {**TIS, "importance_correction_level": "sequence_sum", "importance_correction_high": 2.0},
    {"kl_coefficient": 0.1, **CONSTANT, "loss_aggregation_divisor": 8192.0},
    {"kl_coefficient": 0.1, **OWN},
]
# Beside WARNED: nothing is said of these. A warning at every start is read by nobody.
NOT_WARNED = [{}, TOKEN_MEAN, {"kl_coefficient": 0.1}, *({"policy_loss": name} for name in POLICY_LOSSES.names())]


def launch(settings: dict) -> Settings:
    of_config = {field.name for field in fields(PolicyLossConfig)}
    config = PolicyLossConfig(**{name: value for name, value in settings.items() if name in of_config})
    own = {name: settings[name] for name in ("method", "set_flags") if name in settings}
    arguments = {name: value for name, value in settings.items() if name not in {*of_config, *own}}
    return Settings(config=config, **own, arguments=arguments)


@contextmanager
def own_names_of(settings: dict) -> Iterator[None]:
    """What own_losses declares is known inside, where the launch names something of it; no message of another launch lists it."""
    with names_forgotten():
        if any(str(value).startswith("own_losses.") for value in settings.values()) or "loss_parameters" in settings:
            import own_losses

            own_losses.declare()
        yield


def judge(rule_name: str, settings: dict) -> list[str]:
    """The messages of one rule."""
    (rule,) = [rule for rule in RULES if rule.__name__ == rule_name]
    with own_names_of(settings):
        return [*rule(launch(settings))]


def warnings_at(settings: dict) -> list[str]:
    with own_names_of(settings):
        return config_warnings(launch(settings).config)


def as_settings(settings: dict) -> str:
    """What a user would recognise; set_flags only says that a default was written out."""
    shown = {
        name: str(value) if isinstance(value, LaunchMethod) else value for name, value in settings.items() if name != "set_flags"
    }
    return ", ".join(f"{name}={value!r}" for name, value in shown.items())


# What is said


def shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, SamplingSupport):
        return f"sets {[ids.tolist() for ids in value.ids.split(value.sizes.tolist())]}"
    if callable(value):
        return f"a function {signature(value)}"
    if not isinstance(value, Tensor):
        return repr(value)
    numbers = "" if value.is_meta or value.numel() > 3 or value.layout != torch.strided else f" {value.tolist()}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{numbers}{' on meta' * value.is_meta}"


def message_of(entry: Callable, changes: dict) -> tuple[str, str]:
    """(name of the error, what it says)."""
    try:
        entry(**changes)
    except (ConfigError, DataError) as error:
        return type(error).__name__, str(error)
    raise AssertionError(f"{entry.__name__} takes {changes}")


def entries() -> Iterator[tuple[str, str, str]]:
    """(title, the call or the launch, what is said)."""
    with names_forgotten():
        for entry, rows in REFUSED.items():
            for changes in rows:
                kind, text = message_of(entry, changes)
                yield entry.__name__, ", ".join(f"{name}={shown(value)}" for name, value in changes.items()), f"{kind}: {text}"
    judged = [(f"rule {rule}", judge(rule, row), row) for rule, rows in REFUSED_BY_RULES.items() for row in rows]
    judged += [
        (f"rule {rule} of miles and slime", refused_hosts.judge_launch(rule, row), row)
        for rule, rows in refused_hosts.REFUSED_LAUNCHES.items()
        for row in rows
    ]
    judged += [("warning", warnings_at(row), row) for row in WARNED]
    for title, texts, settings in judged:
        yield from ((title, as_settings(settings), text) for text in texts)


def messages_table() -> str:
    lines, last = [], None
    for title, given, text in entries():
        lines += [f"\n{title}\n"] if title != last else []
        lines += [f"  {given}\n", f"    {re.sub(chr(10), chr(10) + '    ', text)}\n"]
        last = title
    return "".join(lines).lstrip("\n")
