"""One optimiser step through SkyRL's call of a loss: its driver's scaled advantages, the factors of its worker, a float64 truth.

The driver's scaling is emulated, or SkyRL's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import dense_row_cases
import torch
from dense_row_cases import (
    LAYOUTS,
    ROLLOUT_AGGREGATIONS,
    ROLLOUT_LAYOUTS,
    Result,
    RowCase,
    gradients_of,
    own_part,
    padded,
    parameters_of,
    rollouts_of,
    samples_of,
)
from torch import Tensor

from megatron_rl.hosts import skyrl, skyrl_driver
from megatron_rl.hosts.choice import Launch
from megatron_rl.testing.layout_step import StepSample
from megatron_rl.testing.reference import CLIPS, DIVISOR
from megatron_rl.weights import get_loss_aggregation

EMULATED_SKYRL = """
import sys
def off_policy_correction_enabled(off_policy_correction): return off_policy_correction.tis_ratio_type is not None
def apply_off_policy_correction(loss, old_log_probs, rollout_logprobs, loss_mask, off_policy_correction):
    weights = (old_log_probs - rollout_logprobs).exp().clamp(max=off_policy_correction.token_tis_ratio_clip_high)
    return loss * weights, loss_mask, {"tis": 1.0}
def ppo_policy_loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None): pass
def apply_loss_reduction_to_advantages_minibatch(
    advantages, loss_mask, loss_reduction, micro_batch_size, max_seq_len, prompt_boundaries=None): pass
class PolicyLossRegistry:
    known = {}
    @classmethod
    def register(cls, name, function): cls.known[name] = function
class SkyRLTrainConfig:
    @classmethod
    def from_cli_overrides(cls, words):
        import skyrl_cases
        given = dict(word.removeprefix("trainer.algorithm.").split("=") for word in words)
        config = cls()
        config.trainer = cls()
        config.trainer.algorithm = skyrl_cases.algorithm_config(**given)
        return config
class RayPPOTrainer:
    def convert_to_training_input(self, generator_output, uids): pass
    def _normalize_advantages(self, data, mini_batch_boundaries, prompt_boundaries=None): pass
skyrl_entrypoint = "SkyRL's"
def main():
    known = sys.modules["skyrl.backends.skyrl_train.utils.ppo_utils"].PolicyLossRegistry.known
    print("trains", sys.argv[1:], len(known), *([] if skyrl_entrypoint == "SkyRL's" else [skyrl_entrypoint.words]))
