"""From times of operators to a machine: constants are found again, and the file gives back what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from estimate.machines import machine, write_calibration
from shoal.calibration.machine import alpha_beta, fit_product, machine_of
from shoal.calibration.operators import ATTENTION, CONVOLUTION, LINEAR, cases
from shoal.cluster import cluster
from shoal.comm.calibration import WrongCalibration
from shoal.estimate.steps.machine import Curve, Product
from shoal.estimate.steps.read import machine_here


@pytest.mark.parametrize("flops", [1e9, 1e11, 1e14])
def test_the_fit_finds_the_product_that_made_the_times(flops: float) -> None:
    true = Product(start_s=2e-5, flops=flops, rows=6.0, columns=20.0, inner=40.0)
    shapes = [(1.0, float(m), float(n), float(k)) for m, k, n in LINEAR]
    found, error = fit_product(shapes, [true.seconds(*shape) for shape in shapes])
    assert error < 0.02
    for shape in ((1, 300, 300, 300), (1, 4000, 100, 1000)):
        assert found.seconds(*shape) == pytest.approx(true.seconds(*shape), rel=0.05)


def test_alpha_and_beta_of_a_line_are_its_own() -> None:
    sizes = tuple(float(1 << power) for power in range(10, 25, 2))
    assert alpha_beta(Curve(sizes, tuple(3e-5 + 2e-10 * size for size in sizes))) == pytest.approx((3e-5, 2e-10))


def test_the_file_gives_back_the_machine_and_the_cluster_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = machine(byte_s=3e-10, message_s=2e-5, overhead_s=1e-3)
    path = write_calibration(tmp_path / "file.toml", written)
    assert machine_here(path) == written
    monkeypatch.setenv("SHOAL_CALIBRATION", str(path))
    here = cluster("this")
    assert here.devices == written.ranks
    assert here.device.peak("fp32") == 1e11
    assert here.levels[0].bytes_per_s == pytest.approx(5e9)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("flops = 0", r"flops of \[machine.products.linear.forward\] is 0; expected a finite number above 0"),
        ("flops = -1", "is -1; expected a finite number above 0"),
        ('flops = "many"', "is 'many'; expected a finite number above 0"),
        ("", r"\[machine.products.linear.forward\] has no flops"),
        ("flop = 1e11", r"has an unknown key 'flop' \(did you mean 'flops'\?\)"),
    ],
)
def test_a_machine_that_cannot_be_is_refused_in_a_sentence(tmp_path: Path, wrong: str, says: str) -> None:
    path = write_calibration(tmp_path / "file.toml", machine())
    text = path.read_text()
    assert "flops = 1e+11" in text
    path.write_text(text.replace("flops = 1e+11", wrong, 1))
    with pytest.raises(WrongCalibration, match=says):
        machine_here(path)


def test_a_file_of_links_alone_is_of_no_machine(tmp_path: Path) -> None:
    assert machine_here(write_calibration(tmp_path / "file.toml", None)) is None
    assert machine_here(tmp_path / "none.toml") is None


def test_what_the_engine_adds_is_what_is_left() -> None:
    rows: list[dict[str, Any]] = [
        {"kind": case.kind, "shape": list(case.shape), "forward_s": [1e-3] * 4, "backward_s": [2e-3] * 4}
        for case in cases()
    ]
    rows += [{"kind": "SGD", "shape": [size], "forward_s": [1e-5] * 4, "backward_s": [0.0] * 4} for size in (10, 1000)]
    passes = {
        "replicated": 5e-4,
        "sharded": 2e-3,
        "tensor": 1.5e-3,
        "ring": 1.3e-3,
        "pipeline": 1e-3,
        "sync norms": 9e-4,
        "local norms": 1e-4,
    }
    took = {"plain": 4e-4, "one memory": 1.7e-3}
    for kind, pass_s in passes.items():
        took |= {kind: 1e-3 + pass_s, f"{kind}, many": 1e-3 + 9 * pass_s}
    measured = {
        "operators": rows,
        "byte_s": [1e-10] * 4,
        "background_byte_s": [1e-9] * 4,
        "overheads": {name: [each] * 4 for name, each in took.items()},
        "counts": {"passes": 8, "crossings": 20, "gathers": 15, "attentions": 4, "norms": 8},
        "optimizers": ["SGD"],
        "ranks": 2,
    }
    found, errors = machine_of(measured, {"all_reduce": Curve((1.0, 1e6), (1e-4, 1e-4))})
    assert found.overheads == pytest.approx(
        {
            "step_s": 1e-3 - 1e-4 - 1e-5,
            "pass_s": 1e-4,
            "shared_s": 3e-4,
            "action_s": (1e-3 - 2e-4) / 2,
            "gather_s": 1e-4,
            "ring_s": 2e-4,
            "norm_s": 1e-4,
            "crossing_s": 5e-5,
        },
        rel=1e-3,
    )
    assert found.memory_bytes_per_s == pytest.approx(1e10)
    assert set(errors) == set(found.products) == {"linear", "convolution", "attention"}
    kinds = [case.kind for case in cases()]
    assert [kinds.count(kind) for kind in ("linear", "convolution", "attention")] == [
        len(LINEAR),
        len(CONVOLUTION),
        len(ATTENTION),
    ]
