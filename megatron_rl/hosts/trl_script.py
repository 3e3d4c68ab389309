"""What a train script of TRL says: which trainer it makes, and what it gives its config and our trainer. Nothing of it is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_rl.hosts.programs import DISTILLED, PREFERENCES, REWARDS, SUPERVISED, called
from megatron_rl.hosts.script_constants import Table, constants_and_objects, defaults_of, evaluate, keywords_of, last_name, plain
from megatron_rl.hosts.scripts import imported_packages, module_file, syntax_tree, taken_from
from megatron_rl.hosts.settings import UNKNOWN, Settings
from megatron_rl.hosts.trl_others import GRPO, known_trainer
from megatron_rl.hosts.trl_stock import CHOICE, PREFIX, instead_of_stock
from megatron_rl.validation.checks import Row

OURS = "megatron_rl.hosts.trl"
# TRL's trainers by the beginning of their names, whose loss is not judged.
OTHER_TRAINERS = {
    **dict.fromkeys(("SFT", "DiffusionGemmaSFT", "SSD"), SUPERVISED),
    **{"Reward": REWARDS, "PRM": REWARDS},
    **dict.fromkeys(("DPO", "KTO", "ORPO", "CPO", "BCO", "TPO", "OnlineDPO", "NashMD", "XPO"), PREFERENCES),
    **dict.fromkeys(("GKD", "GOLD", "Distillation", "SDFT"), DISTILLED),
}
# Methods of a trainer that make its loss, and those that make its batches.
LOSS_METHODS = (
    *("compute_loss", "_compute_loss", "compute_liger_loss", "training_step"),
    *("_get_per_token_logps", "_get_per_token_logps_and_entropies"),
)
# Packages that replace them where they are imported.
PATCHES = ("unsloth",)
BATCH_METHODS = ("_prepare_inputs", "_generate_and_score_completions")
# What a script that reads its command line imports, or names.
PARSERS = frozenset("absl chz click cyclopts docopt draccus fire gin hydra omegaconf plac pydantic_settings tyro typer".split())
_PARSES = re.compile("argv|argparse|parser|parsing|parse_(known_)?args|from_cli")
# Classes that are made from one another are followed so far.
DEEPEST = 20
# More settings of a script are counted, and not listed.
MOST_LISTED = 6


@dataclass(frozen=True, slots=True)
class Made:
    """A trainer that a script makes. base: TRL's, of a class of the script's own. replaced: methods of its own."""

    name: str
    base: str
    replaced: frozenset[str] = frozenset()


class Script:
    """path: None where only the text is known."""

    def __init__(self, tree: ast.Module, path: Path | None = None):
        self.tree, self.path, self.constants = tree, path, constants_and_objects(tree)
        self.classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        self.imported = {alias.asname: alias.name for node in froms for alias in node.names if alias.asname}

    @classmethod
    def of(cls, path: Path) -> Script:
        return cls(syntax_tree(path), path)

    def base_of(self, name: str, depth: int = 0) -> str:
        """What a class of the script is made from, by its name there."""
        own = self.classes.get(name)
        if own is None or depth > DEEPEST:
            return self.imported.get(name, name)
        bases = [self.base_of(last_name(base), depth + 1) for base in own.bases if last_name(base) != name] or [name]
        return next((base for base in bases if base.endswith(("Trainer", "Config"))), bases[0])

    def methods_of(self, name: str, depth: int = 0) -> frozenset[str]:
        own = self.classes.get(name)
        if own is None or depth > DEEPEST:
            return frozenset()
        found = {node.name for node in own.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        return frozenset(found).union(*(self.methods_of(last_name(base), depth + 1) for base in own.bases))

    @cached_property
    def trainers(self) -> list[Made]:
        """In the order of the script."""
        # A method that is put into a trainer's class, or into a trainer.
        stores = [node for node in ast.walk(self.tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
        put = frozenset(node.attr for node in stores if ast.unparse(node.value) != "self")
        names = {name: self.base_of(name) for name in called(self.tree, "")}
        return [Made(name, base, self.methods_of(name) | put) for name, base in names.items() if base.endswith("Trainer")]

    @cached_property
    def known(self) -> str | None:
        """TRL's trainer that the script makes, where its loss is known here."""
        if imported_packages(self.tree) & {*PATCHES}:
            return None
        bases = [one.base for one in self.trainers if not one.replaced & {*LOSS_METHODS}]
        return GRPO if GRPO in bases else known_trainer(bases, None)

    def why_not_judged(self) -> str | None:
        """By the trainer that it makes."""
        if not self.trainers:
            return "makes no trainer that can be seen here"
        if others := sorted(imported_packages(self.tree) & {*PATCHES}):
            return f"imports {others[0]}, which puts losses of its own into TRL's trainers, so its loss is not known here"
        if self.known:
            return None
        bases = [one.base for one in self.trainers]
        if (base := GRPO if GRPO in bases else known_trainer(bases, None)) is not None:
            made = next(one for one in self.trainers if one.base == base)
            methods = " and ".join(name for name in LOSS_METHODS if name in made.replaced)
            whose = f"{made.name}, a {base} with a {methods} of its own" if made.name != base else f"{base} with another {methods}"
            return f"makes a {whose}, so its loss is not known here"
        of_others = (why for base in bases for name, why in OTHER_TRAINERS.items() if base.startswith(name))
        return next(of_others, None) or f"makes a {self.trainers[0].name}, whose loss is not known here"

    # Its settings

    @cached_property
    def config(self) -> str:
        return f"{(self.known or GRPO).removesuffix('Trainer')}Config"

    @cached_property
    def _config_calls(self) -> list[ast.Call]:
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        return [node for node in calls if self.base_of(last_name(node.func)) == self.config]

    def without_effect(self, flags: Collection[str]) -> list[str]:
        """The flags of its command line that it cannot read: it names no parser, makes its config itself, and imports no file of
        its own that may read them. A setting of it that is not known here may come from there."""
        nodes, imported = [*ast.walk(self.tree)], imported_packages(self.tree)
        names = {getattr(node, name, None) for node in nodes for name in ("id", "attr", "name", "module", "arg")}
        folders = [] if self.path is None else [self.path.parent, Path.cwd()]
        is_own = any(module_file(name, folders) for name in imported - {"trl", PREFIX[:-1]})
        is_relative = any(isinstance(node, ast.ImportFrom) and node.level for node in nodes)
        parses = any(_PARSES.search(str(name).lower()) for name in names) or bool(imported & PARSERS)
        given = [keywords_of(call, self.constants) for call in self._config_calls]
        takes_other = not given and any(isinstance(node, ast.keyword) and node.arg == "args" for node in nodes)
        if is_own or is_relative or parses or takes_other or any(unread for _, unread in given):
            return []
        unknown = {name for of_call, _ in given for name, value in of_call.items() if value is UNKNOWN}
        return [name for name in flags if not (unknown if name == "config" else name in unknown)]

    def fields_given(self) -> list[str]:
        """The fields that its calls give TRL's config, but for those that a class of the script adds; none where the config is of
        another package, which may have added some."""
        froms = [node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom)]
        origins = {str(node.module).split(".")[0] for node in froms if self.config in {alias.name for alias in node.names}}
        if (origins or imported_packages(self.tree) & {"trl"}) != {"trl"}:
            return []
        found = list[str]()
        for call in self._config_calls:
            own = self.fields_of(last_name(call.func))
            found += [] if own is None else [name for name in keywords_of(call, self.constants)[0] if name not in own]
        return list(dict.fromkeys(found))

    def fields_of(self, name: str, depth: int = 0) -> set[str] | None:
        """The fields that a class of the script adds to TRL's config, with its bases; None: it may take any name."""
        node = self.classes.get(name)
        if node is None or depth > DEEPEST:
            return set() if self.imported.get(name, name) == self.config else None
        of_bases = [self.fields_of(last_name(base), depth + 1) for base in node.bases]
        if any(one is None for one in of_bases) or "__init__" in self.methods_of(name):
            return None
        own = {ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)}
        return own.union(*(one for one in of_bases if one is not None))

    def settings(self, known: Collection[str]) -> tuple[dict[str, Any], dict[str, Any], list[Row]]:
        """(what it gives TRL's config, what it assigns to the config's fields afterwards, what is said of it). known: the names
        that are judged."""
        config = self.config
        classes = [name for name in self.classes if self.base_of(name) == config]
        given = {name: value for one in classes for name, value in defaults_of(one, self.constants).items()}
        of_calls = [keywords_of(call, self.constants) for call in self._config_calls]
        unread = [name for _, names in of_calls for name in names]
        for name in dict.fromkeys(name for of_call, _ in of_calls for name in of_call):
            values = [of_call.get(name, UNKNOWN) for of_call, _ in of_calls]
            given[name] = values[0] if all(one == values[0] for one in values) else UNKNOWN
        assigned = self._assigned_fields(self.tree, self._config_names(config))
        said = [self._said(config, given, unread, assigned, known), *self._of_batches()]
        if unread:
            given = {CHOICE: UNKNOWN} | given
        return given, assigned, said

    def _said(self, config: str, given: dict, unread: Sequence[str], assigned: dict, known: Collection[str]) -> Row:
        unknown = [name for name in given if name in known and given[name] is UNKNOWN]
        names = [name for name in given if name in known and name not in unknown][:MOST_LISTED]
        if rest := len(given) - len(names) - len(unknown):
            names = [*names, f"{rest} more" if names else f"{rest} setting{'s' * (rest > 1)}, none of which is judged"]
        listed = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
        text = f"{config} of {self.path} was read: {listed}" if names else f"{self.path} makes no {config} that can be seen"
        if not names and not unread and "TrlParser" in taken_from(self.tree, "trl"):
            text = f"{self.path} fills {config} from the command line and the file of --config: both were read"
        if unread:
            text += f", but for {', '.join(unread)}"
        if assigned:
            text += f", and so were the fields that it sets later: {', '.join(assigned)}"
        if unknown:
            text += f"; not known here: {', '.join(unknown)}"
        return Row("script", f"{text}; what else the script changes is not seen here", is_note=True)

    def _of_batches(self) -> Iterator[Row]:
        for made in self.trainers:
            if methods := [name for name in BATCH_METHODS if name in made.replaced]:
                text = f"{made.name} has another {' and '.join(methods)}, which is not judged; the rest is as in {made.base}"
                yield Row("trainer", text, is_note=True)

    def _config_names(self, config: str) -> set[str]:
        """What it calls its config: the name of what it makes, or of what it gives a trainer as args."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if self.base_of(last_name(node.value.func)) == config:
                    found |= {target.id for target in targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.Call) and last_name(node.func) in {one.name for one in self.trainers}:
                found |= {one.value.id for one in node.keywords if one.arg == "args" and isinstance(one.value, ast.Name)}
        return found

    def _assigned_fields(self, tree: ast.AST, names: set[str], *, is_in_branch: bool = False) -> dict[str, Any]:
        """config.field = value, in the order of the script; UNKNOWN where a branch or a loop decides."""
        found: dict[str, Any] = {}
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                is_plain = not (is_in_branch or isinstance(node, ast.AugAssign))
                for target in targets:
                    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in names:
                        found[target.attr] = evaluate(node.value, self.constants) if is_plain else UNKNOWN
            is_main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
            decides = isinstance(node, ast.If | ast.For | ast.While | ast.Try | ast.Match) and not is_main
            found |= self._assigned_fields(node, names, is_in_branch=is_in_branch or decides)
        return found

    def given_to_trainer(self) -> dict[str, Any]:
        """The keywords of its calls of a trainer, but for a class with an __init__ of its own."""
        names = {one.name for one in self.trainers if one.base == self.known and "__init__" not in one.replaced}
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and last_name(node.func) in names]
        return {name: plain(value) for call in calls for name, value in keywords_of(call, self.constants)[0].items()}

    def given_to_ours(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of GRPOTrainer(..., megatron_rl={...}), by the names that a line has for them. fields: of the config, which
        they may read."""
        found: dict[str, Any] = {}
        configs = dict.fromkeys(self._config_names(self.config), Table(fields.items()))
        constants = replace(self.constants, names={**self.constants.names, **configs})
        for node in ast.walk(self.tree):
            own = [one.value for one in node.keywords if one.arg == PREFIX[:-1]] if isinstance(node, ast.Call) else []
            for given in (plain(evaluate(one, constants)) for one in own):
                found |= {f"{PREFIX}{name}": value for name, value in given.items()} if isinstance(given, dict) else {}
        return found

    def trainer_beside(self, settings: Settings) -> Iterator[Row]:
        """A loss of ours in TRL's trainer, or a loss of TRL's, or none, in ours: the trainer refuses it when it is made or at its
        first step."""
        is_ours, choice = GRPO in taken_from(self.tree, OURS), str(settings[CHOICE])
        if choice.startswith(PREFIX) and not is_ours and GRPO in taken_from(self.tree, "trl"):
            text = f"{self.path} makes TRL's own GRPOTrainer, which does not know {choice}: from {OURS} import GRPOTrainer"
            yield Row(CHOICE, text, is_wrong=True)
        if is_ours and settings[CHOICE] is not UNKNOWN and not choice.startswith(PREFIX) and "." not in choice:
            text = f"{self.path} makes our GRPOTrainer, which refuses {CHOICE}={choice}: set {instead_of_stock(settings)}"
            yield Row(CHOICE, text, is_wrong=True)
