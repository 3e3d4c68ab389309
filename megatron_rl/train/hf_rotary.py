"""Reads the rotary positions of a config.json of Hugging Face, in the spelling of transformers 4 or 5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.files.json_values import Fields
from megatron_rl.megatron.rotary import Llama3, Rotary, Yarn

# Of every form.
COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
ORIGINAL = "original_max_position_embeddings"


def rotary_of(fields: Fields, *, rotates_a_share: bool = False, is_latent: bool = False) -> Rotary:
    """rotates_a_share: whether the architecture may rotate a part of a head's numbers. is_latent: heads have numbers for it.

    Raises ConfigError for a form, or a setting of a form, that is not computed here, and for two settings that differ.
    """
    settings = _in_one_object(fields)
    kind = settings.content.get("rope_type", settings.content.get("type"))
    if kind is None and set(settings.content) <= COMMON:
        kind = "default"
    if not isinstance(kind, str) or kind not in FORMS:
        given = {name: value for name, value in settings.content.items() if name != "partial_rotary_factor"}
        raise ConfigError(f"{fields.place}: rope_scaling={given} is not computed here; known as rope_type are {', '.join(FORMS)}")
    names, form_of = FORMS[kind]
    unknown = sorted(set(settings.content) - COMMON - names) if kind != "default" else []
    if unknown:
        raise ConfigError(
            f"{fields.place}: rope_scaling has {', '.join(unknown)} with rope_type={kind}, which is not computed here; known of it "
            f"are {', '.join(sorted(names))}"
        )
    share = settings.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise settings.wrong("partial_rotary_factor", "a number above 0, and 1 at most: it is a share of a head")
    if share != 1 and not rotates_a_share:
        raise settings.wrong("partial_rotary_factor", "1: positions turn whole heads in this architecture")
    rotary = Rotary(
        base=settings.number("rope_theta", 10000.0, above=1.0, below=2.0**53),
        percent=float(share),
        **form_of(settings, fields),
    )
    factor = 1.0 if rotary.yarn is None else rotary.yarn.factor_of_queries
    if factor != 1 and (is_latent or share != 1):
        raise ConfigError(
            f"{fields.place}: rope_scaling multiplies the rotated numbers of a head by {factor:g} and not the others, which is not "
            "computed here; known is mscale and mscale_all_dim of one value, or attention_factor=1.0"
        )
    return rotary


def _in_one_object(fields: Fields) -> Fields:
    """The settings as transformers 5 has them, in one object. Before, the base and the share of a head stood at the top and the
    scaling in rope_scaling; a folder may mix both."""
    inner, scaling = fields.table("rope_parameters").content, fields.table("rope_scaling").content
    if inner and scaling and {**scaling, **inner} != {**inner, **scaling}:
        raise ConfigError(f"{fields.place}: rope_parameters={inner} and rope_scaling={scaling} differ: remove the wrong one")
    found = {**scaling, **inner}
    for name in ("rope_theta", "partial_rotary_factor"):
        top = fields.content.get(name)
        if top is not None and name in found and found[name] != top:
            raise ConfigError(f"{fields.place}: {name}={top!r}, and {found[name]!r} in its rotary settings: remove the wrong one")
        found = {**found, name: found.get(name, top)}
    return Fields({name: value for name, value in found.items() if value is not None}, fields.place)


def _linear(settings: Fields, fields: Fields) -> dict[str, Any]:
    return {"linear_factor": float(settings.number("factor"))}


def _llama3(settings: Fields, fields: Fields) -> dict[str, Any]:
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    if high <= low:
        raise settings.wrong("high_freq_factor", f"above low_freq_factor={low}: between them two frequencies are mixed")
    factor, length = float(settings.number("factor")), settings.whole(ORIGINAL)
    return {"llama3": Llama3(factor=factor, low_freq_factor=float(low), high_freq_factor=float(high), original_length=length)}


def _yarn(settings: Fields, fields: Fields) -> dict[str, Any]:
    """Left out: the defaults of transformers. An mscale of 0 is left out too."""
    fast, slow = settings.number("beta_fast", 32.0), settings.number("beta_slow", 1.0)
    if fast < slow:
        raise settings.wrong("beta_fast", f"beta_slow={slow} at least: numbers that turn more often are kept")
    mscale, of_all = (settings.number(name, 0.0, above=-1.0) or None for name in ("mscale", "mscale_all_dim"))
    yarn = Yarn(
        factor=float(settings.number("factor")),
        original_length=settings.whole(ORIGINAL, fields.whole("max_position_embeddings")),
        beta_fast=float(fast),
        beta_slow=float(slow),
        mscale=mscale,
        mscale_all_dim=of_all,
        rounds_range=settings.switch("truncate", True),
        attention_factor=settings.number("attention_factor", None),
    )
    return {"yarn": yarn}


# rope_type -> the settings of this form, and what makes fields of Rotary of them and of the whole file.
FORMS: Mapping[str, tuple[set[str], Callable[[Fields, Fields], dict[str, Any]]]] = {
    "default": (set(), lambda settings, fields: {}),
    "linear": ({"factor"}, _linear),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", ORIGINAL}, _llama3),
    "yarn": (
        {"factor", ORIGINAL, "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"},
        _yarn,
    ),
}
