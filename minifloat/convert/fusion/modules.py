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
from ...core.joined import JoinedCall, JoinedLinear
from ...core.linear import Linear as LinearOp
from ...core.norm import Norm, NormCall
from ...modules import Linear
from ...modules.projection import run
from ...producer import activation as activation_of
from ...tensors import QuantizedTensorStorage
from .norms import NormSpec

__all__ = ["FusedMLP", "Handover", "HandsOver", "MLPParts", "NormedLinear", "fused_class", "hooked"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooked(module: nn.Module) -> bool:
    """Whether somebody watches its calls, and would see other values, or none."""
    for name in _HOOKS:  # noqa: SIM110  (2.11 traces loops)
        if len(getattr(module, name)) > 0:
            return True
    return "forward" in module.__dict__


class MLPParts(NamedTuple):
    """Names of an MLP's parts inside it, and its activation; `gate` and `norm` may be ""."""

    pattern: str
    gate: str
    up: str
    down: str
    activation: str
    norm: str = ""
    spec: NormSpec | None = None


class Handover:
    """A norm that passes its input through, since the module that reads it normalizes.

    Both ask `active`, which is a matter of the modules alone: they cannot come to differ.
    """

    def __init__(self, owner: nn.Module, norm: str, reader: str, spec: NormSpec) -> None:
        self.owner, self.norm, self.reader, self.spec = owner, norm, reader, spec

    def active(self) -> bool:
        """Whether both are still in their places, and as they were."""
        norm, reader = _part(self.owner, self.norm), _part(self.owner, self.reader)
        if norm is None or norm.__dict__.get("_handover") is not self:
            return False
        if reader is None or reader.__dict__.get("_handover") is not self:
            return False
        return bool(reader._whole())

    def module(self) -> Any:
        return _part(self.owner, self.norm)


def _part(owner: nn.Module, name: str) -> Any:
    """The submodule of that name, or None; one that is hooked, or inside one, is not found."""
    found: Any = owner
    for step in name.split("."):
        found = found._modules.get(step)
        if found is None or hooked(found):
            return None
    return found


# --------------------------------------------------------------------------- classes of classes
class _Fused(nn.Module):
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


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


class HandsOver(_Fused):
    """A norm, or nothing where its reader normalizes."""

    _handover: Handover

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._handover.active():
            return _given(args, kwargs)
        return super().forward(*args, **kwargs)


# --------------------------------------------------------------------------------- norm + linear
class NormedLinear(Linear):
    """A Linear that normalizes its input while it casts it, where a norm hands that over."""

    _handover: Handover

    def _whole(self) -> bool:
        return _plain(self)

    def forward(
        self,
        inp: Any,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        if not self._handover.active():
            return super().forward(inp, is_first_microbatch, fp8_output, fp8_grad)
        if is_first_microbatch is not None or fp8_output or fp8_grad:
            raise ValueError(
                f"{self._where()}: it is fused with the norm in front of it and takes its input "
                "alone; convert it without fuse"
            )
        norm, spec = self._handover.module(), self._handover.spec
        weight, bias = self.weight, self.bias
        inp = _matrix(self._check_input(inp, weight))
        begun = self._begin()
        self._advise(begun, inp)
        if begun.calibration is not None:
            self._calibrate(_normalized(norm, spec, inp), weight, begun)
        used = self._weight(weight, inp.dtype, begun)
        link = _norm_link(norm, spec, inp, begun.plan)
        grads = torch.is_grad_enabled()
        needs = (True in link[1].needs, grads and weight.requires_grad, grads and _trains(bias))
        call = self._call(begun, needs, inp, used, [weight], None)
        params = (norm.weight, getattr(norm, "bias", None), used, bias)
        y = run((link, (LinearOp, call)), inp, params, True in needs)
        self._end(begun)
        return y


# ------------------------------------------------------------------------------------------- MLP
class FusedMLP(_Fused):
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
        if not (_plain(up) and _plain(self._modules.get(parts.down))):
            return False
        if parts.gate:
            gate: Any = self._modules.get(parts.gate)
            if not _plain(gate) or gate.recipe != up.recipe:
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
        return self._run(_given(args, kwargs))

    def _run(self, inp: Any) -> Any:
        parts = self._parts
        up: Any = self._modules[parts.up]
        last: Any = self._modules[parts.down]
        joined: list[Any] = [self._modules[parts.gate], up] if parts.gate else [up]
        first = joined[0]  # whose state the one product of both has
        act = activation_of(parts.activation)
        inp = _matrix(first._check_input(inp, first.weight))
        begun1, begun2 = first._begin(), last._begin()
        first._advise(begun1, inp)
        last._advise(begun2, inp)
        norm, spec = self._norm()
        if begun1.calibration is not None or begun2.calibration is not None:
            self._calibrate(inp, norm, spec, (begun1, begun2))
        links: tuple[Any, ...] = ()
        params: list[Any] = []
        grads = torch.is_grad_enabled()
        needs_x = grads and inp.requires_grad
        if norm is not None:
            assert spec is not None
            link = _norm_link(norm, spec, inp, begun1.plan)
            links, params = (link,), [norm.weight, getattr(norm, "bias", None)]
            needs_x = True in link[1].needs
        weights = [of._weight(of.weight, inp.dtype, begun1) for of in joined]
        biases = [of.bias for of in joined]
        needs1 = (
            needs_x,
            grads and True in [w.requires_grad for w in weights],
            grads and True in [_trains(b) for b in biases],
        )
        w2 = last._weight(last.weight, inp.dtype, begun2)
        needs2 = (True in needs1, grads and w2.requires_grad, grads and _trains(last.bias))
        call1 = first._call(begun1, needs1, inp, weights[0], [first.weight], None)
        call2 = last._call(begun2, needs2, inp, w2, [last.weight], None)
        if parts.gate:
            links = (*links, (JoinedLinear, JoinedCall(call1, up._counts)))
        else:
            links = (*links, (LinearOp, call1))
        if fusable(call1, call2):
            links = (*links, (ActivatedLinear, ActivatedCall(act, call1, call2)))
        else:
            links = (*links, (Activation, ActivationCall(act, call2.dtype)), (LinearOp, call2))
        every = (*params, *weights, *biases, w2, last.bias)
        y = run(links, inp, every, True in needs2)
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
            x = inp if norm is None else _normalized(norm, spec, inp)
            h = torch.cat(
                [nn.functional.linear(x, of.weight.to(x.dtype), _to(of.bias, x)) for of in layers],
                -1,
            )
            h = h.reshape(-1, h.shape[-1])
            act = ActivationCall(activation_of(parts.activation), inp.dtype)
            made = Activation.compute(h, (), act)[0].value()
            if begun[0].calibration is not None:
                weight = torch.cat([of.weight for of in layers])
                layers[0]._calibrate(x, weight, begun[0])
            if begun[1].calibration is not None:
                down._calibrate(made, down.weight, begun[1])


# ----------------------------------------------------------------------------------------- parts
def _plain(layer: Any) -> bool:
    """A converted linear layer whose call is its product and nothing else."""
    return (
        type(layer) in (Linear, NormedLinear)
        and not layer._special
        and not layer.return_bias
        and layer.tp_size == 1
        and not isinstance(layer.weight, QuantizedTensorStorage)
        and not hooked(layer)
    )


def _matrix(inp: Any) -> Any:
    """What a norm reads: the values of a quantized tensor."""
    return inp.dequantize() if isinstance(inp, QuantizedTensorStorage) else inp


def _trains(p: Any) -> bool:
    return p is not None and p.requires_grad


def _to(bias: Any, x: Any) -> Any:
    return None if bias is None else bias.to(x.dtype)


def _norm_link(norm: Any, spec: NormSpec, inp: Any, plan: Any) -> tuple[Any, NormCall]:
    grads = torch.is_grad_enabled()
    needs = (
        grads and inp.requires_grad,
        grads and norm.weight.requires_grad,
        grads and _trains(getattr(norm, "bias", None)),
    )
    eps = spec.eps_of(inp.dtype)
    return Norm, NormCall(
        eps, spec.rms, spec.zero_centered, needs, inp.dtype, True, plan.input_amax
    )


def _normalized(norm: Any, spec: NormSpec, inp: Any) -> Any:
    call = NormCall(spec.eps_of(inp.dtype), spec.rms, spec.zero_centered, (False,) * 3, inp.dtype)
    with torch.no_grad():
        x = inp.reshape(-1, inp.shape[-1])
        y, _ = Norm.compute(x, (norm.weight, getattr(norm, "bias", None)), call)
    return y
