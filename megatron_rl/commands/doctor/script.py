"""Reads the commands of a bash script from its syntax tree, with its variables and arrays put in. It never runs any of it.

tree-sitter-bash parses; this file follows assignments, simple expansions and branches that are decided, in the order of the text. A
variable holds what the script assigns to it, else what this process's environment says. A word that cannot be expanded so, or that
has several values in branches that are not decided, stays as it was written, `$` and all: the reader of the words can tell.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.commands.doctor.arguments import ALL, arguments_read
from megatron_rl.commands.doctor.composed import model_words
from megatron_rl.commands.doctor.conditions import arms, conditions, ends_the_script, merged_text, merged_words, variables_in
from megatron_rl.errors import ConfigError
from megatron_rl.files.bounds import is_regular, read_regular
from megatron_rl.hosts.script_constants import is_secret

if TYPE_CHECKING:
    from tree_sitter import Node

# Commands that set the variables which they name, from what is known at run time alone.
SETTING = ("read", "mapfile", "readarray", "printf", "let", "getopts")
COUNTING = ("postfix_expression", "unary_expression", "for_statement", "unset_command")
LOOPS = ("for_statement", "c_style_for_statement", "while_statement")
BRANCHING = ("if_statement", "case_statement", "list")
# They hold no command that the script runs as a separate step.
NO_STEPS = ("string", "concatenation", "expansion", "command_substitution", "process_substitution", "heredoc_body")
# The command of miles that prints the flags of a model, and the folder of their scripts from four folders above it.
MODEL_COMMAND, MODELS = "model_args_utils.py", Path("scripts", "models")
PLAIN_EDIT = re.compile(r"s([/|,#])(?P<pattern>(?:(?!\1)[^*+?{\\\\])*)\1(?P<text>(?:(?!\1)[^&\\\\])*)\1")
MOST_CHOICES = 8
# How variables of flags often end, and how similar two are where one is a slip of the other: without it, and as they are.
ENDING, CLOSEST_VARIABLE, CLOSEST_WHOLE = "_ARGS", 0.75, 0.88
SHELLS = ("bash", "sh", "zsh", "exec")
# $NAME, ${NAME}, ${NAME[@]}, ${NAME[0]}, and those with a default; the others cut or count, and are left as they are.
VARIABLE = re.compile(r"\$\{?(?P<name>[A-Za-z_]\w*|[@*0-9])(?:\[(?P<index>[@*]|\d+)\])?(?:(?P<how>:?[-=+]).*|\}?)", re.DOTALL)
# The quoted expressions that may become no word at all.
ALL_QUOTED = re.compile(r'"\$(@|\{(@|[A-Za-z_]\w*\[@\])\})"')
LOST_NAME = re.compile(rb"[A-Za-z_]\w*|[@*0-9]")
# A script that sources itself, or two that source each other.
MAX_DEPTH = 8
# A script, and what it may become: texts it reads, characters of expanded variables, lines that are no bash and are named.
LARGEST_SCRIPT, MOST_TEXTS, MOST_EXPANDED, MOST_UNPARSED = 2**22, 200, 2**24, 100
REMEDY = "give the words that start the training after --, from python on"


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """words: expanded. branches: variables in it that an if, case or loop of the script decides about, as NAME (line n), where it
    is not known which branch runs. deciding: variables that say so, and that whoever starts the script may set.
    python_path: PYTHONPATH as the script has set it by then. unparsed: lines before it that the parser takes for no bash.
    absent: files that it has sourced by then and that are not here. called: what it starts, and has the line. unheard: words behind
    the script that nothing of it reads. slips: names that nothing has set by then, and what may have been meant."""

    words: tuple[str, ...]
    line: int
    branches: tuple[str, ...]
    python_path: str = ""
    unparsed: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    called: str = ""
    deciding: tuple[str, ...] = ()
    exported: tuple[tuple[str, str], ...] = ()  # NAME and value
    unheard: tuple[str, ...] = ()
    slips: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return f"line {self.line} of {self.called or 'the script'}"


def called_script(words: Sequence[str]) -> int | None:
    """The place of the script that a command starts: bash run.sh, ./run.sh; None: it starts none."""
    place = next((at for at, word in enumerate(words) if word not in SHELLS and not word.startswith("-")), None)
    return place if place is not None and words[place].endswith((".sh", ".bash")) else None


def is_unread(word: str) -> bool:
    """Whether a word still holds what only the shell that runs the line knows."""
    return re.search(r"\$[\w@*{(]|`|^[<>]\(", word) is not None


def syntax_tree(text: str) -> Node:
    """Raises ConfigError where the parser is not installed."""
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise ConfigError(
            "a shell script is read with tree-sitter-bash, which is not installed: pip install "
            "'/path/to/megatron_rl[doctor]', or give the "
            "words that start the training after --, from python on"
        ) from error
    parser, source = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language())), text.encode()
    root = parser.parse(source).root_node
    # The grammar loses the name of `$B` in an unquoted `$A:$B`; with braces around the name it does not.
    while lost := [match for end in _lone_dollars(root) if (match := LOST_NAME.match(source, end))]:
        for match in reversed(lost):
            source = source[: match.start()] + b"{" + match[0] + b"}" + source[match.end() :]
        root = parser.parse(source).root_node
    return root


@dataclass(slots=True)
class _Value:
    words: list[str]
    is_array: bool = False
    branches: dict[str, int] = field(default_factory=dict)  # NAME -> line, of this one and of those it was made of


class ScriptReader:
    """lines: the commands of a script that is started with these arguments. settings: variables beside the environment's."""

    def __init__(self, path: Path, arguments: Sequence[str] = (), settings: Mapping[str, str] | None = None):
        self.started = self.path = path
        self.arguments, self.environment = list(arguments), {**os.environ, **(settings or {})}
        self.values: dict[str, _Value] = {}
        self.used: dict[str, int] = {}
        self.unparsed: list[str] = []
        self.absent: list[str] = []
        self.depth, self.lines_above, self.is_in_function, self.is_in_loop = 0, 0, False, False
        self.open_on: set[str] = set()  # names in the conditions around, where it is not known whether they are true
        self.deciders: dict[str, set[str]] = {}  # of each variable
        self.computed: set[str] = set()  # variables that the script sets whatever its environment says
        self.num_texts = self.num_expanded = 0
        # Names that something unread has set; after an `eval` or an unread `source` any name may be one of them.
        self.unknown: set[str] = set()
        self.may_be_anything = False
        self.exported: set[str] = set()
        self.read: set[str] = set()  # names, and arguments: see arguments_read
        self.unset: dict[str, tuple[str, int]] = {}  # NAME -> as it is written, and its line
        self.whole: set[str] = set()  # arrays that are read with all their words
        self.cut: dict[str, tuple[str, int]] = {}  # those of several words that are read without [@], as unset
        self.arrays: dict[str, int] = {}  # of flags, with the line that sets them last, also behind what is read

    def lines(self) -> Iterator[ScriptLine]:
        try:
            text = read_regular(self.path, LARGEST_SCRIPT).decode("utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error}") from error
        yield from self.lines_of_text(text)

    def lines_of_text(self, text: str) -> Iterator[ScriptLine]:
        self.depth, self.num_texts = self.depth + 1, self.num_texts + 1
        if self.num_texts > MOST_TEXTS:
            raise ConfigError(f"{self.started} reads more than {MOST_TEXTS} scripts: {REMEDY}")
        tree = syntax_tree(text)
        if not self.is_in_function:
            self.read |= arguments_read(tree)
            self.arrays |= {name: line + self.lines_above for name, line in _arrays_of_flags(tree)}
        yield from self._walk(tree, is_in_branch=False)
        self.depth -= 1

    def _walk(self, node: Node, *, is_in_branch: bool) -> Iterator[ScriptLine]:
        """In the order of the text, which is not the order of execution where a script loops or calls functions."""
        body = node.child_by_field_name("body") if node.type == "redirected_statement" else node
        if node.type == "ERROR" or node.is_missing:
            if len(self.unparsed) < MOST_UNPARSED:
                self.unparsed.append(str(self._line_of(node)))
            self.may_be_anything = True
        if node.type in COUNTING:
            self.unknown |= {_text(child) for child in node.children if child.type in ("variable_name", "word")}
        if node.type == "declaration_command" and _text(node).startswith("export"):
            self.exported |= {_text(child).partition("=")[0] for child in node.named_children}
        if body is not None and body.type == "command":
            yield from self._command(body, node, is_in_branch=is_in_branch)
        elif node.type == "variable_assignment":
            self._assign(node, is_in_branch=is_in_branch)
        elif node.type in BRANCHING and not node.has_error:
            yield from self._branches(node, is_in_branch=is_in_branch)
        elif node.type not in NO_STEPS:
            outer, is_loop = (self.is_in_function, self.is_in_loop), node.type in LOOPS
            self.is_in_function, self.is_in_loop = outer[0] or node.type == "function_definition", outer[1] or is_loop
            for child in node.children:
                yield from self._walk(child, is_in_branch=is_in_branch or is_loop or node.type in BRANCHING)
            self.is_in_function, self.is_in_loop = outer

    def _branches(self, node: Node, *, is_in_branch: bool) -> Iterator[ScriptLine]:
        """Those that may run, each from what was known before them."""
        found = arms(node, self._decided_text)
        for condition in conditions(node):
            yield from self._walk(condition, is_in_branch=is_in_branch)
        is_open, before, outer = len(found) > 1, self.values, self.open_on
        if is_open:
            used = [variable for one in conditions(node) for variable in variables_in(one)]
            self.open_on = (
                outer | {name for name, taken in used if self._decided_text(taken) is None} - self.computed - self.unknown
            )
        after = []
        for body in found:
            self.values = dict(before) if is_open else before
            for child in body:
                yield from self._walk(child, is_in_branch=is_in_branch or is_open)
            if not ends_the_script(body):
                after.append(self.values)
        self.open_on = outer
        if is_open:
            self.values = _merged(before, after or [before])

    def _decided_text(self, node: Node) -> str | None:
        """What a part of a condition becomes; None: not known, as in a loop or a function, which run at other times than here."""
        outer, self.used, outer_cut = self.used, {}, dict(self.cut)
        words, is_open = self.words(node), bool(self.used)
        self.used, self.cut = outer, outer_cut
        is_open |= self.is_in_function or self.is_in_loop or any(name in self.unknown for name, _ in variables_in(node))
        return None if is_open or len(words) > 1 or any(map(is_unread, words)) else "".join(words)

    def _command(self, node: Node, redirected: Node, *, is_in_branch: bool) -> Iterator[ScriptLine]:
        """redirected: the command with its redirections; the words after the first word of one belong to the command."""
        name, redirects = node.child_by_field_name("name"), [c for c in redirected.children if c.type.endswith("_redirect")]
        given = [*(name.children if name else []), *node.children_by_field_name("argument")]
        for redirect in redirects:
            given += redirect.children_by_field_name("destination")[1:] + redirect.children_by_field_name("argument")
        self.used, words = {}, []
        for word in given:
            words += self.words(word)
            if words and words[-1].endswith(".py"):  # what a branch decides before the script is Ray's, or torchrun's
                self.used = {}
        branches = dict(self.used)
        # NAME=value before a command is gone after it.
        settings = {_name(child): child for child in node.children if child.type == "variable_assignment"}
        outer = {name: self.values[name] for name in settings if name in self.values}
        for setting in settings.values():
            self._assign(setting, is_in_branch=is_in_branch)
        outer_exported, self.exported = self.exported, self.exported | {*settings}
        yield from self._run(words[words[:1] == ["time"] :], branches, self._line_of(node))
        if words[:2] == ["read", "-ra"] and len(words) == 3 and not settings:
            self._read_array(words[2], redirects, {words[2]: self._line_of(node)} if is_in_branch else {})
        self.exported = outer_exported
        self.values = {name: value for name, value in self.values.items() if name not in settings} | outer
        for redirect in redirects:  # the node of a here document holds the rest of its first line
            yield from self._walk(redirect, is_in_branch=is_in_branch)

    def _run(self, words: list[str], branches: dict[str, int], line: int) -> Iterator[ScriptLine]:
        """What a command does to variables, the commands in what it reads, or itself."""
        program = Path(words[0]).name if words else ""
        above = self.path, self.lines_above, self.is_in_function
        if program in SETTING:
            self.unknown.update(word.partition("=")[0] for word in words[1:])
        elif program == "shift" or (program == "set" and "--" in words):
            self.unknown.add("@")
        elif program in ("source", ".") and len(words) > 1 and self.depth < MAX_DEPTH and (path := self._here(words[1])):
            self.path, self.lines_above = path, 0
            yield from self.lines()
        elif program in ("eval", "source", "."):
            self.may_be_anything = True
            if program != "eval" and len(words) > 1 and not is_unread(words[1]):
                self.absent.append(f"{words[1]} (line {line})")
        elif program in ("bash", "sh", "zsh") and "-c" in words[1:-1] and self.depth < MAX_DEPTH:
            self.lines_above, self.is_in_function = line - 1, True
            yield from self.lines_of_text(words[words.index("-c") + 1])
        elif (at := called_script(words)) is not None and self.depth < MAX_DEPTH and (path := self._here(words[at])):
            yield from self._called(path, words[at + 1 :])
        elif words:
            yield ScriptLine(
                tuple(words),
                line,
                tuple(f"{name} (line {at})" for name, at in sorted(branches.items(), key=lambda one: one[1])),
                " ".join(self.values.get("PYTHONPATH", _Value([])).words),
                tuple(self.unparsed),
                tuple(self.absent),
                deciding=tuple(sorted({name for one in branches for name in self.deciders.get(one, ())})),
                exported=tuple(self._exported().items()),
                unheard=self._unheard(),
                slips=tuple(self._slips()),
            )
        self.path, self.lines_above, self.is_in_function = above

    def _read_array(self, name: str, redirects: Sequence[Node], branches: dict[str, int]) -> None:
        """read -ra NAME <<< "$LINE", of a line of flags: any other one may stand for some that are not known."""
        lines = [child for node in redirects if node.type == "herestring_redirect" for child in node.named_children]
        texts = [word for child in lines for word in self.words(child)]
        if len(texts) == 1 and re.match(r"\s*--\w", texts[0]) and not re.search(r"\$\(|`|\n", texts[0]):
            self.values[name] = _Value(_split(texts[0]), is_array=True, branches=branches)
            self.unknown.discard(name)

    def _called(self, path: Path, arguments: Sequence[str]) -> Iterator[ScriptLine]:
        """Another script, in a process of its own: it has what this one has exported."""
        reader = ScriptReader(path, arguments, self._exported())
        reader.depth, reader.num_texts, reader.unknown = self.depth, self.num_texts, self.exported & self.unknown
        for line in reader.lines():
            lost = [word for word in line.unheard if word in self.arguments]
            yield replace(line, called=line.called or str(path), unheard=tuple(dict.fromkeys([*self._unheard(), *lost])))
        self.num_texts = reader.num_texts

    def _unheard(self) -> tuple[str, ...]:
        given = enumerate(self.arguments, 1) if ALL not in self.read else ()
        return tuple(word for number, word in given if str(number) not in self.read)

    def _exported(self) -> dict[str, str]:
        return {name: " ".join(value.words) for name, value in self.values.items() if name in self.exported - self.unknown}

    def _here(self, given: str) -> Path | None:
        places = (Path(given), self.path.parent / given)
        return None if is_unread(given) else next((path for path in places if is_regular(path)), None)

    def _line_of(self, node: Node) -> int:
        return node.start_point[0] + 1 + self.lines_above

    def _assign(self, node: Node, *, is_in_branch: bool) -> None:
        self.used = {}
        name, value = _name(node), node.child_by_field_name("value")
        is_array = value is not None and value.type == "array"
        if value is not None and is_array:
            words = [text for word in value.named_children if word.type != "comment" for text in self.words(word)]
        else:
            words = [" ".join(self.words(value) if value is not None else [])]
            if re.search(r"\$\(|`", words[0]):  # shown by its name, which is shorter
                words = [f"${{{name}}}"]
        branches, before = self.used | ({name: self._line_of(node)} if is_in_branch else {}), self.values.get(name)
        if is_in_branch:
            self.deciders.setdefault(name, set()).update(self.open_on)
        if value is not None and not re.search(rf"\$\{{?{re.escape(name)}\b", _text(value)):
            self.computed.add(name)
        if "[" in name:  # one element: the rest of the array is not known any more
            self.unknown.add(name.partition("[")[0])
        elif before is not None and any(child.type == "+=" for child in node.children):
            words = [*before.words, *words] if before.is_array else ["".join([*before.words, *words])]
            self.values[name] = _Value(words, before.is_array, before.branches | branches)
        else:
            self.values[name] = _Value(words, is_array, branches)

    def words(self, node: Node, *, is_quoted: bool = False) -> list[str]:
        """The words that one becomes: none for an empty array, several for `"${ARRAY[@]}"` or an unquoted `$LINE`."""
        text = _text(node)
        if node.type == "concatenation":
            return _joined(self.words(child, is_quoted=is_quoted) for child in node.children)
        if node.type == "string":
            words = _joined(self._quoted(node))
            return words if words or ALL_QUOTED.fullmatch(text) else [""]
        if node.type in ("simple_expansion", "expansion", "command_substitution"):
            values = self._expansion(node, is_quoted=is_quoted)
            self.num_expanded += sum(len(value) + 1 for value in values)
            if self.num_expanded > MOST_EXPANDED:
                raise ConfigError(
                    f"{self.path}, line {self._line_of(node)}: variables that are put into each other become more than "
                    f"{MOST_EXPANDED} characters: {REMEDY}"
                )
            if is_quoted:
                return [" ".join(values)] if re.match(r"\s*\$\{?(\w+\[)?\*", text) else values
            return [part for value in values for part in _split(value)]
        if node.type in ("raw_string", "ansi_c_string"):
            return [text[text.index("'") + 1 : -1]]
        is_whole = node.type in ("arithmetic_expansion", "process_substitution")
        return [text if is_whole else re.sub(r"\\(.)", _unescaped, text, flags=re.DOTALL)]

    def _quoted(self, node: Node) -> Iterator[list[str]]:
        """The pieces between double quotes; everything between two expansions is text, line ends included."""
        start = 1
        for child in [*(child for child in node.named_children if child.type != "string_content"), None]:
            # The grammar puts blanks before a `$` into its token.
            blanks = len(_bytes(child)) - len(_bytes(child).lstrip()) if child else 0
            text = _bytes(node)[start : child.start_byte - node.start_byte + blanks if child else -1].decode(errors="replace")
            yield [re.sub(r'\\([$`"\\\n])', _unescaped, text)] if text else []
            if child is not None:
                start = child.end_byte - node.start_byte
                yield self.words(child, is_quoted=True)

    def _expansion(self, node: Node, *, is_quoted: bool) -> list[str]:
        """The words of one `$` expression, or itself where it cannot be told."""
        text = _text(node).lstrip()
        match = VARIABLE.fullmatch(text)
        if node.type == "command_substitution" or match is None:
            return [self._known_command(node) or text]
        known, how = self._known(match["name"], match["index"] or "0"), match["how"] or ""
        written = (text, self._line_of(node))
        if known in (None, []) and not how and self._is_unset(match["name"]):
            self.unset.setdefault(match["name"], written)
        if (value := self.values.get(match["name"])) is not None and value.is_array and known is not None:
            if match["index"] in ("@", "*"):
                self.whole.add(match["name"])
            elif match["index"] is None and len(value.words) > 1 and _has_flags(value):
                self.cut.setdefault(match["name"], written)
        is_set = known is not None and not (how.startswith(":") and known in ([""], []))
        if known is not None and is_set and not how.endswith("+"):
            return known
        if not how:
            return [text]
        place = next(index for index, child in enumerate(node.children) if child.type == how)
        other = _joined(self.words(child, is_quoted=is_quoted) for child in node.children[place + 1 : -1])
        return (other if is_set else []) if how.endswith("+") else other or [""]

    def _known(self, name: str, index: str) -> list[str] | None:
        """What a variable holds: all of an array for the index @ or *; None where it is not known, or not set."""
        if name in ("0", "BASH_SOURCE"):
            return [str(self.started if name == "0" else self.path)]
        if name in "@*" or name.isdigit():
            given = self.arguments if name in "@*" else self.arguments[int(name) - 1 : int(name)] or None
            return None if self.is_in_function or "@" in self.unknown else given
        if name in self.values and name not in self.unknown:
            value = self.values[name]
            self.read.add(name)
            self.used |= value.branches
            return value.words if index in "@*" else value.words[int(index) : int(index) + 1] or None
        if name in self.unknown or self.may_be_anything or is_secret(name, self.environment.get(name, "")):
            return None
        # No environment carries an array: one that nothing sets is empty.
        return [self.environment[name]] if name in self.environment else [] if index in "@*" else None

    def _is_unset(self, name: str) -> bool:
        is_unseen = name in self.unknown or self.may_be_anything or self.is_in_function
        return name.isidentifier() and name not in self.values and name not in self.environment and not is_unseen

    def _slips(self) -> Iterator[str]:
        """Of names that nothing sets, those that are set behind their use, and those that are similar to one that nothing reads.
        And arrays of which a line has the first word alone."""
        unread = {name for name, value in self.values.items() if name not in self.read and _has_flags(value)}
        shorter = {name.removesuffix(ENDING): name for name in sorted(unread)}
        for name, (written, line) in self.unset.items():
            close = get_close_matches(name.removesuffix(ENDING), shorter, n=1, cutoff=CLOSEST_VARIABLE)
            whole = get_close_matches(name, sorted(unread), n=1, cutoff=CLOSEST_WHOLE)
            if name not in self.read and self.arrays.get(name, 0) > line:
                yield f"{written} (line {line}) is not set there: the script sets {name} on line {self.arrays[name]}, after it"
            elif meant := [*whole, *(shorter[one] for one in close)]:
                yield f"{written} (line {line}) is not set in the script: did you mean {meant[0]}, which nothing uses?"
        for name, (written, line) in self.cut.items():
            if name not in self.whole:
                yield f"{written} (line {line}) is the first word of the array alone: write ${{{name}[@]}}"

    def _known_command(self, node: Node) -> str | None:
        """`cd ... && pwd`, `dirname ...`, `basename ...` and an edit by sed of what is known: how scripts find their own folder,
        and one another. And the flags of a model, from the script that has them."""
        commands = [[word for child in command.named_children for word in self.words(child)] for command in _commands_in(node)]
        if any(is_unread(word) for words in commands for word in words):
            return None
        match [[word for word in words if word != "--"] for words in commands]:
            case [["cd", where], ["pwd", *_]]:
                return os.path.normpath(os.path.join(os.getcwd(), where))
            case [["dirname", what]]:
                return os.path.dirname(what) or "."
            case [["basename", what, *ending]] if len(ending) < 2:
                return os.path.basename(what).removesuffix("".join(ending))
            case [["echo", text], ["sed", *options, edit]] if options in ([], ["-E"], ["-r"]):
                return _edited(text, edit)
            case [[*_, command, model]] if Path(command).name == MODEL_COMMAND:
                folders = Path(command).resolve().parents
                words = model_words(folders[3] / MODELS, model) if len(folders) > 3 else None
                return None if words is None else " ".join(words)
        return None


