"""What the tests of attention over a cut sequence run on real ranks: the cut call beside the library's whole one.

Every rank draws the same whole tensors and computes both, so each can compare its own positions alone.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from distributed import attention_faults
from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members, Mesh
from shoal.launch.join import join, leave
from shoal.parallel.context import ring
from shoal.parallel.context.attention import BY_METHOD, positions
from shoal.parallel.recompute import _contexts, _kept_products

DEFAULTS = {
    "method": "ring",
    "B": 2,
    "H": 4,
    "kv": None,
    "L": 24,
    "D": 8,
    "Dv": None,
    "dtype": "float64",
    "causal": False,
    "balanced": False,
    "mask": None,
    "scale": None,
    "layout": "plain",
    "recompute": None,
    "mask_gradient": False,
    "big": 1.0,
}


def members_of_all() -> Members:
    me = join()
    return Mesh([("cp", me.world)], rank=me.rank, backend=me.backend).along("cp")


def make_mask(kind: str | None, c: dict[str, Any], dtype: torch.dtype) -> torch.Tensor | None:
    """[B or 1, H or 1, L or 1, L], rows and columns of the whole sequence."""
    B, H, L = c["B"], c["H"], c["L"]
    lower = torch.ones(L, L, dtype=torch.bool).tril()
    kept = torch.rand(B, 1, L, L) < 0.7
    if kind is None:
        return None
    if kind == "bool":
        return kept | torch.eye(L, dtype=torch.bool)
    if kind == "per head":
        return (torch.rand(1, H, L, L) < 0.5) | torch.eye(L, dtype=torch.bool)
    if kind == "float":
        return torch.randn(B, 1, L, L, dtype=dtype)
    if kind == "three dimensions":
        return torch.randn(H, L, L, dtype=dtype)
    if kind == "two dimensions":
        return torch.randn(L, L, dtype=dtype)
    if kind == "causal":
        return lower[None, None]
    if kind == "padding":
        lengths = torch.randint(1, L // 2, (B,))
        return (torch.arange(L) < lengths[:, None])[:, None, None]
    if kind == "causal and left padding":
        # The first rows of the second sample see nothing at all.
        padded = torch.arange(L) >= torch.tensor([0, L // 2 + 1])[:B, None]
        return lower & padded[:, None, None]
    if kind == "lowest":
        # As many models write it: the lowest finite number instead of -inf, also for rows that see nothing.
        hidden = ~make_mask("causal and left padding", c, dtype)
        return torch.zeros(B, 1, L, L, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    if kind == "-inf":
        hidden = ~make_mask("causal and left padding", c, dtype)
        return torch.randn(B, 1, L, L, dtype=dtype).masked_fill(hidden, float("-inf"))
    raise AssertionError(kind)


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, differently placed in memory."""
    if layout == "heads last":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "dimension first":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    return x


