"""One training step as miles and slime make it around custom_loss, on a real GPTModel: init hook, model, batches, schedule, loss.

host_emulator.py has what the hosts do around the loss; whole_host.py runs their own lines.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

import torch
from helpers import zigzag
from host_emulator import EmulatedHost, load_function
from host_steps import KEYS, Case, Sample, host_batch, longest_row, micro_batches, rows_of
from test_forward_step import SeenShapes
from torch import Tensor

from megatron_rl.hosts.args import host_named
from megatron_rl.layout.groups import all_gather_stack, all_reduce_sum, broadcast_from_last, resolve_groups
from megatron_rl.megatron.model import find_gpt_model, model_config_of
from megatron_rl.testing.invariance import Layout, StepResult, TinyGPT, merged
from megatron_rl.testing.layout_step import LayoutModel, RankStep, gather_distributed_gradients, named_shards

# Not the size of anything else in the model.
VOCABULARY = 22
UNTIED = TinyGPT(num_layers=2, hidden_size=16, vocab_size=VOCABULARY, true_vocab_size=VOCABULARY)
# 3 rows of 22 float32 columns.
FUSED = {"fused_lm_head_loss": True, "max_logits_bytes": 300}
INIT = {"custom_megatron_init_path": "megatron_rl.hooks.custom_megatron_init"}


@dataclass(frozen=True)
class HostStep:
    """A step and how it is laid out. size: samples of a micro-batch."""

    case: Case
    layout: Layout = Layout()
    tiny: TinyGPT = UNTIED
    size: int = 3
    flags: dict = field(default_factory=dict)
    factor_of_head: float = 20.0  # factor of the head's weight: at its first values each token is as likely as any other


@dataclass(frozen=True)
class Found:
    step: RankStep
    most_rows: int  # of any tensor with as many columns as this rank's logits
    printed: str


def results(answers: list[list[Found]]) -> list[StepResult]:
    """The whole steps from all ranks' parts."""
    return [merged([answer[number].step for answer in answers]) for number in range(len(answers[0]))]


def host_args(step: HostStep) -> Namespace:
    args = step.case.args()
    vars(args).update(INIT, layout=step.layout, tiny=step.tiny, recompute_loss_function=False, use_rollout_entropy=False)
    vars(args).update(step.flags)
    return args


def host_model(args: Namespace):
    """What a training actor does before data: the init hook, then the model. Returns (model, optimizer, what was printed)."""
    host = host_of(args)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        load_function(args.custom_megatron_init_path)(args)
    model, optimizer, _, _ = host.initialize_model_and_optimizer(args)
    return model, optimizer, printed.getvalue()


def name_of_host(args: Namespace) -> str:
    return "miles" if is_miles(args) else "slime"


def is_miles(args: Namespace) -> bool:
    return "observe_training_entropy" in vars(args)


def emulated(args: Namespace) -> EmulatedHost:
    return EmulatedHost(host_named(name_of_host(args)), resolve_groups())


def host_of(args: Namespace) -> ModuleType:
    """BUILT_BY_HOST as the modules of this host, each host's for itself, because ours are put around their functions."""
    package = host_named(name_of_host(args)).training_package
    if f"{package}.model" not in sys.modules:
        made = ModuleType(f"{package}.model")
        vars(made).update({name: value for name, value in globals().items() if not name.startswith("__")})
        for own in BUILT_BY_HOST:
            exec(inspect.getsource(own), vars(made))
        sys.modules |= {f"{package}.{name}": made for name in ("model", "actor")}
    return sys.modules[f"{package}.model"]


def model_of(step: HostStep) -> tuple:
    """The arguments of a step; its models and optimiser, and what was printed."""
    args = host_args(step)
    models, optimizer, printed = host_model(args)
    enlarge_head(models, step.factor_of_head)
    return args, models, optimizer, printed


def found_on_rank(rank: int, steps: list[HostStep]) -> list[Found]:
    found = []
    for step in steps:
        args, models, optimizer, printed = model_of(step)
        with SeenShapes() as seen:
            logs = train_one_step(args, models, optimizer, step)
        gather_distributed_gradients(models)
        metrics = emulated(args).reduce_metrics(logs, args, num_rollouts=step.case.num_rollouts) if logs else {}
        loss = broadcast_from_last(torch.tensor(metrics.get("loss", 0.0)), resolve_groups().pp)
        rank_step = RankStep(float(loss), [named_shards(model) for model in models], None, metrics, metrics)
        found.append(Found(rank_step, most_rows(seen), printed))
    return found


def measured_on_rank(rank: int, steps: list[HostStep]) -> list[tuple[list[dict[str, list[Tensor]]], int]]:
    """Of each step (the host's log-probabilities of each micro-batch, rows of the tensor that is most like logits)."""
    found = []
    for step in steps:
        args, models, optimizer, _ = model_of(step)
        with SeenShapes() as seen:
            measured = measured_by_the_actor(args, models, optimizer, step)
        found.append((measured, most_rows(seen)))
    return found


def measured_by_the_actor(args: Namespace, models, optimizer, step: HostStep) -> list[dict[str, list[Tensor]]]:
    with torch.no_grad():
        return host_of(args).MegatronTrainRayActor().compute_log_prob(forward_only, args, models, step)


