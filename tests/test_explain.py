"""`megatron-rl explain`: weights by hand, sources, messages, its page. The chain of factors: test_explain_chain.py."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import textwrap
from fractions import Fraction

import pytest
import torch
from conftest import ROOT
from explain_page import BLOCK, PAGE, filled

from megatron_rl.__main__ import main
from megatron_rl.aggregation import StepTotals, sample_token_weights
from megatron_rl.commands.explain import report as explain_report
from megatron_rl.commands.explain.peers import BY_SAMPLES_A_RANK, PEERS
from megatron_rl.config import PolicyLossConfig
from megatron_rl.hosts.init_hook import learning_rate_shift
from megatron_rl.training.rollout_files import save_rollouts
from megatron_rl.training.rollouts import RolloutBatch, Sample

# Step S of tests/helpers.py; the last response has no unmasked token.
S = ["--response-lengths", "2,4,1,3", "--prompt-ids", "a,a,b,b", "--loss-masks", "11,1111,1,000", "--sample-losses", "1,2,3,0"]
RAGGED = ["--response-lengths", "64,512,4096,64", "--prompt-ids", "a,a,b,b"]
# Weights are float32: one rounding.
CLOSE = {"rel": 1e-6}


@pytest.fixture
def explain(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["explain", *arguments])
        out, error = capsys.readouterr()
        return code, out, error

    return run


@pytest.fixture
def as_json(explain):
    def run(*arguments: str) -> dict:
        code, out, error = explain(*arguments, "--json")
        assert (code, error) == (0, "")
        return json.loads(out)

    return run


GOLDEN = {
    # N = 4, P = 2, T = 7, M_a = 6, M_b = 1; weights, and the losses of tests/test_aggregation.py
    "sample_mean": (["1/8", "1/16", "1/4", "0"], "3/2"),
    "prompt_mean": (["1/12", "1/12", "1/2", "0"], "7/3"),
    "token_mean": (["1/7", "1/7", "1/7", "0"], "13/7"),
    "constant": (["1/32", "1/32", "1/32", "0"], "13/32"),
}


def test_step_s_by_hand(as_json):
    """FB-06: the four names, formulas and numbers of the golden table. FB-18: the masked sample counts in N and has weight 0."""
    found = as_json(*S, "--loss-aggregation-divisor", "8")
    assert [found[name] for name in ("num_samples", "num_prompts", "num_tokens", "num_masked_samples")] == [4, 2, 7, 1]
    assert found["token_counts"] == [2, 4, 1, 0]
    assert list(found["aggregations"]) == list(GOLDEN)
    for name, (weights, loss) in GOLDEN.items():
        weighing, exact = found["aggregations"][name], [float(Fraction(weight)) for weight in weights]
        assert weighing["token_weights"] == pytest.approx(exact, **CLOSE)
        assert weighing["loss"] == pytest.approx(float(Fraction(loss)), **CLOSE)
        masses = [weight * count for weight, count in zip(exact, [2, 4, 1, 0], strict=True)]
        assert weighing["sum_of_weights"] == pytest.approx(sum(masses), **CLOSE)
        assert weighing["gradient_scale"] == pytest.approx(sum(masses) / 0.75, **CLOSE)  # three of four samples have a token
        assert weighing["sample_weights"] == pytest.approx(masses, **CLOSE)
        assert weighing["sample_shares"] == pytest.approx([mass / sum(masses) for mass in masses], **CLOSE)
        assert weighing["prompt_shares"]["a"] == pytest.approx((masses[0] + masses[1]) / sum(masses), **CLOSE)


def test_shares_of_unequal_lengths(explain):
    """512 of 576 tokens are 88.9 % of half the weight under prompt_mean; 4096 of 4736 are 86.5 % where tokens count alike."""
    _, out, _ = explain(*RAGGED)
    rows = {line[:8]: re.findall(r"[\d.]+%", line) for line in out.splitlines() if line.startswith("sample ")}
    assert rows["sample 1"] == ["25.0%", "44.4%", "10.8%", "10.8%"]
    assert rows["sample 2"] == ["25.0%", "49.2%", "86.5%", "86.5%"]
    (sums,) = [line for line in out.splitlines() if line.startswith("sum of weights")]
    assert sums.split()[3:] == ["4736", "1", "1", "1", "0.2891"]  # 4736 / (4 x 4096)
    assert "constant: L = 4096, the longest response, because none is given" in out


def test_the_gradients_scale_is_the_one_that_the_init_hook_announces(as_json):
    """FB-75: x m / L, with m = (3 + 5 + 8) / 3 tokens; KL and entropy terms keep sample_mean and gain the inverse."""
    found = as_json("--response-lengths", "3,5,8", "--loss-aggregation-divisor", "8192")
    config = PolicyLossConfig(loss_aggregation="constant", loss_aggregation_divisor=8192.0)
    mean, divisor = 16 / 3, float(re.match(r"x m/([\d.]+) ", learning_rate_shift(config))[1])
    constant = found["aggregations"]["constant"]
    assert constant["gradient_scale"] == pytest.approx(mean / divisor, **CLOSE)
    assert constant["regularizer_strength"] == pytest.approx(divisor / mean, **CLOSE)
    assert found["gradient_scale_from_to"]["constant"]["token_mean"] == pytest.approx(divisor / mean, **CLOSE)
    assert found["aggregations"]["token_mean"]["gradient_scale"] == pytest.approx(1.0, **CLOSE)


def test_a_coefficient_of_kl_is_warned_about_with_the_factor(explain):
    """FB-75: once, and in numbers."""
    divisor = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "64"]
    _, out, error = explain("--response-lengths", "3,5,8", *divisor, "--kl-coefficient", "0.1")
    assert error.count("kl_coefficient=0.1") == 1
    assert "KL and entropy terms stay averaged by sample_mean: 12 x as strong" in out  # 64 / (16 / 3)


def test_deepspeeds_second_division_in_numbers(as_json):
    """FB-91: the gradient is divided by N = 3; the same steps are clipped at 3 x the value."""
    found = as_json("--response-lengths", "3,5,8", "--clip-grad", "0.3")["deepspeed"]
    assert found["gradient_factor"] == pytest.approx(1 / 3, **CLOSE)
    assert (found["clip_grad_with_divisor"], found["clip_grad_without_divisor"]) == (0.3, pytest.approx(0.9, **CLOSE))


def table_of_migration() -> list[tuple[str, str]]:
    """(elsewhere, here) of the first table of the page, plain."""
    text = (ROOT / "docs" / "hosts" / "migration.md").read_text(encoding="utf-8").split("## Aggregations")[1].split("## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ") and "elsewhere" not in line]
    return [(row[0].replace("`", "").strip(), row[1].replace("`", "").strip()) for row in rows]


# Words that a row of the page has for the setting, where they are not the setting's own.
WORDS = {
    "loss_agg_mode=token-mean": "verl token-mean",
    "loss_agg_mode=seq-mean-token-sum": "verl seq-mean-token-sum",
    "loss_agg_mode=seq-mean-token-sum-norm": "verl seq-mean-token-sum-norm",
    'loss_denominator="token"': 'open-instruct "token"',
    "GSPO, normalize_by_documents": "Fast-LLM GSPO, normalized by documents".replace("ized", "ised"),
    "the authors' code": "Dr. GRPO, the authors' code",
    "as published; ScaleRL's prompt average": "DAPO as published",
    "without flags": "miles, slime without flags",
    "train_rl.py": "Megatron-LM train_rl.py",
}
# The page has these in its table of divisors, or not at all.
ELSEWHERE = ("OpenRLHF", "loss_denominator=L", ("Liger", "loss_type=grpo"))


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.framework} {peer.setting} {peer.note[:24]}")
def test_a_row_says_what_the_page_of_migrations_says(peer):
    """Two tables of the same facts: a change of one alone would tell users two things."""
    if peer.framework in ELSEWHERE or peer.setting in ELSEWHERE or (peer.framework, peer.setting) in ELSEWHERE:
        return
    words = WORDS.get(peer.setting, peer.setting.replace("loss_type=", ""))
    rows = [here for elsewhere, here in table_of_migration() if words in elsewhere.replace("loss_type=", "")]
    assert rows, f"{words} is on no row"
    expected = "none" if peer.aggregation is None else str(peer.aggregation)
    assert rows[0].startswith(expected), rows
    assert ("divisor 1" in rows[0]) == (peer.scale is not None and peer.scale.formula == "1")


def test_a_divisor_for_another_framework_gives_its_weight():
    """verl sums by L on each of dp ranks and averages over them: a token weighs 1 / (L dp). N = 12, dp = 4, L = 64."""
    divisor = BY_SAMPLES_A_RANK.value(64.0, 12, 4)
    weights = sample_token_weights("constant", torch.tensor([5]), StepTotals(12, None, 60), divisor=divisor)
    assert float(weights[0]) == pytest.approx(1 / (64 * 4), **CLOSE)


def test_a_framework_is_answered_in_flags(explain):
    _, out, _ = explain("--response-lengths", "3,5,8,8", "--loss-aggregation-divisor", "8192", "--framework", "verl")
    assert "at L = 8192 use --loss-aggregation constant --loss-aggregation-divisor 2048 [L / N]" in out
    assert "to reproduce verl loss_agg_mode=token-mean use --loss-aggregation token_mean" in out
    assert "TRL" not in out


MESSAGES = [
    ([], "nothing to explain: give --response-lengths"),
    (["--response-lengths", "2,x"], "'x' must be a whole number of at least 1"),
    (["--response-lengths", "2,3", "--prompt-ids", "a"], "--prompt-ids a: one name for each of the 2 responses"),
    (["--response-lengths", "2,3", "--loss-masks", "11"], "1 masks for 2 responses"),
    (["--response-lengths", "2,3", "--loss-masks", "11,1x1"], "'1x1' must be 3 digits 0 or 1"),
    (["--response-lengths", "2,3", "--sample-losses", "1"], "one finite number for each of the 2 samples"),
    (["--response-lengths", "2,3", "--sample-losses", "1,y"], "--sample-losses 1,y: could not convert"),
    (["--prompt-ids", "a"], "--prompt-ids goes with --response-lengths alone"),
    (["--response-lengths", "2", "--rollouts", "r.jsonl"], "--response-lengths and --rollouts: a step has one source"),
    (["--response-lengths", "2", "--rollout-index", "1"], "--rollout-index goes with --rollouts alone"),
    (["--response-lengths", "2", "--data-parallel-size", "2"], "--data-parallel-size without --host"),
    (["--response-lengths", "2", "--route", "host"], "--route without --host"),
    (["--response-lengths", "2", "--calculate-per-token-loss"], "--calculate-per-token-loss without --host"),
    (["--host", "train", "--route", "host"], "only miles and slime have several routes"),
    (["--host", "train", "--calculate-per-token-loss"], "`megatron-rl train` has no such flag"),
    (["--host", "slime", "--data-parallel-size", "0"], "--data-parallel-size 0 must be at least 1"),
    (["--response-lengths", "2", "--clip-grad", "0"], "--clip-grad 0.0 must be a finite number above 0"),
    (["--response-lengths", "2", "--loss-aggregation", "prompt_mean"], "needs to know which samples share a prompt"),
    (["--response-lengths", "2", "--loss-aggregation", "constant"], "needs --loss-aggregation-divisor L"),
    (["--response-lengths", "2", "--loss-aggregation", "seq-mean-token-mean"], "is sample_mean here"),
    (["--host", "slime", "--policy-loss", "gspo"], "would be ignored on the route reducer"),
    (["--response-lengths", "2", "--samples-per-prompt", "2", "--prompt-ids", "a"], "1 of samples_per_prompt=2 samples"),
    (["--response-lengths", "2", "--loss-masks", "00"], "not a single unmasked token"),
    (["--rollouts", "none.jsonl"], "there is no such rollout file"),
    (["--rollout-dump", "none.pt"], "--rollout-dump none.pt cannot be read"),
]


@pytest.mark.parametrize(("arguments", "says"), MESSAGES, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_wrong_command_line_is_named(explain, arguments, says):
    code, out, error = explain(*arguments)
    assert code in (1, 2)
    assert out == ""
    assert says in error


def test_every_wrong_flag_is_in_one_message(explain):
    """FB-74."""
    _, _, error = explain("--host", "train", "--route", "host", "--data-parallel-size", "0", "--rows", "0")
    assert "3 problems" in error


def rollout(index: int, lengths: list[int]) -> RolloutBatch:
    samples = [
        Sample(
            prompt_id=f"p{number // 2}",
            tokens=[1] * (length + 2),
            response_length=length,
            loss_mask=[1] * (length - 1) + [0],
            reward=0.0,
            advantage=0.0,
            old_log_probs=None,
            index=number,
        )
        for number, length in enumerate(lengths)
    ]
    return RolloutBatch(samples=samples, rollout_index=index)


def test_a_rollout_of_our_file(as_json, explain, tmp_path):
    for index, lengths in ((0, [3, 5, 4]), (1, [2, 2])):
        save_rollouts(tmp_path / "r.jsonl", rollout(index, lengths))
    found = as_json("--rollouts", "r.jsonl")
    assert (found["prompt_ids"], found["token_counts"]) == (["p0", "p0", "p1"], [2, 4, 3])
    assert found["left_out"][0].startswith("1 other rollouts of the file")
    assert as_json("--rollouts", "r.jsonl", "--rollout-index", "1")["token_counts"] == [1, 1]
    assert "holds the rollouts 0 to 1" in explain("--rollouts", "r.jsonl", "--rollout-index", "7")[2]


def dumped(**fields) -> dict:
    """As Sample.to_dict() of a host, of which a hook reads some."""
    ours = {"group_index": 0, "index": 0, "response_length": 3, "loss_mask": None, "remove_sample": False, "reward": 1.0}
    return {**ours, "prompt": "text", "status": "completed", "metadata": {"k": [1]}, **fields}


DUMP = [
    dumped(index=0),
    dumped(index=1, loss_mask=[1, 0, 1]),
    dumped(index=2, group_index=1, remove_sample=True),
    dumped(index=3, group_index=1, response_length=2, tokens=torch.arange(4)),
]


@pytest.mark.parametrize("host", ["miles", "slime"])
@pytest.mark.parametrize("content", [{"rollout_id": 4, "samples": DUMP, "metadata": {}}, DUMP], ids=["dict", "list"])
def test_a_dump_of_a_host(as_json, content, host):
    """Masks as training will see them: none is all ones, a removed sample is fully masked."""
    torch.save(content, "4.pt")
    found = as_json("--rollout-dump", "4.pt", "--host", host)
    assert (found["prompt_ids"], found["token_counts"]) == ([0, 0, 1, 1], [3, 2, 0, 2])
    assert found["aggregations"]["sample_mean"]["token_weights"] == pytest.approx([1 / 12, 1 / 8, 0, 1 / 8], **CLOSE)


def test_a_dump_whose_rollouts_have_several_samples_says_so(as_json):
    torch.save([dumped(index=0, rollout_id=9), dumped(index=1, rollout_id=9)], "d.pt")
    assert any("2 samples belong to 1 rollouts" in line for line in as_json("--rollout-dump", "d.pt")["left_out"])


class RunsCode:
    def __reduce__(self):
        return os.mkdir, ("was_run",)


BAD_DUMPS = [
    ({"samples": [dumped(metadata=RunsCode())]}, "holds objects beside numbers, text, lists and tensors"),
    ({"rollout_data": {}}, 'a list of samples is needed, or a dict with one at "samples"'),
    ([], "a list of samples is needed"),
    ([[1, 2]], "sample 0: list in the place of a dict"),
    ([{"tokens": [1]}], "response_length is None"),
    ([dumped(loss_mask=[1, 2, 1])], "loss_mask must be a list of 0 and 1"),
    ([dumped(loss_mask=[1])], "a loss_mask of 1 for a response_length of 3"),
    ([dumped(), dumped(group_index=None)], "1 of 2 samples have no group_index"),
]


@pytest.mark.parametrize(("content", "says"), BAD_DUMPS, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_dump_that_cannot_be_read_is_refused_by_name(explain, tmp_path, content, says):
    """A dump is somebody's file: what it would run when unpickled is not run."""
    torch.save(content, "d.pt")
    code, out, error = explain("--rollout-dump", "d.pt")
    assert (code, out) == (1, "")
    assert says in error
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("content", [b"text", pickle.dumps([1]), b""], ids=["text", "pickle", "empty"])
def test_a_file_of_another_kind_is_no_dump(explain, tmp_path, content):
    (tmp_path / "d.pt").write_bytes(content)
    code, _, error = explain("--rollout-dump", "d.pt")
    assert code == 1
    assert "--rollout-dump d.pt" in error


