"""TRL's own trainer with ours on a random Llama, in one process or in several under torchrun: prints the largest errors.

Each optimiser step's gradient is compared with that of a dense float64 step on the completions of all ranks. Nothing is downloaded:
a seeded function stands for the generation.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import tempfile
import types
import warnings

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig

from megatron_rl.hosts.trl import GRPOTrainer
from megatron_rl.loss_hub import get_loss_aggregation, get_policy_loss
from megatron_rl.testing.reference import losses_by_hand, weights_by_hand

WORLD, DIVISOR, VOCABULARY = int(os.environ.get("WORLD_SIZE", 1)), 8.0, 64
# Half of a generation a step comes with aggregations alone that need no whole prompt groups.
STEPS = (
    {"gradient_accumulation_steps": 1},
    {"gradient_accumulation_steps": 4, "max_steps": 2},
    {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4},
    {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 2},
)
REGULARIZED = {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4, "beta": 0.3, "entropy_coef": 0.2}
HALF = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4}


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": number for number in range(3, VOCABULARY)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def save_llama(folder: str) -> None:
    """On each rank, before they know each other: then transformers writes on the first alone."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, initializer_range=0.3, **sizes, **ids)
    LlamaForCausalLM(config).save_pretrained(f"{folder}/model")


def llama(folder: str) -> LlamaForCausalLM:
    """From a folder, because TRL loads the reference model of a KL term by its path."""
    return LlamaForCausalLM.from_pretrained(f"{folder}/model").double()


def reward(completions, completion_ids, **others) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


class Recorded(GRPOTrainer):
    """Ours, with a generation by a seed; without an end of text a completion is truncated, and masked whole."""

    def _generate_single_turn(self, prompt_ids, *others):
        numbers = random.Random(self._step * 100 + self.accelerator.process_index)
        found = []
        for _ in prompt_ids:
            ids = [numbers.randrange(3, VOCABULARY) for _ in range(numbers.randrange(1, 7))]
            found.append([*ids, 1] if numbers.random() > 0.3 else ids)
        return found, None

    def _compute_loss(self, model, inputs):
        self.seen.append({name: value.clone() if torch.is_tensor(value) else value for name, value in inputs.items()})
        return super()._compute_loss(model, inputs)


class Compared(TrainerCallback):
    def __init__(self, trainer: Recorded, loss: str, aggregation: str):
        self.trainer, self.loss, self.aggregation, self.errors = trainer, loss, aggregation, []

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        own, of_all = list(self.trainer.seen), [list(self.trainer.seen)] * WORLD
        self.trainer.seen.clear()
        if WORLD > 1:
            of_all = [None] * WORLD
            dist.all_gather_object(of_all, own)
        model = self.trainer.accelerator.unwrap_model(model)
        dense = copy.deepcopy(model)
        dense.zero_grad()
        samples, log_probs, regularizers = [], [], []
        for inputs in (inputs for of_rank in of_all for inputs in of_rank):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            width = inputs["completion_ids"].shape[1]
            # TRL may have bound a forward of its own to the model, and so to this copy.
            logits = type(dense).forward(dense, input_ids=ids, attention_mask=attention).logits[:, :-1][:, -width:]
            all_log_probs = logits.log_softmax(-1)
            new = all_log_probs.gather(-1, inputs["completion_ids"][..., None])[..., 0]
            old = inputs.get("old_per_token_logps")
            old = new.detach() if old is None else old
            terms = args.entropy_coef * (all_log_probs.exp() * all_log_probs).sum(-1)  # minus the entropy
            if args.beta:
                gap = inputs["ref_per_token_logps"] - new
                ratio = (new - old).exp() if args.use_bias_correction_kl else 1.0
                terms = terms + args.beta * ratio * (gap.exp() - gap - 1)
            for row in range(len(ids)):
                # A step that trains a generation twice has each of its prompt groups twice.
                key = (int(inputs["megatron_rl_group"][row]), inputs["prompt_ids"][row].tolist())
                key = (*map(str, key), str(inputs["completion_ids"][row].tolist()))
                times = sum(sample.key == key for sample in samples)
                samples.append(
                    types.SimpleNamespace(
                        prompt_id=f"{key[:2]} {times}",
                        key=key,
                        loss_mask=inputs["completion_mask"][row].tolist(),
                        old_log_probs=old[row].tolist(),
                        rollout_log_probs=None,
                        rollout_id=None,
                        advantage=float(inputs["advantages"][row]),
                    )
                )
                log_probs.append(new[row])
                regularizers.append((terms[row] * inputs["completion_mask"][row]).sum())
        loss = get_policy_loss(self.loss)
        clip = None if loss.clip_ratios is None else loss.clip_bounds(None, None)
        sums = torch.stack(losses_by_hand(samples, log_probs, self.loss, {}, None, clip))
        policy = torch.tensor(weights_by_hand(samples, self.aggregation, DIVISOR)) @ sums
        # Both terms are means over samples under every aggregation.
        (policy + torch.tensor(weights_by_hand(samples, "sample_mean")) @ torch.stack(regularizers)).backward()
        pairs = list(zip((p.grad for p in model.parameters()), (p.grad for p in dense.parameters()), strict=True))
        scale = max(float(expected.abs().max()) for _, expected in pairs) or 1.0
        self.errors.append(max(float((found - expected).abs().max()) for found, expected in pairs) / scale)


def largest_error(loss: str, aggregation: str, steps: dict, folder: str) -> float:
    takes_divisor = get_loss_aggregation(aggregation).takes_divisor
    args = GRPOConfig(
        output_dir=folder,
        loss_type=f"megatron_rl.{loss}.{aggregation}",
        per_device_train_batch_size=4 // WORLD,
        num_generations=4,
        max_completion_length=8,
        mask_truncated_completions=True,
        learning_rate=0.05,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **({"max_steps": 3, "beta": 0.0} | steps),
    )
    prompts = Dataset.from_dict({"prompt": [f"w{number + 5} w{number + 9} w{number + 20}" for number in range(16)]})
    own = {"loss_aggregation_divisor": DIVISOR} if takes_divisor else {}
    Recorded.seen = []
    trainer = Recorded(
        llama(folder), reward_funcs=reward, args=args, train_dataset=prompts, processing_class=tokenizer(), megatron_rl=own
    )
    compared = Compared(trainer, loss, aggregation)
    trainer.add_callback(compared)
    trainer.train()
    assert len(compared.errors) == args.max_steps
    return max(compared.errors)


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_default_dtype(torch.float64)
    cases = [(loss, "sample_mean", steps) for loss in ("grpo", "gspo", "cispo") for steps in STEPS[1:3]]
    cases += [("grpo", aggregation, steps) for aggregation in ("prompt_mean", "token_mean", "constant") for steps in STEPS]
    cases += [("gspo", aggregation, HALF) for aggregation in ("sample_mean", "token_mean", "constant")]
    cases += [
        (loss, "token_mean", REGULARIZED | {"use_bias_correction_kl": has}) for loss, has in (("grpo", False), ("gspo", True))
    ]
    with tempfile.TemporaryDirectory() as folder:
        save_llama(folder)
        found = {
            f"{loss}.{aggregation} {steps}": largest_error(loss, aggregation, steps, folder) for loss, aggregation, steps in cases
        }
    if int(os.environ.get("RANK", 0)) == 0:
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
