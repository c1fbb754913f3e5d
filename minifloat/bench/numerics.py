"""Whether a provider computed what it should: the gate that a row must pass to count.

The truth is the case in fp32. A recipe's reference is the same with every operand of every product
quantized by `minifloat.reference`, the specification, and decoded: products in fp32, what is stored
between them in the case's dtype. A provider may be off the truth by `MARGIN` times what the
reference is: less work makes a larger error, so a win from skipped work fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..formats import Cast, rup
from ..recipe import Recipe
from ..recipe.plan import Plan, products
from .cases import KINDS
from .layers import attention, decoder_table
from .work import EPS, Work

__all__ = ["MARGIN", "Verdict", "errors", "judge", "relative_error", "results"]

MARGIN = 1.1
# Below this, an error is that of the dtype alone, and the order of sums decides it.
FLOOR = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-5}
CHUNK = 1 << 25  # numbers that are quantized at a time: the specification is generous with memory
TILE = 128  # a multiple of every format's tile

Results = dict[str, Tensor]
Errors = dict[str, float]


@dataclass(frozen=True)
class Verdict:
    """Errors of a provider by output, those of the reference, and "" or what is wrong.

    `ratio` is the largest of the errors over the reference's.
    """

    errors: Errors
    expected: Errors
    failure: str
    ratio: float


def relative_error(got: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference over that of the truth; infinite where shapes differ."""
    if got.shape != truth.shape:
        return float("inf")
    square = total = 0.0
    for a, b in zip(_rows(got), _rows(truth), strict=True):
        b = b.double()
        square += float((a.double() - b).square().sum())
        total += float(b.square().sum())
    return float("inf") if square != square else (square / max(total, 1e-300)) ** 0.5


