"""`megatron-rl explain`: weights by hand, words, messages, its page. Chains and files: test_explain_chain.py, _files.py."""

from __future__ import annotations

import re
import sys
import textwrap
from fractions import Fraction
from importlib import import_module

import pytest
from explain_cases import CLOSE, S, explain, explain_json
from forked import forget, forked
from test_counts import GOLDEN

from megatron_rl.__main__ import main
from megatron_rl.config import PolicyLossConfig
from megatron_rl.validation.weight_words import shift_of_weights
from megatron_rl.weights import get_loss_aggregation, loss_aggregation_names, register_loss_aggregation

RAGGED = ["--response-lengths", "64,512,4096,64", "--prompt-ids", "a,a,b,b"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["as registered", "with a fifth"])
def every_aggregation(request) -> tuple[str, ...]:
    """The names of the registry; the second time with another one. row_mean is sample_mean where each sample is a rollout, and is
    not shown then."""
    if request.param == "with a fifth":
        register_loss_aggregation("of_squares", formula="m_i / N^2")
    return tuple(name for name in loss_aggregation_names() if name != "row_mean")


WEIGHTS_BY_HAND = {row.values[0]: row.values[1] for row in GOLDEN} | {"of_squares": ["1/8", "1/4", "1/16", "0"]}


def test_step_s_by_hand(every_aggregation):
    """FB-06: the names, formulas and numbers of the golden table. FB-18: the masked sample counts in N and has weight 0."""
    found = explain_json(*S, "--loss-aggregation-divisor", "8")
    assert [found[name] for name in ("num_samples", "num_rollouts", "num_prompts", "num_tokens")] == [4, 4, 2, 7]
    assert found["num_masked_samples"] == 1
    assert found["mean_tokens"] == pytest.approx(7 / 3, **CLOSE)  # of the samples with a token
    assert found["token_counts"] == [2, 4, 1, 0]
    assert tuple(found["aggregations"]) == every_aggregation
    for name in every_aggregation:
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


def test_shares_of_unequal_lengths(every_aggregation):
    """512 of 576 tokens are 88.9 % of half the weight under prompt_mean; 4096 of 4736 are 86.5 % where tokens count alike."""
    _, out, _ = explain(*RAGGED)
    rows = {line[:8]: re.findall(r"[\d.]+%", line) for line in out.splitlines() if line.startswith("sample ")}
    (sums,) = [line.split()[3:] for line in out.splitlines() if line.startswith("sum of weights")]
    columns = {name: found for name, *found in zip(every_aggregation, rows["sample 1"], rows["sample 2"], sums[1:], strict=True)}
    assert sums[0] == "4736"
    assert columns["sample_mean"] == ["25.0%", "25.0%", "1"]
    assert columns["prompt_mean"] == ["44.4%", "49.2%", "1"]
    assert columns["token_mean"] == ["10.8%", "86.5%", "1"]
    assert columns["constant"] == ["10.8%", "86.5%", "0.2891"]  # 4736 / (4 x 4096)
    assert "constant: L = 4096, the longest response, because none is given" in out


def test_the_gradients_scale_is_the_one_that_the_init_hook_announces():
    """x m / L, with m = (3 + 5 + 8) / 3 tokens."""
    lengths = ["--response-lengths", "3,5,8"]
    found = explain_json(*lengths, "--loss-aggregation-divisor", "8192")
    config = PolicyLossConfig(loss_aggregation="constant", loss_aggregation_divisor=8192.0)
    announced = shift_of_weights(get_loss_aggregation(config.loss_aggregation), config.loss_aggregation_divisor)
    mean, divisor = 16 / 3, float(re.match(r"x m/([\d.]+) ", announced)[1])
    constant = found["aggregations"]["constant"]
    assert constant["gradient_scale"] == pytest.approx(mean / divisor, **CLOSE)
    assert found["aggregations"]["token_mean"]["gradient_scale"] == pytest.approx(1.0, **CLOSE)
    assert "(m: mean tokens of a sample)" in announced  # the same words


