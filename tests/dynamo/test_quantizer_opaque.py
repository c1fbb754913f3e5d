"""Quantizers and DType as constants of graphs: guarded by value, frozen, printed, rebuilt."""

from __future__ import annotations

import abc
import ast
import enum
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import minifloat as mf
from minifloat import DType, Quantizer, dynamo, opaque
from minifloat.dynamo import is_value_opaque_quantizer, register_value_opaque_quantizer
from minifloat.dynamo.quantizer_opaque import _rebuild_quantizer
from minifloat.formats import Cast
from minifloat.opaque import OpaqueABCMeta

from ..quantizers.cases import (
    CLASSES,
    E4M3,
    E5M2,
    SEED,
    VALUES,
    Make,
    assert_same,
    delayed,
    sample,
)
from ..tensors import world

compiles = pytest.mark.skipif(not opaque.AVAILABLE, reason="this PyTorch has no opaque objects")
values = pytest.mark.parametrize("make", VALUES.values(), ids=VALUES.keys())
classes = pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES.keys())
X = sample(20, 48)


class Counter(CompileCounterWithBackend):
    def __init__(self) -> None:
        torch._dynamo.reset()
        super().__init__("aot_eager")

    def compile(self, fn: Any) -> Any:
        return torch.compile(fn, fullgraph=True, backend=self)


def compiled(fn: Any, backend: Any = "aot_eager") -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend=backend)


def quantized(q: Any, x: Tensor) -> Any:
    return q.quantize(x, seed=SEED)


class Color(enum.Enum):
    RED = "r"
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@register_value_opaque_quantizer
class Custom(mf.MXFP8Quantizer, metaclass=OpaqueABCMeta):
    """A user's quantizer, with a field of every kind a value may have."""

    flag: bool
    number: int
    ratio: float
    name: str
    color: Color
    level: Level | None
    mode: Literal["a", "b"]
    grad_dtype: DType
    compute: torch.dtype
    maybe: torch.dtype | None
    count: ClassVar[int] = 0
    _live: Tensor

    def __init__(self, **fields: Any) -> None:
        super().__init__(E4M3)
        self._live = torch.zeros(3)
        given: dict[str, Any] = {
            "flag": True, "number": 3, "ratio": 0.1, "name": "n'\"", "color": Color.BLUE,
            "level": Level.HIGH, "mode": "a", "grad_dtype": E5M2, "compute": torch.bfloat16,
            "maybe": None, **fields,
        }  # fmt: skip
        for field, value in given.items():
            setattr(self, field, value)

    def _rebuild_derived_state(self) -> None:
        self._live = torch.zeros(3)


# ----------------------------------------------------------------------------------- registration
def test_exports() -> None:
    assert sorted(dynamo.__all__) == [
        "TensorSpec",
        "is_value_opaque_quantizer",
        "register_value_opaque_quantizer",
        "to_tensor_spec",
    ]


@values
def test_what_is_opaque(make: Make) -> None:
    assert is_value_opaque_quantizer(make()) is opaque.AVAILABLE


def test_what_is_not_opaque() -> None:
    class Plain(Quantizer):
        pass

    class Subclass(mf.MXFP8Quantizer):
        pass

    live = mf.HybridQuantizer(
        rowwise_quantizer=delayed(), columnwise_quantizer=mf.MXFP8Quantizer(E4M3)
    )
    for q in (Plain(rowwise=True, columnwise=True), Subclass(E4M3), delayed(), live):
        assert not is_value_opaque_quantizer(q)
    for other in (None, 3, "q", Cast("nvfp4"), mf.MXFP8Quantizer, X, E4M3):
        assert is_value_opaque_quantizer(other) is False


