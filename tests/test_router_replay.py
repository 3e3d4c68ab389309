"""Router replay: which experts are replayed, with which weights, on which layout."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import chain

import pytest
import torch
import trainer_cases as cases
from helpers import pool_of
from test_checkpoints import CONFIG
from test_expert_layouts import EXPERTS as LAYER_EXPERTS
from test_layouts import GRADIENT_TOLERANCE, SP, config_of, errors_by_kind

from megatron_rl.config import PolicyLossConfig
from megatron_rl.megatron.model import model_config_of
from megatron_rl.megatron.routing import GivenRoutes, RouteLog, replay_problems, routers_of
from megatron_rl.testing.invariance import Layout, StepSample, TinyGPT, step_on_layout, steps_on_layout
from megatron_rl.testing.layout_step import LayoutModel, row_length
from megatron_rl.testing.ranks import RankError
from megatron_rl.testing.reference import ragged_samples
from megatron_rl.train.generation import SamplingSettings
from megatron_rl.train.rollout_files import load_rollouts

pytestmark = pytest.mark.megatron

SLOW = pytest.mark.slow
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 0.0}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0}
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
pool = pool_of(4)


def with_random_routes(samples, num_layers: int = 2, num_experts: int = 4, topk: int = 2):
    """Each token goes to experts of a draw, which its router would seldom choose."""
    generator = torch.Generator().manual_seed(7)

    def routes(num_tokens: int) -> list:
        draws = torch.rand(num_layers, num_tokens - 1, num_experts, generator=generator)
        return draws.topk(topk).indices.tolist()

    return [replace(sample, routes=routes(len(sample.tokens))) for sample in samples]


# Which experts, with which weights


def test_the_weights_of_replayed_experts_are_those_of_the_current_router():
    """FB-125: a softmax over the current logits of the given ids, with its gradient; a token without a route chooses by itself."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0], [1.0, 4.0, 2.0, 3.0]], requires_grad=True)
    entry = GivenRoutes()
    entry.open(torch.tensor([[0, 2], [-1, -1]], dtype=torch.int16))
    probs, chosen = topk_routing_with_score_function(logits, 2, router_replay=entry)
    assert chosen.tolist() == [[True, False, True, False], [False, True, False, True]]
    expected = torch.zeros(2, 4)
    expected[0, [0, 2]], expected[1, [1, 3]] = torch.tensor([1.0, 2.0]).softmax(0), torch.tensor([4.0, 3.0]).softmax(0)
    torch.testing.assert_close(probs, expected)
    (gradient,) = torch.autograd.grad(probs[0, 0], logits)
    assert gradient[0, [0, 2]].abs().min() > 0.1 and not gradient[0, [1, 3]].any()


def sampled_routes(rank: int, settings: dict) -> tuple[dict, dict, dict]:
    """Routes of two samples from sampling and from whole samples of the same weights, and the last forward's of each layer."""
    trainer = cases.tiny_trainer(experts=EXPERTS, **settings)
    sampling = SamplingSettings(max_new_tokens=3, end_tokens=(), temperature=1.0, vocab_size=cases.VOCABULARY, rows_per_forward=2)
    prompts, recorder = [[1, 2, 5], [3]], trainer.route_recorder()
    with RouteLog([trainer.model]) as log:
        responses = trainer.sample(prompts, [0, 1], sampling, lambda ids, positions, columns: 0.0 * columns.float(), recorder)
    sequences = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    samples = [replace(s, tokens=of, loss_mask=[1, 1, 1]) for s, of in zip(cases.ragged_step()[:2], sequences, strict=True)]
    whole = trainer.route_recorder()
    trainer.log_probs([samples], recorder=whole)
    return recorder.samples, whole.samples, {layer: maps[-1] for layer, maps in log.by_layer.items()}


def test_a_sampled_token_has_the_experts_of_the_last_forward_that_saw_it(pool):
    """The last token is never an input of the sampler, predicts nothing in training and has no route."""
    ((sampled, whole, last),) = pool.run(sampled_routes, {}, world_size=1)
    assert [tuple(sampled[row].shape) for row in (0, 1)] == [(2, 5, 2), (2, 3, 2)]
    for row, num_tokens in ((0, 6), (1, 4)):
        assert torch.equal(sampled[row], whole[row])
        for place, layer in enumerate(sorted(last)):  # [S, B]: rows of 6 positions and a place for the next token
            maps = last[layer].view(-1, 2, 4)[: num_tokens - 1, row]
            assert torch.equal(sampled[row][place].sort(-1).values, maps.nonzero()[:, 1].view(-1, 2))


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        pytest.param({cases.CP: 2, EP: 2, ETP: 1}, {}, id="CP2xEP2: zigzag"),
        pytest.param({cases.TP: 2, EP: 2, ETP: 1}, {"sequence_parallel": True}, id="TP2+SP, EP2: a slice of the rows"),
        pytest.param({cases.PP: 2}, {}, id="PP2: a layer a stage"),
    ],
)
def test_each_rank_records_the_routes_of_whole_samples(pool, layout, settings):
    ((truth, _, _),) = pool.run(sampled_routes, {}, world_size=1)
    for sampled, whole, _ in pool.run(sampled_routes, settings, world_size=2, **layout):
        for found in (sampled, whole):
            assert all(torch.equal(found[row], truth[row]) for row in (0, 1))


