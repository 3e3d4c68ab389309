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
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.arguments import read_switch
from megatron_rl.config import DEFAULT_KL_ESTIMATOR
from megatron_rl.errors import ConfigError
from megatron_rl.formula import Formula
from megatron_rl.hosts.choice import (
    DIVISOR,
    SWITCHES,
    Given,
    Launch,
    Offer,
    Reader,
    make_launch,
    read_word,
    typed_if,
    value_at,
)
from megatron_rl.hosts.contract import AVERAGED, TIMES_CP, Contract, Stage
from megatron_rl.hosts.sampler_rule import Sampler
from megatron_rl.weights import AggregationRecord, get_loss_aggregation

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
HEAD = f"{ENVIRONMENT}FUSED_LM_HEAD_LOSS"  # ours in the model of the worker
OFFER = Offer(title=TITLE, setting=f"{TRAIN}pg_variant", gives=lambda record: not record.needs_rows, has_logits=True)
CLIP = 0.2  # ROLL's default of its three clips
RECOMPUTE, PER_TOKEN = "enable_old_logprobs_recompute", "strategy_args.strategy_config.calculate_per_token_loss"
# What ROLL's own loss reads, the only value that ours accepts, and why.
_NORMALISED = "ROLL normalises these weights in each micro-batch, so they depend on its size"
ONLY: dict[str, tuple[Any, str]] = {
    "importance_sampling": ("token", "two losses in one launch; ours is gspo: set pg_variant: gspo.<aggregation>"),
    "difficulty_loss_weight": (False, _NORMALISED),
    "length_loss_weight": (False, _NORMALISED),
    "rl_loss_coef": (1.0, "it would multiply the weights; change the learning rate"),
    "loss_agg_mode": ("seq-mean-token-mean", "our aggregation is in pg_variant, and KL and entropy are means over samples"),
}


def stages(weight: Formula, record: AggregationRecord, *, per_token: bool) -> tuple[list[Stage], list[Stage]]:
    scale: Stage = ("ROLL", Formula(M=1, dp=1), "apply_loss_scale: multiplies by micro-batches and data-parallel ranks")
    return [("loss", weight, "the weight, from counts of the step")], [scale, TIMES_CP, AVERAGED[1]]


# The settings


def variables_of(worker: Any) -> dict[str, Given]:
    """Our settings in the worker's environment, by our names. They are text there."""
    given = {name: str(value) for name, value in dict(worker.system_envs).items() if name.startswith(VARIABLES)}
    found = {}
    for name, text in given.items():
        ours = name.removeprefix(VARIABLES).lower()
        found[ours] = Given(f"{TRAIN}system_envs.{name}", read_switch(text) if ours in SWITCHES else read_word(text))
    return found


def trains_ours(worker: Any) -> bool:
    """Whether our worker trains our loss. It may be there for our log-probabilities alone."""
    return "." in str(worker.pg_variant) or not has_log_probs(worker)


def has_log_probs(worker: Any) -> bool:
    """Whether our log-probabilities take the place of ROLL's. Raises ConfigError for another value and another strategy."""
    variables = variables_of(worker)
    value = variables.pop("log_probs", Given("", THEIRS)).value
    if value == THEIRS:
        return False
    if value != OURS:
        raise ConfigError(f"{LOG_PROBS}={value} is neither {OURS} nor {THEIRS}")
    strategy = value_at(worker, "strategy_args.strategy_name")
    if strategy != "megatron_train":
        raise ConfigError(f"{LOG_PROBS}={OURS} with strategy_name={strategy}: it acts in ROLL's Megatron strategy; remove it")
    if "." not in str(worker.pg_variant) and variables:
        raise ConfigError(f"{[*variables.values()][0].name} has no effect on ROLL's own loss: remove it, or choose one of ours")
    return True


