"""What settings of the model do to a step, on a launch of a trainer that settings configure: by the tables of every other host.

A trainer has fields of Megatron-Core's TransformerConfig below sections, or by names of its own: a ModelNames says which.
validation/auxiliary_losses.py and validation/experts.py judge the fields, and their words get the names that the user types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_rl.hosts.settings import ABSENT, UNKNOWN, Settings
from megatron_rl.validation.auxiliary_losses import (
    INDEXER_LOSS,
    MODEL_SETTINGS,
    MTP_LOSS,
    ROUTER_LOSS,
    active_losses,
    expert_loss_problems,
    hosts_train_mtp,
    mtp_factor,
    num_experts_of,
    size_of,
)
from megatron_rl.validation.checks import Row
from megatron_rl.validation.experts import EXPERT_SETTINGS, drift_problem, expert_notes, expert_problems
from megatron_rl.validation.model_settings import OWN_GROUPS

FIELDS = tuple(dict.fromkeys((*MODEL_SETTINGS, *EXPERT_SETTINGS, *OWN_GROUPS)))
# What adds a loss or drops tokens: said also where only the shell knows the value.
DECIDING = (
    *(*ROUTER_LOSS.coefficients, *INDEXER_LOSS.coefficients, "moe_router_load_balancing_type", "moe_expert_capacity_factor"),
    *OWN_GROUPS,
)
# A coefficient that is not on the line.
OF_CHECKPOINT = "router_aux_loss_coef of the checkpoint"
_OF_BRIDGE = (
    "With context parallelism Megatron-Bridge turns calculate_per_token_loss on for some models, as Qwen3-VL: then "
    "moe_z_loss_coeff is the same on every layout"
)
# Of a trainer that scales it by the tokens of its own loss, as far as Megatron's process_mtp_loss lets it.
MTP_PER_TOKEN = (
    "mtp_num_layers={1!r} adds mtp_loss_scaling_factor={0!r} x the loss of multi-token prediction: a sum over response tokens, "
    "divided by those of the step. In each micro-batch Megatron multiplies it by its tokens over those that have a next one, so it "
    "changes with the layout by about 1 in the tokens of a sample; set mtp_loss_scaling_factor to 0 for none"
)
# Values that turn a setting off.
_OFF = (ABSENT, UNKNOWN, None, 0, "disabled")
_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)( (?=\d))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelNames:
    """sections: a field is set by its own name behind one of these prefixes; the last one wins. fields: field -> the trainer's name
    of it. own: what the trainer gives Megatron where nothing is typed. backend: the setting and its value with which Megatron
    trains; None: the names above exist with Megatron alone."""

    sections: tuple[str, ...]
    fields: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    backend: tuple[str, Any] | None = None
    is_per_token: Callable[[Settings], bool] = lambda settings: False
    """Whether the trainer itself turns Megatron's per-token contract on."""
    divides_by_routed: bool = False
    """Whether that contract divides by the tokens that the model is given, as routers multiply by them; else by the loss's."""
    trains_mtp: bool = False
    """Whether layers of multi-token prediction train without a switch, which `fields` has elsewhere."""
    unjudged: Mapping[str, str] = field(default_factory=dict)
    """Settings of further losses -> what is said where one is on."""

    def settings_of(self, name: str) -> tuple[str, ...]:
        """The trainer's settings of a field; the last that is set wins."""
        own = (self.fields[name],) if name in self.fields else ()
        return (*own, *(f"{section}{name}" for section in self.sections))

    @property
    def all(self) -> tuple[str, ...]:
        return (*(one for name in FIELDS for one in self.settings_of(name)), *self.unjudged)

    def in_words(self, text: str) -> str:
        """A message of a table that has flags and fields, with the names that are typed here."""
        text = _FLAG.sub(lambda flag: self.settings_of(flag[1].replace("-", "_"))[0] + "=" * bool(flag[2]), text)
        return re.sub(r"(?<![\w.])\w+", lambda word: self.fields.get(word[0], word[0]), text)


