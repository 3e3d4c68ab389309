"""Losses that a model adds by itself, and settings of a model: which are known, what they do, and who is told on which host."""

from __future__ import annotations

import ast
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
from test_layouts import config_of

from megatron_rl.hosts import model_notes, training_hooks
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
