"""NeMo-RL: our losses in the place of its ClippedPGLossFn, with the step's weights, and prompt_mean by its advantages.

    python -m megatron_rl.hosts.launch examples/run_grpo.py --config ... ++loss_fn.megatron_rl=<loss>.<aggregation>

What NeMo-RL's Megatron worker does with the number that a loss returns, c context-parallel ranks, M micro-batches:

    NeMo-RL: x 1 / c, x M / c; Megatron: x c / M; the gather of log-probabilities adds c equal gradients; DDP: sums over D ranks
    -> sum over ranks and micro-batches; with packing NeMo-RL may call a loss once a sequence, and adds

So a loss returns sum_i w_i S_i of what it is given, w_i from the counts of the whole global batch, which NeMo-RL hands over. KL is
NeMo-RL's own, with its formula and its own mean, or ours where an estimator is chosen. The metrics are NeMo-RL's.

Here are its settings and its start; the loss is in nemo_rl_loss.py.
"""

from __future__ import annotations

import functools
import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeGuard

from megatron_rl.config import LARGEST_RATIO
from megatron_rl.declare import get_policy_loss
from megatron_rl.errors import ConfigError
from megatron_rl.formula import Formula
from megatron_rl.hosts.choice import DIVISOR, Given, Launch, Offer, Reader, make_launch, typed_if, value_at
from megatron_rl.hosts.contract import SUMMED, TIMES_CP, Contract, Stage
from megatron_rl.hosts.dense_rows import is_carried, numbers
from megatron_rl.hosts.heads.nemo_rl import FUSED_HEAD, with_our_worker
from megatron_rl.hosts.nemo_rl_loss import NemoLoss, with_prompt_weights
from megatron_rl.hosts.sampler_rule import Sampler
from megatron_rl.hosts.start_check import end_after_check
from megatron_rl.losses.corrections import CORRECTIONS
from megatron_rl.losses.kl import KL_ESTIMATORS
from megatron_rl.weights import AggregationRecord

TITLE, PROBED = "NeMo-RL", "NVIDIA-NeMo/RL 7ea279abf"
COUNTS_ROLLOUTS, WHY_NOT_PER_TOKEN = False, "its Megatron worker always sets it"
PACKAGE, TRAINER = "nemo_rl", "nemo_rl.algorithms.grpo"
CONTRACT = Contract(
    TITLE,
    PROBED,
    {
        f"{TRAINER}:ClippedPGLossFn.__call__": ("self", "next_token_logprobs", "data", "global_valid_seqs", "global_valid_toks"),
        f"{TRAINER}:ClippedPGLossFn.__init__": ("self", "cfg", "use_fused_linear_logprobs"),
        f"{TRAINER}:_create_advantage_estimator": ("master_config",),
        f"{TRAINER}:setup": ("master_config", "..."),
    },
)
# Its settings.
LOSS_FN, SAMPLING = "loss_fn.", "policy.generation."
NAME, PREFIX = f"{LOSS_FN}megatron_rl", f"{LOSS_FN}megatron_rl_"
PENALTY, IN_REWARD = f"{LOSS_FN}reference_policy_kl_penalty", f"{LOSS_FN}use_kl_in_reward"
WORKER, BATCH = "policy.megatron_cfg.enabled", "policy.train_global_batch_size"
# What computes log-probabilities: ours, whichever loss trains, or NeMo-RL's.
LOG_PROBS, OURS, QUANTISED = f"{PREFIX}log_probs", "megatron_rl", "policy.quant_cfg"
# Settings that choose another loss, and what ours has for it.
OTHER_LOSSES = {
    f"{LOSS_FN}use_cispo": "cispo",
    f"{LOSS_FN}disable_ppo_ratio": "reinforce",
    f"{LOSS_FN}sequence_level_importance_ratios": "gspo",
}
# NeMo-RL's truncation of sampling weights -> our correction. None: weights without bounds.
WEIGHTS, TRUNCATION = f"{LOSS_FN}use_importance_sampling_correction", f"{LOSS_FN}truncated_importance_sampling_type"
BOUND, LOWER_BOUND = f"{LOSS_FN}truncated_importance_sampling_ratio", f"{LOSS_FN}truncated_importance_sampling_ratio_min"
KINDS = {None: "tis", "tis": "tis", "icepop": "icepop", "seq-mask-tis": "seq_mask_tis"}
# What NeMo-RL writes into advantages after its estimator.
AFTER_THE_ESTIMATOR = tuple(
    f"grpo.{name}"
    for name in ("advantage_clip_low", "advantage_clip_high", "invalid_tool_call_advantage", "malformed_thinking_advantage")
)
REPLAY = f"{SAMPLING}vllm_kwargs.return_sampling_mask"


