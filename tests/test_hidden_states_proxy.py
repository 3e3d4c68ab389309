"""The fused head in miles and slime: its step is the step of logits and makes none; a proxy names what else it is asked for.

Where our init hook places it, which forward for old log-probabilities it leaves out, and what it refuses. tests/test_hosts.py has
the steps without that forward, tests/test_whole_host.py the hosts' actors.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import error_of, pool_of, set_global_args
from host_steps import (
    CUSTOM_LOSS,
    GSPO,
    KEYS,
    REDUCER,
    REPLAY,
    TEMPERATURE,
    TERMS,
    TIS,
    VOCAB_SIZE,
    Case,
    Sample,
    host_batch,
    host_logits,
    one,
)
from proxy_cases import (
    FUSED,
    INIT,
    NAMES,
    SOUND,
    UNTIED,
    HostStep,
    batch_of,
    emulated_host,
    enlarge_head,
    found_on_rank,
    host_args,
    host_model,
    host_of,
    results,
    train_one_step,
)
from test_forward_step import SeenShapes
from test_fused_head import subclassed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.args import host_named
from megatron_rl.hosts.contract import OWN
from megatron_rl.hosts.heads.hidden_states_proxy import HiddenStatesProxy, inputs_of, make_proxy
from megatron_rl.hosts.heads.placed_head import place_head, take_over
from megatron_rl.hosts.heads.proxy_log_probs import proxy_log_probs
from megatron_rl.hosts.reducer import get_pg_loss_reducer
from megatron_rl.hosts.training_hooks import custom_megatron_init
from megatron_rl.layout.groups import SINGLE, resolve_groups
from megatron_rl.megatron.head import HeadInputs, HeadSettings
from megatron_rl.megatron.model import find_output_layer
from megatron_rl.testing.invariance import Layout
from megatron_rl.testing.layout_step import LayoutModel

# Two orders of float32 additions are up to 4e-6 of a parameter's gradient; one token more or less is 1e-2 and more.
TOLERANCE = 1e-5
TIED = replace(UNTIED, tie_embeddings=True)
# Wide enough that some tokens are clipped and some are not.
WIDE = {"eps_clip": 0.6, "eps_clip_high": 0.8}
GRPO, OF_GSPO = Case(settings=WIDE), Case(settings=WIDE | GSPO)
CISPO = Case(host="slime", settings=WIDE | {"advantage_estimator": "cispo"})
PADDED, CONTIGUOUS = replace(GRPO, layout="bshd"), replace(OF_GSPO, layout="allgather")
EVERY_TERM = Case(host="slime", settings=WIDE | TERMS | {"kl_loss_type": "k2"}, without=())
OBSERVES = {"observe_training_entropy": True}
OBSERVED = Case(settings=WIDE | OBSERVES | {"calculate_per_token_loss": True, "loss_aggregation": "token_mean"})
OBSERVED = replace(OBSERVED, shapes=[shape for shape in OBSERVED.shapes if any(shape[2])])
KEPT = Case(settings=WIDE | REPLAY["miles"] | OBSERVES)
KEPT_ALONE = Case(settings=WIDE | REPLAY["miles"] | TIS | {"policy_metrics": "none"}, without=())
K2 = TERMS | {"kl_loss_type": "k2", "entropy_coef": 0.0}
KEPT_OF_SLIME = Case(host="slime", settings=WIDE | REPLAY["slime"] | K2)
RECOMPUTED = {"recompute_loss_function": True}

SP, CP, PP, DP = Layout(tensor=2, sequence_parallel=True), Layout(context=2), Layout(pipeline=2), Layout(data=2)
INTERLEAVED, DEEP = Layout(pipeline=2, virtual_pipeline=2), replace(TIED, num_layers=4)
STEPS = {
    "one rank": [HostStep(GRPO), HostStep(OF_GSPO, tiny=TIED), HostStep(CISPO)],
    "one rank, padded rows, every term": [HostStep(PADDED), HostStep(EVERY_TERM, size=2), HostStep(OBSERVED, size=5)],
    "one rank, kept ids": [HostStep(KEPT), HostStep(KEPT_ALONE), HostStep(KEPT_OF_SLIME, tiny=TIED)],
    "TP2+SP, kept ids": [HostStep(KEPT, SP), HostStep(KEPT_ALONE, SP), HostStep(KEPT_OF_SLIME, SP, TIED)],
    "CP2, kept ids": [HostStep(KEPT, CP), HostStep(KEPT_ALONE, CP), HostStep(replace(KEPT_OF_SLIME, layout="allgather"), CP)],
    "one rank, the loss is recomputed": [HostStep(GRPO, flags=RECOMPUTED), HostStep(CISPO, tiny=TIED, flags=RECOMPUTED)],
    "TP2+SP": [HostStep(GRPO, SP), HostStep(OF_GSPO, SP, TIED), HostStep(CISPO, SP, TIED), HostStep(PADDED, SP)],
    "CP2": [HostStep(GRPO, CP, TIED), HostStep(OF_GSPO, CP), HostStep(CISPO, CP), HostStep(PADDED, CP), HostStep(CONTIGUOUS, CP)],
    "PP2": [HostStep(GRPO, PP), HostStep(OF_GSPO, PP, TIED), HostStep(CISPO, PP)],
    "PP2, interleaved": [HostStep(GRPO, INTERLEAVED, DEEP, size=1)],
    "DP2, distributed optimiser": [HostStep(GRPO, replace(DP, distributed_optimizer=True), size=2)],
}

SLIME = host_named("slime")
pool = pool_of(4)


@pytest.mark.megatron
@pytest.mark.parametrize("name", STEPS)
def test_the_step_of_a_proxy_is_the_step_of_logits(pool, name):
    """Loss, metrics, and the gradient of each parameter; and no tensor has a row of this rank's vocabulary for each token."""
    both = [replace(step, flags=step.flags | flags) for step in STEPS[name] for flags in ({}, FUSED)]
    layout = both[0].layout
    answers = pool.run(found_on_rank, both, world_size=layout.world_size, **layout.model_parallel)
    found = results(answers)
    for number, (plain, fused) in enumerate(zip(found[::2], found[1::2], strict=True)):
        assert fused.loss == pytest.approx(plain.loss, rel=1e-6, abs=1e-6)
        assert fused.reported == pytest.approx(plain.reported, rel=TOLERANCE, abs=1e-6)
        assert fused.gradient_error(plain) < TOLERANCE
        for parameter, gradient in plain.gradient.items():
            assert (fused.gradient[parameter] - gradient).norm() < TOLERANCE * gradient.norm() + 1e-9, parameter
        of_logits, of_proxy = (max(answer[2 * number + which][1] for answer in answers) for which in (0, 1))
        # The weight in a product is [H, V_tp].
        assert of_proxy <= UNTIED.hidden_size < of_logits


