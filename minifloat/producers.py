"""Matrices that are produced while they are cast.

    quantize(lazy, ...) == dispatch.quantize(lazy.value(), ...)

bit for bit: `value` computes in fp32 and rounds once to the dtype it is asked for, and a kernel
that casts what it computes rounds it there first. Where no kernel does both, the value is made and
cast. A producer's arithmetic may differ from its twin in `reference` by one unit in the last place
of bf16 (another exp); kernels that make values and kernels that cast them share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import casting, dispatch, env, library, programs, reference
from .formats import Cast
from .inputs import INPUT_DTYPES, check_seed, check_usage
from .layout import parts, value_parts
from .library import op as _op
from .library import traced as _traced
from .producer import Producer, columns, norm
from .scaled import Scaled
from .scaled import parts as _numbered

__all__ = [
    "CAST",
    "OF",
    "Lazy",
    "activated",
    "activation_gradient",
    "fake_quantize",
    "normalized",
    "quantize",
    "quantize_scaled",
    "value",
]

Inputs = tuple[Tensor | None, ...]


class Lazy(NamedTuple):
    """A matrix `[M, K]` of `dtype` that `producer` computes from `inputs`, when it is needed.

    The inputs are (h) of an activation, (h, dy) of its gradient, (x, mean, rstd, gamma, beta) of a
    norm. Numbers that h and dy are multiplied by follow them, where one is `Scaled`. Made by
    `activated`, `activation_gradient` and `normalized`.
    """

    producer: Producer
    inputs: Inputs
    shape: tuple[int, int]
    dtype: torch.dtype
    amax: Tensor | None = None  # of the matrix, where it is known already

    @property
    def device(self) -> torch.device:
        x = self.inputs[0]
        assert x is not None
        return x.device

    def value(self) -> Tensor:
        """The matrix."""
        return value(self)


def activated(h: Tensor | Scaled, producer: Producer, dtype: torch.dtype | None = None) -> Lazy:
    """y = activation of `h[M, F]`, or of `h[M, 2 F]` if gated; in h's dtype unless told."""
    h, number = _numbered(h)
    _check("h", h)
    inputs = (h,) if number is None else (h, number)
    return Lazy(producer, inputs, (h.shape[0], columns(producer, h.shape[1])), dtype or h.dtype)


def activation_gradient(
    h: Tensor | Scaled,
    dy: Tensor | Scaled,
    producer: Producer,
    dtype: torch.dtype | None = None,
) -> Lazy:
    """dh of `h` and `dy[M, F]`, of the shape of h; `producer` is the activation's."""
    (h, of_h), (dy, of_dy) = _numbered(h), _numbered(dy)
    _check("h", h)
    _check("dy", dy)
    f = columns(producer, h.shape[1])
    if dy.shape[0] != h.shape[0] or dy.shape[1] != f:
        raise ValueError(
            f"dy: got {tuple(dy.shape)}; the activation of h {tuple(h.shape)} has the shape "
            f"{(h.shape[0], f)}"
        )
    inputs: Inputs = (h, dy) if of_h is None and of_dy is None else (h, dy, of_h, of_dy)
    return Lazy(producer.gradient(), inputs, (h.shape[0], h.shape[1]), dtype or h.dtype)


def normalized(
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    zero_centered: bool = False,
    dtype: torch.dtype | None = None,
) -> Lazy:
    """y = `(x - mean) * rstd * gamma + beta`; mean, gamma and beta may be absent."""
    _check("x", x)
    m, k = x.shape
    for name, t, n in (
        ("mean", mean, m),
        ("rstd", rstd, m),
        ("gamma", gamma, k),
        ("beta", beta, k),
    ):
        if t is not None and (t.dim() != 1 or t.shape[0] != n):
            raise ValueError(f"{name}: got {tuple(t.shape)}; x {(m, k)} needs ({n},)")
    return Lazy(norm(zero_centered), (x, mean, rstd, gamma, beta), (m, k), dtype or x.dtype)