# The first ratio


class OtherRouter:
    """A sampler whose router chooses by other scores than the trainer's."""

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        noise = 0.1 * scores.std() * torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
        ids = default_compute_topk(scores + noise, topk, num_groups, group_topk)[1]
        return scores.gather(1, ids), ids


def first_ratios(rank: int) -> dict[str, tuple[float, dict[str, float]]]:
    """replay -> (max |ratio - 1| over the response tokens, the metrics of the first step)."""
    trainers = {replay: cases.tiny_trainer(experts=EXPERTS, router_replay=replay) for replay in ("none", "rollout")}
    step, sampler, found = cases.ragged_step([(4, 24)] * 12), trainers["none"], {}
    recorder = sampler.route_recorder()
    for router in routers_of(sampler.model):
        vars(router)["router_replay"] = OtherRouter()
    (sampled,) = sampler.log_probs([step], recorder=recorder)
    for router in routers_of(sampler.model):
        vars(router)["router_replay"] = None
    for replay, trainer in trainers.items():
        routes = recorder.samples if replay == "rollout" else None
        given = [replace(sample, routes=routes and routes[n].tolist(), old_log_probs=sampled[n]) for n, sample in enumerate(step)]
        (now,) = trainer.log_probs([given])
        gaps = torch.tensor(list(chain(*now))) - torch.tensor(list(chain(*sampled)))
        found[replay] = float(gaps.expm1().abs().max()), trainer.step([given])
    return found


def test_the_first_ratio_is_1_where_sampler_and_trainer_choose_other_experts(pool):
    """FB-125"""
    [found] = pool.run(first_ratios, world_size=1)
    (without, _), (with_replay, metrics) = found["none"], found["rollout"]
    assert without > 0.1 and with_replay < 1e-6
    assert abs(metrics["policy/ratio_new_old"] - 1) < 1e-6 and metrics["policy/kl_new_old"] < 1e-9


# Layouts and recomputation

LAYOUTS = [
    pytest.param(Layout(**SP, expert=2, expert_tensor=1, num_microbatches=2), {}, id="TP2+SP, EP2: a slice of the rows"),
    pytest.param(Layout(pipeline=2, num_microbatches=4), RECOMPUTED, id="PP2, recomputed: two micro-batches wait for backward"),
    pytest.param(Layout(data=2, expert=2, num_microbatches=2), BIASED, id="DP2xEP2, sigmoids with a bias that stays"),
    pytest.param(Layout(data=2, expert=2, packed=True, num_microbatches=2), {}, marks=SLOW, id="DP2xEP2, packed"),
    pytest.param(Layout(context=2, data=2, expert=2, num_microbatches=2), {}, marks=SLOW, id="CP2xDP2xEP2: zigzag"),
    pytest.param(Layout(pipeline=2, virtual_pipeline=2, num_microbatches=4), RECOMPUTED, marks=SLOW, id="FB-126 PP2xVPP2"),
]


def model_of(layout: Layout, **options: object) -> TinyGPT:
    """A dense layer, then experts; in a pipeline experts on each stage."""
    num_layers = 4 if layout.virtual_pipeline else 2
    frequency = (0, 1) if layout.pipeline == 1 else (1,) * num_layers
    return TinyGPT(num_layers=num_layers, experts=tuple((LAYER_EXPERTS | {"moe_layer_freq": frequency} | options).items()))


def routes_on_rank(rank: int, tiny: TinyGPT, step: list[StepSample], config: PolicyLossConfig) -> list[list[int]]:
    """The experts of each token but the last of its sample, by sample, layer and position."""
    model = LayoutModel(Layout(), row_length(step, Layout()), tiny)
    with RouteLog(model.models) as log:
        model.step(config, step)
    rows = [chosen.view(-1, len(step), chosen.shape[1]) for _, (chosen,) in sorted(log.by_layer.items())]  # [S, B, experts]
    places = [(rows_of, n, t) for n, sample in enumerate(step) for rows_of in rows for t in range(len(sample.tokens) - 1)]
    return [rows_of[t, n].nonzero().flatten().tolist() for rows_of, n, t in places]