def compare(case: dict[str, Any], members: Members) -> dict[str, Any]:
    """Largest differences of output and gradients from the library's on the whole, relative to their largest value."""
    c = DEFAULTS | case
    torch.manual_seed(7)
    dtype = getattr(torch, c["dtype"])
    kv, Dv = c["kv"] or c["H"], c["Dv"] or c["D"]
    shapes = [(c["B"], c["H"], c["L"], c["D"]), (c["B"], kv, c["L"], c["D"]), (c["B"], kv, c["L"], Dv)]
    whole = [torch.randn(shape, dtype=torch.float64).mul_(c["big"]).to(dtype) for shape in shapes]
    upstream = torch.randn(c["B"], c["H"], c["L"], Dv, dtype=torch.float64).to(dtype)
    mask = make_mask(c["mask"], c, dtype)
    options = {"is_causal": c["causal"], "scale": c["scale"], "enable_gqa": kv != c["H"]}

    serial = [x.clone().requires_grad_() for x in whole]
    serial_mask = mask.clone().requires_grad_() if c["mask_gradient"] else mask
    if c["causal"] and mask is not None:
        # The library takes both at once only in some of its kernels.
        future = torch.ones(c["L"], c["L"], dtype=torch.bool).triu(1)
        both = serial_mask.masked_fill(future, False if mask.dtype == torch.bool else float("-inf"))
        expected = F.scaled_dot_product_attention(*serial, attn_mask=both, **(options | {"is_causal": False}))
    else:
        expected = F.scaled_dot_product_attention(*serial, attn_mask=serial_mask, **options)
    expected.backward(upstream)

    held = positions(c["L"], members.size, members.index, balanced=c["balanced"])
    mine = [lay_out(x[:, :, held], c["layout"]).requires_grad_() for x in whole]
    rows = mask
    if mask is not None and c["method"] == "ring" and mask.shape[-2] > 1:
        rows = mask[..., held, :]
    if c["mask_gradient"]:
        rows = rows.clone().requires_grad_()

    # What comes after attention in a block keeps its output for backward, as a projection does.
    one = torch.ones((), dtype=dtype, requires_grad=True)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = BY_METHOD[c["method"]](q, k, v, members, attn_mask=rows, balanced=c["balanced"], **options)
        return out * one if c["recompute"] else out

    BOOK.take()
    if c["recompute"]:
        context = lambda: _contexts(c["recompute"], _kept_products())
        out = checkpoint(call, *mine, use_reentrant=False, context_fn=context)
    else:
        out = call(*mine)
    forward = BOOK.take()
    out.backward(lay_out(upstream[:, :, held], c["layout"]))
    ledger = forward + BOOK.take()

    found = {"output": apart(out, expected[:, :, held], beside=expected)}
    for name, part, full in zip("qkv", mine, serial, strict=True):
        found[name] = apart(part.grad, full.grad[:, :, held], beside=full.grad)
    if c["mask_gradient"]:
        share = rows.grad.clone()
        if c["method"] == "ulysses" or mask.shape[-2] == 1:
            torch.distributed.all_reduce(share, group=members.group)
            found["mask"] = apart(share, serial_mask.grad)
        else:
            found["mask"] = apart(share, serial_mask.grad[..., held, :])
    return {
        "found": found,
        "ledger": ledger.to_json(),
        "dtype": str(out.dtype),
        "heads_side_by_side": out.transpose(1, 2).is_contiguous(),
    }


def apart(a: torch.Tensor, b: torch.Tensor, *, beside: torch.Tensor | None = None) -> float:
    """The largest difference, relative to the largest value of `beside` (the whole of which b is a part), or of b."""
    if a.shape != b.shape:
        return float("inf")
    whole = b if beside is None else beside
    if whole.numel() == 0:
        return 0.0
    difference = float((a.detach().double() - b.detach().double()).abs().max())
    difference /= max(float(whole.detach().double().abs().max()), 1e-30)
    return difference if difference == difference else float("inf")


