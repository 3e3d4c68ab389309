"""Our fused head in ROLL: a step without logits, old log-probabilities, and mcore_adapter's hook.

ROLL_ROOT=... pytest -m host --require host tests/test_roll_head.py
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import own_log_probs
import pytest
import roll_cases as cases
import torch
from adapter_cases import VOCABULARY, RowCase, Step
from host_checkouts import ROLL
from linear_cases import relative
from roll_cases import ADAPTER, Data
from test_carried_rows import Body
from test_forward_step import SeenShapes
from test_host_log_probs import HIDDEN
from test_roll import roll_forward_step

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.heads import log_probs
from megatron_rl.hosts.heads.carried_rows import CarriedRows
from megatron_rl.hosts.heads.roll import place
from megatron_rl.hosts.roll_loss import RollLoss
from megatron_rl.testing.ranks import run_ranks

OURS = {"MEGATRON_RL_FUSED_LM_HEAD_LOSS": "true", "MEGATRON_RL_LOG_PROBS": "megatron_rl"}
# Three rows of float32 logits in a chunk of one tensor-parallel rank, six of two.
SMALL = 3 * VOCABULARY * 4
# Float32: a loss is one sum of a step's tokens; a gradient adds products of other chunks.
OF_LOSS, OF_GRADIENT = 1e-6, 1e-5
LAYOUTS = [
    {"tp": 1, "sizes": (3, 5)},
    {"tp": 2, "sizes": (6, 2)},
    {"cp": 2, "sizes": (2, 4), "num_samples": 6},
    {"tp": 2, "cp": 2, "sizes": (2, 4), "num_samples": 6},
]
TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_loss_coef": 0.02}


class Contiguous(torch.autograd.Function):
    """As mcore_adapter's: what comes in goes out; its gradient is contiguous."""

    @staticmethod
    def forward(ctx, logits):
        return logits

    @staticmethod
    def backward(ctx, gradient):
        return gradient.contiguous()


def mca_lora_logits_postprocess_hook(module, given, output):
    module.calls = getattr(module, "calls", 0) + 1
    return Contiguous.apply(output[0]), output[1]


def rolls_own_hook():
    """Of mcore_adapter's file, whose imports are not here."""
    path = "mcore_adapter/src/mcore_adapter/models/model_utils.py"
    names = ("_McaLoraLogitsHelper", "_mca_lora_logits_postprocess", "mca_lora_logits_postprocess_hook")
    tree = ast.parse(ROLL.source(path))
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    found = {"torch": torch}
    exec(compile(tree, path, "exec"), found)
    registered = "self.output_layer.register_forward_hook(mca_lora_logits_postprocess_hook)"
    assert ROLL.source("mcore_adapter/src/mcore_adapter/models/model_factory.py").count(registered) == 1
    return found["mca_lora_logits_postprocess_hook"]


def model_of(hook, *, is_sequence_parallel: bool = False) -> Body:
    model = Body(vocabulary=VOCABULARY, is_sequence_parallel=is_sequence_parallel)
    model.output_layer.register_forward_hook(hook)
    return model


class Strategy(cases.Strategy):
    """Its logits are a model's, in training and where log-probabilities are measured."""

    def __init__(self, case: RowCase, step: Step, forward_step, model: Body):
        super().__init__(case, step, None, forward_step)
        self.models_unwrapped = [model]

    def logits(self, data: Data):
        return self.models_unwrapped[0](self._get_feature_on_this_cp_rank(data.batch["input_ids"]))


def step_of(case: RowCase, model: Body, forward_step, *, is_fused: bool):
    """(loss of this rank's metrics, gradients, most rows of a tensor as wide as the logits)."""
    step = ADAPTER.step(case)
    launch, is_on_policy = ADAPTER.settings(case, **TERMS, **(OURS if is_fused else {}))
    launch = replace(launch, config=replace(launch.config, max_logits_bytes=SMALL))
    strategy = Strategy(case, step, forward_step, model)
    if is_fused:
        place(strategy)
    loss = RollLoss(launch, strategy, is_on_policy=is_on_policy)
    order = [index for batch in list(case.micro_batches())[strategy.groups.dp.rank()] for index in batch]
    data = Data({name: column[order] for name, column in step.columns.items()}, {})
    with SeenShapes() as seen:
        metrics = strategy.train_step(batch=data, loss_func=loss)
    columns = model.output_layer.weight.shape[0]
    rows = max(math.prod(shape[:-1]) for shape in seen.shapes if shape and shape[-1] == columns)
    total = sum(log["actor/total_loss@sum"] for log in metrics)
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}, rows


