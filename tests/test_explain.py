"""`megatron-rl explain`: weights by hand, the chain of factors of a host, words, messages, files."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import types
from argparse import Namespace
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_counts import GOLDEN
from test_golden_losses import functions_of, source_of, statements_of
from test_rollouts import make_sample

from megatron_rl.__main__ import main
from megatron_rl.commands.explain.stock import (
    MEAN_OF_TOKEN_MEANS,
    STOCK,
    WHOLE,
    gradient_error,
    read_layout,
    weights_of,
)
from megatron_rl.count import StepTotals
from megatron_rl.errors import ConfigError
from megatron_rl.formula import Formula
from megatron_rl.hosts import SETTINGS_NAMES
from megatron_rl.hosts.adapters import adapter_named
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.megatron.schedule import backward_factor, scale_for_schedule
from megatron_rl.train.rollout_files import save_rollouts
from megatron_rl.train.rollouts import RolloutBatch
from megatron_rl.weights import AGGREGATIONS, get_loss_aggregation

# Step S of tests/helpers.py; the last response has no unmasked token.
S = ["--response-lengths", "2,4,1,3", "--prompt-ids", "a,a,b,b", "--loss-masks", "11,1111,1,000"]
STEP = ["--response-lengths", "2,4,1,3", "--prompt-ids", "a,a,b,b"]
LAYOUT = ["--context-parallel-size", "2", "--data-parallel-size", "2", "--num-microbatches", "3"]
CONSTANT = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "8"]
PROMPT_MEAN = ["--loss-aggregation", "prompt_mean"]
PER_TOKEN = ["--loss-aggregation", "token_mean", "--calculate-per-token-loss"]
# Some weights and 1 / M are float32: a rounding each, over at most seven factors.
CLOSE = {"rel": 1e-6}


def explain(*arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        code = main(["explain", *arguments])
    return code, out.getvalue(), error.getvalue()


def explain_json(*arguments: str, code: int = 0) -> dict:
    """The object of --json of a command that ends with that exit code and says nothing else."""
    found, out, error = explain(*arguments, "--json")
    assert (found, error) == (code, ""), error or out
    return json.loads(out)


def chain_of(*arguments: str, code: int = 0) -> dict:
    chain = explain_json(*arguments, code=code)["chain"]
    assert chain["is_exact"] == (code == 0)
    return chain


def stages(chain: dict) -> dict[str, str]:
    return {factor["stage"]: factor["formula"] for factor in chain["factors"]}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# row_mean is sample_mean where each sample is a rollout, and is not shown then.
SHOWN = tuple(name for name in AGGREGATIONS.names() if name != "row_mean")
WEIGHTS_BY_HAND = {row.values[0]: row.values[1] for row in GOLDEN}


def test_step_s_by_hand():
    """FB-06: the names, formulas and numbers of the golden table. FB-18: the masked sample counts in N and has weight 0."""
    found = explain_json(*S, "--loss-aggregation-divisor", "8")
    assert [found[name] for name in ("num_samples", "num_rollouts", "num_prompts", "num_tokens")] == [4, 4, 2, 7]
    assert found["num_masked_samples"] == 1
    assert found["mean_tokens"] == pytest.approx(7 / 3, **CLOSE)  # of the samples with a token
    assert found["token_counts"] == [2, 4, 1, 0]
    assert tuple(found["aggregations"]) == SHOWN
    for name in SHOWN:
        weighing, exact = found["aggregations"][name], [float(Fraction(weight)) for weight in WEIGHTS_BY_HAND[name]]
        assert weighing["token_weights"] == pytest.approx(exact, **CLOSE)
        masses = [weight * count for weight, count in zip(exact, [2, 4, 1, 0], strict=True)]
        assert weighing["sum_of_weights"] == pytest.approx(sum(masses), **CLOSE)
        assert weighing["gradient_scale"] == pytest.approx(sum(masses) / 0.75, **CLOSE)  # three of four samples have a token
        assert weighing["sample_shares"] == pytest.approx([mass / sum(masses) for mass in masses], **CLOSE)
        assert weighing["prompt_shares"]["a"] == pytest.approx((masses[0] + masses[1]) / sum(masses), **CLOSE)


def test_rollouts_of_several_samples_have_one_share_each():
    """Samples of 3, 5, 8 and 4 tokens, the first two of one rollout: N = 3, M_roll = 8, M_a = 16, M_b = 4, P = 2, T = 20, L = 8."""
    step = ["--response-lengths", "3,5,8,4", "--prompt-ids", "a,a,a,b", "--rollout-ids", "0,0,1,2"]
    found = explain_json(*step)
    assert (found["num_samples"], found["num_rollouts"], found["rollout_ids"]) == (4, 3, ["0", "0", "1", "2"])
    weights = {name: weighing["token_weights"] for name, weighing in found["aggregations"].items()}
    assert weights["sample_mean"] == pytest.approx([1 / 24, 1 / 24, 1 / 24, 1 / 12], **CLOSE)
    assert weights["prompt_mean"] == pytest.approx([1 / 32, 1 / 32, 1 / 32, 1 / 8], **CLOSE)
    assert weights["token_mean"] == pytest.approx([1 / 20] * 4, **CLOSE)
    assert weights["constant"] == pytest.approx([1 / 24] * 4, **CLOSE)
    assert weights["row_mean"] == pytest.approx([1 / 18, 1 / 30, 1 / 24, 1 / 12], **CLOSE)  # k = 2, 2, 1, 1
    assert found["mean_tokens"] == pytest.approx(20 / 3, **CLOSE)
    _, out, _ = explain(*step)
    assert "N = 3 rollouts with 4 samples of 2 prompts" in out
    assert re.search(r"^sample 3 +b +2 +4/4 ", out, re.MULTILINE)
    assert re.search(r"^rollout 0 +8 +33.3% +25.0% +40.0% +40.0%.* 33.3%", out, re.MULTILINE)
    found = explain_json(*step, "--host", "train", "--loss-aggregation", "row_mean")["chain"]
    assert (found["net"], found["asked"], found["is_exact"]) == ("1/(R k_j m_i)", "1/(R k_j m_i)", True)
    assert found["net_weights"] == pytest.approx(weights["row_mean"], **CLOSE)


LENGTHS = ["--response-lengths", "2,3"]
MESSAGES = [
    ([*LENGTHS, "--prompt-ids", "a,b", "--rollout-ids", "0,0"], "rollout 0 has samples of the prompts a and b"),
    ([*LENGTHS, "--loss-masks", "11,11"], "response 1: a loss_mask of 2 for a response_length of 3"),
    ([*LENGTHS, "--rollout-ids", "0,0", "--host", "nemo_rl"], "--host nemo_rl: it counts rows; remove --host"),
    ([*LENGTHS, "--host", "roll", "--calculate-per-token-loss"], "ROLL's factors are made for the mean over ranks"),
    ([*LENGTHS, "--host", "nemo_rl", "--loss-aggregation", "row_mean"], "NeMo-RL does not hand over what row_mean needs"),
    ([*LENGTHS, "--host", "slime", "--calculate-per-token-loss"], "does not go with calculate_per_token_loss=True"),
    ([*LENGTHS, "--loss-aggregation", "prompt_mean"], "prompt_mean: the command line does not say which samples share"),
]


@pytest.mark.parametrize(("arguments", "says"), MESSAGES, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_wrong_command_line_is_named(arguments, says):
    code, out, error = explain(*arguments)
    assert code in (1, 2)
    assert out == ""
    assert says in error


# The chain of factors of a host, by hand

OUR_LOSS = ["--policy-loss", "grpo"]


def test_a_chain_by_hand():
    """dp 8 x cp 2, M = 16, N = 4: reducer 1/m_i, host 16 x 16 / 4 = 64, schedule 1/16, DDP 1/16, net 1/(4 m_i)."""
    chain = chain_of(
        *STEP, "--host", "slime", "--data-parallel-size", "8", "--context-parallel-size", "2", "--num-microbatches", "16"
    )
    assert stages(chain) == {"reducer": "1/m_i", "host": "M dp cp/N", "schedule": "1/M", "DDP": "1/(dp cp)"}
    values = [factor["values"] for factor in chain["factors"]]
    assert values[0] == pytest.approx([1 / 2, 1 / 4, 1, 1 / 3], **CLOSE)
    assert [row[0] for row in values[1:]] == pytest.approx([64, 1 / 16, 1 / 16], **CLOSE)
    assert chain["net_weights"] == pytest.approx([1 / 8, 1 / 16, 1 / 4, 1 / 12], **CLOSE)
    assert (chain["net"], chain["asked"], chain["left_over"]) == ("1/(N m_i)", "1/(N m_i)", "1")


# Of miles and slime: test_rollouts_of_several_samples_weigh_as_one.
@pytest.mark.parametrize("arguments", [[], CONSTANT, PROMPT_MEAN, PER_TOKEN], ids=" ".join)
@pytest.mark.parametrize("host", ["megatron_lm", "train"])
def test_a_sound_launch_has_the_weight_that_was_asked_for(host, arguments):
    chain = chain_of(*STEP, "--host", host, *arguments, *LAYOUT)
    assert chain["ratio"] == pytest.approx([1.0] * 4, **CLOSE)
    assert not any(factor["differs"] for factor in chain["factors"])


@pytest.mark.parametrize("divisor", ["none", "num_samples"])
@pytest.mark.parametrize("per_token", [False, True], ids=["unit", "per-token"])
def test_each_factor_where_the_package_weighs_is_what_its_code_does(per_token, divisor):
    """FB-91: scale_for_schedule; backward delivers of it what backward_factor says; DDP and finalize_model_grads undo the rest."""
    of_two, of_four = (SimpleNamespace(rank=lambda: 0, size=lambda size=size: size) for size in (2, 4))  # of LAYOUT, never used
    groups = ParallelGroups(cp=of_two, dp=of_two, dp_cp=of_four)
    totals = StepTotals(num_samples=4, num_prompts=2, num_tokens=10)
    config = Namespace(calculate_per_token_loss=per_token, grad_scale_func=None)
    shared = {"totals": totals, "config": config, "groups": groups}
    settings = {**shared, "num_local_tokens": 1}
    one = torch.ones((), dtype=torch.float64)
    scale = float(scale_for_schedule(one, 3, **settings)[0])
    delivered = backward_factor(3, **shared)
    arguments = ["--host", "megatron_lm" if per_token else "train", "--gradient-divisor", divisor]
    arguments += ["--loss-aggregation", "token_mean", "--calculate-per-token-loss"] * per_token
    chain = chain_of(*STEP, *arguments, *LAYOUT)
    found = {factor["stage"]: factor["values"] for factor in chain["factors"]}
    assert found["scale"] == pytest.approx([scale] * 4, **CLOSE)
    assert found["schedule"] == pytest.approx([delivered / scale] * 4, **CLOSE)
    undone = found["DDP"][0] * (found["finalize"][0] if per_token else 1.0)
    assert undone == pytest.approx(1 / delivered, **CLOSE)
    if divisor == "num_samples":
        divided = float(scale_for_schedule(one, 3, **settings, gradient_divisor=divisor)[0])
        assert found["gradient divisor"] == pytest.approx([divided / scale] * 4, **CLOSE)
        assert chain["left_over"] == "1" and (per_token or chain["net"] == "1/(N^2 m_i)")


@pytest.mark.parametrize("loss", [[], OUR_LOSS], ids=["reducer", "custom_loss"])
def test_a_phantom_token_is_marked_where_it_is_counted(loss):
    """FB-09: T = 7, and the masked sample counts as one token more."""
    step = [*STEP, "--loss-masks", "11,1111,1,000"]
    chain = chain_of(*step, "--host", "miles", *PER_TOKEN, *loss, *LAYOUT, code=1)
    assert chain["left_over"] == "T/T'" and chain["ratio"] == pytest.approx([7 / 8] * 3, **CLOSE)
    assert {factor["stage"] for factor in chain["factors"] if factor["differs"]} == {"finalize"}


FAN_OUT = [*STEP, "--rollout-ids", "0,0,1,2"]
# Rollouts of 6, 1 and 3 tokens, the first of two samples: N = 3, P = 2, T = 10, M_g = 6 and 4.
BY_ROLLOUT = [
    pytest.param(OUR_LOSS, [1 / 18, 1 / 18, 1 / 3, 1 / 9], id="our loss, sample_mean"),
    pytest.param([*OUR_LOSS, *PROMPT_MEAN], [1 / 12, 1 / 12, 1 / 8, 1 / 8], id="our loss and reward hook, prompt_mean"),
    pytest.param(PROMPT_MEAN, [1 / 12, 1 / 12, 1 / 8, 1 / 8], id="reducer and reward hook, prompt_mean"),
    pytest.param(PER_TOKEN, [1 / 10] * 4, id="per-token"),
]


@pytest.mark.parametrize(("arguments", "weights"), BY_ROLLOUT)
def test_rollouts_of_several_samples_weigh_as_one(arguments, weights):
    """Fan-out is counted once, on every launch method that can."""
    assert chain_of(*FAN_OUT, "--host", "miles", *arguments, *LAYOUT)["net_weights"] == pytest.approx(weights, **CLOSE)


def test_our_reducer_sees_no_rollouts():
    """Each of the two samples would weigh as a rollout: M_roll/m_i = 6/2 and 6/4 too much."""
    chain = chain_of(*FAN_OUT, "--host", "miles", *LAYOUT, code=1)
    assert (chain["left_over"], chain["asked"]) == ("M_roll/m_i", "1/(N M_roll)")
    assert chain["ratio"] == pytest.approx([3, 3 / 2, 1, 1], **CLOSE)


@pytest.mark.parametrize("aggregation", ["sample_mean", "prompt_mean"])
@pytest.mark.parametrize("name", SETTINGS_NAMES)
def test_the_factors_of_each_trainer_of_settings_leave_the_weight(name, aggregation):
    """M, dp and cp cancel; in verl's per-token contract R, the tokens of the model, too."""
    record, adapter = get_loss_aggregation(aggregation), adapter_named(name)
    for per_token in (False, True) if adapter.WHY_NOT_PER_TOKEN is None else (False,):
        of_samples, of_step = adapter.stages(record.formula, record, per_token=per_token)
        factors = [factor for _, factor, _ in (*of_samples, *of_step)]
        assert math.prod(factors, start=Formula()) == record.formula


