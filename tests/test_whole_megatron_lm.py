"""Megatron-LM's own `pretrain`, whole, with our forward step on packed bins, leaves the parameters that `megatron-rl train` leaves.

MEGATRON_LM_ROOT=... pytest -m host --require host tests/test_whole_megatron_lm.py

Its parser, initialisation, model builder, optimiser, scheduler and loop run as they are, on CPU and gloo. What is replaced:
CUDA (install_cpu_support, and the questions for a device and its age while Megatron initialises); the process group, which
run_ranks has made; the layer, because Transformer Engine's packed attention needs CUDA; load_checkpoint, which gives the weights of
build_gpt_model; the compilation of index helpers, because bins stand in the place of a dataset.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import sys
from importlib import import_module
from unittest import mock

import pytest
import trainer_cases
from host_harness import load_checkout, silent_logging
from test_batch import pack
from test_whole_host import CLIPS, DIVISOR, LIMIT, MODEL, VOCABULARY, difference_of, group_of, samples_of, trained_by_command
from whole_host import MEGATRON_ROOT, STUBBED_OF_WHOLE, add_megatron_lm, load_weights

from megatron_rl.hosts.megatron_lm import call_pretrain, megatron_lm_config
from megatron_rl.megatron.cpu import install_cpu_support
from megatron_rl.megatron.model import find_gpt_model, gpt_layer_spec
from megatron_rl.megatron.packed_bins import PackedForwardStep
from megatron_rl.testing.ranks import run_ranks
from megatron_rl.train.rollout_files import save_rollouts
from megatron_rl.train.rollouts import RolloutBatch

pytestmark = [pytest.mark.host("MEGATRON_LM_ROOT"), pytest.mark.megatron]
STEPS, PROMPTS, BINS, LENGTH = 3, 4, 4, 96
SEED = 2
LAYOUTS = {
    "dp2": "",
    "cp2": "--context-parallel-size 2",
    "tp2": "--tensor-model-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
    "tp2 with sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "dp2, distributed optimizer": "--use-distributed-optimizer",
}
OF_PRETRAIN = f"""
    {MODEL} --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer
    --seq-length {LENGTH} --max-position-embeddings {LENGTH} --init-method-std 0.05 --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --lr-decay-style constant --transformer-impl local --no-rope-fusion --no-masked-softmax-fusion --no-persist-layer-norm
    --no-gradient-accumulation-fusion --distributed-backend gloo --micro-batch-size 1 --global-batch-size {BINS}
    --train-iters {STEPS} --load unused --eval-iters 0 --eval-interval 1000 --dataloader-type external --log-interval 1
    --no-create-attention-mask-in-dataloader --adam-beta2 0.95 --weight-decay 0
"""
AGGREGATIONS = {
    "sample_mean": "--loss-aggregation sample_mean",
    "prompt_mean": "--loss-aggregation prompt_mean",
    "constant": f"--loss-aggregation constant --loss-aggregation-divisor {DIVISOR}",
}
ROWS = [("dp2", loss, name) for loss in CLIPS for name in AGGREGATIONS]
ROWS += [(layout, "grpo", "prompt_mean") for layout in LAYOUTS if layout != "dp2"] + [("cp2", "gspo", "constant")]


def rollouts() -> list[list]:
    """The samples of each step: ragged, with masked tokens and a fully masked sample."""
    numbers, steps = random.Random(SEED), []
    for step in range(STEPS):
        groups = range(step * PROMPTS, (step + 1) * PROMPTS)
        steps.append(samples_of([record for group in groups for record in group_of(numbers, group, True)]))
    return steps


def bins_of(steps: list[list]) -> tuple[list, list]:
    """(bins of all steps, the prompt of each row): each step's samples in BINS bins that cut prompt groups."""
    bins, prompts = [], [sample.prompt_id for step in steps for sample in step]
    samples = [sample for step in steps for sample in step]
    for number, step in enumerate(steps):
        first = number * len(step)
        bins += [pack(samples, range(first + start, first + len(step), BINS), prompts, LENGTH) for start in range(BINS)]
    return bins, prompts


