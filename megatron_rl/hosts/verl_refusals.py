"""What verl refuses after its start, or in its first step, and what it makes of a batch that has no whole mini-batches.

Whoever's loss trains. tests/test_verl_refusals.py holds each against verl's own code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from megatron_rl.aggregation_record import Formula
from megatron_rl.hosts.dealing import Dealing
from megatron_rl.hosts.settings import ABSENT, NOT_ASKED, UNKNOWN, Settings
from megatron_rl.hosts.step_sizes import MODEL_KINDS, SizeNames, whole_number
from megatron_rl.hosts.verl_correction import IS_V1, ROLLOUT
from megatron_rl.hosts.verl_stock import (
    ACTOR,
    AGG_MODE,
    DEFAULT_AGG_MODE,
    LOSS_MODE,
    SAMPLE_MEAN_MODE,
    SIZE,
    has_own_mini_batch,
    of_critic,
    regularizers,
    stock,
    stock_of_critic,
)
from megatron_rl.validation.checks import Row

BATCH = "data.train_batch_size"
MINI_BATCH, CRITIC, DYNAMIC = f"{ACTOR}{SIZE}", f"critic.{SIZE}", f"{ACTOR}use_dynamic_bsz"
ROLLOUTS, TRAINER_MODE = f"{ROLLOUT}n", "trainer.v1.trainer_mode"
MODEL, MEGATRON = "actor_rollout_ref.model.", f"{ACTOR}megatron."
ULYSSES, CONTEXT = f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size", f"{MEGATRON}context_parallel_size"
DYNAMIC_CP = f"{MEGATRON}dynamic_context_parallel"
PER_TOKEN = f"{MEGATRON}override_transformer_config.calculate_per_token_loss"
CHUNKS, ENTROPY = f"{ACTOR}entropy_from_logits_with_chunking", f"{ACTOR}entropy_coeff"
# What places our head; the setting of verl that names modules to import in each process that makes a model, and ours.
FUSED_KERNELS = f"{MODEL}use_fused_kernels"
EXTERNAL_LIB, LOG_PROBS = f"{MODEL}external_lib", "megatron_rl.hosts.verl_log_probs"
# Names of models that are of no family for which Megatron-Bridge turns the per-token loss on.
ANOTHER_MODEL = re.compile(r"qwen-?(1\.5|2\.5|2|3)-(?!vl)|llama|deepseek|mistral|gemma|moonlight", re.IGNORECASE)
PREFIX_GROUPS, BALANCE = f"{ACTOR}use_prefix_grouper", "trainer.balance_batch"
PIPELINE, CHUNKS_OF_MODEL = f"{MEGATRON}pipeline_model_parallel_size", f"{MEGATRON}virtual_pipeline_model_parallel_size"


def dealing(value_of: Callable[[str], Any]) -> Dealing:
    """By an estimate of the work of a sample of so many tokens. Two of verl's switches deal in other ways."""
    if value_of(DYNAMIC_CP) is True or value_of(PREFIX_GROUPS) is True:
        return Dealing("verl deals them by length")
    is_chunked = (whole_number(value_of(CHUNKS_OF_MODEL)) or 1) > 1  # Megatron wants whole groups of micro-batches then
    return Dealing(
        "verl deals them by length",
        work=lambda length: 24576 * length + length**2,
        of_ranks=value_of(BALANCE) is not False,
        multiple=(whole_number(value_of(PIPELINE)) or 1) if is_chunked else 1,
    )


SIZES = SizeNames(
    micro_batch=f"{ACTOR}ppo_micro_batch_size_per_gpu",
    ranks=("trainer.nnodes", "trainer.n_gpus_per_node"),
    shared=(*(f"{MEGATRON}{kind}_parallel_size" for kind in MODEL_KINDS), ULYSSES),
    by_tokens={f"{ACTOR}use_dynamic_bsz": f"{ACTOR}ppo_max_token_len_per_gpu"},
    of_budget=(CONTEXT, ULYSSES),
    older={ULYSSES: f"{ACTOR}ulysses_sequence_parallel_size"},
    defaults={f"{ACTOR}ppo_max_token_len_per_gpu": 16384, "trainer.n_gpus_per_node": 8},
    dealing=dealing,
    of_dealing=(DYNAMIC_CP, PREFIX_GROUPS, BALANCE, PIPELINE, CHUNKS_OF_MODEL),
)
# Each engine's own sizes; those of verl's other engines are not read here.
SIZES_OF = {"dp": replace(SIZES, shared=(ULYSSES,)), "megatron": replace(SIZES, shared=SIZES.shared[:-1])}
# What these rows read, by verl's defaults, beside the door's own settings.
DEFAULTS = {
    BATCH: 1024,
    MINI_BATCH: 256,
    ROLLOUTS: 1,
    TRAINER_MODE: "sync",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    f"{MODEL}use_remove_padding": True,
    f"{MEGATRON}vanilla_mbridge": False,
    PER_TOKEN: False,
    FUSED_KERNELS: False,
    f"{ACTOR}use_dynamic_bsz": False,
    f"{ACTOR}calculate_entropy": False,
    CHUNKS: False,
    f"{ACTOR}entropy_from_logits_chunk_size": 2048,
}