# Files: our rollouts, a sample a line; no file runs anything


def rollout(index: int, lengths: list[int]) -> RolloutBatch:
    samples = []
    for number, length in enumerate(lengths):
        response = {"tokens": [1] * (length + 2), "response_length": length, "loss_mask": [1] * (length - 1) + [0]}
        samples.append(make_sample(number, f"p{number // 2}", old_log_probs=None, **response))
    return RolloutBatch(samples=samples, rollout_index=index)


def test_the_rollouts_of_our_file():
    """The second one: tokens 2, 4 of rollout A and 3 of B, so N = 2, M_A = 6."""
    whole = rollout(1, [3, 5, 4])
    samples = [replace(sample, rollout_id="AAB"[n], prompt_id="p") for n, sample in enumerate(whole.samples)]
    save_rollouts("r.jsonl", rollout(0, [2, 2, 3]))
    save_rollouts("r.jsonl", replace(whole, samples=samples))
    found = explain_json("--rollouts", "r.jsonl")
    assert (found["prompt_ids"], found["token_counts"]) == (["p0", "p0", "p1"], [1, 1, 2])
    assert found["left_out"][0].startswith("1 other rollouts of the file")
    second = ["--rollouts", "r.jsonl", "--rollout-index", "1"]
    found = explain_json(*second, "--loss-aggregation", "sample_mean")
    assert (found["num_rollouts"], found["rollout_ids"], found["token_counts"]) == (2, ["A", "A", "B"], [2, 4, 3])
    assert found["aggregations"]["sample_mean"]["token_weights"] == pytest.approx([1 / 12, 1 / 12, 1 / 6], **CLOSE)


