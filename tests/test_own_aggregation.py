"""A fifth aggregation, one file of a user's own given by dotted path, wherever an aggregation is read."""

from __future__ import annotations

import contextlib
import re
from argparse import Namespace
from unittest import mock

import pytest
import torch
from conftest import ROOT
from explain_cases import CLOSE, LAYOUT, STEP, S, chain_of, explain_json, stages
from helpers import names_forgotten
from host_cases import HostCase
from host_ranks import run_cases
from nemo_rl_cases import master_config

from megatron_rl.commands.launch_config import launch_lines
from megatron_rl.config import PolicyLossConfig, Route
from megatron_rl.count import StepTotals
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import nemo_rl
from megatron_rl.hosts.args import read_launch
from megatron_rl.hosts.checks import check_launch
from megatron_rl.hosts.training_hooks import shift_in_words, weight_of_a_token
from megatron_rl.testing import oracle
from megatron_rl.testing.ranks import RankPool
from megatron_rl.validation import Settings as ValidatedSettings
from megatron_rl.validation import find_problems
from megatron_rl.validation.weight_words import samples_of_mean_1
from megatron_rl.weights import (
    AGGREGATIONS,
    Formula,
    get_loss_aggregation,
    loss_aggregation_names,
    register_loss_aggregation,
    sample_token_weights,
)

pytestmark = pytest.mark.usefixtures("own_losses")
NAMES = ("sums", "of_groups", "square_root", "odd")
SAMPLE_SUM, OF_GROUPS, SQUARE_ROOT, ODD = (f"own_losses.{name}" for name in NAMES)


@pytest.fixture(scope="module")
def pool():
    import own_losses

    with contextlib.ExitStack() as stack:
        with names_forgotten():
            own_losses.declare()  # and its ranks know them
            ranks = stack.enter_context(RankPool(2))
        yield ranks


# Step S: N = 4, P = 2, T = 7, m = (2, 4, 1, 0), M_g = (6, 6, 1, 1).
WEIGHTS = {
    SAMPLE_SUM: [1 / 4, 1 / 4, 1 / 4, 0],
    OF_GROUPS: [2 / 24, 4 / 24, 1 / 4, 0],
    SQUARE_ROOT: [1 / (4 * 2**0.5), 1 / 8, 1 / 4, 0],
    ODD: [1 / 48, 1 / 56, 1 / 44, 0],
}
FORMULAS = {SAMPLE_SUM: "1/N", OF_GROUPS: "m_i/(N M_g)", SQUARE_ROOT: "1/(N m_i^0.5)", ODD: "w_i"}


@pytest.mark.parametrize("name", WEIGHTS)
def test_its_weights_by_hand(name):
    counts, prompts = torch.tensor([2, 4, 1, 0]), torch.tensor([6, 6, 1, 1])
    weights = sample_token_weights(name, counts, StepTotals(4, 2, 7), prompt_token_counts=prompts)
    assert weights.tolist() == pytest.approx(WEIGHTS[name], **CLOSE)
    assert find_problems(ValidatedSettings(config=PolicyLossConfig(loss_aggregation=name))) == []


@pytest.mark.parametrize("name", WEIGHTS)
def test_explain_shows_it_beside_its_source_and_along_the_chain(name):
    found = explain_json(*S, "--loss-aggregation", name)["aggregations"][name]
    assert found["token_weights"] == pytest.approx(WEIGHTS[name], **CLOSE)
    assert found["known_as"] == ("token sums, averaged over samples" if name == SAMPLE_SUM else None)
    for host in ("train", "megatron_lm"):
        chain = chain_of(*S[:6], "--host", host, "--loss-aggregation", name, *LAYOUT)
        assert (chain["net"], chain["asked"]) == (FORMULAS[name], FORMULAS[name])
        assert chain["net_weights"] == pytest.approx(WEIGHTS[name], **CLOSE)
    for host in ("verl", "nemo_rl", "roll") if name == SAMPLE_SUM else ():  # they hand over rows
        assert chain_of(*STEP, "--host", host, "--loss-aggregation", name)["net"] == "1/N"


