"""What our init hook puts into miles and slime: our head in the model, and no forward for old log-probabilities; what it refuses.

tests/test_carrier.py has the steps of the head, tests/test_hosts.py those without the forward.
"""

from __future__ import annotations

import contextlib
import io
import sys
from argparse import Namespace
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from carrier_cases import FUSED, INIT, UNTIED, HostStep, batch_of, host_args, host_model, host_of
from helpers import error_of, pool_of, set_global_args
from host_steps import CUSTOM_LOSS, REDUCER, Case, host_batch, one
from test_fused_head_models import subclassed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.args import HEAD_REMEDY, head_places, host_named
from megatron_rl.hosts.contract import OWN
from megatron_rl.hosts.heads.carried_log_probs import carried_log_probs
from megatron_rl.hosts.heads.carrier import Carrier, carry
from megatron_rl.hosts.heads.placed_head import place_head, take_over
from megatron_rl.hosts.heads.skipped_log_probs import unknown_log_probs
from megatron_rl.hosts.reducer import get_pg_loss_reducer
from megatron_rl.hosts.training_hooks import custom_megatron_init
from megatron_rl.layout.groups import SINGLE, resolve_groups
from megatron_rl.megatron.head import HeadInputs, HeadSettings
from megatron_rl.megatron.model import find_output_layer
from megatron_rl.testing.invariance import Layout
from megatron_rl.testing.layout_step import LayoutModel

SLIME = host_named("slime")
pool = pool_of(4)


# The host's own code

NAMES = ("args", "unconcat_tokens", "total_lengths", "response_lengths", "with_entropy", "others")
MEASURE = f"def get_log_probs_and_entropy(logits, *, {', '.join(NAMES)}): return [logits]"
# read: what the advantages take from the old log-probabilities.
ACTOR = """
def compute_advantages_and_returns(args, rollout_data):
    xs = rollout_data.get("log_probs") or rollout_data.get("values")
    if xs is None:
        raise TypeError("no lengths")
    rollout_data["advantages"] = [args.read(x) for x in xs]

class MegatronTrainRayActor:
    def __init__(self, args):
        self.args, self.measured = args, []

    def compute_log_prob(self, data_iterator, num_microbatches, store_prefix=""):
        self.measured.append(store_prefix)
        own = get_log_probs_and_entropy
        return {store_prefix + "log_probs": [torch.zeros(1)]}

    def train_actor(self, rollout_data, num_microbatches=(2,)):
        rollout_data.update(self.compute_log_prob(None, num_microbatches, store_prefix="ref_"))
        rollout_data.update(self.compute_log_prob(None, num_microbatches))
        compute_advantages_and_returns(self.args, rollout_data)
        return rollout_data
"""
BUILD = "def setup_model_and_optimizer(args, role='actor'): return [args.model], None, None"
INITIALIZE = "def initialize_model_and_optimizer(args): return setup_model_and_optimizer(args)"
SOUND = {"model": f"{BUILD}\n{INITIALIZE}", "actor": f"import torch\n{MEASURE}\n{ACTOR}"}


def as_slime(**sources: str) -> dict[str, ModuleType]:
    """Modules in slime's places, of these texts."""
    modules = {}
    for name, source in (SOUND | sources).items():
        modules[name] = ModuleType(f"{SLIME.training_package}.{name}")
        modules[name].__file__ = f"slime/{name}.py"
        exec(source, vars(modules[name]))
        sys.modules[modules[name].__name__] = modules[name]
    return modules


@pytest.fixture
def slime(monkeypatch):
    """as_slime, whose modules are gone at the end."""
    for name in SOUND:
        monkeypatch.setitem(sys.modules, f"{SLIME.training_package}.{name}", None)
    return as_slime


