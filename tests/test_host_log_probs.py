"""Our log-probabilities and head in the place of a trainer's own: numbers of each host; what verl's writes over; another verl.

VERL_ROOT=... pytest -m host --require host tests/test_host_log_probs.py
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace

import own_log_probs
import pytest
import torch
from forked import in_fork
from host_checkouts import VERL
from linear_cases import relative

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.after_import import after_import
from megatron_rl.hosts.heads import log_probs
from megatron_rl.hosts.heads import nemo_rl as nemo_rl_head
from megatron_rl.hosts.heads.carried_rows import carry_rows
from megatron_rl.hosts.heads.log_probs import check_shard, log_probs_of_logits
from megatron_rl.hosts.heads.skyrl import InWorkers
from megatron_rl.layout.groups import SINGLE, resolve_groups
from megatron_rl.megatron.head import HeadInputs
from megatron_rl.testing.ranks import run_ranks

TOKENS, HIDDEN, VOCABULARY = 11, 6, 20
# Float32 against float64: rounding of sums over 20 columns.
LIMIT = 2e-6


def rows(dtype=torch.float32, seed=1):
    """logits [T, V], labels [T], a temperature a row, and the factors of log-probability and entropy in a loss."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    temperature = 0.5 + torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    c, e = (torch.randn(TOKENS, generator=generator, dtype=torch.float64) for _ in range(2))
    return logits.to(dtype), labels, temperature.to(dtype), c, e


def truth(logits, labels, temperature, factors):
    """{name: values} of log-probabilities and entropy, and the gradient of their sum by these factors {name: [T]}, in float64."""
    leaf = logits.double().requires_grad_()
    log_p = (leaf / temperature.double()[:, None]).log_softmax(-1)
    found = {"log_probs": log_p.gather(1, labels[:, None])[:, 0], "entropy": -(log_p.exp() * log_p).sum(-1)}
    total = sum((factor * found[name]).sum() for name, factor in factors.items())
    return {name: value.detach() for name, value in found.items()}, torch.autograd.grad(total, leaf)[0]


@functools.cache
def installed():
    """The modules of the emulated verl, with our functions in them."""
    modules = own_log_probs.verl_modules()
    importlib.import_module("megatron_rl.hosts.heads.verl")
    return modules


def nemo_rl_with_ours(change=lambda module: None) -> ModuleType:
    module = own_log_probs.nemo_rl_module()
    change(module)
    importlib.import_module("megatron_rl.hosts.heads.nemo_rl").install("NeMo-RL", "a revision")
    return module


def skyrl_with_ours(change=lambda module: None) -> ModuleType:
    """By the entry of SkyRL's table, as it comes to a worker."""
    module = own_log_probs.skyrl_module()
    change(module)
    pickle.loads(pickle.dumps(InWorkers("SkyRL", "a revision")))
    return module


def roll_with_ours() -> ModuleType:
    module = own_log_probs.roll_modules()["roll.distributed.strategy.megatron_strategy"]
    importlib.import_module("megatron_rl.hosts.heads.roll").install("ROLL", "a revision")
    return module


def fsdp_engine(modules, name=None):
    engine = modules["verl.workers.engine.fsdp.transformer_impl"]
    entropy = None if name is None else vars(engine)[name]
    return lambda logits, labels, temperature: engine.FSDPEngineWithLMHead.prepare_model_outputs(
        logits, labels, temperature, entropy
    )


def megatron_engine(modules, has_entropy=False, with_chunking=False):
    made = modules["verl.workers.engine.megatron.transformer_impl"].MegatronEngineWithLMHead()
    made.engine_config = SimpleNamespace(entropy_from_logits_with_chunking=with_chunking)
    options = dict.fromkeys(("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only"), False)
    options |= dict.fromkeys(("logits_processor_func", "batch", "data_format"))
    return lambda *given: made._lm_head_logits_processor(*given, **options, calculate_entropy=has_entropy)