@pytest.mark.parametrize("route", ["reducer", "custom_loss"])
def test_explains_chain_in_a_host(route):
    arguments = [*STEP, "--host", "miles", *LAYOUT, *["--policy-loss", "grpo"] * (route == "custom_loss")]
    chains = {name: chain_of(*arguments, "--loss-aggregation", name) for name in WEIGHTS}
    assert (stages(chains[SAMPLE_SUM])[route], chains[SAMPLE_SUM]["net"]) == ("1", "1/N")
    assert stages(chains[SQUARE_ROOT])[route] == "1/m_i^0.5"
    # With the reward hook, where it is needed.
    assert (stages(chains[OF_GROUPS])["reward hook"], chains[OF_GROUPS]["net"]) == ("m_i^2/M_g", FORMULAS[OF_GROUPS])
    assert stages(chains[ODD])["reward hook"] == "N w_i m_i"


REDUCER = {"custom_pg_loss_reducer_function_path": "megatron_rl.reducers.get_pg_loss_reducer"}
REWARD = {"custom_reward_post_process_path": "megatron_rl.hooks.reward_post_process"}


def test_the_start_line_states_the_records_formula():
    """And what it does not know. tests/test_init_hook.py has the built-in ones."""
    launch = check_launch(Namespace(loss_aggregation=SAMPLE_SUM, **REDUCER, global_batch_size=256))
    assert weight_of_a_token(launch) == "1/N = 1/256 = 0.003906"
    said = [shift_in_words(launch.config, coefficients) for coefficients in ((0.1, 0.1), (0.0, 0.1), (0.0, 0.0))]
    ends = ["; KL and entropy x 1/m beside it", "; entropy x 1/m beside it", ""]
    assert all(line.endswith(f"Adam hides it, clipping does not{end}") for line, end in zip(said, ends, strict=True)), said
    unknown = "not stated: own_odd declares no formula"
    assert weight_of_a_token(read_launch(Namespace(loss_aggregation=ODD, **REDUCER, **REWARD))) == unknown
    assert shift_in_words(PolicyLossConfig(loss_aggregation=ODD)) == f"weights against sample_mean {unknown}"
    assert "sample_mean x m_i^2/M_g for sample i" in shift_in_words(PolicyLossConfig(loss_aggregation=OF_GROUPS))


def test_a_host_that_gives_too_little_refuses_it_by_name():
    def problems(name, **others):
        with pytest.raises(ConfigError) as caught:
            check_launch(Namespace(loss_aggregation=name, **REDUCER, **others))
        return caught.value.problems

    (problem,) = problems(OF_GROUPS)
    assert problem.startswith(f"--loss-aggregation {OF_GROUPS} needs prompt_token_counts: ")
    (problem,) = problems(ODD)
    assert "it declares no formula, so what the host's division by N leaves of its weight is not known" in problem
    (problem,) = problems(SQUARE_ROOT, custom_generate_function_path="my.generate")
    assert "may return several samples for one rollout" in problem
    check_launch(Namespace(loss_aggregation=SAMPLE_SUM, **REDUCER, custom_generate_function_path="my.generate"))
    (problem,) = problems(SAMPLE_SUM, calculate_per_token_loss=True)
    assert "does not go with calculate_per_token_loss=True" in problem


@pytest.mark.parametrize(
    ("formula", "missing"), [("1 / (N T)", "num_tokens"), ("1 / N^2", "num_samples"), ("1 / m_i", "num_samples")]
)
def test_what_is_missing_in_a_host_is_named(formula, missing):
    register_loss_aggregation("of_the_step", formula=formula)
    with pytest.raises(ConfigError, match=f"--loss-aggregation of_the_step needs {missing}"):
        check_launch(Namespace(loss_aggregation="of_the_step", **REDUCER))