def write_lines(*lines: object) -> list[str]:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    Path("lines.jsonl").write_text("\n".join(text) + "\n\n", encoding="utf-8")
    return ["--rollouts", "lines.jsonl"]


def test_a_sample_a_line():
    flags = write_lines({"response_length": 3, "prompt_id": "a"}, {"loss_mask": [1, 0, 1, 1, 0], "prompt_id": "b", "reward": 1.0})
    found = explain_json(*flags)
    assert (found["response_lengths"], found["token_counts"]) == ([3, 5], [3, 3])
    assert (found["prompt_ids"], found["rollout_ids"]) == (["a", "b"], None)
    found = explain_json(*write_lines({"response_length": 3, "rollout_id": 0}, {"response_length": 5, "rollout_id": 0}))
    assert (found["prompt_ids"], found["rollout_ids"], found["num_rollouts"]) == (None, [0, 0], 1)


def test_a_bad_line_is_named():
    code, out, error = explain(*write_lines({"response_length": 3, "prompt_id": "a"}, {"response_length": 3}))
    assert (code, out) == (1, "")
    assert "--rollouts lines.jsonl" in error and "line 2 has no prompt_id and others have" in error


# What a file must not do to the terminal

FORGED = "x\x1b[2J\nmegatron_rl: PASS\x85\u2028"


