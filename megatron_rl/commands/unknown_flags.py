"""Says what an unknown flag may have meant. It must never accept one."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

# What other trainers call it (TRL, verl, miles, slime, OpenRLHF) -> ours.
OTHER_NAMES = {
    "--beta": "--kl-coefficient",
    "--kl-coef": "--kl-coefficient",
    "--kl-loss-coef": "--kl-coefficient",
    "--kl-loss-type": "--kl-estimator",
    "--entropy-coef": "--entropy-coefficient",
    "--epsilon": "--clip-ratio-low",
    "--epsilon-high": "--clip-ratio-high",
    "--eps-clip": "--clip-ratio-low",
    "--eps-clip-high": "--clip-ratio-high",
    "--eps-clip-c": "--clip-ratio-c",
    "--advantage-estimator": "--policy-loss",
    "--loss-type": "--policy-loss",
    "--loss-agg-mode": "--loss-aggregation",
    "--scale-rewards": "--advantage-normalization",
    "--disable-grpo-std-normalization": "--advantage-normalization",
    "--temperature": "--policy-temperature",
    "--rollout-temperature": "--policy-temperature",
    "--num-generations": "--samples-per-prompt",
    "--n-samples-per-prompt": "--samples-per-prompt",
    "--rollout-batch-size": "--prompts-per-rollout",
    "--prompt-data": "--prompts",
    "--dataset": "--prompts",
    "--max-completion-length": "--max-new-tokens",
    "--rollout-max-response-len": "--max-new-tokens",
    "--learning-rate": "--lr",
    "--max-grad-norm": "--clip-grad",
    "--num-rollout": "--num-rollouts",
    "--save": "--output-dir",
    "--model": "--hf-checkpoint",
    "--model-name-or-path": "--hf-checkpoint",
    "--tokenizer": "--hf-checkpoint",
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--cp": "--context-parallel-size",
    "--ep": "--expert-model-parallel-size",
}
OTHER_NAMES_IN_EXPLAIN = OTHER_NAMES | {
    "--dp": "--data-parallel-size",
    "--global-batch-size": "--response-lengths, one for each sample of the step",
}


def flags_of(parser: ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]


def problems_of_unknown(unknown: Sequence[str], command: str, known: Sequence[str]) -> Iterator[str]:
    """A line for each unknown flag; one for the words, where there are words alone."""
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-") and word != "--" and not word[1:2].isdigit()]
    names = OTHER_NAMES_IN_EXPLAIN if command == "explain" else OTHER_NAMES
    for flag in flags:
        other = names.get(flag.replace("_", "-"), "")
        close = [other] if other.partition(",")[0] in known else get_close_matches(flag.replace("_", "-"), known, 1)
        remedy = f"did you mean {close[0]}?" if close else f"megatron-rl {command} --help lists the flags"
        yield f"{flag} is no flag of megatron-rl {command}: {remedy}"
    if not flags:
        yield f"megatron-rl {command} takes no argument {' '.join(unknown)!r}: remove it, or give it to a flag"