MEASURED = {
    "one rank": (Layout(), [GRPO, CISPO, PADDED, KEPT_OF_SLIME]),
    "TP2+SP": (SP, [CISPO, PADDED, KEPT_OF_SLIME]),
    "CP2": (CP, [GRPO, CISPO, PADDED, CONTIGUOUS, KEPT_OF_SLIME, replace(KEPT_OF_SLIME, layout="allgather")]),
}
# A host measures masked tokens too.
TRAINED = [(total, size, [1] * size) for total, size, _ in Case().shapes]


def measured_on_rank(rank: int, layout: Layout, cases: list[Case]) -> list[tuple]:
    """Of each case (what our function in the place of the host's measures of a proxy, what it must measure). The hidden states
    are logits: the weight of the head is the unit matrix. No row of a prompt's token is multiplied."""
    cp, tp, found = resolve_groups().cp, resolve_groups().tp, []
    for case in (replace(case, shapes=TRAINED) for case in cases):
        args = host_args(HostStep(case, layout, flags=FUSED | {"max_logits_bytes": 2**20}))
        host_model(args)
        samples, place = case.samples(), (cp.rank(), cp.size())
        leaves = [sample.logits.float() for sample in samples]
        hidden = host_logits(case, samples, samples, leaves, *place, torch.zeros(VOCAB_SIZE)).transpose(0, 1)
        if layout.sequence_parallel:
            hidden = torch.cat([hidden, hidden[: len(hidden) % 2]]).chunk(tp.size())[tp.rank()]
        weight = torch.eye(VOCAB_SIZE).chunk(tp.size())[tp.rank()]
        proxy = make_proxy(HeadInputs(hidden.contiguous(), weight, layout.sequence_parallel), tp).transpose(0, 1).contiguous()
        batch = host_batch(case, samples, samples, *place)
        named = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
        if case.host == "miles":
            named["max_seq_lens"] = batch["max_seq_lens"]
        elif case.keeps:
            named |= {name.removeprefix("rollout_"): batch[name] for name in KEYS["slime"]}
        with SeenShapes() as seen:
            answer = host_of(args, "actor").get_log_probs_and_entropy(proxy, args=args, with_entropy=True, **named)
        expected = host_batch(case, list(map(exact_scores, samples)), samples, *place)
        wanted = {"log_probs": expected["log_probs"], "entropy": expected["advantages"]}
        assert cp.size() > 1 or (sum(size for _, size, _ in TRAINED), weight.shape[0]) in seen.shapes
        found.append((answer if case.host == "miles" else answer[1], wanted))
    return found


