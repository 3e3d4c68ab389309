"""Where our head is placed in the model of miles and slime, which forward it takes, and the hosts and models that it refuses."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from carrier_cases import FUSED, INIT, UNTIED, HostStep, batch_of, host_args, host_model, host_of
from foreign_heads import FOREIGN_HEADS, check_refusals, subclassed
from helpers import error_of, pool_of, set_global_args
from host_steps import Case, one
from launch_settings import CUSTOM_LOSS, REDUCER
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.args import HEAD_REMEDY, head_places, host_named
from megatron_rl.hosts.contract import OWN
from megatron_rl.hosts.heads.carried_log_probs import carried_log_probs
from megatron_rl.hosts.heads.carrier import Carrier, carry
from megatron_rl.hosts.heads.placed_head import place_head, take_over
from megatron_rl.hosts.reducer import get_pg_loss_reducer
from megatron_rl.hosts.training_hooks import custom_megatron_init
from megatron_rl.layout.groups import SINGLE
from megatron_rl.megatron.head import HeadInputs, HeadSettings
from megatron_rl.megatron.model import find_output_layer
from megatron_rl.testing.invariance import Layout
from megatron_rl.testing.layout_step import LayoutModel

SLIME = host_named("slime")
pool = pool_of(2)


# The host's own code

NAMES = ("args", "unconcat_tokens", "total_lengths", "response_lengths", "with_entropy", "others")
MEASURE = f"def get_log_probs_and_entropy(logits, *, {', '.join(NAMES)}): ..."
COMPUTE = "class MegatronTrainRayActor:\n    def compute_log_prob(self): return get_log_probs_and_entropy"
BUILD = "def setup_model_and_optimizer(args, role='actor'): return [args.model], None, None"
INITIALIZE = "def initialize_model_and_optimizer(args): return setup_model_and_optimizer(args)"
SOUND = {"model": f"{BUILD}\n{INITIALIZE}", "actor": f"{MEASURE}\n{COMPUTE}"}


def as_slime(monkeypatch, **sources: str) -> dict[str, ModuleType]:
    """Modules in slime's places, of these texts."""
    modules = {}
    for name, source in (SOUND | sources).items():
        modules[name] = ModuleType(f"{SLIME.training_package}.{name}")
        modules[name].__file__ = f"slime/{name}.py"
        exec(source, vars(modules[name]))
        monkeypatch.setitem(sys.modules, modules[name].__name__, modules[name])
    return modules


MOVED = [
    pytest.param({"model": ""}, "has no setup_model_and_optimizer .slime/model.py.", id="no builder"),
    pytest.param({"model": BUILD}, "has no initialize_model_and_optimizer", id="no caller"),
    pytest.param(
        {"model": f"def setup_model_and_optimizer(role, args): ...\n{INITIALIZE}"},
        r"setup_model_and_optimizer takes \(role, args\), ours is made for \(args, role, ...\) \(slime.*, no source\)",
        id="other arguments",
    ),
    pytest.param(
        {"model": f"{BUILD}\ndef initialize_model_and_optimizer(): build()"},
        "initialize_model_and_optimizer does not call setup_model_and_optimizer",
        id="another path",
    ),
    pytest.param({"actor": MEASURE}, "has no MegatronTrainRayActor.compute_log_prob", id="no actor"),
    pytest.param(
        {"actor": f"{MEASURE.replace('logits', 'hidden')}\n{COMPUTE}"},
        r"get_log_probs_and_entropy takes \(hidden, args",
        id="measures from something else",
    ),
]
SETTINGS = {**CUSTOM_LOSS, **INIT, "loss_aggregation": "sample_mean", "rollout_batch_size": 8}


@pytest.mark.parametrize(("sources", "says"), MOVED)
def test_a_host_that_builds_its_model_in_another_way_is_refused_by_the_init_hook(sources, says, monkeypatch):
    as_slime(monkeypatch, **sources)
    with pytest.raises(ConfigError, match=f"slime's .*{says}.*our head cannot be placed; remove --fused-lm-head-loss"):
        custom_megatron_init(Namespace(**SETTINGS, fused_lm_head_loss=True))


def problems_of_slime(*, is_fused: bool) -> list[str]:
    return [text for one in head_places(is_fused=is_fused) for text in one.problems("slime", SLIME.training_package, HEAD_REMEDY)]


