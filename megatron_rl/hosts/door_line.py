"""Judges a launch line of any door for doctor and its trainer's start, and writes one for explain."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from megatron_rl.config import PolicyLossConfig, flag_fields
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import stock
from megatron_rl.hosts.closed_words import names_users_code, unknown_words
from megatron_rl.hosts.dense_rows import numbers, sample_in_words
from megatron_rl.hosts.door import CLIPS, CORRECTION_SETTINGS, DIVISOR, Door, Found, Kind, Prompts, ReadFile
from megatron_rl.hosts.door_settings import Refused, in_words, losses, modes, read, texts_for_switches
from megatron_rl.hosts.model_names import model_rows
from megatron_rl.hosts.published import CLIP_HIGH_OF_DAPO, CLIP_LOW_OF_DAPO, with_another_divisor, with_clip_of_dapo, with_deviation
from megatron_rl.hosts.settings import ABSENT, NOT_ASKED, UNKNOWN, Given, Settings, Size, StepSizes, clip_to_type, not_numbers
from megatron_rl.hosts.step_sizes import whole_number
from megatron_rl.loss_hub import clip_of, get_loss_aggregation, get_policy_loss
from megatron_rl.validation import config_warnings, flag_of, routes_of_flags
from megatron_rl.validation.checks import Row
from megatron_rl.validation.repeated import repeated

# A misspelt section is more similar than this to the right one; no two sections of a host are.
CLOSEST_SECTION = 0.9
# The same for a module of ours among those of the user's own.
CLOSEST_MODULE = 0.8
PACKAGE = "megatron_rl"
# More names of a section than these are not listed.
MOST_NAMES = 24
# The same for a name without our prefix whose loss is one of ours; another one may be somebody else's.
SIMILAR_MODE = 0.6
# Words for the two sides of a range: another trainer says high where this one says max. The wrong side is never what was meant.
_SIDES = (("low", "min"), ("high", "max"))
LOSS_SETTINGS = ("policy_loss", "loss_aggregation", DIVISOR, *CLIPS)


# doctor


def judge(
    door: Door,
    words: Sequence[str],
    read_file: ReadFile,
    of_step: stock.JudgeStep | None = None,
    asked: StepSizes = NOT_ASKED,
) -> Iterator[Row]:
    """What becomes of a launch line. read_file: the mapping of a file of settings; raises ConfigError where it cannot be read.
    of_step: what is said of a recorded step where the trainer's own loss trains. asked: its sizes that win over the line's."""
    program = door.programs.named(words) or (None if door.recognises(words) else door.programs.imported(words))
    if program is not None and not any(PACKAGE in word for word in words):
        if program.why is not None:
            yield stock.unjudged(f"{program.word} {program.why}")
            return
        if not program.is_script:
            yield Row("program", f"{program.word} trains with {door.title}'s own loss; ours was not tried with it", is_note=True)
    line = door.read_line(words, read_file)
    yield from line.rows
    for settings in filter(None, (line.settings, line.stock)):
        settings.asked = asked
        settings.imports_modules = _imports_modules(door, words, settings)
    if line.settings is not None:
        yield from _flags_of_others(door, words, line.settings.given)
        yield from _without_value(door, words)
        yield from _given_twice(door, words)
        yield from judge_settings(door, line.settings, of_step=of_step, is_partial=line.is_partial)
    elif line.stock is not None:
        rows, refused = [*model_rows(door.model, line.stock)], [*door.refuses(line.stock)]
        yield from (*rows, *refused)
        if any(row.is_wrong for row in refused):
            return
        is_partial = line.is_partial or _has_notes(rows)
        yield from judge_stock(door, line.stock, of_step, is_partial=is_partial, takes_ours=False)


def _imports_modules(door: Door, words: Sequence[str], settings: Settings) -> bool:
    """Whether code of the user's own may run where the loss does: the launch names some, or is a program of the user's own."""
    typed = {name.lstrip("+"): value for name, equals, value in (word.partition("=") for word in words) if equals}
    main = f"{door.starts.replace('.', '/')}.py"
    is_hosts = door.programs.named(words) is not None or any(word == door.starts or word.endswith(main) for word in words)
    return not is_hosts or names_users_code({**settings.given, **typed}, door.imports, PACKAGE)


def judge_stock(
    door: Door, settings: Settings, of_step: stock.JudgeStep | None, *, is_partial: bool = False, takes_ours: bool = True
) -> Iterator[Row]:
    """What the trainer's own loss weighs a token, and the settings that give an exact weight. takes_ours: one can be typed."""

    def exact(aggregation: str) -> str:
        record = get_loss_aggregation(aggregation)
        divisor = 1.0 if record.takes_divisor else None
        config = PolicyLossConfig(policy_loss=loss, loss_aggregation=aggregation, loss_aggregation_divisor=divisor)
        return door.separator.join(write(door, config)[0]) + without

    found, loss, without = door.stock(settings), "grpo", ""
    host = door.field_settings.get(DIVISOR)
    if isinstance(found, stock.Stock):
        if host is not None and found.policy is not None and "L" in found.policy.powers:
            yield from divisor_is_the_longest_response(door, settings, whole_number(settings[host.name]))
        found = replace(found, sizes=_sizes(door, settings))
        takes_ours, loss = takes_ours and found.ours is not None, found.ours or loss
        without = f" without {found.without}" if found.without else ""
    own_terms = ("entropy",) if "entropy_coefficient" in door.honours else ()
    yield from stock.judge(found, door.title, exact if takes_ours else None, of_step, own_terms=own_terms, is_partial=is_partial)


