"""How workers of NeMo-RL, SkyRL and ROLL get our log-probabilities and head; and the hosts' own code with them, from checkouts.

tests/refused_hosts.py has the settings that are refused.

NEMO_RL_ROOT=... SKYRL_ROOT=... pytest -m host --require host tests/test_log_probs_in_workers.py
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import nemo_rl_cases
import own_log_probs
import pytest
import roll_cases
import skyrl_cases
import torch
import torch.distributed as dist
from adapter_cases import PACKINGS
from forked import in_fork
from host_checkouts import NEMO_RL, SKYRL
from linear_cases import relative
from nemo_rl_cases import OwnLoss, master_config
from test_host_log_probs import HIDDEN, VOCABULARY
from test_nemo_rl import load_nemo_rl
from test_roll import started_with

from megatron_rl.errors import ConfigError
from megatron_rl.hosts import nemo_rl, roll, skyrl
from megatron_rl.hosts.heads import log_probs, placed_rows
from megatron_rl.hosts.heads import nemo_rl as nemo_rl_head
from megatron_rl.hosts.heads import skyrl as skyrl_head
from megatron_rl.hosts.heads.carried_rows import carry_rows
from megatron_rl.layout.groups import SINGLE, resolve_groups
from megatron_rl.megatron.head import HeadInputs
from megatron_rl.testing.ranks import run_ranks

ROWS, WIDTH, TEMPERATURE = 2, 8, 0.7


# NeMo-RL


class Policy:
    def __init__(self, config, worker_extension_cls_fqn=None):
        self.worker = worker_extension_cls_fqn


def setup(master_config, tokenizer, policy_factory=None):
    return (Policy if policy_factory is None else policy_factory)(config=master_config)


def test_a_nemo_rl_without_such_workers_is_refused():
    def older(master_config, tokenizer):
        pass

    trainer = SimpleNamespace(Policy=lambda config: None)
    with pytest.raises(ConfigError, match=r"setup takes no policy_factory \(.*test_log_probs_in_workers.py:\d+\)"):
        nemo_rl_head.with_our_worker(trainer, older, ("config", "tokenizer"), {})
    with pytest.raises(ConfigError, match=r"takes no worker_extension_cls_fqn \(.*test_log_probs_in_workers.py:\d+\)"):
        nemo_rl_head.with_our_worker(trainer, setup, ("config", "tokenizer"), {})


ALONE = {"megatron_rl_log_probs": "megatron_rl"}
OUR_LOSS = {"megatron_rl": "grpo.token_mean", "reference_policy_kl_penalty": 0}
BY_FACTORY = {"policy_factory": lambda **options: Policy(**options)}
WORKERS = [
    # loss_fn, use_fused_linear_logprobs, arguments of setup -> the class of the workers, the loss, the fused head of NeMo-RL
    (ALONE, None, {}, nemo_rl_head.OUR_WORKER, "OwnLoss", None),
    (ALONE | OUR_LOSS, None, {}, nemo_rl_head.OUR_WORKER, "NemoLoss", None),
    (ALONE | OUR_LOSS, None, BY_FACTORY, nemo_rl_head.OUR_WORKER, "NemoLoss", None),
    (OUR_LOSS, None, {}, None, "NemoLoss", None),
    (ALONE, True, {}, nemo_rl_head.WORKER_WITH_HEAD, "OwnLoss", False),
    (OUR_LOSS, True, {}, None, "NemoLoss", True),  # NeMo-RL's own switch
    (OUR_LOSS | {"megatron_rl_log_probs": "nemo_rl"}, None, BY_FACTORY, None, "NemoLoss", None),
]


def test_the_workers_of_a_launch_of_nemo_rl():
    """By the launcher: our workers with our loss and with NeMo-RL's own, one after the other in one process."""

    def work():
        def whole_setup(master_config, tokenizer, policy_factory=None):
            policy = setup(master_config, tokenizer, policy_factory)
            loss = type(trainer.ClippedPGLossFn(master_config.loss_fn)).__name__
            return policy.worker, loss, master_config.policy["megatron_cfg"].get("use_fused_linear_logprobs")

        contents = {"setup": whole_setup, "Policy": Policy, "ClippedPGLossFn": OwnLoss}
        contents["_create_advantage_estimator"] = lambda master_config: "NeMo-RL's own"
        trainer = own_log_probs.module_at(nemo_rl.TRAINER, contents)
        environments = {nemo_rl_head.OWN_WORKER: "its Python"}
        own_log_probs.module_at(nemo_rl_head.ENVIRONMENTS, {"ACTOR_ENVIRONMENT_REGISTRY": environments})
        sys.argv = ["run_grpo.py"]
        calls, problems = [], []
        with nemo_rl.loss_in_setup(lambda error: problems.append(str(error)) or 2, calls):
            for settings, is_fused, named, *expected in WORKERS:
                config = master_config(settings)
                if is_fused is not None:
                    config.policy["megatron_cfg"]["use_fused_linear_logprobs"] = is_fused
                assert [*trainer.setup(config, tokenizer="tokenizer", **named)] == expected, settings
                assert config.policy["megatron_cfg"].get("use_fused_linear_logprobs") is is_fused, "the caller's own stays"
            assert trainer._create_advantage_estimator(master_config(ALONE)) == "NeMo-RL's own"
            with pytest.raises(SystemExit):
                trainer.setup(master_config({"megatron_rl_log_probs": "mine"}), "tokenizer")
        assert environments[nemo_rl_head.WORKER_WITH_HEAD] == environments[nemo_rl_head.OUR_WORKER] == "its Python"
        assert len(calls) == len(WORKERS) + 1 and "is neither megatron_rl" in problems[0]
        assert trainer.setup is whole_setup

    in_fork(work)