def gives(record: AggregationRecord) -> bool:
    """A loss sees no prompt and no rollout; the advantages carry prompt_mean."""
    return record.needs is not None and not record.needs_rows and (not record.needs_prompts or is_carried(record.name))


OFFER = Offer(title=TITLE, setting=NAME, gives=gives, carried=("prompt_mean",))


def stages(weight: Formula, record: AggregationRecord, *, per_token: bool) -> tuple[list[Stage], list[Stage]]:
    sample_stages: list[Stage] = [("loss", weight, "the weight, from counts of the step")]
    if record.needs_prompts:
        mean = Formula(N=-1, m_i=-1)
        estimator: Stage = ("estimator", weight / mean, "the launcher's estimator scales the sample's advantage")
        sample_stages = [estimator, ("loss", mean, "the weight of sample_mean")]
    gather = "each cp rank has the whole loss, and the gather of log-probabilities adds their gradients"
    return sample_stages, [
        ("NeMo-RL", Formula(M=1, cp=-2), "its wrappers divide by cp, and multiply by M / cp"),
        TIMES_CP,
        ("gather", Formula(cp=1), gather),
        SUMMED[1],
    ]


# The settings


def read(master_config: Any) -> Launch:
    """What NeMo-RL's whole config trains with our loss. Raises one ConfigError with every problem."""
    at = Reader(master_config)
    loss, aggregation = OFFER.choose(at(NAME))
    ours = our_settings(master_config)
    estimator, penalty = ours.get("kl_estimator"), at.number(PENALTY, 0.01)
    mean = "tokens" if at.switch(f"{LOSS_FN}token_level_loss", True) else "samples"
    terms = f"KL is NeMo-RL's, {penalty:g} x mean over {mean}" if penalty and not at.switch(IN_REWARD) else "no KL in the loss"
    if estimator is not None:
        terms = f"KL {penalty or 0:g} ({estimator.value}) x mean over samples"
    theirs = {
        "clip_ratio_low": at.given(f"{LOSS_FN}ratio_clip_min", 0.2),
        "clip_ratio_high": at.given(f"{LOSS_FN}ratio_clip_max", 0.2),
        "clip_ratio_c": at.given(f"{LOSS_FN}ratio_clip_c"),
        "kl_coefficient": Given(PENALTY, penalty if estimator else None),
        DIVISOR: Given(f"++{PREFIX}{DIVISOR}", None),
    }
    sampler = sampler_of(at, loss, estimator)
    problems = [*problems_of(at, f"{loss}.{aggregation}", has_weights=is_carried(aggregation))]
    if estimator is not None and at.switch(IN_REWARD):
        problems.append(f"{estimator.name}={estimator.value} has no effect beside {IN_REWARD}=true; remove it")
    if has_ratio(estimator) and sampler.kept and sampler.replayed:
        text = f"multiplies a KL over the whole vocabulary by a ratio among the sets of {REPLAY}=true; choose another one"
        problems.append(f"{estimator.name}={estimator.value} {text}")
    return make_launch(
        f"megatron_rl={loss}.{aggregation} in NeMo-RL",
        loss,
        aggregation,
        readers=[at],
        theirs=theirs | corrections_of(at),
        ours=ours,
        offers=("kl_estimator",),
        sampler=sampler,
        terms=terms,
        token_mean_host=TITLE,
        problems=problems,
    )


def our_settings(master_config: Any) -> dict[str, Given]:
    """By our names. NeMo-RL keeps any name below loss_fn."""
    given = {f"{LOSS_FN}{name}": value for name, value in dict(master_config.loss_fn).items() if value is not None}
    names = [name for name in given if name.startswith(PREFIX) and name != LOG_PROBS]
    return {name.removeprefix(PREFIX): Given(f"++{name}", given[name]) for name in names}


