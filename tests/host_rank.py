"""One rank of miles or slime in the emulator: which tokens it holds and how it reduces losses. It imports no host."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.hosts import ROLLOUT_HOST_NAMES
from megatron_rl.hosts.args import Host
from megatron_rl.layout.groups import ParallelGroups

Reducer = Callable[[Tensor], Tensor]


def load_function(path: str):
    """The object behind a dotted path: everything after the last dot is an attribute, whatever characters it has."""
    module, _, attribute = path.rpartition(".")
    return getattr(import_module(module), attribute)


@dataclass(frozen=True, kw_only=True)
class OwnCode:
    """What a host's own code does where no hook of ours looks; what our loss must know is in the host's object."""

    log_ratio_bound: float | None = None
    """Log-ratios are clamped to +- this before exp; None: they are not."""
    has_cispo: bool = False
    """--advantage-estimator cispo trains CISPO."""
    logs_sample_count: bool = False
    """The log of a micro-batch begins with the number of samples, else with 0."""
    reenters_checkpoint: bool = False
    """--recompute-loss-function uses the reentrant form of torch.utils.checkpoint."""
    pads_rows: bool = False
    """--qkv-format bshd, rows padded to one length, exists."""
    groups_by_prompt: bool = True
    """Rewards are normalised over the samples of one group_index, with one reward a rollout; else over samples in their order."""
    drops_masked_values: bool = True
    """Masked tokens are replaced before anything is computed; else their values are multiplied by 0, in the backward too."""
    divides_by_zero_deviation: bool = False
    """A group of equal rewards is divided by its standard deviation as well."""


OWN_CODE = {
    "miles": OwnCode(log_ratio_bound=20.0, logs_sample_count=True, reenters_checkpoint=True, pads_rows=True),
    "slime": OwnCode(has_cispo=True, drops_masked_values=False, groups_by_prompt=False, divides_by_zero_deviation=True),
}


@dataclass(frozen=True)
class HostRank:
    """It finds positions token by token; the hosts and layout/context_parallel.py do it otherwise."""

    host: Host
    groups: ParallelGroups

    def __post_init__(self):
        if self.host.name not in ROLLOUT_HOST_NAMES or self.groups.tp.size() != 1:
            known = " and ".join(ROLLOUT_HOST_NAMES)
            raise ConfigError(
                f"host={self.host} on {self.groups.tp.size()} tensor-parallel ranks: the emulator knows {known}, on one"
            )

    @property
    def own(self) -> OwnCode:
        return OWN_CODE[self.host.name]

    def default_reducer(
        self,
        args: Namespace,
        batch: dict,
        loss_masks: list[Tensor],  # [response_length] each, whole
    ) -> Reducer:
        """The sum of m x over this rank's tokens, divided, if not per-token, by the unmasked tokens of the sample's rollout."""
        owned = [self.owned(args, batch, sample) for sample in range(len(loss_masks))]
        masks = [mask[torch.tensor(indices, dtype=torch.int64)] for mask, indices in zip(loss_masks, owned, strict=True)]
        divisors = [1.0] * len(masks) if args.calculate_per_token_loss else batch["rollout_mask_sums"]

        def reduce(values: Tensor) -> Tensor:  # [sum of local lengths] -> 0-d
            parts = values.split([len(indices) for indices in owned])
            terms = [(p * m).sum() / max(float(d), 1.0) for p, m, d in zip(parts, masks, divisors, strict=True)]
            return torch.stack(terms).sum()

        return reduce

    def policy_reducer(
        self,
        args: Namespace,
        batch: dict,
        loss_masks: list[Tensor],  # [response_length] each: the batch's, or what TIS made of them
        default: Reducer,
    ) -> Reducer:
        """The hook's factory gets four positional arguments and not the batch."""
        if args.custom_pg_loss_reducer_function_path is None:
            return default
        factory = load_function(args.custom_pg_loss_reducer_function_path)
        return factory(batch["total_lengths"], batch["response_lengths"], loss_masks, args.calculate_per_token_loss)

    def owned(self, args: Namespace, batch: dict, sample: int) -> list[int]:
        """The response indices of this rank's losses, ascending, which is the local order; zigzag under --allgather-cp too."""
        prompt, response = _prompt_and_response(batch, sample)
        chunk = _chunk_size(self._row_length(args, batch, sample), self.groups.cp.size())
        return [index for index in range(response) if self._owns(chunk, prompt + index - 1)]

    def owned_rows(
        self,
        args: Namespace,
        batch: dict,
        num_rows: int,
    ) -> list[tuple[list[int], list[int]]]:  # per sample: response indices, rows of the flattened local logits that predict them
        """The rows of this rank's logits: zigzag, or under --allgather-cp one contiguous part of all samples end to end."""
        found, start, cp_size = [], 0, self.groups.cp.size()
        for sample, total in enumerate(batch["total_lengths"]):
            prompt, response = _prompt_and_response(batch, sample)
            length = self._row_length(args, batch, sample)
            chunk = _chunk_size(length, cp_size)
            pairs = []
            for index in range(response):
                position = prompt + index - 1
                if args.allgather_cp and cp_size > 1:
                    rank, row = divmod(start + position, num_rows)
                    is_mine = rank == self.groups.cp.rank()
                else:
                    row = start + position % chunk + (chunk if position // chunk >= cp_size else 0)
                    is_mine = self._owns(chunk, position)
                if is_mine:
                    pairs.append((index, row))
            found.append(([index for index, _ in pairs], [row for _, row in pairs]))
            start += total if args.allgather_cp else length if cp_size == 1 else 2 * chunk
        return found

    def _owns(self, chunk_size: int, position: int) -> bool:
        chunk, cp_size = position // chunk_size, self.groups.cp.size()
        return self.groups.cp.rank() == (chunk if chunk < cp_size else 2 * cp_size - 1 - chunk)

    def _row_length(self, args: Namespace, batch: dict, sample: int) -> int:
        is_padded = self.own.pads_rows and args.qkv_format == "bshd"
        return batch["max_seq_lens"][sample] if is_padded else batch["total_lengths"][sample]


def _prompt_and_response(batch: dict, sample: int) -> tuple[int, int]:
    response = batch["response_lengths"][sample]
    return batch["total_lengths"][sample] - response, response


def _chunk_size(length: int, cp_size: int) -> int:
    """The size of each of 2 cp_size chunks; the last ones are padded."""
    return -(-length // (2 * cp_size))
