"""docs/api.md from signatures and docstrings, a section for each kind of caller. Only the heads here are typed."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module

# Section -> module -> names. A name of megatron_rl.__all__ is imported from megatron_rl.
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "The step": {
        "megatron_rl": ("count_step", "sample_token_weights", "regularizer_weights", "StepCounts", "StepTotals", "RolloutCounts")
    },
    "Losses from logits": {
        "megatron_rl": (
            *("grpo_loss", "gspo_loss", "PolicyLossOutput", "AssumedScale", "importance_correction"),
            *("CorrectionSettings", "SamplingSupport"),
        ),
        "megatron_rl.policy_loss": ("policy_loss", "loss_of_log_probs", "LossOptions", "LossBatch"),
    },
    "Losses from hidden states": {
        "megatron_rl": ("linear_policy_loss", "linear_grpo_loss", "linear_gspo_loss", "linear_log_probs"),
    },
    "Log-probabilities": {"megatron_rl": ("vocab_parallel_log_probs", "bounded_exp")},
    "Losses and aggregations of your own": {
        "megatron_rl": ("register_policy_loss", "LossValue", "Parameter", "register_loss_aggregation"),
    },
    "KL estimators and corrections of your own": {
        "megatron_rl": (*("register_kl_estimator", "KLValue", "register_correction", "CorrectionValue"),),
    },
    "In Megatron-Core": {
        "megatron_rl.megatron.ranks": ("initialize_ranks",),
        "megatron_rl.layout": ("resolve_groups", "local_positions", "local_cu_seqlens"),
        "megatron_rl.layout.groups": ("make_context_groups",),
        "megatron_rl.megatron.schedule": ("scale_for_schedule",),
        "megatron_rl.megatron.probe": ("probe_schedule",),
        "megatron_rl.megatron.forward_step": ("PolicyForwardStep",),
        "megatron_rl.megatron.cpu": ("install_cpu_support",),
        "megatron_rl.metrics.step": ("step_metrics",),
        "megatron_rl.train.watchdog": ("watch", "WatchdogState"),
        "megatron_rl": ("PolicyLossConfig",),
    },
    "Testing": {
        "megatron_rl.testing.step_check": ("check_step",),
        "megatron_rl.testing.loss_property": ("assert_layout_invariant",),
        "megatron_rl.testing.invariance": ("step_on_layout", "Layout", "StepSample"),
        "megatron_rl.testing.ranks": ("run_ranks", "RankPool"),
    },
    "Errors": {"megatron_rl": ("ConfigError", "DataError")},
}
HEAD = """# API

