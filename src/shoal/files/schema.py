"""What the files of Shoal may hold, as pydantic models: a calibration and a cluster.

Import it inside the function that has a file to read: pydantic takes a tenth of a second. The models hold a file as it
is written; the rooms `comm`, `cluster` and `estimate` make their own objects of them. The schema of a profile is made
of its fields (`shoal.estimate.cost.profile_file`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from shoal.files.quantities import duration, rate, size
from shoal.files.table import (
    AtLeastZero,
    Count,
    Duration,
    Number,
    Positive,
    Rate,
    Size,
    Table,
    Text,
    WrongKeys,
    integer,
    seconds,
    shown,
)

# A cluster.


def _one_of(table: Table, key: str, bare: str, *, example: str | None = None) -> None:
    """A quantity with its unit, or a bare number under the key that names its unit; either way at most once."""
    given = [each for each in (key, bare) if getattr(table, each) is not None]
    if len(given) == 2:
        raise WrongKeys(f" has both {key} and {bare}; give one of them")
    if not given and example is not None:
        raise WrongKeys(f" has no {key}; give one with its unit, such as {example}")


def _value_of(text: str | None, read: Callable[[object], float], bare: float | None, unit: float) -> float:
    return read(text) if text is not None else (bare or 0.0) * unit


class LevelTable(Table):
    """Links that join units of the level below."""

    ranks: Count = Field(examples=["the number of units that it joins, such as 8"])
    bandwidth: Rate | None = None
    latency: Duration | None = None
    gb_per_s: Positive | None = None
    latency_us: AtLeastZero | None = None

    @model_validator(mode="after")
    def _units(self) -> Self:
        _one_of(self, "bandwidth", "gb_per_s", example='"200 Gb/s"')
        _one_of(self, "latency", "latency_us")
        return self

    @property
    def bytes_per_s(self) -> float:
        return _value_of(self.bandwidth, rate, self.gb_per_s, 1e9)

    @property
    def latency_s(self) -> float:
        return _value_of(self.latency, duration, self.latency_us, 1e-6)


class DeviceTable(Table):
    """A device of the user's own."""

    name: Text = "device"
    peak_tflops: dict[str, Positive] = Field({})
    matmul_tflops: dict[str, Positive] = Field({})
    memory: Size | None = None
    memory_bandwidth: Rate | None = None
    memory_gb: Positive | None = None
    memory_gb_s: Positive | None = None
    sms: Count = 128
    domain: Annotated[int, integer(0)] = 0
    watts: Positive | None = None

    @model_validator(mode="after")
    def _units(self) -> Self:
        _one_of(self, "memory", "memory_gb", example='"80 GB"')
        _one_of(self, "memory_bandwidth", "memory_gb_s", example='"2039 GB/s"')
        return self

    @property
    def memory_bytes(self) -> float:
        return _value_of(self.memory, size, self.memory_gb, 1e9)

    @property
    def memory_bytes_per_s(self) -> float:
        return _value_of(self.memory_bandwidth, rate, self.memory_gb_s, 1e9)


def _name_or_table(given: Any) -> str:
    return "(table)" if isinstance(given, dict | DeviceTable) else "(name)"


def _tables(given: Any) -> Any:
    if not isinstance(given, list) or not given:
        raise ValueError(f" is {shown(given)}; expected {LEVELS}")
    return given


LEVELS = "a table [[level]] for each level of links, innermost first"


class ClusterFile(Table):
    """`--cluster FILE.toml`: docs/clusters.md."""

    name: Text | None = None
    devices: Count | None = None
    device: Annotated[
        Annotated[Text, Tag("(name)")] | Annotated[DeviceTable, Tag("(table)")], Discriminator(_name_or_table)
    ] = Field(examples=['device = "A100 SXM4 80GB" or a table [device]'])
    level: Annotated[list[LevelTable], BeforeValidator(_tables)] = Field(examples=[LEVELS])


# A calibration.


class LinkTable(Table):
    """What messages cost. Values beyond a minute for a message or below a kilobyte a second are assumed to be typos."""

    latency_s: Annotated[float, seconds(60)] = Field(description="seconds a message")
    byte_s: Annotated[float, seconds(1e-3)] = Field(description="seconds a byte")
    # Only reducing may cost nothing: it may be hidden behind the moving of the next bytes.
    reduce_byte_s: Annotated[float, seconds(1e-3, zero=True)] = Field(
        description="seconds to reduce a byte, on top of moving it"
    )
    error: Number | None = Field(None, description="median of |predicted / measured time - 1|")
    over_best: Number | None = Field(None, description="time of the algorithms it chooses, over the best ones'")