def refusals(settings: Settings, *, is_ours: bool, cuts_groups: bool = False) -> Iterator[Row]:
    """A problem for each, and a note where the model decides, or where nothing is wrong and a step is not what its sizes say.

    cuts_groups: the mini-batches are refused for that, and have no other remedy."""
    engine = engine_of(settings)
    if not cuts_groups:
        yield from (row for row in mini_batches(settings, is_ours=is_ours) if row.is_wrong or not is_ours)
    if engine in SIZES_OF:
        yield from _ranks(settings, SIZES_OF[engine])
    if engine == "megatron":
        yield from _per_token(settings, is_ours=is_ours)
        yield from _chunks_of_entropy(settings)


def engine_of(settings: Settings) -> str:
    """dp, megatron or another name of model_engine; what no engine is called is its text."""
    strategy = settings.value_of(f"{ACTOR}strategy")
    name = str(settings["model_engine"] if strategy in (ABSENT, None) else strategy)
    return "dp" if name.startswith("fsdp") else name


def mini_batches(settings: Settings, *, is_ours: bool) -> Iterator[Row]:
    """Of the actor, and of a critic with another size. The v1 trainer fills a batch to whole mini-batches of both, and the old one
    raises. separate_async has one mini-batch at a time."""
    batch, mode, is_v1 = whole_number(settings[BATCH]), settings[TRAINER_MODE], settings[IS_V1]
    sizes = {MINI_BATCH: whole_number(settings[MINI_BATCH])}
    if has_own_mini_batch(settings):
        sizes[CRITIC] = whole_number(settings.value_of(CRITIC))
    known = {name: size for name, size in sizes.items() if size is not None}
    if batch is None or len(known) < len(sizes) or mode in (UNKNOWN, "separate_async") or is_v1 is UNKNOWN:
        if CRITIC in sizes:
            yield Row(
                "mini-batch", f"{CRITIC}={_shown(settings.value_of(CRITIC))}: which samples share one is not judged", is_note=True
            )
        return
    filled = -(-batch // (whole := math.lcm(*known.values()))) * whole
    refused = [row for name, size in known.items() for row in _refused(settings, batch, name, size)]
    yield from refused
    if refused:
        return
    found = regularizers(settings) if is_ours else stock(settings)
    terms = {name: weight for name, weight in (found.terms if found else {}).items() if name != "value" or CRITIC not in known}
    yield from _filled(settings, batch, MINI_BATCH, known[MINI_BATCH], filled, terms)
    if CRITIC in known:
        value = stock_of_critic(settings)
        yield from _filled(settings, batch, CRITIC, known[CRITIC], filled, {} if value is None else {"value": value})


def _refused(settings: Settings, batch: int, name: str, size: int) -> Iterator[Row]:
    """Of mini-batches that do not divide the batch. name: the setting of their size, of the actor or the critic."""
    if batch % size == 0:
        return
    is_dynamic, text = (
        settings[DYNAMIC] if name == MINI_BATCH else of_critic(settings, "use_dynamic_bsz"),
        _misfit(name, size, batch),
    )
    if batch < size and is_dynamic is False:
        yield Row("mini-batch", f"{text}verl refuses a batch below a mini-batch; set {name}={batch}", is_wrong=True)
    elif settings[IS_V1] is False:
        text += f"the old trainer raises at the first update, after a rollout{_to_fit(name, size, batch)}"
        yield Row("mini-batch", text, is_wrong=True)


def _misfit(name: str, size: int, batch: int) -> str:
    return f"{name}={size} does not divide {BATCH}={batch}: "


def _to_fit(name: str, size: int, batch: int) -> str:
    below, above = batch // size * size, -(-batch // size) * size
    return f"; set {name}={batch}" if batch < size else f"; set {BATCH}={below} or {above}"


def _filled(settings: Settings, batch: int, name: str, size: int, filled: int, terms: Mapping[str, Formula]) -> Iterator[Row]:
    """Of mini-batches that verl makes of a batch, which the v1 trainer fills to `filled` prompts."""
    last, number = batch % size, -(-batch // size)
    if filled == batch != size:
        whose = f" of {name}" if name == CRITIC else ""
        text = (
            f"{size} of {batch} prompts a step{whose}: verl deals samples to ranks by length, so which of them share a mini-batch "
        )
        yield Row("mini-batch", f"{text}depends on the data-parallel size", is_note=True)
    elif empty := filled // size - number:
        text = f"verl fills the {batch} prompts of {BATCH} to {filled}, whole mini-batches of actor and critic, and {empty} of the "
        text += f"{filled // size} of {name}={size} have padding alone; set {CRITIC}={settings[MINI_BATCH]}, the actor's, with a "
        yield Row("mini-batch", f"{text}{BATCH} of whole mini-batches", is_wrong=True)
    elif last:
        which = "the mini-batch" if number == 1 else f"the last of {number} mini-batches"
        text = f"{_misfit(name, size, batch)}verl fills the batch with padding rows, and {which} has the samples of about {last} "
        text += "prompts"
        if shrunk := [term for term, weight in terms.items() if "N" in weight.powers]:
            text += (
                f". verl's N counts the padding, so its {' and '.join(shrunk)} term{'s have' if len(shrunk) > 1 else ' has'} about "
            )
            yield Row("mini-batch", f"{text}{last}/{size} of the mean there{_to_fit(name, size, batch)}", is_wrong=True)
        else:
            text += f": an update of full size from fewer samples{_to_fit(name, size, batch)}"
            yield Row("mini-batch", text, is_note=True)


def _shown(value: object) -> str:
    return "<not known here>" if value is UNKNOWN else str(value)


def _ranks(settings: Settings, sizes: SizeNames) -> Iterator[Row]:
    """Of an engine whose sizes are known: ranks that its groups do not divide, and mini-batches that ranks do not."""
    if misfit := sizes.misfit(settings.__getitem__):
        yield Row("ranks", f"{misfit}: no engine starts", is_wrong=True)
        return
    data = sizes.read(settings.__getitem__, NOT_ASKED).data
    size, rollouts = (whole_number(settings[name]) for name in (MINI_BATCH, ROLLOUTS))
    if data is None or size is None or rollouts is None or size * rollouts % data.value == 0:
        return
    step = data.value // math.gcd(rollouts, data.value)
    text = f"{MINI_BATCH}={size} x {ROLLOUTS}={rollouts} = {size * rollouts} samples are no multiple of {data.value} data-parallel"
    text += f" ranks of {data.source}: verl raises at the first update, after a rollout; set {MINI_BATCH}={-(-size // step) * step}"
    yield Row("mini-batch", text, is_wrong=True)


def _per_token(settings: Settings, *, is_ours: bool) -> Iterator[Row]:
    """Under Megatron's per-token loss. Megatron-Bridge turns it on for two families of models, which the line does not say."""
    size, is_set = settings[CONTEXT], settings[PER_TOKEN] is True
    has_padding = settings[f"{MODEL}use_remove_padding"] is False
    if settings[DYNAMIC_CP] is True:
        if has_padding:
            text = f"{DYNAMIC_CP}=True needs {MODEL}use_remove_padding=True: verl's first step raises"
            yield Row("use_remove_padding", f"{text}; set it", is_wrong=True)
        return
    is_split = isinstance(size, int) and size > 1
    if not is_set and not (is_split and settings[f"{MEGATRON}vanilla_mbridge"] is False):
        return
    cause, where = f"{PER_TOKEN}=True", ""
    if not is_set and ANOTHER_MODEL.search(PurePath(str(settings.value_of(f"{MODEL}path"))).name):
        return
    if not is_set:
        cause = f"with {CONTEXT}={size} Megatron-Bridge turns calculate_per_token_loss on for Qwen3-VL and Qwen3.5"
        where = "there "
    if is_split:
        text = f"{cause}: {where}verl counts the tokens of a micro-batch by context-parallel ranks, rounded down"
        yield Row("context_parallel_size", f"{text}: off by at most {size} tokens", is_note=True)
    where = f"{cause}: {where}verl's first step raises"
    if settings[AGG_MODE] == SAMPLE_MEAN_MODE:
        loss = settings[LOSS_MODE]
        remedy = f"{AGG_MODE}={DEFAULT_AGG_MODE}"
        if not is_ours and loss not in ("gspo", "sapo"):  # these are means over samples whatever is set
            remedy += f" {LOSS_MODE}=megatron_rl.grpo.sample_mean"
        text = f"{where} with {AGG_MODE}={SAMPLE_MEAN_MODE}; set {remedy}"
        yield Row("loss_agg_mode", text, is_wrong=is_set, is_note=not is_set)
    if has_padding:
        text = f"{where} with {MODEL}use_remove_padding=False; set it to True"
        yield Row("use_remove_padding", text, is_wrong=is_set, is_note=not is_set)


def _chunks_of_entropy(settings: Settings) -> Iterator[Row]:
    """The function writes into its saved logits in the backward of each chunk."""
    entropy, names = settings[ENTROPY], str(settings.value_of(EXTERNAL_LIB))
    is_in_loss = settings[f"{ACTOR}calculate_entropy"] is True or entropy not in (0, None, UNKNOWN)
    if settings[CHUNKS] is not True or not is_in_loss or settings[FUSED_KERNELS] is not False or LOG_PROBS in names:
        return
    text = (
        f"{CHUNKS}=True: verl's function of Megatron has no gradient over several chunks, and the first micro-batch of more than "
    )
    text += f"{settings[f'{ACTOR}entropy_from_logits_chunk_size']} tokens on a rank raises; set it to False, or "
    yield Row("entropy", f"{text}{EXTERNAL_LIB}={LOG_PROBS}, whose function has one", is_wrong=True)
