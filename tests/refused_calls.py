"""Calls of the front doors with one wrong argument each, and the golden table of what every refusal says: tests/messages.txt.

`python tests/pages.py tests/messages.txt` writes the table. A row needs no pattern: whoever changes a message sees it in the table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import torch
import validation_cases
from helpers import CLIP, names_forgotten
from torch import Tensor

from megatron_rl.count import StepTotals
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.context_parallel import local_cu_seqlens, padded_length
from megatron_rl.layout.sampling_support import SamplingSupport
from megatron_rl.losses.corrections import CorrectionSettings
from megatron_rl.ops.linear_log_probs import linear_log_probs
from megatron_rl.ops.log_probs import vocab_parallel_log_probs
from megatron_rl.policy_loss import api, grpo_loss, importance_correction, linear_gspo_loss, policy_loss
from megatron_rl.weights import sample_token_weights

ONES, TOO_LONG = torch.ones(5), torch.full((5,), 1e300, dtype=torch.float64)
COMPLEX, INT64, DOUBLE = torch.ones(5, dtype=torch.complex64), torch.int64, torch.float64
PACKED = {
    "labels": torch.zeros(5, dtype=INT64),
    "old_log_probs": torch.zeros(5),
    "advantages": torch.ones(2),
    "loss_mask": torch.ones(5, dtype=torch.bool),
    "cu_seqlens": torch.tensor([0, 2, 5], dtype=torch.int32),
    "token_weights": torch.ones(2),
}


def loss_of_logits(**changes):
    """2 documents of 2 and 3 tokens."""
    return grpo_loss(**{"logits": torch.zeros(5, 4), **PACKED, **changes})


def loss_of_hidden(**changes):
    head = {"hidden": torch.zeros(5, 6, requires_grad=True), "weight": torch.zeros(16, 6), "max_logits_bytes": 10**6}
    return linear_gspo_loss(**{**head, **PACKED, **CLIP, **changes})


def loss_of_log_probs(**changes):
    others = {name: value for name, value in PACKED.items() if name != "labels"}
    return api.loss_of_log_probs("grpo", torch.zeros(5, requires_grad=True), **others | changes)


def loss_of_the_sampler(**changes):
    return policy_loss("dppo_tv", torch.zeros(5, 4), **PACKED | {"rollout_log_probs": torch.zeros(5)} | changes)


def log_probs_of_hidden(**changes):
    arguments = {"hidden": torch.zeros(5, 6), "weight": torch.zeros(16, 6), "labels": PACKED["labels"], **changes}
    return linear_log_probs(**arguments)


def log_probs_of_logits(**changes):
    return vocab_parallel_log_probs(**{"logits": torch.zeros(8, 16), "labels": torch.zeros(8, dtype=INT64), **changes})


VECTORS = ("old_log_probs", "rollout_log_probs", "log_probs", "advantages")


def correction_of(**changes):
    """The settings are arguments too."""
    given = {name: torch.zeros(3) for name in VECTORS} | {"loss_mask": torch.ones(3, dtype=torch.bool)}
    given |= {"cu_seqlens": torch.tensor([0, 3], dtype=torch.int32)}
    settings = {name: value for name, value in changes.items() if name not in given}
    return importance_correction(
        CorrectionSettings(**(settings or {"kind": "tis"})), **given | dict(changes.items() - settings.items())
    )


def weights_of_a_step(totals=StepTotals(num_samples=2, num_prompts=1, num_tokens=3)):  # noqa: B008
    return sample_token_weights("sample_mean", torch.tensor([1, 2]), totals)


def slices_of_a_rank(cp_size=2):
    return local_cu_seqlens(torch.tensor([0, 4]), cp_size)


def padded_length_of(cp_size=2, **layout):
    return padded_length(5, cp_size, **layout)


def each(name: str, *values: object) -> Iterator[dict]:
    yield from ({name: value} for value in values)


def bounds(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


KEPT = SamplingSupport.from_lists([[0, 2]] * 5)
WITH_KL = {"kl_coefficient": 0.1, "ref_log_probs": torch.zeros(5), "regularizer_weights": torch.ones(2)}
# Door -> what is wrong in the call.
REFUSED: dict[Callable, list[dict]] = {
    weights_of_a_step: [*each("totals", None)],
    slices_of_a_rank: [*each("cp_size", 0, -1)],
    padded_length_of: [*each("cp_size", 0), *each("layout", "striped")],
    loss_of_logits: [
        *each(
            "logits", None, [[0.0]], torch.ones(5, 4).to_sparse(), torch.ones(5, 4).to(torch.float8_e4m3fn), torch.zeros(1, 5, 4)
        ),
        *each("labels", torch.zeros(5), None, [0, 1, 2, 0, 1]),
        *each("loss_mask", ONES, torch.ones(4, dtype=torch.bool), torch.tensor([1, 2, 1, 0, 1])),
        *each("old_log_probs", torch.zeros(6), torch.zeros(5, device="meta"), COMPLEX, ONES.bool()),
        *each("token_weights", torch.ones(3), torch.tensor([1, math.nan]), torch.full((2,), 1e300, dtype=DOUBLE)),
        *each("token_weights", torch.tensor([1, 1]), torch.tensor([0.5, -0.5])),
        *each("importance_weights", torch.ones(2), TOO_LONG, COMPLEX, ONES.long(), -ONES),
        *each("advantages", torch.ones(3), torch.ones(2, 1), [1.0, -1.0], torch.tensor([True, False])),
        *each("advantages_per", "token", "turn"),
        *each("cu_seqlens", bounds(0, 2, 6), bounds(0, 3, 2), bounds(1, 5), torch.tensor([0.0, 5.0]), [0, 2, 5]),
        *each("regularizer_weights", torch.tensor([1, math.nan]), torch.tensor([1, 1]), torch.tensor([0.5, -0.5])),
        *each("token_counts", torch.ones(3), torch.tensor([1, 2]), torch.tensor([20, 20]), torch.tensor([True, True]), [2, 3]),
        *each("token_counts", *(torch.tensor([number, 2]) for number in (2.5, math.nan, math.inf, -2))),
        *each("vocab_size", 3.0),
        {"ref_log_probs": TOO_LONG, "kl_coefficient": 0.1, "regularizer_weights": torch.ones(2)},
        *each("clip_ratio_low", 1.3, -0.1, math.nan, "0.2"),
        *each("clip_ratio_high", -0.1, math.nan, "0.1", True, [0.1], 1e300),
        *each("kl_coefficient", -0.1, math.nan, math.inf, "0.1", True, [0.1], 1e300, None, 0.1),
        *each("entropy_coefficient", -0.1, math.inf, "0.1", 0.1),
        *each("kl_estimator", "k4"),
        *each("temperature", 0.0, "1", None, 1e-40, ONES),
        *each("metrics", "all", ["basic"]),
        *each("inplace", "no"),
        *each("backend", "cuda"),
        *each("correction", "tis", CorrectionSettings(kind="tis"), CorrectionSettings(kind="ticepop")),
        *each("loss_scale", 0.0, math.inf, "2", torch.ones(2)),
        *each("clip_ratio_max", 0.2),
        *each("clip_ratio_c", 2.0),
        {"advantages": ONES, "cu_seqlens": bounds(0, 2, 2, 3, 4, 5), "token_weights": ONES},
        *each("loss_parameters", {"sapo_temperature_positive": 1.0}, {"clip_ratio_c": 0.5}),
        *each("sapo_temperature_positive", 1.0),
        *each("sampling_support", [[0]] * 5, *(SamplingSupport.from_lists(sets) for sets in ([[0]] * 4, [[0]] * 4 + [[]]))),
        *each("sampling_support", *(SamplingSupport.from_lists([[0, 2]] * 4 + [ids]) for ids in ([1, 2], [0, 2, 2], [0, 4]))),
    ],
    loss_of_hidden: [
        *each("hidden", torch.zeros(5, 1, 6)),
        *each("weight", torch.zeros(16, 6, dtype=INT64), torch.zeros(16, 5), torch.zeros(16, 6, dtype=DOUBLE)),
        *each("labels", torch.zeros(4, dtype=INT64)),
        *each("vocab_size", 17),
        *each("max_logits_bytes", 63, 1e9),
        *each("loss_scale", 0.0, math.nan, "8", torch.ones(2)),
        *each("advantages", torch.arange(5.0)),
        *each("sampling_support", [[0]] * 5, SamplingSupport.from_lists([[0, 2]] * 4 + [[1, 2]])),
    ],
    loss_of_log_probs: [
        *each("sampling_support", KEPT),
        *each("temperature", 0.7),
        {"entropy_coefficient": 0.1, "regularizer_weights": torch.ones(2)},
    ],
    loss_of_the_sampler: [*each("rollout_log_probs", None), *each("correction", CorrectionSettings(kind="tis"))],
    log_probs_of_hidden: [
        *each("labels", torch.zeros(5, dtype=INT64, device="meta")),
        *each("loss_mask", torch.ones(4, dtype=torch.bool), ONES),
        *each("labels", torch.zeros(5)),
        *each("hidden", None, torch.zeros(5, 5)),
        *each("temperature", 0, torch.ones(3), torch.linspace(0, 1, 5)),
        *each("sampling_support", [[0]] * 5, SamplingSupport.from_lists([[0, 2]] * 4 + [[]])),
        {"sampling_support": KEPT, "hidden": torch.zeros(5, 6, requires_grad=True)},
        {"sampling_support": KEPT, "temperature": ONES},
    ],
    log_probs_of_logits: [
        *each("logits", torch.zeros(2, 3, 16), torch.zeros(8, 16, dtype=INT64)),
        *each("labels", torch.zeros(7, dtype=INT64), torch.zeros(8).int(), torch.zeros(8, dtype=INT64, device="meta")),
        *each("loss_mask", torch.ones(7, dtype=torch.bool), torch.ones(8), [True] * 8),
        {"inplace": True, "logits": torch.zeros(1, 16).expand(8, 16)},
        *each("temperature", 0.0, -1.0, math.nan, math.inf),
        *each("vocab_size", 0, 17),
        *each("backend", "cuda"),
        {"backend": "triton", "logits": torch.zeros(8, 16, dtype=DOUBLE)},
        *each("sampling_support", KEPT),
    ],
    correction_of: [
        *each("cu_seqlens", bounds(0, 5), bounds(0, 2, 1, 3), bounds(1, 3), torch.tensor([0.0, 3.0])),
        *each("old_log_probs", torch.zeros(3, dtype=torch.float16)),
        *each("rollout_log_probs", torch.zeros(3, dtype=INT64), torch.zeros(4), torch.full((3,), math.nan)),
        *each("loss_mask", torch.full((3,), 0.5), torch.tensor([1, 2, 0])),
        *({name: torch.zeros(3, 1)} for name in VECTORS),  # FB-116: a column against a row gives a matrix with a finite mean
        *each("kind", "ticepop", "mask"),
        {"kind": "tis", "level": "sample"},
        *({"kind": "tis", "high": value} for value in (-1.0, math.inf, 0.0, 1e9)),
        {"kind": "icepop", "low": "a"},
        {"kind": "icepop", "low": 3.0, "high": 2.0},
        {"kind": "mask", "low": 0.0, "high": 0.2},
        {"kind": "icepop", "level": "sequence_mean", "low": 0.9},
        {"kind": "tis", "level": "sequence_sum"},
        *({"kind": "none", name: value} for name, value in (("high", 2.0), ("level", "sequence_sum"))),
        {"kind": "mask", "low": 1e-9, "high": 2.0},
        {"sequence_delta": -0.1},
        {"sequence_delta": 0.1, "log_probs": None},
    ],
}


def shown(value: object) -> str:
    if isinstance(value, SamplingSupport):
        return f"sets {[ids.tolist() for ids in value.ids.split(value.sizes.tolist())]}"
    if not isinstance(value, Tensor):
        return repr(value)
    numbers = "" if value.is_meta or value.numel() > 3 or value.layout != torch.strided else f" {value.tolist()}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{numbers}{' on meta' * value.is_meta}"


def message_of(door: Callable, changes: dict) -> tuple[str, str]:
    """(name of the error, what it says)."""
    try:
        door(**changes)
    except (ConfigError, DataError) as error:
        return type(error).__name__, str(error)
    raise AssertionError(f"{door.__name__} takes {changes}")


def entries() -> Iterator[tuple[str, str, str]]:
    """(title, the call or the launch, what is said)."""
    with names_forgotten():
        for door, rows in REFUSED.items():
            for changes in rows:
                kind, text = message_of(door, changes)
                yield door.__name__, ", ".join(f"{name}={shown(value)}" for name, value in changes.items()), f"{kind}: {text}"
    for rule, launches in validation_cases.REFUSED.items():
        for settings in launches:
            for text in validation_cases.judge(rule, settings):
                yield f"rule {rule}", validation_cases.as_settings(settings).replace("`", ""), text
    for settings in validation_cases.WARNED:
        for text in validation_cases.warnings_at(settings):
            yield "warning", validation_cases.as_settings(settings).replace("`", ""), text


def messages_table() -> str:
    lines, last = [], None
    for title, given, text in entries():
        lines += [f"\n{title}\n"] if title != last else []
        lines += [f"  {given}\n", f"    {re.sub(chr(10), chr(10) + '    ', text)}\n"]
        last = title
    return "".join(lines).lstrip("\n")
