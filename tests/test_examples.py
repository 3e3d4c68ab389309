"""What is under examples/: launch scripts that bash runs, terms against their formulas, losses of trainers against a dense step.

What a launch script would start is a sound launch of flags that exist. examples/trl_trainer.py and examples/prime_rl_loss.py run on
stand-ins of their trainers: two processes of two micro-batches each, and the log-probabilities of the samples are the parameters.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from adapter_cases import RowCase, gradients_of, padded, samples_of, truth
from helpers import EXACT, loop_log_probs, pool_of, random_batch
from host_checkouts import roots_by_environment

from megatron_rl.arguments import add_megatron_rl_args, read_number
from megatron_rl.config import Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts.checks import check_launch, launch_warnings
from megatron_rl.hosts.megatron_lm import megatron_lm_config
from megatron_rl.megatron.packed_bins import samples_of_bin
from megatron_rl.testing.ranks import run_ranks

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
pool = pool_of(3, use_megatron=False)


def example(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


# Launch scripts

SCRIPT = "gspo_prompt_mean.sh"
HOSTS = ("miles", "slime")
# Flags that stand in the script of miles, which slime's starts, as a comment, for Dr. GRPO, and those that they take the place of.
COMMENTED, REPLACED = re.compile(r"^    # (--.*)$", re.M), re.compile(r"^    --advantage-estimator.*?(?=\n\n)", re.M | re.S)
# Of Megatron-LM's parser; the flags of miles and slime are looked for in a checkout, where one is at hand.
FLAGS_OF_MEGATRON = (
    "--perform-rl-step --rl-use-sequence-packing --grpo-prompts-per-step --grpo-group-size --global-batch-size"
).split()
FLAGS_OF_HOSTS = (
    "--rollout-batch-size --n-samples-per-prompt --global-batch-size --rollout-max-response-len "
    "--advantage-estimator --disable-grpo-std-normalization --eps-clip --eps-clip-high "
    "--loss-type --custom-loss-function-path --custom-pg-loss-reducer-function-path --custom-reward-post-process-path "
    "--custom-megatron-init-path --custom-megatron-before-train-step-hook-path"
).split()


@pytest.fixture
def words(tmp_path):
    """What a script starts: the words of its last command, for which stand-ins of python3 and torchrun are on the path."""

    def run(script: Path) -> list[str]:
        for name in ("python3", "torchrun"):
            (tmp_path / name).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
            (tmp_path / name).chmod(0o755)
        environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        command = ["bash", str(script), "--tensor-model-parallel-size", "2"]
        finished = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=tmp_path)
        return finished.stdout.splitlines()

    return run


def settings_of(words: list[str]) -> dict[str, object]:
    """{flag: value} of a command line; True for a flag without a value."""
    settings: dict[str, object] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            settings[word] = True if following.startswith("--") else read_number(following)
    return settings


def our_flags() -> set[str]:
    return {flag for action in add_megatron_rl_args(ArgumentParser(add_help=False))._actions for flag in action.option_strings}


def namespace_of(settings: dict[str, object], **others) -> Namespace:
    """As the launcher's parser makes it: every flag of ours has an attribute."""
    ours = vars(add_megatron_rl_args(ArgumentParser()).parse_args([]))
    named = {flag.removeprefix("--").replace("-", "_"): value for flag, value in settings.items()}
    named["grpo_std_normalization"] = not named.pop("disable_grpo_std_normalization", False)  # as the hosts' parsers call it
    return Namespace(**ours | others | named)


def whole_numbers(settings: dict[str, object]) -> dict[str, object]:
    """argparse of the hosts reads counts as int."""
    return {flag: int(value) if isinstance(value, float) and value >= 1 else value for flag, value in settings.items()}


@pytest.mark.parametrize("is_dr_grpo", [False, True])
@pytest.mark.parametrize("host", HOSTS)
def test_a_script_starts_a_launch_that_is_sound_and_does_what_it_says(words, tmp_path, host, is_dr_grpo):
    """Catches a flag that does not exist, a path that does not load, and a combination that the init hook would refuse."""
    script = EXAMPLES / host / SCRIPT
    if is_dr_grpo:
        text = (EXAMPLES / "miles" / SCRIPT).read_text(encoding="utf-8")
        script = tmp_path / SCRIPT
        script.write_text(COMMENTED.sub(r"\1", REPLACED.sub("", text)), encoding="utf-8")
    line = words(script)
    assert line[:3] == ["-m", "megatron_rl.hosts.launch", "train.py"]
    assert line[-2:] == ["--tensor-model-parallel-size", "2"]
    settings = settings_of(line[3:-2])
    assert set(settings) <= our_flags() | set(FLAGS_OF_HOSTS)
    for value in settings.values():
        if isinstance(value, str) and value.startswith("megatron_rl."):
            module, _, function = value.rpartition(".")
            assert callable(getattr(import_module(module), function))
    of_miles = {"allow_partial_train_step": False} if host == "miles" else {}
    args = namespace_of(whole_numbers(settings), **of_miles)
    launch = check_launch(args)
    assert launch.host.name == host
    found = (launch.route, settings["--advantage-estimator"], launch.config.loss_aggregation, launch.has_reward_hook)
    gspo, dr_grpo = (Route.CUSTOM_LOSS, "gspo", "prompt_mean", True), (Route.REDUCER, "grpo", "constant", False)
    assert found == (dr_grpo if is_dr_grpo else gspo)
    assert launch_warnings(launch) == []


