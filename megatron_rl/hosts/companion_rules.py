"""When weights that are given to samples before training stay exact until the loss: one rule for each thing that would undo them.

The reward hook scales advantages; the converter makes prompts out of rollouts. A rule never changes what it judges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_rl.aggregation_record import TOKEN_MEAN, AggregationRecord, Formula
from megatron_rl.arguments import read_switch
from megatron_rl.hosts.facts import Host, HostArgs, companion_of, names_ours
from megatron_rl.hosts.launch_facts import CONVERT_LINE, REDUCER_FLAG, REWARD_LINE, aggregation_record
from megatron_rl.loss_hub import get_loss_aggregation

CompanionRule = Callable[[HostArgs], Iterator[str]]
REWARD_RULES: list[CompanionRule] = []
CONVERT_RULES: list[CompanionRule] = []

# Estimators whose advantage is the reward, so that scaling the reward scales the advantage.
HOMOGENEOUS_ESTIMATORS = ("grpo", "gspo", "cispo")


def companion_problems(view: HostArgs) -> list[str]:
    """Why the companion on the launch line would not give the aggregation that is asked for; empty without a companion."""
    rules = {"reward": REWARD_RULES, "convert": CONVERT_RULES, None: []}[companion_of(view)]
    return [problem for judge in rules for problem in judge(view)]


def for_reward(function: CompanionRule) -> CompanionRule:
    REWARD_RULES.append(function)
    return function


def for_convert(function: CompanionRule) -> CompanionRule:
    CONVERT_RULES.append(function)
    return function


@for_convert
@for_reward
def companion_has_a_use(view: HostArgs) -> Iterator[str]:
    line = REWARD_LINE if companion_of(view) == "reward" else CONVERT_LINE
    # Then the hook is there to look at the samples: hosts/rules.py judges the declaration.
    is_declared = companion_of(view) == "reward" and read_switch(view.ours("one_sample_per_rollout")) is True
    if aggregation_record(view) is get_loss_aggregation("sample_mean") and not is_declared:
        yield f"{line} has nothing to do with --loss-aggregation sample_mean, which needs no weights: remove it"


@for_convert
def only_one_companion(view: HostArgs) -> Iterator[str]:
    if names_ours(view["custom_reward_post_process_path"], "reward_post_process"):
        yield (
            f"{REWARD_LINE} is never called beside {CONVERT_LINE}: the converter replaces the host's step that calls it; remove "
            "one of them"
        )


@for_convert
def converter_gives_prompt_means(view: HostArgs) -> Iterator[str]:
    """Its rollout_mask_sums carry the aggregation; sample_mean is refused above."""
    record = aggregation_record(view)
    others = [get_loss_aggregation(name) for name in ("prompt_mean", "sample_mean")]
    if record is not None and record not in others:
        hook = f" and add {REWARD_LINE}" if record.missing_where_a_host_divides_by("N") != () else ""
        yield (
            f"--loss-aggregation {view.ours('loss_aggregation')} with {CONVERT_LINE}: the converter gives prompt_mean alone, "
            f"whatever the loss; choose prompt_mean, or remove it{hook}"
        )


@for_convert
def host_has_a_converter(view: HostArgs) -> Iterator[str]:
    if view.host == Host.MEGATRON_LM:
        yield f"{CONVERT_LINE} is a hook of miles and slime, and these are not their arguments: remove it"


@for_convert
def prompt_counts_divide(view: HostArgs) -> Iterator[str]:
    reducer, loss_type, loss = (
        view[name] for name in ("custom_pg_loss_reducer_function_path", "loss_type", "custom_loss_function_path")
    )
    if reducer and not names_ours(reducer, "get_pg_loss_reducer"):
        yield (
            f"{REDUCER_FLAG} {reducer} with {CONVERT_LINE}: a reducer sees no rollout_mask_sums, so it cannot divide by the "
            "tokens of a prompt; remove it, the host's own does"
        )
    if loss_type != "policy_loss" and not (loss_type == "custom_loss" and names_ours(loss, "custom_loss")):
        yield (
            f"--loss-type {loss_type} ({loss}) with {CONVERT_LINE}: whether it divides by rollout_mask_sums is unknown; use "
            "policy_loss, or custom_loss with megatron_rl.hooks.custom_loss"
        )


@for_reward
def loss_takes_advantages(view: HostArgs) -> Iterator[str]:
    if view["loss_type"] not in ("policy_loss", "custom_loss"):
        yield (
            f"--loss-type {view['loss_type']} takes no advantages: {REWARD_LINE} would do nothing; use policy_loss or "
            "custom_loss, or remove the hook"
        )


@for_reward
def advantage_is_the_reward(view: HostArgs) -> Iterator[str]:
    estimator = view["advantage_estimator"]
    if estimator not in HOMOGENEOUS_ESTIMATORS:
        yield (
            f"--advantage-estimator {estimator} with {REWARD_LINE}: the hook weights samples through their rewards, and this "
            f"estimator's advantage is more than the reward; allowed are {', '.join(HOMOGENEOUS_ESTIMATORS)}"
        )


@for_reward
def nothing_is_added_to_the_reward(view: HostArgs) -> Iterator[str]:
    if view["kl_coef"]:
        yield (
            f"--kl-coef {view['kl_coef']} with {REWARD_LINE}: the penalty joins the advantage after the weight, unweighted; set "
            "--kl-coef 0, or use --use-kl-loss with --kl-loss-coef"
        )
    if view["use_opd"]:
        yield f"--use-opd with {REWARD_LINE}: distillation adds to the advantage after the weight, unweighted; remove one of them"
    if view["custom_advantage_function_path"]:
        yield (
            f"--custom-advantage-function-path {view['custom_advantage_function_path']} with {REWARD_LINE}: whether the function "
            "keeps the weights cannot be known; remove one of them"
        )


@for_reward
def advantages_are_not_whitened(view: HostArgs) -> Iterator[str]:
    if view["normalize_advantages"]:
        yield f"--normalize-advantages with {REWARD_LINE}: whitening undoes the weights; remove --normalize-advantages"


@for_reward
def host_divides_by_rollouts(view: HostArgs) -> Iterator[str]:
    if view["calculate_per_token_loss"]:
        yield (
            f"--calculate-per-token-loss with {REWARD_LINE}: the weights count on a division by rollouts, and the host would "
            "divide by tokens; remove --calculate-per-token-loss"
        )


@for_convert
@for_reward
def masks_are_final(view: HostArgs) -> Iterator[str]:
    if (view["use_tis"] or view["get_mismatch_metrics"]) and view["custom_tis_function_path"]:
        line = REWARD_LINE if companion_of(view) == "reward" else CONVERT_LINE
        yield (
            f"--custom-tis-function-path {view['custom_tis_function_path']} with {line}: it may reject tokens after the weights "
            "were counted; remove it (the built-in --use-tis keeps the masks), or choose sample_mean or constant without the hook"
        )


@for_reward
def no_foreign_reduction(view: HostArgs) -> Iterator[str]:
    reducer, loss = view["custom_pg_loss_reducer_function_path"], view["custom_loss_function_path"]
    if reducer and not names_ours(reducer, "get_pg_loss_reducer"):
        yield (
            f"{REDUCER_FLAG} {reducer} with {REWARD_LINE}: the weights cancel the denominators of the host's own reducer or of "
            "ours, and this one's are unknown; remove it"
        )
    if view["loss_type"] == "custom_loss" and not names_ours(loss, "custom_loss"):
        yield (
            f"--custom-loss-function-path {loss} with {REWARD_LINE}: the weights cancel the denominators of the host's own loss "
            "or of ours, and this one's are unknown; remove it"
        )


@for_convert
@for_reward
def no_multi_lora(view: HostArgs) -> Iterator[str]:
    if view["multi_lora"]:
        line = REWARD_LINE if companion_of(view) == "reward" else CONVERT_LINE
        yield f"multi-LoRA with {line}: prompt groups of adapters do not reach the hook, and each adapter has its own N; remove it"


@for_reward
def steps_hold_whole_groups(view: HostArgs) -> Iterator[str]:
    """N / P is the same in every step only when groups are whole in it; else the rollout batch must be one step."""
    record = aggregation_record(view)
    if record is None or not record.needs_prompts or is_one_step(view):
        return
    step, size = view["global_batch_size"], view["n_samples_per_prompt"]
    if step and size and step % size:
        yield (
            f"--global-batch-size {step} is no multiple of --n-samples-per-prompt {size}: with {record.name} a step would cut a "
            f"prompt group; choose a multiple of {size}"
        )
    elif read_switch(view.ours("allow_partial_prompt_groups")):
        yield (
            f"--allow-partial-prompt-groups with {REWARD_LINE} and several steps per rollout batch: the number of prompts of a "
            "step is then unknown when rewards are weighted; make the rollout batch one step (--num-steps-per-rollout 1)"
        )


@for_reward
def weights_are_alike_in_every_step(view: HostArgs) -> Iterator[str]:
    record = aggregation_record(view)
    if record is not None and is_of_one_step(record) and not is_one_step(view):
        instead = ", or use --calculate-per-token-loss without the hook" if record.formula == TOKEN_MEAN else ""
        yield (
            f"--global-batch-size {view['global_batch_size']} of a rollout batch of {samples_of_batch(view)} samples with "
            f"{REWARD_LINE} and {record.name}: the counts of a step are unknown when rewards are weighted; make the rollout batch "
            f"one step (--num-steps-per-rollout 1){instead}"
        )


@for_convert
def step_is_counted_in_prompts(view: HostArgs) -> Iterator[str]:
    step, prompts = view["global_batch_size"], view["rollout_batch_size"]
    if view["use_dynamic_global_batch_size"]:
        yield f"--use-dynamic-global-batch-size with {CONVERT_LINE}: it counts samples where the converter's step counts prompts"
    elif step and prompts and (step > prompts or prompts % step):
        yield (
            f"--global-batch-size {step} with {CONVERT_LINE} counts prompts, and the rollout batch holds {prompts} "
            f"(--rollout-batch-size): pass the prompts of a step, a divisor of {prompts}"
        )


@for_convert
def steps_are_not_given_in_samples(view: HostArgs) -> Iterator[str]:
    steps, size, in_batch = view["num_steps_per_rollout"], view["global_batch_size"], samples_of_batch(view)
    if steps and in_batch and view["n_samples_per_prompt"] > 1 and size == in_batch // steps:
        yield (
            f"--num-steps-per-rollout {steps} with {CONVERT_LINE}: the host has set --global-batch-size {size} from it, in "
            "samples, and the converter's step counts prompts; give --global-batch-size in prompts instead"
        )


@for_convert
def batches_are_split_by_rollout(view: HostArgs) -> Iterator[str]:
    if view.host != Host.MILES:
        return
    options = ("delay_split_train_data_by_dp", "indep_dp", "multimodal_keys")
    found = [f"--{option.replace('_', '-')}" for option in options if view[option]]
    if view["train_backend"] != "megatron":
        found.append(f"--train-backend {view['train_backend']}")
    for option in found:
        yield (
            f"{option} with {CONVERT_LINE}: miles then splits samples without looking at rollout ids, so "
            f"a step would cut prompt groups; use {REWARD_LINE}"
        )


def is_of_one_step(record: AggregationRecord) -> bool:
    """Whether N times the weight holds counts of the step. N / P does not count: whole groups of one size make it one number."""
    if record.formula is None:
        return True
    left = record.formula * Formula(N=1)
    return "T" in left.powers or left.powers.get("N", 0) != -left.powers.get("P", 0)


def samples_of_batch(view: HostArgs) -> int | None:
    prompts, size = view["rollout_batch_size"], view["n_samples_per_prompt"]
    return prompts * size if prompts and size else None


def is_one_step(view: HostArgs) -> bool:
    """One optimiser step takes the whole rollout batch. False where the arguments do not say."""
    if view["use_dynamic_global_batch_size"]:
        return view["num_steps_per_rollout"] in (None, 1)
    in_batch = samples_of_batch(view)
    return in_batch is not None and view["global_batch_size"] == in_batch
