"""The `Machine` in the calibration file of this host, and the tables that it is written as."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.comm.calibration import read_calibration_file
from shoal.estimate.steps.machine import Curve, Machine, Product

if TYPE_CHECKING:
    from shoal.files.schema import MachineTable


def machine_here(path: Path | None = None) -> Machine | None:
    """What was measured on this host; None if nothing was, or only its links. Raises WrongCalibration."""
    found = read_calibration_file(path)
    return machine_of_table(found.machine) if found is not None and found.machine is not None else None


def machine_of_table(table: MachineTable) -> Machine:
    """What [machine] of a calibration file says."""
    return Machine(
        ranks=table.ranks,
        memory_bytes=table.memory_bytes,
        memory_bytes_per_s=table.memory_bytes_per_s,
        background_byte_s=table.background_byte_s,
        overheads=table.overheads,
        products={
            kind: (Product(**both.forward.model_dump()), Product(**both.backward.model_dump()))
            for kind, both in table.products.items()
        },
        passes={
            kind: (_curve(row.elements, row.forward_s), _curve(row.elements, row.backward_s))
            for kind, row in table.passes.items()
        },
        updates={name: _curve(row.parameters, row.seconds) for name, row in table.updates.items()},
        collectives={kind: _curve(row.bytes, row.seconds) for kind, row in table.collectives.items()},
        codecs={name: (row.tensor_s, row.element_s) for name, row in table.codecs.items()},
    )


def table_of_machine(machine: Machine, errors: Mapping[str, float]) -> MachineTable:
    """[machine] of a calibration file; `errors`: how far the model of each kind of product is from the times."""
    from dataclasses import asdict

    from shoal.files.schema import CodecTable, CollectiveTable, MachineTable, PassTable, ProductsTable, UpdateTable

    return MachineTable(
        ranks=machine.ranks,
        memory_bytes=machine.memory_bytes,
        memory_bytes_per_s=machine.memory_bytes_per_s,
        background_byte_s=machine.background_byte_s,
        overheads=dict(machine.overheads),
        products_error=dict(errors),
        products={
            kind: ProductsTable.model_validate({"forward": asdict(forward), "backward": asdict(backward)})
            for kind, (forward, backward) in machine.products.items()
        },
        passes={
            kind: PassTable(
                elements=list(forward.sizes), forward_s=list(forward.seconds), backward_s=list(backward.seconds)
            )
            for kind, (forward, backward) in machine.passes.items()
        },
        updates={
            name: UpdateTable(parameters=list(curve.sizes), seconds=list(curve.seconds))
            for name, curve in machine.updates.items()
        },
        collectives={
            kind: CollectiveTable(bytes=list(curve.sizes), seconds=list(curve.seconds))
            for kind, curve in machine.collectives.items()
        },
        codecs={
            name: CodecTable(tensor_s=tensor_s, element_s=element_s)
            for name, (tensor_s, element_s) in machine.codecs.items()
        },
    )


def _curve(sizes: list[float], seconds: list[float]) -> Curve:
    return Curve(tuple(sizes), tuple(seconds))
