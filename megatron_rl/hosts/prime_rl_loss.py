"""What prime-rl calls for each sample: our loss, with the counts of the step where its weights need them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.files.settings_file import read_settings_file
from megatron_rl.hosts import prime_rl
from megatron_rl.hosts.dense_rows import loss_of_rows, step_line
from megatron_rl.hosts.door import Found
from megatron_rl.hosts.door_line import read_launch
from megatron_rl.hosts.door_settings import OnceRead
from megatron_rl.hosts.prime_rl import BATCHES, DOOR, IMPORT_PATH, KWARGS, LOSSES, TYPE, read_line
from megatron_rl.hosts.pydantic_line import SIGN
from megatron_rl.hosts.run import Run
from megatron_rl.hosts.settings import Settings, read_value
from megatron_rl.layout.groups import SINGLE, all_reduce_sum, group_device, world_group
from megatron_rl.loss_hub import needs_rollout_log_probs
from megatron_rl.metrics.step import finalise_metrics
from megatron_rl.registries.correction_settings import CorrectionSettings
from megatron_rl.step_counts import StepTotals


class PrimeLoss:
    """What prime-rl calls for each sample of its rl loss."""

    def __init__(self, aggregation: str):
        """Raises ConfigError, in each trainer before its first batch, for a launch line with problems and for another prime-rl."""
        if problems := [*DOOR.contract_problems()]:
            raise ConfigError(problems)
        settings = read_line(["trainer", *sys.argv[1:]], read_settings_file).settings if SIGN in sys.argv else None
        if settings is not None and settings[IMPORT_PATH] == f"{prime_rl.__name__}.{aggregation}":
            read_launch(DOOR, settings, may_have_more=True)
        self.path, self.reader = f"{prime_rl.__name__}.{aggregation}", OnceRead(DOOR)
        self.run = Run()
        self.totals: StepTotals | None = None  # of the step; under token_mean nothing counts
        if aggregation != "token_mean":
            for loader in ("DataLoader", "FakeDataLoader"):
                self._count_batches_of(getattr(import_module(BATCHES), loader))

    def _count_batches_of(self, loader: Any) -> None:
        get_batch = getattr(loader.get_batch, "__wrapped__", loader.get_batch)

        @functools.wraps(get_batch)
        def counted(own: Any) -> Any:
            micro_batches = get_batch(own)
            self.totals = totals_of(micro_batches)
            return micro_batches

        loader.get_batch = counted

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:  # LossInputs of one sample, [R] each -> LossOutputs
        """T w_i sum_t m_it u_it l_it, u: prime-rl's own weight of a token, times our correction.

        Masked values may be anything. Communication: none. Synchronises as prime-rl's own losses do for their metrics.
        """
        found = self.reader.read(settings_of(self.path, kwargs))
        config = found.config
        mask, sampled = inputs.loss_mask, inputs.inference_logprobs
        is_corrected = CorrectionSettings.of(config).has_factor
        old = inputs.trainer_logprobs.detach() if is_corrected else sampled
        output = loss_of_rows(
            config,
            self.totals,
            *(row[None] for row in (inputs.trainer_logprobs, old, inputs.advantages, mask)),
            scale=1 if self.totals is None else self.totals.num_tokens,
            importance_weights=None if inputs.loss_weights is None else inputs.loss_weights[None],
            rollout_log_probs=sampled[None] if needs_rollout_log_probs(config) else None,
        )
        tell_step(self.run, self.path, found)
        metrics = finalise_metrics(output.metrics) if output.metrics is not None else {}
        on_cpu = torch.tensor([*metrics.values()]).unbind()  # where prime-rl takes them
        return import_module(LOSSES).LossOutputs(loss=output.loss, metrics=dict(zip(metrics, on_cpu, strict=True)))


def settings_of(path: str, kwargs: Mapping[str, Any]) -> Settings:
    """kwargs of prime-rl's custom loss; a value of the launch line may be text there."""
    given = {f"{KWARGS}{name}": read_value(value) if isinstance(value, str) else value for name, value in kwargs.items()}
    given |= {TYPE: "custom", IMPORT_PATH: path}
    return Settings.of_names(given, DOOR.all_defaults, typed=given)


def tell_step(run: Run, path: str, found: Found) -> None:
    title = f"{path} in prime-rl"
    given = (title, found.config, None, "no KL, no entropy")
    of_token_mean, rollouts = DOOR.of_token_mean, found.rollouts
    run.tell(title, lambda: step_line(*given, of_token_mean=of_token_mean, rollouts=rollouts, in_advantages=False))


def totals_of(micro_batches: Sequence[Mapping[str, Any]]) -> StepTotals:
    """N and T of the step, both c times over, as c context-parallel ranks have the same samples: their quotient is right.

    A sample without a token of the rl loss is not counted, as those that prime-rl fills the last micro-batches with. Communication:
    one all-reduce of 16 bytes over all ranks of the trainer, which get their batches together.
    """
    counts = [int(mask.sum()) for batch in micro_batches for mask in rl_masks(batch)]
    group = world_group() if dist.is_initialized() else SINGLE
    own = torch.tensor([sum(count > 0 for count in counts), sum(counts)], device=group_device(group))
    num_samples, num_tokens = all_reduce_sum(own, group).tolist()
    return StepTotals(num_samples=max(num_samples, 1), num_prompts=None, num_tokens=max(num_tokens, 1))


def rl_masks(micro_batch: Mapping[str, Any]) -> Sequence[Tensor]:  # [R] bool of each sample
    """The tokens of the rl loss of a row of samples."""
    mask, weights = micro_batch["loss_mask"][0], micro_batch["rl_weights"]
    return (mask if weights is None else mask & (weights[0] != 0)).split(micro_batch["sequence_lengths"])
