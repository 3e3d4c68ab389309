"""What verl loads by the entry point `verl.plugins`, in each process that imports verl: it adds our losses to verl's tables.

verl's tables are in a module that this import must not load, so they are filled right after verl has loaded it; its engines count a
mini-batch by the same way. Before that nothing
of the package is imported but the function that waits for it. verl drops an exception of a plugin without a word; therefore a
launch line with a problem ends here, in the process that it starts, by SystemExit. Settings of YAML files are judged where verl
judges them itself, before Ray starts: its `validate_config` is given the whole config.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from megatron_rl.hosts.after_import import after_import

TABLES, CHECKS, ENGINES = "verl.trainer.ppo.core_algos", "verl.utils.config", "verl.workers.engine.base"
OUR_ESTIMATE = re.compile(r"\.(kl_loss_type|kl_penalty)=['\"]?unbiased")
OURS = re.compile(r"=['\"]?megatron[-_]rl\.")
# A name and one of our aggregations: verl's own modes have no dot. Another mode, which somebody registered, is not judged.
WITHOUT_PREFIX = re.compile(r"policy_loss\.loss_mode=['\"]?[\w-]+\.((sample|prompt|token)[-_]mean|constant)\b")


def fill(tables: ModuleType) -> None:
    """Registers our losses. A verl that has another contract keeps its own alone, and says so."""
    from megatron_rl.errors import ConfigError
    from megatron_rl.hosts import verl_loss

    try:
        verl_loss.register(tables)
    except ConfigError as error:
        print(f"megatron_rl: none of its losses is registered in verl: {error}", file=sys.stderr, flush=True)


def count_in(engines: ModuleType) -> None:
    """Each engine counts a mini-batch before it trains on it with a loss of ours; a loss that nobody has counted for is refused."""
    from megatron_rl.errors import ConfigError
    from megatron_rl.hosts import verl_step

    try:
        verl_step.count_in(engines)
    except ConfigError as error:
        print(f"megatron_rl: none of its losses can train in verl: {error}", file=sys.stderr, flush=True)


def refuse_bad_line(words: Sequence[str]) -> None:
    """Ends the process that a launch line with one of our names starts, where the line has a problem."""
    if not any(pattern.search(word) for word in words for pattern in (OURS, OUR_ESTIMATE, WITHOUT_PREFIX)):
        return
    from megatron_rl.hosts.verl import problems_of, read_line

    settings = read_line(words).settings
    _refuse(problems_of(settings)[0] if settings else [])


def judge_files(checks: Any) -> None:
    """verl's validate_config ends a launch with one of our names whose settings, of any file, have a problem."""
    validate = getattr(checks, "validate_config", None)
    if validate is None:
        return  # the line is judged, and each step

    @functools.wraps(validate)
    def validate_ours_too(config: Any, *given: Any, **named: Any) -> Any:
        try:
            actor = config["actor_rollout_ref"]["actor"]
            external = config["actor_rollout_ref"].get("model", {}).get("external_lib")
            names = f"policy_loss.loss_mode={actor['policy_loss']['loss_mode']}", f"={external}"
        except Exception:  # of any type, OmegaConf has its own: a config without these places names nothing of ours
            names = "", ""
        if OURS.search(" ".join(names)) or WITHOUT_PREFIX.search(names[0]):
            from megatron_rl.hosts.verl import problems_of, settings_of_config

            problems, said = problems_of(settings_of_config(config))
            _refuse(problems)
            for text in said:
                print(f"megatron_rl: {text}", file=sys.stderr, flush=True)
        return validate(config, *given, **named)

    checks.validate_config = validate_ours_too
    package = sys.modules.get(CHECKS.rpartition(".")[0])
    if getattr(package, "validate_config", None) is validate:
        package.validate_config = validate_ours_too  # type: ignore[union-attr]


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise SystemExit("\n".join(f"megatron_rl: ConfigError: {problem}" for problem in problems))


refuse_bad_line(sys.argv[1:])
after_import(TABLES, fill)
after_import(ENGINES, count_in)
after_import(CHECKS, judge_files)
