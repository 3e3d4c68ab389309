"""doctor reads launch scripts as bash would run them, without running any, and says what it could not read."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_rl.__main__ import main
from megatron_rl.commands.doctor.command_line import read_line, training_line
from megatron_rl.commands.doctor.launch import judge_launch
from megatron_rl.commands.doctor.report import OK, PROBLEM, as_text
from megatron_rl.commands.doctor.script import ScriptReader, is_unread
from megatron_rl.commands.doctor.shell_syntax import syntax_problem
from megatron_rl.config import Route
from megatron_rl.errors import ConfigError
from megatron_rl.hosts import DOOR_NAMES, HOST_NAMES, ROLLOUT_HOST_NAMES
from megatron_rl.hosts.base import INIT_LINE, REDUCER_LINE, known_hosts

ROOT = Path(__file__).resolve().parent.parent
OURS = """--loss-aggregation constant --loss-aggregation-divisor 8192
   --custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer"""
# As the scripts of both hosts are written.
LAUNCH = """
    #!/bin/bash
    pkill -9 sglang
    set -ex
    export PYTHONUNBUFFERED=1
    SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
    source "${SCRIPT_DIR}/models/tiny.sh"
    GRPO_ARGS=(
       --advantage-estimator grpo
       # --calculate-per-token-loss
       OURS
    )
    WANDB_ARGS=(
       # --use-wandb
    )
    RUNTIME_ENV_JSON="{
      \\"env_vars\\": {\\"PYTHONPATH\\": \\"${SCRIPT_DIR}/plugins\\"}
    }"
    ray job submit --address="http://127.0.0.1:8265" \\
       --runtime-env-json="${RUNTIME_ENV_JSON}" \\
       -- python3 START train.py \\
       --actor-num-gpus-per-node ${NUM_GPUS_HERE} \\
       ${MODEL_ARGS[@]} \\
       ${GRPO_ARGS[@]} \\
       ${WANDB_ARGS[@]} 2>&1 | tee log.txt
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout of slime, as far as a launch script knows it: (its folder, make(script) -> the script)."""
    (tmp_path / "train.py").write_text("from slime.utils.arguments import parse_args\n")
    scripts = tmp_path / "scripts"
    (scripts / "models").mkdir(parents=True)
    (scripts / "models" / "tiny.sh").write_text("MODEL_ARGS=(\n   --num-layers 2 # of them\n   --swiglu\n)\n")

    def make(text: str = LAUNCH, *, ours: str = OURS, start: str = "-m megatron_rl.hosts.launch") -> str:
        script = scripts / "run.sh"
        script.write_text(textwrap.dedent(text).lstrip().replace("OURS", ours).replace("START", start))
        return str(script)

    return tmp_path, make


def problems(report) -> list[str]:
    return [f"{finding.subject}: {finding.text}" for finding in report.findings if finding.status == PROBLEM]


def test_a_line_of_our_launcher_without_a_flag_of_ours_has_a_problem(checkout, monkeypatch):
    """A misspelt array is empty in bash. The stock launcher may well start such a line."""
    folder, make = checkout
    monkeypatch.chdir(folder)
    text = LAUNCH.replace("WANDB_ARGS=(", "LOSS_ARGS=(\n       OURS\n    )\n    WANDB_ARGS=(", 1).replace("OURS", "", 1)
    slip, whole = (text.replace("${WANDB_ARGS[@]} 2", f"{words} 2") for words in ("${LOS_ARGS[@]}", "${LOSS_ARGS[@]}"))
    own_loss = (
        "rule: the host's own loss would train: neither our reducer nor our loss is on the launch line; add "
        "--custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer"
    )
    (line,) = [at for at, row in enumerate(Path(make(slip)).read_text().splitlines(), 1) if "LOS_ARGS" in row]
    array = f"script: ${{LOS_ARGS[@]}} (line {line}) is not set in the script: did you mean LOSS_ARGS, which nothing uses?"
    assert problems(judge_launch(["bash", make(slip)], None)) == [array, own_loss]
    assert problems(judge_launch(["bash", make(slip, start="")], None)) == [array]
    assert problems(judge_launch(["bash", make(whole)], None)) == []
    assert problems(judge_launch(["bash", make(ours="")], None)) == [own_loss]
    assert problems(judge_launch(["bash", make(ours="", start="")], None)) == []
    # One that is set where the launch is started, or read by a condition, is no slip.
    monkeypatch.setenv("LOS_ARGS", "--num-epoch 1")
    assert array not in problems(judge_launch(["bash", make(slip)], None))


# The words, against bash itself

SNIPPETS = {
    "quotes": """show 'a b' "c d" e\\ f "g\\"h" 'i'"j"k $'l' "" ''""",
    "variables": """X=1; Y="$X 2"; show $X ${X} "$Y" $Y "${Y}z" '$X' \\$X "\\$X" a$X'b'""",
    "defaults": """E=""; Y="y z"; show ${N:-d} "${N:-d e}" "${N:-$Y}/x" ${N:-$Y}
    show ${N-f} ${E:-g} "${E-h}" ${X:-$HOME_OF_TEST} ${N:+i} ${HOME_OF_TEST:+j}""",
    "arrays": """A=(a "b c" --d=e); show ${A[@]} "${A[@]}" "${A[*]}" $A "x${A[@]}y" ${A[0]:-}""",
    "empty arrays": """A=(); show 1 ${A[@]} "${A[@]}" 2 "${N[@]}" 3""",
    "an array over lines": """A=(
        --a 1   # what it is
        # --gone 2
        --b "two
lines"
    )
    show "${A[@]}" """,
    "adding": """A=(a); A+=(b "c d"); S=x; S+=y; show "${A[@]}" $S""",
    "of other variables": """L=5; A=(--layers "$L"); B=("${A[@]}" --more); L=6; show "${B[@]}" """,
    "blanks between quotes": """X=1; Y="y z"; show "$X $Y" "
  $X
    $Y  ${X}  ${Y} " "$X
$Y
" " $*" """,
    "declared": """export X=1 Y="2 3"; readonly Z=4; declare -a A=(5 "6 7"); show $X "$Y" $Z "${A[@]}" """,
    "arguments": """show "$@" $1 "$2" "${@}" """,
    "lines that go on": "show a \\\n   --b c \\\n   d",
    "a comment ends a line that goes on": "show a \\\n   # --b c \\\n   2>/dev/null",
    "redirections": """show a 2>&1 b >/dev/null c </dev/null 2> /dev/null | cat""",
    "here documents": "cat <<EOF >/dev/null\nshow no $(x)\nEOF\nshow yes\n"
    "cat <<-'END' >/dev/null\n\tshow no\n\tEND\nshow too <<< no",
    "more on a line": """X=1 show a; Y=2; show $Y && show b; (show c); { show d; }; ! show e; time show f 2>/dev/null""",
    "words beside brackets": """if true; then show a; fi; for i in 1; do show b; done
    case x in x) show c ;; esac; f() { show d; }; f""",
    "json": """N=1; J="{ \\"a\\": {\\"b\\": \\"${N}\\"} }"; show --json="${J}" --k '{"l":[1, 2]}'""",
    "a shell in a shell": """X=1; bash -c "show a $X" """,
    "own folder": """D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
    R="$(cd "${D}/.." && pwd)"; show "$D" $R $0""",
    "names side by side": """H=h; P=8; A=(http://$H:$P/x [0]*$P+[1]*$P); X=$H:$P; export Y=$H/$P:$1
    show $H:$P/$1 "${A[@]}" $X $Y""",
    "settings of one command": """X=1; echo 'show $X $Y' > sourced.sh; X=2 Y=3 source ./sourced.sh; show $X ${Y-gone}
    X=4 show $X; show $X""",
    "dirname": """D=$(dirname "$0"); show "$D/x.sh" """,
    "names of other scripts": """N=$(basename "/a/base-tq_simple.sh" .sh); B=$(echo "$N" | sed -E 's/-tq_(simple|mooncake)$//')
    show $N $B $(basename x.sh .py) $(echo a-b-a | sed 's/a/c/') $(echo a/b | sed 's|a/|x|') $(echo "a" | sed s/b/c/)""",
    "branches that are decided": """D=${NOT_SET:-gpu}; E=(); N=""
    case "$D" in gpu | tpu) A=1; E+=(g) ;; npu) A=2; N=8 ;; *) exit 1 ;; esac
    case $D in n*) B=1 ;; *) B=2 ;; esac; case "$D" in "g*") C=1 ;; g?u) C=2 ;; esac
    if [ "$D" = npu ] && [ "$A" = 1 ]; then F=1; elif [[ "$D" == g* && -n $A ]]; then F=2; else F=3; fi
    if ! [ -z "$N" ] || test "$A" != 1; then G=1; else G=2; fi; T=false; if $T; then H=1; else H=2; fi
    if [ "$A" -gt 3 ]; then I=1; elif { [ "$A" = 5 ] || [[ ( $A -le 1 ) ]]; }; then I=2; fi
    [ "$HOME_OF_TEST" = /home ] && J=1; [[ "$D" != gpu ]] && J=2; [ "$D" = npu ] || K=3; if [ "$N" ]; then K=4; fi
    show "$A" "$B" "$C" "${E[@]}" "$F" "$G" "$H" "$I" "$J" "$K" "${N:-0}"; if [ "$D" = npu ]; then show no; else show yes; fi
    case $1 in one) show first ;; *) show other ;; esac""",
}
NEEDS_BASH = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash to compare with: install bash")
SHOW = "show() { printf '%s\\0' show \"$@\" >&3; }; export -f show; export HOME_OF_TEST=/home\n"