def _has_notes(rows: Iterable[Row]) -> bool:
    return any(row.is_note or row.is_wrong for row in rows)


def read_launch(door: Door, settings: Settings, *, may_have_more: bool = False) -> Found:
    """A launch of ours that the trainer itself starts, with what it says then, of the model too. may_have_more: see judge_names.

    Raises one ConfigError with every problem, of names and of the model too."""
    problems, found = name_problems(door, settings, may_have_more=may_have_more), None
    of_model = [*model_rows(door.model, settings)]
    problems += [in_words(row) for row in of_model if row.is_wrong]
    try:
        found = read(door, settings)
    except ConfigError as error:
        problems += error.problems
    if problems or found is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    return replace(found, warnings=(*found.warnings, *(in_words(row) for row in of_model if row.is_note)))


def name_problems(door: Door, settings: Settings, *, may_have_more: bool = False) -> list[str]:
    """Of the names of a launch of ours."""
    rows = _names(door, settings, is_ours=True, may_have_more=may_have_more)
    return [in_words(row) for row in rows if row.is_wrong]


def judge_settings(
    door: Door,
    settings: Settings,
    *,
    may_have_more: bool = False,
    of_step: stock.JudgeStep | None = None,
    is_partial: bool = False,
) -> Iterator[Row]:
    """may_have_more: see judge_names. of_step: see judge. is_partial: see Line."""
    choice = door.choice
    if groups := [*_values_for_groups(door, settings)]:
        yield from groups
        return
    name = settings[choice.setting]
    is_ours = door.is_ours(settings) if door.is_ours else str(name).startswith(choice.prefix)
    yield from _names(door, settings, is_ours=is_ours, may_have_more=may_have_more)
    yield from door.of_any_launch(settings)
    of_model = [*model_rows(door.model, settings)]
    yield from of_model
    yield from judge_log_probs(door, settings)
    meant = None if is_ours else _meant(door, name)
    imports_modules = may_have_more or settings.imports_modules
    words = {setting: one for setting, one in door.words.items() if one.beside_ours or not is_ours}
    slips = unknown_words(door.title, words, settings, imports_modules=imports_modules)
    texts = () if is_ours else texts_for_switches(door, settings)  # of ours by `read`
    switches = [Row(choice.setting, text, is_wrong=True) for text in texts]
    refusals = [] if meant else [*slips, *switches, *door.refuses(settings)]
    yield from refusals
    if name is UNKNOWN:
        yield Row(choice.setting, "not known here, so the loss is not judged", is_note=True)
        yield from door.unchosen(settings)
        return
    if not is_ours:
        if meant:
            yield Row(choice.setting, f"{name} is neither ours nor {door.title}'s: set {choice.setting}={meant}", is_wrong=True)
        if meant or any(row.is_wrong for row in refusals):
            return
        yield from door.unchosen(settings)
        loss = "the loss" if name is None else name
        has_it = choice.setting not in door.words or door.words[choice.setting].has(name)
        whose = f"{door.title}'s" if has_it else "your"
        text = f"{loss} is {whose} own: none of our losses is chosen; {choice.remedy}"
        yield Row(choice.setting, text, is_note=True)
        yield from idle_beside_own_loss(door, settings)
        if not has_it:
            yield stock.unjudged(f"{loss} is your own, and what it weighs is not known here")
            return
        yield from judge_stock(door, settings, of_step, is_partial=is_partial or _has_notes(of_model))
        return
    own = [name for name in settings.given if name.startswith(door.own.prefix)]
    if unknown := [one for one in dict.fromkeys([*door.read_names, *own]) if settings[one] is UNKNOWN]:
        if door.stand_ins is None:
            text = f"not judged: the value of {', '.join(unknown)} is not known here; type it in the place of the name"
            yield Row(choice.setting, text, is_note=True)
            return
        settings.stand_ins = door.stand_ins
    try:
        found = read(door, settings)
    except Refused as refused:
        yield from refused.rows
        return
    except ConfigError as error:
        yield from (Row(choice.setting, problem, is_wrong=True) for problem in error.problems)
        return
    yield from said_of(found)
    if of_step is not None:
        of_ours = stock.Stock.of_ours(found.config, door.terms(found))
        yield from of_step(replace(of_ours, sizes=_sizes(door, settings), coefficients=coefficients_of(found)))


