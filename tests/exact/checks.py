"""The cases of each op of `dispatch`, kernel against reference."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from minifloat import dispatch
from minifloat.formats import Cast
from minifloat.layout import Part, part_names, parts, value_parts

from .compare import Case, reference_only
from .inputs import (
    BROAD,
    DTYPES,
    NARROW,
    PAIRS,
    RING,
    WHOLE,
    Input,
    layouts,
    matrix,
    shaped,
    specials,
)
from .kinds import FAKE, KINDS, Kind, directions

__all__ = ["amax", "dequantize", "devices", "fake", "quantize", "scaled", "swizzle", "transpose"]

Shapes = tuple[tuple[int, int], ...]
SEEDS = ((1234, 0), (2**40 + 7, 2**32 - 1), (-1, 3))  # seed, offset


def name_of(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def seed_of(
    row: Cast | None, col: Cast | None, device: torch.device, index: int = 0
) -> Tensor | None:
    """The seed of a quantization that needs one, as `quantizers` pass it."""
    if any(c is not None and c.stochastic for c in (row, col)):
        return torch.tensor(SEEDS[index], dtype=torch.int64, device=device)
    return None


def shapes(kind: Kind, direction: str, dtype: torch.dtype) -> Shapes:
    """The sizes that one direction of one kind sees in one dtype.

    Every pair where compiling that often is affordable: formats without options, in bf16 or in both
    directions at once. Fewer for what differs from that in more than one way.
    """
    bf16, both = dtype is torch.bfloat16, direction == "row+col"
    common = kind.full and not kind.costly and "e5m2" not in kind.name
    if kind.full and both and (bf16 or common) or common and bf16:
        return RING if kind.stochastic else PAIRS
    if kind.full and (bf16 or both):
        return BROAD
    if bf16 and both:
        return WHOLE if kind.costly else BROAD
    return NARROW if both or bf16 or not kind.costly else ()


def inputs(kind: Kind, direction: str, dtype: torch.dtype) -> Iterator[Input]:
    """What one direction of one kind sees in one dtype."""
    sizes = shapes(kind, direction, dtype)
    if not sizes:
        return
    yield from shaped(sizes)
    yield from specials(kind.row)
    if direction == "row+col":
        every = kind.full and dtype is torch.bfloat16
        yield from layouts(kind.row.tiled, every=every)


# --------------------------------------------------------------------------------------- quantize
def quantize(
    kind: Kind, direction: str, dtype: torch.dtype, device: torch.device
) -> Iterator[Case]:
    """Every input in one direction; then known amaxes, and seeds."""
    row, col = directions(kind)[direction]
    for given in inputs(kind, direction, dtype):
        label = f"quantize {kind.name} {name_of(dtype)} {given.label} {direction}"
        yield _quantize(label, given.make(dtype, device), row, col)
    if not shapes(kind, direction, dtype):
        return
    x = matrix((129, 100), dtype, device)
    label = f"quantize {kind.name} {name_of(dtype)} 129x100 {direction}"
    if kind.row.format.two_level or kind.row.format.shares_scale:
        yield _quantize(f"{label} known amax", x, row, col, known=True)
    if kind.stochastic:
        for i in range(1, len(SEEDS)):
            yield _quantize(f"{label} seed {SEEDS[i]}", x, row, col, seed=i)


def _quantize(
    label: str, x: Tensor, row: Cast | None, col: Cast | None, *, known: bool = False, seed: int = 0
) -> Case:
    amaxes: dict[str, Tensor] = {}
    if known:
        with reference_only():
            found = [2.5 * a for a in dispatch.amax(x, row, col)]  # reduced over a group, say
        amaxes = {"row_amax": found[0]} if row is not None else {"col_amax": found[0]}
        if row is not None and col is not None and len(found) == 2:
            amaxes["col_amax"] = found[1]
    s = seed_of(row, col, x.device, seed)
    return Case(
        label, part_names(row, col), lambda: dispatch.quantize(x, row, col, seed=s, **amaxes)
    )


# ------------------------------------------------------------------------------------------- amax
def amax(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Of every kind whose scales depend on the whole tensor."""
    for kind in KINDS:
        if not (kind.row.format.two_level or kind.row.format.shares_scale) or kind.row.error:
            continue
        for direction, (row, col) in directions(kind).items():
            for given in inputs(kind, direction, dtype):
                x = given.make(dtype, device)
                names = ["row_amax"] if row is not None else []
                if col is not None and not (names and kind.row.format.shares_scale):
                    names.append("col_amax")
                label = f"amax {kind.name} {name_of(dtype)} {given.label} {direction}"
                yield Case(label, names, lambda x=x, r=row, c=col: dispatch.amax(x, r, c))


