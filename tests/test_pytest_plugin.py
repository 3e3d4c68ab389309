"""The plugin that pytest loads by entry point: costs nothing unused, and holds anybody's loss against itself over layouts."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_setup import described  # noqa: F401  (a fixture)

from megatron_rl import grpo_loss, gspo_loss, sample_token_weights, vocab_parallel_log_probs
from megatron_rl.aggregation import StepTotals
from megatron_rl.errors import ConfigError
from megatron_rl.testing import loss_property
from megatron_rl.testing.invariance import Layout
from megatron_rl.testing.loss_property import LAYOUTS
from megatron_rl.testing.ranks import RankPool
from megatron_rl.testing.reference import ragged_samples

ROOT = Path(__file__).resolve().parent.parent
PLUGIN = ("-p", "pytest_megatron_rl")


@pytest.fixture(scope="module")
def pool():
    with RankPool(4, use_megatron=False) as ranks:
        yield ranks


# Losses


def our_loss(loss, aggregation: str):
    def of_batch(logits, batch):
        totals = StepTotals(batch.num_samples, batch.num_prompts, batch.num_tokens)
        counts = {"prompt_token_counts": batch.prompt_token_counts, "divisor": 48.0 if aggregation == "constant" else None}
        weights = sample_token_weights(aggregation, batch.token_counts, totals, **counts)
        return loss(
            logits,
            batch.labels,
            batch.old_log_probs,
            batch.advantages,
            batch.loss_mask,
            batch.cu_seqlens,
            weights,
            token_counts=batch.token_counts,
            tp_group=batch.tp_group,
            cp_group=batch.cp_group,
            advantages_per="sample",
        ).loss

    return of_batch


@pytest.mark.parametrize(("loss", "aggregation"), [(gspo_loss, "prompt_mean"), (grpo_loss, "constant"), (gspo_loss, "token_mean")])
def test_the_losses_of_the_package_hold_on_every_layout(pool, loss, aggregation):
    """FB-14, FB-21, FB-25: the same property that another framework would run on its own."""
    loss_property.assert_layout_invariant(pool, our_loss(loss, aggregation), tolerance=1e-6)


def values(logits, batch):
    return torch.where(batch.loss_mask, torch.log_softmax(logits, -1).gather(1, batch.labels[:, None])[:, 0], 0.0)


def summed(logits, batch):
    return values(logits, batch).sum() / batch.num_tokens


def divided_by_cp(logits, batch):
    return summed(logits, batch) / batch.cp_group.size()


def mean_of_the_batch(logits, batch):
    return values(logits, batch).sum() / batch.loss_mask.sum().clamp(min=1)


def of_one_shard(logits, batch):
    return torch.where(batch.loss_mask, torch.log_softmax(logits, -1)[:, 0], 0.0).sum() / batch.num_tokens


def for_a_mean(logits, batch):
    parts = batch.num_microbatches * batch.dp_group.size() * batch.cp_group.size()
    return summed(logits, batch) * parts


def twice_for_a_mean(logits, batch):
    return for_a_mean(logits, batch) * batch.num_microbatches * batch.dp_group.size()


def test_a_sum_by_the_steps_count_passes_and_so_does_its_form_for_a_mean(pool):
    layouts = [layout for layout in LAYOUTS if layout.tensor == 1]
    loss_property.assert_layout_invariant(pool, summed, layouts=layouts)
    loss_property.assert_layout_invariant(pool, for_a_mean, layouts=layouts, reduction="mean")


WRONG = [
    pytest.param(divided_by_cp, Layout(context=2), "sum", r"CP2, M1: gradient is 0\.5 of one process's = 1/cp", id="FB-21 1/cp"),
    pytest.param(
        summed, Layout(num_microbatches=3), "mean", r"M3: gradient is 0\.333333 of one process's = 1/micro-batches", id="FB-01 1/M"
    ),
    pytest.param(summed, Layout(data=2), "mean", r"DP2, M1: gradient is 0\.5 of one process's = 1/dp", id="FB-03 1/dp"),
    pytest.param(for_a_mean, Layout(data=2, context=2), "sum", r"gradient is 4 of one process's = dp x cp", id="FB-03 dp x cp"),
    pytest.param(mean_of_the_batch, Layout(data=2), "mean", "gradient is no multiple of one process's", id="FB-02 a local mean"),
    pytest.param(of_one_shard, Layout(tensor=2), "sum", "TP2, M1: gradient is no multiple", id="a softmax of one shard"),
]


@pytest.mark.parametrize(("loss", "layout", "reduction", "message"), WRONG)
def test_a_loss_that_depends_on_the_layout_fails_with_the_layout_and_the_factor(pool, loss, layout, reduction, message):
    with pytest.raises(AssertionError, match=message) as caught:
        loss_property.assert_layout_invariant(pool, loss, layouts=[layout], reduction=reduction)
    assert str(caught.value).startswith("the gradient depends on the layout:\n  ")


def test_every_wrong_layout_is_listed(pool):
    with pytest.raises(AssertionError) as caught:
        loss_property.assert_layout_invariant(pool, divided_by_cp, layouts=[Layout(context=2), Layout(data=2), Layout(context=4)])
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == ["CP2, M1", "CP4, M1"]


def constant(logits, batch):
    return torch.zeros(())


def vector(logits, batch):
    return logits.sum(-1)


def raising(logits, batch):
    raise ValueError("my own mistake")


def zero(logits, batch):
    return (logits * 0).sum()


def not_finite(logits, batch):
    return (logits * math.inf).sum()


def a_tuple(logits, batch):
    return summed(logits, batch), {"entropy": 1.0}


def number(logits, batch):
    return summed(logits, batch).item()


def dying(logits, batch):
    os._exit(7)


def drawing(logits, batch):
    return (values(logits, batch) * torch.rand(len(batch.labels))).sum()


class Remembering:
    num_calls = 0

    def __call__(self, logits, batch):
        self.num_calls += 1
        return summed(logits, batch) * self.num_calls


def hanging(logits, batch):
    if batch.dp_group.size() > 1:
        time.sleep(60)
    return summed(logits, batch)


def unmasked(logits, batch):
    return torch.log_softmax(logits, -1)[:, 0].sum() / batch.num_tokens


def rounded(logits, batch):
    return summed(logits, batch) * (1 + 2e-3 * batch.dp_group.rank())


def in_place(logits, batch):
    logits /= 0.7
    return summed(logits, batch)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (constant, "the loss does not depend on the logits: it was detached, or made of numbers; there is nothing to compare"),
        (zero, "on one process the gradient by the logits is 0: there is nothing to compare"),
        (not_finite, r"on one process \d+ values of the gradient by the logits are not finite"),
        (vector, r"rank 0 raises TypeError: the loss returned a tensor of shape \[269\]: a 0-d tensor is wanted$"),
        (
            a_tuple,
            r"the loss returned tuple: a 0-d tensor is wanted; take its loss: lambda logits, batch: loss\(logits, batch\)\[0\]$",
        ),
        (number, "the loss returned float: a 0-d tensor is wanted$"),
        (dying, "on one process with one micro-batch: rank 0 ended without an answer, exit code 7$"),
        (drawing, "two calls with the same batch give two gradients: the loss draws random numbers or keeps something"),
        (Remembering(), "two calls with the same batch give two gradients"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__),
)
def test_a_loss_that_cannot_be_compared_says_so(loss, message):
    with RankPool(1, use_megatron=False) as one, pytest.raises(AssertionError, match=message):
        loss_property.assert_layout_invariant(one, loss, layouts=[Layout(num_microbatches=2)])


def test_what_a_loss_raises_is_shown_from_the_loss_on():
    """Not the pool's own frames, nor those of every rank."""
    with RankPool(1, use_megatron=False) as one, pytest.raises(AssertionError) as caught:
        loss_property.assert_layout_invariant(one, raising)
    first, second, *_, last = str(caught.value).splitlines()
    assert first == "on one process with one micro-batch: rank 0 raises ValueError: my own mistake"
    assert re.search(r'File ".*test_pytest_plugin.py", line \d+, in raising', second) and last == "ValueError: my own mistake"