def of_aligner(module, chunk_size=None):
    """NeMo-RL's and SkyRL's function, which shifts the labels and drops the last row; at temperature 1."""

    def call(logits, labels, temperature):
        rows, tokens = torch.cat([logits / temperature[:, None], logits[:1]])[None], torch.cat([labels[:1], labels])[None]
        tp, columns = resolve_groups().tp, logits.shape[1]
        bounds = tp.rank() * columns, (tp.rank() + 1) * columns
        return {"log_probs": module.from_parallel_logits_to_logprobs(rows, tokens, *bounds, tp, chunk_size=chunk_size)[0]}

    return call


def of_roll(module):
    strategy = module.MegatronInferStrategy()

    def call(logits, labels, temperature):
        of_model = (logits / temperature[:, None])[None]
        log_probs, entropy = strategy.op_compute_log_probs(of_model, labels[None]), strategy.op_compute_entropy(of_model)
        return {"log_probs": log_probs[0], "entropy": entropy[0]}

    return call


def entropy_of_skyrl(module):
    return lambda logits, labels, temperature: {"entropy": module.vocab_parallel_entropy((logits / temperature[:, None])[None])[0]}


# Each function of a host whose place ours take.
CALLS = {
    "FSDP": lambda: fsdp_engine(installed()),
    "FSDP, entropy": lambda: fsdp_engine(installed(), "entropy_from_logits"),
    "FSDP, entropy in chunks": lambda: fsdp_engine(installed(), "entropy_from_logits_with_chunking"),
    "Megatron": lambda: megatron_engine(installed()),
    "Megatron, entropy": lambda: megatron_engine(installed(), True),
    "Megatron, entropy in chunks": lambda: megatron_engine(installed(), True, True),
    "NeMo-RL": lambda: of_aligner(nemo_rl_with_ours()),
    "NeMo-RL in chunks": lambda: of_aligner(nemo_rl_with_ours(), 3),
    "SkyRL": lambda: of_aligner(skyrl_with_ours()),
    "SkyRL in chunks": lambda: of_aligner(skyrl_with_ours(), 3),
    "SkyRL, entropy": lambda: entropy_of_skyrl(skyrl_with_ours()),
    "ROLL": lambda: of_roll(roll_with_ours()),
}


def step(call, case, *, batched=False):
    """What the call gives, and the gradient of the logits."""
    logits, labels, temperature, c, e = case
    leaf = logits.clone().requires_grad_()
    given = [leaf * 1.0, labels, temperature]  # a host divides what the model gives, which is no leaf
    found = call(*(tensor[None] for tensor in given)) if batched else call(*given)
    found = {name: value.flatten() for name, value in found.items()}
    sum(({"log_probs": c, "entropy": e}[name] * value.double()).sum() for name, value in found.items()).backward()
    return {name: value.detach() for name, value in found.items()}, leaf.grad


def numbers_on_a_rank(rank: int, tp: int):
    logits, labels, temperature, c, e = rows()
    case = logits.chunk(tp, 1)[rank].contiguous(), labels, temperature, c, e
    names = [name for name in CALLS if tp == 1 or not name.startswith("FSDP")]
    return {name: step(CALLS[name](), case, batched=name.startswith("Megatron")) for name in names}


@pytest.mark.megatron
@pytest.mark.parametrize("tp", [1, 2])
def test_each_function_of_a_host_has_exact_numbers_and_gradients_by_ours(tp):
    answers = run_ranks(partial(numbers_on_a_rank, tp=tp), tp, tensor_model_parallel_size=tp)
    logits, labels, temperature, c, e = rows()
    for name, (found, _) in answers[0].items():
        factors = {key: {"log_probs": c, "entropy": e}[key] for key in found}
        values, gradient = truth(logits, labels, temperature, factors)
        for key, value in found.items():
            assert all(relative(answer[name][0][key], values[key]) < LIMIT for answer in answers), (name, key)
            assert value.dtype == torch.float32, name
        assert relative(torch.cat([answer[name][1] for answer in answers], 1), gradient) < LIMIT, name
        assert ("entropy" in found) == ("entropy" in name or name == "ROLL"), name