def coefficients_of(found: Found) -> dict[str, float]:
    """Of the terms that our loss has, as they are typed."""
    settings, names_of = found.door.field_settings, ("kl_coefficient", "entropy_coefficient")
    return {settings[name].name: value for name in names_of if name in settings and (value := getattr(found.config, name))}


def judge_log_probs(door: Door, settings: Settings) -> Iterator[Row]:
    """Whose log-probabilities train, where the launch says it."""
    one = door.log_probs
    value = ABSENT if one is None else settings.value_of(one.setting)
    if one is None or value in (ABSENT, UNKNOWN, None, one.theirs):
        return
    listed = value if isinstance(value, list | tuple) else str(value).strip("[]").split(",")
    values = [str(each).strip(" '\"") for each in listed]
    if one.value in values:
        if one.backend is not None and settings[one.backend[0]] not in (one.backend[1], UNKNOWN):
            name, needed = one.backend
            text = f"{name}={settings[name]}: {one.setting}={one.value} has no effect there; set {name} to {needed}"
            yield Row(name, text, is_wrong=True)
            return
        text = f"{one.value}: log-probabilities and entropies are ours, in the place of {door.title}'s, for whichever loss trains"
        yield Row(one.setting, text)
    elif not one.is_hosts:
        text = f"{one.setting}={value} must be {one.value}, which computes log-probabilities and entropies here, or {one.theirs}"
        yield Row(one.setting, text, is_wrong=True)
    else:
        for each in values:
            # The package alone can be imported, and replaces nothing.
            if each == PACKAGE or get_close_matches(each, [one.value], 1, CLOSEST_MODULE):
                text = f"{one.setting}={each} puts none of our log-probabilities in the place of {door.title}'s"
                yield Row(one.setting, f"{text}; did you mean {one.value}?", is_wrong=True)


def idle_beside_own_loss(door: Door, settings: Settings) -> Iterator[Row]:
    """Our settings of a loss in a launch that has our log-probabilities alone."""
    one = door.log_probs
    if one is None or one.is_hosts:
        return
    for name, value in settings.given.items():
        if name.startswith(door.own.prefix) and name != one.setting:
            text = f"{name}={value} has no effect on {door.title}'s own loss: choose one of ours, or remove it"
            yield Row(name, text, is_wrong=True)


def check_log_probs(door: Door, settings: Settings, *, trains_ours: bool, others: Iterable[Row] = ()) -> bool:
    """Whether our log-probabilities take the place of the host's. others: what more is said of that. Raises one ConfigError with
    every problem of it."""
    rows = [*judge_log_probs(door, settings), *others]
    if not trains_ours:
        rows += idle_beside_own_loss(door, settings)
    if problems := [in_words(row) for row in rows if row.is_wrong]:
        raise ConfigError(problems)
    return door.log_probs is not None and bool(settings[door.log_probs.setting] != door.log_probs.theirs)


