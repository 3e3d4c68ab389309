"""prime-rl: our losses as its custom loss of one sample; the step is counted where its trainer gets the batch.

    uv run rl @ rl.toml --trainer.loss.type custom --trainer.loss.import-path megatron_rl.hosts.prime_rl.<aggregation> \\
        --trainer.loss.kwargs.policy-loss <loss>

What prime-rl does with the number that a loss returns for a sample; D data-parallel, c context-parallel ranks:

    trainer: adds samples, / (c T); the gather of log-probabilities adds c equal gradients; FSDP: mean over D c ranks, x D c

So a loss returns T w_i S_i. Under token_mean that is S_i; for other weights one all-reduce a step counts N and T. The trainer knows
no prompts. Old log-probabilities are the sampler's. Beside a correction they are the trainer's own: the correction has the ratio.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.aggregation_record import TOKEN_MEAN, Formula
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.closed_words import Words
from megatron_rl.hosts.door import (
    ONE_SAMPLE,
    Choice,
    Door,
    Found,
    Kind,
    Line,
    Own,
    Prompts,
    ReadFile,
    Rollouts,
    Setting,
    names,
    plug,
)
from megatron_rl.hosts.programs import SUPERVISED, Programs
from megatron_rl.hosts.pydantic_line import SIGN, read_pydantic_line
from megatron_rl.hosts.sampling import NO_ADDEND, NO_FACTOR, OFF, Filter, Replay, Sampler
from megatron_rl.hosts.settings import ABSENT, UNKNOWN, Settings, flat, value_at
from megatron_rl.hosts.stock import Stock, unjudged
from megatron_rl.validation.checks import Row, check

LOSS, KWARGS = "trainer.loss.", "trainer.loss.kwargs."
TYPE, IMPORT_PATH = f"{LOSS}type", f"{LOSS}import_path"
ALGORITHM, SAMPLING = "orchestrator.algo.type", "orchestrator.train.sampling."
EXTRA = f"{SAMPLING}extra_body."
# With these names its trainer scores among the sampler's sets by itself; releases that do not refuse the names.
REPLAYED = {f"{SAMPLING}top_p": Filter(1.0, (1.0,)), f"{SAMPLING}top_k": Filter(-1, (-1, 0, None, "None", "null"))}
LOSSES, BATCHES = "prime_rl.trainer.rl.loss", "prime_rl.trainer.rl.data"
SFT = "sft"
PROGRAMS, MODULES = ("rl", "trainer", SFT), ("prime_rl.entrypoints.rl", "prime_rl.entrypoints.trainer", "prime_rl.trainer.rl.train")
# Algorithms of the orchestrator whose tokens go to another loss of prime-rl's.
OTHER_LOSSES = {"sft": "ce", "opd": "ref_kl", "opsd": "ref_kl"}
AGGREGATIONS = ("token_mean", "sample_mean", "constant")
NO_PROMPTS = "prompt groups end in prime-rl's orchestrator, and its trainer gets samples alone"


@check(subject=TYPE)
def loss_is_custom(found: Found) -> Iterator[str]:
    if found.settings[TYPE] != "custom":
        yield f"{found.settings[TYPE]} takes no import_path: set {TYPE}=custom"


@check(subject=ALGORITHM)
def tokens_reach_our_loss(found: Found) -> Iterator[str]:
    kind = found.settings[ALGORITHM]
    if str(kind) in OTHER_LOSSES:
        yield f"the tokens of {kind} go to prime-rl's {OTHER_LOSSES[kind]} loss, and ours gets none: choose grpo, or remove ours"


@check(is_warning=True, subject="counts")
def zero_advantages_leave_the_step(found: Found) -> Iterator[Row]:
    name = "orchestrator.train.filter_zero_advantages"
    if found.settings[name]:
        yield Row("counts", f"samples whose advantage is 0 leave the step: N and T count the others; {name}=false keeps them")


def read_line(words: Sequence[str], read_file: ReadFile) -> Line:
    """What stands below trainer. in `rl` stands alone in `trainer`."""
    at, is_trainer = _program(words)
    if at and Path(words[at - 1]).name == SFT:
        return Line(None, [unjudged(f"{words[at - 1]} {SUPERVISED}")])
    rows = [
        Row(word.partition("=")[0], "prime-rl takes no = here: type the value behind a space", is_wrong=True)
        for word in words[at:]
        if word.startswith(("--loss." if is_trainer else "--trainer.loss.",)) and "=" in word
    ]
    try:
        tree, unknown = read_pydantic_line(words[at:], read_file)
    except ConfigError as error:
        return Line(None, [*rows, Row("settings", str(error), is_wrong=True)])
    rows += [Row("settings", f"{file} is not known here", is_note=True) for file in unknown]
    given = flat({"trainer": tree} if is_trainer else tree)
    if given.get(KWARGS[:-1]) is UNKNOWN:
        given[f"{KWARGS}policy_loss"] = UNKNOWN
    sources = value_at(tree, "orchestrator.train.source")
    if isinstance(sources, list) and sources:
        given |= _of_sources(sources, given.get(ALGORITHM, "grpo"))
    return Line(Settings.of_names(given, DOOR.all_defaults, typed=given, knows_defaults=not unknown), rows)


def _of_sources(sources: Sequence[Any], algorithm: Any) -> dict[str, Any]:
    """The algorithm of a source that has our loss, if there is one, and each filter that is on in some source."""
    kinds = [value_at(source, "algo.type") for source in sources]
    kinds = [algorithm if kind is ABSENT else kind for kind in kinds]
    found = {ALGORITHM: next((kind for kind in kinds if str(kind) not in OTHER_LOSSES), kinds[0])}
    for name, one in DOOR.sampler.filters.items():
        values = [value_at(source, name.removeprefix("orchestrator.train.")) for source in sources]
        if on := [value for value in values if value is not ABSENT and value not in one.off]:
            found[name] = on[0]
    return found


def is_launch(words: Sequence[str]) -> bool:
    """The program and a file behind it, or one of its modules."""
    is_started = _program(words)[0] > 0 and any(word == SIGN or word.startswith(f"--{LOSS}") for word in words)
    return is_started or any(word in MODULES or __name__ in word for word in words)


def stock(settings: Settings) -> Stock | None:
    """Each part of prime-rl's loss is a mean over its own tokens of the step."""
    if settings[TYPE] not in ("default", "ipo"):
        return None
    kind = settings[ALGORITHM]
    if str(kind) not in OTHER_LOSSES:
        return Stock(TOKEN_MEAN)
    return Stock(TOKEN_MEAN, remarks=(f"{ALGORITHM}={kind}: T counts the tokens of its {OTHER_LOSSES[str(kind)]} loss",))


