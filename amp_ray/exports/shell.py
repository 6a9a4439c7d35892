"""Read the commands of a shell script without executing it.

Variables and arrays that the script sets are replaced; all others stay as they are written. Where a
condition depends on something that the script does not set, the script is read once for each
branch, so that a caller can compare what the branches say.
"""

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Final

from amp_ray.errors import shown

MOST_CHARACTERS: Final = 2**16  # most characters of an expanded layout or word; no script has more
_MOST_WRITTEN_OUT: Final = 2**20  # most characters of all words of all branches
_LEAST_CHARACTERS: Final = 2**3  # that a word counts for, so that their number is limited too
_MOST_BRANCHES: Final = 100  # more branches are not compared, but refused
_MOST_DOCUMENTS: Final = 100
_MOST_REPEATS: Final = 100  # of the body of a loop
_MOST_AROUND: Final = 2**6  # words before a script within a command
_DEEPEST: Final = 30  # scripts within scripts, and brackets within brackets

_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]*\])?(\+?)=")
_VARIABLE: Final = re.compile(
    r"\$(?:([A-Za-z_]\w*|[0-9])|\{([A-Za-z_]\w*|[0-9])(?:\[([@*])\])?(?:(:?[-=])((?:[^{}]|\$\{[^{}]*\}){0,999}))?\})"
)
_REDIRECTION: Final = re.compile(r"(?:[0-9]*|&)(<<-?|<<<|[<>]&|>>|>\||<>|[<>])[ \t]*")
_SPACE: Final = re.compile(r"(?:[ \t\r]|\\\n)+")
_OPERATOR: Final = re.compile(r";;&|;;|;&|&&|\|\||\|&|[\n;&|()]")
_CONDITION: Final = re.compile(r"""\(\((?:[^()\n`"']|\([^()\n`"']{0,999}\)){0,999}\)\)""")
_CHANGED: Final = re.compile(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)")
_ARITHMETIC: Final = re.compile(r"\$\(\(.*\)\)", re.DOTALL)
_MOST_COMPUTED: Final = 2**8  # characters of a sum or product
_OPERATIONS: Final[Mapping[type[ast.AST], Callable[[int, int], int]]] = {
    ast.Gt: int.__gt__,
    ast.GtE: int.__ge__,
    ast.Lt: int.__lt__,
    ast.LtE: int.__le__,
    ast.Eq: int.__eq__,
    ast.NotEq: int.__ne__,
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.FloorDiv: int.__floordiv__,
    ast.Mod: int.__mod__,
}
_UNKNOWN: Final = re.compile(r"[$`]")
_FLAGS_INSIDE: Final = re.compile(r"(?:^|\s)--[A-Za-z]")
_SUBSTITUTION: Final = re.compile(r"\$\((?:[^()]|\([^()]*\)){0,999}\)|`[^`]*`")
_PIECE: Final = re.compile(rf"(?:{_SUBSTITUTION.pattern}|\S)+")  # nothing splits a substitution
_PROGRAM: Final = re.compile(r"\.py\b|\bpython|\btorchrun\b")
_DECLARES: Final = frozenset({"export", "local", "declare", "readonly", "typeset"})
_IN_FUNCTIONS: Final = frozenset({"local", "declare", "typeset"})
"""Words before variables that a function has for itself."""
_TESTS: Final = frozenset({"[", "[[", "test"})
_COMPARISONS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-lt": int.__lt__,
    "-le": int.__le__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
}


class LineError(ValueError):
    """A mistake in one line of a text."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command with its words; a variable that the script does not set stays as it is written."""

    line: int
    words: tuple[str, ...]
    around: tuple[str, ...] = ()  # of ``srun bash -c "..."`` the words before the script
    variables: Mapping[str, str] = field(default_factory=dict)  # those that were asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The commands of one way through a script."""

    commands: tuple[Command, ...]
    values: tuple[str, ...]  # words of all variables and arrays that the script sets
    condition: str = ""  # what decides between this branch and the first one
    line: int = 0  # line of that condition