def read(worker: Any, pipeline: Any) -> Launch:
    """ROLL's configs of the worker and of the pipeline. Raises one ConfigError with every problem."""
    if not hasattr(pipeline, "num_return_sequences_in_group"):
        raise ConfigError(f"{type(pipeline).__name__} is not of ROLL's RLVR pipeline; start examples/start_rlvr_pipeline.py")
    own, at = Reader(worker, TRAIN), Reader(pipeline)
    loss, aggregation = OFFER.choose(own("pg_variant"))
    ours = variables_of(worker)
    ours.pop("log_probs", None)
    corrections = ["train_infer_correction.is_weight"] if at.switch("train_infer_correction.is_weight.enabled") else []
    filters = at("train_infer_correction.filters") or ()
    compares = ["train_infer_correction.filters"] if any(value_at(one, "enabled") is True for one in filters) else []
    kl = at.number("kl_loss_coef", 0.0) if at.switch("use_kl_loss") else 0
    entropy = max(at.number("entropy_loss_coef", 0) or 0, 0)
    theirs = clips(at) | {
        "kl_coefficient": Given("use_kl_loss: true and kl_loss_coef", kl),
        "entropy_coefficient": Given("entropy_loss_coef", entropy),
        DIVISOR: Given(f"{ENVIRONMENT}{DIVISOR.upper()}", None),
    }
    estimator = ours["kl_estimator"].value if "kl_estimator" in ours else DEFAULT_KL_ESTIMATOR
    terms = [f"KL {kl:g} ({estimator})"] * bool(kl) + [f"entropy {entropy:g}"] * bool(entropy)
    problems = [
        *problems_of(own, at, get_loss_aggregation(aggregation), is_corrected=bool(corrections or compares)),
    ]
    if "fused_lm_head_loss" in ours and ours["fused_lm_head_loss"].value is True:
        problems += problems_of_head(own, has_log_probs(worker))
    return make_launch(
        f"pg_variant: {loss}.{aggregation} in ROLL",
        loss,
        aggregation,
        readers=[own, at],
        theirs=theirs,
        ours=ours,
        offers=("kl_estimator", "fused_lm_head_loss"),
        corrections=corrections,
        compares=compares,
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
    dual_clip = 1 + 2 * (at.number("pg_clip", CLIP) or 0) if at.switch("dual_clip_loss") else None
    return {"clip_ratio_low": sides[0], "clip_ratio_high": sides[1], "clip_ratio_c": Given("dual_clip_loss", dual_clip)}


def problems_of(own: Reader, at: Reader, record: AggregationRecord, *, is_corrected: bool) -> Iterator[str]:
    chosen, strategy = own("pg_variant"), own("strategy_args.strategy_name")
    for name, (only, why) in ONLY.items():
        if (value := at(name, only)) != only:
            yield f"{name}={value} beside {chosen}: {why}; set {name}: {only}"
    if strategy != "megatron_train":
        yield f"{TRAIN}strategy_args.strategy_name={strategy}: our worker needs logits; set megatron_train"
    if not own.switch("apply_loss_scale", True):
        yield f"{TRAIN}apply_loss_scale=false: Megatron and DDP would average over micro-batches and ranks; set it to true"
    if own.switch(PER_TOKEN):
        yield f"{TRAIN}{PER_TOKEN}=true: ROLL's factors are made for the mean over ranks; remove it"
    # A step has whole prompts where they are counted, and old log-probabilities where it is not the only one of its batch.
    batch = int((at.number("rollout_batch_size", 128) or 0) * (at.number("num_return_sequences_in_group", 1) or 0))
    step = samples_of_step(own)
    is_dynamic = own.switch("use_dynamic_batching_in_train")
    is_one_step = not is_dynamic and (step is None or step == batch)
    if not is_one_step and (record.needs is None or record.needs_prompts):
        how = "dynamic batching" if is_dynamic else f"a step of {step} of {batch} samples"
        remedy = f"set {TRAIN}training_args.gradient_accumulation_steps for {batch} samples a step, and no dynamic batching"
        yield f"{how} beside {chosen}: a step of a part of a batch cuts prompt groups; {remedy}"
    if at.switch(RECOMPUTE):
        return
    if not (is_one_step and at.number("ppo_epochs", 1) == 1):
        yield f"{RECOMPUTE}=false with several optimiser steps a batch: there are no old log-probabilities; set {RECOMPUTE}: true"
    if is_corrected:
        yield f"{RECOMPUTE}=false beside train_infer_correction: ROLL drops tokens after it has counted them; set {RECOMPUTE}: true"


def samples_of_step(own: Reader) -> int | None:
    """Of an optimiser step; None where the devices of the worker are not known."""
    devices = own("device_mapping")
    if not isinstance(devices, list | tuple):
        return None
    kinds = ("tensor_model", "pipeline_model", "context")
    model = math.prod(int(own(f"strategy_args.strategy_config.{kind}_parallel_size") or 1) for kind in kinds)
    sizes = [own(f"training_args.{name}") or 1 for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    return int(math.prod(sizes) * (len(devices) // model))


def problems_of_head(own: Reader, has_our_log_probs: bool) -> Iterator[str]:
    if not has_our_log_probs:
        yield f"{HEAD}=true: ROLL's function of log-probabilities needs logits, and none are made; set {LOG_PROBS}: {OURS}"
    if own.switch("use_sequence_packing"):
        why = "ROLL calls the loss once a sequence, and each call would keep a gradient of the head's whole weight"
        yield f"{TRAIN}use_sequence_packing=true with {HEAD}=true: {why}; set {TRAIN}use_sequence_packing: false"


def sampler_of(at: Reader) -> Sampler | None:
    """None in a worker whose pipeline config has no actor_infer."""
    if at("actor_infer") is None:
        return None
    strategy, arguments = "actor_infer.strategy_args", "actor_infer.generating_args"
    defaults = {f"{arguments}.top_p": 0.7, f"{arguments}.top_k": 50}  # of ROLL's GeneratingArguments
    return Sampler(
        engine=str(at(f"{strategy}.strategy_name")),
        mode=str(at(f"{strategy}.strategy_config.logprobs_mode", "raw_logprobs")),
        kept=typed_if(dict(zip(defaults, ((1.0,), (-1, 0)), strict=True)), lambda name: at(name, defaults[name])),
        changed=typed_if({f"{arguments}.repetition_penalty": (1.0,)}, at),
    )


# The start


def compose(words: Sequence[str]) -> Any:
    """ROLL's pipeline config of a launch line, as examples/start_rlvr_pipeline.py makes it."""
    from dacite import from_dict
    from hydra import compose as composed
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf
    from roll.pipeline.rlvr.rlvr_config import RLVRConfig

    parser = ArgumentParser()
    parser.add_argument("--config_path", default="config")
    parser.add_argument("--config_name", default="sppo_config")
    args, _ = parser.parse_known_args(words)
    script = next((Path(word) for word in words if word.endswith("_pipeline.py")), Path())
    folder = (script.parent / args.config_path).resolve()
    with initialize_config_dir(str(folder), version_base=None):
        tree = OmegaConf.to_container(composed(args.config_name), resolve=True)
    return from_dict(data_class=RLVRConfig, data=tree)


def check(pipeline: Any) -> list[str]:
    """Raises one ConfigError with every problem."""
    worker = pipeline.actor_train
    if worker.worker_cls != WORKER:
        return [f"worker_cls={worker.worker_cls}: not ours, so nothing of megatron_rl is at work"]
    return [read(worker, pipeline).title if trains_ours(worker) else f"{LOG_PROBS}={OURS}, and ROLL's own loss"]
