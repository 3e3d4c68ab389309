"""A trainer that nobody has, as a door in sixty lines: what CONTRIBUTING shows, and tests/test_toy_door.py runs.

It adds micro-batches, averages over data-parallel ranks, and hands a loss the counts of the step: `toy.loss=<loss>.<aggregation>`.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl.aggregation_record import Formula
from megatron_rl.hosts.dense_rows import loss_of_rows, step_line
from megatron_rl.hosts.door import Choice, Door, Found, Kind, Line, Own, Prompts, Setting, names
from megatron_rl.hosts.door_settings import read
from megatron_rl.hosts.run import Run
from megatron_rl.hosts.sampling import Filter, Sampler, Scores
from megatron_rl.hosts.settings import Settings, read_overrides
from megatron_rl.step_counts import StepTotals
from megatron_rl.validation.checks import check


@check()
def epochs_have_their_ratio(found: Found):
    if found.settings["toy.epochs"] != 1 and found.config.policy_loss == "reinforce":
        yield f"toy.epochs={found.settings['toy.epochs']} with reinforce, which has no ratio: set toy.epochs=1, or take grpo"


DOOR: Door = Door(
    name="toy",
    title="Toy",
    probed="nobody/toy 1234567",
    settings=(
        Setting("toy.loss"),
        Setting("toy.clip_low", Kind.NUMBER, "clip_ratio_low", 0.2),
        Setting("toy.clip_high", Kind.NUMBER, "clip_ratio_high", 0.2),
        Setting("toy.epochs", Kind.NUMBER, default=1),
        *names("toy.", Kind.SWITCH, "shuffle"),
        *names("toy.", Kind.NUMBER, {"gamma": "advantages are the trainer's; remove it"}),
    ),
    sections=("toy.",),
    choice=Choice(setting="toy.loss", prefix="megatron_rl.", remedy="Set toy.loss=megatron_rl.<loss>.<aggregation>"),
    own=Own(prefix="megatron_rl."),
    sampler=Sampler(filters={"sampler.top_p": Filter(1.0, (1.0,))}, engines={"vLLM": Scores.KEPT}),
    checks=(epochs_have_their_ratio,),
    prompts=Prompts.UNKNOWN,
    returns=Formula(dp=1),
    step=(("Toy", Formula(), "adds micro-batches"), ("DDP", Formula(dp=-1), "averages over ranks")),
    why_not_per_token="it is not Megatron",
    starts="toy.train",
    recognises=lambda words: "toy.train" in words,
    read_line=lambda words, _: Line(Settings.of_names(given := read_overrides(words), DOOR.all_defaults, typed=given)),
)


class ToyLoss:
    def __init__(self, settings: Settings):
        self.found, self.run = read(DOOR, settings), Run()

    def __call__(self, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, step: StepTotals, ranks: int) -> Tensor:
        self.run.tell("Toy", lambda: step_line(f"toy.loss={self.found}", self.found.config, step, "no KL"))
        return loss_of_rows(self.found.config, step, new, old, advantages, mask, scale=ranks).loss
