"""A training loop of your own, from a plain GPTModel to a step that is exact on every layout.

torchrun --nproc-per-node 4 examples/own_loop.py --tensor-model-parallel-size 2    # or without torchrun; a few seconds
"""

import argparse
from functools import partial

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_rl import count_step, grpo_loss, sample_token_weights
from megatron_rl.config import PolicyLossConfig
from megatron_rl.layout import resolve_groups
from megatron_rl.megatron.ranks import initialize_ranks
from megatron_rl.megatron.schedule import scale_for_schedule
from megatron_rl.testing.invariance import StepSample
from megatron_rl.testing.step_check import check_step

VOCABULARY, LENGTH, PROMPT, SAMPLES, SAMPLES_PER_PROMPT, MICROBATCHES = 16, 12, 4, 24, 3, 3


def build():  # plain Megatron-Core: put your own model and optimiser here
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, parallel_output=True)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model.to(torch.cuda.current_device()))
    return config, model, get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])


@record  # so that torchrun ends with the error of a rank, and not with its own
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    device = initialize_ranks(**vars(parser.parse_args()), pipeline_model_parallel_size=1, context_parallel_size=1)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    torch.manual_seed(0)
    (config, model, optimizer), groups = build(), resolve_groups()
    tokens, advantages = torch.randint(VOCABULARY, (SAMPLES, LENGTH), device=device), torch.randn(SAMPLES, device=device)
    prompts = [index // SAMPLES_PER_PROMPT for index in range(SAMPLES)]
    lengths = 1 + torch.arange(SAMPLES, device=device) * 3 % 7  # responses of 1 to 7 tokens; the rest is padding
    old = -2.8 + 0.2 * torch.randn(SAMPLES, LENGTH, device=device)  # log-probabilities of the policy that took the rollout
    mine = list(range(groups.dp.rank(), SAMPLES, groups.dp.size()))  # any division of the samples will do
    positions = torch.arange(LENGTH, device=device)
    places = positions - (PROMPT - 1)  # the logits at a position predict the next token, of this place in the response
    is_trained = (places >= 0) & (places < lengths[:, None])  # [SAMPLES, LENGTH]

    masks = [torch.ones(int(lengths[index]), dtype=torch.bool) for index in mine]
    totals, counts, prompt_counts, _ = count_step(masks, [prompts[index] for index in mine])  # (1) counts of the whole step
    weights = sample_token_weights("prompt_mean", counts, totals, prompt_token_counts=prompt_counts).to(device)  # (2)
    batches = torch.arange(len(mine)).chunk(MICROBATCHES)

    def loss_func(rows, logits):
        index = torch.tensor(mine)[rows]
        bounds = torch.arange(len(rows) + 1, dtype=torch.int32, device=device) * LENGTH
        mask = is_trained[index].flatten()
        labels = tokens[index].roll(-1, 1).flatten()
        old_here = old[index].flatten()  # at the row that predicts the token
        output = grpo_loss(logits.flatten(0, 1), labels, old_here, advantages[index], mask, bounds, weights[rows])  # (3)
        tokens_here = int(mask.sum())
        return scale_for_schedule(  # (4) undoes what schedule and DDP divide
            output.loss, len(batches), totals=totals, num_local_tokens=tokens_here, config=config, groups=groups
        )

    def forward_step(iterator, model):
        rows = next(iterator)
        return model(tokens[[mine[row] for row in rows]], positions.expand(len(rows), -1), None), partial(loss_func, rows)

    shape = {"seq_length": LENGTH, "micro_batch_size": len(batches[0])}
    rollout = (tokens, old, lengths.tolist(), advantages, prompts)
    check_own_step(forward_step, batches, model, rollout, mine, shape)  # (5) once, before training
    for step in range(3):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(batches), model=model, num_microbatches=len(batches),
            forward_only=False, **shape,
        )  # fmt: skip
        _, norm, _ = optimizer.step()
        if torch.distributed.get_rank() == 0:
            print(f"step {step}: gradient norm {norm:.6f}, {len(reports)} micro-batches", flush=True)
    torch.distributed.destroy_process_group()


def check_own_step(forward_step, batches, model, rollout, mine, shape):
    """Compares the gradient of one step with a dense float64 reference, which knows the samples as plain numbers."""
    tokens, old, lengths, advantages, prompts = rollout
    samples = [
        StepSample(
            tokens=tokens[number, : PROMPT + length].tolist(),
            loss_mask=[1] * length,
            prompt_id=str(prompts[number]),
            advantage=float(advantages[number]),
            old_log_probs=old[number, PROMPT - 1 :][:length].tolist(),
        )
        for number, length in enumerate(lengths)
    ]

    def places_of(rows):  # of each row of the logits: the number of the sample, and the place in its response
        numbers = torch.tensor(mine)[rows][:, None].expand(-1, LENGTH)
        places = (torch.arange(LENGTH) - (PROMPT - 1)).expand(len(rows), -1)
        is_response = (places >= 0) & (places < torch.tensor(lengths)[numbers])
        return torch.stack([torch.where(is_response, of_row, -1) for of_row in (numbers, places)], -1).flatten(0, 1)

    config = PolicyLossConfig(policy_loss="grpo", loss_aggregation="prompt_mean")
    found = check_step(
        forward_step, batches, model, samples, places_of, config, vocab_size=VOCABULARY, reported_loss="policy/loss", **shape
    )
    if torch.distributed.get_rank() == 0:
        print(f"the gradient is exact: off by {found.gradient_error:.0e}", flush=True)


if __name__ == "__main__":
    main()