def test_a_registered_class_has_its_annotated_fields_base_first() -> None:
    base = mf.MXFP8Quantizer._value_field_names
    own = ("flag", "number", "ratio", "name", "color", "level", "mode")
    assert Custom._value_field_names == (*base, *own, "grad_dtype", "compute", "maybe")
    assert "_value_field_names" in vars(Custom)
    assert Custom() == Custom()
    assert Custom() != Custom(color=Color.RED)
    assert Custom() != Custom(level=None)
    assert Custom() != Custom(compute=torch.float16)
    assert Custom() != mf.MXFP8Quantizer(E4M3)
    assert is_value_opaque_quantizer(Custom()) is opaque.AVAILABLE


@pytest.mark.parametrize(
    "annotation",
    [
        Tensor,
        Tensor | None,
        dist.ProcessGroup,
        list,
        list[int],
        dict[str, int],
        Any,
        object,
        Callable[[], int],
        Color | str,
        Color | Level,
        torch.device,
    ],
    ids=str,
)
def test_a_field_that_cannot_be_a_constant_is_named(annotation: Any) -> None:
    cls = OpaqueABCMeta(
        "Bad", (Quantizer,), {"__annotations__": {"fine": int, "state": annotation}}
    )
    with pytest.raises(TypeError, match=r"Bad\.state: a value field cannot be annotated"):
        register_value_opaque_quantizer(cls)
    assert "_value_field_names" not in vars(cls)
    assert not is_value_opaque_quantizer(cls(rowwise=True, columnwise=True))


def test_a_bad_field_of_a_base_is_named_too() -> None:
    class Base(Quantizer):
        group: dist.ProcessGroup

    class Derived(Base, metaclass=OpaqueABCMeta):
        fine: int

    with pytest.raises(TypeError, match=r"Derived\.group: .*ProcessGroup"):
        register_value_opaque_quantizer(Derived)


@compiles
def test_registering_twice_raises() -> None:
    with pytest.raises(RuntimeError, match="registered"):
        register_value_opaque_quantizer(mf.MXFP8Quantizer)
    assert is_value_opaque_quantizer(mf.MXFP8Quantizer(E4M3)), "still what it was"


@compiles
@pytest.mark.parametrize("error", [RuntimeError, TypeError, AttributeError, ImportError])
def test_an_error_inside_registration_is_not_swallowed(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(Quantizer, metaclass=OpaqueABCMeta):
        field: int

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise error("refused by PyTorch")

    monkeypatch.setattr(opaque, "register_opaque_type", refuse)
    with pytest.raises(error, match="refused by PyTorch"):
        register_value_opaque_quantizer(Refused)
    q = Refused(rowwise=True, columnwise=True)
    assert q._value_fields() is None, "a class that was refused stays as it was"
    assert not is_value_opaque_quantizer(q)


@compiles
def test_a_metaclass_and_dunders_of_its_own() -> None:
    from torch._library.opaque_object import MemberType, register_opaque_type
    from torch._opaque_base import OpaqueBaseMeta

    class Meta(OpaqueBaseMeta, abc.ABCMeta):
        pass

    class Own(Quantizer, metaclass=Meta):
        def __init__(self, factor: float) -> None:
            super().__init__(rowwise=True, columnwise=True)
            self.factor = factor

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own) and self.factor == other.factor

        def __hash__(self) -> int:
            return hash(self.factor)

        def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
            return f"Own({self.factor})", {"Own": Own}

    assert not is_value_opaque_quantizer(Own(2.0))
    real = ("__setattr__", "set_usage", "factor", "get_usages")
    members = dict.fromkeys(real, MemberType.USE_REAL)
    register_opaque_type(Own, typ="value", members=members)
    assert is_value_opaque_quantizer(Own(2.0))
    counter = Counter()
    scale = counter.compile(lambda q, x: x * q.factor)
    for q in (Own(2.0), Own(2.0), Own(3.0)):
        assert torch.equal(scale(q, X), X * q.factor)
    assert counter.frame_count == 2


