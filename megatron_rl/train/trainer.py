"""Holds a policy with its optimiser on this rank's part of the layout: sample, measure, step, save.

This is all that a training loop needs of Megatron-Core. The loop itself (tasks, rollouts, files) is in loop.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_rl.config import Distillation, PolicyLossConfig, PolicyMetrics, RouterReplay
from megatron_rl.count import StepTotals
from megatron_rl.errors import ConfigError
from megatron_rl.layout.context_parallel import padded_length
from megatron_rl.layout.groups import all_reduce_sum, broadcast_from_last, group_device, resolve_groups
from megatron_rl.megatron.batch import PolicyBatch, StepContext, make_packed_batch, make_padded_batch
from megatron_rl.megatron.checks import check_model
from megatron_rl.megatron.forward_step import MicrobatchReport, PolicyForwardStep, check_finite
from megatron_rl.megatron.head import HeadSettings, setting_problems
from megatron_rl.megatron.model import build_gpt_model, has_transformer_engine, transformer_config
from megatron_rl.megatron.probe import ProbeResult, probe_schedule
from megatron_rl.megatron.responses import response_log_probs
from megatron_rl.megatron.routing import RouteRecorder, forget_recomputations, replay_problems
from megatron_rl.megatron.samples import PolicySample, UnweightedSample, count_routed_tokens, unweighted, weigh_samples
from megatron_rl.metrics.step import step_metrics
from megatron_rl.ops.backends import resolve_backend
from megatron_rl.train import checkpoints
from megatron_rl.train.generation import Noise, Sampler, SamplingSettings
from megatron_rl.train.hf_model import HFModel
from megatron_rl.train.hf_weights import build_hf_model, save_hf_checkpoint
from megatron_rl.train.sampling_filter import KeptTokens

if TYPE_CHECKING:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """Settings of model, optimiser and layout. `max_sequence_length` is the most tokens of prompt and response together."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int  # without padding; the model pads it to a multiple of the tensor-parallel size
    max_sequence_length: int
    seed: int = 0
    lr: float = 3e-3  # the largest
    lr_decay_style: str = "constant"
    lr_warmup_iters: int = 0
    lr_decay_iters: int | None = None  # None: only with the style "constant"
    min_lr: float = 0.0
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    bf16: bool = False
    packed: bool = False
    hf_model: HFModel | None = None  # has the sizes above too, and the initial weights
    experts: Mapping[str, Any] = field(default_factory=dict)  # fields of TransformerConfig, as num_moe_experts; empty: dense
    router_replay: str = RouterReplay.NONE


