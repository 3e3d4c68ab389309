"""Our log-probabilities in the place of a trainer's own: numbers, what is written over, and the hosts that are refused.

VERL_ROOT=... pytest -m host --require host tests/test_host_log_probs.py
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import own_log_probs
import pytest
import torch
from forked import forked
from host_checkouts import VERL
from linear_cases import relative

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts.after_import import after_import
from megatron_rl.hosts.heads import log_probs
from megatron_rl.hosts.heads.log_probs import check_shard, log_probs_of_logits
from megatron_rl.layout.groups import SINGLE
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


def truth(logits, labels, temperature, c, e):
    """log-probabilities, entropy and the gradient of sum c log p + e H, in float64."""
    leaf = logits.double().requires_grad_()
    log_p = (leaf / temperature.double()[:, None]).log_softmax(-1)
    log_probs, entropy = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    found = (c * log_probs).sum() + (0.0 if e is None else (e * entropy).sum())
    return log_probs.detach(), entropy.detach(), torch.autograd.grad(found, leaf)[0]


def in_fork(work: Callable[[], object]) -> str:
    """Standard error of the work, for which modules and replacements of a host are made in a process of their own."""

    def checked() -> int:
        work()
        return 0

    code, _, error = forked(checked)
    assert code == 0, error[-3000:]
    return error


def installed():
    """The modules of the emulated verl, with our functions in them."""
    modules = own_log_probs.verl_modules()
    importlib.import_module("megatron_rl.hosts.heads.verl")
    return modules


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


CALLS = {
    "FSDP": fsdp_engine,
    "FSDP, entropy": lambda modules: fsdp_engine(modules, "entropy_from_logits"),
    "FSDP, entropy in chunks": lambda modules: fsdp_engine(modules, "entropy_from_logits_with_chunking"),
    "Megatron": megatron_engine,
    "Megatron, entropy": lambda modules: megatron_engine(modules, True),
    "Megatron, entropy in chunks": lambda modules: megatron_engine(modules, True, True),
}


def step(call, case, *, batched=False):
    """What the call gives, and the gradient of the logits."""
    logits, labels, temperature, c, e = case
    leaf = logits.clone().requires_grad_()
    given = [leaf * 1.0, labels, temperature]  # verl divides what the model gives, which is no leaf
    found = call(*(tensor[None] for tensor in given)) if batched else call(*given)
    found = {name: value.flatten() for name, value in found.items()}
    total = (c * found["log_probs"].double()).sum()
    if "entropy" in found:
        total = total + (e * found["entropy"].double()).sum()
    total.backward()
    return found, leaf.grad


# verl


@pytest.mark.parametrize("name", CALLS)
def test_verls_engines_get_our_numbers_and_gradients(name):
    def work():
        call = CALLS[name](installed())
        case = rows()
        logits, labels, temperature, c, e = case
        found, gradient = step(call, case, batched=name.startswith("Megatron"))
        log_probs, entropy, expected = truth(logits, labels, temperature, c, e if "entropy" in found else None)
        assert relative(found["log_probs"], log_probs) < LIMIT and relative(gradient, expected) < LIMIT
        assert ("entropy" in name) == ("entropy" in found)
        assert "entropy" not in found or relative(found["entropy"], entropy) < LIMIT

    assert "log_probs in verl: " in in_fork(work)


def test_our_function_says_once_that_it_is_at_work():
    def work():
        modules = installed()
        for _ in range(2):
            step(fsdp_engine(modules), rows())
        importlib.import_module("megatron_rl.hosts.heads.verl").install()  # a second one changes nothing
        step(fsdp_engine(modules), rows())

    assert in_fork(work).splitlines() == ["megatron_rl: log_probs in verl: logprobs_from_logits is megatron_rl's"]


def test_the_gradient_of_bfloat16_logits_is_exact_in_each_element():
    """verl without flash attention takes the log-softmax in bfloat16: a probability is e^ of a rounded number. Ours rounds the
    gradient alone, by 2^-9 of an element."""

    def work():
        modules = own_log_probs.verl_modules()
        logits, labels, temperature, c, _ = rows(torch.bfloat16)
        case = logits, labels, torch.ones_like(temperature), c, None
        log_probs, _, expected = truth(*case)

        def errors():
            found, gradient = step(fsdp_engine(modules), case)
            of_elements = (gradient.double() - expected).abs() / expected.abs()
            return found["log_probs"].dtype, relative(found["log_probs"], log_probs), float(of_elements.max())

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
        modules = installed()
        kept = []
        call = CALLS[name](modules)
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


def fused(module_name, function):
    """The caller of verl's own switch, with our head."""

    def call(modules, hidden, weight, labels):
        module = modules[module_name]
        return function(module)(hidden, weight, labels, 0.7)

    return call


