"""Megatron-LM: flags composed with another provider's, pretrain in its three signatures, two names for one setting; and what
its rollouts give our loss without an edit: the prompt of each row, and log-probabilities at the temperature.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import set_global_args

from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.megatron_lm import call_pretrain, compose_extra_args_provider, megatron_lm_config
from megatron_rl.hosts.train_rl import take_rollouts
from megatron_rl.layout.groups import SINGLE
from megatron_rl.testing.ranks import RankPool

PACKAGE = "stand_in_megatron_training"


def add_inference_args(parser):
    parser.add_argument("--inference-max-requests", type=int, default=8)
    return parser


def test_flags_of_both_providers_are_read_and_ours_are_there_once():
    """argparse raises on a second flag of the same name; a script may compose what is composed already."""
    parser = compose_extra_args_provider(compose_extra_args_provider(add_inference_args))(ArgumentParser())
    args = parser.parse_args(["--inference-max-requests", "3", "--loss-aggregation", "token_mean"])
    assert (args.inference_max_requests, args.loss_aggregation, args.policy_loss) == (3, "token_mean", None)


# pretrain by version of Megatron-LM. It is called by these names.
SIGNATURES = {
    "up_to_0_17": "train_valid_test_dataset_provider, model_provider, model_type, forward_step_func, extra_args_provider=None, "
    "args_defaults=None, store=None",
    "in_0_18": "cfg_container, train_valid_test_dataset_provider, model_provider, model_type, forward_step_func, store=None",
    "from_0_19": "cfg_container, train_valid_test_dataset_provider, model_type, forward_step_func, model_provider=None, "
    "store=None, pg_collection=None",
}


@pytest.fixture
def megatron(monkeypatch):
    """Stand-ins of megatron.training by version: pretrain in its signature, parsing where that version has it; calls are noted."""
    seen = []
    line = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "64", "--inference-max-requests", "2"]
    global_vars = ModuleType("megatron.training.global_vars")
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", global_vars)
    training, arguments, utils = (ModuleType(f"{PACKAGE}.{name}") for name in ("training", "arguments", "argument_utils"))
    for module in (ModuleType(PACKAGE), training, arguments, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def parse_and_validate_args(extra_args_provider=None, ignore_unknown_args=False, args_defaults=None):
        parser = ArgumentParser(allow_abbrev=False)
        parser.add_argument("--calculate-per-token-loss", action="store_true")  # two flags of its own
        parser.add_argument("--tokenizer-type", default=None)
        args = extra_args_provider(parser).parse_args(line)
        for name, value in (args_defaults or {}).items():
            if vars(args)[name] is None:
                setattr(args, name, value)
        global_vars.get_args = lambda: args
        return args

    def run(given):
        if "extra_args_provider" in given:  # parsing is its own
            parse_and_validate_args(given["extra_args_provider"], False, given["args_defaults"])
        args, provider = global_vars.get_args(), given["model_provider"]
        model = provider(pre_process=True) if provider else "of the model configuration"
        seen.append((args.loss_aggregation, args.inference_max_requests, args.tokenizer_type, model))
        others = {"store": given["store"], "cfg": given.get("cfg_container")}
        return given["train_valid_test_dataset_provider"], given["model_type"], given["forward_step_func"], others

    arguments.parse_and_validate_args = parse_and_validate_args
    utils.pretrain_cfg_container_from_args = lambda args, model_cfg=None: ("container", args.loss_aggregation, model_cfg)
    versions = {}
    for name, parameters in SIGNATURES.items():
        made = {"run": run}
        exec(f"def {name}({parameters}): return run(locals())", made)
        made[name].__module__ = training.__name__
        versions[name[-4:].replace("_", ".")] = made[name]
    return Namespace(pretrain=versions, seen=seen, line=line, training=training)


def call(pretrain, **others):
    arguments = {
        "dataset_provider": "data",
        "model_provider": lambda pre_process: f"built with {pre_process}",
        "model_type": "encoder",
        "forward_step": "step",
        "extra_args_provider": add_inference_args,
        "args_defaults": {"tokenizer_type": "GPT2BPETokenizer"},
        "store": "store",
    }
    return call_pretrain(pretrain, **{**arguments, **others})


@pytest.mark.parametrize("version", ["0.17", "0.18", "0.19"])
def test_pretrain_is_called_in_its_own_signature(megatron, version):
    """Positions changed twice: in 0.19 what stood third is fifth. Both providers' flags and the defaults arrive in each."""
    dataset, model_type, forward_step, others = call(megatron.pretrain[version])
    assert (dataset, model_type, forward_step, others["store"]) == ("data", "encoder", "step", "store")
    assert megatron.seen == [("constant", 2, "GPT2BPETokenizer", "built with True")]
    assert version == "0.17" or others["cfg"] == ("container", "constant", None)


