"""The plugin that pytest loads by entry point: costs nothing unused, and holds anybody's loss against itself over layouts."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import ROOT, let_time_run_out, pool_of

from megatron_rl import grpo_loss, gspo_loss, sample_token_weights, vocab_parallel_log_probs
from megatron_rl.count import StepTotals
from megatron_rl.errors import ConfigError
from megatron_rl.testing import loss_property
from megatron_rl.testing.invariance import Layout
from megatron_rl.testing.ranks import RankError, RankPool
from megatron_rl.testing.reference import ragged_samples

PLUGIN = ("-p", "pytest_megatron_rl")


pool = pool_of(4, use_megatron=False)


def our_loss(loss, aggregation: str, logits, batch):
    totals = StepTotals(batch.num_samples, batch.num_prompts, batch.num_tokens)
    counts = {"prompt_token_counts": batch.prompt_token_counts, "divisor": 48.0 if aggregation == "constant" else None}
    weights = sample_token_weights(aggregation, batch.token_counts, totals, **counts)
    tensors = (batch.labels, batch.old_log_probs, batch.advantages, batch.loss_mask, batch.cu_seqlens, weights)
    groups = {"token_counts": batch.token_counts, "tp_group": batch.tp_group, "cp_group": batch.cp_group}
    return loss(logits, *tensors, **groups, advantages_per="sample").loss


def values(logits, batch):
    return torch.where(batch.loss_mask, torch.log_softmax(logits, -1).gather(1, batch.labels[:, None])[:, 0], 0.0)


def summed(logits, batch):
    return values(logits, batch).sum() / batch.num_tokens


def divided_by_cp(logits, batch):
    return summed(logits, batch) / batch.cp_group.size()


def for_a_mean(logits, batch):
    return summed(logits, batch) * batch.num_microbatches * batch.dp_group.size() * batch.cp_group.size()


def mean_of_the_batch(logits, batch):
    return values(logits, batch).sum() / batch.loss_mask.sum().clamp(min=1)


def foreign(kind, logits, batch):
    """Losses as others write them, by what is wrong or particular with them."""
    if kind == "a softmax of one shard":
        return torch.where(batch.loss_mask, torch.log_softmax(logits, -1)[:, 0], 0.0).sum() / batch.num_tokens
    if kind == "unmasked":
        return torch.log_softmax(logits, -1)[:, 0].sum() / batch.num_tokens
    if kind == "in place":
        logits /= 0.7
    return {
        "constant": lambda: torch.zeros(()),
        "vector": lambda: logits.sum(-1),
        "draws": lambda: (values(logits, batch) * torch.rand(len(batch.labels))).sum(),
        "by parallel state": lambda: (
            vocab_parallel_log_probs(logits, batch.labels, loss_mask=batch.loss_mask).sum() / batch.num_tokens
        ),
    }.get(kind, lambda: summed(logits, batch))()


def hangs(folder, logits, batch):
    if batch.dp_group.size() > 1:
        (folder / str(batch.dp_group.rank())).touch()
        time.sleep(1000)
    return summed(logits, batch)


def is_invariant(pool, loss, *layouts: Layout, **settings) -> None:
    settings |= {"layouts": layouts} if layouts else {}
    loss_property.assert_layout_invariant(pool, partial(foreign, loss) if isinstance(loss, str) else loss, **settings)


def refusal(pool, loss, *layouts: Layout, **settings) -> str:
    with pytest.raises(AssertionError) as caught:
        is_invariant(pool, loss, *layouts, **settings)
    return str(caught.value)


DP2, CP2, TP2, M3 = Layout(data=2), Layout(context=2), Layout(tensor=2), Layout(num_microbatches=3)
OTHERS = (Layout(data=2, num_microbatches=3), Layout(data=2, context=2))


def test_the_losses_of_the_package_and_a_sum_by_the_steps_count_hold(pool):
    """FB-21, FB-25: the same property that another framework would run on its own. An empty micro-batch is part of it: three
    samples over DP2 x M2. A loss may change the logits in place, as with a temperature: what a model returns is no leaf."""
    is_invariant(pool, partial(our_loss, gspo_loss, "prompt_mean"), tolerance=1e-6)
    is_invariant(pool, partial(our_loss, grpo_loss, "constant"), TP2, Layout(tensor=2, context=2), *OTHERS, tolerance=1e-6)
    is_invariant(pool, summed, *OTHERS)
    is_invariant(pool, for_a_mean, *OTHERS, reduction="mean")
    samples = [replace(sample, prompt_id="a") for sample in ragged_samples(vocab_size=64)[:3]]
    is_invariant(pool, "in place", Layout(data=2, num_microbatches=2), samples=samples)


WRONG = [
    pytest.param(divided_by_cp, CP2, "sum", r"CP2, M1: gradient is 0\.5 of one process's = 1/cp", id="FB-21 1/cp"),
    pytest.param(summed, M3, "mean", r"M3: gradient is 0\.333333 of one process's = 1/micro-batches", id="FB-01 1/M"),
    pytest.param(summed, DP2, "mean", r"DP2, M1: gradient is 0\.5 of one process's = 1/dp", id="FB-03 1/dp"),
    pytest.param(for_a_mean, OTHERS[1], "sum", r"gradient is 4 of one process's = dp x cp", id="FB-03 dp x cp"),
    pytest.param(mean_of_the_batch, DP2, "mean", "gradient is no multiple of one process's", id="FB-02 a local mean"),
    pytest.param("a softmax of one shard", TP2, "sum", "TP2, M1: gradient is no multiple", id="a softmax of one shard"),
]


@pytest.mark.parametrize(("loss", "layout", "reduction", "message"), WRONG)
def test_a_loss_that_depends_on_the_layout_fails_with_the_layout_and_the_factor(pool, loss, layout, reduction, message):
    said = refusal(pool, loss, layout, reduction=reduction)
    assert said.startswith("the gradient depends on the layout:\n  ") and re.search(message, said)


def raising(logits, batch):
    raise ValueError("my own mistake")


NO_LOSSES = [
    ("constant", "on one process the gradient by the logits is 0 or not finite: there is nothing to compare"),
    ("draws", "M2: gradient is no multiple of one process's"),
]


@pytest.mark.parametrize(("loss", "message"), NO_LOSSES)
def test_a_loss_that_cannot_be_compared_says_so(pool, loss, message):
    assert re.search(message, refusal(pool, loss, Layout(num_microbatches=2)))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (raising, "rank 0: Traceback .*, in raising\n.*ValueError: my own mistake$"),
        ("vector", "grad can be implicitly created only for scalar outputs"),
    ],
)
def test_what_a_loss_raises_on_one_process_is_shown(pool, loss, message):
    with pytest.raises(RankError) as caught:
        is_invariant(pool, loss)
    assert re.search(message, str(caught.value), re.DOTALL)


def test_a_loss_that_raises_on_a_layout_is_told_after_the_layouts_before_it(pool):
    """A softmax over the columns of one shard is the first thing that a foreign loss meets. Every wrong layout is listed."""
    said = refusal(pool, divided_by_cp, DP2, CP2, Layout(context=4), TP2, CP2)
    title, of_slices, of_more_slices, of_shards, *_ = said.splitlines()
    assert of_slices.startswith("  CP2, M1: gradient is 0.5 of one process's = 1/cp") and of_more_slices.startswith("  CP4, M1: ")
    assert of_shards.startswith("  TP2, M1: rank") and "RuntimeError: index" in said and ", in divided_by_cp" in said
    is_invariant(pool, summed, TP2, DP2, CP2, Layout(tensor=4), whole_vocabulary=True)


def test_a_loss_that_hangs_is_told_and_ends_the_test(monkeypatch, tmp_path):
    let_time_run_out(monkeypatch, 2, lambda: len([*tmp_path.iterdir()]) == 2)
    with RankPool(2, use_megatron=False) as two:
        said = refusal(two, partial(hangs, tmp_path), DP2, CP2, M3)
    assert "DP2, M1: rank 0: gave no answer in time; it was here:\n" in said and "CP2" not in said
    assert "in hangs" in said


def test_padding_that_trains_is_told(pool):
    assert refusal(pool, "unmasked", DP2, CP2).splitlines()[1:] == ["  CP2, M1: padding has a gradient: mask it by batch.loss_mask"]


def test_nothing_to_compare_and_an_unknown_reduction_are_refused(pool):
    for settings, message in (
        ({"layouts": [TP2], "whole_vocabulary": True}, "with 0 layouts: give .* at least one layout"),
        ({"reduction": "max"}, "reduction='max' with 8 layouts: give sum or mean"),
    ):
        with pytest.raises(ConfigError, match=message):
            is_invariant(pool, summed, **settings)


@pytest.mark.megatron
def test_a_loss_may_read_its_groups_from_parallel_state(assert_layout_invariant):
    loss, layouts = partial(foreign, "by parallel state"), [TP2, Layout(tensor=2, context=2)]
    assert_layout_invariant(loss, layouts=layouts, use_megatron=True)
    with pytest.raises(AssertionError):  # without it each shard is taken for the whole vocabulary
        assert_layout_invariant(loss, layouts=layouts)


def for_a_mean_over_the_ranks_of_experts(logits, batch):
    """Right where each rank has all experts: the groups are the same then."""
    from megatron.core import parallel_state

    return summed(logits, batch) * batch.num_microbatches * parallel_state.get_expert_data_parallel_world_size()


@pytest.mark.megatron
def test_a_loss_may_not_take_the_ranks_of_experts_for_its_own(assert_layout_invariant):
    """FB-106: with expert sizes parallel_state has groups for them, and the message names the factor."""
    loss, settings = for_a_mean_over_the_ranks_of_experts, {"use_megatron": True, "reduction": "mean"}
    assert_layout_invariant(loss, layouts=[DP2], **settings)
    spread = [Layout(data=2, expert=2), Layout(context=2, data=2, expert=4)]
    assert_layout_invariant(for_a_mean, layouts=spread, **settings)
    with pytest.raises(AssertionError, match=r"DP2xEP2, M1: gradient is 0\.5 of one process's = 1/dp or 1/ep"):
        assert_layout_invariant(loss, layouts=spread[:1], **settings)


@pytest.fixture
def installed(tmp_path):
    """A folder that makes the entry point of pyproject.toml visible, as an installation does."""
    folder = tmp_path / "site"
    metadata = folder / "megatron_rl-0.0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron_rl_under_test\nVersion: 0.0.1\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\npytest_megatron_rl = pytest_megatron_rl\n")
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_other.py").write_text(
        "import sys\ndef test_other(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('pytest_megatron_rl')\n"
        "    assert not {'torch', 'megatron_rl', 'numpy'} & set(sys.modules)\n"
    )
    return folder, tests


@pytest.mark.parametrize("more", [(), PLUGIN], ids=["by entry point", "and by name"])
def test_a_run_that_uses_no_fixture_imports_nothing_heavy(installed, more):
    """Catches an entry point that makes every pytest run of a user's environment import torch; twice named, it is one plugin."""
    folder, tests = installed
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *more, str(tests)]
    environment = {"PYTHONPATH": f"{folder}:{ROOT}", "PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}
    finished = subprocess.run(command, check=False, cwd=tests, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0 and "1 passed" in finished.stdout, finished.stdout + finished.stderr
