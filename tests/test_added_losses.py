"""Losses that a model adds by itself, and settings of a model: which are known, what they do, and who is told on which host."""

from __future__ import annotations

import ast
import copy
import math
import re
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import trainer_cases
from helpers import error_of, pool_of
from host_steps import (
    GSPO,
    KEYS,
    MASKED,
    OPSM,
    PER_TOKEN,
    REPLAY,
    REWARD,
    SHAPES,
    SKIPPED,
    TERMS,
    TIS,
    VOCAB_SIZE,
    Case,
    host_batch,
    host_logits,
    never,
    one,
)
from test_layouts import config_of

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import loss, model_notes, training_hooks
from megatron_rl.hosts.checks import check_launch
from megatron_rl.hosts.loss import custom_loss
from megatron_rl.megatron import installed
from megatron_rl.megatron.checks import check_attached, contract_problems
from megatron_rl.megatron.model import find_gpt_model
from megatron_rl.validation.auxiliary_losses import SCALERS

megatron = pytest.mark.megatron
pool = pool_of(1)


# The table


def attaches(one: ast.ClassDef) -> bool:
    """Whether it has a set_loss_scale, or is an autograd Function whose backward makes a gradient that no later node gave."""
    methods = {line.name: line for line in one.body if isinstance(line, ast.FunctionDef)}
    is_function = any(ast.unparse(base).split(".")[-1] == "Function" for base in one.bases)
    made = ast.unparse(methods["backward"]) if is_function and "backward" in methods else ""
    return "set_loss_scale" in methods or bool(re.search(r"\b(?:ones_like|full_like|new_ones)\(", made))


@megatron
def test_every_function_of_megatron_that_attaches_a_loss_is_in_the_table():
    """A release that brings another one turns this red: its loss would be scaled by something that no page names."""
    [root] = find_spec("megatron.core").submodule_search_locations
    texts = [path.read_text(encoding="utf-8") for path in Path(root).rglob("*.py")]
    trees = [ast.parse(text) for text in texts if re.search("set_loss_scale|ones_like|main_loss", text)]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = {one.name for one in classes if attaches(one)}
    assert {"MoEAuxLossAutoScaler", "MTPLossAutoScaler"} <= found <= {*SCALERS}


class NewAutoScaler(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, loss):
        return output

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones(())

    @staticmethod
    def set_loss_scale(scale): ...


class MTPLossAutoScaler(NewAutoScaler): ...


@pytest.mark.parametrize(("function", "is_refused"), [(NewAutoScaler, True), (MTPLossAutoScaler, False)])
def test_a_model_that_attaches_an_unknown_loss_is_refused_in_its_first_forward(function, is_refused):
    """Where no walk over Megatron's source finds it: a layer of one's own."""
    layer = torch.nn.Linear(2, 2)
    hidden = layer(torch.ones(1, 2))
    output = function.apply(hidden, hidden.sum()).exp() * 2
    with torch.no_grad():
        assert not check_attached([layer(torch.ones(1, 2))])  # has no graph, and is no answer
    said = error_of(lambda: check_attached([output]))
    assert ("the model attaches a loss by NewAutoScaler, which this package does not know" in said) == is_refused
    assert is_refused or said == ""


def first_step_on_rank(rank: int) -> str:
    trainer = trainer_cases.tiny_trainer()
    layer = find_gpt_model(trainer.model).decoder.layers[0]
    layer.register_forward_hook(lambda layer, given, made: (NewAutoScaler.apply(made[0], made[0].sum()), *made[1:]))
    return error_of(lambda: trainer.step([trainer_cases.ragged_step()]))


@megatron
def test_the_forward_step_looks_at_the_first_graph(pool):
    [said] = pool.run(first_step_on_rank, world_size=1)
    assert "the model attaches a loss by NewAutoScaler" in said


# The indexer of sparse attention