def _check(name: str, x: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"{name}: got {tuple(x.shape)}; a matrix [M, K] is needed")
    if x.dtype not in INPUT_DTYPES:
        allowed = ", ".join(str(d) for d in INPUT_DTYPES)
        raise TypeError(f"{name}: got dtype {x.dtype}; allowed: {allowed}")


def _shape(p: Producer, inputs: Sequence[Tensor | None]) -> tuple[int, int]:
    """Of what is produced."""
    x = inputs[0]
    assert x is not None
    m, k = x.shape
    return m, k if p.normalizes or p.differentiates else columns(p, k)


def _rows(inputs: Sequence[Tensor | None]) -> Inputs:
    """The inputs with unit stride along their last dim, as kernels read them."""
    return tuple(
        t if t is None or t.shape[-1] <= 1 or t.stride(-1) == 1 else t.contiguous() for t in inputs
    )


def _kernels(inputs: Sequence[Tensor | None]) -> Any:
    """The kernels where they run on the inputs' device, else None."""
    x = inputs[0]
    assert x is not None
    if not env.runs_kernels(x) or x.numel() == 0:
        return None
    from .kernels import produce_entry

    return produce_entry


def _run(name: Any, inputs: Inputs, casts: tuple[Any, Any], ordinary: Any) -> list[Tensor]:
    """`ordinary()`, or the program that was recorded of it. `inputs` is all that it reads."""
    x = inputs[0]
    assert x is not None
    if not x.is_cuda:
        return ordinary()  # type: ignore[no-any-return]
    of = programs.key(name, inputs, *casts)
    made = programs.again(of, inputs)
    if made is not None:
        return made
    return programs.replay(of, inputs, ordinary)


# ------------------------------------------------------------------------------------------- value
def value(lazy: Lazy) -> Tensor:
    """The matrix: computed in fp32, rounded once."""
    p, inputs, _, dtype, _ = lazy
    if _traced():
        return _op("produce")(p, list(inputs), dtype)  # type: ignore[no-any-return]
    return _run(
        ("produce", id(p), dtype), inputs, (None, None), lambda: [_produce(p, inputs, dtype)]
    )[0]


