"""miles and slime: each of our flags that is misspelt, and each of our numbers that is text, is refused by name in doctor."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import pytest

from megatron_rl.__main__ import main
from megatron_rl.config import flag_fields
from megatron_rl.hosts import ROLLOUT_HOST_NAMES
from megatron_rl.hosts.base import CUSTOM_LOSS_LINE, INIT_LINE
from megatron_rl.validation import flag_of, routes_of_flags

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
