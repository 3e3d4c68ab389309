"""The modules by which verl, NeMo-RL, SkyRL and ROLL compute log-probabilities, as far as our replacement looks at them.

What ours takes the place of has the host's arguments, and is an error where it is asked.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
from collections.abc import Mapping
from types import ModuleType


def unasked(name: str, arguments: str) -> str:
    return f"def {name}({arguments}): raise AssertionError('the host is not asked')\n"


def unasked_function(name: str, arguments: str) -> str:
    """The same of autograd."""
    return f"class {name}(torch.autograd.Function):\n    @staticmethod\n    {unasked('forward', 'ctx, ' + arguments)}"


# verl 1dda039b9

VERL = {
    "verl.utils.torch_functional": (
        unasked("logprobs_from_logits", "logits, labels, inplace_backward=True")
        + unasked("entropy_from_logits", "logits")
        + unasked("entropy_from_logits_with_chunking", "logits, chunk_size=2048")
    ),
    "verl.utils.megatron.tensor_parallel": (
        unasked("vocab_parallel_log_probs_from_logits", "logits, labels")
        + unasked("vocab_parallel_entropy", "vocab_parallel_logits")
        + unasked("vocab_parallel_entropy_with_chunking", "vocab_parallel_logits, chunk_size=2048")
    ),
    "verl.utils.kernel.linear_cross_entropy": "import torch\n"
    + unasked_function("LinearCrossEntropy", "hidden, weight, labels, temperature=1.0, reduction='none', dist_process_group=None")
    + "linear_cross_entropy = LinearCrossEntropy.apply\n",
    "verl.utils.experimental.torch_functional": "import torch\n"
    + unasked_function("FusedLinearForPPOFunction", "hidden_states, vocab_weights, input_ids, temperature=1.0, chunk_size=512")
    + """
class FusedLinearForPPO:
    def forward(self, hidden_states, vocab_weights, input_ids, temperature=1.0):
        return FusedLinearForPPOFunction.apply(hidden_states, vocab_weights, input_ids, temperature, 512)
""",
    "verl.utils.tensordict_utils": """
def get_non_tensor_data(data, key, default):
    return data.get(key, default)

def assign_non_tensor(data, **values):
    data.update(values)
""",
    "verl.models.mcore.model_forward_fused": """
from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

def fused_output_processor(hidden_states, weight, labels, temperature):
    return linear_cross_entropy(hidden_states, weight, labels, temperature, "none", None)
""",
    # Of packed rows; its fused head has one temperature.
    "verl.workers.engine.fsdp.transformer_impl": """
import torch
from verl.utils.torch_functional import entropy_from_logits, entropy_from_logits_with_chunking, logprobs_from_logits

class FSDPEngineWithLMHead:
    def prepare_model_outputs(self, logits, labels, temperature, entropy):
        self.logits = logits = logits / temperature.clamp(min=1e-8).unsqueeze(-1).to(logits.dtype)
        found = {} if entropy is None else {"entropy": globals()[entropy](logits)}
        return found | {"log_probs": logprobs_from_logits(logits=logits, labels=labels, inplace_backward=entropy is None)}

    def prepare_model_inputs(self, micro_batch):
        temperature, tokens = micro_batch["temperature"], micro_batch["input_ids"]
        is_fused = micro_batch["use_fused_kernels"]
        if is_fused:
            assert not isinstance(temperature, torch.Tensor), "use_fused_kernels does not support per sample temperature yet"
        of_rows = torch.as_tensor(temperature).expand(tokens.shape[0]).repeat_interleave(tokens.shape[1])
        kept = {"input_ids_rmpad_rolled": tokens.roll(-1, 1).flatten(), "temperature_rmpad": of_rows}
        inputs = {"input_ids": tokens.flatten()[None]}
        if is_fused:
            rolled = kept["input_ids_rmpad_rolled"].unsqueeze(0)
            inputs |= {"temperature": temperature, "return_dict": True, "shift_labels": rolled}
        return inputs, kept

    def forward_step(self, micro_batch):
        return self.prepare_model_inputs(micro_batch=micro_batch)
""",
    # verl turns its fused head off for MTP and for rows with padding. Its forward here is of whole rows: with MTP the model is
    # given its labels, and a row of padding has temperature 0.
    "verl.workers.engine.megatron.transformer_impl": """
from types import SimpleNamespace
from verl.utils.megatron.tensor_parallel import (
    vocab_parallel_entropy, vocab_parallel_entropy_with_chunking, vocab_parallel_log_probs_from_logits
)

class MegatronEngine(SimpleNamespace):
    def _maybe_enable_fused_kernels(self):
        self.engine_config.use_fused_kernels = False

    def initialize(self):
        self._maybe_enable_fused_kernels()

class MegatronEngineWithLMHead(MegatronEngine):
    def _lm_head_logits_processor(
        self, logits, label, temperature, *, calculate_sum_pi_squared, calculate_entropy, distillation_use_topk,
        distillation_only, logits_processor_func, batch, data_format,
    ):
        temperature[temperature <= 0] = 1e-8
        logits.div_(temperature.unsqueeze(dim=-1).to(logits.dtype))
        found, kept = {}, logits
        if calculate_entropy:
            kept = logits.clone()
            if self.engine_config.entropy_from_logits_with_chunking:
                found["entropy"] = vocab_parallel_entropy_with_chunking(logits, chunk_size=2)
            else:
                found["entropy"] = vocab_parallel_entropy(logits)
        found["log_probs"] = vocab_parallel_log_probs_from_logits(kept, label)
        return found

    def forward_step(self, batch, **chosen):
        tokens = batch["input_ids"]
        output = self.module[0](tokens, tokens.roll(-1, 1) if self.has_mtp else None)
        temperature = batch["temperature"][:, None].repeat(1, tokens.shape[1])
        temperature[:, -1] = 0.0
        switches = ("calculate_sum_pi_squared", "calculate_entropy", "distillation_use_topk", "distillation_only")
        options = dict.fromkeys(switches, False) | {"logits_processor_func": None, "batch": batch, "data_format": "bshd"}
        return self._lm_head_logits_processor(output, tokens.roll(-1, 1), temperature, **options | chosen)
