"""Where the step of `megatron-rl explain` comes from, and the command line as a source; it must never guess a step."""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import Tensor

from megatron_rl.commands.explain.files import read_dump, read_rollouts
from megatron_rl.commands.explain.launch import WITHOUT_ROUTES
from megatron_rl.commands.explain.peers import DEEPSPEED
from megatron_rl.commands.explain.step import MOST_TOKENS, StepInput, prompts_of_rollouts, too_many_tokens
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.base import host_named

# What executes the code behind a chain of factors where no step is given: ragged, two prompts, a one-token response.
EXAMPLE_LENGTHS, EXAMPLE_PROMPTS = (2, 4, 1, 3), ("a", "a", "b", "b")


def read_step(args: Namespace) -> StepInput:
    """ConfigError for sources that contradict each other, DataError for a source that cannot be read."""
    sources = {"--response-lengths": args.response_lengths, "--rollouts": args.rollouts, "--rollout-dump": args.rollout_dump}
    given = [flag for flag, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: a step has one source; give one of them")
    problems = [
        f"{flag} goes with {source} alone: remove it, or give {source}"
        for flag, value, source in (
            ("--prompt-ids", args.prompt_ids, "--response-lengths"),
            ("--rollout-ids", args.rollout_ids, "--response-lengths"),
            ("--loss-masks", args.loss_masks, "--response-lengths"),
            ("--rollout-index", args.rollout_index, "--rollouts"),
        )
        if value is not None and source not in given
    ]
    if problems:
        raise ConfigError(problems)
    if args.rollouts is not None:
        return read_rollouts(args.rollouts, args.rollout_index)
    if args.rollout_dump is not None:
        return read_dump(args.rollout_dump, None if args.host in WITHOUT_ROUTES else host_named(args.host))
    if args.response_lengths is not None:
        return read_lengths(args.response_lengths, args.prompt_ids, args.rollout_ids, args.loss_masks)
    return _no_step(args)


def _no_step(args: Namespace) -> StepInput:
    """The formulas of a chain need no step; everything else does."""
    given = {"--sample-losses": args.sample_losses, "--plot": args.plot, "--clip-grad": args.clip_grad}
    needs = [flag for flag, value in given.items() if value is not None]
    needs += ["--framework DeepSpeed"] if args.framework == DEEPSPEED else []
    if args.host is None or needs:
        what = f"{' and '.join(needs)} without a step" if needs else "nothing to explain"
        raise ConfigError(
            f"{what}: give --response-lengths 3,5,8 (with --prompt-ids a,a,b), --rollouts FILE of megatron-rl train "
            "--save-rollouts or of one sample a line, or --rollout-dump FILE of a host's --save-debug-rollout-data"
            + ("" if needs else "; --host alone gives the chain of factors as formulas")
        )
    note = (
        "numbers: no step is given; --response-lengths 3,5,8 --prompt-ids a,a,b, --rollouts FILE or --rollout-dump FILE gives one"
    )
    masks = [torch.ones(length, dtype=torch.bool) for length in EXAMPLE_LENGTHS]
    return StepInput(masks=masks, prompts=list(EXAMPLE_PROMPTS), source="no step", notes=(note,), is_given=False)


def read_lengths(lengths: str, prompt_ids: str | None, rollout_ids: str | None, loss_masks: str | None) -> StepInput:
    """`3,5,8`; `a,a,b`; `0,0,1`; `110,11111,00000000`, a digit a response token. Every problem in one ConfigError."""
    words = [word.strip() for word in lengths.split(",")]
    problems = [
        f"--response-lengths {lengths}: {word!r} must be a whole number of 1 to {MOST_TOKENS}, as in 3,5,8"
        for word in words
        if not word.isdecimal() or not 1 <= int(word) <= MOST_TOKENS
    ]
    if not problems:
        problems = [f"--response-lengths: {problem}" for problem in too_many_tokens([int(word) for word in words])]
    prompts, of_prompts = _names("--prompt-ids", prompt_ids, len(words))
    rollouts, of_rollouts = _names("--rollout-ids", rollout_ids, len(words))
    problems += of_prompts + of_rollouts
    masks: list[Tensor] = []
    if not problems:
        masks, problems = _masks(words, loss_masks)
    if not problems and rollouts is not None:
        problems = [f"--rollout-ids {rollout_ids}: {problem}" for problem in prompts_of_rollouts(rollouts, prompts)]
    if problems:
        raise ConfigError(problems)
    return StepInput(masks=masks, prompts=prompts, rollouts=rollouts, source="the command line")


def _names(flag: str, text: str | None, num_samples: int) -> tuple[list[str] | None, list[str]]:
    if text is None:
        return None, []
    names = [word.strip() for word in text.split(",")]
    if len(names) == num_samples and "" not in names:
        return names, []
    empty = ", one of them empty," if "" in names else ""
    return None, [f"{flag} {text}: {len(names)} names{empty} for {num_samples} responses; one name for each is needed, as in a,a,b"]


def _masks(words: list[str], loss_masks: str | None) -> tuple[list[Tensor], list[str]]:
    """(a mask of each response, problems)."""
    if loss_masks is None:
        return [torch.ones(int(word), dtype=torch.bool) for word in words], []
    rows = [row.strip() for row in loss_masks.split(",")]
    if len(rows) != len(words):
        return [], [f"--loss-masks {loss_masks}: {len(rows)} masks for {len(words)} responses: one each, as in 110,11111"]
    problems = [
        f"--loss-masks: {row!r} must be {word} digits 0 or 1, one for each token of its response"
        for word, row in zip(words, rows, strict=True)
        if len(row) != int(word) or set(row) - {"0", "1"}
    ]
    return [torch.tensor([digit == "1" for digit in row], dtype=torch.bool) for row in rows], problems
