"""Products as cuBLASLt is asked for them, described once and not in every call.

    d[M, N] = a[M, K] b[N, K]^T    of codes under scales of whole operands, or of their blocks,
                                   or of values of two bytes, which have no scales

PyTorch describes a product, and asks for an algorithm, at every call, and takes the first that is
proposed. Here both are done when a program is written, and `fastest` chooses among the algorithms:
those that are proposed, and for codes the same with other tiles and clusters. PyTorch multiplies
values by cuBLAS, which takes what it likes: of theirs an algorithm is taken for its bits alone.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import env, fastest
from .formats import HALF
from .steps import ALIGNED, Call, Constant, Form, Piece, numel

__all__ = ["Operand", "Product", "of_call", "product"]

aten = torch.ops.aten

# Names of cublasLt.h and library_types.h.
COMPUTE_32F, R_32F, R_16F, R_16BF, R_8F_E4M3, R_8F_E5M2 = 68, 0, 2, 14, 28, 29
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8
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
WORKSPACES = (1 << 20, 32 << 20)  # what may be offered: PyTorch's depends on its settings
MOST = 8  # algorithms that are asked for
ALGO_TILE, ALGO_CLUSTER, CAP_TILES = 1, 8, 6
# Algorithms that are tried besides: the FIRST of those proposed with their own tile and with 128 x
# 128, by clusters of 1x1, 2x1 and 1x2. H200: of 450 to 1000 that cuBLASLt accepts for a product,
# what beat all that it proposed was among these: 1.54 ms for 1.58 (dx of 16384, 14336 -> 4096, two
# accumulators), 1.95 for 2.08 (dw of 16384, 4096 -> 14336, 1x128 blocks), bits the same.
FIRST, TILE_128X128, CLUSTERS = 4, 20, (2, 3, 5)
# Of a SHORT product (of as many operations) all tiles that an algorithm lists are tried: which one
# fills the device depends on the sizes. H200: 12.5 us for 17.3 (dw of 2048, 768 -> 3072, 1x128
# blocks), in a CUDA graph, of 270 that made the same bits. A number that stands for no tile ends
# the process with a division by zero where it is checked, so this is for what was seen: products
# of blocks, and the versions whose lists were tried (13.1).
SHORT, LISTED = 10**11, (1301,)
SOMEWHERE = 1 << 20  # an address for pointers that are not known yet; nobody reads it


class Operand(NamedTuple):
    """`[lines, K]`, K contiguous, or else, `turned`, the lines; `stride` is that of the other.

    `mode` is a value of ScalingType for codes, None for values.
    """

    lines: int
    k: int
    stride: int
    dtype: torch.dtype
    mode: int | None = 0
    turned: bool = False

    @property
    def rows(self) -> int:
        """Of the matrix as cuBLAS counts, whose columns are contiguous."""
        return self.lines if self.turned else self.k

    @property
    def columns(self) -> int:
        return self.k if self.turned else self.lines

    @property
    def nbytes(self) -> int:
        """Gaps included."""
        return self.columns * self.stride * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """`[lines, K]` of bytes that start where the operand does."""
        strides = (1, self.stride) if self.turned else (self.stride, 1)
        return memory.view(self.dtype).as_strided((self.lines, self.k), strides)


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
        self.a, self.b, self.dtype, self.fast, self.bias = a, b, dtype, fast, bias
        self._made: list[tuple[str, ctypes.c_void_p]] = []
        weakref.finalize(self, _destroy, self._made).atexit = False
        self._descriptor = self._make("MatmulDesc", COMPUTE_32F, R_32F)
        # cuBLAS counts columns first: d^T = b a^T is what it is asked for, of b [N, K] and a^T
        # [K, M]. It sees [lines, K] where lines are contiguous, else [K, lines].
        self._set(TRANSA, ctypes.c_int32(not b.turned))
        self._set(TRANSB, ctypes.c_int32(a.turned))
        self.attributes: list[int] = []
        if a.mode is not None and b.mode is not None:
            self._set(FAST_ACCUM, ctypes.c_int8(fast))
            self._set(A_SCALE_MODE, ctypes.c_int32(_MODES[b.mode]))
            self._set(B_SCALE_MODE, ctypes.c_int32(_MODES[a.mode]))
            self.attributes += (A_SCALE_POINTER, B_SCALE_POINTER)
        self.of_codes = bool(self.attributes)
        # What PyTorch's own product depends on besides.
        self.settings = () if self.of_codes else _settings()
        if bias:
            self._set(EPILOGUE, ctypes.c_int32(EPILOGUE_BIAS))
            self._set(BIAS_DATA_TYPE, ctypes.c_int32(_TYPES[dtype]))
            self.attributes.append(BIAS_POINTER)
        self.point([SOMEWHERE] * len(self.attributes))
        self._layouts = [
            *(self._make_layout(_TYPES[o.dtype], o.rows, o.columns, o.stride) for o in (b, a)),
            *(self._make_layout(_TYPES[dtype], b.lines, a.lines, b.lines) for _ in range(2)),
        ]
        self.is_pytorchs = (
            False  # whether the first proposal is what PyTorch takes, as far as known
        )
        self.proposals = self._proposals()
        self.chosen = 0

    def take(self, i: int) -> None:
        """Multiply by proposal i, and forget the others: of a product of blocks there are up to a
        thousand, of 240 bytes each, and a plan keeps the product."""
        self.proposals, self.chosen = [self.proposals[i]], 0

    @property
    def scratch(self) -> int:
        """Bytes that the chosen algorithm needs."""
        return int(self.proposals[self.chosen].workspace)

    def words(self, a: Any, b: Any, d: Any, scratch: Any, given: list[Any]) -> list[Any]:
        """Those of `batch.PRODUCT`, of references; `given`: to what `attributes` point at, scales
        of b and of a, and a bias."""
        pairs = [x for pair in zip(self.attributes, given, strict=True) for x in pair]
        algorithm = ctypes.addressof(self.proposals[self.chosen].algorithm)
        operands = [algorithm, self.scratch, b, a, d, scratch if self.scratch else (0,)]
        return [*self._objects(), *operands, len(given), *pairs]

    def point(self, addresses: list[int]) -> None:
        """Where scales of b and of a, and a bias, are, as far as there are any."""
        for attribute, address in zip(self.attributes, addresses, strict=True):
            self._set(attribute, ctypes.c_void_p(address))

    def run(self, i: int, a: int, b: int, d: int, scratch: int, stream: int) -> bool:
        """Multiply by proposal i, now; whether it could. All are addresses."""
        handle, descriptor, *layouts = (ctypes.c_void_p(o) for o in self._objects())
        one, zero = ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0))
        found = self.proposals[i]
        b_, a_, d_, scratch_, stream_ = (ctypes.c_void_p(p) for p in (b, a, d, scratch, stream))
        status = _library().cublasLtMatmul(
            handle, descriptor, one, b_, layouts[0], a_, layouts[1], zero, d_, layouts[2], d_,
            layouts[3], ctypes.byref(found.algorithm), scratch_,
            ctypes.c_size_t(found.workspace), stream_,
        )  # fmt: skip
        return bool(status == 0)

    def ordinary(self, a: Tensor, b: Tensor, ones: Tensor) -> Tensor | None:
        """What PyTorch makes of numbers that lie as these operands do, where scales and a bias are
        read from `ones`; None for blocks, which have more than one scale."""
        if self.a.mode or self.b.mode:
            return None
        x, w = self.a.view(a), self.b.view(b).t()
        bias = ones.view(self.dtype)[: self.b.lines] if self.bias else None
        if self.of_codes:
            one = ones[0]
            return torch._scaled_mm(x, w, one, one, bias, None, self.dtype, self.fast)
        if bias is not None:
            return torch.addmm(bias, x, w)
        if self.dtype is x.dtype:
            return torch.mm(x, w)
        return torch.mm(x, w, out_dtype=self.dtype)

    def _objects(self) -> list[Any]:
        return [o.value for o in (_handle(), self._descriptor, *self._layouts)]

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

    def _proposals(self) -> list[_Result]:
        """For codes, those that do with little memory; the first is PyTorch's, if it does not
        depend on how much there is. For values also those that take as much as cuBLAS is given:
        its own may split the contraction, and no other has the bits of that."""
        few, many = (self._proposed(size) for size in WORKSPACES)
        if not few or not many:
            return []
        more: Iterable[_Result] = many
        if self.of_codes:
            self.is_pytorchs = bytes(few[0].algorithm) == bytes(many[0].algorithm)
            more = chain.from_iterable(map(self._derived, few[:FIRST]))
        known: dict[bytes, _Result] = {}
        for found in chain(few, more):
            known.setdefault(bytes(found.algorithm), found)
        return list(known.values())

    def _derived(self, of: _Result) -> Iterator[_Result]:
        """`of` with other tiles and clusters, as far as cuBLASLt accepts them."""
        lib = _library()
        configure = lib.cublasLtMatmulAlgoConfigSetAttribute
        for tile in (None, *map(ctypes.c_uint32, self._tiles(of))):
            for cluster in map(ctypes.c_uint16, CLUSTERS):
                made, checked = _Result(), _Result()
                made.algorithm[:] = of.algorithm[:]
                wanted = [(ALGO_TILE, tile), (ALGO_CLUSTER, cluster)]
                given = [(name, value) for name, value in wanted if value is not None]
                algorithm = ctypes.byref(made.algorithm)
                failed = [
                    configure(algorithm, name, ctypes.byref(value), ctypes.sizeof(value))
                    for name, value in given
                ]
                if any(failed) or lib.cublasLtMatmulAlgoCheck(
                    _handle(), self._descriptor, *self._layouts, algorithm, ctypes.byref(checked)
                ):
                    continue
                made.workspace = checked.workspace
                if made.workspace <= WORKSPACES[0]:
                    yield made

    def _tiles(self, of: _Result) -> list[int]:
        """Tiles to try besides that of an algorithm."""
        lib, operations = _library(), 2 * self.a.lines * self.b.lines * self.a.k
        tried = self.a.mode and self.b.mode and lib.cublasLtGetVersion() // 100 in LISTED
        if operations > SHORT or not tried:
            return [TILE_128X128]
        found, written = (ctypes.c_uint32 * 1024)(), ctypes.c_size_t()
        status = lib.cublasLtMatmulAlgoCapGetAttribute(
            ctypes.byref(of.algorithm), CAP_TILES, ctypes.byref(found), ctypes.sizeof(found),
            ctypes.byref(written),
        )  # fmt: skip
        listed = found[: written.value // ctypes.sizeof(ctypes.c_uint32)] if status == 0 else []
        return [TILE_128X128, *(tile for tile in listed if tile not in (0, TILE_128X128))]

    def _proposed(self, workspace: int) -> list[_Result]:
        lib, found, count = _library(), (_Result * MOST)(), ctypes.c_int()
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
                _handle(), self._descriptor, *self._layouts, preference, MOST,
                ctypes.byref(found), ctypes.byref(count),
            )  # fmt: skip
        finally:
            lib.cublasLtMatmulPreferenceDestroy(preference)
        made = [found[i] for i in range(count.value)] if status == 0 else []
        return made if all(r.state == 0 for r in made) else []


def _destroy(made: list[tuple[str, ctypes.c_void_p]]) -> None:
    for kind, one in made:
        getattr(_library(), f"cublasLt{kind}Destroy")(one)


def product(a: Operand, b: Operand, dtype: torch.dtype, fast: bool, bias: bool) -> Product | None:
    """On the current device; None: it is PyTorch's."""
    if min(a.lines, b.lines, a.k) < 2 or a.k != b.k or not _known(a, b, dtype) or _tuned():
        return None
    try:
        made = Product(a, b, dtype, fast, bias)
    except RuntimeError:  # a pair that this version does not know
        return None
    return made if made.proposals else None


