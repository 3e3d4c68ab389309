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
from megatron_rl.layout.packing import document_ids, document_sums
from megatron_rl.loss_hub import PolicyLoss, get_policy_loss, is_built_in
from megatron_rl.losses.reduce_torch import LossValues, evaluate, evaluate_batch
from megatron_rl.losses.token_batch import JointSums, TokenBatch

# The rest of a loop over vectors may round in another way, so that few elements show nothing: 64 are four rests of 16. With a
# multiple of 64 there is no rest where the function takes the elements as they are.
_NUM_PROBES, _FEW = 1024, 64
_NOISE = 1e-6
_FACTOR_NOISE = 1e-2  # a loss may compute in bfloat16


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
    a scalar, is told alone; of a loss of level "batch" nothing else is, as its values may depend on other tokens. A derivative that
    the loss gives must be what autograd makes of its value, in which factors that are constant for the gradient are detached. A
    value without a graph has another one.
    """
    clips = {} if clip is None else {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1]}
    find = _batch_contradictions if loss.level == "batch" else _contradictions
    return tuple(find(loss, clips | dict(parameters)))


def _batch_contradictions(loss: PolicyLoss, keywords: Mapping[str, float]) -> Iterator[str]:
    """Of samples of 1, 2, ... tokens on one rank, every fifth token masked."""
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            vectors = _probes()
            lengths = torch.arange(1, 45)  # 990 tokens, and the rest
            cu_seqlens = torch.cat([torch.zeros(1), lengths.cumsum(0), torch.tensor([_NUM_PROBES])]).int()
            documents, mask = document_ids(cu_seqlens, _NUM_PROBES), torch.arange(_NUM_PROBES) % 5 != 4
            counts = document_sums(mask.double(), cu_seqlens)
            sums = JointSums(SINGLE, counts.numel(), mask.device, is_checked=False)
            batch = TokenBatch(vectors[0], vectors[2], vectors[1], mask, documents, counts, cu_seqlens, sums)
            further = {name: _FURTHER_PROBES[name]() for name in loss.needs}
            evaluate_batch(loss, batch, torch.ones(_NUM_PROBES), keywords, further, has_importance_weights=False)
    except DataError as error:  # of what it returned, or wrote into
        yield f"{error} (tried on {_NUM_PROBES} tokens)"
    except Exception:  # of any type: it is the user's function
        return


def _contradictions(loss: PolicyLoss, keywords: Mapping[str, float]) -> Iterator[str]:
    def at(
        log_ratio: Tensor, advantages: Tensor, log_probs: Tensor, *further: Tensor, prefers_autograd: bool = False
    ) -> LossValues:
        found, vectors = [], dict(zip(loss.needs, further, strict=True))
        for seed in (0, 1):
            torch.default_generator.manual_seed(seed)
            found.append(evaluate(loss, log_ratio, advantages, log_probs, keywords, vectors, prefers_autograd=prefers_autograd))
        if any(map(_num_apart, *found)):
            raise _IsRandom
        return found[0]

    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            further = [_FURTHER_PROBES[name]() for name in loss.needs]
            probes = [*_probes(), *further]
            log_ratio, advantages, log_probs = probes[:3]
            own, of_value = at(*probes), at(*probes, prefers_autograd=True).derivative
            # Others on both sides: sums, means and the number of elements change, and so does each element's place.
            others = (log_ratio + 0.5, 3 * advantages + 5, log_probs - 2, *(vector.flip(0) for vector in further))
            among = at(*(torch.stack([b, a, b], dim=1).flatten() for a, b in zip(probes, others, strict=True)))
            is_idle = torch.arange(_NUM_PROBES) % 2 == 0
            mixed = at(log_ratio, advantages.masked_fill(is_idle, 0.0), log_probs, *further)
    except DataError as error:  # of what it returned, or wrote into
        yield str(error)
        return
    except Exception:  # of any type: it is the user's function
        return
    numbers = ", ".join(f"{name}={value:g}" for name, value in keywords.items())
    name = f"policy_loss={loss.name}" + f" with {numbers}" * bool(numbers)
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
    pairs = {"value": (own.value, among.value), "derivative": (own.derivative, among.derivative)}
    changed = [what for what, (alone, joint) in pairs.items() if _num_apart(alone, joint[1::3]) > _FEW]
    if changed:
        element = "sample" if loss.level == "sequence" else "token"
        yield (
            f"{name} is declared elementwise, and its {changed[0]} at one {element} depends on the others, so it would change with "
            'the layout: leave means and sums to the package, or declare level="batch"'
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
        elif (num_apart := _num_apart(own.derivative, of_value, rtol=_FACTOR_NOISE)) > _FEW:
            yield (
                f"{name} returns a derivative that its value does not have, for {num_apart} of {_NUM_PROBES} pairs of log-ratio "
                "and advantage: in the value, detach what is constant for the gradient; or leave the derivative to autograd"
            )


def _probes() -> tuple[Tensor, Tensor, Tensor]:  # log_ratio, advantages and log_probs, [_NUM_PROBES] float32
    """All sizes that a run may meet, in all combinations: a loss may be 0 for most of them. Some log-ratios are exactly 0."""
    drawn = torch.rand(5, _NUM_PROBES, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    signs = torch.where(drawn[:2] < 0.5, -1.0, 1.0)
    log_ratio = signs[0] * 10 ** (6 * drawn[2] - 5)  # 1e-5 to 10
    log_ratio[::16] = 0.0
    advantages = signs[1] * 10 ** (5 * drawn[3] - 3)  # 1e-3 to 100
    return log_ratio, advantages, log_ratio.clamp(max=0.0) - 10 ** (4 * drawn[4] - 3)  # no probability is above 1


# What a loss may need besides: counts of short and of long samples, entropies from a sure token to an even choice, and numbers of
# other policies.
_FURTHER_PROBES = {
    "token_counts": lambda: 1.0 + torch.arange(_NUM_PROBES) % 61,
    "entropy": lambda: 1e-3 + 11 * torch.rand(_NUM_PROBES, generator=torch.Generator().manual_seed(1), dtype=torch.float32),
    "rollout_log_probs": lambda: -9 * torch.rand(_NUM_PROBES, generator=torch.Generator().manual_seed(2), dtype=torch.float32),
    "ref_log_probs": lambda: -9 * torch.rand(_NUM_PROBES, generator=torch.Generator().manual_seed(3), dtype=torch.float32),
}


def _num_apart(values: Tensor, others: Tensor, rtol: float = 1e-4) -> int:
    return int((~torch.isclose(values.float(), others.float(), rtol=rtol, atol=_NOISE, equal_nan=True)).sum())
