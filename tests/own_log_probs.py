"""The names by which verl, NeMo-RL and SkyRL compute log-probabilities, with their arguments and callers, in plain torch.

`modules_of` makes them a package of this process, as far as our replacement looks at it.
"""

from __future__ import annotations

import builtins
import sys
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor


def chosen(values: Tensor, labels: Tensor) -> Tensor:  # [..., V], [...] -> [...]
    return values.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def entropy_of(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def modules_of(package: str, contents: dict[str, dict[str, object]]) -> dict[str, ModuleType]:
    """{module: {name: value}} as modules; `from module import name` of a caller is a value here. A function of one of them looks
    its names up there."""
    for whole in contents:
        parts = whole.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            sys.modules.setdefault(name, ModuleType(name)).__path__ = []
    assert all(name.split(".")[0] == package for name in contents)
    found = {name: sys.modules[name] for name in contents}
    for name, values in contents.items():
        vars(found[name]).update({key: _looking_up(found[name], value) for key, value in values.items()})
    return found


def _looking_up(module: ModuleType, value: object) -> object:
    """A function whose globals are the module's."""
    if isinstance(value, type(chosen)) and value.__module__ == __name__:
        vars(module).setdefault("__builtins__", builtins)
        made = type(chosen)(value.__code__, vars(module), value.__name__, value.__defaults__, value.__closure__)
        made.__kwdefaults__ = value.__kwdefaults__
        return made
    return value


# verl 1dda039b9


def logprobs_from_logits(logits, labels, inplace_backward=True):
    return chosen(logits.log_softmax(-1), labels)


def entropy_from_logits(logits):
    return entropy_of(logits)


def entropy_from_logits_with_chunking(logits, chunk_size=2048):
    return entropy_of(logits.float())


def vocab_parallel_log_probs_from_logits(logits, labels):
    return chosen(logits.float().log_softmax(-1), labels)


def vocab_parallel_entropy(vocab_parallel_logits):
    return entropy_of(vocab_parallel_logits)


def vocab_parallel_entropy_with_chunking(vocab_parallel_logits, chunk_size=2048):
    return entropy_of(vocab_parallel_logits)


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None):
        raise AssertionError("verl's kernel needs CUDA")


class FusedLinearForPPOFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_states, vocab_weights, input_ids, temperature=1.0, chunk_size=512):
        raise AssertionError("verl's own function is not asked")


def of_the_megatron_engine(logits, label, temperature, calculate_entropy, with_chunking=False):
    """MegatronEngineWithLMHead._lm_head_logits_processor."""
    logits.div_(temperature.unsqueeze(dim=-1).to(logits.dtype))
    found = {}
    kept = logits
    if calculate_entropy:
        kept = logits.clone()
        if with_chunking:
            found["entropy"] = vocab_parallel_entropy_with_chunking(logits, chunk_size=2)
        else:
            found["entropy"] = vocab_parallel_entropy(logits)
    found["log_probs"] = vocab_parallel_log_probs_from_logits(kept, label)
    return found


def of_the_fsdp_engine(logits, labels, temperature, entropy):
    """FSDPEngineWithLMHead.prepare_model_outputs of packed rows."""
    logits = logits / temperature.clamp(min=1e-8).unsqueeze(-1).to(logits.dtype)
    found = {} if entropy is None else {"entropy": entropy(logits)}
    return found | {"log_probs": logprobs_from_logits(logits=logits, labels=labels, inplace_backward=entropy is None)}


def fused_output_processor(hidden_states, weight, labels, temperature):
    return linear_cross_entropy(hidden_states, weight, labels, temperature, "none", None)  # noqa: F821  # of its module


def fused_in_torch(self, hidden_states, vocab_weights, input_ids, temperature=1.0):
    """FusedLinearForPPO.forward."""
    return FusedLinearForPPOFunction.apply(hidden_states, vocab_weights, input_ids, temperature, 512)


