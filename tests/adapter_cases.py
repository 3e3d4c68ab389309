"""How each adapter is run by test_adapters.py: one small class a host.

A new adapter adds a class here and its name to ADAPTERS. `run` sends one optimiser step through what the host sees: its
micro-batches, its factors, the call of our loss under its name, with settings as a launch types them. tests/<host>_cases.py
emulates the host; the samples and the float64 truth are those of dense_row_cases.py. What the class does not say, such as the
losses, is read from the adapter itself.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import dense_row_cases
import nemo_rl_cases
import roll_cases
import skyrl_cases
import verl_cases
from dense_row_cases import Result, RowCase, largest_error, samples_of
from torch import Tensor

from megatron_rl.hosts.adapters import adapter_named
from megatron_rl.testing.layout_step import StepSample

Step = tuple[Sequence[StepSample], Sequence[Tensor]]  # samples, and the log-probabilities of their responses
SAMPLER_GAP = 0.1  # the sampler's log-probabilities are so much lower where a correction is tried


class Adapter:
    """What the suite asks of a host.

    metrics: what our loss reports there, by the host's names. num_ranks: processes
    that the layouts need, on Megatron's groups; 1: ranks are a loop. shorts: layouts of several micro-batches in one process.
    other: the layout of the losses beside LOSSES. terms: the host's own terms that read masked positions too, for `run`.
    of_sampler: its settings beside a correction of ours."""

    name: str
    metrics: frozenset[str]
    num_ranks = 1
    shorts: tuple[Mapping[str, Any], ...] = ({"sizes": (3, 5)},)
    other: Mapping[str, Any] = {"dp": 2, "cp": 2, "sizes": (2, 5), "num_samples": 14}
    terms: Mapping[str, Any] = {}
    of_sampler: Mapping[str, Any] = {}
    case: Callable[..., Any] = RowCase

    @property
    def module(self) -> Any:
        return adapter_named(self.name)

    def modes(self) -> list[tuple[str, str]]:
        """(loss, aggregation), all that can be trained there by name."""
        return self.module.OFFER.pairs()

    @property
    def aggregations(self) -> list[str]:
        return [*dict.fromkeys(aggregation for _, aggregation in self.modes())]

    def layouts(self, loss: str) -> list[Any]:
        raise NotImplementedError

    def others(self, losses: Sequence[str]) -> list[Any]:
        """A layout for each aggregation of the other losses."""
        return [self.case(loss=loss, aggregation=one, **self.other) for loss, one in self.modes() if loss not in losses]

    def install(self, monkeypatch: Any) -> None:
        """The modules of the host that ours imports, emulated."""

    def step(self, case: Any) -> Step:
        return samples_of(case)

    def run(
        self, case: Any, step: Step, *, poison: float | None = None, own: Mapping[str, Any] | None = None, **settings: Any
    ) -> Result:
        """poison: in masked positions. own: our settings by their names here. settings: the host's."""
        raise NotImplementedError

    def truth(self, case: Any, step: Step) -> tuple[float, list[Tensor]]:
        return dense_row_cases.truth(case, *step)

    def errors(self, cases: Sequence[Any], pool: Callable[[], Any]) -> dict[str, float]:
        """pool: makes the RankPool of num_ranks processes."""
        found = {}
        for case in cases:
            step = self.step(case)
            found[str(case)] = largest_error(self.run(case, step), *self.truth(case, step))
        return found

    def corrected(self, case: Any, own: Mapping[str, Any]) -> tuple[float, float]:
        """(the loss of the step, the same with this correction of ours for a sampler SAMPLER_GAP below)."""
        samples, log_probs = self.step(case)
        below = [replace(one, rollout_log_probs=[value - SAMPLER_GAP for value in one.old_log_probs or []]) for one in samples]
        found = self.run(case, (below, log_probs), own=own, **self.of_sampler)
        return self.run(case, (samples, log_probs)).loss, found.loss


class Verl(Adapter):
    name, case = "verl", verl_cases.Case
    metrics = frozenset({"actor/pg_clipfrac", "actor/ppo_kl"})

    def layouts(self, loss):
        return verl_cases.matrix([loss])

    def run(self, case, step, *, poison=None, own=None, **settings):
        config = verl_cases.emulated_config(case)
        config.policy_loss |= dict(own or {}) | settings
        advantages = verl_cases.given_advantages(step[0])
        return verl_cases.run_step(case, *step, advantages, verl_cases.emulated_ppo_loss, config, poison)


