"""Recordings of forward passes as CUDA graphs: one launch for hundreds of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hotshoe.api import NotRecordableError, Recording


class GraphRecording(Recording):
    """A captured graph.

    Attributes:
        outputs: where the graph leaves its results. They don't keep the memory: later recordings
            use it too, so that dozens of batch sizes take as much as the largest.
    """

    def __init__(self, graph: Any, outputs: tuple[Tensor, ...]) -> None:
        self.outputs = outputs
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class GraphRecorder:
    """Makes recordings that share one pool of memory: only one of them runs at a time.

    Args:
        device: where the kernels run.
        cuda: torch's module for it.
        alias: a tensor on the memory of another, which doesn't keep it.
    """

    def __init__(
        self,
        device: torch.device,
        cuda: Any = torch.cuda,
        alias: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._device = device
        self._cuda = cuda
        self._alias = alias or _alias
        self._stream: Any = None
        self._pool: Any = None

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> GraphRecording:
        """Run a function once, which compiles its kernels, then capture it.

        Raises:
            NotRecordableError: outside a GPU, while something else is captured, if the function
                waits for the GPU, or if what it returns isn't contiguous tensors on the GPU.
        """
        if self._device.type != "cuda":
            raise NotRecordableError(
                f"forward passes are recorded as CUDA graphs, and the device is "
                f"{str(self._device)!r}"
            )
        if self._cuda.is_current_stream_capturing():
            raise NotRecordableError("something else is being captured already")
        with self._cuda.device(self._device):
            return self._capture(run)

    def _capture(self, run: Callable[[], tuple[Tensor, ...]]) -> GraphRecording:
        if self._stream is None:
            self._stream, self._pool = self._cuda.Stream(), self._cuda.graph_pool_handle()
        current = self._cuda.current_stream()
        # on the stream that captures: libraries keep their workspaces by stream
        self._stream.wait_stream(current)
        with self._cuda.stream(self._stream):
            _refuse_outputs(run(), self._device)
        current.wait_stream(self._stream)
        graph = self._cuda.CUDAGraph()
        try:
            with self._cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                # other threads of the program may use the GPU meanwhile
                capture_error_mode="thread_local",
            ):
                outputs = run()
        except RuntimeError as error:
            self._give_up(current)
            if "captur" not in str(error).lower():
                raise
            raise NotRecordableError(
                f"it does what a CUDA graph can't hold, such as waiting for the GPU: {error}"
            ) from error
        return GraphRecording(graph, tuple(map(self._alias, outputs)))

    def _give_up(self, current: Any) -> None:
        """What torch leaves undone after a capture that failed.

        Args:
            current: the stream that was current before.
        """
        self._cuda.set_stream(current)
        memory, place = self._cuda.memory, (self._cuda.current_device(), self._pool)
        # for torch's allocator it is still under way, and until it ends none can be freed of what
        # is only kept for later, as each capture begins with; it has ended if its last step failed
        with suppress(RuntimeError):
            memory._cuda_endAllocateToPool(*place)
            memory._cuda_releasePool(*place)
        self._stream = self._pool = None


def _refuse_outputs(outputs: Sequence[Tensor], device: torch.device) -> None:
    for index, output in enumerate(outputs):
        if output.device.type != device.type:
            raise NotRecordableError(f"result {index} is on {str(output.device)!r}, not on the GPU")
        if not output.is_contiguous():
            raise NotRecordableError(
                f"result {index} is a view with gaps: shape {tuple(output.shape)}, strides "
                f"{output.stride()}"
            )


class _Memory:
    """Bytes of a GPU, as other libraries would show them to torch."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _alias(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:
        return tensor
    raw = torch.as_tensor(_Memory(tensor), device=tensor.device)
    return raw.view(tensor.dtype).view(tensor.shape)
