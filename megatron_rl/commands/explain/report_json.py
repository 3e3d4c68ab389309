"""The object that `megatron-rl explain --json` prints: what the text says, unrounded and uncut. It never computes a weight."""

from __future__ import annotations

from dataclasses import asdict

from megatron_rl.commands.explain.chain import Chain
from megatron_rl.commands.explain.report import Explanation
from megatron_rl.commands.explain.shifts import from_to
from megatron_rl.commands.explain.weights import KNOWN_AS, Weighing


def as_json(explanation: Explanation) -> dict:
    """docs/explain.md names every key. Without a step there is no number of one."""
    step, counts, deepspeed = explanation.step, explanation.counts, explanation.deepspeed
    totals, weighings = counts.totals, explanation.weighings
    of_step = {
        "source": step.source,
        "num_samples": counts.num_samples,
        "num_rollouts": totals.num_samples,
        "num_prompts": totals.num_prompts,
        "num_tokens": totals.num_tokens,
        "num_masked_samples": counts.num_masked,
        "mean_tokens": weighings[0].mean_tokens,
        "prompt_ids": step.prompts,
        "rollout_ids": step.rollouts,
        "token_counts": counts.tokens.tolist(),
        "response_lengths": [mask.numel() for mask in step.masks],
        "aggregations": {weighing.name: _weighing_json(weighing, explanation) for weighing in weighings},
        "gradient_scale_from_to": from_to(weighings),
    }
    return {
        **(of_step if step.is_given else dict.fromkeys(of_step)),
        "policy_loss": explanation.policy_loss,
        "layout": asdict(explanation.layout) if explanation.host is not None else None,
        "chain": None if explanation.chain is None else _chain_json(explanation.chain, explanation),
        "launch_lines": explanation.launch_lines,
        "problems": explanation.problems,
        "warnings": explanation.warnings,
        "equivalents": [asdict(one) for one in explanation.equivalents],
        "deepspeed": None if deepspeed is None else asdict(deepspeed),
        "left_out": explanation.left_out,
        "plot": explanation.plot,
        "is_sound": explanation.is_sound,
    }


def _weighing_json(weighing: Weighing, explanation: Explanation) -> dict:
    prompts = explanation.step.prompts
    shares = None if prompts is None else {str(name): share for name, share in weighing.prompt_shares(prompts).items()}
    return {
        "divisor": weighing.divisor,
        "divisor_is_assumed": weighing.is_assumed,
        "token_weights": weighing.token_weights.tolist(),
        "sample_weights": weighing.sample_weights.tolist(),
        "sample_shares": weighing.shares.tolist(),
        "prompt_shares": shares,
        "sum_of_weights": weighing.total,
        "gradient_scale": weighing.gradient_scale,
        "regularizer_strength": 1 / weighing.gradient_scale,
        "loss": None if explanation.losses is None else weighing.loss(explanation.losses),
        "known_as": KNOWN_AS.get(weighing.name),
    }


def _chain_json(chain: Chain, explanation: Explanation) -> dict:
    has_numbers = explanation.step.is_given
    return {
        "host": explanation.host,
        "route": explanation.route,
        "companion": explanation.companion,
        "factors": [
            {
                "stage": one.stage,
                "formula": str(one.formula),
                "values": one.values.tolist() if has_numbers else None,
                "differs": one.differs,
                "does": one.does,
            }
            for one in chain.factors
        ],
        "known": chain.known,
        "net": str(chain.net),
        "asked": str(chain.asked),
        "left_over": str(chain.left_over),
        "net_weights": chain.net_weights.tolist() if has_numbers else None,
        "ratio": chain.ratio.tolist() if has_numbers else None,
        "is_exact": chain.is_exact,
    }