@pytest.fixture(scope="module")
def of_bash(tmp_path_factory):
    """What bash makes of each snippet: {name: (script, its commands)}, in one process for all."""
    folder = tmp_path_factory.mktemp("snippets")
    runs = []
    for index, text in enumerate(SNIPPETS.values()):
        (folder / f"{index}.sh").write_text(text + "\n")
        runs.append(f"( exec 3>{folder}/{index}.out; bash {folder}/{index}.sh one 'two words' ) 2>{folder}/{index}.err")
    subprocess.run(["bash", "-c", SHOW + "\n".join(runs)], check=True, cwd=folder)
    found = {}
    for index, name in enumerate(SNIPPETS):
        words = (folder / f"{index}.out").read_text().split("\0")[:-1]
        starts = [place for place, word in enumerate(words) if word == "show"] + [len(words)]
        found[name] = (folder / f"{index}.sh", [tuple(words[a:b]) for a, b in zip(starts, starts[1:], strict=False)])
    return found


@NEEDS_BASH
@pytest.mark.parametrize("name", SNIPPETS)
def test_a_script_is_read_as_bash_runs_it(of_bash, name, monkeypatch):
    monkeypatch.setenv("HOME_OF_TEST", "/home")
    script, expected = of_bash[name]
    assert expected, "bash shows nothing: the snippet is wrong"
    lines = ScriptReader(script, ["one", "two words"]).lines()
    found = [line.words for line in lines if line.words[0] == "show"]
    assert found == expected


UNKNOWN = [
    pytest.param("X=$(nvidia-smi | wc -l)\nshow --gpus $X", ("--gpus", "${X}"), id="what a command prints"),
    pytest.param("show --gpus $NOT_SET_ANYWHERE", ("--gpus", "$NOT_SET_ANYWHERE"), id="a variable of the cluster"),
    pytest.param("A=(1); read -ra A < a.txt\nshow ${A[@]}", ("${A[@]}",), id="read"),
    pytest.param("A=(1); IFS=, read -ra A <<< 2,3\nshow ${A[@]}", ("${A[@]}",), id="read at commas"),
    pytest.param("A=(1); mapfile -t A\nshow ${A[@]}", ("${A[@]}",), id="mapfile"),
    pytest.param('printf -v X "[%s]" 1\nshow $X', ("$X",), id="printf -v"),
    pytest.param("source /gone/models.sh\nshow ${A[@]}", ("${A[@]}",), id="a source that is not here"),
    pytest.param('eval "$(cat x)"\nshow ${A[@]}', ("${A[@]}",), id="eval"),
    pytest.param("for X in 1 2; do show $X; done", ("$X",), id="a loop's variable"),
    pytest.param("A=(1 2); A[1]=3\nshow ${A[@]}", ("${A[@]}",), id="an element"),
    pytest.param("show $((8 * 2)) ${X%.json} ${#A[@]}", ("$((8 * 2))", "${X%.json}", "${#A[@]}"), id="arithmetic and cutting"),
    pytest.param('f() { show $1 "$@"; }', ("$1", "$@"), id="a function's own arguments"),
    pytest.param('shift\nshow $1 "$@"', ("$1", "$@"), id="shift"),
    pytest.param("I=0; ((I++)); for ((J=0; J<3; J++)); do :; done\nshow $I $J", ("$I", "$J"), id="counters"),
    pytest.param("X=1; unset X\nshow $X", ("$X",), id="unset"),
    pytest.param("show <(date)", ("<(date)",), id="a process substitution"),
    pytest.param("show `date`", ("`date`",), id="backticks"),
]


