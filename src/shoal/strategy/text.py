"""From text to strategy. The text is read as a Python syntax tree and walked against the closed list of
terms; nothing is evaluated.

Whatever is wrong, and however strange the text, the answer is a StrategyError that shows the text with a
caret under the place, says what was expected, and names the nearest thing that would have been right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, simplefilter

from shoal.common.suggest import nearest_name
from shoal.strategy.expression import SERIAL, Strategy
from shoal.strategy.place_in_text import StrategyError
from shoal.strategy.terms.arguments import Argument, Nested, TermError, shortened
from shoal.strategy.terms.term import FAMILIES, REGISTRY, Term

if TYPE_CHECKING:
    import ast

LONGEST_TEXT = 4096
"""Characters of a strategy. The longest sensible one has a few hundred."""

EXAMPLE = "dp(8, zero=1) * tp(2)"


def parse(text: str) -> Strategy:
    """The strategy that a text describes.

    >>> parse('dp(2) * tp(2)') == dp(2) * tp(2)
    True
    """
    if not isinstance(text, str):
        raise TypeError(f"parse reads text, not {type(text).__name__}; expected a string such as {EXAMPLE!r}")
    return _Reader(text).strategy()


_UNQUOTED = "{} is a word here, and words (schedules, methods, precisions) need quotes"


def _words() -> set[str]:
    """All words that some argument may be."""
    arguments = (argument for term in REGISTRY.values() for argument in term.arguments.values())
    return {word for argument in arguments for word in getattr(argument, "choices", ())}


class _Reader:
    """One text on its way to a strategy; knows the text, so that any step can point into it."""

    def __init__(self, text: str) -> None:
        self.text = text
        # One line, with every character where it was: positions in it are positions in the text. A strategy
        # may be written over
        # several lines, and Python would otherwise want those in parentheses.
        self.line = "".join(" " if character.isspace() else character for character in text)
        self.start = len(self.line) - len(self.line.lstrip())
        self.code = self.line.strip()

    def error(
        self, message: str, node: ast.expr | ast.keyword | None = None, *, suggestion: str | None = None
    ) -> StrategyError:
        column, length = 0, max(len(self.code), 1)
        if node is not None:
            column = self._characters(node.col_offset)
            length = max(self._characters(node.end_col_offset or node.col_offset) - column, 1)
        return StrategyError(message, text=self.text, column=self.start + column, length=length, suggestion=suggestion)

    def _characters(self, utf8_offset: int) -> int:
        """The syntax tree counts bytes; people count characters."""
        return len(self.code.encode()[:utf8_offset].decode(errors="ignore"))

    def strategy(self) -> Strategy:
        import ast  # Only reading text pays for this import.

        root = self._tree(ast)
        factors: list[ast.expr] = []
        pending = [root]
        while pending:  # A loop, because a long product is a deep tree.
            node = pending.pop()
            if isinstance(node, ast.BinOp):
                if not isinstance(node.op, ast.Mult):
                    raise self._wrong_operator(node)
                pending += [node.right, node.left]
            else:
                factors.append(node)
        nodes: list[ast.expr] = []
        terms: list[Term] = []
        for node in factors:
            if not self._is_serial(ast, node):
                terms.append(self._factor(ast, node))
                nodes.append(node)
        try:
            return Strategy(*terms)
        except TermError as error:
            at = nodes[error.index] if error.index is not None else None
            raise self.error(error.message, at, suggestion=error.suggestion) from None

    def _tree(self, ast: Any) -> ast.expr:
        """The syntax tree of the text, or a StrategyError for anything Python itself cannot read."""
        if not self.code:
            raise self.error(f'the strategy is empty; expected an expression such as {EXAMPLE}, or "{SERIAL}"')
        if len(self.text) > LONGEST_TEXT:
            raise StrategyError(
                f"the strategy has {len(self.text):,} characters; at most {LONGEST_TEXT:,} are read",
                text=self.text[:72].strip() or EXAMPLE,
                column=0,
            )
        for column, character in enumerate(self.line):
            # A comment would swallow the rest, a backslash would draw warnings from Python, the others cannot
            # be shown.
            if character in "#\\" or not (character.isprintable() or character.isspace()):
                raise StrategyError(
                    f"the character {character!a} has no place in a strategy",
                    text=self.text,
                    column=column,
                )
        try:
            with catch_warnings():
                simplefilter("ignore")  # Python warns of oddities such as 2if; here they are errors anyway.
                tree: ast.Expression = ast.parse(self.code, mode="eval")
        except SyntaxError as error:
            raise self._unreadable(error) from None
        except (RecursionError, MemoryError, ValueError):
            raise self.error("this is nested too deeply for a strategy") from None
        return tree.body

    def _unreadable(self, error: SyntaxError) -> StrategyError:
        at = min(max((error.offset or 1) - 1, 0), len(self.code) - 1)
        word = next((word for word in _words() if self.code.startswith(word, at)), None)
        if word is not None:  # 1f1b, which Python takes for a number.
            return StrategyError(
                _UNQUOTED.format(word),
                text=self.text,
                column=self.start + at,
                length=len(word),
                suggestion=f'"{word}"',
            )
        message = (error.msg or "invalid syntax").removeprefix("invalid syntax. ")
        opened, closed = self.code.count("("), self.code.count(")")
        if opened > closed:
            message = (
                f"{opened - closed} closing parenthesis missing" if opened - closed == 1 else "parentheses stay open"
            )
        elif "comma" in message or message == "invalid syntax":
            message = f"cannot read this; terms are joined by *, as in {EXAMPLE}"
        elif "limit" in message:
            message = "this number has too many digits"
        return StrategyError(message, text=self.text, column=self.start + at)

    def _wrong_operator(self, node: ast.BinOp) -> StrategyError:
        left_end = self._characters(node.left.end_col_offset or 0)
        right_start = self._characters(node.right.col_offset)
        between = self.code[left_end:right_start]
        # Closing and opening parentheses may stand between the operands and the operator.
        at = left_end + len(between) - len(between.lstrip(" )"))
        symbol = self.code[at:right_start].rstrip(" (") or "this"
        return StrategyError(
            f"{symbol} does not join terms; terms multiply",
            text=self.text,
            column=self.start + at,
            length=len(symbol),
            suggestion="*",
        )

    def _is_serial(self, ast: Any, node: ast.expr) -> bool:
        if isinstance(node, ast.Call) and not node.args and not node.keywords:
            node = node.func
        return isinstance(node, ast.Name) and node.id == SERIAL

    def _factor(self, ast: Any, node: ast.expr) -> Term:
        if isinstance(node, ast.Call):
            return self._call(ast, node)
        if isinstance(node, ast.Name):
            return self._build(ast, self._class_of(node), node, [], [])
        if isinstance(node, ast.Constant):
            raise self.error(f"a term was expected here, not {node.value!r:.40}; for example {EXAMPLE}", node)
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            raise self.error("terms are not listed, they multiply: join them with *", node)
        raise self.error(f"this has no place in a strategy; terms such as {EXAMPLE} have", node)

    def _class_of(self, node: ast.Name, wanted: Argument | None = None) -> type[Term]:
        """The term of this name; `wanted` is the argument whose value it would be."""
        found = REGISTRY.get(node.id)
        if found is not None:
            return found
        if isinstance(wanted, Nested):
            near = nearest_name(node.id, list(REGISTRY.of(wanted.family)))
            known = "" if near else f"; {wanted.name} takes {wanted.expects}"
        else:
            near = nearest_name(node.id, [*REGISTRY, SERIAL])
            known = "" if near else f"; the axes are {', '.join(REGISTRY.of('axis'))}"
        raise self.error(f"there is no term {shortened(node.id)}{known}", node, suggestion=near)

    def _call(self, ast: Any, node: ast.Call, wanted: Argument | None = None) -> Term:
        if not isinstance(node.func, ast.Name):
            raise self.error("only a term can be called, by its plain name", node.func)
        return self._build(ast, self._class_of(node.func, wanted), node, node.args, node.keywords)

    def _build(
        self, ast: Any, cls: type[Term], node: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]
    ) -> Term:
        positional: list[Any] = []
        by_place = [name for name, argument in cls.arguments.items() if not argument.kw_only]
        for index, argument in enumerate(args):
            if isinstance(argument, ast.Starred):
                raise self.error("arguments are written out one by one", argument)
            wanted = cls.arguments[by_place[index]] if index < len(by_place) else None
            positional.append(self._value(ast, argument, wanted))
        named: dict[str, Any] = {}
        places: dict[str | int, ast.expr | ast.keyword] = dict(enumerate(args))
        for keyword in keywords:
            if keyword.arg is None:
                raise self.error("arguments are written out one by one", keyword)
            if keyword.arg in named:
                raise self.error(f"{cls.__name__}: {shortened(keyword.arg)} is given twice", keyword)
            if keyword.arg in cls.arguments:
                named[keyword.arg] = self._value(ast, keyword.value, cls.arguments[keyword.arg])
                places[keyword.arg] = keyword.value
            else:
                named[keyword.arg] = None
                places[keyword.arg] = keyword
        for index, name in enumerate(by_place[: len(args)]):
            places.setdefault(name, args[index])
        try:
            return cls(*positional, **named)
        except TermError as error:
            place = None if error.argument is None else places.get(error.argument)
            raise self.error(error.message, place or node, suggestion=error.suggestion) from None

    def _value(self, ast: Any, node: ast.expr, wanted: Argument | None) -> Any:
        """The value of the argument `wanted`: a constant, a negative number (so that its range can be named), or a
        term.
        """
        if isinstance(node, ast.Constant):
            if isinstance(node.value, (bool, int, float, str)):
                return node.value
            raise self.error(
                f"{node.value!r:.40} is no value for an argument; expected a number, a word or a term", node
            )
        if (
            isinstance(node, ast.UnaryOp)
            and isinstance(node.op, (ast.USub, ast.UAdd))
            and isinstance(node.operand, ast.Constant)
            and type(node.operand.value) in (int, float)
        ):
            number = node.operand.value
            return -number if isinstance(node.op, ast.USub) else number
        if isinstance(node, ast.Call):
            return self._nested(self._call(ast, node, wanted), node)
        if isinstance(node, ast.Name):
            if node.id in REGISTRY:
                return self._nested(self._build(ast, REGISTRY[node.id], node, [], []), node)
            if node.id in _words():
                raise self.error(_UNQUOTED.format(node.id), node, suggestion=f'"{node.id}"')
            self._class_of(node, wanted)  # raises
        written = self.code[self._characters(node.col_offset) : self._characters(node.end_col_offset or 0)]
        if written in _words():  # zero-bubble, which Python takes for a difference.
            raise self.error(_UNQUOTED.format(written), node, suggestion=f'"{written}"')
        raise self.error("this is no value for an argument; expected a number, a word in quotes or a term", node)

    def _nested(self, term: Term, node: ast.expr) -> Term:
        if term.family in ("axis", "modifier"):
            raise self.error(f"{type(term).__name__} is {FAMILIES[term.family].format(name=type(term).__name__)}", node)
        return term