# verl


def test_our_function_says_once_that_it_is_at_work():
    def work():
        modules = installed()
        for _ in range(2):
            step(fsdp_engine(modules), rows())
        importlib.import_module("megatron_rl.hosts.heads.verl").install()  # a second one changes nothing
        step(fsdp_engine(modules), rows())

    assert in_fork(work)[1].splitlines() == ["megatron_rl: log_probs in verl: logprobs_from_logits is megatron_rl's"]


def test_the_gradient_of_bfloat16_logits_is_exact_in_each_element():
    """verl without flash attention takes the log-softmax in bfloat16: a probability is e^ of a rounded number. Ours rounds the
    gradient alone, by 2^-9 of an element."""

    def work():
        modules = own_log_probs.verl_modules()
        logits, labels, temperature, c, _ = rows(torch.bfloat16)
        case = logits, labels, torch.ones_like(temperature), c, None
        values, expected = truth(*case[:3], {"log_probs": c})

        def errors():
            found, gradient = step(fsdp_engine(modules), case)
            of_elements = (gradient.double() - expected).abs() / expected.abs()
            return found["log_probs"].dtype, relative(found["log_probs"], values["log_probs"]), float(of_elements.max())

        dtype, of_values, of_gradient = errors()
        assert dtype == torch.bfloat16 and of_values > 1e-3 and of_gradient > 0.03
        importlib.import_module("megatron_rl.hosts.heads.verl")
        dtype, of_values, of_gradient = errors()
        assert dtype == torch.float32 and of_values < LIMIT and of_gradient < 2**-8

    in_fork(work)


@pytest.mark.parametrize(
    ("name", "dtype", "is_written"),
    [
        ("FSDP", torch.float32, True),
        ("FSDP", torch.bfloat16, True),
        ("FSDP, entropy", torch.float32, False),
        ("Megatron", torch.float32, True),
        ("Megatron", torch.bfloat16, False),
        ("Megatron, entropy", torch.float32, True),
    ],
)
def test_the_gradient_is_written_over_the_logits_where_verls_own_function_does_that(name, dtype, is_written):
    """Another reader of these logits in backward then gets torch's error, and no wrong number."""

    def work():
        modules, kept, call = installed(), [], CALLS[name]()
        logits, labels, temperature, c, e = rows(dtype)
        of_model = logits.clone().requires_grad_() * 1.0
        if name.startswith("FSDP"):  # verl makes new logits by the division, which its log-probabilities read
            engine = modules["verl.workers.engine.fsdp.transformer_impl"]
            ours = engine.logprobs_from_logits
            engine.logprobs_from_logits = lambda logits, **named: kept.append(logits) or ours(logits=logits, **named)
            found = call(of_model, labels, temperature)
        else:
            kept.append(of_model)
            found = call(of_model[None], labels[None], temperature[None])
        before = kept[0].detach().clone()
        sum(value.float().sum() for value in found.values()).backward()
        assert torch.equal(before, kept[0].detach()) != is_written

    in_fork(work)


def test_a_label_outside_the_vocabulary_gives_0_and_no_gradient():
    logits, labels, *_ = rows()
    labels[2], labels[5] = -100, VOCABULARY
    leaf = logits.clone().requires_grad_()
    found = log_probs_of_logits(leaf, labels, SINGLE)
    found.sum().backward()
    assert found[[2, 5]].tolist() == [0.0, 0.0] and leaf.grad[[2, 5]].abs().max() == 0
    assert bool((found[[0, 1, 3, 4]] < 0).all()) and bool(found.isfinite().all())


