"""A GPU that isn't there: code for one runs on the CPU, and fails where it would wait.

    gpu = PretendGpu()
    logits = gpu.put(torch.randn(4, 1000))
    with gpu:
        token_ids = sampler.draw(...)  # a tolist() in it raises WouldWaitError
    gpu.get(token_ids)

Operations are really computed, so what comes out can be compared. What is found: numbers that
Python reads; outputs whose shape depends on numbers, inside other operations too; copies from and
to the CPU that wait; tensors of the CPU among those of the GPU. Triton's kernels aren't looked
into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hotshoe.worker.streams import Copy, HostCopy, Streams

GPU = torch.device("cuda", 0)
"""Where the tensors say that they are."""

_READING = {
    *("item", "tolist", "numpy", "cpu", "is_nonzero", "equal", "allclose"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"),
    *("__array__", "__format__", "__repr__"),
}
_SHAPED_BY_NUMBERS = {
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive"),
}
_FROM_THE_HOST = {"tensor", "as_tensor", "asarray", "new_tensor"}


class WouldWaitError(AssertionError):
    """Code would wait for a GPU, or can't run on one."""


class _OnGpu(Tensor):
    """A tensor that says it is on the GPU."""


class _HiddenWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Finds operations that wait inside those that were called."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """If it is to be skipped, torch imports its compiler for it, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        kwargs = kwargs or {}
        if name in _SHAPED_BY_NUMBERS or (
            name == "repeat_interleave" and kwargs.get("output_size") is None
        ):
            raise WouldWaitError(f"aten::{name} waits for the GPU")
        if name.startswith(("index", "_index_put")) and any(map(_is_mask, tree_leaves(args[1:2]))):
            raise WouldWaitError("an index of booleans waits for the GPU; use torch.where")
        return func(*args, **kwargs)


class PretendGpu(TorchFunctionMode):
    """Refuses to wait while it is entered. Tensors are put on it by ``put``, or made there by code
    that asks for ``device``, and stay there in all that is computed from them.

    Attributes:
        device: where they say that they are.
    """

    device = GPU

    def __init__(self) -> None:
        super().__init__()
        self._may_wait = False

    @property
    def streams(self) -> PretendStreams:
        """Copies to it and from it."""
        return PretendStreams(self)

    def put(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor on the GPU."""
        return tensor.as_subclass(_OnGpu)

    def get(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor on the CPU, at a time when it's allowed to wait."""
        return tensor.as_subclass(Tensor)

    def is_on(self, value: object) -> bool:
        """Whether something is a tensor on the GPU."""
        return isinstance(value, _OnGpu)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Allow it for a while."""
        before, self._may_wait = self._may_wait, True
        try:
            yield
        finally:
            self._may_wait = before

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name, kwargs = _name_of(func), dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        on_gpu = [leaf for leaf in leaves if isinstance(leaf, _OnGpu)]
        if name == "as_subclass":
            return _call(func, args, kwargs)
        if on_gpu and name in _PLACE:
            return _PLACE[name]
        is_for_gpu = any(map(_is_gpu, leaves))
        if not self._may_wait:
            _check(name, args, kwargs, leaves, on_gpu=bool(on_gpu), is_for_gpu=is_for_gpu)
        args, kwargs = tree_map_only(_is_gpu, lambda _: torch.device("cpu"), (args, kwargs))
        kwargs.pop("pin_memory", None)
        if name == "pin_memory":
            return args[0]
        if not on_gpu and not is_for_gpu:
            return _call(func, args, kwargs)
        if self._may_wait:
            found = _call(func, args, kwargs)
            if name == "cpu" or any(map(_is_cpu, tree_leaves((args[1:], kwargs)))) > is_for_gpu:
                return tree_map_only(_OnGpu, self.get, found)
        else:
            with _HiddenWaits():  # type: ignore[no-untyped-call]  # torch's
                found = _call(func, args, kwargs)
        return tree_map_only(Tensor, self.put, found)


class PretendStreams(Streams):
    """Streams of a pretended GPU; what is copied from it arrives at the last moment.

    Args:
        gpu: where tensors are copied.
    """

    def __init__(self, gpu: PretendGpu) -> None:
        self._gpu = gpu

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    def copy_in(self, source: Tensor, target: Tensor) -> Copy:
        assert self._gpu.is_on(target)
        assert not self._gpu.is_on(source)
        self._gpu.get(target).copy_(source)
        return _Arriving(())

    def copy_out(self, *sources: Tensor) -> HostCopy:
        assert all(map(self._gpu.is_on, sources))
        found = [self._gpu.get(source).clone() for source in sources]
        targets = tuple(torch.full_like(one, -1) for one in found)
        return HostCopy(targets, _Arriving(tuple(zip(targets, found, strict=True))))


class _Arriving:
    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._pairs = pairs

    def wait(self) -> None:
        for target, found in self._pairs:
            target.copy_(found)


_PLACE: dict[str, Any] = {
    "device.__get__": GPU,
    "is_cuda.__get__": True,
    "is_cpu.__get__": False,
    "get_device": 0,
}


def _check(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: Iterable[Any],
    *,
    on_gpu: bool,
    is_for_gpu: bool,
) -> None:
    """Refuse a call that would wait, or that a GPU doesn't take."""
    if is_for_gpu and not on_gpu:
        if name in _FROM_THE_HOST or any(isinstance(leaf, Tensor) for leaf in leaves):
            raise WouldWaitError(f"{name} copies to the GPU from memory that isn't page-locked")
        return
    if not on_gpu:
        return
    if name in _READING:
        raise WouldWaitError(f"{name} waits for the GPU")
    if any(map(_is_cpu, tree_leaves((args[1:], kwargs)))):
        raise WouldWaitError(f"{name} copies to the CPU, and waits for the GPU")
    if name in ("__getitem__", "__setitem__"):
        for index in tree_leaves(args[1]):
            if isinstance(index, np.ndarray) or _is_mask(index):
                raise WouldWaitError(f"{name} with {type(index).__name__} waits for the GPU")
        if isinstance(args[1], list) or (
            isinstance(args[1], tuple) and any(isinstance(one, list) for one in args[1])
        ):
            raise WouldWaitError(f"{name} with a list copies it to the GPU, and waits for that")
    if any(_is_of_host(leaf) for leaf in leaves):
        raise WouldWaitError(f"{name} is given a tensor of the CPU beside those of the GPU")


def _call(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _name_of(func: Callable[..., Any]) -> str:
    """As ``tolist``, ``device.__get__``."""
    name = getattr(func, "__name__", str(func))
    return f"{func.__self__.__name__}.__get__" if name == "__get__" else name  # type: ignore[attr-defined]  # of a descriptor


def _is_gpu(value: object) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.split(":")[0] == "cuda"
    )


def _is_cpu(value: object) -> bool:
    return (isinstance(value, torch.device) and value.type == "cpu") or (
        isinstance(value, str) and value == "cpu"
    )


def _is_mask(value: object) -> bool:
    return (
        isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8) and value.dim() > 0
    )


def _is_of_host(value: object) -> bool:
    """Single numbers may be on the CPU."""
    return isinstance(value, Tensor) and not isinstance(value, _OnGpu) and value.dim() > 0
