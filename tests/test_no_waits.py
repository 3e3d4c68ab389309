"""Where a host waits for a GPU, on a simulated one: the losses and the schedule's seam nowhere, others where their pages say.

At the end: the simulation sees each planted wait. Whether torch and Triton wait inside an operation is for a
GPU to say, in tests/test_gpu.py.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import CLIP, ROOT, Batch, float32, placed, random_batch, without_needless_clip
from linear_cases import HeadBatch, budget, head_batch
from simulated_cuda import ASYNC_COPY, COPY, LOOK, MIXTURE, CaptureError, Seen, mark, simulated_cuda
from torch import Tensor

from megatron_rl import StepTotals, count_step, importance_correction
from megatron_rl.config import PolicyLossConfig
from megatron_rl.declare import POLICY_LOSSES, get_policy_loss
from megatron_rl.layout.groups import SINGLE, ParallelGroups
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.megatron.batch import PolicySample, StepContext, make_packed_batch
from megatron_rl.megatron.schedule import backward_factor, scale_for_schedule
from megatron_rl.metrics.step import report_pairs
from megatron_rl.ops.backends import is_interpreted
from megatron_rl.policy_loss import linear_policy_loss, policy_loss
from megatron_rl.testing.layout_step import StepSample

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/test_gpu.py asks it")

GROUPS = {"tp_group": SINGLE, "cp_group": SINGLE}
# One document of no token, one wholly masked.
LENGTHS, NUM_MASKED = [4, 0, 2, 5], (1, 0, 2, 0)


there = functools.partial(placed, device="cuda")


def make_batch() -> Batch:
    batch = float32(random_batch(LENGTHS, num_masked=NUM_MASKED))
    return replace(batch, labels=batch.labels % 10)  # within vocab_size=10


def everything(batch: Batch) -> dict:
    """Every option of a loss; those of [T] on the batch's device, those of [N] as they are made."""
    return {
        "importance_weights": 1.2 + torch.cos(batch.old_log_probs),
        "ref_log_probs": batch.old_log_probs - 0.1,
        "kl_coefficient": 0.2,
        "entropy_coefficient": 0.1,
        "regularizer_weights": 0.5 + torch.arange(len(batch.documents), dtype=torch.float32),
        "token_counts": torch.tensor([sum(bool(batch.loss_mask[t]) for t in document) for document in batch.documents]),
        "metrics": "with_entropy",
        "inplace": True,
        "temperature": 0.7,
        "vocab_size": 10,
    }


# What a loss is given -> where bounds, weights and counts of documents lie; advantages lie beside the logits.
GIVEN = {"everything": "cuda", "everything, numbers of documents on the host": "cpu", "advantages a token": "cuda"}
# What a host does depends on level and anchor: one loss of each kind. Interpreted kernels take seconds.
OF_EACH_KIND = {(get_policy_loss(kind).level, get_policy_loss(kind).anchor): kind for kind in reversed(POLICY_LOSSES.names())}
ON_TRITON = [pytest.mark.slow, pytest.mark.skipif(not is_interpreted(), reason="Triton is not in its interpreter here")]


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=ON_TRITON)])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("kind", OF_EACH_KIND.values())
def test_a_loss_waits_for_nothing_and_a_graph_can_hold_its_second_call(kind, given, backend):
    """Forward and backward: no look at the device and no copy from the host."""
    batch, options = make_batch(), {"loss_scale": 2.0}
    if given.startswith("everything"):
        options |= everything(batch)
    if given == "advantages a token":
        per_token = torch.cat([batch.advantages[i].repeat(length) for i, length in enumerate(LENGTHS)])
        batch, options = replace(batch, advantages=per_token), options | {"advantages_per": "token"}

    def step(logits: Tensor, arguments: tuple, options: dict) -> tuple[Tensor, Tensor]:
        leaf = logits.detach().clone().requires_grad_()
        output = without_needless_clip(policy_loss, kind, leaf * 1, *arguments, **GROUPS, **CLIP, **options)
        (output.loss * 2.0).backward()
        if output.metrics is not None:
            assert report_pairs(output.metrics, 3)
        return output.loss.detach(), leaf.grad

    expected = step(batch.logits, batch.arguments(), options | {"backend": "torch"})
    with simulated_cuda() as seen:
        moved, there_options = there(batch), there(options)
        labels, old, advantages, mask, _, weights = moved.arguments()
        cu_seqlens = batch.cu_seqlens.to(GIVEN[given])
        if GIVEN[given] == "cpu":
            weights = batch.token_weights
            there_options |= {name: options[name] for name in ("regularizer_weights", "token_counts")}
        call = functools.partial(
            step, moved.logits, (labels, old, advantages, mask, cu_seqlens, weights), there_options | {"backend": backend}
        )
        seen.clear()
        found = call()
        assert seen == []
        if GIVEN[given] == "cuda":
            with seen.capture():
                call()
        found = [value.cpu() for value in found]
    for mine, theirs in zip(found, expected, strict=True):  # two orders of float32 additions over 11 tokens
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