def _program(words: Sequence[str]) -> tuple[int, bool]:
    """(the place behind the program, whether it is the trainer alone); place 0: there is none."""
    for at, word in enumerate(words):
        if word in MODULES or Path(word).name in PROGRAMS:
            return at + 1, word not in MODULES[:1] and Path(word).name != PROGRAMS[0]
    return 0, False


def write(config: PolicyLossConfig, given: dict[str, Any]) -> dict[str, Any]:
    return {TYPE: "custom", **given}


DOOR = Door(
    name="prime_rl",
    title="prime-rl",
    probed="PrimeIntellect-ai/prime-rl 559b44772",
    settings=(
        Setting(TYPE, default="default"),
        Setting(f"{KWARGS}policy_loss"),
        Setting(IMPORT_PATH),
        Setting(KWARGS[:-1], Kind.GROUP),
        Setting("orchestrator.train.filter_zero_advantages", Kind.SWITCH, default=True),
        *names(
            LOSS, Kind.NUMBER, dict.fromkeys(("dppo_mask_low", "dppo_mask_high"), f"choose dppo_tv, and set {KWARGS}divergence_low")
        ),
        *names(LOSS, Kind.NUMBER, dict.fromkeys(("adv_tau", "kl_tau", "ipo_threshold"), "remove it")),
    ),
    sections=(LOSS,),
    choice=Choice(
        setting=f"{KWARGS}policy_loss",
        aggregation=IMPORT_PATH,
        names={f"{__name__}.{name}": name for name in AGGREGATIONS},
        why_not={f"{__name__}.prompt_mean": f"{NO_PROMPTS}; SkyRL and verl, for two, have it"},
        remedy=f"{TYPE}=custom, {IMPORT_PATH}={__name__}.token_mean and {KWARGS}policy_loss=<loss> choose one",
    ),
    own=Own(prefix=KWARGS, clips=True, others=(ONE_SAMPLE,)),
    is_ours=lambda settings: str(settings[IMPORT_PATH]).startswith("megatron_rl."),
    defaults={ALGORITHM: "grpo"},
    readers=lambda settings: [f"{IMPORT_PATH}, whose ratio is to the sampler"],
    rollouts=lambda settings: Rollouts(several="a trace of several branches"),
    sampler=Sampler(
        filters={
            **REPLAYED,
            f"{EXTRA}top_p": Filter(1.0, (1.0,)),
            f"{EXTRA}top_k": Filter(-1, (-1, 0)),
            f"{EXTRA}min_p": Filter(0.0, (0.0,)),
        },
        engines={"vLLM": None},
        modes=("inference.vllm.logprobs_mode",),
        default_mode="processed_logprobs",
        replay=Replay(by=REPLAYED, told=f"{SAMPLING}top_p and top_k in the place of extra_body's"),
        reshaped={
            f"{EXTRA}repetition_penalty": NO_FACTOR,
            **dict.fromkeys((f"{EXTRA}presence_penalty", f"{EXTRA}frequency_penalty"), NO_ADDEND),
            f"{EXTRA}logit_bias": OFF,
        },
        unsettled={"inference.vllm.speculative_config": OFF},
    ),
    checks=(loss_is_custom, tokens_reach_our_loss, zero_advantages_leave_the_step),
    stock=stock,
    prompts=Prompts.UNKNOWN,
    returns=Formula(T=1),
    step=(
        ("prime-rl", Formula(T=-1, cp=-1), "divides by the tokens of the step, which each context-parallel rank has counted"),
        ("gather", Formula(cp=1), "each cp rank has the whole loss, and the gather of log-probabilities adds their gradients"),
        ("FSDP", Formula(dp=-1, cp=-1), "averages over dp x cp ranks"),
        ("prime-rl", Formula(dp=1, cp=1), "scale_gradients_: undoes this mean"),
    ),
    why_not_per_token="its trainer is no Megatron, and divides by the tokens of the step itself",
    words={TYPE: Words(names=("default", "ipo", "custom"))},
    starts=PROGRAMS[0],
    recognises=is_launch,
    programs=Programs(names={r"prime_rl\.(entrypoints\.sft|trainer\.sft\.train)": SUPERVISED}),
    read_line=read_line,
    write=write,
    line_of=lambda name, value: f"--{name.replace('_', '-')} {value}",
    honours=(ONE_SAMPLE,),
    decides="entropy, temperature and KL",
    contract={
        f"{LOSSES}:LossInputs": (
            *("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_mask", "loss_weights"),
        ),
        f"{LOSSES}:LossOutputs": ("loss", "metrics"),
        f"{BATCHES}:DataLoader.get_batch": ("self",),
        f"{BATCHES}:FakeDataLoader.get_batch": ("self",),
    },
)


def __getattr__(name: str) -> Any:
    """prime-rl imports a loss by the name of its aggregation. Each import makes one: two trainers share nothing."""
    if name in AGGREGATIONS:
        return plug("prime_rl_loss").PrimeLoss(name)
    why = f": {NO_PROMPTS}" if name == "prompt_mean" else ""
    raise AttributeError(f"{__name__} has {', '.join(AGGREGATIONS)}, and no {name}{why}")