# SkyRL


def test_skyrl_has_our_log_probabilities_beside_our_loss_or_its_own():
    for loss, said in (("regular", "megatron_rl.log_probs=megatron_rl, and SkyRL's own loss"), ("megatron_rl.grpo", "grpo")):
        trainer = SimpleNamespace(algorithm=skyrl_cases.algorithm_config(loss), strategy="megatron")
        (line,) = skyrl.check((SimpleNamespace(trainer=trainer), skyrl.Words(), "megatron_rl"))
        assert said in line


def test_skyrls_table_carries_them_where_they_are_asked_for():
    for is_there in (False, True):
        entries = {}
        table = SimpleNamespace(register=lambda name, entry, entries=entries: entries.update({name: entry}))
        skyrl.register(table, skyrl.Words(), has_log_probs=is_there)
        assert (skyrl.LOG_PROBS in entries) == is_there
    with pytest.raises(TypeError, match="it is no policy loss"):
        entries[skyrl.LOG_PROBS]()
    assert not any(name.startswith("skyrl.") for name in sys.modules)


# ROLL

BOTH = {"MEGATRON_RL_FUSED_LM_HEAD_LOSS": "true", "MEGATRON_RL_LOG_PROBS": "megatron_rl"}


@pytest.mark.parametrize(
    ("variant", "variables", "is_ours", "is_replaced", "placed"),
    [
        ("gspo.prompt_mean", {}, True, False, []),
        ("gspo.prompt_mean", {"MEGATRON_RL_LOG_PROBS": "megatron_rl"}, True, True, []),
        ("gspo.prompt_mean", BOTH, True, True, [((), f"{roll.HEAD}=true")]),  # a stage without an output layer
        ("ppo", {"MEGATRON_RL_LOG_PROBS": "megatron_rl"}, False, True, []),
        (None, {"MEGATRON_RL_LOG_PROBS": "megatron_rl"}, False, True, []),
        ("gspo.prompt_mean", {"MEGATRON_RL_LOG_PROBS": "roll"}, True, False, []),
    ],
)
def test_our_worker_of_roll_has_our_log_probabilities_and_head_with_our_loss_or_rolls(
    variant, variables, is_ours, is_replaced, placed, monkeypatch
):
    found = []
    monkeypatch.setattr(placed_rows, "place_head", lambda models, settings, *_, **__: found.append((models, settings.setting)))

    def work():
        modules = own_log_probs.modules_of("ROLL")
        worker = started_with(roll_cases.worker_config(variant, **variables))
        assert (worker.loss is not None) == is_ours and found == placed
        if is_ours:
            assert worker.loss.launch.config.fused_lm_head_loss == bool(placed)
        else:
            assert worker.loss_func("data", "logits") == "ROLL's own loss"
        replaced = modules["mcore_adapter.parallel_functions.vocab_parallel"].vocab_parallel_logprobs
        assert hasattr(replaced, log_probs.MARK) == is_replaced

    in_fork(work)


