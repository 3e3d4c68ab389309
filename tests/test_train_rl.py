"""What Megatron-LM's rollouts give our loss without an edit: the prompt of each row, and log-probabilities at the temperature.

MEGATRON_LM_ROOT=... pytest -m host --require host tests/test_train_rl.py runs the functions of a checkout, 0.16 or later.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import copy
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.train_rl import take_rollouts
from megatron_rl.layout.groups import SINGLE

WIDTH, PAD, END = 8, 9, 99


@dataclass
class TokenRollout:
    """A turn's first token names its group, so that a row says where it is from. The last two tokens were sampled."""

    group: int
    trajectory: list[list[int]]
    env_id: str = "env"

    @property
    def generation_mask(self) -> list[list[bool]]:
        return [[False] * (len(turn) - 2) + [True] * 2 for turn in self.trajectory]

    @property
    def logprobs(self) -> list[list[float]]:
        return [[-1.0] * 2 for _ in self.trajectory]


def rollouts_of_step(*, has_turns: bool) -> list[list[TokenRollout]]:
    """Three groups; with turns, one rollout of two turns of which one begins with the other, and one of two that do not."""
    groups = [[TokenRollout(g, [[10 + g, 1, END]]), TokenRollout(g, [[10 + g, 2, 2, END]])] for g in range(3)]
    if has_turns:
        groups[0][1].trajectory = [[10, 5, END], [10, 5, END, 6, END]]
        groups[2][0].trajectory = [[12, 5, END], [12, 6, END]]
    return groups


# The flow of three forms of prepare_data_for_update, to the packing.

utils: Any = ModuleType("megatron.rl.rl_utils")


def compute_group_stats(rollouts, tokenizer, seq_length):
    return "stats"


def selective_log_softmax(logits, index):
    return logits.log_softmax(-1).gather(-1, index[..., None])[..., 0]


def get_logprobs(logits, tokens):
    return utils.selective_log_softmax(logits[:, :-1], tokens[:, 1:])


def padded(turns) -> tuple[torch.Tensor, None, None]:
    return torch.tensor([turn + [PAD] * (WIDTH - len(turn)) for turn in turns]), None, None


def a_row_for_each_turn(rollouts, tokenizer, seq_length, sequence_packing, skip_bos_token):
    return padded([turn for rollout in rollouts for turn in rollout.trajectory])


def pairs(rollout_turns, tokenizer, seq_length, skip_bos_token):
    return padded([[] if rollout is None else rollout.trajectory[turn] for rollout, turn in rollout_turns])


def some_turns_joined(rows, tokenizer, seq_length, skip_bos_token):
    turns = [row[0].trajectory[row[1]] if isinstance(row, tuple) else [] if row is None else row.trajectory[-1] for row in rows]
    return padded(turns)


def prepare_data_for_update(groups, rank, num_ranks):
    utils.compute_group_stats(groups, None, WIDTH)
    rollouts = [rollout for group in groups for rollout in group]
    make = utils.prepare_trajectories
    form = getattr(make, "__wrapped__", make)
    rows: list = rollouts
    if form is pairs:
        rows = [(rollout, turn) for rollout in rollouts for turn in range(len(rollout.trajectory))]
        rows += [(None, -1)] * (-len(rows) % num_ranks)
    elif form is some_turns_joined:
        rows = []
        for rollout in rollouts:
            is_chain = all(b[: len(a)] == a for a, b in zip(rollout.trajectory, rollout.trajectory[1:], strict=False))
            rows += [rollout] if is_chain else [(rollout, turn) for turn in range(len(rollout.trajectory))]
        rows += [None] * (-len(rows) % num_ranks)
    share = len(rows) // num_ranks
    return make(rows[rank * share : (rank + 1) * share], None, WIDTH, *([True] if form is a_row_for_each_turn else []), True)[0]


@pytest.fixture(autouse=True)
def as_imported() -> None:
    import_utils()


def import_utils() -> None:
    for function in (compute_group_stats, selective_log_softmax, get_logprobs, prepare_data_for_update):
        setattr(utils, function.__name__, function)
    utils.prepare_trajectories = pairs