def branches_of(
    text: str, *, environment: Mapping[str, str] | None = None, wanted: Collection[str] = ()
) -> tuple[Branch, ...]:
    """Return the ways through a script: the first one, and one for each other branch.

    Args:
        text: The script.
        environment: Variables that are set before it begins.
        wanted: Names of the variables that its commands have beside their words.

    Raises:
        LineError: If the text is no shell script, its variables expand to very long texts, or it
            has more than `_MOST_BRANCHES` branches.
    """
    script = _parsed(text, 1)
    branches: list[Branch] = []
    waiting = [(frozenset[str](), "", 0)]
    flipped: set[str] = set()
    room = _MOST_WRITTEN_OUT
    while waiting:
        decided, condition, line = waiting.pop(0)
        if len(branches) == _MOST_BRANCHES:
            message = f"more than {_MOST_BRANCHES} branches: write the command alone into a file"
            raise LineError(message, line)
        values = {name: [value] for name, value in (environment or {}).items()}
        run = _Run(flipped=decided, room=room, values=values, wanted=wanted)
        try:
            run.all_of(script)
        except _EndError:
            pass
        except RecursionError:
            raise LineError("cannot be read as a script: nested too deeply", None) from None
        room = run.room
        branches.append(
            Branch(
                commands=tuple(run.commands),
                values=tuple(
                    part
                    for value in run.values.values()
                    for word in value
                    for part in (word.split() if "--" in word else [word])
                ),
                condition=condition,
                line=line,
            )
        )
        for met, at in run.met.items():
            if met not in flipped:
                flipped.add(met)
                waiting.append((decided | {met}, met, at))
    return tuple(branches)


def words_of(text: str) -> list[str]:
    r"""Return the words of all commands of a script, with the script's own variables replaced.

    Example:
        >>> words_of('TP=2\nA=(--tp "$TP")\nrun ${A[@]} --pp ${PP:-4} $B  # both')
        ['run', '--tp', '2', '--pp', '4', '$B']
    """
    return [word for command in branches_of(text)[0].commands for word in command.words]


# ------------------------------------------------------------------------------ tokens


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # "word", "array" or "op"
    text: str
    line: int


class _Scanner:
    """Splits a script into words, arrays and operators, without comments and redirections."""

    def __init__(self, text: str, line: int) -> None:
        self._text = text
        self._place = 0
        self._line = line
        self._num_documents = 0
        self._marks: list[str] = []  # ends of here-documents that begin after this line

    def tokens(self) -> Iterator[_Token]:
        while self._place < len(self._text):
            if self._skips():
                continue
            if condition := _CONDITION.match(self._text, self._place):
                yield self._until(condition.end(), "word")
            elif operator := _OPERATOR.match(self._text, self._place):
                yield self._until(operator.end(), "op")
                if operator[0] == "\n":
                    self._documents()
            else:
                yield self._word()

    def _until(self, end: int, kind: str = "") -> _Token:
        """Move on to a place, and return the token before it."""
        token = _Token(kind, self._text[self._place : end], self._line)
        self._line += token.text.count("\n")
        self._place = end
        return token

    def _skips(self) -> bool:
        """Skip white space, a comment or a redirection; return whether there was one."""
        text, place = self._text, self._place
        if space := _SPACE.match(text, place):
            self._until(space.end())
        elif text[place] == "#":
            self._until(_end_of_line(text, place))
        elif redirection := _REDIRECTION.match(text, place):
            self._until(redirection.end())
            target = self._until(_end_of_word(text, self._place, self._line))
            if redirection[1] in {"<<", "<<-"}:
                self._marks.append(re.sub(r"[\"'\\]", "", target.text))
                self._num_documents += 1
                if self._num_documents > _MOST_DOCUMENTS:
                    _refuse("more here-documents than any script has", self._line)
        return self._place > place

    def _documents(self) -> None:
        """Skip here-documents; one that starts a program is read as part of the script."""
        for mark in self._marks:
            end = re.compile(rf"^\t*{re.escape(mark)}$", re.MULTILINE)
            last = end.search(self._text, self._place)
            place = len(self._text) if last is None else last.end()
            document = self._text[self._place : place]
            if not (_FLAGS_INSIDE.search(document) and _PROGRAM.search(document)):
                self._until(place)
        self._marks = []

    def _word(self) -> _Token:
        text, place, line = self._text, self._place, self._line
        end = _end_of_word(text, place, line)
        if _ASSIGNMENT.fullmatch(text, place, end) and text.startswith("(", end):
            return self._until(_end_of_brackets(text, end, line), "array")
        return self._until(max(end, place + 1), "word")


