"""Our losses in prime-rl: through emulated packing and sums always, through its own with a checkout.

PRIME_RL_ROOT=... pytest -m host --require host tests/test_prime_rl.py
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import prime_rl_cases as cases
import pytest
import torch
from conftest import ROOT
from dense_row_cases import LOSSES, RowCase, largest_error, samples_of
from forked import forked
from helpers import pool_of
from host_checkouts import PRIME_RL

from megatron_rl.errors import ConfigError
from megatron_rl.files.settings_file import read_settings_file
from megatron_rl.hosts import prime_rl, prime_rl_loss
from megatron_rl.hosts.door_line import judge
from megatron_rl.hosts.door_settings import losses
from megatron_rl.hosts.pydantic_line import read_pydantic_line
from megatron_rl.hosts.settings import UNKNOWN
from megatron_rl.testing.ranks import run_ranks

# Relative. Log-probabilities and advantages are float32 there, with 6e-8 each; the largest error of all cases here is 3e-7.
TOLERANCE = 1e-6
PATH = prime_rl.__name__
CUSTOM = f"rl @ rl.toml --trainer.loss.type custom --trainer.loss.import-path {PATH}."

ranks = pool_of(2, use_megatron=False)


@pytest.fixture(autouse=True)
def prime_modules(request, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    if not any(request.node.iter_markers("host")):
        cases.emulated_prime(monkeypatch)


def too_large(found: dict[str, float]) -> dict[str, float]:
    return {name: error for name, error in found.items() if not error <= TOLERANCE}


# The step


def test_tokens_outside_the_rl_loss_are_of_no_count_and_weights_multiply_tokens():
    """prime-rl prunes samples without an advantage by weights of 0, and other weights scale a token's loss."""
    for case in [RowCase(loss=loss, aggregation=one, sizes=(3, 5)) for loss in LOSSES for one in cases.AGGREGATIONS]:
        samples, log_probs = samples_of(case)
        weights = {1: [0.0, *[0.5] * (len(samples[1].loss_mask) - 1)], 3: [0.0] * len(samples[3].loss_mask)}
        kept = [
            replace(one, loss_mask=[int(bit and weight != 0) for bit, weight in zip(one.loss_mask, weights[i], strict=True)])
            if i in weights
            else one
            for i, one in enumerate(samples)
        ]
        factors = [weights.get(i, [1.0] * len(one.loss_mask)) for i, one in enumerate(samples)]
        found = cases.run_step(case, samples, log_probs, weights=weights)
        assert largest_error(found, *cases.truth(case, kept, log_probs, factors)) <= TOLERANCE, case


def corrected_error(case: RowCase, host=None, **settings) -> float:
    """The old policy is the trainer's own, and the correction has the ratio to the sampler's, which is 0.1 lower."""
    samples, log_probs = samples_of(case)
    sampled = [replace(one, old_log_probs=[v - 0.1 for v in row.tolist()]) for one, row in zip(samples, log_probs, strict=True)]
    found = cases.run_step(case, sampled, log_probs, host, **settings)
    on_policy = [replace(one, old_log_probs=row.tolist()) for one, row in zip(samples, log_probs, strict=True)]
    high, is_cut = settings["importance_correction_high"], settings["importance_correction"] != "tis"
    factor = math.exp(0.1) if math.exp(0.1) <= high else 0.0 if is_cut else high
    factors = [[factor] * len(one.loss_mask) for one in samples]
    loss, gradients = cases.truth(case, on_policy, log_probs, factors)
    return largest_error(found, loss, gradients) if factor else max(float(one.abs().max()) for one in found.gradients)


CORRECTIONS = [
    {"importance_correction": "tis", "importance_correction_high": 1.05},
    {"importance_correction": "tis", "importance_correction_high": 2},
    {"importance_correction": "icepop", "importance_correction_low": 0.5, "importance_correction_high": 1.05},
    {"importance_correction": "tis", "importance_correction_level": "sequence_mean", "importance_correction_high": 2},
]


@pytest.mark.parametrize("settings", CORRECTIONS, ids=str)
def test_beside_a_correction_the_ratio_to_the_sampler_is_the_corrections(settings):
    for loss in LOSSES:
        for one in cases.AGGREGATIONS:
            case = RowCase(loss=loss, aggregation=one, dp=2, sizes=(2, 5), num_samples=14)
            assert corrected_error(case, **settings) <= TOLERANCE, case


