"""The clip that acts, and the names of settings in our tables: are they the host's own?

VERL_ROOT=... NEMO_RL_ROOT=... ROLL_ROOT=... SKYRL_ROOT=... pytest -m host --require host tests/test_sections.py compares the tables
of names with checkouts.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import pytest
import yaml
from host_checkouts import NEMO_RL, ROLL, SKYRL, VERL, Checkout

from megatron_rl.hosts import nemo_rl, roll, roll_sizes, skyrl, verl
from megatron_rl.hosts.door import Door, Kind
from megatron_rl.hosts.door_line import judge_names
from megatron_rl.hosts.settings import Given, Settings, acting_clip, clip_to_type
from megatron_rl.loss_hub import get_policy_loss

A, B = Given("low", 0.2, 0.2), Given("high", 0.2, 0.2)


@pytest.mark.parametrize(
    ("low", "high", "acting", "is_open"),
    [
        (A, B, (None, None), False),  # nobody's choice
        (A._replace(is_typed=False), B._replace(is_typed=False), (None, None), False),
        (A._replace(is_typed=True), B._replace(is_typed=True), (0.2, 0.2), False),
        (A._replace(is_typed=True), B._replace(is_typed=False), (0.2, None), False),
        (A._replace(is_typed=True), B, (0.2, None), True),
        (A, B._replace(value=0.28), (None, 0.28), True),
        (A._replace(value=3e-4, default=0.2), B._replace(value=0.28), (3e-4, 0.28), False),
        (A._replace(value=None), B._replace(value=0.28), (None, 0.28), False),
    ],
)
def test_what_is_typed_wins_and_one_open_side_is_refused(low, high, acting, is_open):
    found, problems = acting_clip(get_policy_loss("gspo"), low, high, "{name}: {value}")
    assert found == acting and bool(problems) == is_open
    assert all("low=" in problem and "high=" in problem for problem in problems)


def test_an_open_side_that_is_the_losss_own_is_not_refused():
    assert acting_clip(get_policy_loss("grpo"), A, B._replace(value=0.28), "") == ((None, 0.28), [])


def test_what_explain_types_leaves_no_side_open():
    assert clip_to_type(get_policy_loss("gspo"), None, 5e-4, {"a": 0.2, "b": 0.2}) == {"a": 3e-4, "b": 5e-4}
    assert clip_to_type(get_policy_loss("grpo"), None, 0.28, {"a": 0.2, "b": 0.2}) == {"b": 0.28}
    assert clip_to_type(get_policy_loss("gspo"), None, None, {"a": 0.2, "b": 0.2}) == {}


# Checkouts

# Of Megatron's sizes, which are settings of ROLL's strategy, those that are like one that we read.
MEGATRON_NAMES = ("virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "seq_length")


def fields(checkout: Checkout, path: str, *owners: str) -> dict[str, str]:
    """Name -> annotation of the fields of dataclasses."""
    found = {}
    for node in ast.walk(ast.parse(checkout.source(path))):
        if isinstance(node, ast.ClassDef) and node.name in owners:
            found |= {one.target.id: ast.unparse(one.annotation) for one in node.body if isinstance(one, ast.AnnAssign)}  # type: ignore[union-attr]
    return found


@dataclass(frozen=True, kw_only=True)
class Section:
    """numbers, others: names below the prefix. trees: names with names of their own, which are not judged."""

    prefix: str  # with its dot
    numbers: tuple[str, ...]
    others: tuple[str, ...]
    trees: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.numbers, *self.others)


def differences(section: Section, found: dict[str, str]) -> dict[str, set[str]]:
    """found: name -> annotation; a name of a tree is in no table."""
    found = {name: kind for name, kind in found.items() if name not in section.trees}
    numbers = {
        name
        for name, kind in found.items()
        if "List[" not in kind and {"int", "float"} & set(kind.replace("[", " ").replace("]", " ").split())
    }
    of_tables = {name for name in section.names if name.partition(".")[0] not in section.trees and name != "_target_"}
    return {
        "no name of the host": of_tables - found.keys(),
        "not in the table": found.keys() - of_tables,
        "numbers": (numbers ^ set(section.numbers)) & found.keys(),
    }


def section_of(door: Door, place: int = 0) -> Section:
    """The names below one of a door's sections, without those of a section within."""
    prefix = door.sections[place]
    inner = [one for one in door.sections if one != prefix and one.startswith(prefix)]
    names = {one.name: one.kind for one in door.settings if not one.name.startswith(tuple(inner) or "no")}
    names |= {name: Kind.OTHER for name in door.defaults if name not in names}
    own = {name.removeprefix(prefix): kind for name, kind in names.items() if name.startswith(prefix)}
    of_kind = {kind: tuple(name for name, found in own.items() if found == kind) for kind in Kind}
    others = (*of_kind[Kind.OTHER], *of_kind[Kind.SWITCH])
    trees = (*of_kind[Kind.GROUP], *(one.removeprefix(prefix).partition(".")[0] for one in inner))
    return Section(prefix=prefix, numbers=(*of_kind[Kind.NUMBER], *of_kind[Kind.BOUNDS]), others=others, trees=trees)


