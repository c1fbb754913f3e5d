"""Statistics and gradients of norms over the last dimension: a kernel where one runs, else PyTorch.

What a norm makes of its input and its statistics is `producers.normalized`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import env, library, programs, reference
from .library import op as _op
from .library import traced as _traced
from .scaled import Scaled, parts

__all__ = ["l2_norm", "l2_norm_backward", "norm_backward", "norm_stats", "norm_stats_amax"]


def _kernels(x: Tensor) -> Any:
    """The kernels where they run on x's device, else None."""
    if not env.runs_kernels(x) or x.numel() == 0:
        return None
    from .kernels import norm

    return norm


def _rows(x: Tensor) -> Tensor:
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def _check(name: str, x: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"{name}: got {tuple(x.shape)}; a matrix [M, K] is needed")


def _run(name: Any, inputs: tuple[Tensor | None, ...], ordinary: Any) -> list[Tensor]:
    x = inputs[0]
    assert x is not None
    if not x.is_cuda:
        return ordinary()  # type: ignore[no-any-return]
    of = programs.key(name, inputs)
    made = programs.again(of, inputs)
    return made if made is not None else programs.replay(of, inputs, ordinary)


# ------------------------------------------------------------------------------------------- stats
def norm_stats(x: Tensor, eps: float, *, rms: bool) -> tuple[Tensor | None, Tensor]:
    """(mean, rstd) of the rows of `x[M, K]`, fp32 `[M]`: `rstd = 1/sqrt(var + eps)`.

    No mean for RMSNorm: var is the mean of the squares.
    """
    _check("x", x)
    if _traced():
        made = _op("norm_stats")(x, eps, rms)
    else:
        made = _run(("norm_stats", eps, rms), (x,), lambda: _stats(x, eps, rms))
    return (None if rms else made[0]), made[-1]


def _stats(x: Tensor, eps: float, rms: bool) -> list[Tensor]:
    kernels = _kernels(x)
    if kernels is None:
        return [t for t in reference.norm_stats(x, eps, rms) if t is not None]
    out = _stats_fake(x, eps, rms)
    kernels.stats(_rows(x), eps, None if rms else out[0], out[-1])
    return out


def _stats_fake(x: Tensor, eps: float, rms: bool) -> list[Tensor]:
    m = x.shape[0]
    return [x.new_empty(m, dtype=torch.float32) for _ in range(1 if rms else 2)]


def norm_stats_amax(
    x: Tensor,
    eps: float,
    gamma: Tensor | None,
    beta: Tensor | None,
    *,
    rms: bool,
    zero_centered: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """(mean, rstd, amax): also the fp32 (1,) amax of the norm's output rounded to `dtype`."""
    _check("x", x)
    dtype = dtype or x.dtype
    arguments = (x, gamma, beta, eps, rms, zero_centered, dtype)
    if _traced():
        made = _op("norm_stats_amax")(*arguments)
    else:
        name = ("norm_stats_amax", eps, rms, zero_centered, dtype)
        made = _run(name, (x, gamma, beta), lambda: _stats_amax(*arguments))
    return (None if rms else made[0]), made[-2], made[-1]


def _stats_amax(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    rms: bool,
    zero_centered: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    kernels = _kernels(x)
    if kernels is None:
        mean, rstd = reference.norm_stats(x, eps, rms)
        y = reference.norm(x, mean, rstd, gamma, beta, zero_centered, dtype)
        amax = y.abs().amax().float().reshape(1) if y.numel() else rstd.new_zeros(1)
        return [*([] if mean is None else [mean]), rstd, amax]
    out = _stats_amax_fake(x, gamma, beta, eps, rms, zero_centered, dtype)
    mean = None if rms else out[0]
    kernels.stats(_rows(x), eps, mean, out[-2], (gamma, beta, zero_centered, dtype), out[-1])
    return out


def _stats_amax_fake(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    rms: bool,
    zero_centered: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    return [*_stats_fake(x, eps, rms), x.new_empty(1, dtype=torch.float32)]


# ---------------------------------------------------------------------------------------- backward
def norm_backward(
    dy: Tensor | Scaled,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    gamma: Tensor | None,
    *,
    zero_centered: bool = False,
    add: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx in x's dtype, dgamma and dbeta in gamma's), each summed in fp32 and rounded once.

    `add` joins dx before it is rounded: a residual's gradient. dbeta is None for RMSNorm (no mean),
    and both are without gamma.
    """
    dy, number = parts(dy)
    _check("dy", dy)
    if dy.shape != x.shape or (add is not None and add.shape != x.shape):
        shapes = [tuple(t.shape) for t in (dy, x, add) if t is not None]
        raise ValueError(f"dy, x, add: got {shapes}; they must have one shape")
    arguments = (dy, x, mean, rstd, gamma, zero_centered, add, number)
    if _traced():
        made = _op("norm_backward")(*arguments)
    else:
        tensors = (dy, x, mean, rstd, gamma, add, number)
        made = _run(("norm_backward", zero_centered), tensors, lambda: _backward(*arguments))
    dgamma = made[1] if gamma is not None else None
    return made[0], dgamma, (None if gamma is None or mean is None else made[2])


def _backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    gamma: Tensor | None,
    zero_centered: bool,
    add: Tensor | None,
    number: Tensor | None = None,
) -> list[Tensor]:
    kernels = _kernels(x)
    if kernels is None:
        dy = dy if number is None else Scaled(dy, number).value()
        dx, *sums = reference.norm_backward(dy, x, mean, rstd, gamma, zero_centered, add)
        dx = dx.clone(memory_format=torch.contiguous_format)
        if gamma is None:
            return [dx]
        return [dx, *(s.to(gamma.dtype) for s in sums[: 1 if mean is None else 2])]
    out = _backward_fake(dy, x, mean, rstd, gamma, zero_centered, add)
    read = (_rows(dy), _rows(x), mean, rstd, gamma, None if add is None else _rows(add))
    kernels.backward(*read, zero_centered, out, number)
    return out


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    gamma: Tensor | None,
    zero_centered: bool,
    add: Tensor | None,
    number: Tensor | None = None,
) -> list[Tensor]:
    m, k = x.shape
    dx = x.new_empty((m, k))
    if gamma is None:
        return [dx]
    return [dx, *(gamma.new_empty(k) for _ in range(1 if mean is None else 2))]


# ---------------------------------------------------------------------------------------------- L2
def l2_norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, rstd): `y = x * rstd`, `rstd = 1/sqrt(sum(x^2) + eps)` of each row."""
    _check("x", x)
    return reference.l2_norm(x, eps)


def l2_norm_backward(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """dx in x's dtype."""
    return reference.l2_norm_backward(dy, x, rstd)


# --------------------------------------------------------------------------------------------- ops
library.define(
    (
        ("norm_stats(Tensor x, float eps, bool rms) -> Tensor[]", _stats, _stats_fake),
        (
            "norm_stats_amax(Tensor x, Tensor? gamma, Tensor? beta, float eps, bool rms, "
            "bool zero_centered, ScalarType dtype) -> Tensor[]",
            _stats_amax,
            _stats_amax_fake,
        ),
        (
            "norm_backward(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? gamma, "
            "bool zero_centered, Tensor? add, Tensor? number=None) -> Tensor[]",
            _backward,
            _backward_fake,
        ),
    ),
    replayed=True,
)
