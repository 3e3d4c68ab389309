"""ROLL: our losses on the logits of its Megatron strategy, with the weights of the step. The loss is in roll_loss.

    actor_train:
      worker_cls: megatron_rl.hosts.roll_worker.ActorWorker
      pg_variant: <loss>.<aggregation>

ROLL's settings drop a name that they do not know without a word. So ours are variables of the worker's environment,
actor_train.system_envs.MEGATRON_RL_<NAME>.

What ROLL and Megatron do with the number that a loss returns, D data-parallel and c context-parallel ranks, M micro-batches:

    ROLL: x M D; Megatron: x c / M; DDP: mean over D c ranks
    -> sum over ranks and micro-batches; with packing ROLL calls a loss once a sequence, and adds

So a loss returns its rank's part of sum_i w_i S_i, w_i from the counts of the whole step, which ROLL hands over. Each rank has the
logits of its own tokens, so KL and entropy come from the same pass, with ROLL's coefficients. Prompts are known by their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.aggregation_record import AggregationRecord, Formula
from megatron_rl.arguments import read_switch
from megatron_rl.config import DEFAULT_KL_ESTIMATOR
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.choice import DIVISOR, Given, Launch, Offer, Reader, make_launch, read_word, typed_if, value_at
from megatron_rl.hosts.contract import AVERAGED, TIMES_CP, Contract, Stage
from megatron_rl.hosts.sampler_rule import MODES, Sampler, Scores
from megatron_rl.loss_hub import get_loss_aggregation

TITLE, PROBED = "ROLL", "alibaba/ROLL 8eb27cc2"
COUNTS_ROLLOUTS, WHY_NOT_PER_TOKEN = False, "ROLL's factors are made for the mean over ranks, and our worker refuses it"
CONTRACT = Contract(
    TITLE,
    PROBED,
    {
        "roll.pipeline.rlvr.actor_worker:ActorWorker.loss_func": ("self", "data", "output_tensor"),
        "roll.pipeline.rlvr.actor_worker:ActorWorker.initialize": ("self", "pipeline_config"),
    },
)
# Of the strategy that ROLL gives the worker.
STRATEGY_CONTRACT = {
    "train_step": ("self", "batch", "loss_func"),
    "inner_forward_step": ("self", "loss_func", "data_iterator", "model"),
    "_get_feature_on_this_cp_rank": ("self", "feature", "feature_name"),
}
TRAIN, VARIABLES, WORKER = "actor_train.", "MEGATRON_RL_", "megatron_rl.hosts.roll_worker.ActorWorker"
ENVIRONMENT = f"{TRAIN}system_envs.{VARIABLES}"
# What computes old log-probabilities and those of ROLL's own loss: ours, or ROLL's.
LOG_PROBS, OURS, THEIRS = f"{ENVIRONMENT}LOG_PROBS", "megatron_rl", "roll"
# Our head in the model of the worker, and the most bytes of its logits.
HEAD, HEAD_BYTES = f"{ENVIRONMENT}FUSED_LM_HEAD_LOSS", f"{ENVIRONMENT}MAX_LOGITS_BYTES"
OFFER = Offer(
    title=TITLE,
    setting=f"{TRAIN}pg_variant",
    prefix="",
    gives=lambda record: not record.needs_rows,
    has_logits=True,
    remedy=f"For ours set {TRAIN}worker_cls: {WORKER} and {TRAIN}pg_variant: <loss>.<aggregation>.",
)
CLIP = 0.2  # ROLL's default of its three clips
RECOMPUTE = "enable_old_logprobs_recompute"
# What ROLL's own loss reads, the only value that ours accepts, and why.
_NORMALISED = "ROLL normalises these weights in each micro-batch, so they depend on its size"
ONLY: dict[str, tuple[Any, str]] = {
    "importance_sampling": ("token", "two losses in one launch; ours is gspo: set pg_variant: gspo.<aggregation>"),
    "difficulty_loss_weight": (False, _NORMALISED),
    "length_loss_weight": (False, _NORMALISED),
    "rl_loss_coef": (1.0, "it would multiply the weights; change the learning rate"),
    "loss_agg_mode": ("seq-mean-token-mean", "our aggregation is in pg_variant, and KL and entropy are means over samples"),
}
FILTERS = {"top_p": (1.0,), "top_k": (-1, 0)}


def refusal(loss: str, record: AggregationRecord) -> str | None:
    return None if OFFER.gives(record) else "no rollout ids"


def stages(weight: Formula, record: AggregationRecord, *, per_token: bool) -> tuple[list[Stage], list[Stage]]:
    scale: Stage = ("ROLL", Formula(M=1, dp=1), "apply_loss_scale: multiplies by micro-batches and data-parallel ranks")
    return [("loss", weight, "the weight, from counts of the step")], [scale, TIMES_CP, AVERAGED[1]]


# The settings


def variables_of(worker: Any) -> dict[str, Given]:
    """Our settings in the worker's environment, by our names. They are text there."""
    given = {name: value for name, value in dict(worker.system_envs).items() if name.startswith(VARIABLES)}
    found = {}
    for name, text in given.items():
        ours = name.removeprefix(VARIABLES).lower()
        value = read_word(str(text))
        value = int(value) if ours == "max_logits_bytes" and isinstance(value, float) and value.is_integer() else value
        value = read_switch(text) if ours in ("fused_lm_head_loss", "one_sample_per_rollout") else value
        found[ours] = Given(f"{TRAIN}system_envs.{name}", value)
    return found