def count_on_two_ranks(rank: int) -> tuple[int, int]:
    mask = torch.ones(1, 4, dtype=torch.bool)
    rows = [{"loss_mask": mask, "rl_weights": None, "sequence_lengths": [1, 3]}]
    rows += [{"loss_mask": mask & False, "rl_weights": None, "sequence_lengths": [4]}] * (1 + rank)
    rows += [{"loss_mask": mask, "rl_weights": torch.tensor([[0.0, 0.0, 2.0, 1.0]]), "sequence_lengths": [2, 2]}] * rank
    totals = prime_rl_loss.totals_of(rows)
    return totals.num_samples, totals.num_tokens


def test_ranks_count_the_step_together_and_fillers_count_nothing(ranks):
    """Rank 0 has samples of 1 and 3 tokens; rank 1 these and one of 2 tokens, whose neighbour has left the rl loss."""
    assert ranks.run(count_on_two_ranks) == [(5, 10)] * 2


def test_a_step_without_our_tokens_has_a_gradient_of_zero():
    case = RowCase(loss="gspo", aggregation="sample_mean", num_samples=4, sizes=(2,))
    samples, log_probs = samples_of(case)
    empty = [replace(one, loss_mask=[0] * len(one.loss_mask)) for one in samples]
    found = cases.run_step(case, empty, log_probs)
    assert found.loss == 0 and not any(one.any() for one in found.gradients)


def test_two_trainers_of_a_process_share_nothing():
    first, second = prime_rl.sample_mean, prime_rl.sample_mean
    data = import_module(prime_rl.BATCHES)
    mask = torch.ones(1, 2, dtype=torch.bool)
    data.DataLoader([{"loss_mask": mask, "rl_weights": None, "sequence_lengths": [1, 1]}]).get_batch()
    assert first.totals is None and second.totals.num_samples == 2


def test_nobody_counts_under_token_mean():
    data = import_module(prime_rl.BATCHES)
    before = data.DataLoader.get_batch
    assert prime_rl.token_mean.totals is None and data.DataLoader.get_batch is before


# Refusals


@pytest.mark.parametrize(
    ("aggregation", "kwargs", "message"),
    [
        ("token_mean", {}, "policy_loss=None: it is not a loss of megatron_rl; choose one"),
        ("token_mean", {"policy_loss": "gpso"}, "there is no such loss; did you mean gspo"),
        ("token_mean", {"policy_loss": "gspo", "clip_ratio_hi": 0.1}, "did you mean trainer.loss.kwargs.clip_ratio_high"),
        ("token_mean", {"policy_loss": "gspo", "clip_ratio_low": True}, "is a switch, and must be a number"),
        ("token_mean", {"policy_loss": "gspo", "clip_ratio_low": "true"}, "is a switch, and must be a number"),
        ("token_mean", {"policy_loss": "grpo", "kl_coefficient": 0.1}, "kl_coefficient=0.1 has no effect"),
    ],
)
def test_kwargs_that_are_not_honoured_are_refused(aggregation, kwargs, message):
    case = RowCase(loss="grpo", aggregation=aggregation, num_samples=4)
    host = cases.EmulatedPrime()
    loss = host.setup(f"{PATH}.{aggregation}", kwargs)
    row = host.packed(case, cases.rollouts_of(samples_of(case)[0], "grpo", {}))[0][0]
    with pytest.raises(ConfigError, match=message):
        cases.call(host, row, cases.row_of(row, samples_of(case)[1], 0, 1).float(), loss, 1, None)


def test_text_of_the_launch_line_is_a_number():
    case = RowCase(loss="grpo", aggregation="constant", sizes=(3, 5))
    step = samples_of(case)
    typed = {"clip_ratio_low": "0.15", "clip_ratio_high": "2.5e-1", "loss_aggregation_divisor": "48"}
    assert cases.run_step(case, *step, **typed).loss == cases.run_step(case, *step).loss


def test_prompt_mean_is_refused_with_the_reason():
    with pytest.raises(AttributeError, match="no prompt_mean: prompt groups end in prime-rl's orchestrator"):
        _ = prime_rl.prompt_mean


