"""The hosts' function of masked importance sampling: which settings our loss honours, by which correction, and which it refuses."""

from __future__ import annotations

import importlib.util
import itertools
import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from test_host_rules import OUR_LOSS

from megatron_rl import CorrectionSettings, importance_correction
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.checks import check_launch, host_warnings
from megatron_rl.hosts.flags import MIS_FUNCTION

PATHS = {
    "miles": f"examples.infra_features.{MIS_FUNCTION}",
    "slime": f"examples.{MIS_FUNCTION}",
}
# As the file of --custom-config-path gives them, without what is refused.
FILE = {
    "use_tis": True,
    "use_rs": False,
    "tis_level": "token",
    "rs_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": 0.5,
    "tis_upper_bound": 2.0,
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": None,
    "tis_batch_normalize": False,
}
RATIOS = [[0.4, 1.0], [6.0], [1.0, 2.5, 0.9], [0.45, 1.9, 1.2, 0.8]]
MASKS = [[1, 1], [1], [1, 0, 1], [1, 1, 1, 1]]


def launch(host: str = "miles", **settings) -> tuple:
    return check_launch(Namespace(**{**OUR_LOSS, "custom_tis_function_path": PATHS[host], **FILE, **settings}))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("tis", "token", 0.0, 2.0)),
        ({"tis_mode": "clip", "tis_lower_bound": None}, ("tis", "token", 0.5, 2.0)),
        ({"tis_mode": "mask", "tis_level": "geometric", "rs_level": "geometric"}, ("icepop", "sequence_mean", 0.5, 2.0)),
        ({"use_rs": True}, ("icepop", "token", 0.5, 2.0)),
        ({"use_rs": True, "rs_lower_bound": 0.1, "rs_upper_bound": 1.5}, ("icepop", "token", 0.1, 1.5)),
        (
            {
                "use_rs": True,
                "tis_mode": "mask",
                "rs_lower_bound": 0.1,
                "rs_upper_bound": 1.5,
                "tis_level": "sequence",
                "rs_level": "sequence",
            },
            ("icepop", "sequence_sum", 0.5, 1.5),
        ),
        ({"use_rs": False, "rs_veto_threshold": 1e-4}, ("tis", "token", 0.0, 2.0)),
    ],
    ids=str,
)
def test_a_setting_of_the_function_is_a_correction_of_ours(settings, expected):
    config, found = launch(**settings)
    names = ("", "_level", "_low", "_high")
    assert tuple(getattr(config, f"importance_correction{name}") for name in names) == expected
    assert any("the same weights over the same denominators" in line for line in host_warnings(found))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tis_batch_normalize": True}, "tis_batch_normalize: true divides the weights by their mean over a micro-batch"),
        ({"use_rs": True, "rs_veto_threshold": 1e-4}, "rs_veto_threshold: 0.0001 drops a sample for one of its tokens"),
        ({"use_rs": True, "rs_level": "sequence"}, "is two criteria, and megatron_rl has one: give both one level"),
        ({"use_rs": True, "rs_upper_bound": 3.0}, "is two criteria"),
        ({"use_rs": True, "tis_mode": "clip", "rs_lower_bound": 0.1}, "is two criteria"),
        ({"tis_mode": "truncated"}, "tis_mode='truncated', .*needs a mode of truncate, clip, mask"),
        ({"tis_upper_bound": None}, "tis_upper_bound=None: .* and an upper bound"),
    ],
)
def test_what_no_correction_of_ours_does_is_refused_with_its_reason(settings, message):
    with pytest.raises(ConfigError, match=message):
        launch("slime", **settings)


def rows() -> list[dict]:
    """Each mode with each level, with and without a rejection that has the same level."""
    found = []
    for mode, level, (rejects, low, high) in itertools.product(
        ("truncate", "clip", "mask"),
        ("token", "sequence", "geometric"),
        ((False, None, None), (True, None, None), (True, 0.7, 1.6)),
    ):
        of_rejection = {"use_rs": rejects, "rs_level": level, "rs_lower_bound": low, "rs_upper_bound": high}
        found.append({"tis_mode": mode, "tis_level": level, **of_rejection})
    return found


