"""How the gradient of experts' weights is multiplied: as codes, or as the values that they hold.

    dw_e[N, K] = g[r_e]^T x[r_e]

A row costs 2 N K operations at the rate of the product. As values it costs besides what turns N + K
codes into bf16. So

    values are faster  <=>  N K / (N + K) > break_even

and the number of rows, which only the device knows, is on neither side: the choice is one of the
formats, the features and the device, made without asking for a size, and the same in every graph.
It never changes what is multiplied. Values are chosen only where bf16 holds them exactly: codes
whose scale is one of a whole member, which scales the product, or a power of two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from . import env
from .formats import Cast, Scale

__all__ = ["RATES", "Choice", "Rates", "break_even", "choose", "multiplies_codes"]

CODES, VALUES = "codes", "values"


class Rates(NamedTuple):
    """Of a device: operations per second of contractions over ragged rows, by what they multiply,
    and bytes per second that a copy reads and writes."""

    fast: float  # codes, a scale for each member, a short accumulator
    split: float  # the same, accumulated in fp32
    blocks: float  # codes, scales per block
    values: float  # bf16, PyTorch's
    copy: float


# By compute capability. H200, 8 members of 2048 rows, N = K = 4096: 434, 704, 1004 and 742 us.
RATES = {90: Rates(1270e12, 780e12, 547e12, 741e12, 4.26e12)}
# What values must save at least: they take memory, two bytes for each number until dw is there.
MARGIN = 0.03


class Choice(NamedTuple):
    """What is multiplied, "codes" or "values", and why."""

    name: str
    why: str


def multiplies_codes(a: Cast, b: Cast) -> bool:
    """Whether a kernel of ours multiplies the codes of both: FP8 whose scales are fp32, of one
    kind."""
    return all(c.format.element is not None and c.format.scale is Scale.F32 for c in (a, b)) and (
        a.format.tile is None
    ) == (b.format.tile is None)


def choose(
    a: Cast,
    b: Cast,
    n: int,
    k: int,
    device: torch.device,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    into: bool = False,
    fast: bool = False,
) -> Choice:
    """For column operands of `g[M, n]` cast by `a` and `x[M, k]` cast by `b`.

    `into`: the result goes to, or is added to, memory that is there.
    """
    if a.format.element is None or b.format.element is None:
        return Choice(VALUES, "an operand is in high precision")
    if not multiplies_codes(a, b):
        return Choice(VALUES, f"no kernel multiplies the codes of {a.format_name}; bf16 holds them")
    if device.type != "cuda":
        return Choice(CODES, f"on {device.type} each expert is multiplied as a layer of its own")
    if not all(c.pow2 or c.format.tile is None for c in (a, b)):
        return Choice(CODES, "bf16 would round the values: block scales are not powers of two")
    if into or out_dtype is not torch.bfloat16 or n % 8 or k % 8:
        return Choice(CODES, "PyTorch's bf16 product makes a new bf16 result, of widths 8 divides")
    limit, capability = break_even(a, device, fast), env.capability(device)
    if limit is None:
        return Choice(CODES, f"nobody has measured sm_{capability}")
    size = n * k / (n + k)
    name, sign = (VALUES, ">") if size > limit else (CODES, "<=")
    bound = "never" if math.isinf(limit) else f"{limit:.0f}"
    return Choice(name, f"in out / (in + out) = {size:.0f} {sign} {bound}, where bf16 is faster")


def break_even(cast: Cast, device: torch.device, fast: bool = False) -> float | None:
    """The least N K / (N + K) at which values are faster by MARGIN; infinite where they never are,
    None where nobody has measured."""
    rates = RATES.get(env.capability(device) or 0)
    if rates is None:
        return None
    tile = cast.format.tile
    rate = rates.blocks if tile is not None else rates.fast if fast else rates.split
    # A code and its share of a scale are read, a value is written.
    moved = 3 + (0 if tile is None else cast.format.scale.dtype.itemsize / (tile[0] * tile[1]))
    saved = 2 / rate - 2 * (1 + MARGIN) / rates.values
    return (1 + MARGIN) * moved / rates.copy / saved if saved > 0 else math.inf