def test_a_launch_line_with_problems_ends_in_the_trainer_before_its_first_batch(tmp_path, monkeypatch):
    (tmp_path / "trainer.json").write_text(
        f'{{"loss": {{"type": "custom", "import_path": "{PATH}.token_mean", "kwargs": {{"policy_loss": "gspoo"}}}}}}'
    )
    monkeypatch.setattr(sys, "argv", ["train.py", "@", str(tmp_path / "trainer.json")])
    with pytest.raises(ConfigError, match="gspoo"):
        _ = prime_rl.token_mean


def test_another_prime_rl_is_named(monkeypatch):
    module = import_module(prime_rl.LOSSES)
    monkeypatch.delattr(module, "LossOutputs")
    with pytest.raises(ConfigError, match=r"prime_rl.trainer.rl.loss has no LossOutputs.*559b44772"):
        _ = prime_rl.token_mean


# Launch lines


def judged(words: str | list[str], **files: dict) -> tuple[list[str], str]:
    """(problems as subject: text, what else is said). files: by the name before .toml."""

    def read_file(path: Path) -> dict:
        if path.stem not in files:
            raise ConfigError(f"{path} is no file here")
        return files[path.stem]

    words = words.split() if isinstance(words, str) else words
    rows = list(judge(prime_rl.DOOR, words, read_file))
    return [f"{row.subject}: {row.text}" for row in rows if row.is_wrong], " ".join(row.text for row in rows if not row.is_wrong)


ONE_ROW = "--trainer.loss.kwargs.one-sample-per-rollout True"
KWARGS = {"policy_loss": "gspo", "one_sample_per_rollout": True}
OURS = {"trainer": {"loss": {"type": "custom", "import_path": f"{PATH}.sample_mean", "kwargs": KWARGS}}}


def test_right_lines_are_right():
    for words, files in (
        ("uv run rl @ rl.toml", {"rl": OURS}),
        ("uv run rl --trainer @ t.toml", {"t": OURS["trainer"]}),
        ("trainer @ t.toml", {"t": OURS["trainer"]}),
        ("torchrun --nproc-per-node 2 -m prime_rl.trainer.rl.train @ t.json", {"t": OURS["trainer"]}),
        (f"{CUSTOM}sample_mean --trainer.loss.kwargs.policy-loss gspo {ONE_ROW}", {"rl": {}}),
        ([*f"{CUSTOM}sample_mean --trainer.loss.kwargs".split(), json.dumps(KWARGS)], {"rl": {}}),
    ):
        problems, said = judged(words, **files)
        assert not problems and "gspo.sample_mean, clip 0.0003/0.0004" in said, words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{CUSTOM}tokenmean --trainer.loss.kwargs.policy-loss gspo", "ours are .*prime_rl.token_mean"),
        (f"{CUSTOM}prompt_mean --trainer.loss.kwargs.policy-loss gspo", "prompt groups end in prime-rl's orchestrator"),
        ("rl @ rl.toml --trainer.loss.import-path megatron_rl.hosts.prim_rl.x --trainer.loss.kwargs.policy-loss gspo", "ours are"),
        (f"{CUSTOM}token_mean --trainer.loss.kwargs.policy-loss gspo --trainer.loss.kl-tau 0", "our losses do not read it; remove"),
        (f"{CUSTOM}token_mean --trainer.loss.kwargs.policy-loss gspo --trainer.loss.typ custom", "did you mean trainer.loss.type"),
        (f"{CUSTOM}token_mean --trainer.loss.kwargs.policy-loss gspo --trainer.los.type x", "did you mean trainer.loss.type"),
        (f"{CUSTOM}token_mean --trainer.loss.kwargs gspo", "it is a group of settings, and prime-rl takes no gspo"),
        (f"{CUSTOM}token_mean --trainer.loss.kwargs.policy-loss=gspo", "prime-rl takes no = here"),
        (f"rl @ rl.toml --trainer.loss.import-path {PATH}.token_mean --trainer.loss.kwargs.policy-loss gspo", "type=custom"),
        (f"{CUSTOM}token_mean --trainer.loss.kwargs.policy-loss gspo --orchestrator.algo.type opd", "go to prime-rl's ref_kl loss"),
        (
            f"{CUSTOM}sample_mean --trainer.loss.kwargs.policy-loss gspo",
            f"may come in several rows .a trace of several branches.*If each has one row, type {ONE_ROW}; else choose token_mean",
        ),
        (
            f"{CUSTOM}token_mean --trainer.loss.kwargs.policy-loss gspo {ONE_ROW}",
            "one_sample_per_rollout=true has no effect: token_mean counts no rollouts; remove it",
        ),
        ("rl @ nope.toml", "nope.toml is no file here"),
    ],
)
def test_wrong_lines_are_refused_by_name(words, message):
    with pytest.raises(AssertionError, match=message):
        problems, _ = judged(words, rl={})
        assert not problems, "\n".join(problems)


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 50), ("min_p", 0.1)])
def test_a_sampler_that_keeps_a_part_is_refused_beside_any_loss(name, value):
    body = {"sampling": {"extra_body": {name: value}}}
    for train in (body, {"source": [{}, body]}):
        problems, _ = judged("rl @ rl.toml", rl=OURS | {"orchestrator": {"train": train}})
        assert len(problems) == 1 and f"extra_body.{name}={value} beside" in problems[0]
    raw = {"inference": {"vllm": {"logprobs_mode": "raw_logprobs"}}}
    problems, said = judged("rl @ rl.toml", rl=OURS | {"orchestrator": {"train": body}} | raw)
    assert not problems and "keeps a part of the vocabulary" in said