@pytest.mark.parametrize("version", ["0.17", "0.18", "0.19"])
def test_a_wrong_scale_stops_before_the_model_is_built(megatron, version):
    """FB-74: validate_args of Megatron-LM has no hook."""
    megatron.line.append("--calculate-per-token-loss")
    with pytest.raises(ConfigError, match="loss_aggregation=constant does not go with calculate_per_token_loss=True"):
        call(megatron.pretrain[version], model_provider=lambda **named: pytest.fail("the model was built"))
    assert megatron.seen == []


def announced_on_rank(rank):
    """(what was built, what the rank has printed) with two chunks of a model."""
    set_global_args(args_of("--policy-loss", "gspo", "--policy-temperature", "0.7"))
    made = {"run": lambda given: [given["model_provider"](), given["model_provider"]()]}
    exec(f"def pretrain({SIGNATURES['up_to_0_17']}): return run(locals())", made)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return call(made["pretrain"], model_provider=lambda: "a chunk"), printed.getvalue()


@pytest.mark.megatron
def test_one_line_of_rank_0_says_what_will_be_trained():
    """The installed schedule has run on the launch's own groups before the model is built."""
    with RankPool(2) as pool:
        (built, line), (_, nothing) = pool.run(announced_on_rank, world_size=2, tensor_model_parallel_size=2)
    assert built == ["a chunk", "a chunk"] and nothing == ""
    assert line.startswith("megatron_rl: policy_loss=gspo, loss_aggregation=sample_mean | weight of a token 1/(N m_i) | ")
    assert "| clip 0.0003/0.0004, KL 0, entropy 0, temperature 0.7 applied | host megatron_lm | " in line
    assert line.endswith("ratio 1 on dp 1 x cp 1 x tp 2 x pp 1 | PASS\n") and line.count("\n") == 1


OF_TRAIN_RL = {
    "perform_rl_step": True,
    "rl_use_sequence_packing": True,
    "grpo_clamp_eps_lower": 0.01,
    "grpo_clamp_eps_upper": 0.01,
    "grpo_kl_beta": 0.001,
    "grpo_entropy_term_weight": 0.0,
    "rl_default_temperature": 1.0,
    "rl_inference_logprobs_is_correction": False,
}


def args_of(*line, **host) -> Namespace:
    return Namespace(**host, **vars(compose_extra_args_provider()(ArgumentParser()).parse_args(line)))


CORRECTED = {**OF_TRAIN_RL, "rl_inference_logprobs_is_correction": True}
COLLECTION = {**OF_TRAIN_RL, "grpo_prompts_per_step": 32, "grpo_group_size": 8, "grpo_iterations": 2}
SCORES_KEPT = {"inference_dynamic_batching_logprobs_mode": "processed_logprobs"}
TOP_P = {**CORRECTED, "rl_default_top_p": 0.9, "rl_default_top_k": -1}
COEFFICIENT = {"rl_importance_sampling_truncation_coef": 3.0}
OWN_LOOP = {"perform_rl_step": False}
CLIPPED_OTHERWISE = ["--clip-ratio-low", "0.2", "--kl-coefficient", "0"]
PROMPT_MEAN, PARTIAL = ["--loss-aggregation", "prompt_mean"], ["--allow-partial-prompt-groups"]