def of_head(hidden, weight, labels, c, e):
    """In float64, at temperature 0.7: log-probabilities, entropy, and both gradients."""
    hidden, weight = (leaf.double().requires_grad_() for leaf in (hidden, weight))
    log_p = (hidden @ weight.T / 0.7).log_softmax(-1)
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
    """{switch of a host: (values of each token, gradient of hidden states, of the weight)} at temperature 0.7."""
    modules, group = installed(), resolve_groups().tp
    hidden, weight, labels, c, e = operands()
    tokens, found = labels.roll(1)[None], {}  # NeMo-RL and SkyRL shift them back, and drop the last row, whose factor is 0
    bounds = rank * VOCABULARY // tp, (rank + 1) * VOCABULARY // tp

    def keep(name, call, given):
        leaves = given.clone().requires_grad_(), weight.chunk(tp)[rank].clone().requires_grad_()
        log_probs, *entropy = (values.flatten() for values in call(*leaves))
        ((c[: len(log_probs)] * log_probs).sum() + sum((e * values).sum() for values in entropy)).backward()
        found[name] = [log_probs.detach(), *(values.detach() for values in entropy)], *(leaf.grad for leaf in leaves)

    gather = importlib.import_module("megatron.core.tensor_parallel.mappings").gather_from_sequence_parallel_region
    fused = modules["verl.models.mcore.model_forward_fused"]
    keep("verl", lambda h, w: fused.linear_cross_entropy(gather(h), w, labels, 0.7, "none", group), hidden.chunk(tp)[rank])
    if tp == 1:
        kernel = modules["verl.utils.kernel.linear_cross_entropy"].linear_cross_entropy
        in_torch = modules["verl.utils.experimental.torch_functional"].FusedLinearForPPO.forward
        keep("verl, output processor", lambda h, w: fused.fused_output_processor(h[:, None], w, labels[:, None], 0.7), hidden)
        keep("verl FSDP, triton", lambda h, w: kernel(h[:, None], w, labels[:, None], 0.7), hidden)
        keep("verl FSDP, torch", lambda h, w: in_torch(None, h[:, None], w, labels[:, None], 0.7), hidden)
    else:
        with pytest.raises(ConfigError, match="use_fused_kernels on several tp ranks without sequence parallelism: .*=False"):
            fused.linear_cross_entropy(hidden.clone().requires_grad_() * 1, weight.chunk(tp)[rank], labels, 0.7, "none", group)
        with torch.no_grad():  # for old log-probabilities the parts of a gradient are no question
            again, _ = fused.linear_cross_entropy(hidden, weight.chunk(tp)[rank], labels, 0.7, "none", group)
        assert torch.equal(again, found["verl"][0][0])
    module = nemo_rl_with_ours()
    for name, given in (("NeMo-RL", hidden), ("NeMo-RL, SP", hidden.chunk(tp)[rank])):

        def by_output(h, w):
            output = carry_rows(HeadInputs(h[:, None], w, len(h) < len(hidden)), group, nemo_rl_head.FUSED_HEAD)
            output.div_(0.7)
            return [module.from_parallel_logits_to_logprobs(output.transpose(0, 1).contiguous(), tokens, *bounds, group)]

        keep(name, by_output, given)
    sky = skyrl_with_ours()

    def by_hidden(h, w):
        return [sky.from_parallel_hidden_to_logprobs(h[None], w, tokens, *bounds, group, temperature=0.7)]

    keep("SkyRL", by_hidden, hidden)
    entropy = sky.from_parallel_hidden_to_entropy_packed_sequences(
        hidden[None].requires_grad_(), weight.chunk(tp)[rank], group, 0.7
    )
    assert not entropy.requires_grad
    return found, entropy.flatten()


@pytest.mark.megatron
@pytest.mark.parametrize("tp", [1, 2])
def test_each_fused_switch_of_a_host_runs_our_head_with_exact_numbers(tp):
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
            mine = torch.cat([gradient for _, gradient, _ in parts]) if name in ("verl", "NeMo-RL, SP") else parts[0][1]
        assert relative(mine, of_hidden) < LIMIT, name
        assert relative(torch.cat([gradient for *_, gradient in parts]), of_weight) < LIMIT, name
    assert all(relative(entropy, of_head(*given)[1]) < LIMIT for _, entropy in answers)