FUSED = {
    "Megatron": fused("verl.models.mcore.model_forward_fused", lambda module: module.fused_output_processor),
    "FSDP, triton": fused("verl.utils.kernel.linear_cross_entropy", lambda module: module.linear_cross_entropy),
    "FSDP, torch": fused(
        "verl.utils.experimental.torch_functional",
        lambda module: lambda *given: module.FusedLinearForPPO.forward(None, *given),
    ),
}


def of_head(hidden, weight, labels, c, e):
    """In float64, at temperature 0.7."""
    hidden, weight = (leaf.double().requires_grad_() for leaf in (hidden, weight))
    log_p = (hidden @ weight.T / 0.7).log_softmax(-1)
    log_probs, entropy = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    found = (c * log_probs).sum() + (e * entropy).sum()
    return log_probs.detach(), entropy.detach(), *torch.autograd.grad(found, (hidden, weight))


def operands():
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(size, HIDDEN, generator=generator) for size in (TOKENS, VOCABULARY))
    return hidden, weight, *rows()[1::2][:1], *rows()[3:]


@pytest.mark.parametrize("name", FUSED)
def test_verls_fused_switch_runs_our_head(name):
    def work():
        modules = installed()
        hidden, weight, labels, c, e = operands()
        want = of_head(hidden, weight, labels, c, e)
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        found = FUSED[name](modules, leaves[0][:, None], leaves[1], labels[:, None])
        log_probs, entropy = (values.flatten() for values in found)
        ((c * log_probs).sum() + (e * entropy).sum()).backward()
        got = log_probs.detach(), entropy.detach(), leaves[0].grad, leaves[1].grad
        assert all(relative(mine, theirs) < LIMIT for mine, theirs in zip(got, want, strict=True))

    in_fork(work)


def test_a_reduction_of_the_fused_function_is_refused():
    def work():
        module = installed()["verl.utils.kernel.linear_cross_entropy"]
        hidden, weight, labels, *_ = operands()
        with pytest.raises(ConfigError, match="reduction='mean': megatron_rl's head gives each token"):
            module.linear_cross_entropy(hidden, weight, labels, 1.0, "mean")

    in_fork(work)


def of_sequences():
    """operands() of as many tokens as two ranks can share."""
    hidden, weight, labels, c, e = operands()
    return hidden[1:], weight, labels[1:], c[1:], e[1:]