def test_a_sourced_file_that_is_not_here_is_named(checkout):
    script = checkout[1]("set -e\nsource models/gone.sh\npython slime/train.py ${MODEL_ARGS[@]}\n")
    (unread,) = judge_launch(["bash", script], None).reading
    assert unread.text.endswith("not judged; sourced, and not here: models/gone.sh (line 2)")


@pytest.mark.parametrize(("text", "expected"), UNKNOWN)
def test_what_cannot_be_known_stays_as_it_is_written(checkout, text, expected):
    """Never a guess: the word is told as one that was not read."""
    lines = ScriptReader(Path(checkout[1](text)), ["an argument"]).lines()
    (words,) = [line.words[1:] for line in lines if line.words[0] == "show"]
    assert words == expected and all(is_unread(word) for word in words if not word.startswith("--"))


def test_what_a_branch_decides_is_told(checkout):
    script = Path(checkout[1]('A=(1)\nif x; then\n  A+=(2)\nfi\nB=("${A[@]}")\n[ -n "$D" ] && C=3\nE=4\nshow ${B[@]} $C $E\n'))
    (line,) = [line for line in ScriptReader(script).lines() if line.words[0] == "show"]
    assert line.words == ("show", "1", "2", "3", "4") and line.branches == ("A (line 3)", "C (line 6)") and line.line == 8


def test_no_branch_wins_where_it_is_not_known_which_one_runs(checkout):
    """A value is a branch's where all give it; a count of one is none. What may be typed is named, and what is computed is not."""
    text = """
        D=${D:-$(probe)}; N=$(probe); X=1; S=1; L=(a.b=1); P=(--x 1); Q="--q 1"
        case "$D" in
            gpu) X=2; S=3; L+=(a.c=1 a.d=same); P+=(--y 2 --z on) ;;
            npu) X=4; S=3; L+=(a.d=same a.e=5); P+=(--y 3); Q="$Q --r 2" ;;
            *) exit 1 ;;
        esac
        if [ $N -gt 1 ]; then Y=1; else Y=2; fi
        for I in 1 2; do if [ "$S" = $I ]; then Z=1; else Z=2; fi; done
        show $X $S $Y $Z "${L[@]}" "${P[@]}" $Q
    """
    (line,) = [line for line in ScriptReader(Path(checkout[1](text))).lines() if line.words[0] == "show"]
    lists = ["a.b=1", "a.c=${L}", "a.d=same", "a.e=${L}", "--x", "1", "--y", "${P}", "--z", "on", "--q", "1", "--r", "${Q}"]
    assert [*line.words[1:]] == ["${X}", "3", "${Y}", "${Z}", *lists]
    assert line.deciding == ("D",) and [one.split()[0] for one in line.branches] == ["X", "L", "P", "Q", "Y", "Z"]


STARTING = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "pty.spawn")
# Each makes a file where bash runs it.
RUNNING = [
    "$(touch {0})",
    "echo `touch {0}`",
    'X="$(touch {0})"; show "$X"',
    "cat <(touch {0})",
    "echo hi > >(touch {0}); wait $!",
    'eval "touch {0}"',
    "source <(echo touch {0})",
    "trap 'touch {0}' EXIT",
    "trap 'touch {0}' DEBUG; true",
    'bash -c "touch {0}"',
    "show ${{NOT_SET:=$(touch {0})}}",
    "show ${{NOT_SET:-`touch {0}`}}",
    "A=(1); show ${{A[$(touch {0}; echo 0)]}}",
    "show $(( $(touch {0}; echo 1) + 1 ))",
    "cat <<EOF\n$(touch {0})\nEOF",
    "cat <<< $(touch {0})",
    "f() {{ touch {0}; }}; f",
    "X='$(touch {0})'; show ${{X@P}}",
    "coproc touch {0}; wait $!",
    "[[ -n $(touch {0}) ]] || touch {0}",
    "cd $(touch {0}; dirname $0) && pwd",
    "pkill -f no_such_process_of_a_test; touch {0} &\nwait",
]


@NEEDS_BASH
def test_nothing_of_a_script_is_run(tmp_path):
    """Substitutions, traps, sourcing, eval: bash makes every file, doctor makes none and starts no process."""
    scripts = [tmp_path / f"{index}.sh" for index in range(len(RUNNING))]
    for script, text in zip(scripts, RUNNING, strict=True):
        script.write_text(text.format(script.with_suffix(".made")) + "\npython3 train.py\n")
    started = []
    sys.addaudithook(lambda event, _: started.append(event) if event in STARTING and is_watched else None)
    is_watched = True
    found = [training_line(list(ScriptReader(script).lines()), "it")[0].words for script in scripts]
    is_watched = False
    assert found == [("python3", "train.py")] * len(RUNNING)
    assert started == [] and not list(tmp_path.glob("*.made"))
    show = "show() { :; }; python3() { :; }; export -f show python3\n"
    line = show + "\n".join(f"bash {script} >/dev/null 2>&1 </dev/null" for script in scripts)
    subprocess.run(["bash", "-c", line], check=False, cwd=tmp_path)
    assert {int(path.stem) for path in tmp_path.glob("*.made")} == set(range(len(RUNNING)))


def test_what_is_no_bash_hides_what_it_may_set(checkout):
    """The parser goes on behind it; arrays that nothing is known to set may come from there."""
    report = judge_launch(["bash", checkout[1](LAUNCH.replace("    set -ex", "    if then ((; done"))], None)
    told = [(f.status, f.text) for f in report.reading][-2:]
    assert told[0][1].startswith("not understood, and what they set is not known: line ")
    assert told[1][0] == PROBLEM and told[1][1].startswith("bash cannot read it: line ")


