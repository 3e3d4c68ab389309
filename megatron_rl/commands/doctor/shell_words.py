"""Cuts the text of a bash script into simple commands of raw words, with their lines and whether a branch decides about them.

It must never run nor expand anything: quotes and `$` stay in the words as they were written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

OPENING, CLOSING = ("if", "case", "for", "while", "until", "select"), ("fi", "esac", "done")
# Words that stand before a command and are none.
RESERVED = ("if", "while", "until", "then", "elif", "else", "do", "}", "!", "time", *CLOSING)
ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
HEREDOC = re.compile(r"<<(-?)[ \t]*(['\"]?)([\w.-]+)\2")
REDIRECTION = re.compile(r"\d*(?:<<<|>>|>&|<&|&>>|&>|>\||<>|<|>)")
SEPARATORS = ("&&", "||", ";;", ";&", "|&", "|", "&", ";", "(", ")", "\n")


@dataclass(slots=True)
class Command:
    """words: raw. array: the raw elements of `NAME=( ... )`, whose first word is then `NAME=` or `NAME+=`."""

    line: int
    is_in_branch: bool
    is_in_function: bool
    words: list[str] = field(default_factory=list)
    array: list[str] | None = None


def commands_of(text: str) -> Iterator[Command]:
    """In the order of the text, which is not the order of execution where a script loops or calls functions."""
    depth, follows_condition, before = 0, False, ""
    braces: list[bool] = []  # whether the brace opened a function
    command = Command(1, False, False)
    for kind, value, line in _tokens(text):
        if kind == "separator":
            if command.words:
                yield command
            elif value == "\n":
                continue
            follows_condition, before = value in ("&&", "||"), before + value if value in "()" else ""
            command = Command(line, depth > 0 or follows_condition, any(braces))
        elif kind == "array" and command.words:
            command.array = value
        elif value == "{" and (not command.words or command.words[0] == "function"):
            braces.append(before == "()" or bool(command.words))
            command.words.clear()
        elif kind == "word":
            if not command.words:
                depth += (value in OPENING) - (value in CLOSING)
                command.line, command.is_in_branch, command.is_in_function = line, depth > 0 or follows_condition, any(braces)
                if value == "}" and braces:
                    braces.pop()
                if value in RESERVED:
                    continue
            command.words.append(value)
            before = ""
    if command.words:
        yield command


def _tokens(text: str) -> Iterator[tuple[str, object, int]]:
    """("word", raw, line), ("array", [raw ...], line) after the word NAME=, ("separator", text, line)."""
    position, line = 0, 1
    heredocs: list[tuple[bool, str]] = []
    while position < len(text):
        char = text[position]
        if char == "\n" and heredocs:
            yield "separator", "\n", line
            end = _after_heredocs(text, position + 1, heredocs)
            line, position = line + text.count("\n", position, end), end
            heredocs.clear()
        elif char in " \t\r" or text.startswith("\\\n", position):
            width = 1 if char in " \t\r" else 2
            line, position = line + text.count("\n", position, position + width), position + width
        elif char == "#":
            position = _end_of_line(text, position)
        elif (match := HEREDOC.match(text, position)) and not text.startswith("<<<", position):
            heredocs.append((bool(match[1]), match[3]))
            position = match.end()
        elif match := REDIRECTION.match(text, position):
            position = _after_blanks(text, match.end())
            end = word_end(text, position)  # where to, or what is read: no word of the command
            line, position = line + text.count("\n", position, end), end
        elif separator := next((s for s in SEPARATORS if text.startswith(s, position)), None):
            yield "separator", separator, line
            line, position = line + separator.count("\n"), position + len(separator)
        else:
            end = word_end(text, position)
            raw = text[position:end]
            yield "word", raw.replace("\\\n", ""), line
            line, position = line + raw.count("\n"), end
            if ARRAY.fullmatch(raw) and text.startswith("(", position):
                end = closing(text, position, "(", ")")
                yield "array", array_words(text[position + 1 : end - 1]), line
                line, position = line + text.count("\n", position, end), end


def array_words(text: str) -> list[str]:
    """The raw elements between the brackets of an array."""
    return [value for kind, value, _ in _tokens(text) if kind == "word"]


def word_end(text: str, position: int) -> int:
    """Where the word that begins here ends; quotes, `$( )`, `${ }` and backticks belong to it with all they hold."""
    while position < len(text):
        char = text[position]
        if char in " \t\r\n;&|<>()":
            return position
        position = after_piece(text, position)
    return position


def after_piece(text: str, position: int) -> int:
    """Behind a quoted text, an expansion, an escaped or a plain character."""
    char, two = text[position], text[position : position + 2]
    if char == "\\":
        return min(position + 2, len(text))
    if two == "$'":
        return _after_quote(text, position + 1, escapes=True)
    if char in "'\"`":
        return _after_quote(text, position, escapes=char != "'")
    if two == "$(":
        return closing(text, position + 1, "(", ")")
    if two == "${":
        return closing(text, position + 1, "{", "}")
    return position + 1


def closing(text: str, position: int, opens: str, closes: str) -> int:
    """Behind the bracket that closes the one at `position`; the end of the text where none does."""
    depth = 0
    while position < len(text):
        char = text[position]
        if char == "#" and opens == "(" and text[position - 1] in " \t\n(":
            position = _end_of_line(text, position)
            continue
        depth += (char == opens) - (char == closes)
        if char == closes and depth == 0:
            return position + 1
        position = position + 1 if char in (opens, closes) else after_piece(text, position)
    return position


def _after_quote(text: str, position: int, *, escapes: bool) -> int:
    quote, position = text[position], position + 1
    while position < len(text) and text[position] != quote:
        if escapes and text[position] == "\\":
            position += 2
        elif quote == '"' and text[position] in "$`":
            position = after_piece(text, position)
        else:
            position += 1
    return min(position + 1, len(text))


def _after_heredocs(text: str, position: int, heredocs: list[tuple[bool, str]]) -> int:
    for strips_tabs, word in heredocs:
        while position < len(text):
            end = _end_of_line(text, position)
            found = text[position:end].lstrip("\t") if strips_tabs else text[position:end]
            position = min(end + 1, len(text))
            if found == word:
                break
    return position


def _end_of_line(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _after_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t":
        position += 1
    return position
