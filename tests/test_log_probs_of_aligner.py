"""Our log-probabilities in NeMo-RL and SkyRL: numbers on one and two ranks, the fused switches, how workers get them, refusals.

NEMO_RL_ROOT=... SKYRL_ROOT=... pytest -m host --require host tests/test_log_probs_of_aligner.py
"""

from __future__ import annotations

import importlib
import math
import pickle
import sys
from functools import partial
from types import SimpleNamespace

import nemo_rl_cases
import own_log_probs
import pytest
import skyrl_cases
import torch
import torch.distributed as dist
from carrier_cases import LiveBytes
from forked import in_fork
from host_checkouts import NEMO_RL, SKYRL
from linear_cases import relative
from nemo_rl_cases import master_config
from test_forward_step import SeenShapes
from test_host_log_probs import (
    HIDDEN,
    LIMIT,
    OF_GRADIENTS,
    VOCABULARY,
    before_and_after,
    nearly_equal,
    nemo_rl_with_ours,
    skyrl_with_ours,
    total_of,
)
from test_nemo_rl import load_nemo_rl

from megatron_rl.errors import ConfigError
from megatron_rl.hosts import nemo_rl, skyrl
from megatron_rl.hosts.heads import log_probs
from megatron_rl.hosts.heads import nemo_rl as nemo_rl_head
from megatron_rl.hosts.heads import skyrl as skyrl_head
from megatron_rl.hosts.heads.carried_rows import carry_rows
from megatron_rl.hosts.heads.skyrl import InWorkers
from megatron_rl.layout.groups import SINGLE, resolve_groups
from megatron_rl.megatron.head import HeadInputs
from megatron_rl.testing.ranks import run_ranks

ROWS, WIDTH, TEMPERATURE = 2, 8, 0.7
FUSED_HEAD = {"megatron_cfg": {"enabled": True, "use_fused_linear_logprobs": True}}


HOSTS = {"NeMo-RL": nemo_rl_with_ours, "SkyRL": skyrl_with_ours}


def case(dtype=torch.float32):
    """tokens [B, S]; hidden [B, S, H] and weight [V, H]; logits [B, S, V]; the factors of log-probability and entropy."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (ROWS, WIDTH), generator=generator)
    hidden = torch.randn(ROWS, WIDTH, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    c = torch.randn(ROWS, WIDTH - 1, generator=generator, dtype=torch.float64)
    e = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return tokens, hidden.to(dtype), weight.to(dtype), (hidden @ weight.T).to(dtype), c, e


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_log_probabilities_from_logits_of_16_bits_are_exact(host, chunk_size):
    def work():
        module = HOSTS[host]()
        tokens, _, _, logits, c, _ = case(torch.bfloat16)
        exact = logits.double().requires_grad_()
        values = exact.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
        (gradient,) = torch.autograd.grad((c * values).sum(), exact)
        leaf = logits.clone().requires_grad_()
        found = module.from_parallel_logits_to_logprobs(leaf, tokens, 0, VOCABULARY, SINGLE, chunk_size=chunk_size)
        (c * found).sum().backward()
        assert found.dtype == torch.float32 and relative(found.detach(), values.detach()) < LIMIT
        assert relative(leaf.grad, gradient) < 2**-8  # the gradient alone is rounded, by 2^-9 of an element
        assert torch.equal(leaf.detach(), logits), "the host may read the logits later"
        assert not module.from_parallel_logits_to_logprobs(leaf, tokens, 0, VOCABULARY, SINGLE, True).requires_grad

    in_fork(work)


def carried(hidden, weight, group=SINGLE, *, is_sequence_parallel=False):
    """[S, B, H] as the output layer of NeMo-RL's worker gives it to the host, [B, S, V]."""
    rows = carry_rows(HeadInputs(hidden, weight, is_sequence_parallel), group, nemo_rl_head.FUSED_HEAD)
    return rows.transpose(0, 1).contiguous()


