"""What a trainer's own loss weighs a token, of a launch that chooses none of ours: for doctor.

A weight is a product of counts, as the weights of our aggregations are. Counts of the step are the same on every layout. Counts of
one micro-batch, T_b, T_k, N_b and L_b, change with its size, with data parallelism, packing and dynamic batches: such a term is a
mean of the means of micro-batches. tests/test_stock.py holds each row against the trainer's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from megatron_rl.aggregation_record import Formula
from megatron_rl.config import PolicyLossConfig
from megatron_rl.hosts.settings import UNKNOWN, Settings, StepSizes
from megatron_rl.loss_hub import get_loss_aggregation, get_policy_loss, loss_aggregation_names, policy_loss_names
from megatron_rl.validation.checks import Row

# Counts of one micro-batch, by their letters.
LOCAL = {
    "T_b": "the unmasked tokens of the micro-batch",
    "T_k": "the unmasked tokens of the k-th micro-batches of all ranks",
    "N_b": "the samples of the micro-batch",
    "L_b": "the padded response length of the micro-batch",
}
# Counts of what is generated at once, which may be several steps or a part of one. They are the same on every layout.
GENERATED = {"T_gen": "the unmasked tokens of a generation", "M_gen": "its micro-batches a rank"}
# Counts that no aggregation of ours has.
OTHERS = {"N+": "the samples with an unmasked token", "T'": "the tokens, and one for each fully masked sample", **GENERATED}
SAMPLE_MEAN = Formula(N=-1, m_i=-1)
OF_PRESENT_SAMPLES = Formula({"N+": -1, "m_i": -1})
OF_COUNTED_TOKENS = Formula({"T'": -1})
# Means of the means of micro-batches: over their tokens, and over their samples.
MEAN_OF_TOKEN_MEANS = Formula(M=-1, dp=-1, T_b=-1)
MEAN_OVER_RANKS = Formula(M=-1, T_k=-1)  # each mean is over the ranks too
MEAN_OF_SAMPLE_MEANS = Formula(M=-1, dp=-1, N_b=-1, m_i=-1)
# The sums of ranks, averaged over them, where the count of tokens is dropped.
MEAN_OF_RANK_SUMS = Formula(dp=-1)
OURS = "megatron_rl"
TERMS = ("policy", "KL", "entropy", "distillation", "value")
# verl's and SkyRL's losses that select tokens.
SELECTING = ("clip_cov", "kl_cov")
MEANS_ARE_ADDED = "{} adds the means of micro-batches, so the gradient grows with their number"
MTP_IS_NOT_JUDGED = "{} adds the loss of multi-token prediction, which is not judged"
OF_A_MICRO_BATCH = "{} selects tokens of each micro-batch, where the paper selects them of the step"
# A count of micro-batches -> the count of the step that a mean over all of it has, with the numbers that divide a mean of means.
WHOLE = {"T_b": ("T", "M", "dp"), "T_k": ("T", "M"), "N_b": ("N", "M", "dp")}


class Term(NamedTuple):
    """A term of the trainer's own beside a loss of ours: its coefficient and estimate, and what it weighs a token."""

    words: str
    weight: Formula