PLACED = {"fused_lm_head_loss": True}, "our head cannot be placed; remove --fused-lm-head-loss"
SKIPPED = {"skip_old_log_probs": True}, "no forward can be left out; remove --skip-old-log-probs"
MOVED = [
    (PLACED, {"model": ""}, "has no setup_model_and_optimizer .slime/model.py."),
    (PLACED, {"model": BUILD}, "has no initialize_model_and_optimizer"),
    (
        PLACED,
        {"model": f"def setup_model_and_optimizer(role, args): ...\n{INITIALIZE}"},
        r"setup_model_and_optimizer takes \(role, args\), ours is made for \(args, role, ...\) \(slime.*, no source\)",
    ),
    (
        PLACED,
        {"model": f"{BUILD}\ndef initialize_model_and_optimizer(): build()"},
        "initialize_model_and_optimizer does not call setup_model_and_optimizer",
    ),
    (PLACED, {"actor": MEASURE}, "has no MegatronTrainRayActor.compute_log_prob"),
    (PLACED, {"actor": SOUND["actor"].replace("(logits,", "(hidden,")}, r"get_log_probs_and_entropy takes \(hidden, args"),
    (SKIPPED, {"actor": SOUND["actor"].replace("store_prefix", "prefix")}, "compute_log_prob has no argument store_prefix"),
    (
        SKIPPED,
        {"actor": SOUND["actor"].replace("    compute_advantages_and_returns(", "    advantages(")},
        "train_actor does not call compute_advantages_and_returns",
    ),
]


@pytest.mark.parametrize(("launch", "sources", "says"), MOVED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_host_of_another_path_is_refused_by_the_init_hook(slime, launch, sources, says):
    slime(**sources)
    settings, remedy = launch
    args = Namespace(**CUSTOM_LOSS, **INIT, **settings, loss_aggregation="sample_mean", rollout_batch_size=8)
    with pytest.raises(ConfigError, match=f"slime's .*{says}.*{remedy}"):
        custom_megatron_init(args)


def problems_of_slime(*, is_fused: bool) -> list[str]:
    return [text for one in head_places(is_fused=is_fused) for text in one.problems("slime", SLIME.training_package, HEAD_REMEDY)]


def test_a_host_that_is_not_there_is_refused_and_the_fp32_head_does_not_ask_how_it_measures(slime):
    first, second = problems_of_slime(is_fused=True)
    assert "slime.backends.megatron_utils.model of slime cannot be imported" in first and "_utils.actor of slime" in second
    slime(actor="")
    assert problems_of_slime(is_fused=False) == []


def test_a_host_is_taken_over_once_and_keeps_what_is_not_ours(slime):
    modules = slime()
    model, actor = modules["model"], modules["actor"]
    own = model.setup_model_and_optimizer, actor.get_log_probs_and_entropy
    for _ in range(2):
        take_over(SLIME, HeadSettings(is_fused=True))
        assert [vars(function)[OWN] for function in (model.setup_model_and_optimizer, actor.get_log_probs_and_entropy)] == [*own]
    args, logits = Namespace(model=nn.Linear(2, 2)), torch.zeros(1, 5, 7)
    # A run without a head: its model is not looked at, and logits go to the host's own function.
    assert model.initialize_model_and_optimizer(args)[0] == [args.model]
    assert actor.get_log_probs_and_entropy(logits, **dict.fromkeys(NAMES)) == [logits]


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


def hidden_away(model):
    model.lm_head = model.output_layer
    del model.output_layer


def sharded(model):
    """As FSDP leaves the parameters of a module outside of its forward."""
    layer, mesh = model.output_layer, init_device_mesh("cpu", (1,))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))