def _end_of_line(text: str, place: int) -> int:
    end = text.find("\n", place)
    return len(text) if end < 0 else end


def _end_of_word(text: str, place: int, line: int) -> int:
    while place < len(text) and text[place] not in " \t\r\n;&|()<>":
        place = _end_of_part(text, place, line)
    return place


def _end_of_part(text: str, place: int, line: int) -> int:
    """Return the end of a character, of a quoted text or of brackets after ``$``."""
    if text[place] == "\\":
        return place + 2
    if text[place] in "'\"`":
        return _end_of_quotes(text, place, line)
    if text.startswith("$'", place):
        return _end_of_quotes(text, place + 1, line)
    if text.startswith(("$(", "${"), place):
        return _end_of_brackets(text, place + 1, line)
    return place + 1


def _end_of_quotes(text: str, place: int, line: int) -> int:
    mark = text[place]
    place += 1
    if mark == "'":
        place = text.find(mark, place)
        place = len(text) if place < 0 else place
    while place < len(text) and text[place] != mark:
        if text[place] == "\\":
            place += 2
        elif mark == '"' and text.startswith(("$(", "${", "`"), place):
            place = _end_of_part(text, place, line)
        else:
            place += 1
    if place >= len(text):
        _refuse("No closing quotation", line)
    return place + 1


def _end_of_brackets(text: str, place: int, line: int) -> int:
    """Return the end of the brackets that open at ``place``."""
    opening, closing = text[place], {"(": ")", "{": "}"}[text[place]]
    depth = 0
    while place < len(text):
        if text[place] in "\\'\"`":
            place = _end_of_part(text, place, line)
            continue
        if text[place] == "#" and text[place - 1] in " \t\n" and opening == "(":
            place = _end_of_line(text, place)
            continue
        depth += (text[place] == opening) - (text[place] == closing)
        place += 1
        if not depth:
            return place
    return _refuse(f"no closing {closing}", line)


def _refuse(why: str, line: int) -> int:
    raise LineError(f"cannot be read as a script: {why}", line)


# -------------------------------------------------------------------------- statements


@dataclass(frozen=True, slots=True)
class _Simple:
    tokens: tuple[_Token, ...]
    line: int


@dataclass(frozen=True, slots=True)
class _If:
    branches: tuple[tuple["_Script", "_Script"], ...]  # conditions with what they lead to
    otherwise: "_Script"


@dataclass(frozen=True, slots=True)
class _Case:
    subject: _Token
    choices: tuple[tuple[tuple[str, ...], "_Script"], ...]  # patterns with what they lead to


@dataclass(frozen=True, slots=True)
class _Loop:
    name: str  # variable of a ``for`` with a list; empty for other loops
    words: tuple[_Token, ...]
    condition: "_Script"
    body: "_Script"


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    body: "_Script"


@dataclass(frozen=True, slots=True)
class _Not:
    body: "_Script"


@dataclass(frozen=True, slots=True)
class _Subshell:
    body: "_Script"