def trains_ours(worker: Any) -> bool:
    """Whether our worker trains our loss. It may be there for our log-probabilities alone."""
    return not has_log_probs(worker) or "." in str(worker.pg_variant)


def has_log_probs(worker: Any) -> bool:
    """Whether our log-probabilities take the place of ROLL's. Raises ConfigError for another value and another strategy."""
    value = dict(worker.system_envs).get(LOG_PROBS.rpartition(".")[2], THEIRS)
    if value not in (OURS, THEIRS):
        raise ConfigError(f"{LOG_PROBS}={value} is neither {OURS} nor {THEIRS}")
    strategy = value_at(worker, "strategy_args.strategy_name")
    if value == OURS and strategy != "megatron_train":
        raise ConfigError(f"{LOG_PROBS}={OURS} with strategy_name={strategy}: it acts in ROLL's Megatron strategy; remove it")
    idle = [] if value == THEIRS or "." in str(worker.pg_variant) else [*variables_of(worker).keys() - {"log_probs"}]
    if idle:
        raise ConfigError(f"{ENVIRONMENT}{idle[0].upper()} has no effect on ROLL's own loss: remove it, or choose one of ours")
    return bool(value == OURS)


def read(worker: Any, pipeline: Any) -> Launch:
    """ROLL's configs of the worker and of the pipeline. Raises one ConfigError with every problem."""
    if not hasattr(pipeline, "num_return_sequences_in_group"):
        raise ConfigError(
            f"{type(pipeline).__name__}: our worker is made for ROLL's RLVR pipeline; start examples/start_rlvr_pipeline.py"
        )
    own, at = Reader(worker, TRAIN), Reader(pipeline)
    loss, aggregation = OFFER.choose(own("pg_variant"))
    ours = variables_of(worker)
    ours.pop("log_probs", None)
    corrections = ["train_infer_correction.is_weight"] if at.switch("train_infer_correction.is_weight.enabled") else []
    filters = at("train_infer_correction.filters") or ()
    is_filtered = any(value_at(one, "enabled") is True for one in filters)
    readers = ["train_infer_correction.filters"] * is_filtered
    theirs = clips(at) | {
        "kl_coefficient": Given("use_kl_loss: true and kl_loss_coef", at.number("kl_loss_coef") if at.switch("use_kl_loss") else 0),
        "entropy_coefficient": Given("entropy_loss_coef", max(at.number("entropy_loss_coef", 0) or 0, 0)),
        DIVISOR: Given(f"{ENVIRONMENT}{DIVISOR.upper()}", None),
    }
    estimator = ours["kl_estimator"].value if "kl_estimator" in ours else DEFAULT_KL_ESTIMATOR
    terms = [f"KL {theirs['kl_coefficient'].value:g} ({estimator})"] * bool(theirs["kl_coefficient"].value)
    terms += [f"entropy {theirs['entropy_coefficient'].value:g}"] * bool(theirs["entropy_coefficient"].value)
    problems = [f"{ours[name].name} has no effect: set {theirs[name].name}" for name in ours.keys() & theirs.keys() - {DIVISOR}]
    problems += clip_problems(at)
    problems += [
        f"{name}={at(name)} beside {loss}.{aggregation}: {why}; set {name}: {only}"
        for name, (only, why) in ONLY.items()
        if at(name, only) != only
    ]
    problems += strategy_problems(own)
    record = get_loss_aggregation(aggregation)
    counts_prompts = record.needs is None or record.needs_prompts
    problems += step_problems(own, at, counts_prompts=counts_prompts, is_corrected=bool(corrections) or is_filtered)
    problems += head_problems(own, ours, has_log_probs(worker))
    return make_launch(
        f"pg_variant: {loss}.{aggregation} in ROLL",
        loss,
        aggregation,
        readers=[own, at],
        theirs=theirs,
        ours={name: one for name, one in ours.items() if name not in theirs or name == DIVISOR},
        offers=("kl_estimator", "fused_lm_head_loss", "max_logits_bytes"),
        corrections=corrections,
        compares=readers,
        sampler=sampler_of(at),
        terms=f"{' and '.join(terms)} x mean over samples" if terms else "no KL and no entropy in the loss",
        problems=problems,
    )


