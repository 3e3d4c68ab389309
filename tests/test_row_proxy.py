"""Hidden states in the place of logits in verl, NeMo-RL and ROLL: several temperatures, MTP's loss, shards, and what is refused.

tests/test_verl_engines.py, tests/test_nemo_rl.py and tests/test_roll.py have steps with them, and run the hosts' own code.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from forked import in_fork
from linear_cases import relative
from own_log_probs import with_ours
from test_forward_step import SeenShapes
from test_host_log_probs import HIDDEN, LIMIT, SMALL, VOCABULARY
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_rl.errors import ConfigError
from megatron_rl.hosts.heads import log_probs, row_proxy
from megatron_rl.hosts.heads.placed_rows import place_rows
from megatron_rl.hosts.heads.roll import place
from megatron_rl.hosts.heads.row_proxy import RowProxy, make_row_proxy
from megatron_rl.layout.groups import SINGLE
from megatron_rl.megatron.head import HeadInputs
from megatron_rl.testing.ranks import run_ranks

ROWS, WIDTH, MTP_FACTOR = 3, 8, 0.7
TEMPERATURES = (0.7, 1.3, 0.7)
SETTING = "actor_rollout_ref.model.use_fused_kernels=True"


class Body(nn.Module):
    """A model as verl's engine and our head see it: an embedding, a layer of multi-token prediction, Megatron's output layer."""

    def __init__(self, *, has_mtp: bool = False):
        super().__init__()
        from megatron.core.tensor_parallel import ColumnParallelLinear

        from megatron_rl.megatron.model import transformer_config

        layers = {"num_layers": 1, "mtp_num_layers": 1 if has_mtp else None}
        self.config = transformer_config(hidden_size=HIDDEN, num_attention_heads=2, **layers)
        self.embedding, self.mtp = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.output_layer = ColumnParallelLinear(
            HIDDEN, VOCABULARY, config=self.config, init_method=nn.init.zeros_, bias=False, gather_output=False
        )
        self.detaches_head = True
        generator = torch.Generator().manual_seed(2)
        weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        with torch.no_grad():
            for parameter in (self.embedding.weight, self.mtp.weight, self.mtp.bias):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            self.output_layer.weight.copy_(weight)

    def forward(self, tokens, labels=None):
        from megatron.core import tensor_parallel
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        hidden = self.embedding(tokens).transpose(0, 1)
        if labels is not None:
            # As verl's mtp_patch: the loss of the layer does not train the head.
            given = {name: value.detach() for name, value in self.output_layer.named_parameters()}
            given = given if self.detaches_head else dict(self.output_layer.named_parameters())
            logits, _ = torch.func.functional_call(self.output_layer, given, (self.mtp(hidden),))
            loss = tensor_parallel.vocab_parallel_cross_entropy(logits, labels.roll(-1, 1).T.contiguous())
            hidden = MTPLossAutoScaler.apply(hidden, MTP_FACTOR * loss)
        logits, _ = self.output_layer(hidden)
        return logits.transpose(0, 1).contiguous()


def batch_of_verl():
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (ROWS, WIDTH), generator=generator)
    factors = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2)]
    for factor in factors:
        factor[:, -1] = 0.0  # padding
    return {"input_ids": tokens, "temperature": torch.tensor(TEMPERATURES)}, factors


def engine_of(model: Body, *, is_fused: bool, is_value_model: bool = False):
    """verl's engine of this model, as its worker makes it."""
    settings = SimpleNamespace(use_fused_kernels=is_fused, entropy_from_logits_with_chunking=False)
    has_mtp = bool(model.config.mtp_num_layers)
    engine = with_ours("verl")["verl.workers.engine.megatron.transformer_impl"].MegatronEngineWithLMHead
    made = engine(engine_config=settings, is_value_model=is_value_model, module=[model], has_mtp=has_mtp)
    made.initialize()
    return made


def step_of(*, is_fused: bool, **options):
    """Log-probabilities and entropies; the gradient of each parameter; the most rows of a tensor as wide as the logits."""
    model, (batch, (c, e)) = Body(**options), batch_of_verl()
    engine = engine_of(model, is_fused=is_fused)
    log_probs.MAX_LOGITS_BYTES = SMALL
    with SeenShapes() as seen:
        found = engine.forward_step(batch, calculate_entropy=True)
        ((c * found["log_probs"]).sum() + (e * found["entropy"]).sum()).backward()
    columns = model.output_layer.weight.shape[0]
    rows = max(math.prod(shape[:-1]) for shape in seen.shapes if shape and shape[-1] == columns)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: value.detach()[:, :-1] for name, value in found.items()}, gradients, rows


def steps_on_a_rank(rank: int, *options: dict):
    return [step_of(**each) for each in options]


