"""The flags of `megatron-rl train` beside the loss's own. No device is touched and no file is written here.

Names and meanings are Megatron-LM's where Megatron-LM has the flag. One field of TrainOptions is one flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from megatron_rl.config import AdvantageNormalization, PolicyLossConfig, RouterAuxLoss, RouterReplay, flag_fields
from megatron_rl.errors import ConfigError
from megatron_rl.train.tasks import BUILT_IN_TASKS
from megatron_rl.validation import flag_of

# In --output-dir, beside metrics.jsonl and the lock.
CHECKPOINT_DIRECTORY = "checkpoints"
PLOT_FILE = "curves.png"
VOCABULARY_FILE = "vocabulary.json"
SAMPLES_FILE = "samples.txt"
# Responses per prompt of `train` where --samples-per-prompt, a flag of the loss, is not given: enough for a baseline.
DEFAULT_SAMPLES_PER_PROMPT = 8
DEFAULT_NUM_ROLLOUTS = 140
DEFAULT_STEPS_PER_ROLLOUT = 2
ROLLOUTS_BETWEEN_SAMPLES = 10
# What a preset sets for flags that are not given. The clip is left out: the loss's own default is right for each loss.
_DEMO: dict[str, Any] = {
    "task": "tally",
    "policy_loss": "gspo",
    "loss_aggregation": "prompt_mean",
    "prompts_per_rollout": 8,
    "samples_per_prompt": 16,
    "lr": 1e-3,
    "num_rollouts": 140,
    "target_reward": 0.97,
}
PRESETS: dict[str, dict[str, Any]] = {
    "demo": _DEMO,
    "moe": _DEMO
    | {
        "num_experts": 4,
        "moe_ffn_hidden_size": 128,
        "moe_aux_loss_coeff": 1e-3,
        "router_aux_loss": RouterAuxLoss.EXACT.value,
    },
}


class Range(NamedTuple):
    """What a number may be; each is finite."""

    words: str
    allows: Callable[[float], bool]


def flag(
    default: Any,
    help: str,
    /,
    *,
    must: Range | None = None,
    needs: tuple[str, str] | None = None,
    without: tuple[str, str] | None = None,
    **argparse_settings: Any,
) -> Any:
    """A field of TrainOptions: its default, its help line, the range of a number, the option without which it has no effect and
    why, the option or flag of the loss with which it has none and why, and further settings of argparse."""
    metadata = {"help": help, "must": must, "needs": needs, "without": without, "argparse": argparse_settings}
    return dataclasses.field(default=default, metadata=metadata)


count = partial(flag, must=Range("at least 1", lambda value: value >= 1))
positive = partial(flag, must=Range("above 0", lambda value: value > 0))
not_negative = partial(flag, must=Range("at least 0", lambda value: value >= 0))
OF_EXPERTS = ("num_experts", "a dense model has no experts")
OF_FOLDER = ("hf_checkpoint", "the folder decides it")
OF_SAMPLES = ("rollouts", "nothing is sampled")
OF_STEPS = ("docs_per_step", "where a step ends is known only when it ends")
OF_PROMPTS = ("prompts", "a built-in task has its own")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What is trained: a model of random weights and these sizes, or a Hugging Face folder's model."""

    hf_checkpoint: str | None = flag(
        None,
        "Train this model: a folder with config.json, *.safetensors and tokenizer of Llama, Mistral, Qwen2 or Qwen3.",
    )
    num_layers: int = count(2, "Transformer layers.", without=OF_FOLDER)
    hidden_size: int = count(64, "Width of the transformer.", without=OF_FOLDER)
    num_attention_heads: int = count(4, "Attention heads.", without=OF_FOLDER)
    vocab_size: int | None = count(
        None, "Vocabulary of the model. Unset: as --rollouts says, if it does, else the task's.", without=OF_FOLDER
    )
    num_experts: int | None = count(None, "Experts of each layer. Unset: a dense model.", without=OF_FOLDER)
    moe_router_topk: int = count(2, "Experts that each token is sent to.", needs=OF_EXPERTS, without=OF_FOLDER)
    moe_ffn_hidden_size: int | None = count(
        None, "Width of an expert. Unset: 4 x --hidden-size.", needs=OF_EXPERTS, without=OF_FOLDER
    )
    moe_router_load_balancing_type: str = flag(
        "aux_loss",
        "What --moe-aux-loss-coeff weighs.",
        choices=("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
        needs=OF_EXPERTS,
    )
    moe_aux_loss_coeff: float = not_negative(
        0.0, "Weight of the loss that balances the experts; --router-aux-loss says how it is scaled.", needs=OF_EXPERTS
    )
    bf16: bool | None = flag(None, "Compute in bfloat16, or not (--no-bf16). Unset: only on CUDA.")


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """How the ranks share the model and the samples. The loss and its gradient do not depend on it."""

    tensor_model_parallel_size: int = count(1, "Ranks that share each layer.")
    pipeline_model_parallel_size: int = count(1, "Ranks that share the stack of layers.")
    context_parallel_size: int = count(1, "Ranks that share each sequence.")
    expert_model_parallel_size: int = count(1, "Ranks that share the experts of each layer.", needs=OF_EXPERTS)
    sequence_parallel: bool = flag(
        False,
        "Share activations between layers over the tensor-parallel ranks too.",
        needs=("tensor_model_parallel_size", "it shares what 2 or more of those ranks repeat"),
    )
    use_distributed_optimizer: bool = flag(False, "Share optimiser state over the data-parallel ranks.")
    packed: bool = flag(False, "Batches without padding.")


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """What the policy is asked, how its responses are rewarded, and which recorded rollouts take their place."""

    preset: str | None = flag(None, "Values for flags that are not given.", choices=tuple(PRESETS))
    task: str | None = flag(
        None,
        "Built-in task. Unset without --prompts: repeat.",
        choices=tuple(BUILT_IN_TASKS),
        without=("prompts", "the file is the task"),
    )
    prompts: str | None = flag(
        None,
        'Your own prompts, a JSON object in each line: {"prompt": text or token ids, ...}.',
        needs=("reward", "module.function, called as fn(prompt, response, record)"),
    )
    reward: str | None = flag(
        None,
        "Your own reward, module.function, called as fn(prompt, response, record).",
        needs=OF_PROMPTS,
    )
    max_new_tokens: int | None = count(None, "Longest response to a prompt of --prompts. Unset: 16.", needs=OF_PROMPTS)
    num_rollouts: int | None = count(None, f"Rollouts to train on. Unset: {DEFAULT_NUM_ROLLOUTS}, or all of --rollouts.")
    prompts_per_rollout: int = count(16, "Prompts sampled between two weight updates of the sampling policy.")
    advantage_normalization: str = flag(
        AdvantageNormalization.STD.value,
        "An advantage is the reward minus the mean of its prompt group; std: divided by the standard deviation of the group, as in "
        "GRPO; none: not divided, as in Dr. GRPO.",
        without=("rollouts", "the file holds the advantages"),
        choices=tuple(kind.value for kind in AdvantageNormalization),
    )
    top_p: float = flag(
        1.0,
        "Sample from the fewest most probable tokens whose mass reaches this, after the temperature. The "
        "kept ids are recorded, and all log-probabilities of the loss are over them (--sampling-support replay).",
        must=Range("above 0 and at most 1; 1 turns it off", lambda value: 0 < value <= 1),
        without=OF_SAMPLES,
    )
    seed: int = not_negative(0, "Decides initial weights, prompts and sampling noise.")
    rollouts: str | None = flag(None, "Train on recorded rollouts of --save-rollouts instead.")
    save_rollouts: str | None = flag(
        None, "Write the rollouts to this file, for --rollouts.", without=("rollouts", "the file holds them: copy it")
    )
    router_replay: str = flag(
        RouterReplay.NONE.value,
        "Experts that routers use in training: none: their own choice; old_log_probs (R2 in other frameworks): what "
        "the forward chose that measured the old log-probabilities; rollout (R3): the sampler's, in that forward too. Each step "
        "compares what routers used with what was replayed.",
        choices=tuple(kind.value for kind in RouterReplay),
        needs=OF_EXPERTS,
    )


@dataclass(frozen=True, kw_only=True)
class OptimiserOptions:
    """Adam and its learning rate."""

    lr: float | None = positive(
        None, "Learning rate of Adam, its largest. Unset: 3e-3 for a built-in task, 5e-4 with --prompts, 1e-6 with --hf-checkpoint."
    )
    lr_decay_style: str = flag(
        "constant",
        "How the learning rate goes from --lr to --min-lr, after the warm-up.",
        choices=("constant", "linear", "cosine"),
        needs=("num_rollouts", "the decay ends with the run"),
        without=OF_STEPS,
    )
    lr_warmup_iters: int = not_negative(0, "Optimiser steps in which the learning rate grows to --lr.")
    min_lr: float = not_negative(
        0.0, "Learning rate at the end of the decay.", needs=("lr_decay_style", "a constant learning rate does not decay")
    )
    clip_grad: float = flag(
        1.0, "Largest gradient norm; 0 does not clip.", must=Range("at least 0; 0 does not clip", lambda value: value >= 0)
    )


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a rollout is cut into optimiser steps and micro-batches; --docs-per-step cuts by documents."""

    # The default on the command line is None: --docs-per-step, the other flag for where a step ends, must tell 2 from unset.
    steps_per_rollout: int = count(
        DEFAULT_STEPS_PER_ROLLOUT, "Optimiser steps on each rollout; prompt groups stay whole.", without=OF_STEPS, default=None
    )
    micro_batch_size: int | None = count(
        None, "Samples in a micro-batch. Unset: all of a rank's; with --docs-per-step a prompt group."
    )


@dataclass(frozen=True, kw_only=True)
class SavingOptions:
    """Where the run keeps its files, and which run it goes on with."""

    output_dir: str = flag("runs/train", "Where metrics, curves and checkpoints go.")
    save_interval: int = count(
        50, "Rollouts between two checkpoints, and between two evaluations on --eval-prompts; one is saved at the end too."
    )
    resume: bool = flag(False, "Go on from the latest checkpoint in --output-dir.")
    overwrite: bool = flag(False, "Start anew in an --output-dir that holds a run.", without=("resume", "it goes on with the run"))
    save_hf: str | None = flag(
        None,
        "Write the trained model of --hf-checkpoint to this folder, in the same format, at the end.",
        needs=("hf_checkpoint", "it writes the format that the model was read from"),
    )


@dataclass(frozen=True, kw_only=True)
class WatchingOptions:
    """What is measured beside training, and when the run ends early."""

    eval_prompts: str | None = flag(
        None,
        "Prompts that are not trained on, as --prompts; their mean reward and length are reported every --save-interval rollouts.",
        needs=("prompts", "they are evaluated by the same reward"),
        without=OF_SAMPLES,
    )
    target_reward: float | None = flag(
        None, "Stop when the mean reward of the last 5 rollouts is at least this.", must=Range("finite", lambda value: True)
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How the metrics are shown and to whom they are sent."""

    tensorboard: bool = flag(True, "Write TensorBoard events, if TensorBoard is installed; on by default.")
    wandb_project: str | None = flag(
        None,
        "Send TensorBoard's events to this project of Weights & Biases too; needs wandb.",
        needs=("tensorboard", "it sends TensorBoard's events"),
    )
    show_samples: int = not_negative(
        0,
        f"Samples of rank 0 to show every {ROLLOUTS_BETWEEN_SAMPLES} rollouts: prompt, response, reward; in {SAMPLES_FILE} too.",
        without=OF_SAMPLES,
    )
    json: bool = flag(False, "Print the summary as one JSON line on stdout.")


# The title of each group of flags in --help -> its flags. Its docstring is the sentence below the title.
GROUPS: dict[str, type] = {
    "model": ModelOptions,
    "layout": LayoutOptions,
    "rollouts and tasks": RolloutOptions,
    "optimiser": OptimiserOptions,
    "steps": StepOptions,
    "saving and resuming": SavingOptions,
    "watching": WatchingOptions,
    "output": OutputOptions,
}


@dataclass(frozen=True, kw_only=True)
class TrainOptions(
    ModelOptions, LayoutOptions, RolloutOptions, OptimiserOptions, StepOptions, SavingOptions, WatchingOptions, OutputOptions
):
    """One field = type, default, one line; the flag is the field's name with dashes."""


def add_train_args(parser: ArgumentParser) -> ArgumentParser:
    """Adds the groups of GROUPS, one flag for each field of TrainOptions, and returns the parser."""
    kinds = typing.get_type_hints(TrainOptions)
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title, options.__doc__)
        for field in dataclasses.fields(options):
            name, kind, help = flag_of(field.name), kinds[field.name], field.metadata["help"]
            if field.default is False:
                group.add_argument(name, action="store_true", help=help)
            elif kind in (bool, bool | None):
                group.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default, help=help)
            else:
                shown_default = "" if field.default is None else f" Default: {field.default}."
                settings = {"default": field.default, **field.metadata["argparse"]}
                reader = next(one for one in (int, float, str) if kind in (one, one | None))
                group.add_argument(name, type=reader, help=help + shown_default, **settings)
    return parser


