"""TRL's other trainers of a policy: what their losses weigh a token. Each has one loss, whatever its settings say.

RLOO takes one loss a sample, of the sum of its log-probabilities, and the mean over samples. AsyncGRPO divides a micro-batch by its
tokens on all ranks, and by the micro-batches. PPO divides by the tokens of a rank's micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rl.aggregation_record import Formula
from megatron_rl.hosts.stock import MEAN_OF_TOKEN_MEANS, MEAN_OVER_RANKS, Stock

GRPO, RLOO, ASYNC = "GRPOTrainer", "RLOOTrainer", "AsyncGRPOTrainer"
STOCKS: Mapping[str, Stock] = {
    RLOO: Stock(Formula(N=-1)),
    ASYNC: Stock(MEAN_OVER_RANKS),
    "PPOTrainer": Stock(
        MEAN_OF_TOKEN_MEANS,
        value=MEAN_OF_TOKEN_MEANS,
        remarks=("the value term counts one token more of a response that ends before its longest length",),
    ),
}
# A name under which the settings of a launch keep the trainer.
OTHER = "<trainer>"
OF_COMMAND = {"rloo": RLOO}
# What RLOO has in the place of GRPO's defaults, as far as it is read here.
DEFAULTS = {"beta": 0.05}


def known_trainer(trainers: Sequence[str], command: str | None) -> str | None:
    """The first of the trainers that a script makes, or of TRL's own command, whose loss is known here."""
    return OF_COMMAND.get(str(command)) or next((name for name in trainers if name in STOCKS), None)