def _known(a: Operand, b: Operand, dtype: torch.dtype) -> bool:
    """Whether these are codes under scales, K contiguous, or values of one dtype of two bytes."""
    if a.mode is None and b.mode is None:
        return a.dtype is b.dtype and a.dtype in HALF and dtype in (a.dtype, torch.float32)
    if any(o.mode not in _MODES or o.turned for o in (a, b)):
        return False
    return all(t in _TYPES for t in (a.dtype, b.dtype, dtype))


# --------------------------------------------------------------------------- what PyTorch is asked
def of_call(
    step: Call, forms: dict[str, Form], scratch: str, unaligned: Collection[str] = ()
) -> tuple[list[Any], Product] | None:
    """(words of `batch.PRODUCT` for a recorded call, what they point into), or None.

    `scratch` is the name of memory that the product may need, `unaligned` are names of regions.
    """
    order = _ORDERS.get(step.function)
    if order is None or step.kwargs or len(step.makes) != 1:
        return None
    given = dict(zip(order, step.args, strict=False))
    x, w, bias = given["a"], given["b"], _plain(given.get("bias"))
    scales = [_only(given[name]) for name in ("scale_a", "scale_b") if name in given]
    default = Constant(0 if scales else None)
    modes = [_plain(_only(given.get(name, default))) for name in ("mode_a", "mode_b")]
    if any(_plain(_only(given.get(name))) is not None for name in _NEVER):
        return None
    if not all(isinstance(s, Piece) for s in scales):
        return None
    if any(m == 0 and numel(s.form) != 1 for m, s in zip(modes, scales, strict=False)):
        return None  # one for each line
    # What cuBLAS takes depends on it, and a trial's operands are aligned.
    if not scales and not all(p is None or _aligned(p, unaligned) for p in (x, w, bias)):
        return None
    a, b = _operand(x, False, modes[0]), _operand(w, True, modes[1])
    shape, strides, dtype, _ = forms[step.makes[0]]
    if a is None or b is None or (shape, strides) != ((a.lines, b.lines), (b.lines, 1)):
        return None
    if bias is not None and bias.form[:3] != ((b.lines,), (1,), dtype):
        return None
    fast = bool(_plain(given.get("fast")))
    made = product(a, b, dtype, fast, bias is not None)
    if made is None:
        return None
    chosen = fastest.choose(made)
    if chosen is None:
        return None
    made.take(chosen)
    reads = [*reversed(scales), *([] if bias is None else [bias])]
    y = (step.makes[0], 0)
    return made.words(_at(x), _at(w), y, (scratch, 0), [_at(r) for r in reads]), made