@pytest.mark.parametrize("host", HOSTS)
def test_no_logits_are_made_behind_the_fused_switches(host):
    """1,440 tokens and 4,096 columns in chunks of 256 KiB, which are 16 rows: forward and backward, entropies of SkyRL too. Of the
    memory of float32 logits they take less than a tenth; from logits it is more than the logits and their gradient."""
    width, columns = 1440, 4096

    def work():
        module = HOSTS[host]()
        log_probs.MAX_LOGITS_BYTES = 16 * columns * 4
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, columns, (1, width), generator=generator)
        hidden = torch.randn(1, width, HIDDEN, generator=generator).requires_grad_()
        weight = torch.randn(columns, HIDDEN, generator=generator).requires_grad_()

        def by_head():
            if host == "NeMo-RL":
                output = carried(hidden.transpose(0, 1), weight)
                output.div_(TEMPERATURE)
                return module.from_parallel_logits_to_logprobs(output, tokens, 0, columns, SINGLE)
            module.from_parallel_hidden_to_entropy_packed_sequences(hidden, weight, SINGLE, TEMPERATURE)
            return module.from_parallel_hidden_to_logprobs(hidden, weight, tokens, 0, columns, SINGLE, temperature=TEMPERATURE)

        def by_logits():
            return module.from_parallel_logits_to_logprobs(hidden @ weight.T, tokens, 0, columns, SINGLE)

        peaks = {}
        for name, call in (("logits", by_logits), ("head", by_head)):
            with LiveBytes() as live, SeenShapes() as seen:
                call().sum().backward()
            peaks[name] = live.peak
        assert max(math.prod(shape[:-1]) for shape in seen.shapes if shape and shape[-1] == columns) <= 16
        assert peaks["logits"] > 2 * 4 * width * columns and peaks["head"] < 0.1 * 4 * width * columns, peaks

    in_fork(work)


class WithMore(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vocab_parallel_logits, target, vocab_start_index, vocab_end_index, chunk_size, tp_group, top_k):
        pass


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_whose_functions_are_others_is_refused(host):
    """In a worker of NeMo-RL, and where SkyRL's table arrives."""

    def work():
        with pytest.raises(ConfigError, match=rf"{host}'s ChunkedDistributedLogprob takes \(ctx, .*, tp_group, top_k\), ours is"):
            HOSTS[host](lambda module: setattr(module, "ChunkedDistributedLogprob", WithMore))

    in_fork(work)


# How NeMo-RL's workers get them


class Policy:
    def __init__(self, config, worker_extension_cls_fqn=None):
        self.worker = worker_extension_cls_fqn


def setup(master_config, tokenizer, policy_factory=None):
    return (Policy if policy_factory is None else policy_factory)(config=master_config)


def with_environments(work):
    """NeMo-RL's table of the Python of each class of workers, in the process of the work."""

    def prepared():
        contents = {"ACTOR_ENVIRONMENT_REGISTRY": {nemo_rl_head.OWN_WORKER: "its Python"}}
        modules = own_log_probs.modules_of("nemo_rl", {nemo_rl_head.ENVIRONMENTS: contents})
        work(modules[nemo_rl_head.ENVIRONMENTS].ACTOR_ENVIRONMENT_REGISTRY)

    return prepared


def test_a_nemo_rl_without_such_workers_is_refused():
    def older(master_config, tokenizer):
        pass

    trainer = SimpleNamespace(Policy=lambda config: None)
    with pytest.raises(ConfigError, match=r"setup takes no policy_factory \(.*test_log_probs_of_aligner.py:\d+\)"):
        nemo_rl_head.with_our_worker(trainer, older, ("config", "tokenizer"), {})
    with pytest.raises(ConfigError, match=r"takes no worker_extension_cls_fqn \(.*test_log_probs_of_aligner.py:\d+\)"):
        nemo_rl_head.with_our_worker(trainer, setup, ("config", "tokenizer"), {})


class ClippedPGLossFn:
    def __init__(self, cfg, use_fused_linear_logprobs=False):
        self.input_type = self.loss_type = self.use_fused_linear_logprobs = self.metric_normalizations = None
        self.reference_policy_kl_penalty, self.force_on_policy_ratio = 0.0, False

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        pass


