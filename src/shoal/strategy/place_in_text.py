"""The error of a text that is no strategy: the text, a caret under the place, and what would be right."""

from __future__ import annotations

from typing import Any


class StrategyError(ValueError):
    """A text that is no strategy: the text, the place, what is wrong with it and what would be right."""

    def __init__(self, message: str, *, text: str, column: int, length: int = 1, suggestion: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.text = text
        self.column = column
        """The place as an index into the text, from 0."""
        self.length = length
        self.suggestion = suggestion

    def __str__(self) -> str:
        # The message comes first: whatever a caller writes before it, the caret below stays under its place.
        lines = [self.message + (f". Did you mean {self.suggestion}?" if self.suggestion else "")]
        if self.text.strip():
            lines += _marked(self.text, self.column, self.length)
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.message, self.text, self.column, self.length, self.suggestion)


def _rebuilt(message: str, text: str, column: int, length: int, suggestion: str | None) -> StrategyError:
    return StrategyError(message, text=text, column=column, length=length, suggestion=suggestion)


def _marked(text: str, column: int, length: int) -> list[str]:
    """The line of the text that holds the place, and a line with carets under it."""
    start = max(text.rfind(end, 0, column) for end in "\n\r") + 1
    ends = [at for at in (text.find(end, start) for end in "\n\r") if at >= 0]
    line = text[start : min(ends, default=len(text))]
    column -= start
    length = max(min(length, len(line) - column), 1)
    if len(line) > 160:  # A long line would wrap and part the caret from its place.
        cut = max(column - 60, 0)
        line, column = line[cut : cut + 120], column - cut
        length = min(length, max(len(line) - column, 1))
    line = "".join(character if character.isprintable() else " " for character in line)
    under = "".join(" " * _width(character) for character in line[:column])
    carets = "".join("^" * _width(character) for character in line[column : column + length])
    return ["  " + line, "  " + under + (carets or "^")]


def _width(character: str) -> int:
    """The columns a character takes on a terminal."""
    if character.isascii():
        return 1
    from unicodedata import combining, east_asian_width

    return 0 if combining(character) else 2 if east_asian_width(character) in "WF" else 1