def _produce(p: Producer, inputs: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    kernels = _kernels(inputs)
    if kernels is None:
        return _reference(p, inputs, dtype)
    if p.interleave:
        return _interleaved(p, inputs, dtype)
    out = _produce_fake(p, inputs, dtype)
    kernels.value(p, _rows(inputs), out)
    return out


def _interleaved(p: Producer, inputs: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    """`_produce` by way of copies whose halves lie apart."""
    h, *rest = inputs
    assert h is not None
    (m, k), n = h.shape, p.interleave
    apart = h.reshape(m, k // (2 * n), 2, n).transpose(1, 2).reshape(m, k)
    made = _produce(p.replace(interleave=0), (apart, *rest), dtype)
    if not p.differentiates:
        return made
    return made.reshape(m, 2, k // (2 * n), n).transpose(1, 2).reshape(m, k)


def _reference(p: Producer, inputs: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    x, *rest = inputs
    assert x is not None
    if p.normalizes:
        mean, rstd, gamma, beta = rest
        assert rstd is not None
        made = reference.norm(x, mean, rstd, gamma, beta, p.zero_centered, dtype)
    elif p.differentiates:
        dy, of_h, of_dy = (*rest, None, None)[:3]
        assert dy is not None
        made = reference.activate_gradient(_whole(x, of_h), _whole(dy, of_dy), p, dtype)
    else:
        made = reference.activate(_whole(x, *rest), p, dtype)
    return casting.compact(made, made.shape)


def _whole(x: Tensor, number: Tensor | None = None) -> Tensor:
    return x if number is None else Scaled(x, number).value()


def _produce_fake(p: Producer, inputs: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    x = inputs[0]
    assert x is not None
    return x.new_empty(_shape(p, inputs), dtype=dtype)


# ---------------------------------------------------------------------------------------- quantize
def quantize(
    lazy: Lazy,
    row: Cast | None,
    col: Cast | None,
    *,
    row_amax: Tensor | None = None,
    col_amax: Tensor | None = None,
    seed: Tensor | None = None,
    after: Tensor | None = None,
    keep_amax: bool = False,
) -> list[Tensor]:
    """`dispatch.quantize` of the value."""
    if any(c is not None and c.layout[0] is not torch.uint8 for c in (row, col)):
        return dispatch.quantize(
            value(lazy), row, col, row_amax=row_amax, col_amax=col_amax, seed=seed, after=after
        )
    check_usage(row is not None, col is not None)
    check_seed(seed)
    p, inputs, _, dtype, _ = lazy
    options = (row_amax, col_amax, seed)
    if _traced():
        return _op("produce_quantize")(p, list(inputs), dtype, row, col, *options, after, keep_amax)  # type: ignore[no-any-return]
    name = ("produce_quantize", id(p), dtype, keep_amax)
    arguments = (p, inputs, dtype, row, col, *options, None, keep_amax)
    return _run(name, (*inputs, *options), (row, col), lambda: _quantize(*arguments))


def _quantize(  # noqa: PLR0913  (the operator's)
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    seed: Tensor | None,
    after: Tensor | None = None,
    keep_amax: bool = False,
) -> list[Tensor]:
    kernels = _kernels(inputs)
    if kernels is None or not kernels.fuses(p, inputs, dtype, row, col):
        made = _produce(p, inputs, dtype)
        return casting.quantize(made, row, col, row_amax, col_amax, seed, keep_amax)
    x = inputs[0]
    assert x is not None
    out = _buffers(x, _shape(p, inputs), row, col)
    if keep_amax:
        out["amax"] = casting.empty(x, (1,), torch.float32)
    known = row_amax if row_amax is not None else col_amax
    kernels.quantize(p, _rows(inputs), dtype, row, col, out, known)
    return list(out.values())


def _buffers(
    x: Tensor, shape: tuple[int, int], row: Cast | None, col: Cast | None
) -> dict[str, Tensor]:
    return casting.buffers(x, parts(shape, row, col))


def _quantize_fake(  # noqa: PLR0913
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    seed: Tensor | None,
    after: Tensor | None = None,
    keep_amax: bool = False,
) -> list[Tensor]:
    x = inputs[0]
    assert x is not None
    made = list(_buffers(x, _shape(p, inputs), row, col).values())
    return [*made, x.new_empty(1, dtype=torch.float32)] if keep_amax else made


# ------------------------------------------------------------------------------------------- values
def fake_quantize(
    lazy: Lazy,
    row: Cast | None,
    col: Cast | None,
    *,
    keep_col: bool,
    seed: Tensor | None = None,
    after: Tensor | None = None,
) -> list[Tensor]:
    """`dispatch.fake_quantize` of the value."""
    check_usage(row is not None, col is not None)
    check_seed(seed)
    p, inputs, _, dtype, _ = lazy
    if _traced():
        return _op("produce_values")(p, list(inputs), dtype, row, col, keep_col, seed, after)  # type: ignore[no-any-return]
    name = ("produce_values", id(p), dtype, keep_col)
    arguments = (p, inputs, dtype, row, col, keep_col, seed)
    return _run(name, (*inputs, seed), (row, col), lambda: _fake_quantize(*arguments))


def _fake_quantize(
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
    keep_col: bool,
    seed: Tensor | None,
    after: Tensor | None = None,
) -> list[Tensor]:
    kernels = _kernels(inputs)
    if kernels is not None and kernels.fuses(p, inputs, dtype, row, col, as_values=True):
        x = inputs[0]
        assert x is not None
        out = casting.buffers(x, value_parts(_shape(p, inputs), row, col, keep_col))
        kernels.values(p, _rows(inputs), row, col, out)
        return list(out.values())
    return casting.fake_quantize(_produce(p, inputs, dtype), row, col, keep_col, seed)


def _fake_quantize_fake(
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
    keep_col: bool,
    seed: Tensor | None,
    after: Tensor | None = None,
) -> list[Tensor]:
    x = inputs[0]
    assert x is not None
    described = value_parts(_shape(p, inputs), row, col, keep_col)
    return list(casting.buffers(x, described).values())


# --------------------------------------------------------------------------------- delayed scaling
def quantize_scaled(
    lazy: Lazy,
    scale: Tensor,
    amax: Tensor | None,
    cast: Cast,
    *,
    row: bool,
    col: bool,
    keep_scale: bool = False,
    after: Tensor | None = None,
) -> list[Tensor]:
    """`dispatch.quantize_scaled` of the value."""
    check_usage(row, col)
    p, inputs, _, dtype, _ = lazy
    if _traced():
        made: list[Tensor]
        *made, seen = _op("produce_scaled")(p, list(inputs), dtype, scale, cast, row, col, after)
        if amax is not None:
            amax.copy_(torch.maximum(amax, seen.reshape(amax.shape)))
        return [*made, scale] if keep_scale else made
    name = ("produce_scaled", id(p), dtype, row, col, keep_scale)
    arguments = (p, inputs, dtype, scale, amax, cast, row, col, keep_scale)
    return _run(name, (*inputs, scale, amax), (cast, None), lambda: _scaled(*arguments))


def _scaled(  # noqa: PLR0913
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    scale: Tensor,
    amax: Tensor | None,
    cast: Cast,
    row: bool,
    col: bool,
    keep_scale: bool = False,
) -> list[Tensor]:
    kernels = _kernels(inputs)
    casts = cast if row else None, cast if col else None
    if kernels is None or not kernels.fuses(p, inputs, dtype, *casts):
        made = _produce(p, inputs, dtype)
        return casting.quantize_scaled(made, scale, amax, cast, row, col, keep_scale)
    x = inputs[0]
    assert x is not None
    out = _buffers(x, _shape(p, inputs), *casts)
    if keep_scale:
        out["kept"] = casting.empty(x, (1,), torch.float32)
    kernels.quantize_scaled(p, _rows(inputs), dtype, scale, amax, cast, out)
    return list(out.values())


def _scaled_op(  # noqa: PLR0913
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    scale: Tensor,
    cast: Cast,
    row: bool,
    col: bool,
    after: Tensor | None = None,
) -> list[Tensor]:
    seen = torch.zeros(1, dtype=torch.float32, device=scale.device)
    return [*_scaled(p, inputs, dtype, scale, seen, cast, row, col), seen]


def _scaled_fake(  # noqa: PLR0913
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    scale: Tensor,
    cast: Cast,
    row: bool,
    col: bool,
    after: Tensor | None = None,
) -> list[Tensor]:
    x = inputs[0]
    assert x is not None
    made = _buffers(x, _shape(p, inputs), cast if row else None, cast if col else None)
    return [*made.values(), x.new_empty(1, dtype=torch.float32)]


# --------------------------------------------------------------------------------------------- ops
# How schemas say what a cast is, and what comes first in those of operators that produce.
CAST = f"{Cast.__module__}.{Cast.__qualname__}"
OF = f"{Producer.__module__}.{Producer.__qualname__} p, Tensor?[] inputs, ScalarType dtype"
library.define(
    (
        (f"produce({OF}) -> Tensor", _produce, _produce_fake),
        (
            f"produce_quantize({OF}, {CAST}? row, {CAST}? col, Tensor? row_amax, "
            "Tensor? col_amax, Tensor? seed, Tensor? after=None, bool keep_amax=False) -> Tensor[]",
            _quantize,
            _quantize_fake,
        ),
        (
            f"produce_values({OF}, {CAST}? row, {CAST}? col, bool keep_col, Tensor? seed, "
            "Tensor? after=None) -> Tensor[]",
            _fake_quantize,
            _fake_quantize_fake,
        ),
        (
            f"produce_scaled({OF}, Tensor scale, {CAST} cast, bool row, bool col, "
            "Tensor? after=None) -> Tensor[]",
            _scaled_op,
            _scaled_fake,
        ),
    ),
    replayed=True,
)
