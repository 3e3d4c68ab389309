"""Each line of door_lines.py is judged as it says, from a folder that is no checkout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from door_lines import ACTOR, LINES, RIGHT, WRONG, YAML_OF_ROLL
from explain_cases import explain

from megatron_rl.commands.explain.launch import HOSTS
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import verl
from megatron_rl.hosts.door_line import given_by, judge, judge_settings
from megatron_rl.hosts.doors import DOORS
from megatron_rl.hosts.settings import UNKNOWN, Settings
from megatron_rl.loss_hub import get_loss_aggregation
from megatron_rl.validation import config_warnings


def judged(host: str, rest: str | list[str] | dict[str, Any]) -> tuple[list[str], str]:
    """(problems as subject: text, what else is said)."""
    settings = dict(YAML_OF_ROLL)
    if isinstance(rest, dict):
        for name, value in rest.items():
            settings = settings | {name: value} if "." not in name else settings
            if "." in name:
                settings["actor_train"] = {**settings["actor_train"], name.partition(".")[2]: value}
        words = ["python", "examples/start_rlvr_pipeline.py"]
    else:
        words = rest if isinstance(rest, list) else (LINES[host] + rest).split()

    def read_file(path: Path) -> dict[str, Any]:
        if host == "roll":
            return settings
        raise ConfigError(f"{path} is no file here")

    rows = list(judge(DOORS[host], words, read_file))
    return [f"{row.subject}: {row.text}" for row in rows if row.is_wrong], " ".join(
        f"{row.subject} {row.text}" for row in rows if not row.is_wrong
    )


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_line_is_approved_and_its_clip_is_shown(name):
    host, rest, said = RIGHT[name]
    problems, told = judged(host, rest)
    assert not problems and told and re.search(said, told), (problems, told)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_is_refused_by_name(name):
    host, rest, expected = WRONG[name]
    problems, _ = judged(host, rest)
    assert len(problems) == len(expected.splitlines()) and re.search(expected, "\n".join(problems)), problems


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


# What leaves the deviation of a group's rewards out of the advantages, by the pages of the hosts. prime-rl's have none in them.
WITHOUT_DEVIATION = {
    "verl": "algorithm.norm_adv_by_std_in_grpo=False",
    "nemo_rl": "grpo.adv_estimator.normalize_rewards=False",
    "skyrl": "trainer.algorithm.grpo_norm_by_std=False",
    "roll": "adv_estimator: reinforce; norm_mean_type: group; norm_std_type: null",
    "trl": "scale_rewards='none'",
    "prime_rl": "",
    "miles": "--disable-grpo-std-normalization",
    "slime": "--disable-grpo-std-normalization",
    "megatron_lm": "",
    "train": "--advantage-normalization none",
}
DIVISORS = {"constant": 8.0, "token_mean": None}
ESTIMATORS = {"verl": {verl.ESTIMATOR: "grpo"}, "roll": {"adv_estimator": "grpo"}}


@pytest.mark.parametrize("host", HOSTS)
def test_explain_names_what_dr_grpo_needs_beside_its_aggregation(host):
    for aggregation in ("constant", "token_mean"):
        divisor = ["--loss-aggregation-divisor", "8"] if aggregation == "constant" else []
        _, out, _ = explain("--host", host, "--response-lengths", "3,5", "--loss-aggregation", aggregation, *divisor)
        said = [line.partition(" also: ")[2] for line in out.splitlines() if line.startswith("for Dr. GRPO")]
        assert said == [WITHOUT_DEVIATION[host]] * bool(aggregation == "constant" and WITHOUT_DEVIATION[host])


@pytest.mark.parametrize("host", [name for name, door in DOORS.items() if door.deviation is not None])
def test_doctor_advises_it_where_the_advantages_have_the_deviation(host):
    door = DOORS[host]
    for aggregation, without in (("constant", False), ("constant", True), ("token_mean", False)):
        given, problems = given_by(
            door, PolicyLossConfig(loss_aggregation=aggregation, loss_aggregation_divisor=DIVISORS[aggregation])
        )
        given |= ESTIMATORS.get(host, {}) | (dict(door.deviation.without) if without else {})
        known = {name: value for name, value in given.items() if value is not UNKNOWN}
        rows = [*judge_settings(door, Settings.of_names(known, door.all_defaults, typed=known))]
        advice = [row.text for row in rows if row.subject == "advice" and "standard deviation" in row.text]
        assert not problems and len(advice) == (aggregation == "constant" and not without), (aggregation, without, rows)
        assert all(f"without {WITHOUT_DEVIATION[host]}: " in text for text in advice)


# What the trainers call the longest response, and the number of its turns; prime-rl's environments say theirs.
LONGEST = {
    "verl": ("data.max_response_length", None),
    "nemo_rl": ("policy.generation.max_new_tokens", "grpo.max_rollout_turns"),
    "skyrl": ("generator.sampling_params.max_generate_length", "generator.max_turns"),
    "roll": ("response_length", None),
    "trl": ("max_completion_length", None),
}


@pytest.mark.parametrize("host", LONGEST)
def test_doctor_says_how_wrong_an_l_is_that_is_not_the_longest_response(host):
    """8192 / 8 = 1024. Of several turns no setting says how long they are together."""
    door, (longest, turns) = DOORS[host], LONGEST[host]
    given, _ = given_by(door, PolicyLossConfig(loss_aggregation="constant", loss_aggregation_divisor=8.0))
    cases = [({longest: 8192}, True), ({longest: 8}, False), ({longest: UNKNOWN}, False)]
    cases += [({}, False)] if longest not in door.all_defaults else []
    cases += [({longest: 8192, turns: number}, number == 1) for number in (1, 3) if turns]
    for more, is_said in cases:
        known = {name: value for name, value in (given | more).items() if name in more or value is not UNKNOWN}
        rows = [*judge_settings(door, Settings.of_names(known, door.all_defaults, typed=known))]
        advice = [row.text for row in rows if row.subject == "advice" and "longest response" in row.text]
        assert len(advice) == is_said and all("the gradient is 1.02e+03 x as large" in text for text in advice), (more, rows)
    told = judged("verl", f"grpo.constant {ACTOR}.loss_scale_factor=819 data.max_response_length=8192")[1]
    assert (
        f"{ACTOR}.loss_scale_factor=819 is not data.max_response_length=8192, the longest response: the gradient is 10 x as large "
        f"as with it; type {ACTOR}.loss_scale_factor=8192, unless you mean that"
    ) in told


@pytest.mark.parametrize(
    ("host", "line", "is_said"),
    [
        (
            "verl",
            f"python -m verl.trainer.main_ppo {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm {ACTOR}.loss_scale_factor=819",
            True,
        ),
        ("verl", f"python -m verl.trainer.main_ppo {ACTOR}.loss_agg_mode=token-mean {ACTOR}.loss_scale_factor=819", False),
        ("verl", f"python -m verl.trainer.main_ppo {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", False),  # another remark
        (
            "skyrl",
            "python -m skyrl.train.entrypoints.main_base trainer.algorithm.loss_reduction=seq_mean_token_sum_norm "
            "trainer.algorithm.max_seq_len=819",
            True,
        ),
    ],
)
def test_doctor_says_so_of_a_trainer_s_own_loss_too(host, line, is_said):
    told = judged(host, [*line.split(), f"{LONGEST[host][0]}=8192"])[1]
    assert ("the longest response: the gradient is 10 x as large as with it" in told) == is_said, told


# What gives prompt_mean the clip of DAPO, by the rows "DAPO as published" of the pages. ROLL's switch chooses both sides.
CLIP_OF_DAPO = {
    "verl": f"{ACTOR}.clip_ratio_high=0.28",
    "nemo_rl": "loss_fn.ratio_clip_max=0.28",
    "skyrl": "trainer.algorithm.eps_clip_high=0.28",
    "roll": "pg_clip_high: 0.28; use_pg_clip_range: true; pg_clip_low: 0.2",
    "trl": "epsilon_high=0.28",
    "prime_rl": "megatron_rl.clip_ratio_high=0.28",
}


@pytest.mark.parametrize("host", [name for name, door in DOORS.items() if door.gives(get_loss_aggregation("prompt_mean"))])
def test_doctor_advises_the_clip_of_dapo_beside_its_aggregation(host):
    door = DOORS[host]
    for loss, aggregation, high, is_advised in (
        ("grpo", "prompt_mean", None, True),
        ("grpo", "prompt_mean", 0.28, False),
        ("grpo", "token_mean", None, False),
        ("gspo", "prompt_mean", None, False),
    ):
        config = PolicyLossConfig(policy_loss=loss, loss_aggregation=aggregation, clip_ratio_high=high)
        given, problems = given_by(door, config)
        given |= {"data.train_batch_size": 8, f"{ACTOR}.ppo_mini_batch_size": 8} if host == "verl" else {}
        known = {name: value for name, value in given.items() if value is not UNKNOWN}
        rows = [*judge_settings(door, Settings.of_names(known, door.all_defaults, typed=known))]
        advice = [row.text for row in rows if row.subject == "advice" and "DAPO" in row.text]
        assert not problems and len(advice) == is_advised, (loss, aggregation, high, rows)
        assert all(f"prompt_mean without {CLIP_OF_DAPO[host]}: the clip is 0.2/0.2, and DAPO" in text for text in advice), advice


@pytest.mark.parametrize("host", [name for name, door in DOORS.items() if door.gives(get_loss_aggregation("prompt_mean"))])
def test_the_side_that_dapo_does_not_have_is_named(host):
    door = DOORS[host]
    config = PolicyLossConfig(policy_loss="grpo", loss_aggregation="prompt_mean", clip_ratio_low=0.8, clip_ratio_high=0.28)
    given, _ = given_by(door, config)
    given |= {"data.train_batch_size": 8, f"{ACTOR}.ppo_mini_batch_size": 8} if host == "verl" else {}
    known = {name: value for name, value in given.items() if value is not UNKNOWN}
    texts = [row.text for row in judge_settings(door, Settings.of_names(known, door.all_defaults, typed=known))]
    assert any(re.search(r"prompt_mean without \S+[=: ]+0\.2: the clip is 0\.8/0\.28, and DAPO", text) for text in texts), texts


@pytest.mark.parametrize(
    ("loss", "low", "high", "said"),
    [
        ("grpo", 0.8, 1.28, "a ratio down to 0.2 and up to 2.28; for bounds 0.8 and 1.28 type 0.2 and 0.28"),
        ("grpo", None, 1.28, "^clip_ratio_high=1.28: a distance from 1, so a ratio up to 2.28; for a bound of 1.28 type 0.28$"),
        ("grpo", 0.8, None, "^clip_ratio_low=0.8: a distance from 1, so a ratio down to 0.2; for a bound of 0.8 type 0.2$"),
        ("grpo", None, 28, "^clip_ratio_high=28: a distance from 1, so a ratio up to 29$"),
        ("grpo", 0.2, 0.28, None),
        ("cispo", None, 5, None),  # without a bound below, and far above by its paper
        ("sapo", None, None, None),
    ],
)
def test_a_clip_that_is_typed_as_bounds_is_noted(loss, low, high, said):
    config = PolicyLossConfig(policy_loss=loss, loss_aggregation="token_mean", clip_ratio_low=low, clip_ratio_high=high)
    found = [text for text in config_warnings(config) if "distance from 1" in text]
    assert len(found) == (said is not None) and all(re.search(said, text) for text in found), found


def test_a_name_that_the_trainer_has_in_two_sections_is_no_slip():
    for words in ("critic.loss_agg_mode=token-mean", "+distillation.distillation_loss.clip_ratio_high=0.3", "data.shuffle=False"):
        problems, told = judged("verl", f"grpo.token_mean {words}")
        assert not problems and "no such setting" not in told, words


@pytest.mark.parametrize(
    ("host", "line"),
    [
        ("verl", "grpo.token_mean algorithm.norm_adv_by_std_in_grpo=Flase"),
        ("verl", ["-m", "verl.trainer.main_ppo", "algorithm.norm_adv_by_std_in_grpo=Flase"]),
        ("skyrl", "grpo trainer.algorithm.grpo_norm_by_std=Flase"),
        ("skyrl", ["python", "-m", "skyrl.train.entrypoints.main_base", "trainer.algorithm.grpo_norm_by_std=Flase"]),
        ("nemo_rl", "grpo.token_mean ++grpo.adv_estimator.normalize_rewards=Flase"),
    ],
)
def test_text_for_what_is_true_or_false_is_a_problem(host, line):
    """With our loss and without: a text is true, and rewards would be divided by their deviation."""
    problems, _ = judged(host, line)
    assert any("='Flase' is text, which" in text for text in problems), problems
