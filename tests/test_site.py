"""The site in a real browser, read from a disk: no page is too wide, every picture is there, search finds pages. Needs Chromium."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from markdown_pages import ROOT
from test_docs import site  # noqa: F401

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: no chromium, chromium-browser or google-chrome in PATH"),
]
PAGES = sorted(path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES = [page.replace("README.html", "index.html") for page in PAGES]
WIDTHS = (1400, 390)

# Each page in a frame of that width: what is cut or missing, by page.
LOOK = """
<body><script>
const found = {}, width = WIDTH;
async function look(page) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 2000px; border: 0`;
  frame.src = page;
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  const shown = frame.contentDocument, all = selector => [...shown.querySelectorAll(selector)];
  const style = e => frame.contentWindow.getComputedStyle(e).overflowX;
  const scrolls = e => { for (; e; e = e.parentElement) if (/auto|scroll/.test(style(e))) return true; };
  const text = elements => elements.map(e => e.textContent.slice(0, 60));
  found[page] = {
    formulas: all("math").length,
    problems: {
      "lies beside the page": text(all(".md-content math, .md-content table")
        .filter(e => e.getBoundingClientRect().right > width + 1 && !scrolls(e))),
      "no picture": [...shown.images].filter(e => !e.naturalWidth).map(e => e.src),
      "the page scrolls sideways": shown.documentElement.scrollWidth > width ? [page] : [],
    },
  };
  frame.remove();
}
(async () => { for (const page of PAGES) await look(page); document.body.dataset.found = JSON.stringify(found); })();
</script></body>
"""
# Types each word into the search of the page, and notes where the answers lead once they stay the same.
SEARCH = """
<script>addEventListener("load", async () => {
  const field = document.querySelector(".md-search__input"), found = {};
  const pause = time => new Promise(done => setTimeout(done, time));
  const answers = () => [...document.querySelectorAll(".md-search-result__link")].map(e => e.getAttribute("href"));
  await pause(500);
  field.focus();
  for (const word of WORDS) {
    field.value = word;
    field.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
    field.dispatchEvent(new Event("input", {bubbles: true}));
    for (let before; !before || before !== answers().join(); await pause(2000)) before = answers().join();
    found[word] = answers();
  }
  document.body.dataset.found = JSON.stringify(found);
});</script></body>
"""


def shown_by_the_browser(page: Path, profile: Path, *more: str):
    """What the page's script has left in the attribute `data-found` of the body."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--window-size=1500,2000"]
    command = [CHROMIUM, *options, *more, "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = re.search(r'data-found="([^"]*)"', shown.stdout)
    assert found, f"the script of {page.name} did not end: {shown.stderr[-2000:]}"
    return json.loads(html.unescape(found[1]))


@pytest.fixture(scope="module", params=WIDTHS, ids=lambda width: f"{width} pixels")
def found(request, site, tmp_path_factory):  # noqa: F811
    page = site / f"look_{request.param}.html"
    page.write_text(LOOK.replace("WIDTH", str(request.param)).replace("PAGES", json.dumps(PAGES)), encoding="utf-8")
    # A page of a disk may look into the frame of another one only without the browser's guard.
    return shown_by_the_browser(page, tmp_path_factory.mktemp("profile"), "--disable-web-security", "--virtual-time-budget=60000")


def test_nothing_lies_beside_a_page_and_no_picture_is_missing(found):
    assert set(found) == set(PAGES)
    problems = {page: {what: where for what, where in of_page["problems"].items() if where} for page, of_page in found.items()}
    assert {page: of_page for page, of_page in problems.items() if of_page} == {}


def test_formulas_are_drawn_by_the_browser(found):
    formulas = {page: found[page]["formulas"] for page in ("losses.html", "metrics.html", "aggregation.html", "parallelism.html")}
    assert all(number > 5 for number in formulas.values()) and formulas["losses.html"] > 15, formulas


# Of the pages that a word finds, the page with the target is among the first so many.
SEARCHES = [
    ("prompt_mean", "aggregation.html", 3),
    ("GSPO", "losses.html#gspo", 1),
    ("Dr. GRPO", "losses.html#dr-grpo-dapo", 1),
    ("--docs-per-step", "training.html", 10),
    ("kl_new_old", "metrics.html", 2),
    ("install", "index.html#install-and-two-commands", 1),
    ("docker", "index.html#install-and-two-commands", 1),
]


def test_search_works_from_a_disk_and_finds_the_page_to_read_first(site, tmp_path):  # noqa: F811
    page, words = site / "search_all.html", [word for word, *_ in SEARCHES]
    text = (site / "index.html").read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", SEARCH.replace("WORDS", json.dumps(words))), encoding="utf-8")
    answers = shown_by_the_browser(page, tmp_path, "--virtual-time-budget=60000")
    for word, target, place in SEARCHES:
        found = [re.sub(r"\?h=[^#]*", "", address).removeprefix(f"{site.as_uri()}/") for address in answers[word]]
        first = list(dict.fromkeys(address.partition("#")[0] for address in found))[:place]
        assert target in found and target.partition("#")[0] in first, (word, found)