SLIPS = [
    pytest.param(
        "${GRPO_ARGS[@]}", "${GRPO_ARG[@]}", "is not set in the script: did you mean GRPO_ARGS, which nothing uses?", id="one"
    ),
    pytest.param(
        "${GRPO_ARGS[@]}", "${GRPOARGS[@]}", "is not set in the script: did you mean GRPO_ARGS, which nothing uses?", id="two"
    ),
    pytest.param("${GRPO_ARGS[@]}", "${GRPO_ARGS}", "is the first word of the array alone: write ${GRPO_ARGS[@]}", id="no index"),
    pytest.param("${GRPO_ARGS[@]}", "$GRPO_ARGS", "is the first word of the array alone: write ${GRPO_ARGS[@]}", id="nor braces"),
]


@pytest.mark.parametrize(("right", "wrong", "said"), SLIPS)
def test_a_slip_with_an_array_is_told_where_it_is(tmp_path, capsys, right, wrong, said):
    code, out = said_of(tmp_path, READABLE.replace(right, wrong), capsys)
    assert code == 1 and f"PROBLEM  script  {wrong} (line 9) {said}" in re.sub(" +(?= {2})", "", out), out


def test_an_array_that_is_set_behind_its_use_is_told(tmp_path, capsys):
    array = "GRPO_ARGS=(\n   --advantage-estimator grpo\n)\n"
    code, out = said_of(tmp_path, READABLE.replace(array, "") + array, capsys)
    assert code == 1 and "${GRPO_ARGS[@]} (line 6) is not set there: the script sets GRPO_ARGS on line 7, after it" in out
    # One that adds to itself, one of a function that runs later, one that is used again.
    for text in (
        READABLE.replace("set -ex", "GRPO_ARGS=(\n${GRPO_ARGS[@]} --seed 1\n)"),
        READABLE.replace(array, "EXTRA=(\n${EXTRA[@]} --seed 1\n)\n" + array).replace("train.py", "train.py ${EXTRA[@]}"),
        READABLE.replace(array, "echo ${GRPO_ARGS[@]}\n" + array),
    ):
        assert said_of(tmp_path, text, capsys)[0] == 0


def test_an_array_whose_first_word_a_condition_or_a_log_reads_is_no_slip(tmp_path, capsys):
    for line in ('if [ -n "${GRPO_ARGS}" ]; then echo yes; fi', 'echo "$GRPO_ARGS"'):
        assert said_of(tmp_path, READABLE.replace("set -ex", line), capsys)[0] == 0


def test_a_value_that_is_missing_has_the_slip_that_lost_it(tmp_path, capsys):
    text = READABLE.replace("--advantage-estimator grpo", "--loss-aggregation constant").replace("${GRPO_ARGS[@]}", "${GRPO_ARGS}")
    code, out = said_of(tmp_path, text.replace("python3", "python3 -m megatron_rl.hosts.launch"), capsys)
    assert (
        code == 2 and "1. ${GRPO_ARGS} (line 9) is the first word" in out and "2. argument --loss-aggregation: expected one" in out
    )


UNREADABLE = [
    pytest.param("GRPO_ARGS=(", "GRPO_ARGS = (", "near unexpected token `(': write GRPO_ARGS=( without a blank", id="blanks"),
    pytest.param(")\nPERF_ARGS=(", "PERF_ARGS=(", "near unexpected token `(': does an array above it lack its )?", id="open array"),
    pytest.param("grpo", '"grpo', "unexpected EOF while looking for matching `\"'", id="open quote"),
    pytest.param("set -ex", "case $1 in @(a|b)) ;; esac", "near unexpected token `('", id="extended pattern"),
]
READABLE = """
#!/bin/bash
GRPO_ARGS=(
   --advantage-estimator grpo
)
PERF_ARGS=(
   --context-parallel-size 1
)
set -ex
python3 train.py ${GRPO_ARGS[@]} ${PERF_ARGS[@]} >> log
"""


def said_of(folder, text, capsys):
    (folder / "run.sh").write_text(text.lstrip())
    code, (out, error) = (
        main(["doctor", "--launch-only", "--host", "slime", "--", "bash", str(folder / "run.sh")]),
        capsys.readouterr(),
    )
    return code, out + error


@pytest.mark.parametrize(("plain", "broken", "said"), UNREADABLE)
def test_a_script_that_bash_cannot_read_is_told_in_bash_s_words(tmp_path, capsys, monkeypatch, plain, broken, said):
    """The parser of doctor goes on behind such a line, and names another reason."""
    assert said_of(tmp_path, READABLE, capsys)[0] == 0
    text = READABLE.replace(plain, broken)
    number = next(at for at, line in enumerate(text.strip().splitlines(), 1) if broken.splitlines()[0] in line)
    code, out = said_of(tmp_path, text, capsys)
    assert code and re.search(rf"bash cannot read it: line {number}, (syntax error )?{re.escape(said)}; see bash -n", out), out
    monkeypatch.setenv("PATH", "")  # no bash: nothing is said of it
    assert "bash cannot read" not in said_of(tmp_path, text, capsys)[1]


@pytest.mark.parametrize("start", ["shopt -s extglob\ncase $1 in @(a|b)) ;; esac", "#!/bin/zsh\ncase $1 in @(a|b)) ;; esac"])
def test_a_script_that_its_own_shell_reads_is_no_problem(tmp_path, capsys, start):
    assert said_of(tmp_path, start + READABLE.replace("#!/bin/bash", ""), capsys)[0] == 0


@pytest.mark.parametrize(
    "root", [f"{name}_ROOT" for name in ("VERL", "NEMO_RL", "MILES", "SLIME", "ROLL", "SKYRL", "PRIME_RL", "TRL")]
)
def test_bash_reads_every_script_that_a_trainer_publishes(root):
    folder = Path(os.environ.get(root) or pytest.skip(root))
    found = {path: syntax_problem(path, 2**22) for path in folder.rglob("*.sh") if path.is_file()}
    assert {path: said for path, said in found.items() if said} == {}


def test_the_parse_of_bash_runs_nothing(tmp_path, monkeypatch):
    (tmp_path / "start.sh").write_text(f"touch {tmp_path}/made\n")
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "start.sh"))
    (tmp_path / "run.sh").write_text(f"touch {tmp_path}/made\nX=$(touch {tmp_path}/made)\nset +n\ntouch {tmp_path}/made\n")
    assert syntax_problem(tmp_path / "run.sh", 2**22) is None and not (tmp_path / "made").exists()


