"""Mixtures of experts on a launch line: what each flag does to the step, by doctor and at start; what a checkpoint switches on."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from pathlib import Path

import pytest
from doctor_cases import CPU_MACHINE, machine

from megatron_rl.commands.doctor.launch import judge_launch
from megatron_rl.commands.doctor.machine import findings
from megatron_rl.commands.doctor.report import NOTE, OK, PROBLEM
from megatron_rl.config import Route
from megatron_rl.hosts.base import HostOptions, read_launch
from megatron_rl.hosts.checkpoint_config import checkpoint_config
from megatron_rl.hosts.checks import experts_keep_the_step
from megatron_rl.validation.auxiliary_losses import expert_loss_problems
from megatron_rl.validation.checks import Asker, warnings_of
from megatron_rl.validation.experts import drift_problem, expert_notes, expert_problems

REDUCER = "--loss-aggregation sample_mean --custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer"
OURS = f"python -m megatron_rl.hosts.launch miles/train.py {REDUCER}"
# As miles's run_qwen3_30b_a3b.py composes it for one node of eight H100.
QWEN3_30B = (
    "python3 /root/miles/train.py --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-score-function softmax "
    "--moe-token-dispatcher-type alltoall --moe-router-topk 8 --moe-grouped-gemm --moe-token-drop-policy probs "
    "--moe-router-dtype fp32 --moe-permute-fusion --moe-aux-loss-coeff 0 --hf-checkpoint /root/models/Qwen3-30B-A3B/ "
    "--advantage-estimator grpo --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 1 "
    "--context-parallel-size 1 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --use-rollout-routing-replay"
)
MIXTURE = "--num-experts 128 --expert-model-parallel-size 8 --tensor-model-parallel-size 4 --sequence-parallel"


def rows(line: str, replicas_drift: bool | None = None) -> dict[str, tuple[str, str]]:
    """flag -> (status, text), of what the line was judged by."""
    report = judge_launch(shlex.split(line), "miles", replicas_drift=replicas_drift)
    return {finding.subject: (finding.status, finding.text) for finding in report.rules}


def texts(line: str, status: str, **known) -> list[str]:
    report = judge_launch(shlex.split(line), "miles", **known)
    return [finding.text for finding in report.rules if finding.status == status]


def test_a_launch_of_a_host_is_told_row_by_row():
    """Nothing of ours is on the line, and each flag that matters has its row."""
    found = rows(QWEN3_30B)
    assert found["--expert-model-parallel-size"] == (
        OK,
        "16 of 128 experts a rank; the scale of the policy loss stays",
    )
    assert found["--expert-tensor-parallel-size"][0] == found["--moe-aux-loss-coeff"][0] == OK
    assert found["--moe-token-drop-policy"][1].startswith("no effect without --moe-expert-capacity-factor")
    assert found["--use-rollout-routing-replay"][1].startswith(
        "R3: old log-probabilities and training take the experts that the sampler"
    )
    assert {status for status, _ in found.values()} == {OK, NOTE}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--moe-expert-capacity-factor 1.25", "moe_expert_capacity_factor=1.25: which tokens an expert drops"),
        ("--calculate-per-token-loss --moe-z-loss-coeff 1e-3", "moe_z_loss_coeff=0.001 does not go with calculate_per_token_loss"),
    ],
)
def test_what_makes_a_step_depend_on_its_layout_is_a_problem(flags, message):
    """By the rule that a start goes by; with nothing of ours on the line doctor still says it of experts."""
    assert any(message in text for text in texts(f"{OURS} {MIXTURE} {flags}", PROBLEM))
    if "per-token" not in flags:
        assert any(message in text for text in texts(f"python miles/train.py {MIXTURE} {flags}", PROBLEM))


@pytest.mark.parametrize(("drifts", "status"), [(True, PROBLEM), (None, NOTE), (False, None)])
def test_a_release_whose_replicas_drift_is_named(drifts, status):
    """FB-105: a problem where the installed release is asked and does, a note where none is, nothing where it does not."""
    line = f"{OURS} --num-experts 8 --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
    report = judge_launch(shlex.split(line), None, replicas_drift=drifts)
    found = [
        finding.status for finding in report.rules if "Megatron-Core 0.13 to 0.18 does not add their gradients" in finding.text
    ]
    assert found == ([] if status is None else [status])


@pytest.mark.parametrize(
    ("settings", "drifts"),
    [
        ({"expert_tensor_parallel_size": 1}, True),
        ({"expert_tensor_parallel_size": None}, False),  # as tensor parallelism: shards
        ({"expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2}, False),
        ({"expert_tensor_parallel_size": 1, "num_experts": None}, False),
        ({"expert_tensor_parallel_size": 4}, True),  # shards of an expert on data-parallel ranks
        ({"expert_tensor_parallel_size": 2, "tensor_model_parallel_size": 1}, True),
        ({"expert_tensor_parallel_size": 4, "expert_model_parallel_size": 2}, False),
    ],
)
def test_experts_that_all_ranks_hold_are_cut_as_the_dense_layers(settings, drifts):
    launch = {"num_experts": 8, "tensor_model_parallel_size": 2, "sequence_parallel": True, **settings}
    assert (drift_problem(launch) is not None) == drifts


@pytest.mark.parametrize(("drifts", "number"), [(True, 1), (False, 0)])
def test_the_machine_says_whether_its_megatron_lets_replicas_drift(drifts, number):
    found = findings(machine(megatron={**CPU_MACHINE["megatron"], "replicas_drift": drifts}))
    assert [finding.subject for finding in found].count("experts") == number


WARNED = [
    ({"moe_aux_loss_coeff": 0.001}, "moe_aux_loss_coeff=0.001 of aux_loss: Megatron takes a mean over micro-batches"),
    ({"moe_z_loss_coeff": 0.001}, "moe_z_loss_coeff=0.001: Megatron takes a mean over micro-batches"),
    ({"moe_router_enable_expert_bias": True}, "with moe_router_bias_update_rate=0.001: each step moves the bias"),
]


@pytest.mark.parametrize(("settings", "message"), WARNED)
def test_a_host_is_warned_at_start_of_what_changes_with_the_layout(settings, message):
    """FB-97, FB-99: doctor and the init hook read the same registry."""
    reducer = {"custom_pg_loss_reducer_function_path": "megatron_rl.reducers.get_pg_loss_reducer"}
    launch = read_launch(Namespace(rollout_batch_size=8, num_experts=8, loss_aggregation="sample_mean", **reducer, **settings))
    (warning,) = warnings_of([experts_keep_the_step], launch, Asker.DOCTOR)
    assert message in warning
    flags = " ".join(f"--{name.replace('_', '-')} {'' if value is True else value}" for name, value in settings.items())
    assert warning in texts(f"{OURS} --num-experts 8 {flags}", NOTE)


QUIET = [
    ({"moe_aux_loss_coeff": 0.001, "router_aux_loss": "exact"}, Route.TRAIN, "moe_aux_loss_coeff", None),
    ({"moe_aux_loss_coeff": 0.0}, Route.REDUCER, "moe_aux_loss_coeff", "off"),
    (
        {"moe_aux_loss_coeff": 0.001, "moe_router_load_balancing_type": "none"},
        None,
        "moe_router_load_balancing_type",
        "adds no loss",
    ),
    ({"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0}, None, "moe_router_enable_expert_bias", "stays"),
    ({"moe_router_enable_expert_bias": True}, Route.TRAIN, "moe_router_enable_expert_bias", "by real tokens"),
    ({"moe_router_bias_update_rate": 0}, Route.REDUCER, "moe_router_bias_update_rate", "no effect without"),
    ({"use_routing_replay": True}, Route.REDUCER, "use_routing_replay", "R2: training takes the experts of the pass"),
    ({"moe_enable_routing_replay": True}, Route.REDUCER, "moe_enable_routing_replay", "a queue of the process"),
]


@pytest.mark.parametrize(("settings", "route", "name", "words"), QUIET)
def test_what_leaves_the_step_alone_is_told_and_warns_nobody(settings, route, name, words):
    found = {note.subject: note for note in expert_notes({"num_experts": 8, **settings}, route)}
    assert not any(note.is_note for note in found.values())
    assert (name not in found) if words is None else (words in found[name].text)


@pytest.mark.parametrize(
    "settings", [{"num_experts": None}, {"num_moe_experts": None, "moe_aux_loss_coeff": 0.1}, {"moe_x": 1}, {}]
)
def test_a_dense_model_is_asked_nothing(settings):
    """Scripts of dense models give both expert sizes as 1. A line that hides its model arguments may have experts."""
    dense = {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 4, **settings}
    is_hidden = "moe_x" in settings
    assert bool(list(expert_notes(dense, Route.REDUCER))) == bool(list(expert_problems(dense))) == is_hidden
    assert (drift_problem(dense) is not None) == is_hidden


def checkpoint(folder: Path, content: object) -> str:
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


FROM_CHECKPOINTS = [
    ({"router_aux_loss_coef": 0.001, "output_router_logits": False}, {"router_aux_loss_coef": 0.001}),
    ({"aux_loss_alpha": 0.0001, "router_aux_loss_coef": 0.0}, {"aux_loss_alpha": 0.0001}),
    ({"text_config": {"router_aux_loss_coef": 0.001}}, {"router_aux_loss_coef": 0.001}),
    ({"hidden_size": 8}, {}),
    ([1], {}),
]


@pytest.mark.parametrize(("content", "coefficients"), FROM_CHECKPOINTS)
def test_the_coefficient_of_a_checkpoint_is_found(tmp_path, content, coefficients):
    """FB-102: a multimodal model has it one level below; what is no number is none."""
    found = checkpoint_config(HostOptions(Namespace(rollout_batch_size=8, hf_checkpoint=checkpoint(tmp_path, content))))
    assert found is not None and found.coefficients == coefficients and found.flag == "--hf-checkpoint"


def test_a_checkpoint_that_cannot_be_read_says_nothing(tmp_path):
    (tmp_path / "config.json").write_text("{")
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert checkpoint_config(HostOptions(Namespace(rollout_batch_size=8, ref_load=str(folder)))) is None


def test_doctor_says_what_a_bridge_takes_from_a_checkpoint(tmp_path):
    """FB-102: under raw conversion the arguments build the model; a bridge takes the checkpoint's, unless they have one."""
    folder = checkpoint(tmp_path, {"router_aux_loss_coef": 0.001})
    given = f"{OURS} --num-experts 8 --hf-checkpoint {folder}"
    assert (
        rows(given)["--hf-checkpoint"][0] == OK
        and "has no effect: miles takes --moe-aux-loss-coeff" in rows(given)["--hf-checkpoint"][1]
    )
    bridge = f"{given} --megatron-to-hf-mode bridge"
    (warning,) = [text for text in texts(bridge, NOTE) if "bridge takes router_aux_loss_coef=0.001" in text]
    assert warning.endswith("add --moe-aux-loss-coeff 0")
    assert not [text for text in texts(f"{bridge} --moe-aux-loss-coeff 0", NOTE) if "bridge takes" in text]
    stock = f"python miles/train.py --hf-checkpoint {folder} --megatron-to-hf-mode bridge"
    assert rows(stock)["--hf-checkpoint"][0] == NOTE