def test_the_fp32_head_does_not_ask_how_the_host_measures(monkeypatch):
    as_slime(monkeypatch, actor="")
    assert problems_of_slime(is_fused=False) == []
    (problem,) = problems_of_slime(is_fused=True)
    assert "slime.backends.megatron_utils.actor has no get_log_probs_and_entropy" in problem


def test_a_host_that_is_not_there_is_refused():
    first, second = problems_of_slime(is_fused=True)
    assert "slime.backends.megatron_utils.model of slime cannot be imported" in first and "_utils.actor of slime" in second


def test_a_host_is_taken_over_once_and_keeps_what_is_not_ours(monkeypatch):
    modules = as_slime(monkeypatch, actor=f"{MEASURE.replace('...', 'return [logits]')}\n{COMPUTE}")
    model, actor = modules["model"], modules["actor"]
    own = model.setup_model_and_optimizer, actor.get_log_probs_and_entropy
    for _ in range(2):
        take_over(SLIME, HeadSettings(is_fused=True))
        assert [vars(function)[OWN] for function in (model.setup_model_and_optimizer, actor.get_log_probs_and_entropy)] == [*own]
    args, logits = Namespace(model=nn.Linear(2, 2)), torch.zeros(1, 5, 7)
    # A run without a head: its model is not looked at, and logits go to the host's own function.
    assert model.initialize_model_and_optimizer(args)[0] == [args.model]
    named = dict.fromkeys(NAMES)
    assert actor.get_log_probs_and_entropy(logits, **named) == [logits]


def test_what_the_host_measures_with_and_we_do_not_know_is_refused():
    carrier = carry(HeadInputs(torch.zeros(5, 1, 4), torch.zeros(7, 4), False), SINGLE)
    named = {"args": Case().args(), "unconcat_tokens": [], "total_lengths": [], "response_lengths": []}
    with pytest.raises(
        ConfigError, match=r"measures log-probabilities with top_p_token_ids=\[\[1\]\], which our head does not know"
    ):
        carried_log_probs(carrier, **named, top_p_token_ids=[[1]], max_seq_lens=None)


# Which forward


# (name, model.train(), gradients are enabled). Nothing of the hosts has gradients off in a model that trains.
FORWARDS = (("trains", True, True), ("evaluates", False, True), ("measures", False, False), ("other", True, False))


def forwards_on_rank(rank: int, flags: dict, bf16: bool) -> dict[str, tuple]:
    """By forward: (type, dtype and values of the model's output, whether they are the layer's own)."""
    args = host_args(HostStep(Case(), flags=flags, tiny=replace(UNTIED, bf16=bf16)))
    models, _, _ = host_model(args)
    own = LayoutModel(args.layout, 64, args.tiny).models[0]
    case = Case()
    tokens, packed, _ = batch_of(HostStep(case), case.samples()[:2], case.samples())

    def output_of(model):
        return model(input_ids=tokens, position_ids=None, attention_mask=None, labels=None, packed_seq_params=packed)

    found = {}
    for name, is_training, has_gradients in FORWARDS:
        models[0].train(is_training)
        with torch.set_grad_enabled(has_gradients):
            output, expected = output_of(models[0]), output_of(own)
        is_own = None if isinstance(output, Carrier) else torch.equal(output, expected)
        found[name] = (type(output).__name__, str(output.dtype), tuple(output.shape) == tuple(expected.shape), is_own)
    return found


LOGITS, FP32_LOGITS = ("Tensor", "torch.float32", True, True), ("Tensor", "torch.float32", True, False)
CARRIED = ("Carrier", "torch.float32", True, None)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("flags", "bf16", "expected"),
    [
        pytest.param({}, False, [LOGITS] * 4, id="neither"),
        pytest.param(FUSED, False, [CARRIED, LOGITS, CARRIED, LOGITS], id="fused"),
        pytest.param({"fp32_lm_head": True}, True, [FP32_LOGITS] * 4, id="fp32"),
        pytest.param(FUSED | {"fp32_lm_head": True}, True, [CARRIED, FP32_LOGITS, CARRIED, FP32_LOGITS], id="both"),
    ],
)
def test_the_forwards_that_train_and_measure_get_a_carrier_and_no_other(pool, flags, bf16, expected):
    """FB-39: logits of another precision in old log-probabilities than in the loss make the first ratio another number than 1."""
    [found] = pool.run(forwards_on_rank, flags, bf16, world_size=1)
    assert [*found.values()] == expected


# Models


def with_bias(layer):
    layer.bias = nn.Parameter(torch.zeros(layer.weight.shape[0]))