def correction(kind: str, high: float | None, delta: float | None = None) -> dict:
    return {"importance_correction": kind, "importance_correction_high": high, "off_policy_sequence_delta": delta}


# What is typed of our flags, the options of train_rl, and settings of ours that this gives.
CONFIGS = {
    "an unset flag takes the value of train_rl": (
        [],
        {**OF_TRAIN_RL, "rl_default_temperature": 0.7, "grpo_clamp_eps_upper": 0.03},
        {"clip_ratio_low": 0.01, "clip_ratio_high": 0.03, "kl_coefficient": 0.001, "policy_temperature": 0.7},
    ),
    "in another loop its options mean nothing": ([], {**OF_TRAIN_RL, **OWN_LOOP, "grpo_kl_beta": 0.5}, asdict(PolicyLossConfig())),
    # The inference log-probabilities of train_rl are our correction.
    "tis": ([], {**CORRECTED, **COEFFICIENT}, correction("tis", 3.0)),
    "tis without a coefficient, which truncates nothing": ([], CORRECTED, correction("tis", math.exp(20))),
    "a bound of ours": (["--importance-correction-high", "4"], CORRECTED, correction("tis", 4.0)),
    "a sampler's default scores, which are raw": ([], TOP_P, correction("tis", math.exp(20))),
    # The group size is train_rl's own: accepting cut groups needs no --samples-per-prompt, which rows of turns would break.
    "one step a collection": (PROMPT_MEAN, {**COLLECTION, "global_batch_size": 256}, {"samples_per_prompt": None}),
    "cut groups accepted": (PROMPT_MEAN + PARTIAL, {**COLLECTION, "global_batch_size": 100}, {"samples_per_prompt": None}),
}
# What is typed, the options, and how each problem begins.
PROBLEMS = {
    "another value that can only have been typed": (
        *(CLIPPED_OTHERWISE, {**OF_TRAIN_RL, "grpo_clamp_eps_lower": 0.1, "grpo_kl_beta": 0.5}),
        [
            "--clip-ratio-low 0.2 and --grpo-clamp-eps-lower 0.1 are the same thing with two values: remove one of them",
            "--kl-coefficient 0.0 and --grpo-kl-beta 0.5 are the same thing with two values: remove one of them",
        ],
    ),
    "what the forward step would leave out": (
        ["--loss-aggregation", "constant", "--importance-correction", "icepop"],
        {**OF_TRAIN_RL, "rl_use_sequence_packing": False},
        [
            "--perform-rl-step without --rl-use-sequence-packing: our forward step reads packed bins",
            "--importance-correction icepop compares with the sampler, and train_rl.py packs",
            "loss_aggregation=constant needs --loss-aggregation-divisor",
        ],
    ),
    "FB-114 a sampler that scores its kept tokens": (
        *([], {**TOP_P, **SCORES_KEPT}),
        ["--rl-default-top-p 0.9 beside --importance-correction tis"],
    ),
    # Bins are dealt to steps, so that a multiple of the group size cuts groups too, and M_g would be a part's.
    **{
        f"FB-07 a step of {step} of a collection": (
            *(PROMPT_MEAN, {**COLLECTION, "global_batch_size": step}),
            [f"--global-batch-size {step} with --loss-aggregation prompt_mean: a collection is"],
        )
        for step in (128, 100)
    },
}