def test_a_loss_that_raises_on_some_layouts_is_compared_on_the_others(pool):
    """A softmax over the columns of one shard is the first thing that a foreign loss meets."""
    layouts = [Layout(tensor=2), Layout(data=2), Layout(context=2)]
    with pytest.raises(AssertionError) as caught:
        loss_property.assert_layout_invariant(pool, divided_by_cp, layouts=layouts)
    title, of_shards, of_slices, *frames = str(caught.value).splitlines()
    assert "TP2, M1: rank" in of_shards and "raises RuntimeError: index" in of_shards
    assert of_shards.endswith(
        "(each rank has 32 of 64 columns, from batch.vocab_start; a loss that needs all: whole_vocabulary=True)"
    )
    assert of_slices.startswith("  CP2, M1: gradient is 0.5 of one process's = 1/cp") and "in divided_by_cp" in frames[0]
    loss_property.assert_layout_invariant(pool, summed, layouts=[*layouts, Layout(tensor=4)], whole_vocabulary=True)


def test_a_loss_that_hangs_is_told_and_ends_the_test():
    with RankPool(2, use_megatron=False, timeout=1.0) as two, pytest.raises(AssertionError) as caught:
        loss_property.assert_layout_invariant(two, hanging, layouts=[Layout(data=2), Layout(context=2), Layout(num_microbatches=3)])
    said = str(caught.value)
    assert "DP2, M1: rank 0 gave no answer within 1 s; it was here:\n  and no other layout was tried after that\n" in said
    assert "in hanging" in said and "rank_process" not in said