def exact_scores(sample: Sample) -> Sample:
    """With its log-probabilities, and in the place of advantages its entropies."""
    rows = sample.logits[sample.prompt - 1 : -1]
    log_p = torch.log_softmax(rows / TEMPERATURE, -1)
    values = {"log_probs": sample.scores(rows, list(range(len(sample.mask)))), "advantages": -(log_p.exp() * log_p).sum(-1)}
    return replace(sample, values=sample.values | values)


@pytest.mark.megatron
@pytest.mark.parametrize("name", MEASURED)
def test_old_log_probabilities_are_measured_without_logits(pool, name):
    layout, cases = MEASURED[name]
    for answer in pool.run(measured_on_rank, layout, cases, world_size=layout.world_size, **layout.model_parallel):
        for found, expected in answer:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


HALF = replace(UNTIED, bf16=True)


@pytest.mark.megatron
def test_the_fp32_head_of_a_bf16_model_is_one_head_fused_or_not(pool):
    """FB-85: through Float16Module, whose cast the proxy survives without a copy. Below the head a hidden gradient is rounded to
    bf16 once more, and a rounding falls on the other side now and then; bf16 logits are another loss."""
    fp32 = {"fp32_lm_head": True}
    flags = [{}, fp32, FUSED, FUSED | fp32]
    steps = [HostStep(OF_GSPO, SP, HALF, flags=one) for one in flags]
    answers = pool.run(found_on_rank, steps, world_size=2, **SP.model_parallel)
    rounded, plain, fused_rounded, fused = results(answers)
    assert fused.loss == pytest.approx(plain.loss, rel=1e-4) and fused_rounded.loss == pytest.approx(rounded.loss, rel=1e-4)
    assert fused.gradient_error(plain) < 2e-2
    of_head = "output_layer.weight"
    assert (fused.gradient[of_head] - plain.gradient[of_head]).norm() < TOLERANCE * plain.gradient[of_head].norm()
    assert (rounded.gradient[of_head] - plain.gradient[of_head]).norm() > 100 * TOLERANCE * plain.gradient[of_head].norm()


def head_alone_on_rank(rank: int, flags: dict) -> torch.Tensor:
    """main_grad of a head whose model is not trained."""
    step = HostStep(GRPO, flags=flags)
    args = host_args(step)
    models, optimizer = host_model(args)
    enlarge_head(models, step.factor_of_head)
    models[0].requires_grad_(False)
    weight = models[0].module.output_layer.weight.requires_grad_()
    train_one_step(args, models, optimizer, step)
    return weight.main_grad.clone()


@pytest.mark.megatron
@pytest.mark.parametrize("flags", [{}, RECOMPUTED], ids=["plain", "the loss is recomputed"])
def test_a_head_that_is_trained_alone_gets_its_gradient(pool, flags):
    """Hidden states of frozen layers have no gradient, and logits have one: miles's checkpoint takes the latter for granted."""
    [of_logits], [found] = (pool.run(head_alone_on_rank, flags | fused, world_size=1) for fused in ({}, FUSED))
    assert of_logits.any() and (found - of_logits).norm() < TOLERANCE * of_logits.norm()


# What a HiddenStatesProxy is asked for


def proxy_of(*, dtype: torch.dtype = torch.float32) -> HiddenStatesProxy:
    """As the loss of a host gets it: 5 tokens, hidden size 4, 7 columns."""
    hidden = torch.randn(5, 1, 4, dtype=dtype, requires_grad=True)
    made = make_proxy(HeadInputs(hidden * 1, torch.zeros(7, 4, dtype=dtype), False), SINGLE)
    return made.transpose(0, 1).contiguous()