def said_of(found: Found) -> Iterator[Row]:
    """What a launch without a problem trains, and its warnings."""
    door, config = found.door, found.config
    divisor = door.field_settings.get(DIVISOR)
    is_known = divisor is None or found.settings.value_of(divisor.name) is not UNKNOWN
    known = {"L": config.loss_aggregation_divisor if is_known else None}
    weight = found.record.weight_in_words(known, of_rollouts=found.rollouts.have_several)
    carried = ", in the advantages" if found.is_carried or door.prompts == Prompts.BY_DRIVER else ""
    chosen = f"{door.choice.prefix}{found}"
    yield Row(door.choice.setting, f"{chosen}, {numbers(config)}, weight of a token {weight}{carried}")
    yield Row("sample", sample_in_words(config.loss_aggregation, found.rollouts))
    yield Row("learning rate", found.record.shift_in_words(config.loss_aggregation_divisor, door.of_token_mean))
    yield from stock.rows_of_terms(door.terms(found), door.title, stock.Stock.of_ours(config))
    yield from (Row("advice", text, is_note=True) for text in config_warnings(config))
    if found.record.name == "constant" and door.deviation is not None and door.deviation.divides(found.settings):
        yield Row("advice", with_deviation(chosen, door.without_deviation), is_note=True)
    if is_known:
        yield from divisor_is_the_longest_response(door, found.settings, config.loss_aggregation_divisor)
    clip = None if any(found.settings[name] is UNKNOWN for name in door.read_names) else clip_of(config)
    for text in with_clip_of_dapo(chosen, config.policy_loss, found.record.name, clip, clip_of_dapo(found)):
        yield Row("advice", text, is_note=True)
    yield from (Row("sampling", text, is_note=True) for text in found.warnings)
    if found.correction.is_on:
        yield Row("correction", f"{config.importance_correction}, for the gap between sampler and trainer")
    if found.theirs:
        yield weights_multiply(found, found.theirs)
    yield from (row for one in door.checks for row in one(found))


def divisor_is_the_longest_response(door: Door, settings: Settings, divisor: float | None) -> Iterator[Row]:
    """Where the launch says how long one may be, and makes it in one turn."""
    longest, host = _longest(door, settings), door.field_settings.get(DIVISOR)
    if divisor is not None and longest is not None and longest.value != divisor:
        name = host.name if host else door.own.name(DIVISOR)
        of_both = ({name: divisor}, {longest.source: longest.value}, {name: longest.value})
        typed, limit, exact = (door.separator.join(door.typed(one)) for one in of_both)
        if longest.title:
            limit = longest.in_words.removesuffix(",")
            if float(divisor).is_integer():
                exact = f"{door.separator.join(door.typed({longest.source: int(divisor)}))}, or {exact}"
        yield Row("advice", with_another_divisor(divisor, longest.value, typed=typed, limit=limit, exact=exact), is_note=True)


def _longest(door: Door, settings: Settings) -> Size | None:
    """A response in tokens, where the launch or the trainer's default says it, and one is made in one turn."""
    sampler = door.sampler
    if sampler.longest is None or (sampler.turns and settings.value_of(sampler.turns) not in (ABSENT, 1)):
        return None
    longest = whole_number(settings[sampler.longest])
    is_default = settings.value_of(sampler.longest) is ABSENT
    return None if longest is None else Size(longest, sampler.longest, door.title * is_default)


def _sizes(door: Door, settings: Settings) -> StepSizes:
    return door.sizes.read(settings.value_of, settings.asked)._replace(longest=_longest(door, settings))


def clip_of_dapo(found: Found) -> str:
    """What it changes in the settings of the launch, as it is typed."""
    low = None if found.config.clip_ratio_low is None else CLIP_LOW_OF_DAPO
    wider = replace(found.config, clip_ratio_low=low, clip_ratio_high=CLIP_HIGH_OF_DAPO)
    before, given = (given_by(found.door, config)[0] for config in (found.config, wider))
    changed = {name: value for name, value in given.items() if before.get(name) != value}
    return found.door.separator.join(found.door.typed(changed))


def weights_multiply(found: Found, theirs: Iterable[str]) -> Row:
    """Of the host's own correction, whose weights a loss of ours is given. theirs: its settings, as they are typed."""
    mean = "; a sample has one ratio, so its tokens share the mean of their weights" if found.loss.level == "sequence" else ""
    return Row("correction", f"{' and '.join(theirs)}: {found.door.title}'s own: its weights multiply our loss{mean}")


# Names


