"""What is under examples/: a launch script, weights of tokens against their formulas, losses of trainers against a dense step.

examples/trl_trainer.py and examples/prime_rl_loss.py run on stand-ins of their trainers: two processes of two micro-batches each,
and the log-probabilities of the samples are the parameters. examples/distill.py runs as it is.
"""

from __future__ import annotations

import importlib.util
import math
import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from adapter_cases import RowCase, gradients_of, padded, samples_of, truth
from helpers import EXACT, loop_log_probs, pool_of, random_batch
from pages import of_own_loop

from megatron_rl.arguments import add_megatron_rl_args
from megatron_rl.config import LaunchMethod
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.checks import check_launch, launch_warnings
from megatron_rl.megatron.packed_bins import samples_of_bin
from megatron_rl.testing.ranks import run_ranks

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
pool = pool_of(3, use_megatron=False)


def example(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("host", ["miles", "slime"])
def test_the_launch_script_of_miles_and_slime_is_a_sound_launch(host):
    """Catches a combination that the init hook would refuse. The script of slime starts that of miles."""
    script = (EXAMPLES / "miles" / "gspo_prompt_mean.sh").read_text(encoding="utf-8")
    words = shlex.split(script.split("LINES=(")[1].split("\n)")[0], comments=True)
    flags = {flag.removeprefix("--").replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    # As the hosts' own parsers make them.
    counts = {name: int(value) for name, value in flags.items() if value.isdigit()}
    clips = {name: float(flags[name]) for name in ("eps_clip", "eps_clip_high")}
    of_host = {"grpo_std_normalization": True} | ({"allow_partial_train_step": False} if host == "miles" else {})
    launch = check_launch(
        Namespace(**vars(add_megatron_rl_args(ArgumentParser()).parse_args([])) | flags | counts | clips | of_host)
    )
    assert (launch.host.name, launch.method, launch.has_reward_hook) == (host, LaunchMethod.CUSTOM_LOSS, True)
    assert launch.config.loss_aggregation == "prompt_mean" and launch_warnings(launch) == []


def test_the_train_script_of_megatron_lm_reads_its_bins(monkeypatch):
    """The tuple of load_packed_data_by_index has eleven entries, tensors of one row with the mask already shifted."""
    train_policy = example("megatron_lm/train_policy")
    mask, old = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.bfloat16)
    tokens, advantages, positions = torch.tensor([[7, 8, 9, 0]]), torch.tensor([0.5, 0.0]), torch.arange(4)[None]
    utils, counted = ModuleType("megatron.rl.rl_utils"), []
    state = Namespace(packing_context="context", increment_sequences=counted.append)
    utils.get_rl_runtime_state = lambda: state
    of_bin = (tokens, advantages, old, mask, positions, old, old - 1, [0, 3, 3], [3, 0], [0, 1], None)
    utils.load_packed_data_by_index = lambda index, context, is_correction: of_bin
    monkeypatch.setitem(sys.modules, "megatron.rl", ModuleType("megatron.rl"))
    monkeypatch.setitem(sys.modules, "megatron.rl.rl_utils", utils)
    training = ModuleType("megatron.training")
    training.get_args = lambda: Namespace(rl_inference_logprobs_is_correction=True)
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    [sample] = samples_of_bin(train_policy.read_bin((torch.tensor(0),)), ["a", None])
    assert (sample.tokens, sample.loss_mask, sample.prompt_id, sample.old_log_probs) == ([7, 8, 9], [0.0, 1.0], "a", [-1.0, -2.0])
    assert sample.rollout_log_probs == [-2.0, -3.0]
    assert counted == [2]


# Selections

LENGTHS = (9, 2, 14, 5, 7, 11, 1)
SAMPLE_OF_TOKEN = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])


def step():
    """Entropies with ties, and covariances of which about a third are between 1 and 5."""
    generator = torch.Generator().manual_seed(3)
    entropy = torch.randint(6, (len(SAMPLE_OF_TOKEN),), generator=generator) / 4
    log_probs, advantages = (2 * torch.randn(len(SAMPLE_OF_TOKEN), generator=generator, dtype=torch.float64) for _ in range(2))
    return entropy, log_probs, advantages, torch.rand(len(SAMPLE_OF_TOKEN), generator=generator) > 0.2


def weights_on_rank(rank, cut, size):
    """The tokens of this rank, and what the example makes of them."""
    tokens = torch.randperm(len(SAMPLE_OF_TOKEN), generator=torch.Generator().manual_seed(9))  # any order of the tokens will do
    tokens = tokens[(SAMPLE_OF_TOKEN if cut == "samples" else SAMPLE_OF_TOKEN + POSITIONS)[tokens] % size == rank]
    entropy, log_probs, advantages, mask = (values[tokens] for values in step())
    selections, group = example("selections"), dist.group.WORLD if size > 1 else None
    order = SAMPLE_OF_TOKEN[tokens] * 2**32 + POSITIONS[tokens]
    return tokens, {
        "top_entropy": selections.top_entropy(entropy, mask, order, share=0.29, group=group),
        "every clip_cov": selections.clip_cov(log_probs, advantages, mask, order, share=1.0, seed=5, group=group),
        "clip_cov": selections.clip_cov(log_probs, advantages, mask, order, share=0.1, seed=5, group=group),
    }


def weights_by_hand():
    """The whole step sorted by entropy, the first of equal ones first; and the covariances of its unmasked tokens."""
    entropy, log_probs, advantages, mask = step()
    live = mask.nonzero()[:, 0].tolist()
    chosen = sorted(live, key=lambda token: (-entropy[token], token))[: int(0.29 * len(live))]
    covariance = (log_probs - log_probs[mask].mean()) * (advantages - advantages[mask].mean())
    is_candidate = mask & (covariance >= 1) & (covariance <= 5)
    return {"top_entropy": torch.isin(torch.arange(len(SAMPLE_OF_TOKEN)), torch.tensor(chosen)), "every clip_cov": ~is_candidate}