def test_a_correction_on_the_device_shows_a_value_that_is_not_finite():
    """Nobody looks at the device, so the weight of the token says it, and that of its sample where the sample decides."""
    given = {"old_log_probs": torch.full((3,), -1.0), "rollout_log_probs": torch.tensor([-1.0, float("nan"), -1.0])}
    given |= {"loss_mask": torch.ones(3, dtype=torch.bool)}
    of_samples = CorrectionSettings(kind="tis", level="sequence_mean", high=2.0)
    with simulated_cuda() as seen:
        given, found = there(given), {}
        for settings in (CorrectionSettings(kind="tis"), of_samples):
            seen.clear()
            found[settings.level] = importance_correction(settings, **given, cu_seqlens=torch.tensor([0, 2, 3]))[0].weights
            assert seen == []
        is_nan = {level: weights.cpu().isnan().tolist() for level, weights in found.items()}
    assert is_nan == {"token": [False, True, False], "sequence_mean": [True, True, False]}


# The seam to the schedule


@pytest.mark.parametrize("per_token", [False, True], ids=["unit", "per-token"])
@pytest.mark.parametrize("num_tokens", [5, "on the device"], ids=str)
def test_the_seam_to_the_schedule_waits_for_nothing(per_token, num_tokens):
    config = SimpleNamespace(calculate_per_token_loss=per_token, grad_scale_func=None)
    shared = {"totals": StepTotals(2, None, 9), "config": config, "groups": ParallelGroups()}
    with simulated_cuda() as seen:
        loss, mask = torch.ones((), device="cuda"), torch.ones(5, dtype=torch.bool, device="cuda")
        local = mask.sum() if num_tokens == "on the device" else num_tokens
        loss, number, report = scale_for_schedule(loss, 4, num_local_tokens=local, **shared)
        factor = backward_factor(4, **shared)
        assert seen == []
        assert loss.is_cuda and number.is_cuda and report["policy/loss"].is_cuda
        assert number.dtype == torch.int32 and number.item() == (5 if per_token else 1)
        # Per token 1 x 9 and nothing divides; else 1 x 4 micro-batches, which the schedule divides by.
        assert (loss.item(), factor) == ((9.0, 9.0) if per_token else (4.0, 1.0))
        number += 3  # Megatron adds the other micro-batches' counts to what it is given, in place
        assert not isinstance(local, Tensor) or local.item() == 5


# The fused head


HOST_FACTS, KEPT_ROWS, LONG_DOCUMENT = (f"megatron_rl/policy_loss/linear.py {name}" for name in ("_on_host", "_kept", "scale_last"))
OF_SETS = "megatron_rl/layout/sampling_support.py"