class PolicyTrainer:
    """One policy on one rank. The methods are collective: every rank calls them in the same order."""

    def __init__(self, settings: TrainerSettings, config: PolicyLossConfig, device: torch.device):
        """Builds model, DDP and optimiser, and probes the schedule. Raises ConfigError where a step would have a wrong scale."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        resolve_backend(config.policy_loss_backend, torch.empty(0, device=device))  # not at the first loss
        self.settings, self.config, self.device = settings, config, device
        self.groups = resolve_groups()
        self._model_config = self._transformer_config(finalize_model_grads_func=finalize_model_grads)
        self._head = HeadSettings.of(config)
        self._bounds_on_host = not has_transformer_engine()  # as gpt_layer_spec decides
        problems = [*setting_problems(self._head, self._model_config)]
        if settings.router_replay != RouterReplay.NONE:
            problems += replay_problems(self._model_config)
        if problems:
            raise ConfigError(problems)
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=settings.use_distributed_optimizer,
            grad_reduce_in_fp32=settings.bf16,
        )
        self.probe: ProbeResult = probe_schedule(ddp_config=ddp_config)
        policy = self._build()
        check_model(config, policy, is_packed=settings.packed)
        self.model = DistributedDataParallel(self._model_config, ddp_config, policy)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=settings.min_lr,
                weight_decay=0.0,
                adam_beta1=0.9,
                adam_beta2=settings.adam_beta2,
                adam_eps=settings.adam_eps,
                clip_grad=settings.clip_grad,
                bf16=settings.bf16,
                params_dtype=self._model_config.params_dtype,
                use_distributed_optimizer=settings.use_distributed_optimizer,
            ),
            [self.model],
        )
        self._schedule = self._learning_rates()
        self._forward_step = PolicyForwardStep(config, vocab_size=settings.vocab_size)
        # Before the optimiser is in the model's config: Megatron copies the config for experts, and process groups have no copy.
        self._reference = self._build().requires_grad_(False) if config.kl_coefficient else None
        self._model_config.grad_scale_func = self.optimizer.scale_loss

    def route_recorder(self) -> RouteRecorder:
        return RouteRecorder(self.model, self.groups)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sample_ids: Sequence[int],
        settings: SamplingSettings,
        noise: Noise,
        recorder: RouteRecorder | None = None,
        kept: KeptTokens | None = None,
    ) -> list[list[int]]:
        """One response for each prompt of this data-parallel rank. Communication and errors: as Sampler.sample."""
        head = HeadSettings(is_fp32=self.config.fp32_lm_head)  # one row a sequence: nothing to fuse
        sampler = Sampler(self.model, settings, noise, self.groups, self.device, head, recorder, kept)
        return sampler.sample(prompts, sample_ids)

    def log_probs(
        self,
        microbatches: Sequence[Sequence[UnweightedSample]],
        *,
        with_reference: bool = False,
        recorder: RouteRecorder | None = None,
    ) -> list[list[Tensor]]:  # [response_length] float32 on the CPU
        """The log-probabilities of each response, by micro-batch and sample, under the policy or the reference (the policy's
        weights before training). Those of samples with kept_ids are over these; 0 at a token outside its set.
        Communication: as response_log_probs."""
        model = self._reference if with_reference else self.model
        assert model is not None, "without a kl_coefficient there is no reference policy"
        has_routes = self.settings.router_replay == RouterReplay.ROLLOUT
        plain = [[unweighted(sample, has_routes and not with_reference) for sample in samples] for samples in microbatches]
        context = StepContext(totals=StepTotals(1, None, 1), num_microbatches=1)
        batches = self._batches(plain, context)
        sizes = [[(sample.tokens.shape[0], sample.response_length) for sample in samples] for samples in plain]
        return response_log_probs(
            model,
            batches,
            sizes,
            temperature=self.config.policy_temperature,
            vocab_size=self.settings.vocab_size,
            backend=self.config.policy_loss_backend,
            groups=self.groups,
            head=self._head,
            recorder=recorder,
        )

    def step(
        self,
        microbatches: Sequence[Sequence[UnweightedSample]],
        *,
        policy_version: int | None = None,
        counts_phantoms: bool = False,
    ) -> dict[str, float]:
        """One optimiser step on this data-parallel rank's micro-batches. Every rank passes the same number; some may be empty.

        policy_version: of the current policy, in the unit of the samples' versions; a schedule of the learning rate needs it, and
        takes it for the optimiser steps that are done.
        counts_phantoms: measure policy/num_phantom_tokens, where old log-probs are given.

        Synchronisation on CUDA: for count_step before the first forward, with a fused head once a chunk, and after the last
        backward once each for num_nonfinite, Megatron's gradient norm, the losses and the metrics.

        Returns the step's metrics, equal on all ranks: loss, loss/policy (and loss/kl, loss/entropy), grad_norm, num_* and
        policy/*. Raises DataError for an unmasked token that is not finite, before the optimiser changes a weight.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        samples = [sample for part in microbatches for sample in part]
        weighted, totals = weigh_samples(self.config, samples, self.groups)
        in_order = iter(weighted)
        parts = [[next(in_order) for _ in part] for part in microbatches]
        context = StepContext(
            totals=totals,
            num_microbatches=len(parts),
            policy_version=policy_version,
            counts_phantoms=counts_phantoms,
            num_routed_tokens=count_routed_tokens(self.config, samples, self.groups),
        )
        batches = self._batches(parts, context)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._forward_step.take_reports()  # drops reports of a step that raised
        if self._model_config.num_moe_experts is not None:
            forget_recomputations(self.model)
        get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter(batches),
            model=self.model,
            num_microbatches=len(batches),
            seq_length=batches[0].tokens.shape[1] * self.groups.cp.size(),
            micro_batch_size=batches[0].tokens.shape[0],
            forward_only=False,
        )
        reports = self._forward_step.take_reports()
        check_finite(reports)
        learning_rate = self._set_learning_rate(policy_version)
        _, grad_norm, _ = self.optimizer.step()
        return self._step_metrics(reports, totals, float(grad_norm)) | {"learning_rate": learning_rate}

    def _learning_rates(self) -> OptimizerParamScheduler | None:
        settings = self.settings
        if settings.lr_decay_style == "constant" and not settings.lr_warmup_iters:
            return None
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        return OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=settings.min_lr,
            lr_warmup_steps=settings.lr_warmup_iters,
            lr_decay_steps=settings.lr_decay_iters or settings.lr_warmup_iters + 1,
            lr_decay_style=settings.lr_decay_style,
            start_wd=0.0,
            end_wd=0.0,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def _set_learning_rate(self, steps_done: int | None) -> float:
        """That of the step to come. The first step takes one part of the warm-up, and not 0."""
        if self._schedule is None:
            return self.settings.lr
        assert steps_done is not None, "a schedule of the learning rate needs policy_version"
        self._schedule.num_steps = steps_done + 1
        self._schedule.step(0)
        rate: float = self.optimizer.param_groups[0]["lr"]
        return rate

    def save(self, directory: str | Path, step: int, counters: dict[str, Any]) -> Path:
        return checkpoints.save_checkpoint(directory, step, self.model, self.optimizer, counters, description=self._description())

    def save_hf(self, folder: str | Path) -> None:
        """For a model that was read from a folder. Communication and errors: as save_hf_checkpoint."""
        assert self.settings.hf_model is not None, "the model was not read from a folder"
        save_hf_checkpoint(self.settings.hf_model, [self.model], folder)

    def load(self, checkpoint: str | Path) -> dict[str, Any]:
        return checkpoints.load_checkpoint(checkpoint, self.model, self.optimizer, description=self._description())

    def _description(self) -> dict[str, int]:
        names = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "bf16", "use_distributed_optimizer")
        description = {"--" + name.replace("_", "-"): getattr(self.settings, name) for name in names}
        description["--num-experts"] = self._model_config.num_moe_experts or 0
        # Megatron has one more optimiser where experts are spread over ranks, and saves it apart.
        description["--expert-model-parallel-size"] = self._model_config.expert_model_parallel_size
        return description

    def _transformer_config(self, **others: Any) -> TransformerConfig:
        settings = self.settings
        if settings.hf_model is not None:
            sizes = settings.hf_model.transformer_options()
        else:
            sizes = {name: getattr(settings, name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
            sizes |= {"normalization": "RMSNorm", "add_bias_linear": False}
        others |= {"sequence_parallel": settings.sequence_parallel, "bf16": settings.bf16}
        return transformer_config(**{**sizes, **settings.experts, **others})

    def _build(self) -> nn.Module:
        """A model with the initial weights, of the seed or of --hf-checkpoint."""
        from megatron.core.transformer.module import Float16Module

        settings, tp_size = self.settings, self.groups.tp.size()
        longest = self._row_length([settings.max_sequence_length])
        if settings.hf_model is not None:
            model = build_hf_model(settings.hf_model, self._model_config, max_sequence_length=longest)
        else:
            model = build_gpt_model(
                self._model_config,
                vocab_size=-(-settings.vocab_size // tp_size) * tp_size,
                max_sequence_length=longest,
                seed=settings.seed,
            )
        model = model.to(self.device)
        return Float16Module(self._model_config, model) if settings.bf16 else model

    def _row_length(self, lengths: Sequence[int]) -> int:
        multiple = self.groups.tp.size() if self.settings.sequence_parallel else 1
        return padded_length(max(lengths), self.groups.cp.size(), multiple=multiple)

    def _batches(self, parts: Sequence[Sequence[PolicySample]], context: StepContext) -> list[PolicyBatch]:
        """The batches. All micro-batches have equal shapes, as a pipeline needs."""
        lengths = [[sample.tokens.shape[0] for sample in samples] for samples in parts]
        shared: dict[str, Any] = {"cp_group": self.groups.cp, "device": self.device}
        if self.settings.packed:
            padded = [sum(padded_length(length, self.groups.cp.size()) for length in row) for row in lengths]
            shared |= {"row_length": self._row_length([*padded, 1]), "bounds_on_host": self._bounds_on_host}
            return [make_packed_batch(samples, context, **shared) for samples in parts]
        shared |= {"row_length": self._row_length([length for row in lengths for length in row] or [1])}
        num_rows = max(len(samples) for samples in parts)
        return [make_padded_batch(samples, context, num_rows=num_rows, **shared) for samples in parts]

    def _step_metrics(self, reports: list[MicrobatchReport], totals: StepTotals, grad_norm: float) -> dict[str, float]:
        metrics = self._loss_metrics(reports)
        if totals.num_rollouts is not None:
            metrics |= {"num_rollouts": totals.num_rollouts, "rollout/rows": totals.num_samples / totals.num_rollouts}
        metrics |= {"grad_norm": grad_norm, "num_samples": totals.num_samples, "num_tokens": totals.num_tokens}
        if totals.num_prompts is not None:
            metrics["num_prompts"] = totals.num_prompts
        if self.config.policy_metrics != PolicyMetrics.NONE:
            has_entropy = self.config.policy_metrics == PolicyMetrics.WITH_ENTROPY
            statistics = [report.statistics for report in reports if report.statistics is not None]
            metrics |= step_metrics(statistics, self.groups, has_entropy=has_entropy)
        return metrics

    def _loss_metrics(self, reports: list[MicrobatchReport]) -> dict[str, float]:
        """The losses of the step: the sum of the parts over micro-batches and dp-cp, from the last pipeline stage.

        Communication: one all-reduce of [4] over dp-cp and one broadcast over pp. Synchronises once.
        """
        rows = [(report.policy_loss, report.kl_loss, report.entropy, report.distillation) for report in reports]
        zero, config = torch.zeros((), dtype=torch.float64, device=self.device), self.config
        parts = [torch.stack([zero if value is None else value.double() for value in row]) for row in rows]
        own = torch.stack(parts).sum(0) if parts else zero.new_zeros(4)
        summed = all_reduce_sum(own.to(group_device(self.groups.dp_cp)), self.groups.dp_cp)
        policy, kl, entropy, distillation = broadcast_from_last(summed.contiguous(), self.groups.pp).tolist()
        loss = policy + config.kl_coefficient * kl - config.entropy_coefficient * entropy + distillation
        metrics = {"loss": loss, "loss/policy": policy}
        if config.kl_coefficient:
            metrics["loss/kl"] = kl
        if config.entropy_coefficient:
            metrics["loss/entropy"] = entropy
        if config.distillation == Distillation.TOPK:
            metrics["loss/distillation"] = distillation
        return metrics
