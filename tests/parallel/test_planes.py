"""Operations on planes that ranks hold parts of: results and gradients are those of one process.

The grid of the issue runs on ranks that are threads, in float64; `tests/distributed/test_spatial.py` has real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.plane_ranks import Hub, error_of, on_ranks
from shoal.layout.global_view import CannotFollow
from shoal.layout.spatial.grid import Grid
from shoal.parallel.spatial.view import HiddenParts, RankView

EXACT = 1e-12
KERNELS, STRIDES, DILATIONS, SIZES, RANKS = (1, 2, 3, 5, 7), (1, 2, 3), (1, 2), (16, 17), (2, 3, 4)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cut_first(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A pointwise convolution in front, behind which planes are cut."""
    return lambda x, first, *more: function(F.conv2d(x, first), *more)


def windows(kernel: int) -> Iterator[dict[str, int]]:
    for stride in STRIDES:
        for dilation in DILATIONS:
            for padding in range(kernel // 2 + 1):
                yield {"stride": stride, "dilation": dilation, "padding": padding}


def worst_of(kernel: int, function: Callable[..., Tensor], *, most_dilation: int = 2, width: int = 6) -> float:
    """Over the grid, of an operation with a window."""
    worst = 0.0
    for how in windows(kernel):
        if how["dilation"] > most_dilation:
            continue
        for size in SIZES:
            for ranks in RANKS:
                given = [random(1, 2, size, width), random(2, 2, 1, 1, seed=1), random(2, 2, kernel, 1, seed=2)]
                cut = cut_first(lambda x, w, how=how: function(x, w, **how))
                worst = max(worst, error_of(cut, given, Grid((ranks, 1))))
    return worst


def tall(how: dict[str, int], neutral: dict[str, int]) -> dict[str, tuple[int, int]]:
    """The window along the height; along the width, none."""
    return {name: (how[name], neutral[name]) for name in how}


NEUTRAL = {"stride": 1, "dilation": 1, "padding": 0}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kernel", KERNELS)
def test_convolutions_of_every_window_are_exact(kernel: int) -> None:
    assert worst_of(kernel, lambda x, w, **how: F.conv2d(x, w, **tall(how, NEUTRAL))) < EXACT  # type: ignore[arg-type]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kernel", [pytest.param(k, marks=[] if k == 3 else [pytest.mark.slow]) for k in KERNELS])
def test_transposed_convolutions_of_every_window_are_exact(kernel: int) -> None:
    def function(x: Tensor, w: Tensor, **how: int) -> Tensor:
        extra = max(how["stride"], how["dilation"]) - 1
        return F.conv_transpose2d(x, w, output_padding=(extra, 0), **tall(how, NEUTRAL))  # type: ignore[arg-type]

    assert worst_of(kernel, function) < EXACT


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kernel", KERNELS)
def test_poolings_of_every_window_are_exact(kernel: int) -> None:
    for ceil in (False, True):

        def largest(x: Tensor, w: Tensor, *, ceil: bool = ceil, **how: int) -> Tensor:
            return F.max_pool2d(x, (kernel, 1), ceil_mode=ceil, **tall(how, NEUTRAL)) * w.sum()  # type: ignore[arg-type]

        def mean(x: Tensor, w: Tensor, *, ceil: bool = ceil, **how: int) -> Tensor:
            stride, padding = (how["stride"], 1), (how["padding"], 0)
            return F.avg_pool2d(x, (kernel, 1), stride, padding, ceil_mode=ceil, count_include_pad=ceil) * w.sum()

        assert worst_of(kernel, largest) < EXACT
        assert worst_of(kernel, mean, most_dilation=1) < EXACT


GRIDS = ((2, 1), (3, 1), (1, 2), (2, 2), (4, 1), (3, 2))
WEIGHT = {"w": (4, 3, 3, 3)}


def conv(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1)


def again(x: Tensor, w: Tensor, **how: Any) -> Tensor:
    return F.conv2d(x, w[:, :1].expand(4, 4, 3, 3), **how)


def targets(x: Tensor) -> Tensor:
    shape = (2, *x.shape[2:])
    return torch.arange(2 * x.shape[2] * x.shape[3]).remainder(4).view(shape)


def excited(x: Tensor, w: Tensor) -> Tensor:
    """Squeeze and excitation."""
    y = conv(x, w)
    return y * F.conv2d(y.mean((2, 3), keepdim=True), w[:, :1, :1, :1].expand(4, 4, 1, 1))


def shrunk_and_grown(x: Tensor, w: Tensor) -> Tensor:
    """Planes smaller than the ranks in between."""
    return F.conv_transpose2d(again(F.max_pool2d(conv(x, w), 4, 4), w, padding=1), w, stride=3)


def attended(x: Tensor, w: Tensor) -> Tensor:
    q = conv(x, w).flatten(2).mT[:, None]
    return F.scaled_dot_product_attention(q, q, q)


def compared(x: Tensor, w: Tensor) -> Tensor:
    y = conv(x, w).flatten(2)
    return y @ y.mT


def sized(x: Tensor, w: Tensor) -> Tensor:
    """What the code computes from sizes."""
    y = conv(x, w)
    return y.view(y.size(0), -1)[:, : y.numel() // 4].sum() + y.shape[2]


def told_apart(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(conv(x, w).permute(0, 2, 3, 1).reshape(-1, 4), targets(x).flatten())


def right_or_wrong(x: Tensor, w: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(conv(x, w), (x[:, :1] > 0).double().expand(-1, 4, -1, -1))


def mirrored_tokens(x: Tensor, w: Tensor) -> Tensor:
    return again(conv(x, w).flatten(2).mT.mul(2).mT.reshape(2, 4, *x.shape[2:]), w)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "two convolutions": lambda x, w: again(conv(x, w), w, padding=2, dilation=2),
    "same padding": lambda x, w: again(conv(x, w), w, padding="same"),
    "grouped": lambda x, w: F.conv2d(conv(x, w), w[:, :1], groups=4, stride=2, padding=1),
    "transposed": lambda x, w: F.conv_transpose2d(conv(x, w), w, stride=2, padding=1, output_padding=1),
    "maximum": lambda x, w: F.max_pool2d(conv(x, w), 3, 2, 1, ceil_mode=True),
    "mean": lambda x, w: F.avg_pool2d(conv(x, w), 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "mean by another divisor": lambda x, w: F.avg_pool2d(conv(x, w), 3, 2, 1, divisor_override=4),
    "adaptive": lambda x, w: F.adaptive_avg_pool2d(conv(x, w), (5, 3)),
    "global mean": lambda x, w: F.adaptive_avg_pool2d(conv(x, w), 1),
    "adaptive maximum": lambda x, w: F.adaptive_max_pool2d(conv(x, w), (5, 3)),
    "global maximum": lambda x, w: conv(x, w).amax((2, 3)),
    "nearest": lambda x, w: F.interpolate(conv(x, w), scale_factor=2),
    "nearest, odd": lambda x, w: F.interpolate(conv(x, w), size=(23, 14)),
    "nearest-exact": lambda x, w: F.interpolate(conv(x, w), size=(7, 14), mode="nearest-exact"),
    "bilinear": lambda x, w: F.interpolate(conv(x, w), scale_factor=1.7, mode="bilinear"),
    "bilinear, corners": lambda x, w: F.interpolate(conv(x, w), size=(23, 5), mode="bilinear", align_corners=True),
    "bicubic": lambda x, w: F.interpolate(conv(x, w), size=(23, 9), mode="bicubic"),
    "area": lambda x, w: F.interpolate(conv(x, w), size=(6, 5), mode="area"),
    "antialiased": lambda x, w: F.interpolate(conv(x, w), size=(6, 5), mode="bilinear", antialias=True),
    "mirrored": lambda x, w: again(F.pad(conv(x, w), (1, 2, 2, 1), mode="reflect"), w),
    "repeated": lambda x, w: again(F.pad(conv(x, w), (1, 2, 2, 1), mode="replicate"), w),
    "padded": lambda x, w: again(F.pad(conv(x, w), (1, 2, 2, 1), value=3.0), w),
    "circular": lambda x, w: again(F.pad(conv(x, w), (1, 2, 2, 1), mode="circular"), w),
    "cropped by padding": lambda x, w: again(F.pad(conv(x, w), (-1, -2, -2, -1)), w),
    "shuffled": lambda x, w: F.pixel_shuffle(conv(x, w), 2),
    "unshuffled": lambda x, w: F.pixel_unshuffle(conv(x[:, :, :10, :8], w), 2),
    "cropped": lambda x, w: conv(x, w)[:, :, 2:-1, 1:7:2],
    "mirror image": lambda x, w: conv(x, w).flip(-1),
    "channels last": lambda x, w: F.layer_norm(conv(x, w).permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2),
    "tokens": lambda x, w: (conv(x, w).flatten(2).transpose(1, 2) @ w[:, 0, 0, :].contiguous()).softmax(1),
    "attention": attended,
    "tokens and back": mirrored_tokens,
    "squeeze and excitation": excited,
    "products over the plane": compared,
    "sum over the height": lambda x, w: conv(x, w).sum(2),
    "cross entropy": lambda x, w: F.cross_entropy(conv(x, w), targets(x), ignore_index=2),
    "cross entropy, summed": lambda x, w: F.cross_entropy(conv(x, w), targets(x), reduction="sum"),
    "cross entropy, smoothed": lambda x, w: F.cross_entropy(conv(x, w), targets(x), label_smoothing=0.1),
    "cross entropy of rows": told_apart,
    "squared error": lambda x, w: F.mse_loss(conv(x, w), x[:, :1].expand(-1, 4, -1, -1)),
    "binary cross entropy": right_or_wrong,
    "written in place": lambda x, w: conv(x, w).add_(1).mul_(2).clamp_(min=0.5),
    "smaller than the ranks": shrunk_and_grown,
    "sized by the code": sized,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_behind_a_cut_convolution_are_exact(name: str) -> None:
    for grid in GRIDS if name == "two convolutions" else (*GRIDS[:5:2], (2, 2)):
        for height, width in ((11, 8), (8, 13)):
            given = [random(2, 3, height, width), random(*WEIGHT["w"], seed=3)]
            assert error_of(OPERATIONS[name], given, Grid(grid)) < EXACT, (grid, height, width)


def test_volumes_and_signals_are_exact() -> None:
    def volume(x: Tensor, w: Tensor) -> Tensor:
        y = F.conv_transpose3d(F.conv3d(x, w, padding=1), w, stride=2)
        return F.interpolate(F.avg_pool3d(F.max_pool3d(y, 2), 2, 1, 1), scale_factor=2, mode="trilinear")

    def signal(x: Tensor, w: Tensor) -> Tensor:
        y = F.conv_transpose1d(F.conv1d(x, w, padding=1), w, stride=2)
        return F.interpolate(F.avg_pool1d(F.max_pool1d(y, 2), 2, 1, 1), scale_factor=1.5, mode="linear")

    for grid in (Grid((2, 1)), Grid((1, 3)), Grid((2, 2))):
        assert error_of(volume, [random(1, 2, 6, 5, 7), random(3, 2, 3, 3, 3, seed=1)], grid) < EXACT
        assert error_of(signal, [random(2, 2, 23), random(3, 2, 3, seed=1)], grid) < EXACT


def test_ranks_hold_parts_and_exchange_halos_only() -> None:
    """Not the whole plane: a rank's output has its own rows, and one row crosses each border for a window of three."""
    hub, shapes = Hub(2), {}

    def work(view: RankView) -> None:
        view.wire.hub = hub  # type: ignore[attr-defined]
        with view:
            y = conv(random(1, 3, 8, 5), random(*WEIGHT["w"], seed=1))
            z = again(y, random(*WEIGHT["w"], seed=1), padding=1)
            assert y.shape == z.shape == (1, 4, 8, 5)
        shapes[view.wire.index] = tuple(y.shape)

    on_ranks(Grid((2, 1)), work)
    assert set(shapes.values()) == {(1, 4, 4, 5)}
    assert hub.sent == 2 * 4 * 5


def test_a_halo_that_is_one_row_short_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import shoal.layout.spatial.rules as rules

    right = rules.convolution
    monkeypatch.setattr(rules, "convolution", lambda **how: right(**{**how, "kernel": max(1, how["kernel"] - 1)}))
    given = [random(2, 3, 11, 8), random(*WEIGHT["w"], seed=3)]
    with pytest.raises((AssertionError, RuntimeError)):
        assert error_of(OPERATIONS["two convolutions"], given, Grid((2, 1))) < EXACT


def test_a_dropped_gradient_of_a_halo_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import shoal.parallel.spatial.exchange as exchange

    def nothing(gradient: Tensor, total: Tensor, have: Any, need: Any, move: Any, wire: Any, dims: Any) -> None:
        own = exchange.common(have, need)
        exchange.inside(total, own, have, dims).copy_(exchange.inside(gradient, own, need, dims))

    monkeypatch.setattr(exchange, "give_back", nothing)
    given = [random(2, 3, 11, 8), random(*WEIGHT["w"], seed=3)]
    assert error_of(OPERATIONS["two convolutions"], given, Grid((2, 1))) > 1e-3


def test_writing_into_a_view_of_a_cut_plane_is_refused_by_name() -> None:
    def work(view: RankView) -> None:
        with view:
            conv(random(1, 3, 8, 5), random(*WEIGHT["w"]))[:, :, 1:].mul_(2)

    with pytest.raises(CannotFollow, match="mul_ writes in place into what is a view of a plane"):
        on_ranks(Grid((2, 1)), work)


def test_code_sees_the_sizes_of_the_full_plane() -> None:
    def work(view: RankView) -> Any:
        with view:
            y = conv(random(1, 3, 9, 5), random(*WEIGHT["w"]))
            return tuple(y.shape), y.size(2), y.numel(), len(y), y.new_zeros(y.shape).sum().item()

    assert on_ranks(Grid((2, 1)), work) == [((1, 4, 9, 5), 9, 180, 1, 0.0)] * 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x.shape[2]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy * dy.shape[2]


def test_an_autograd_function_of_the_models_own_gets_the_full_plane() -> None:
    given = [random(2, 3, 11, 8), random(*WEIGHT["w"], seed=3)]
    assert error_of(lambda x, w: again(Doubled.apply(conv(x, w)), w), given, Grid((2, 1))) < EXACT


def test_a_checkpoint_of_the_models_own_is_refused_by_name() -> None:
    from torch.utils.checkpoint import checkpoint

    given = [random(2, 3, 11, 8), random(*WEIGHT["w"], seed=3)]
    for reentrant in (True, False):
        with pytest.raises(HiddenParts, match="checkpoint by itself"):
            on_ranks(Grid((2, 1)), lambda view, r=reentrant: _checkpointed(view, given, checkpoint, reentrant=r))


def _checkpointed(view: RankView, given: list[Tensor], checkpoint: Any, *, reentrant: bool) -> None:
    x, w = given[0], given[1].clone().requires_grad_()
    with view:
        checkpoint(torch.tanh, conv(x, w), use_reentrant=reentrant)
