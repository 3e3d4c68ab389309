"""Megatron-LM: flags composed with another provider's, pretrain in its three signatures, and two names for one setting."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from argparse import ArgumentParser, Namespace
from types import ModuleType

import pytest
from helpers import set_global_args

from megatron_rl.__main__ import main
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.megatron_lm import call_pretrain, compose_extra_args_provider, megatron_lm_config
from megatron_rl.testing.ranks import RankPool

PACKAGE = "stand_in_megatron_training"


def add_inference_args(parser):
    parser.add_argument("--inference-max-requests", type=int, default=8)
    return parser


def test_flags_of_both_providers_are_read_and_ours_are_there_once():
    """argparse raises on a second flag of the same name; a script may compose what is composed already."""
    parser = compose_extra_args_provider(compose_extra_args_provider(add_inference_args))(ArgumentParser())
    args = parser.parse_args(["--inference-max-requests", "3", "--loss-aggregation", "token_mean"])
    assert (args.inference_max_requests, args.loss_aggregation, args.policy_loss) == (3, "token_mean", None)


def test_a_provider_that_forgets_its_return_is_named():
    with pytest.raises(ConfigError, match="forgetful returned NoneType: an arguments provider returns the parser"):

        def forgetful(parser):
            parser.add_argument("--x")

        compose_extra_args_provider(forgetful)(ArgumentParser())


# pretrain by version of Megatron-LM. It is called by these names.
SIGNATURES = {
    "up_to_0_17": "train_valid_test_dataset_provider, model_provider, model_type, forward_step_func, extra_args_provider=None, "
    "args_defaults=None, store=None",
    "in_0_18": "cfg_container, train_valid_test_dataset_provider, model_provider, model_type, forward_step_func, store=None",
    "from_0_19": "cfg_container, train_valid_test_dataset_provider, model_type, forward_step_func, model_provider=None, "
    "store=None, pg_collection=None",
}


@pytest.fixture
def megatron(monkeypatch):
    """Stand-ins of megatron.training by version: pretrain in its signature, parsing where that version has it; calls are noted."""
    seen = []
    line = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "64", "--inference-max-requests", "2"]
    global_vars = ModuleType("megatron.training.global_vars")
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", global_vars)
    training, arguments, utils = (ModuleType(f"{PACKAGE}.{name}") for name in ("training", "arguments", "argument_utils"))
    for module in (ModuleType(PACKAGE), training, arguments, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def parse_and_validate_args(extra_args_provider=None, ignore_unknown_args=False, args_defaults=None):
        parser = ArgumentParser(allow_abbrev=False)
        parser.add_argument("--calculate-per-token-loss", action="store_true")  # two flags of its own
        parser.add_argument("--tokenizer-type", default=None)
        args = extra_args_provider(parser).parse_args(line)
        for name, value in (args_defaults or {}).items():
            if vars(args)[name] is None:
                setattr(args, name, value)
        global_vars.get_args = lambda: args
        return args

    def run(given):
        if "extra_args_provider" in given:  # parsing is its own
            parse_and_validate_args(given["extra_args_provider"], False, given["args_defaults"])
        args, provider = global_vars.get_args(), given["model_provider"]
        model = provider(pre_process=True) if provider else "of the model configuration"
        seen.append((args.loss_aggregation, args.inference_max_requests, args.tokenizer_type, model))
        others = {"store": given["store"], "cfg": given.get("cfg_container")}
        return given["train_valid_test_dataset_provider"], given["model_type"], given["forward_step_func"], others

    arguments.parse_and_validate_args = parse_and_validate_args
    utils.pretrain_cfg_container_from_args = lambda args, model_cfg=None: ("container", args.loss_aggregation, model_cfg)
    versions = {}
    for name, parameters in SIGNATURES.items():
        made = {"run": run}
        exec(f"def {name}({parameters}): return run(locals())", made)
        made[name].__module__ = training.__name__
        versions[name[-4:].replace("_", ".")] = made[name]
    return Namespace(pretrain=versions, seen=seen, line=line, training=training)


def call(pretrain, **others):
    arguments = {
        "dataset_provider": "data",
        "model_provider": lambda pre_process: f"built with {pre_process}",
        "model_type": "encoder",
        "forward_step": "step",
        "extra_args_provider": add_inference_args,
        "args_defaults": {"tokenizer_type": "GPT2BPETokenizer"},
        "store": "store",
    }
    return call_pretrain(pretrain, **{**arguments, **others})


@pytest.mark.parametrize("version", ["0.17", "0.18", "0.19"])
def test_pretrain_is_called_in_its_own_signature(megatron, version):
    """Positions changed twice: in 0.19 what stood third is fifth. Both providers' flags and the defaults arrive in each."""
    dataset, model_type, forward_step, others = call(megatron.pretrain[version])
    assert (dataset, model_type, forward_step, others["store"]) == ("data", "encoder", "step", "store")
    assert megatron.seen == [("constant", 2, "GPT2BPETokenizer", "built with True")]
    assert version == "0.17" or others["cfg"] == ("container", "constant", None)