def set_preset_defaults(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    """Makes the values of the --preset among the arguments the parser's defaults, so that a flag that is given wins, and prompts
    over its task.

    Call it before parser.parse_args(arguments). An unknown preset is left for parse_args to report.
    """
    finder = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--preset", "--prompts", "--hf-checkpoint"):
        finder.add_argument(name, nargs="?")
    given = finder.parse_known_args(list(arguments))[0]
    has_prompts = given.prompts is not None or given.hf_checkpoint is not None
    values = PRESETS.get(given.preset, {})
    parser.set_defaults(**{name: value for name, value in values.items() if name != "task" or not has_prompts})


def model_vocab_size(options: TrainOptions, task_vocab_size: int, recorded: int | None = None) -> int:
    """--vocab-size, else as the recorded rollouts say, else the task's. ConfigError when the task's tokens do not fit. Tensor
    parallelism pads it later."""
    if options.vocab_size is None:
        return task_vocab_size if recorded is None else recorded
    if options.vocab_size < task_vocab_size:
        raise ConfigError(f"--vocab-size {options.vocab_size} is smaller than the task's {task_vocab_size} tokens; leave it unset")
    return options.vocab_size


def experts_of(options: TrainOptions) -> dict[str, Any]:
    """The fields of Megatron's TransformerConfig for a mixture of experts; {} for a dense model."""
    if options.num_experts is None:
        return {}
    balance = {name: getattr(options, name) for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff")}
    if options.hf_checkpoint is not None:  # the folder has the rest
        return balance if options.moe_aux_loss_coeff else {}
    return {
        "num_moe_experts": options.num_experts,
        "moe_ffn_hidden_size": options.moe_ffn_hidden_size or 4 * options.hidden_size,
        "moe_router_topk": options.moe_router_topk,
        **balance,
    }


def settings_of(options: TrainOptions, config: PolicyLossConfig) -> dict[str, Any]:
    """flag -> value, as plain numbers and text: what a checkpoint keeps of a run's settings. Where a run begins, when it ends and
    what it writes is left out: it does not change a step."""
    left_out = {"preset", "save_rollouts"}
    if options.lr_decay_style == "constant":
        left_out.add("num_rollouts")
    for group in (SavingOptions, WatchingOptions, OutputOptions):
        left_out |= {field.name for field in dataclasses.fields(group)}
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options) if field.name not in left_out}
    values |= {field.name: getattr(config, field.name) for field in flag_fields()} | dict(config.loss_parameters)
    plain = (int, float, bool, type(None))
    return {flag_of(name): value if type(value) in plain else str(value) for name, value in values.items()}


def changed_settings(saved: dict[str, Any], now: dict[str, Any], step: int) -> list[str]:
    """A line for each setting that a resumed run changes."""
    return [
        f"resumed at step {step} with {flag} {value}: the checkpoint was saved with {saved.get(flag)}"
        for flag, value in now.items()
        if saved.get(flag) != value
    ]