def test_the_script_of_megatron_lm_does_what_it_says(words):
    line = words(EXAMPLES / "megatron_lm" / SCRIPT)
    assert Path(line[2]).resolve() == EXAMPLES / "megatron_lm" / "train_policy.py"
    settings = settings_of(line[3:-2])
    assert set(settings) <= our_flags() | set(FLAGS_OF_MEGATRON)
    of_train_rl = {"grpo_clamp_eps_lower": 0.01, "grpo_clamp_eps_upper": 0.01, "grpo_kl_beta": 0.001, "rl_default_temperature": 0.7}
    config = megatron_lm_config(namespace_of(whole_numbers(settings), **of_train_rl))
    assert (config.policy_loss, config.loss_aggregation, config.policy_temperature) == ("gspo", "prompt_mean", 0.7)


@pytest.mark.host
def test_the_flags_of_the_hosts_are_their_own():
    for host, root in roots_by_environment().items():
        source = (Path(root) / host / "utils" / "arguments.py").read_text(encoding="utf-8")
        assert [flag for flag in FLAGS_OF_HOSTS if f'"{flag}"' not in source] == []


@pytest.mark.parametrize("is_correction", [False, True])
def test_the_train_script_of_megatron_lm_reads_its_bins(monkeypatch, is_correction):
    """The tuple of load_packed_data_by_index has eleven entries, tensors of one row with the mask already shifted."""
    train_policy = example("megatron_lm/train_policy")
    mask, old = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.bfloat16)
    tokens, advantages, positions = torch.tensor([[7, 8, 9, 0]]), torch.tensor([0.5, 0.0]), torch.arange(4)[None]
    utils, counted = ModuleType("megatron.rl.rl_utils"), []
    state = Namespace(packing_context="context", increment_sequences=counted.append)
    utils.get_rl_runtime_state = lambda: state
    utils.load_packed_data_by_index = lambda index, context, is_correction: (
        *(tokens, advantages, old, mask, positions, old, old - 1 if is_correction else None),
        *([0, 3, 3], [3, 0], [0, 1], None),
    )
    monkeypatch.setitem(sys.modules, "megatron.rl", ModuleType("megatron.rl"))
    monkeypatch.setitem(sys.modules, "megatron.rl.rl_utils", utils)
    training = ModuleType("megatron.training")
    training.get_args = lambda: Namespace(rl_inference_logprobs_is_correction=is_correction)
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    [sample] = samples_of_bin(train_policy.read_bin((torch.tensor(0),)), ["a", None])
    assert (sample.tokens, sample.loss_mask, sample.prompt_id, sample.old_log_probs) == ([7, 8, 9], [0.0, 1.0], "a", [-1.0, -2.0])
    assert sample.rollout_log_probs == ([-2.0, -3.0] if is_correction else None)
    assert counted == [2]


@pytest.mark.slow
@pytest.mark.megatron
def test_warnings_that_are_not_about_the_run_are_silent():
    """As in train: Megatron-Core says at its import what it does without, seven times."""
    root = EXAMPLES.parent
    finished = subprocess.run(
        [sys.executable, "examples/own_loop.py"],
        cwd=root,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert finished.returncode == 0 and not finished.stderr, finished.stderr


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


@pytest.mark.parametrize(("cut", "size"), [("samples", 1), ("samples", 3), ("tokens", 3)])
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
    at_first = example("fipo").future_kl_advantages(log_probs, log_probs, *before[2:])
    assert torch.equal(at_first, before[2])


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
    sure = example("gtpo").entropy_weighted_advantages(torch.zeros_like(entropy), *before[1:])
    torch.testing.assert_close(sure, before[1], **EXACT)


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


def test_a_step_in_which_trl_masks_every_completion_has_weights_of_zero(trainers):
    trainer = example("trl_trainer").GSPOTrainer({"completion_mask": torch.zeros(SHARE, WIDTH)})
    assert trainer._generate_and_score_completions(None)["token_weights"].tolist() == [0.0] * SHARE


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


def test_a_step_without_a_token_of_prime_rls_rl_loss_adds_nothing(trainers):
    module, row = example("prime_rl_loss"), torch.zeros(3)
    module.DataLoader([{"loss_mask": row[None] > 0, "rl_weights": None, "sequence_lengths": [3]}]).get_batch()
    columns = dict.fromkeys(("trainer_logprobs", "inference_logprobs", "advantages"), row)
    assert float(module.loss(SimpleNamespace(loss_mask=row > 0, loss_weights=None, **columns)).loss) == 0.0


# examples/length_bias.py at a reduced size: what the picture in docs/aggregation.md claims

WRONG, RIGHT, SHARE_OF_SHORT = range(3)


@pytest.mark.slow
def test_length_bias_is_what_the_picture_claims():
    """Dr. GRPO's claim, where the reward does not depend on the length: sample_mean lengthens wrong answers and shortens right
    ones, and prompt_mean less; the noise of 40 steps is 2 %. Answers of 4 and 16 tokens in the mean: where tokens count alike, 4 /
    20 of the weight is that of the short prompts, give or take a step's luck."""
    module = example("length_bias")
    curves = {name: module.train(name, seed=0, steps=40) for name in module.AGGREGATIONS}
    of_samples, of_prompts = curves["sample_mean"], curves["prompt_mean"]
    assert of_samples[-1, WRONG] > 2.0 and of_samples[-1, RIGHT] < 0.5
    assert 1.05 < of_prompts[-1, WRONG] < 0.6 * of_samples[-1, WRONG] and of_samples[-1, RIGHT] < of_prompts[-1, RIGHT] < 0.97
    for name in ("constant", "token_mean"):
        assert curves[name][-1, [WRONG, RIGHT]].tolist() == pytest.approx([1.0, 1.0], abs=0.05)
        assert float(curves[name][:, SHARE_OF_SHORT].mean()) == pytest.approx(0.2, abs=0.03)
    assert float(of_samples[:, SHARE_OF_SHORT].mean()) == pytest.approx(0.5, abs=1e-6)