def test_padding_that_trains_is_told(pool):
    """A loss that ignores the mask adds up alike on any layout; how much padding there is differs."""
    with pytest.raises(AssertionError) as caught:
        loss_property.assert_layout_invariant(pool, unmasked, layouts=[Layout(data=2), Layout(context=2)])
    assert str(caught.value).splitlines()[1:] == [
        "  CP2, M1: padding has a gradient, and how much there is depends on the layout: mask it by batch.loss_mask"
    ]


def test_means_that_are_added_are_told_from_other_faults(pool):
    layouts = [Layout(data=2), Layout(num_microbatches=3)]
    with pytest.raises(AssertionError, match="each part seems to return its own mean: reduction='mean' averages"):
        loss_property.assert_layout_invariant(pool, mean_of_the_batch, layouts=layouts)
    with pytest.raises(AssertionError) as caught:
        loss_property.assert_layout_invariant(pool, mean_of_the_batch, layouts=layouts, reduction="mean")
    assert "its own mean" not in str(caught.value)
    with pytest.raises(AssertionError) as caught:  # a factor too many, under the mean already
        loss_property.assert_layout_invariant(pool, twice_for_a_mean, layouts=layouts, reduction="mean")
    assert "its own mean" not in str(caught.value)


def test_rounding_is_told_from_a_wrong_weight(pool):
    """0.5 in bfloat16 is exact: the sum of a rank is rounded, and only that."""
    with pytest.raises(AssertionError, match=r"DP2, M1: gradient is off by \de-0\d, as by rounding to 16 bits: compute in float32"):
        loss_property.assert_layout_invariant(pool, rounded, layouts=[Layout(data=2)])
    loss_property.assert_layout_invariant(pool, rounded, layouts=[Layout(data=2)], tolerance=1e-2)


def test_a_loss_may_change_the_logits_in_place(pool):
    """As losses do with a temperature: what a model returns is no leaf."""
    loss_property.assert_layout_invariant(pool, in_place, layouts=[Layout(data=2)])


def test_layouts_that_a_loss_cannot_see_are_refused(pool):
    with pytest.raises(ConfigError, match="pipeline has no effect on a loss of logits"):
        loss_property.assert_layout_invariant(pool, summed, layouts=[Layout(pipeline=2)])
    with pytest.raises(ConfigError, match="vocab_size=63 must be a multiple of tensor=2"):
        loss_property.assert_layout_invariant(pool, summed, layouts=[Layout(tensor=2)], vocab_size=63)
    with pytest.raises(ConfigError, match="layouts is empty"):
        loss_property.assert_layout_invariant(pool, summed, layouts=filter(None, []))
    with pytest.raises(ConfigError, match="reduction='max'"):
        loss_property.assert_layout_invariant(pool, summed, reduction="max")


def test_an_empty_micro_batch_is_part_of_the_property(pool):
    """Three samples over DP2 x M2: one rank has a micro-batch of none."""
    samples = [replace(sample, prompt_id="a") for sample in ragged_samples(vocab_size=64)[:3]]
    loss_property.assert_layout_invariant(pool, summed, layouts=[Layout(data=2, num_microbatches=2)], samples=samples)


# The plugin


def by_parallel_state(logits, batch):
    return vocab_parallel_log_probs(logits, batch.labels, loss_mask=batch.loss_mask).sum() / batch.num_tokens


@pytest.mark.megatron
def test_a_loss_may_read_its_groups_from_parallel_state(assert_layout_invariant):  # noqa: F811
    layouts = [Layout(tensor=2), Layout(tensor=2, context=2)]
    assert_layout_invariant(by_parallel_state, layouts=layouts, use_megatron=True)
    with pytest.raises(AssertionError):  # without it each shard is taken for the whole vocabulary
        assert_layout_invariant(by_parallel_state, layouts=layouts)


@pytest.fixture
def installed(tmp_path):
    """A folder that makes the entry point of setup.py visible, as an installation does."""
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


def test_setup_names_the_plugin_as_its_module(described):  # noqa: F811
    """pytest then knows `-p pytest_megatron_rl` and the entry point for one and the same."""
    assert described["py_modules"] == ["pytest_megatron_rl"]
    assert described["entry_points"]["pytest11"] == ["pytest_megatron_rl = pytest_megatron_rl"]