@dataclass(frozen=True, slots=True)
class Stock:
    """The weight of a token in each term of a trainer's own loss; None: the term is off, or its weight is not known here."""

    policy: Formula | None
    kl: Formula | None = None
    entropy: Formula | None = None
    exact: str | None = None
    """The trainer's own setting of the policy term that does not depend on the layout, as it is typed."""
    remarks: tuple[str, ...] = ()
    """What else of the loss is to be known, or is not judged."""
    varies: tuple[str, ...] = ()
    """What else of the loss depends on the layout, and so makes the step depend on it."""
    distillation: Formula | None = None
    value: Formula | None = None
    """Of a critic: the squares are halved in some trainers, which changes no weight against another."""
    known: Mapping[str, float] = field(default_factory=dict)
    """Counts that the line says, by their letters: L, and M_gen beside M. Without L a step is shown with 1."""
    coefficients: Mapping[str, float] = field(default_factory=dict)
    """Of KL and entropy, as they are typed, in a loss of ours whose policy term is not as strong as under sample_mean."""
    strength: Formula = field(default_factory=Formula)
    """That of the policy term against sample_mean's: m/L, m the mean tokens of a sample."""
    sizes: StepSizes = StepSizes()
    shuffles: str = ""
    """Where the trainer shuffles the samples of a rank before it cuts them into micro-batches: what is said of that."""
    ours: str | None = "grpo"
    """The loss of ours that is the trainer's own, but for the weights; None: there is none."""
    without: str = ""
    """The trainer's setting that ours takes the place of, and that is refused beside it."""

    has_sample_ratio: bool = False
    """The policy term has one ratio a sample, as GSPO's."""
    dropped: str = ""
    """What drops the step's tokens, and leaves MEAN_OF_RANK_SUMS."""

    @classmethod
    def of_ours(cls, config: PolicyLossConfig, terms: Mapping[str, Term] = MappingProxyType({})) -> Stock:
        """What a loss of ours weighs, for the same table. terms: what the trainer adds to it."""
        kl, entropy = (SAMPLE_MEAN if one else None for one in (config.kl_coefficient, config.entropy_coefficient))
        kl, entropy = (terms[name].weight if name in terms else own for name, own in (("KL", kl), ("entropy", entropy)))
        record, divisor = get_loss_aggregation(config.loss_aggregation), config.loss_aggregation_divisor
        known, strength = {} if divisor is None else {"L": divisor}, record.mean_strength or Formula()
        of_samples = has_sample_ratio(config.policy_loss)
        return cls(record.formula, kl, entropy, known=known, strength=strength, has_sample_ratio=of_samples)

    def in_words(self, weight: Formula) -> str:
        """The formula, and with the counts that are known: 1/(L N) = 1/(512 N)."""
        numbers = {name: f"{count:g}" for name, count in self.known.items() if name == "L" or is_of_generation(weight)}
        return " = ".join(dict.fromkeys([str(weight), weight.with_names(numbers)]))

    @property
    def terms(self) -> dict[str, Formula]:
        named = zip(TERMS, (self.policy, self.kl, self.entropy, self.distillation, self.value), strict=True)
        return {name: weight for name, weight in named if weight is not None}


def has_sample_ratio(loss: object) -> bool:
    """Of a loss of ours, or of a trainer's by the same name."""
    return loss in policy_loss_names() and get_policy_loss(str(loss)).level == "sequence"


JudgeStep = Callable[[Stock], Iterable[Row]]


def rows_of_terms(terms: Mapping[str, Term], title: str, ours: Stock) -> Iterator[Row]:
    """Of the trainer's terms beside our loss, and how strong they are beside it where one count of tokens says so."""
    for name, term in terms.items():
        local = ", so it changes with what shares a micro-batch" if local_letters(term.weight) else ""
        factor = Formula() if ours.policy is None else (term.weight.renamed({"N+": "N"}) / ours.policy).of_mean_tokens()
        beside = "" if ours.policy is None or factor.powers else ", as in the policy term"
        if factor.powers and factor.powers.keys() <= {"L", "m", "m_i"}:
            beside = f", {ours.in_words(factor)} times a token of the policy term (m: mean tokens of a sample)"
        yield Row(name, f"{term.words}, {title}'s own: a token weighs {ours.in_words(term.weight)}{local}{beside}", is_note=True)


def local_letters(weight: Formula) -> list[str]:
    """What it changes with of the layout: counts of a micro-batch, or the number of ranks alone."""
    return ["dp"] if weight == MEAN_OF_RANK_SUMS else [letter for letter in LOCAL if letter in weight.powers]


def is_of_generation(weight: Formula) -> bool:
    return "T_gen" in weight.powers


def times_of_generation(weight: Formula, known: Mapping[str, float]) -> float | None:
    """The weight against that of the step's own tokens, where a step has its share of the generation's; None: M_gen is unknown."""
    if "M_gen" not in known:
        return None
    power = weight.powers["T_gen"]  # T_gen is T M_gen / M
    return Formula(M_gen=weight.powers.get("M_gen", 0) + power, M=weight.powers.get("M", 0) - power).evaluate(known)