def test_a_reduction_of_the_fused_function_is_refused():
    def work():
        module = installed()["verl.utils.kernel.linear_cross_entropy"]
        hidden, weight, labels, *_ = operands()
        with pytest.raises(ConfigError, match="reduction='mean': megatron_rl's head gives each token"):
            module.linear_cross_entropy(hidden, weight, labels, 1.0, "mean")

    in_fork(work)


# Modules that the host loads later


@pytest.mark.parametrize("before", ["nothing", "a search", "an import that fails"])
def test_work_after_an_import_waits_for_the_import_that_succeeds(tmp_path, monkeypatch, before):
    """A host looks for an optional module, or tries it, and imports it later."""
    (tmp_path / "a_host").mkdir()
    (tmp_path / "a_host" / "__init__.py").write_text("is_ready = False\n")
    (tmp_path / "a_host" / "later.py").write_text("import a_host\nassert a_host.is_ready\n")
    monkeypatch.syspath_prepend(tmp_path)
    package, finders, done = importlib.import_module("a_host"), [*sys.meta_path], []
    for name in ("first", "second"):
        after_import("a_host.later", lambda module, name=name: done.append((name, module.__name__)))
    if before == "a search":
        assert importlib.util.find_spec("a_host.later") is not None
    if before == "an import that fails":
        with pytest.raises(AssertionError):
            importlib.import_module("a_host.later")
    assert done == []
    package.is_ready = True
    importlib.import_module("a_host.later")
    assert done == [("first", "a_host.later"), ("second", "a_host.later")] and sys.meta_path == finders
    for name in ("a_host.later", "a_host"):
        del sys.modules[name]


# Hosts that are another version


def moved(name: str) -> Callable[[], None]:
    """Changes the emulated verl before ours is installed."""

    def change(modules):
        functional = modules["verl.utils.torch_functional"]
        if name == "signature":
            vars(functional)["logprobs_from_logits"] = lambda logits, labels, inplace_backward=True, mask=None: logits
        elif name == "gone":
            del functional.entropy_from_logits
        elif name == "caller":
            engine = modules["verl.workers.engine.megatron.transformer_impl"].MegatronEngineWithLMHead
            engine._lm_head_logits_processor = lambda logits, label: logits
        else:
            del modules["verl.workers.engine.fsdp.transformer_impl"].FSDPEngineWithLMHead

    return change


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "signature",
            r"verl's logprobs_from_logits takes \(logits, labels, inplace_backward, mask\), ours is made for \(logits, labels, "
            r"inplace_backward\), .*test_host_log_probs.py:\d+; verl-project/verl 1dda039b9 was probed",
        ),
        ("gone", r"verl's verl.utils.torch_functional \(.*\) has no entropy_from_logits; verl-project/verl 1dda039b9 was probed"),
        (
            "caller",
            r"verl's MegatronEngineWithLMHead._lm_head_logits_processor does not call vocab_parallel_log_probs_from_logits any "
            r"more, .*test_host_log_probs.py:\d+, so log_probs would have no effect there",
        ),
        ("no engine", r"has no FSDPEngineWithLMHead.prepare_model_outputs, which calls logprobs_from_logits; verl-project/verl"),
    ],
)
def test_a_verl_whose_path_is_another_one_is_refused(name, message):
    def work():
        moved(name)(own_log_probs.verl_modules())
        with pytest.raises(ConfigError, match=message):
            importlib.import_module("megatron_rl.hosts.heads.verl")

    in_fork(work)


LATER = """
def logprobs_from_logits(logits, labels, inplace_backward=True): pass
def entropy_from_logits(logits): pass
def entropy_from_logits_with_chunking(logits, chunk_size=2048): pass
"""
ENGINE = """
from verl.utils.torch_functional import logprobs_from_logits
class FSDPEngineWithLMHead:
    def prepare_model_outputs(self, logits): return logprobs_from_logits(logits, None)
    def prepare_model_inputs(self, micro_batch): pass
    def forward_step(self, micro_batch): return self.prepare_model_inputs(micro_batch)
"""


