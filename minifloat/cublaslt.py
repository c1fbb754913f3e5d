"""Products of codes as cuBLASLt is asked for them, described once and not in every call.

    d[M, N] = a[M, K] b[N, K]^T    under scales of whole operands, or of their blocks

PyTorch describes a product, and asks for an algorithm, at every call. Here both are done when a
program is written; what runs is then the algorithm that PyTorch takes: the first that cuBLASLt
proposes, if it is the same whatever memory it is offered, and needs none. Any other product stays
PyTorch's.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any, NamedTuple

import torch

from . import env
from .steps import Call, Constant, Form, Piece, numel

__all__ = ["Operand", "Product", "of_call", "product"]

aten = torch.ops.aten

# Names of cublasLt.h and library_types.h.
COMPUTE_32F, R_32F, R_16F, R_16BF, R_8F_E4M3, R_8F_E5M2 = 68, 0, 2, 14, 28, 29
TRANSA, EPILOGUE, BIAS_POINTER = 3, 7, 8
A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUM, BIAS_DATA_TYPE = 17, 18, 25, 26
A_SCALE_MODE, B_SCALE_MODE = 31, 32
EPILOGUE_BIAS, MAX_WORKSPACE_BYTES = 4, 1
_TYPES = {
    torch.float32: R_32F, torch.float16: R_16F, torch.bfloat16: R_16BF,
    torch.float8_e4m3fn: R_8F_E4M3, torch.float8_e5m2: R_8F_E5M2,
}  # fmt: skip
# torch.nn.functional.ScalingType's values by cublasLtMatmulMatrixScale_t's: a tensor's scale, one
# for 1x128, one for 128x128.
_MODES = {0: 0, 4: 4, 5: 5}
WORKSPACES = (0, 1 << 20, 32 << 20)  # what may be offered: PyTorch's depends on its settings
SOMEWHERE = 1 << 20  # an address for pointers that are not known yet; nobody reads it


class Operand(NamedTuple):
    """`[lines, K]`, the contraction contiguous; `mode` is a value of ScalingType."""

    lines: int
    k: int
    stride: int
    dtype: torch.dtype
    mode: int = 0


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Product:
    """A described product. It owns cuBLASLt's objects: a plan that names them keeps it."""

    def __init__(self, a: Operand, b: Operand, dtype: torch.dtype, fast: bool, bias: bool) -> None:
        self._made: list[tuple[str, ctypes.c_void_p]] = []
        weakref.finalize(self, _destroy, self._made).atexit = False
        self._descriptor = self._make("MatmulDesc", COMPUTE_32F, R_32F)
        # cuBLAS counts columns first: d^T = b a^T is what it is asked for.
        self._set(TRANSA, ctypes.c_int32(1))
        self._set(FAST_ACCUM, ctypes.c_int8(fast))
        self._set(A_SCALE_MODE, ctypes.c_int32(_MODES[b.mode]))
        self._set(B_SCALE_MODE, ctypes.c_int32(_MODES[a.mode]))
        self.attributes = [A_SCALE_POINTER, B_SCALE_POINTER]
        if bias:
            self._set(EPILOGUE, ctypes.c_int32(EPILOGUE_BIAS))
            self._set(BIAS_DATA_TYPE, ctypes.c_int32(_TYPES[dtype]))
            self.attributes.append(BIAS_POINTER)
        for attribute in self.attributes:
            self._set(attribute, ctypes.c_void_p(SOMEWHERE))
        self._layouts = [
            self._make_layout(_TYPES[b.dtype], b.k, b.lines, b.stride),
            self._make_layout(_TYPES[a.dtype], a.k, a.lines, a.stride),
            *(self._make_layout(_TYPES[dtype], b.lines, a.lines, b.lines) for _ in range(2)),
        ]
        self.algorithm = self._algorithm()

    def words(self, a: Any, b: Any, d: Any, given: list[Any]) -> list[Any]:
        """Those of `batch.PRODUCT`, of references; `given`: to scales of b and of a, and a bias."""
        assert self.algorithm is not None
        pairs = [x for pair in zip(self.attributes, given, strict=True) for x in pair]
        objects = [o.value for o in (_handle(), self._descriptor, *self._layouts)]
        return [*objects, ctypes.addressof(self.algorithm), b, a, d, len(given), *pairs]

    def _make(self, kind: str, *args: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        _check(getattr(_library(), f"cublasLt{kind}Create")(ctypes.byref(made), *args))
        self._made.append((kind, made))
        return made

    def _make_layout(self, dtype: int, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride))
        return self._make("MatrixLayout", dtype, *sizes)

    def _set(self, attribute: int, value: Any) -> None:
        set_ = _library().cublasLtMatmulDescSetAttribute
        _check(set_(self._descriptor, attribute, ctypes.byref(value), ctypes.sizeof(value)))

    def _algorithm(self) -> Any:
        """The first that is proposed, or None where that depends on the memory for it."""
        first: Any = None
        for size in WORKSPACES:
            found = self._proposed(size)
            if found is None or found.workspace > 0:
                return None
            if first is not None and bytes(first.algorithm) != bytes(found.algorithm):
                return None
            first = found
        return first.algorithm

    def _proposed(self, workspace: int) -> _Result | None:
        lib, found, count = _library(), _Result(), ctypes.c_int()
        preference = ctypes.c_void_p()
        _check(lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        try:
            size = ctypes.c_size_t(workspace)
            _check(
                lib.cublasLtMatmulPreferenceSetAttribute(
                    preference, MAX_WORKSPACE_BYTES, ctypes.byref(size), ctypes.sizeof(size)
                )
            )
            status = lib.cublasLtMatmulAlgoGetHeuristic(
                _handle(), self._descriptor, *self._layouts, preference, 1,
                ctypes.byref(found), ctypes.byref(count),
            )  # fmt: skip
        finally:
            lib.cublasLtMatmulPreferenceDestroy(preference)
        return found if status == 0 and count.value == 1 and found.state == 0 else None


def _destroy(made: list[tuple[str, ctypes.c_void_p]]) -> None:
    for kind, one in made:
        getattr(_library(), f"cublasLt{kind}Destroy")(one)


def product(a: Operand, b: Operand, dtype: torch.dtype, fast: bool, bias: bool) -> Product | None:
    """On the current device; None: it is PyTorch's."""
    shapes = (a.lines, b.lines, a.k)
    if min(shapes) < 2 or a.k != b.k or any(o.mode not in _MODES for o in (a, b)):
        return None
    if any(t not in _TYPES for t in (a.dtype, b.dtype, dtype)) or _tuned():
        return None
    try:
        made = Product(a, b, dtype, fast, bias)
    except RuntimeError:  # a pair that this version does not know
        return None
    return made if made.algorithm is not None else None


# --------------------------------------------------------------------------- what PyTorch is asked
def of_call(step: Call, forms: dict[str, Form]) -> tuple[list[Any], Product] | None:
    """(words of `batch.PRODUCT` for a recorded call, what they point into), or None."""
    order = _ORDERS.get(step.function)
    if order is None or step.kwargs or len(step.makes) != 1:
        return None
    given = dict(zip(order, step.args, strict=False))
    x, w, bias = given["a"], given["b"], _plain(given.get("bias"))
    scales = [_only(given["scale_a"]), _only(given["scale_b"])]
    modes = [_plain(_only(given.get(name, Constant(0)))) for name in ("mode_a", "mode_b")]
    if any(_plain(_only(given.get(name))) is not None for name in _NEVER):
        return None
    if not all(isinstance(s, Piece) for s in scales):
        return None
    a, b = _operand(x, False, modes[0], scales[0]), _operand(w, True, modes[1], scales[1])
    shape, strides, dtype, _ = forms[step.makes[0]]
    if a is None or b is None or (shape, strides) != ((a.lines, b.lines), (b.lines, 1)):
        return None
    if bias is not None and bias.form[2] is not dtype:
        return None
    fast = bool(_plain(given.get("fast")))
    made = product(a, b, dtype, fast, bias is not None)
    if made is None:
        return None
    reads = [scales[1], scales[0], *([] if bias is None else [bias])]
    return made.words(_at(x), _at(w), (step.makes[0], 0), [_at(r) for r in reads]), made


# Arguments of PyTorch's products in their order; those at the end may be left out.
_ORDERS: dict[Any, tuple[str, ...]] = {
    aten._scaled_mm.default: (
        "a", "b", "scale_a", "scale_b", "bias", "scale_result", "dtype", "fast",
    ),
    aten._scaled_mm_v2.default: (
        "a", "b", "scale_a", "mode_a", "swizzle_a", "scale_b", "mode_b", "swizzle_b", "bias",
        "dtype", "dims", "fast",
    ),
}  # fmt: skip
_NEVER = ("scale_result", "swizzle_a", "swizzle_b", "dims")


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Constant) else value