def prompts_and_rows(prepare, module, *, num_ranks: int = 1, has_turns: bool = True) -> tuple[list, list]:
    """The recorded prompts, and those that the first tokens of the rows name; ranks one after the other."""
    taken, prompts, rows = take_rollouts(module, lambda: 1.0, SINGLE), [], []
    for rank in range(num_ranks):
        trajectories = prepare(rollouts_of_step(has_turns=has_turns), rank, num_ranks)
        prompts += taken.prompt_of_row()
        rows += [None if first == PAD else first - 10 for first in trajectories[:, 0].tolist()]
    return prompts, rows


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("form", [a_row_for_each_turn, pairs, some_turns_joined])
def test_each_row_has_the_prompt_of_its_rollout(form, num_ranks, capsys):
    """Shown red with the groups counted by rows in the place of rollouts."""
    utils.prepare_trajectories = form
    prompts, rows = prompts_and_rows(prepare_data_for_update, utils, num_ranks=num_ranks)
    assert prompts == rows and {0, 1, 2} <= set(prompts) and len(prompts) > 6
    step = [rollout for group in rollouts_of_step(has_turns=True) for rollout in group]
    turns = [1 if form is some_turns_joined and number == 1 else len(rollout.trajectory) for number, rollout in enumerate(step)]
    taken = take_rollouts(utils, lambda: 1.0, SINGLE)
    prepare_data_for_update(rollouts_of_step(has_turns=True), 0, 1)
    assert taken.rollout_of_row() == [number for number, rows in enumerate(turns) for _ in range(rows)]
    if num_ranks == 2 and form is some_turns_joined:
        assert prompts == [0, 0, 1, 1, 2, 2, 2, None]
    line, _ = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron_rl: replaced in megatron.rl.rl_utils: compute_group_stats and prepare_trajectories")


@pytest.mark.parametrize("temperatures", [[0.5], [4.0, 0.5]], ids=["once", "a second trainer of the process"])
def test_old_log_probabilities_are_those_of_the_temperature(temperatures):
    """Applied once, however many trainers of the process have taken their rollouts."""
    for temperature in temperatures:
        take_rollouts(utils, lambda temperature=temperature: temperature, SINGLE)
    logits, tokens = torch.tensor([[[0.0, 1.0], [3.0, 1.0]]]), torch.tensor([[0, 1]])
    expected = 2.0 - math.log(1 + math.exp(2.0))  # of logits 0 and 1, divided by 1/2
    assert float(get_logprobs(logits, tokens)) == pytest.approx(expected)


def test_a_step_before_any_rollout_is_refused():
    taken = take_rollouts(utils, lambda: 1.0, SINGLE)
    with pytest.raises(DataError, match="no rollout was prepared before this step"):
        taken.prompt_of_row()


def edited(logits, tokens, rl_default_temperature=2.0):
    return utils.selective_log_softmax(logits / rl_default_temperature, tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"prepare_trajectories": lambda turns, tokenizer: None},
            r"takes turns first \(.*test_train_rl.py:\d+\), and rollouts .* was expected: record the prompts by hand",
        ),
        ({"compute_group_stats": None}, "compute_group_stats takes None first, and rollouts was expected"),
        ({"get_logprobs": None}, "get_logprobs is missing or has rl_default_temperature in it"),
        ({"get_logprobs": edited}, "get_logprobs is missing or has rl_default_temperature in it, as an edit"),
    ],
)
def test_another_source_and_one_that_was_edited_by_hand_are_refused_by_name(change, message):
    for name, function in change.items():
        delattr(utils, name) if function is None else setattr(utils, name, function)
    with pytest.raises(ConfigError, match=message):
        take_rollouts(utils, lambda: 1.0, SINGLE)


