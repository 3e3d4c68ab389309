"""The pages as a whole: links lead somewhere, names are somebody's, and the site says what the raw pages say.

Outputs are in tests/test_pages.py, code in tests/test_docs_code.py. Nothing is fetched from a network.
"""

from __future__ import annotations

import itertools
import json
import os
import pkgutil
import posixpath
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import markdown_pages
import pytest
from command_lines import OF_BOTH_HOSTS, flags_of_hosts, flags_of_torchrun, our_flags
from host_harness import roots_by_environment
from markdown_pages import ROOT, spans, text_of

import megatron_rl
from megatron_rl.declare import policy_loss_names
from megatron_rl.hosts import roll, skyrl
from megatron_rl.hosts.choice import CORRECTION_SETTINGS
from megatron_rl.hosts.heads import nemo_rl as nemo_rl_head
from megatron_rl.hosts.megatron_lm import FILTERS_OFF, MODE
from megatron_rl.validation import flag_of
from megatron_rl.weights import loss_aggregation_names

PAGES = markdown_pages.pages()
# The changelog names flags and files that went.
OF_TODAY = [page for page in PAGES if page != "CHANGELOG.md"]
DOCS = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]

# Links


@cache
def files_of_git() -> frozenset[str]:
    """What git tracks or would track."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("which files belong to the repository is known in a git checkout alone")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return frozenset(subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout.splitlines())


def dead_links(page: str, links: list[str]) -> list[str]:
    dead = []
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        is_known = target in files_of_git() or any(name.startswith(f"{target}/") for name in files_of_git())
        has_anchor = not anchor or (target.endswith(".md") and is_known and anchor in markdown_pages.anchors(target))
        if not (is_known and has_anchor and (ROOT / target).exists()):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_image_leads_to_a_file_of_the_repository_and_to_a_heading_of_it(page):
    """A heading that GitHub and mkdocs call by two names is none: its link would work in one of the two alone."""
    assert dead_links(page, markdown_pages.links(page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_no_row_of_a_table_is_torn(page):
    """Catches a generated cell with a line break: what is behind it becomes a row of its own."""
    lines = [*markdown_pages.prose(page).splitlines(), ""]
    behind = [line for row, line in itertools.pairwise(lines) if row.startswith("|") and line[:1] not in ("|", "")]
    assert behind == [] and [line for line in lines if line.startswith("|") and not line.endswith("|")] == []


# Names

# Whose they are, in words.
FLAGS_OF_OTHERS = {
    "ncu": "--metrics --kernel-name --launch-skip --launch-count --kill",
    "pytest-xdist, and our own plugin": "--dist --require",
    "parameters of example losses": "--cap --ratio-cap --scale",
    "NeMo-RL; ROLL; hydra; uv": "--config --config_path --config_name --config-name --extra --isolated",
    "train_rl.py": "--grpo-clamp-eps-lower --grpo-clamp-eps-upper --grpo-entropy-term-weight --grpo-kl-beta --grpo-iterations "
    "--rl-default-temperature --rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef "
    + " ".join(map(flag_of, (*FILTERS_OFF, MODE))),
    "Megatron-LM": "--fp8-param-gather --recompute-granularity --mtp-loss-scaling-factor --mtp-num-layers "
    "--no-check-for-nan-in-loss-and-grad --use-megatron-fsdp --use-torch-fsdp2 --transformer-impl "
    "--dynamic-context-parallel --hybrid-context-parallel",
    "launch scripts of miles in Python, which hand its value on": "--extra-args",
    "OpenRLHF and prime-rl, up to the first dot; miles and slime": "--actor --trainer --algo --opsm-delta",
    "flags that other frameworks had, and vLLM's": "--pg-loss-divisor --quantization",
    "pip; hf": "--no-deps --no-index --local-dir",
    "TRL": "--loss_type --epsilon_high",
    ".ci/gpu_session.py": "--dry-run --seconds --stages",
    "srun": "--kill-on-bad-exit",
}


@pytest.mark.parametrize("page", OF_TODAY)
def test_every_flag_of_a_page_is_somebodys(page):
    """Catches a flag of ours that was renamed: no parser has it, and it is nobody else's."""
    known = our_flags() | flags_of_hosts() | flags_of_torchrun() | set(" ".join(FLAGS_OF_OTHERS.values()).split())
    named = set(re.findall(r"(?<![\w/-])--[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*", text_of(page)))
    assert sorted(named - known) == []