def test_which_weights_depend_on_the_tokens_of_other_samples():
    names = ("sample_mean", "constant", "prompt_mean", "token_mean", ODD)
    assert [get_loss_aggregation(name).counts_other_samples for name in names] == [False, False, True, True, True]


def test_over_which_samples_a_strength_has_the_mean_1():
    found = {
        name: samples_of_mean_1(get_loss_aggregation(name))
        for name in ("sample_mean", "prompt_mean", "token_mean", "constant", ODD)
    }
    means = {"prompt_mean": "its prompt's samples", "token_mean": "the step's samples"}
    assert found == {name: means.get(name) for name in found}


def test_launch_config_adds_the_hook_where_the_record_asks_for_it():
    def lines(name):
        args = Namespace(output="-", route=Route.REDUCER, calculate_per_token_loss=False)
        return " ".join(launch_lines(args, PolicyLossConfig(loss_aggregation=name)))

    assert {name: "reward_post_process" in lines(name) for name in WEIGHTS} == {
        SAMPLE_SUM: False,
        OF_GROUPS: True,
        SQUARE_ROOT: False,
        ODD: True,
    }


# In the emulated hosts. R counts rollouts and Mj a rollout's tokens, as the hosts do.
BY_HAND = {
    SAMPLE_SUM: lambda n: 1 / n.R,
    OF_GROUPS: lambda n: n.Mj / (n.R * n.M),
    SQUARE_ROOT: lambda n: 1 / (n.R * n.Mj**0.5),
    ODD: lambda n: 1 / (n.R * (n.Mj + 10)),
}


HOSTS, DOORS = ("miles", "slime"), ("default", "reducer", "custom_loss")
# With the hook each door meets both hosts, and so does each aggregation.
LAUNCHES = [
    *((door, name, "", HOSTS) for door in DOORS[1:] for name in (SAMPLE_SUM, SQUARE_ROOT)),
    *((door, name, "reward", (HOSTS[(i + j) % 2],)) for i, door in enumerate(DOORS) for j, name in enumerate(WEIGHTS)),
]