class NemoRL(Adapter):
    name, case = "nemo_rl", nemo_rl_cases.Case
    metrics = frozenset({"loss", "probs_ratio", "clipped_ratio_fraction"})
    shorts = ({"dp": 2, "sizes": (2, 5), "num_samples": 14, "has_dropped": True},)
    other = Adapter.other | {"packing": "a call a sequence"}
    terms = {"reference_policy_kl_penalty": 0.1}

    def layouts(self, loss):
        return nemo_rl_cases.matrix([loss])

    def run(self, case, step, *, poison=None, own=None, **settings):
        loss = nemo_rl_cases.make_loss(case, **settings, **{f"megatron_rl_{name}": value for name, value in (own or {}).items()})
        whole = nemo_rl_cases.make_step(case, step)
        return nemo_rl_cases.run_step(case, whole if poison is None else nemo_rl_cases.poisoned(whole, poison), loss, poison=poison)

    def truth(self, case, step):
        return nemo_rl_cases.truth(case, nemo_rl_cases.make_step(case, step))


class Roll(Adapter):
    """On gloo ranks, with logits of vocabulary-parallel heads."""

    name, case, num_ranks = "roll", roll_cases.Case, 4
    metrics = frozenset(
        {"actor/total_loss@sum", "actor/pg_loss@sum", "actor/kl_loss@sum", "actor/ppo_ratio_clipfrac@mean", "actor/policykl@mean"}
    )
    shorts = ({"sizes": (3, 5)}, {"sizes": (3, 5), "packing": "a call a sequence"})
    other = {"cp": 2, "sizes": (4, 12)}
    terms = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_loss_coef": 0.02}

    def layouts(self, loss):
        return roll_cases.matrix([loss])

    def run(self, case, step, *, poison=None, own=None, **settings):
        numbers = {f"MEGATRON_RL_{name.upper()}": value for name, value in (own or {}).items()}
        whole, found = roll_cases.make_step(case, step), roll_cases.settings_of(case, **settings, **numbers)
        return roll_cases.run_step(case, whole if poison is None else roll_cases.poisoned(whole, poison), found, poison)

    def errors(self, cases, pool):
        ranks = pool()
        return roll_cases.errors_of(cases, lambda chosen, **layout: ranks.run(roll_cases.results_on_rank, chosen, **layout))


class SkyRL(Adapter):
    name = "skyrl"
    metrics = frozenset({"clip_ratio", "tis"})
    terms = {"off_policy_correction": SimpleNamespace(tis_ratio_type="token", token_tis_ratio_clip_high=1.05)}

    def layouts(self, loss):
        return skyrl_cases.matrix([loss])

    def install(self, monkeypatch):
        for name, module in skyrl_cases.emulated_skyrl().items():
            monkeypatch.setitem(sys.modules, name, module)

    def run(self, case, step, *, poison=None, own=None, **settings):
        return skyrl_cases.run_step(case, *step, poison=poison, own=dict(own or {}), **settings)


ADAPTERS: dict[str, Adapter] = {one.name: one() for one in (Verl, NemoRL, Roll, SkyRL)}

# Our corrections, and the factor of each token's loss where the sampler is SAMPLER_GAP below.
CORRECTIONS: tuple[tuple[Mapping[str, Any], float], ...] = (
    ({"importance_correction": "tis"}, math.exp(SAMPLER_GAP)),
    ({"importance_correction": "tis", "importance_correction_high": 1.05}, 1.05),
    (
        {"importance_correction": "tis", "importance_correction_level": "sequence_mean", "importance_correction_high": 2},
        math.exp(SAMPLER_GAP),
    ),
    (
        {"importance_correction": "tis", "importance_correction_level": "sequence_mean", "importance_correction_high": 1.05},
        1.05,
    ),
    ({"importance_correction": "icepop", "importance_correction_low": 0.5, "importance_correction_high": 1.05}, 0.0),
    ({"importance_correction": "mask", "importance_correction_low": 0.5, "importance_correction_high": 1.2}, 1.0),
    ({"importance_correction": "mask", "importance_correction_low": 0.5, "importance_correction_high": 1.05}, 0.0),
    (
        {
            "importance_correction": "mask",
            "importance_correction_level": "sequence_mean",
            "importance_correction_low": 0.5,
            "importance_correction_high": 1.05,
        },
        0.0,
    ),
    ({"off_policy_sequence_delta": 10.0}, 1.0),
)