def _only(value: Any) -> Any:
    """What a list of one holds, None for an empty one; and what is no list."""
    if isinstance(value, Constant) and isinstance(value.value, list | tuple):
        value = [Constant(v) for v in value.value]
    if not isinstance(value, list):
        return value
    return None if not value else value[0] if len(value) == 1 else value


def _operand(piece: Any, turned: bool, mode: Any, scale: Piece) -> Operand | None:
    """An operand as it lies in memory, if its contraction is contiguous; `turned`: `[K, lines]`."""
    (shape, strides, dtype, _) = piece.form
    if len(shape) != 2:
        return None
    (lines, k), (stride, step) = (shape[::-1], strides[::-1]) if turned else (shape, strides)
    whole = mode != 0 or numel(scale.form) == 1  # else one for each line
    return Operand(lines, k, stride, dtype, mode) if step == 1 and whole else None


def _at(piece: Piece) -> tuple[str, int]:
    return piece.region, piece.form[3] * piece.form[2].itemsize


def _tuned() -> bool:
    """Whether PyTorch would take other algorithms than the first, or leave multiprocessors free."""
    if torch.cuda.tunable.is_enabled():
        return True
    carveout: Any = getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)
    return carveout() is not None


@cache
def _library() -> Any:
    found = env.cublaslt()
    assert found is not None
    return ctypes.CDLL(found)


_HANDLES: dict[int, ctypes.c_void_p] = {}


def _handle() -> ctypes.c_void_p:
    """The current device's."""
    index = torch.cuda.current_device()
    if index not in _HANDLES:
        made = ctypes.c_void_p()
        _check(_library().cublasLtCreate(ctypes.byref(made)))
        _HANDLES[index] = made
    return _HANDLES[index]


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"cuBLASLt returned {status}")