def sweep(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """Each of `cases` compared; `fault` names a function of attention_faults to call first."""
    members = members_of_all()
    if arguments.get("fault"):
        getattr(attention_faults, arguments["fault"])(index=arguments["index"])
    with ExitStack() as stack:
        if arguments.get("plain"):
            from shoal.parallel.context import chunk_attention

            honest = chunk_attention._fused_serves
            chunk_attention._fused_serves = lambda q, v: False
            stack.callback(setattr, chunk_attention, "_fused_serves", honest)
        results = [compare(case, members) for case in arguments["cases"]]
    leave()
    return results


def products(arguments: dict[str, Any], channel: Any) -> dict[str, list[float]]:
    """Scores that each rank computes, in units of one chunk by one chunk, forward and backward."""
    members = members_of_all()
    counted: dict[str, list[float]] = {"forward": [], "backward": []}
    chunk = arguments["case"]["L"] / members.size / 2

    def area(q: torch.Tensor, k: torch.Tensor, causal: bool) -> float:
        rows, columns = q.shape[2] / chunk, k.shape[2] / chunk
        # A diagonal of two chunks: one whole product, two halves.
        return rows * columns / 2 if causal else rows * columns

    attend, attend_backward = ring.attend, ring.attend_backward

    def forward(q: Any, k: Any, v: Any, **options: Any) -> Any:
        counted["forward"].append(area(q, k, options["causal"]))
        return attend(q, k, v, **options)

    def backward(grad: Any, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
        counted["backward"].append(area(q, k, options["causal"]))
        return attend_backward(grad, q, k, v, *rest, **options)

    ring.attend, ring.attend_backward = forward, backward
    compare(arguments["case"], members)
    leave()
    return counted


def refusals(arguments: dict[str, Any], channel: Any) -> dict[str, str]:
    """What each impossible call is told."""
    members = members_of_all()
    q = torch.zeros(1, 4, 6, 8)
    wrong: dict[str, tuple[str, tuple[torch.Tensor, ...], dict[str, Any]]] = {
        "dropout": ("ring", (q, q, q), {"dropout_p": 1.5}),
        "dropout of ulysses": ("ulysses", (q, q, q), {"dropout_p": -0.1}),
        "cross": ("ring", (q, q[:, :, :4], q[:, :, :4]), {}),
        "three dimensions": ("ring", (q[0], q[0], q[0]), {}),
        "grouped without saying so": ("ring", (q, q[:, :2], q[:, :2]), {}),
        "odd groups": ("ring", (q, q[:, :3], q[:, :3]), {"enable_gqa": True}),
        "types": ("ring", (q, q.double(), q), {}),
        "integers": ("ring", (q.long(), q.long(), q.long()), {}),
        "odd length": ("ring", (q[:, :, :3], q[:, :, :3], q[:, :, :3]), {}),
        "rows of everyone": ("ring", (q, q, q), {"attn_mask": torch.zeros(12, 12)}),
        "own columns only": ("ring", (q, q, q), {"attn_mask": torch.zeros(6, 6)}),
        "integer mask": ("ring", (q, q, q), {"attn_mask": torch.zeros(6, 12, dtype=torch.long)}),
        "own rows": ("ulysses", (q, q, q), {"attn_mask": torch.zeros(6, 12)}),
        "heads": ("ulysses", (q[:, :3], q[:, :3], q[:, :3]), {}),
        "key heads": ("ulysses", (q, q[:, :1], q[:, :1]), {"enable_gqa": True}),
        "balanced": ("ulysses", (q, q, q), {"balanced": True}),
    }
    said = {}
    for name, (method, tensors, options) in wrong.items():
        try:
            BY_METHOD[method](*tensors, members, **options)
            said[name] = ""
        except ValueError as error:
            said[name] = str(error)
    said["sent"] = str(BOOK.take().only("forward").calls)
    leave()
    return said


def surroundings(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Calls inside evaluation, under autocast, with frozen inputs, of no samples, and beside a second ring."""
    members = members_of_all()
    torch.manual_seed(1)
    found: dict[str, Any] = {}
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    for method, attention in BY_METHOD.items():
        BOOK.take()
        with BOOK.during("evaluate"), torch.no_grad():
            attention(q, k, v, members, is_causal=method == "ring")
        found[f"{method}: phases of evaluation"] = sorted({key.phase for key in BOOK.take().entries})
        with torch.autocast("cpu", torch.bfloat16):
            mixed = attention(q.clone().requires_grad_(), k, v, members)
            doubled = attention(q.double(), k.double(), v.double(), members)
            mixed.float().sum().backward()
        found[f"{method}: types under autocast"] = [str(mixed.dtype), str(doubled.dtype)]
        # Gradients of the queries alone, and two calls whose backwards run in the opposite order.
        first, second = (q.clone().requires_grad_() for _ in range(2))
        a, b = attention(first, k, v, members), attention(second, k, v, members)
        (b.sum() * 2 + a.sum()).backward()
        found[f"{method}: twice"] = apart(second.grad, first.grad * 2)
        none = q[:0].clone().requires_grad_()
        attention(none, k[:0], v[:0], members).sum().backward()
        found[f"{method}: no samples"] = list(none.grad.shape)
    alone = Members("cp", (0,), 0, None)
    same = [attention(q, k, v, alone, is_causal=True) for attention in BY_METHOD.values()]
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    found["alone"] = [bool(torch.equal(x, whole)) for x in same]
    leave()
    return found
