"""miles and slime: each of our flags that is misspelt, and each of our numbers that is text, is refused by name in doctor."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import pytest

from megatron_rl.__main__ import main
from megatron_rl.config import flag_fields
from megatron_rl.hosts import DOOR_NAMES, HOST_NAMES, ROLLOUT_HOST_NAMES
from megatron_rl.hosts.base import CUSTOM_LOSS_LINE, INIT_LINE
from megatron_rl.hosts.launch import main as launch
from megatron_rl.validation import flag_of, routes_of_flags
from megatron_rl.validation.dashes import require_hyphens

LINE = (
    *("python", "-m", "megatron_rl.hosts.launch", "train.py", *CUSTOM_LOSS_LINE.split(), *INIT_LINE.split()),
    *("--policy-loss", "grpo", "--loss-aggregation", "sample_mean"),
)
LEAST = 40


def doctor(host: str, *words: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["doctor", "--launch-only", "--host", host, "--", *LINE, *words])
    return code, out.getvalue()


def misspelt(flag: str) -> str:
    """With the last two letters of a word that differ in the other order."""
    places = [at for at in range(len(flag) - 2, 2, -1) if flag[at] != flag[at + 1] and "-" not in flag[at : at + 2]]
    at = places[0]
    return flag[:at] + flag[at + 1] + flag[at] + flag[at + 2 :]


def wrong_words() -> Iterator[tuple[str, str]]:
    """(what stands on the line, what the report names)."""
    for flag in routes_of_flags():
        yield f"{misspelt(flag)} 0.5", misspelt(flag)
    for one in flag_fields():
        if "float" in str(one.type) and flag_of(one.name) in routes_of_flags():
            yield f"{flag_of(one.name)} many", one.name


@pytest.mark.parametrize("host", ROLLOUT_HOST_NAMES)
def test_each_wrong_flag_is_refused_by_name(host):
    code, out = doctor(host)
    assert code == 0, out
    found, silent = 0, []
    for words, named in wrong_words():
        code, out = doctor(host, *words.split())
        problems = [line for line in out.splitlines() if "PROBLEM" in line]
        found += 1
        if code != 1 or not any(named in line.replace("-", "_") or named in line for line in problems):
            silent.append((words, problems))
    assert not silent, silent
    assert found >= LEAST


DASHES = {
    "–loss-aggregation": "–loss-aggregation begins with a dash that is no hyphen (U+2013): type --loss-aggregation",
    "—eps-clip=0.2": "—eps-clip begins with a dash that is no hyphen (U+2014): type --eps-clip",
    "-–eps-clip": "-–eps-clip begins with a dash that is no hyphen (U+2013): type --eps-clip",
}


@pytest.mark.parametrize("host", [*HOST_NAMES, *DOOR_NAMES])
@pytest.mark.parametrize(("word", "said"), DASHES.items())
def test_a_dash_that_a_chat_made_of_two_hyphens_is_named(host, word, said, capsys):
    """A parser takes the flag for a value of the one before it, and the report would blame that one."""
    code = main(["doctor", "--launch-only", "--host", host, "--", "python", "train.py", "--policy-loss", "grpo", word, "constant"])
    assert code == 2 and said in capsys.readouterr().err


def test_every_command_and_the_texts_of_a_script_name_such_a_dash(tmp_path, capsys):
    (tmp_path / "run_mine.py").write_text(
        "import miles.utils as U\nclass Args:\n    extra_args: str = ''\nU.execute_train(f'--a 1 {args.extra_args}')\n"
        "train_args = f'--a 1 {args.extra_args}'\n"
    )
    (tmp_path / "run.sh").write_text("python3 train.py --advantage-estimator grpo –loss-aggregation constant\n")
    for words in (
        ["train", "–loss-aggregation", "constant"],
        ["explain", "–loss-aggregation", "constant", "--response-lengths", "3"],
        ["doctor", "--launch-only", "--host", "miles", "--", "bash", str(tmp_path / "run.sh")],
        ["doctor", "--launch-only", "--", "python", str(tmp_path / "run_mine.py"), "--extra-args", "–loss-aggregation constant"],
    ):
        assert main(words) == 2
        assert DASHES["–loss-aggregation"] in capsys.readouterr().err, words
    assert launch(["train.py", "–loss-aggregation", "constant"]) == 2
    assert DASHES["–loss-aggregation"] in capsys.readouterr().err


@pytest.mark.parametrize("word", ["–5", "–", "– yes", "a–b", "–a note of mine"])
def test_a_dash_of_a_text_is_no_flag(word):
    require_hyphens(["train.py", "--wandb-notes", word])