"""


def emulated_skyrl(old: str = "", new: str = "") -> dict[str, ModuleType]:
    """The modules of SkyRL that ours imports, each with all of EMULATED_SKYRL, in which `old` is `new`."""
    assert old in EMULATED_SKYRL
    modules = {}
    for path in (skyrl.ENTRY, skyrl.TABLES, skyrl.CORRECTIONS, skyrl_driver.TRAINER):
        names = path.split(".")
        for end in range(1, len(names) + 1):
            name = ".".join(names[:end])
            modules[name] = ModuleType(name)
            modules[name].__path__ = []
        exec(EMULATED_SKYRL.replace(old, new, 1), vars(modules[path]))
    return modules


# Aggregation -> SkyRL's name of it.
NAMES = {ours: theirs for theirs, ours in skyrl.REDUCTIONS.items()}
Scale = Callable[..., Tensor]


def matrix(losses: Sequence[str]) -> list[RowCase]:
    return [RowCase(loss=loss, aggregation=one, **layout) for loss in losses for one in NAMES for layout in LAYOUTS]


def trajectory_matrix() -> list[RowCase]:
    rows = [("grpo", one, layout) for one in ROLLOUT_AGGREGATIONS for layout in ROLLOUT_LAYOUTS]
    rows += [(loss, "sample_mean", ROLLOUT_LAYOUTS[2]) for loss in ("gspo", "cispo")]
    return [RowCase(loss=loss, aggregation=one, has_rollouts=True, **layout) for loss, one, layout in rows]


def algorithm_config(policy_loss_type: str, loss_reduction: str = "token_mean", **settings: Any) -> SimpleNamespace:
    own: dict[str, Any] = {
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "clip_ratio_c": 3.0,
        "sapo": SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
        "max_seq_len": None,
        "off_policy_correction": SimpleNamespace(tis_ratio_type=None, sequence_mask_metric=None),
    }
    return SimpleNamespace(policy_loss_type=policy_loss_type, loss_reduction=loss_reduction, **(own | settings))


def launch(name: str, own: Mapping[str, Any] = MappingProxyType({}), **given: Any) -> Launch:
    return skyrl.read(algorithm_config(name, **given), skyrl.Words(own))


def config_of(case: RowCase, **settings: Any) -> SimpleNamespace:
    clip = CLIPS[case.loss]
    given = {} if clip is None else {"eps_clip_low": clip[0], "eps_clip_high": clip[1]}
    given |= {"clip_ratio_c": 3.0} if parameters_of(case) else {}
    given |= {"max_seq_len": DIVISOR} if get_loss_aggregation(case.aggregation).takes_divisor else {}
    return algorithm_config(f"megatron_rl.{case.loss}", told_of(case), **(given | settings))


def told_of(case: RowCase) -> str:
    """The loss_reduction that SkyRL is told: it knows no row_mean."""
    return skyrl.SEQUENCE_MEAN if case.aggregation == "row_mean" else NAMES[case.aggregation]


def words_of(case: RowCase, own: Mapping[str, Any] = MappingProxyType({}), *, is_step_wise: bool = False) -> skyrl.Words:
    """What SkyRL is not told."""
    return skyrl.Words(dict(own), skyrl.ROW_MEAN if case.aggregation == "row_mean" else None, is_step_wise)


def emulated_scale(
    advantages: Tensor,  # [S, R]
    loss_mask: Tensor,  # [S, R]
    loss_reduction: str,
    micro_batch_size: int,
    max_seq_len: int | None,
    prompt_boundaries: Sequence[tuple[int, int]] | None,  # of the rows of each prompt
) -> Tensor:
    """The contract of SkyRL's apply_loss_reduction_to_advantages_minibatch."""
    rows, counts = len(advantages), loss_mask.sum(-1, keepdim=True).clamp(min=1)
    if loss_reduction == "prompt_mean":
        assert prompt_boundaries is not None
        tokens = [loss_mask[start:end].sum().clamp(min=1).expand(end - start) for start, end in prompt_boundaries]
        return advantages / (len(prompt_boundaries) * torch.cat(tokens)[:, None])
    divisors = {"token_mean": loss_mask.sum(), "sequence_mean": rows * counts}
    return advantages / (rows * max_seq_len if max_seq_len else divisors[loss_reduction])


def scale_of_trajectories(trainer: Any, case: RowCase, samples: Sequence[StepSample]) -> Scale:
    """SkyRL's trainer, or what stands for it: its batch of a generator's output, padded for five ranks, and the advantages of it as
    one mini-batch."""

    def scale(
        advantages: Tensor,
        loss_mask: Tensor,
        loss_reduction: str,
        micro_batch_size: int,
        max_seq_len: int | None,
        prompt_boundaries: Any,
    ) -> Tensor:
        rollouts, prompts = rollouts_of(samples), [sample.prompt_id for sample in samples]
        own = words_of(case, is_step_wise=True)
        algorithm = algorithm_config("megatron_rl.grpo", loss_reduction, max_seq_len=max_seq_len, advantage_batch_normalize=False)
        sizes = dict.fromkeys(("train_batch_size", "policy_mini_batch_size"), len(set(prompts)))
        critic = SimpleNamespace(model=SimpleNamespace(path=None))
        settings = SimpleNamespace(algorithm=algorithm, critic=critic, micro_train_batch_size_per_gpu=1, **sizes)
        generator = SimpleNamespace(n_samples_per_prompt=4, step_wise_trajectories=True)
        driver = SimpleNamespace(
            cfg=SimpleNamespace(trainer=settings, generator=generator),
            tokenizer=SimpleNamespace(pad_token_id=0),
            dispatch=SimpleNamespace(get_lcm_dp_size=lambda: 5),
            all_metrics={},
        )
        skyrl_driver.count_trajectories(trainer, partial(skyrl.read, words=own))
        responses = [len(sample.loss_mask) for sample in samples]
        given = {
            "prompt_token_ids": [sample.tokens[:-size] for sample, size in zip(samples, responses, strict=True)],
            "response_ids": [sample.tokens[-size:] for sample, size in zip(samples, responses, strict=True)],
            "rewards": [[0.0] * size for size in responses],
            "loss_masks": [sample.loss_mask for sample in samples],
            "is_last_step": [one != after for one, after in pairwise([*rollouts, None])],
        }
        batch = trainer.RayPPOTrainer.convert_to_training_input(driver, given, prompts)
        number, mask = len(batch["loss_mask"]), batch["loss_mask"]  # SkyRL's rows begin with their padding
        assert number % 5 == 0 and torch.equal(mask.sum(-1)[: len(samples)], loss_mask.sum(-1))
        batch["advantages"] = mask.clone()
        bounds = batch.metadata["policy_mini_batch_boundaries"], batch.metadata["policy_prompt_boundaries"]
        scaled = trainer.RayPPOTrainer._normalize_advantages(driver, batch, *bounds)["advantages"]
        assert not scaled[len(samples) :].any() and torch.equal(scaled, scaled.max(-1, keepdim=True).values * mask)
        return advantages * scaled.max(-1, keepdim=True).values[: len(samples)]

    return scale


