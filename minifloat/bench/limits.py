"""The least time a case can take: a roofline, from formats and from ceilings of the same run.

    limit = sum over products of operations / rate of that product  +  bytes / copy bandwidth

The rate of a product is that of the same pair of formats, measured on a large square. Bytes are
those of casts and of what makes their sources (norms, activations), each number read as few times
as the format allows and each copy written once; what products themselves read and write is inside
their rates. Nothing of launches or of the host is in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..formats import HIGH, Cast, Scale
from ..native import backend
from ..recipe import Recipe
from ..recipe.plan import Plan, Product, products
from .cases import Case, Layer
from .work import dtype_name

__all__ = ["COPY", "PEAKS", "Limit", "Peak", "limit_of", "peak_of", "peak_time", "product_name"]

COPY = "copy"  # the ceiling's name; bytes per second, read and written


class Limit(NamedTuple):
    """What a case needs: operations by kind of product, bytes, and bytes of products."""

    operations: dict[str, float]
    bytes: float
    product_bytes: float

    def seconds(self, ceilings: Mapping[str, float]) -> float | None:
        """The least time at these rates (operations and bytes per second); None if one lacks."""
        if COPY not in ceilings or any(name not in ceilings for name in self.operations):
            return None
        compute = sum(ops / ceilings[name] for name, ops in self.operations.items())
        return compute + self.bytes / ceilings[COPY]

    @property
    def intensity(self) -> float:
        """Operations for each byte that must move."""
        return sum(self.operations.values()) / (self.bytes + self.product_bytes)


class Peak(NamedTuple):
    """A device's data sheet: bytes and operations (bits of an element -> rate) per second."""

    bandwidth: float
    rates: Mapping[int, float]


# Dense, without sparsity.
PEAKS: dict[str, Peak] = {
    "H200": Peak(4.8e12, {16: 989.5e12, 8: 1979e12}),
    "H100 80GB HBM3": Peak(3.35e12, {16: 989.5e12, 8: 1979e12}),
}


def peak_of(device_name: str) -> Peak | None:
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)


def peak_time(case: Case, recipe: Recipe | None, device: torch.device, peak: Peak) -> float:
    """The least time by the data sheet, with every product at the rate of its elements."""
    plan = _plan(recipe)
    pairs = _pairs(plan)
    total = limit_of(case, recipe, device, torch.bfloat16).bytes / peak.bandwidth
    for layer in case.layers:
        for pair in pairs:
            bits = 8 if pair.quantized and _native(pair, device) else 16
            total += 2.0 * layer.tokens * layer.k * layer.n / peak.rates[bits]
    return total


def limit_of(case: Case, recipe: Recipe | None, device: torch.device, dtype: torch.dtype) -> Limit:
    """What `case` needs by `recipe`; None is plain `dtype`."""
    plan = _plan(recipe)
    operations: Counter[str] = Counter()
    moved = products_moved = 0.0
    size = dtype.itemsize
    for layer in case.layers:
        for pair, fast in zip(_pairs(plan), _fast(plan), strict=True):
            name = product_name(pair, fast, device, dtype)
            operations[name] += 2 * layer.tokens * layer.k * layer.n
        moved += _casts(layer, plan, device, size)
        products_moved += _operands(layer, plan, device, size)
    return Limit(dict(operations), moved + case.extra * size, products_moved)


def product_name(pair: Product, fast: bool, device: torch.device, dtype: torch.dtype) -> str:
    """What a ceiling is called; pairs that run alike have one name."""
    if not (pair.quantized and _native(pair, device)):
        return dtype_name(dtype)
    first, second = sorted((pair.a.format.name, pair.b.format.name), reverse=True)
    tiled = pair.a.tiled or pair.b.tiled  # those always promote their sums
    return f"{first} x {second}" + ("" if tiled else " fast" if fast else " split")


def _plan(recipe: Recipe | None) -> Plan | None:
    return None if recipe is None else recipe.plan()


def _pairs(plan: Plan | None) -> tuple[Product, Product, Product]:
    high = Product(HIGH, HIGH)
    return (high, high, high) if plan is None else products(plan)


def _fast(plan: Plan | None) -> tuple[bool, bool, bool]:
    return (False, False, False) if plan is None else plan.fast


def _native(pair: Product, device: torch.device) -> bool:
    return backend(pair.a, pair.b, device).name == "native"


# ------------------------------------------------------------------------------------------- bytes
def _casts(layer: Layer, plan: Plan | None, device: torch.device, size: int) -> float:
    """Bytes of making the six operands; what nobody casts and nobody makes costs nothing."""
    fprop, dgrad, wgrad = _pairs(plan)
    delayed = (False,) * 5 if plan is None else plan.delayed
    x = _moved(((fprop.a, fprop), (wgrad.b, wgrad)), delayed[0], layer.x_reads, layer.x_made,
               device, size)  # fmt: skip
    w = _moved(((fprop.b, fprop), (dgrad.b, dgrad)), delayed[1], 1.0, False, device, size)
    g = _moved(((dgrad.a, dgrad), (wgrad.a, wgrad)), delayed[3], layer.g_reads, layer.g_made,
               device, size)  # fmt: skip
    t, k, n = layer.tokens, layer.k, layer.n
    return x * t * k + w * layer.experts * n * k + g * t * n


def _moved(
    copies: tuple[tuple[Cast, Product], ...],
    delayed: bool,
    reads: float,
    made: bool,
    device: torch.device,
    size: int,
) -> float:
    """Bytes per number: reads of its source, twice for a scale of the whole, and each copy."""
    coded = [(cast, pair) for cast, pair in copies if cast.format.element is not None]
    if not coded:
        return (reads + 1) * size if made else 0.0
    whole = any(
        cast.format.two_level or (cast.format.scale is Scale.F32 and not cast.tiled)
        for cast, _ in coded
    )
    passes = 2 if whole and not delayed else 1
    written = sum(_stored(cast, pair, device, size) for cast, pair in coded)
    if len(coded) < len(copies) and made:
        written += size  # the other copy is the value itself
    return passes * reads * size + written


def _stored(cast: Cast, pair: Product, device: torch.device, size: int) -> float:
    """Bytes per number of an operand as a product reads it: codes and scales, or values."""
    fmt = cast.format
    if fmt.element is None or not _native(pair, device):
        return float(size)
    scales = 0.0
    if fmt.scale_tile is not None:
        scales = fmt.scale.dtype.itemsize / (fmt.scale_tile[0] * fmt.scale_tile[1])
    return fmt.element.bits / 8 + scales


def _operands(layer: Layer, plan: Plan | None, device: torch.device, size: int) -> float:
    """Bytes that the three products read and write, each operand once."""
    t, k, n = layer.tokens, layer.k, layer.n
    x, w, g = float(t * k), float(layer.experts * n * k), float(t * n)
    total = 0.0
    for pair, (a, b, out) in zip(_pairs(plan), ((x, w, g), (g, w, x), (g, x, w)), strict=True):
        total += a * _stored(pair.a, pair, device, size)
        total += b * _stored(pair.b, pair, device, size) + out * size
    return total
