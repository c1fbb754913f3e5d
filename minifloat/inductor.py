"""What Inductor may fuse: casts whose arithmetic it can inline into the kernel of their producer.

A cast is an operator to everyone above Inductor, so that what backward keeps is its codes. A cast
to the row copy alone is, below, the reference's own arithmetic: Inductor inlines it, and a norm or
an activation in the same graph is quantized as it is computed. Casts that make both copies keep
our kernel, which reads its source once for the two; so do formats without fp32 scales.

Inductor keeps bf16 producers in fp32 registers. The inlined arithmetic rounds them to their dtype
first, as memory would have, so that a fused cast has the codes of one that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import library, reference
from .formats import Cast, Scale
from .layout import flatten, parts

__all__ = ["REVISION", "register"]

# Caches of compiled code do not hash lowerings: the operators' arguments carry this number. Raise
# it with every change of the arithmetic below, or of the reference's.
REVISION = 3

Math = Callable[..., list[Tensor]]
_registered = False


def register() -> None:
    """Tell Inductor, once. Called while a graph is traced: before that nobody needs Inductor."""
    global _registered  # noqa: PLW0603
    if _registered:
        return
    _registered = True
    from torch._inductor.lowering import fallback_handler, register_lowering

    for name, (math, fuses) in _FUSIBLE.items():
        op = library.op(name)
        lower = _lowering(math, fuses, fallback_handler(op))  # type: ignore[no-untyped-call]
        register_lowering(op, type_promotion_kind=None)(lower)


def _lowering(math: Math, fuses: Callable[..., bool], fallback: Any) -> Any:
    """Inline `math` where `fuses` says so of the operator's arguments, else call the operator."""

    def lower(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.lowering import process_subgraph_nodes
        from torch._inductor.virtualized import V
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

        node: Any = V.graph.current_node
        # The math asks whether there is anything to cast, which data may decide.
        if kwargs or free_unbacked_symbols(node.args[0].meta["val"]) or not fuses(*node.args):
            return fallback(*args, **kwargs)
        values = torch.fx.map_arg(node.args, lambda n: n.meta["val"])
        tensors = [i for i, a in enumerate(node.args) if isinstance(a, torch.fx.Node)]

        def inlined(*given: Tensor) -> list[Tensor]:
            full = list(values)
            for i, t in zip(tensors, given, strict=True):
                full[i] = t
            return math(*full)

        with V.fake_mode:
            traced = make_fx(
                inlined,
                decomposition_table=select_decomp_table(),
                tracing_mode="real",
                _allow_non_fake_inputs=True,
            )(*[values[i] for i in tensors])
        return process_subgraph_nodes(traced, [args[i] for i in tensors])

    return lower


def _rounded(x: Tensor) -> Tensor:
    """x as its dtype holds it: bits are taken of the number that memory would have."""
    return x if x.dtype is torch.float32 else x.view(torch.int16).view(x.dtype)


def _roomy(t: Tensor, shape: Sequence[int]) -> Tensor:
    """`t` with zeros up to a shape."""
    if t.dim() != 2:
        return t
    pads = (0, shape[1] - t.shape[1], 0, shape[0] - t.shape[0])
    known = all(isinstance(n, int) and n == 0 for n in pads)
    return t if known else torch.nn.functional.pad(t, pads)


def _fp32_scales(cast: Cast | None) -> bool:
    return cast is not None and cast.format.scale is Scale.F32


def _quantize(x: Tensor, row: Cast, *rest: Any) -> list[Tensor]:
    x2 = _rounded(x).reshape(flatten(x.shape))
    data, scale, _ = reference.quantize(x2, row, amax=rest[1])
    assert scale is not None
    if row.room[0] == 1:
        return [data.reshape(x.shape), scale]
    return [
        _roomy(t, p.shape) for t, p in zip((data, scale), parts(x.shape, row, None), strict=True)
    ]


def _quantize_fuses(x: Any, row: Cast | None, col: Cast | None, *rest: Any) -> bool:
    keep_amax = len(rest) > 4 and rest[4]
    if col is not None or row is None or not _fp32_scales(row) or keep_amax or row.room[1]:
        return False
    return _whole_blocks(x.meta["val"], row)


def _whole_blocks(x: Tensor, row: Cast) -> bool:
    """Whether blocks fill x up, or there is one, as far as that matters.

    Inductor's loops in C++ (PyTorch 2.13) split an index that is divided by a block's length, and
    leave out what is no whole block: codes would be whatever memory held.
    """
    if x.device.type != "cpu" or not row.tiled:
        return True
    from torch.fx.experimental.symbolic_shapes import statically_known_true as known

    sizes = zip(parts(flatten(x.shape), row, None)[0].shape, row.layout[2], strict=True)
    return all(t == 1 or known(n <= t) or known(n % t == 0) for n, t in sizes)


def _quantize_scaled(x: Tensor, scale: Tensor, cast: Cast, *_: Any) -> list[Tensor]:
    data, *rest = reference.quantize_scaled(_rounded(x), scale.reshape(1), cast)
    if cast.room[0] != 1:
        data = _roomy(data, parts(x.shape, cast, None)[0].shape)
    return [data, *rest]


def _quantize_scaled_fuses(x: Any, scale: Any, cast: Cast, row: bool, col: bool, *_: Any) -> bool:
    return row and not col


_FUSIBLE: dict[str, tuple[Math, Callable[..., bool]]] = {
    "quantize": (_quantize, _quantize_fuses),
    "quantize_scaled": (_quantize_scaled, _quantize_scaled_fuses),
}