def test_a_roll_whose_strategy_has_no_models_is_refused():
    def work() -> None:
        own_log_probs.modules_of("ROLL")
        worker = roll_cases.worker_config("gspo.prompt_mean", **BOTH)
        with pytest.raises(ConfigError, match="Strategy has no models_unwrapped, and .* was probed"):
            started_with(worker, "    models_unwrapped = ()\n")

    in_fork(work)


# The hosts' own code

# Float32 against float32, each with its own order of sums over 20 columns: a few units in the last place of numbers near 5.
OF_VALUES, OF_GRADIENTS = 1e-6, 1e-5
# Their entropy is the difference of two numbers near the largest logit, 10 here, where ours adds up numbers of its own size.
OF_ENTROPIES = 5e-6


def nemo_rls_own_loss(rank: int) -> None:
    """Its ClippedPGLossFn on real context-parallel ranks, in each packing, from hidden states through its
    forward_with_post_processing_fn, at a temperature: by a product that makes logits and NeMo-RL's functions or ours, and by our
    head. The gradients are of the numbers that hidden states are made of, and of the weight."""
    group = dist.group.WORLD
    weight = torch.eye(50) + 0.2 * torch.randn(50, 50, generator=torch.Generator().manual_seed(3))
    leaf = weight.requires_grad_()
    seen = []

    def by_logits(hidden):
        return hidden @ leaf.T

    def by_our_head(hidden):
        seen.append(carry_rows(HeadInputs(hidden.transpose(0, 1), leaf, False), SINGLE, nemo_rl_head.FUSED_HEAD).transpose(0, 1))
        return seen[-1]

    adapter = nemo_rl_cases.ADAPTER
    chosen = [case for case in adapter.matrix(["grpo"]) if case.cp == group.size() and case.aggregation == "token_mean"]
    chosen = [case for case in chosen if group.size() == 1 or case.packing != PACKINGS[0]]

    def results(output_of):
        own, call = load_nemo_rl(group, output_of, TEMPERATURE)
        found = []
        for case in chosen:
            leaf.grad = None
            loss = own({"reference_policy_kl_penalty": 0.1, "ratio_clip_min": 0.2, "ratio_clip_max": 0.28})
            step = adapter.step(case)
            calls = adapter.by(call, loss, case, step)
            result = adapter.run(case, step, start=lambda *_, calls=calls: calls, cp_group=group)
            found.append((result.loss, [torch.cat(result.gradients), leaf.grad]))
        return found

    theirs = results(by_logits)
    own_log_probs.install("NeMo-RL")
    log_probs.MAX_LOGITS_BYTES = 5 * 50 * 4
    ours, of_head = results(by_logits), results(by_our_head)
    module = NEMO_RL.load("nemo_rl.distributed.model_utils")
    assert hasattr(module.DistributedLogprob, log_probs.MARK)
    assert not hasattr(module.DistributedLogprobWithSampling, log_probs.MARK)  # of a filter of the sampler
    assert seen and {case.packing for case in chosen} == set(PACKINGS[group.size() > 1 :])
    for (their_loss, their_gradients), *found in zip(theirs, ours, of_head, strict=True):
        for loss, gradients in found:
            assert loss == pytest.approx(their_loss, rel=OF_GRADIENTS)
            for their_gradient, gradient in zip(their_gradients, gradients, strict=True):
                # Logits that are float32 sums of 50 products are rounded in another order, some near 30, before their exponential.
                assert relative(gradient, their_gradient) < 4 * OF_GRADIENTS


@pytest.mark.host("NEMO_RL_ROOT")
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_nemo_rls_own_loss_has_its_own_gradients_by_our_functions_and_head(cp):
    """With context parallelism and packed rows, where NeMo-RL refuses its own head."""
    run_ranks(nemo_rls_own_loss, cp, timeout=500, use_megatron=False)


