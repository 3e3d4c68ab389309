"""`megatron-rl explain` in this process, for its tests. Starts nothing and writes nothing."""

from __future__ import annotations

import contextlib
import io
import json

from megatron_rl.__main__ import main

# Step S of tests/helpers.py; the last response has no unmasked token.
S = ["--response-lengths", "2,4,1,3", "--prompt-ids", "a,a,b,b", "--loss-masks", "11,1111,1,000"]
STEP = ["--response-lengths", "2,4,1,3", "--prompt-ids", "a,a,b,b"]
LAYOUT = ["--context-parallel-size", "2", "--data-parallel-size", "2", "--num-microbatches", "3"]
CONSTANT = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "8"]
PROMPT_MEAN = ["--loss-aggregation", "prompt_mean"]
PER_TOKEN = ["--loss-aggregation", "token_mean", "--calculate-per-token-loss"]
# Some weights and 1 / M are float32: a rounding each, over at most seven factors.
CLOSE = {"rel": 1e-6}


def explain(*arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        code = main(["explain", *arguments])
    return code, out.getvalue(), error.getvalue()


def explain_json(*arguments: str, code: int = 0) -> dict:
    """The object of --json of a command that ends with that exit code and says nothing else."""
    found, out, error = explain(*arguments, "--json")
    assert (found, error) == (code, ""), error or out
    return json.loads(out)


def chain_of(*arguments: str, code: int = 0) -> dict:
    chain = explain_json(*arguments, code=code)["chain"]
    assert chain["is_exact"] == (code == 0)
    return chain


def stages(chain: dict) -> dict[str, str]:
    return {factor["stage"]: factor["formula"] for factor in chain["factors"]}
