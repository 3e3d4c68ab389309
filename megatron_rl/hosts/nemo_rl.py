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

import ast
import functools
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_rl.aggregation_record import AggregationRecord, Formula
from megatron_rl.config import LARGEST_RATIO, CorrectionLevel
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.choice import CORRECTION_SETTINGS, DIVISOR, Given, Launch, Offer, Reader, make_launch, typed_if, value_at
from megatron_rl.hosts.contract import SUMMED, TIMES_CP, Contract, Stage
from megatron_rl.hosts.dense_rows import is_carried, is_proportional, numbers
from megatron_rl.hosts.heads.nemo_rl import FUSED_HEAD, with_our_worker
from megatron_rl.hosts.nemo_rl_loss import NemoLoss, with_prompt_weights
from megatron_rl.hosts.sampler_rule import MODES, Sampler, Scores
from megatron_rl.hosts.start_check import end_after_check
from megatron_rl.loss_hub import get_policy_loss
from megatron_rl.registries.corrections import get_correction
from megatron_rl.registries.kl_estimators import KL_ESTIMATORS

TITLE, PROBED = "NeMo-RL", "NVIDIA-NeMo/RL 7ea279abf"
COUNTS_ROLLOUTS, WHY_NOT_PER_TOKEN = False, "its Megatron worker always sets it"
PACKAGE, TRAINER = "nemo_rl", "nemo_rl.algorithms.grpo"
CONTRACT = Contract(
    TITLE,
    PROBED,
    {
        f"{TRAINER}:ClippedPGLossFn.__call__": (
            *("self", "next_token_logprobs", "data", "global_valid_seqs", "global_valid_toks"),
        ),
        f"{TRAINER}:ClippedPGLossFn.__init__": ("self", "cfg", "use_fused_linear_logprobs"),
        f"{TRAINER}:_create_advantage_estimator": ("master_config",),
        f"{TRAINER}:setup": ("master_config", "..."),
    },
)
# Its settings.
LOSS_FN, SAMPLING = "loss_fn.", "policy.generation."
NAME, PREFIX = f"{LOSS_FN}megatron_rl", f"{LOSS_FN}megatron_rl_"
PENALTY, POSITIVE_EXAMPLES = f"{LOSS_FN}reference_policy_kl_penalty", f"{LOSS_FN}positive_example_nll_weight"
IN_REWARD = f"{LOSS_FN}use_kl_in_reward"
WORKER = "policy.megatron_cfg.enabled"
PROMPTS, GENERATIONS, BATCH = "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", "policy.train_global_batch_size"
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
CORRECTIONS = {None: "tis", "tis": "tis", "icepop": "icepop", "seq-mask-tis": "seq_mask_tis"}
# What our KL estimator takes the place of, with NeMo-RL's default. The coefficient stays NeMo-RL's.
KL_SETTINGS = {
    f"{LOSS_FN}reference_policy_kl_type": ("k3",),
    f"{LOSS_FN}use_on_policy_kl_approximation": (False,),
    f"{LOSS_FN}kl_input_clamp_value": (20.0,),
    f"{LOSS_FN}kl_output_clamp_value": (10.0,),
}
# What NeMo-RL writes into advantages after its estimator.
AFTER_THE_ESTIMATOR = tuple(
    f"grpo.{name}"
    for name in ("advantage_clip_low", "advantage_clip_high", "invalid_tool_call_advantage", "malformed_thinking_advantage")
)
# Its sampler. Over what each engine's log-probabilities are; vLLM's are as its mode says.
FILTERS = {f"{SAMPLING}top_p": (1.0,), f"{SAMPLING}top_k": (-1, 0)}
DRAFTS = {f"{SAMPLING}vllm_kwargs.speculative_config": ()}
MODE, REPLAY = f"{SAMPLING}vllm_cfg.logprobs_mode", f"{SAMPLING}vllm_kwargs.return_sampling_mask"
ENGINES = {"megatron": Scores.KEPT, "dynamo": Scores.KEPT, "sglang": Scores.WHOLE}


def gives(record: AggregationRecord) -> bool:
    """A loss sees no prompt and no rollout; the advantages carry prompt_mean."""
    return record.needs is not None and not record.needs_rows and (not record.needs_prompts or is_carried(record.name))


OFFER = Offer(
    title=TITLE,
    setting=NAME,
    prefix="",
    gives=gives,
    in_advantages=True,
    remedy=f"++{NAME}=<loss>.<aggregation> on the launch line chooses both",
)


def refusal(loss: str, record: AggregationRecord) -> str | None:
    if not gives(record):
        return "no rollout ids" if record.needs_rows else "no prompts there"
    return None if not is_carried(record.name) or is_proportional(get_policy_loss(loss)) else "not proportional"