def verl_modules() -> dict[str, ModuleType]:
    """Its engines have taken the names already, as in a process that made one engine before."""
    rows = {one.__name__: one for one in (logprobs_from_logits, entropy_from_logits, entropy_from_logits_with_chunking)}
    shards = {
        one.__name__: one
        for one in (vocab_parallel_log_probs_from_logits, vocab_parallel_entropy, vocab_parallel_entropy_with_chunking)
    }
    linear_cross_entropy = LinearCrossEntropy.apply
    found = modules_of(
        "verl",
        {
            "verl.utils.torch_functional": rows,
            "verl.utils.megatron.tensor_parallel": shards,
            "verl.utils.kernel.linear_cross_entropy": {"linear_cross_entropy": linear_cross_entropy},
            "verl.utils.experimental.torch_functional": {"FusedLinearForPPOFunction": FusedLinearForPPOFunction},
        },
    )
    functional, parallel = found["verl.utils.torch_functional"], found["verl.utils.megatron.tensor_parallel"]
    engines = {
        "verl.workers.engine.fsdp.transformer_impl": (functional, rows, "FSDPEngineWithLMHead", of_the_fsdp_engine),
        "verl.workers.engine.megatron.transformer_impl": (parallel, shards, "MegatronEngineWithLMHead", of_the_megatron_engine),
    }
    methods = {"FSDPEngineWithLMHead": "prepare_model_outputs", "MegatronEngineWithLMHead": "_lm_head_logits_processor"}
    for name, (source, names, engine, function) in engines.items():
        found |= modules_of("verl", {name: {each: vars(source)[each] for each in names} | {"chosen": chosen}})
        vars(found[name])[engine] = SimpleNamespace(**{methods[engine]: _looking_up(found[name], function)})
    forward = "verl.models.mcore.model_forward_fused"
    found |= modules_of(
        "verl", {forward: {"linear_cross_entropy": linear_cross_entropy, "fused_output_processor": fused_output_processor}}
    )
    experimental = found["verl.utils.experimental.torch_functional"]
    experimental.FusedLinearForPPO = SimpleNamespace(forward=_looking_up(experimental, fused_in_torch))
    for module in (functional, parallel):
        vars(module).update(chosen=chosen, entropy_of=entropy_of)
    return found


# NeMo-RL 7ea279abf and SkyRL a9564572e, which have the first two functions from NeMo-Aligner


class DistributedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vocab_parallel_logits, target, vocab_start_index, vocab_end_index, group, inference_only=False):
        raise AssertionError("the host's own function is not asked")


class ChunkedDistributedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vocab_parallel_logits, target, vocab_start_index, vocab_end_index, chunk_size, tp_group, inference_only=False):
        raise AssertionError("the host's own function is not asked")


class ChunkedDistributedHiddenStatesToLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        tensor_parallel_hidden_states,
        target,
        output_weight_layer,
        vocab_start_index,
        vocab_end_index,
        chunk_size,
        tp_group,
        inference_only=False,
    ):
        raise AssertionError("NeMo-RL's own function is not asked")


class _VocabParallelEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vocab_parallel_logits):
        raise AssertionError("SkyRL's own function is not asked")


def from_parallel_logits_to_logprobs(logits, target, first, end, group, inference_only=False, chunk_size=None):
    """The shift and the choice of the function; packing and context parallelism are the host's own."""
    target = target.roll(shifts=-1, dims=-1)
    if chunk_size is None:
        found = DistributedLogprob.apply(logits, target, first, end, group, inference_only)
    else:
        found = ChunkedDistributedLogprob.apply(logits, target, first, end, chunk_size, group, inference_only)
    return found.contiguous()[:, :-1]


def from_parallel_hidden_states_to_logprobs(hidden, weight, target, first, end, group, inference_only=False):
    target = target.roll(shifts=-1, dims=-1)
    found = ChunkedDistributedHiddenStatesToLogprobs.apply(hidden, target, weight, first, end, 4, group, inference_only)
    return found.contiguous()[:, :-1]


def _fused_lm_head_logprob_apply(
    backend, hidden, weight, target, vocab_start_index, vocab_end_index, chunk_size, tp_group, inference_only
):
    raise AssertionError("SkyRL's own function is not asked")


def _fused_vocab_parallel_entropy_from_hidden(hidden, lm_head_weight, tp_group, chunk_size=None, temperature=1.0):
    raise AssertionError("SkyRL's own function is not asked")


