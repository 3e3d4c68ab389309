"""Replaces Megatron-LM's train_rl.py, 0.17 and later, for GPT models: start it from a checkout, with its flags and ours.

Three things differ. Logits stay sharded over the vocabulary, [1, S, V / tp]. The rollout temperature divides them. The counts in
the loss are those of the step, whatever the bins hold. Rollouts, packing and the training loop are Megatron-LM's; `take_rollouts`
says which of its functions it replaces, and no file of the checkout is edited.

This file leaves out parts of train_rl.py: hybrid models; --fp8-param-gather, whose parameters train_rl.py makes in Transformer
Engine's fp8_model_init; the step that hides --recompute-granularity from the model's configuration while inference is checked; its
reports (rl/...), timers, and checks for NaN and spiky losses. If you need one of these, copy our forward_step into train_rl.py.
"""

import sys
from functools import partial
from pathlib import Path

from megatron_rl.hosts.megatron_lm import call_pretrain, megatron_lm_config
from megatron_rl.hosts.train_rl import take_rollouts
from megatron_rl.megatron.packed_bins import PackedBin, PackedForwardStep

_rollouts = _step = None


def read_bin(item):
    """Reads the bin of an item. An item of train_rl.py's iterator is the index of a bin."""
    from megatron.rl.rl_utils import get_rl_runtime_state, load_packed_data_by_index
    from megatron.training import get_args

    state, is_correction = get_rl_runtime_state(), get_args().rl_inference_logprobs_is_correction
    loaded = load_packed_data_by_index(item[0].item(), state.packing_context, is_correction)
    tokens, advantages, old_log_probs, loss_mask, _, ref_log_probs, rollout_log_probs, starts, lengths, indices, _ = loaded
    state.increment_sequences(len(indices))
    return PackedBin(
        tokens=tokens,
        loss_mask=loss_mask,
        advantages=advantages,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        rollout_log_probs=rollout_log_probs,
        seq_starts=starts,
        seq_lengths=lengths,
        seq_indices=indices,
    )


def clear_rope_caches(model):
    """Clears rotary embeddings that were cached under inference mode: they cannot be saved for a backward pass."""
    for module in model.modules():
        for method in (getattr(module, name, None) for name in ("forward", "_forward")):
            if hasattr(method, "cache_clear"):
                method.cache_clear()


def forward_step(data_iterator, model, loss_only=False):
    global _step
    if _step is None:
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.training import get_tokenizer

        _step = PackedForwardStep(
            read_bin,
            _rollouts.prompt_of_row,
            get_num_microbatches,
            vocab_size=get_tokenizer().vocab_size,
            config=megatron_lm_config(),
            rollout_of_row=_rollouts.rollout_of_row,
        )
    model = model[0] if isinstance(model, list) else model
    clear_rope_caches(model)
    return _step(data_iterator, model)


def main():
    global _rollouts
    sys.path.insert(0, str(Path.cwd()))  # the checkout: gpt_builders and model_provider are in its root
    from gpt_builders import gpt_builder
    from megatron.core.enums import ModelType
    from megatron.inference.utils import add_inference_args
    from megatron.rl import rl_utils
    from megatron.training import get_args, pretrain
    from model_provider import model_provider

    _rollouts = take_rollouts(rl_utils, lambda: get_args().rl_default_temperature)

    call_pretrain(
        pretrain,
        dataset_provider=None,  # rollouts are the data
        model_provider=partial(model_provider, gpt_builder),
        model_type=ModelType.encoder_or_decoder,
        forward_step=forward_step,
        extra_args_provider=add_inference_args,
    )


if __name__ == "__main__":
    main()
