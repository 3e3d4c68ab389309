"""examples/trl_trainer.py and examples/prime_rl_loss.py on stand-ins of their trainers, against a dense float64 step.

Two processes have two micro-batches each. The log-probabilities of the samples are the parameters.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from dense_row_cases import RowCase, gradients_of, padded, samples_of, truth

from megatron_rl.errors import ConfigError
from megatron_rl.testing.ranks import run_ranks

RANKS, MICRO_BATCHES, NUM_SAMPLES, GROUP = 2, 2, 12, 4  # the second of three prompts has samples on both ranks
SHARE = NUM_SAMPLES // RANKS
SAMPLES, LOG_PROBS = samples_of(RowCase(loss="gspo", aggregation="sample_mean", num_samples=NUM_SAMPLES))
WIDTH = max(map(len, LOG_PROBS))
TOLERANCE = 1e-5  # float32 against float64, relative to the largest gradient: the ratio's exponent is a sum over 24 tokens


class StandInTRL:
    """As TRL's GRPOTrainer: it generates for one step, shuffles and splits. The first id of a prompt is the sample's number."""

    def __init__(self, columns, leaves=(), rank=0, **settings):
        steps = {"steps_per_generation": MICRO_BATCHES, "gradient_accumulation_steps": MICRO_BATCHES}
        self.args, self.columns, self.leaves = SimpleNamespace(**steps | settings), columns, leaves
        self.model, self.num_generations = SimpleNamespace(training=True), GROUP
        self.accelerator = SimpleNamespace(process_index=rank, num_processes=RANKS)

    def _generate_and_score_completions(self, inputs):
        return {name: column[self.accelerator.process_index * SHARE :][:SHARE] for name, column in self.columns.items()}

    def micro_batches(self):
        batch = self._generate_and_score_completions(None)
        order = torch.randperm(SHARE, generator=torch.Generator().manual_seed(1)).chunk(MICRO_BATCHES)
        return [{name: column[rows] for name, column in batch.items()} for rows in order]

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep):
        rows = [self.leaves[number] for number in input_ids[:, 0].tolist()]
        return torch.stack([torch.nn.functional.pad(row, (0, logits_to_keep - len(row))) for row in rows]), None, None


@pytest.fixture
def example(monkeypatch):
    """example(name): that module of examples/. What it imports of its trainer are stand-ins."""
    stand_ins = {
        "trl": {"GRPOTrainer": StandInTRL},
        **{"prime_rl": {}, "prime_rl.trainer": {}, "prime_rl.trainer.rl": {}},
        "prime_rl.trainer.rl.data": {"DataLoader": type("DataLoader", (list,), {"get_batch": lambda loader: loader})},
        "prime_rl.trainer.rl.loss": {"LossInputs": SimpleNamespace, "LossOutputs": SimpleNamespace},
    }
    for name, contents in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(contents)

    def load(name: str) -> ModuleType:
        module = ModuleType(name)
        exec((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8"), vars(module))
        return module

    return load


def largest_error(run_on_rank, aggregation, numbers=range(NUM_SAMPLES)) -> float:
    """run_on_rank(rank, leaves) runs a rank's backward; the ranks' gradients are summed. numbers: of the samples that count."""

    def gradient_on_rank(rank):
        leaves = [values.float().requires_grad_() for values in LOG_PROBS]
        run_on_rank(rank, leaves)
        whole = torch.cat(gradients_of(leaves))
        dist.all_reduce(whole)
        return whole

    case, gradients = RowCase(loss="gspo", aggregation=aggregation), [torch.zeros_like(values) for values in LOG_PROBS]
    _, of_numbers = truth(case, [SAMPLES[number] for number in numbers], [LOG_PROBS[number] for number in numbers])
    for number, gradient in zip(numbers, of_numbers, strict=True):
        gradients[number] = gradient
    whole = torch.cat(gradients)
    found = run_ranks(gradient_on_rank, RANKS, use_megatron=False)
    return max(float((one - whole).abs().max() / whole.abs().max()) for one in found)


def test_the_gradient_in_trl_is_that_of_the_whole_step(example):
    module, mask = example("trl_trainer"), padded([sample.loss_mask for sample in SAMPLES], WIDTH)
    columns = {"prompt_ids": torch.arange(NUM_SAMPLES)[:, None], "prompt_mask": torch.ones(NUM_SAMPLES, 1)}
    columns |= {"completion_ids": mask.long(), "completion_mask": torch.ones_like(mask), "tool_mask": mask}
    columns["old_per_token_logps"] = padded([sample.old_log_probs for sample in SAMPLES], WIDTH)
    columns["advantages"] = torch.tensor([sample.advantage for sample in SAMPLES])

    def run_on_rank(rank, leaves):
        trainer = module.GSPOTrainer(columns, leaves, rank)
        for inputs in trainer.micro_batches():
            (trainer._compute_loss(None, inputs) / RANKS).backward()  # DDP's mean

    assert largest_error(run_on_rank, module.AGGREGATION) < TOLERANCE


def test_settings_of_trl_that_would_train_another_loss_are_refused(example):
    module = example("trl_trainer")
    with pytest.raises(ConfigError, match="set steps_per_generation=4"):
        module.GSPOTrainer({}, gradient_accumulation_steps=4)
    with pytest.raises(ConfigError, match=r"beta=0\.1 is of TRL's own loss.*; set beta=0\.0"):
        module.GSPOTrainer({}, beta=0.1)


def test_a_step_in_which_trl_masks_every_completion_has_weights_of_zero(example):
    trainer = example("trl_trainer").GSPOTrainer({"completion_mask": torch.zeros(SHARE, WIDTH)})
    assert trainer._generate_and_score_completions(None)["token_weights"].tolist() == [0.0] * SHARE


def test_the_gradient_in_prime_rl_is_that_of_the_whole_step(example):
    module = example("prime_rl_loss")
    kept = [index for index, sample in enumerate(SAMPLES) if any(sample.loss_mask)]  # others are as its padding
    num_tokens = sum(sum(sample.loss_mask) for sample in SAMPLES)

    def inputs_of(number, leaves):
        sample, weights = SAMPLES[number], torch.tensor(SAMPLES[number].loss_mask).float()
        old, advantages = torch.tensor(sample.old_log_probs), torch.full_like(weights, sample.advantage)
        of_loss = {"loss_mask": weights != 0, "loss_weights": weights}
        return SimpleNamespace(trainer_logprobs=leaves[number], inference_logprobs=old, advantages=advantages, **of_loss)

    def row_of(weights):
        whole = torch.cat(weights)[None]
        return {"loss_mask": whole >= 0, "rl_weights": whole, "sequence_lengths": [*map(len, weights)]}

    def run_on_rank(rank, leaves):
        numbers = torch.arange(rank * SHARE, (rank + 1) * SHARE).chunk(MICRO_BATCHES)
        batches = [[inputs_of(number, leaves) for number in chunk] for chunk in numbers]
        module.DataLoader(row_of([one.loss_weights for one in batch]) for batch in batches).get_batch()
        for batch in batches:
            (sum(module.loss(one).loss for one in batch) / num_tokens).backward()  # prime-rl takes FSDP's mean back

    assert len(kept) < NUM_SAMPLES
    assert largest_error(run_on_rank, module.AGGREGATION, kept) < TOLERANCE


def test_a_step_without_a_token_of_prime_rls_rl_loss_adds_nothing(example):
    module, row = example("prime_rl_loss"), torch.zeros(3)
    module.DataLoader([{"loss_mask": row[None] > 0, "rl_weights": None, "sequence_lengths": [3]}]).get_batch()
    columns = dict.fromkeys(("trainer_logprobs", "inference_logprobs", "advantages"), row)
    assert float(module.loss(SimpleNamespace(loss_mask=row > 0, loss_weights=None, **columns)).loss) == 0.0