def from_parallel_hidden_to_logprobs(hidden, weight, target, first, end, group, inference_only=False, temperature=1.0):
    target, weight = target.roll(shifts=-1, dims=-1), weight / temperature
    found = _fused_lm_head_logprob_apply("torch", hidden, weight, target, first, end, 4, group, inference_only)
    return found.contiguous()[:, :-1]


def from_parallel_hidden_to_entropy_packed_sequences(hidden, weight, group, temperature):
    return _fused_vocab_parallel_entropy_from_hidden(hidden, weight, group, chunk_size=4, temperature=temperature)


def of_entropy(vocab_parallel_logits):
    """SkyRL's vocab_parallel_entropy and vocab_parallel_entropy_weighted_sum."""
    return _VocabParallelEntropy.apply(vocab_parallel_logits)


def nemo_rl_module() -> ModuleType:
    name = "nemo_rl.distributed.model_utils"
    functions = (DistributedLogprob, ChunkedDistributedLogprob, ChunkedDistributedHiddenStatesToLogprobs)
    contents: dict[str, object] = {one.__name__: one for one in functions}
    contents["from_parallel_logits_to_logprobs"] = from_parallel_logits_to_logprobs
    contents["from_parallel_logits_to_logprobs_packed_sequences"] = from_parallel_logits_to_logprobs
    contents["from_parallel_hidden_states_to_logprobs"] = from_parallel_hidden_states_to_logprobs
    return modules_of("nemo_rl", {name: contents})[name]


def skyrl_module() -> ModuleType:
    name = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
    functions = (DistributedLogprob, ChunkedDistributedLogprob, _VocabParallelEntropy)
    contents: dict[str, object] = {one.__name__: one for one in functions}
    for one in (
        *(from_parallel_logits_to_logprobs, from_parallel_hidden_to_logprobs, _fused_lm_head_logprob_apply),
        *(_fused_vocab_parallel_entropy_from_hidden, from_parallel_hidden_to_entropy_packed_sequences),
    ):
        contents[one.__name__] = one
    contents["from_parallel_logits_to_logprobs_packed_sequences"] = from_parallel_logits_to_logprobs
    contents["from_parallel_hidden_to_logprobs_packed_sequences"] = from_parallel_hidden_to_logprobs
    contents["vocab_parallel_entropy"] = contents["vocab_parallel_entropy_weighted_sum"] = of_entropy
    return modules_of("skyrl", {name: contents})[name]


# ROLL 8eb27cc2d


def vocab_parallel_logprobs(vocab_parallel_logits, target, use_fused_kernel=True):
    raise AssertionError("ROLL's own function is not asked")


def vocab_parallel_entropy_of_roll(vocab_parallel_logits, used_fp32=True, use_fused_kernel=True):
    raise AssertionError("ROLL's own function is not asked")


def op_compute_log_probs(self, logits, labels):
    return vocab_parallel_logprobs(logits, labels, use_fused_kernel=False)


def op_compute_entropy(self, logits):
    return vocab_parallel_entropy(logits, used_fp32=True, use_fused_kernel=False)


def roll_modules() -> dict[str, ModuleType]:
    """Its strategy has taken the names already, one of them from the package that hands it on."""
    functions = "mcore_adapter.parallel_functions"
    found = modules_of("mcore_adapter", {f"{functions}.vocab_parallel": {"vocab_parallel_logprobs": vocab_parallel_logprobs}})
    log_probs = found[f"{functions}.vocab_parallel"].vocab_parallel_logprobs
    found |= modules_of("mcore_adapter", {functions: {"vocab_parallel_logprobs": log_probs}})
    parallel = "roll.third_party.megatron.tensor_parallel"
    found |= modules_of("roll", {parallel: {"vocab_parallel_entropy": vocab_parallel_entropy_of_roll}})
    entropy = found[parallel].vocab_parallel_entropy
    strategy = "roll.distributed.strategy.megatron_strategy"
    found |= modules_of("roll", {strategy: {"vocab_parallel_logprobs": log_probs, "vocab_parallel_entropy": entropy}})
    methods = {one.__name__: _looking_up(found[strategy], one) for one in (op_compute_log_probs, op_compute_entropy)}
    found[strategy].MegatronInferStrategy = type("MegatronInferStrategy", (), methods)
    return found
