"""Lines of the trainers that settings configure, judged from a folder that is no checkout: one clip rule, numbers, names.

VERL_ROOT=... NEMO_RL_ROOT=... ROLL_ROOT=... SKYRL_ROOT=... pytest -m host --require host tests/test_sections.py compares the tables
of names with checkouts.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from host_checkouts import NEMO_RL, ROLL, SKYRL, VERL, Checkout

from megatron_rl.errors import ConfigError
from megatron_rl.hosts import nemo_rl, roll, skyrl, verl
from megatron_rl.hosts.door import Door, Kind
from megatron_rl.hosts.door_line import judge, judge_names
from megatron_rl.hosts.doors import DOORS
from megatron_rl.hosts.settings import Given, Settings, acting_clip, clip_to_type
from megatron_rl.loss_hub import get_policy_loss

ACTOR = "actor_rollout_ref.actor"
LAUNCHER = "python -m megatron_rl.hosts.launch"
LINES = {
    "verl": f"-m verl.trainer.main_ppo {ACTOR}.policy_loss.loss_mode=megatron_rl.",
    "nemo_rl": "python -m megatron_rl.hosts.launch examples/run_grpo.py ++loss_fn.megatron_rl=",
    "skyrl": "python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=megatron_rl.hosts.skyrl "
    "trainer.algorithm.policy_loss_type=megatron_rl.",
}
YAML_OF_ROLL: dict[str, Any] = {
    "rollout_batch_size": 8,
    "num_return_sequences_in_group": 4,
    "enable_old_logprobs_recompute": True,
    "actor_train": {"worker_cls": roll.WORKER, "strategy_args": {"strategy_name": roll.STRATEGY}},
}


def judged(host: str, rest: str | dict[str, Any]) -> tuple[list[str], str]:
    """(problems as subject: text, what is said of the loss)."""
    settings = dict(YAML_OF_ROLL)
    if isinstance(rest, dict):
        for name, value in rest.items():
            settings = settings | {name: value} if "." not in name else settings
            if "." in name:
                settings["actor_train"] = {**settings["actor_train"], name.partition(".")[2]: value}
        words = ["python", "examples/start_rlvr_pipeline.py"]
    else:
        words = (LINES[host] + rest).split()

    def read_file(path: Path) -> dict[str, Any]:
        if host == "roll":
            return settings
        raise ConfigError(f"{path} is no file here")

    rows = list(judge(DOORS[host], words, read_file))
    return [f"{row.subject}: {row.text}" for row in rows if row.is_wrong], " ".join(row.text for row in rows if not row.is_wrong)


def clips(host: str, low: object = None, high: object = None) -> str:
    """The host's own words for a clip."""
    names = {"verl": (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")}
    names |= {"nemo_rl": ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max")}
    names |= {"skyrl": ("trainer.algorithm.eps_clip_low", "trainer.algorithm.eps_clip_high")}
    return " ".join(f" {name}={value}" for name, value in zip(names[host], (low, high), strict=True) if value is not None)


CLASS = f" {verl.CLASS_LINE}"
OWN_CLIP = f"{CLASS} +{ACTOR}.policy_loss.clip_ratio_low=0.2 +{ACTOR}.policy_loss.clip_ratio_high="
RANGE = {"use_pg_clip_range": True}
RIGHT = {
    # DAPO's and CISPO's numbers, typed: they act, with each loss
    "verl, grpo, 0.2/0.28": ("verl", "grpo.token_mean" + clips("verl", 0.2, 0.28), "clip 0.2/0.28"),
    "verl, grpo, high alone": ("verl", "grpo.token_mean" + clips("verl", None, 0.28), "clip 0.2/0.28"),
    "verl, gspo, its own": ("verl", "gspo.token_mean", "clip 0.0003/0.0004"),
    "verl, gspo, typed": ("verl", "gspo.token_mean" + clips("verl", 3e-4, 4e-4), "clip 0.0003/0.0004"),
    "verl, cispo, by our names": ("verl", f"cispo.token_mean{OWN_CLIP}0.28", "clip 0.2/0.28"),
    "verl, cispo, verl's": ("verl", f"cispo.token_mean{OWN_CLIP}0.2", "clip 0.2/0.2"),
    "verl, cispo, 1/4": ("verl", "cispo.token_mean" + clips("verl", 1.0, 4.0), "clip 1/4"),
    "verl, low of the shell": ("verl", "cispo.token_mean" + clips("verl", "$LOW", 0.28), "clip 1/0.28"),
    "nemo_rl, gspo, 0.2/0.28": ("nemo_rl", "gspo.sample_mean" + clips("nemo_rl", 0.2, 0.28), "clip 0.2/0.28"),
    "nemo_rl, cispo, 0.2/0.2": ("nemo_rl", "cispo.token_mean" + clips("nemo_rl", 0.2, 0.2), "clip 0.2/0.2"),
    "nemo_rl, gspo, its own": ("nemo_rl", "gspo.sample_mean", "clip 0.0003/0.0004"),
    "nemo_rl, grpo": ("nemo_rl", "grpo.prompt_mean" + clips("nemo_rl", 0.2, 0.28), "clip 0.2/0.28"),
    "nemo_rl, another script": ("nemo_rl", "grpo.token_mean policy.train_global_batch_size=64", "clip 0.2/0.2"),
    "nemo_rl, sizes": (
        "nemo_rl",
        "grpo.prompt_mean policy.train_global_batch_size=256 grpo.num_prompts_per_step=32 grpo.num_generations_per_prompt=8",
        "1/(P M_g)",
    ),
    "skyrl, gspo, 0.2/0.28": ("skyrl", "gspo" + clips("skyrl", 0.2, 0.28), "clip 0.2/0.28"),
    "skyrl, cispo, 0.2/0.2": ("skyrl", "cispo" + clips("skyrl", 0.2, 0.2), "clip 0.2/0.2"),
    "skyrl, gspo, high alone": ("skyrl", "gspo" + clips("skyrl", None, 5e-4), "clip 0.0003/0.0005"),
    "skyrl, gspo, its own": ("skyrl", "gspo", "clip 0.0003/0.0004"),
    "skyrl, constant": (
        "skyrl",
        "grpo trainer.algorithm.loss_reduction=seq_mean_token_sum_norm trainer.algorithm.max_seq_len=8192",
        "1/(8192 N)",
    ),
    "skyrl, nested": ("skyrl", "sapo trainer.algorithm.sapo.tau_neg=1.5", "1.5"),
    "roll, gspo, its own": ("roll", {"actor_train.pg_variant": "gspo.token_mean"}, "clip 0.0003/0.0004"),
    "roll, gspo, 0.2/0.28": (
        "roll",
        {"actor_train.pg_variant": "gspo.token_mean", **RANGE, "pg_clip_low": 0.2, "pg_clip_high": 0.28},
        "clip 0.2/0.28",
    ),
    "roll, cispo, 0.2/0.2": (
        "roll",
        {"actor_train.pg_variant": "cispo.token_mean", **RANGE, "pg_clip_low": 0.2, "pg_clip_high": 0.2},
        "clip 0.2/0.2",
    ),
    "roll, grpo, high alone": ("roll", {"actor_train.pg_variant": "grpo.token_mean", **RANGE, "pg_clip_high": 0.28}, "0.2/0.28"),
    "roll, grpo, pg_clip": ("roll", {"actor_train.pg_variant": "grpo.token_mean", "pg_clip": 0.2, "lr": 1e-6}, "clip 0.2/0.2"),
    "roll, a name of one's own": (
        "roll",
        {"actor_train.pg_variant": "${pg_variant}", "pg_variant": "grpo.token_mean", "my_name": 3},
        "clip 0.2/0.2",
    ),
    "roll, both sides": ("roll", {"actor_train.pg_variant": "gspo.token_mean", "pg_clip": 1e-3}, "clip 0.001/0.001"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_line_is_approved_and_its_clip_is_shown(name):
    host, rest, said = RIGHT[name]
    problems, told = judged(host, rest)
    assert not problems and said in told, (problems, told)


VARIANT = "actor_train.pg_variant"
SWITCH = "=true is a switch, and must be a number"
WRONG: dict[str, tuple[str, str | dict[str, Any], str]] = {
    # One side at the host's default beside a chosen one, where a worker does not know what was typed
    "verl, gspo, 0.2/0.28": (
        "verl",
        "gspo.token_mean" + clips("verl", 0.2, 0.28),
        "clip_ratio_low=0.2 beside .*clip_ratio_high=0.28",
    ),
    "verl, cispo, 0.2/0.28": ("verl", "cispo.token_mean" + clips("verl", 0.2, 0.28), "policy_loss.clip_ratio_low=0.2 for 0.2"),
    "verl, gmpo, high": ("verl", "gmpo.token_mean" + clips("verl", None, 0.28), "gmpo has 0.32968 of its own"),
    "verl, gspo, low": ("verl", "gspo.token_mean" + clips("verl", 1e-3), "clip_ratio_high=0.2 beside .*clip_ratio_low=0.001"),
    "verl, cispo, 0.2/0.2": ("verl", "cispo.token_mean" + clips("verl", 0.2, 0.2), "would train its own clip, 1/0.28"),
    "verl, a clip twice": ("verl", f"cispo.token_mean{OWN_CLIP}0.28" + clips("verl", 0.1), "the same thing with two values"),
    "verl, our names in verl's class": (
        "verl",
        f"cispo.token_mean +{ACTOR}.policy_loss.clip_ratio_low=0.2 +{ACTOR}.policy_loss.clip_ratio_high=0.3",
        "verl's own class has no such fields",
    ),
    "roll, no switch": ("roll", {VARIANT: "grpo.token_mean", "pg_clip_high": 0.28}, "no effect without use_pg_clip_range: true"),
    "roll, the other clip": (
        "roll",
        {VARIANT: "grpo.token_mean", **RANGE, "pg_clip_low": 0.1, "pg_clip_high": 0.2, "pg_clip": 0.3},
        "pg_clip=0.3 has no effect without dual_clip_loss: true",
    ),
    "roll, ROLL's default": ("roll", {VARIANT: "gspo.token_mean", "pg_clip": 0.2}, "its worker cannot tell that you wrote it"),
    "roll, half a range": ("roll", {VARIANT: "gspo.token_mean", **RANGE, "pg_clip_high": 4e-4}, "without pg_clip_low trains ROLL"),
    # A switch for a number
    "verl, a clip": ("verl", "grpo.token_mean" + clips("verl", "True", 0.28), f"clip_ratio_low{SWITCH}"),
    "nemo_rl, L": ("nemo_rl", "grpo.constant ++loss_fn.megatron_rl_loss_aggregation_divisor=true", SWITCH),
    "skyrl, nested": ("skyrl", "sapo trainer.algorithm.sapo.tau_pos=true", f"tau_pos{SWITCH}"),
    "roll, L": (
        "roll",
        {VARIANT: "grpo.constant", "actor_train.system_envs": {"MEGATRON_RL_LOSS_AGGREGATION_DIVISOR": True}},
        f"DIVISOR{SWITCH}",
    ),
    # Misspelt
    "verl, a correction": (
        "verl",
        f"grpo.token_mean +{ACTOR}.policy_loss.importance_corection=tis",
        "policy_loss.importance_correction\\?",
    ),
    "verl, a clip's name": ("verl", f"grpo.token_mean +{ACTOR}.eps_clip=0.28", "verl has no such setting"),
    "verl, L's name": ("verl", f"grpo.token_mean {ACTOR}.loss_scale=8", f"did you mean {ACTOR}.loss_scale_factor\\?"),
    "verl, a parameter that verl names": (
        "verl",
        f"grpo.token_mean +{ACTOR}.policy_loss.clip_ratio_c=3",
        "set .*actor.clip_ratio_c",
    ),
    **{
        f"nemo_rl, {name}": ("nemo_rl", f"grpo.token_mean ++loss_fn.{name}=0.28", "NeMo-RL has no such setting")
        for name in ("ratio_clip_maxx", "eps_clip_high", "use_importance_sampling_corection")
    },
    # Another word for a side: never the other side.
    **{
        f"{host}, {name}": (host, f"{loss}{place}{name}=0.28", f"did you mean [a-z_.]*{meant}\\?")
        for host, loss, place, name, meant in (
            ("nemo_rl", "grpo.token_mean", " ++loss_fn.", "ratio_clip_high", "ratio_clip_max"),
            ("nemo_rl", "grpo.token_mean", " ++loss_fn.", "ratio_clip_low", "ratio_clip_min"),
            ("nemo_rl", "grpo.token_mean", " ++loss_fn.", "clip_ratio_low", "ratio_clip_min"),
            ("skyrl", "grpo", " trainer.algorithm.", "eps_clip_max", "eps_clip_high"),
            ("verl", "grpo.token_mean", f" +{ACTOR}.", "clip_ratio_min", "clip_ratio_low"),
        )
    },
    # One value in the place of a group
    **{
        f"{host}, {rest}": (host, f"{loss} {rest}", "it is a group of settings, and .* takes no abc in its place")
        for host, loss, rest in (
            ("nemo_rl", "grpo.token_mean", "loss_fn=abc"),
            ("nemo_rl", "grpo.token_mean", "policy.generation=abc"),
            ("nemo_rl", "grpo.token_mean", "grpo=abc"),
            ("skyrl", "grpo", "trainer.algorithm.off_policy_correction=abc"),
            ("skyrl", "grpo", "trainer.algorithm.sapo=abc"),
            ("skyrl", "grpo", "generator=abc"),
        )
    },
    **{
        f"roll, {name}": ("roll", {VARIANT: "grpo.token_mean", name: 5}, "group of settings, and ROLL takes no 5 in its place")
        for name in ("actor_train", "actor_train.training_args", "actor_train.system_envs", "actor_infer")
    },
    "nemo_rl, another worker": ("nemo_rl", "grpo.token_mean policy.megatron_cfg.enabled=false", "enabled is not true"),
    "nemo_rl, a part of a batch": (
        "nemo_rl",
        "grpo.prompt_mean policy.train_global_batch_size=64 grpo.num_prompts_per_step=32 grpo.num_generations_per_prompt=8",
        "must have all 256 samples",
    ),
    "nemo_rl, clipped advantages": (
        "nemo_rl",
        "grpo.prompt_mean ++grpo.advantage_clip_low=-1",
        "grpo.advantage_clip_low=-1 beside",
    ),
    "nemo_rl, a flag": ("nemo_rl", "grpo.token_mean --loss-aggregation constant", "--loss-aggregation: a flag of miles and slime"),
    **{
        f"skyrl, {name}": ("skyrl", f"grpo trainer.algorithm.{name}=1", f"did you mean trainer.algorithm.{meant}\\?")
        for name, meant in (
            ("eps_clip_hi", "eps_clip_high"),
            ("max_seq_length", "max_seq_len"),
            ("sapo.tau_negative", "sapo.tau_neg"),
            ("off_policy_correction.tis_ratio", "off_policy_correction.tis_ratio_type"),
        )
    },
    "skyrl, two in one": ("skyrl", "gspo.prompt_mean", "type .*policy_loss_type=megatron_rl.gspo .*loss_reduction=prompt_mean"),
    "roll, pg_clip_hi": ("roll", {VARIANT: "grpo.token_mean", **RANGE, "pg_clip_hi": 0.28}, "did you mean pg_clip_high\\?"),
    **{
        f"roll, {name}": ("roll", {VARIANT: "grpo.token_mean", name: value}, said)
        for name, value, said in (
            ("advantage_clp", 0.1, "did you mean advantage_clip\\?"),
            (
                "actor_train.training_args",
                {"gradient_acumulation_steps": 4},
                "did you mean .*s.gradient_accumulation_steps",
            ),
            ("system_envs", 5, "group of settings, and ROLL takes no 5 in its place"),
        )
    },
}


@pytest.mark.parametrize(
    ("host", "rest"),
    [
        ("verl", "grpo.token_mean algorithm.rollout_correction={rollout_is:token}"),
        ("nemo_rl", "grpo.token_mean ++loss_fn={ratio_clip_max:0.28}"),
        ("nemo_rl", "grpo.token_mean policy={generation:{top_p:0.8}}"),
        ("skyrl", "grpo trainer.algorithm.sapo={tau_pos:1.0}"),
        ("skyrl", "grpo generator.sampling_params={top_p:0.8}"),
    ],
)
def test_several_settings_in_one_word_are_told_apart_from_none(host, rest):
    problems, said = judged(host, rest)
    assert not problems and "several settings in one word are not read here" in said


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_is_refused_by_name(name):
    host, rest, expected = WRONG[name]
    problems, _ = judged(host, rest)
    assert any(re.search(expected, problem) for problem in problems), problems


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "python -m megatron_rl.hosts.launch examples/run_sft.py ++loss_fn.megatron_rl=grpo.token_mean",
            "run_sft.py is not nemo_rl",
        ),
        (
            "python -m megatron_rl.hosts.launch examples/run_grpo.py loss_fn.megatron_rl=grpo.token_mean",
            r"type \+\+loss_fn.megatron_rl",
        ),
    ],
)
def test_nemo_rls_script_and_hydras_plus_are_judged_without_a_file(line, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def no_file(path: Path) -> dict[str, Any]:
        raise ConfigError(f"{path} is no file here")

    (row,) = [row for row in judge(DOORS["nemo_rl"], line.split(), no_file) if row.is_wrong]
    assert re.search(said, row.text), row.text


def problems_of(words: list[str]) -> list[str]:
    settings = verl.read_line(words).settings
    assert settings is not None
    return verl.problems_of(settings)[0]


def test_a_name_of_a_newer_verl_does_not_end_a_launch():
    words = [*(LINES["verl"] + "grpo.token_mean").split(), f"+{ACTOR}.quantum_speed=3"]
    assert problems_of(words) == []
    assert problems_of([*words, f"+{ACTOR}.clip_ratio_hgih=3"]) != []
    assert judged("verl", f"grpo.token_mean +{ACTOR}.quantum_speed=3")[0]


OWN = (3e-4, 4e-4)
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
    found = fields(NEMO_RL, "nemo_rl/algorithms/loss/loss_functions.py", "ClippedPGLossConfig") | {"megatron_rl": "of ours"}
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
        roll.TRAINING: fields(ROLL, "roll/configs/training_args.py", "TrainingArguments"),
        f"{roll.INFER}generating_args.": fields(ROLL, "roll/configs/generating_args.py", "GeneratingArguments"),
        f"{roll.TRAIN}strategy_args.strategy_config.": MEGATRON_NAMES,
    }
    given = dict.fromkeys([*own, *(prefix + name for prefix, known in groups.items() for name in known)])
    settings = Settings.of_names(given, roll.DOOR.all_defaults)
    slips = [row for row in judge_names(roll.DOOR, settings, is_ours=False) if row.is_wrong]
    assert not slips, "a name of ROLL's is taken for a slip"