@pytest.mark.host("SKYRL_ROOT")
def test_the_names_of_skyrl_are_its_own():
    path = "skyrl/train/config/config.py"
    found = fields(SKYRL, path, "AlgorithmConfig")
    nested = {name: kind for name, kind in found.items() if kind.endswith("Config")}
    found |= {f"{name}.{inner}": kind for name, owner in nested.items() for inner, kind in fields(SKYRL, path, owner).items()}
    table = section_of(skyrl.DOOR)
    assert not any(differences(table, found).values()), differences(table, found)


@pytest.mark.host("NEMO_RL_ROOT")
def test_the_names_of_nemo_rl_are_its_own():
    found = fields(NEMO_RL, "nemo_rl/algorithms/loss/loss_functions.py", "ClippedPGLossConfig")
    found |= dict.fromkeys(("megatron_rl", "megatron_rl_log_probs"), "of ours")
    table = section_of(nemo_rl.DOOR)
    assert not any(differences(table, found).values()), differences(table, found)
    for file in NEMO_RL.path("examples").rglob("*grpo*.yaml"):
        named = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("loss_fn") or {}
        assert set(named) <= {*table.names, "_override_"}, file
    for script in NEMO_RL.path("examples").glob("run_*.py"):
        is_ours = "setup" in script.read_text(encoding="utf-8") and "nemo_rl.algorithms.grpo import" in script.read_text(
            encoding="utf-8"
        )
        assert bool(nemo_rl.OTHER_SCRIPT.fullmatch(script.name)) == (not is_ours), script


@pytest.mark.host("VERL_ROOT")
def test_the_names_of_verl_are_its_own():
    engines = [f"{engine}ActorConfig" for engine in ("", "Mcore", "FSDP", "VeOmni", "TorchTitan")]
    actor = fields(VERL, "verl/workers/config/actor.py", *engines)
    policy_loss = fields(VERL, "verl/workers/config/actor.py", "PolicyLossConfig")
    correction = fields(VERL, "verl/trainer/config/algorithm.py", "RolloutCorrectionConfig")
    for place, found in enumerate((actor, policy_loss, correction)):
        section = section_of(verl.DOOR, place)
        assert not any(differences(section, found).values()), (section.prefix, differences(section, found))


@pytest.mark.host("ROLL_ROOT")
def test_the_names_of_roll_are_its_own():
    base, worker = "roll/configs/base_config.py", "roll/configs/worker_config.py"
    table, of_worker = section_of(roll.DOOR), fields(ROLL, worker, "WorkerConfig")
    assert not any(differences(table, of_worker).values()), differences(table, of_worker)
    own = fields(ROLL, base, "ScheduleConfig", "BaseConfig", "PPOConfig") | fields(
        ROLL, "roll/pipeline/rlvr/rlvr_config.py", "RLVRConfig"
    )
    at_top = [one for one in roll.DOOR.settings if "." not in one.name and one.name != "pg_variant"]
    assert {one.name for one in at_top} == own.keys()
    kinds = {one.name: one.kind for one in at_top}
    assert {name for name, kind in own.items() if kind == "bool"} <= {n for n, kind in kinds.items() if kind == Kind.SWITCH} | {
        one.name for one in at_top if one.idle
    }
    numbers = {name for name, kind in own.items() if {"int", "float"} & set(re.findall(r"\w+", kind))}
    assert numbers == {name for name, kind in kinds.items() if kind == Kind.NUMBER}
    groups = {
        roll_sizes.TRAINING: fields(ROLL, "roll/configs/training_args.py", "TrainingArguments"),
        f"{roll.INFER}generating_args.": fields(ROLL, "roll/configs/generating_args.py", "GeneratingArguments"),
        f"{roll.TRAIN}strategy_args.strategy_config.": MEGATRON_NAMES,
    }
    given = dict.fromkeys([*own, *(prefix + name for prefix, known in groups.items() for name in known)])
    settings = Settings.of_names(given, roll.DOOR.all_defaults)
    slips = [row for row in judge_names(roll.DOOR, settings, is_ours=False) if row.is_wrong]
    assert not slips, "a name of ROLL's is taken for a slip"
