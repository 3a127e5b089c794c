"""What all terms have in common: frozen values with checked arguments, one canonical text, and an entry in a
closed registry.

A term is one class. Declaring it enters its name; the parser, the legality rules, `explain` and the taxonomy
all read that entry. The classes are not `dataclasses` because forty of those would cost more time at import
than everything else here together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, dataclass_transform

from shoal.common.suggest import nearest_name
from shoal.strategy.terms.arguments import (
    Argument,
    TermError,
    choice,
    flag,
    integer,
    nested,
    real,
    shortened,
    size,
)

if TYPE_CHECKING:
    from typing import Self

    from shoal.strategy.expression import Strategy

Family = Literal["axis", "modifier", "sync", "via", "compress"]

FAMILIES: dict[str, str] = {
    "axis": "an axis, which multiplies: {name}(...)",
    "modifier": "a modifier, which multiplies: {name}(...)",
    "sync": "a way to synchronise: write it as dp(n, sync={name}(...))",
    "via": "a path for gradients: write it as dp(n, via={name}(...))",
    "compress": "a compression: write it as dp(n, compress={name}(...))",
}
"""Each family of terms and where its members stand in an expression."""


def technique_names(kind: str) -> list[str]:
    """The files of a folder of `shoal/technique`: one technique each, with a class of the file's name."""
    folder = os.path.join(os.path.dirname(__file__), "..", "..", "technique", kind)
    return sorted(file[:-3] for file in os.listdir(folder) if file.endswith(".py") and not file.startswith("_"))


class Registry(Mapping[str, "type[Term]"]):
    """Every term by its name. One that is a file of `shoal/technique` is imported when it is first asked for."""

    def __init__(self) -> None:
        self._terms: dict[str, type[Term] | None] = {}
        self._families: dict[str, Family] = {}

    def enter(self, term: type[Term]) -> None:
        """A class that has just been declared."""
        name = term.__name__
        if self._terms.get(name) is not None:
            raise TypeError(f"the term {name} exists already")
        self._terms[name], self._families[name] = term, term.family

    def find(self, family: Family) -> None:
        """The terms of a family that are a file each."""
        for name in technique_names(family):
            self._terms.setdefault(name, None)
            self._families[name] = family

    def of(self, family: str) -> list[str]:
        """The names of all terms of a family."""
        return [name for name, of in self._families.items() if of == family]

    def __getitem__(self, name: str) -> type[Term]:
        term = self._terms[name]
        if term is None:
            term = _declared(self._families[name], name)
        return term

    def __iter__(self) -> Iterator[str]:
        return iter(self._terms)

    def __len__(self) -> int:
        return len(self._terms)

    def __contains__(self, name: object) -> bool:
        return name in self._terms


def _declared(kind: str, name: str) -> Any:
    """The class of a technique's file."""
    found = getattr(import_module(f"shoal.technique.{kind}.{name}"), name, None)
    if found is None:
        raise ValueError(f"technique/{kind}/{name}.py must declare a class called {name}")
    return found


REGISTRY = Registry()
"""The closed list of terms, in the order of declaration."""