def test_without_the_parser_a_script_is_refused_in_one_line_and_a_command_line_is_judged(checkout, monkeypatch):
    monkeypatch.setitem(sys.modules, "tree_sitter_bash", None)
    folder, make = checkout
    with pytest.raises(
        ConfigError, match=r"is not installed: pip install '/path/to/megatron_rl\[doctor\]', or give the words that start"
    ):
        judge_launch(["bash", make()], None)
    assert judge_launch(["python3", str(folder / "train.py")], None).title.startswith("slime")


# The line that starts the training


def test_a_launch_script_is_judged_with_its_arrays(checkout):
    """Journey A, as it is typed: `megatron-rl doctor -- bash scripts/run.sh`."""
    folder, make = checkout
    report = judge_launch(["bash", make()], None)
    assert report.title == "slime, started by megatron_rl.hosts.launch, route reducer, from line 19 of the script"
    assert problems(report) == [] and report.unread == ()
    assert [(finding.subject, finding.text) for finding in report.flags] == [
        ("--loss-aggregation", "constant, read on the route reducer"),
        ("--loss-aggregation-divisor", "8192, read on the route reducer"),
    ]
    assert [finding.text for finding in report.reading] == [
        "not known here, and not judged: what --actor-num-gpus-per-node will be given"
    ]
    assert read_line(["bash", make()], None).script == folder / "train.py"  # above the script, wherever doctor is started


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({"start": ""}, "--loss-aggregation: dropped without a word by the stock launcher of slime", id="stock"),
        (
            {"ours": f"{OURS} --calculate-per-token-loss"},
            "rule: loss_aggregation=constant does not go with calculate_per_token_loss=True",
        ),
        ({"ours": OURS.replace("--loss-aggregation c", "--loss_aggregation c")}, "--loss_aggregation: dropped"),
    ],
)
def test_an_unsound_launch_script_is_told(checkout, change, expected):
    """FB-15: a script is judged by the rules that a line is judged by."""
    assert problems(judge_launch(["bash", checkout[1](**change)], None))[0].startswith(expected)


def test_flags_that_a_missing_backslash_cuts_off_are_told(checkout):
    """One of slime's own scripts has it: bash says `--swiglu: command not found` after the training was started without them."""
    for cut in (
        "   --colocate\n   ${GRPO_ARGS[@]}",
        "   --colocate \\\n   # a comment\n   ${GRPO_ARGS[@]}",
        "   --colocate \\ \n   ${GRPO_ARGS[@]}",
    ):
        text = LAUNCH.replace("   ${GRPO_ARGS[@]}", cut)
        found = problems(judge_launch(["bash", checkout[1](text)], None))
        assert found[0].startswith("script: --advantage-estimator and 7 words after it are alone on line"), found


SCRIPTS = [path for path in sorted((ROOT / "examples").rglob("*.sh")) if path.parent.name in (*HOST_NAMES, *DOOR_NAMES)]


@pytest.mark.parametrize("path", [path.relative_to(ROOT).as_posix() for path in SCRIPTS])
def test_the_examples_are_sound_scripts(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    report = judge_launch(["bash", path, "--seed", "1"], None)
    assert problems(report) == [] and report.unread == () and report.flags
    assert report.title.startswith(Path(path).parent.name)


def test_a_whole_line_in_quotes_is_read_as_the_shell_would():
    """As launchers print it: EXEC: export A=1 && ray job submit ... -- python3 ..."""
    line = "export A=x && ray job submit --runtime-env-json='{\"a\": 1}' -- python3 /root/miles/train.py --load /m/$A --seed 1"
    read = read_line([line], None)
    assert (read.host, read.flags) == ("miles", (("--load", ("/m/x",)), ("--seed", ("1",))))
    out_of_a_script = read_line(["python3 slime/train.py ${MODEL_ARGS[@]} --seed 1"], None)
    assert out_of_a_script.unread == ("${MODEL_ARGS[@]}",)


@pytest.mark.parametrize(
    ("program", "name", "text", "message"),
    [
        ("bash", "run.sh", "python3 train.py --a\npython3 train_async.py --b", "starts a training on the lines 1 and 2: give one"),
        (
            "bash",
            "run.sh",
            "python3 tools/convert.py\nbash other.sh",
            "starts no training .* here, it runs convert.py, other.sh: give the script that does, as in -- bash other.sh",
        ),
        ("bash", "run.sh", "echo hello", "starts no training that can be seen here: give the line that does"),
        ("bash", "gone.sh", None, r"gone\.sh is no file in .*: start from the folder that the launch starts from"),
        # scripts/run_*.py of miles: what they start is decided while they run.
        (
            *("python", "run_tiny.py", "import miles.utils.x as U\nU.execute_train(train_args='--a')"),
            r"puts its launch line together while it runs: give the line that it prints \(EXEC: ",
        ),
    ],
)
def test_a_script_without_one_training_is_refused(tmp_path, monkeypatch, program, name, text, message):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_line([program, name], None)


@pytest.mark.parametrize(
    "edit",
    ["sed 's/(a+)+$/b/'", "sed 's/a/\\1/'", "sed -n s/a/b/", "sed 's/a/b/;s/b/c/'", "sed 's/(/b/'", f"sed 's/{'a|' * 9}/b/'"],
)
def test_an_edit_that_may_be_another_one_is_not_made(tmp_path, edit):
    script = tmp_path / "run.sh"
    script.write_text(f"N=$(echo aaaa | {edit})\nshow $N\n")
    (line,) = (line.words for line in ScriptReader(script).lines() if line.words[0] == "show")
    assert is_unread(line[1]), line


def test_each_training_of_a_script_is_judged(checkout, capsys):
    """Trainings that differ in nothing that is judged share a table."""
    script = checkout[1]("python3 train.py --a 1\npython3 train.py --a 2\npython3 train.py --loss-type sft_loss\n")
    assert main(["doctor", "--launch-only", "--", "bash", script]) == 0
    out = capsys.readouterr().out
    places = [line.rpartition(", from ")[2] for line in out.splitlines() if line.startswith("launch line: ")]
    assert places == [f"line {number} of the script" for number in (1, 2, 3)], out
    verdicts = [line for line in out.splitlines() if line.startswith("doctor: ")]
    assert len(verdicts) == 2 and "do not depend on the layout" in verdicts[0] and "given answers" in verdicts[1], out
    main(["doctor", "--json", "--launch-only", "--", "bash", script])
    found = json.loads(capsys.readouterr().out)
    assert found["launch"]["title"].endswith("line 1 of the script") and len(found["further"]) == 2


def test_a_script_that_another_one_starts_is_read(checkout, tmp_path):
    """It has the exported variables alone, and its own training counts where the first script has none."""
    inner = checkout[1]('python3 train.py --lr "$1" --seed "$SEED" --name "$NAME" --kl-coef "$KL"')
    outer = tmp_path / "outer.sh"
    outer.write_text(f'export SEED=7\nNAME=mine\nKL=0.5 exec bash "$(dirname "$0")/{Path(inner).relative_to(tmp_path)}" 3e-4\n')
    line = read_line(["bash", str(outer)], None)
    assert dict(line.flags) == {"--lr": ("3e-4",), "--seed": ("7",), "--name": ("$NAME",), "--kl-coef": ("0.5",)}
    assert line.read_from.place.startswith("line ") and line.read_from.place.endswith(Path(inner).name)
    outer.write_text(f"bash {inner}\npython3 train.py --lr 1 --rollout-batch-size 2 --custom-megatron-init-path a.b\n")
    assert dict(read_line(["bash", str(outer)], "slime").flags)["--lr"] == ("1",)


def test_an_unquoted_variable_with_something_unread_is_split(checkout):
    script = checkout[1]('ARGS="\\n  --lr ${LR:?set} \\\n --seed 7"\npython3 train.py $ARGS')
    line = read_line(["bash", script], "slime")
    assert dict(line.flags)["--seed"] == ("7",)


def test_a_script_of_python_is_read_by_its_strings(checkout, tmp_path):
    """As if each branch had run; what names another string is read there, and what is put in is not known."""
    script = tmp_path / "scripts" / "run_mine.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        "import miles.utils as U\nargs = f'--lr {rate} --use-kl-loss --kl-loss-coef 0.1 '\nif x:\n    args += '--seed 7 '\n"
        "U.run('hf download --local-dir x')\nall_args = f'{args} {U.wandb_args(3)}'\nU.execute_train(train_args=all_args)\n"
    )
    line = read_line(["python", str(script)], None)
    assert line.host == "miles" and line.is_composed and line.unread == ("${wandb_args}",)
    given = {"--lr": ("${rate}",), "--use-kl-loss": (), "--kl-loss-coef": ("0.1",), "--seed": ("7",)}
    assert dict(line.flags) == given
    said = "do not depend on the layout, as far as they were judged; see the notes"
    assert judge_launch(["python", str(script)], None).unjudged.endswith(said)


