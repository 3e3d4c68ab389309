"""Tries a user's own loss, and says where it is not what it declares. It runs once a launch, before any data.

The package knows nothing of such a loss but its declaration, and the fused head and the layouts rely on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatron_rl.config import PolicyLossConfig
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


class _IsRandom(Exception):
    """Two results for the same inputs."""


def own_loss_problems(config: PolicyLossConfig) -> tuple[str, ...]:
    """The contradictions of the configured loss; none of a built-in one, and where a name or number of it is wrong, which other
    rules report."""
    try:
        loss = get_policy_loss(config.policy_loss)
        clip = loss.clip_bounds(config.clip_ratio_low, config.clip_ratio_high)
        parameters = loss.resolve_parameters(config.loss_parameters)
    except ConfigError:
        return ()
    return () if is_built_in(loss.name) else contradictions(loss, clip, parameters)


def contradictions(loss: PolicyLoss, clip: tuple[float, float] | None, parameters: Mapping[str, float]) -> tuple[str, ...]:
    """A text for each way in which a loss differs from its declaration, at these numbers.

    Nothing for a loss that raises here, and for one that is random: another result then shows nothing. What cannot be a result, as
    a scalar, is told alone. An element may not depend on the others, nor may a sample at level "batch", of which nothing else is
    told. A derivative that the loss gives must be what autograd makes of its value, in which factors that are constant for the
    gradient are detached. A value without a graph has another one.
    """
    clips = {} if clip is None else {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1]}
    find = _batch_contradictions if loss.level == "batch" else _contradictions
    return tuple(find(loss, clips | dict(parameters)))


def _batch_contradictions(loss: PolicyLoss, keywords: Mapping[str, float]) -> Iterator[str]:
    """Of samples of 1, 2, ... tokens on one rank, every fifth token masked."""
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            log_ratio, advantages, log_probs = _probes()
            documents = torch.repeat_interleave(torch.arange(1, 92))[:NUM_PROBES]
            mask = torch.arange(NUM_PROBES) % 5 != 4
            further = {name: _FURTHER_PROBES[name]() for name in loss.needs}

            def results_of(tokens: Tensor) -> tuple[Tensor, Tensor]:  # the places of whole samples -> value, derivative [T]
                _, own, lengths = documents[tokens].unique(return_inverse=True, return_counts=True)
                cu_seqlens, live = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(), mask[tokens]
                sums = JointSums(SINGLE, lengths.numel(), mask.device, is_checked=False)
                vectors = (log_ratio[tokens], log_probs[tokens], advantages[tokens])
                batch = TokenBatch(*vectors, live, own, document_sums(live.double(), cu_seqlens), cu_seqlens, sums)
                others = {name: vector[tokens] for name, vector in further.items()}
                weights = torch.ones(len(tokens))
                found, _ = evaluate_batch(loss, batch, weights, keywords, others, has_importance_weights=False)
                return torch.where(live, found.value, 0.0), torch.where(live, found.derivative, 0.0)

            whole, again = (results_of(torch.arange(NUM_PROBES)) for _ in range(2))
            if any(map(_num_apart, whole, again)):
                raise _IsRandom
            given = (log_ratio, advantages, log_probs, *further.values(), documents)  # the numbers of the samples, and so lengths
            of_samples = (torch.bincount(documents, vector) / documents.bincount() for vector in given)
            parts = (torch.isin(documents, samples).nonzero()[:, 0] for samples in halves(of_samples))
            changed = changed_in(parts, results_of, whole)
    except DataError as error:  # of what it returned, or wrote into
        yield f"{error} (tried on {NUM_PROBES} tokens)"
        return
    except Exception:  # of any type: it is the user's function
        return
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
    is_first = log_ratio == 0
    towards = -(of_value * advantages)[is_first]
    if towards.any() and (towards <= 0).all():
        yield (
            f"{name} at ratio 1 makes likelier what has a negative advantage, and less likely what has a positive one: a loss is "
            "minimised, so its value is -advantages times something that grows with log_probs; is the minus missing?"
        )
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
                "and advantage: in the value, detach what is constant for the gradient; or leave the derivative to autograd"
            )


def _with_numbers(loss: PolicyLoss, keywords: Mapping[str, float]) -> str:
    numbers = ", ".join(f"{name}={value:g}" for name, value in keywords.items())
    return f"policy_loss={loss.name}" + f" with {numbers}" * bool(numbers)


def _probes() -> tuple[Tensor, Tensor, Tensor]:  # log_ratio, advantages and log_probs, [NUM_PROBES] float32
    """All sizes that a run may meet, in all combinations: a loss may be 0 for most of them. Some log-ratios are exactly 0."""
    drawn = torch.rand(5, NUM_PROBES, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    signs = 2.0 * (drawn[:2].argsort(dim=1) % 2) - 1  # half of them are 1: a half of the probes may have one sign alone
    log_ratio = signs[0] * 10 ** (6 * drawn[2] - 5)  # 1e-5 to 10
    log_ratio[::16] = 0.0
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
