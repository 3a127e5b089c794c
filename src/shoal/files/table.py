"""`Table`: what a table of a file may hold, as a pydantic model, and the kinds of values in it.

A value that cannot be is refused in a sentence: what was given and where, what is expected with its unit, what to do.
Every kind of value says itself what it expects; pydantic adds where in the file that was.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from math import isfinite, isnan
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, create_model, model_validator

from shoal.common.suggest import did_you_mean
from shoal.files.quantities import BadQuantity, duration, rate, size
from shoal.files.toml import BadFile


class WrongKeys(ValueError):
    """What is wrong with the keys of a table, as the end of a sentence whose subject is the table."""


class Table(BaseModel):
    """A table of a file: every key is known, and those without a default are there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, given: Any) -> Any:
        if isinstance(given, cls):
            return given
        if not isinstance(given, dict):
            raise ValueError(f" is {shown(given)}; expected a table")
        known = list(cls.model_fields)
        if cls.model_config.get("extra") == "forbid":
            for key in given:
                if key not in known:
                    near = did_you_mean(key, known)
                    raise WrongKeys(f" has an unknown key {shown(key)}{near}; known are {', '.join(known)}")
        for key, field in cls.model_fields.items():
            if field.is_required() and key not in given:
                raise WrongKeys(f" has no {key}" + (f"; give {field.examples[0]}" if field.examples else ""))
        return given


Checked = TypeVar("Checked", bound=Table)


def checked(schema: type[Checked], values: Mapping[str, Any]) -> Checked:
    """The tables of a file, if they are as the schema has them.

    Raises:
        BadFile: The first thing that is not.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise BadFile(_sentence(error)) from None


def table_of_numbers(name: str, numbers: Iterable[str]) -> type[Table]:
    """The schema of a file of a name and numbers of at least 0, none of which has to be given."""
    fields: dict[str, Any] = {number: (AtLeastZero | None, None) for number in numbers}
    return create_model(name, __base__=Table, name=(Text | None, None), **fields)


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = tuple(each for each in first["loc"] if not str(each).startswith("("))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, WrongKeys):
        return f"{_table(path)}{cause}"
    expected = first["msg"].removeprefix("Input should be ")
    return _value(path) + (str(cause) if cause is not None else f" is {shown(first['input'])}; expected {expected}")


def _table(path: tuple[int | str, ...]) -> str:
    match path:
        case ():
            return "it"
        case (name, int(number)):
            return f"{name} {number + 1}"
    return f"[{'.'.join(map(str, path))}]"


def _value(path: tuple[int | str, ...]) -> str:
    match path:
        case ():
            return "it"
        case (*outer, int(number)):
            return f"number {number + 1} of {_value(tuple(outer))}"
        case (name,):
            return str(name)
    return f"{path[-1]} of {_table(path[:-1])}"


def shown(value: Any) -> str:
    """A value as a refusal quotes it: short, whatever it was."""
    return f"{value:g}" if isinstance(value, float) else reprlib.repr(value)


def _number(expected: str, fits: Callable[[float], bool]) -> BeforeValidator:
    def check(value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        try:
            if is_number and not isnan(value) and fits(float(value)):
                return float(value)
        except OverflowError:  # An integer that no float can hold.
            pass
        raise ValueError(f" is {shown(value)}; expected {expected}")

    return BeforeValidator(check)


def seconds(largest: float, *, zero: bool = False) -> BeforeValidator:
    """Seconds up to a largest number, 0 only where `zero` says so."""
    least = "0" if zero else "above 0"
    return _number(f"seconds, {least} to {largest:g}", lambda each: 0 <= each <= largest and (each > 0 or zero))


def integer(least: int) -> BeforeValidator:
    """A whole number, also if it is written 8.0 or 1e3."""
    return _number(f"a whole number, at least {least}", lambda each: each >= least and each.is_integer())


def _quantity(read: Callable[[object], float], *, zero: bool = False) -> BeforeValidator:
    def check(value: Any) -> str:
        try:
            found = read(value)
        except BadQuantity as error:
            raise ValueError(f": {error}") from None
        if not found and not zero:
            raise ValueError(f" is {value}; expected a finite number above 0")
        return str(value)

    return BeforeValidator(check)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f" is {shown(value)}; expected text")
    return value


Text = Annotated[str, BeforeValidator(_text)]
Number = Annotated[float, _number("a finite number", isfinite)]
Positive = Annotated[float, _number("a finite number above 0", lambda each: 0 < each < float("inf"))]
AtLeastZero = Annotated[float, _number("a finite number, at least 0", lambda each: 0 <= each < float("inf"))]
Count = Annotated[int, integer(1)]
Rate = Annotated[str, _quantity(rate)]
Size = Annotated[str, _quantity(size)]
Duration = Annotated[str, _quantity(duration, zero=True)]
