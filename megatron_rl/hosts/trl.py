"""TRL: a GRPOTrainer with our losses, for training without Megatron.

    from megatron_rl.hosts.trl import GRPOTrainer

    args = GRPOConfig(loss_type="megatron_rl.gspo.prompt_mean", ...)
    GRPOTrainer(model, rewards, args, dataset, megatron_rl={"importance_correction": "tis"}).train()

What is done with the number that our loss returns; D ranks, M micro-batches of an optimiser step:

    ours: D x sum_i w_i sum_t m_it u_it l_it; TRL and Trainer: nothing; accelerate adds micro-batches; DDP: mean over D ranks -> sum

Weights are from counts of the step, which every rank has before it trains on the first micro-batch: those of all completions are
gathered once, when a batch of them is generated. So a step must have its completions by then. KL and entropy are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_rl.aggregation_record import Formula
from megatron_rl.config import KLEstimator, PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.door import CLIPS, Choice, Door, Found, Kind, Line, Own, Prompts, ReadFile, Setting, names
from megatron_rl.hosts.sampling import Filter, Sampler, Scores
from megatron_rl.hosts.settings import Given, Settings, read_value
from megatron_rl.loss_hub import PolicyLoss, needs_rollout_log_probs
from megatron_rl.validation.checks import Row, check

PREFIX, CHOICE = "megatron_rl.", "loss_type"
MODULE, TRAINER = "megatron_rl.hosts.trl_trainer", "trl.trainer.grpo_trainer:GRPOTrainer"
REMEDY = f'GRPOConfig({CHOICE}="{PREFIX}<loss>.<aggregation>") with {__name__}.GRPOTrainer chooses one of ours'
# What TRL's own loss selects or weighs in each micro-batch by itself, the only value that ours accepts, and why.
ONLY = {
    "use_liger_kernel": (False, "Liger's kernel is another loss; remove it"),
    "importance_sampling_level": ("token", "two losses in one launch; ours is gspo: set loss_type=megatron_rl.gspo.<aggregation>"),
    "top_entropy_quantile": (1.0, "TRL selects the tokens of each micro-batch by itself, so they depend on its size"),
    "use_adaptive_entropy": (False, "TRL changes the coefficient by the entropy of a micro-batch; set entropy_coef"),
    "off_policy_mask_threshold": (None, "ours is megatron_rl={'off_policy_sequence_delta': ...}"),
}


def derive(settings: Settings, loss: PolicyLoss, fields: Mapping[str, Given]) -> dict[str, Given]:
    """epsilon is of both sides unless epsilon_high is set. A clip by our name is typed. The bias correction of KL is `unbiased`."""
    low, high = (fields[name] for name in CLIPS)
    found = {CLIPS[1]: high if high.value is not None else low._replace(name="epsilon_high")}
    found |= {name: one._replace(is_typed=True) for name in CLIPS if (one := fields[f"own {name}"]).value is not None}
    if settings["use_bias_correction_kl"] and fields["kl_estimator"].value is None:
        found["kl_estimator"] = Given("use_bias_correction_kl", KLEstimator.UNBIASED.value)
    return found


def corrections(settings: Settings) -> list[str]:
    is_on = settings["use_vllm"] and settings["vllm_importance_sampling_correction"]
    return [f"vllm_importance_sampling_correction=True ({settings['vllm_importance_sampling_mode']})"] if is_on else []


@check()
def one_loss_trains(found: Found) -> Iterator[Row]:
    for name, (only, why) in ONLY.items():
        if (value := found.settings[name]) != only:
            yield Row(name, f"{name}={value} beside {PREFIX}{found}: {why}; set {name}={only}", is_wrong=True)


@check(subject="steps_per_generation")
def a_step_has_its_completions(found: Found) -> Iterator[str]:
    names_of = ("gradient_accumulation_steps", "steps_per_generation", "num_iterations")
    steps, generated, iterations = (found.settings[name] for name in names_of)
    if not all(isinstance(count, int) for count in (steps, generated, iterations)):
        return
    if min(steps, generated, iterations) < 1:
        yield f"{', '.join(names_of)} are {steps}, {generated}, {iterations}: each must be 1 or more"
        return
    if generated * iterations % steps:
        yield (
            f"steps_per_generation={generated} with gradient_accumulation_steps={steps}: completions of the optimiser step are "
            f"generated after its first micro-batch is trained, so its counts are not known; set steps_per_generation={steps}"
        )
    if steps % generated and found.counts_prompts:
        yield (
            f"steps_per_generation={generated} with gradient_accumulation_steps={steps} beside {PREFIX}{found}: TRL shuffles the "
            f"completions, and an optimiser step cuts prompt groups; set steps_per_generation={steps}, or another aggregation"
        )


@check(when=lambda found: bool(found.correction.is_on or "rollout_log_probs" in found.loss.inputs_needed))
def sampler_reports_its_scores(found: Found) -> Iterator[Row]:
    if not (found.settings["use_vllm"] or found.settings["rollout_func"]):
        text = f"{PREFIX}{found} with these settings compares with the sampler, and transformers reports no log-probabilities"
        yield Row("use_vllm", f"use_vllm=False: {text}; set use_vllm=True, or give the trainer a rollout_func", is_wrong=True)


@check()
def sampler_follows_the_settings(found: Found) -> Iterator[Row]:
    """generation_kwargs overrides them in generation alone: the trainer's scores and our rules of sampling do not see it."""
    given, filters = found.settings["generation_kwargs"], DOOR.sampler.filters
    for name in ("temperature", *filters) if isinstance(given, Mapping) else ():
        expected = found.settings[name]
        if expected is None and name in filters:
            expected = filters[name].default
        if name in given and given[name] != expected:
            text = f"generation_kwargs sets {name} to {given[name]} for the sampler alone; set {name}={given[name]}"
            yield Row("generation_kwargs", text, is_wrong=True)