@compiles
def test_a_users_class_is_registered_by_us() -> None:
    from torch._opaque_base import OpaqueBaseMeta

    class Meta(OpaqueBaseMeta, abc.ABCMeta):
        pass

    @register_value_opaque_quantizer
    class Scaled(Quantizer, metaclass=Meta):
        factor: float
        _traced_members = ("doubled",)

        def __init__(self, factor: float) -> None:
            super().__init__(rowwise=True, columnwise=True)
            self.factor = factor

        def doubled(self) -> float:
            return 2 * self.factor

        def quantize_impl(self, tensor: Tensor) -> Tensor:  # type: ignore[override]
            return tensor * self.factor

    counter = Counter()
    fn = counter.compile(lambda q, x: q.quantize(x) + q.doubled())
    for factor, frames in ((2.0, 1), (2.0, 1), (3.0, 2), (2.0, 2)):
        x = X.clone().requires_grad_()
        made = fn(Scaled(factor), x)
        assert torch.equal(made, X * factor + 2 * factor)
        (grad,) = torch.autograd.grad(made.sum(), x)
        assert (grad == 1).all()
        assert counter.frame_count == frames
    q = Scaled(2.0)
    compiled(lambda q, x: q.quantize(x))(q, X)
    with pytest.raises(RuntimeError, match=r"Scaled\.factor cannot change.*copy\(\)"):
        q.factor = 4.0


@compiles
def test_a_users_fields_are_read_and_guarded() -> None:
    counter = Counter()

    def read(q: Any, x: Tensor) -> Any:
        return x.to(q.compute) * (2 if q.color is Color.RED else 3), q.level, q.grad_dtype

    fn = counter.compile(read)
    for color, frames in ((Color.BLUE, 1), (Color.BLUE, 1), (Color.RED, 2)):
        made, level, dtype = fn(Custom(color=color), X)
        assert torch.equal(made, X.bfloat16() * (2 if color is Color.RED else 3))
        assert level is Level.HIGH
        assert dtype is E5M2
        assert counter.frame_count == frames
    assert_same(compiled(quantized)(Custom(), X), quantized(Custom(), X))


def test_no_registry_of_names() -> None:
    """The module keeps nothing per class: what a graph needs travels in its globals."""
    source = Path(dynamo.quantizer_opaque.__file__).read_text()
    mutable = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp, ast.Call)
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            (target,) = node.targets if isinstance(node, ast.Assign) else (node.target,)
            assert isinstance(target, ast.Name)
            if target.id not in ("__all__", "T"):
                assert not isinstance(node.value, mutable), f"{target.id} can grow"


# ---------------------------------------------------------------------------------- printing, FX
def evaluated(q: Any) -> Any:
    text, names = q.__fx_repr__()
    return eval(text, dict(names))


@values
def test_fx_repr_evaluates_to_an_equal_quantizer(make: Make) -> None:
    q = make()
    q.set_usage(columnwise=False)
    q.optimize_for_gemm = True
    twin = evaluated(q)
    assert twin is not q
    assert twin == q
    assert hash(twin) == hash(q)
    assert twin._value_key() == q._value_key()
    for field in q._value_fields():
        assert type(getattr(twin, field)) is type(getattr(q, field))
    assert_same(quantized(twin, X), quantized(q, X))
    twin.set_usage(columnwise=True)  # a rebuilt one is nobody's constant yet
    assert_same(evaluated(twin).quantize(X, seed=SEED), quantized(twin, X))


