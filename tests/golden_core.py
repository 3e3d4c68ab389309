"""Golden values of the core: what each loss, weight and score was, bit by bit, before a change that must not move it.

    python tests/golden_core.py                  writes tests/golden/core.pt
    python tests/golden_core.py --compare        recomputes all: which kinds of cases are bitwise equal, and the largest difference
    python tests/golden_core.py --compare gspo   the cases whose key has this word
    python tests/golden_core.py --drop k3+       removes cases by a word of the key, or a value by its name; others stay

The package is called in the section "Adapter" and nowhere else: where its names change, only that section does. golden_cases.py has
cases and inputs, golden_layouts.py layouts of Megatron-Core and emulated trainers. A change that moves numbers on purpose puts a
word of the keys, a bound and the reason into BOUNDS of test_golden_core.py.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import conftest  # noqa: F401  # kernels are interpreted
import torch
from golden_cases import (
    BOUNDS_OF_LEVEL,
    CLIPS,
    HEADS,
    OF_SAMPLER,
    OPSM,
    PARAMETERS,
    RANKS,
    VOCABULARY,
    Case,
    Given,
    given_to,
    keys_of_counts,
    keys_of_losses,
    keys_of_scores,
    numbers,
    step_of,
    temperature_of,
)
from simulated_ranks import groups_of_ranks, on_simulated_ranks
from torch import Tensor

from megatron_rl import (
    CorrectionSettings,
    SamplingSupport,
    count_step,
    linear_policy_loss,
    regularizer_weights,
    sample_token_weights,
    vocab_parallel_log_probs,
)
from megatron_rl.layout.groups import SINGLE
from megatron_rl.metrics.step import step_metrics
from megatron_rl.policy_loss import policy_loss
from megatron_rl.policy_loss.api import loss_of_log_probs

FILE = Path(__file__).parent / "golden" / "core.pt"
Values = dict[str, Tensor]  # by name: everything that a case gives
SUMS = ("loss", "policy_loss", "kl_loss", "entropy")


# ---------------------------------------------------------------------------------------------------------------- Adapter
def weights_of(masks: list[Tensor], prompts: list[str], rollouts: list[str] | None, aggregation: str, dp=SINGLE) -> Values:
    """Counts of the step, and the weight of each sample of this rank."""
    totals, tokens, prompt_tokens, rows = count_step(masks, prompts, dp, rollout_ids=rollouts)
    of_rollouts = {} if rows is None else {"rollout_token_counts": rows.tokens, "rows_of_rollout": rows.rows}
    divisor = 8.0 if aggregation == "constant" else None
    weights = sample_token_weights(aggregation, tokens, totals, prompt_token_counts=prompt_tokens, divisor=divisor, **of_rollouts)
    counts = [totals.num_samples, totals.num_prompts, totals.num_tokens, totals.rollouts]
    regularizer = regularizer_weights(tokens, totals, None if rows is None else rows.tokens)
    found = {"weights": weights, "regularizer_weights": regularizer, "counts": torch.tensor(counts), "prompt_tokens": prompt_tokens}
    return found | ({} if rows is None else {"rollout_tokens": rows.tokens, "rows_of_rollout": rows.rows})


def options_of(given: Given, groups, regularizer: Tensor) -> dict:
    case, vectors = given.case, given.vectors
    options = {"tp_group": groups.tp, "cp_group": groups.cp, "backend": case.backend, "metrics": case.metrics}
    options |= {"loss_parameters": PARAMETERS[case.loss], "advantages_per": "sample" if "tokens" not in case.extra else "token"}
    if case.loss in CLIPS:
        options |= {"clip_ratio_low": CLIPS[case.loss][0], "clip_ratio_high": CLIPS[case.loss][1]}
    if case.correction != "none":
        name, _, level = case.correction.removesuffix(OPSM).strip().partition(" ")
        low, high = BOUNDS_OF_LEVEL[level or "token"]
        of_kind = {"kind": name, "level": level, "low": low, "high": high} if name else {}
        delta = 0.02 if case.correction.endswith(OPSM) else None
        options["correction"] = CorrectionSettings(**of_kind, sequence_delta=delta)
    if case.correction != "none" or case.loss in OF_SAMPLER:
        options["rollout_log_probs"] = vectors["rollout"]
    if case.kl != "no KL":
        options |= {"kl_coefficient": 0.7, "kl_estimator": case.kl, "ref_log_probs": vectors["ref"]}
    if case.entropy == "entropy":
        options["entropy_coefficient"] = 0.3
    if case.kl != "no KL" or case.entropy == "entropy":
        options["regularizer_weights"] = regularizer
    if case.extra == "importance weights":
        options["importance_weights"] = vectors["importance"]
    if case.kept != "all ids":
        options["sampling_support"] = SamplingSupport.from_lists(given.kept)
    if case.route != "log-probabilities":
        options |= {"temperature": temperature_of(case), "vocab_size": VOCABULARY}
    return options


def loss_on_rank(given: Given, groups, weights: Tensor, regularizer: Tensor) -> tuple[Values, dict[str, float]]:
    """One call of a loss and its backward: values, gradients, and the metrics of a step of this micro-batch alone."""
    case, options = given.case, options_of(given, groups, regularizer)
    old = None if case.policy == "on-policy" else given.vectors["old"]
    arguments = (given.labels, old, given.advantages, given.mask, given.cu_seqlens, weights)
    hidden, weight = given.hidden.clone().requires_grad_(), given.weight.clone().requires_grad_()
    logits = (given.hidden @ given.weight.T).requires_grad_()
    if case.route == "log-probabilities":
        leaf = given.vectors["new"].clone().requires_grad_()
        output = loss_of_log_probs(case.loss, leaf, *arguments[1:], **options)
        leaves = {"log-probabilities": leaf}
    elif case.route in HEADS:
        rows = 1000 if case.route == "one chunk" else 4  # one of them is for moving others
        options["max_logits_bytes"] = (rows + -(-rows // 32)) * weight.shape[0] * weight.element_size()
        if "main_grad" in case.route:
            weight.main_grad = torch.zeros_like(weight)
        if "forward" in case.route:
            options["loss_scale"] = 2.0
        output = linear_policy_loss(case.loss, hidden, weight, *arguments, **options)
        leaves = {"hidden states": hidden, "weight": weight}
    else:
        options |= {"inplace": True} if case.route == "logits in place" else {}
        options |= {"loss_scale": 2.0} if case.route == "announced factor" else {}
        output = policy_loss(case.loss, logits * 1 if case.route == "logits in place" else logits, *arguments, **options)
        leaves = {"logits": logits}
    (2.0 * output.loss).backward()
    found = {f"gradient of {name}": getattr(leaf, "main_grad", leaf.grad) for name, leaf in leaves.items()}
    names = ("loss", "policy_loss", "kl_loss", "entropy", "log_probs", "num_nonfinite")
    found |= {name: getattr(output, name).detach() for name in names if getattr(output, name) is not None}
    if case.metrics == "none":
        return found, {}
    metrics = step_metrics([output.metrics], groups, has_entropy=case.metrics == "with_entropy")
    return found, metrics


def scores_on_rank(given: Given, groups) -> Values:
    """Scores over the kept ids, the entropy over the vocabulary, and the gradient of both by the logits."""
    logits = (given.hidden @ given.weight.T).requires_grad_()
    shared = {"loss_mask": given.live, "temperature": temperature_of(given.case), "vocab_size": VOCABULARY}
    support = SamplingSupport.from_lists(given.kept)
    shared |= {"tp_group": groups.tp, "backend": given.case.backend, "sampling_support": support, "with_entropy": True}
    log_probs, entropy = vocab_parallel_log_probs(logits, given.labels, **shared)
    (log_probs.sum() + 0.3 * entropy.sum()).backward()
    return {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "gradient of logits": logits.grad}


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    """Documents of a few tokens then have several blocks of a kernel."""
    from megatron_rl.ops import rows_triton
    from megatron_rl.ops.backends import OneReadConfiguration
    from megatron_rl.policy_loss.reduce_triton import reduce_triton

    shape = OneReadConfiguration(lanes=4, tiles=2, block=32, num_warps=1)
    with (
        mock.patch.object(rows_triton, "one_read_configuration", lambda *sizes: shape),
        mock.patch.dict(reduce_triton.__wrapped__.__kwdefaults__, block=4),
    ):
        yield


# ----------------------------------------------------------------------------------------------------------------- Values


def on_ranks(tp: int, cp: int, dp: int, function: Callable) -> list:
    return on_simulated_ranks(function, groups_of_ranks(tp=tp, cp=cp, dp=dp))


def joined(answers: list[Values]) -> Values:
    """The values of all ranks, one behind the other."""
    return {name: torch.cat([answer[name].flatten() for answer in answers]) for name in answers[0]}


def values_of_loss(key: str) -> Values:
    case = Case.of(key)
    step, (tp, cp) = step_of(case), RANKS[case.ranks]
    starts = [0, *itertools.accumulate(step.lengths)]
    masks = [step.mask[first:last] for first, last in itertools.pairwise(starts)]
    beside = [torch.ones(3), torch.ones(2)]  # samples of the step that are in no call
    number = [*range(len(masks)), 0, 90]
    rollouts = [f"rollout {i // 2}" for i in number] if case.aggregation == "row_mean" else None
    weighed = weights_of([*masks, *beside], [f"prompt {i // 4}" for i in number], rollouts, case.aggregation)
    weights, regularizer = (weighed[name][: len(masks)] for name in ("weights", "regularizer_weights"))

    def work(groups) -> tuple[Values, dict[str, float]]:
        given = given_to(case, step, (groups.tp.rank(), tp), (groups.cp.rank(), cp))
        return loss_on_rank(given, groups, weights, regularizer)

    with small_blocks() if case.backend == "triton" else contextlib.nullcontext():
        answers = on_ranks(tp, cp, 1, work)
    found, metrics = joined([values for values, _ in answers]), answers[0][1]
    return found | {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}


def values_of_scores(key: str) -> Values:
    case = Case.of(key)
    step, (tp, _) = step_of(case), RANKS[case.ranks]
    return joined(on_ranks(tp, 1, 1, lambda groups: scores_on_rank(given_to(case, step, (groups.tp.rank(), tp), (0, 1)), groups)))


def values_of_counts(key: str) -> Values:
    _, aggregation, rollouts, words = key.split(" | ")
    dp, drawn, steps = int(words.removeprefix("dp ")), numbers(key), []
    for _ in range(17):
        size = 1 + next(drawn) % 16
        masks = [torch.tensor([next(drawn) % 3 > 0 for _ in range(next(drawn) % 40)], dtype=torch.bool) for _ in range(size)]
        masks[next(drawn) % size] = torch.ones(1 + next(drawn) % 5)  # a step has a token
        ids = [next(drawn) % 8 for _ in range(size)]
        steps.append((masks, [f"prompt {i // 3}" for i in ids], [f"rollout {i}" for i in ids] if rollouts == "rollouts" else None))

    def work(groups) -> Values:
        mine = slice(groups.dp.rank(), None, dp)
        parts = [weights_of(masks[mine], prompts[mine], ids and ids[mine], aggregation, groups.dp) for masks, prompts, ids in steps]
        return joined(parts)

    return joined(on_ranks(1, 1, dp, work))


# kind, the first word of a key -> how its values are computed
KINDS: dict[str, Callable[[str], Values]] = {"loss": values_of_loss, "scores": values_of_scores, "counts": values_of_counts}


def values_of(keys: Sequence[str]) -> Iterator[tuple[str, Values]]:
    yield from ((key, KINDS[key.partition(" ")[0]](key)) for key in keys if key.partition(" ")[0] in KINDS)
    rest = [key for key in keys if key.partition(" ")[0] not in KINDS]
    if rest:
        import golden_layouts

        yield from golden_layouts.values_of(rest)


# ------------------------------------------------------------------------------------------------------------- Comparison


def machine() -> dict[str, str]:
    """Two of one description compute the same bits: another torch or processor sums and vectorises in another order."""
    return {"torch": str(torch.__version__), "cpu": torch.backends.cpu.get_cpu_capability()}


def save(made_on: dict[str, str], values: dict[str, Values]) -> None:
    """One tensor of each dtype, and where in it the values of a case are: a tensor of a file costs 300 bytes."""
    parts: dict[str, list[Tensor]] = {}
    sizes: dict[str, int] = {}
    places: dict[str, list[tuple[str, str, int, int]]] = {}
    for key, of_case in values.items():
        places[key] = []
        for name, value in of_case.items():
            dtype = str(value.dtype)
            start = sizes.get(dtype, 0)
            sizes[dtype] = start + value.numel()
            parts.setdefault(dtype, []).append(value.flatten())
            places[key].append((name, dtype, start, sizes[dtype]))
    joined = {dtype: torch.cat(tensors) for dtype, tensors in parts.items()}
    torch.save({"machine": made_on, "places": places, "values": joined}, FILE)
    print(f"{FILE}: {len(values)} cases, {FILE.stat().st_size / 2**20:.1f} MiB")


def load() -> tuple[dict[str, str], dict[str, Values]]:
    """(the machine, the values by key)."""
    stored = torch.load(FILE, weights_only=True)
    parts = stored["values"]
    values = {
        key: {name: parts[dtype][start:end] for name, dtype, start, end in places} for key, places in stored["places"].items()
    }
    return stored["machine"], values


def difference(stored: Values, found: Values) -> tuple[bool, float, str]:
    """(whether all bits are equal, the largest relative difference, whose). Relative to the largest element of a vector. Losses and
    metrics are sums of terms of both signs and of size 0.1 and more: their differences are relative to that at least."""
    if stored.keys() != found.keys():
        return False, math.inf, f"names {sorted(stored.keys() ^ found.keys())}"
    is_equal, worst = True, (0.0, "")
    for name, value in stored.items():
        other = found[name].flatten()
        if value.dtype != other.dtype or value.shape != other.shape:
            return False, math.inf, f"{name}: {value.dtype} {tuple(value.shape)}, {other.dtype} {tuple(other.shape)}"
        is_equal &= value.numpy().tobytes() == other.numpy().tobytes()
        if name == "digest":
            continue
        value, other = value.double(), other.double()
        is_same = (value == other) | (value.isnan() & other.isnan())
        least = 0.1 if name in SUMS or name.startswith("policy/") else 1e-30
        apart = largest((value - other)[~is_same]) / max(largest(value[value.isfinite()]), least)
        worst = max(worst, (math.inf if math.isnan(apart) else apart, name))
    return is_equal, *worst


def largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def compare(word: str) -> None:
    """A line for each loss and backend, and for each other kind."""
    made_on, stored = load()
    if made_on != machine():
        print(f"made on {made_on}, and this is {machine()}: last bits may differ")
    rows: dict[str, list[tuple[bool, float, str]]] = {}
    for key, values in values_of([key for key in stored if word in ("", *key.split(" | "))]):
        words = key.split(" | ")
        is_equal, gap, name = difference(stored[key], values)
        rows.setdefault(" | ".join([*words[:2], *{"torch", "triton"}.intersection(words)]), []).append(
            (is_equal, gap, f"{name} of {key}")
        )
    for kind, found in rows.items():
        num_equal, (_, gap, where) = sum(row[0] for row in found), max(found, key=lambda row: row[1])
        print(f"{kind}: {num_equal} of {len(found)} bitwise equal" + f"; up to {gap:.1e}, {where}" * (num_equal < len(found)))


def all_keys() -> list[str]:
    import golden_layouts

    return [*keys_of_losses(), *keys_of_scores(), *keys_of_counts(), *golden_layouts.KEYS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", nargs="?", const="", metavar="WORD")
    parser.add_argument("--drop", metavar="WORD")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # Megatron-Core's, of what a machine without a GPU lacks
    if args.compare is not None:
        compare(args.compare)
    elif args.drop is not None:
        made_on, values = load()
        values = {key: of_case for key, of_case in values.items() if args.drop not in key.split(" | ")}
        for of_case in values.values():
            of_case.pop(args.drop, None)
        save(made_on, values)
    else:
        save(machine(), dict(values_of(all_keys())))


if __name__ == "__main__":
    sys.modules["golden_core"] = sys.modules["__main__"]  # golden_layouts imports it
    main()