def of_the_step(weight: Formula) -> Formula:
    """The weight that the mean over the whole step has, in the place of the mean over micro-batches or over a generation."""
    found = OF_COUNTED_TOKENS if weight == MEAN_OF_RANK_SUMS else weight
    if is_of_generation(weight):
        return Formula(T=weight.powers["T_gen"]) * weight.without("T_gen", "M_gen", "M")
    for letter in local_letters(weight):
        if letter in WHOLE:
            power = weight.powers[letter]
            count, *numbers = WHOLE[letter]
            found *= Formula({letter: -power, count: power} | dict.fromkeys(numbers, -power))
    return found


def aggregation_of(weight: Formula) -> str | None:
    """Our aggregation of that weight."""
    of_step = of_the_step(weight)
    records = [get_loss_aggregation(name) for name in loss_aggregation_names() if "." not in name]
    named = {record.formula: record.name for record in records if not record.needs_rows}
    of_step = of_step.renamed({"N+": "N", "T'": "T"})
    return named.get(of_step) or ("constant" if of_step.powers.keys() <= {"N", "L", "L_b"} and "N" in of_step.powers else None)


def rows_of(stock: Stock, title: str, exact: Callable[[str], str] | None, own_terms: Collection[str] = ()) -> Iterator[Row]:
    """What doctor says of it. exact: an aggregation of ours -> the line that trains it; None: nothing of ours trains there.
    own_terms: those that no setting of the trainer makes exact, and that our loss has."""
    said: dict[Formula, str] = {}
    of_policy = None if stock.policy is None or exact is None else aggregation_of(stock.policy)
    with_ours = "" if of_policy is None or exact is None else f"; exact: {exact(of_policy)}, whose {{0}} is a mean over the samples"
    for name, weight in stock.terms.items():
        of_ours = with_ours.format(name) if name in own_terms and local_letters(weight) else ""
        if weight in said:
            is_note = bool(local_letters(weight)) or is_of_generation(weight)
            yield Row(name, f"{title}'s own: {weight} too, as the {said[weight]} term{of_ours}", is_note=is_note)
            continue
        said[weight] = name
        letters, ours = local_letters(weight), aggregation_of(weight)
        known = {**LOCAL, **OTHERS}
        where = "".join(f", {letter} is {known[letter]}" for letter in known if letter in weight.powers)
        called = f"; {ours} here" if ours else ""
        shown = stock.in_words(weight)
        if is_of_generation(weight):
            words = "" if stock.exact is None else f"; exact: {stock.exact}{_kept_strength(stock, stock.exact, own_terms)}"
            same = "" if stock.varies else "the same on every layout, but "
            text = f"{same}not the step's token mean: {_of_generations(weight, stock.known)}{words}"
            text = f"{title}'s own: a token weighs {shown}{where}: {text}"
            yield Row(name, text, is_note=True)
            continue
        if not letters:
            same = "" if stock.varies else "; the same on every layout"
            yield Row(name, f"{title}'s own: a token weighs {shown}{where}{called}{same}")
            continue
        remedy = None
        if len(said) == 1:
            remedy = stock.exact or (exact(ours) if exact is not None and ours is not None else None)
        words = of_ours if remedy is None else f"; exact: {remedy}{_kept_strength(stock, remedy, own_terms)}"
        yield Row(name, f"{title}'s own: a token weighs {shown}{where}: {_changes(letters, stock.dropped)}{words}", is_note=True)
    for text in (*stock.varies, *stock.remarks):
        yield Row("stock loss", text, is_note=True)


def _kept_strength(stock: Stock, remedy: str, own_terms: Collection[str]) -> str:
    """What keeps KL and entropy as strong beside the policy term, over the step, where `remedy` has a loss of ours that weighs the
    policy term as the trainer does, and makes these terms itself: a token of them weighs 1/(N m_i)."""
    terms = {name: weight for name, weight in (("KL", stock.kl), ("entropy", stock.entropy)) if weight is not None}
    said = []
    for name, weight in terms.items() if own_terms and f"{OURS}." in remedy else ():
        factor = (of_the_step(weight).renamed({"N+": "N", "T'": "T"}) / SAMPLE_MEAN).of_mean_tokens()
        power = factor.powers.get("m_i", 0)
        factor *= Formula(m_i=-power, m=power)
        if not factor.powers:
            said.append(f"keep the coefficient of {name}")
        elif factor.powers.keys() <= {"m", "L"}:
            said.append(f"multiply the coefficient of {name} by {stock.in_words(factor)}, m the mean tokens of a sample")
    return f"; with ours, each sample counts the same in {' and '.join(terms)}: {', '.join(said)}" if said else ""