@values
def test_fx_globals_hold_the_class_itself_and_no_module(make: Make) -> None:
    q = make()
    text, names = q.__fx_repr__()
    cls = type(q)
    assert text.startswith(f"_rebuild_quantizer({cls.__name__}, (('rowwise_usage', True), ")
    assert names["_rebuild_quantizer"] is _rebuild_quantizer
    assert names[cls.__name__] is cls
    assert "amax_reduction_group" not in text
    assert evaluated(q).amax_reduction_group is None
    rest = {k: v for k, v in names.items() if k not in ("_rebuild_quantizer", cls.__name__)}
    assert all(isinstance(v, type) and issubclass(v, Quantizer) for v in rest.values())
    if cls is not mf.HybridQuantizer:
        assert not rest


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"ratio": math.inf},
        {"ratio": -math.inf, "level": None, "maybe": torch.float64},
        {"color": Color.RED, "level": Level.LOW, "name": "a, b)"},
        {"number": -(2**70), "ratio": 1e-300},
    ],
    ids=repr,
)
def test_every_kind_of_field_is_printed_and_restored(fields: dict[str, Any]) -> None:
    q = Custom(**fields)
    twin = evaluated(q)
    assert twin == q
    assert hash(twin) == hash(q)
    for field in q._value_fields():
        value, rebuilt = getattr(q, field), getattr(twin, field)
        assert (rebuilt, type(rebuilt)) == (value, type(value))
    assert torch.equal(twin._live, torch.zeros(3)), "_rebuild_derived_state ran"


def test_two_classes_of_one_name_are_not_confused() -> None:
    def make(tile: bool) -> Any:
        @register_value_opaque_quantizer
        class Twin(mf.MXFP8Quantizer, metaclass=OpaqueABCMeta):
            __qualname__ = f"Twin{tile}{next(UNIQUE)}"

        return Twin(E4M3, with_2d_quantization=tile)

    q = mf.HybridQuantizer(rowwise_quantizer=make(True), columnwise_quantizer=make(False))
    with pytest.raises(TypeError, match="columnwise_quantizer: two classes named 'Twin'"):
        q.__fx_repr__()


UNIQUE = itertools.count()


def test_a_local_class_prints() -> None:
    @register_value_opaque_quantizer
    class Local(mf.MXFP8Quantizer, metaclass=OpaqueABCMeta):
        extra: int

    q = Local(E4M3)
    q.extra = 5
    twin = evaluated(q)
    assert type(twin) is Local
    assert twin == q


# ----------------------------------------------------------------------------- compiled functions
@compiles
@values
def test_a_compiled_function_takes_it(make: Make) -> None:
    q = make()
    made = compiled(quantized)(q, X)
    assert_same(made, quantized(make(), X))
    assert made._quantizer == q


@compiles
@classes
def test_a_compiled_function_closes_over_it(make: Make) -> None:
    q = make()
    assert_same(compiled(lambda x: quantized(q, x))(X), quantized(make(), X))


GLOBAL = mf.MXFP8Quantizer(E4M3)


@compiles
def test_a_compiled_function_reads_a_global() -> None:
    assert_same(compiled(lambda x: GLOBAL.quantize(x))(X), mf.MXFP8Quantizer(E4M3).quantize(X))


class Holder(torch.nn.Module):
    def __init__(self, q: Any) -> None:
        super().__init__()
        self.q = q

    def forward(self, x: Tensor) -> Any:
        return quantized(self.q, x)


@compiles
@classes
def test_a_compiled_module_holds_it(make: Make) -> None:
    module = Holder(make())
    made = compiled(module)(X)
    assert_same(made, quantized(make(), X))
    assert made._quantizer == module.q


@compiles
@classes
def test_a_compiled_function_returns_it(make: Make) -> None:
    q = make()
    returned, total = compiled(lambda q, x: (q, quantized(q, x).dequantize().sum()))(q, X)
    assert returned is q
    assert total == quantized(q, X).dequantize().sum()
    (again,), _ = compiled(lambda x: ([q], x + 1))(X)
    assert again is q
    held, _ = compiled(lambda m, x: ({"q": m.q}, x + 1))(Holder(q), X)
    assert held["q"] is q


@compiles
@classes
def test_it_is_made_in_the_graph(make: Make) -> None:
    assert_same(compiled(lambda x: quantized(make(), x))(X), quantized(make(), X))