def hidden_away(model):
    model.lm_head = model.output_layer
    del model.output_layer


def sharded(layer):
    """As FSDP leaves the parameters of a module outside of its forward."""
    mesh = init_device_mesh("cpu", (1,))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))


CHANGES = {
    **{words[0]: change for change, words in FOREIGN_HEADS.items()},
    "bias": lambda model: with_bias(model.output_layer),
    "gathered": lambda model: setattr(model.output_layer, "gather_output", True),
    "mtp": lambda model: setattr(model.config, "mtp_num_layers", 1),
    "deferred": lambda model: setattr(model.config, "defer_embedding_wgrad_compute", True),
    "elsewhere": hidden_away,
    "fsdp": lambda model: sharded(model.output_layer),
    "nothing": lambda model: None,
}


def refusals_on_rank(rank: int, names: list[str], layout: Layout) -> dict[str, str]:
    found = {}
    for name in names:
        models = LayoutModel(layout, 64, UNTIED).models
        if find_output_layer(models[0]) is not None:
            CHANGES[name](models[0].module)
        found[name] = error_of(lambda models=models: place_head(models, HeadSettings(is_fused=True)))
    return found


@pytest.mark.megatron
def test_a_model_whose_logits_are_not_x_w_is_refused_by_name(pool):
    [found] = pool.run(refusals_on_rank, list(CHANGES), Layout(), world_size=1)
    # On one rank there is nothing to gather.
    assert found.pop("nothing") == found.pop("gathered") == ""
    check_refusals([found.pop(words[0]) for words in FOREIGN_HEADS.values()], "--fused-lm-head-loss")
    says = {
        "bias": "with a bias in the output layer",
        "mtp": "--fused-lm-head-loss with mtp_num_layers=1: multi-token prediction calls the output layer again",
        "fsdp": "--fused-lm-head-loss with FSDP: the weight of the output layer is whole within the layer's own forward alone",
        "elsewhere": "the model is a GPTModel whose output layer is not found",
        "deferred": "--fused-lm-head-loss with defer_embedding_wgrad_compute=True",
    }
    assert {name: text in found[name] for name, text in says.items()} == dict.fromkeys(says, True), found


@pytest.mark.megatron
def test_logits_that_tensor_parallel_ranks_gather_are_refused_on_each(pool):
    layout = Layout(tensor=2)
    one, two = pool.run(refusals_on_rank, ["gathered"], layout, world_size=2, **layout.model_parallel)
    assert one == two and one["gathered"].startswith(
        "ConfigError: the output layer gathers its logits over 2 tensor-parallel ranks"
    )
    assert "build the model with parallel_output=True" in one["gathered"]


@pytest.mark.megatron
def test_a_fault_of_the_last_stage_stops_the_first_one_too(pool):
    layout = Layout(pipeline=2)
    adapter = FOREIGN_HEADS[subclassed][0]
    first, last = pool.run(refusals_on_rank, [adapter, "nothing"], layout, world_size=2, **layout.model_parallel)
    assert first[adapter].startswith("ConfigError: another rank refused its output layer")
    assert adapter in last[adapter] and first["nothing"] == last["nothing"] == ""


def critic_on_rank(rank: int) -> list[bool]:
    args = host_args(HostStep(Case(), flags=FUSED))
    host_model(args)
    models, *_ = host_of(args).initialize_model_and_optimizer(args, "critic")
    return ["forward" in vars(find_output_layer(models[0]))]


@pytest.mark.megatron
def test_a_critic_keeps_its_own_output_layer(pool):
    """It has one column, and its loss is the host's."""
    assert pool.run(critic_on_rank, world_size=1) == [[False]]


# A launch whose model has no head of ours


def test_our_loss_and_our_reducer_refuse_a_model_without_the_head_that_was_asked_for():
    """The init hook was not called, or the model was built before: the loss would be of the host's logits, without a word."""
    for flags in ({"fused_lm_head_loss": True}, {"fp32_lm_head": True}):
        with pytest.raises(ConfigError, match="have no effect: the init hook has not placed our head in this model.*add --custom"):
            one(Case(), **INIT, **flags)
    set_global_args(Namespace(**REDUCER, **INIT, loss_aggregation="sample_mean", rollout_batch_size=8, fp32_lm_head=True))
    with pytest.raises(ConfigError, match="have no effect: the init hook has not placed our head in this model"):
        get_pg_loss_reducer([3], [2], [torch.ones(2, dtype=torch.int32)], False)