def skyrl_calls(rank: int, tp: int) -> None:
    """SkyRL's functions of log-probabilities and entropy with its autograd functions and with ours: whole rows, packed rows with
    lengths that are padded to multiples of 4, in chunks, from hidden states."""
    module, group = SKYRL.load(skyrl_head.MODULE), resolve_groups().tp
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (ROWS, WIDTH), generator=generator)
    hidden, weight = torch.randn(ROWS, WIDTH, HIDDEN, generator=generator), torch.randn(VOCABULARY, HIDDEN, generator=generator)
    c, e = torch.randn(ROWS, WIDTH - 1, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)
    bounds, shard = torch.tensor([0, WIDTH, 2 * WIDTH], dtype=torch.int32), VOCABULARY // tp
    alone = [dist.new_group([each]) for each in range(tp)][rank]
    own = {"vocab_start_index": rank * shard, "vocab_end_index": (rank + 1) * shard, "cp_group": alone}

    def log_probs_of(source, rows, *weight, is_packed, **options):
        name = f"from_parallel_{source}_to_logprobs"
        if is_packed:
            flat = rows.reshape(1, -1, rows.shape[-1]), *weight, tokens.reshape(1, -1), bounds, WIDTH
            return vars(module)[f"{name}_packed_sequences"](*flat, **own, group=group, **options)
        return vars(module)[name](rows, *weight, tokens, **own, tp_group=group, **options)

    def from_logits(is_packed=False, has_entropy=False, **options):
        leaf = (hidden @ weight.T).chunk(tp, -1)[rank].clone().requires_grad_()
        given = leaf * 1.0
        found = {"log_probs": log_probs_of("logits", given, is_packed=is_packed, **options)}
        total = (c * found["log_probs"].view_as(c)).sum()
        if has_entropy:
            found["entropy"] = module.vocab_parallel_entropy(given, chunk_size=options.get("chunk_size"))
            total = total + (e * found["entropy"].view_as(e)).sum()
        total.backward()
        return found, [leaf.grad]

    def from_hidden(is_packed=False, temperature=1.0):
        leaves = hidden.clone().requires_grad_(), weight.chunk(tp)[rank].clone().requires_grad_()
        values = log_probs_of("hidden", *leaves, is_packed=is_packed, chunk_size=3, temperature=temperature)
        (c * values.view_as(c)).sum().backward()
        with torch.no_grad():
            entropy = module._fused_vocab_parallel_entropy_from_hidden(*leaves, group, 3, temperature)
        return {"log_probs": values, "entropy": entropy}, [leaf.grad for leaf in leaves]

    calls = [
        *(partial(from_logits, **chunks, has_entropy=one) for chunks in ({}, {"chunk_size": 3}) for one in (False, True)),
        *(partial(from_logits, is_packed=True, **chunks) for chunks in ({}, {"chunk_size": 3})),
        *(
            from_hidden,
            partial(from_hidden, temperature=TEMPERATURE),
            partial(from_hidden, is_packed=True, temperature=TEMPERATURE),
        ),
    ]
    theirs = [call() for call in calls]
    own_log_probs.install("SkyRL")
    for (values, gradients), (our_values, our_gradients) in zip(theirs, [call() for call in calls], strict=True):
        assert values.keys() == our_values.keys()
        for name, value in values.items():
            assert value.shape == our_values[name].shape and value.dtype == our_values[name].dtype
            limit = OF_ENTROPIES if name == "entropy" else OF_VALUES
            assert relative(our_values[name].detach(), value.detach()) < limit, name
        for gradient, our_gradient in zip(gradients, our_gradients, strict=True):
            assert gradient.shape == our_gradient.shape and relative(our_gradient, gradient) < OF_GRADIENTS
    assert hasattr(module._fused_lm_head_logprob_apply, log_probs.MARK)


@pytest.mark.host("SKYRL_ROOT")
@pytest.mark.megatron
@pytest.mark.parametrize("tp", [1, 2])
def test_skyrl_has_its_own_numbers_by_our_functions(tp):
    run_ranks(partial(skyrl_calls, tp=tp), tp, tensor_model_parallel_size=tp)
