"""What happens to responses that --max-new-tokens cut."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test_train_command import Command
from test_train_options import options_of, write_prompts

from megatron_rl.config import Overlong
from megatron_rl.errors import ConfigError
from megatron_rl.train.collection import SampledRollouts
from megatron_rl.train.rollout_files import existing_parts, load_rollouts

pytestmark = pytest.mark.megatron


def one_by_one(prompt, response, record):
    return len(response) / 10 + (prompt == "1=")


def run(tmp_path, flags, num_ranks=1):
    """The samples of the first rollout, and the exit codes with the first rank's messages."""
    file = write_prompts(tmp_path / "prompts.jsonl", "1=", "22=")
    command = Command(
        f"--prompts {file} --max-new-tokens 4 --num-rollouts 1 --prompts-per-rollout 2 --samples-per-prompt 8 --hidden-size 32 "
        f"--no-plot --no-tensorboard --output-dir {tmp_path / 'run'} --save-rollouts {tmp_path / 'rollouts.jsonl'} {flags}",
        tmp_path,
        num_ranks,
    )
    codes, path = command.wait(), tmp_path / "rollouts.jsonl"
    batches = list(load_rollouts(path, vocab_size=100)) if existing_parts(path) else []
    return (batches[0].samples if batches else []), codes, command.output()


def ended(samples):
    """By sample: whether an end token, the largest of the vocabulary of characters, ends the response."""
    return [sample.tokens[-1] == 3 for sample in samples]  # characters 1, 2, = and the end


def test_a_masked_sample_trains_nothing_and_keeps_its_reward(tmp_path):
    (tmp_path / "keep").mkdir()
    (tmp_path / "mask").mkdir()
    kept, codes, said = run(tmp_path / "keep", "--reward test_overlong.one_by_one")
    masked, more_codes, more = run(tmp_path / "mask", "--reward test_overlong.one_by_one --overlong mask")
    assert codes == more_codes == [0], said + more
    assert [sample.tokens.tolist() for sample in kept] == [sample.tokens.tolist() for sample in masked]
    assert [sample.reward for sample in kept] == [sample.reward for sample in masked]
    assert [bool(sample.loss_mask.any()) for sample in masked] == ended(masked)
    assert 0 < sum(ended(masked)) < len(masked)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_of_cut_responses_alone_names_the_flag_that_cut_them(tmp_path, num_ranks):
    flags = "--reward test_overlong.one_by_one --overlong mask --max-new-tokens 1 --prompts-per-rollout 1 --samples-per-prompt 2"
    flags += " --steps-per-rollout 1 --seed 3"
    _, codes, said = run(tmp_path, flags, num_ranks)
    assert all(codes), said
    assert "not a single unmasked token" in said
    assert (
        "--overlong mask has masked every response of this step, because --max-new-tokens 1 cut it: raise --max-new-tokens" in said
    )


def test_the_penalty_grows_over_the_buffer(tmp_path):
    (tmp_path / "keep").mkdir()
    (tmp_path / "penalty").mkdir()
    kept, _, _ = run(tmp_path / "keep", "--reward test_overlong.one_by_one")
    lower, codes, said = run(tmp_path / "penalty", "--reward test_overlong.one_by_one --overlong penalty --overlong-buffer 2")
    assert codes == [0], said
    # Of at most 4 tokens the last two are the buffer: 0 up to 2 tokens, a half at 3, 1 at 4.
    penalties = {1: 0.0, 2: 0.0, 3: 0.5, 4: 1.0}
    assert [a.reward - b.reward for a, b in zip(kept, lower, strict=True)] == pytest.approx(
        [penalties[sample.response_length] for sample in lower]
    )
    assert {sample.response_length for sample in lower} >= {2, 3, 4}


def test_a_response_that_ends_at_the_last_token_is_not_cut():
    rollouts = SampledRollouts.__new__(SampledRollouts)
    rollouts._settings = SimpleNamespace(max_new_tokens=3, end_tokens=(9,))
    rollouts._options = SimpleNamespace(overlong=Overlong.MASK, overlong_buffer=None)
    assert [rollouts._is_cut(response) for response in ([1, 2, 9], [1, 2, 3], [1, 9])] == [False, True, False]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--overlong-buffer 3", "--overlong-buffer 3 has no effect without --overlong penalty"),
        ("--overlong mask", "--overlong mask needs --prompts"),
        ("--prompts p.jsonl --reward a.b --overlong mask --overlong-buffer 2", "has no effect with --overlong mask"),
        ("--prompts p.jsonl --reward a.b --overlong penalty", "from 1 to --max-new-tokens 16, and not None"),
        ("--prompts p.jsonl --reward a.b --overlong penalty --overlong-buffer 17", "and not 17"),
    ],
)
def test_flags_without_an_effect_are_refused(tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    write_prompts(tmp_path / "p.jsonl", "1=")
    with pytest.raises(ConfigError) as refused:
        options_of(line)
    assert message in str(refused.value)
