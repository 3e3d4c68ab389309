"""Changes one line of the package at a time and asks the tests whether they see it: a list, and the driver that runs it.

    python tests/mutants.py                                     # the whole list, on two processes
    python tests/mutants.py losses/ weights.py                  # the mutants of these paths
    python tests/mutants.py --killed-by tests/test_watchdog.py  # those that this file has killed, judged by the others

tests/mutants.txt has a block for each mutant: the file, `- ` the line as it is, `+ ` the line as it becomes, `= ` why no test can
see it, where none can, and `! ` the first test file that killed it: --record runs the blocks that lack it and writes it there. A
line that is not in its file exactly once is an error, so the list moves with the code. JUDGES says which tests are asked, most
likely first; the first that fails ends the question. The suite does not run this: it takes hours.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
sys.dont_write_bytecode = True

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".txt")
# The share of the mutants that must die.
BAR = 0.97
# A mutant that makes ranks wait for each other is seen by the time limit of its ranks.
SECONDS_OF_RANKS = 60.0
SECONDS_OF_A_MUTANT = 900

# Path within megatron_rl/ -> the test files whose fast tests are asked and, behind a bar, those whose slow tests are asked then,
# without "test_" and ".py". The longest path that fits counts.
JUDGES = {
    "": "contracts generated_steps",
    "arguments.py": "settings",
    "train/accumulation.py": "accumulation",
    "train/document_steps.py": "accumulation | accumulation train_loop checkpoints",
    "formula.py": "counts own refused explain",
    "weights.py": "counts own declare refused generated_steps",
    "count.py": "counts refused no_waits layout_primitives",
    "validation/weight_words.py": "own explain",
    "metrics/policy.py": "metrics generated_steps",
    "metrics/further.py": "metrics generated_steps",
    "metrics/step.py": "metrics generated_steps no_waits",
    "ops/fp32_head.py": "linear_log_probs",
    "hosts/": "hosts added_losses launch megatron_lm hooks | hosts",
    "hosts/batch.py": "hosts added_losses hidden_states_proxy | hosts",
    "hosts/heads/": "host_log_probs nemo_rl skyrl roll row_proxy hidden_states_proxy",
    "hosts/heads/hidden_states_proxy.py": "hidden_states_proxy",
    "hosts/heads/row_proxy.py": "row_proxy host_log_probs",
    "hosts/heads/placed_rows.py": "row_proxy skyrl",
    "hosts/heads/skipped_log_probs.py": "hidden_states_proxy launch",
    "hosts/training_hooks.py": "hooks",
    "hosts/contract.py": "hidden_states_proxy",
    "hosts/heads/placed_head.py": "hidden_states_proxy",
    "hosts/host_run.py": "hooks hosts hidden_states_proxy",
    "hosts/reducer.py": "hosts hooks own | hosts",
    "hosts/train_rl.py": "megatron_lm",
    "hosts/dense_rows.py": "adapters verl skyrl nemo_rl roll",
    "hosts/choice.py": "adapters refused verl skyrl nemo_rl roll",
    "hosts/run.py": "hooks nemo_rl adapters",
    "hosts/verl": "verl adapters refused",
    "hosts/nemo_rl": "nemo_rl adapters refused",
    "hosts/roll": "roll adapters refused",
    "hosts/heads/roll.py": "row_proxy",
    "hosts/skyrl": "skyrl adapters refused",
    "layout/": "layout_primitives rank_agreement generated_steps log_probs",
    "layout/sampling_support.py": "support sparse_head generated_steps",
    "layout/agreement.py": "layout_primitives rank_agreement generated_steps",
    "layout/groups.py": "layout_primitives counts rank_agreement generated_steps",
    "policy_loss/": "contracts golden_losses losses refused generated_steps head",
    "losses/": "contracts golden_losses losses refused generated_steps head",
    "policy_loss/corrected_inputs.py": "golden_losses losses generated_steps",
    "policy_loss/api.py": "losses contracts own assumed_scale support generated_steps",
    "policy_loss/inputs.py": "losses refused generated_steps head own",
    "policy_loss/linear.py": "head refused generated_steps",
    "policy_loss/one_read_triton.py": "row_kernels generated_steps",
    "policy_loss/reduce_torch.py": "golden_losses losses contracts own declare generated_steps",
    "policy_loss/value.py": "value_loss refused",
    "policy_loss/reduce_triton.py": "losses generated_steps",
    "megatron/checks.py": "forward_step expert_layouts added_losses model_shapes",
    "megatron/attention.py": "megatron_model",
    "megatron/model.py": "megatron_model model_shapes layouts",
    "megatron/multi_token.py": "model_shapes",
    "megatron/rotary.py": "megatron_model",
    "megatron/samples.py": "batch counts expert_layouts forward_step model_shapes generated_steps",
    "megatron/schedule.py": "generated_steps forward_step megatron_model layouts",
    "megatron/probe.py": "forward_step",
    "megatron/router_losses.py": "expert_layouts forward_step",
    "megatron/routing.py": "router_replay expert_layouts",
    "megatron/batch.py": "batch router_replay",
    "megatron/forward_step.py": "forward_step router_replay | selftest",
    "megatron/head.py": "fused_head model_shapes",
    "ops/": "log_probs head row_kernels linear_log_probs refused generated_steps",
    "ops/log_probs_triton.py": "row_kernels generated_steps",
    "ops/rescale_triton.py": "assumed_scale",
    "losses/kl": "contracts golden_losses generated_steps",
    "losses/corrections.py": "golden_losses contracts own generated_steps",
    "losses/distillation.py": "distillation generated_steps",
    "registry.py": "declare refused own",
    "declare.py": "declare contracts refused own",
    "ops/support.py": "support sparse_head generated_steps",
    "ops/support_triton.py": "sparse_head",
    "ops/rows_triton.py": "row_kernels generated_steps",
    "ops/loss_triton.py": "losses contracts",
    "ops/distribution.py": "distillation refused generated_steps",
    "ops/backends.py": "row_kernels backends",
    "validation/": "refused settings",
    "validation/own_functions.py": "declare own",
    "train/trainer.py": "forward_step | accumulation train_loop checkpoints train_command",
    "train/collection.py": "rollouts | train_loop accumulation train_command",
    "train/rollouts.py": "rollouts | train_loop",
    "train/rollout_files.py": "rollouts | train_loop",
    "train/checkpoints.py": "checkpoints | checkpoints",
    "train/generation.py": "generation | generation",
    "train/hf_": "hf",
    "train/stopping.py": "watchdog",
    "testing/": "layouts step_check | step_check",
    "testing/comparison.py": "layouts step_check | selftest",
    "testing/oracle.py": "golden_losses generated_steps",
    "testing/reference.py": "layouts step_check | selftest",
    "testing/selftest.py": "selftest layouts | selftest",
    "testing/loss_": "declare | ranks",
    "testing/step_": "step_check | step_check",
    "commands/explain/": "explain pages",
    "commands/unknown_flags.py": "settings explain | train_command",
}


@dataclass(frozen=True)
class Mutant:
    path: str
    old: str
    new: str
    reason: str = ""
    killer: str = ""

    def __str__(self) -> str:
        rest = [f"{sign} {text}\n" for sign, text in (("=", self.reason), ("!", self.killer)) if text]
        return "".join([f"{self.path}\n- {self.old}\n+ {self.new}\n", *rest])

    def applied(self, text: str) -> str:
        lines = text.split("\n")
        found = [number for number, line in enumerate(lines) if line.strip() == self.old]
        if len(found) != 1:
            raise SystemExit(f"tests/mutants.txt: {self.path} has this line {len(found)} times, not once:\n{self.old}")
        indent = len(lines[found[0]]) - len(lines[found[0]].lstrip())
        lines[found[0]] = " " * indent + self.new
        return "\n".join(lines)

    def judges(self, without: Sequence[str] = ()) -> dict[str, list[str]]:
        """pytest's -m -> the test files that are asked with it. A file that does not exist any more is passed over."""
        of_path = max((prefix for prefix in JUDGES if self.path.startswith(prefix)), key=len)
        asked = ([test_file(name) for name in part.split()] for part in JUDGES[of_path].partition("|")[::2])
        here = ([test for test in tests if test not in without and (ROOT / test).exists()] for tests in asked)
        return dict(zip(("not slow", "slow"), here, strict=True))


