"""What doctor and explain say of a line of TRL that trains with TRL's own loss."""

from __future__ import annotations

import re

import pytest
from test_stock_lines import ALIKE, GENERATION, doctor, explain

from megatron_rl.aggregation_record import Formula
from megatron_rl.hosts import trl_stock
from megatron_rl.hosts.stock import Stock, rows_of
from megatron_rl.hosts.trl_script import OURS


@pytest.mark.parametrize(
    ("assigned", "said"),
    [
        ("config.loss_type = 'bnpo'", "NOT exact"),
        ("if x:\n    config.loss_type = 'bnpo'", "not known here"),
        ("if __name__ == '__main__':\n    config.beta, config.loss_type = 0.1, 'bnpo'\n    config.loss_type = 'bnpo'", "NOT exact"),
    ],
)
def test_a_field_that_a_script_sets_later_wins_over_the_line(assigned, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made = "from trl import GRPOConfig, GRPOTrainer, TrlParser\n(config,) = TrlParser(GRPOConfig).parse_args_and_config()\n"
    (tmp_path / "mine.py").write_text(f"{made}{assigned}\nGRPOTrainer(args=config)")
    _, out = doctor(capsys, "--", "python", "mine.py", "--loss_type", "dapo")
    assert "so were the fields that it sets later: " in out and "loss_type" in out and said in out.splitlines()[-1], out


@pytest.mark.parametrize(("version", "kind"), [(None, "unbiased"), ((1, 9), "k3")])
def test_the_kl_of_trl_is_of_its_version(version, kind, monkeypatch, capsys):
    monkeypatch.setattr(trl_stock, "installed", lambda: version)
    _, out = doctor(capsys, "--", "trl", "grpo", "--beta", "0.1", "--loss_type", "grpo")
    assert f"by default, so KL is {kind}" in out and ("no TRL is installed here, and 1.16 is judged" in out) == (version is None), (
        out
    )
    _, out = doctor(capsys, "--", "trl", "grpo", "--beta", "0.1", "--use_bias_correction_kl", "False")
    assert "by default" not in out


@pytest.mark.parametrize(("version", "said"), [((1, 16), "replaces layers"), ((1, 13), "trains Liger's loss (")])
def test_liger_trains_a_loss_in_some_versions(version, said, monkeypatch, capsys):
    monkeypatch.setattr(trl_stock, "installed", lambda: version)
    _, out = doctor(capsys, "--", "trl", "grpo", "--use_liger_kernel")
    assert said in out, out
    _, out = doctor(capsys, "--", "python", "t.py", "--use_liger_kernel", "--loss_type", "megatron_rl.grpo.sample_mean")
    assert ("PROBLEM" in out) == (version == (1, 13)), out


def test_a_selection_of_each_micro_batch_is_in_the_verdict_of_trl(capsys):
    _, out = doctor(capsys, "--", "trl", "grpo", "--top_entropy_quantile", "0.2")
    assert "NOT exact" in out.splitlines()[-1] and ALIKE not in out, out


def test_a_generation_of_whole_steps_is_kept_by_ours(capsys):
    line = ["trl", "grpo", "--steps_per_generation", "8", "--gradient_accumulation_steps", "4"]
    _, out = doctor(capsys, "--", *line)
    assert "exact: steps_per_generation=4, or loss_type=megatron_rl.grpo.token_mean, which keeps the generation" in out, out


def test_a_remedy_of_ours_says_what_keeps_the_strength_of_kl_and_entropy(capsys):
    """1/T adds up to 1 over the step, as 1/(N m_i) does: no coefficient changes."""
    line = ["trl", "grpo", "--steps_per_generation", "8", "--gradient_accumulation_steps", "4"]
    said = "; with ours, each sample counts the same in KL and entropy: keep the coefficient of KL, keep the coefficient of entropy"
    for loss in ("dapo", "bnpo"):
        _, out = doctor(capsys, "--", *line, "--beta", "0.04", "--entropy_coef", "0.01", "--loss_type", loss)
        assert f"which keeps the generation{said}" in out, out
        _, out = doctor(capsys, "--", *line, "--loss_type", loss)
        assert "which keeps the generation" in out and "with ours" not in out, out
    _, out = doctor(capsys, "--", "trl", "grpo", "--beta", "0.04", "--loss_type", "bnpo")  # TRL's dapo has TRL's KL
    assert "exact: loss_type=dapo" in out and "with ours" not in out, out


def test_under_constant_the_coefficient_of_kl_is_multiplied_by_the_mean_tokens_over_l():
    """sum_i m_i / (L N) is m / L, where ours adds up to 1."""
    weight = Formula(N=-1, L=-1)
    local = Stock(Formula(M=-1, dp=-1, N_b=-1, L=-1), weight, known={"L": 64})
    rows = [*rows_of(local, "TRL", "loss_type=megatron_rl.grpo.{}".format, ("entropy",))]
    assert "exact: loss_type=megatron_rl.grpo.constant; with ours, each sample counts the same in KL: multiply" in rows[0].text
    assert "the coefficient of KL by m/L = m/64, m the mean tokens of a sample" in rows[0].text


def test_an_aggregation_alone_is_given_the_loss_that_lacks(capsys):
    _, out = doctor(capsys, "--", "python", "t.py", "--loss_type", "megatron_rl.prompt_mean")
    assert "did you mean megatron_rl.grpo.prompt_mean?" in out, out


def test_no_remedy_is_named_where_none_can_be_typed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import trl\ntrl.AsyncGRPOTrainer()")
    _, out = doctor(capsys, "--", "python", "mine.py")
    assert "1/(M T_k)" in out and "exact: " not in out.replace("NOT exact: ", ""), out


def test_terms_of_one_weight_have_one_mark(capsys):
    _, out = doctor(
        capsys, "--", "trl", "grpo", "--beta", "0.1", "--steps_per_generation", "8", "--gradient_accumulation_steps", "4"
    )
    assert {line.split()[0] for line in out.splitlines() if " TRL's own: " in line} == {"note"}, out


@pytest.mark.parametrize(
    ("version", "line", "said"),
    [
        ((1, 10), "--loss_type dapo", "1/(M T_k)"),
        ((1, 10), "--loss_type cispo --steps_per_generation 8 --gradient_accumulation_steps 4", "1/(M T_k)"),
        ((1, 11), "--loss_type dapo", "1/T"),
        ((1, 11), "--loss_type vespo --steps_per_generation 8 --gradient_accumulation_steps 4", "M_gen/(M T_gen)"),
        ((1, 13), "--loss_type grpo", "1/(N m_i)"),
        ((1, 13), "--loss_type bnpo", "1/(M dp T_b)"),
        ((1, 13), "--loss_type luspo", "m_i/(N L_b)"),
    ],
)
def test_liger_divides_by_what_its_version_is_given(version, line, said, monkeypatch, capsys):
    """Before 1.11 compute_liger_loss passes no num_items_in_batch: Liger counts a micro-batch on all ranks."""
    monkeypatch.setattr(trl_stock, "installed", lambda: version)
    _, out = doctor(capsys, "--", "trl", "grpo", "--use_liger_kernel", *line.split())
    assert f"a token weighs {said}" in out and "not judged" not in out, out
    is_local = said in ("1/(M T_k)", "1/(M dp T_b)", "m_i/(N L_b)")
    assert is_local == ("NOT exact: " in out.splitlines()[-1]) and not (is_local and ALIKE in out), out
    assert is_local == ("exact: use_liger_kernel=False" in out), out


def test_explain_knows_the_divisor_of_a_line(capsys):
    line = ["trl", "grpo", "--loss_type", "dr_grpo", "--max_completion_length"]
    for longest in ("1024", "${LONGEST}"):
        _, out = explain(capsys, "--response-lengths", "3,5", "--", *line, longest)
        assert f"policy 1/(N L), L = {longest if longest.isdecimal() else 1}" in out, out


@pytest.mark.parametrize(("default", "times"), [(None, "0.125"), (256, "0.0625")])  # 512/4096, 256/4096
def test_the_longest_response_is_trls_default_where_none_is_typed(default, times, tmp_path, monkeypatch, capsys):
    """default: of the TRL that is installed; None: there is none."""
    monkeypatch.setattr(trl_stock, "default_of", lambda file, name, field: default if field == trl_stock.LONGEST else None)
    config, own = "loss_type='megatron_rl.grpo.constant'", {"loss_aggregation_divisor": 4096}
    made = f"from trl import GRPOConfig\nfrom {OURS} import GRPOTrainer\nGRPOTrainer(args=GRPOConfig({config}), megatron_rl={own})"
    (tmp_path / "mine.py").write_text(made)
    _, out = doctor(capsys, "--response-lengths", "3,4096", "--", "python", str(tmp_path / "mine.py"))
    limit = f"max_completion_length={default or 512}, TRL's default"
    assert f"is not {limit}, the longest response: the gradient is {times} x as large as with it; type max_comp" in out, out
    assert f"a response of 4096 tokens cannot occur: {limit}, is the longest one" in out, out


def test_a_script_of_trl_that_parses_the_line_was_read_with_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from trl import GRPOConfig, GRPOTrainer, TrlParser\nGRPOTrainer(TrlParser(GRPOConfig))")
    (tmp_path / "mine.yaml").write_text("loss_type: bnpo")
    _, out = doctor(capsys, "--", "python", "mine.py", "--config", "mine.yaml")
    assert "mine.py fills GRPOConfig from the command line and the file of --config: both were read" in out and "NOT exact" in out


@pytest.mark.parametrize(("version", "times"), [((1, 16), 1), ((1, 9), 0.5)])
def test_a_step_of_a_generation_that_has_more(version, times, monkeypatch, capsys):
    monkeypatch.setattr(trl_stock, "installed", lambda: version)
    line = [*GENERATION, "--steps_per_generation", "4"]
    _, out = doctor(capsys, "--response-lengths", "3,5", "--host", "trl", "--", *line)
    assert f"T_gen counts tokens of other steps too; a token weighs {times} times its exact weight" in out, out
    assert ("about 0.5 times its mean" in out.splitlines()[-1]) == (times == 0.5), out
    _, out = explain(capsys, "--response-lengths", "3,5", "--host", "trl", "--", *line)
    assert out.splitlines()[2].split()[5] == f"{times / 8:g}", out  # 1 / T, T = 8
    assert ("about policy M_gen/(M T_gen)" in out) == (version == (1, 16)), out


def test_a_step_of_several_generations_by_hand(capsys):
    """Generations of one micro-batch: 1 / (2 x 3) and 1 / (2 x 5), exact 1 / 8."""
    line = ["accelerate", "launch", *GENERATION[1:], "--steps_per_generation", "1"]
    _, out = doctor(capsys, "--response-lengths", "3,5", "--host", "trl", "--", *line)
    assert "policy: a token weighs 0.8 to 1.33 times its exact weight" in out, out


@pytest.mark.parametrize(("loss", "is_alone"), [("dapo", True), ("bnpo", False)])
def test_an_entropy_that_no_setting_of_trl_makes_exact_is_exact_with_ours(loss, is_alone, capsys):
    _, out = doctor(capsys, "--", "trl", "grpo", "--loss_type", loss, "--entropy_coef", "0.01")
    (row,) = [line for line in out.splitlines() if line.split()[1] == "entropy"]
    assert row.endswith("exact: loss_type='megatron_rl.grpo.token_mean', whose entropy is a mean over the samples"), out
    assert ("too, as the policy term" in row) != is_alone and ("exact: loss_type=dapo" in out) != is_alone


@pytest.mark.parametrize(
    ("estimator", "version", "said"),
    [
        (
            "k3",
            None,
            "use_bias_correction_kl=False is --kl-estimator k3, our default; TRL has True by default, so KL is unbiased (no ",
        ),
        (
            "unbiased",
            (1, 9),
            "use_bias_correction_kl=True is --kl-estimator unbiased; TRL has False by default, so KL is k3 (TRL 1.9",
        ),
        ("k2", (1, 16), "use_bias_correction_kl=False is --kl-estimator k2; TRL has True by default, so KL is unbiased (TRL 1.16"),
    ],
)
def test_explain_says_which_estimator_the_switch_of_trl_is(estimator, version, said, monkeypatch, capsys):
    monkeypatch.setattr(trl_stock, "installed", lambda: version)
    line = ["--host", "trl", "--response-lengths", "3,5", "--kl-estimator", estimator]
    _, out = explain(capsys, *line, "--kl-coefficient", "0.1")
    assert said in out, out
    _, out = explain(capsys, *line[:4])
    assert "use_bias_correction_kl" not in out


@pytest.mark.parametrize(
    ("loss", "level", "said"),
    [
        ("dapo", "token", "exact: steps_per_generation=8, or loss_type=megatron_rl.grpo.token_mean, which keeps"),
        ("cispo", "token", "exact: steps_per_generation=8, or loss_type=megatron_rl.cispo.token_mean, which keeps"),
        ("dapo", "sequence", "or loss_type=megatron_rl.gspo.token_mean without importance_sampling_level, which keeps"),
        ("cispo", "sequence", "exact: steps_per_generation=8\n"),
        (
            "bnpo",
            "token",
            "exact: loss_type=dapo with steps_per_generation=8, or loss_type=megatron_rl.grpo.token_mean, which keeps",
        ),
    ],
)
def test_the_advice_for_a_generation_of_two_steps_is_not_refused_in_its_turn(loss, level, said, capsys):
    sizes = ["--gradient_accumulation_steps", "8", "--steps_per_generation", "16"]
    _, out = doctor(capsys, "--", "trl", "grpo", "--loss_type", loss, "--importance_sampling_level", level, *sizes)
    assert said in out, out
    mean = "the same on every layout, but not the step's token mean: that of 2 steps together; exact: "
    assert (mean in out) == (loss != "bnpo"), out
    typed = [*sizes[:2], "--loss_type", said.partition("or loss_type=")[2].partition(" without")[0].partition(",")[0] or "dapo"]
    code, out = doctor(capsys, "--host", "trl", "--", "accelerate", "launch", "t.py", *typed)
    assert code == 0 and "not the step's token mean" not in out, out


def test_the_entropy_of_a_sequence_loss_is_exact_with_gspo(capsys):
    line = ["trl", "grpo", "--loss_type", "grpo", "--importance_sampling_level", "sequence", "--entropy_coef", "0.1"]
    _, out = doctor(capsys, "--", *line)
    assert "exact: loss_type='megatron_rl.gspo.sample_mean' without importance_sampling_level, whose entropy is a mean" in out, out


NONE, OLD, NEW = "no TRL is installed here, and 1.16 is judged", "TRL 1.9 is installed", "TRL 1.16 is installed"


@pytest.mark.parametrize(
    ("given", "before", "since"),
    [
        (["--steps_per_generation", "16"], {"policy": "1/T_gen, about 0.5 times the token mean"}, {"policy": "M_gen/(M T_gen)"}),
        (["--entropy_coef", "0.1"], {"entropy": "1/T"}, {"entropy": "1/(M dp T_b)"}),
        (["--loss_type", "luspo", "--beta", "0.1"], {"policy and KL": "m_i/(N L_b)"}, {"policy and KL": "1/N"}),
        (["--loss_type", "luspo", "--importance_sampling_level", "sequence"], {}, {}),
        (["--loss_type", "grpo", "--entropy_coef", "0.1"], {}, {}),
        (["--loss_type", "megatron_rl.gspo.sample_mean"], {}, {}),
        (["--use_liger_kernel", "True"], {}, {}),  # which has a remark of its own
    ],
)
def test_what_1_10_changed_is_said_where_another_version_may_train(given, before, since, monkeypatch, capsys):
    """Each side of it is held against TRL's own code in test_stock.py, where a checkout of it is there."""
    for version, side, of_side, judged in (
        (None, "before", before, NONE),
        ((1, 9), "since", since, OLD),
        ((1, 16), "before", {}, NEW),
    ):
        monkeypatch.setattr(trl_stock, "installed", lambda version=version: version)
        line = ["trl", "grpo", "--gradient_accumulation_steps", "8", *given]
        _, out = doctor(capsys, "--", *line)
        said = re.findall(rf"^  note +version +{side} 1\.10 a token weighs (.*), in (.*) \({judged}\)$", out, re.MULTILINE)
        assert {terms: weight for weight, terms in said} == of_side, out


@pytest.mark.parametrize(
    ("processes", "rows", "lengths", "far"),
    [
        # Two orders of three pair a short sample with a long one, and each token weighs 1/8; in the third the squares over the
        # tokens are 2 (1/4 - 1/8)^2 + 6 (1/12 - 1/8)^2 = 1/24 of 8/64: a third, and its root is 58%.
        (1, 2, "1,1,3,3", "58% off in this order; TRL shuffles a generation: 0% in the median of 1000 shuffles, 0% to 58% ("),
        # Each rank shuffles its own, and each micro-batch has one sample: no order changes anything.
        (2, 1, "1,1,3,3", "58% off ("),
        # Nor does one where a rank has one micro-batch.
        (2, 2, "1,1,3,3", "58% off ("),
    ],
)
def test_an_error_of_a_step_that_trl_shuffles_is_of_an_order(processes, rows, lengths, far, capsys):
    sizes = {"num_processes": processes, "per_device_train_batch_size": rows, "num_generations": 2}
    sizes["gradient_accumulation_steps"] = 4 // (processes * rows)
    line = ["trl", "grpo", "--loss_type", "bnpo", *(word for name, size in sizes.items() for word in (f"--{name}", str(size)))]
    _, out = doctor(capsys, "--response-lengths", lengths, "--", *line)
    assert f"and the gradient is {far}" in out, out
    _, out = explain(capsys, "--response-lengths", lengths, "--", *line)
    assert "rank.micro-batch in this order" in out, out


def test_explain_says_what_was_read_and_what_was_run(capsys):
    """And which of its settings are the trainer's."""
    step = ["--response-lengths", "3,5", "--host", "trl", "--policy-loss", "grpo", "--loss-aggregation", "constant"]
    _, out = explain(capsys, *step, "--loss-aggregation-divisor", "8")
    assert "and none was run here; the gradient was compared in TRL 1.10 and 1.16, in one process and with DDP" in out, out
    typed = "loss_type='megatron_rl.grpo.constant', megatron_rl={'loss_aggregation_divisor': 8.0} of GRPOTrainer"
    assert f"arguments of GRPOConfig, and of GRPOTrainer where it is said: {typed}" in out, out


@pytest.mark.parametrize(
    ("aggregation", "beta", "said"),
    [
        ("constant", 0.02, "beta=0.02 is as strong as beta=0.04 under sample_mean"),
        ("constant", 0.01, "beta=0.01 is as strong as beta=0.02 under sample_mean"),  # whoever followed it is not told to go on
        ("sample_mean", 0.02, None),  # the strength is that one
        ("token_mean", 0.02, None),  # no coefficient keeps it
    ],
)
def test_a_step_puts_numbers_into_the_advice_for_the_kl_of_our_loss(aggregation, beta, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own = {"loss_aggregation_divisor": 8} if aggregation == "constant" else {}
    config = f"GRPOConfig(loss_type='megatron_rl.grpo.{aggregation}', scale_rewards='none', beta={beta}, max_completion_length=8)"
    imports = "from trl import GRPOConfig\nfrom megatron_rl.hosts.trl import GRPOTrainer\n"
    (tmp_path / "mine.py").write_text(f"{imports}GRPOTrainer(args={config}, megatron_rl={own})")
    _, out = doctor(capsys, "--response-lengths", "2,4,6", "--", "torchrun", "mine.py")
    words = f"the mean tokens of a sample are 4 here, so {said}; for the strength that b has there, type b x 0.5 = b x 4/8"
    assert words in out if said else "the mean tokens of a sample are" not in out, out