def run_head(kind: str, case: HeadBatch, rows: int, facts_on: str, *, in_main_grad=False, has_kl=False, support=None):
    """(file and function of each look in forward, what backward was seen to do). Mask, bounds and sets of ids lie on facts_on."""
    case = float32(case)
    with simulated_cuda() as seen:
        batch, hidden = there(float32(case.batch)), case.hidden.to("cuda").requires_grad_()
        weight, options = torch.nn.Parameter(case.weight.to("cuda")), {}
        if in_main_grad:
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
            options["loss_scale"] = 2.0
        if has_kl:
            options |= {"kl_coefficient": 0.1, "entropy_coefficient": 0.1, "ref_log_probs": batch.old_log_probs - 0.1}
            options["regularizer_weights"] = batch.token_weights
        if support is not None:
            options["sampling_support"] = support.to(torch.device(facts_on))
        labels, old, advantages, _, _, weights = batch.arguments()
        mask, cu_seqlens = case.batch.loss_mask.to(facts_on), case.batch.cu_seqlens.to(facts_on)
        options |= {"max_logits_bytes": budget(case, rows), "backend": "torch", **CLIP, **GROUPS}
        seen.clear()
        output = linear_policy_loss(kind, hidden, weight, labels, old, advantages, mask, cu_seqlens, weights, **options)
        assert {event.kind for event in seen} <= {LOOK}
        in_forward = [f"{event.file} {event.function}" for event in seen]
        seen.clear()
        (output.loss * 2.0).backward()
        return in_forward, list(seen)


@pytest.mark.filterwarnings("ignore:max_logits_bytes gives chunks of")
@pytest.mark.parametrize("facts_on", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("kind", "lengths", "rows", "has_kl", "waits"),
    [
        pytest.param("gspo", [5, 7, 0, 3], 1000, False, [KEPT_ROWS], id="A: all documents in one chunk"),
        pytest.param("gspo", [5, 7, 0, 6], 9, False, [KEPT_ROWS] * 3, id="A: one document a chunk"),
        pytest.param("gspo", [21], 9, False, [LONG_DOCUMENT], id="B: a document of three chunks"),
        pytest.param("gspo", [21], 9, True, [KEPT_ROWS] * 3, id="C: the same with KL"),
        pytest.param("grpo", [5, 21, 7, 0, 1, 12, 9], 9, True, [KEPT_ROWS] * 7, id="D: 55 tokens in chunks of 9"),
    ],
)
def test_the_fused_head_waits_once_a_chunk_and_once_for_facts_on_the_device(kind, lengths, rows, has_kl, waits, facts_on):
    """In plan scale-last once a document."""
    case = head_batch(lengths)
    case = replace(case, batch=replace(case.batch, loss_mask=torch.ones_like(case.batch.loss_mask)))
    found = run_head(kind, case, rows, facts_on, has_kl=has_kl, in_main_grad=facts_on == "cpu")
    assert found == ([HOST_FACTS] * (facts_on == "cuda") + waits, [])


@pytest.mark.parametrize("sets_on", ["cpu", "cuda"])
def test_sets_of_kept_ids_wait_for_nothing_but_sets_on_the_device(sets_on):
    """In torch the weight's gradient counts the ids of a chunk; the kernel does not (test_kernel_code.py)."""
    case = head_batch([9, 7])
    sizes = (1, 2, 3, 15, 16)
    kept = [[(int(label) + i) % 16 for i in range(sizes[t % 5])] for t, label in enumerate(case.batch.labels)]
    support = SamplingSupport.from_lists(kept)
    in_forward, in_backward = run_head("grpo", case, 1000, sets_on, support=support)
    are_there = sets_on == "cuda"
    files = [look.partition(" ")[0] for look in in_forward]
    assert (in_forward.count(HOST_FACTS), files.count(OF_SETS)) == (are_there, 2 * are_there)
    assert {*files} - {HOST_FACTS.partition(" ")[0], OF_SETS} == {"megatron_rl/ops/support.py"}
    assert in_backward == []


# Counting a step

STEP_MASKS = [[1, 1], [1, 1, 1, 1], [1], [0, 0, 0], []]
DTYPES = [torch.bool, torch.int64, torch.float32, torch.bool, torch.int32]