def _rows(t: Tensor) -> Iterator[Tensor]:
    step = max(1, CHUNK // max(1, t[0].numel())) if t.shape[0] else 1
    for at in range(0, t.shape[0], step):
        yield t[at : at + step]


def errors(got: Results, truth: Results) -> Errors:
    return {name: relative_error(got[name], wanted) for name, wanted in truth.items()}


def judge(found: Errors, expected: Errors, dtype: torch.dtype) -> Verdict:
    """Whether each error is within MARGIN of the reference's."""
    wrong = [
        f"{name}: error {found[name]:.3g}, the reference's is {expected[name]:.3g}"
        for name in expected
        if not found[name] <= max(MARGIN * expected[name], FLOOR[dtype])
    ]
    # A reference that has next to no error of its own says nothing about that of others.
    least = 0.01 * FLOOR[dtype]
    ratio = max(found[n] / (e if e > least else FLOOR[dtype]) for n, e in expected.items())
    return Verdict(found, expected, "; ".join(wrong), ratio)


def results(work: Work, recipe: Recipe | None, exact: bool = False) -> Results:
    """What the case gives by `recipe` (None: in its own dtype), or with `exact` the truth."""
    plan = None if recipe is None else recipe.plan()
    with torch.no_grad():
        return _CHAINS[work.case.kind](work, _Products(plan, work.dtype, exact))


# ---------------------------------------------------------------------------------------- products
class _Products:
    """The three products of a linear layer, of operands as `plan` casts them."""

    def __init__(self, plan: Plan | None, dtype: torch.dtype, exact: bool) -> None:
        self.dtype = torch.float32 if exact else dtype
        self.pairs = None if plan is None else products(plan)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        a, b = self._operands(0, x, False, w, False)
        return (a @ b.t()).to(self.dtype)

    def backward(self, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """(gradient of the input, gradient of the weight)."""
        a, b = self._operands(1, g, False, w, True)
        dx = (a @ b).to(self.dtype)
        a, b = self._operands(2, g, True, x, True)
        return dx, (a.t() @ b).to(self.dtype)

    def _operands(
        self, index: int, a: Tensor, a_col: bool, b: Tensor, b_col: bool
    ) -> tuple[Tensor, Tensor]:
        if self.pairs is None:
            return a.float(), b.float()
        pair = self.pairs[index]
        return _decoded(a, pair.a, a_col), _decoded(b, pair.b, b_col)


def _decoded(x: Tensor, cast: Cast, col: bool) -> Tensor:
    """fp32 values of a copy, in the orientation of `x`; a transform stays on its contraction."""
    if cast.format.element is None:
        return x.float()
    rows, columns = x.shape
    kept = rup(rows, 16) if col and cast.transforms else rows
    width = columns if col or not cast.transforms else rup(columns, 16)
    out = torch.empty(kept, width, device=x.device)
    amax = None
    if cast.format.tile is None or (cast.format.two_level and not cast.row_scaled):
        amax = _amax(x, cast, col)
    plain = cast.replace(hadamard=-1)
    # Across the contraction: what belongs to one block stays in one piece.
    length, other = (columns, rows) if col else (rows, columns)
    step = max(TILE, CHUNK // max(1, other) // TILE * TILE)
    for i, at in enumerate(range(0, length, step)):
        piece = x[:, at : at + step] if col else x[at : at + step]
        seed = torch.tensor([i, 0], device=x.device) if cast.stochastic else None
        data, scale, made = reference.quantize(piece, cast, col=col, amax=amax, seed=seed)
        shape = (kept, piece.shape[1]) if col else (piece.shape[0], width)
        value = reference.dequantize(data, scale, made, plain, shape, torch.float32, col=col)
        if col:
            out[:, at : at + step] = value
        else:
            out[at : at + step] = value
    return out


def _amax(x: Tensor, cast: Cast, col: bool) -> Tensor:
    """The amax of all of it, piece by piece."""
    length, other = (x.shape[1], x.shape[0]) if col else x.shape
    step = max(TILE, CHUNK // max(1, other) // TILE * TILE)
    pieces = [
        reference.amax(x[:, at : at + step] if col else x[at : at + step], cast, col=col)
        for at in range(0, length, step)
    ]
    return torch.stack(pieces).amax(0)


# ------------------------------------------------------------------------------------------ chains
def _linear(work: Work, p: _Products) -> Results:
    x, w, g = work.x.detach().to(p.dtype), work.weights["weight"], work.grad.to(p.dtype)
    dx, dw = p.backward(x, w, g)
    return {"y": p.forward(x, w), "dx": dx, "dweight": dw}


def _norm_linear(work: Work, p: _Products) -> Results:
    w, g = work.weights["weight"], work.grad.to(p.dtype)
    x, normed = _normed(work.x.detach().to(p.dtype))
    dn, dw = p.backward(normed.detach(), w, g)
    (dx,) = torch.autograd.grad(normed, x, dn)
    return {"y": p.forward(normed.detach(), w), "dx": dx, "dweight": dw}


Backward = Callable[[Tensor], tuple[Tensor, Results]]  # dy -> dx, gradients of weights


def _mlp(work: Work, p: _Products) -> Results:
    y, backward = _gated(work, p, work.x.detach().to(p.dtype), "")
    dx, grads = backward(work.grad.to(p.dtype))
    return {"y": y, "dx": dx, **grads}


def _gated(work: Work, p: _Products, x: Tensor, prefix: str) -> tuple[Tensor, Backward]:
    """(output, its backward)."""
    w1, w2 = work.weights[f"{prefix}fc1"], work.weights[f"{prefix}fc2"]
    x, normed = _normed(x)
    h = p.forward(normed.detach(), w1)
    with torch.enable_grad():
        h.requires_grad_()
        gate, linear = h.chunk(2, -1)
        act = F.silu(gate) * linear

    def backward(g: Tensor) -> tuple[Tensor, Results]:
        da, dw2 = p.backward(act.detach(), w2, g)
        (dh,) = torch.autograd.grad(act, h, da)
        dn, dw1 = p.backward(normed.detach(), w1, dh)
        (dx,) = torch.autograd.grad(normed, x, dn)
        return dx, {f"d{prefix}fc1": dw1, f"d{prefix}fc2": dw2}

    return p.forward(act.detach(), w2), backward


def _layer(work: Work, p: _Products, x: Tensor, prefix: str) -> tuple[Tensor, Backward]:
    """(output of a decoder layer, its backward)."""
    wq, wo = work.weights[f"{prefix}qkv"], work.weights[f"{prefix}out"]
    x, normed = _normed(x)
    qkv = p.forward(normed.detach(), wq)
    with torch.enable_grad():
        qkv.requires_grad_()
        mixed = attention(qkv, work.case.heads, decoder_table(work.case, work.device))
    middle = x.detach() + p.forward(mixed.detach(), wo)
    y, behind = _gated(work, p, middle, prefix)

    def backward(g: Tensor) -> tuple[Tensor, Results]:
        dm, grads = behind(g)
        dm = dm + g
        da, dwo = p.backward(mixed.detach(), wo, dm)
        (dqkv,) = torch.autograd.grad(mixed, qkv, da)
        dn, dwq = p.backward(normed.detach(), wq, dqkv)
        (dx,) = torch.autograd.grad(normed, x, dn)
        return dx + dm, grads | {f"d{prefix}qkv": dwq, f"d{prefix}out": dwo}

    return middle + y, backward


def _decoder(work: Work, p: _Products) -> Results:
    y, g = work.x.detach().to(p.dtype), work.grad.to(p.dtype)
    backwards: list[Backward] = []
    for prefix in KINDS[work.case.kind].prefixes:
        y, backward = _layer(work, p, y, prefix)
        backwards.append(backward)
    grads: Results = {}
    while backwards:
        g, more = backwards.pop()(g)
        grads |= more
    return {"y": y, "dx": g, **grads}


def _normed(x: Tensor) -> tuple[Tensor, Tensor]:
    """(a leaf of these values, its RMSNorm)."""
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        return x, F.rms_norm(x, x.shape[-1:], None, EPS)


def _grouped(work: Work, p: _Products) -> Results:
    rows = work.case.rows
    x, g = work.x.detach().to(p.dtype), work.grad.to(p.dtype)
    parts: dict[str, list[Tensor]] = {"y": [], "dx": [], "dweight": []}
    pieces = zip(torch.split(x, rows), torch.split(g, rows), work.weights["weight"], strict=True)
    for part, grad, w in pieces:
        if part.shape[0]:
            dx, dw = p.backward(part, w, grad)
            parts["y"].append(p.forward(part, w))
            parts["dx"].append(dx)
        else:
            dw = torch.zeros_like(w, dtype=p.dtype)
        parts["dweight"].append(dw)
    return {name: torch.cat(ts) for name, ts in parts.items()}


_CHAINS: dict[str, Callable[[Work, _Products], Results]] = {
    "linear": _linear,
    "norm_linear": _norm_linear,
    "mlp": _mlp,
    "grouped": _grouped,
    "decoder": _decoder,
    "model": _decoder,
}