def _names(door: Door, settings: Settings, *, is_ours: bool, may_have_more: bool) -> Iterator[Row]:
    """One row of a name that is in the wrong place, and what judge_names says of the others."""
    misplaced = [*_misplaced(door, settings.given)]
    yield from misplaced
    told = {row.subject for row in misplaced}
    found = judge_names(door, settings, is_ours=is_ours, may_have_more=may_have_more)
    yield from (row for row in found if row.subject not in told)


def judge_names(door: Door, settings: Settings, *, is_ours: bool, may_have_more: bool = False) -> Iterator[Row]:
    """Names below the door's sections that neither has, numbers that are true or false, and what none of our losses reads.

    may_have_more: a name that is like none of these may be one of another version, and gets a note."""
    table, known, own = {one.name: one for one in door.settings}, door.known_names, door.own_names()
    for whole, value in settings.given.items():
        if one := table.get(whole):
            if one.kind in (Kind.NUMBER, Kind.BOUNDS):
                yield from (Row(whole, problem, is_wrong=True) for problem in not_numbers([Given(whole, value)]))
            if is_ours and one.idle is not None:
                yield Row(whole, f"{whole}={value} has no effect: our losses do not read it; {one.idle}", is_wrong=True)
            continue
        prefix = next((prefix for prefix in sorted(door.sections, key=len, reverse=True) if whole.startswith(prefix)), None)
        if prefix is None or _is_below_group(whole[len(prefix) :], prefix, table):
            yield from _in_another_section(door, whole, is_note=may_have_more or settings.imports_modules)
        elif not (whole in known or whole in own or _is_apart(door, whole) or door.is_open(settings, prefix)):
            names = [name.removeprefix(prefix) for name in {*known, *own} if name.startswith(prefix)]
            close = _closest(whole.removeprefix(prefix), names)
            last = whole.rpartition(".")[2]
            if last not in names and (elsewhere := [name for name in known if name.rpartition(".")[2] == last]):
                yield Row(whole, f"{door.title} has no such setting: did you mean {elsewhere[0]}?", is_wrong=True)
                continue
            listed = f"; it has {', '.join(sorted(set(names)))}" if len(set(names)) <= MOST_NAMES else ""
            meant = f"did you mean {prefix}{close}?" if close else f"remove it{listed}"
            is_note = may_have_more and not close and prefix != door.own.prefix
            yield Row(whole, f"{door.title} has no such setting: {meant}", is_wrong=not is_note, is_note=is_note)


def _is_below_group(name: str, prefix: str, table: Mapping[str, Any]) -> bool:
    parents = [prefix + name[:at] for at, letter in enumerate(name) if letter == "."]
    return any(parent in table and table[parent].kind == Kind.GROUP for parent in parents)


def _is_apart(door: Door, whole: str) -> bool:
    """A name of ours in a place of its own, which `door_settings` judges with the loss."""
    return whole.startswith(door.own.prefix) and door.own.prefix not in door.sections


def _meant(door: Door, name: Any) -> str | None:
    """The name of ours that is meant by one without our prefix, or with a slip of it; None: it may be the host's own, which has no
    dot, or somebody else's."""
    if not (isinstance(name, str) and "." in name and door.choice.prefix and door.choice.aggregation is None):
        return None
    package = door.choice.prefix.rstrip(".")
    slip = re.compile("[-_.]?".join(map(re.escape, package.split("_"))) + "[-_.]+")  # megatronrl.grpo, megatron_rl_grpo
    known, short = modes(door), slip.sub("", name, count=1) if slip.match(name) else name
    cutoff = SIMILAR_MODE if short.partition(".")[0] in losses(door) else CLOSEST_SECTION
    close = get_close_matches(short, known, 1, cutoff)
    return door.choice.prefix + close[0] if close else None


def _in_another_section(door: Door, whole: str, *, is_note: bool) -> Iterator[Row]:
    """A setting of the loss in a section that the trainer reads for others, or a slip of a section. is_note: code of the user's own
    may read it there."""
    parent, _, last = whole.rpartition(".")
    above = {name[:at] for name in door.known_names for at, letter in enumerate(name) if letter == "."}
    read = [one.name for one in door.settings if one.field or one.default is not None]
    home = next((name for name in read if name in (f"{section}{last}" for section in door.sections)), None)
    if home is None or whole in door.known_names or _is_apart(door, whole) or not (parent in above or not parent):
        yield from _misspelt_section(door, whole)
        return
    yield Row(whole, f"{door.title} reads no such setting here: did you mean {home}?", is_wrong=not is_note, is_note=is_note)


