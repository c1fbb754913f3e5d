"""What fused modules share: who may be a part of one, and the first links of their chains."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import nn

from ...core.joined import JoinedCall, JoinedLinear
from ...core.linear import Call
from ...core.linear import Linear as LinearOp
from ...core.norm import Norm, NormCall
from ...core.probe import together
from ...modules import Linear
from ...ops.fusible import hooked
from ...recipe.autocast import STATE
from ...tensors import QuantizedTensorStorage
from .norms import NormSpec

__all__ = [
    "Bond", "First", "Reader", "alike", "calibrate", "first_links", "hooked", "matrix",
    "normalized", "part", "plain",
]  # fmt: skip


class Reader(Linear):
    """Base of our linear layers that are fused with a norm in front of them."""

    _handover: Any

    def _alone(self, *options: Any) -> None:
        """Refuse the options of a forward that runs as a part of another."""
        if any(option is not None and option is not False for option in options):
            raise ValueError(
                f"{self._where()}: it is fused with the norm in front of it and takes its input "
                "alone; convert it without fuse"
            )


class Bond:
    """What a norm and its readers hold of each other: both ask it, so they cannot come to differ.

    A copy of a part without the owner of both is a part by itself again.
    """

    owner: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = copy.copy(self)
        made.owner = memo.get(id(self.owner))
        return made


def part(owner: nn.Module | None, name: str) -> Any:
    """The submodule of that name, or None; one that is hooked, or inside one, is not found.

    Nor is any of an owner whose forward was replaced: it may call its parts in other ways.
    """
    if owner is None or "forward" in owner.__dict__:
        return None
    found: Any = owner
    for step in name.split("."):
        found = found._modules.get(step)
        if found is None or hooked(found):
            return None
    return found


def plain(layer: Any) -> bool:
    """A converted linear layer whose call is its product and nothing else."""
    kind: Any = type(layer)
    return (
        (kind is Linear or issubclass(kind, Reader))
        and not layer._special
        and not layer.return_bias
        and layer.tp_size == 1
        and not isinstance(layer.weight, QuantizedTensorStorage)
        and not hooked(layer)
    )


def alike(layers: list[Any]) -> bool:
    """Whether one product can be that of all of them: what may have changed since they were fused.

    Somebody who wants one of them alone in high precision gets them apart.
    """
    first = layers[0]
    wanted = None if first._probe is None else first._probe.precise
    for layer in layers:
        if layer.recipe != first.recipe:
            return False
        if (None if layer._probe is None else layer._probe.precise) != wanted:
            return False
    return True


def matrix(inp: Any) -> Any:
    """What a norm reads: the values of a quantized tensor."""
    return inp.dequantize() if isinstance(inp, QuantizedTensorStorage) else inp


def normalized(norm: Any, spec: NormSpec, inp: Any) -> Any:
    call = NormCall(spec.eps_of(inp.dtype), spec.rms, spec.zero_centered, (False,) * 3, inp.dtype)
    with torch.no_grad():
        x = inp.reshape(-1, inp.shape[-1])
        y, _ = Norm.compute(x, (norm.weight, getattr(norm, "bias", None)), call)
    return y


# ----------------------------------------------------------------------------- the start of a chain
class First(NamedTuple):
    """The links from an input to the product of some layers, and `needs` of what follows."""

    links: tuple[Any, ...]
    params: tuple[Any, ...]
    call: Call
    needs: tuple[bool, bool, bool]


def first_links(layers: list[Any], begun: Any, inp: Any, norm: Any, spec: Any) -> First:
    """Of `inp`, normalized if there is a norm, times the weights of `layers`.

    The one product has the state of the first layer, which has `begun`.
    """
    first = layers[0]
    grads = torch.is_grad_enabled()
    links: tuple[Any, ...] = ()
    params: tuple[Any, ...] = ()
    needs_x = grads and inp.requires_grad
    if norm is not None:
        link = _norm_link(norm, spec, inp, begun.plan)
        links, params = (link,), (norm.weight, getattr(norm, "bias", None))
        needs_x = True in link[1].needs
    weights = [of._weight(of.weight, inp.dtype, begun) for of in layers]
    biases = [of.bias for of in layers]
    needs = (
        needs_x,
        grads and True in [w.requires_grad for w in weights],
        grads and True in [b is not None and b.requires_grad for b in biases],
    )
    call = first._call(begun, needs, inp, weights[0], [first.weight], None)
    if len(layers) == 1:
        last: Any = (LinearOp, call)
    else:
        _check_plans(layers, begun)
        sizes = tuple([of.out_features for of in layers])
        call = call._replace(probe=together([of._probe for of in layers], sizes))
        last = (JoinedLinear, JoinedCall(call, sizes, tuple([of._counts for of in layers[1:]])))
    return First((*links, last), (*params, *weights, *biases), call, needs)


def calibrate(layers: list[Any], x: Any, begun: Any) -> None:
    """Record what the product of `layers` would quantize, for a recipe that scales by history."""
    weight = layers[0].weight if len(layers) == 1 else torch.cat([of.weight for of in layers])
    layers[0]._calibrate(x, weight, begun)


def _check_plans(layers: list[Any], begun: Any) -> None:
    """A recipe that asks for names may give each layer something else: one product cannot."""
    recipe = STATE.recipe if STATE.depth else layers[0].recipe
    if begun.replays or recipe is None or not recipe.custom():
        return
    for layer in layers[1:]:
        if recipe.plan(*layer._roles(recipe)) != begun.plan:
            raise ValueError(
                f"{layer._where()}: it runs as one with {layers[0]._where()}, and the recipe casts "
                "the two differently; convert without fuse, or give them the same formats"
            )


def _norm_link(norm: Any, spec: NormSpec, inp: Any, plan: Any) -> tuple[Any, NormCall]:
    grads = torch.is_grad_enabled()
    bias = getattr(norm, "bias", None)
    needs = (
        grads and inp.requires_grad,
        grads and norm.weight.requires_grad,
        grads and bias is not None and bias.requires_grad,
    )
    eps = spec.eps_of(inp.dtype)
    return Norm, NormCall(
        eps, spec.rms, spec.zero_centered, needs, inp.dtype, True, plan.input_amax
    )