# The change of a model -> what is said; tests/test_fused_head_models.py has the other output layers that are refused.
CHANGES = {
    "foreign": (subclassed, "--fused-lm-head-loss: the output layer is a CappedLayer, a subclass of Megatron's"),
    "gathered": (lambda model: setattr(model.output_layer, "gather_output", True), ""),  # on one rank there is nothing to gather
    "mtp": (
        lambda model: setattr(model.config, "mtp_num_layers", 1),
        "--fused-lm-head-loss with mtp_num_layers=1: multi-token prediction calls the output layer again",
    ),
    "deferred": (
        lambda model: setattr(model.config, "defer_embedding_wgrad_compute", True),
        "--fused-lm-head-loss with defer_embedding_wgrad_compute=True",
    ),
    "elsewhere": (hidden_away, "the model is a GPTModel whose output layer is not found"),
    "fsdp": (
        sharded,
        "--fused-lm-head-loss with FSDP: the weight of the output layer is whole within the layer's own forward alone",
    ),
    "nothing": (lambda model: None, ""),
}


def refusals_on_rank(rank: int, names: list[str], layout: Layout) -> dict[str, str]:
    found = {}
    for name in names:
        models = LayoutModel(layout, 64, UNTIED).models
        if find_output_layer(models[0]) is not None:
            CHANGES[name][0](models[0].module)
        found[name] = error_of(lambda models=models: place_head(models, HeadSettings(is_fused=True)))
    return found


@pytest.mark.megatron
def test_a_model_whose_logits_are_not_x_w_is_refused_by_name(pool):
    [found] = pool.run(refusals_on_rank, list(CHANGES), Layout(), world_size=1)
    for name, (_, says) in CHANGES.items():
        assert says in found[name] and bool(says) == bool(found[name]), found


@pytest.mark.megatron
def test_logits_that_tensor_parallel_ranks_gather_are_refused_on_each(pool):
    layout = Layout(tensor=2)
    one, two = pool.run(refusals_on_rank, ["gathered"], layout, world_size=2, **layout.model_parallel)
    said = "ConfigError: the output layer gathers its logits over 2 tensor-parallel ranks"
    assert one == two and one["gathered"].startswith(said) and "build the model with parallel_output=True" in one["gathered"]


@pytest.mark.megatron
def test_a_fault_of_the_last_stage_stops_the_first_one_too(pool):
    layout = Layout(pipeline=2)
    first, last = pool.run(refusals_on_rank, ["foreign", "nothing"], layout, world_size=2, **layout.model_parallel)
    assert first["foreign"].startswith("ConfigError: another rank refused its output layer")
    assert "CappedLayer" in last["foreign"] and first["nothing"] == last["nothing"] == ""


def critic_on_rank(rank: int) -> list[bool]:
    args = host_args(HostStep(Case(), flags=FUSED))
    host_model(args)
    models, *_ = host_of(args).initialize_model_and_optimizer(args, "critic")
    return ["forward" in vars(find_output_layer(models[0]))]


@pytest.mark.megatron
def test_a_critic_keeps_its_own_output_layer(pool):
    """It has one column, and its loss is the host's."""
    assert pool.run(critic_on_rank, world_size=1) == [[False]]


def test_our_loss_and_our_reducer_refuse_a_model_without_the_head_that_was_asked_for():
    """The init hook was not called, or the model was built before: the loss would be of the host's logits, without a word."""
    for flags in ({"fused_lm_head_loss": True}, {"fp32_lm_head": True}):
        with pytest.raises(ConfigError, match="have no effect: the init hook has not placed our head in this model.*add --custom"):
            one(Case(), **INIT, **flags)
    set_global_args(Namespace(**REDUCER, **INIT, loss_aggregation="sample_mean", rollout_batch_size=8, fp32_lm_head=True))
    with pytest.raises(ConfigError, match="have no effect: the init hook has not placed our head in this model"):
        get_pg_loss_reducer([3], [2], [torch.ones(2, dtype=torch.int32)], False)


# The forward for old log-probabilities


def started(**settings) -> tuple[Namespace, str]:
    """The arguments of a run of slime after its init hook, and what that printed."""
    args = Case(host="slime", settings=settings).args()
    args.read = lambda x: torch.zeros_like(x) + 1.5
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        custom_megatron_init(args)
    return args, printed.getvalue()