@compiles
@classes
def test_lists_dicts_and_comparisons(make: Make) -> None:
    q = make()

    def use(qs: list[Any], table: dict[str, Any], x: Tensor) -> Any:
        assert qs[0] == table["q"]
        return quantized(qs[0], x).dequantize() + quantized(table["q"], x).dequantize()

    expected = quantized(q, X).dequantize()
    assert torch.equal(compiled(use)([q], {"q": q}, X), expected + expected)


@compiles
def test_fields_and_answers_are_read() -> None:
    def read(q: Any, x: Tensor) -> Any:
        return (
            q.rowwise_usage,
            q.dtype,
            q.with_2d_quantization,
            q.get_usages(),
            q.is_requantization_safe(),
            q.is_quantizable(x),
            q.copy() == q,
            x + 1,
        )

    q = mf.MXFP8Quantizer(E4M3)
    *answers, _ = compiled(read)(q, X)
    assert answers == [True, E4M3, False, {"rowwise": True, "columnwise": True}, True, True, True]


@compiles
@pytest.mark.parametrize("internal", [False, True])
def test_usages_internal_and_swizzled_scales(internal: bool) -> None:
    for columnwise in (True, False):
        q = mf.MXFP8Quantizer(E4M3, columnwise=columnwise)
        q.optimize_for_gemm = True
        q.internal = internal
        expected = q.copy().quantize(X)

        def rows(q: Any, x: Tensor) -> Any:
            made = q.quantize(x)
            return made._rowwise_data, made._rowwise_scale_inv

        data, scale = compiled(rows)(q, X)
        assert torch.equal(data, expected._rowwise_data)
        assert torch.equal(scale, expected._rowwise_scale_inv)


@compiles
def test_stochastic_rounding_draws_from_the_generator() -> None:
    q = VALUES["nvfp4-sr"]()
    draw = compiled(lambda x: q.quantize(x))
    torch.manual_seed(1)
    first, second = draw(X), draw(X)
    torch.manual_seed(1)
    assert_same(draw(X), first)
    assert not torch.equal(first._rowwise_data, second._rowwise_data)


@compiles
@pytest.mark.parametrize("make", [VALUES["mxfp8"], VALUES["current"]], ids=["mxfp8", "current"])
def test_inductor(make: Make) -> None:
    """Our op stays a call of its own, so even Inductor's bits are eager's."""
    q = make()
    assert_same(compiled(lambda q, x: q.quantize(x), "inductor")(q, X), make().quantize(X))


# ------------------------------------------------------------------------------------- guards
@compiles
@values
def test_equal_ones_interchange_and_an_unequal_one_compiles_once_more(make: Make) -> None:
    counter = Counter()
    fn = counter.compile(quantized)
    other = make()
    other.set_usage(columnwise=False)
    for _ in range(2):
        assert_same(fn(make(), X), quantized(make(), X))
    assert counter.frame_count == 1
    for _ in range(2):
        twin = make()
        twin.set_usage(columnwise=False)
        assert_same(fn(twin, X), quantized(other, X))
    assert_same(fn(make(), X), quantized(make(), X))
    assert counter.frame_count == 2


@compiles
def test_equal_ones_interchange_in_modules_and_closures() -> None:
    counter = Counter()
    module = Holder(mf.MXFP8Quantizer(E4M3))
    fn = counter.compile(module)
    fn(X)
    module.q = mf.MXFP8Quantizer(E4M3)
    fn(X)
    assert counter.frame_count == 1
    module.q = mf.MXFP8Quantizer(E5M2)
    assert_same(fn(X), mf.MXFP8Quantizer(E5M2).quantize(X))
    module.q = mf.MXFP8Quantizer(E5M2)
    fn(X)
    assert counter.frame_count == 2

    counter = Counter()
    q: Any = mf.MXFP8Quantizer(E4M3)
    fn = counter.compile(lambda x: q.quantize(x))
    for dtype, frames in ((E4M3, 1), (E4M3, 1), (E5M2, 2), (E5M2, 2)):
        q = mf.MXFP8Quantizer(dtype)
        assert fn(X)._quantizer.dtype is dtype
        assert counter.frame_count == frames