def _misspelt_section(door: Door, whole: str) -> Iterator[Row]:
    parent, _, last = whole.rpartition(".")
    beside = {name.rpartition(".")[2]: name for name in door.known_names if name.rpartition(".")[0] == parent}
    close = [one for one in get_close_matches(last, beside, 1, CLOSEST_SECTION) if not _has_a_word_more(last, one)]
    if whole not in door.known_names and close:
        yield Row(whole, f"{door.title} has no such setting: did you mean {beside[close[0]]}?", is_wrong=True)
        return
    sections = [prefix.removesuffix(".") for prefix in door.sections]
    if parent and (close := get_close_matches(parent, sections, 1, CLOSEST_SECTION)) and f"{close[0]}.{last}" in door.known_names:
        yield Row(whole, f"{door.title} has no such setting: did you mean {close[0]}.{last}?", is_wrong=True)


def _has_a_word_more(name: str, other: str) -> bool:
    """Whether one is the other with further words, as val_num_generations is: that is another setting, and no slip."""
    words, others = name.split("_"), other.split("_")
    return len(words) != len(others) and (set(words) < set(others) or set(others) < set(words))


def _closest(name: str, known: Sequence[str]) -> str | None:
    """The known name that is most similar; of a name that ends in a side, one of this side, whichever word it has for the side, and
    whatever the order of its words."""
    side = next((words for words in _SIDES if name.endswith(words)), None)
    if side is None:
        return next(iter(get_close_matches(name, known, 1)), None)

    def stem(one: str) -> str:
        return "_".join(sorted(one[: -len(next(filter(one.endswith, side)))].split("_")))

    name_of = {stem(one): one for one in known if one.endswith(side)}
    return next((name_of[one] for one in get_close_matches(stem(name), name_of, 1)), None)


def _misplaced(door: Door, given: Mapping[str, Any]) -> Iterator[Row]:
    """The name that chooses the loss without its section."""
    choice = door.choice
    for name, value in given.items():
        if name in door.known_names:
            continue
        has_ours = bool(choice.prefix) and str(value).startswith(choice.prefix)
        last = f".{name.rpartition('.')[2]}"
        wanted = [one for one in (choice.setting, choice.aggregation) if one and (one.endswith(f".{name}") or has_ours)]
        whole = next((one for one in [*wanted, *(door.read_names if has_ours else ())] if one.endswith(last)), None)
        if whole is not None:
            yield Row(name, f"{door.title} has no such setting: type its whole name, {door.line_of(whole, value)}", is_wrong=True)


def _flags_of_others(door: Door, words: Sequence[str], given: Mapping[str, Any]) -> Iterator[Row]:
    for name in (word.partition("=")[0] for word in words):
        if name in routes_of_flags() and name not in given:
            yield Row(name, f"a flag of miles and slime, and no setting of {door.title}: {door.choice.remedy}", is_wrong=True)


def _without_value(door: Door, words: Sequence[str]) -> Iterator[Row]:
    """Where a setting is one word, its name alone. A program has a dot too."""
    programs = {door.starts, *(word for before, word in pairwise(words) if before == "-m")}
    for word, behind in pairwise([*words, ""]):
        name = word.lstrip("+")
        if name not in programs and "." in name and (name in door.known_names or name.startswith(door.sections)):
            if "=" not in name:
                value = "VALUE" if "=" in behind or not behind else behind
                yield Row(name, f"{door.title} takes NAME=VALUE in one word: type {word}={value}", is_wrong=True)


def _given_twice(door: Door, words: Sequence[str]) -> Iterator[Row]:
    """Hydra, OmegaConf and argparse keep the last value. Hydra alone refuses a + for a setting that is there."""
    given: list[tuple[str, str]] = []
    for word, behind in pairwise([*words, ""]):
        name, equals, value = word.lstrip("+").partition("=")
        if word.startswith("--"):
            name, value = name.removeprefix("--").replace("-", "_"), value if equals else behind
        elif not equals:
            continue
        is_added = word.startswith("+") and not word.startswith("++")
        if is_added and name in (other for other, _ in given):
            text = f"given before: a + adds what is not there, so hydra refuses it; remove the first, or type ++{name}={value}"
            yield Row(name, text, is_wrong=True)
        given.append((name, value))
    for name, text in repeated(given, lambda name: name in door.known_names or name.startswith(door.own.prefix)):
        yield Row(name, text, is_note=True)


