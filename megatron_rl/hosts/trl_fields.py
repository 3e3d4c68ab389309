"""The fields of TRL's configs: a keyword that is none of them stops a script, and a flag that is none stops `trl grpo`.

They are read from the text of TRL and transformers where TRL is installed, else from the tables here. Nothing of them is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from megatron_rl.hosts.settings import UNKNOWN, Letter
from megatron_rl.hosts.stock import VERDICT
from megatron_rl.hosts.trl_source import CONFIG, declared, installed
from megatron_rl.hosts.trl_stock import NEWEST, PREFIX, judged
from megatron_rl.validation.checks import Row

# Of GRPOConfig in TRL 1.16, of RLOOConfig beside them, of TrainingArguments in transformers 5.24, and in 4.56 alone.
OF_GRPO = """
    model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 num_generations
    num_generations_eval max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of
    generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs
    repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode
    vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
    vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta num_iterations epsilon delta epsilon_high
    sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
    importance_sampling_level reward_weights multi_objective_aggregation scale_rewards loss_type mask_truncated_completions
    sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy
    entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
    vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal
    num_completions_to_print log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching
    transformers_continuous_batching_config use_transformers_paged vllm_importance_sampling_cap
"""
OF_RLOO = "normalize_advantages reward_clip_range"
OF_TRAINING = """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs
    warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules
    gradient_accumulation_steps average_tokens_across_devices max_grad_norm label_smoothing_factor bf16 fp16 bf16_full_eval
    fp16_full_eval tf32 activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
    gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config
    use_cache neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps
    logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica
    disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy
    eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches
    eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_strategy
    save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id
    hub_strategy hub_always_push hub_revision load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config parallelism_config
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names train_sampling_strategy
    length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
    ddp_timeout fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint
    local_rank
"""
BEFORE = """
    overwrite_output_dir per_gpu_train_batch_size per_gpu_eval_batch_size warmup_ratio logging_dir save_safetensors no_cuda
    use_mps_device jit_mode_eval use_ipex fp16_opt_level half_precision_backend tpu_num_cores tpu_metrics_debug past_index
    fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap adafactor group_by_length use_legacy_prediction_loop
    include_inputs_for_metrics fp16_backend push_to_hub_model_id push_to_hub_organization push_to_hub_token mp_parameters
    torchdynamo ray_scope include_tokens_per_second
"""
# What `trl grpo` and `trl rloo` take beside their config.
OF_COMMAND = """
    dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming ignore_bias_buffers datasets
    streaming test_split_size model_name_or_path model_revision dtype attn_implementation use_peft lora_r lora_alpha
    lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora
    load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage reward_model_name_or_path
    reward_funcs