def _arrays_of_flags(node: Node) -> Iterator[tuple[str, int]]:
    """(name, line) of those that are assigned below a node; not in functions, which run at other times."""
    value = node.child_by_field_name("value") if node.type == "variable_assignment" else None
    if value is not None and value.type == "array" and re.search(r"(^|[\s(\"'])--?[A-Za-z]", _text(value)):
        yield _name(node), node.start_point[0] + 1
    for child in node.children if node.type != "function_definition" else ():
        yield from _arrays_of_flags(child)


def _has_flags(value: _Value) -> bool:
    return any(re.match(r"\s*(--?[A-Za-z]|[+~\w.]+=)", word) for word in value.words)


def _merged(before: Mapping[str, _Value], after: Sequence[Mapping[str, _Value]]) -> dict[str, _Value]:
    """What variables hold behind branches of which one has run. One that some do not set may have been set by the others."""
    merged: dict[str, _Value] = {}
    for name in dict.fromkeys(name for values in after for name in values):
        found = [values[name] for values in after if name in values]
        branches = {key: line for one in found for key, line in one.branches.items()}
        if all(one is found[0] for one in found) or all(one.words == found[0].words for one in found):
            same = {key: line for key, line in branches.items() if key != name} if len(found) == len(after) > 1 else branches
            merged[name] = found[0] if found[0] is before.get(name) else replace(found[0], branches=same)
        elif all(one.is_array for one in found):
            start = before[name].words if name in before else []
            merged[name] = _Value(merged_words(name, [one.words for one in found], start), True, branches)
        else:
            merged[name] = _Value([merged_text(name, [" ".join(one.words) for one in found])], False, branches)
    return merged