def test_its_own_names_have_the_trainer_score_among_the_samplers_sets():
    """Then both scores are of one kind; a penalty, a draft or raw scores still are not."""

    def problems_of(sampling, vllm=None):
        files = {"orchestrator": {"train": {"sampling": sampling}}, "inference": {"vllm": vllm or {}}}
        return judged("rl @ rl.toml", rl=OURS | files)[0]

    assert problems_of({"top_p": 0.9, "top_k": 20}) == problems_of({"top_k": 20}) == problems_of({"top_p": 1.0}) == []
    name = "orchestrator.train.sampling."
    for sampling, vllm, message in (
        ({"extra_body": {"repetition_penalty": 1.1}}, {}, f"{name}extra_body.repetition_penalty=1.1 with {name}top_p=0.9: "),
        ({}, {"speculative_config": "{}"}, f"inference.vllm.speculative_config=.* with {name}top_p=0.9: .* of a draft"),
        ({}, {"logprobs_mode": "raw_logprobs"}, f"{name}top_p=0.9 beside .*set inference.vllm.logprobs_mode=processed_logp"),
    ):
        [problem] = problems_of({"top_p": 0.9} | sampling, vllm)
        assert re.search(message, problem), problem
    [problem] = problems_of({"extra_body": {"top_p": 0.9}})
    assert f"add {name}top_p and top_k in the place of extra_body's (in releases that have it), or set" in problem


def test_of_several_sources_one_that_has_our_loss_is_enough():
    of_kinds = [{"algo": {"type": "sft"}}, {}]
    for sources, is_refused in ((of_kinds, False), (of_kinds[:1], True)):
        problems, _ = judged("rl @ rl.toml", rl=OURS | {"orchestrator": {"train": {"source": sources}}})
        assert bool(problems) == is_refused


def test_what_the_shell_knows_is_not_judged():
    for words in ("rl @ $CONFIG", f"{CUSTOM}token_mean --trainer.loss.kwargs $KWARGS"):
        problems, said = judged(words, rl={})
        assert not problems and "not known here" in said


def test_a_line_without_ours_is_no_problem():
    problems, said = judged("rl @ rl.toml", rl={})
    assert not problems and "none of our losses is chosen" in said


def test_the_line_is_read_as_pydantic_config_reads_it():
    """Checked by hand against prime-pydantic-config 0.4.3."""
    files = {"a": {"x": {"y": 1, "w": 2}}, "t": {"lr": 1}, "b": {"x": {"y": 5}}, "x": {"w": 9}}
    files_first = "--x @ x.toml --t @ t.toml @ a.toml @ b.toml"
    line = files_first + ' --x.w-z 3 --no-clean --deep --eq=7 --none None --list [1,2] --json {"a":1} --of $V'
    found, unknown = read_pydantic_line([*line.split(), "@", "$F"], lambda path: files[path.stem])
    assert found == {
        **{"x": {"y": 5, "w": 9, "w_z": 3}, "t": {"lr": 1}, "clean": False, "deep": True, "eq": 7, "none": None},
        **{"list": [1, 2], "json": {"a": 1}, "of": UNKNOWN},
    }
    assert unknown == ["$F"]