def test_settings_of_a_script_of_python_leave_branches_out(tmp_path):
    """By their defaults, by what is typed, and not where something else of the script sets them."""
    script = tmp_path / "run_mine.py"
    script.write_text(
        "import miles.utils as U\nclass Args:\n    kl: bool = True\n    mode: str = 'a'\n    other: bool = False\n"
        "def run(args):\n    args.other = f()\n    e = ''\n    if args.kl and not args.mode == 'b':\n        e += '--a 1 '\n"
        "    if args.mode != 'a' or args.other:\n        e += '--b 1 '\n    if not args.kl:\n        e += '--c 1 '\n"
        "    w = U.get_default_wandb_args(3)\n    gone = ''\n    U.execute_train(f'{e}')\n    all = f'{e} {w} {gone} --d 1'\n"
        "run(Args())\n"
    )

    def flags(*typed):
        line = read_line(["python", str(script), *typed], None)
        assert not line.unread
        return "".join(flag.strip("-") for flag, _ in line.flags)

    assert [flags(), flags("--no-kl"), flags("--mode", "b"), flags("--mode=b", "--kl")] == ["abd", "bcd", "bd", "bd"]


def test_what_no_check_reads_is_not_told(tmp_path):
    script = tmp_path / "run_mine.py"
    script.write_text(
        "import miles.utils as U\nU.execute_train(a)\n"
        "a = f'--lr {x} --save {y} --load {y} --min-lr {y} --context-parallel-size {z} --num-experts {n} --seed 1'\n"
    )
    (row,) = [row for row in judge_launch(["python", str(script)], None).reading if row.subject == "unread"]
    assert row.text == "not known here, and not judged: what --context-parallel-size, --num-experts will be given"
    script.write_text("import miles.utils as U\nU.execute_train(a)\na = f'--lr {x} --num-rollout {y} --moe-layer-freq {z} --a 1'\n")
    assert [row for row in judge_launch(["python", str(script)], None).reading if row.subject == "unread"] == []


