"""The rows of the selftest: one table, which says of each row its name, when it runs, what it runs and how far off it may be.

A loss, an aggregation, a KL estimator, a correction and a balancing loss of routers has its rows by its registration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch

from megatron_rl.config import Backend
from megatron_rl.errors import ConfigError
from megatron_rl.ops.backends import is_interpreted, why_triton_is_missing
from megatron_rl.testing.reference import CLIPS
from megatron_rl.testing.selftest_bench import Bench, Measured
from megatron_rl.testing.selftest_terms import AGGREGATIONS, ALL_TERMS, FUSED, LOGITS, OF_STEPS, OF_TOKENS, Case, term_pairs
from megatron_rl.validation.auxiliary_losses import TYPES_WITH_A_LOSS

# On any layout a float32 gradient of the tiny models is 3e-7 to 7e-7 from the float64 truth; the smallest wrong factor, one token
# too many of a hundred, moves it by 9e-3.
BOUND = 1e-5
# Interpreted kernels take seconds a row: so one row of each loss, on each head.
INTERPRETED = tuple(zip(CLIPS, islice(cycle(AGGREGATIONS), len(CLIPS)), strict=True))
# A loss of tokens and one of whole samples.
OF_SHAPES = ("grpo", "gspo")
# The auxiliary losses of routers: the z-loss, and one for each type of load balancing.
Z_LOSS = "z_loss"
ROUTER_LOSSES = (Z_LOSS, *TYPES_WITH_A_LOSS)


@dataclass(frozen=True, slots=True)
class Row:
    """runs_when: whether it can run on these ranks. run: what it measures. bound: of each relative error of a comparison; the probe
    has its own bound. case: what a row of a loss runs."""

    name: str
    runs_when: Callable[[Bench], bool]
    run: Callable[[Bench], Measured]
    bound: float = BOUND
    case: Case | None = None
    is_probe: bool = False


def table(runs_triton: Callable[[Case], bool]) -> list[Row]:
    """All rows, in the order of the report."""
    rows = [
        row_of_probe("schedule probe", "dense"),
        row_of_probe("schedule probe, experts", "experts"),
    ]
    on_triton = [case for case in cases_of(Backend.TRITON) if runs_triton(case)]
    of_torch = [*cases_of(Backend.TORCH), *own_group_cases()]
    for is_per_token, cases in ((False, [*of_torch, *on_triton]), (True, per_token_cases())):
        rows += map(row_of_loss, cases)
        rows += [row_of_router_loss(name, is_per_token=is_per_token) for name in ROUTER_LOSSES]
    return rows


def table_of_shape(runs_triton: Callable[[Case], bool], policy_loss: str | None = None) -> list[Row]:
    """The rows of a model of the field: what depends on its parameters, and no table of losses. policy_loss: of this one alone."""
    losses = OF_SHAPES if policy_loss is None else (policy_loss,)
    steps = (("sample_mean", LOGITS), ("prompt_mean", FUSED), ("token_mean", LOGITS))
    cases = [Case(loss, *step, backend) for backend in (Backend.TORCH, Backend.TRITON) for step in steps for loss in losses]
    cases = [case for case in cases if case.backend == Backend.TORCH or runs_triton(case)]
    cases.append(Case(losses[0], "token_mean", FUSED, has_own_groups=True))
    cases += [Case(loss, "token_mean", head, is_per_token=True) for head in (LOGITS, FUSED) for loss in losses]
    probes = [row_of_probe("schedule probe", "dense"), row_of_probe("schedule probe, experts", "experts")]
    return [*probes, *map(row_of_loss, cases)]


def table_of_kl(runs_triton: Callable[[Case], bool], estimator: str) -> list[Row]:
    """The rows of one KL estimator: with each loss, aggregation and head."""
    every = itertools.product((Backend.TORCH, Backend.TRITON), (LOGITS, FUSED), CLIPS, AGGREGATIONS)
    cases = [Case(loss, aggregation, head, backend, term=f"KL {estimator}") for backend, head, loss, aggregation in every]
    probe = row_of_probe("schedule probe", "dense")
    return [probe, *(row_of_loss(case) for case in cases if case.backend == Backend.TORCH or runs_triton(case))]


def row_of_probe(name: str, gradients: str) -> Row:
    return Row(name, lambda bench: gradients in bench.probes, lambda bench: bench.probe(gradients), is_probe=True)


def row_of_loss(case: Case) -> Row:
    def runs_when(bench: Bench) -> bool:
        is_of_a_step = case.is_per_token or case.term in OF_STEPS
        return (bench.has_own_groups or not case.has_own_groups) and (bench.megatron_version is not None or not is_of_a_step)

    return Row(str(case), runs_when, lambda bench: bench.loss(case), case=case)


def row_of_router_loss(name: str, *, is_per_token: bool) -> Row:
    title = f"{name} of routers, exact{', per-token' if is_per_token else ''}"
    return Row(title, lambda bench: name in bench.router_losses, lambda bench: bench.router_loss(name, is_per_token=is_per_token))


def cases_of(backend: Backend) -> list[Case]:
    heads = (LOGITS, FUSED)
    plain = [
        Case(policy_loss, aggregation, head, backend) for head in heads for policy_loss in CLIPS for aggregation in AGGREGATIONS
    ]
    return plain + [Case(loss, aggregation, head, backend, term=term) for head in heads for loss, aggregation, term in term_pairs()]


def own_group_cases() -> list[Case]:
    """A loss of tokens and one of whole samples, whose sums go over the micro-batch's group."""
    pairs = (("grpo", "token_mean"), ("gspo", "sample_mean"))
    return [Case(*pair, head, has_own_groups=True) for head in (LOGITS, FUSED) for pair in pairs]