Each name with its module, its signature and what it does, returns and raises. Shapes are beside the tensors; the
[glossary](glossary.md) has the letters. `help(name)` adds the meaning of each argument, when an error is raised, collectives,
memory and examples. A wrong setting raises ConfigError, and wrong data DataError. A name without a module is imported from
`megatron_rl`. `tests/api_page.py` makes this page.
"""
SAID_BY_THE_HEAD = ("Raises: ConfigError.", "Raises: DataError.", "Raises: ConfigError and DataError.")
# Where a reader finds arguments or fields that the page does not repeat.
DECLARED_ELSEWHERE = {
    "WatchdogState": "`WatchdogState()` begins a run.",
    "PolicyLossConfig": "Its fields are the [flags](arguments.md).",
    "grpo_loss": "[policy_loss](#policy_loss) of `grpo`, with its arguments after `name`.",
    "gspo_loss": "[policy_loss](#policy_loss) of `gspo`, with its arguments after `name`.",
    "linear_grpo_loss": "[linear_policy_loss](#linear_policy_loss) of `grpo`, with its arguments after `name`.",
    "linear_gspo_loss": "[linear_policy_loss](#linear_policy_loss) of `gspo`, with its arguments after `name`.",
}
ENTRY = re.compile(r"(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*): +(?P<text>.*)")
RAISES = re.compile(r"^Raises\b(?:.|\n(?!\n))*", re.MULTILINE)  # to the end of its paragraph
PART = re.compile(r"(?P<part>Args|Returns|Raises|Communication|Memory)(?P<rest>:? .*|:)$")


def page() -> str:
    text = "\n".join([HEAD, *(line for title, modules in SECTIONS.items() for line in section(title, modules))])
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def section(title: str, modules: dict[str, tuple[str, ...]]) -> Iterator[str]:
    yield f"## {title}\n"
    for module, names in modules.items():
        for name in names:
            what = getattr(import_module(module), name)
            yield f"### {name}\n" if module == "megatron_rl" else f"### {name}\n\n`{module}.{name}`\n"
            yield f"{DECLARED_ELSEWHERE[name]}\n" if name in DECLARED_ELSEWHERE else f"```text\n{declared(what)}\n```\n"
            if not isinstance(what, functools.partial):
                yield prose(shortened(what))


def declared(what: object) -> str:
    """The lines of its source from `def` to the body, or a class's head, and its fields or how it is made: there the comments say
    the shapes."""
    lines = textwrap.dedent(inspect.getsource(inspect.unwrap(what))).splitlines()
    node = next(node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    if isinstance(node, ast.FunctionDef):
        return "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
    makers = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    if makers:
        return "\n".join([lines[node.lineno - 1], *lines[makers[0].lineno - 1 : makers[0].body[0].lineno - 1]])
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign) and not str(ast.unparse(part.target)).startswith("_")]
    shown = [line for part in fields for line in lines[part.lineno - 1 : part.end_lineno]]
    return "\n".join([lines[node.lineno - 1], *shown])


def shortened(what: object) -> str:
    """The first paragraph of the docstring, the arguments and fields that only a sentence explains, what it returns and raises."""
    first, *others = re.split(r"\n\s*\n", inspect.getdoc(what) or "")
    shown = [first]
    if others and not first.endswith((".", ":")):  # a sentence that ends with an equation
        shown.append(others.pop(0))
    in_signature = set() if inspect.isclass(what) else set(inspect.signature(what).parameters)
    text = "\n\n".join([*shown, *(kept for block in others if (kept := essential(block, in_signature)))])
    return RAISES.sub(lambda found: named_errors(found[0]), text)


def named_errors(raises: str) -> str:
    """The kinds of errors that a part Raises names; a part that names none, as "what policy_loss raises", stays."""
    names = sorted(set(re.findall(r"\b[A-Z]\w*Error\b", raises)))
    return f"Raises: {' and '.join(names)}." if names else raises


def essential(block: str, in_signature: set[str]) -> str:
    """The lines of a block about what is returned and raised, and the entries whose names the signature does not show."""
    kept, is_kept = [], False
    for line in block.splitlines():
        if part := PART.match(line):
            is_kept = part["part"] in ("Returns", "Raises")
        elif entry := ENTRY.match(line.strip()):
            is_kept = not in_signature & set(entry["names"].split(", "))
        if is_kept:
            kept.append(line.removeprefix(" " * 8))
    return "\n".join(kept)


def prose(docstring: str) -> str:
    """Markdown: indented blocks are code, `name: text` is an item of a list, and so is a line of a part such as Args."""
    blocks = re.split(r"\n\s*\n", docstring)
    return "\n".join(part for block in blocks for part in of_block(block))


def of_block(block: str) -> Iterator[str]:
    lines = block.splitlines()
    if all(line.startswith("    ") for line in lines) or block.startswith(">>> "):
        yield f"```text\n{textwrap.dedent(block)}\n```\n"
        return
    items: list[str] = []
    for line in lines:
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if text in SAID_BY_THE_HEAD:
            continue
        if not indent and (part := PART.match(text)):
            items.append(
                f"\n**{part['part']}**{part['rest'] if part['rest'] != ':' else ''}\n" if part["part"] != "Args" else "\n**Args**\n"
            )
        elif (entry := ENTRY.match(text)) and indent in (0, 4, 8):
            names = ", ".join(f"`{name}`" for name in entry["names"].split(", "))
            items.append(f"{'    ' if indent == 8 else ''}- {names}: {escaped(entry['text'])}")
        elif items:
            items[-1] = f"{items[-1].rstrip()} {escaped(text)}"
        else:
            items.append(escaped(text))
    yield "\n".join(items) + "\n"


def escaped(text: str) -> str:
    """What Markdown and HTML would take for their own, outside of backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*<>|])", r"\\\1", part) for part in parts)