def test_the_last_line_names_what_a_check_reads_and_was_not_read(tmp_path, capsys):
    script = tmp_path / "run_mine.py"
    ours = f"{INIT_LINE} {REDUCER_LINE} --custom-config-path {tmp_path / 'ours.yaml'}"
    (tmp_path / "ours.yaml").write_text("loss_aggregation: sample_mean\n")
    sizes = "--context-parallel-size {z} --lr {x} --tensor-model-parallel-size"
    script.write_text(f"import miles.utils as U\nU.execute_train(a)\na = f'{sizes} {{z}} {ours}'\n")

    def last_line(*words):
        assert main(["doctor", "--launch-only", "--host", "miles", "--", *words]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    both = "--context-parallel-size, --tensor-model-parallel-size"
    expected = f"doctor: no problems in what could be read; not read: {both} (give them behind --extra-args)"
    assert last_line("python", str(script)) == expected
    script.write_text(f"import miles.utils as U\nU.execute_train(a)\na = f'{sizes} 1 {ours}'\n")
    assert last_line("python", str(script)).endswith("; not read: --context-parallel-size (give it behind --extra-args)")
    line = f"python train.py --advantage-estimator grpo --context-parallel-size $CP --lr $LR {ours}"
    (tmp_path / "run.sh").write_text(f"source not_here.sh\n{line}\n")
    assert last_line("bash", str(tmp_path / "run.sh")).endswith("in what could be read; not read: --context-parallel-size")


def test_what_no_check_reads_leaves_no_check_out():
    """Whole steps and the default of dropout are judged of a line that was read to its end."""

    def said(*more):
        sizes = ["--rollout-batch-size", "25", "--n-samples-per-prompt", "4", "--global-batch-size", "64"]
        report = judge_launch(["python", "train.py", *sizes, *more], "miles")
        return {row.subject for row in report.findings} & {"mini-batch", "--hidden-dropout", "unread"}

    assert said() == said("--num-rollout", "$X", "--rotary-base", "$BASE") == {"mini-batch", "--hidden-dropout"}
    assert said("--kl-loss-coef", "$X") == said("--custom-rm-path", "$RM") == {"unread"}


# What a person adds to a script of Python, in its own default or on its line, is judged too; `--lr 3` is not ours.
COMPOSED = (
    "import miles.utils as U\nclass Args:\n    {}\n    extra_args: str = '{}'\nU.execute_train(f'--a 1 {{args.extra_args}}', {})\n"
)


OF_OURS = "--custom-pg-loss-reducer-function-path megatron_rl.reducers.get_pg_loss_reducer --loss-aggregation token_mean"


def test_what_is_added_to_a_script_of_python_is_judged(tmp_path):
    """Also our loss: the settings of a file reach the parser, and flags of ours do not."""
    script = tmp_path / "run_mine.py"
    script.write_text(COMPOSED.format("", "", "") + "b = f'--b 1 {args.extra_args}'\n")
    plain = read_line(["python", str(script), "--extra-args", "--lr 3"], None)
    assert dict(plain.flags)["--lr"] == ("3",) and "${extra_args}" not in plain.words
    for words in (["--extra-args", OF_OURS], [f"--extra-args={OF_OURS}"]):
        report = judge_launch(["python", str(script), *words], None)
        assert report.route == Route.REDUCER and "by the stock launcher of miles" in problems(report)[0]
    script.write_text(COMPOSED.format("", OF_OURS, "") + "b = f'--b 1 {args.extra_args}'\n")
    assert judge_launch(["python", str(script)], None).route == Route.REDUCER
    (tmp_path / "ours.yaml").write_text("loss_aggregation: sample_mean\n")
    reducer = OF_OURS.partition(" --loss")[0]
    filed = f"{reducer} --custom-config-path {tmp_path / 'ours.yaml'} --hidden-dropout 0 --attention-dropout 0"
    report = judge_launch(["python", str(script), "--extra-args", filed], None)
    assert report.unjudged is None and not problems(report) and "sample_mean" in str(report.flags)
    report = judge_launch(["python", str(script), "--extra-args", f"{filed} --advantage-estimator gspo"], None)
    assert not problems(report) or problems(report)[0].endswith("(unless a branch of the script says otherwise)")


@pytest.mark.parametrize(
    ("default", "argument", "experts"),
    [
        pytest.param("megatron_model_type: str = 'tiny'", "megatron_model_type=args.megatron_model_type", ("4",), id="default"),
        pytest.param("pass", "megatron_model_type='tiny'", ("4",), id="argument"),
        pytest.param("pass", "megatron_model_type=None", None, id="no script of flags"),
        pytest.param("megatron_model_type: str = 'gone'", "", "unread", id="not here"),
        pytest.param("pass", "megatron_model_type=f(x)", "unread", id="computed"),
        pytest.param("megatron_model_type: str = 'tiny'", "megatron_model_type=f(x)", ("4",), id="the default of several"),
        pytest.param("MODEL = 'tiny'", "megatron_model_type=MODEL", ("4",), id="by another name"),
    ],
)
def test_the_flags_of_the_model_are_read_in_its_own_script(tmp_path, default, argument, experts):
    script = tmp_path / "run_mine.py"
    script.write_text(COMPOSED.format(default, "", argument) + "b = '--b 1'\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.py").write_text("def model_args():\n    return '--num-experts 4 '\n")
    line = read_line(["python", str(script)], None)
    is_unread = line.unread == ("${MEGATRON_MODEL_TYPE_ARGS}",)
    assert ("unread" if is_unread else dict(line.flags).get("--num-experts")) == experts
    notes = [row.text for row in judge_launch(["python", str(script)], None).reading if row.subject == "unread"]
    assert [note.endswith("; the line that the script prints (EXEC: ...) has them") for note in notes] == [True] * is_unread


@pytest.mark.parametrize(
    ("command", "experts", "unread"),
    [
        pytest.param('$(python3 "${HERE}/../a/b/c/model_args_utils.py" "tiny")', ("4",), (), id="here"),
        pytest.param('$(LAYERS=3 python3 "${HERE}/../a/b/c/model_args_utils.py" tiny)', ("4",), (), id="with a setting"),
        pytest.param('$(python3 "${HERE}/../a/b/c/model_args_utils.py" "gone")', None, ("${MODEL_ARGS[@]}",), id="not here"),
        pytest.param('$(python3 "${HERE}/../a/b/c/other.py" "tiny")', None, ("${MODEL_ARGS[@]}",), id="another command"),
    ],
)
def test_the_flags_of_the_model_are_read_where_a_script_asks_for_them(checkout, tmp_path, command, experts, unread):
    """As the shell scripts of miles do it: `read -ra` of what the command prints."""
    models = tmp_path / "scripts" / "models"
    models.mkdir(exist_ok=True)
    (models / "tiny.py").write_text("def model_args(n=None):\n    return '--num-experts 4 ' f'--num-layers {n} '\n")
    script = checkout[1](
        f'HERE="$(cd -- "$(dirname -- "$0")" && pwd)"\nLINE="{command}" || exit 1\nread -ra MODEL_ARGS <<< "${{LINE}}"\n'
        "python3 train.py ${MODEL_ARGS[@]} --lr 1"
    )
    line = read_line(["bash", script], "miles")
    assert (dict(line.flags).get("--num-experts"), line.unread, dict(line.flags)["--lr"]) == (experts, unread, ("1",))


def test_an_evaluation_behind_the_training_is_no_second_training(checkout):
    script = checkout[1]("uv run examples/run_grpo.py a=1\nuv run examples/run_eval.py b=2")
    (line, _) = training_line([*ScriptReader(Path(script)).lines()], "run.sh")
    assert line.words[-1] == "a=1"


def test_the_scripts_own_python_path_is_looked_at(checkout, tmp_path):
    (tmp_path / "plug").mkdir()
    (tmp_path / "plug" / "my_reward_model.py").write_text("def score(): ...\n")
    script = checkout[1](
        'export PYTHONPATH="$PYTHONPATH:$(dirname "$0")/../plug"\npython3 train.py --custom-rm-path my_reward_model.score'
    )
    (finding,) = judge_launch(["bash", script], None).paths
    assert finding.text.startswith("my_reward_model.score is there: ") and finding.status == OK


def test_scripts_that_source_each_other_end(tmp_path):
    (tmp_path / "a.sh").write_text("source b.sh\nshow $A\n")
    (tmp_path / "b.sh").write_text("A=1\nsource a.sh\n")
    lines = list(ScriptReader(tmp_path / "a.sh").lines())
    assert lines and {line.words for line in lines} <= {("show", "1"), ("show", "$A")}


LINE = "python3 slime/train.py --loss-aggregation constant --loss-aggregation-divisor 8192"
HOSTILE = {
    "doubled 40 times": ("A=x\n" + "A=$A$A\n" * 40 + f"{LINE} --x $A", "become more than 16777216"),
    "an array doubled": (
        "A=(x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40 + f'{LINE} "${{A[@]}}"',
        "become more than 16777216",
    ),
    "commands in commands": ("A=" + "$(" * 3000 + ")" * 3000 + f"\n{LINE}", "is nested too deeply to be read"),
    "branches in branches": ("if true; then " * 2000 + LINE + "; fi" * 2000, "is nested too deeply to be read"),
    "itself, ten times": ("source run.sh\n" * 10 + LINE, "reads more than 200 scripts"),
    "5 MB": ("# " + "x" * 5_000_000 + f"\n{LINE}", "has more than 4194304 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_script_that_would_take_all_time_or_memory_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    text, message = HOSTILE[name]
    Path("run.sh").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_line(["bash", "run.sh"], None)


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "WANDB_KEY", "HF_TOKEN", "MY_SECRET", "DB_PASSWORD"])
def test_a_secret_of_the_environment_is_not_put_into_the_words(tmp_path, monkeypatch, name):
    """A message shows a word that is wrong; a launch script has keys, and whoever asks for help pastes what doctor says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, "0123456789abcdef-secret")
    monkeypatch.setenv("INPUT_KEY", "prompt")
    Path("run.sh").write_text(f"K=${name}\n{LINE} --custom-config-path ${name} --wandb-key $K --input-key $INPUT_KEY\n")
    report = judge_launch(["bash", "run.sh"], None)
    assert "secret" not in as_text([], [report])
    assert read_line(["bash", "run.sh"], None).flags[-1] == ("--input-key", ("prompt",))


def test_what_a_file_holds_reaches_the_terminal_without_its_control_characters(tmp_path, monkeypatch):
    """A key of YAML or a word of the line that clears the screen and says that all is well."""
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text('"loss_aggregation\\e[2J\\ndoctor: no problems": constant\nloss_aggregation: "\\e[2Jx"\n')
    words = [*LINE.split(), "--custom-config-path", "c.yaml", "--policy-loss", "\x1b[31mgspo"]
    text = as_text([], [judge_launch(words, None)])
    assert "\\x1b" in text and all(char.isprintable() or char == "\n" for char in text)
    assert len([line for line in text.splitlines() if line.startswith("doctor: ")]) == 1


def test_an_error_is_a_line_whatever_a_script_puts_into_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text("python3 'tools/a\ndoctor: no problems \x1b[2J.py'\n")
    assert main(["doctor", "--launch-only", "--", "bash", "run.sh"]) == 2
    error = capsys.readouterr().err
    assert "it runs a\\ndoctor: no problems \\x1b[2J.py" in error and error.count("\n") == 1


def test_the_hosts_of_the_option_are_all_hosts():
    """The names need no torch; each names a file with an object of that name, and the last host recognises any options."""
    assert HOST_NAMES == tuple(host.name for host in known_hosts())
    assert set(ROLLOUT_HOST_NAMES) == {host.name for host in known_hosts() if Route.REDUCER in host.routes}
    assert known_hosts()[-1].recognises({})


# Words behind a script


TYPED = "trainer.total_epochs=3"
TRAINS = "python -m verl.trainer.main_ppo trainer.nnodes=1"


@pytest.mark.parametrize(
    ("text", "words", "lost"),
    [
        (TRAINS, [TYPED], [TYPED]),
        (f"log() {{ echo $@; }}\nlog start\n{TRAINS}", [TYPED], [TYPED]),  # a function has its own
        (f"N=$1\n{TRAINS} trainer.n_gpus_per_node=$N", ["8", TYPED], [TYPED]),
        (f"{TRAINS} # $@", [TYPED], [TYPED]),
        (f'{TRAINS} "$@"', [TYPED], []),
        (f"{TRAINS} ${{@:2}}", ["8", TYPED], []),
        (f'ARGS=("$@")\n{TRAINS} "${{ARGS[@]}}"', [TYPED], []),
        (f'while [ $# -gt 0 ]; do A="$A $1"; shift; done\n{TRAINS} $A', [TYPED], []),
        (f'for ONE; do A="$A $ONE"; done\n{TRAINS} $A', [TYPED], []),
        (f'main() {{ {TRAINS} "$@"; }}\nmain "$@"', [TYPED], []),
        (f"cat <<END\n$1\nEND\n{TRAINS}", [TYPED], []),
    ],
)
def test_words_behind_a_script_that_takes_none_are_a_problem(text, words, lost, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"{text}\n")
    report = judge_launch(["bash", str(script), *words], None)
    where = report.title.rpartition("from ")[2]
    remedy = f'nothing in the script takes what is behind it; put "$@" behind the words of {where}, or edit them'
    assert problems(report) == [f"script: no effect of {word}: {remedy}" for word in lost]


def test_words_that_a_script_does_not_hand_on_are_a_problem(tmp_path):
    (tmp_path / "inner.sh").write_text(f"{TRAINS}\n")
    script = tmp_path / "run.sh"
    for handed, lost in (('"$@"', [TYPED]), ("", [TYPED]), ("fixed", [])):  # a word of the script itself is not the user's
        script.write_text(f"bash inner.sh {handed}\n")
        words = [TYPED] if lost else []
        report = judge_launch(["bash", str(script), *words], None)
        assert [one.text.split(":")[0] for one in report.findings if one.subject == "script"] == [f"no effect of {a}" for a in lost]


def test_a_sourced_file_that_is_not_here_may_take_them(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"source absent.sh\n{TRAINS}\n")
    report = judge_launch(["bash", str(script), TYPED], None)
    assert [one.status for one in report.findings if one.subject == "script"] == ["note"]