def columns_of(samples: Sequence[StepSample]) -> dict[str, Tensor]:  # [S, R] each
    width = max(len(sample.loss_mask) for sample in samples)
    old = [sample.old_log_probs or [] for sample in samples]
    sampled = [sample.rollout_log_probs or [value - 0.1 for value in row] for sample, row in zip(samples, old, strict=True)]
    mask = padded([sample.loss_mask for sample in samples], width)
    advantages = torch.tensor([sample.advantage for sample in samples])[:, None] * mask
    columns = {"old_log_probs": padded(old, width), "advantages": advantages, "loss_mask": mask}
    return columns | {"rollout_logprobs": padded(sampled, width)}


def run_step(
    case: RowCase,
    samples: Sequence[StepSample],
    log_probs: Sequence[Tensor],
    scale: Scale = emulated_scale,
    poison: float | None = None,  # in masked positions
    own: dict[str, Any] | None = None,
    **settings: Any,
) -> Result:
    """The gradient that the optimiser gets, and the sum of the returned losses over ranks and micro-batches."""
    config, columns = config_of(case, **settings), columns_of(samples)
    leaves = [values.float().requires_grad_() for values in log_probs]
    prompts = [sample.prompt_id for sample in samples]
    starts = [index for index, prompt in enumerate(prompts) if index == 0 or prompt != prompts[index - 1]]
    boundaries = list(zip(starts, [*starts[1:], len(samples)], strict=True))
    given = (columns["advantages"], columns["loss_mask"], config.loss_reduction, 1, config.max_seq_len, boundaries)
    columns["advantages"] = scale(*given)
    is_kept = columns["loss_mask"].bool()
    if poison is not None:
        columns |= {name: torch.where(is_kept, columns[name], poison) for name in columns if name != "loss_mask"}
    loss_of = skyrl.SkyrlLoss(case.loss, words_of(case, own or {}))
    total, metrics = 0.0, []
    for micro_batches in case.micro_batches():
        for chosen in micro_batches:
            for cp_rank in range(case.cp):
                rows = torch.stack([row_of(case, samples[index], leaves[index], cp_rank, is_kept.shape[1]) for index in chosen])
                rows = rows if poison is None else torch.where(is_kept[chosen], rows, poison)
                data = {name: column[chosen] for name, column in columns.items()}
                old, advantages = data.pop("old_log_probs"), data.pop("advantages")
                loss, log = loss_of(rows, old, advantages, config=config, **data)
                # SkyRL: x M D; Megatron: x c / M; DDP: mean over D c ranks
                factor = len(micro_batches) * case.dp * case.cp / len(micro_batches) / (case.dp * case.cp)
                (loss * factor).backward()
                if cp_rank == 0:
                    total += float(loss.detach())
                    metrics.append(log)
    return Result(total, gradients_of(leaves), metrics)


def row_of(case: RowCase, sample: StepSample, leaf: Tensor, cp_rank: int, width: int) -> Tensor:  # [width]
    """The response's log-probabilities, with gradient where this context-parallel rank has the logits."""
    prompt = len(sample.tokens) - len(sample.loss_mask)
    values = own_part(torch.cat([torch.zeros(prompt - 1), leaf, torch.zeros(1)]), cp_rank, case.cp)
    return torch.nn.functional.pad(values[prompt - 1 : -1], (0, width - len(leaf)))


def error_of(case: RowCase, scale: Scale = emulated_scale, trainer: Any = None) -> float:
    """trainer: SkyRL's module, for a case with trajectories."""
    samples, log_probs = samples_of(case)
    scale = scale if trainer is None else scale_of_trajectories(trainer, case, samples)
    found = run_step(case, samples, log_probs, scale)
    return dense_row_cases.largest_error(found, *dense_row_cases.truth(case, samples, log_probs))
