"""The golden table of refusals: tests/messages.txt. tests/test_pages.py sees a message that changed without it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from refused_calls import REFUSED, message_of, shown

TABLE = Path(__file__).with_name("messages.txt")
# The modules that refuse what a caller hands over.
FRONT_DOORS = ("policy_loss", "ops/log_probs.py", "ops/linear_head.py")
# What is said, and by which test it is seen: it takes a device, a second backward, or a loss that misbehaves.
ELSEWHERE = {
    ", and none is real. If each rank has the logits": "test_losses.py",
    "a second backward through a policy loss": "test_one_read.py",
    "returned a value with a gradient of its own": "test_contracts.py",
    ", one number for each of its inputs; return megatron_rl.LossValue": "test_contracts.py",
    " is not a @triton.jit function": "test_declare.py",
    "token_clip of policy loss ": "test_rank_agreement.py",
    " needs the entropy of each token, and this call has log-probabilities": "test_own.py",
}
ROWS = [
    pytest.param(door, changes, id=f"{door.__name__} {', '.join(f'{k}={shown(v)}' for k, v in changes.items())}"[:100])
    for door, rows in REFUSED.items()
    for changes in rows
]


@pytest.mark.parametrize(("door", "changes"), ROWS)
def test_a_refused_call_names_the_argument(door, changes):
    """FB-40, FB-63, FB-65, FB-74, FB-80, FB-116: no shape is guessed or broadcast, nothing is dropped without a word."""
    _, text = message_of(door, changes)
    names = {"loss_parameters": "parameter", "kind": "importance_correction", "kl_estimator": "KL estimator"}
    flat = {**changes, **changes.get("loss_parameters", {})}
    assert any(name in text or names.get(name, name) in text for name in flat), text


@pytest.mark.parametrize("door", REFUSED, ids=lambda door: door.__name__)
def test_the_same_call_without_a_fault_is_taken(door):
    door()


def constant_words(node: ast.AST) -> list[str]:
    """The parts of a message that no value changes, longest first."""
    parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return sorted(parts, key=len, reverse=True)


def refusals(tree: ast.Module) -> list[str]:
    """The longest constant part of each ConfigError and DataError that is raised with a message of its own."""
    found = []
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
        if is_call and node.exc.func.id in ("ConfigError", "DataError"):
            found += [words for words in constant_words(node.exc)[:1] if len(words) > 8]
    return found


def test_each_refusal_of_a_front_door_has_an_entry(package_trees):
    """Catches a message that nobody has ever seen."""
    table = TABLE.read_text(encoding="utf-8")
    said = [words for path, tree in package_trees.items() if path.startswith(FRONT_DOORS) for words in refusals(tree)]
    assert len(said) > 40
    missing = [words for words in said if words not in table and not any(known in words for known in ELSEWHERE)]
    assert missing == [], "add a call to REFUSED of tests/refused_calls.py, or its test to ELSEWHERE"