def test_a_file_writes_no_lines_of_its_own():
    """Escapes that move the cursor, newlines that begin a line of ours: in prompts and rollouts."""
    rows = [{"response_length": 2, "prompt_id": name, "rollout_id": FORGED} for name in ("a", FORGED)]
    outputs = [explain(*write_lines({"response_length": 2, "prompt_id": FORGED})), explain(*write_lines(*rows))]
    assert [code for code, _, _ in outputs] == [0, 1]
    for _, out, error in outputs:
        shown = out + error
        assert "\\x1b[2J\\nmegatron_rl:" in shown, shown
        assert all(char.isprintable() or char == "\n" for char in shown)
        assert not any(line.startswith("megatron_rl: P") for line in shown.splitlines())


# The table of the trainers' own losses: by hand on a ragged step, and each row against the trainer's own code from a checkout.


# Two ranks of two micro-batches of two samples; one sample is fully masked.
STOCK_LAYOUT = [[[3, 1], [4, 2]], [[0, 5], [2, 1]]]
TOKENS = torch.tensor(STOCK_LAYOUT).flatten()
SAMPLES = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
M, DP, DIVISOR = 2, 2, 512
PROMPTS = "aabbccdd"
WEIGHED = TOKENS > 0


def test_a_mean_of_means_by_hand():
    """1 / (M dp T_b) against 1 / T = 1 / 18: micro-batches of 4, 6, 5 and 3 tokens."""
    weights = weights_of(MEAN_OF_TOKEN_MEANS, STOCK_LAYOUT, None, None)
    own = [1 / (4 * tokens) for tokens in (4, 4, 6, 6, 5, 5, 3, 3)]
    assert weights == pytest.approx([0.0 if i == 4 else own[i] for i in range(8)])
    exact = weights_of(WHOLE[MEAN_OF_TOKEN_MEANS], STOCK_LAYOUT, None, None)
    assert exact == pytest.approx([0.0 if i == 4 else 1 / 18 for i in range(8)])
    # |w - 1/T|^2 / |1/T|^2 over tokens: (4 (1/8)^2 + 6 (-1/4)^2 + 5 (-1/10)^2 + 3 (1/2)^2) / 18
    error = gradient_error(weights, exact, TOKENS.tolist())
    assert error == pytest.approx(((4 / 64 + 6 / 16 + 5 / 100 + 3 / 4) / 18) ** 0.5)