def rollout_of(case: Case) -> dict:
    samples = case.samples()
    return {
        "total_lengths": [sample.total for sample in samples],
        "response_lengths": [len(sample.mask) for sample in samples],
        "loss_masks": [torch.tensor(sample.mask) for sample in samples],
    }


def skipped_on_rank(rank: int) -> dict:
    """Rollouts of a run without our flag, of two with it, and of the first run once more: (the forwards, the names in its data)."""
    actor, rollout = as_slime()["actor"].MegatronTrainRayActor, rollout_of(Case())
    asked = {**INIT, "skip_old_log_probs": True}
    runs = [started()[0], *(started(**asked)[0] for _ in range(2))]  # the second hook puts nothing around what is there
    found = {"printed": started(**asked)[1], "rollouts": []}
    for args in (*runs, runs[0]):
        made = actor(args)
        data = made.train_actor(dict(rollout))
        found["rollouts"].append((made.measured, sorted(data.keys() - rollout.keys()), data["advantages"]))
    args = runs[1]
    found["three steps"] = error_of(lambda: actor(args).train_actor(dict(rollout), (2, 2, 1)))
    own = [torch.zeros(len(mask)) for mask in rollout["loss_masks"]]
    found["its own"] = error_of(lambda: actor(args).train_actor(rollout | {"log_probs": own}))
    args.read = lambda x: x
    found["a reader"] = actor(args).train_actor(dict(rollout))["advantages"]
    found["a critic"] = actor(args).train_actor(rollout | {"values": own})["advantages"]
    return found


@pytest.mark.megatron
def test_the_forward_is_left_out_of_the_runs_that_ask_for_it(pool):
    """The reference is measured as before, and advantages have the lengths of responses. An advantage that reads the old
    log-probabilities is NaN, which our loss refuses; with a critic the host takes the lengths of its values."""
    [found] = pool.run(skipped_on_rank, world_size=1)
    measured, data, _ = found["rollouts"][0]
    assert (measured, data) == (["ref_", ""], ["advantages", "log_probs", "ref_log_probs"])
    assert found["rollouts"][3] == found["rollouts"][0], "a run beside it, in the same process, keeps its forward"
    sizes = [len(mask) for mask in rollout_of(Case())["loss_masks"]]
    for measured, data, advantages in found["rollouts"][1:3]:
        assert (measured, data) == (["ref_"], ["advantages", "ref_log_probs"])
        assert [values.tolist() for values in advantages] == [[1.5] * size for size in sizes]
    assert "old log-probabilities are the step's own, each ratio is 1" in found["printed"]
    assert all(values.isnan().all() for values in found["a reader"])
    assert [values.tolist() for values in found["a critic"]] == [[0.0] * size for size in sizes]
    assert "this rollout is 3 optimiser steps, and from the second on" in found["three steps"]
    assert "make a rollout one step (--num-steps-per-rollout 1), or remove --skip-old-log-probs" in found["three steps"]
    assert "the rollout brings log_probs of its own, which would be ignored; remove --skip-old-log-probs" in found["its own"]


def lengths_on_rank(rank: int, layout: str) -> tuple[list[int], list[int]]:
    cp, case = resolve_groups().cp, Case(layout)
    longest = -(-max(sample.total for sample in case.samples()) // 4) * 4
    data = rollout_of(case) | {"max_seq_lens": [longest] * len(case.shapes) if layout == "bshd" else None}
    batch = host_batch(case, case.samples(), case.samples(), cp.rank(), cp.size())
    found = unknown_log_probs(data)
    assert all(values.dtype == torch.float32 and values.isnan().all() for values in found)
    return [len(values) for values in found], [len(values) for values in batch["log_probs"]]


@pytest.mark.megatron
@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_lengths_are_those_of_the_ranks_own_tokens(pool, cp_size, layout):
    for found, expected in pool.run(lengths_on_rank, layout, world_size=cp_size, context_parallel_size=cp_size):
        assert found == expected