@pytest.mark.parametrize("is_known", [True, False], ids=["", "another signature"])
def test_what_verl_loads_later_has_our_functions_from_the_start(tmp_path, is_known):
    """As in a worker, which imports its engine after the module of external_lib: three names of one module, and their caller."""
    files = {
        "verl/utils/torch_functional.py": LATER if is_known else LATER.replace("chunk_size=2048", "chunk_size=2048, axis=-1"),
        "verl/workers/engine/fsdp/transformer_impl.py": ENGINE,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def work():
        sys.path.insert(0, str(tmp_path))
        importlib.import_module("megatron_rl.hosts.heads.verl")
        if not is_known:
            with pytest.raises(ConfigError, match=r"entropy_from_logits_with_chunking takes \(logits, chunk_size, axis\)"):
                importlib.import_module("verl.utils.torch_functional")
            return
        engine = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
        functional = importlib.import_module("verl.utils.torch_functional")
        names = ("logprobs_from_logits", "entropy_from_logits", "entropy_from_logits_with_chunking")
        assert all(hasattr(vars(functional)[name], log_probs.MARK) for name in names)
        assert engine.logprobs_from_logits is functional.logprobs_from_logits

    in_fork(work)


def test_bounds_of_a_shard_that_is_not_equal_are_refused():
    check_shard(0, 8, 8, SINGLE)
    with pytest.raises(DataError, match=r"has the columns \[0, 7\) of the vocabulary, and 8 columns of rank 0 of 1 are \[0, 8\)"):
        check_shard(0, 7, 8, SINGLE)


# verl's own functions, from a checkout

# Float32 against float32, each with its own order of sums over 20 columns: a few units in the last place of numbers near 5.
OF_VALUES, OF_GRADIENTS = 1e-6, 1e-5
# Their entropy is the difference of two numbers near the largest logit, 10 here, where ours adds up numbers of its own size.
OF_ENTROPIES = 5e-6
FSDP_CALLS = {"": None, "entropy": "entropy_from_logits", "entropy in chunks": "entropy_from_logits_with_chunking"}


def install_verls() -> None:
    importlib.import_module("megatron_rl.hosts.heads.verl")


def before_and_after(call, install=install_verls):
    """What `call` gives with the host's own functions, and with ours."""
    theirs = call()
    install()
    return theirs, call()


def nearly_equal(theirs, ours) -> None:
    """Values and gradients of two calls, each ({name: value}, [gradient, ...])."""
    assert theirs[0].keys() == ours[0].keys()
    for name, value in theirs[0].items():
        assert value.shape == ours[0][name].shape and value.dtype == ours[0][name].dtype
        limit = OF_ENTROPIES if name == "entropy" else OF_VALUES
        assert relative(ours[0][name].detach(), value.detach()) < limit, name
    for their_gradient, gradient in zip(theirs[1], ours[1], strict=True):
        assert their_gradient.shape == gradient.shape and relative(gradient, their_gradient) < OF_GRADIENTS


def total_of(found, c, e=None):
    """The log-probabilities by random factors, as a loss has them by its derivatives, and an entropy bonus; without e none."""
    bonus = 0.0 if e is None or "entropy" not in found else (e * found["entropy"].view_as(e)).sum()
    return (c * found["log_probs"].view_as(c)).sum() + bonus


@pytest.mark.host("VERL_ROOT")
@pytest.mark.parametrize("entropy", FSDP_CALLS)
@pytest.mark.parametrize("shape", [(TOKENS,), (1, TOKENS)], ids=str)
def test_the_fsdp_engine_of_verl_has_its_own_numbers_by_our_functions(entropy, shape):
    """Value, entropy and gradient; verl's engine names our function."""

    def work():
        functional = VERL.load("verl.utils.torch_functional")
        VERL.load("verl.workers.engine.fsdp.transformer_impl")
        logits, labels, _, c, e = rows()

        def call():
            leaf = logits.clone().requires_grad_()
            given = (leaf * 1.0).view(*shape, VOCABULARY)
            found = {}
            if name := FSDP_CALLS[entropy]:
                found["entropy"] = vars(functional)[name](given.flatten(0, -2)).view(shape)
            engine = VERL.load("verl.workers.engine.fsdp.transformer_impl")
            found["log_probs"] = engine.logprobs_from_logits(logits=given, labels=labels.view(shape), inplace_backward=not found)
            total_of(found, c, e).backward()
            return found, [leaf.grad]

        nearly_equal(*before_and_after(call))

    assert "log_probs in verl: logprobs_from_logits is megatron_rl's" in in_fork(work)[1]


def megatron_engine_of_verl(rank: int, tp: int):
    """verl's own engine code on tensor-parallel ranks: with entropy, in chunks, and without; sums of squares beside them."""
    module = VERL.load("verl.workers.engine.megatron.transformer_impl")
    logits, labels, temperature, c, e = rows()

    def call(calculate_entropy, with_chunking, e=e):
        settings = SimpleNamespace(entropy_from_logits_with_chunking=with_chunking, entropy_from_logits_chunk_size=3)
        leaf = logits.chunk(tp, 1)[rank].clone().requires_grad_()
        found = module.MegatronEngineWithLMHead._lm_head_logits_processor(
            SimpleNamespace(engine_config=settings),
            (leaf * 1.0)[None],
            labels[None],
            temperature[None].clone(),
            calculate_sum_pi_squared=True,
            calculate_entropy=calculate_entropy,
            distillation_use_topk=False,
            distillation_only=False,
            logits_processor_func=None,
            batch=None,
            data_format="thd",
        )
        total_of(found, c, e).backward()
        return found, [leaf.grad]

    # verl's own entropy in chunks has no gradient: each chunk writes over a part of what the others have kept, and torch raises.
    forms = [(False, False), (True, False), (True, True, None)]
    theirs, ours = before_and_after(lambda: [call(*form) for form in forms])
    for pair in zip(theirs, ours, strict=True):
        nearly_equal(*pair)
    assert hasattr(module.vocab_parallel_entropy, log_probs.MARK)


@pytest.mark.host("VERL_ROOT")
@pytest.mark.megatron
@pytest.mark.parametrize("tp", [1, 2])
def test_the_megatron_engine_of_verl_has_its_own_numbers_by_our_functions(tp):
    run_ranks(partial(megatron_engine_of_verl, tp=tp), tp, tensor_model_parallel_size=tp)


@pytest.mark.host("VERL_ROOT")
def test_the_fused_function_of_verl_in_torch_has_its_own_numbers_by_ours():
    """Its Triton function needs CUDA; the float64 truth stands for it in the tests above."""

    def work():
        fused = VERL.load("verl.utils.experimental.torch_functional")
        hidden, weight, labels, c, e = operands()

        def call():
            leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            head = fused.FusedLinearForPPO(chunk_size=4)
            found = dict(zip(("log_probs", "entropy"), head(leaves[0][None], leaves[1], labels[None], 0.7), strict=True))
            total_of(found, c, e).backward()
            return found, [leaf.grad for leaf in leaves]

        nearly_equal(*before_and_after(call))

    in_fork(work)


@pytest.mark.host("VERL_ROOT")
@pytest.mark.megatron
def test_verls_fused_forward_calls_our_head():
    """verl's own output processor, whose kernel has no CPU."""

    def work():
        forward = VERL.load("verl.models.mcore.model_forward_fused")
        install_verls()
        hidden, weight, labels, c, e = operands()
        forward.CausalLMOutputForPPO = SimpleNamespace  # of transformers
        forward.parallel_state = SimpleNamespace(get_tensor_model_parallel_group=lambda: None)
        found = forward.fused_output_processor(
            hidden_states=hidden[:, None],
            output_layer=SimpleNamespace(weight=weight),
            output_weight=None,
            labels=labels[None],
            context=forward.FusedOutputProcessorContext(temperature=0.7),
            config=SimpleNamespace(sequence_parallel=False, config_logger_dir=""),
        )
        expected, entropy, *_ = of_head(hidden, weight, labels, c, e)
        assert relative(found.log_probs, expected) < LIMIT and relative(found.entropy, entropy) < LIMIT

    in_fork(work)