def _of_generations(weight: Formula, known: Mapping[str, float]) -> str:
    times = times_of_generation(weight, known)
    if times is None:
        return "M_gen is not known here"
    steps = known["M_gen"] / known["M"]
    of_steps = f"{steps:.3g} steps" if steps > 1 else f"1/{1 / steps:.3g} of a step"
    if times != 1:
        return f"a generation is {of_steps}, so the gradient is about {times:.3g} times its own"
    if steps > 1:
        return f"that of {of_steps} together"
    return f"a mean of token means, as a generation is {of_steps}"


def _changes(letters: list[str], dropped: str) -> str:
    if dropped:
        return f"{dropped}, so the gradient is T'/dp times too large, and changes with dp, the data-parallel ranks"
    if letters == ["L_b"]:
        return "it changes with what shares a micro-batch"
    unit = "samples" if letters == ["N_b"] else "tokens"
    return (
        "a mean of the means of micro-batches. It changes with micro-batch size, data parallelism, packing and dynamic batches; a "
        f"token weighs twice as much in a micro-batch of half the {unit}"
    )


# The subject of the row that doctor's last line is made of.
VERDICT = "verdict"


def judge(
    stock: Stock | str | None,
    title: str,
    exact: Callable[[str], str] | None = None,
    of_step: JudgeStep | None = None,
    *,
    own_terms: Collection[str] = (),
    is_partial: bool = False,
) -> Iterator[Row]:
    """The rows of each term, of a recorded step where there is one, and the verdict. stock: text says why nothing is judged;
    None: the weights are not known here. own_terms: see rows_of. is_partial: rows of the line say what is not judged."""
    if not isinstance(stock, Stock):
        yield unjudged(stock or f"{title}'s own loss, and what it weighs is not known here")
        return
    yield from rows_of(stock, title, exact, own_terms)
    yield from () if of_step is None else of_step(stock)
    yield Row(VERDICT, verdict(stock, title, has_notes=is_partial or bool(stock.varies or stock.remarks)), is_note=True)


def unjudged(why: str) -> Row:
    return Row(VERDICT, f"{why}: nothing was judged", is_note=True)


def verdict(stock: Stock, title: str, *, has_notes: bool) -> str:
    said, notes = [], "; see the notes" if has_notes else ""
    if local := [name for name, weight in stock.terms.items() if local_letters(weight)]:
        why = f"the weight of a token in its {_listed(local)} depends on the layout"
        why = f"{stock.dropped}; a token weighs {next(iter(stock.terms.values()))}" if stock.dropped else why
        said.append(f"NOT exact: {why}")
    elif stock.varies:
        said.append("NOT exact: the step depends on the layout")
    if generated := {name: weight for name, weight in stock.terms.items() if is_of_generation(weight)}:
        times = times_of_generation(next(iter(generated.values())), stock.known)
        far = "" if times in (None, 1) else f", about {times:.3g} times its mean"
        verb = "divide" if len(generated) > 1 else "divides"
        same = "" if local or stock.varies else "; the same on every layout"
        said.append(f"its {_listed([*generated])} {verb} by the tokens of a generation and not of the step{far}{same}")
    as_judged = ", as far as they were judged" if has_notes else ""
    text = ", and ".join(said) or f"the weights of its tokens do not depend on the layout{as_judged}"
    return f"{title}'s own loss: {text}{notes}"


def _listed(terms: list[str]) -> str:
    listed = " and ".join(filter(None, (", ".join(terms[:-1]), terms[-1])))
    return f"{listed} term{'s' * (len(terms) > 1)}"


def exact_setting(setting: str, modes: Mapping[str, Formula], weight: Formula) -> str | None:
    """The value of the setting whose weight is the mean over the whole step, where `weight` depends on micro-batches."""
    wanted = of_the_step(weight)
    return next((setting.format(mode) for mode, one in modes.items() if one == wanted), None) if local_letters(weight) else None


def is_on(settings: Settings, name: str) -> bool:
    """Whether a coefficient is not 0, as far as it is known here."""
    value = settings[name]
    return value is UNKNOWN or bool(value)