def corrections_of(at: Reader) -> dict[str, Given]:
    """Ours in the place of NeMo-RL's truncation of sampling weights, where that is on."""
    truncation = at(TRUNCATION)
    if not at.switch(WEIGHTS) or truncation not in KINDS:
        return {}
    kind = KINDS[truncation]
    return {
        "importance_correction": Given(f"{WEIGHTS}=true {TRUNCATION}", kind),
        "importance_correction_level": Given(TRUNCATION, next(iter(CORRECTIONS[kind].bounds))),
        "importance_correction_low": Given(LOWER_BOUND, at.number(LOWER_BOUND) or 0.0),
        "importance_correction_high": Given(BOUND, LARGEST_RATIO if truncation is None else at.number(BOUND)),
    }


def sampler_of(at: Reader, loss: str, estimator: Given | None) -> Sampler:
    engine = at(f"{SAMPLING}backend", "vllm")
    mixers = [f"the policy loss {loss}, whose ratio is of more than one token"] if get_policy_loss(loss).reads_means else []
    if has_ratio(estimator):
        mixers.append(f"{estimator.name}={estimator.value}")
    return Sampler(
        engine=engine,
        mode=(at(f"{SAMPLING}vllm_cfg.logprobs_mode") or "raw_logprobs") if engine == "vllm" else None,
        kept=typed_if({f"{SAMPLING}top_p": (1.0,), f"{SAMPLING}top_k": (-1, 0)}, at),
        drafted=typed_if({f"{SAMPLING}vllm_kwargs.speculative_config": ()}, at),
        replayed=f"{REPLAY}=true" if at.switch(REPLAY) and can_replay() else None,
        recomputes=True,
        mixers=mixers,
    )


def has_ratio(estimator: Given | None) -> TypeGuard[Given]:
    """Whether the KL estimator has an importance ratio."""
    declared = None if estimator is None else KL_ESTIMATORS.find(estimator.value)
    return declared is not None and declared.takes_log_ratio


def can_replay() -> bool:
    """Whether this NeMo-RL can score among the sampler's sets. Another one takes the setting for vLLM's, and keeps tokens by its
    own logits."""
    try:
        return hasattr(import_module("nemo_rl.algorithms.logits_sampling_utils"), "SamplingMask")
    except ImportError:
        return False


def problems_of(at: Reader, chosen: str, *, has_weights: bool) -> Iterator[str]:
    """has_weights: the advantages carry the weights, of all prompts of a step."""
    for name, ours in OTHER_LOSSES.items():
        if at.switch(name):
            yield f"{name}=true beside {NAME}={chosen}: two losses in one launch; remove it, or set ++{NAME}={ours}.<aggregation>"
    if weight := at.number(f"{LOSS_FN}positive_example_nll_weight", 0.0):
        why = "NeMo-RL divides this term by the tokens of a micro-batch, so its weight depends on the micro-batch size"
        yield f"{LOSS_FN}positive_example_nll_weight={weight}: {why}; remove it"
    if at.switch(WEIGHTS) and at(TRUNCATION) not in KINDS:
        kinds = ", ".join(filter(None, KINDS))
        yield f"{TRUNCATION}={at(TRUNCATION)}: our losses have {kinds}, or null for weights without bounds; set one of these"
    if not at.switch(WORKER):
        why = "other workers multiply a loss by other factors"
        yield f"{WORKER} is not true: {why}; set {WORKER}=true and policy.dtensor_cfg.enabled=false"
    if not has_weights:
        return
    for name in AFTER_THE_ESTIMATOR:
        if (value := at(name)) is not None:
            yield f"{name}={value} beside {chosen}: NeMo-RL writes it over the weights in the advantages; set {name}=null"
    samples = at("grpo.num_prompts_per_step") * at("grpo.num_generations_per_prompt")
    if at(BATCH) != samples:
        yield f"{BATCH}={at(BATCH)} beside {chosen}: a step of a part of a batch cuts prompt groups; set it to {samples}"


# The start


def judge(master_config: Any) -> tuple[Launch | None, bool]:
    """(the launch of our loss, None where NeMo-RL's own trains; whether our log-probabilities take the place of NeMo-RL's).

    Raises one ConfigError with every problem."""
    at, ours = Reader(master_config), our_settings(master_config)
    value, trains_ours = at(LOG_PROBS, PACKAGE), at(NAME) is not None
    if value == PACKAGE:
        return read(master_config), False
    problems = [] if value == OURS else [f"{LOG_PROBS}={value} is neither {OURS} nor {PACKAGE}"]
    if not at.switch(WORKER):
        problems.append(f"{LOG_PROBS}={value} is made for NeMo-RL's Megatron worker; set {WORKER}=true, or remove it")
    if at(QUANTISED) is not None:
        problems.append(
            f"{LOG_PROBS}={value} beside {QUANTISED}: each has NeMo-RL make another class of worker; remove one of them"
        )
    if not trains_ours:
        problems += [f"{one.name}={one.value} has no effect on NeMo-RL's own loss; remove it" for one in ours.values()]
    if problems:
        raise ConfigError(problems)
    return read(master_config) if trains_ours else None, True


