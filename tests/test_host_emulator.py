"""The emulated hosts by hand: what they hand to Megatron and report for numbers that fit on paper. No hook of ours takes part."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from host_cases import HostCase, host_args
from host_ranks import make_host

from megatron_rl.hosts.base import host_named
from megatron_rl.layout.groups import ParallelGroups
from megatron_rl.testing.host_emulator import EmulatedHost, EmulatedSample, merge_custom_config
from megatron_rl.testing.host_rank import load_function

HOSTS = pytest.mark.parametrize("host", ["miles", "slime"])


class FakeGroup:
    """A group for arithmetic that launches nothing over it."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def launch(host: str, **options) -> Namespace:
    hooks = {"loss_type": "custom_loss", "custom_loss_function_path": "host_hooks.advantages_alone"}
    return host_args(HostCase(host, "default", "sample_mean", options=tuple({**hooks, **options}.items())))


def two_samples() -> dict:
    """Masks [1, 0, 1] and [0, 0]; the first sample's rollout has 5 unmasked tokens in all, 3 of them in another sample."""
    return {
        "total_lengths": [5, 4],
        "response_lengths": [3, 2],
        "loss_masks": [torch.tensor([1, 0, 1]), torch.tensor([0, 0])],
        "rollout_mask_sums": torch.tensor([5.0, 0.0]),
        "advantages": [torch.tensor([1.0, 100.0, 4.0]), torch.tensor([7.0, 7.0])],
    }


@HOSTS
def test_a_loss_is_scaled_by_micro_batches_rollouts_and_ranks(host):
    """(1 + 4) / 5, times 3 micro-batches / 8 rollouts x 4 ranks; the tuple counts 1 token."""
    emulated, args, batch = EmulatedHost(host_named(host), ParallelGroups(dp_cp=FakeGroup(0, 4))), launch(host), two_samples()
    loss, num_tokens, log = emulated.loss_function(args, batch, torch.zeros(1, 9, 3), num_microbatches=3, num_rollouts=8)
    assert float(loss) == pytest.approx(1.0 * 3 / 8 * 4)
    assert int(num_tokens) == 1
    assert log["keys"] == ["advantages", "samples"]
    assert log["values"].tolist() == [2 if host == "miles" else 0, 1.0, 2.0]


@HOSTS
def test_per_token_a_loss_is_scaled_by_cp_and_a_masked_sample_counts_as_one_token(host):
    """The first of two cp ranks has rows 0, 1 and 4 of the first sample, whose response tokens rows 1, 2, 3 predict: the first one,
    1.0, times 2. Unmasked tokens of the whole samples: 2, and a phantom for the fully masked one."""
    emulated = EmulatedHost(host_named(host), ParallelGroups(dp_cp=FakeGroup(0, 4), cp=FakeGroup(0, 2)))
    args, batch = launch(host, calculate_per_token_loss=True), two_samples()
    batch["advantages"] = [values[emulated.owned(args, batch, sample)] for sample, values in enumerate(batch["advantages"])]
    loss, num_tokens, log = emulated.loss_function(args, batch, torch.zeros(1, 6, 3), num_microbatches=3, num_rollouts=8)
    assert float(loss) == pytest.approx(1.0 * 2)
    assert int(num_tokens) == 2 + 1
    assert log["values"].tolist() == [3.0, 1.0, 2.0]


@HOSTS
@pytest.mark.parametrize("per_token", [False, True])
def test_metrics_are_sums_by_the_steps_rollouts_or_tokens(host, per_token):
    """Two micro-batches of 3 tokens, one rank: 2 + 4 by 5 rollouts, or by 6 tokens."""
    args = launch(host, calculate_per_token_loss=per_token)
    logs = [{"keys": ["loss"], "values": torch.tensor([3.0, value])} for value in (2.0, 4.0)]
    reduced = make_host(host, {}).reduce_metrics(logs, args, num_rollouts=5)
    assert reduced == {"loss": pytest.approx(6 / 6 if per_token else 6 / 5)}


@pytest.mark.parametrize(
    ("cp_rank", "owned", "rows"),
    [
        # 7 tokens, prompt of 2: chunks of 2 rows, rank 0 has rows 0 1 and 6 7, rank 1 has 2 3 and 4 5.
        pytest.param(0, [0], [1], id="first"),
        pytest.param(1, [1, 2, 3, 4], [0, 1, 2, 3], id="second"),
    ],
)
def test_response_tokens_are_dealt_out_zigzag(cp_rank, owned, rows):
    emulated = EmulatedHost(host_named("slime"), ParallelGroups(cp=FakeGroup(cp_rank, 2)))
    args, batch = launch("slime"), {"total_lengths": [7], "response_lengths": [5]}
    assert emulated.owned(args, batch, 0) == owned
    assert emulated.owned_rows(args, batch, 4) == [(owned, rows)]


def test_rewards_are_normalised_over_the_prompts_rollouts():
    """Prompt 0: rollouts of rewards 1 and 3, the first in two segments: mean 2, deviation sqrt(2). Prompt 1: 5 alone."""
    rewards, rollouts = [1.0, 1.0, 3.0, 5.0], [0, 0, 1, 2]
    samples = [
        EmulatedSample(group_index=int(rollout == 2), index=i, response_length=2, reward=reward, rollout_id=rollout)
        for i, (reward, rollout) in enumerate(zip(rewards, rollouts, strict=True))
    ]
    data = make_host("miles", {}).train_data(launch("miles"), samples)
    assert data["rewards"] == pytest.approx([-(0.5**0.5), -(0.5**0.5), 0.5**0.5, 0.0], abs=1e-5)
    assert data["rollout_mask_sums"] == [4, 4, 2, 2]
    assert data["loss_masks"] == [[1, 1]] * 4


def test_a_path_is_split_at_its_last_dot():
    assert load_function("host_hooks.advantages_alone").__name__ == "advantages_alone"
    with pytest.raises(AttributeError, match="loss_function:no"):
        load_function("megatron_rl.testing.loss_function:no")


def test_a_config_file_overrides_arguments_unchecked():
    args = Namespace(divisor=1.0, other=2)
    merge_custom_config(args, {"divisor": "text", "with-dash": None})
    merge_custom_config(args, None)
    assert vars(args) == {"divisor": "text", "other": 2, "with-dash": None}
