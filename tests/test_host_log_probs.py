"""Our log-probabilities and head in the place of a trainer's own: each host's functions, where they write, another host."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from functools import partial
from types import SimpleNamespace

import own_log_probs
import pytest
import torch
from forked import in_fork
from linear_cases import relative
from own_log_probs import with_ours
from test_forward_step import SeenShapes

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.after_import import after_import
from megatron_rl.hosts.heads import log_probs
from megatron_rl.hosts.heads.log_probs import check_shard, log_probs_of_logits
from megatron_rl.hosts.heads.row_proxy import make_row_proxy
from megatron_rl.layout.groups import SINGLE, resolve_groups
from megatron_rl.megatron.head import HeadInputs
from megatron_rl.testing.ranks import run_ranks

TOKENS, HIDDEN, VOCABULARY, TEMPERATURE = 11, 6, 20, 0.7
# Float32 against float64: rounding of sums over 20 columns.
LIMIT = 2e-6
# A gradient in bfloat16 is rounded by 2^-9 of an element, the sum of two of them by less than 2^-7 of its norm.
OF_BFLOAT16, OF_A_SUM = 2**-8, 2**-7
# Three rows of float32 logits in a chunk of one tensor-parallel rank, six of two.
SMALL = 3 * VOCABULARY * 4


def rows(dtype=torch.float32, seed=1):
    """logits [T, V], labels [T], a temperature a row, 1 for 16 bits, which a host's division would round, and the factors of
    log-probability and entropy in a loss."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    temperature = 0.5 + torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    c, e = (torch.randn(TOKENS, generator=generator, dtype=torch.float64) for _ in range(2))
    temperature = temperature.to(dtype) if dtype == torch.float32 else torch.ones(TOKENS, dtype=dtype)
    return logits.to(dtype), labels, temperature, c, e


def truth(logits, labels, temperature, factors):
    """{name: values} of log-probabilities and entropy, and the gradient of their sum by these factors {name: [T]}, in float64."""
    leaf = logits.double().requires_grad_()
    log_p = (leaf / temperature.double()[:, None]).log_softmax(-1)
    found = {"log_probs": log_p.gather(1, labels[:, None])[:, 0], "entropy": -(log_p.exp() * log_p).sum(-1)}
    total = sum((factor * found[name]).sum() for name, factor in factors.items())
    return {name: value.detach() for name, value in found.items()}, torch.autograd.grad(total, leaf)[0]


# A call gives (values by name, the logits that our function was given).


def fsdp_engine(entropy=None):
    def call(logits, labels, temperature):
        engine = with_ours("verl")["verl.workers.engine.fsdp.transformer_impl"].FSDPEngineWithLMHead()
        found = engine.prepare_model_outputs(logits, labels, temperature, entropy)
        return found, engine.logits

    return call


def megatron_engine(*, has_entropy=False, with_chunking=False):
    options = dict.fromkeys(("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only"), False)
    options |= dict.fromkeys(("logits_processor_func", "batch", "data_format"))

    def call(logits, labels, temperature):
        engine = with_ours("verl")["verl.workers.engine.megatron.transformer_impl"].MegatronEngineWithLMHead()
        engine.engine_config = SimpleNamespace(entropy_from_logits_with_chunking=with_chunking)
        given = logits[None], labels[None], temperature[None].clone()
        return engine._lm_head_logits_processor(*given, **options, calculate_entropy=has_entropy), logits

    return call


def model_utils(host):
    (module,) = with_ours(host).values()
    return module


def of_aligner(host, chunk_size=None):
    """NeMo-RL's and SkyRL's function, which shifts the labels and drops the last row; at temperature 1."""

    def call(logits, labels, temperature):
        of_model = logits / temperature[:, None]
        given, tokens = torch.cat([of_model, of_model[:1]])[None], torch.cat([labels[:1], labels])[None]
        tp, columns = resolve_groups().tp, logits.shape[1]
        bounds = tp.rank() * columns, (tp.rank() + 1) * columns
        function = model_utils(host).from_parallel_logits_to_logprobs
        assert not function(given, tokens, *bounds, tp, True, chunk_size).requires_grad
        return {"log_probs": function(given, tokens, *bounds, tp, chunk_size=chunk_size)[0]}, given

    return call


def entropy_of_skyrl(logits, labels, temperature):
    of_model = logits / temperature[:, None]
    return {"entropy": model_utils("SkyRL").vocab_parallel_entropy(of_model[None])[0]}, of_model


