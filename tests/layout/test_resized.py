"""Code that takes sizes from its input is cut as well, with the sizes in its calls divided; or stays whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from layout import plain_models as plain
from layout import sized_models as sized
from layout.parts import compare
from shoal.layout.tensor.plan import Region, ResizedView, TensorPlan, sizes_known_inside
from shoal.layout.tensor.resized import divide_views
from shoal.layout.tensor.roles import tensor_plan
from shoal.layout.tensor.sized_calls import NAMES, SizedCall, read
from shoal.layout.trace import modules_by_path, trace


def plan_of(code: sized.Code) -> TensorPlan:
    return tensor_plan(trace(plain.job_of(lambda: sized.Model(code))))


@pytest.mark.long
@pytest.mark.parametrize("case", sized.GOOD)
def test_attention_that_asks_for_the_whole_width_is_cut_by_heads_and_adds_up(case: str) -> None:
    job = plain.job_of(lambda: sized.Model(sized.GOOD[case]))
    (region,) = tensor_plan(trace(job)).regions
    assert (region.kind, region.parts) == ("heads", sized.HEADS)
    assert (region.columns, region.rows) == (("attn.c_attn",), ("attn.c_proj",))
    assert region.views
    torch.manual_seed(0)
    model = job.model().double()
    for ranks in (2, 4):
        # Other numbers of samples and tokens than were traced.
        for samples, tokens in ((3, 5), (1, 7), (5, 1)):
            x = torch.randn(samples, tokens, sized.WIDTH, dtype=torch.float64)
            compare(model, region, ranks, lambda part, x=x: part(x))
            compare(model, region, ranks, lambda part, x=x: part.eval()(x))


@pytest.mark.parametrize("case", sized.BAD)
def test_code_that_needs_the_whole_for_more_than_a_view_stays_whole_and_says_why(case: str) -> None:
    code, words = sized.BAD[case]
    plan = plan_of(code)
    assert plan.regions == ()
    assert words in plan.whole["attn.c_attn"]


def test_only_calls_that_ask_for_the_whole_are_divided() -> None:
    (region,) = plan_of(sized.masked).regions
    assert [(v.module, v.order, v.function, v.places) for v in region.views] == [
        ("attn", 0, "split", (0,)),
        ("attn", 1, "view", (2,)),
        ("attn", 2, "view", (2,)),
        ("attn", 3, "view", (2,)),
        ("attn", 4, "view", (2,)),
    ]
    assert region.scaled == ()
    (region,) = plan_of(sized.in_a_module).regions
    assert [(v.module, v.order) for v in region.views] == [("attn.fold", 0)]


def test_attributes_are_preferred_and_leave_no_view_to_divide() -> None:
    wide, narrow, code, _ = plain.GOOD["query, key, value in chunks"]
    (region,) = tensor_plan(trace(plain.job_of(plain.between(wide, narrow, code)))).regions
    assert (region.scaled, region.views) == ((("", "heads"),), ())


class Both(nn.Module):
    """A slice by an attribute, and a view by the input's width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(sized.WIDTH, 2 * sized.WIDTH), nn.Linear(sized.WIDTH, sized.CLASSES)
        self.half = sized.WIDTH

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = (y[..., : self.half] * y[..., self.half :].tanh()).reshape(x.size(0), -1, 4, 3).sin()
        return self.down(y.view(x.shape))[:, 0]


def test_attributes_and_views_are_divided_together() -> None:
    job = plain.job_of(Both)
    (region,) = tensor_plan(trace(job)).regions
    assert region.scaled == (("", "half"),)
    assert [(view.function, view.places) for view in region.views] == [("reshape", (2,)), ("view", (2,))]
    x = torch.randn(3, 5, sized.WIDTH, dtype=torch.float64)
    for ranks in (2, 4):
        compare(job.model().double(), region, ranks, lambda part: part(x))