def test_a_model_configuration_takes_the_place_of_the_provider(megatron):
    pretrain = megatron.pretrain["0.19"]
    *_, others = call(pretrain, model_provider=None, model_config_from_args=lambda args: f"gpt of {args.tokenizer_type}")
    assert others["cfg"] == ("container", "constant", "gpt of GPT2BPETokenizer")
    assert megatron.seen[0][3] == "of the model configuration"


@pytest.mark.parametrize("version", ["0.17", "0.18", "0.19"])
def test_a_wrong_scale_stops_before_the_model_is_built(megatron, version):
    """FB-74: validate_args of Megatron-LM has no hook."""
    megatron.line.append("--calculate-per-token-loss")
    with pytest.raises(ConfigError, match="loss_aggregation=constant does not go with calculate_per_token_loss=True"):
        call(megatron.pretrain[version], model_provider=lambda **named: pytest.fail("the model was built"))
    assert megatron.seen == []


def announced_on_rank(rank):
    """(whether the model was built, what the rank has printed) with two chunks of a model."""
    printed = io.StringIO()
    set_global_args(args_of("--policy-loss", "gspo", "--policy-temperature", "0.7"))

    def pretrain(
        train_valid_test_dataset_provider, model_provider, model_type, forward_step_func, extra_args_provider, args_defaults, store
    ):
        return [model_provider(), model_provider()]

    with contextlib.redirect_stdout(printed):
        built = call(pretrain, model_provider=lambda: "a chunk")
    return built, printed.getvalue()


@pytest.mark.megatron
def test_one_line_of_rank_0_says_what_will_be_trained():
    """The installed schedule has run on the launch's own groups before the model is built."""
    with RankPool(2) as pool:
        (built, line), (_, nothing) = pool.run(announced_on_rank, world_size=2, tensor_model_parallel_size=2)
    assert built == ["a chunk", "a chunk"] and nothing == ""
    assert line.startswith(
        "megatron_rl: policy_loss=gspo, loss_aggregation=sample_mean | weight of a token 1/(N m_i) | weights against "
        "sample_mean x 1 | logits [T, V/2] on each tp rank | clip 0.0003/0.0004, KL 0, entropy 0, temperature 0.7 applied | "
        "host megatron_lm | "
    )
    assert line.endswith("ratio 1 on dp 1 x cp 1 x tp 2 x pp 1 | PASS\n") and line.count("\n") == 1


def test_what_this_pretrain_lacks_is_refused(megatron):
    with pytest.raises(ConfigError, match=r"up_to_0_17 of this Megatron-LM takes no pg_collection: it has train_valid"):
        call(megatron.pretrain["0.17"], pg_collection="groups")
    with pytest.raises(ConfigError, match="takes no model_config_from_args: it has train_valid"):
        call(megatron.pretrain["0.17"], model_config_from_args=lambda args: None)


def test_a_pretrain_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match=r"pretrain\(everything\) is no pretrain of Megatron-LM 0.13 to 0.20"):

        def pretrain(everything):
            pytest.fail("it was called")

        call(pretrain)


OF_TRAIN_RL = {
    "perform_rl_step": True,
    "rl_use_sequence_packing": True,
    "grpo_clamp_eps_lower": 0.01,
    "grpo_clamp_eps_upper": 0.01,
    "grpo_kl_beta": 0.001,
    "grpo_entropy_term_weight": 0.0,
    "rl_default_temperature": 1.0,
    "rl_inference_logprobs_is_correction": False,
}