def of_roll(*names):
    def call(logits, labels, temperature):
        strategy = with_ours("ROLL")["roll.distributed.strategy.megatron_strategy"].MegatronInferStrategy()
        of_model = (logits / temperature[:, None])[None]
        functions = {
            "log_probs": lambda: strategy.op_compute_log_probs(of_model, labels[None]),
            "entropy": lambda: strategy.op_compute_entropy(of_model),
        }
        return {name: functions[name]()[0] for name in names}, of_model

    return call


# Each function of a host whose place ours takes -> the call, and the dtypes of logits over which it writes their gradient, as the
# host's own function does. Another reader of these logits in backward then gets torch's error, and no wrong number.
FLOAT32, BOTH = {torch.float32}, {torch.float32, torch.bfloat16}
CALLS = {
    "FSDP": (fsdp_engine(), BOTH),
    "FSDP, entropy": (fsdp_engine("entropy_from_logits"), set()),
    "Megatron": (megatron_engine(), FLOAT32),
    "Megatron, entropy": (megatron_engine(has_entropy=True), FLOAT32),
    "Megatron, entropy in chunks": (megatron_engine(has_entropy=True, with_chunking=True), FLOAT32),
    "NeMo-RL": (of_aligner("NeMo-RL"), set()),
    "SkyRL": (of_aligner("SkyRL"), set()),
    "SkyRL in chunks": (of_aligner("SkyRL", 3), set()),
    "SkyRL, entropy": (entropy_of_skyrl, set()),
    "ROLL": (of_roll("log_probs"), BOTH),
    "ROLL, entropy": (of_roll("log_probs", "entropy"), BOTH),
}


def numbers_on_a_rank(rank: int, tp: int, dtype: torch.dtype):
    """Of each call: values, the gradient of the logits, whether it is written over those that our function was given."""
    logits, labels, temperature, c, e = rows(dtype)
    answers = {}
    for name in [name for name in CALLS if tp == 1 or not name.startswith("FSDP")]:
        leaf = logits.chunk(tp, 1)[rank].clone().requires_grad_()
        found, given = CALLS[name][0](leaf * 1.0, labels, temperature)  # what a model gives is no leaf
        found, before = {key: value.flatten() for key, value in found.items()}, given.detach().clone()
        sum(({"log_probs": c, "entropy": e}[key] * value.double()).sum() for key, value in found.items()).backward()
        answers[name] = {key: value.detach() for key, value in found.items()}, leaf.grad, not torch.equal(before, given.detach())
    return answers


@pytest.mark.megatron
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tp", [1, 2])
def test_each_function_of_a_host_has_exact_numbers_and_gradients_by_ours(tp, dtype):
    """From 16 bits too, where a softmax in bfloat16 would put 3 % on an element of the gradient."""
    answers = run_ranks(partial(numbers_on_a_rank, tp=tp, dtype=dtype), tp, tensor_model_parallel_size=tp)
    logits, labels, temperature, c, e = rows(dtype)
    for name, (found, _, is_written) in answers[0].items():
        values, expected = truth(logits, labels, temperature, {key: {"log_probs": c, "entropy": e}[key] for key in found})
        for key, value in found.items():
            assert all(relative(answer[name][0][key], values[key]) < LIMIT for answer in answers), (name, key)
            assert value.dtype == torch.float32, name
        assert ("entropy" in found) == ("entropy" in name) and is_written == (dtype in CALLS[name][1]), name
        gradient = torch.cat([answer[name][1] for answer in answers], 1)
        if dtype == torch.float32:
            assert relative(gradient, expected) < LIMIT, name
        elif len(found) == 1:
            assert ((gradient.double() - expected).abs() / expected.abs()).max() < OF_BFLOAT16, name
        else:
            assert relative(gradient, expected) < OF_A_SUM, name


def test_a_label_outside_the_vocabulary_gives_0_and_no_gradient():
    logits, labels, *_ = rows()
    labels[2], labels[5] = -100, VOCABULARY
    leaf = logits.clone().requires_grad_()
    found = log_probs_of_logits(leaf, labels, SINGLE)
    found.sum().backward()
    assert found[[2, 5]].tolist() == [0.0, 0.0] and leaf.grad[[2, 5]].abs().max() == 0
    assert bool((found[[0, 1, 3, 4]] < 0).all()) and bool(found.isfinite().all())


# The fused switches