def is_launch(words: Sequence[str]) -> bool:
    """A line that names one of our losses, or TRL's own command."""
    pairs = pairwise([*words, ""])
    names_ours = any(name == f"--{CHOICE}" and value.startswith(PREFIX) for name, value in pairs)
    is_command = "grpo" in words and "trl" in [Path(word).name for word in words]
    return names_ours or is_command or any(word.startswith(f"--{CHOICE}={PREFIX}") for word in words)


def read_line(words: Sequence[str], read_file: ReadFile) -> Line:
    """`--name value` as HfArgumentParser reads them, over a file of --config. What a Python script sets is not seen."""
    given, tree = dict[str, Any](), dict[str, Any]()
    for at, word in enumerate(words):
        name, is_joined, value = word.removeprefix("--").partition("=")
        behind = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else "true"
        if word.startswith("--"):
            given[name.replace("-", "_")] = read_value(value if is_joined else behind)
    unseen = "what the script sets itself is not seen here: our trainer judges all of it when it is made"
    rows = [Row("script", unseen, is_note=True)]
    if "trl" in [Path(word).name for word in words[:3]]:
        rows.append(Row("trl", f"the command makes TRL's own trainer: write a script with {__name__}.GRPOTrainer", is_wrong=True))
    if isinstance(given.get("config"), str):
        try:
            tree = dict(read_file(Path(given["config"])))
        except ConfigError as error:
            rows.append(Row("config", str(error), is_wrong=True))
    given = tree | given
    return Line(Settings.of_names(given, DOOR.all_defaults, typed=given), rows)


