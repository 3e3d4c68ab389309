"""One training step as miles and slime make it around custom_loss, on a real GPTModel: init hook, model, batches, schedule, loss.

host_emulator.py has what the hosts do around the loss; tests/test_whole_host.py runs their own lines.
"""

from __future__ import annotations

import contextlib
import io
import math
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

import torch
from host_emulator import EmulatedHost, load_function
from host_steps import Case, Sample, host_batch, longest_row, micro_batches, rows_of
from test_forward_step import SeenShapes
from torch import Tensor

from megatron_rl.hosts.args import Host, host_named
from megatron_rl.layout.groups import broadcast_from_last, resolve_groups
from megatron_rl.megatron.model import find_gpt_model, model_config_of
from megatron_rl.testing.invariance import Layout, StepResult, TinyGPT, merged
from megatron_rl.testing.layout_step import LayoutModel, RankStep, gradient_shards

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


def results(answers: list[list[tuple[RankStep, int]]]) -> list[StepResult]:
    return [merged([answer[number][0] for answer in answers]) for number in range(len(answers[0]))]


def host_args(step: HostStep) -> Namespace:
    args = step.case.args()
    vars(args).update(INIT, build=partial(built, step.layout, step.tiny), recompute_loss_function=False)
    vars(args).update(step.flags)
    return args


def built(layout: Layout, tiny: TinyGPT) -> tuple:
    made = LayoutModel(layout, 64, tiny)
    return made.models, made.optimizer, None


def host_model(args: Namespace) -> tuple:
    """What a training actor does before data: the init hook, then the models and their optimiser."""
    host = host_of(args, "model")
    with contextlib.redirect_stdout(io.StringIO()):
        load_function(args.custom_megatron_init_path)(args)
    return host.initialize_model_and_optimizer(args)[:2]


def name_of_host(args: Namespace) -> str:
    return "miles" if is_miles(args) else "slime"


def is_miles(args: Namespace) -> bool:
    return "observe_training_entropy" in vars(args)


def emulated(args: Namespace) -> EmulatedHost:
    return EmulatedHost(host_named(name_of_host(args)), resolve_groups())


def host_of(args: Namespace, name: str) -> ModuleType:
    """The emulated module of models, or of the actor, of this host."""
    host = host_named(name_of_host(args))
    path = f"{host.training_package}.{name}"
    return sys.modules[path] if path in sys.modules else emulated_host(host)[name]


# What our init hook puts its functions around in a training actor. read: what the advantages take from the old log-probabilities.
NAMES = ("args", "unconcat_tokens", "total_lengths", "response_lengths", "with_entropy", "others")
MEASURE = f"def get_log_probs_and_entropy(logits, *, {', '.join(NAMES)}): return [logits]"
ACTOR = """
def compute_advantages_and_returns(args, rollout_data):
    xs = rollout_data.get("log_probs") or rollout_data.get("values")
    if xs is None:
        raise TypeError("no lengths")
    rollout_data["advantages"] = [args.read(x) for x in xs]

class MegatronTrainRayActor:
    def __init__(self, args):
        self.args, self.measured = args, []

    def compute_log_prob(self, data_iterator, num_microbatches, store_prefix=""):
        self.measured.append(store_prefix)
        own = get_log_probs_and_entropy
        return {store_prefix + "log_probs": [torch.zeros(1)]}

    def train_actor(self, rollout_data, num_microbatches=(2,)):
        rollout_data.update(self.compute_log_prob(None, num_microbatches, store_prefix="ref_"))
        rollout_data.update(self.compute_log_prob(None, num_microbatches))
        compute_advantages_and_returns(self.args, rollout_data)
        return rollout_data
"""
BUILD = "def setup_model_and_optimizer(args, role='actor'): return args.build()"
INITIALIZE = "def initialize_model_and_optimizer(args): return setup_model_and_optimizer(args)"
SOUND = {"model": f"{BUILD}\n{INITIALIZE}", "actor": f"import torch\n{MEASURE}\n{ACTOR}"}


def emulated_host(host: Host, **sources: str) -> dict[str, ModuleType]:
    """Modules in the places of a host's, of these texts."""
    modules = {}
    for name, source in (SOUND | sources).items():
        modules[name] = ModuleType(f"{host.training_package}.{name}")
        modules[name].__file__ = f"{host.name}/{name}.py"
        exec(source, vars(modules[name]))
        sys.modules[modules[name].__name__] = modules[name]
    return modules


def found_on_rank(rank: int, steps: list[HostStep]) -> list[tuple[RankStep, int]]:
    """Of each step this rank's part, and the most rows of any tensor with as many columns as its logits."""
    found = []
    for step in steps:
        args = host_args(step)
        models, optimizer = host_model(args)
        enlarge_head(models, step.factor_of_head)
        with SeenShapes() as seen:
            logs = train_one_step(args, models, optimizer, step)
        metrics = emulated(args).reduce_metrics(logs, args, num_rollouts=step.case.num_rollouts) if logs else {}
        loss = broadcast_from_last(torch.tensor(metrics.get("loss", 0.0)), resolve_groups().pp)
        rank_step = RankStep(float(loss), gradient_shards(models), None, metrics, metrics)
        found.append((rank_step, most_rows(seen)))
    return found


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