def train_on_rank(rank: int, root: str, words: list[str]) -> tuple[dict, list[float]]:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    install_cpu_support()
    load_checkout(root, STUBBED_OF_WHOLE)
    add_megatron_lm(root)
    from megatron.core import mpu
    from megatron.core.enums import ModelType
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import initialize, training

    gpt_builders, provider = import_module("gpt_builders"), import_module("model_provider")

    bins, prompts = bins_of(rollouts())
    models, norms, log = [], [], training.training_log

    def bins_of_rank(sizes):
        share, dp = BINS // mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        items = [step * BINS + dp * share + number for step in range(STEPS) for number in range(share)]
        return iter(items), None, None

    bins_of_rank.is_distributed = True

    def log_and_note(*positional, **named):
        logged = inspect.signature(log).bind(*positional, **named).arguments
        norms.append(float(logged["grad_norm"]))
        return log(*positional, **named)

    def provide(*positional, **named):
        models.append(provider.model_provider(gpt_builders.gpt_builder, *positional, **named))
        return models[-1]

    @functools.cache
    def made() -> PackedForwardStep:  # after pretrain has read its arguments
        own = {"vocab_size": VOCABULARY, "config": megatron_lm_config(), "rollout_of_row": lambda: range(len(prompts))}
        return PackedForwardStep(bins.__getitem__, lambda: prompts, get_num_microbatches, **own)

    def forward_step(data_iterator, model):
        return made()(data_iterator, model)

    with (
        silent_logging(),
        mock.patch.object(sys, "argv", ["train.py", *words]),
        mock.patch.object(
            gpt_builders, "_get_transformer_layer_spec", lambda use_te, config: gpt_layer_spec(config, vp_stage=None)
        ),
        mock.patch.object(initialize, "_compile_dependencies", lambda: None),
        mock.patch.object(training, "load_checkpoint", lambda *given, **options: (load_weights(*given, **options)[1], 0)),
        mock.patch.object(training, "training_log", log_and_note),
        mock.patch("megatron.training.arguments.get_device_arch_version", lambda: 10),
        mock.patch.object(training, "initialize_megatron", as_if_a_device_was_there(training.initialize_megatron)),
    ):
        call_pretrain(
            training.pretrain,
            dataset_provider=bins_of_rank,
            model_provider=provide,
            model_type=ModelType.encoder_or_decoder,
            forward_step=forward_step,
        )
    return trainer_cases.named_shards(find_gpt_model(models[0]), lambda parameter: parameter.detach()), norms


def as_if_a_device_was_there(function):
    def call(*positional, **named):
        with mock.patch("torch.cuda.is_available", lambda: True), mock.patch("torch.cuda.device_count", lambda: 1):
            return function(*positional, **named)

    return call


@pytest.mark.parametrize(("layout", "loss", "aggregation"), ROWS)
def test_pretrain_trains_what_our_command_trains(tmp_path_factory, layout, loss, aggregation):
    low, high = CLIPS[loss]
    ours = f"--policy-loss {loss} --clip-ratio-low {low} --clip-ratio-high {high} {AGGREGATIONS[aggregation]}"
    first, last, norms = of_command(tmp_path_factory, ours)
    words = f"{OF_PRETRAIN} {LAYOUTS[layout]} {ours}".split()
    answers = run_ranks(train_on_rank, 2, os.environ[MEGATRON_ROOT], words, use_megatron=False)
    assert len(norms) == STEPS and answers[0][1] == pytest.approx(norms, rel=LIMIT)
    assert difference_of([weights for weights, _ in answers], first, last) < LIMIT


_trained: dict[str, tuple] = {}


def of_command(tmp_path_factory, ours: str) -> tuple[dict, dict, list[float]]:
    """Of `megatron-rl train` on the same rollouts, one step each."""
    if ours not in _trained:
        folder = tmp_path_factory.mktemp("command")
        for number, samples in enumerate(rollouts()):
            save_rollouts(folder / "rollouts.jsonl", RolloutBatch(samples=samples, rollout_index=number))
        words = f"{MODEL} --vocab-size {VOCABULARY} --rollouts {folder}/rollouts.jsonl --no-bf16 --steps-per-rollout 1"
        words += f" --samples-per-prompt 4 --output-dir {folder}/run --no-tensorboard {ours}"
        _trained[ours] = trained_by_command(words.split())
    return _trained[ours]