def args_of(*line, **host) -> Namespace:
    return Namespace(**host, **vars(compose_extra_args_provider()(ArgumentParser()).parse_args(line)))


def test_an_unset_flag_takes_the_value_of_train_rl():
    config = megatron_lm_config(args_of(**{**OF_TRAIN_RL, "rl_default_temperature": 0.7, "grpo_clamp_eps_upper": 0.03}))
    expected = {"clip_ratio_low": 0.01, "clip_ratio_high": 0.03, "kl_coefficient": 0.001, "policy_temperature": 0.7}
    assert config == PolicyLossConfig(**expected)


def test_a_set_flag_beats_a_default_of_train_rl_and_not_a_value():
    """argparse does not tell a default from a value that was typed; another number can only have been typed."""
    line = ["--clip-ratio-low", "0.2", "--kl-coefficient", "0"]
    config = megatron_lm_config(args_of(*line, **OF_TRAIN_RL))
    assert (config.clip_ratio_low, config.clip_ratio_high, config.kl_coefficient) == (0.2, 0.01, 0.0)
    with pytest.raises(ConfigError) as error:
        megatron_lm_config(args_of(*line, **{**OF_TRAIN_RL, "grpo_clamp_eps_lower": 0.1, "grpo_kl_beta": 0.5}))
    assert error.value.problems == (
        "--clip-ratio-low 0.2 and --grpo-clamp-eps-lower 0.1 are the same thing with two values: remove one of them",
        "--kl-coefficient 0.0 and --grpo-kl-beta 0.5 are the same thing with two values: remove one of them",
    )
    assert (
        megatron_lm_config(args_of("--clip-ratio-low", "0.1", **{**OF_TRAIN_RL, "grpo_clamp_eps_lower": 0.1})).clip_ratio_low == 0.1
    )


def test_in_a_loop_that_is_not_train_rl_its_options_mean_nothing():
    config = megatron_lm_config(args_of(**{**OF_TRAIN_RL, "perform_rl_step": False, "grpo_kl_beta": 0.5}))
    assert config == PolicyLossConfig()


def test_what_the_forward_step_would_leave_out_is_refused_with_everything_else():
    host = {**OF_TRAIN_RL, "rl_use_sequence_packing": False}
    with pytest.raises(ConfigError) as error:
        megatron_lm_config(args_of("--loss-aggregation", "constant", "--importance-correction", "icepop", **host))
    packing, correction, divisor = error.value.problems
    assert "without --rl-use-sequence-packing: our forward step reads packed bins" in packing
    assert correction.startswith("--importance-correction icepop compares with the sampler, and train_rl.py packs")
    assert correction.endswith("only with --rl-inference-logprobs-is-correction: add it")
    assert "needs --loss-aggregation-divisor" in divisor


CORRECTED = {**OF_TRAIN_RL, "rl_inference_logprobs_is_correction": True}


@pytest.mark.parametrize(
    ("line", "coefficient", "expected"),
    [
        ([], 3.0, ("tis", 3.0, None)),
        ([], None, ("tis", math.exp(20), None)),  # train_rl.py truncates nothing without a coefficient
        (["--importance-correction", "tis", "--importance-correction-high", "3"], 3.0, ("tis", 3.0, None)),
        (["--importance-correction-high", "4"], None, ("tis", 4.0, None)),
        (["--importance-correction", "icepop"], None, ("icepop", None, None)),
        (["--importance-correction", "none", "--off-policy-sequence-delta", "0.1"], None, ("none", None, 0.1)),
    ],
)
def test_the_inference_log_probs_of_train_rl_are_our_correction(line, coefficient, expected):
    config = megatron_lm_config(args_of(*line, **CORRECTED, rl_importance_sampling_truncation_coef=coefficient))
    found = (config.importance_correction, config.importance_correction_high, config.off_policy_sequence_delta)
    assert found == expected


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (["--importance-correction", "icepop"], "--importance-correction icepop and --rl-inference-logprobs-is-correction tis are"),
        (
            ["--importance-correction-high", "4"],
            "--importance-correction-high 4.0 and --rl-importance-sampling-truncation-coef 3.0",
        ),
    ],
)
def test_a_correction_and_a_coefficient_of_train_rl_that_differ_are_refused(line, problem):
    args = args_of(*line, **CORRECTED, rl_importance_sampling_truncation_coef=3.0)
    [found] = pytest.raises(ConfigError, megatron_lm_config, args).value.problems
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        (
            {"inference_dynamic_batching_logprobs_mode": "processed_logprobs"},
            "--rl-default-top-p 0.9 beside --importance-correction tis",
        ),
        ({}, None),  # the engine's default is raw_logprobs
        ({"inference_dynamic_batching_logprobs_mode": "processed_logprobs", "rl_default_top_p": 0.0}, None),
    ],
)
def test_a_sampler_that_scores_its_kept_tokens_is_refused_beside_a_correction(host, problem):
    """FB-114"""
    args = args_of(**CORRECTED | {"rl_default_top_p": 0.9, "rl_default_top_k": -1} | host)
    if problem is None:
        megatron_lm_config(args)
    else:
        [found] = pytest.raises(ConfigError, megatron_lm_config, args).value.problems
        assert found.startswith(problem)