def verl_on_a_rank(rank: int):
    """On one of two tensor-parallel ranks: engine with entropy, and the fused function."""
    modules = installed()
    logits, labels, temperature, c, e = rows()
    shard = logits.chunk(2, 1)[rank].contiguous()
    found, gradient = step(megatron_engine(modules, True), (shard, labels, temperature, c, e), batched=True)
    hidden, weight, labels, c, e = of_sequences()
    leaves = hidden.chunk(2)[rank].clone().requires_grad_(), weight.chunk(2)[rank].clone().requires_grad_()
    group = importlib.import_module("megatron.core.parallel_state").get_tensor_model_parallel_group()
    gather = importlib.import_module("megatron.core.tensor_parallel.mappings").gather_from_sequence_parallel_region
    fused = modules["verl.models.mcore.model_forward_fused"]
    log_probs, entropy = fused.linear_cross_entropy(gather(leaves[0]), leaves[1], labels, 0.7, "none", group)
    ((c * log_probs).sum() + (e * entropy).sum()).backward()
    values = [tensor.detach() for tensor in found.values()]
    whole = hidden.clone().requires_grad_()
    with pytest.raises(ConfigError, match="use_fused_kernels on several tp ranks without sequence parallelism: .*=False"):
        fused.linear_cross_entropy(whole * 1, leaves[1], labels, 0.7, "none", group)
    with torch.no_grad():  # for old log-probabilities the parts of a gradient are no question
        again, _ = fused.linear_cross_entropy(whole, leaves[1], labels, 0.7, "none", group)
    assert torch.equal(again, log_probs)
    return values, gradient, [log_probs.detach(), entropy.detach()], leaves[0].grad, leaves[1].grad


@pytest.mark.megatron
def test_two_tensor_parallel_ranks_of_verl_have_the_numbers_of_one():
    first, second = run_ranks(verl_on_a_rank, 2, tensor_model_parallel_size=2)
    case = rows()
    log_probs, entropy, gradient = truth(*case)
    for rank in (first, second):
        assert relative(rank[0][0], entropy) < LIMIT and relative(rank[0][1], log_probs) < LIMIT
    assert relative(torch.cat([first[1], second[1]], 1), gradient) < LIMIT
    want = of_head(*of_sequences())
    for rank in (first, second):
        assert all(relative(mine, theirs) < LIMIT for mine, theirs in zip(rank[2], want[:2], strict=True))
    # The gather of sequence-parallel hidden states adds up the ranks' parts.
    assert relative(torch.cat([first[3], second[3]]), want[2]) < LIMIT
    assert relative(torch.cat([first[4], second[4]]), want[3]) < LIMIT


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
        elif name in ("method", "start"):
            engine = modules["verl.workers.engine.megatron.transformer_impl"].MegatronEngine
            if name == "method":
                engine._maybe_enable_fused_kernels = lambda self, module: None
            else:
                engine.initialize = lambda self: None
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
        (
            "method",
            r"verl's MegatronEngine._maybe_enable_fused_kernels takes \(self, module\), ours is made for \(self\), "
            r".*test_host_log_probs.py:\d+; verl-project/verl 1dda039b9 was probed",
        ),
        (
            "start",
            r"verl's MegatronEngine.initialize does not call MegatronEngine._maybe_enable_fused_kernels any more, .*:\d+, so",
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


def ppo_loss_of_verl(log_probs, c):
    """verl's own loss of one response, with its clip, over ratios on both sides of it."""
    core = VERL.load("verl.trainer.ppo.core_algos")
    configs = VERL.load("verl.workers.config")
    config = configs.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    old = (log_probs.detach() + 0.4 * torch.linspace(-1, 1, log_probs.numel()))[None]
    found = core.compute_policy_loss_vanilla(
        old_log_prob=old,
        log_prob=log_probs[None],
        advantages=c.float()[None],
        response_mask=torch.ones_like(old),
        loss_agg_mode="token-mean",
        config=config,
    )
    return found[0]


def total_of(found, c, e):
    """verl's own loss of log-probabilities, and an entropy bonus; without e none."""
    bonus = 0.0 if e is None or "entropy" not in found else (e * found["entropy"].flatten()).sum()
    return ppo_loss_of_verl(found["log_probs"].flatten(), c) + bonus


@pytest.mark.host("VERL_ROOT")
@pytest.mark.parametrize("entropy", FSDP_CALLS)
@pytest.mark.parametrize("shape", [(TOKENS,), (1, TOKENS)], ids=str)
def test_the_fsdp_engine_of_verl_has_its_own_numbers_by_our_functions(entropy, shape):
    """Value, entropy and gradient, of verl's own loss; verl's engine names our function."""

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

    assert "log_probs in verl: logprobs_from_logits is megatron_rl's" in in_fork(work)


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
