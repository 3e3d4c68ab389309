"""On-policy distillation: a small policy samples, a larger teacher gives its K likeliest ids, and the policy learns from them.

torchrun --nproc-per-node 2 examples/distill.py    # or without torchrun; half a minute on a CPU

Both are plain Megatron-Core with random weights. A step is exact for any number of data-parallel ranks and micro-batches.
"""

from functools import partial

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_rl import DistillationSettings, TopKTeacher, count_step, sample_token_weights
from megatron_rl.layout import resolve_groups
from megatron_rl.megatron.ranks import initialize_ranks
from megatron_rl.megatron.schedule import scale_for_schedule
from megatron_rl.policy_loss import policy_loss

VOCABULARY, LENGTH, SAMPLES, MICROBATCHES, STEPS, K, END = 32, 12, 32, 2, 100, 6, 0  # samples of a rank


def build(layers, width, spread):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=layers, hidden_size=width, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        init_method_std=spread, use_cpu_initialization=True, finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, parallel_output=True)
    return config, DistributedDataParallel(config, DistributedDataParallelConfig(), model.to(torch.cuda.current_device()))


def logits_of(model, tokens):  # [n, length] -> [n, length, V]
    return model(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), None)


@torch.no_grad()
def rollout(policy, teacher, generator):
    """Tokens [n, LENGTH + 1], which of them but the first the policy has sampled [n, LENGTH], log q there [n, LENGTH, V]; and the
    mean reverse KL of the step, over all ids and not only the K that the policy learns from."""
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, 1), device=generator.device, generator=generator)
    for _ in range(LENGTH):
        p = logits_of(policy, tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=generator)], 1)
    is_sampled = (tokens[:, :-1] == END).cumsum(1) == 0
    log_p, log_q = (logits_of(model, tokens[:, :-1]).log_softmax(-1) for model in (policy, teacher))
    sums = torch.stack([(log_p.exp() * (log_p - log_q))[is_sampled].sum(), is_sampled.sum()])
    torch.distributed.all_reduce(sums)
    return tokens, is_sampled, log_q, float(sums[0] / sums[1])


@record  # so that torchrun ends with the error of a rank, and not with its own
def main():
    device = initialize_ranks(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1)
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    torch.manual_seed(0)
    (_, teacher), (config, policy) = build(layers=2, width=64, spread=0.3), build(layers=1, width=32, spread=0.05)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), [policy])
    generator = torch.Generator(device).manual_seed(torch.distributed.get_rank())

    def loss_func(rows, step, logits):
        tokens, is_sampled, log_q, totals, weights = step
        bounds = torch.arange(len(rows) + 1, dtype=torch.int32, device=device) * LENGTH
        mask, no_advantage = is_sampled[rows].flatten(), torch.zeros(len(rows), device=device)
        top = log_q[rows].flatten(0, 1).topk(K)  # what an inference server returns
        output = policy_loss(
            "reinforce", logits.flatten(0, 1), tokens[rows, 1:].flatten(), None, no_advantage, mask, bounds, weights[rows],
            distillation=DistillationSettings("reverse_kl"), teacher=TopKTeacher(top.indices, top.values),
        )  # fmt: skip
        of_rank = {"num_local_tokens": int(mask.sum()), "config": config, "groups": resolve_groups()}
        return scale_for_schedule(output.loss, MICROBATCHES, totals=totals, **of_rank)

    def forward_step(iterator, model):
        rows, step = next(iterator)
        return logits_of(model, step[0][rows, :-1]), partial(loss_func, rows, step)

    for number in range(STEPS + 1):
        tokens, is_sampled, log_q, divergence = rollout(policy, teacher, generator)
        if number in (0, STEPS) and torch.distributed.get_rank() == 0:
            print(f"step {number}: KL(policy, teacher) {divergence:.3f} nats a token", flush=True)
        totals, counts, *_ = count_step(list(is_sampled.cpu()))
        step = tokens, is_sampled, log_q, totals, sample_token_weights("token_mean", counts, totals).to(device)
        policy.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=((rows, step) for rows in torch.arange(SAMPLES).chunk(MICROBATCHES)),
            model=policy, num_microbatches=MICROBATCHES, forward_only=False, seq_length=LENGTH,
            micro_batch_size=SAMPLES // MICROBATCHES,
        )  # fmt: skip
        optimizer.step()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