COLLECTION = {**OF_TRAIN_RL, "grpo_prompts_per_step": 32, "grpo_group_size": 8, "grpo_iterations": 2}


@pytest.mark.parametrize("step", [128, 100, 512], ids=["whole groups of rows", "no whole groups", "two collections"])
def test_prompt_mean_is_refused_where_a_step_is_not_a_collection(step):
    """FB-07: bins are dealt to steps, so that a multiple of the group size cuts groups too, and M_g would be a part's."""
    args = args_of("--loss-aggregation", "prompt_mean", **COLLECTION, global_batch_size=step)
    [problem] = pytest.raises(ConfigError, megatron_lm_config, args).value.problems
    assert problem.startswith(f"--global-batch-size {step} with --loss-aggregation prompt_mean: a collection is")
    assert "--grpo-group-size 8 = 256 samples" in problem
    assert problem.endswith("set --global-batch-size 256, or accept them with --allow-partial-prompt-groups")


@pytest.mark.parametrize(
    ("line", "host"),
    [
        pytest.param(["prompt_mean"], {"global_batch_size": 256}, id="one step a collection"),
        pytest.param(["prompt_mean", "--allow-partial-prompt-groups"], {"global_batch_size": 100}, id="cut groups accepted"),
        pytest.param(["prompt_mean"], {"global_batch_size": 100, "perform_rl_step": False}, id="a loop of one's own"),
        pytest.param(["sample_mean"], {"global_batch_size": 100}, id="sample_mean"),
    ],
)
def test_prompt_mean_is_allowed_where_groups_stay_whole_or_may_be_cut(line, host):
    """The group size is train_rl's own: accepting cut groups needs no --samples-per-prompt, which rows of turns would break."""
    config = megatron_lm_config(args_of("--loss-aggregation", *line, **{**COLLECTION, **host}))
    assert (config.loss_aggregation, config.samples_per_prompt) == (line[0], None)


@pytest.mark.parametrize("name", ["own_reinforce", "own_losses.reinforce"])
def test_the_clip_of_train_rl_does_not_reach_a_loss_without_one(name, own_losses):
    """Its flags always have a value, which such a loss refuses."""
    config = megatron_lm_config(args_of("--policy-loss", name, **OF_TRAIN_RL))
    assert (config.policy_loss, config.clip_ratio_low, config.clip_ratio_high) == (name, None, None)


def test_doctor_asks_the_parser_of_megatron_lm(monkeypatch, capsys):
    arguments = ModuleType("megatron.training.arguments")
    arguments.parse_args = lambda extra_args_provider=None: extra_args_provider(ArgumentParser()).parse_args()
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    monkeypatch.setitem(sys.modules, "megatron.training.arguments", arguments)
    line = ["doctor", "--host", "megatron_lm", "--", "torchrun", "train.py", "--loss-aggregation", "constant"]
    assert main([*line, "--loss-aggregation-divisor", "8"]) == 0
    assert "policy_loss=grpo, loss_aggregation=constant | weight of a token 1/(L N) = 1/(8 N)" in capsys.readouterr().out
    assert main(line) == 1 and "needs --loss-aggregation-divisor" in capsys.readouterr().out