# --------------------------------------------------------------------------------- delayed scaling
def scaled(kind: Kind, direction: str, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Given scales, and a running amax that is higher or lower than the tensor's."""
    row, col = directions(kind)[direction]
    for i, given in enumerate(inputs(kind, direction, dtype)):
        x = given.make(dtype, device)
        scale = torch.tensor([(0.37, 1.0, 1e6, 2.0**-120)[i % 4]], device=device)
        before = torch.tensor([(0.0, 0.5, 1e9)[i % 3]], device=device)
        label = f"quantize_scaled {kind.name} {name_of(dtype)} {given.label} {direction}"
        yield _scaled(label, x, scale, before, row, col)


def _scaled(
    label: str, x: Tensor, scale: Tensor, before: Tensor, row: Cast | None, col: Cast | None
) -> Case:
    cast = row or col
    assert cast is not None

    def call() -> list[Tensor]:
        after = before.clone()
        made = dispatch.quantize_scaled(
            x, scale, after, cast, row=row is not None, col=col is not None
        )
        return [*made, after]

    return Case(label, (*part_names(row, col), "amax"), call)


# ------------------------------------------------------------------------------------- dequantize
def dequantize(kind: Kind, device: torch.device) -> Iterator[Case]:
    """What the reference quantized, and arbitrary codes, to every dtype."""
    for direction, (row, col) in directions(kind).items():
        if row is not None and col is not None:
            continue
        for dtype in DTYPES:
            bf16 = dtype is torch.bfloat16
            sizes = PAIRS if bf16 and kind.full else BROAD if bf16 else NARROW
            ways = layouts(kind.row.tiled, every=bf16 and kind.full)
            for given in (*shaped(sizes), *specials(kind.row), *ways):
                x = given.make(torch.float32, device)
                with reference_only():
                    stored = dispatch.quantize(x, row, col)
                label = f"dequantize {kind.name} {name_of(dtype)} {given.label} {direction}"
                yield _dequantize(label, tuple(x.shape), stored, row, col, dtype)
            for shape in ((129, 100), (256, 256)):
                label = f"dequantize {kind.name} {name_of(dtype)} random codes {shape} {direction}"
                stored = [_random(p, kind.row, device) for p in parts(shape, row, col)]
                yield _dequantize(label, shape, stored, row, col, dtype)


def _random(part: Part, cast: Cast, device: torch.device) -> Tensor:
    """Arbitrary bytes, E4M3 scales without a sign; fp32 scales and amaxes are positive numbers."""
    g = torch.Generator(device).manual_seed(3)
    if part.dtype is torch.float32:
        return torch.rand(part.shape, generator=g, device=device) + 0.01
    signless = cast.format.two_level and part.name.endswith("scale")
    top = 128 if signless else 256
    return torch.randint(0, top, part.shape, dtype=part.dtype, generator=g, device=device)


def _dequantize(
    label: str,
    shape: tuple[int, ...],
    stored: list[Tensor],
    row: Cast | None,
    col: Cast | None,
    dtype: torch.dtype,
) -> Case:
    cast = row or col
    assert cast is not None
    named = {n.split("_")[-1]: t for n, t in zip(part_names(row, col), stored, strict=True)}
    data, scale, top = named["data"], named["scale"], named.get("amax")
    is_col = col is not None
    return Case(
        label,
        ["values"],
        lambda: [dispatch.dequantize(data, scale, top, cast, shape, dtype, col=is_col)],
    )


# ------------------------------------------------------------------------------------- fake quant
def fake(kind: Kind, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """bf16 operands of the emulated formats, with and without the packed column copy."""
    bf16 = dtype is torch.bfloat16
    for direction, (row, col) in directions(kind).items():
        for keep in (False, True) if col is not None else (False,):
            most = keep and row is not None  # everything at once
            if not (bf16 and kind.full) and not (most and (bf16 or kind.full)):
                continue
            sizes = (WHOLE if kind.costly else BROAD) if most and bf16 and kind.full else NARROW
            for given in (*shaped(sizes), *specials(kind.row), *layouts(True, every=False)):
                packed = " packed" if keep else ""
                label = f"fake {kind.name} {name_of(dtype)} {given.label} {direction}{packed}"
                yield _fake(label, given.make(dtype, device), row, col, keep)


def _fake(label: str, x: Tensor, row: Cast | None, col: Cast | None, keep: bool) -> Case:
    names = [p.name for p in value_parts(x.shape, row, col, keep)]
    seed = seed_of(row, col, x.device)
    return Case(label, names, lambda: dispatch.fake_quantize(x, row, col, keep_col=keep, seed=seed))


# -------------------------------------------------------------------------- transpose and swizzle
def transpose(device: torch.device) -> Iterator[Case]:
    g = torch.Generator(device).manual_seed(5)
    for m, k in PAIRS:
        data = torch.randint(0, 256, (m, k), dtype=torch.uint8, generator=g, device=device)
        yield Case(f"transpose {m}x{k}", ["data"], lambda d=data: [dispatch.transpose(d)])
    wide = torch.randint(0, 256, (129, 213), dtype=torch.uint8, generator=g, device=device)
    for label, data in {
        "strided": wide[:, :100],
        "misaligned": wide[:, 1:101],
        "transposed": wide.t(),
        "3-D": wide[:, :90].reshape(3, 43, 90),
        "3-D, permuted": wide[:, :90].reshape(43, 3, 90).transpose(0, 1),
        "1-D": wide[0],
        "empty": wide[:0],
    }.items():
        yield Case(f"transpose {label}", ["data"], lambda d=data: [dispatch.transpose(d)])


def swizzle(device: torch.device) -> Iterator[Case]:
    g = torch.Generator(device).manual_seed(6)
    for r, c in (*PAIRS, (128, 4), (256, 8), (0, 4)):
        scale = torch.randint(0, 256, (r, c), dtype=torch.uint8, generator=g, device=device)
        yield Case(f"swizzle {r}x{c}", ["scale"], lambda s=scale: [dispatch.swizzle(s)])
        view = scale.t().contiguous().t()
        yield Case(f"swizzle {r}x{c} view", ["scale"], lambda s=view: [dispatch.swizzle(s)])
        view = torch.nn.functional.pad(scale, (0, 3))[:, :c]
        yield Case(f"swizzle {r}x{c} strided", ["scale"], lambda s=view: [dispatch.swizzle(s)])


# ---------------------------------------------------------------------------------------- devices
def devices(kind: Kind, device: torch.device) -> Iterator[Case]:
    """The reference on this device against the reference on the CPU: one specification."""
    for dtype in DTYPES:
        for direction, (row, col) in directions(kind).items():
            for given in (*shaped(NARROW), *specials(kind.row)):
                x = given.make(dtype, device)
                label = f"devices {kind.name} {name_of(dtype)} {given.label} {direction}"
                yield _devices(label, x, row, col)
            cast = row or col
            if (row is None or col is None) and cast is not None and not cast.transforms:
                x = matrix((129, 100), dtype, device)
                label = f"devices dequantize {kind.name} {name_of(dtype)} 129x100 {direction}"
                yield _decoded(label, x, row, col)


def _devices(label: str, x: Tensor, row: Cast | None, col: Cast | None) -> Case:
    def on(where: torch.device) -> list[Tensor]:
        t, seed = x.to(where), seed_of(row, col, where)
        with reference_only():
            made = dispatch.quantize(t, row, col, seed=seed)
            if _is_emulated(row or col):
                made += dispatch.fake_quantize(t, row, col, keep_col=False, seed=seed)
        return made

    names = list(part_names(row, col))
    if _is_emulated(row or col):
        names += [n for n, c in (("row", row), ("col", col)) if c is not None]
        names += [n for n in part_names(row, col) if n.endswith("amax")]
    return Case(label, names, lambda: on(x.device), lambda: on(torch.device("cpu")))


def _is_emulated(cast: Cast | None) -> bool:
    return cast is not None and any(k.row.format is cast.format for k in FAKE)


def _decoded(label: str, x: Tensor, row: Cast | None, col: Cast | None) -> Case:
    def on(where: torch.device) -> list[Tensor]:
        with reference_only():
            stored = dispatch.quantize(x.to(where), row, col, seed=seed_of(row, col, where))
            return list(_dequantize(label, tuple(x.shape), stored, row, col, x.dtype).call())

    return Case(label, ["values"], lambda: on(x.device), lambda: on(torch.device("cpu")))
