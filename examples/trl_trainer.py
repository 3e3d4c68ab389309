"""TRL's GRPOTrainer with GSPO under prompt_mean; it needs torch and TRL. Import GSPOTrainer in the place of GRPOTrainer.

    trainer = GSPOTrainer("Qwen/Qwen3-0.6B", reward_funcs=reward, args=GRPOConfig(...), train_dataset=dataset)

The gradient is that of the whole optimiser step, for any number of processes, micro-batches and lengths. TRL's loss_type, epsilon
and delta are not read: the loss has its own clip. TRL's correction for vLLM multiplies the loss.
"""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from trl import GRPOTrainer

from megatron_rl import ConfigError, count_step, sample_token_weights
from megatron_rl.errors import EmptyStep
from megatron_rl.policy_loss import loss_of_log_probs

POLICY_LOSS, AGGREGATION = "gspo", "prompt_mean"
# Terms and selections of TRL's own loss, and the values that turn them off.
OFF = {"beta": 0.0, "entropy_coef": 0.0, "use_adaptive_entropy": False, "use_liger_kernel": False}
OFF |= {"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None}


def mask_of(batch):  # [S, R] bool: the tokens that train
    return (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()


class GSPOTrainer(GRPOTrainer):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        generated, accumulated = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        if generated != accumulated:
            raise ConfigError(
                f"steps_per_generation={generated} beside gradient_accumulation_steps={accumulated}: the counts of a generation "
                f"are not those of an optimiser step; set steps_per_generation={accumulated}"
            )
        for name, value in OFF.items():
            if (given := getattr(self.args, name, value)) != value:
                raise ConfigError(f"{name}={given} is of TRL's own loss, and this loss has nothing like it; set {name}={value}")
        if getattr(self, "aux_loss_enabled", False):
            raise ConfigError("output_router_logits=True adds TRL's router loss, and this loss has none; set it to False")

    def _generate_and_score_completions(self, inputs):
        """Adds each sample's weight, before TRL shuffles and splits the step's samples. Each batch of an evaluation is a step."""
        batch = super()._generate_and_score_completions(inputs)
        mask = mask_of(batch)
        first = self.accelerator.process_index * len(mask)
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        prompts = [index // group_size for index in range(first, first + len(mask))]
        try:
            totals, counts, prompt_counts, _ = count_step(mask, prompts, dist.group.WORLD)  # over all processes
            weights = sample_token_weights(AGGREGATION, counts, totals, prompt_token_counts=prompt_counts)
        except EmptyStep:  # TRL goes on with a step whose completions are all masked
            weights = torch.zeros(len(mask))
        batch["token_weights"] = weights.to(mask.device)
        return batch

    def _compute_loss(self, model, inputs):
        mask = mask_of(inputs)
        ids, attended = (torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], 1) for kind in ("ids", "mask"))
        known = inspect.signature(self._get_per_token_logps_and_entropies).parameters
        others = {name: value for name, value in inputs.items() if name in known}
        log_probs = self._get_per_token_logps_and_entropies(model, ids, attended, mask.shape[1], **others)[0]
        old, ratio = inputs.get("old_per_token_logps"), inputs.get("importance_sampling_ratio")
        bounds = torch.arange(len(mask) + 1, dtype=torch.int32, device=mask.device) * mask.shape[1]
        return loss_of_log_probs(
            POLICY_LOSS,
            log_probs.flatten(),
            (log_probs.detach() if old is None else old).flatten(),
            inputs["advantages"].view(len(mask), -1).expand_as(mask).flatten(),
            mask.flatten(),
            bounds,
            inputs["token_weights"] * self.accelerator.num_processes,  # DDP, FSDP and DeepSpeed divide by it
            advantages_per="token",
            importance_weights=None if ratio is None else ratio.expand_as(mask).flatten(),
        ).loss