def of_head(hidden, weight, labels, c, e):
    """In float64, at TEMPERATURE: log-probabilities, entropy, and both gradients."""
    hidden, weight = (leaf.double().requires_grad_() for leaf in (hidden, weight))
    log_p = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
    log_probs, entropy = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    found = (c * log_probs).sum() + (0.0 if e is None else (e * entropy).sum())
    return log_probs.detach(), entropy.detach(), *torch.autograd.grad(found, (hidden, weight))


def operands():
    """As many tokens as two ranks can share. The last one is in no loss."""
    generator = torch.Generator().manual_seed(4)
    _, labels, _, c, e = (values[1:] for values in rows())
    hidden, weight = (torch.randn(size, HIDDEN, generator=generator) for size in (len(labels), VOCABULARY))
    c[-1] = e[-1] = 0.0
    return hidden, weight, labels, c, e


def heads_on_a_rank(rank: int, tp: int):
    """{switch of a host: (values of each token, gradient of hidden states, of the weight)}, and the most rows of any tensor that is
    as wide as the logits."""
    modules, group = with_ours("verl"), resolve_groups().tp
    hidden, weight, labels, c, e = operands()
    tokens, found = labels.roll(1)[None], {}  # NeMo-RL and SkyRL shift them back, and drop the last row, whose factor is 0
    columns = VOCABULARY // tp
    bounds = rank * columns, (rank + 1) * columns
    of_rank, part = weight.chunk(tp)[rank], hidden.chunk(tp)[rank]
    log_probs.MAX_LOGITS_BYTES = SMALL

    def keep(name, call, given):
        leaves = given.clone().requires_grad_(), of_rank.clone().requires_grad_()
        values, *entropy = (values.flatten() for values in call(*leaves))
        ((c[: len(values)] * values).sum() + sum((e * each).sum() for each in entropy)).backward()
        found[name] = [values.detach(), *(each.detach() for each in entropy)], *(leaf.grad for leaf in leaves)

    gather = importlib.import_module("megatron.core.tensor_parallel.mappings").gather_from_sequence_parallel_region
    fused = modules["verl.models.mcore.model_forward_fused"]

    def output_of(h, w):
        """What NeMo-RL does between model and loss: a division, a sequence cut out, a dimension off and on, a cast."""
        output = (
            make_row_proxy(HeadInputs(h[:, None], w, len(h) < len(hidden)), group, "a.setting=true").transpose(0, 1).contiguous()
        )
        output.div_(TEMPERATURE)
        assert output.narrow(1, 4, 3).shape[1] == 3 and output.size(-1) == columns and output.dim() == 3
        return output[:, slice(0, len(hidden))].squeeze(0).unsqueeze(0).to(torch.float32)

    def by_nemo_rl(h, w):
        return [model_utils("NeMo-RL").from_parallel_logits_to_logprobs(output_of(h, w), tokens, *bounds, group)]

    strategy = with_ours("ROLL")["roll.distributed.strategy.megatron_strategy"].MegatronInferStrategy()

    def by_roll(h, w):
        output = output_of(h, w)
        return strategy.op_compute_log_probs(output, labels[None]), strategy.op_compute_entropy(output)

    def by_hidden(h, w):
        function = model_utils("SkyRL").from_parallel_hidden_to_logprobs
        return [function(h[None], w, tokens, *bounds, group, temperature=TEMPERATURE)]

    with SeenShapes() as seen:
        keep("verl", lambda h, w: fused.linear_cross_entropy(gather(h), w, labels, TEMPERATURE, "none", group), part)
        if tp == 1:
            in_torch = modules["verl.utils.experimental.torch_functional"].FusedLinearForPPO()
            processed = fused.fused_output_processor
            keep("verl, output processor", lambda h, w: processed(h[:, None], w, labels[:, None], TEMPERATURE), hidden)
            keep("verl FSDP, torch", lambda h, w: in_torch.forward(h[:, None], w, labels[:, None], TEMPERATURE), hidden)
        for sp, given in (("", hidden), (", SP", part)):
            keep(f"NeMo-RL{sp}", by_nemo_rl, given)
            keep(f"ROLL{sp}", by_roll, given)
        keep("SkyRL", by_hidden, hidden)
        of_packed = model_utils("SkyRL").from_parallel_hidden_to_entropy_packed_sequences
        entropy = of_packed(hidden[None].requires_grad_(), of_rank, group, TEMPERATURE)
    assert not entropy.requires_grad
    if tp > 1:
        with pytest.raises(ConfigError, match="use_fused_kernels on several tp ranks without sequence parallelism: .*=False"):
            fused.linear_cross_entropy(hidden.clone().requires_grad_() * 1, of_rank, labels, TEMPERATURE, "none", group)
    return found, entropy.flatten(), max(math.prod(shape[:-1]) for shape in seen.shapes if shape and shape[-1] == columns)