"""
# What other trainers, and older versions, call it.
OTHER_NAMES = {
    **dict.fromkeys(("max_new_tokens", "max_response_length", "max_tokens", "response_length"), "max_completion_length"),
    **dict.fromkeys(("kl_coef", "kl_loss_coef", "kl_coefficient", "kl_beta"), "beta"),
    **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_range", "cliprange", "eps_clip", "epsilon_low", "eps_low"), "epsilon"),
    **dict.fromkeys(("clip_ratio_high", "eps_high", "eps_clip_high", "clip_higher", "clip_high"), "epsilon_high"),
    **dict.fromkeys(("grad_accum_steps", "accumulation_steps", "grad_accum"), "gradient_accumulation_steps"),
    **dict.fromkeys(("micro_batch_size", "train_batch_size", "batch_size"), "per_device_train_batch_size"),
    **dict.fromkeys(("per_device_batch_size", "device_batch_size"), "per_device_train_batch_size"),
    **dict.fromkeys(("group_size", "n_samples_per_prompt", "samples_per_prompt", "rollout_n"), "num_generations"),
    **dict.fromkeys(("loss_agg_mode", "loss_aggregation", "policy_loss"), "loss_type"),
    **{"lr": "learning_rate", "entropy_coefficient": "entropy_coef", "per_gpu_train_batch_size": "per_device_train_batch_size"},
}
# A name that is as similar to a field is a slip: per_device_train_batch is 0.88, and max_prompt_length, of older TRLs, 0.79.
CLOSEST_FIELD = 0.82
# The argument of our trainer.
OUR_ARGUMENT = PREFIX[:-1]
TABLES = {"GRPOConfig": OF_GRPO, "RLOOConfig": f"{OF_GRPO} {OF_RLOO}"}


def fields_of(config: str) -> frozenset[str]:
    """Of the config of that name; none where it is not known here."""
    if config not in TABLES:
        return frozenset()
    file = CONFIG.format(config.removesuffix("Config").lower())
    if installed() is not None and (found := declared("trl", file, config)):
        return frozenset(found)
    return frozenset(f"{TABLES[config]} {OF_TRAINING}".split())


def unknown_fields(names: Iterable[str], config: str, *, is_command: bool = False) -> Iterator[Row]:
    """A problem for each name that the config does not have. Without TRL here the version is not known: a name that is like no
    field, or that older transformers have, is a note, and the former are in the verdict. is_command: flags of TRL's own command,
    which takes accelerate's too."""
    known = fields_of(config)
    if not known:
        return
    doubtful: list[str] = []
    known |= {*OF_COMMAND.split(), *(f"no_{name}" for name in known)} if is_command else set()
    for name in (one for one in names if one not in known):
        meant = OTHER_NAMES.get(name) or next(iter(get_close_matches(name, sorted(known), 1, CLOSEST_FIELD)), None)
        if is_command and meant is None:
            continue
        is_older = name in BEFORE.split()
        is_sure = installed() is not None or (meant is not None and not is_older)
        what = f"trl takes no --{name}" if is_command else f"{config} has no field {name}"
        older = ", and transformers before 5 has it" if is_older else ""
        remedy = f"did you mean {'--' * is_command}{meant}?" if meant else "remove it"
        text = f"{what} ({judged()}{older}): {remedy}"
        yield Row(name, text, is_wrong=is_sure, is_note=not is_sure)
        doubtful += [] if is_sure or is_older else [f"{name}=..."]
    if doubtful:
        newest = ".".join(map(str, NEWEST))
        yield Row(VERDICT, f"if TRL is {newest}, this run stops at {config}({', '.join(doubtful)})", is_note=True)


def misplaced(
    of_config: Mapping[str, Any], of_trainer: Mapping[str, Any], config: str, ours: Collection[str]
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """What a script gives the wrong one of config and trainer, and so no TRL takes: (a problem, what is meant, by the names of a
    line). ours: the keys of our trainer's argument."""
    trainer, fields = config.replace("Config", "Trainer"), fields_of(config)
    for place, given in ((config, of_config), (trainer, of_trainer)):
        for name, value in given.items():
            if name == OUR_ARGUMENT and place == config:
                own = value if isinstance(value, Mapping) else {}
                text = f"an argument of {trainer}, not of {config}"
            elif name in ours and name not in {*fields, *OTHER_NAMES}:
                own, text = {name: value}, f"a key of the argument {OUR_ARGUMENT} of {trainer}, not an argument of {place}"
            else:
                if name in fields and place == trainer:
                    text = f"an argument of {config}, not of {trainer}: {config}(..., {name}={_typed(value)!r})"
                    yield Row(name, text, is_wrong=True), {name: value}
                continue
            shown = {key: _typed(one) for key, one in own.items()} or Letter("{...}")
            yield (
                Row(name, f"{text}: {trainer}(..., {OUR_ARGUMENT}={shown!r})", is_wrong=True),
                {f"{PREFIX}{key}": one for key, one in own.items()},
            )


def _typed(value: Any) -> Any:
    return Letter("...") if value is UNKNOWN else value
