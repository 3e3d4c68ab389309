"""Calls the function of a policy loss on copies of its inputs and checks the result. Autograd gives a missing derivative."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.errors import DataError
from megatron_rl.layout.groups import Group, all_reduce_sum
from megatron_rl.layout.packing import document_sums, spread
from megatron_rl.loss_hub import LossValue, PolicyLoss
from megatron_rl.losses.ordered_sums import SlicedTokens, ordered_sum


class LossValues(NamedTuple):
    """A LossValue with all its fields, detached."""

    value: Tensor  # [*]
    derivative: Tensor  # [*] d value / d log-probability
    is_clipped: Tensor  # [*] bool


class RefusedElsewhere(Exception):
    """Another cp rank refused the result of the loss; RankAgreement passes its message on."""


class OtherNumberOfSums(DataError):
    """A cp rank has ended its sums while another one asks for a further sum."""


@dataclass(slots=True)
class JointSums:
    """Sums over cp for one call of a loss. is_checked: a rank that refuses, or that has no further sum, tells the others in their
    next sum.

    Without that they would wait in the sum for a rank that has left, because the number of sums of a loss is not known.
    """

    cp_group: Group
    num_documents: int
    device: torch.device
    is_checked: bool
    num_done: int = 0

    def __call__(self, values: Tensor) -> Tensor:  # [N] or [N, k] -> the same, float64
        """Communication: one all-reduce of it; where checked one of [N + 2] for each column. Raises RefusedElsewhere, and
        OtherNumberOfSums."""
        values = values.double()
        if not self.is_checked:
            return all_reduce_sum(values.contiguous(), self.cp_group)
        if values.dim() > 1:  # a rank that refuses does not know k
            return torch.stack([self(column) for column in values.unbind(-1)], dim=-1)
        return self._exchange(values, is_refused=False, is_end=False)

    def end(self, *, is_refused: bool) -> None:
        """Ends the sums: tells the other ranks that this one refused, or raises RefusedElsewhere where another one did, and
        OtherNumberOfSums where another one has not ended.

        Communication: one all-reduce of [N + 2] where checked.
        """
        if self.is_checked:
            none = torch.zeros(self.num_documents, dtype=torch.float64, device=self.device)
            self._exchange(none, is_refused=is_refused, is_end=not is_refused)

    def _exchange(self, values: Tensor, *, is_refused: bool, is_end: bool) -> Tensor:  # [N] -> [N]
        state = values.new_tensor([float(is_refused), float(is_end)])
        found = all_reduce_sum(torch.cat([values, state]), self.cp_group)
        num_refused, num_ended = found[-2:].tolist()
        if num_refused and not is_refused:
            raise RefusedElsewhere
        if 0 < num_ended < self.cp_group.size() and not num_refused:
            raise OtherNumberOfSums(
                f"asks for {self.num_done} sums over samples on this rank{'' if is_end else ' and a further one'}, and for another "
                "number on another context-parallel rank: each rank must make the same sums, also one without a token, and either "
                "all return a derivative or all leave it to autograd"
            )
        self.num_done += 1
        return found[:-2]


@dataclass(frozen=True)
class TokenBatch:
    """The argument of a loss of level "batch": this rank's tokens, and sums over samples, which include all cp ranks.

    The sums are differentiable, so a loss may be any function of them.
    """

    log_ratio: Tensor  # [T] log_probs - old_log_probs
    log_probs: Tensor  # [T]
    advantages: Tensor  # [T]
    loss_mask: Tensor  # [T] bool; the vectors above are 0 where it is False
    documents: Tensor  # [T] int64, the sample of each token; N on padding
    token_counts: Tensor  # [N] unmasked tokens of each sample over all cp ranks
    cu_seqlens: Tensor  # [N + 1] this rank's slices
    sums: JointSums
    cp_layout: str | None = None  # the order of the slices: "zigzag" or "contiguous"; None: not known

    def sample_sum(self, values: Tensor) -> Tensor:  # [T] -> [N], or [T, k] -> [N, k]
        """The sum over the unmasked tokens of each sample.

        Communication: one all-reduce of the result over cp, and one in backward; where ranks are checked one of [N + 2] a column.
        """
        masked = torch.where(self.loss_mask if values.dim() == 1 else self.loss_mask[:, None], values, 0.0)
        sums: Tensor = _SampleSum.apply(masked, self.cu_seqlens, self.documents, self.sums)  # type: ignore[no-untyped-call]  # torch's
        return sums

    def sample_mean(self, values: Tensor) -> Tensor:  # [T] -> [N], or [T, k] -> [N, k]
        """The mean over the unmasked tokens of each sample; 0 for a sample without one. Communication: as sample_sum."""
        counts = self.token_counts.clamp(min=1).to(values.dtype)
        return self.sample_sum(values) / (counts if values.dim() == 1 else counts[:, None])

    def suffix_sum(self, values: Tensor, *, decay: float = 1.0) -> Tensor:  # [T] -> [T], or [T, k] -> [T, k]
        """Of each unmasked token the sum over the unmasked tokens of its sample from this one on; of a masked one 0.

            sum_t = sum_{k >= t} decay^(k - t) values_k        k and t count the sample's unmasked tokens, over all cp ranks

        The sum is float64, in an order that is the same in every run.
        Communication: at cp above 1 one all-reduce of [N, c (k + 1)] over cp, c the chunks of a sample (2 cp_size in zigzag order),
        and one in backward; in zigzag order one of [N] before; where ranks are checked one of [N + 2] a column.
        Raises: ConfigError for a decay outside (0, 1], and where cp_layout is None at cp above 1; DataError, on the CPU, for slices
        that are not in zigzag order. On CUDA their samples get NaN.
        """
        return ordered_sum(values, self._sliced_tokens(), self.sums, decay=decay, from_the_end=True)

    def prefix_sum(self, values: Tensor, *, decay: float = 1.0) -> Tensor:  # [T] -> [T], or [T, k] -> [T, k]
        """As suffix_sum, over the sample's unmasked tokens up to this one: sum_t = sum_{k <= t} decay^(t - k) values_k."""
        return ordered_sum(values, self._sliced_tokens(), self.sums, decay=decay, from_the_end=False)

    def _sliced_tokens(self) -> SlicedTokens:
        return SlicedTokens(self.loss_mask, self.documents, self.cu_seqlens, self.sums.cp_group, self.cp_layout)

    def of_tokens(self, values: Tensor) -> Tensor:  # [N] -> [T], or [N, k] -> [T, k]
        """Gives each token the value of its sample; 0 on padding."""
        return spread(values, self.documents)