def test_a_proxy_says_of_itself_what_logits_would_say():
    proxy = proxy_of(dtype=torch.bfloat16)
    assert proxy.shape == proxy.size() == (1, 5, 7) and proxy.size(-1) == 7 and proxy.numel() == 35
    assert proxy.dim() == proxy.ndim == 3 and proxy.device.type == "cpu" and proxy.is_floating_point()
    assert proxy.requires_grad and not proxy.detach().requires_grad
    inputs = inputs_of(proxy.float())
    assert type(inputs.hidden) is torch.Tensor and inputs.hidden.shape == (5, 1, 4) and inputs.hidden.dtype == torch.bfloat16


def test_zero_times_its_sum_is_zero_and_keeps_the_graph():
    """--allgather-cp: a rank without tokens must meet the collectives of the backward."""
    hidden = torch.randn(5, 1, 4, requires_grad=True)
    for product in (lambda total: 0 * total, lambda total: total * 0.0):
        proxy = make_proxy(HeadInputs(hidden * 1, torch.zeros(7, 4), False), SINGLE).transpose(0, 1).contiguous()
        zero = product(proxy.sum())
        assert type(zero) is torch.Tensor and zero == 0
        (gradient,) = torch.autograd.grad(zero, hidden)
        assert torch.equal(gradient, torch.zeros_like(hidden))


TOUCHES = {
    "div": lambda logits: logits / 0.7,
    "__getitem__": lambda logits: logits[0],
    "transpose": lambda logits: logits.transpose(1, 2),
    "grad": lambda logits: logits.grad,
    "sum": lambda logits: logits.sum(dim=-1),
    "mul": lambda logits: 2 * logits.sum(),
}


@pytest.mark.parametrize("name", TOUCHES)
def test_another_use_of_it_is_refused_with_the_operation_and_the_line(name):
    touch = TOUCHES[name]
    file, line = inspect.getsourcefile(touch), inspect.getsourcelines(touch)[1]
    with pytest.raises(ConfigError, match=f"{file}:{line} asks for `{name}` of .*the model's output.*--fused-lm-head-loss"):
        touch(proxy_of())


def test_logits_in_its_place_are_refused():
    with pytest.raises(ConfigError, match=r"the loss is given a Tensor \(1, 5, 7\), and not what our output layer returns"):
        inputs_of(torch.zeros(1, 5, 7))
    moved_by_nobody = make_proxy(HeadInputs(torch.zeros(5, 1, 4), torch.zeros(7, 4), False), SINGLE)
    with pytest.raises(ConfigError, match=r"the model's output is \[S, B, V_tp\] \(5, 1, 7\)"):
        inputs_of(moved_by_nobody)


# Where it is placed: the host's own code


@pytest.fixture
def slime(monkeypatch):
    """emulated_host of slime, whose modules are gone at the end."""
    for name in SOUND:
        monkeypatch.setitem(sys.modules, f"{SLIME.training_package}.{name}", None)
    return partial(emulated_host, SLIME)