class LinksTable(Table):
    """Both kinds of links."""

    inside: LinkTable = Field(description="Between ranks of one host: shared memory.")
    between: LinkTable = Field(description="Between ranks of different hosts: TCP.")


class BackendTable(Table):
    """What carries tensors in host memory. (On GPUs there is nothing to choose: NCCL.)"""

    fastest: Literal["shoal", "gloo"]
    relative_time: dict[str, Positive] = Field({})


class MeasuredTable(Table):
    """When and how it was measured."""

    date: datetime
    ranks: Count
    hosts: Count
    cores: Count
    torch: Text
    rounds: Count
    disturbed: AtLeastZero = Field(description="share of the time in which other programs had the cores")


class ProductTable(Table):
    """Constants of a matrix product in one direction."""

    start_s: Positive
    flops: Positive
    rows: Positive
    columns: Positive
    inner: Positive


class ProductsTable(Table):
    """A kind of product."""

    forward: ProductTable
    backward: ProductTable


class CurveTable(Table):
    """Seconds at some sizes: the first column, smallest first, and the times of each size in the others."""

    @model_validator(mode="after")
    def _one_time_for_each_size(self) -> Self:
        names = list(type(self).model_fields)
        sizes, *times = (getattr(self, name) for name in names)
        if not sizes or any(high <= low for low, high in pairwise(sizes)):
            raise WrongKeys(f" has {names[0]} = {shown(sizes)}; expected one size at least, each above the one before")
        for name, took in zip(names[1:], times, strict=True):
            if len(took) != len(sizes):
                raise WrongKeys(f" has {len(took)} {name} for {len(sizes)} {names[0]}; expected one for each")
        return self


class PassTable(CurveTable):
    """Operators that pass over memory."""

    elements: list[Positive]
    forward_s: list[Positive]
    backward_s: list[Positive]


class UpdateTable(CurveTable):
    """Steps of an optimizer."""

    parameters: list[Positive]
    seconds: list[Positive]


class CollectiveTable(CurveTable):
    """A collective, by bytes of the full tensor."""

    bytes: list[Positive]
    seconds: list[Positive]


class CodecTable(Table):
    """A compressor."""

    tensor_s: Number
    element_s: Number


class MachineTable(Table):
    """What a rank computes while the others do the same."""

    ranks: Count
    memory_bytes: Positive
    memory_bytes_per_s: Positive = Field(description="read and written, by each rank")
    background_byte_s: Positive = Field(description="the core's time for a byte between hosts")
    products: dict[str, ProductsTable] = Field(
        description="Products of (rows x inner) by (inner x columns): start_s + 2 rows columns inner / flops, times\n"
        "(1 + r / rows) (1 + c / columns) (1 + i / inner) with the r, c, i given here. backward: both gradients."
    )
    products_error: dict[str, Number] = Field({}, description="median of |predicted / measured time - 1|")
    passes: dict[str, PassTable] = Field(description="Seconds of what passes over memory, by elements.")
    updates: dict[str, UpdateTable] = Field(description="Seconds of a step of the optimizer, by parameters.")
    collectives: dict[str, CollectiveTable] = Field(
        description="Collectives of these ranks by the fastest backend, by bytes of the full tensor."
    )
    overheads: dict[str, AtLeastZero] = Field(
        {},
        description="Seconds that the engine adds: once a step, for each micro-batch, for a barrier in shared memory,\n"
        "for each pass of a stage, gather of ZeRO-3, attention around a ring, batch norm of all replicas,\n"
        "tp collective.",
    )
    codecs: dict[str, CodecTable] = Field({}, description="Compressors: seconds a tensor, and for each element of it.")


class CalibrationFile(Table):
    """What `shoal calibrate` writes; tables of other programs may stand in it."""

    model_config = ConfigDict(extra="ignore")

    measured: MeasuredTable | None = None
    links: LinksTable
    backend: BackendTable = Field(
        description="What carries tensors in host memory fastest: geometric mean over collectives and sizes."
    )
    machine: MachineTable | None = Field(None, description="What a rank computes while the others do the same.")