def _edited(text: str, edit: str) -> str | None:
    """By `sed s/PATTERN/TEXT/`. A pattern that repeats or has many branches may take for ever, and is not tried; nor is a TEXT with
    parts of the match."""
    found = PLAIN_EDIT.fullmatch(edit) if edit.count("|") < MOST_CHOICES else None
    try:
        return None if found is None else re.sub(found["pattern"], lambda match: found["text"], text, count=1)
    except re.error:
        return None


def _split(value: str) -> list[str]:
    """At blanks, as bash does with an unquoted variable; not within what is unread. What a command prints stays whole."""
    if not is_unread(value):
        return value.split()
    return [value] if re.search(r"[`()]", value) else re.findall(r"(?:\$\{[^}]*\}|\S)+", value)


def _joined(pieces: Iterable[list[str]]) -> list[str]:
    """The pieces of one word side by side: the last word of one and the first of the next are one."""
    fields: list[str] = []
    for values in pieces:
        if fields and values:
            fields[-1] += values[0]
            values = values[1:]
        fields += values
    return fields


def _commands_in(node: Node) -> list[Node]:
    return [node] if node.type == "command" else [found for child in node.children for found in _commands_in(child)]


def _lone_dollars(node: Node) -> Iterator[int]:
    if node.type == "$" and node.parent is not None and node.parent.type != "simple_expansion":
        yield node.end_byte
    for child in node.children:
        yield from _lone_dollars(child)


def _unescaped(match: re.Match) -> str:
    return "" if match[1] == "\n" else match[1]


def _bytes(node: Node) -> bytes:
    return node.text or b""  # None: of a tree that was edited, which none is here


def _text(node: Node) -> str:
    return _bytes(node).decode(errors="replace")


def _name(node: Node) -> str:
    name = node.child_by_field_name("name")
    return "" if name is None else _text(name)
