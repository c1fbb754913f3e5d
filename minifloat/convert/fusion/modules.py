"""Modules that run several as one.

The class of a fused module is a subclass of what it was, which takes a short cut while its parts
are what they were when it was fused: nobody hooked into them, wrapped them or replaced them.
Otherwise it is the module of before, and its parts run one by one. Its parameters never move: a
part holds its own, and the short cut reads them there.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from ...core.activation import ActivatedCall, ActivatedLinear, Activation, ActivationCall, fusable
from ...core.linear import Linear as LinearOp
from ...modules.projection import run
from ...producer import activation as activation_of
from .norms import NormSpec
from .parts import (
    Bond,
    Reader,
    alike,
    calibrate,
    first_links,
    hooked,
    matrix,
    normalized,
    part,
    plain,
)

__all__ = [
    "Fused", "FusedMLP", "Handover", "HandsOver", "MLPParts", "NormedLinear", "fused_class",
    "given",
]  # fmt: skip


class MLPParts(NamedTuple):
    """Names of an MLP's parts inside it, and its activation; `gate` and `norm` may be ""."""

    pattern: str
    gate: str
    up: str
    down: str
    activation: str
    norm: str = ""
    spec: NormSpec | None = None


class Handover(Bond):
    """A norm that passes its input through, since the module that reads it normalizes.

    Both ask `active`, which is a matter of the modules alone.
    """

    def __init__(self, owner: nn.Module, norm: str, reader: str, spec: NormSpec) -> None:
        self.owner, self.norm, self.reader, self.spec = owner, norm, reader, spec

    def active(self) -> bool:
        """Whether both are still in their places, and as they were."""
        norm, reader = part(self.owner, self.norm), part(self.owner, self.reader)
        if norm is None or norm.__dict__.get("_handover") is not self:
            return False
        if reader is None or reader.__dict__.get("_handover") is not self:
            return False
        return bool(reader._whole())

    def module(self) -> Any:
        return part(self.owner, self.norm)


# --------------------------------------------------------------------------- classes of classes
class Fused(nn.Module):
    """First base of a fused class; the class of before is the second."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        first, before = type(self).__bases__
        return _remake, (first, before), self.__dict__.copy()


@cache
def fused_class(first: Any, before: Any) -> Any:
    """`before` with `first`'s forward in front; it goes by the name of before."""
    made = type(before.__name__, (first, before), {"__doc__": before.__doc__})
    made.__module__, made.__qualname__ = before.__module__, before.__qualname__
    return made


def _remake(first: type, before: type) -> Any:
    """For pickles and copies: a fused class is not in any file."""
    made = fused_class(first, before)
    return made.__new__(made)


def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


class HandsOver(Fused):
    """A norm, or nothing where its reader normalizes."""

    _handover: Handover

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._handover.active():
            return given(args, kwargs)
        return super().forward(*args, **kwargs)


# --------------------------------------------------------------------------------- norm + linear
class NormedLinear(Reader):
    """A Linear that normalizes its input while it casts it, where a norm hands that over."""

    _handover: Handover

    def _whole(self) -> bool:
        return plain(self)

    def forward(
        self,
        inp: Any,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        if not self._handover.active():
            return super().forward(inp, is_first_microbatch, fp8_output, fp8_grad)
        self._alone(is_first_microbatch, fp8_output, fp8_grad)
        norm, spec = self._handover.module(), self._handover.spec
        inp = matrix(self._check_input(inp, self.weight))
        begun = self._begin()
        self._advise(begun, inp)
        if begun.calibration is not None:
            calibrate([self], normalized(norm, spec, inp), begun)
        first = first_links([self], begun, inp, norm, spec)
        y = run(first.links, inp, first.params, True in first.needs)
        self._end(begun)
        return y


# ------------------------------------------------------------------------------------------- MLP
class FusedMLP(Fused):
    """`down(act(up(x)))` or `down(act(gate(x)) * up(x))` as one chain, a norm in front or not.

    gate and up are one product, and the activation is made while it is cast, in forward and again
    in backward: see `core.activation`.
    """

    _parts: MLPParts
    _handover: Handover | None

    def _whole(self) -> bool:
        """Whether the parts are as they were; the norm inside, if there is one, too."""
        parts = self._parts
        up: Any = self._modules.get(parts.up)
        if not (plain(up) and plain(self._modules.get(parts.down))):
            return False
        if parts.gate:
            gate: Any = self._modules.get(parts.gate)
            if not plain(gate) or not alike([gate, up]):
                return False
        if parts.norm:
            norm = self._modules.get(parts.norm)
            return norm is not None and not hooked(norm)
        return True

    def _norm(self) -> tuple[Any, NormSpec | None]:
        if self._parts.norm:
            return self._modules[self._parts.norm], self._parts.spec
        if self._handover is not None and self._handover.active():
            return self._handover.module(), self._handover.spec
        return None, None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._whole():
            return super().forward(*args, **kwargs)
        return self._run(given(args, kwargs))

    def _run(self, inp: Any) -> Any:
        parts = self._parts
        up: Any = self._modules[parts.up]
        last: Any = self._modules[parts.down]
        joined: list[Any] = [self._modules[parts.gate], up] if parts.gate else [up]
        first = joined[0]  # whose state the one product of both has
        act = activation_of(parts.activation)
        inp = matrix(first._check_input(inp, first.weight))
        begun1, begun2 = first._begin(), last._begin()
        first._advise(begun1, inp)
        last._advise(begun2, inp)
        norm, spec = self._norm()
        if begun1.calibration is not None or begun2.calibration is not None:
            self._calibrate(inp, norm, spec, (begun1, begun2))
        made = first_links(joined, begun1, inp, norm, spec)
        grads, bias = torch.is_grad_enabled(), last.bias
        w2 = last._weight(last.weight, inp.dtype, begun2)
        needs2 = (
            True in made.needs,
            grads and w2.requires_grad,
            grads and bias is not None and bias.requires_grad,
        )
        call2 = last._call(begun2, needs2, inp, w2, [last.weight], None)
        if fusable(made.call, call2):
            links = (*made.links, (ActivatedLinear, ActivatedCall(act, made.call, call2)))
        else:
            activation = (Activation, ActivationCall(act, call2.dtype))
            links = (*made.links, activation, (LinearOp, call2))
        y = run(links, inp, (*made.params, w2, bias), True in needs2)
        first._end(begun1)
        last._end(begun2)
        return y

    def _calibrate(self, inp: Any, norm: Any, spec: Any, begun: tuple[Any, Any]) -> None:
        """Record what the layers would quantize, for a recipe that scales by history."""
        parts = self._parts
        names = (parts.gate, parts.up) if parts.gate else (parts.up,)
        layers: list[Any] = [self._modules[name] for name in names]
        down: Any = self._modules[parts.down]
        with torch.no_grad():
            x = inp if norm is None else normalized(norm, spec, inp)
            h = torch.cat(
                [nn.functional.linear(x, of.weight.to(x.dtype), _to(of.bias, x)) for of in layers],
                -1,
            )
            h = h.reshape(-1, h.shape[-1])
            act = ActivationCall(activation_of(parts.activation), inp.dtype)
            made = Activation.compute(h, (), act)[0].value()
            if begun[0].calibration is not None:
                calibrate(layers, x, begun[0])
            if begun[1].calibration is not None:
                down._calibrate(made, down.weight, begun[1])


def _to(bias: Any, x: Any) -> Any:
    return None if bias is None else bias.to(x.dtype)