class _SampleSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, cu_seqlens: Tensor, documents: Tensor, sums: JointSums) -> Tensor:
        ctx.documents, ctx.sums = documents, sums
        return sums(document_sums(values, cu_seqlens)).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        # The part of the loss on each cp rank depends on the sum, so their derivatives are added.
        return spread(ctx.sums(upstream).to(upstream.dtype), ctx.documents), None, None, None


def evaluate(
    loss: PolicyLoss,
    log_ratio: Tensor,  # [*] of tokens or samples
    advantages: Tensor,  # [*]
    log_probs: Tensor,  # [*] of tokens, or means of samples
    keywords: Mapping[str, float],  # clip and parameters
    vectors: Mapping[str, Tensor],  # [*] the further inputs that the loss declares
    *,
    prefers_autograd: bool = False,  # even where the loss gives a derivative, unless its value has no graph
) -> LossValues:
    """Calls an elementwise loss. Raises DataError for a result of another shape or dtype, and for a write into an input.

    It does not check that values are finite: the caller does, because it knows which of them count.
    """
    given = {"log_ratio": log_ratio, "advantages": advantages}
    if loss.takes_log_probs:
        given["log_probs"] = log_probs

    def call(copies: dict[str, Tensor]) -> object:
        positional = [copies.pop(name) for name in given]
        return loss.function(*positional, **copies, **keywords)

    values, _ = _checked(
        loss, call, given=given | dict(vectors), by=("log_ratio", "log_probs"), like=log_ratio, prefers_autograd=prefers_autograd
    )
    return values


def evaluate_batch(
    loss: PolicyLoss,
    batch: TokenBatch,
    value_weights: Tensor,  # [T] the factors of the values
    keywords: Mapping[str, float],
    vectors: Mapping[str, Tensor],  # [T]
    *,
    has_importance_weights: bool,
) -> tuple[LossValues, bool]:  # [T] each; whether the derivative includes the weights
    """Calls a loss of level "batch". Autograd differentiates the weighted sum over all cp ranks together.

    With importance weights it does so even where the loss gives a derivative, unless its value has no graph: a value may depend on
    tokens of other weights, and one factor a token cannot say that.

    Call it inside a RankAgreement. Where another cp rank refused, the values are zeros. Raises DataError as `evaluate`.
    Communication: the function's sums over samples, once in forward and at most once in backward; where ranks are checked
    one more.
    """
    names = ("log_ratio", "log_probs", "advantages")
    given = {name: getattr(batch, name) for name in names} | dict(vectors)
    # Masked tokens may hold NaN, and NaN times 0 would reach the derivative of the sums.
    given = {name: torch.where(batch.loss_mask, tensor, 0.0) for name, tensor in given.items()}

    def call(copies: dict[str, Tensor]) -> object:
        fields = {name: copies.pop(name) for name in names}
        others = {name: getattr(batch, name).clone() for name in ("loss_mask", "documents", "token_counts", "cu_seqlens")}
        whole = TokenBatch(**fields, **others, sums=batch.sums, cp_layout=batch.cp_layout)
        return loss.function(whole, **copies, **keywords)

    weights = torch.where(batch.loss_mask, value_weights, 0.0)
    try:
        result = _checked(
            loss,
            call,
            given=given,
            by=("log_ratio", "log_probs"),
            like=batch.log_ratio,
            weights=weights,
            prefers_autograd=has_importance_weights,
        )
        batch.sums.end(is_refused=False)
    except RefusedElsewhere:
        zeros = torch.zeros_like(batch.log_ratio)
        return LossValues(zeros, zeros, zeros.bool()), False
    except OtherNumberOfSums as error:  # all ranks know it
        raise DataError(f"policy loss {loss.name!r} {error}") from error
    except Exception:
        batch.sums.end(is_refused=True)
        raise
    return result