def per_token_cases() -> list[Case]:
    """Of token_mean, which is what the contract divides by."""
    return [Case(policy_loss, "token_mean", head, is_per_token=True) for head in (LOGITS, FUSED) for policy_loss in CLIPS]


def triton_here(
    device: torch.device, *, interprets: bool, cases: Sequence[Case] | None = None
) -> tuple[Callable[[Case], bool], str | None]:
    """(which of the cases of Triton run on this device, what is left out and why). cases: of the whole table; None: cases_of.

    interprets: on a CPU, run a few rows in Triton's interpreter; TRITON_INTERPRET is set. Raises ConfigError on CUDA.
    """
    missing = why_triton_is_missing()
    if device.type == "cuda":
        if interprets:
            raise ConfigError("--interpret-triton is for ranks without CUDA: here kernels run compiled; remove it")
        if torch.version.hip is not None:
            missing = "its kernels need CUDA, and this torch is built for ROCm"
        return (lambda case: missing is None), f"Triton: {missing}" if missing else None
    if not interprets:
        hint = "" if missing else "; --interpret-triton runs a few rows in its interpreter"
        return (lambda case: False), f"Triton: its kernels need CUDA, and the ranks are on the CPU{hint}"
    if not is_interpreted():
        why = missing or "it was imported before --interpret-triton could ask for its interpreter"
        return (lambda case: False), f"Triton: {why}"
    rows = cases_of(Backend.TRITON) if cases is None else cases
    few = sum(map(is_interpreted_too, rows))
    left_out = f"Triton: all but {few} of {len(rows)} rows, which its interpreter ran; compiled kernels need CUDA"
    return is_interpreted_too, left_out


def is_interpreted_too(case: Case) -> bool:
    """Of each loss a row, and one row with three terms, on each head."""
    if case.term:
        return (case.policy_loss, case.term) == (OF_TOKENS, ALL_TERMS)
    return (case.policy_loss, case.aggregation) in INTERPRETED


@dataclass(frozen=True, slots=True)
class Choice:
    """The rows that were asked for. What is a user's own is registered before this package's tables are made, on import."""

    policy_loss: str | None = None
    """The rows of this loss alone; None: of all."""
    texts: tuple[str, ...] = ()
    """The rows with one of these in their names; none: all."""
    aggregation: str | None = None
    """The rows of this aggregation alone; None: of all."""
    kl_estimator: str | None = None
    """Its table; None: the table of all losses, in which each estimator has a few rows."""

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of a probe run whatever is chosen. Raises ConfigError where a text chooses no row."""
        if self.texts and not any(map(self._has, rows)):
            texts = " ".join(f"--row {text!r}" for text in self.texts)
            raise ConfigError(f"{texts}: no row has that in its name; without --row the rows are listed as they run")
        return [row for row in rows if row.is_probe or self._has(row)]

    def _has(self, row: Row) -> bool:
        of_case = row.case is None or (
            self.policy_loss in (None, row.case.policy_loss) and self.aggregation in (None, row.case.aggregation)
        )
        return of_case and (not self.texts or any(text in row.name for text in self.texts))
