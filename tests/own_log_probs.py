"""The names by which verl, NeMo-RL and SkyRL compute log-probabilities, with their arguments and callers, in plain torch.

`modules_of` makes them a package of this process, as far as our replacement looks at it.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
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
    if isinstance(value, staticmethod):
        return staticmethod(_looking_up(module, value.__func__))
    if isinstance(value, type(chosen)) and value.__module__ == __name__:
        vars(module).setdefault("__builtins__", builtins)
        made = type(chosen)(value.__code__, vars(module), value.__name__, value.__defaults__, value.__closure__)
        made.__kwdefaults__ = value.__kwdefaults__
        return made
    return value


def unasked(name: str, arguments: str) -> Callable:
    """A function of these arguments that ours takes the place of."""
    made: dict[str, Callable] = {}
    exec(f"def {name}({arguments}): raise AssertionError('the host is not asked')", made)
    return made[name]


def unasked_function(name: str, arguments: str) -> type:
    """The same of autograd."""
    return type(name, (torch.autograd.Function,), {"forward": staticmethod(unasked("forward", f"ctx, {arguments}"))})


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


# Their kernels need CUDA.
LinearCrossEntropy = unasked_function(
    "LinearCrossEntropy", "hidden, weight, labels, temperature=1.0, reduction='none', dist_process_group=None"
)
FusedLinearForPPOFunction = unasked_function(
    "FusedLinearForPPOFunction", "hidden_states, vocab_weights, input_ids, temperature=1.0, chunk_size=512"
)


# MegatronEngine and MegatronEngineWithLMHead


def _maybe_enable_fused_kernels(self):
    """verl's own: not for MTP, nor for rows with padding."""
    if self.engine_config.use_fused_kernels:
        self.engine_config.use_fused_kernels = False


def initialize(self):
    self._maybe_enable_fused_kernels()


def of_the_megatron_engine(
    self,
    logits,
    label,
    temperature,
    *,
    calculate_sum_pi_squared,
    calculate_entropy,
    distillation_use_topk,
    distillation_only,
    logits_processor_func,
    batch,
    data_format,
):
    """_lm_head_logits_processor."""
    temperature[temperature <= 0] = 1e-8
    logits.div_(temperature.unsqueeze(dim=-1).to(logits.dtype))
    found = {}
    kept = logits
    if calculate_entropy:
        kept = logits.clone()
        if self.engine_config.entropy_from_logits_with_chunking:
            found["entropy"] = vocab_parallel_entropy_with_chunking(logits, chunk_size=2)
        else:
            found["entropy"] = vocab_parallel_entropy(logits)
    found["log_probs"] = vocab_parallel_log_probs_from_logits(kept, label)
    return found


def forward_step(self, batch, calculate_entropy=False, calculate_sum_pi_squared=False):
    """Of whole rows: the labels and the temperature of each row, laid out as the model's output is. With MTP the model is given its
    labels. A row of padding has temperature 0."""
    tokens = batch["input_ids"]
    output = self.module[0](tokens, tokens.roll(-1, 1) if self.has_mtp else None)
    temperature = batch["temperature"][:, None].repeat(1, tokens.shape[1])
    temperature[:, -1] = 0.0
    return self._lm_head_logits_processor(
        output,
        tokens.roll(-1, 1),
        temperature,
        calculate_sum_pi_squared=calculate_sum_pi_squared,
        calculate_entropy=calculate_entropy,
        distillation_use_topk=False,
        distillation_only=False,
        logits_processor_func=None,
        batch=batch,
        data_format="bshd",
    )


# FSDPEngineWithLMHead


def prepare_model_inputs(self, micro_batch):
    """Of packed rows; a fused head has one temperature."""
    temperature, tokens = micro_batch["temperature"], micro_batch["input_ids"]
    is_fused = micro_batch["use_fused_kernels"]
    if is_fused:
        assert not isinstance(temperature, Tensor), "use_fused_kernels does not support per sample temperature yet"
    of_rows = torch.as_tensor(temperature).expand(tokens.shape[0]).repeat_interleave(tokens.shape[1])
    kept = {"input_ids_rmpad_rolled": tokens.roll(-1, 1).flatten(), "temperature_rmpad": of_rows}
    inputs = {"input_ids": tokens.flatten()[None]}
    if is_fused:
        rolled = kept["input_ids_rmpad_rolled"].unsqueeze(0)
        inputs |= {"temperature": temperature, "return_dict": True, "shift_labels": rolled}
    return inputs, kept