def test_every_weight_that_depends_on_the_layout_stands_for_one_that_does_not():
    """Each sample alone on a rank has another weight under the first, and the same under the second."""
    alone = [[[int(tokens)]] for tokens in TOKENS]
    for weight in {weight for weights in STOCK.values() for weight in weights.values()}:
        here, there = (weights_of(weight, layout, DIVISOR, PROMPTS) for layout in (STOCK_LAYOUT, alone))
        assert (here == pytest.approx(there)) == (weight not in WHOLE), weight
        whole = WHOLE.get(weight, weight)
        here, there = (weights_of(whole, layout, DIVISOR, PROMPTS) for layout in (STOCK_LAYOUT, alone))
        assert here == pytest.approx(there), weight


def test_a_typed_layout():
    assert read_layout("3100,900|2500,700||400|60") == [[[3100, 900], [2500, 700]], [[400], [60]]]
    with pytest.raises(ConfigError, match=r"--micro-batches 3,a: give response lengths"):
        read_layout("3,a")


# The trainers' own functions


def matrix(samples: list[int], values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of tokens and their mask, padded to the longest of the micro-batch."""
    width = int(TOKENS[samples].max())
    mask = torch.stack([(torch.arange(width) < TOKENS[sample]).double() for sample in samples])
    return torch.stack([values[sample, :width] for sample in samples]), mask


def agrees(host: str, name: str, reduced) -> None:
    """reduced(losses, mask, samples): the trainer's number of a micro-batch, with its factors, averaged over ranks and added over
    micro-batches."""
    values = torch.zeros(len(TOKENS), int(TOKENS.max()), dtype=torch.float64, requires_grad=True)
    total = sum(reduced(*matrix(samples, values), samples) for rank in SAMPLES for samples in rank) / DP
    (weights,) = torch.autograd.grad(total, values)
    found = torch.tensor(weights_of(STOCK[host][name], STOCK_LAYOUT, DIVISOR, PROMPTS), dtype=torch.float64)
    # The trainers add 1e-8 to some divisors.
    torch.testing.assert_close(found, weights[:, 0] * WEIGHED, rtol=1e-7, atol=0)


@pytest.mark.host("VERL_ROOT")
@pytest.mark.parametrize("mode", [name for name in STOCK["verl"] if name != "geo_mean"])
def test_verl(mode):
    """The worker multiplies by M what Megatron's schedule divides by it."""
    masked = types.SimpleNamespace(masked_sum=lambda x, mask: (x * mask).sum())
    agg_loss = functions_of(source_of("VERL_ROOT", "verl/trainer/ppo/core_algos.py"), "agg_loss", verl_F=masked).agg_loss
    scale = None if "without" in mode else DIVISOR
    batch = {"dp_size": DP, "batch_num_tokens": int(TOKENS.sum()), "global_batch_size": len(TOKENS), "loss_scale_factor": scale}
    agrees("verl", mode, lambda losses, mask, samples: agg_loss(losses, mask, mode.split()[0], **batch))


@pytest.mark.host("SKYRL_ROOT")
@pytest.mark.parametrize("reduction", STOCK["skyrl"])
def test_skyrl(reduction):
    """The driver scales the advantages of a mini-batch, micro-batches add tokens, and the worker multiplies by what schedule and
    ranks divide by."""
    tree = source_of("SKYRL_ROOT", "skyrl/backends/skyrl_train/utils/ppo_utils.py")
    found = functions_of(tree, "apply_loss_reduction_to_advantages_minibatch")
    mask = matrix(list(range(8)), torch.zeros(8, 5, dtype=torch.float64))[1]
    of_prompts = [(first, first + 2) for first in range(0, 8, 2)]
    scaled = found.apply_loss_reduction_to_advantages_minibatch(torch.ones_like(mask), mask, reduction, 2, DIVISOR, of_prompts)
    weights = torch.tensor(weights_of(STOCK["skyrl"][reduction], STOCK_LAYOUT, DIVISOR, PROMPTS), dtype=torch.float64)
    torch.testing.assert_close(weights, scaled[:, 0] * WEIGHED)


@pytest.mark.host("NEMO_RL_ROOT")
@pytest.mark.parametrize("name", STOCK["nemo_rl"])
def test_nemo_rl(name):
    """Its workers add micro-batches and ranks."""
    masked_mean = functions_of(source_of("NEMO_RL_ROOT", "nemo_rl/algorithms/utils.py"), "masked_mean").masked_mean
    tokens, present = TOKENS.sum().double(), WEIGHED.sum().double()

    def reduced(losses, mask, samples):
        if name == "token_level_loss=true":
            return DP * masked_mean(losses, mask, global_normalization_factor=tokens)
        of_samples = masked_mean(losses, mask, dim=-1)
        return DP * masked_mean(of_samples, WEIGHED[samples].double(), global_normalization_factor=present)

    agrees("nemo_rl", name, reduced)


@pytest.mark.host("ROLL_ROOT")
@pytest.mark.parametrize("mode", STOCK["roll"])
def test_roll(mode):
    """apply_loss_scale multiplies by M dp, the schedule and DDP divide by it."""
    found = functions_of(source_of("ROLL_ROOT", "roll/utils/functionals.py"), "agg_loss", "masked_mean", "masked_sum")
    counts = {"batch_num_tokens": int(TOKENS.sum()), "global_valid_samples": int(WEIGHED.sum())}
    # token-mean there adds all of the matrix, whose masked places are 0
    agrees("roll", mode, lambda losses, mask, samples: DP * found.agg_loss(losses * mask, mask, mode, **counts))


REDUCERS = {"miles": "miles/backends/training_utils/cp_utils.py", "slime": "slime/backends/megatron_utils/cp_utils.py"}


@pytest.mark.parametrize("name", ["default", "calculate_per_token_loss"])
@pytest.mark.parametrize("host", [pytest.param(host, marks=pytest.mark.host(f"{host.upper()}_ROOT")) for host in REDUCERS])
def test_miles_and_slime(host, name):
    """The host multiplies by M dp / N what Megatron divides by M dp; per token Megatron divides by the tokens that it counted."""
    groups = types.SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    parallel = types.SimpleNamespace(cp=types.SimpleNamespace(size=1))
    others = {"mpu": groups, "get_parallel_state": lambda: parallel}
    reducer_of = functions_of(source_of(f"{host.upper()}_ROOT", REDUCERS[host]), "get_sum_of_sample_mean", **others)

    def reduced(losses, mask, samples):
        lengths, is_per_token = [losses.shape[1]] * len(samples), name != "default"
        reducer = reducer_of.get_sum_of_sample_mean(lengths, lengths, list(mask), calculate_per_token_loss=is_per_token)
        return DP * reducer(losses.flatten()) / (TOKENS.clamp(min=1).sum() if is_per_token else len(TOKENS))

    agrees(host, name, reduced)


@pytest.mark.host("PRIME_RL_ROOT")
def test_prime_rl():
    """The trainer divides by the tokens of all ranks, and scale_gradients_ undoes FSDP's mean over them."""

    class Type:
        def __class_getitem__(cls, item):
            return cls

    names = dict.fromkeys(("Bool", "Float", "LossFn"), Type) | {"LossInputs": types.SimpleNamespace, "Any": object}
    tree = source_of("PRIME_RL_ROOT", "src/prime_rl/trainer/rl/loss.py")
    compute_loss = functions_of(tree, "compute_loss", Tensor=torch.Tensor, **names).compute_loss

    def sums(inputs):
        return types.SimpleNamespace(loss=(inputs.trainer_logprobs * inputs.loss_mask).sum(), metrics={})

    def reduced(losses, mask, samples):
        nothing, total = [None] * 4, int(TOKENS.sum())
        return DP * compute_loss([*losses], [*losses], None, [*losses], [*mask.bool()], *nothing[:3], sums, total, 1, 1)[0]

    agrees("prime_rl", "default", reduced)


@pytest.mark.host("TRL_ROOT")
@pytest.mark.parametrize("kind", [kind for kind in STOCK["trl"] if kind != "luspo"])
def test_trl(kind):
    """The branch of _compute_loss that divides; two accumulation steps on two processes."""
    tree = source_of("TRL_ROOT", "trl/trainer/grpo_trainer.py")
    accelerator = types.SimpleNamespace(num_processes=DP, gather=lambda loss: loss[None], sync_gradients=True)
    trainer = types.SimpleNamespace(
        loss_type=kind,
        current_gradient_accumulation_steps=M,
        max_completion_length=DIVISOR,
        args=types.SimpleNamespace(steps_per_generation=M),
        accelerator=accelerator,
        _metrics={"train": {"policy_loss": []}},
    )

    def reduced(losses, mask, samples):
        inputs = {"num_items_in_batch": TOKENS.sum().double()}
        given = {"self": trainer, "mode": "train", "per_token_loss": losses, "mask": mask, "inputs": inputs}
        found = statements_of(tree, "_compute_loss", lambda text: text.startswith("if self.loss_type in ['grpo', 'sapo']"), **given)
        return found["loss"]

    agrees("trl", kind, reduced)