PLACED = {"fused_lm_head_loss": True}, "our head cannot be placed; remove --fused-lm-head-loss"
SKIPPED = {"skip_old_log_probs": True}, "no forward can be left out; remove --skip-old-log-probs"
MOVED = [
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


def test_a_host_is_taken_over_once_and_keeps_what_is_not_ours(slime):
    modules = slime()
    model, actor = modules["model"], modules["actor"]
    own = model.setup_model_and_optimizer, actor.get_log_probs_and_entropy
    for _ in range(2):
        take_over(SLIME, HeadSettings(is_fused=True))
        assert [vars(function)[OWN] for function in (model.setup_model_and_optimizer, actor.get_log_probs_and_entropy)] == [*own]
    args, logits = Namespace(build=lambda: ([], None, None)), torch.zeros(1, 5, 7)
    # A run without a head: its model is not looked at, and logits go to the host's own function.
    assert model.initialize_model_and_optimizer(args)[0] == []
    assert actor.get_log_probs_and_entropy(logits, **dict.fromkeys(NAMES)) == [logits]


def test_what_the_host_measures_with_and_we_do_not_know_is_refused():
    proxy = make_proxy(HeadInputs(torch.zeros(5, 1, 4), torch.zeros(7, 4), False), SINGLE)
    named = {"args": Case().args(), "unconcat_tokens": [], "total_lengths": [], "response_lengths": []}
    with pytest.raises(
        ConfigError, match=r"measures log-probabilities with top_p_token_ids=\[\[1\]\], which our head does not know"
    ):
        proxy_log_probs(proxy, **named, top_p_token_ids=[[1]], max_seq_lens=None)


# Which forward


# (name, model.train(), gradients are enabled). Nothing of the hosts has gradients off in a model that trains.
FORWARDS = (("trains", True, True), ("evaluates", False, True), ("measures", False, False), ("other", True, False))


def forwards_on_rank(rank: int, flags: dict, bf16: bool) -> dict[str, tuple]:
    """By forward: (type, dtype and values of the model's output, whether they are the layer's own)."""
    args = host_args(HostStep(Case(), flags=flags, tiny=replace(UNTIED, bf16=bf16)))
    models, _ = host_model(args)
    own = args.build()[0][0]
    case = Case()
    tokens, packed, _ = batch_of(HostStep(case), case.samples()[:2], case.samples())

    def output_of(model):
        return model(input_ids=tokens, position_ids=None, attention_mask=None, labels=None, packed_seq_params=packed)

    found = {}
    for name, is_training, has_gradients in FORWARDS:
        models[0].train(is_training)
        with torch.set_grad_enabled(has_gradients):
            output, expected = output_of(models[0]), output_of(own)
        is_own = None if isinstance(output, HiddenStatesProxy) else torch.equal(output, expected)
        found[name] = (type(output).__name__, str(output.dtype), tuple(output.shape) == tuple(expected.shape), is_own)
    return found


LOGITS, FP32_LOGITS = ("Tensor", "torch.float32", True, True), ("Tensor", "torch.float32", True, False)
CARRIED = ("HiddenStatesProxy", "torch.float32", True, None)


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
def test_the_forwards_that_train_and_measure_get_a_proxy_and_no_other(pool, flags, bf16, expected):
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


# The change of a model -> what is said; tests/test_fused_head.py has the other output layers that are refused.
CHANGES = {
    "foreign": (subclassed, "--fused-lm-head-loss: the output layer is a CappedLayer, a subclass of Megatron's"),
    "mtp": (
        lambda model: setattr(model.config, "mtp_num_layers", 1),
        "--fused-lm-head-loss with mtp_num_layers=1: multi-token prediction calls the output layer again",
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
def test_a_fault_of_the_last_stage_stops_the_first_one_too(pool):
    layout = Layout(pipeline=2)
    first, last = pool.run(refusals_on_rank, ["foreign", "nothing"], layout, world_size=2, **layout.model_parallel)
    assert first["foreign"].startswith("ConfigError: another rank refused its output layer")
    assert "CappedLayer" in last["foreign"] and first["nothing"] == last["nothing"] == ""


def critic_on_rank(rank: int) -> list[bool]:
    args = host_args(HostStep(Case(), flags=FUSED))
    host_model(args)
    models, *_ = host_of(args, "model").setup_model_and_optimizer(args, "critic")
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


def started(**settings) -> Namespace:
    """The arguments of a run of slime after its init hook."""
    args = Case(host="slime", settings=settings).args()
    args.read = lambda x: torch.zeros_like(x) + 1.5
    with contextlib.redirect_stdout(io.StringIO()):
        custom_megatron_init(args)
    return args


def rollout_of(case: Case) -> dict:
    samples = case.samples()
    return {
        "total_lengths": [sample.total for sample in samples],
        "response_lengths": [len(sample.mask) for sample in samples],
        "loss_masks": [torch.tensor(sample.mask) for sample in samples],
    }


def skipped_on_rank(rank: int) -> dict:
    """Rollouts of a run without our flag, of two with it, and of the first run once more: (the forwards, the names in its data)."""
    actor, rollout = emulated_host(SLIME)["actor"].MegatronTrainRayActor, rollout_of(Case())
    asked = {**INIT, "skip_old_log_probs": True}
    runs = [started(), *(started(**asked) for _ in range(2))]  # the second hook puts nothing around what is there
    found: dict = {"rollouts": []}
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
    assert all(values.isnan().all() for values in found["a reader"])
    assert [values.tolist() for values in found["a critic"]] == [[0.0] * size for size in sizes]
    assert "this rollout is 3 optimiser steps, and from the second on" in found["three steps"]
    assert "the rollout brings log_probs of its own, which would be ignored; remove --skip-old-log-probs" in found["its own"]