def forward_only(f, args: Namespace, models, step: HostStep) -> list[dict[str, list[Tensor]]]:
    """Of the hosts: the log of each micro-batch, on the last stage."""
    for model in models:
        model.eval()
    names = ("unconcat_tokens", "total_lengths", "response_lengths", "max_seq_lens")

    def function_of(batch: dict):
        named = {name: batch[name] for name in names} | {"with_entropy": args.use_rollout_entropy}
        if not is_miles(args):
            named.pop("max_seq_lens")
            if step.case.keeps:
                named |= {name.removeprefix("rollout_"): batch[name] for name in KEYS["slime"]}
        return partial(f, args=args, **named)

    options = {"forward_only": True, "collect_non_loss_data": is_miles(args)}
    return scheduled(function_of, batches_of(step), models, **options)


def most_rows(seen: SeenShapes) -> int:
    columns = VOCABULARY // resolve_groups().tp.size()
    return max((math.prod(shape[:-1]) for shape in seen.shapes if shape and shape[-1] == columns), default=0)


def enlarge_head(models, factor: float) -> None:
    with torch.no_grad():
        for model in map(find_gpt_model, models):
            names = {"output_layer.weight"}  # on the last stage of a tied model a copy of the embedding
            if model.share_embeddings_and_output_weights:
                names.add("embedding.word_embeddings.weight")
            for name, parameter in model.named_parameters():
                if name in names:
                    parameter.mul_(factor)


def train_one_step(args: Namespace, models, optimizer, step: HostStep) -> list[dict]:
    """The hosts' train_one_step up to the optimiser: the log of each micro-batch."""
    batches = batches_of(step)
    for model in models:
        model.train()
        model.zero_grad_buffer()
    optimizer.zero_grad()

    host, sizes = emulated(args), {"num_microbatches": len(batches), "num_rollouts": step.case.num_rollouts}

    def function_of(batch: dict):
        return partial(host.loss_function, args, batch, **sizes)

    return scheduled(function_of, batches, models, forward_only=False)


def batches_of(step: HostStep) -> list[tuple[Tensor, object, dict]]:
    samples, dp = step.case.samples(), resolve_groups().dp
    parts = micro_batches(step.case, step.size, dp.rank(), dp.size())
    return [batch_of(step, [samples[number] for number in numbers], samples) for numbers in parts]


def scheduled(function_of, batches, models, **options) -> list:
    """function_of: a batch -> what is called with the model's output."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator, model, return_schedule_plan=False):
        tokens, packed, batch = next(iterator)
        output = model(input_ids=tokens, position_ids=None, attention_mask=None, labels=None, packed_seq_params=packed)
        return output, function_of(batch)

    # As Megatron's command line sets it: what a stage has sent is freed.
    model_config_of(models[0]).deallocate_pipeline_outputs = True
    iterators, is_chunked = [iter(batches) for _ in models], len(models) > 1
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if is_chunked else iterators[0],
        model=models if is_chunked else models[0],
        num_microbatches=len(batches),
        seq_length=batches[0][0].shape[1] * resolve_groups().cp.size(),
        micro_batch_size=batches[0][0].shape[0],
        **options,
    )


def batch_of(step: HostStep, own: list[Sample], all_samples: list[Sample]) -> tuple[Tensor, object, dict]:
    """(tokens [1, T] or [B, S], PackedSeqParams or None, the host's batch), as get_batch gives them."""
    from megatron.core.packed_seq_params import PackedSeqParams

    groups, layout = resolve_groups(), step.case.layout
    cp_rank, cp_size = groups.cp.rank(), groups.cp.size()
    lines = rows_of(layout, own, cp_rank, cp_size, longest_row(all_samples))
    batch = host_batch(step.case, own, all_samples, cp_rank, cp_size)
    packed = None
    if layout == "thd":
        (line,) = lines
        sizes = [len(rows) for rows in (rows_of("bshd", [sample], cp_rank, cp_size, sample.total)[0] for sample in own)]
        line = line[: sum(sizes)]
        line += [None] * (4 + -len(line) % 4)  # a document of padding, in whole chunks of cp and shards of tp
        bounds = torch.tensor([0, *sizes, len(line) - sum(sizes)]).cumsum(0).to(torch.int32) * cp_size
        named = {"cu_seqlens": bounds, "max_seqlen": int(bounds.diff().max())}
        of_both = {f"{name}_{side}": value for side in ("q", "kv") for name, value in named.items()}
        packed = PackedSeqParams(qkv_format="thd", **of_both)
        lines = [line]
    tokens = [[0 if row is None else int(own[row[0]].tokens[row[1]]) for row in line] for line in lines]
    return torch.tensor(tokens), packed, batch


# The functions of the files model and actor of a training actor that we put ours around, by name


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


class MegatronTrainRayActor:
    def compute_log_prob(self, forward_only, *operands):
        return forward_only(get_log_probs_and_entropy, *operands)


BUILT_BY_HOST = (setup_model_and_optimizer, initialize_model_and_optimizer, get_log_probs_and_entropy, MegatronTrainRayActor)