def test_file(name: str) -> str:
    return f"tests/test_{name}.py"


def read_list() -> list[Mutant]:
    blocks = [block.splitlines() for block in LIST.read_text(encoding="utf-8").split("\n\n") if block.strip()]
    found = []
    for path, old, new, *rest in blocks:
        signed = {line[0]: line[2:] for line in rest}
        found.append(Mutant(path, old[2:], new[2:], signed.get("=", ""), signed.get("!", "")))
    return found


def record(mutant: Mutant, killer: str) -> None:
    """Writes the killer into the list, one process at a time, so that a run that is interrupted loses nothing."""
    with LIST.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        known = [replace(one, killer=killer) if (one.path, one.new) == (mutant.path, mutant.new) else one for one in read_list()]
        file.write("\n".join(map(str, known)))
        file.truncate()


def source(path: str) -> str:
    return (ROOT / "megatron_rl" / path).read_text(encoding="utf-8")


def judge(mutant: Mutant, without: Sequence[str], folder: Path, log: Path) -> str:
    """The first test that fails, or "" where all pass. The folder is a copy of the checkout of its own."""
    path = folder / "megatron_rl" / mutant.path
    text = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied(text), encoding="utf-8")
    failures = (first_failure(tests, marks, folder, log) for marks, tests in mutant.judges(without).items())
    failed = next(filter(None, failures), "")
    path.write_text(text, encoding="utf-8")
    return failed