@pytest.mark.parametrize("launch", LAUNCHES, ids=[" ".join([*launch[:3], *launch[3]]) for launch in LAUNCHES])
def test_it_is_trained_in_the_emulated_hosts(pool, launch):
    """Small micro-batches; the losses in turn, and one sample a rollout or several where the door sees rollouts."""
    door, name, companion, hosts = launch
    # Without the hook slime normalises the rewards of segments in another way, and a reducer does not see a rollout's m_i.
    is_whole = not companion and name == SQUARE_ROOT and door == "reducer"
    turn = LAUNCHES.index(launch)
    cases = [
        HostCase(host, door, name, ("grpo", "gspo")[(turn + number) % 2], companion, size=5, segments=segments)
        for number, host in enumerate(hosts)
        for segments in ((False,) if is_whole or (not companion and host == "slime") else (turn // 2 % 2 == 0,))
    ]
    for case, result in zip(cases, pool.run(run_cases, {}, cases, world_size=1)[0], strict=True):
        assert not isinstance(result, str), f"{case}:\n{result}"
        with mock.patch.dict(oracle.AGGREGATIONS, BY_HAND):
            _, wanted = case.truth()
        error = float((result.gradient - wanted).abs().max() / wanted.abs().max())
        assert error <= 1e-6, f"{case}: {error:.2e}"


WRONG = [
    pytest.param({"formula": "1 / (N m_j)"}, "formula=.* 'm_j' is no count; known: N, R, P, T, m_i, M_j, k_j, M_g, L", id="symbol"),
    pytest.param({"formula": "1 / N / m_i"}, "formula=.* has 2 divisions: one division at most", id="two divisions"),
    pytest.param({"formula": "1 / (N + m_i)"}, "formula=.* is not a product of counts over", id="sum"),
    pytest.param({"formula": 3}, "formula=3 must be text", id="no text"),
    pytest.param({"formula": ""}, "formula='' is empty", id="empty"),
    pytest.param({"source": None}, "source=None must be text", id="source"),
    pytest.param({"needs": "num_tokens"}, r"needs='num_tokens' must be a tuple of names", id="needs is text"),
    pytest.param({"needs": ("num_documents",)}, r"needs=\('num_documents',\) must be a tuple of names, of num_samples", id="needs"),
    pytest.param({"formula": "1 / N", "needs": ("num_samples",)}, "formula='1 / N' says what it needs: remove", id="both"),
    pytest.param({"formula": "1 / (L N)", "takes_divisor": True}, "formula=.* says what it needs", id="divisor"),
    pytest.param({"takes_divisor": 1}, "takes_divisor=1 must be True or False", id="no switch"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_a_wrong_record_is_refused_at_registration(fields, message):
    with pytest.raises(ConfigError, match=f"loss aggregation 'mine': {message}"):
        register_loss_aggregation("mine", **fields)


def test_a_cell_that_is_run_again_declares_its_formula_anew():
    """Catches a declaration that is ours by the module of its function: nobody could take the name of another module's."""
    for formula in ("1 / N", "1 / (N m_i)"):
        cell = {"__name__": "__main__", "register": register_loss_aggregation}
        exec(f"mine = register('mine', formula={formula!r})", cell)
        assert str(get_loss_aggregation("mine").formula) == formula.replace(" / ", "/")
    assert AGGREGATIONS.is_built_in("token_mean") and not AGGREGATIONS.is_built_in("mine")
    with pytest.raises(ConfigError, match="'mine' is already registered by __main__"):
        register_loss_aggregation("mine", formula="1 / N")


def test_the_table_of_the_page_states_the_formulas_of_the_records():
    page = "docs/aggregation.md"
    text = re.sub(r"\$`\\dfrac\{(.*?)\}\{(.*?)\}`\$", r"\1 / (\2)", (ROOT / page).read_text(encoding="utf-8"))
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    # The first table of the page that has the name.
    cells = {name.strip("| `"): (weight, source) for name, weight, source in reversed([row for row in rows if len(row) == 3])}
    for name in filter(AGGREGATIONS.is_built_in, loss_aggregation_names()):
        record, (weight, source) = get_loss_aggregation(name), cells[name]
        assert Formula.parse(weight.partition(",")[0]) == record.formula, f"the weight of {name} in {page}"
        stated = source.replace("GSPO as published", "GSPO")
        assert record.source in stated, f"{name} in {page}: its last column holds its source in the same words"


def test_a_name_of_two_halves_may_have_dots_in_each():
    loss = "megatron_rl.losses.gspo.gspo"
    for name, halves in {
        f"gspo.{SAMPLE_SUM}": ("gspo", SAMPLE_SUM),
        f"{loss}.token_mean": (loss, "token_mean"),
        f"{loss}.{SAMPLE_SUM}": (loss, SAMPLE_SUM),
        "gspo.prompt_mean": ("gspo", "prompt_mean"),
    }.items():
        assert nemo_rl.OFFER.choose(name) == halves
    for name, message in {
        f"gspo.{OF_GROUPS}": "does not hand over what own_of_groups needs",
        "gspo.own_losses.nothing": "own_losses",
        "gspoo.token_mean": "gspoo.token_mean does not name a loss and an aggregation",
        "gspo": "gspo does not name a loss and an aggregation",
    }.items():
        with pytest.raises(ConfigError, match=message):
            nemo_rl.OFFER.choose(name)


def test_one_whose_weights_change_with_the_micro_batch_is_refused_in_a_trainers_config():
    with pytest.raises(ConfigError, match="own_of_the_call depends at one sample on the others"):
        nemo_rl.read(master_config({"megatron_rl": "grpo.own_losses.of_the_call", "reference_policy_kl_penalty": 0}))