def test_rows_of_unknown_rollouts_and_of_unknown_number_are_refused():
    def copied(rollouts, tokenizer, seq_length, skip_bos_token):
        return padded([rollout.trajectory[0] for rollout, _ in rollouts])

    taken = take_rollouts(utils, lambda: 1.0, SINGLE)
    groups = rollouts_of_step(has_turns=False)
    taken.see_groups(groups)
    with pytest.raises(DataError, match="in no group of this step"):
        taken.see_rows([(copy.copy(groups[0][0]), 0)], 1)
    with pytest.raises(DataError, match="made 5 rows of 2 rollouts of 2 turns"):
        taken.see_rows([(groups[0][0], 0), (groups[0][1], 0)], 5)


@contextlib.contextmanager
def checkout_utils() -> Iterator[ModuleType]:
    """rl_utils.py of the checkout: its functions run, what it imports is mocks, and the packing ends the preparation."""
    path, found = Path(os.environ["MEGATRON_LM_ROOT"]) / "megatron" / "rl" / "rl_utils.py", ModuleType("megatron.rl.rl_utils")
    found.source = path.read_text(encoding="utf-8")
    tree = ast.parse(found.source)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) or is_constant(node)]
    for node in tree.body:
        node.decorator_list = []
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - vars(builtins).keys()
    known = (torch, copy, math, TokenRollout, Counter, contextlib.nullcontext)
    vars(found).update({name: mock.MagicMock(name=name) for name in used} | {one.__name__: one for one in known})
    for name in ("_HuggingFaceTokenizer", "CustomTikTokenizer"):  # types asked for in 0.16
        setattr(found, name, type(name, (), {}))
    exec(compile(tree, str(path), "exec", flags=__future__.annotations.compiler_flag), vars(found))
    with mock.patch.object(torch.Tensor, "cuda", lambda self: self):
        yield found


def is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("PAD_")


class _Packed(Exception):
    pass


@pytest.mark.host("MEGATRON_LM_ROOT")
@pytest.mark.parametrize("has_turns", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_each_row_of_a_checkout_has_the_prompt_of_its_rollout(num_ranks, has_turns):
    """prepare_data_for_update of the checkout, to its packing; up to 0.18 rollouts of several turns need one rank."""
    with checkout_utils() as found:
        arguments = SimpleNamespace(
            bf16=False, fp16=False, seq_length=WIDTH, global_batch_size=6, grpo_prompts_per_step=3, grpo_group_size=2,
            micro_batch_size=1, cuda_graph_impl="none", rl_skip_bos_token=True, rl_sequence_packing_max_sequences_per_bin=4,
            rl_sequence_packing_algo="fifo", rl_training_cuda_graphs=False,
        )  # fmt: skip
        found.get_args = lambda: arguments

        def compute_group_stats(rollouts, *others):
            """RolloutStats holds a list of the step's rollouts in 0.16, a list of each group since 0.17."""
            turns = [[len(rollout.trajectory) for rollout in group] for group in rollouts]
            is_flat = "num_turns: list[int]" in found.source
            return SimpleNamespace(advantages=[0.0] * 12, num_turns=sum(turns, []) if is_flat else turns)

        found.compute_group_stats = compute_group_stats
        found.pack_all_trajectories = mock.Mock(side_effect=_Packed)
        tokenizer = SimpleNamespace(library="other", pad=PAD, eod=END, bos=None, vocab_size=100, detokenize=str)

        def prepare(groups, rank, num_ranks):
            found.mpu = mock.Mock()
            found.mpu.get_data_parallel_world_size.return_value, found.mpu.get_data_parallel_rank.return_value = num_ranks, rank
            named = {
                "ref_state_dict": {},
                "rollouts": groups,
                "tokenizer": tokenizer,
                "sequence_packing": True,
                "is_correction": False,
            }
            if "request_ledger" in found.prepare_data_for_update.__code__.co_varnames:
                named["request_ledger"] = {}
            with pytest.raises(_Packed):
                found.prepare_data_for_update(model=[mock.MagicMock()], **named)
            return found.pack_all_trajectories.call_args.args[0]

        prompts, rows = prompts_and_rows(prepare, found, num_ranks=num_ranks, has_turns=has_turns)
    assert prompts == rows and {0, 1, 2} <= set(prompts)
    assert len(prompts) > 6 if has_turns else prompts == [0, 0, 1, 1, 2, 2]