def steps_on_a_rank(rank: int, case: RowCase, is_sequence_parallel: bool, is_rolls: bool):
    hook, forward_step = mca_lora_logits_postprocess_hook, cases.emulated_forward_step
    if is_rolls:
        hook, forward_step = rolls_own_hook(), roll_forward_step
    return [
        step_of(case, model_of(hook, is_sequence_parallel=is_sequence_parallel), forward_step, is_fused=is_fused)
        for is_fused in (False, True)
    ]


@pytest.mark.megatron
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("loss", "is_rolls"), [("gspo", False), ("cispo", False), pytest.param("gspo", True, marks=pytest.mark.host("ROLL_ROOT"))]
)
def test_a_step_is_that_of_logits_and_makes_none(loss, is_rolls, layout):
    """tp with sequence parallelism, cp, KL and entropy terms, chunks of a few rows; ROLL's own forward step and hook."""
    case = RowCase(loss=loss, aggregation="prompt_mean", **layout)
    options = {"tensor_model_parallel_size": case.tp, "context_parallel_size": case.cp, "timeout": 300}
    work = partial(steps_on_a_rank, case=case, is_sequence_parallel=case.tp > 1, is_rolls=is_rolls)
    for of_logits, of_hidden in run_ranks(work, case.tp * case.cp, **options):
        assert abs(of_hidden[0] - of_logits[0]) < OF_LOSS * max(abs(of_logits[0]), 1)
        for name in ("embedding.weight", "output_layer.weight"):
            assert of_logits[1][name].abs().max() > 1e-3, "a step that trains something"
            assert relative(of_hidden[1][name], of_logits[1][name]) < OF_GRADIENT, name
        # All rows of a micro-batch with logits; without, a chunk, or the columns of a weight that is turned.
        assert of_hidden[2] <= max(HIDDEN, 3 * case.tp) < 16 <= of_logits[2]


# Old log-probabilities


