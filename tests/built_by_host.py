"""Stands for the files model and actor of a training actor of miles and slime: their functions that we put ours around, by name."""

from __future__ import annotations

from argparse import Namespace

import torch
from helpers import zigzag
from torch import Tensor

from megatron_rl.layout.groups import all_gather_stack, all_reduce_sum, resolve_groups
from megatron_rl.testing.layout_step import LayoutModel


def setup_model_and_optimizer(args: Namespace, role: str = "actor"):
    built = LayoutModel(args.layout, 64, args.tiny)
    return built.models, built.optimizer, None


def initialize_model_and_optimizer(args: Namespace, role: str = "actor"):
    model, optimizer, schedule = setup_model_and_optimizer(args, role)
    return model, optimizer, schedule, -1


def get_log_probs_and_entropy(
    logits: Tensor,  # [1, T, V_tp] (thd) or [N, S, V_tp] (bshd)
    *,
    args: Namespace,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    max_seq_lens: list[int] | None = None,
    top_p_token_ids: list[Tensor] | None = None,
    top_p_token_offsets: list[Tensor] | None = None,
):
    """Token by token, from whole rows of the vocabulary; with ids from these and the token itself."""
    starts = list(zip(total_lengths, response_lengths, strict=True))

    def measured(row: Tensor, number: int, place: int) -> tuple[Tensor, Tensor]:
        token, entropy = unconcat_tokens[number][place + 1], -(row.exp() * row).sum()
        if top_p_token_ids is None or top_p_token_offsets is None:
            return row[token], entropy
        index = place + 1 - (starts[number][0] - starts[number][1])
        first, end = top_p_token_offsets[number][index : index + 2]
        kept = {*top_p_token_ids[number][first:end].tolist(), int(token)}
        return row[token] - row[sorted(kept)].logsumexp(0), entropy

    groups, found = resolve_groups(), {"log_probs": [], "entropy": []}
    cp_rank, cp_size = groups.cp.rank(), groups.cp.size()
    shards = all_gather_stack(logits.flatten(0, 1), groups.tp) if groups.tp.size() > 1 else logits.flatten(0, 1)[None]
    rows = torch.log_softmax(torch.cat([*shards], -1) / args.rollout_temperature, -1)
    start = 0
    for number, (total, response) in enumerate(starts):
        length = total if max_seq_lens is None else max_seq_lens[number]
        document = [*range(total), *[None] * (length - total)]
        document += [None] * (-length % (2 * cp_size) if cp_size > 1 else 0)
        own = zigzag(document, cp_rank, cp_size)
        predicting = [place for place in own if place is not None and total - response - 1 <= place < total - 1]
        if args.allgather_cp and cp_size > 1:
            whole = torch.zeros(2, total)
            for place in range(total - response - 1, total - 1):
                rank, row = divmod(start + place, rows.shape[0])
                if rank == cp_rank:
                    whole[:, place] = torch.stack(measured(rows[row], number, place))
            values = all_reduce_sum(whole, groups.cp)[:, predicting]
            start += total
        else:
            each = [measured(rows[start + own.index(place)], number, place) for place in predicting]
            values = torch.tensor(each).reshape(-1, 2).t()
            start += len(own)
        found["log_probs"].append(values[0])
        found["entropy"].append(values[1])
    found = found if with_entropy else {"log_probs": found["log_probs"]}
    return found if is_miles(args) else (torch.empty((0,), device=logits.device), found)


def is_miles(args: Namespace) -> bool:
    return "observe_training_entropy" in vars(args)


class MegatronTrainRayActor:
    def compute_log_prob(self, forward_only, *operands):
        return forward_only(get_log_probs_and_entropy, *operands)