@compiles
def test_every_class_in_one_function() -> None:
    counter = Counter()
    fn = counter.compile(lambda q, x: quantized(q, x).dequantize())
    for _ in range(2):
        for make in CLASSES.values():
            assert torch.equal(fn(make(), X), quantized(make(), X).dequantize())
    assert counter.frame_count == len(CLASSES)


# ------------------------------------------------------------------------------------- freezing
def traced_as_argument(q: Any) -> None:
    compiled(lambda q, x: q.quantize(x))(q, X)


def traced_in_a_closure(q: Any) -> None:
    compiled(lambda x: q.quantize(x))(X)


def traced_as_module_attribute(q: Any) -> None:
    compiled(Holder(q))(X)


def traced_by_reading_an_attribute(q: Any) -> None:
    compiled(lambda q, x: x + 1 if q.rowwise_usage else x)(q, X)


def traced_by_reading_a_closures_attribute(q: Any) -> None:
    compiled(lambda x: x + 1 if q.internal else x)(X)


def traced_by_returning_it(q: Any) -> None:
    compiled(lambda q, x: (q, x + 1))(q, X)


def traced_with_another_backend(q: Any) -> None:
    compiled(lambda q, x: q.quantize(x).dequantize(), "eager")(q, X)


@compiles
@pytest.mark.parametrize("frozen_by", [
    traced_as_argument,
    traced_in_a_closure,
    traced_as_module_attribute,
    traced_by_reading_an_attribute,
    traced_by_reading_a_closures_attribute,
    traced_by_returning_it,
    traced_with_another_backend,
])  # fmt: skip
@pytest.mark.parametrize("make", [VALUES["mxfp8"], VALUES["hybrid"]], ids=["mxfp8", "hybrid"])
def test_tracing_freezes(make: Make, frozen_by: Any) -> None:
    q = make()
    frozen_by(q)
    for change in (
        lambda: q.set_usage(columnwise=False),
        lambda: setattr(q, "internal", True),
    ):
        with pytest.raises(RuntimeError, match=rf"{type(q).__name__}\..*copy\(\)"):
            change()
    assert q == make()
    twin = q.copy()
    twin.set_usage(columnwise=False)
    assert twin != q


@compiles
@classes
def test_every_class_freezes(make: Make) -> None:
    q = make()
    compiled(lambda q, x: x + 1 if q.rowwise_usage else x)(q, X)
    with pytest.raises(RuntimeError, match=r"copy\(\)"):
        q.set_usage(columnwise=False)


@compiles
def test_an_untraced_quantizer_is_not_frozen() -> None:
    used, unused = mf.MXFP8Quantizer(E4M3), mf.MXFP8Quantizer(E4M3)
    fn = compiled(lambda q, x: q.quantize(x))
    fn(used, X)
    fn(unused, X)  # met by a guard only
    unused.set_usage(columnwise=False)
    assert_same(fn(unused, X), unused.quantize(X))


@compiles
def test_a_change_inside_the_graph_is_an_error() -> None:
    def change(q: Any, x: Tensor) -> Any:
        q.set_usage(columnwise=False)
        return q.quantize(x)

    def assign(q: Any, x: Tensor) -> Any:
        q.internal = True
        return q.quantize(x)

    for fn in (change, assign):
        q = mf.MXFP8Quantizer(E4M3)
        with pytest.raises(Exception):  # noqa: B017  (each PyTorch has its own)
            compiled(fn)(q, X)
        assert q == mf.MXFP8Quantizer(E4M3)


@compiles
def test_the_frozen_flag_is_not_guarded_on() -> None:
    counter = Counter()
    fn = counter.compile(lambda q, x: q.create_metadata(x.shape, dtype=x.dtype)["is_tensor"])
    fn(mf.MXFP8Quantizer(E4M3), X)
    fn(mf.MXFP8Quantizer(E4M3), X)
    assert counter.frame_count <= 1