@pytest.mark.parametrize("prompt_ids", [None, ["a", "a", "b", "b", "c"]], ids=["no prompts", "prompts"])
def test_masks_on_the_device_are_counted_with_one_look_for_all(prompt_ids):
    """Hosts hand masks over on the device: a look a sample is 512 waits in a step of 512. Some may lie on the host."""
    masks = [torch.tensor(mask, dtype=dtype) for mask, dtype in zip(STEP_MASKS, DTYPES, strict=True)]
    expected = count_step(masks, prompt_ids, SINGLE)
    with simulated_cuda() as seen:
        moved = [mask.to("cuda") for mask in masks[:3]] + masks[3:]
        seen.clear()
        totals, counts, prompt_counts, _ = count_step(moved, prompt_ids, SINGLE)
        assert [(event.kind, event.file) for event in seen] == [(LOOK, COUNTING)]
        on_device = counts.to("cuda")
        seen.clear()
        again = count_step(None, prompt_ids, SINGLE, token_counts=on_device)
        assert [event.kind for event in seen] == [LOOK]
    assert (totals, counts.tolist()) == (expected[0], expected[1].tolist()) and not counts.is_cuda
    assert (again[0], again[1].tolist()) == (totals, counts.tolist())
    assert prompt_ids is None or prompt_counts.tolist() == expected[2].tolist()


# The training command


SUMS = "megatron_rl/train/trainer.py"
RESPONSES = "megatron_rl/megatron/responses.py"
COUNTING, FINITE, METRICS = "megatron_rl/count.py", "megatron_rl/megatron/forward_step.py", "megatron_rl/metrics/step.py"
GRADIENT_NORM = "megatron/core/optimizer/clip_grads.py"


PADDED, PACKED = "padded, logits, float32", "packed, fused head, bfloat16"
SETTINGS = {
    PADDED: ({}, {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}),
    PACKED: ({"packed": True, "bf16": True}, {"fused_lm_head_loss": True, "fp32_lm_head": True}),
}


TOKENS = [[1, 2, 3, 11, 12, 13], [4, 5, 14, 15, 16]]
STEP = [
    [StepSample(tokens=tokens, loss_mask=[1] * 3, prompt_id=number, advantage=1.0 - 2 * number, policy_version=0)]
    for number, tokens in enumerate(TOKENS)
]


def phases_of_training(device: torch.device, settings: dict, options: dict, seen: list) -> dict[str, list]:
    """What measuring and a step were seen to do, on one rank."""
    from megatron_rl.train.trainer import PolicyTrainer, TrainerSettings

    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 20, "max_sequence_length": 16}
    config = PolicyLossConfig(policy_loss="gspo", policy_loss_backend="torch", policy_metrics="with_entropy", **options)
    trainer, found = PolicyTrainer(TrainerSettings(**sizes, **settings), config, device), {}
    seen.clear()
    old = trainer.log_probs(STEP)
    found["log_probs"] = list(seen)
    reference = trainer.log_probs(STEP, with_reference=True) if config.kl_coefficient else [[None], [None]]
    step = [
        [replace(sample, old_log_probs=own, rollout_log_probs=own, ref_log_probs=others)]
        for [sample], [own], [others] in zip(STEP, old, reference, strict=True)
    ]
    first = trainer.step(step, policy_version=1)  # what is looked at or allocated once
    assert abs(first["policy/ratio_new_old"] - 1) < 1e-5, first
    seen.clear()
    trainer.step(step, policy_version=1)
    return found | {"step": list(seen)}


def train_on_simulated_cuda() -> None:
    """Prints what was seen. A process of its own, because Megatron-Core looks for CUDA where it is imported; gloo stands in for
    NCCL, and one rank launches no collective of its own."""
    start = dist.init_process_group
    replaced = {"init_process_group": lambda backend, **kwargs: start("gloo", **kwargs), "get_backend": lambda *group: "nccl"}
    with simulated_cuda() as seen, mock.patch.multiple(dist, **replaced):
        from megatron_rl.megatron.ranks import initialize_ranks

        sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}
        device = initialize_ranks(**sizes)
        print(json.dumps({name: phases_of_training(device, *options, seen) for name, options in SETTINGS.items()}))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def training(shared) -> dict:
    def run() -> str:
        code = "import test_no_waits; test_no_waits.train_on_simulated_cuda()"
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return {
        setting: {name: [Seen(*event) for event in events] for name, events in phases.items()}
        for setting, phases in json.loads(shared("test_no_waits", run)).items()
    }


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize("setting", [PADDED, PACKED])
def test_a_training_step_waits_where_it_says_and_nowhere_else(training, setting):
    """Two micro-batches. No value is looked at between the first forward and the last backward, but by the fused head, once
    a chunk. Catches a copy that is waited for in every micro-batch, and Megatron's rotary embedding, which reads packed bounds."""
    seen = training[setting]["step"]
    of_counting = [event for event in seen if event.file == COUNTING]
    assert seen[: len(of_counting)] == of_counting, "counts are exchanged before the first forward"
    assert [event.kind for event in of_counting].count(LOOK) <= 2 and len(of_counting) <= 4
    heads = [] if setting == PADDED else [KEPT_ROWS.partition(" ")[0]] * 2
    looks = [event.file for event in seen[len(of_counting) :] if event.kind == LOOK]
    assert looks == [*heads, FINITE, GRADIENT_NORM, SUMS, METRICS]
    rest = [event for event in seen[len(of_counting) :] if event.kind != LOOK]
    assert all(event.kind == COPY and event.file.startswith("megatron/core/") for event in rest), rest
    # Measuring waits once a batch. The first forward of a fused head looks at what the model makes of the layer's output, once.
    first = [] if setting == PADDED else [(LOOK, "megatron_rl/megatron/head.py")]
    assert [(event.kind, event.file) for event in training[setting]["log_probs"]] == [*first, *[(LOOK, RESPONSES)] * 2]