class Techniques(Mapping[str, Any]):
    """Techniques that are no terms, by name: one object of each file's class, made when it is first asked for."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._made: dict[str, Any] = dict.fromkeys(technique_names(kind))

    def __getitem__(self, name: str) -> Any:
        if self._made[name] is None:
            self._made[name] = _declared(self._kind, name)()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def __contains__(self, name: object) -> bool:
        return name in self._made


@dataclass_transform(frozen_default=True, field_specifiers=(integer, size, real, choice, flag, nested))
class Term:
    """A frozen value with a name and checked arguments. Equal arguments make equal terms."""

    family: ClassVar[Family]
    title: ClassVar[str] = ""
    """The technique in a few words, as a table of techniques names it."""
    where: ClassVar[str] = ""
    """Where it runs well: the links or the part of the machine it is made for."""
    arguments: ClassVar[dict[str, Argument]] = {}

    def __init_subclass__(cls) -> None:
        declared = {name: value for name, value in vars(cls).items() if isinstance(value, Argument)}
        for name, argument in declared.items():
            argument.name = name
            delattr(cls, name)
        cls.arguments = declared
        if "family" in vars(cls):
            return  # A family's base class is no term.
        REGISTRY.enter(cls)

    def __init__(self, *positional: Any, **named: Any) -> None:
        if type(self).__name__ not in REGISTRY:
            raise TypeError(f"{type(self).__name__} is a family of terms, not a term")
        given = self._bind(positional, named)
        values: dict[str, Any] = {}
        for name, argument in self.arguments.items():
            if given.get(name) is not None:
                try:
                    values[name] = argument.accept(given[name])
                except TermError as error:
                    where = error.argument if error.argument == name else name
                    raise TermError(
                        f"{type(self).__name__}: {error.message}", argument=where, suggestion=error.suggestion
                    ) from None
            elif name in given and (argument.required or not callable(argument.default)):
                raise TermError(f"{type(self).__name__}: {name} is None; expected {argument.expects}", argument=name)
            elif argument.required:
                raise TermError(f"{type(self).__name__} needs {name}: {argument.expects}", suggestion=self.example())
            else:
                values[name] = argument.default_for(values)
        self.__dict__.update(values)

    @classmethod
    def _bind(cls, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, as a Python call would bind them."""
        places = [name for name, argument in cls.arguments.items() if not argument.kw_only]
        if len(positional) > len(places):
            rest = [name for name, argument in cls.arguments.items() if argument.kw_only]
            named_too = f"; give the others by name: {', '.join(f'{name}=' for name in rest)}" if rest else ""
            few = "1 argument" if len(places) == 1 else f"{len(places)} arguments"
            takes = "no arguments" if not cls.arguments else f"{few} without a name"
            raise TermError(
                f"{cls.__name__} takes {takes}, {len(positional)} were given{named_too}", argument=len(places)
            )
        given = dict(zip(places, positional, strict=False))
        for name, value in named.items():
            if name not in cls.arguments:
                near = nearest_name(name, cls.arguments)
                has = f"it has {', '.join(cls.arguments)}" if cls.arguments else "it has none"
                raise TermError(
                    f"{cls.__name__} has no argument {shortened(name)}; {has}", argument=name, suggestion=near
                )
            if name in given:
                raise TermError(f"{cls.__name__}: {name} is given twice", argument=name)
            given[name] = value
        return given

    @classmethod
    def example(cls) -> str:
        """The shortest right way to write the term, for tables and for messages about a wrong one."""
        return str(cls.sample())

    @classmethod
    def sample(cls) -> Self:
        """The term with the sample values of its required arguments."""
        return cls(**{name: argument.sample for name, argument in cls.arguments.items() if argument.required})

    def values(self) -> dict[str, Any]:
        """All arguments by name, defaults included."""
        return dict(self.__dict__)

    def written(self) -> dict[str, Any]:
        """The arguments that are not at their default: those which the text shows."""
        values = self.__dict__
        return {
            name: values[name]
            for name, argument in self.arguments.items()
            if argument.required or values[name] != argument.default_for(values)
        }

    def replace(self, **changes: Any) -> Self:
        """The same term with some arguments changed; arguments at their default follow their default."""
        return type(self)(**{**self.written(), **changes})

    def __str__(self) -> str:
        parts: list[str] = []
        by_place = True
        for name, value in self.written().items():
            argument = self.arguments[name]
            # After a gap in the positional arguments everything must be named.
            by_place = by_place and not argument.kw_only and len(parts) == list(self.arguments).index(name)
            text = f'"{value}"' if isinstance(value, str) else str(value) if isinstance(value, Term) else repr(value)
            parts.append(text if by_place else f"{name}={text}")
        return f"{type(self).__name__}({', '.join(parts)})"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self).__name__, *self.__dict__.values()))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"terms are frozen; use .replace({name}=...) to get a changed copy")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("terms are frozen")

    def __mul__(self, other: Term | Strategy) -> Strategy:
        from shoal.strategy.expression import Strategy

        return Strategy(self) * other

    def words(self) -> str:
        """What the term does, in plain words."""
        raise TypeError(f"{type(self).__name__} has no words")

    def promises(self) -> tuple[Promise, ...]:
        """How training with this term differs from the serial run; nothing said means that it does not."""
        return ()


Kind = Literal["exact", "bounded", "statistical"]


class Promise:
    """One reason why a run is not the serial run: how far from it, and why."""

    __slots__ = ("band", "kind", "reason", "staleness", "within")

    def __init__(self, kind: Kind, reason: str, *, staleness: int = 0, band: str = "", within: float = 0.05) -> None:
        self.kind: Kind = kind
        self.reason = reason
        self.staleness = staleness
        """Updates by which a gradient may be late, if there is a bound."""
        self.band = band
        """What is compared with the serial run, and how near it must come, if there is none."""
        self.within = within
        """The same as a number: the largest relative difference of the loss."""