def nonfinite_values(values: LossValues, is_live: Tensor) -> Tensor:  # [*] bool
    return is_live & ~(torch.isfinite(values.value) & torch.isfinite(values.derivative))


def _checked(
    loss: PolicyLoss,
    call: Callable[[dict[str, Tensor]], Any],
    *,
    given: Mapping[str, Tensor],
    by: tuple[str, ...],
    like: Tensor,
    weights: Tensor | None = None,
    prefers_autograd: bool = False,
) -> tuple[LossValues, bool]:
    """The checked result of `call` on copies of `given`, and whether the derivative includes the weights.

    The derivative is the sum of those by the names in `by`; autograd computes it where the loss gives none, and with
    prefers_autograd wherever it can.
    """
    with torch.inference_mode(False), torch.enable_grad():
        # A tensor made in inference mode cannot be differentiated; a copy made outside can.
        leaves = {name: tensor.clone() if tensor.is_inference() else tensor.detach() for name, tensor in given.items()}
        for name in by:
            if name in leaves:
                leaves[name] = leaves[name].requires_grad_()
        copies = {name: leaf.clone() for name, leaf in leaves.items()}
        kept = dict(copies)
        returned = _returned(loss, call, copies)
        for name, tensor in kept.items():
            if tensor._version:  # torch counts the writes into a tensor, and has no public name for the count
                raise DataError(f"policy loss {loss.name!r} writes into {name}: it must leave its inputs as they are")
        result = returned if isinstance(returned, LossValue) else LossValue(returned)
        _check_shapes(loss, result, like)
        derivative = None if prefers_autograd and result.value.requires_grad else result.derivative
        is_weighted = derivative is None and weights is not None
        if derivative is None:
            derivative = _derivative(loss, result.value, weights, [leaves[name] for name in by if name in leaves], like)
    is_clipped = torch.zeros_like(like, dtype=torch.bool) if result.is_clipped is None else result.is_clipped
    values = LossValues(result.value.detach(), derivative.detach(), is_clipped)
    return values, is_weighted


def _returned(loss: PolicyLoss, call: Callable[[dict[str, Tensor]], Any], copies: dict[str, Tensor]) -> Any:
    try:
        return call(copies)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit would end this rank without a word to the others
        raise DataError(f"policy loss {loss.name!r} raised {type(error).__name__}({error}): raise a ValueError instead") from error


def _derivative(loss: PolicyLoss, value: Tensor, weights: Tensor | None, leaves: list[Tensor], like: Tensor) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(like)
    # Of a masked token the weight is 0, and so is what its value, which may be anything, gets as gradient.
    total = value.sum() if weights is None else (weights * value).sum()
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    found = [gradient for gradient in gradients if gradient is not None]
    if not found:
        raise DataError(
            f"policy loss {loss.name!r} returned a value with a gradient of its own, and none by log_ratio or log_probs: compute "
            "it from them; a number that is trained elsewhere, such as a torch.nn.Parameter, must be detached"
        )
    return sum(found[1:], found[0])


def _check_shapes(loss: PolicyLoss, result: LossValue, like: Tensor) -> None:
    for name, tensor in (("value", result.value), ("derivative", result.derivative), ("is_clipped", result.is_clipped)):
        dtype = torch.bool if name == "is_clipped" else like.dtype
        if tensor is None and name != "value":
            continue
        wanted, found = f"{tuple(like.shape)} {dtype}", type(tensor).__name__
        if isinstance(tensor, Tensor):
            given = (tensor.shape, tensor.dtype, tensor.layout, tensor.device)
            if given == (like.shape, dtype, like.layout, like.device):
                continue
            found = f"{tuple(tensor.shape)} {tensor.dtype}"
            if (tensor.layout, tensor.device) != (like.layout, like.device):
                wanted += f" with {like.layout} on {like.device}"
                found += f" with {tensor.layout} on {tensor.device}"
        hint = "; return megatron_rl.LossValue(value, derivative, is_clipped)" if isinstance(tensor, tuple | list) else ""
        raise DataError(f"policy loss {loss.name!r} returned {found} as its {name}: it must be {wanted}{hint}")