def roll_file(name: str):
    """A module of mcore_adapter by its file: its package imports what is stubbed."""
    path = ROLL.path("mcore_adapter", "src", *name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def measured_on_a_rank(rank: int, tp: int, is_rolls: bool):
    """What ROLL's strategy measures without gradients: by its own functions, by ours of logits, by ours without; the most rows of a
    tensor as wide as the logits."""
    tokens = torch.randint(0, VOCABULARY, (3, 16), generator=torch.Generator().manual_seed(7))
    if is_rolls:
        module = ROLL.load("roll.distributed.strategy.megatron_strategy")
        parallel = roll_file("mcore_adapter.parallel_functions.vocab_parallel")
        module.vocab_parallel_logprobs = parallel.vocab_parallel_logprobs
        module.mpu = importlib.import_module("megatron.core.parallel_state")
        hook, last = rolls_own_hook(), (torch.ones_like(tokens),)
    else:
        module = own_log_probs.modules_of("ROLL")["roll.distributed.strategy.megatron_strategy"]
        hook, last = mca_lora_logits_postprocess_hook, ()
    own = module.MegatronInferStrategy
    strategy = SimpleNamespace(
        megatron_train_args=SimpleNamespace(cross_entropy_loss_fusion=False),
        worker_config=SimpleNamespace(logits_in_fp32=True),
        _get_feature_on_this_cp_rank=lambda feature, name: feature,
    )
    log_probs.MAX_LOGITS_BYTES, found = SMALL, []
    for which in ("theirs", "ours", "fused"):
        model = model_of(hook, is_sequence_parallel=tp > 1).eval()
        strategy.models_unwrapped = [model]
        if which == "ours":
            own_log_probs.install("ROLL")
        if which == "fused":
            place(strategy)
        if which == "theirs" and not is_rolls:
            continue
        with torch.no_grad(), SeenShapes() as seen:
            logits = model(tokens)
            assert isinstance(logits, CarriedRows) == (which == "fused")
            labels = tokens if is_rolls else tokens.roll(-1, 1)
            entropy = own.op_compute_entropy(strategy, logits.clone() if which == "theirs" else logits, *last)
            values = own.op_compute_log_probs(strategy, logits, labels, *last), entropy
        columns = model.output_layer.weight.shape[0]
        rows = max(math.prod(shape[:-1]) for shape in seen.shapes if shape and shape[-1] == columns)
        found.append((*(value[:, :15] for value in values), rows))
    return found


@pytest.mark.megatron
@pytest.mark.parametrize("is_rolls", [False, pytest.param(True, marks=pytest.mark.host("ROLL_ROOT"))])
@pytest.mark.parametrize("tp", [1, 2])
def test_old_log_probabilities_are_measured_without_logits(tp, is_rolls):
    answers = run_ranks(partial(measured_on_a_rank, tp=tp, is_rolls=is_rolls), tp, tensor_model_parallel_size=tp)
    for first, *others, of_hidden in answers:
        for each in (*others, of_hidden):
            assert relative(each[0], first[0]) < OF_LOSS and relative(each[1], first[1]) < OF_LOSS
        assert first[0].std() > 0.1
        assert of_hidden[2] <= max(HIDDEN, 3 * tp) < 48 == first[2]


# The hook


def hooks_on_a_rank(rank: int):
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    model = model_of(mca_lora_logits_postprocess_hook)
    place(SimpleNamespace(models_unwrapped=[model]))
    layer = model.output_layer
    assert isinstance(model(tokens), CarriedRows) and not hasattr(layer, "calls")
    # The layer's own logits, for a loss that does not train the head, have the hook.
    own, _ = layer(torch.ones(4, 2, HIDDEN), weight=layer.weight.detach())
    assert type(own) is torch.Tensor and layer.calls == 1
    left = model_of(lambda *_: None)
    with pytest.raises(ConfigError, match=r"the output layer has a hook, .*lambda.*test_roll_head.py:\d+.*remove the hook, or "):
        place(SimpleNamespace(models_unwrapped=[left]))
    left.output_layer.register_forward_hook(mca_lora_logits_postprocess_hook)
    for has_gradients in (True, False):  # without place it would be given CarriedRows
        with torch.set_grad_enabled(has_gradients), pytest.raises(ConfigError, match="`view_as`"):
            left(tokens)
    case = RowCase(loss="grpo", aggregation="token_mean")
    step = ADAPTER.step(case)
    strategy = Strategy(case, step, cases.emulated_forward_step, left)
    launch, is_on_policy = ADAPTER.settings(case, **OURS)
    loss = RollLoss(launch, strategy, is_on_policy=is_on_policy)
    # What a host's function of autograd may make of CarriedRows.
    strategy.logits = lambda data: torch.zeros(*data.batch["input_ids"].shape, HIDDEN)
    with pytest.raises(ConfigError, match="FUSED_LM_HEAD_LOSS=true: the loss is given a plain tensor"):
        strategy.train_step(batch=Data(step.columns, {}), loss_func=loss)
    left.config.fp16 = True
    with pytest.raises(ConfigError, match=r"HEAD_LOSS=true with fp16: .*train in bf16"):
        place(SimpleNamespace(models_unwrapped=[left]))
    with pytest.raises(ConfigError, match=r"MEGATRON_RL_FUSED_LM_HEAD_LOSS=true with mtp_num_layers=1"):
        place(SimpleNamespace(models_unwrapped=[Body(has_mtp=True)]))
    return True


@pytest.mark.megatron
def test_the_hook_sees_logits_alone_and_another_one_is_refused():
    assert run_ranks(hooks_on_a_rank, 1) == [True]