# The checkout


def in_the_checkout(work) -> None:
    """In a process of its own: the checkout stays importable there."""
    code, out, error = forked(lambda: work() or 0)
    assert code == 0, out + error


@pytest.mark.host("PRIME_RL_ROOT")
def test_the_checkout_has_the_contract_and_our_names_of_its_settings():
    def work() -> None:
        configs = PRIME_RL.load("prime_rl.configs.trainer")
        assert not [*prime_rl.DOOR.contract_problems()]
        theirs = {name for kind in ("Default", "IPO", "Custom") for name in getattr(configs, f"{kind}LossConfig").__annotations__}
        table = [one.name.removeprefix(prime_rl.LOSS) for one in prime_rl.DOOR.settings]
        assert {name for name in table if "." not in name} == theirs
        algorithms = PRIME_RL.load("prime_rl.configs.algorithm")
        kinds = {name: kind for name in vars(algorithms) if (kind := getattr(getattr(algorithms, name), "type", None))}
        routed = {kinds[name]: getattr(algorithms, name).action_loss_type for name in kinds if name.endswith("AlgoConfig")}
        assert {kind: loss for kind, loss in routed.items() if loss != "rl"} == prime_rl.OTHER_LOSSES

    in_the_checkout(work)


@pytest.mark.host("PRIME_RL_ROOT")
@pytest.mark.parametrize("row_length", [40, 64, 1000])
def test_the_step_of_the_checkout_is_exact(row_length):
    """Its own packing into rows of this length, its own loader, sum of samples and corrections' neighbours."""

    def work() -> None:
        host = cases.RealPrime(PRIME_RL.load, row_length)
        names = losses(prime_rl.DOOR) if row_length == 64 else LOSSES
        found = {str(case): cases.error_of(case, host) for case in cases.matrix(names)}
        assert len(found) == 18 * len(names) and not too_large(found), too_large(found)
        for settings in CORRECTIONS:
            for one in cases.AGGREGATIONS:
                case = RowCase(loss="grpo", aggregation=one, dp=2, cp=2, sizes=(2, 5), num_samples=14)
                assert corrected_error(case, host, **settings) <= TOLERANCE, (case, settings)

    in_the_checkout(work)


@pytest.mark.host("PRIME_RL_ROOT")
def test_the_gather_of_the_checkout_adds_equal_gradients():
    assert run_ranks(gathered_gradient, 2, use_megatron=False) == [[2.0, 2.0, 2.0]] * 2


def gathered_gradient(rank: int) -> list[float]:
    parts = torch.ones(1, 3, requires_grad=True)
    cp = PRIME_RL.load("prime_rl.utils.cp")
    cp.gather_for_cp(parts, torch.distributed.group.WORLD).sum().backward()
    return parts.grad[0].tolist()


# Files of settings


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "a = " + "[" * 20000, "a.toml is no TOML"),
        ("a.toml", "a." * 100_000 + "b = 1", "a key of more than 64 parts"),
        ("a.toml", "a = 0x" + "f" * 100_000, "more than 64 bits"),
        ("a.toml", "a = 1\n" * 2, "Cannot overwrite a value"),
        ("a.toml", "# " + "x" * 2**18, "at most 262144 are read"),
        ("a.toml", "a." * 70 + "b = 1", "a key of more than 64 parts"),
        ("a.json", '{"a": 1, "a": 2}', "stands twice"),
        ("a.json", "[1]", "holds list: it must be key: value lines"),
        ("a.toml", None, "a.toml is no file here"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_settings_file(tmp_path / name)


def test_a_file_is_read_by_its_suffix(tmp_path):
    for name, text in (("a.toml", "[a]\nb = 1"), ("a.json", '{"a": {"b": 1}}'), ("a.yaml", "a: {b: 1}")):
        (tmp_path / name).write_text(text)
        assert read_settings_file(tmp_path / name) == {"a": {"b": 1}}


def test_the_example_is_right():
    example = ROOT / "examples" / "prime_rl" / "gspo_sample_mean.toml"
    problems, said = judged("uv run rl @ loss.toml", loss=read_settings_file(example))
    assert not problems and "gspo.sample_mean, clip 0.0003/0.0004, weight" in said