def check(master_config: Any) -> list[str]:
    """Raises one ConfigError with every problem."""
    launch, has_log_probs = judge(master_config)
    trains = "NeMo-RL's own loss" if launch is None else f"{launch.title}, {numbers(launch.config)}"
    return [trains, *[f"{LOG_PROBS}={OURS}"] * has_log_probs]


def compose(words: Sequence[str]) -> Any:
    """NeMo-RL's MasterConfig of a launch line, as run_grpo.py makes it. NeMo-RL is imported."""
    composer, trainer, omegaconf = (import_module(name) for name in ("nemo_rl.utils.config", TRAINER, "omegaconf"))
    start = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
    if start is None:
        raise ConfigError("no script is on the line: give one after -m megatron_rl.hosts.launch, as examples/run_grpo.py")
    parser = ArgumentParser()
    parser.add_argument("--config", default=str(Path(words[start]).parent / "configs" / "grpo_math_1B.yaml"))
    args, overrides = parser.parse_known_args(words[start + 1 :])
    try:
        composer.register_omegaconf_resolvers()
        config = composer.parse_hydra_overrides(composer.load_config(args.config), overrides)
        return trainer.MasterConfig(**omegaconf.OmegaConf.to_container(config, resolve=True))
    except (composer.OverridesError, OSError, ValueError) as error:
        raise ConfigError(f"NeMo-RL's own reader refuses the line: {error}") from error


def is_script_of_ours(script: Path) -> bool:
    """Whether the script trains with NeMo-RL. Raises ConfigError for a script of another trainer of NeMo-RL."""
    text = script.read_text(encoding="utf-8")
    if re.search(rf"^\s*(from|import) {PACKAGE}\b", text, re.MULTILINE) is None:
        return False
    if f"from {TRAINER} import" not in text:
        raise ConfigError(
            f"{script} does not import {TRAINER}, the trainer that our losses are made for; start examples/run_grpo.py"
        )
    return True


@contextmanager
def loss_in_setup(refuse: Callable[[ConfigError], int], calls: list[str]) -> Iterator[None]:
    """NeMo-RL's `setup` makes our loss; each call is noted in `calls`, and one with problems ends the process by `refuse`. With
    MEGATRON_RL_CHECK=1 one without problems ends it too, before a worker is made.

    Undone at the end. Raises ConfigError for a NeMo-RL with another contract."""
    trainer: Any = import_module(TRAINER)
    CONTRACT.check()
    own_loss, setup, create = trainer.ClippedPGLossFn, trainer.setup, trainer._create_advantage_estimator

    @functools.wraps(setup)
    def setup_with_our_loss(master_config: Any, *positional: Any, **named: Any) -> Any:
        calls.append(PACKAGE)
        try:
            (launch, has_log_probs), lines = judge(master_config), check(master_config)
            if has_log_probs:
                has_head = value_at(master_config, FUSED_HEAD) is True
                given = (master_config, *positional)
                (master_config, *others), named = with_our_worker(trainer, setup, given, named, has_head=has_head)
                positional = (*others,)
        except ConfigError as error:
            sys.exit(refuse(error))
        end_after_check(lines)
        trainer.ClippedPGLossFn = own_loss  # a setup before may have had ours
        if launch is not None:
            samples = value_at(master_config, BATCH)
            trainer.ClippedPGLossFn = lambda *given, **options: NemoLoss(own_loss(*given, **options), launch, samples)
        return setup(master_config, *positional, **named)

    def create_for_our_loss(master_config: Any) -> Any:
        """After setup, for each trainer by its own config: another one of the process may have another aggregation."""
        estimator, chosen = create(master_config), Reader(master_config)(NAME)
        is_weighed = chosen is not None and is_carried(OFFER.choose(chosen)[1])
        return with_prompt_weights(estimator) if is_weighed else estimator

    trainer.setup, trainer._create_advantage_estimator = setup_with_our_loss, create_for_our_loss
    try:
        yield
    finally:
        trainer.ClippedPGLossFn, trainer.setup, trainer._create_advantage_estimator = own_loss, setup, create