# Arguments of PyTorch's products in their order; those at the end may be left out.
_ORDERS: dict[Any, tuple[str, ...]] = {
    aten._scaled_mm.default: (
        "a", "b", "scale_a", "scale_b", "bias", "scale_result", "dtype", "fast",
    ),
    aten._scaled_mm_v2.default: (
        "a", "b", "scale_a", "mode_a", "swizzle_a", "scale_b", "mode_b", "swizzle_b", "bias",
        "dtype", "dims", "fast",
    ),
    aten.mm.default: ("a", "b"), aten.mm.dtype: ("a", "b", "dtype"),
    aten.addmm.default: ("bias", "a", "b"),
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


def _operand(piece: Piece, second: bool, mode: Any) -> Operand | None:
    """An operand as it lies in memory, no element twice; the second is given as `[K, lines]`."""
    (shape, strides, dtype, _) = piece.form
    if len(shape) != 2:
        return None
    (lines, k), (stride, step) = (shape[::-1], strides[::-1]) if second else (shape, strides)
    if step == 1 and stride >= k:
        return Operand(lines, k, stride, dtype, mode)
    if stride == 1 and step >= lines:
        return Operand(lines, k, step, dtype, mode, turned=True)
    return None


def _aligned(piece: Piece, unaligned: Collection[str]) -> bool:
    return piece.region not in unaligned and _at(piece)[1] % ALIGNED == 0


def _at(piece: Piece) -> tuple[str, int]:
    return piece.region, piece.form[3] * piece.form[2].itemsize


def _tuned() -> bool:
    """Whether PyTorch would take other algorithms than the first, or leave multiprocessors free."""
    if torch.cuda.tunable.is_enabled():
        return True
    carveout: Any = getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)
    return carveout() is not None


def _settings() -> Hashable:
    """What decides on PyTorch's products of values: by whom, and how sums may be rounded on their
    way. As for codes, a program keeps what was set when it was written."""
    matmul: Any = torch.backends.cuda.matmul
    flags = [
        getattr(matmul, f"allow_{dtype}_{what}", None)
        for dtype in ("bf16", "fp16")
        for what in ("reduced_precision_reduction", "reduced_precision_reduction_split_k")
    ]
    blas: Any = torch.backends.cuda.preferred_blas_library
    return (*flags, matmul.allow_fp16_accumulation, blas())


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