@pytest.mark.parametrize(
    ("flags", "number"), [("--expert-tensor-parallel-size 2", 1), ("--expert-tensor-parallel-size 1", 0), ("", 1)]
)
def test_adapters_of_shared_experts_are_warned_of(flags, number):
    """FB-108: unset, expert tensor parallelism is tensor parallelism."""
    line = (
        f"{OURS} --num-experts 8 --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 --lora-rank 16"
    )
    assert len([text for text in texts(f"{line} {flags}", NOTE) if text.startswith("--lora-rank 16 with experts on 2")]) == number
    assert not [text for text in texts(f"{line} {flags}".replace("--lora-rank 16", ""), NOTE) if "--lora-rank" in text]


@pytest.mark.parametrize(("flags", "number"), [("--lora-rank 16", 1), ("", 0)])
def test_an_adapter_of_an_overlapped_shared_expert_is_warned_of(flags, number):
    """FB-151"""
    line = f"{OURS} {MIXTURE} --expert-tensor-parallel-size 1 --moe-shared-expert-overlap {flags}"
    found = [text for text in texts(line, NOTE) if "add the shared expert's adapter once on each tensor-parallel rank" in text]
    assert len(found) == number


def test_a_line_with_nothing_of_ours_hears_of_a_rescaled_loss():
    """The worse case was silent, because the rule is one of ours."""
    line = "python train.py --num-experts 8 --expert-model-parallel-size 8 --calculate-per-token-loss --moe-aux-loss-coeff 1e-3"
    report = judge_launch(shlex.split(line), "slime")
    (finding,) = [finding for finding in report.rules if "routed tokens / response tokens" in finding.text]
    assert (
        finding.status == PROBLEM
        and "moe_aux_loss_coeff=0.001 of aux_loss does not go with calculate_per_token_loss=True" in finding.text
    )


def test_a_hidden_number_of_experts_is_not_none():
    settings = {"expert_model_parallel_size": 8, "moe_aux_loss_coeff": 1e-3, "calculate_per_token_loss": True}
    assert len(list(expert_loss_problems({**settings, "calculate_per_token_loss": True}, Route.REDUCER))) == 1
    assert not list(expert_loss_problems({"moe_aux_loss_coeff": None, "calculate_per_token_loss": True}, Route.REDUCER))