def test_long_steps_are_cut_on_paper_and_whole_in_json(explain, as_json):
    lengths = ["--response-lengths", ",".join(["3"] * 40), "--prompt-ids", ",".join(f"p{i}" for i in range(40))]
    _, out, _ = explain(*lengths, "--rows", "2")
    assert out.count("38 more") == 2
    assert len(as_json(*lengths)["aggregations"]["constant"]["token_weights"]) == 40


def test_a_terminal_gets_richs_table_with_the_same_words(explain, monkeypatch):
    pytest.importorskip("rich", reason="the table of a terminal needs rich")
    monkeypatch.setenv("COLUMNS", "200")
    plain = explain(*RAGGED)[1]
    monkeypatch.setattr(explain_report.sys.stdout, "isatty", lambda: True, raising=False)
    rich = re.sub(r"\x1b\[[\d;]*m", "", explain(*RAGGED)[1])
    assert rich.split() == plain.split()


def test_a_picture_is_drawn(explain, tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    code, out, _ = explain(*S, "--loss-aggregation-divisor", "8", "--plot", "folder/weights.png")
    assert code == 0
    assert "wrote folder/weights.png" in out
    assert (tmp_path / "folder" / "weights.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_a_kind_that_cannot_be_written_is_refused(explain):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    code, _, error = explain(*RAGGED, "--plot", "weights.nothing")
    assert code == 2
    assert "--plot weights.nothing cannot be written" in error


# As on a machine with torch alone: what is optional is not there.
WITHOUT = textwrap.dedent(
    """
    import sys
    import torch
    ABSENT = {"triton", "megatron", "transformer_engine", "apex", "rich", "matplotlib"}
    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ABSENT:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    for name in [name for name in sys.modules if name.split(".")[0] in ABSENT]:
        del sys.modules[name]
    sys.meta_path.insert(0, Absent())
    import importlib.util
    found = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in ABSENT else found(name, package)
    from megatron_rl.__main__ import main
    sys.stdout.isatty = lambda: True
    sys.exit(main(sys.argv[1:]))
    """
)


def run_without(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, "explain", *arguments], check=False, cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize("host", ["miles", "slime", "megatron_lm", "train"])
def test_it_needs_torch_alone(host, explain):
    """And says what it did not measure. FB-32: auxiliary losses are nobody's business here, which it says too."""
    arguments = [*S, "--host", host, "--data-parallel-size", "2"]
    finished = run_without(*arguments)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == explain(*arguments)[1]
    assert "left out: a measurement" in finished.stdout
    assert "left out: auxiliary losses of MoE and MTP" in finished.stdout


def test_a_picture_without_matplotlib_is_refused_with_the_remedy():
    finished = run_without(*S, "--plot", "w.png")
    assert finished.returncode == 2
    assert "--plot w.png needs matplotlib: pip install matplotlib" in finished.stderr


def test_the_page_shows_what_the_commands_print(tmp_path, monkeypatch):
    """Catches an output that changed without its page: python tests/explain_page.py writes it anew."""
    pytest.importorskip("matplotlib", reason="one command of the page draws")
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    assert len(BLOCK.findall(page)) >= 4
    assert filled(page) == page


def test_the_page_names_every_key_of_the_json(as_json):
    found = as_json(*S, "--host", "slime")
    keys = {*found, *found["chain"], *found["chain"]["factors"][0], *found["aggregations"]["sample_mean"], *found["deepspeed"]}
    keys |= set(found["equivalents"][0])
    page = PAGE.read_text(encoding="utf-8")
    assert sorted(key for key in keys if f"`{key}`" not in page) == []