def test_every_aggregation_is_told_what_it_does_to_a_step(every_aggregation):
    """64 + 512 + 4096 + 64 tokens, L = 4096: m / L = 1184 / 4096. Step S: sample_mean's weights sum to 3/4, the others' to 1."""
    _, out, _ = explain(*RAGGED)
    lines = {line.split()[0]: line for line in out.splitlines() if " against sample_mean: " in line}
    assert lines.keys() == set(every_aggregation) - {"sample_mean"}
    same = "the same sum of weights; look at grad_norm before you keep --clip-grad; its long samples weigh more"
    for name in ("prompt_mean", "token_mean"):
        assert lines[name] == f"{name} against sample_mean: {same}"
    constant = lines["constant"]
    assert constant.startswith("constant 4096 against sample_mean: sum of weights x 0.2891 = m/L, m = 1184 mean tokens of a sample")
    assert "near learning rate x 3.459, a like clipping near --clip-grad x 0.2891" in constant
    assert constant.endswith("KL and entropy terms are 3.459 x as strong")
    masked = explain(*S, "--loss-aggregation-divisor", "8")[1]
    for name in ("prompt_mean", "token_mean"):
        assert re.search(rf"^{name} against sample_mean: sum of weights x 1\.333", masked, re.MULTILINE)


LENGTHS = ["--response-lengths", "2,3"]
MESSAGES = [
    (["--host", "slime"], "nothing to explain: give a step, as --response-lengths"),
    (["--response-lengths", "2,x"], "--response-lengths, response 1: response_length is 'x': a whole number is needed"),
    ([*LENGTHS, "--prompt-ids", "a,"], "--prompt-ids a,: one entry for each of the 2 responses is needed, as in a,a,b"),
    (["--response-lengths", "3100,", "2000"], "takes no argument '2000'"),
    ([*LENGTHS, "--prompt-ids", "a,b", "--rollout-ids", "0,0"], "rollout 0 has samples of the prompts a and b"),
    ([*LENGTHS, "--loss-masks", "11,1x1"], "response 1: loss_mask must be a list of 0 and 1"),
    ([*LENGTHS, "--loss-masks", "11,11"], "response 1: a loss_mask of 2 for a response_length of 3"),
    (["--rollouts", "r.jsonl", "--loss-masks", "11"], "--loss-masks does nothing with --rollouts: remove it"),
    ([*LENGTHS, "--rollout-index", "1"], "--rollout-index does nothing with --response-lengths: remove it"),
    ([*LENGTHS, "--data-parallel-size", "2"], "--data-parallel-size does nothing without --host: remove it, or give --host"),
    ([*LENGTHS, "--calculate-per-token-loss"], "--calculate-per-token-loss does nothing without --host"),
    (["--micro-batches", "2,3"], "--micro-batches without --stock: say whose weights"),
    ([*LENGTHS, "--rollout-ids", "0,0", "--host", "nemo_rl"], "--host nemo_rl: it counts rows; remove --host"),
    ([*LENGTHS, "--host", "roll", "--calculate-per-token-loss"], "ROLL's factors are made for the mean over ranks"),
    ([*LENGTHS, "--host", "nemo_rl", "--loss-aggregation", "row_mean"], "NeMo-RL does not hand over what row_mean needs"),
    ([*LENGTHS, "--host", "slime", "--data-parallel-size", "0"], "--data-parallel-size 0 must be at least 1"),
    ([*LENGTHS, "--host", "slime", "--calculate-per-token-loss"], "does not go with calculate_per_token_loss=True"),
    (
        [*LENGTHS, "--host", "slime", "--clip-ratio-low", "0.1"],
        "--clip-ratio-low works on custom_loss, megatron_lm, train",
    ),
    ([*LENGTHS, "--loss-aggregation", "prompt_mean"], "prompt_mean: the command line does not say which samples share"),
    ([*LENGTHS, "--samples-per-prompt", "2"], "samples_per_prompt=2 without prompt_ids"),
    ([*LENGTHS, "--samples-per-prompt", "2", "--prompt-ids", "a,b"], "1 of samples_per_prompt=2 samples"),
    ([*LENGTHS, "--loss-aggregation", "constant"], "needs --loss-aggregation-divisor L"),
    (["--response-lengths", "2", "--loss-masks", "00"], "not a single unmasked token"),
]