def write(config: PolicyLossConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Of both sides TRL takes epsilon where epsilon_high is not set, and has the sampler's log-probabilities from vLLM."""
    if "epsilon" in given and "epsilon_high" not in given and config.clip_ratio_high is not None:
        given["epsilon_high"] = config.clip_ratio_high
    if needs_rollout_log_probs(config):
        given |= {"use_vllm": True, "vllm_importance_sampling_correction": False}
    return given


def line_of(name: str, value: Any) -> str:
    own = name.startswith(PREFIX)
    return f"megatron_rl={{{name.removeprefix(PREFIX)!r}: {value!r}}}" if own else f"{name}={value!r}"


DOOR = Door(
    name="trl",
    title="TRL",
    probed="huggingface/trl f2cd57710",
    settings=(
        Setting(CHOICE, default="dapo"),
        Setting("epsilon", Kind.NUMBER, "clip_ratio_low", 0.2),
        Setting("epsilon_high", Kind.NUMBER, "clip_ratio_high"),
        Setting("delta", Kind.NUMBER, "clip_ratio_c"),
        Setting("sapo_temperature_pos", Kind.NUMBER, "sapo_temperature_positive", 1.0),
        Setting("sapo_temperature_neg", Kind.NUMBER, "sapo_temperature_negative", 1.05),
        Setting("beta", Kind.NUMBER, "kl_coefficient", 0.0),
        Setting("entropy_coef", Kind.NUMBER, "entropy_coefficient", 0.0),
        *(Setting(name, default=only) for name, (only, _) in ONLY.items()),
        Setting("use_bias_correction_kl", Kind.SWITCH, default=False),
        Setting("use_vllm", Kind.SWITCH, default=False),
        Setting("vllm_importance_sampling_correction", Kind.SWITCH, default=True),
        Setting("vllm_importance_sampling_mode", default="sequence_mask"),
        Setting("gradient_accumulation_steps", Kind.NUMBER, default=1),
        Setting("num_iterations", Kind.NUMBER, default=1),
        Setting("temperature", Kind.NUMBER, default=1.0),
        *names("", Kind.NUMBER, "steps_per_generation num_generations num_generations_eval max_completion_length"),
        *names("", Kind.NUMBER, "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min"),
        *names("", Kind.NUMBER, dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), "remove it")),
        *names(
            "",
            Kind.NUMBER,
            dict.fromkeys(("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"), "set entropy_coef"),
        ),
        *names("", Kind.OTHER, "scale_rewards reward_weights mask_truncated_completions generation_batch_size repetition_penalty"),
        *names("", Kind.OTHER, "generation_kwargs"),
    ),
    sections=(),
    choice=Choice(setting=CHOICE, prefix=PREFIX, remedy=REMEDY, imports=True),
    own=Own(prefix=PREFIX, clips=True, others=("kl_estimator",)),
    keep_clip="megatron_rl={{'clip_ratio_{side}': {value}}}",
    derive=derive,
    corrections=corrections,
    sampler=Sampler(
        filters={"top_p": Filter(1.0, (1.0,)), "top_k": Filter(0, (0, -1)), "min_p": Filter(None, (None, 0.0))},
        engines={"vLLM": Scores.KEPT},
    ),
    checks=(one_loss_trains, a_step_has_its_completions, sampler_reports_its_scores, sampler_follows_the_settings),
    prompts=Prompts.COUNTED,
    returns=Formula(dp=1),
    step=(("accelerate", Formula(), "adds micro-batches"), ("DDP", Formula(dp=-1), "averages over ranks")),
    why_not_per_token="TRL's trainer is no Megatron",
    starts="GRPOTrainer",
    recognises=is_launch,
    read_line=read_line,
    write=write,
    line_of=line_of,
    place="arguments of GRPOConfig and GRPOTrainer",
    separator=", ",
    honours=("kl_coefficient", "kl_estimator", "entropy_coefficient"),
    decides="temperature and batches",
    contract={
        f"{TRAINER}._compute_loss": ("self", "model", "inputs"),
        f"{TRAINER}._prepare_inputs": ("self", "generation_batch"),
        f"{TRAINER}._generate_and_score_completions": ("self", "inputs"),
        f"{TRAINER}._get_per_token_logps_and_entropies": (
            *("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "..."),
        ),
    },
)


def __getattr__(name: str) -> Any:
    """The trainer, which imports TRL; doctor and explain do without it."""
    if name == "GRPOTrainer":
        return import_module(MODULE).GRPOTrainer
    raise AttributeError(f"{__name__} has GRPOTrainer, and no {name}")