def test_a_launch_of_nemo_rl_with_our_log_probabilities_alone():
    """By the launcher: our workers, and NeMo-RL's own loss and estimator."""

    def work(environments):
        def whole_setup(master_config, tokenizer, policy_factory=None):
            policy = (trainer.Policy if policy_factory is None else policy_factory)(config=master_config)
            is_fused.append(fused_of(master_config))
            return policy.worker, type(trainer.ClippedPGLossFn(master_config.loss_fn)).__name__

        def own_estimator(master_config):
            return "NeMo-RL's own"

        def fused_of(config):
            return config.policy["megatron_cfg"].get("use_fused_linear_logprobs")

        contents = {
            "setup": whole_setup,
            "_create_advantage_estimator": own_estimator,
            "Policy": Policy,
            "ClippedPGLossFn": ClippedPGLossFn,
        }
        trainer = own_log_probs.modules_of("nemo_rl", {nemo_rl.TRAINER: contents})[nemo_rl.TRAINER]
        sys.argv = ["run_grpo.py"]
        calls, problems = [], []
        is_fused: list = []
        with nemo_rl.loss_in_setup(lambda error: problems.append(str(error)) or 2, calls):
            alone = master_config({"megatron_rl_log_probs": "megatron_rl"})
            assert trainer.setup(alone, "tokenizer") == (nemo_rl_head.OUR_WORKER, "ClippedPGLossFn")
            assert trainer._create_advantage_estimator(alone) == "NeMo-RL's own"
            both = master_config(
                {"megatron_rl": "grpo.token_mean", "megatron_rl_log_probs": "megatron_rl", "reference_policy_kl_penalty": 0}
            )
            assert trainer.setup(both, tokenizer="tokenizer") == (nemo_rl_head.OUR_WORKER, "NemoLoss")
            by_factory = {"policy_factory": lambda **options: Policy(**options)}
            assert trainer.setup(both, "tokenizer", **by_factory) == (nemo_rl_head.OUR_WORKER, "NemoLoss")
            ours = master_config({"megatron_rl": "grpo.token_mean", "reference_policy_kl_penalty": 0})
            assert trainer.setup(ours, "tokenizer") == (None, "NemoLoss")
            for one in (alone, ours):
                one.policy["megatron_cfg"]["use_fused_linear_logprobs"] = True
            is_fused.clear()
            assert trainer.setup(alone, "tokenizer") == (nemo_rl_head.WORKER_WITH_HEAD, "ClippedPGLossFn")
            assert trainer.setup(ours, "tokenizer") == (None, "NemoLoss"), "NeMo-RL's own switch, without our log-probabilities"
            assert is_fused == [False, True]
            assert alone.policy["megatron_cfg"]["use_fused_linear_logprobs"], "the caller's own stays"
            assert environments[nemo_rl_head.WORKER_WITH_HEAD] == environments[nemo_rl_head.OUR_WORKER] == "its Python"
            both.loss_fn["megatron_rl_log_probs"] = "nemo_rl"
            assert trainer.setup(both, "tokenizer", **by_factory) == (None, "NemoLoss")
            with pytest.raises(SystemExit):
                trainer.setup(master_config({"megatron_rl_log_probs": "mine"}), "tokenizer")
        assert len(calls) == 8 and "is neither megatron_rl" in problems[0]
        assert trainer.setup is whole_setup

    in_fork(with_environments(work))


@pytest.mark.parametrize(
    ("settings", "policy", "message"),
    [
        ({"megatron_rl_log_probs": "ours"}, {}, "loss_fn.megatron_rl_log_probs=ours is neither megatron_rl nor nemo_rl"),
        ({"megatron_rl_log_probs": True}, {}, "loss_fn.megatron_rl_log_probs=True is neither megatron_rl"),
        (
            {"megatron_rl_log_probs": "megatron_rl"},
            {"megatron_cfg": {"enabled": False}},
            "is made for NeMo-RL's Megatron worker; set policy.megatron_cfg.enabled=true",
        ),
        (
            {"megatron_rl_log_probs": "megatron_rl"},
            {"quant_cfg": "fp8"},
            "beside policy.quant_cfg: each has NeMo-RL make another class",
        ),
        (
            {"megatron_rl_log_probs": "megatron_rl", "megatron_rl_kl_estimator": "k3"},
            {},
            "loss_fn.megatron_rl_kl_estimator=k3 has no effect on NeMo-RL's own loss",
        ),
    ],
)
def test_nemo_rls_setting_is_judged(settings, policy, message):
    config = master_config(settings)
    config.policy |= policy
    with pytest.raises(ConfigError, match=message):
        nemo_rl.check(config)