@pytest.mark.host
@pytest.mark.parametrize("host", PATHS)
def test_the_weights_are_those_of_the_hosts_own_function(host):
    """Masked tokens weigh 0 there by the loss mask, which our loss has by itself."""
    root = os.environ.get(f"{host.upper()}_ROOT")
    if not root:
        pytest.skip(f"needs {host.upper()}_ROOT, the root of a checkout")
    (path,) = Path(root, "examples").rglob("train_infer_mismatch_helper/mis.py")
    spec = importlib.util.spec_from_file_location(f"mis_of_{host}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    generator = torch.Generator().manual_seed(0)
    rollout = [torch.randn(len(row), generator=generator, dtype=torch.float64) - 3 for row in RATIOS]
    old = [values + torch.tensor(row, dtype=torch.float64).log() for values, row in zip(rollout, RATIOS, strict=True)]
    masks = [torch.tensor(row) for row in MASKS]
    for settings in rows():
        args = Namespace(**{**FILE, **settings})
        weights, kept, _ = module.compute_mis_weights(args, train_log_probs=old, rollout_log_probs=rollout, loss_masks=masks)
        expected = torch.cat([weight * mask for weight, mask in zip(weights, kept, strict=True)])
        config, _ = launch(host, **settings)
        found, _ = importance_correction(
            CorrectionSettings.of(config),
            *(torch.cat(values) for values in (old, rollout)),
            torch.cat(masks).bool(),
            torch.tensor([0, *(len(row) for row in RATIOS)]).cumsum(0).int(),
        )
        torch.testing.assert_close(found.weights, expected, rtol=1e-12, atol=1e-12, msg=lambda text, s=settings: f"{s}: {text}")


def test_the_host_is_no_way_out_for_weights_of_a_micro_batch():
    """Its own loss calls the function too: the advice would train the same weights."""
    with pytest.raises(ConfigError) as caught:
        launch(tis_batch_normalize=True, tis_mode="mask", use_rs=True, rs_veto_threshold=1e-4)
    normalised, veto = caught.value.problems
    assert "get_pg_loss_reducer" not in normalised and normalised.endswith("write tis_batch_normalize: false")
    assert "get_pg_loss_reducer" in veto


PROMPT_MEAN = {
    "loss_aggregation": "prompt_mean",
    "custom_reward_post_process_path": "megatron_rl.hooks.reward_post_process",
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "global_batch_size": 8,
}
REDUCER = {
    "loss_type": "policy_loss",
    "custom_loss_function_path": None,
    "custom_pg_loss_reducer_function_path": "megatron_rl.reducers.get_pg_loss_reducer",
}


@pytest.mark.parametrize("host", PATHS)
def test_our_loss_keeps_the_counts_of_the_hook_and_the_hosts_does_not(host):
    """Ours does not call the function: a rejected token has weight 0, and is counted."""
    config, _ = launch(host, use_rs=True, **PROMPT_MEAN)
    assert config.importance_correction == "icepop"
    with pytest.raises(
        ConfigError, match=r"may reject tokens after .*; our loss has its weights and keeps them too: --loss-type cu"
    ):
        launch(host, use_rs=True, **PROMPT_MEAN, **REDUCER)


def test_settings_that_the_function_alone_reads_do_not_stay_behind_in_silence():
    names = "use_rs, rs_level"
    for path, is_said in (None, True), (PATHS["miles"], False), ("mine.weights", False):
        settings = {"use_tis": path != "mine.weights", "custom_tis_function_path": path}
        _, found = check_launch(Namespace(**{**OUR_LOSS, **FILE, **settings}))
        said = [line for line in host_warnings(found) if f"{names}, " in line and "no effect without --custom-tis-function" in line]
        assert bool(said) == is_said, path