@pytest.mark.parametrize(("layout", "options"), LAYOUTS)
def test_a_replayed_step_has_the_gradient_of_one_rank(pool, layout, options):
    """Catches routes that are not laid out as tokens, and micro-batches that replay each other's."""
    model, config = model_of(layout, **options), config_of("grpo", "token_mean")
    plain = model_of(layout, **{name: value for name, value in options.items() if name not in RECOMPUTED})
    num_layers = len(plain.expert_options["moe_layer_freq"]) - plain.expert_options["moe_layer_freq"].count(0)
    step = with_random_routes(ragged_samples(), num_layers)
    alone, own = steps_on_layout(pool, Layout(), [(samples, config) for samples in (step, ragged_samples())], plain)
    result = step_on_layout(pool, layout, step, config, model)
    assert max(errors_by_kind(result.gradient, alone.gradient).values()) < GRADIENT_TOLERANCE
    assert own.gradient_error(alone) > 0.01, "the routes do not matter"
    [used] = pool.run(routes_on_rank, plain, step, config, world_size=1)
    assert used == [sorted(experts) for sample in step for layer in sample.routes for experts in layer]


BIAS_THAT_MOVES = {"moe_router_enable_expert_bias": True}
# Changes of the model's config -> words of the problem.
CANNOT_REPLAY = [
    ({}, ""),
    ({**BIAS_THAT_MOVES, "moe_router_bias_update_rate": 0.0}, ""),
    (BIAS_THAT_MOVES, "moe_router_enable_expert_bias"),
    ({"moe_router_fusion": True}, "moe_router_fusion"),
    ({"cuda_graph_impl": "local"}, "CUDA graphs"),
    ({"num_moe_experts": None}, "num_moe_experts"),
]


def replay_refusals(rank: int) -> list[list[str]]:
    config, found = model_config_of(cases.tiny_trainer(experts=EXPERTS).model), []
    for changes, _ in CANNOT_REPLAY:
        other = copy.copy(config)
        vars(other).update(changes)
        found.append(list(replay_problems(other)))
    return found


def test_replay_refuses_by_name_what_it_cannot_do(pool):
    """FB-127: an expert bias would follow the replayed load."""
    [found] = pool.run(replay_refusals, world_size=1)
    for problems, (_, words) in zip(found, CANNOT_REPLAY, strict=True):
        assert len(problems) == bool(words) and all(words in problem for problem in problems)


# Rollouts and files

OPTIONS = {"num_rollouts": 2, "save_interval": 1000, "steps_per_rollout": 2}
PHANTOMS = "policy/num_phantom_tokens"


def runs_on_rank(rank: int, folder, runs: dict[str, dict]) -> None:
    for name, options in runs.items():
        cases.run_loop(folder / name, CONFIG, {**OPTIONS, **options}, settings={"experts": EXPERTS})


@pytest.mark.parametrize("replay", ["old_log_probs", "rollout"])
def test_a_run_with_replay_is_the_same_on_two_ranks_and_from_its_file(pool, tmp_path, replay):
    """Sampling, two steps a rollout and a file, on EP2 and on one rank. A first ratio is 1."""
    file = tmp_path / "rollouts.jsonl"
    replayed = {"router_replay": replay}
    pool.run(runs_on_rank, tmp_path, {"one": replayed | {"save_rollouts": str(file)}}, world_size=1)
    pool.run(runs_on_rank, tmp_path, {"two": replayed, "file": replayed | {"rollouts": str(file)}}, world_size=2, **{EP: 2})
    truth, two, from_file = (cases.metrics_of(tmp_path / name) for name in ("one", "two", "file"))
    assert cases.unlike_metrics(from_file, truth) == []
    # Phantoms are counted where old log-probabilities are given. Without a file the first step is measured for its routes alone.
    assert truth[0].pop(PHANTOMS) == 0 and (PHANTOMS in two[0]) == (replay == "old_log_probs")
    two[0].pop(PHANTOMS, None)
    assert cases.unlike_metrics(two, truth) == []
    for row in truth[::2]:
        assert row["policy/ratio_new_old"] == pytest.approx(1, abs=1e-6)
    batch = next(load_rollouts(file))
    assert all(sample.routes.shape == (2, len(sample.tokens) - 1, 2) for sample in batch.samples)


def test_a_file_without_the_routes_that_are_needed_is_refused(pool, tmp_path):
    file = tmp_path / "rollouts.jsonl"
    pool.run(runs_on_rank, tmp_path, {"plain": {"save_rollouts": str(file)}}, world_size=1)
    for options, message in (
        ({"router_replay": "rollout"}, "no routes, which --router-replay rollout needs"),
        ({"router_replay": "old_log_probs"}, "old_log_probs and no routes: --router-replay old_log_probs needs"),
    ):
        with pytest.raises(RankError, match=message):
            pool.run(runs_on_rank, tmp_path, {"refused": options | {"rollouts": str(file)}}, world_size=1)
