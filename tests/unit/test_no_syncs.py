"""The pretended GPU: what it refuses, and what it lets through."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from hotshoe.testing.no_syncs import PretendGpu, PretendStreams, WouldWaitError

WAITING: dict[str, Callable[[Tensor], object]] = {
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0, 0].item(),
    "number": lambda x: int(x[0, 0]),
    "condition": lambda x: bool(x.sum() > 0),
    "python's min": lambda x: min(x[0]),
    "format": lambda x: f"{x[0, 0]}",
    "numpy": lambda x: np.asarray(x),
    "cpu": lambda x: x.cpu(),
    "to the cpu": lambda x: x.to("cpu"),
    "into the cpu": lambda x: torch.zeros(4, 10).copy_(x),
    "from the cpu": lambda x: x.copy_(torch.zeros(4, 10)),
    "from a list": lambda x: torch.tensor([1], device=x.device),
    "from an array": lambda x: torch.from_numpy(np.zeros(3)).to(x.device),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: torch.bincount(x[0].long()),
    "repeat": lambda x: x.repeat_interleave(torch.arange(4, device=x.device), 0),
    "mask": lambda x: x[x > 0],
    "mask that is set": lambda x: x.__setitem__(x > 0, 0.0),
    "list as index": lambda x: x[[1, 2]],
    "array as index": lambda x: x[np.array([1, 2])],
    "index on the cpu": lambda x: x[torch.tensor([1])],
    "operand on the cpu": lambda x: x + torch.zeros(10),
    "length": lambda x: torch.arange(x.max(), device=x.device),
    "slice": lambda x: x[: x[0, 0].long()],
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_refused(name: str) -> None:
    gpu = PretendGpu()
    numbers = gpu.put(torch.ones(4, 10))
    with gpu, pytest.raises(WouldWaitError):
        WAITING[name](numbers)
    with gpu, gpu.waiting():
        WAITING["tolist"](numbers)


def test_what_does_not_wait_is_computed_and_stays_there() -> None:
    gpu = PretendGpu()
    host = torch.randn(4, 10)
    numbers = gpu.put(host.clone())
    with gpu:
        assert numbers.device == gpu.device
        assert numbers.is_cuda
        places = torch.arange(10, device=numbers.device)
        best, token_ids = (numbers[:, places] * torch.tensor(2.0)).where(numbers > 0, 0.0).max(-1)
        numbers[places[:3]] = 1.0
        numbers.masked_fill_(numbers > 1, 0.5)
        ones = torch.ones(3, device="cuda").to(torch.float64)
    assert all(map(gpu.is_on, (best, token_ids, ones)))
    expected = (host * 2).where(host > 0, 0.0).max(-1)
    assert gpu.get(token_ids).tolist() == expected.indices.tolist()
    assert gpu.get(numbers)[3].tolist() == host[3].masked_fill(host[3] > 1, 0.5).tolist()


def test_copies_of_the_streams_arrive_when_they_are_waited_for() -> None:
    gpu = PretendGpu()
    streams = PretendStreams(gpu)
    with gpu:
        source = streams.host_tensor(3, torch.int64).fill_(7)
        target = torch.zeros(3, dtype=torch.int64, device=gpu.device)
        streams.copy_in(source, target).wait()
        arriving = streams.copy_out(target)
        target += 1
        assert arriving.wait()[0].tolist() == [7, 7, 7]