def _values_for_groups(door: Door, settings: Settings) -> Iterator[Row]:
    """One value in the place of a group of settings: nothing below it can be judged. A file may leave a group out by null."""
    setting, known = door.choice.setting, door.known_names
    groups = {one.name for one in door.settings if one.kind == Kind.GROUP}
    for whole, value in settings.given.items():
        is_read = any(name.startswith(f"{whole}.") for name in known)
        if value is UNKNOWN or isinstance(value, Mapping) or not (is_read or whole in groups):
            continue
        if value is None and (not is_read or (settings.has_files and not settings.is_typed(whole))):
            continue
        if str(value).startswith("{"):
            yield Row(whole, "several settings in one word are not read here: type each by its whole name", is_note=True)
        else:
            meant = f": did you mean {setting}={value}?" if setting.startswith(f"{whole}.") else ""
            yield Row(whole, f"it is a group of settings, and {door.title} takes no {value} in its place{meant}", is_wrong=True)


# explain


def write(door: Door, config: PolicyLossConfig) -> tuple[list[str], list[str]]:
    """(the settings that give this trainer ours, as they are typed; their problems)."""
    given, problems = given_by(door, config)
    return door.typed({name: value for name, value in given.items() if value is not UNKNOWN}), problems


def given_by(door: Door, config: PolicyLossConfig) -> tuple[dict[str, Any], list[str]]:
    """The same by whole names, with their values."""
    choice, own, theirs = door.choice, door.own, door.field_settings
    given: dict[str, Any] = {}
    problems = _idle(door, config)
    if choice.aggregation is None:
        given[choice.setting] = f"{choice.prefix}{config.policy_loss}.{config.loss_aggregation}"
    else:
        names = {ours: host for host, ours in choice.names.items()}
        given[choice.setting] = f"{choice.prefix}{config.policy_loss}"
        if config.loss_aggregation in names:
            given[choice.aggregation] = names[config.loss_aggregation]
        else:
            text = f"{door.title} has {', '.join(names)} alone; choose one of them"
            problems.append(f"--loss-aggregation {config.loss_aggregation}: {text}")
    if config.kl_coefficient and door.estimators is not None and config.kl_estimator not in door.estimators:
        text = f"{door.title} computes the KL term, and has {', '.join(door.estimators)} of ours; choose one of them"
        problems.append(f"--kl-estimator {config.kl_estimator}: {text}")
    given |= _clips(door, config)
    default = PolicyLossConfig()
    changed = {name: getattr(config, name) for name in (DIVISOR, *CORRECTION_SETTINGS, *door.honours)}
    changed = {name: value for name, value in changed.items() if value != getattr(default, name)}
    for name, value in {**config.loss_parameters, **changed}.items():
        if name in theirs:
            given[theirs[name].name] = value
        elif name in door.own_fields(get_policy_loss(config.policy_loss)):
            given[own.name(name)] = value
    given = {name: value for name, value in door.write(config, given).items() if value is not None}
    if not problems or choice.aggregation is None or choice.aggregation in given:
        try:
            read(door, Settings.of_names(given, door.all_defaults, typed=given))
        except ConfigError as error:
            problems += error.problems
    return given, problems


def _clips(door: Door, config: PolicyLossConfig) -> dict[str, Any]:
    sides = [door.field_settings.get(name) for name in CLIPS]
    if None in sides:
        return {door.own.name(name): getattr(config, name) for name in CLIPS} if door.own.clips else {}
    defaults = {one.name: one.default for one in sides if one is not None}
    return clip_to_type(get_policy_loss(config.policy_loss), config.clip_ratio_low, config.clip_ratio_high, defaults)


def _idle(door: Door, config: PolicyLossConfig) -> list[str]:
    """A problem for each of our settings that is not its default and reaches no loss there."""
    honoured = (*LOSS_SETTINGS, *CORRECTION_SETTINGS, *door.honours)
    why = {"rejected_tokens": f"{door.title}: it counts the step before a loss knows which tokens are dropped"}
    common = f"{door.title}: its own settings decide on {door.decides}"
    return [
        f"{flag_of(one.name)}={getattr(config, one.name)} has no effect in {why.get(one.name, common)}; remove it"
        for one in flag_fields()
        if one.name not in honoured and getattr(config, one.name) != one.default
    ]
