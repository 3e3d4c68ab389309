"""Tries a user's own loss, and says where it is not what it declares. It runs once a launch, before any data.

The package knows nothing of such a loss but its declaration, and the fused head and the layouts rely on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatron_rl.config import LOG_RATIO_BOUND, PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.layout.packing import document_sums
from megatron_rl.loss_hub import PolicyLoss, get_policy_loss, is_built_in
from megatron_rl.losses.reduce_torch import LossValues, evaluate, evaluate_batch
from megatron_rl.losses.token_batch import JointSums, TokenBatch
from megatron_rl.validation.halves import FEW, NUM_PROBES, changed_in, halves, num_apart

_NOISE = 1e-6
_FACTOR_NOISE = 1e-2  # a loss may compute in bfloat16
_RESULTS = ("value", "derivative")
# Evenly from 0 to 1, each with two advantages, of a sample of some tokens: NUM_PROBES tokens.
_NUM_PROBABILITIES, _REPEATS = NUM_PROBES // 16, 8


class _IsRandom(Exception):
    """Two results for the same inputs."""


def own_loss_problems(config: PolicyLossConfig) -> tuple[str, ...]:
    """The contradictions of the configured loss; none of a built-in one, and where a name or number of it is wrong, which other
    rules report."""
    own = _own_loss(config)
    return () if own is None else contradictions(*own)


def own_loss_warnings(config: PolicyLossConfig) -> tuple[str, ...]:
    """What the configured loss may mean, and rarely does; as `own_loss_problems` of a built-in one."""
    own = _own_loss(config)
    return () if own is None else cautions(*own)


def _own_loss(config: PolicyLossConfig) -> tuple[PolicyLoss, tuple[float, float] | None, Mapping[str, float]] | None:
    """The loss, its clip and its parameters."""
    try:
        loss = get_policy_loss(config.policy_loss)
        clip = loss.clip_bounds(config.clip_ratio_low, config.clip_ratio_high)
        parameters = loss.resolve_parameters(config.loss_parameters)
    except ConfigError:
        return None
    return None if is_built_in(loss.name) else (loss, clip, parameters)


def contradictions(loss: PolicyLoss, clip: tuple[float, float] | None, parameters: Mapping[str, float]) -> tuple[str, ...]:
    """A text for each way in which a loss differs from its declaration, at these numbers.

    Nothing for a loss that raises here, and for one that is random: another result then shows nothing. What cannot be a result, as
    a scalar, is told alone. An element may not depend on the others, nor may a sample at level "batch", of which nothing else is
    told. A derivative that the loss gives must be what autograd makes of its value, in which factors that are constant for the
    gradient are detached. A value without a graph has another one.
    """
    find = _batch_contradictions if loss.level == "batch" else _contradictions
    return tuple(find(loss, _keywords(clip, parameters)))


def cautions(loss: PolicyLoss, clip: tuple[float, float] | None, parameters: Mapping[str, float]) -> tuple[str, ...]:
    """A text where the sign of the coefficient at ratio 1 turns with the probability: a weight of the log-probability that is not
    detached, w A log p, has the derivative w A (1 + log p)."""
    keywords = _keywords(clip, parameters)
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            towards = _towards(loss, keywords)
    except Exception:  # of any type: it is the user's function
        return ()
    is_right, is_wrong = ((sign * towards >= 0).all(0) & towards.any(0) for sign in (1, -1))
    wrong, right = is_wrong.nonzero()[:, 0].tolist(), is_right.nonzero()[:, 0].tolist()
    if not wrong or not right or max(wrong) > min(right):
        return ()
    return (
        f"{_with_numbers(loss, keywords)} at ratio 1 makes tokens of negative advantage likelier where their probability is under "
        f"{_probabilities()[max(wrong)]:.2g}: is a weight not detached?",
    )


def _keywords(clip: tuple[float, float] | None, parameters: Mapping[str, float]) -> dict[str, float]:
    return ({} if clip is None else {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1]}) | dict(parameters)


def _probabilities() -> Tensor:
    return (torch.arange(_NUM_PROBABILITIES, dtype=torch.float32) + 0.5) / _NUM_PROBABILITIES


def _towards(loss: PolicyLoss, keywords: Mapping[str, float]) -> Tensor:  # [2 advantages, probabilities]
    """Above 0 where a step follows the advantage: by the gradient of the value where each ratio is 1, of samples of equal tokens,
    -1 or 1 their advantage. One test for all levels."""
    signs, log_probs = torch.tensor([-1.0, 1.0], dtype=torch.float32), _probabilities().log()

    def each(of_one_sign: Tensor) -> Tensor:  # [probabilities] -> [signs x probabilities x tokens]
        return of_one_sign.repeat(len(signs)).repeat_interleave(_REPEATS)

    advantages = signs.repeat_interleave(_NUM_PROBABILITIES * _REPEATS)
    # Other policies are the trained one too.
    given = {name: log_probs if name.endswith("log_probs") else _FURTHER_PROBES[name]()[:_NUM_PROBABILITIES] for name in loss.needs}
    further = {name: each(vector) for name, vector in given.items()}
    vectors = (torch.zeros_like(advantages), advantages, each(log_probs))
    if loss.level == "batch":
        documents = torch.arange(len(signs) * _NUM_PROBABILITIES).repeat_interleave(_REPEATS)
        live = torch.ones_like(documents, dtype=torch.bool)
        found = _of_batch(loss, keywords, *vectors, further, documents, live, prefers_autograd=True)
    else:
        found = evaluate(loss, *vectors, keywords, further, prefers_autograd=True)
    towards = -(found.derivative * advantages).view(len(signs), _NUM_PROBABILITIES, _REPEATS).sum(-1)
    return torch.where(towards.abs() > _NOISE, towards, 0.0)


def _sign_problem(loss: PolicyLoss, keywords: Mapping[str, float], towards: Tensor) -> Iterator[str]:
    if towards.any() and (towards <= 0).all():
        yield (
            f"{_with_numbers(loss, keywords)} at ratio 1 makes likelier what has a negative advantage, and less likely what has a "
            "positive one: a loss is minimised, so its value is -advantages times something that grows with log_probs; is the "
            "minus missing, or are old and new swapped in the ratio?"
        )


def _of_batch(
    loss: PolicyLoss,
    keywords: Mapping[str, float],
    log_ratio: Tensor,  # [T], and the following
    advantages: Tensor,
    log_probs: Tensor,
    further: Mapping[str, Tensor],
    documents: Tensor,
    live: Tensor,
    *,
    prefers_autograd: bool = False,
) -> LossValues:
    """Of whole samples on one rank; masked tokens have no part."""
    _, own, lengths = documents.unique(return_inverse=True, return_counts=True)
    cu_seqlens = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    sums = JointSums(SINGLE, lengths.numel(), live.device, is_checked=False)
    counts = document_sums(live.double(), cu_seqlens)
    batch = TokenBatch(log_ratio, log_probs, advantages, live, own, counts, cu_seqlens, sums)
    weights = torch.ones_like(log_ratio)
    return evaluate_batch(loss, batch, weights, keywords, further, has_importance_weights=prefers_autograd)[0]


def _batch_contradictions(loss: PolicyLoss, keywords: Mapping[str, float]) -> Iterator[str]:
    """Of samples of 1, 2, ... tokens on one rank, every fifth token masked."""
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            log_ratio, advantages, log_probs = _probes()
            documents = torch.repeat_interleave(torch.arange(1, 92))[:NUM_PROBES]
            mask = torch.arange(NUM_PROBES) % 5 != 4
            further = {name: _FURTHER_PROBES[name]() for name in loss.needs}

            def results_of(tokens: Tensor) -> tuple[Tensor, Tensor]:  # the places of whole samples -> value, derivative [T]
                vectors = (log_ratio[tokens], advantages[tokens], log_probs[tokens])
                others, live = {name: vector[tokens] for name, vector in further.items()}, mask[tokens]
                found = _of_batch(loss, keywords, *vectors, others, documents[tokens], live)
                return torch.where(live, found.value, 0.0), torch.where(live, found.derivative, 0.0)

            whole, again = (results_of(torch.arange(NUM_PROBES)) for _ in range(2))
            if any(map(_num_apart, whole, again)):
                raise _IsRandom
            given = (log_ratio, advantages, log_probs, *further.values(), documents)  # the numbers of the samples, and so lengths
            of_samples = (torch.bincount(documents, vector) / documents.bincount() for vector in given)
            parts = (torch.isin(documents, samples).nonzero()[:, 0] for samples in halves(of_samples))
            changed = changed_in(parts, results_of, whole)
            towards = _towards(loss, keywords)
    except DataError as error:  # of what it returned, or wrote into
        yield f"{error} (tried on {NUM_PROBES} tokens)"
        return
    except Exception:  # of any type: it is the user's function
        return
    yield from _sign_problem(loss, keywords, towards)
    if changed:
        yield (
            f"{_with_numbers(loss, keywords)} has a {_RESULTS[min(changed)]} at one sample that depends on the other samples, so "
            "it would change with the layout: take sums and means over each sample, by sample_sum and sample_mean of the batch"
        )


def _contradictions(loss: PolicyLoss, keywords: Mapping[str, float]) -> Iterator[str]:
    def at(
        log_ratio: Tensor, advantages: Tensor, log_probs: Tensor, *further: Tensor, prefers_autograd: bool = False
    ) -> LossValues:
        vectors = dict(zip(loss.needs, further, strict=True))
        return evaluate(loss, log_ratio, advantages, log_probs, keywords, vectors, prefers_autograd=prefers_autograd)

    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            probes = [*_probes(), *(_FURTHER_PROBES[name]() for name in loss.needs)]
            log_ratio, advantages, log_probs, *further = probes
            own, of_value = at(*probes), at(*probes, prefers_autograd=True).derivative
            if any(map(_num_apart, own, at(*probes))):
                raise _IsRandom
            read = probes if loss.takes_log_probs else [log_ratio, advantages, *further]
            whole = own.value, own.derivative
            changed = changed_in(halves(read), lambda places: at(*(vector[places] for vector in probes))[:2], whole)
            is_idle = torch.arange(NUM_PROBES) % 2 == 0
            mixed = at(log_ratio, advantages.masked_fill(is_idle, 0.0), log_probs, *further)
            towards = _towards(loss, keywords)
    except DataError as error:  # of what it returned, or wrote into
        yield str(error)
        return
    except Exception:  # of any type: it is the user's function
        return
    name, element = _with_numbers(loss, keywords), "sample" if loss.level == "sequence" else "token"
    is_bad = ~(own.value.isfinite() & own.derivative.isfinite())
    if is_bad.any():
        nearest = int(log_ratio.abs().masked_fill(~is_bad, torch.inf).argmin())
        yield (
            f"{name} is not finite for {int(is_bad.sum())} of {NUM_PROBES} pairs of log-ratio and advantage, with the smallest "
            f"log-ratio {log_ratio[nearest]:.3g} and advantage {advantages[nearest]:.3g}, and a {element} there would end the run: "
            "write bounded_exp for exp, and give a function that is not defined everywhere torch.where(is_inside, x, 0.0)"
        )
        return
    # A value that is 0 as well comes from a loss whose coefficient is 0.
    if own.value.any() and not own.derivative.any():
        yield (
            f"{name} has derivative 0 by log_ratio and log_probs everywhere, so nothing would train: compute its value from them "
            "without detach, or return LossValue(value, derivative, is_clipped)"
        )
    yield from _sign_problem(loss, keywords, towards)
    idle = {"gradient": mixed.derivative, "value": mixed.value}
    kept = [what for what, tensor in idle.items() if (tensor[is_idle].abs() > _NOISE).any()]
    if loss.zero_advantage_has_no_gradient and kept:
        yield (
            f"{name} declares zero_advantage_has_no_gradient, and has a {kept[0]} at advantage 0: the fused head would leave it "
            "out; remove the declaration"
        )
    if changed:
        yield (
            f"{name} is declared elementwise, and its {_RESULTS[min(changed)]} at one {element} depends on the others, so it would "
            'change with the layout: leave means and sums to the package, or declare level="batch"'
        )
    if not changed and own.derivative.any() and not of_value.any():
        yield (
            f"{name} returns a derivative, and a value that has none by log_ratio and log_probs: detach only what is constant for "
            "the gradient, as in -weight.detach() * advantages * log_probs; or leave the derivative to autograd"
        )
    if not changed and own.derivative.any() and of_value.any():
        is_moved = of_value != 0
        factor = float((own.derivative[is_moved] / of_value[is_moved]).median())
        if abs(factor - 1.0) > _FACTOR_NOISE and not _num_apart(own.derivative, factor * of_value):
            yield (
                f"{name} returns {factor:g} times the derivative of its value: return d value / d log-probability, or "
                "leave it to autograd"
            )
        elif (num_wrong := _num_apart(own.derivative, of_value, rtol=_FACTOR_NOISE)) > FEW:
            yield (
                f"{name} returns a derivative that its value does not have, for {num_wrong} of {NUM_PROBES} pairs of log-ratio "
                "and advantage: in the value, detach what is constant for the gradient; or leave the derivative to autograd; "
                f"beyond a log-ratio of +-{LOG_RATIO_BOUND:g} the derivative through it is 0"
            )


def _with_numbers(loss: PolicyLoss, keywords: Mapping[str, float]) -> str:
    numbers = ", ".join(f"{name}={value:g}" for name, value in keywords.items())
    return f"policy_loss={loss.name}" + f" with {numbers}" * bool(numbers)


def _probes() -> tuple[Tensor, Tensor, Tensor]:  # log_ratio, advantages and log_probs, [NUM_PROBES] float32
    """All sizes that a run may meet, in all combinations: a loss may be 0 for most of them. Some log-ratios are exactly 0, and
    some beyond the bound: a clip leaves a quarter of them a gradient, which is more than FEW."""
    drawn = torch.rand(5, NUM_PROBES, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    signs = 2.0 * (drawn[:2].argsort(dim=1) % 2) - 1  # half of them are 1: a half of the probes may have one sign alone
    log_ratio = signs[0] * 10 ** (6 * drawn[2] - 5)  # 1e-5 to 10
    log_ratio[::16] = 0.0
    log_ratio[4::8] = LOG_RATIO_BOUND * signs[0, 4::8] * (1 + drawn[2, 4::8] / 2)
    advantages = signs[1] * 10 ** (5 * drawn[3] - 3)  # 1e-3 to 100
    return log_ratio, advantages, log_ratio.clamp(max=0.0) - 10 ** (4 * drawn[4] - 3)  # no probability is above 1


# What a loss may need besides: counts of short and of long samples, entropies from a sure token to an even choice, and numbers of
# other policies.
_FURTHER_PROBES = {
    "token_counts": lambda: (2.0 ** (torch.arange(NUM_PROBES, dtype=torch.float32) % 32 / 2.5)).round(),
    "entropy": lambda: 1e-3 + 11 * torch.rand(NUM_PROBES, generator=torch.Generator().manual_seed(1), dtype=torch.float32),
    "rollout_log_probs": lambda: -9 * torch.rand(NUM_PROBES, generator=torch.Generator().manual_seed(2), dtype=torch.float32),
    "ref_log_probs": lambda: -9 * torch.rand(NUM_PROBES, generator=torch.Generator().manual_seed(3), dtype=torch.float32),
}


def _num_apart(values: Tensor, others: Tensor, rtol: float = 1e-4) -> int:
    return num_apart(values, others, rtol, _NOISE)