@pytest.mark.parametrize(("arguments", "says"), MESSAGES, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_wrong_command_line_is_named(arguments, says):
    code, out, error = explain(*arguments)
    assert code in (1, 2)
    assert out == ""
    assert says in error


def test_a_step_has_one_source():
    with pytest.raises(SystemExit, match="2"):
        explain(*LENGTHS, "--rollouts", "r.jsonl")


def test_long_steps_are_cut_on_paper_and_whole_in_json():
    lengths = ["--response-lengths", ",".join(["3"] * 40), "--prompt-ids", ",".join(f"p{i}" for i in range(40))]
    _, out, _ = explain(*lengths, "--rows", "2")
    assert out.count("38 more") == 2
    assert len(explain_json(*lengths)["aggregations"]["constant"]["token_weights"]) == 40


def test_an_aggregation_of_ones_own_stands_beside_the_built_in_ones(tmp_path, monkeypatch):
    """1 / (N m_i^0.5) of 1, 4 and 4 tokens of 3 samples: 1/3, 1/6, 1/6, so a sample's share is 1/5, 2/5, 2/5."""
    source = """
        from megatron_rl import register_loss_aggregation
        for name in ("beside", "another"):
            globals()[name] = register_loss_aggregation(name, formula="1 / (N m_i^0.5)")
    """
    (tmp_path / "own_weights.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = ["--response-lengths", "1,4,4", "--loss-aggregation", "own_weights.beside"]
    found = explain_json(*flags, "--prompt-ids", "a,a,b")
    built_in = ["sample_mean", "prompt_mean", "token_mean", "constant"]
    assert [*found["aggregations"]][:5] == ["own_weights.beside", *built_in] and "row_mean" not in found["aggregations"]
    assert found["aggregations"]["own_weights.beside"]["token_weights"] == pytest.approx([1 / 3, 1 / 6, 1 / 6])
    assert found["aggregations"]["own_weights.beside"]["sample_shares"] == pytest.approx([0.2, 0.4, 0.4])
    assert found["aggregations"]["token_mean"]["sample_shares"] == pytest.approx([1 / 9, 4 / 9, 4 / 9])
    assert found["aggregations"]["constant"]["divisor"] == 4  # the longest response
    found = explain_json(*flags)
    assert [*found["aggregations"]][:4] == ["own_weights.beside", "sample_mean", "token_mean", "constant"]
    assert "prompt_mean: which samples share a prompt is not known; give --prompt-ids" in found["left_out"]
    assert [*explain_json(*flags, "--host", "train")["aggregations"]] == ["own_weights.beside"]
    assert [*explain_json(*flags[:2], "--loss-aggregation", "token_mean")["aggregations"]] == ["token_mean"]


def test_it_needs_torch_alone():
    """And says what it did not measure. FB-32: auxiliary losses keep Megatron's scale under the default contract."""
    arguments = [*S, "--host", "slime", "--data-parallel-size", "2"]

    def with_torch_alone() -> int:
        others = ("triton", "megatron", "transformer_engine", "apex", "tqdm", "matplotlib", "tensorboard")
        forget(*others)
        sys.modules.update(dict.fromkeys(others))
        return import_module("megatron_rl.__main__").main(["explain", *arguments])

    code, out, error = forked(with_torch_alone)
    assert (code, out) == (0, explain(*arguments)[1]), error
    assert "left out: a measurement" in out
    assert "left out: auxiliary losses of the model's experts and of MTP: they keep the scale that Megatron gives them" in out


def test_the_help_begins_with_the_step_and_lists_no_flag_that_changes_no_weight(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["explain", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: megatron-rl explain --response-lengths LIST") and len(text.splitlines()) < 140
    assert text.index("--prompt-ids") < text.index("--host {") < text.index("--loss-aggregation {sample_mean")
    assert "--watchdog" not in text and "--clip-ratio-c" not in text
    assert explain("--response-lengths", "3,5", "--watchdog", "off", "--clip-ratio-c", "3")[0] == 0