def stages(weight: Formula, record: AggregationRecord, *, per_token: bool) -> tuple[list[Stage], list[Stage]]:
    of_samples: list[Stage] = [("loss", weight, "the weight, from counts of the step")]
    if record.needs_prompts:
        mean = Formula(N=-1, m_i=-1)
        estimator: Stage = ("estimator", weight / mean, "the launcher's estimator scales the sample's advantage")
        of_samples = [estimator, ("loss", mean, "the weight of sample_mean")]
    gather = "each cp rank has the whole loss, and the gather of log-probabilities adds their gradients"
    return of_samples, [
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
    penalty, mean = at.number(PENALTY, 0.01), "tokens" if at.switch(f"{LOSS_FN}token_level_loss", True) else "samples"
    terms = f"KL is NeMo-RL's, {penalty:g} x mean over {mean}" if penalty and not at.switch(IN_REWARD) else "no KL in the loss"
    if estimator := ours.get("kl_estimator"):
        terms = f"KL {penalty or 0:g} ({estimator.value}) x mean over samples"
    theirs = {
        "clip_ratio_low": at.given(f"{LOSS_FN}ratio_clip_min", 0.2),
        "clip_ratio_high": at.given(f"{LOSS_FN}ratio_clip_max", 0.2),
        "clip_ratio_c": at.given(f"{LOSS_FN}ratio_clip_c"),
        "kl_coefficient": Given(PENALTY, penalty if estimator else None),
    }
    problems = [f"{one.name}={one.value} has no effect: set {theirs[name].name}" for name, one in ours.items() if name in theirs]
    problems += one_loss_trains(at, f"{loss}.{aggregation}")
    problems += one_correction_acts(at, ours)
    problems += one_estimate_of_kl_acts(at, ours)
    problems += ratio_of_the_kl_is_of_its_kind(at, ours)
    problems += worker_is_megatrons(at)
    if is_carried(aggregation):
        problems += weights_reach_the_loss(at, f"{loss}.{aggregation}")
    return make_launch(
        f"megatron_rl={loss}.{aggregation} in NeMo-RL",
        loss,
        aggregation,
        readers=[at],
        theirs=theirs | {DIVISOR: Given(f"++{PREFIX}{DIVISOR}", None)} | corrections_of(at),
        ours={name: one for name, one in ours.items() if name not in theirs},
        offers=("kl_estimator", "log_probs"),
        mixers=mixers_of(loss, ours),
        sampler=sampler_of(at),
        terms=terms,
        in_advantages=is_carried(aggregation),
        problems=problems,
    )


def our_settings(master_config: Any) -> dict[str, Given]:
    """By our names. NeMo-RL keeps any name below loss_fn."""
    given = {f"{LOSS_FN}{name}": value for name, value in dict(master_config.loss_fn).items()}
    return {
        name.removeprefix(PREFIX): Given(f"++{name}", value)
        for name, value in given.items()
        if name.startswith(PREFIX) and name != LOG_PROBS and value is not None
    }


def corrections_of(at: Reader) -> dict[str, Given]:
    """Ours in the place of NeMo-RL's truncation of sampling weights, where that is on."""
    kind = CORRECTIONS.get(at(TRUNCATION)) if at.switch(WEIGHTS) else None
    if kind is None:
        return {}
    has_bounds, level = at(TRUNCATION) is not None, get_correction(kind).levels[0]
    found = {"importance_correction": Given(f"{WEIGHTS}=true, which is importance_correction", kind)}
    if level != CorrectionLevel.TOKEN:
        found["importance_correction_level"] = Given(TRUNCATION, level)
    found["importance_correction_low"] = Given(LOWER_BOUND, at.number(LOWER_BOUND) or 0.0)
    found["importance_correction_high"] = Given(BOUND, at.number(BOUND) if has_bounds else LARGEST_RATIO)
    return found


def sampler_of(at: Reader) -> Sampler:
    engine, mode = at(f"{SAMPLING}backend", "vllm"), at(MODE) or "raw_logprobs"
    by = f" ({MODE}={mode})" if engine == "vllm" else ""
    return Sampler(
        kept=typed_if(FILTERS, at),
        drafted=typed_if(DRAFTS, at),
        scores=MODES.get(mode, Scores.UNKNOWN) if engine == "vllm" else ENGINES.get(engine, Scores.UNKNOWN),
        engine=f"{engine}{by}",
        replayed=f"{REPLAY}=true" if at.switch(REPLAY) and can_replay() else None,
        recomputes=True,
    )


def can_replay() -> bool:
    """Whether this NeMo-RL can score among the sampler's sets. Another one takes the setting for vLLM's, and keeps tokens by its
    own logits."""
    try:
        return hasattr(import_module("nemo_rl.algorithms.logits_sampling_utils"), "SamplingMask")
    except ImportError:
        return False


def mixers_of(loss: str, ours: Mapping[str, Given]) -> list[str]:
    """What of our loss mixes a token's score with other tokens', or compares two of them for the KL."""
    found = [] if get_policy_loss(loss).level == "token" else [f"the policy loss {loss}, whose ratio is of more than one token"]
    return found + [f"{one.name}={one.value}" for one in _with_log_ratio(ours)]


def _with_log_ratio(ours: Mapping[str, Given]) -> list[Given]:
    """The KL estimator, where it has an importance ratio."""
    one = ours.get("kl_estimator")
    declared = None if one is None else KL_ESTIMATORS.find_or_none(one.value)
    return [one] if one is not None and declared is not None and declared.takes_log_ratio else []


def one_loss_trains(at: Reader, chosen: str) -> Iterator[str]:
    for name, ours in OTHER_LOSSES.items():
        if at.switch(name):
            text = f"two losses in one launch; remove it. Ours has ++{NAME}={ours}.<aggregation>"
            yield f"{name}=true beside {NAME}={chosen}: {text}"
    if weight := at.number(POSITIVE_EXAMPLES, 0.0):
        text = "NeMo-RL divides this term by the tokens of a micro-batch, so its weight depends on the micro-batch size; remove it"
        yield f"{POSITIVE_EXAMPLES}={weight}: {text}"


def one_correction_acts(at: Reader, ours: Mapping[str, Given]) -> Iterator[str]:
    if not at.switch(WEIGHTS):
        return
    if at(TRUNCATION) not in CORRECTIONS:
        yield (
            f"{TRUNCATION}={at(TRUNCATION)}: beside {WEIGHTS}=true our losses have {', '.join(filter(None, CORRECTIONS))}, or null "
            f"for weights without bounds; set one of these, or turn it off and set ++{PREFIX}importance_correction"
        )
    if chosen := [f"{one.name}={one.value}" for name, one in ours.items() if name in CORRECTION_SETTINGS]:
        yield f"{', '.join(chosen)} beside {WEIGHTS}=true: two corrections in one launch; turn one of them off"


def one_estimate_of_kl_acts(at: Reader, ours: Mapping[str, Given]) -> Iterator[str]:
    """Ours takes the place of NeMo-RL's."""
    if (one := ours.get("kl_estimator")) is None:
        return
    if at.switch(IN_REWARD):
        yield (
            f"{one.name}={one.value} has no effect beside {IN_REWARD}=true, which puts the KL into the rewards by NeMo-RL's own "
            "estimate; remove one of them"
        )
    for changed in typed_if(KL_SETTINGS, at):
        yield f"{changed} has no effect beside {one.name}={one.value}; remove it"


def ratio_of_the_kl_is_of_its_kind(at: Reader, ours: Mapping[str, Given]) -> Iterator[str]:
    """With NeMo-RL's replay the ratio is among the sampler's sets, and its reference over the whole vocabulary."""
    sampler = sampler_of(at)
    if sampler.kept and sampler.replayed:
        for one in _with_log_ratio(ours):
            text = f"multiplies a KL over the whole vocabulary by a ratio among the sets of {REPLAY}=true; choose another one"
            yield f"{one.name}={one.value} {text}"


def worker_is_megatrons(at: Reader) -> Iterator[str]:
    if not at.switch(WORKER):
        yield (
            f"{WORKER} is not true: our losses are made for NeMo-RL's Megatron worker, and other workers multiply a loss by other "
            f"factors; set {WORKER}=true and policy.dtensor_cfg.enabled=false"
        )


def weights_reach_the_loss(at: Reader, chosen: str) -> Iterator[str]:
    """The advantages carry them, of all prompts of a step."""
    for name in AFTER_THE_ESTIMATOR:
        if (value := at(name)) is not None:
            yield (
                f"{name}={value} beside {chosen}: NeMo-RL writes it into the advantages after they have the weights of prompt "
                f"groups; set {name}=null, or another aggregation"
            )
    prompts, generations, batch = (at(name) for name in (PROMPTS, GENERATIONS, BATCH))
    if batch != prompts * generations:
        yield (
            f"{BATCH}={batch} beside {chosen}: an optimiser step must have all {prompts * generations} samples of a batch, because "
            f"a smaller one cuts prompt groups; set it to {prompts * generations}"
        )


def log_probs_problems(at: Reader, ours: Mapping[str, Given]) -> Iterator[str]:
    """Of our log-probabilities, which come with a class of NeMo-RL's Megatron worker."""
    value = at(LOG_PROBS, PACKAGE)
    if value == PACKAGE:
        return
    if value != OURS:
        yield f"{LOG_PROBS}={value} is neither {OURS} nor {PACKAGE}"
    if not at.switch(WORKER):
        yield f"{LOG_PROBS}={value} is made for NeMo-RL's Megatron worker; set {WORKER}=true, or remove it"
    if at(QUANTISED) is not None:
        yield f"{LOG_PROBS}={value} beside {QUANTISED}: each has NeMo-RL make another class of worker; remove one of them"
    if at(NAME) is None:
        yield from (f"{one.name}={one.value} has no effect on NeMo-RL's own loss; remove it" for one in ours.values())


# The start


def judge(master_config: Any) -> tuple[Launch | None, bool]:
    """(the launch of our loss, None where NeMo-RL's own trains; whether our log-probabilities take the place of NeMo-RL's).

    Raises one ConfigError with every problem."""
    at = Reader(master_config)
    if problems := [*log_probs_problems(at, our_settings(master_config)), *at.problems]:
        raise ConfigError(problems)
    has_log_probs = at(LOG_PROBS) == OURS
    return None if has_log_probs and at(NAME) is None else read(master_config), has_log_probs


def check(master_config: Any) -> list[str]:
    """Raises one ConfigError with every problem."""
    return said_of(*judge(master_config))


def said_of(launch: Launch | None, has_log_probs: bool) -> list[str]:
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
    try:
        nodes = [*ast.walk(ast.parse(script.read_bytes(), filename=str(script)))]
    except SyntaxError as error:
        raise ConfigError(f"{script} is no Python script: {error}") from error
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    modules = [str(node.module) for node in froms]
    modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    if PACKAGE not in (name.partition(".")[0] for name in modules):
        return False
    if not any(node.module == TRAINER and alias.name == "setup" for node in froms for alias in node.names):
        raise ConfigError(
            f"{script} does not import setup from {TRAINER}: our losses are made for that trainer, as examples/run_grpo.py starts "
            "it. Others send a step in parts, with 1 in the place of its counts, or train with another loss"
        )
    return True


@contextmanager
def loss_in_setup(refuse: Callable[[ConfigError], int], calls: list[str]) -> Iterator[None]:
    """NeMo-RL's `setup` makes our loss; each call is noted in `calls`, and one with problems ends the process by `refuse`. With
    MEGATRON_RL_CHECK=1 one without problems ends it too, before a worker is made.

    Undone at the end. Raises ConfigError for a NeMo-RL that cannot be imported, or has another contract."""
    try:
        trainer: Any = import_module(TRAINER)
    except ImportError as error:
        raise ConfigError(
            f"{TRAINER} cannot be imported ({error}): start the launcher as NeMo-RL's scripts, with uv run"
        ) from error
    if problems := [*CONTRACT.problems()]:
        raise ConfigError(problems)
    own_loss, setup, create = trainer.ClippedPGLossFn, trainer.setup, trainer._create_advantage_estimator

    @functools.wraps(setup)
    def setup_with_our_loss(master_config: Any, *positional: Any, **named: Any) -> Any:
        calls.append(PACKAGE)
        try:
            launch, has_log_probs = judge(master_config)
            if has_log_probs:
                has_head = value_at(master_config, FUSED_HEAD) is True
                given = (master_config, *positional)
                (master_config, *others), named = with_our_worker(trainer, setup, given, named, has_head=has_head)
                positional = (*others,)
        except ConfigError as error:
            sys.exit(refuse(error))
        end_after_check(said_of(launch, has_log_probs))
        trainer.ClippedPGLossFn = own_loss  # a setup before may have had ours
        if launch is not None:
            samples = value_at(master_config, BATCH)
            trainer.ClippedPGLossFn = lambda *given, **options: NemoLoss(own_loss(*given, **options), launch, samples)
        return setup(master_config, *positional, **named)

    def create_for_our_loss(master_config: Any) -> Any:
        """After setup, for each trainer by its own config: another one of the process may have another aggregation."""
        estimator, chosen = create(master_config), Reader(master_config)(NAME)
        return estimator if chosen is None or not is_carried(OFFER.choose(chosen)[1]) else with_prompt_weights(estimator)

    trainer.setup, trainer._create_advantage_estimator = setup_with_our_loss, create_for_our_loss
    try:
        yield
    finally:
        trainer.ClippedPGLossFn, trainer.setup, trainer._create_advantage_estimator = own_loss, setup, create