@pytest.mark.parametrize(("line", "host", "expected"), CONFIGS.values(), ids=CONFIGS)
def test_flags_and_the_options_of_train_rl_give_one_config(line, host, expected):
    config = megatron_lm_config(args_of(*line, **host))
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(("line", "host", "says"), PROBLEMS.values(), ids=PROBLEMS)
def test_two_values_and_what_would_be_left_out_are_refused_together(line, host, says):
    problems = pytest.raises(ConfigError, megatron_lm_config, args_of(*line, **host)).value.problems
    for problem, beginning in zip(problems, says, strict=True):
        assert problem.startswith(beginning)


# The rollouts of train_rl

WIDTH, PAD, END = 8, 9, 99


@dataclass
class TokenRollout:
    """A turn's first token names its group, so that a row says where it is from."""

    group: int
    trajectory: list[list[int]]


def rollouts_of_step() -> list[list[TokenRollout]]:
    """Three groups, with a rollout of two turns of which one begins with the other, and one of two that do not."""
    groups = [[TokenRollout(g, [[10 + g, 1, END]]), TokenRollout(g, [[10 + g, 2, 2, END]])] for g in range(3)]
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
    for function in (compute_group_stats, selective_log_softmax, get_logprobs, prepare_data_for_update):
        setattr(utils, function.__name__, function)
    utils.prepare_trajectories = pairs


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("form", [a_row_for_each_turn, pairs, some_turns_joined])
def test_each_row_has_the_prompt_of_its_rollout(form, num_ranks):
    """The first tokens of the rows name their prompts. Shown red with the groups counted by rows in the place of rollouts."""
    utils.prepare_trajectories = form
    taken, prompts, rows = take_rollouts(utils, lambda: 1.0, SINGLE), [], []
    for rank in range(num_ranks):
        trajectories = prepare_data_for_update(rollouts_of_step(), rank, num_ranks)
        prompts += taken.prompt_of_row()
        rows += [None if first == PAD else first - 10 for first in trajectories[:, 0].tolist()]
    assert prompts == rows and {0, 1, 2} <= set(prompts) and len(prompts) > 6
    if num_ranks == 2 and form is some_turns_joined:
        assert prompts == [0, 0, 1, 1, 2, 2, 2, None]
    step = [rollout for group in rollouts_of_step() for rollout in group]
    turns = [1 if form is some_turns_joined and number == 1 else len(rollout.trajectory) for number, rollout in enumerate(step)]
    prepare_data_for_update(rollouts_of_step(), 0, 1)
    assert taken.rollout_of_row() == [number for number, rows in enumerate(turns) for _ in range(rows)]


@pytest.mark.parametrize("temperatures", [[0.5], [4.0, 0.5]], ids=["once", "a second trainer of the process"])
def test_old_log_probabilities_are_those_of_the_temperature(temperatures):
    """Applied once, however many trainers of the process have taken their rollouts."""
    for temperature in temperatures:
        take_rollouts(utils, lambda temperature=temperature: temperature, SINGLE)
    logits, tokens = torch.tensor([[[0.0, 1.0], [3.0, 1.0]]]), torch.tensor([[0, 1]])
    expected = 2.0 - math.log(1 + math.exp(2.0))  # of logits 0 and 1, divided by 1/2
    assert float(get_logprobs(logits, tokens)) == pytest.approx(expected)


def edited(logits, tokens, rl_default_temperature=2.0):
    return utils.selective_log_softmax(logits / rl_default_temperature, tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"prepare_trajectories": lambda turns, tokenizer: None},
            r"takes turns first \(.*test_megatron_lm.py:\d+\), and rollouts .* was expected: record the prompts by hand",
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
    taken = take_rollouts(utils, lambda: 1.0, SINGLE)
    groups = rollouts_of_step()
    taken.see_groups(groups)
    with pytest.raises(DataError, match="in no group of this step"):
        taken.see_rows([(copy.copy(groups[0][0]), 0)], 1)
    with pytest.raises(DataError, match="made 5 rows of 2 rollouts of 3 turns"):
        taken.see_rows([(groups[0][0], 0), (groups[0][1], 0)], 5)