@pytest.mark.host
def test_the_flags_that_both_hosts_have_are_theirs():
    for host, root in roots_by_environment().items():
        source = (Path(root) / host / "utils" / "arguments.py").read_text(encoding="utf-8")
        assert [flag for flag in OF_BOTH_HOSTS if f'"{flag}"' not in source] == []


def resolves(dotted: str) -> bool:
    """megatron_rl.module.name"""
    with suppress(ImportError, AttributeError):
        pkgutil.resolve_name(dotted)
        return True
    return False


# Files of checkouts that are not this one, and of the reader.
ELSEWHERE = tuple(
    "megatron/rl/ slime/ miles/ runs/ /path/to/ path/to/ examples/run_grpo.py examples/start_rlvr_pipeline.py "
    "scripts/run_qwen3_4b.py".split()
)


@pytest.mark.parametrize("page", OF_TODAY)
def test_every_module_and_path_of_a_page_exists(page):
    """In code, from the root of the repository, from megatron_rl/ or from the page; test_x.py stands in tests/."""
    words = [word.rstrip(",;") for text in [*spans(page), *(f.text for f in markdown_pages.fences(page))] for word in text.split()]
    dotted = {found[0].rstrip(".") for word in words if (found := re.match(r"megatron_rl(\.(?!yaml)\w+)+", word))}
    in_verl = {f"megatron_rl.{loss}.{aggregation}" for loss in policy_loss_names() for aggregation in loss_aggregation_names()}
    in_roll = {roll.WORKER}  # importable beside ROLL alone; test_roll.py starts it
    in_skyrl = {f"{skyrl.PREFIX}{name}" for name in CORRECTION_SETTINGS} | {skyrl.LOG_PROBS}
    in_nemo_rl = {nemo_rl_head.OUR_WORKER}  # importable beside NeMo-RL alone
    here = dotted - in_verl - in_roll - in_skyrl - in_nemo_rl
    assert sorted(name for name in here if not resolves(name)) == []
    paths = {word for word in words if re.fullmatch(r"[\w./-]*/[\w.-]+\.(py|sh|md)|test_\w+\.py", word)}
    homes = (ROOT, ROOT / "megatron_rl", ROOT / "tests", (ROOT / page).parent)
    missing = [path for path in paths if not path.startswith(ELSEWHERE) and not any((home / path).exists() for home in homes)]
    assert sorted(missing) == []


def test_dir_lists_public_names_alone():
    assert dir(megatron_rl) == sorted([*megatron_rl.__all__, "__version__"])


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if find_spec("mkdocs") is None or find_spec("material") is None:
        is_ours = Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()
        (pytest.fail if is_ours else pytest.skip)("mkdocs-material is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_builds_without_a_warning_and_fetches_nothing(site):
    """Catches a font, a script or a picture that a reader without a network waits for."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(DOCS)
    for page in pages:
        html = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="?(?:https?:)?//[^>]*>|<link[^>]*href="?(?:https?:)?//[^>]*>', html)
        assert fetched == [], page


def test_the_words_of_a_search_are_those_of_the_index(site):
    """A query is not trimmed, so a stop that stays in a word finds nothing: "Dr. GRPO" was "Missing: dr."."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    words = [word.lower() for word in re.split(index["config"]["separator"], "Dr. GRPO") if word]
    assert words == ["dr", "grpo"]
    titles = {page["location"]: page["title"] for page in index["docs"]}
    assert titles["losses.html#dr-grpo-dapo"] == "Dr. GRPO, DAPO"


def test_links_within_the_site_lead_to_files_of_it(site):
    """Those that leave docs/ too: mkdocs itself does not look at what a hook has written."""
    for page in site.rglob("*.html"):
        for target in re.findall(r'(?:href|src)="(?!https:|data:)([^"#?]+)', page.read_text(encoding="utf-8")):
            path = site / target[1:] if target.startswith("/") else page.parent / target
            assert path.exists(), f"{page.relative_to(site)}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_no_word_in_angle_brackets_is_lost_as_a_tag(page):
    """`<name>` outside code is HTML to both readers, and shown by neither. Anchors are wanted."""
    assert re.findall(r"<(?!a id=|/a>|https://)[A-Za-z/][^>]*>", re.sub(r"`[^`]*`", "", markdown_pages.prose(page))) == []