@pytest.mark.parametrize(("cut", "size"), [("samples", 1), ("tokens", 3)])
def test_a_selection_is_of_the_whole_step_for_any_cut_of_it(pool, cut, size):
    whole = {name: torch.full((len(SAMPLE_OF_TOKEN),), -1.0) for name in ("top_entropy", "every clip_cov", "clip_cov")}
    for tokens, answers in pool.run(weights_on_rank, cut, size, world_size=size):
        for name, weights in answers.items():
            whole[name][tokens] = weights
    for name, weights in weights_by_hand().items():
        assert torch.equal(whole[name], weights.float()), name
    left_out, candidates = (whole[name] == 0 for name in ("clip_cov", "every clip_cov"))
    num_tokens = int(step()[-1].sum())
    assert int(whole["top_entropy"].sum()) == int(0.29 * num_tokens)
    assert int(left_out.sum()) == int(0.1 * num_tokens) < int(candidates.sum()) and bool(candidates[left_out].all())
    assert left_out.nonzero()[:, 0].tolist() == [1, 7, 24, 29]  # the draw of this seed, in each layout


# Weights of advantages


def spread_advantages(batch):
    return batch.advantages.repeat_interleave(torch.tensor([len(document) for document in batch.documents]))


def batch_of(sign: int):
    """Ratios on both sides of the clips and of the limit, and a sample without a trained token."""
    batch = random_batch([40, 3, 17, 1], num_masked=(7, 3, 0, 0), noise=0.7, seed=3)
    return replace(batch, advantages=sign * batch.advantages)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_advantages_of_fipo_are_those_by_hand(sign):
    """Weights of 0.5 and more: each token's sum over the tokens behind it, one by one."""
    batch, want = batch_of(sign), spread_advantages(batch_of(sign))
    log_probs = loop_log_probs(batch.logits, batch.labels)
    for document, advantage in zip(batch.documents, batch.advantages, strict=True):
        trained = [token for token in document if batch.loss_mask[token]]
        shift = {token: float(log_probs[token] - batch.old_log_probs[token]) for token in trained}
        for place, token in enumerate(trained):
            near = [(k, shift[other]) for k, other in enumerate(trained[place:]) if math.exp(shift[other]) <= 2.0]
            weight = min(max(math.exp(sum(2 ** (-k / 5.0) * x for k, x in near)), 0.5), 1.6)
            if advantage < 0 and math.exp(shift[token]) > 2.0:
                weight = min(weight, 1.0)
            want[token] = weight * advantage
    before = (log_probs, batch.old_log_probs, spread_advantages(batch), batch.loss_mask, batch.cu_seqlens)
    settings = {"half_life": 5.0, "weight_low": 0.5, "weight_high": 0.6, "ratio_limit": 2.0}
    found = example("fipo").future_kl_advantages(*before, **settings)
    assert len({*(found / before[2]).tolist()}) > 20
    torch.testing.assert_close(found, want, **EXACT)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_advantages_of_gtpo_are_those_by_hand(sign):
    batch, want = batch_of(sign), spread_advantages(batch_of(sign))
    entropy = torch.distributions.Categorical(logits=batch.logits).entropy()
    for document, advantage in zip(batch.documents, batch.advantages, strict=True):
        trained = [token for token in document if batch.loss_mask[token]]
        of_token = entropy if advantage > 0 else 1 / entropy
        for token in trained:
            want[token] = advantage * (1 + 0.4 * (of_token[token] / of_token[trained].mean() - 1))
    before = (entropy, spread_advantages(batch), batch.loss_mask, batch.cu_seqlens)
    found = example("gtpo").entropy_weighted_advantages(*before, share=0.4)
    assert entropy.min() > example("gtpo").SMALLEST_ENTROPY
    torch.testing.assert_close(found, want, **EXACT)


# Trainers that have no Megatron

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
def trainers(monkeypatch):
    """What the examples import of their trainers are stand-ins."""
    stand_ins = {
        "trl": {"GRPOTrainer": StandInTRL},
        **{"prime_rl": {}, "prime_rl.trainer": {}, "prime_rl.trainer.rl": {}},
        "prime_rl.trainer.rl.data": {"DataLoader": type("DataLoader", (list,), {"get_batch": lambda loader: loader})},
        "prime_rl.trainer.rl.loss": {"LossInputs": SimpleNamespace, "LossOutputs": SimpleNamespace},
    }
    for name, contents in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(contents)


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


def test_the_gradient_in_trl_is_that_of_the_whole_step(trainers):
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


def test_settings_of_trl_that_would_train_another_loss_are_refused(trainers):
    module = example("trl_trainer")
    with pytest.raises(ConfigError, match="set steps_per_generation=4"):
        module.GSPOTrainer({}, gradient_accumulation_steps=4)
    with pytest.raises(ConfigError, match=r"beta=0\.1 is of TRL's own loss.*; set beta=0\.0"):
        module.GSPOTrainer({}, beta=0.1)


def test_the_gradient_in_prime_rl_is_that_of_the_whole_step(trainers):
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


# Distillation


@pytest.mark.slow
@pytest.mark.megatron
def test_the_small_policy_learns_from_the_teacher():
    lines = of_own_loop("torchrun --nproc-per-node 2 examples/distill.py").splitlines()
    before, after = (float(re.search(r"(\S+) nats", line)[1]) for line in lines)
    assert after < 0.5 * before
