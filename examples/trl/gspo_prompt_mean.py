"""GSPO with prompt_mean in TRL, without Megatron: accelerate launch examples/trl/gspo_prompt_mean.py

Stock TRL but for the trainer's import and loss_type. MODEL and DATASET are names on the hub or folders.
"""

from __future__ import annotations

import os

from datasets import load_dataset
from trl import GRPOConfig

from megatron_rl.hosts.trl import GRPOTrainer


def reward(completions: list, answer: list[str], **columns: object) -> list[float]:
    """1 where the answer stands in the completion."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float(expected in text) for text, expected in zip(texts, answer, strict=True)]


def main() -> None:
    arguments = GRPOConfig(
        output_dir="outputs/gspo_prompt_mean",
        loss_type="megatron_rl.gspo.prompt_mean",
        num_generations=8,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,  # an optimiser step is one generation: its prompt groups are whole
        max_completion_length=1024,
    )
    dataset = load_dataset(os.environ["DATASET"], split="train")  # columns prompt and answer
    GRPOTrainer(os.environ["MODEL"], reward_funcs=reward, args=arguments, train_dataset=dataset).train()


if __name__ == "__main__":
    main()