@pytest.mark.megatron
@pytest.mark.parametrize("has_mtp", [False, True], ids=["", "MTP"])
def test_verls_step_of_two_temperatures_is_that_of_its_logits(has_mtp):
    """verl refuses its fused head for such a batch, and turns it off for MTP. The loss of MTP has its own weight in both."""
    options = [{"is_fused": is_fused, "has_mtp": has_mtp} for is_fused in (False, True)]
    [(by_logits, by_head)] = run_ranks(steps_on_a_rank, 1, *options)
    for theirs, ours in zip(by_logits[:2], by_head[:2], strict=True):
        assert theirs.keys() == ours.keys()
        for name, value in theirs.items():
            has_gradient = has_mtp or not name.startswith("mtp")
            assert (value is not None) == (ours[name] is not None) == has_gradient, name
            assert value is None or relative(ours[name], value) < LIMIT, name
    # MTP's own logits are made, of all rows. Else a chunk of three rows, or the weight's columns.
    assert by_head[2] == (ROWS * WIDTH if has_mtp else HIDDEN)


# Several temperatures


def head(dtype=torch.float32, rows=ROWS * WIDTH):
    generator = torch.Generator().manual_seed(8)
    hidden, weight = (torch.randn(size, HIDDEN, generator=generator).to(dtype) for size in (rows, VOCABULARY))
    labels = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    return hidden, weight, labels, torch.tensor(TEMPERATURES).repeat_interleave(WIDTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_numbers_that_it_has_alone_whatever_temperatures_are_beside_it(dtype):
    """To the last bit, in 16 bits too: a division of hidden states before the product would round them."""
    hidden, weight, labels, temperature = head(dtype)
    leaf = hidden.clone().requires_grad_()
    found = log_probs.log_probs_of_hidden(leaf, weight, labels, SINGLE, temperature=temperature, reduces_hidden=True)
    sum(values.sum() for values in found).backward()
    for one in set(temperature.tolist()):
        rows = (temperature == one).nonzero()[:, 0]
        alone = hidden[rows].requires_grad_()
        of_samples = torch.full((3,), one)  # of a batch of samples
        mine = log_probs.log_probs_of_hidden(alone, weight, labels[rows], SINGLE, temperature=of_samples, reduces_hidden=True)
        sum(values.sum() for values in mine).backward()
        assert all(torch.equal(values[rows], other) for values, other in zip(found, mine, strict=True))
        assert torch.equal(leaf.grad[rows], alone.grad)


def sharded_on_a_rank(rank: int):
    """FSDP2's shard of a head that the host reads outside of the layer's forward; each rank has hidden states of its own."""
    hidden, weight, labels, temperature = head()
    mesh = init_device_mesh("cpu", (2,))
    leaf = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    found, _ = log_probs.log_probs_of_hidden(
        (1 + rank) * hidden, leaf, labels, SINGLE, temperature=temperature, reduces_hidden=False
    )
    found.sum().backward()
    return found.detach(), leaf.grad.full_tensor()


def test_a_head_that_fsdp2_shards_has_the_mean_of_the_ranks_gradients():
    hidden, weight, labels, temperature = head()
    answers = run_ranks(sharded_on_a_rank, 2, use_megatron=False)
    leaf, values = weight.clone().requires_grad_(), []
    for rank in range(2):
        log_p = ((1 + rank) * hidden @ leaf.T / temperature[:, None]).log_softmax(-1)
        values.append(log_p.gather(1, labels[:, None])[:, 0])
    (sum(value.sum() for value in values) / 2).backward()
    for (found, gradient), value in zip(answers, values, strict=True):
        assert relative(found, value.detach()) < LIMIT and relative(gradient, leaf.grad) < LIMIT


def test_verls_fsdp_engine_gives_its_fused_forward_the_temperature_of_each_row():
    def work():
        engine = with_ours("verl")["verl.workers.engine.fsdp.transformer_impl"].FSDPEngineWithLMHead()
        batch, _ = batch_of_verl()
        fused = batch | {"use_fused_kernels": True}
        inputs, kept = engine.forward_step(fused)
        assert inputs["temperature"].tolist() == pytest.approx([one for one in TEMPERATURES for _ in range(WIDTH)])
        assert inputs["return_dict"] and torch.equal(inputs["shift_labels"][0], kept["input_ids_rmpad_rolled"])
        assert fused["use_fused_kernels"], "the batch is as it was"
        one, _ = engine.forward_step(fused | {"temperature": 0.9})
        assert one.keys() == inputs.keys() and one["temperature"] == 0.9
        assert "temperature" not in engine.forward_step(batch | {"use_fused_kernels": False})[0]
        other = type("VeOmniEngine", (type(engine),), {"__module__": "verl.workers.engine.veomni.transformer_impl"})()
        with pytest.raises(AssertionError, match="does not support per sample temperature"):
            other.forward_step(fused)

    in_fork(work)


# What is refused


def rows_of(hidden, weight) -> RowProxy:
    """As the output layer gives them: [S, B, V]."""
    return make_row_proxy(HeadInputs(hidden, weight, False), SINGLE, SETTING)


@pytest.mark.parametrize(
    ("touch", "name"),
    [
        (lambda rows: rows * 2, "mul"),
        (lambda rows: rows[..., 0], "__getitem__"),
        (lambda rows: rows[0], "__getitem__"),
        (lambda rows: rows.narrow(-1, 0, 2), "narrow"),
        (lambda rows: rows.transpose(0, 2), "transpose"),
        (lambda rows: rows.div_(torch.ones(1)), "div_"),
        (lambda rows: rows.div_(0.0), "div_"),
        (lambda rows: rows.data.sum(), "sum"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_function_of_torch_is_refused_by_its_name_and_line(touch, name):
    hidden, weight, *_ = head()
    rows = rows_of(hidden[:, None], weight)
    with pytest.raises(
        ConfigError, match=rf"test_row_proxy.py:\d+ asks for `{name}` of the model's output, which under .*{SETTING}"
    ):
        touch(rows)
    assert f"(24, 1, 20) torch.float32, {SETTING}" in repr(rows)


@pytest.mark.parametrize("view", [lambda rows: rows[:, :], lambda rows: rows.float(), lambda rows: rows.squeeze(1)])
@pytest.mark.parametrize("is_divided", [0, 1], ids=["rows are divided", "their view is divided"])
def test_a_view_of_rows_that_were_divided_elsewhere_is_refused(view, is_divided):
    """The division of logits would reach both, and here one of them would keep temperature 1."""
    rows = rows_of(torch.ones(2, 1, 4), torch.ones(3, 4))
    both = [rows, view(rows)]
    both[is_divided].div_(0.5)
    assert row_proxy.rows_of(both[is_divided])[1].temperature == 0.5
    with pytest.raises(ConfigError, match=f"asks for `div_` of another view of .* remove {SETTING}"):
        row_proxy.rows_of(both[1 - is_divided])


def test_a_cast_to_another_type_is_a_copy_that_has_its_own_temperature():
    rows = rows_of(torch.ones(2, 1, 4, dtype=torch.bfloat16), torch.ones(3, 4, dtype=torch.bfloat16))
    copied = rows.float()
    copied.div_(0.5)
    assert [row_proxy.rows_of(each)[1].temperature for each in (rows, copied)] == [1.0, 0.5]


def refused_on_a_rank(rank: int):
    engine, (batch, _) = engine_of(Body(), is_fused=True), batch_of_verl()
    with pytest.raises(ConfigError, match=f"{SETTING}: calculate_sum_pi_squared reads logits, and none are made"):
        engine.forward_step(batch, calculate_sum_pi_squared=True)
    # A loss of MTP that trains the head, as Megatron-Core's own: its call cannot be told from the main one.
    model = Body(has_mtp=True)
    model.detaches_head = False
    engine = engine_of(model, is_fused=True)
    with pytest.raises(ConfigError, match=r"cross_entropy.py:\d+ asks for `.*` of the model's output"):
        engine.forward_step(batch)
    with pytest.raises(
        ConfigError, match="a.setting=true with mtp_num_layers=1: multi-token prediction calls the output layer again"
    ):
        place_rows([Body(has_mtp=True)], "a.setting=true")
    # A value model stays verl's.
    value_model = Body()
    engine_of(value_model, is_fused=True, is_value_model=True)
    assert "forward" not in vars(value_model.output_layer)


@pytest.mark.megatron
def test_what_needs_logits_is_refused_by_name():
    run_ranks(refused_on_a_rank, 1)


# ROLL's models have a hook on the output layer


def mca_lora_logits_postprocess_hook(module, given, output):
    module.calls = getattr(module, "calls", 0) + 1
    return output[0] * 1, output[1]


def model_with(hook) -> Body:
    model = Body()
    model.output_layer.register_forward_hook(hook)
    return model


def hooks_on_a_rank(rank: int):
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    model = model_with(mca_lora_logits_postprocess_hook)
    place(SimpleNamespace(models_unwrapped=[model]))
    layer = model.output_layer
    assert isinstance(model(tokens), RowProxy) and not hasattr(layer, "calls")
    # The layer's own logits, for a loss that does not train the head, have the hook.
    own, _ = layer(torch.ones(4, 2, HIDDEN), weight=layer.weight.detach())
    assert type(own) is torch.Tensor and layer.calls == 1
    left = model_with(lambda *_: None)
    with pytest.raises(ConfigError, match=r"the output layer has a hook, .*lambda.*test_row_proxy.py:\d+.*remove the hook"):
        place(SimpleNamespace(models_unwrapped=[left]))
    left.output_layer.register_forward_hook(mca_lora_logits_postprocess_hook)
    for has_gradients in (True, False):  # without place it would be given RowProxy
        with torch.set_grad_enabled(has_gradients), pytest.raises(ConfigError, match="`mul`"):
            left(tokens)
    left.config.fp16 = True
    with pytest.raises(ConfigError, match=r"HEAD_LOSS=true with fp16: .*train in bf16"):
        place(SimpleNamespace(models_unwrapped=[left]))


@pytest.mark.megatron
def test_the_hook_sees_logits_alone_and_another_one_is_refused():
    run_ranks(hooks_on_a_rank, 1)