# SkyRL


def skyrl_launch(log_probs: str, *, loss: str = "regular", strategy: str = "megatron"):
    algorithm = skyrl_cases.algorithm_config(loss)
    return SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm, strategy=strategy)), skyrl.Words(), log_probs


def test_skyrls_own_loss_has_no_other_word_of_ours():
    config, _, log_probs = skyrl_launch("megatron_rl")
    words = skyrl.Words({"importance_correction": "tis"}, "row_mean")
    with pytest.raises(ConfigError, match=r"(?s)tis has no effect on SkyRL's own loss.*row_mean has no effect"):
        skyrl.check((config, words, log_probs))


def test_skyrl_has_our_log_probabilities_beside_our_loss_or_its_own():
    assert skyrl.check(skyrl_launch("megatron_rl")) == ["megatron_rl.log_probs=megatron_rl, and SkyRL's own loss"]
    skyrl.check(skyrl_launch("megatron_rl", loss="megatron_rl.grpo"))
    for launch, message in (
        (skyrl_launch("ours"), "megatron_rl.log_probs=ours is neither megatron_rl nor skyrl"),
        (skyrl_launch("skyrl"), "trainer.override_entrypoint=megatron_rl.hosts.skyrl has no effect"),
        (skyrl_launch("megatron_rl", strategy="fsdp"), "megatron_rl.log_probs=megatron_rl with trainer.strategy=fsdp"),
    ):
        with pytest.raises(ConfigError, match=message):
            skyrl.check(launch)


def test_skyrls_table_carries_them_where_they_are_asked_for():
    for is_there in (False, True):
        entries = {}
        table = SimpleNamespace(register=lambda name, entry, entries=entries: entries.update({name: entry}))
        skyrl.register(table, skyrl.Words(), has_log_probs=is_there)
        assert (skyrl.LOG_PROBS in entries) == is_there
    with pytest.raises(TypeError, match="it is no policy loss"):
        entries[skyrl.LOG_PROBS]()
    assert not any(name.startswith("skyrl.") for name in sys.modules)


# The hosts' own code, from checkouts


def columns():
    """Tokens [B, S], and their packed order with lengths that are padded to multiples of 4."""
    tokens, hidden, weight, logits, c, e = case()
    return tokens, hidden, weight, logits, c, e, torch.tensor([0, WIDTH, 2 * WIDTH], dtype=torch.int32)


def nemo_rl_calls(rank: int, tp: int) -> None:
    """NeMo-RL's own functions of log-probabilities with its autograd functions and with ours: whole rows, packed rows, in chunks.
    Those of a filter of the sampler stay its own."""
    module = NEMO_RL.load("nemo_rl.distributed.model_utils")
    group = resolve_groups().tp
    tokens, hidden, weight, logits, c, _, bounds = columns()
    shard = VOCABULARY // tp
    own = {"vocab_start_index": rank * shard, "vocab_end_index": (rank + 1) * shard}
    alone = [dist.new_group([each]) for each in range(tp)][rank]

    def from_logits(packed=False, **options):
        leaf = logits.chunk(tp, -1)[rank].clone().requires_grad_()
        if packed:
            given = leaf.reshape(1, -1, shard), tokens.reshape(1, -1), bounds, WIDTH
            found = module.from_parallel_logits_to_logprobs_packed_sequences(*given, **own, group=group, cp_group=alone, **options)
        else:
            found = module.from_parallel_logits_to_logprobs(leaf, tokens, **own, tp_group=group, cp_group=alone, **options)
        total_of({"log_probs": found}, c).backward()
        return {"log_probs": found}, [leaf.grad]

    calls = [
        from_logits,
        partial(from_logits, chunk_size=3),
        partial(from_logits, packed=True),
        partial(from_logits, packed=True, chunk_size=3),
    ]
    theirs, ours = before_and_after(
        lambda: [call() for call in calls],
        lambda: importlib.import_module("megatron_rl.hosts.heads.nemo_rl").install("NeMo-RL", "a revision"),
    )
    for pair in zip(theirs, ours, strict=True):
        nearly_equal(*pair)
    assert hasattr(module.DistributedLogprob, log_probs.MARK)
    assert not hasattr(module.DistributedLogprobWithSampling, log_probs.MARK)


