"""Metrics of a user's own, as --custom-policy-metrics names them: own_metrics.far_tokens."""

from __future__ import annotations

import torch

from megatron_rl.metrics.policy import Metric, Reduction, Weight, sample_mean

WORDS = {"unit": "0 to 1", "formula": "mean of [abs(rho_t - 1) > 0.1]", "healthy": "0 at a first step"}
far_tokens = sample_mean("far_tokens", lambda tokens: (tokens.ratios - 1).abs() > 0.1, **WORDS)
smallest_ratio = Metric(name="smallest_ratio", value=lambda tokens: tokens.ratios, reduction=Reduction.MIN)
raised_tokens = Metric(
    name="raised_tokens", value=lambda tokens: tokens.ratios > 1, weight=Weight.TOKEN, normaliser="num_tokens", unit="0 to 1"
)
clipped_share = sample_mean("clipped_share", lambda tokens: tokens.is_clipped, **WORDS)
moved = sample_mean("moved", lambda tokens: tokens.old_log_probs - tokens.log_probs, **WORDS)
moved_tokens = Metric(
    name="moved_tokens", value=lambda tokens: tokens.old_log_probs - tokens.log_probs, weight=Weight.TOKEN, normaliser="num_tokens"
)
tis = sample_mean("tis", lambda tokens: tokens.ratios, **WORDS)
surprise = sample_mean("surprise", lambda tokens: -tokens.log_probs - tokens.entropy, **WORDS)
ALL = "own_metrics.far_tokens, own_metrics.smallest_ratio,own_metrics.raised_tokens"

# What is refused
plain = 3
taken = sample_mean("entropy", lambda tokens: tokens.ratios, **WORDS)
of_a_step = sample_mean("mtp_loss", lambda tokens: tokens.ratios, **WORDS)
unspeakable = sample_mean("far tokens", lambda tokens: tokens.ratios, **WORDS)
divided = sample_mean("divided", lambda tokens: tokens.ratios, normaliser="num_far", **WORDS)
unguarded = Metric(name="unguarded", value=lambda tokens: tokens.ratios, normaliser="clipped_low")
without_a_name = Metric(name=3, value=lambda tokens: tokens.ratios)
reduced = Metric(name="reduced", value=lambda tokens: tokens.ratios, reduction="median")
weighed = Metric(name="weighed", value=lambda tokens: tokens.ratios, weight="heavy")
present_nowhere = Metric(name="present_nowhere", value=lambda tokens: tokens.ratios, present_with="num_far")
of_a_maximum = Metric(
    name="of_a_maximum", value=lambda tokens: tokens.ratios, normaliser="max_advantage", present_with="max_advantage"
)
num_far = Metric(name="num_far", value=lambda tokens: (tokens.ratios - 1).abs() > 0.1, weight=Weight.TOKEN)
of_far = Metric(
    name="of_far", value=lambda tokens: tokens.ratios, weight=Weight.TOKEN, normaliser="num_far", present_with="num_far"
)
one_number = sample_mean("one_number", lambda tokens: tokens.ratios.mean(), **WORDS)
of_pairs = sample_mean("of_pairs", lambda tokens: tokens.ratios.diff(), **WORDS)
imaginary = sample_mean("imaginary", lambda tokens: torch.complex(tokens.ratios, tokens.ratios), **WORDS)
number = sample_mean("number", lambda tokens: 1.0, **WORDS)
nothing = sample_mean("nothing", lambda tokens: None, **WORDS)
centred = sample_mean("centred", lambda tokens: tokens.advantages - tokens.advantages.mean(), **WORDS)
far_from_the_rest = sample_mean("far_from_the_rest", lambda tokens: tokens.ratios > tokens.ratios.sum() / 1e5, **WORDS)
misspelt = sample_mean("misspelt", lambda tokens: tokens.ratio, **WORDS)
infinite = sample_mean("infinite", lambda tokens: 1 / tokens.advantages, **WORDS)
writing = sample_mean("writing", lambda tokens: tokens.ratios.sub_(1), **WORDS)
largest = Metric(name="largest", value=lambda tokens: tokens.ratios / tokens.ratios.max(), reduction=Reduction.MAX)
