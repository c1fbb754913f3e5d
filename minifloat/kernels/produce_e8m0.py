"""What norms and activations produce, as FP8 blocks with E8M0 scales, or as those blocks' values.

    y = activation(h) or norm(x)   ->   row and column copies of y, one read of h or x

As in `produce`, y is rounded to bf16 before it is cast. Tiles are words (`_e8m0_device`): bf16
alone, and K a multiple of 128.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import Cast, Scale, rup
from ..producer import ACTIVATIONS, Producer, activation, norm
from ._device import FP8, fp32
from ._e8m0_device import store_e8m0
from ._produce_device import in_words, load_pairs, produced_words
from .produce import arguments
from .variant import Config, Launch, Variant

__all__ = ["element_arguments", "fuses", "has_blocks", "quantize", "variants"]

# H200, bf16, us: values of SwiGLU's rows, 16384x14336, 347 at 128 columns and 2 warps (copy_ of the
# bytes: 334), 352 with 4; values of RMSNorm's rows and codes of its columns, 16384x4096, 113 at 64
# and 2 (copy_: 80), 139 at 128 and 4. Columns alone, and codes, are not tuned.
CONFIGS = {
    "row": Config(32, 128, 2),
    "col": Config(32, 64, 2),
    "both": Config(32, 64, 2),
}
PAD = 128  # rows of a tile of the padded scale matrices


@triton.jit
def cast_kernel(
    x, mean, rstd, gamma, beta, row, row_scale, col, col_scale, M, K, stride, NORM: tl.constexpr,
    MEAN: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, ZERO: tl.constexpr,
    FN: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, CLIP: tl.constexpr,
    OFFSET: tl.constexpr, ROW: tl.constexpr, ROW_CODES: tl.constexpr, COL: tl.constexpr,
    COL_CODES: tl.constexpr, LIMIT: tl.constexpr, RECIPROCAL: tl.constexpr, TYPE: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Row and column copies of what is produced, `[M, K]`, as `store_e8m0` has them."""
    i_t = tl.num_programs(0) - 1 - tl.program_id(0)
    BW: tl.constexpr = BK // 2
    n_k = K // BK
    i_m = (i_t // n_k).to(tl.int64)
    i_k = (i_t % n_k).to(tl.int64)
    o_m = i_m * BM + tl.arange(0, BM)
    o_w = i_k * BW + tl.arange(0, BW)
    p_x = x.to(tl.pointer_type(tl.int32), bitcast=True) + o_m[:, None] * (stride // 2)
    p_x += o_w[None, :]
    m_x = o_m[:, None] < M
    b_w = tl.load(p_x) if EVEN else tl.load(p_x, mask=m_x, other=0)  # [BM, BW]
    b_v = b_w
    if GATED:
        p_x += K // 2
        b_v = tl.load(p_x) if EVEN else tl.load(p_x, mask=m_x, other=0)
    g_0, g_1 = load_pairs(gamma, o_w, GAMMA, ZERO)
    b_0, b_1 = load_pairs(beta, o_w, BETA, False)
    b_w = produced_words(
        b_w, b_v, mean, rstd, g_0, g_1, b_0, b_1, o_m, M, NORM, MEAN, GAMMA, BETA,
        FN, GATED, ALPHA, CLIP, OFFSET, EVEN,
    )  # fmt: skip
    store_e8m0(
        b_w, row, row_scale, col, col_scale, i_m, i_k, M, K, ROW, ROW_CODES, COL, COL_CODES, LIMIT,
        RECIPROCAL, TYPE, EVEN,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- fronts
def has_blocks(cast: Cast) -> bool:
    """Whether kernels here and in `gradient_e8m0` make copies of this format."""
    fmt = cast.format
    return fmt.scale is Scale.E8M0 and fmt.element in FP8 and not fmt.square


def fuses(
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
) -> bool:
    """Whether kernels here make these copies of what `p` produces in `dtype`."""
    cast = row if row is not None else col
    if cast is None or (row is not None and col is not None and row != col) or p.interleave:
        return False
    args = arguments(p, inputs)
    return has_blocks(cast) and in_words(dtype, rup(args["M"], 4), args["K"], args["x"])


def quantize(
    p: Producer,
    inputs: Sequence[Tensor | None],
    row: Cast | None,
    col: Cast | None,
    out: dict[str, Tensor],
) -> None:
    """Both copies into `out`: `row_data`, `row_scale` if it is codes, and `row` if it is values;
    likewise the column copy."""
    _cast(p, inputs, row, col, out).run()


# ----------------------------------------------------------------------------------------- launches
def element_arguments(cast: Cast, prefix: str = "") -> dict[str, Any]:
    """What kernels know of a cast's codes."""
    element = cast.format.element
    assert element is not None
    return {
        f"{prefix}LIMIT": element.max,
        f"{prefix}RECIPROCAL": fp32(1.0 / element.max),
        f"{prefix}TYPE": FP8[element],
    }


def _cast(
    p: Producer,
    inputs: Sequence[Tensor | None],
    row: Cast | None,
    col: Cast | None,
    out: dict[str, Tensor],
    config: Config | None = None,
) -> Launch:
    cast = row or col
    assert cast is not None
    args = arguments(p, inputs) | element_arguments(cast)
    kind = "both" if row is not None and col is not None else "row" if col is None else "col"
    config = config or CONFIGS[kind]
    m, k = args["M"], args["K"]
    args |= {
        "row": out.get("row_data", out.get("row")), "row_scale": out.get("row_scale"),
        "col": out.get("col_data", out.get("col")), "col_scale": out.get("col_scale"),
        "ROW": row is not None, "ROW_CODES": "row_data" in out, "COL": col is not None,
        "COL_CODES": "col_data" in out, "EVEN": m % PAD == 0, "BM": config.m, "BK": config.k,
    }  # fmt: skip
    return Launch.of(cast_kernel, config.tiles(rup(m, PAD), k), args, config)


# ----------------------------------------------------------------------------------------- variants
def variants() -> Iterator[Variant]:
    """Codes, values, and values beside codes to keep; each activation once."""
    code = torch.empty(1, dtype=torch.uint8, device="meta")
    number = torch.empty(1, dtype=torch.bfloat16, device="meta")
    codes = {"row_data": code, "row_scale": code, "col_data": code, "col_scale": code}
    outs = {
        "codes": codes,
        "values": {"row": number, "col": number},
        "kept": {"row": number, "col_data": code, "col_scale": code},
    }
    mx = Cast("mxfp8_e4m3")
    for name, p, inputs, whole in _samples():
        for form, out in outs.items() if whole or not name.startswith("act_") else ():
            for direction, row, col in (("row", mx, None), ("col", None, mx), ("both", mx, mx)):
                if direction != "both" and (form == "kept" or not whole):
                    continue
                some = {n: t for n, t in out.items() if direction in ("both", n[:3])}
                yield Variant.of(f"{form}_{direction}_{name}", _cast(p, inputs, row, col, some))
        if name.startswith("act_"):
            yield Variant.of(f"values_both_{name}", _cast(p, inputs, mx, mx, outs["values"]))


def _samples() -> Iterator[tuple[str, Producer, tuple[Tensor | None, ...], bool]]:
    def x(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def stat(n: int) -> Tensor:
        return torch.empty(n, dtype=torch.float32, device="meta")

    for m, k in ((4096, 4096), (4097, 4096)):
        tag, whole = f"bf16_{m}x{k}", m % PAD == 0
        yield f"swiglu_{tag}", activation("swiglu"), (x(m, 2 * k),), whole
        yield f"rmsnorm_{tag}", norm(), (x(m, k), None, stat(m), x(k), None), whole
        yield f"layernorm_{tag}", norm(True), (x(m, k), stat(m), stat(m), x(k), x(k)), whole
    for name, a in ACTIVATIONS.items():
        h = x(4096, 8192 if a.gated else 4096)
        yield f"act_{name}_bf16_4096x4096", activation(name), (h,), False