def clips(at: Reader) -> dict[str, Given]:
    """The clip of both sides, or of each, and ROLL's c of the dual clip."""
    if at.switch("use_pg_clip_range"):  # the switch chooses both sides, whatever their values
        sides = [Given(name, at.number(name, CLIP)) for name in ("pg_clip_low", "pg_clip_high")]
    else:
        sides = [at.given("pg_clip", CLIP)] * 2
    has_dual_clip = at.switch("dual_clip_loss")
    dual_clip = Given("dual_clip_loss", 1 + 2 * (at.number("pg_clip", CLIP) or 0) if has_dual_clip else None)
    return {"clip_ratio_low": sides[0], "clip_ratio_high": sides[1], "clip_ratio_c": dual_clip}


def clip_problems(at: Reader) -> Iterator[str]:
    """A clip that its switch turns off."""
    has_range, has_dual_clip = at.switch("use_pg_clip_range"), at.switch("dual_clip_loss")
    acting = ["pg_clip_low", "pg_clip_high"] if has_range else ["pg_clip"]
    acting += ["pg_clip"] * has_dual_clip
    for name in ("pg_clip", "pg_clip_low", "pg_clip_high"):
        if name not in acting and at.number(name, CLIP) != CLIP:
            switch = "dual_clip_loss: true" if has_range else "use_pg_clip_range: true"
            yield f"{name}={at(name)} has no effect without {switch}; set the switch, or remove it"


def strategy_problems(own: Reader) -> Iterator[str]:
    name, per_token = "strategy_args.strategy_name", "strategy_args.strategy_config.calculate_per_token_loss"
    if own(name) != "megatron_train":
        yield f"{TRAIN}{name}={own(name)}: our worker needs the logits of ROLL's Megatron strategy; set megatron_train"
        return
    if not own.switch("apply_loss_scale", True):
        yield f"{TRAIN}apply_loss_scale=false: Megatron and DDP would average over micro-batches and ranks; set it to true"
    if own.switch(per_token):
        yield f"{TRAIN}{per_token}=true: ROLL's factors are made for the mean over ranks; remove it"


def step_problems(own: Reader, at: Reader, *, counts_prompts: bool, is_corrected: bool) -> Iterator[str]:
    """A step has whole prompts where they are counted, and old log-probabilities where it is not the only one of its batch."""
    step, batch = samples_of_step(own), samples_of_batch(at)
    is_dynamic = own.switch("use_dynamic_batching_in_train")
    is_one_step = not is_dynamic and (step is None or step == batch)
    if not is_one_step and counts_prompts:
        how = "dynamic batching" if is_dynamic else f"a step of {step} of {batch} samples"
        yield (
            f"{how} beside {own('pg_variant')}: an optimiser step must have all samples of a batch, because a smaller "
            f"one cuts prompt groups; set {TRAIN}training_args.gradient_accumulation_steps so that the step has {batch} samples, "
            "and use_dynamic_batching_in_train: false"
        )
    if at.switch(RECOMPUTE):
        return
    if not (is_one_step and at.number("ppo_epochs", 1) == 1):
        yield (
            f"{RECOMPUTE}=false with several optimiser steps a batch: the batch has no old log-probabilities, and the ratio of the "
            f"later steps would be 1; set {RECOMPUTE}: true, and no force_disable_old_logprobs_recompute"
        )
    if is_corrected:
        yield f"{RECOMPUTE}=false beside train_infer_correction: ROLL drops tokens after it has counted them; set {RECOMPUTE}: true"


