"""Reads the lines of a bash script that start a training, with its variables and arrays put in. It must never run any of it.

What a variable holds is what the script assigns to it, as if each branch had run, or else what this process's environment says. A
word that cannot be expanded so stays as it was written, `$` and all: whoever reads the words can tell.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.commands.doctor.shell_words import Command, after_piece, closing, commands_of

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
ELEMENT = re.compile(r"([A-Za-z_]\w*)\[(.*?)\]\+?=(.*)", re.DOTALL)
DECLARING = ("export", "declare", "local", "readonly", "typeset")
# What sets the variables that it names, from what is known at run time alone.
SETTING = ("read", "mapfile", "readarray", "printf", "for", "select", "getopts")
NAME = re.compile(r"[A-Za-z_]\w*|[@*#?0-9]")
# ${NAME}, ${NAME[@]}, ${NAME[0]}, ${NAME:-default}; the others cut or count, and are left as they are.
BRACED = re.compile(r"(?P<name>[A-Za-z_]\w*|[@*0-9])(?:\[(?P<index>[@*]|\d+)\])?(?:(?P<how>:?[-=+])(?P<other>.*))?", re.DOTALL)
CHANGE_FOLDER = re.compile(r"cd\s+(?:--\s+)?(?P<where>.+?)\s*(?:&?>\s*/dev/null(?:\s+2>&1)?)?\s*(?:&&|;)\s*pwd(?:\s+-P)?")
DIRNAME = re.compile(r"dirname\s+(?:--\s+)?(?P<what>.+)", re.DOTALL)
# The one quoted expression that may become no word at all.
ALL_QUOTED = re.compile(r'"\$(@|\{(@|[A-Za-z_]\w*\[@\])\})"')
OWN_PATH = ("${BASH_SOURCE[0]}", "${BASH_SOURCE}", "$BASH_SOURCE", "$0", "${0}")
SHELLS = ("bash", "sh", "zsh")
# A script that sources itself, or two that source each other.
MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """words: expanded. branches: variables in it that an if, case or loop of the script decides about, as NAME (line n).
    python_path: PYTHONPATH as the script has set it by then."""

    words: tuple[str, ...]
    line: int
    branches: tuple[str, ...]
    python_path: str = ""


def is_unread(word: str) -> bool:
    """Whether a word still holds what only the shell that runs the line knows."""
    return re.search(r"\$[\w@*{(]|`", word) is not None


@dataclass(slots=True)
class _Value:
    words: list[str]
    is_array: bool
    branches: dict[str, int]  # NAME -> line, of this one and of those it was made of


class ScriptReader:
    """lines: the commands of a script that is started with these arguments."""

    def __init__(self, path: Path, arguments: Sequence[str] = (), settings: Mapping[str, str] | None = None):
        """settings: variables beside those of this process's environment."""
        self.path, self.arguments = path, list(arguments)
        self.environment = {**os.environ, **(settings or {})}
        self.values: dict[str, _Value] = {}
        self.used: dict[str, int] = {}
        self.own_path, self.depth, self.is_in_function = path, 0, False
        # Names that something unread has set; after an `eval` or an unread `source` any name may be one of them.
        self.unknown: set[str] = set()
        self.may_be_anything = False

    def lines(self) -> Iterator[ScriptLine]:
        yield from self._lines_of(self.path)

    def lines_of_text(self, text: str) -> Iterator[ScriptLine]:
        for command in commands_of(text):
            yield from self._read(command)

    def _lines_of(self, path: Path) -> Iterator[ScriptLine]:
        outer, self.own_path, self.depth = self.own_path, path, self.depth + 1
        yield from self.lines_of_text(path.read_text(encoding="utf-8", errors="replace"))
        self.own_path, self.depth = outer, self.depth - 1

    def _read(self, command: Command) -> Iterator[ScriptLine]:
        is_declaration, words = command.words[0] in DECLARING, list(command.words)
        self.is_in_function = command.is_in_function
        while words and (is_declaration or ASSIGNMENT.fullmatch(words[0]) or ELEMENT.fullmatch(words[0])):
            word = words.pop(0)
            if match := ASSIGNMENT.fullmatch(word):
                self._assign(match, command)
            elif match := ELEMENT.fullmatch(word):
                self._assign_element(*match.groups())
        self.used, expanded = {}, []
        for word in words:
            expanded += self.expand(word)
            if expanded and expanded[-1].endswith(".py"):  # what a branch decides before the script is Ray's, or torchrun's
                self.used = {}
        program = Path(expanded[0]).name if expanded else ""
        if program in SETTING:
            self.unknown.update(expanded[1:])
        elif program == "eval":
            self.may_be_anything = True
        elif program in ("source", ".") and len(expanded) > 1:
            yield from self._source(expanded[1])
        elif program in SHELLS and "-c" in expanded[1:-1] and self.depth < MAX_DEPTH:
            for inner in commands_of(expanded[expanded.index("-c") + 1]):
                yield from self._read(Command(command.line, command.is_in_branch, True, inner.words, inner.array))
        elif expanded:
            branches = tuple(f"{name} (line {line})" for name, line in sorted(self.used.items()))
            python_path = " ".join(self.values["PYTHONPATH"].words) if "PYTHONPATH" in self.values else ""
            yield ScriptLine(tuple(expanded), command.line, branches, python_path)

    def _source(self, given: str) -> Iterator[ScriptLine]:
        places = [] if is_unread(given) else [path for path in (Path(given), self.own_path.parent / given) if path.is_file()]
        if places and self.depth < MAX_DEPTH:
            yield from self._lines_of(places[0])
        else:
            self.may_be_anything = True

    def _assign(self, match: re.Match, command: Command) -> None:
        name, adds, raw = match.groups()
        self.used = {}
        is_array = command.array is not None and not raw
        if is_array:
            words = [text for word in command.array for text in self.expand(word)]
        else:
            words = [" ".join(self.expand(raw))]
            if re.search(r"\$\(|`", words[0]):  # shown by its name, which is shorter
                words = [f"${{{name}}}"]
        branches = self.used | ({name: command.line} if command.is_in_branch else {})
        before = self.values.get(name)
        if adds and before is not None:
            branches = before.branches | branches
            words = [*before.words, *words] if before.is_array else ["".join([*before.words, *words])]
            is_array = before.is_array
        self.values[name] = _Value(words, is_array, branches)

    def _assign_element(self, name: str, index: str, raw: str) -> None:
        value = self.values.get(name)
        if value is not None and value.is_array and index.isdigit() and int(index) < len(value.words):
            value.words[int(index)] = " ".join(self.expand(raw))
        else:
            self.unknown.add(name)

    def expand(self, raw: str) -> list[str]:
        """The words that a raw word becomes: none for an empty array, several for `"${ARRAY[@]}"` or an unquoted `$LINE`."""
        fields: list[str | None] = [None]
        position = 0
        while position < len(raw):
            end = after_piece(raw, position)
            piece = raw[position:end]
            if piece[0] == '"' and len(piece) > 1:
                if not ALL_QUOTED.fullmatch(piece):
                    fields[-1] = fields[-1] or ""
                inner = 0
                while inner < len(piece) - 2:
                    inner = self._add_piece(fields, piece[1:-1], inner, is_quoted=True)
            elif piece[0] == "'" or piece.startswith("$'"):
                fields[-1] = (fields[-1] or "") + piece[piece.index("'") + 1 : -1]
            else:
                end = self._add_piece(fields, raw, position, is_quoted=False)
            position = end
        return [text for text in fields if text is not None]

    def _add_piece(self, fields: list[str | None], text: str, position: int, *, is_quoted: bool) -> int:
        """Adds what stands at `position`, inside or outside double quotes, and returns where the next piece begins."""
        if text[position] == "\\" and position + 1 < len(text):
            keeps = is_quoted and text[position + 1] not in '$`"\\\n'
            fields[-1] = (fields[-1] or "") + ("\\" if keeps else "") + text[position + 1]
            return position + 2
        name = NAME.match(text, position + 1) if text[position] == "$" else None
        if text.startswith(("${", "$("), position):
            end = closing(text, position + 1, *("{}" if text[position + 1] == "{" else "()"))
        elif text[position] == "`":
            end = after_piece(text, position)
        else:
            end = name.end() if name else position + 1
        piece = text[position:end]
        values = self._expansion(piece, is_quoted=is_quoted) if len(piece) > 1 else [piece]
        if len(piece) > 1 and not is_quoted:
            values = [part for value in values for part in ([value] if is_unread(value) else value.split())]
        if values:
            fields[-1] = (fields[-1] or "") + values[0]
            fields.extend(values[1:])
        return end

    def _expansion(self, piece: str, *, is_quoted: bool) -> list[str]:
        """The words of one `$` expression, or itself where it cannot be told."""
        if piece in OWN_PATH:
            return [str(self.own_path)]
        if piece.startswith("$(") and not piece.startswith("$(("):
            return [self._path_command(piece[2:-1].strip()) or piece]
        match = BRACED.fullmatch(piece[2:-1] if piece.startswith("${") else piece[1:])
        if match is None:
            return [piece]
        known = self._known(match["name"], match["index"] or "0")
        if known is not None and "*" in (match["name"], match["index"]) and is_quoted:
            known = [" ".join(known)]
        how = match["how"] or ""
        is_set = known is not None and not (how.startswith(":") and known in ([""], []))
        if how.endswith("+"):
            return self.expand(match["other"]) if is_set else []
        if is_set:
            return known
        return self.expand(match["other"]) or [""] if how else [piece]

    def _known(self, name: str, index: str) -> list[str] | None:
        """What a variable holds: all of an array for the index @ or *; None where it is not known, or not set."""
        if name in "@*" or name.isdigit():
            if self.is_in_function:
                return None
            return list(self.arguments) if name in "@*" else self.arguments[int(name) - 1 : int(name)] or None
        if name in self.values and name not in self.unknown:
            value = self.values[name]
            self.used |= value.branches
            return list(value.words) if index in "@*" else value.words[int(index) : int(index) + 1] or None
        if name in self.unknown or self.may_be_anything:
            return None
        # No environment carries an array: one that nothing sets is empty.
        return [self.environment[name]] if name in self.environment else [] if index in "@*" else None

    def _path_command(self, command: str) -> str | None:
        """`cd ... && pwd` and `dirname ...` of what is known: how scripts find their own folder."""
        if match := CHANGE_FOLDER.fullmatch(command):
            where = "".join(self.expand(match["where"]))
            return None if is_unread(where) else os.path.normpath(os.path.join(os.getcwd(), where))
        if match := DIRNAME.fullmatch(command):
            what = "".join(self.expand(match["what"]))
            return None if is_unread(what) else os.path.dirname(what) or "."
        return None