""",
}

# NeMo-RL 7ea279abf and SkyRL a9564572e, which have their first functions from NeMo-Aligner. Packing is the host's own.

OF_ALIGNER = (
    "import torch\n"
    + unasked_function(
        "DistributedLogprob", "vocab_parallel_logits, target, vocab_start_index, vocab_end_index, group, inference_only=False"
    )
    + unasked_function(
        "ChunkedDistributedLogprob",
        "vocab_parallel_logits, target, vocab_start_index, vocab_end_index, chunk_size, tp_group, inference_only=False",
    )
    + """
def from_parallel_logits_to_logprobs(logits, target, first, end, group, inference_only=False, chunk_size=None):
    target = target.roll(shifts=-1, dims=-1)
    if chunk_size is None:
        found = DistributedLogprob.apply(logits, target, first, end, group, inference_only)
    else:
        found = ChunkedDistributedLogprob.apply(logits, target, first, end, chunk_size, group, inference_only)
    return found.contiguous()[:, :-1]

from_parallel_logits_to_logprobs_packed_sequences = from_parallel_logits_to_logprobs
"""
)
NEMO_RL = {"nemo_rl.distributed.model_utils": OF_ALIGNER}
SKYRL = {
    "skyrl.backends.skyrl_train.distributed.megatron.model_utils": OF_ALIGNER
    + unasked_function("_VocabParallelEntropy", "vocab_parallel_logits")
    + unasked(
        "_fused_lm_head_logprob_apply",
        "backend, hidden, weight, target, vocab_start_index, vocab_end_index, chunk_size, tp_group, inference_only",
    )
    + unasked("_fused_vocab_parallel_entropy_from_hidden", "hidden, lm_head_weight, tp_group, chunk_size=None, temperature=1.0")
    + """
def from_parallel_hidden_to_logprobs(hidden, weight, target, first, end, group, inference_only=False, temperature=1.0):
    target, weight = target.roll(shifts=-1, dims=-1), weight / temperature
    found = _fused_lm_head_logprob_apply("torch", hidden, weight, target, first, end, 4, group, inference_only)
    return found.contiguous()[:, :-1]

from_parallel_hidden_to_logprobs_packed_sequences = from_parallel_hidden_to_logprobs

def from_parallel_hidden_to_entropy_packed_sequences(hidden, weight, group, temperature):
    return _fused_vocab_parallel_entropy_from_hidden(hidden, weight, group, chunk_size=4, temperature=temperature)

def vocab_parallel_entropy(vocab_parallel_logits):
    return _VocabParallelEntropy.apply(vocab_parallel_logits)

vocab_parallel_entropy_weighted_sum = vocab_parallel_entropy
"""
}

# ROLL 8eb27cc2d, whose strategy has one of its names from a package that hands it on.

ROLL = {
    "mcore_adapter.parallel_functions.vocab_parallel": unasked(
        "vocab_parallel_logprobs", "vocab_parallel_logits, target, use_fused_kernel=True"
    ),
    "mcore_adapter.parallel_functions": "from mcore_adapter.parallel_functions.vocab_parallel import vocab_parallel_logprobs\n",
    "roll.third_party.megatron.tensor_parallel": unasked(
        "vocab_parallel_entropy", "vocab_parallel_logits, used_fp32=True, use_fused_kernel=True"
    ),
    "roll.distributed.strategy.megatron_strategy": """
from mcore_adapter.parallel_functions import vocab_parallel_logprobs
from roll.third_party.megatron.tensor_parallel import vocab_parallel_entropy

class MegatronInferStrategy:
    def op_compute_log_probs(self, logits, labels):
        return vocab_parallel_logprobs(logits, labels, use_fused_kernel=False)

    def op_compute_entropy(self, logits):
        return vocab_parallel_entropy(logits, used_fp32=True, use_fused_kernel=False)
""",
}
SOURCES = {"verl": VERL, "NeMo-RL": NEMO_RL, "SkyRL": SKYRL, "ROLL": ROLL}


def module_at(name: str, contents: str | Mapping[str, object] = "") -> ModuleType:
    """A module of this process in that place, with this text or these values."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        outer = ".".join(parts[:end])
        sys.modules.setdefault(outer, ModuleType(outer)).__path__ = []
    if isinstance(contents, str):
        exec(compile(contents, f"{name}.py", "exec"), vars(sys.modules[name]))
    else:
        vars(sys.modules[name]).update(contents)
    return sys.modules[name]


def modules_of(host: str, old: str = "", new: str = "") -> dict[str, ModuleType]:
    """Those of SOURCES, with another text in the place of one. The first may have been imported by the others already."""
    assert any(old in source for source in SOURCES[host].values())
    return {name: module_at(name, source.replace(old, new)) for name, source in SOURCES[host].items()}


def install(host: str) -> None:
    """As in a worker of that host. SkyRL's has the entry of its table."""
    heads = importlib.import_module(f"megatron_rl.hosts.heads.{host.lower().replace('-', '_')}")
    if host == "SkyRL":
        pickle.loads(pickle.dumps(heads.InWorkers(host, "a revision")))
    elif host != "verl":  # importing that one installs
        heads.install(host, "a revision")


@functools.cache
def with_ours(host: str) -> dict[str, ModuleType]:
    modules = modules_of(host)
    install(host)
    return modules