def nemo_rls_own_loss_of_our_head(rank: int) -> None:
    """Its ClippedPGLossFn on real context-parallel ranks, in each packing, from hidden states through its
    forward_with_post_processing_fn, at a temperature: by a product that makes logits and NeMo-RL's functions, and by our head. The
    gradients are of the numbers that hidden states are made of, and of the weight."""
    group = dist.group.WORLD
    weight = torch.eye(50) + 0.2 * torch.randn(50, 50, generator=torch.Generator().manual_seed(3))
    leaf = weight.requires_grad_()
    seen = []

    def by_logits(hidden):
        return hidden @ leaf.T

    def by_our_head(hidden):
        seen.append(carry_rows(HeadInputs(hidden.transpose(0, 1), leaf, False), SINGLE, nemo_rl_head.FUSED_HEAD).transpose(0, 1))
        return seen[-1]

    chosen = [case for case in nemo_rl_cases.matrix(["grpo"]) if case.cp == group.size() and case.aggregation == "token_mean"]
    chosen = [case for case in chosen if group.size() == 1 or case.packing != "rows"]

    def results(output_of):
        own, call = load_nemo_rl(group, output_of, TEMPERATURE)
        found = []
        for case in chosen:
            leaf.grad = None
            loss = own({"reference_policy_kl_penalty": 0.1, "ratio_clip_min": 0.2, "ratio_clip_max": 0.28})
            step = nemo_rl_cases.run_step(case, nemo_rl_cases.make_step(case), loss, call=call, cp_group=group)
            found.append((step.loss, [torch.cat(step.gradients), leaf.grad]))
        return found

    theirs = results(by_logits)
    importlib.import_module("megatron_rl.hosts.heads.nemo_rl").install("NeMo-RL", "a revision")
    log_probs.MAX_LOGITS_BYTES = 5 * 50 * 4
    ours = results(by_our_head)
    assert seen and {case.packing for case in chosen} == set(nemo_rl_cases.PACKINGS[group.size() > 1 :])
    for (their_loss, their_gradients), (loss, gradients) in zip(theirs, ours, strict=True):
        assert loss == pytest.approx(their_loss, rel=OF_GRADIENTS)
        for their_gradient, gradient in zip(their_gradients, gradients, strict=True):
            # Logits that are float32 sums of 50 products are rounded in another order, some near 30, before their exponential.
            assert relative(gradient, their_gradient) < 4 * OF_GRADIENTS


@pytest.mark.host("NEMO_RL_ROOT")
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_nemo_rls_own_loss_has_its_own_gradients_by_our_head(cp):
    """With context parallelism and packed rows, where NeMo-RL refuses its own head."""
    run_ranks(nemo_rls_own_loss_of_our_head, cp, timeout=500, use_megatron=False)


@pytest.mark.host("NEMO_RL_ROOT")
@pytest.mark.megatron
@pytest.mark.parametrize("tp", [1, 2])
def test_nemo_rl_has_its_own_numbers_by_our_functions(tp):
    run_ranks(partial(nemo_rl_calls, tp=tp), tp, tensor_model_parallel_size=tp)


