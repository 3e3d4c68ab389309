"""SkyRL: its modules, its config, the advantages that its driver scales, and its call of a loss, emulated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import torch
from adapter_cases import Adapter, RowCase, advantages_of, emulated, old_of, responses, rollouts_of, sampled_of
from torch import Tensor

from megatron_rl.hosts import skyrl, skyrl_driver
from megatron_rl.testing.layout_step import StepSample

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
    """The modules of SkyRL that ours imports, with EMULATED_SKYRL, in which `old` is `new`."""
    assert old in EMULATED_SKYRL
    paths = (skyrl.ENTRY, skyrl.TABLES, skyrl.CORRECTIONS, skyrl_driver.TRAINER)
    return emulated(EMULATED_SKYRL.replace(old, new, 1), *paths)


# Aggregation -> SkyRL's name of it. It knows no row_mean, and is told sequence_mean.
NAMES = {ours: theirs for theirs, ours in skyrl.REDUCTIONS.items()} | {"row_mean": skyrl.SEQUENCE_MEAN}
Scale = Callable[..., Tensor]


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


def correction(bound: float) -> dict[str, SimpleNamespace]:
    return {"off_policy_correction": SimpleNamespace(tis_ratio_type="token", token_tis_ratio_clip_high=bound)}


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


class Batch(dict):
    """What our driver uses of SkyRL's batch: columns, and metadata."""

    metadata: dict[str, Any]


def scale_of_trajectories(case: RowCase, samples: Sequence[StepSample]) -> Scale:
    """SkyRL's trainer, emulated, with ours around its methods: advantages of trajectories of several rows as one mini-batch."""

    def scale(
        advantages: Tensor, loss_mask: Tensor, loss_reduction: str, size: int, max_seq_len: int | None, prompt_bounds: Any
    ) -> Tensor:
        algorithm = algorithm_config("megatron_rl.grpo", loss_reduction, max_seq_len=max_seq_len)

        class RayPPOTrainer:
            cfg = SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm))

            def convert_to_training_input(self, generator_output, uids):
                return generator_output

            def _normalize_advantages(self, data, mini_batch_boundaries, prompt_boundaries=None):
                given = (loss_reduction, size, max_seq_len, prompt_boundaries)
                data["advantages"] = emulated_scale(data["advantages"], data["loss_mask"], *given)
                return data

        words, rollouts = words_of(case, is_step_wise=True), rollouts_of(samples)
        skyrl_driver.count_trajectories(SimpleNamespace(RayPPOTrainer=RayPPOTrainer), partial(skyrl.read, words=words))
        batch = Batch(advantages=advantages, loss_mask=loss_mask)
        batch.metadata = {skyrl_driver.LAST_STEPS: [one != after for one, after in pairwise([*rollouts, None])]}
        batch = RayPPOTrainer().convert_to_training_input(batch, None)
        return RayPPOTrainer()._normalize_advantages(batch, [(0, len(samples))], prompt_bounds)["advantages"]

    return scale


class SkyRL(Adapter):
    name = "skyrl"
    metrics = frozenset({"clip_ratio", "tis"})
    terms = correction(1.05)
    numbers = ("eps_clip_low", "eps_clip_high", "clip_ratio_c", "max_seq_len")

    def __init__(self, scale: Scale = emulated_scale):
        self.scale = scale

    def install(self, monkeypatch):
        for name, module in emulated_skyrl().items():
            monkeypatch.setitem(sys.modules, name, module)

    def config(self, case: RowCase, **settings: Any) -> SimpleNamespace:
        return algorithm_config(f"megatron_rl.{case.loss}", NAMES[case.aggregation], **self.given_numbers(case) | settings)

    def columns(self, case: RowCase, samples: Sequence[StepSample]) -> dict[str, Tensor]:
        mask = self.place(samples, [sample.loss_mask for sample in samples])
        prompts, config = [sample.prompt_id for sample in samples], self.config(case)
        starts = [index for index, prompt in enumerate(prompts) if index == 0 or prompt != prompts[index - 1]]
        bounds = [*pairwise([*starts, len(samples)])]
        scale = scale_of_trajectories(case, samples) if case.has_rollouts else self.scale
        given = (advantages_of(samples) * mask, mask, config.loss_reduction, 1, config.max_seq_len, bounds)
        return {
            "old_log_probs": self.place(samples, old_of(samples)),
            "advantages": scale(*given),
            "loss_mask": mask,
            "rollout_logprobs": self.place(samples, sampled_of(samples)),
        }

    def start(self, case, step, own, **settings):
        config, loss = self.config(case, **settings), skyrl.SkyrlLoss(case.loss, words_of(case, own))

        def call(data: dict[str, Tensor], rows: list[Tensor], num_microbatches: int) -> tuple[Tensor, dict]:
            given = {name: data.get(name) for name in ("old_log_probs", "advantages", "loss_mask", "rollout_logprobs")}
            value, log = loss(responses(data, rows, given["loss_mask"].shape[1]), config=config, **given)
            return value * self.host_factor(case, num_microbatches), log

        return call

    def host_factor(self, case, num_microbatches):
        return num_microbatches * case.dp


ADAPTER = SkyRL()
