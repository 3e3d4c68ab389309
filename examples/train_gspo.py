"""GSPO with prompt_mean in your own training loop. The model, the schedule and the optimiser are plain Megatron-Core.

    torchrun --nproc-per-node 2 examples/train_gspo.py --tensor-model-parallel-size 2    # or without torchrun; 30 s on a CPU

This file leaves out context and pipeline parallelism, packing, checkpoints and plots. `megatron-rl train` has them.
"""

import argparse
from functools import partial

import torch
import torch.distributed as dist

from megatron_rl import count_step, gspo_loss, sample_token_weights
from megatron_rl.layout import resolve_groups
from megatron_rl.megatron.model import build_gpt_model, transformer_config
from megatron_rl.megatron.probe import probe_schedule
from megatron_rl.megatron.ranks import initialize_ranks
from megatron_rl.megatron.schedule import scale_for_schedule
from megatron_rl.train.generation import SamplingSettings, gumbel_noise, sample_responses
from megatron_rl.train.rollouts import group_advantages
from megatron_rl.train.tasks import make_task

PROMPTS, SAMPLES, MICROBATCHES, STEPS_PER_ROLLOUT = 16, 8, 2, 2


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=60)
    return parser.parse_args()


def build(vocab_size: int, length: int):
    """Builds plain Megatron-Core. Put your own model and optimiser here."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = transformer_config(
        num_layers=2, hidden_size=64, num_attention_heads=4, normalization="RMSNorm", finalize_model_grads_func=finalize_model_grads
    )
    bare = build_gpt_model(config, vocab_size=vocab_size, max_sequence_length=length)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), bare.to(torch.cuda.current_device()))
    settings = OptimizerConfig(optimizer="adam", lr=3e-3, adam_beta2=0.95, clip_grad=1.0, weight_decay=0.0)
    return config, model, get_megatron_optimizer(settings, [model])


def rollout(model, task, number: int, groups, device):
    """Samples from the policy. Returns this data-parallel rank's tokens [S, L], rewards and prompt names."""
    names = [prompt for prompt in range(number * PROMPTS, (number + 1) * PROMPTS) for _ in range(SAMPLES)]
    mine = list(range(groups.dp.rank(), len(names), groups.dp.size()))
    prompts = [task.make_prompt(names[index], seed=0) for index in mine]
    sampling = SamplingSettings(
        max_new_tokens=task.max_new_tokens,
        end_tokens=task.end_tokens,
        temperature=1.0,
        vocab_size=task.vocab_size,
        rows_per_forward=len(mine),
    )
    noise = partial(gumbel_noise, 0, number)
    answers = sample_responses(model, [prompt.tokens for prompt in prompts], mine, sampling, noise, groups, device=device)
    rewards = [task.reward(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = torch.tensor([prompt.tokens + answer for prompt, answer in zip(prompts, answers, strict=True)], device=device)
    return tokens, rewards, [prompt.prompt_id for prompt in prompts]


def advantages_of(rewards, names, groups):
    """Advantages of this rank's samples. Group statistics need all samples of a prompt, on all ranks."""
    everyone = [None] * groups.dp.size()
    if groups.dp.size() > 1:
        dist.all_gather_object(everyone, (rewards, names), group=groups.dp)
    else:
        everyone = [(rewards, names)]
    all_rewards = [value for part, _ in everyone for value in part]
    values = group_advantages(all_rewards, [name for _, part in everyone for name in part])
    start = sum(len(part) for part, _ in everyone[: groups.dp.rank()])
    return torch.tensor(values[start : start + len(rewards)]), sum(all_rewards) / len(all_rewards)


def main():
    args = parse_args()
    device = initialize_ranks(
        tensor_model_parallel_size=args.tensor_model_parallel_size, pipeline_model_parallel_size=1, context_parallel_size=1
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    groups, task = resolve_groups(), make_task("repeat")
    response, length = task.max_new_tokens, task.max_prompt_tokens + task.max_new_tokens
    padded_vocab = -(-task.vocab_size // groups.tp.size()) * groups.tp.size()
    config, model, optimizer = build(padded_vocab, length)
    probe_schedule()  # (1) runs the installed schedule's own arithmetic once; raises where the loss would have a wrong scale
    positions = torch.arange(length, device=device)
    for number in range(args.rollouts):
        tokens, rewards, names = rollout(model, task, number, groups, device)
        advantages, mean_reward = advantages_of(rewards, names, groups)
        # (2) counts of the whole step over all data-parallel ranks, (3) the weight of each token of each sample
        totals, token_counts, prompt_counts = count_step([torch.ones(response, dtype=torch.bool)] * len(names), names)
        weights = sample_token_weights("prompt_mean", token_counts, totals, prompt_token_counts=prompt_counts)
        rows = torch.arange(len(names)).chunk(MICROBATCHES)
        old_log_probs = {}

        def loss_func(index, rows, logits):
            labels = tokens[rows].roll(-1, dims=1)  # logits at a position give the next token
            mask = (positions >= length - response - 1) & (positions < length - 1)
            output = gspo_loss(  # (4) this rank's part of the step's loss, with its exact gradient
                logits.flatten(0, 1),
                labels.flatten(),
                old_log_probs.get(index),
                advantages[rows].to(device),
                mask.expand(len(rows), -1).flatten(),
                torch.arange(len(rows) + 1, dtype=torch.int32, device=device) * length,
                weights[rows].to(device),
                vocab_size=task.vocab_size,
            )
            old_log_probs.setdefault(index, output.log_probs)
            return scale_for_schedule(  # (5) what undoes the schedule's and DDP's own divisions
                output.loss,
                len(batches),
                totals=totals,
                num_local_tokens=len(rows) * response,
                config=config,
                groups=groups,
            )

        def forward_step(iterator, model):
            index, rows = next(iterator)
            return model(tokens[rows], positions.expand(len(rows), -1), None), partial(loss_func, index, rows)

        batches = list(enumerate(rows))
        for _ in range(STEPS_PER_ROLLOUT):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=model,
                num_microbatches=len(batches),
                seq_length=length,
                micro_batch_size=len(rows[0]),
                forward_only=False,
            )
            optimizer.step()
        if dist.get_rank() == 0 and (number + 1) % 10 == 0:
            print(f"rollout {number + 1:3d}   mean reward {mean_reward:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