@pytest.mark.megatron
@pytest.mark.parametrize("bounds_on_host", [True, False])
def test_bounds_of_a_packed_row_lie_where_the_layers_read_them(bounds_on_host):
    """On the host without Transformer Engine, whose kernels read them on the device. All else is on the device, without a wait."""
    importlib.import_module("megatron.core.packed_seq_params")  # before it could ask the simulated device anything
    numbers = {"advantage": 1.0, "token_weight": 0.5, "token_count": 2, "old_log_probs": -torch.ones(2)}
    sample = PolicySample(tokens=torch.arange(5), loss_mask=torch.ones(2), **numbers)
    context = StepContext(totals=StepTotals(2, 1, 4), num_microbatches=1)
    with simulated_cuda() as seen:
        shared = {"row_length": 12, "cp_group": SINGLE, "device": torch.device("cuda", 0)}
        batch = make_packed_batch([sample, sample], context, bounds_on_host=bounds_on_host, **shared)
        assert seen == []
        packed = batch.packed_seq_params
        assert packed.cu_seqlens_q.is_cuda == packed.cu_seqlens_kv.is_cuda != bounds_on_host
        values = [*(getattr(batch, name) for name in batch.__slots__), *batch.loss.arguments().values()]
        tensors = [value for value in values if isinstance(value, Tensor)]
        assert len(tensors) == 12 and all(tensor.is_cuda for tensor in tensors)


# The simulation sees each planted wait, copy and mixture


def on_device(values=(1.0, 0.0, 2.0, 0.0, 3.0)):
    """Marked directly, so that no copy is on the list."""
    return mark(torch.tensor(list(values)))


def backward_that_looks():
    doubled = on_device().requires_grad_() * 2
    doubled.register_hook(lambda gradient: gradient if gradient.sum() > 0 else None)
    doubled.sum().backward()


PLANTED = {
    "item": (LOOK, lambda: on_device().sum().item()),
    "cpu": (LOOK, lambda: on_device().cpu()),
    "index by a mask": (LOOK, lambda: on_device()[on_device() > 0]),
    "in backward": (LOOK, backward_that_looks),
    "torch.tensor": (COPY, lambda: torch.tensor([1, 2], device="cuda")),
    "to the device": (COPY, lambda: torch.ones(5).to("cuda")),
    "index by a CPU tensor": (COPY, lambda: on_device()[torch.tensor([0, 1])]),
    "sum of both": (MIXTURE, lambda: on_device() + torch.ones(5)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_wait_copy_and_mixture_is_seen_once(name):
    kind, run = PLANTED[name]
    with simulated_cuda() as seen:
        run()
    assert [event.kind for event in seen] == [kind], seen


def test_a_capture_refuses_what_a_graph_cannot_hold():
    """A copy that nobody waits for too."""
    with simulated_cuda() as seen, seen.capture():
        on_device().max()
        with pytest.raises(CaptureError, match=ASYNC_COPY):
            torch.ones(5).to("cuda", non_blocking=True)