def model_rows(names: ModelNames | None, settings: Settings) -> Iterator[Row]:
    """A row for each setting of the line that could change the step by the model, whichever loss trains."""
    if names is None or (names.backend is not None and settings[names.backend[0]] not in (names.backend[1], UNKNOWN)):
        return
    typed: dict[str, str] = {}  # field -> the name that has set it
    given: dict[str, Any] = {}
    for name in FIELDS:
        for one in names.settings_of(name):
            value = settings.value_of(one)
            if value is UNKNOWN and name in DECIDING:
                yield Row(one, "not known here: what it adds to the step is not judged", is_note=True)
            if value not in (ABSENT, UNKNOWN, None):
                typed[name], given[name] = one, value
    for row in _judged(names, settings, given):
        subject = typed.get(row.subject)
        if row.is_wrong or row.is_note or (subject is not None and (settings.typed is None or subject in settings.typed)):
            yield replace(row, subject=subject or names.settings_of(row.subject)[0], text=names.in_words(row.text))
    for one, text in names.unjudged.items():
        if (value := settings.value_of(one)) not in _OFF:
            yield Row(one, text.format(f"{one}={value}"), is_note=True)


def _judged(names: ModelNames, settings: Settings, given: Mapping[str, Any]) -> Iterator[Row]:
    """Of what a launch line gives, and what the trainer and the checkpoint give beside it."""
    found = {"calculate_per_token_loss": names.is_per_token(settings), **given}
    if num_experts_of(given)[1] != 0:
        found = {"moe_aux_loss_coeff": OF_CHECKPOINT, **names.own, **found}
        if not found.get("moe_router_enable_expert_bias"):  # the checkpoint may turn it on
            found.pop("moe_router_bias_update_rate", None)
        if settings.has_files and size_of(found.get("expert_model_parallel_size")) == 1:
            # The file of a dense model has these names too.
            found |= {"sequence_parallel": True, "expert_tensor_parallel_size": found.get("tensor_model_parallel_size")}
        if (drift := drift_problem(found)) is not None:  # Megatron-Core of the workers decides
            yield Row("expert_tensor_parallel_size", drift, is_note=True)
    for row in rows_of_fields(names, found):
        is_unsure = row.subject in ROUTER_LOSS.coefficients and row.is_note and names.divides_by_routed
        if is_unsure and not found["calculate_per_token_loss"] and size_of(found.get("context_parallel_size")) > 1:
            row = replace(row, text=f"{row.text}. {_OF_BRIDGE}")
        yield row


def rows_of_fields(names: ModelNames, found: Mapping[str, Any]) -> Iterator[Row]:
    """Of the fields that a model has, by name; their names are the subjects."""
    is_per_token = found.get("calculate_per_token_loss")
    for name in (one for one in OWN_GROUPS if found.get(one)):
        text = f"{name}={found[name]!r}: each micro-batch has a context-parallel group of its own"
        yield Row(name, f"{text}, which was run with no loss, and is not judged", is_note=True)
    if hosts_train_mtp({"enable_mtp_training": names.trains_mtp, **found}):
        if is_per_token:
            text = MTP_PER_TOKEN.format(mtp_factor(found), found["mtp_num_layers"])
            yield Row("mtp_num_layers", text, is_note=True)
        else:
            yield from (row for row in MTP_LOSS.notes(found, None) if row.is_note)
    yield from INDEXER_LOSS.notes(found, None)
    if num_experts_of(found)[1] == 0:
        return
    problems = [*expert_problems(found)]
    if not names.divides_by_routed:
        problems += expert_loss_problems(found, None)
    yield from (Row(text.partition("=")[0], text, is_wrong=True) for text in problems)
    yield from expert_notes(found, None)
    if is_per_token and names.divides_by_routed:
        yield from _of_routed_tokens(found)


def _of_routed_tokens(settings: Mapping[str, Any]) -> Iterator[Row]:
    for name, of in active_losses(settings).items():
        text = f"{name}={settings[name]!r}{of}: under calculate_per_token_loss micro-batches weigh as many as their tokens are"
        if name == "moe_z_loss_coeff":
            yield Row(name, f"{text}, prompts included: the same on every layout")
        else:
            text = f"{text}, and the loss of each is of its own tokens, so it changes with what shares one; set {name} to 0"
            yield Row(name, text, is_note=True)