def refusals_on_rank(rank: int) -> list[str]:
    """Of the forward step for models with an indexer, and of a model that cannot be built here."""
    from megatron_rl.megatron.model import build_gpt_model, transformer_config

    answers = []
    for is_per_token, coefficient in ((False, 0.01), (True, 0.01), (False, 0.0)):
        config = transformer_config(num_layers=1, hidden_size=4, num_attention_heads=1, calculate_per_token_loss=is_per_token)
        vars(config)["dsa_indexer_loss_coeff"] = coefficient
        answers.append("".join(contract_problems(config_of("grpo", "token_mean"), config)))
    vars(config).update(hybrid_context_parallel=True, expert_model_parallel_size=2)
    answers.append("".join(contract_problems(config_of("grpo", "token_mean"), config)))
    latent = {"multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "v_head_dim": 8}
    of_indexer = {"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 4, "dsa_indexer_loss_coeff": 0.0}
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "add_bias_linear": False}
    config = transformer_config(**sizes, **latent, **of_indexer, experimental_attention_variant="dsa")
    return [*answers, error_of(lambda: build_gpt_model(config, vocab_size=8, max_sequence_length=8))]


@megatron
def test_an_indexer_is_refused_under_both_contracts_and_where_it_cannot_be_built(pool):
    """Its activations are turned by a CUDA package. Without the refusal plain layers would be built."""
    default, of_tokens, switched_off, hybrid, built = pool.run(refusals_on_rank, world_size=1)[0]
    assert all("dsa_indexer_loss_coeff=0.01: the loss of the sparse-attention" in said for said in (default, of_tokens))
    assert switched_off == "" and "with expert_model_parallel_size=2: these ranks would run different" in hybrid
    assert "experimental_attention_variant='dsa': build_gpt_model has no such layers" in built


@megatron
@pytest.mark.parametrize("is_scaled", [False, True])
def test_actors_of_hosts_and_of_megatron_lm_ask_the_release(is_scaled):
    with (
        mock.patch.object(installed, "scales_indexer_loss", lambda: is_scaled),
        mock.patch.object(model_notes, "expert_replicas_drift", lambda: False),
    ):
        found = list(model_notes.release_problems({"dsa_indexer_loss_coeff": 0.01, "calculate_per_token_loss": False}))
        config = SimpleNamespace(calculate_per_token_loss=False, dsa_indexer_loss_coeff=0.01, hybrid_context_parallel=True)
        of_model = error_of(lambda: training_hooks.check_model_contract(Namespace(), config))
    assert len(found) == (not is_scaled) and ("no scale" in of_model) != is_scaled
    assert "remove --hybrid-context-parallel" in of_model


ACTORS_REFUSE = {
    "so its gradient is x 1 / cp": {
        **{"calculate_per_token_loss": True, "context_parallel_size": 2, "enable_mtp_training": True},
        **{"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1},
    },
    "hybrid_context_parallel=True: each micro-batch then has": {"hybrid_context_parallel": True},
    "multi_latent_attention=True with tensor_model_parallel_size=2 and transformer_impl='local'": {
        **{"multi_latent_attention": True, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    },
    "tensor_model_parallel_size=2 with experts needs sequence_parallel": {"num_moe_experts": 8, "tensor_model_parallel_size": 2},
}


@pytest.mark.parametrize("said", ACTORS_REFUSE)
def test_an_actor_refuses_a_model_that_would_train_wrongly(said):
    """FB-103, FB-104, FB-105, FB-127: by the built model's config, whichever host made it. test_refused.py has all rows."""
    given = {"calculate_per_token_loss": False, "transformer_impl": "local"} | ACTORS_REFUSE[said]
    found = error_of(lambda: training_hooks.check_model_contract(Namespace(**given), SimpleNamespace(**given)))
    assert found.count("\n") == 0 and said in found, found


# hooks.custom_loss: what it leaves alone, and what it refuses by name. tests/test_hosts.py has its steps.


def test_running_twice_gives_the_same_changes_nothing_and_is_judged_once(monkeypatch):
    """--recompute-loss-function runs the loss again; arguments, batch and logits stay as they are."""
    judged = []
    monkeypatch.setattr(loss, "check_launch", lambda *given, **named: judged.append(given) or check_launch(*given, **named))
    case = Case("bshd", settings=GSPO | TIS | TERMS, without=())
    args, samples = case.args(), case.samples()
    logits = host_logits(case, samples, samples, [sample.logits for sample in samples], 0, 1)
    batch = host_batch(case, samples, samples, 0, 1)
    before = copy.deepcopy((args, batch, logits))
    first, second = (custom_loss(args, batch, logits, never) for _ in range(2))
    assert first[0] == second[0] and first[1] == second[1]
    assert repr((args, batch, logits)) == repr(before) and len(judged) == 1


def test_reported_loss_does_not_share_memory_with_the_loss():
    """Whoever scales the loss in place leaves the metric alone."""
    loss, metrics, _ = one(Case(), lambda batch, logits: logits.float())
    kept = float(metrics["loss"])
    with torch.no_grad():
        loss.mul_(100)
    assert float(metrics["loss"]) == kept != 0


# Our names in miles' order; slime has neither ess_ratio nor train_rollout_kl.
ALL_KEYS = (
    "loss pg_loss entropy_loss pg_clipfrac ppo_kl ess_ratio train_rollout_logprob_abs_diff train_rollout_kl kl_loss ois tis "
    "tis_clipfrac tis_abs opsm_clipfrac"
).split()


@pytest.mark.parametrize("shapes", [SHAPES, [MASKED, MASKED]], ids=["normal", "all masked"])
def test_metric_names_are_the_hosts_in_their_order(shapes):
    everything = Case(settings=TIS | OPSM | TERMS, shapes=shapes, without=())
    assert list(one(everything)[1]) == ALL_KEYS
    slime = Case(host="slime", settings=TIS | OPSM | TERMS, shapes=shapes, without=())
    assert list(one(slime)[1]) == [name for name in ALL_KEYS if name not in ("ess_ratio", "train_rollout_kl")]
    assert list(one(Case(shapes=shapes), policy_metrics="none")[1]) == ["loss", "pg_loss", "entropy_loss"]


def test_without_rollout_counts_a_sample_is_its_own_rollout():
    """miles hands None over where its data has no rollouts: then m_i = 6 and 6, -(1 + 3) = -4."""

    def known(batch, logits):
        batch["advantages"] = [torch.full((6,), 1.0), torch.full((6,), 3.0)]
        batch["rollout_mask_sums"] = None

    case = Case(host="slime", shapes=[SHAPES[4], SHAPES[4]], rollouts=[0, 0], without=("log_probs", "rollout_log_probs"))
    torch.testing.assert_close(float(one(case, known)[0].detach()), -4.0, rtol=1e-6, atol=0)


def test_settings_that_would_not_be_honoured_are_refused():
    """test_launch has every rule of a launch; one of them here shows that our loss asks for all."""
    with pytest.raises(ConfigError, match="--importance-correction mask and --use-tis tis are the"):
        one(Case(shapes=SHAPES, without=()), **TIS, importance_correction="mask")


@pytest.mark.parametrize("key", ["rollout_top_p_token_ids", "rollout_sampling_mask_ids"])
def test_a_batch_that_brings_its_sampling_support_is_refused(key):
    """Whatever the arguments say: a sample may be sampled by settings of its own."""
    with pytest.raises(DataError, match=f"the host's batch has '{key}'.*the whole vocabulary"):
        one(Case(), lambda batch, logits: batch.update({key: [[1, 2]]}))


def without(key):
    return lambda batch, logits: batch.update({key: None})


def shorter(key):
    return lambda batch, logits: batch.update({key: [batch[key][0][:-1], *batch[key][1:]]})


def fewer(key):
    return lambda batch, logits: batch.update({key: batch[key][:-1]})


def logits_like(*shape):
    return lambda batch, logits: torch.zeros(*shape, VOCAB_SIZE, requires_grad=True)


def vary(batch, logits):
    batch["advantages"][0] = torch.arange(5.0)


NEEDS = "no 'rollout_log_probs', .*needs with what compares with the sampler's policy; it has"
# The launch, what is done to the batch, what is said.
BAD_DATA = {
    **{f"FB-02 no {key}": (Case(without=()), without(key), f"no '{key}'") for key in ("loss_masks", "log_probs")},
    "FB-02 no ref_log_probs": (Case(settings=TERMS), without("ref_log_probs"), "no 'ref_log_probs'"),
    "FB-02 TIS, no rollout_log_probs": (Case(settings=TIS), None, NEEDS),
    "FB-02 rollout log-probs unset": (Case(settings={"use_rollout_logprobs": True}), None, "no 'rollout_log_probs'"),
    "FB-11 companion without counts": (
        Case(settings=REWARD | {"loss_aggregation": "prompt_mean"}),
        without("rollout_mask_sums"),
        "no 'rollout_mask_sums'",
    ),
    "short log_probs": (Case(), shorter("log_probs"), r"log_probs\[0\] .* \(4,\): it must be \[5\]"),
    "log_probs of a forward that is left out": (Case(settings=SKIPPED, without=()), None, "log_probs, which would be ignored"),
    "wrong rollout sums": (Case(), fewer("rollout_mask_sums"), r"rollout_mask_sums .* \(5,\), expected \[6\]"),
    "FB-40 flat logits": (Case(), logits_like(75), "logits must be"),
    "too few rows": (Case(), logits_like(1, 71), "need 1 x 72 rows or more"),
    "FB-26 bshd rows of another length": (Case("bshd"), logits_like(6, 25), "need 6 x 24 rows"),
    "FB-09 phantom token": (Case(settings=PER_TOKEN), None, r"samples \[3\] .* fully masked.* counts one token"),
    "NaN logits": (Case(), lambda batch, logits: logits * math.nan, "log_probs"),
    "advantages that vary in a sample": (Case(settings=GSPO), vary, "advantages vary inside document 0"),
}


REPLAYED = Case(settings=REPLAY["miles"])
REPLAYED_BY_SLIME = Case(host="slime", settings=REPLAY["slime"])


def change_sets(case, change):
    """change(ids, offsets) of sample 0, whose tokens 0, 2 and 3 are trained, with sets of 3, 4 and 8 ids; masked ones have none."""

    def changed(batch, logits):
        keys = KEYS[case.host]
        new = change(*(batch[key][0].clone() for key in keys))
        for key, value in zip(keys, new, strict=True):
            batch[key][0] = value

    return changed


def outside(batch, logits):
    """Sample 2 takes the sets of tokens one later."""
    ids, offsets = (batch[key] for key in KEYS["miles"])
    ids[2], offsets[2] = ids[2][3:], torch.tensor([0, 1, 5, 5])


BAD_SETS = {
    "no ids": (REPLAYED, without(KEYS["miles"][0]), f"no '{KEYS['miles'][0]}', which --sampling-support replay needs: this host"),
    "padding in a set": (
        *(REPLAYED, change_sets(REPLAYED, lambda ids, offsets: (ids.index_fill(0, torch.tensor([2]), -1), offsets))),
        r"token 0 \(sample 0 .*\) has the ids -1, .*: they must be distinct and in \[0, 8\)",
    ),
    "a token outside its set": (REPLAYED, outside, r"token 6 \(sample 2 of the micro-batch\) took the id \d, which is not among"),
    "the sets of other tokens, slime": (
        *(REPLAYED_BY_SLIME, lambda batch, logits: [tokens.add_(1).remainder_(8) for tokens in batch["unconcat_tokens"]] and None),
        "took the id .* which is not among its",
    ),
    "sets, and no flag": (
        *(Case(), lambda batch, logits: batch.update({KEYS["miles"][0]: [[1]]})),
        "the whole vocabulary; sample with .*, or add --sampling-support replay",
    ),
}
BAD_DATA |= {f"kept ids: {name}": row for name, row in BAD_SETS.items()}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_refused_by_name(name):
    case, change, message = BAD_DATA[name]
    with pytest.raises(DataError, match=message):
        one(case, change)


def test_slime_counts_a_sampled_token_at_the_edge_of_its_set_as_kept():
    """Its sampler and its trainer both do. miles refuses it."""
    whole = one(REPLAYED_BY_SLIME)[0]

    def without_token(batch, logits):
        ids, token = KEYS["slime"][0], batch["unconcat_tokens"][0][4]
        assert batch[ids][0][0] == token
        batch[ids][0], offsets = batch[ids][0][1:], batch[KEYS["slime"][1]][0]
        batch[KEYS["slime"][1]][0] = torch.cat([offsets[:1], offsets[1:] - 1])

    assert one(REPLAYED_BY_SLIME, without_token)[0] == whole
