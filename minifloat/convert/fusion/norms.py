"""Which modules are norms: those of PyTorch, and any other that computes what one computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["NormSpec", "looks_like_norm", "norm_spec"]

_EPS = ("eps", "variance_epsilon", "epsilon")


class NormSpec(NamedTuple):
    """`eps` None: that of the input's dtype. `zero_centered` norms multiply by 1 + weight."""

    rms: bool
    eps: float | None
    zero_centered: bool = False

    def eps_of(self, dtype: torch.dtype) -> float:
        return torch.finfo(dtype).eps if self.eps is None else self.eps


def looks_like_norm(module: nn.Module) -> bool:
    """Whether it is worth asking `norm_spec`."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    names = {name for name, p in module.named_parameters(recurse=False) if p is not None}
    return (
        "norm" in type(module).__name__.lower()
        and not isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm)
        and "weight" in names <= {"weight", "bias"}
        and not list(module.children())
    )


def norm_spec(module: Any) -> NormSpec | str:
    """What the norm computes, or why it is none that can be fused.

    Classes of others are tried on numbers: small ones too, which eps decides.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if weight is None or weight.dim() != 1:
        return "it has no weight of one dim"
    if isinstance(module, nn.LayerNorm) and bias is None:
        return "it is a LayerNorm without bias"
    if type(module) is nn.LayerNorm:
        return NormSpec(False, module.eps)
    if type(module) is nn.RMSNorm:
        return NormSpec(True, module.eps)
    eps = next((getattr(module, name) for name in _EPS if hasattr(module, name)), None)
    if not isinstance(eps, float):
        return f"no eps was found on {type(module).__name__}"
    if weight.is_meta:
        return f"{type(module).__name__} is on the meta device, where it cannot be tried"
    for spec in (NormSpec(True, eps), NormSpec(True, eps, True), NormSpec(False, eps)):
        if (bias is None) == spec.rms and _agrees(module, spec):
            return spec
    return f"{type(module).__name__} computes something else than RMSNorm and LayerNorm"


def _agrees(module: Any, spec: NormSpec) -> bool:
    weight: Tensor = module.weight
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(4, weight.shape[0], generator=generator, device="cpu").to(weight)
    with torch.no_grad():
        for size in (1.0, spec.eps_of(x.dtype) ** 0.5):
            try:
                got = type(module).forward(module, x * size)
            except Exception:  # another signature: not a norm of ours
                return False
            if not isinstance(got, Tensor) or got.shape != x.shape:
                return False
            expected = _expected((x * size).float(), module, spec)
            # Two roundings to the dtype more than the reference.
            tolerance = 4 * torch.finfo(weight.dtype).eps
            if not torch.allclose(got.float(), expected, tolerance, tolerance):
                return False
    return True


def _expected(x: Tensor, module: Any, spec: NormSpec) -> Tensor:
    weight = module.weight.float() + (1.0 if spec.zero_centered else 0.0)
    eps = spec.eps_of(torch.float32)
    if spec.rms:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.layer_norm(x, x.shape[-1:], weight, module.bias.float(), eps)
