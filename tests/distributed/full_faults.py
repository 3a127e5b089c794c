"""Wrong updates of full parameters, planted on purpose: each sends what an honest run sends."""

from __future__ import annotations

from typing import Any

import torch

from shoal.parallel.full_parameters import FullParameters
from shoal.proof.entry import parallel_run


def update_not_sent(arguments: dict[str, Any], channel: Any) -> Any:
    """Other ranks keep their pieces of one parameter as they were: its owner's update does not reach them."""
    send_back = FullParameters.send_back

    def faulty(self: FullParameters) -> None:
        each = self.classes[0]
        elsewhere = [
            sum(share.size for member, share in enumerate(shares) if member != owner)
            for shares, owner in zip(each.shares, each.owners, strict=True)
        ]
        place = elsewhere.index(max(elsewhere))
        piece = each.params[place].mine(each.params[place].bucket.master)
        before = piece.clone()
        send_back(self)
        if each.owners[place] != each.members.index:
            piece.copy_(before)

    FullParameters.send_back = faulty
    return parallel_run(arguments, channel)


def update_of_the_wrong_owner(arguments: dict[str, Any], channel: Any) -> Any:
    """Two parameters of one shape are taken from each other's owner: each gets the other's update."""
    send_back = FullParameters.send_back

    def faulty(self: FullParameters) -> None:
        each = self.classes[0]
        pairs = [
            (one, other)
            for other in range(len(each.params))
            for one in range(other)
            if each.params[one].shape == each.params[other].shape and each.owners[one] != each.owners[other]
        ]
        one, other = pairs[0]
        names = {one: each.params[one].slot.name, other: each.params[other].slot.name}
        exchanged = {names[one]: names[other], names[other]: names[one]}
        owners, owned = list(each.owners), self.owned
        each.owners[one], each.owners[other] = owners[other], owners[one]
        self.owned = {exchanged.get(name, name): piece for name, piece in owned.items()}
        send_back(self)
        each.owners[:], self.owned = owners, owned

    FullParameters.send_back = faulty
    return parallel_run(arguments, channel)


def pieces_in_the_wrong_order(arguments: dict[str, Any], channel: Any) -> Any:
    """Owners put the pieces of every gradient together in another order than they lie in the parameter."""
    collect = FullParameters.collect

    def faulty(self: FullParameters) -> None:
        collect(self)
        for piece in self.owned.values():
            grad = piece.param.grad
            if grad is not None and grad.numel() > 1:
                grad.copy_(torch.roll(grad.flatten(), grad.numel() // 2).view_as(grad))

    FullParameters.collect = faulty
    return parallel_run(arguments, channel)
