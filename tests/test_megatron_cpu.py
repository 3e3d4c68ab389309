"""CPU support for Megatron-Core: when asked for, without CUDA, once, and without Transformer Engine in the way."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import run_in_children

from megatron_rl.errors import ConfigError
from megatron_rl.megatron import cpu
from megatron_rl.megatron.model import gpt_layer_spec, has_transformer_engine
from megatron_rl.testing.ranks import run_ranks

IMPOSTOR = "raise RuntimeError('transformer-engine: found no package for this framework')"


def fake_transformer_engine(folder, source):
    (folder / "transformer_engine").mkdir()
    (folder / "transformer_engine" / "__init__.py").write_text(source)
    return folder


def patched_places():
    """What the support replaces, by the object that is there now."""
    of_cuda = [torch.cuda.current_device, torch.cuda.Stream, torch.cuda.Event, torch.cuda.synchronize]
    of_torch = [torch.Tensor.cuda, torch.Tensor.type, torch.nn.Module.cuda, *(getattr(torch, name) for name in cpu._FACTORIES)]
    return of_cuda + of_torch


IMPORTS = """
before = torch.zeros, torch.cuda.current_device, torch.Tensor.type
import megatron_rl.megatron.cpu as cpu, megatron_rl.megatron.model, megatron_rl.testing.ranks, sys
assert before == (torch.zeros, torch.cuda.current_device, torch.Tensor.type)
print(cpu._is_installed, any(name.startswith("megatron.") for name in sys.modules))
cpu.install_cpu_support()
import megatron.core.models.gpt
print("survived")
"""


@pytest.mark.megatron
def test_nothing_is_replaced_by_an_import_and_a_broken_transformer_engine_does_not_stop_megatron(tmp_path):
    """Catches support that acts at import. Megatron-Core survives ImportError alone."""
    path = [str(fake_transformer_engine(tmp_path, IMPOSTOR)), *filter(None, [os.environ.get("PYTHONPATH")])]
    printed = run_in_children(IMPORTS, PYTHONPATH=os.pathsep.join(path), CUDA_VISIBLE_DEVICES="")
    assert printed == "False False\nsurvived\n"


@pytest.mark.megatron
def test_installing_twice_replaces_once():
    """Catches wrappers around wrappers, which make each call of torch.zeros slower than the last."""

    def work(rank):
        assert not cpu._is_installed
        before = patched_places()
        cpu.install_cpu_support()
        first = patched_places()
        cpu.install_cpu_support()
        assert all(x is not y for x, y in zip(before, first, strict=True))
        return cpu._is_installed, all(x is y for x, y in zip(first, patched_places(), strict=True))

    assert run_ranks(work, 1, use_megatron=False) == [(True, True)]
    assert not cpu._is_installed  # the rank's, not ours


def test_it_refuses_where_cuda_is_available_and_where_megatron_is_not_installed(monkeypatch):
    """Catches a training run on GPUs that silently computes on the CPU."""
    before = patched_places()
    with monkeypatch.context() as with_cuda:
        with_cuda.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(ConfigError, match=r"torch.cuda.is_available\(\) is True.*CUDA_VISIBLE_DEVICES=''"):
            cpu.install_cpu_support()
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ConfigError, match=r"megatron-core is not installed.*pip install '/path/to/megatron_rl\[megatron\]'"):
        cpu.install_cpu_support()
    assert all(x is y for x, y in zip(before, patched_places(), strict=True)) and not cpu._is_installed


def test_an_absent_or_broken_transformer_engine_is_not_used(monkeypatch, tmp_path):
    assert not has_transformer_engine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "transformer_engine").exists()])
    assert not has_transformer_engine()
    monkeypatch.syspath_prepend(fake_transformer_engine(tmp_path, IMPOSTOR))
    assert not has_transformer_engine()


@pytest.mark.megatron
@pytest.mark.parametrize(("choice", "expected"), [(True, True), (False, False)])
def test_transformer_engine_s_layers_are_taken_where_they_work(monkeypatch, choice, expected):
    """Catches a working Transformer Engine that is never used, and a False that is not obeyed."""
    import megatron.core.models.gpt.gpt_layer_specs as layer_specs

    asked = []
    block = SimpleNamespace(layer_specs=[])
    monkeypatch.setattr("megatron_rl.megatron.model.has_transformer_engine", lambda: True)
    spec = lambda config, use_transformer_engine, **keywords: asked.append(use_transformer_engine) or block  # noqa: E731
    monkeypatch.setattr(layer_specs, "get_gpt_decoder_block_spec", spec)
    gpt_layer_spec(SimpleNamespace(normalization="RMSNorm", qk_layernorm=False), use_transformer_engine=choice)
    assert asked == [expected]


def test_torch_compile_returns_its_function_while_megatron_is_imported_without_cuda(monkeypatch):
    """Catches a compiler that stays away, and one that is imported for fused functions that no model on a CPU calls."""
    compiling = torch.compile
    for has_cuda in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_cuda=has_cuda: has_cuda)
        with cpu._without_compiler():
            assert (torch.compile is compiling) == has_cuda
            assert has_cuda or (torch.compile(len) is len and torch.compile(dynamic=True)(len) is len)
        assert torch.compile is compiling