# -------------------------------------------------------------------------------- process groups
@pytest.fixture
def group() -> Iterator[Any]:
    with world.alone() as made:
        yield made


@compiles
def test_a_live_group_cannot_be_traced(group: Any) -> None:
    for attribute in ("amax_reduction_group", "_hidden"):
        q = mf.Float8CurrentScalingQuantizer(E4M3, "cpu", with_amax_reduction=True)
        setattr(q, attribute, group)
        with pytest.raises(Exception, match=rf"{attribute} holds a live ProcessGroup"):
            compiled(lambda q, x: q.quantize(x))(q, X)


@compiles
def test_reduction_over_the_world_is_traced_by_name(group: Any) -> None:
    q = mf.Float8CurrentScalingQuantizer(E4M3, "cpu", with_amax_reduction=True)
    made = compiled(lambda q, x: q.quantize(x))(q, X)
    expected = VALUES["current"]().quantize(X)
    assert torch.equal(made._data, expected._data)
    assert torch.equal(made._scale_inv, expected._scale_inv)
    assert not made._quantizer.with_amax_reduction


# ------------------------------------------------------------------------------------------ DType
@compiles
@pytest.mark.parametrize("make", [VALUES["mxfp8"], VALUES["nvfp4"], VALUES["current-e5m2-pow2"]])
def test_a_quantizers_dtype_is_returned(make: Make) -> None:
    q = make()
    dtype, _ = compiled(lambda q, x: (q.dtype, x + 1))(q, X)
    assert dtype is q.dtype


@compiles
def test_a_branch_on_a_quantizers_dtype() -> None:
    counter = Counter()
    by_equality = counter.compile(lambda q, x: x + 1 if q.dtype == DType.kFloat8E4M3 else x - 1)
    by_identity = counter.compile(lambda q, x: x + 1 if q.dtype is DType.kFloat8E4M3 else x - 1)
    for fn in (by_equality, by_identity):
        for dtype, expected in ((E4M3, X + 1), (E5M2, X - 1), (E4M3, X + 1)):
            assert torch.equal(fn(mf.MXFP8Quantizer(dtype), X), expected)
    assert counter.frame_count == 4


@compiles
def test_dtype_as_argument_closure_global_and_result() -> None:
    captured = DType.kBFloat16
    counter = Counter()
    passed = counter.compile(lambda d, x: (d, x * d, x + 1 if d == DType.kByte else x - 1))
    for d in (E4M3, E5M2, DType.kByte):
        same, scaled, shifted = passed(d, X)
        assert same is d
        assert torch.equal(scaled, X * int(d))
        assert torch.equal(shifted, X + 1 if d is DType.kByte else X - 1)
    closed, _ = compiled(lambda x: (captured, x + 1))(X)
    assert closed is captured
    named, made, cast, _ = compiled(
        lambda x: (DType.kFloat16, DType(8), DType.cast(x.dtype), x + 1)
    )(X)
    assert (named, made, cast) == (DType.kFloat16, E5M2, DType.kFloat32)
    assert all(type(d) is DType for d in (named, made, cast))


@compiles
def test_dtype_in_modules_tables_and_attributes() -> None:
    module = torch.nn.Module()
    module.d = E5M2
    factors = {E4M3: 2.0, E5M2: 4.0}

    def use(m: Any, x: Tensor) -> Any:
        return {"d": m.d, "name": m.d.name, "value": m.d.value}, x * factors[m.d]

    told, scaled = compiled(use)(module, X)
    assert told == {"d": E5M2, "name": "kFloat8E5M2", "value": 8}
    assert type(told["d"]) is DType
    assert torch.equal(scaled, X * 4)
    made = compiled(lambda d, x: x.to(mf.TE_DType_To_Torch[d]))(DType.kBFloat16, X)
    assert made.dtype == torch.bfloat16
