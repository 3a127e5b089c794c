"""The levels below, and the state that streams through one: of any shape, in any number of parts."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shoal.parallel.offload.level import DiskLevel, HostLevel, MemoryLevel, NoRoomBelow


@pytest.fixture(params=["disk", "host"])
def level(request: pytest.FixtureRequest) -> Iterator[MemoryLevel]:
    found = DiskLevel() if request.param == "disk" else HostLevel(torch.device("cpu"))
    yield found
    found.close()


def test_what_is_written_is_read_and_seen(level: MemoryLevel) -> None:
    place, other = level.reserve(100_000), level.reserve(5000)
    values, into = torch.arange(100_000).to(torch.uint8), torch.zeros(60_000, dtype=torch.uint8)
    level.wait(place.write(0, values))
    level.wait(other.write(1000, values[:4000]))
    level.wait(place.read(40_000, into))
    assert torch.equal(into, values[40_000:])
    assert torch.equal(place.tensor, values)
    assert torch.equal(other.tensor[1000:], values[:4000])
    place.tensor[7] = 200  # Slowly: a checkpoint that is loaded.
    level.wait(place.read(0, into[:8]))
    assert into[7] == 200
    assert (level.held_bytes, level.written_bytes, level.read_bytes) == (105_000, 104_000, 60_008)


def test_a_place_is_seen_as_any_tensor(level: MemoryLevel) -> None:
    place = level.reserve(4096)
    like = torch.randn(8, 16, dtype=torch.float64)
    level.wait(place.write(1024, like.view(-1).view(torch.uint8)))
    assert torch.equal(place.view(1024, like), like)


def test_a_storage_that_moved_can_still_be_freed(level: MemoryLevel) -> None:
    tensor = torch.zeros(4096, dtype=torch.uint8)
    level.wait(level.reserve(4096).write(0, tensor))
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


def test_a_disk_without_room_is_told_before_anything_moves() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    level = DiskLevel()
    try:
        import signal

        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        with pytest.raises(NoRoomBelow, match="TMPDIR"):
            level.reserve(1 << 22)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
        level.close()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        left, right = hidden.chunk(2, dim=-1)  # Two views of one storage.
        return self.second(torch.cat([left.tanh() * right, right.sigmoid()], dim=-1))  # type: ignore[no-any-return]


def test_gradients_from_offloaded_activations_are_the_same_to_the_bit(level: MemoryLevel) -> None:
    from shoal.parallel.offload.activations import OffloadedActivations

    torch.manual_seed(0)
    net, x = Net(), torch.randn(512, 64)
    net(x).square().sum().backward()
    plain = [param.grad.clone() for param in net.parameters() if param.grad is not None]
    moved = OffloadedActivations(level, net.parameters)
    for _ in range(2):
        net.zero_grad()
        with moved.saving([x]):
            loss = net(x).square().sum()
        loss.backward()
        moved.end_step()
        found = [param.grad for param in net.parameters() if param.grad is not None]
        assert all(map(torch.equal, plain, found))
    del loss
    assert moved.most_bytes > 1_000_000
    assert moved.live_bytes == 0
    assert level.held_bytes <= moved.most_bytes  # The second forward used the places of the first.