_Script = tuple[tuple[str, "_Statement"], ...]
_Statement = _Simple | _If | _Case | _Loop | _Function | _Not | _Subshell | _Script
"""Statements, each with the operator before it: ``&&``, ``||`` or nothing."""


def _parsed(text: str, line: int) -> _Script:
    try:
        return _Parser(list(_Scanner(text, line).tokens())).script()
    except RecursionError:
        raise LineError("cannot be read as a script: nested too deeply", None) from None


class _Parser:
    """Turns tokens into statements; reserved words count only where a command may begin."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._next = 0

    def script(self, *ends: str) -> _Script:
        """Read statements up to one of some words, which is not consumed."""
        statements: list[tuple[str, _Statement]] = []
        start, connector = self._line, ""
        while (token := self._peek()) is not None and token.text not in ends:
            if token.kind == "op" and token.text != "(":
                self._next += 1
                connector = token.text if token.text in {"&&", "||"} else connector
                connector = "" if token.text in {";", "&", "|", "|&"} else connector
                continue
            statements.append((connector, self._statement(token)))
            connector = ""
        if ends and self._peek() is None:
            _refuse(f"no {ends[-1]}", start)
        return tuple(statements)

    @property
    def _line(self) -> int:
        token = self._peek() or (self._tokens[-1] if self._tokens else None)
        return token.line if token else 1

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _taken(self) -> _Token:
        token = self._peek()
        if token is None:
            _refuse("it ends within a command", self._line)
        assert token is not None
        self._next += 1
        return token

    def _after(self, word: str) -> None:
        """Consume a word that `script` has stopped at."""
        assert self._taken().text == word

    def _statement(self, token: _Token) -> _Statement:
        readers: dict[str, Callable[[], _Statement]] = {
            "if": self._if,
            "while": self._while,
            "until": self._while,
            "for": self._for,
            "select": self._for,
            "case": self._case,
            "function": self._function,
            "!": self._not,
            "{": lambda: self._until("}"),
            "(": lambda: _Subshell(self._until(")")),
        }
        if token.text not in readers:
            return self._simple(token)
        self._next += 1
        return readers[token.text]()

    def _while(self) -> _Loop:
        condition = self.script("do")
        return _Loop("", (), condition, self._body())

    def _function(self) -> _Function:
        name = self._taken().text
        self._next += 2 * (self._texts(2) == ["(", ")"])
        while self._texts(1) == ["\n"]:
            self._next += 1
        return _Function(name, self._following())

    def _not(self) -> _Not:
        return _Not(self._following())

    def _following(self) -> _Script:
        token = self._taken()
        self._next -= 1
        return (("", self._statement(token)),)

    def _texts(self, number: int) -> list[str]:
        return [token.text for token in self._tokens[self._next : self._next + number]]

    def _until(self, end: str) -> _Script:
        script = self.script(end)
        self._after(end)
        return script

    def _body(self) -> _Script:
        self._after("do")
        return self._until("done")

    def _if(self) -> _If:
        branches = []
        while True:
            condition = self._until("then")
            branches.append((condition, self.script("elif", "else", "fi")))
            end = self._taken().text
            if end == "elif":
                continue
            return _If(tuple(branches), self._until("fi") if end == "else" else ())

    def _for(self) -> _Loop:
        name, words = self._taken().text, []
        while (token := self._taken()).text not in {"do", ";", "\n"}:
            words.append(token)
        self._next -= token.text == "do"
        self.script("do")
        is_list = bool(words) and words[0].text == "in"
        return _Loop(name if is_list else "", tuple(words[1:]), (), self._body())

    def _case(self) -> _Case:
        subject = self._taken()
        choices: list[tuple[tuple[str, ...], _Script]] = []
        self._until("in")
        while True:
            while (token := self._taken()).text in {"\n", "(", ";"}:
                pass
            if token.text == "esac":
                return _Case(subject, tuple(choices))
            patterns = []
            while token.text != ")":
                patterns += [] if token.kind == "op" else [token.text]
                token = self._taken()
            body = self.script(";;", ";&", ";;&", "esac")
            choices.append((tuple(patterns), body))
            self._next += self._tokens[self._next].text != "esac"

    def _simple(self, first: _Token) -> _Statement:
        tokens = []
        is_test = first.text == "[["
        while (token := self._peek()) is not None and (token.kind != "op" or is_test):
            tokens.append(token)
            self._next += 1
            if is_test and token.text == "]]":
                break
        if len(tokens) == 1 and self._texts(2) == ["(", ")"]:
            self._next -= 1
            return self._function()
        return _Simple(tuple(tokens), first.line)


# ----------------------------------------------------------------------------- reading


class _EndError(Exception):
    """The script ends here."""


@dataclass(slots=True, kw_only=True)
class _Run:
    """One way through a script, which takes the other side of some conditions."""

    flipped: frozenset[str]
    room: int  # for characters of further words
    values: dict[str, list[str]] = field(default_factory=dict)
    wanted: Collection[str] = ()
    commands: list[Command] = field(default_factory=list)
    met: dict[str, int] = field(default_factory=dict)  # unknown conditions, with their lines
    _functions: dict[str, _Script] = field(default_factory=dict)
    _unknown: tuple[str, int, bool] = ("", 0, False)  # the last status that is not known
    _depth: int = 0
    _around: tuple[str, ...] = ()
    _outer: dict[str, list[str] | None] = field(default_factory=dict)  # of a function's variables

    def all_of(self, script: _Script) -> bool | None:
        """Read statements; return the status of the last one, None if it is not known."""
        status: bool | None = True
        for connector, statement in script:
            if connector and self._holds(status, usually=not self._unknown[2]) != (
                connector == "&&"
            ):
                continue
            status = self._one(statement)
        return status

    def _holds(self, status: bool | None, *, usually: bool = False) -> bool:  # noqa: FBT001
        """Return a status; of one that is not known what is usual, or the other in its branch."""
        if status is not None:
            return status
        text, line, _ = self._unknown
        self.met.setdefault(text, line)
        return usually != (text in self.flipped)

    def _one(self, statement: _Statement) -> bool | None:
        match statement:
            case _Simple():
                return self._simple(statement)
            case _If():
                return self._if(statement)
            case _Case():
                self._case(statement)
            case _Loop():
                self._loop(statement)
            case _Function():
                self._functions[statement.name] = statement.body
            case _Not():
                status = self.all_of(statement.body)
                return None if status is None else not status
            case _Subshell():
                with self._apart():
                    return self.all_of(statement.body)
            case tuple():
                return self.all_of(statement)
        return True

    def _if(self, statement: _If) -> bool | None:
        for condition, body in statement.branches:
            if self._holds(self.all_of(condition)):
                return self.all_of(body)
        return self.all_of(statement.otherwise)

    @contextmanager
    def _apart(self, around: Sequence[str] = ()) -> Iterator[None]:
        """Read as another shell does: its assignments and its end are its own."""
        before = self.values, self._around
        self._spend(len(self.values))
        self.values = {**self.values}
        self._around = (*self._around, *around[:_MOST_AROUND])
        try:
            yield
        except _EndError:
            pass
        finally:
            self.values, self._around = before

    def _spend(self, size: int, line: int | None = None) -> None:
        self.room -= size
        if self.room < 0:
            message = f"with its variables the script has more than {_MOST_WRITTEN_OUT} characters"
            raise LineError(message, line)

    def _restore(self, values: Mapping[str, list[str] | None]) -> None:
        for name, value in values.items():
            self.values.pop(name, None)
            self.values |= {} if value is None else {name: value}

    def _case(self, statement: _Case) -> None:
        line = statement.subject.line
        subject = self._text(statement.subject.text, line, is_test=True)
        for patterns, body in statement.choices:
            texts = [self._text(pattern, line) for pattern in patterns]
            if _UNKNOWN.search(subject) and "*" not in texts:
                self._unknown = (f"case {subject} in {'|'.join(texts)}", line, True)
                is_taken = self._holds(None)
            else:
                is_taken = any(fnmatchcase(subject, text) or text == "*" for text in texts)
            if is_taken:
                self.all_of(body)
                return

    def _loop(self, statement: _Loop) -> None:
        if self.all_of(statement.condition) is False:
            return
        words = [word for token in statement.words for word in self._words(token.text, token.line)]
        if not statement.name or len(words) > _MOST_REPEATS or any(map(_UNKNOWN.search, words)):
            self.values.pop(statement.name, None)
            self.all_of(statement.body)
            return
        for word in words:
            self.values[statement.name] = [word]
            self.all_of(statement.body)

    def _simple(self, statement: _Simple) -> bool | None:
        tokens, line = statement.tokens, statement.line
        if tokens[0].text.startswith("(("):
            return self._condition(tokens[0].text, line)
        assigned = [*takewhile(lambda token: _ASSIGNMENT.match(token.text), tokens)]
        tokens = tokens[len(assigned) :]
        if not tokens or tokens[0].text in _DECLARES:
            for token in (*assigned, *tokens):
                if match := _ASSIGNMENT.match(token.text):
                    if tokens and tokens[0].text in _IN_FUNCTIONS:
                        self._outer.setdefault(match[1], self.values.get(match[1]))
                    self._assign(token)
            return True
        is_test = tokens[0].text in _TESTS
        words = [
            word for token in tokens for word in self._words(token.text, line, is_test=is_test)
        ]
        if is_test:
            status = None if any(token.kind == "op" for token in tokens) else _tested(words)
            self._unknown = (" ".join(words), line, True)
            return status
        if not words:
            return True
        names = [_ASSIGNMENT.match(token.text) for token in assigned]
        before = {name[1]: self.values.get(name[1]) for name in names if name}
        try:
            for token in assigned:
                self._assign(token)
            return self._command(words, line)
        finally:
            self._restore(before)

    def _condition(self, text: str, line: int) -> bool | None:
        """Return the status of ``((...))``; None if it is not known."""
        for name in _CHANGED.findall(text):
            self.values[name] = [f"${text}"]
        self._unknown = (text, line, True)
        result = self._computed(f"${text}", line)
        return None if _UNKNOWN.search(result) else result != "0"

    def _command(self, words: list[str], line: int) -> bool | None:
        name, rest = words[0], words[1:]
        if name in {"exit", "return"}:
            raise _EndError
        if name in {"true", ":", "false"}:
            return name != "false"
        if name in {"echo", "printf"}:
            return True
        if name == "unset":
            for word in rest:
                self.values.pop(word, None)
        elif name == "eval":
            self._inner(" ".join(rest), line, is_script=True)
        elif name in self._functions:
            self._call(name, rest)
        else:
            kept = tuple(self._without_scripts(words, line))
            values = {name: " ".join(self.values.get(name, [])) for name in self.wanted}
            variables = {name: value for name, value in values.items() if value}
            self.commands.append(
                Command(line=line, words=kept, around=self._around, variables=variables)
            )
        self._unknown = (" ".join(words)[: 2**9], line, False)
        return None

    def _call(self, name: str, arguments: list[str]) -> None:
        positions = {str(number): [word] for number, word in enumerate(arguments[:9], start=1)}
        before, self._outer = self._outer, {key: self.values.get(key) for key in positions}
        self.values |= positions
        self._nested(self._functions[name])
        self._restore(self._outer)
        self._outer = before

    def _nested(self, script: _Script) -> None:
        if self._depth == _DEEPEST:
            raise RecursionError
        self._depth += 1
        try:
            self.all_of(script)
        except _EndError:
            pass
        finally:
            self._depth -= 1

    def _without_scripts(self, words: list[str], line: int) -> Iterator[str]:
        """Yield the words of a command, and read scripts among them, as of ``bash -c``."""
        before = ""
        for index, word in enumerate(words):
            parts = word.partition("=") if word.startswith("--") else ("", "", word)
            flag, value = parts[0], parts[2]
            if not re.search(r"\s", _SUBSTITUTION.sub("", word)):
                yield word
            elif flag and not re.search(r"\s", flag):
                is_script = flag == "--wrap"
                with self._apart(words[:index]):
                    self._inner(value, line, is_script=is_script)
                yield flag if is_script else word
            elif flag:
                yield from _PIECE.findall(word)
            elif _FLAGS_INSIDE.search(word):
                is_script = before.endswith("c") or before == "--wrap"
                with self._apart(words[:index]):
                    self._inner(word, line, is_script=is_script)
            else:
                yield word
            before = word

    def _inner(self, text: str, line: int, *, is_script: bool) -> None:
        if not _FLAGS_INSIDE.search(text):
            return
        try:
            script = _parsed(text, line)
        except LineError:
            if is_script:
                raise
            return
        self._nested(script)

    def _assign(self, token: _Token) -> None:
        match = _ASSIGNMENT.match(token.text)
        assert match is not None
        name, adds, raw = match[1], match[2] or "[" in match[0], token.text[match.end() :]
        before = self.values.get(name, []) if adds else []
        if token.kind == "array":
            inner = _Scanner(raw[1:-1], token.line).tokens()
            words = [
                word
                for part in inner
                if part.kind == "word"
                for word in self._words(part.text, part.line, whole=token.text)
            ]
            self.values[name] = before + words
        else:
            text = self._text(raw, token.line, whole=token.text)
            is_text = adds and len(before) == 1 and "[" not in match[0]
            self.values[name] = [before[0] + text] if is_text else [*before, text]
        if sum(map(len, self.values[name])) > MOST_CHARACTERS:
            raise _too_long(token.text, token.line)

    def _text(self, raw: str, line: int, *, whole: str = "", is_test: bool = False) -> str:
        """Return a word without splitting it."""
        return " ".join(self._words(raw, line, whole=whole, is_test=is_test, splits=False))

    def _words(
        self, raw: str, line: int, *, whole: str = "", is_test: bool = False, splits: bool = True
    ) -> list[str]:
        """Return the words that a word of the script stands for."""
        fields = _Fields(splits=splits)
        for text, is_quoted in _parts(raw):
            variable = None if is_quoted is None else _VARIABLE.fullmatch(text)
            values = [text]
            if variable is not None:
                values = self._values(variable, line, is_test=is_test)
            elif is_quoted is not None and _ARITHMETIC.fullmatch(text):
                values = [self._computed(text, line)]
            fields.add(values, is_quoted=is_quoted is not False or variable is None)
            if fields.size > MOST_CHARACTERS:
                raise _too_long(whole or raw, line)
        self._spend(max(fields.size, _LEAST_CHARACTERS), line)
        return fields.words

    def _computed(self, text: str, line: int) -> str:
        """Return the result of ``$((...))``; the text itself if its variables are not all known."""
        inner = self._text(text[3:-2], line)
        if len(inner) > _MOST_COMPUTED:
            return text
        for name in {*re.findall(r"[A-Za-z_]\w*", inner)}:
            value = " ".join(self.values.get(name, [name]))
            inner = re.sub(rf"\b{name}\b", value.replace("\\", ""), inner)
        result = None if len(inner) > _MOST_COMPUTED else _result_of(inner)
        return text if result is None else str(result)

    def _values(self, variable: re.Match[str], line: int, *, is_test: bool) -> list[str]:
        """Return the value of a variable; the variable itself if the script does not set it."""
        name, operator, default = variable[1] or variable[2], variable[4], variable[5]
        value = self.values.get(name)
        if operator and (value is None or (operator[0] == ":" and value in ([], [""]))):
            if value is None and is_test and not default:
                return [variable[0]]  # a question to the environment
            text = self._text(default, line, is_test=is_test)
            if operator.endswith("="):
                self.values[name] = [text]
            return [text]
        if value is None:
            return [variable[0]]
        return value if variable[3] else (value[:1] or [""])


class _Fields:
    """Words that are put together from parts."""

    def __init__(self, *, splits: bool) -> None:
        self.words: list[str] = []
        self.size = 0
        self._splits = splits
        self._is_open = False

    def add(self, values: Iterable[str], *, is_quoted: bool) -> None:
        for number, value in enumerate(values):
            pieces = [value] if is_quoted or not self._splits else _PIECE.findall(value)
            for index, piece in enumerate(pieces):
                if self._is_open and not number and not index:
                    self.words[-1] += piece
                else:
                    self.words.append(piece)
                self._is_open = True
                self.size += len(piece)


def _too_long(raw: str, line: int) -> LineError:
    return LineError(
        f"{shown(raw)} is more than {MOST_CHARACTERS} characters when it is written out", line
    )


_PLAIN: Final = re.compile(r"[^\\'\"`$]+")
_PLAIN_IN_QUOTES: Final = re.compile(r"[^\\`$]+")


def _parts(raw: str, *, is_quoted: bool = False) -> Iterator[tuple[str, bool | None]]:
    """Yield the parts of a word without quotes, each with whether it stood in quotes.

    None stands for a text in which nothing is replaced.
    """
    place = 0
    while place < len(raw):
        plain = (_PLAIN_IN_QUOTES if is_quoted else _PLAIN).match(raw, place)
        variable = _VARIABLE.match(raw, place)
        if plain:
            end = plain.end()
            yield plain[0], None
        elif variable:
            end = variable.end()
            yield variable[0], is_quoted
        elif raw[place] == "\\":
            end = place + 2
            keeps = is_quoted and raw[place + 1 : end] not in {"$", '"', "\\", "`", "\n"}
            yield raw[place + (not keeps) : end].removesuffix("\n"), None
        elif raw[place] in "$`":
            end = _end_of_part(raw, place, 0)
            yield raw[place:end], is_quoted
        else:
            end = _end_of_quotes(raw, place, 0)
            inner = raw[place + 1 : end - 1]
            yield "", None
            yield from [(inner, None)] if raw[place] == "'" else _parts(inner, is_quoted=True)
        place = end


def _tested(words: list[str]) -> bool | None:
    """Return the result of a test; None if it is not known from the script alone."""
    match [word for word in words[1:] if word not in {"]", "]]"}]:
        case ["!", *rest]:
            result = _tested([words[0], *rest])
            return None if result is None else not result
        case ["-z" | "-n" as operator, text] if not _UNKNOWN.search(text):
            return (text == "") == (operator == "-z")
        case [one, operator, other] if not _UNKNOWN.search(one + other):
            if operator in {"=", "==", "!="}:
                is_pattern = words[0] == "[["
                is_equal = fnmatchcase(one, other) if is_pattern else one == other
                return is_equal == (operator != "!=")
            if operator in _COMPARISONS and one.isdecimal() and other.isdecimal():
                return _COMPARISONS[operator](int(one), int(other))
    return None


def _result_of(text: str) -> int | None:
    """Return the value of sums, products and comparisons of integers; None for any other text.

    Example:
        >>> _result_of("2 * (3 + 4) / 4")
        3
    """
    if not re.fullmatch(r"(?:[0-9]{1,9}|[-+*/%()<>=! ])+", text):
        return None
    try:
        return _value_of(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value_of(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case (
            ast.BinOp(left=left, op=operator, right=right)
            | ast.Compare(left=left, ops=[operator], comparators=[right])
        ) if type(operator) in _OPERATIONS:
            return int(_OPERATIONS[type(operator)](_value_of(left), _value_of(right)))
    raise ValueError("not a sum, product or comparison of integers")