class Repeated(nn.Module):
    """One layer, applied to sequences of different length."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.head = sized.Attention(sized.masked), nn.Linear(sized.WIDTH, sized.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attn(x).mean(1) + self.attn(x[:, :3]).mean(1))


def test_a_layer_that_is_called_again_counts_anew() -> None:
    job = plain.job_of(Repeated)
    (region,) = tensor_plan(trace(job)).regions
    assert {view.order for view in region.views} == {0, 1, 2, 3, 4}
    x = torch.randn(3, 5, sized.WIDTH, dtype=torch.float64)
    compare(job.model().double(), region, 2, lambda part: part(x))


def test_views_in_hooks_and_in_modules_below_are_not_counted() -> None:
    job = plain.job_of(lambda: sized.Model(sized.masked))
    (region,) = tensor_plan(trace(job)).regions
    model = job.model().double()
    model.attn.c_attn.register_forward_pre_hook(lambda _, args: (args[0].view(args[0].shape),))
    model.attn.c_attn.register_forward_hook(lambda _, args, y: y.reshape(-1, y.shape[-1]).view(y.shape))
    x = torch.randn(3, 5, sized.WIDTH, dtype=torch.float64)
    compare(model, region, 2, lambda part: part(x))


def test_finding_the_views_leaves_the_model_as_it_was() -> None:
    job = plain.job_of(lambda: sized.Model(sized.masked))
    model = job.model()
    recorded = trace(job, model=model)
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    assert tensor_plan(recorded).regions
    for path, module in model.named_modules():
        assert vars(module).keys() == before[path].keys()
        assert module.training
        assert "forward" not in vars(module)


def test_code_that_takes_another_way_than_traced_is_an_error_and_not_a_wrong_result() -> None:
    model: Any = sized.Model(lambda self, x: self.c_attn(x)[..., : sized.WIDTH].contiguous().view(x.shape))
    view = ResizedView(module="attn", order=0, function="view", num_sizes=3, places=(2,))
    divide_views(modules_by_path(model), [view], 2)
    with pytest.raises(ValueError, match=r"attn: view\(2, 5, 12\).*does not name 2 times the local size.*whole"):
        model(torch.randn(2, 5, sized.WIDTH))


def test_a_stream_that_is_cut_needs_an_entry_around_code_that_names_its_sizes() -> None:
    (region,) = plan_of(sized.masked).regions
    assert region.entry == "attn"
    assert sizes_known_inside(region)

    def known(entry: str | None, module: str, function: str = "view") -> bool:
        view = ResizedView(module=module, order=0, function=function, num_sizes=3, places=(2,))
        return sizes_known_inside(
            Region(kind="heads", parts=4, columns=("a.q",), rows=("a.o",), cuts={}, views=(view,), entry=entry)
        )

    assert known("a", "a")
    assert known("a", "a.b")
    assert known("", "a")
    assert not known("a", "")
    assert not known("a", "ab")
    assert not known("a.q", "a")
    assert not known(None, "a")
    assert known(None, "a", "unflatten")


CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any], tuple[int, ...] | None]] = [
    (torch.Tensor.view, (2, 12), {}, (2, 12)),
    (torch.Tensor.view, ((2, -1),), {}, (2, -1)),
    (torch.Tensor.view, (torch.Size([24]),), {}, (24,)),
    (torch.Tensor.view, (24,), {}, (24,)),
    (torch.Tensor.view, (torch.int32,), {}, None),
    (torch.Tensor.view, (), {"size": (4, 6)}, (4, 6)),
    (torch.Tensor.reshape, (), {"shape": (4, 6)}, (4, 6)),
    (torch.reshape, ((4, 6),), {}, (4, 6)),
    (torch.Tensor.expand, (2, 6, 4), {}, (2, 6, 4)),
    (torch.broadcast_to, ((2, 6, 4),), {}, (2, 6, 4)),
    (torch.Tensor.unflatten, (-1, (2, -1)), {}, (2, -1)),
    (torch.Tensor.unflatten, (), {"dim": 1, "sizes": [2, 2]}, (2, 2)),
    (torch.Tensor.split, (2, 1), {}, (2,)),
    (torch.Tensor.split, ([1, 3],), {"dim": -1}, (1, 3)),
    (torch.split, (3,), {}, (3,)),
    (torch.Tensor.flatten, (), {}, None),
    (torch.Tensor.view, (torch.tensor(24),), {}, None),
    (torch.Tensor.view, (np.int64(24),), {}, (24,)),
]


@pytest.mark.parametrize(("func", "args", "kwargs", "sizes"), CALLS)
def test_a_call_is_read_and_made_again_as_it_was(func: Any, args: Any, kwargs: Any, sizes: Any) -> None:
    x = torch.arange(24.0).reshape(6, 4)
    call = read(func, (x, *args), kwargs)
    assert (None if call is None else call.sizes) == sizes
    if isinstance(call, SizedCall):
        again, once = call.again(call.sizes), func(x, *args, **kwargs)
        torch.testing.assert_close(again, once, rtol=0, atol=0)


def test_a_call_that_fails_fails_as_it_does_without_us() -> None:
    for func, args in ((torch.Tensor.unflatten, ()), (torch.Tensor.view, ()), (torch.Tensor.split, ())):
        assert read(func, (torch.zeros(4), *args), {}) is None
    assert read(torch.Tensor.view, (torch.zeros(()), ()), {}) is None


def test_all_functions_are_known_by_the_object_that_a_mode_is_given() -> None:
    seen: list[Any] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.zeros(4, 6)
    with Mode():
        for made in (
            x.view(24),
            x.reshape(24),
            torch.reshape(x, (24,)),
            x.expand(4, 6),
            x.broadcast_to((4, 6)),
            torch.broadcast_to(x, (4, 6)),
            x.unflatten(0, (2, 2)),
            torch.unflatten(x, 0, (2, 2)),
            x.split(2),
            torch.split(x, 2),
            x.split_with_sizes([4]),
            torch.split_with_sizes(x, [4]),
        ):
            assert made is not None
    assert [func in NAMES for func in seen] == [True] * 12
