"""Whatever is written is read back as it was, and what no file may hold is refused in one sentence."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster import BadCluster, read_cluster
from shoal.comm.calibration import WrongCalibration, read_calibration
from shoal.estimate.cost.profile import Profile
from shoal.estimate.cost.profile_file import BadProfile, profile_schema, profile_toml, read_profile
from shoal.estimate.steps.machine import Curve, Machine, Product
from shoal.estimate.steps.read import machine_of_table, table_of_machine
from shoal.files.schema import CalibrationFile, ClusterFile
from shoal.files.table import Table, checked
from shoal.files.toml import read_toml, toml_text

positive = st.floats(min_value=1e-300, max_value=1e300)
at_least_zero = st.floats(min_value=0, max_value=1e300)
seconds = st.floats(min_value=1e-15, max_value=1e-3)
numbers = st.floats(allow_nan=False, allow_infinity=False)
count = st.integers(min_value=1, max_value=2**40)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
quantity = st.builds("{:g} {}".format, st.floats(min_value=1e-3, max_value=1e6), st.sampled_from(["Gb/s", "GB/s"]))


def some(**known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=known)


link = st.fixed_dictionaries(
    {"latency_s": seconds, "byte_s": seconds, "reduce_byte_s": st.floats(min_value=0, max_value=1e-3)},
    optional={"error": numbers, "over_best": numbers},
)
dates = st.datetimes(min_value=datetime(1000, 1, 1), timezones=st.sampled_from([None, UTC]))
product = st.builds(Product, start_s=positive, flops=positive, rows=positive, columns=positive, inner=positive)
curve = st.dictionaries(positive, positive, min_size=1, max_size=4).map(
    lambda each: Curve(tuple(sorted(each)), tuple(each[size] for size in sorted(each)))
)


@st.composite
def passes(draw: st.DrawFn) -> tuple[Curve, Curve]:
    forward = draw(curve)
    return forward, Curve(forward.sizes, tuple(draw(positive) for _ in forward.sizes))


def by_name(of: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(text, of, max_size=3)


machines = st.builds(
    Machine,
    ranks=count,
    memory_bytes=positive,
    memory_bytes_per_s=positive,
    background_byte_s=positive,
    products=by_name(st.tuples(product, product)),
    passes=by_name(passes()),
    updates=by_name(curve),
    collectives=by_name(curve),
    overheads=by_name(at_least_zero),
    codecs=by_name(st.tuples(numbers, numbers)),
)
measured = st.fixed_dictionaries(
    {
        "date": dates,
        "ranks": count,
        "hosts": count,
        "cores": count,
        "torch": text,
        "rounds": count,
        "disturbed": at_least_zero,
    }
)
calibrations = st.fixed_dictionaries(
    {
        "links": st.fixed_dictionaries({"inside": link, "between": link}),
        "backend": st.fixed_dictionaries(
            {"fastest": st.sampled_from(["shoal", "gloo"]), "relative_time": by_name(positive)}
        ),
    },
    optional={"measured": measured, "machine": machines.map(lambda each: table_of_machine(each, {}).model_dump())},
)
levels = st.lists(
    st.one_of(
        st.fixed_dictionaries({"ranks": count, "bandwidth": quantity}, optional={"latency": st.just("7 us")}),
        st.fixed_dictionaries({"ranks": count, "gb_per_s": positive}, optional={"latency_us": at_least_zero}),
    ),
    min_size=1,
    max_size=3,
)
devices = st.fixed_dictionaries(
    {"peak_tflops": by_name(positive), "memory": st.just("80 GiB"), "memory_gb_s": positive},
    optional={"name": text, "matmul_tflops": by_name(positive), "sms": count, "domain": count, "watts": positive},
)
clusters = st.fixed_dictionaries(
    {"device": st.one_of(text, devices), "level": levels}, optional={"name": text, "devices": count}
)
profiles = some(name=text, **{field.name: at_least_zero for field in fields(Profile) if field.name != "name"})


def written_and_read(schema: type[Table], table: Table, heading: str = "") -> Table:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.toml"
        path.write_text(toml_text(table, heading=heading), encoding="utf-8")
        return checked(schema, read_toml(path))


@given(calibrations)
def test_a_calibration_is_read_as_it_was_written(values: dict[str, Any]) -> None:
    table = checked(CalibrationFile, values)
    assert written_and_read(CalibrationFile, table, "two\nlines") == table


@given(clusters)
def test_a_cluster_is_read_as_it_was_written(values: dict[str, Any]) -> None:
    table = checked(ClusterFile, values)
    assert written_and_read(ClusterFile, table) == table


@given(profiles)
def test_a_profile_is_read_as_it_was_written(values: dict[str, Any]) -> None:
    profile = Profile(**values)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        path.write_text(profile_toml(profile, origin="a test"), encoding="utf-8")
        assert read_profile(str(path)) == profile
    table = checked(profile_schema(), values)
    assert written_and_read(profile_schema(), table) == table


@given(machines)
def test_a_machine_is_the_tables_it_is_written_as(machine: Machine) -> None:
    assert machine_of_table(table_of_machine(machine, {})) == machine


READERS = [
    (read_cluster, BadCluster),
    (lambda path: read_profile(str(path)), BadProfile),
    (read_calibration, WrongCalibration),
]
ODD = [
    b"\xff\xfe\x00",
    b"a = 1\n" * 2,
    b"[[",
    b"x = " + b"[" * 5000,
    b"x = " + b"9" * 5000,
    b"\x00",
    b"= 3",
    b"level = [3]\nlinks = [3]\nusable = [3]\ndevice = 1979-05-27\nbackend = 07:32:00",
    b"device = {a = {b = {c = [1, [2, {d = 3}]]}}}\nlevel = 3\nlinks = 3\nbackend = 4\nname = 1979-05-27",
    b"[level]\nranks = 9\n[links]\ninside = 3\nbetween = []\n[backend]\n[usable]",
]


@pytest.mark.parametrize(("read", "error"), READERS)
@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_an_odd_file_is_refused_in_one_sentence_that_names_it(
    tmp_path: Path, read: Callable[[Path], object], error: type[ValueError], odd: bytes
) -> None:
    path = tmp_path / "odd.toml"
    path.write_bytes(odd)
    with pytest.raises(error) as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1800