@pytest.mark.megatron
@pytest.mark.parametrize("tp", [1, 2])
def test_each_fused_switch_of_a_host_runs_our_head_with_exact_numbers_and_without_logits(tp):
    answers = run_ranks(partial(heads_on_a_rank, tp=tp), tp, tensor_model_parallel_size=tp)
    given = operands()
    for name, (found, *_) in answers[0][0].items():
        parts = [answer[0][name] for answer in answers]
        *values, of_hidden, of_weight = of_head(*given[:4], given[4] if len(found) == 2 else None)
        for answer, _, _ in parts:
            assert all(relative(mine, theirs[: len(mine)]) < LIMIT for mine, theirs in zip(answer, values, strict=False)), name
        if name == "SkyRL":  # each rank's part, which its gather of sequence-parallel hidden states adds up
            mine = sum(gradient for _, gradient, _ in parts)
        else:
            mine = torch.cat([gradient for _, gradient, _ in parts]) if name in ("verl", "NeMo-RL, SP", "ROLL, SP") else parts[0][1]
        assert relative(mine, of_hidden) < LIMIT, name
        assert relative(torch.cat([gradient for *_, gradient in parts]), of_weight) < LIMIT, name
    for _, entropy, most_rows in answers:
        assert relative(entropy, of_head(*given)[1]) < LIMIT
        assert most_rows <= HIDDEN < TOKENS - 1  # a chunk, or the weight as [H, V_tp]


# Another host


def test_bounds_of_a_shard_that_is_not_equal_are_refused():
    check_shard(0, 8, 8, SINGLE)
    with pytest.raises(DataError, match=r"has the columns \[0, 7\) of the vocabulary, and 8 columns of rank 0 of 1 are \[0, 8\)"):
        check_shard(0, 7, 8, SINGLE)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            *("inplace_backward=True)", "inplace_backward=True, mask=None)"),
            r"verl's logprobs_from_logits takes \(logits, labels, inplace_backward, mask\), ours is made for \(logits, labels, inp",
        ),
        (
            *("vocab_parallel_log_probs_from_logits(kept", "print(kept"),
            r"_lm_head_logits_processor does not call vocab_parallel_log_probs_from_logits any more, .* would have no effect there",
        ),
    ],
)
def test_a_host_whose_path_is_another_one_is_refused_in_its_worker(old, new, message):
    def work():
        own_log_probs.modules_of("verl", old, new)
        with pytest.raises(ConfigError, match=message):
            own_log_probs.install("verl")

    in_fork(work)


# Modules that the host loads later


def test_work_after_an_import_waits_for_the_import_that_succeeds(tmp_path, monkeypatch):
    """A host looks for an optional module, or tries it, and imports it later."""
    (tmp_path / "a_host").mkdir()
    (tmp_path / "a_host" / "__init__.py").write_text("is_ready = False\n")
    (tmp_path / "a_host" / "later.py").write_text("import a_host\nassert a_host.is_ready\n")
    monkeypatch.syspath_prepend(tmp_path)
    package, finders, done = importlib.import_module("a_host"), [*sys.meta_path], []
    for name in ("first", "second"):
        after_import("a_host.later", lambda module, name=name: done.append((name, module.__name__)))
    assert importlib.util.find_spec("a_host.later") is not None
    with pytest.raises(AssertionError):
        importlib.import_module("a_host.later")
    assert done == []
    package.is_ready = True
    importlib.import_module("a_host.later")
    assert done == [("first", "a_host.later"), ("second", "a_host.later")] and sys.meta_path == finders
    for name in ("a_host.later", "a_host"):
        del sys.modules[name]


def test_what_verl_loads_later_has_our_functions_from_the_start(tmp_path):
    """As in a worker, which imports its engine after the module of external_lib: three names of one module, and their caller."""
    functional, engine = "verl.utils.torch_functional", "verl.workers.engine.fsdp.transformer_impl"
    for name in (functional, engine):
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(own_log_probs.VERL[name])

    def work():
        sys.path.insert(0, str(tmp_path))
        importlib.import_module("megatron_rl.hosts.heads.verl")
        taken, own = importlib.import_module(engine), importlib.import_module(functional)
        for name in ("logprobs_from_logits", "entropy_from_logits", "entropy_from_logits_with_chunking"):
            assert hasattr(vars(own)[name], log_probs.MARK) and vars(taken)[name] is vars(own)[name]

    in_fork(work)