def samples_of_batch(at: Reader) -> int:
    return int((at.number("rollout_batch_size", 128) or 0) * (at.number("num_return_sequences_in_group", 1) or 0))


def samples_of_step(own: Reader) -> int | None:
    """Of an optimiser step; None where the devices of the worker are not known."""
    devices = own("device_mapping")
    if not isinstance(devices, list | tuple):
        return None
    kinds = ("tensor_model", "pipeline_model", "context")
    model = math.prod(int(own(f"strategy_args.strategy_config.{kind}_parallel_size") or 1) for kind in kinds)
    sizes = [own(f"training_args.{name}") or 1 for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    return int(math.prod(sizes) * (len(devices) // model))


def head_problems(own: Reader, ours: dict[str, Given], has_our_log_probs: bool) -> Iterator[str]:
    fused, size = ours.get("fused_lm_head_loss"), ours.get("max_logits_bytes")
    is_fused = fused is not None and fused.value is True
    if size is not None and not is_fused:
        yield f"{size.name}={size.value} has no effect without our head: set {HEAD}: 'true', or remove it"
    if size is not None and (not isinstance(size.value, int) or size.value <= 0):
        yield f"{size.name}={size.value!r} must be a whole number of bytes above 0"
    if is_fused and not has_our_log_probs:
        yield (f"{HEAD}=true: ROLL's function of log-probabilities needs logits, and none are made; set {LOG_PROBS}: {OURS}")
    if is_fused and own.switch("use_sequence_packing"):
        yield (
            f"{TRAIN}use_sequence_packing=true with {HEAD}=true: ROLL calls the loss once a sequence, and each call would keep a "
            f"gradient of the head's whole weight; set {TRAIN}use_sequence_packing: false, or remove {HEAD}"
        )


def sampler_of(at: Reader) -> Sampler | None:
    """None in a worker whose pipeline config has no actor_infer."""
    if at("actor_infer") is None:
        return None
    arguments, strategy = "actor_infer.generating_args", "actor_infer.strategy_args"
    engine, mode = str(at(f"{strategy}.strategy_name")), str(at(f"{strategy}.strategy_config.logprobs_mode", "raw_logprobs"))
    defaults = {"top_p": 0.7, "top_k": 50}  # of ROLL's GeneratingArguments
    kept = typed_if(FILTERS, lambda name: at(f"{arguments}.{name}", defaults[name]), f"{arguments}.")
    changed = typed_if({"repetition_penalty": (1.0,)}, lambda name: at(f"{arguments}.{name}"), f"{arguments}.")
    scores = {"vllm": MODES.get(mode, Scores.UNKNOWN), "sglang": Scores.WHOLE}.get(engine, Scores.UNKNOWN)
    return Sampler(kept=kept, changed=changed, scores=scores, engine=f"{engine} (logprobs_mode={mode})")


# The start


def compose(words: Sequence[str]) -> Any:
    """ROLL's pipeline config of a launch line, as examples/start_rlvr_pipeline.py makes it."""
    from dacite import from_dict
    from hydra import compose as composed
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf
    from roll.pipeline.rlvr.rlvr_config import RLVRConfig

    given = dict(zip((word.partition("=")[0] for word in words), [*words[1:], ""], strict=True))
    script = next((Path(word) for word in words if word.endswith("_pipeline.py")), Path())
    folder = (script.parent / given.get("--config_path", "config")).resolve()
    with initialize_config_dir(str(folder), version_base=None):
        tree = OmegaConf.to_container(composed(given.get("--config_name", "sppo_config")), resolve=True)
    return from_dict(data_class=RLVRConfig, data=tree)


def check(pipeline: Any) -> list[str]:
    """Raises one ConfigError with every problem."""
    worker = pipeline.actor_train
    if worker.worker_cls != WORKER:
        return [f"worker_cls={worker.worker_cls}: not ours, so nothing of megatron_rl is at work"]
    return [read(worker, pipeline).title if trains_ours(worker) else f"{LOG_PROBS}={OURS}, and ROLL's own loss"]