def step_of_the_fsdp_engine(self, micro_batch):
    """forward_step."""
    return self.prepare_model_inputs(micro_batch=micro_batch)


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


def get_non_tensor_data(data, key, default):
    return data.get(key, default)


def assign_non_tensor(data, **values):
    data.update(values)


FSDP_ENGINE = {
    "FSDPEngineWithLMHead": {
        "prepare_model_outputs": staticmethod(of_the_fsdp_engine),
        "prepare_model_inputs": prepare_model_inputs,
        "forward_step": step_of_the_fsdp_engine,
    }
}
MEGATRON_ENGINE = {
    "MegatronEngine": {"_maybe_enable_fused_kernels": _maybe_enable_fused_kernels, "initialize": initialize},
    "MegatronEngineWithLMHead": {"_lm_head_logits_processor": of_the_megatron_engine, "forward_step": forward_step},
}


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
        "verl.workers.engine.fsdp.transformer_impl": (functional, rows, FSDP_ENGINE),
        "verl.workers.engine.megatron.transformer_impl": (parallel, shards, MEGATRON_ENGINE),
    }
    for name, (source, names, classes) in engines.items():
        found |= modules_of("verl", {name: {each: vars(source)[each] for each in names} | {"chosen": chosen, "torch": torch}})
        vars(found[name])["Tensor"] = Tensor
        base: type = SimpleNamespace
        for engine, methods in classes.items():
            of_class = {key: _looking_up(found[name], function) for key, function in methods.items()}
            base = vars(found[name])[engine] = type(engine, (base,), of_class | {"__module__": name})
    found |= modules_of(
        "verl", {"verl.utils.tensordict_utils": {one.__name__: one for one in (get_non_tensor_data, assign_non_tensor)}}
    )
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


ROWS = "vocab_parallel_logits, target, vocab_start_index, vocab_end_index"
DistributedLogprob = unasked_function("DistributedLogprob", f"{ROWS}, group, inference_only=False")
ChunkedDistributedLogprob = unasked_function("ChunkedDistributedLogprob", f"{ROWS}, chunk_size, tp_group, inference_only=False")
_VocabParallelEntropy = unasked_function("_VocabParallelEntropy", "vocab_parallel_logits")
_fused_lm_head_logprob_apply = unasked(
    "_fused_lm_head_logprob_apply",
    "backend, hidden, weight, target, vocab_start_index, vocab_end_index, chunk_size, tp_group, inference_only",
)
_fused_vocab_parallel_entropy_from_hidden = unasked(
    "_fused_vocab_parallel_entropy_from_hidden", "hidden, lm_head_weight, tp_group, chunk_size=None, temperature=1.0"
)


def from_parallel_logits_to_logprobs(logits, target, first, end, group, inference_only=False, chunk_size=None):
    """The shift and the choice of the function; packing and context parallelism are the host's own."""
    target = target.roll(shifts=-1, dims=-1)
    if chunk_size is None:
        found = DistributedLogprob.apply(logits, target, first, end, group, inference_only)
    else:
        found = ChunkedDistributedLogprob.apply(logits, target, first, end, chunk_size, group, inference_only)
    return found.contiguous()[:, :-1]


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
    contents: dict[str, object] = {one.__name__: one for one in (DistributedLogprob, ChunkedDistributedLogprob)}
    contents["from_parallel_logits_to_logprobs"] = from_parallel_logits_to_logprobs
    contents["from_parallel_logits_to_logprobs_packed_sequences"] = from_parallel_logits_to_logprobs
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


vocab_parallel_logprobs = unasked("vocab_parallel_logprobs", "vocab_parallel_logits, target, use_fused_kernel=True")
vocab_parallel_entropy_of_roll = unasked("vocab_parallel_entropy", "vocab_parallel_logits, used_fp32=True, use_fused_kernel=True")


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
