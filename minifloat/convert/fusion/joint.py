"""A norm and the linear layers that read it: one cast of the normalized input, one product.

They are called one after the other by code that is not ours, so the norm runs all of them when it
is called, and returns what each of them made instead of what they would have read. Nothing is kept
anywhere between the calls: what a layer returns is a part of what it is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.joined import Split
from ...modules.projection import run
from .modules import Fused, given
from .norms import NormSpec
from .parts import Bond, Reader, alike, calibrate, first_links, matrix, normalized, part, plain

__all__ = ["FACTS", "Joint", "JointLinear", "JointNorm", "Read"]

# What else may be asked of a norm's output: the same of its input.
FACTS = ("shape", "device", "ndim", "size", "dim")


class Read:
    """In place of a tensor that everybody has read: what it looked like, and what they made."""

    def __init__(self, of: Tensor, made: tuple[Any, ...]) -> None:
        self.of, self.made = of, made

    @property
    def shape(self) -> torch.Size:
        return self.of.shape

    @property
    def device(self) -> torch.device:
        return self.of.device

    @property
    def ndim(self) -> int:
        return self.of.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.of.size() if dim is None else self.of.size(dim)

    def dim(self) -> int:
        return self.of.dim()


class Joint(Bond):
    """`norm` and its `readers`, by their names inside `owner`."""

    def __init__(self, owner: Any, norm: str, readers: tuple[str, ...], spec: NormSpec) -> None:
        self.owner, self.norm, self.readers, self.spec = owner, norm, readers, spec

    def layers(self) -> list[Any] | None:
        """The readers, if all are still in their places and as they were, and the norm is too."""
        norm = part(self.owner, self.norm)
        if norm is None or norm.__dict__.get("_handover") is not self:
            return None
        found = []
        for name in self.readers:
            layer = part(self.owner, name)
            if layer is None or layer.__dict__.get("_handover") is not self or not plain(layer):
                return None
            found.append(layer)
        return found if alike(found) else None

    def active(self) -> bool:
        return self.layers() is not None


class JointNorm(Fused):
    """A norm that runs the layers which read it."""

    _handover: Joint

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layers = self._handover.layers()
        if layers is None:
            return super().forward(*args, **kwargs)
        first, spec = layers[0], self._handover.spec
        inp = matrix(first._check_input(given(args, kwargs), first.weight))
        begun = first._begin()
        first._advise(begun, inp)
        if begun.calibration is not None:
            calibrate(layers, normalized(self, spec, inp), begun)
        made = first_links(layers, begun, inp, self, spec)
        sizes = tuple([of.out_features for of in layers])
        parts = run((*made.links, (Split, sizes)), inp, made.params, True in made.needs)
        first._end(begun)
        return Read(inp, parts)


class JointLinear(Reader):
    """A Linear whose output may be there already."""

    _handover: Joint
    _index: int

    def forward(
        self,
        inp: Any,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        if not isinstance(inp, Read):
            return super().forward(inp, is_first_microbatch, fp8_output, fp8_grad)
        self._alone(is_first_microbatch, fp8_output, fp8_grad)
        return inp.made[self._index]
