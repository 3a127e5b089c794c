"""Convolution by PyTorch's library and by the four methods of shoal.operators, on one thread: docs/operators.md.

    python benchmarks/operators.py [--rounds 9] [--json]

Forward and backward in float32, methods interleaved, median of the rounds; shown as a multiple of the library's time,
with the largest error against float64.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from _report import arguments, report

from shoal.analysis.convolution import Convolution, best_by_depth, best_by_work
from shoal.operators import METHODS, convolve, time_methods

LAYERS = {
    "3x3, 64 -> 64 on 4 x 56x56": (nn.Conv2d(64, 64, 3, padding=1), (4, 64, 56, 56)),
    "3x3, 256 -> 256 on 4 x 14x14": (nn.Conv2d(256, 256, 3, padding=1), (4, 256, 14, 14)),
    "3x3, 512 -> 512 on 2 x 28x28": (nn.Conv2d(512, 512, 3, padding=1), (2, 512, 28, 28)),
    "1x1, 256 -> 64 on 4 x 28x28": (nn.Conv2d(256, 64, 1), (4, 256, 28, 28)),
    "7x7 / 2, 3 -> 64 on 2 x 112x112": (nn.Conv2d(3, 64, 7, stride=2, padding=3), (2, 3, 112, 112)),
    "5x5, 1 -> 8 on 64 x 28x28": (nn.Conv2d(1, 8, 5, padding=2), (64, 1, 28, 28)),
    "11x11, 16 -> 16 on 4 x 64x64": (nn.Conv2d(16, 16, 11, padding=5), (4, 16, 64, 64)),
    "31x31, 8 -> 8 on 2 x 64x64": (nn.Conv2d(8, 8, 31, padding=15), (2, 8, 64, 64)),
    "31x31, 64 in 64 groups on 2 x 56x56": (nn.Conv2d(64, 64, 31, padding=15, groups=64), (2, 64, 56, 56)),
    "3x3, 64 in 64 groups on 4 x 56x56": (nn.Conv2d(64, 64, 3, padding=1, groups=64), (4, 64, 56, 56)),
    "3x3 dilated by 4, 64 -> 64 on 4 x 28x28": (nn.Conv2d(64, 64, 3, padding=4, dilation=4), (4, 64, 28, 28)),
    "2x2 / 2, 64 -> 128 on 4 x 28x28": (nn.Conv2d(64, 128, 2, stride=2), (4, 64, 28, 28)),
}


def error(conv: nn.Conv2d, shape: tuple[int, ...], method: str) -> float:
    """Largest error of the result over the largest result."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    form = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation, "groups": conv.groups}
    with torch.no_grad():
        exact = nn.functional.conv2d(x.double(), conv.weight.double(), **form)
        found = convolve(x, conv.weight, **form, method=method).double()
    return float((found - exact).abs().max() / exact.abs().max())


def expected(conv: nn.Conv2d, shape: tuple[int, ...]) -> tuple[str, str]:
    operator = Convolution(
        samples=shape[0],
        in_channels=conv.in_channels,
        out_channels=conv.out_channels,
        image=shape[2:],
        kernel=conv.kernel_size,
        stride=conv.stride,
        padding=conv.padding,
        dilation=conv.dilation,
        groups=conv.groups,
        bias=False,
    )
    return best_by_work(operator), best_by_depth(operator)


def main() -> None:
    given = arguments(__doc__, lambda parser: parser.add_argument("--rounds", type=int, default=9))
    torch.set_num_threads(1)
    rows, errors = [], dict.fromkeys(METHODS, 0.0)
    for name, (conv, shape) in LAYERS.items():
        found = time_methods(conv, shape, rounds=given.rounds).seconds
        own = {each: round(found[each] / found["library"], 2) for each in found if each != "library"}
        for each in found:
            errors[each] = max(errors[each], error(conv, shape, each))
        work, depth = expected(conv, shape)
        rows.append(
            {
                "name": name,
                "library_ms": round(1000 * found["library"], 2),
                **own,
                "fastest_of_the_four": min(own, key=lambda each: own[each]),
                "least_work": work,
                "least_depth": depth,
            }
        )
    report(
        rows,
        title="time as a multiple of the library's",
        as_json=given.json,
        notes=[f"largest error in float32, {each}: {found:.1e}" for each, found in errors.items()],
    )


if __name__ == "__main__":
    main()