def skyrl_calls(rank: int, tp: int) -> None:
    """The same of SkyRL, with its entropies."""
    module = SKYRL.load(skyrl_head.MODULE)
    group = resolve_groups().tp
    tokens, hidden, weight, logits, c, e, bounds = columns()
    shard = VOCABULARY // tp
    own = {"vocab_start_index": rank * shard, "vocab_end_index": (rank + 1) * shard}
    alone = [dist.new_group([each]) for each in range(tp)][rank]

    def from_logits(packed=False, has_entropy=False, **options):
        leaf = logits.chunk(tp, -1)[rank].clone().requires_grad_()
        given = leaf * 1.0
        if packed:
            flat = given.reshape(1, -1, shard), tokens.reshape(1, -1), bounds, WIDTH
            values = module.from_parallel_logits_to_logprobs_packed_sequences(*flat, **own, group=group, cp_group=alone, **options)
        else:
            values = module.from_parallel_logits_to_logprobs(given, tokens, **own, tp_group=group, cp_group=alone, **options)
        found = {"log_probs": values}
        if has_entropy:
            found["entropy"] = module.vocab_parallel_entropy(given, chunk_size=options.get("chunk_size"))
        total_of(found, c, e).backward()
        return found, [leaf.grad]

    def from_hidden(packed=False, **options):
        leaves = hidden.clone().requires_grad_(), weight.chunk(tp)[rank].clone().requires_grad_()
        kept = {"cp_group": alone, "chunk_size": 3, **options}
        if packed:
            flat = leaves[0].reshape(1, -1, HIDDEN), leaves[1], tokens.reshape(1, -1), bounds, WIDTH
            values = module.from_parallel_hidden_to_logprobs_packed_sequences(*flat, **own, group=group, **kept)
        else:
            values = module.from_parallel_hidden_to_logprobs(*leaves, tokens, **own, tp_group=group, **kept)
        total_of({"log_probs": values}, c).backward()
        found = {"log_probs": values}
        with torch.no_grad():
            found["entropy"] = module._fused_vocab_parallel_entropy_from_hidden(*leaves, group, 3, options.get("temperature", 1.0))
        return found, [leaf.grad for leaf in leaves]

    calls = [
        from_logits,
        partial(from_logits, chunk_size=3),
        partial(from_logits, has_entropy=True),
        partial(from_logits, has_entropy=True, chunk_size=3),
        partial(from_logits, packed=True),
        partial(from_logits, packed=True, chunk_size=3),
        from_hidden,
        partial(from_hidden, temperature=TEMPERATURE),
        partial(from_hidden, packed=True, temperature=TEMPERATURE),
    ]
    theirs, ours = before_and_after(
        lambda: [call() for call in calls], lambda: pickle.loads(pickle.dumps(InWorkers("SkyRL", skyrl.PROBED)))
    )
    for pair in zip(theirs, ours, strict=True):
        nearly_equal(*pair)
    assert hasattr(module._fused_lm_head_logprob_apply, log_probs.MARK)


@pytest.mark.host("SKYRL_ROOT")
@pytest.mark.megatron
@pytest.mark.parametrize("tp", [1, 2])
def test_skyrl_has_its_own_numbers_by_our_functions(tp):
    run_ranks(partial(skyrl_calls, tp=tp), tp, tensor_model_parallel_size=tp)


@pytest.mark.host("NEMO_RL_ROOT")
def test_nemo_rl_makes_workers_of_another_class_as_we_ask():
    """Its source: `setup` calls the factory with keywords, Policy takes the class, and its table has NeMo-RL's own worker."""
    assert "policy_factory: Optional[Callable" in NEMO_RL.source("nemo_rl/algorithms/grpo.py")
    policy = NEMO_RL.source("nemo_rl/models/policy/lm_policy.py")
    assert (
        "worker_extension_cls_fqn: Optional[str] = None," in policy
        and "worker_builder_cls_fqn = worker_extension_cls_fqn" in policy
    )
    assert f'"{nemo_rl_head.OWN_WORKER}": ' in NEMO_RL.source("nemo_rl/distributed/ray_actor_environment_registry.py")
    worker = NEMO_RL.source("nemo_rl/models/policy/workers/megatron_policy_worker.py")
    # Our head is placed in the model that its __init__ leaves, and its fused head is off by this name.
    assert "self.model = model_and_optimizer_state.model" in worker
    assert 'config["megatron_cfg"].get("use_fused_linear_logprobs", False)' in NEMO_RL.source("nemo_rl/models/megatron/setup.py")
    assert "class MegatronPolicyWorkerImpl(" in worker and 'get_runtime_env_for_policy_worker("megatron_policy_worker")' in worker


@pytest.mark.host("SKYRL_ROOT")
def test_skyrls_workers_ask_for_their_loss_before_they_compute():
    assert "PolicyLossRegistry.get(self.cfg.algorithm.policy_loss_type)" in SKYRL.source(
        "skyrl/backends/skyrl_train/workers/worker.py"
    )
    table = SKYRL.source("skyrl/backends/skyrl_train/utils/ppo_utils.py")
    assert "cls.sync_with_actor()" in table and "func = cloudpickle.loads(func_serialized)" in table
