"""A training step as one CUDA graph: the host launches it, and does nothing else for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .errors import TrainError

__all__ = ["StepGraph"]

ORDINARY = 2  # calls before the capture: they compile, allocate moments and record programs


class StepGraph:
    """`work(*inputs) -> result`, the first calls as usual and the others by replay.

    A call does what `work` would do, to the bit: the capture itself runs nothing, and random
    numbers depend on the generator's seed and offset at the call. What `work` reads besides its
    inputs must stay where it is (parameters, moments, a learning rate in a tensor), and its inputs
    keep their shapes. A result is the caller's, and the next call leaves it alone.
    """

    def __init__(self, work: Callable[..., Tensor]) -> None:
        self.work = work
        self.calls = 0
        # Autograd runs the sum of a gradient on the stream that its parameter was first used on.
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.inputs: tuple[Tensor, ...] = ()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Tensor | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        if not self.inputs:
            self.inputs = tuple(torch.empty_like(t) for t in inputs)
        for i, (own, given) in enumerate(zip(self.inputs, inputs, strict=True)):
            if own.shape != given.shape:  # `copy_` would broadcast it
                raise ValueError(
                    f"input {i}: got shape {tuple(given.shape)}, the first call had "
                    f"{tuple(own.shape)}; a graph has one: call release() in between"
                )
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.calls += 1
        if self.calls <= ORDINARY:
            return self._ordinary()
        if self.graph is None:
            self.graph = self._captured()
        self.graph.replay()
        assert self.result is not None
        return self.result.clone()

    def _ordinary(self) -> Tensor:
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = self.work(*self.inputs)
        current.wait_stream(self.stream)
        return result

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self.result = self.work(*self.inputs)
        except RuntimeError as error:
            first = _first(error)
            if isinstance(first, torch.OutOfMemoryError):
                raise
            raise TrainError(
                f"a step cannot be captured in a CUDA graph: {str(first).splitlines()[0]}:"
                " --no-cuda-graphs runs it without"
            ) from error
        return graph

    def release(self) -> None:
        """Give back the memory of the graph; the next calls start over."""
        self.graph = self.result = None
        self.inputs, self.calls = (), 0


def _first(error: BaseException) -> BaseException:
    """What went wrong: the end of a capture that failed fails as well, and says less."""
    while error.__context__ is not None:
        error = error.__context__
    return error
