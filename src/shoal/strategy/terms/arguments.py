"""The kinds of argument a term may take, each of which checks one value and says plainly what was wrong with
it.

A term class declares its arguments with these (`n: int = size()`), and everything else reads the declaration:
the constructor, the text form, the error messages and the generators of the tests. So an argument is
described in one place only.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

from shoal.common.suggest import nearest_name

LARGEST_SIZE = 1_048_576
"""No axis has more parts than this: far beyond any machine, and small enough that products stay readable."""

LARGEST_COUNT = 1_000_000_000
"""The bound of counts that are not sizes of an axis: steps, micro-batches, columns of a sketch."""

REQUIRED: Any = object()
"""Marks an argument without a default."""


class TermError(ValueError):
    """A term or a product of terms that cannot be built: which argument (or which factor) is at fault, and
    what to write.
    """

    def __init__(
        self,
        message: str,
        *,
        argument: str | int | None = None,
        index: int | None = None,
        suggestion: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.argument = argument
        """The name of the argument at fault, or its place among the positional ones."""
        self.index = index
        """The place of the factor at fault in a product."""
        self.suggestion = suggestion
        """What to write instead, ready to be shown after "did you mean"."""

    def __str__(self) -> str:
        return self.message + (f" (did you mean {self.suggestion}?)" if self.suggestion else "")


def shown(value: object) -> str:
    """A value as an error message quotes it: short, whatever it was."""
    try:
        text = repr(value)
    except Exception:  # A foreign object may fail to print; the message about it must not.
        text = f"a {type(value).__name__}"
    return shortened(text)


def shortened(text: str) -> str:
    """A text as an error message quotes it: not longer than a line can bear."""
    return text if len(text) <= 60 else text[:57] + "..."


class Argument:
    """One argument of a term: its name (set by the class around it), its default, and what it accepts."""

    def __init__(self, *, default: Any, kw_only: bool, sample: Any = None) -> None:
        self.name = ""
        self.default = default
        self.kw_only = kw_only
        self.sample = sample
        """A value for examples, tables and measurements."""

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    def default_for(self, values: Mapping[str, Any]) -> Any:
        """The default, which may follow from the arguments declared before this one."""
        return self.default(values) if callable(self.default) else self.default

    @property
    def expects(self) -> str:
        """What the argument accepts, in words that complete "expected ..."."""
        raise TypeError(f"{type(self).__name__} does not define what it expects")

    def accept(self, value: Any) -> Any:
        """The value in its normal form, or a TermError."""
        raise TypeError(f"{type(self).__name__} does not define what it accepts")

    def refuse(self, value: object, *, suggestion: str | None = None) -> TermError:
        return TermError(
            f"{self.name} is {shown(value)}; expected {self.expects}",
            argument=self.name,
            suggestion=suggestion,
        )


class Integer(Argument):
    """A whole number between two bounds. Anything with `__index__` will do, except a truth value."""

    def __init__(self, low: int, high: int, *, default: Any, kw_only: bool, sample: int | None = None) -> None:
        super().__init__(default=default, kw_only=kw_only, sample=max(low, 2) if sample is None else sample)
        self.low = low
        self.high = high

    @property
    def expects(self) -> str:
        if self.high >= LARGEST_SIZE:
            return f"a whole number of at least {self.low} (and at most {self.high})"
        return f"a whole number from {self.low} to {self.high}"

    def accept(self, value: Any) -> int:
        if isinstance(value, bool):
            raise self.refuse(value, suggestion=f"{self.name}={max(int(value), self.low)}")
        try:
            number = operator.index(value)
        except TypeError:
            raise self.refuse(value) from None
        if not self.low <= number <= self.high:
            raise self.refuse(value if abs(number) < 10**40 else "a number of more than 40 digits")
        return number


class Real(Argument):
    """A finite number above one bound (or at least that) and at most another."""

    def __init__(
        self,
        above: float,
        high: float,
        *,
        default: Any,
        kw_only: bool,
        sample: float | None = None,
        inclusive: bool = False,
    ) -> None:
        super().__init__(default=default, kw_only=kw_only, sample=high if sample is None else sample)
        self.above = above
        self.high = high
        self.inclusive = inclusive

    @property
    def expects(self) -> str:
        if self.inclusive:
            return f"a number from {self.above:g} to {self.high:g}"
        return f"a number above {self.above:g} and at most {self.high:g}"

    def accept(self, value: Any) -> float:
        if isinstance(value, (bool, str, bytes)):
            raise self.refuse(value)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise self.refuse(value) from None
        if not math.isfinite(number) or not self.above <= number <= self.high:
            raise self.refuse(value)
        if number == self.above and not self.inclusive:
            raise self.refuse(value)
        return number


class Choice(Argument):
    """One of a few words."""

    def __init__(self, choices: tuple[str, ...], *, default: Any, kw_only: bool) -> None:
        super().__init__(default=default, kw_only=kw_only, sample=choices[0])
        self.choices = choices

    @property
    def expects(self) -> str:
        return ("one of " if len(self.choices) > 1 else "") + ", ".join(f'"{choice}"' for choice in self.choices)

    def accept(self, value: Any) -> str:
        if isinstance(value, str) and value in self.choices:
            return str(value)
        near = nearest_name(value, self.choices) if isinstance(value, str) else None
        raise self.refuse(value, suggestion=f'"{near}"' if near else None)


class Flag(Argument):
    """True or False."""

    @property
    def expects(self) -> str:
        return "True or False"

    def accept(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        raise self.refuse(value)


class Nested(Argument):
    """A term of another family, such as the `sync` of a level of data parallelism."""

    def __init__(self, family: str, *, default: Any, kw_only: bool) -> None:
        super().__init__(default=default, kw_only=kw_only)
        self.family = family

    @property
    def expects(self) -> str:
        from shoal.strategy.terms.term import REGISTRY

        return f"one of {', '.join(REGISTRY.of(self.family))}"

    def accept(self, value: Any) -> Any:
        from shoal.strategy.terms.term import Term

        if isinstance(value, type) and issubclass(value, Term) and value.family == self.family:
            value = value()  # `compress=fp16` says the same as `compress=fp16()`.
        if isinstance(value, Term):
            if value.family == self.family:
                return value
            if value.family in ("sync", "via", "compress"):
                raise self.refuse(value, suggestion=f"{value.family}={value}")
        raise self.refuse(value)


def integer(
    low: int, high: int = LARGEST_COUNT, *, default: Any = REQUIRED, kw_only: bool = False, sample: int | None = None
) -> Any:
    """A whole number from `low` to `high`."""
    return Integer(low, high, default=default, kw_only=kw_only, sample=sample)


def size() -> Any:
    """The number of parts of an axis."""
    return Integer(1, LARGEST_SIZE, default=REQUIRED, kw_only=False)


def real(
    above: float,
    high: float,
    *,
    default: Any = REQUIRED,
    kw_only: bool = False,
    sample: float | None = None,
    inclusive: bool = False,
) -> Any:
    """A number above one bound (with `inclusive`, at least that) and at most another."""
    return Real(above, high, default=default, kw_only=kw_only, sample=sample, inclusive=inclusive)


def choice(*choices: str, default: Any = REQUIRED, kw_only: bool = False) -> Any:
    """One of the words given."""
    return Choice(choices, default=default, kw_only=kw_only)


def flag(*, default: bool, kw_only: bool = False) -> Any:
    """True or False."""
    return Flag(default=default, kw_only=kw_only)


def nested(family: str, *, default: Any, kw_only: bool = False) -> Any:
    """A term of the family named."""
    return Nested(family, default=default, kw_only=kw_only)