def first_failure(tests: list[str], marks: str, folder: Path, log: Path) -> str:
    """`FAILED file::test`, or `ENDED file with ...` where pytest did not get as far; "" where all pass."""
    if not tests:
        return ""
    child = os.fork()
    if child == 0:
        run_tests(tests, marks, folder, log)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) in (0, 5):  # 5: no test of these files has the marks
        return ""
    told = log.read_text(errors="replace")
    failed = [line for line in told.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    running = re.findall(r"^tests/test_\w+\.py", told, re.MULTILINE) or tests[:1]
    return failed[0].split(" - ")[0] if failed else f"ENDED {running[-1]} with {os.waitstatus_to_exitcode(status)}"


def run_tests(tests: list[str], marks: str, folder: Path, log: Path) -> None:
    os.setsid()
    signal.alarm(SECONDS_OF_A_MUTANT)
    for number in (1, 2):
        os.dup2(os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path[:0] = [str(folder), str(folder / "tests")]
    try:
        import pytest

        from megatron_rl.testing import ranks

        for function in (ranks.run_ranks, ranks.RankPool.__init__):
            function.__kwdefaults__["timeout"] = SECONDS_OF_RANKS
        code = pytest.main(["-x", "-v", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", marks, *tests])
    except BaseException as error:
        print(f"ERROR import: {type(error).__name__}: {error}", flush=True)
        code = 1
    os._exit(int(code))


def in_forks(work: Callable[[int], list[str]], processes: int) -> list[str]:
    """What `work` returns for 0, 1, ..., each in a process. No threads: a fork of a thread could not end its own forks."""
    children = []
    for number in range(processes):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            with open(writer, "w") as answers:
                answers.write("\n".join(work(number)))
            os._exit(0)
        os.close(writer)
        children.append((child, reader))
    found = []
    for child, reader in children:
        with open(reader) as answers:
            found += answers.read().splitlines()
        if os.waitpid(child, 0)[1] != 0:
            raise SystemExit("a process that judges mutants has ended with an error, see above")
    return found


def run(mutants: list[Mutant], without: Sequence[str], processes: int, is_recorded: bool) -> int:
    import hypothesis  # noqa: F401  # once here, and not in each fork
    import pytest  # noqa: F401
    import torch._dynamo  # noqa: F401

    begun, bar = time.monotonic(), 1.0 if without else BAR
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        folders = [Path(scratch) / str(number) for number in range(processes)]
        for folder in folders:
            left_out = shutil.ignore_patterns(".git", ".venv", ".tritons", "__pycache__", "runs")
            shutil.copytree(ROOT, folder, symlinks=True, ignore=left_out)
        judges = sorted({(test, marks) for mutant in mutants for marks, tests in mutant.judges(without).items() for test in tests})

        def fail_unchanged(share: int) -> list[str]:
            own, log = judges[share::processes], Path(scratch) / f"log-{share}"
            return [failed for test, marks in own if (failed := first_failure([test], marks, folders[share], log))]

        def live(share: int) -> list[str]:
            """The numbers of the mutants that no test sees."""
            alive = []
            for number in range(share, len(mutants), processes):
                mutant = mutants[number]
                killer = judge(mutant, without, folders[share], Path(scratch) / f"log-{share}")
                print(f"{killer or 'LIVES'}  {mutant.path}: {mutant.old}  ->  {mutant.new}", flush=True)
                alive += [] if killer else [str(number)]
                if is_recorded:
                    record(mutant, killer and killer.split()[1].partition("::")[0])
            return alive

        if failed := in_forks(fail_unchanged, processes):
            raise SystemExit("\n".join(["the tests must pass on the package as it is:", *failed]))
        alive = [mutants[int(number)] for number in in_forks(live, processes)]
    died = len(mutants) - len(alive)
    share = died / max(len(mutants), 1)
    print(f"{died} of {len(mutants)} mutants die: {share:.1%}, the bar is {bar:.0%}; {time.monotonic() - begun:.0f} s")
    print("\n".join(map(str, alive)))
    return 0 if share >= bar and all(mutant.reason for mutant in alive) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", default=[""], help="within megatron_rl/; all without one")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="run those that no file has killed, and write who kills them")
    parser.add_argument("--killed-by", nargs="+", default=[], metavar="FILE", help="what these have killed, judged by others")
    args = parser.parse_args()
    named = {test_file(name) for names in JUDGES.values() for name in names.replace("|", " ").split()}
    if gone := sorted(name for name in named if not (ROOT / name).exists()):
        print("these files of JUDGES do not exist and are not asked:", *gone)
    killers, paths = args.killed_by or ([""] if args.record else None), tuple(args.paths)
    chosen = [one for one in read_list() if one.path.startswith(paths) and (killers is None or one.killer in killers)]
    return run(chosen, args.killed_by, args.processes, args.record)


if __name__ == "__main__":
    sys.exit(main())
