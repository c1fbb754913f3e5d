"""Values are interned, immutable and survive every way Python and FX copy an object."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from minifloat.formats import Cast
from minifloat.opaque import AVAILABLE, Value, is_registered, register


class Point(Value):
    _fields = ("x", "y", "tag")
    _defaults = (0, "p")

    def _derived(self) -> dict[str, Any]:
        if self.x < 0:
            raise ValueError(f"x: got {self.x}; it must be >= 0")
        return {"total": self.x + self.y}


class Point3(Point):
    """Same fields as its base, and another type."""


register(Point, real=("x", "y", "tag", "total", "_key", "__eq__", "replace"))


class Unregistered(Value):
    _fields = ("x",)


VALUES = [
    Point(1, 2, "q"),
    Point3(1, 2, "q"),
    Cast("mxfp8_e4m3"),
    Cast("fp8_e4m3", pow2=True, eps=2.0**-30),
    Cast("nvfp4", hadamard=0xD7E8, stochastic=True),
    Cast("high_precision", dtype=torch.bfloat16),
]


def equal_but_distinct(value: Value) -> Value:
    """A copy that bypasses interning, as tracing may make one."""
    twin = object.__new__(type(value))
    for key, field in vars(value).items():
        object.__setattr__(twin, key, field)
    return twin


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((1,), {}),
        ((1, 0), {}),
        ((1, 0, "p"), {}),
        ((), {"x": 1}),
        ((), {"tag": "p", "y": 0, "x": 1}),
        ((1,), {"tag": "p"}),
    ],
)
def test_every_spelling_is_one_object(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert Point(*args, **kwargs) is Point(1)


def test_derived_attributes() -> None:
    assert Point(1, 2).total == 3
    assert Point(1, 2).replace(y=5).total == 6


def test_interning_tells_types_and_fields_apart() -> None:
    assert Point(1) is not Point(2)
    assert Point(1) != Point(2)
    assert Point3(1) is not Point(1)
    assert Point3(1) != Point(1)
    assert len({Point(1), Point(1, 0), Point(2), Point3(1)}) == 3


def test_threads_get_one_object() -> None:
    with ThreadPoolExecutor(8) as pool:
        for i in range(1000, 1020):
            made = list(pool.map(lambda _, i=i: Point(i), range(16)))
            assert all(p is made[0] for p in made)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_fields(value: Value) -> None:
    assert value._key == (type(value), *(getattr(value, f) for f in value._fields))


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_equality_and_hash_by_content(value: Value) -> None:
    twin = equal_but_distinct(value)
    assert twin is not value
    assert twin == value
    assert (twin != value) is False
    assert hash(twin) == hash(value)
    assert value != value._key
    assert value != None  # noqa: E711


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_copies_are_the_object(value: Value) -> None:
    assert copy.copy(value) is value
    assert copy.deepcopy(value) is value
    assert copy.deepcopy({"a": [value]})["a"][0] is value
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(value, protocol)) is value


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_fx_repr_evaluates_to_the_object(value: Value) -> None:
    text, names = value.__fx_repr__()
    assert names == {type(value).__name__: type(value)}
    # FX-generated code always imports torch; a module among the names would break its caches.
    assert eval(text, {"torch": torch, **names}) is value


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_immutable(value: Value) -> None:
    before = dict(vars(value))
    for name in (value._fields[0], "_key", "new_attribute"):
        with pytest.raises(AttributeError, match="is a value"):
            setattr(value, name, 1)
        with pytest.raises(AttributeError, match="is a value"):
            delattr(value, name)
    assert vars(value) == before


def test_replace() -> None:
    p = Point(1, 2, "q")
    assert p.replace(y=5) is Point(1, 5, "q")
    assert p.replace(x=7, tag="r") is Point(7, 2, "r")
    assert p.replace() is p
    assert Point3(1).replace(y=1) is Point3(1, 1)
    assert p is Point(1, 2, "q")


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Point(), TypeError, "Point: the field 'x' is missing"),
        (lambda: Point(y=1), TypeError, "Point: the field 'x' is missing"),
        (lambda: Point(1, z=1), TypeError, "Point: no field named 'z'"),
        (lambda: Point(1, 2, "q", z=1), TypeError, "Point: no field named 'z'"),
        (lambda: Point(1, x=1), TypeError, "Point: .*'x'"),
        (lambda: Point(1, 2, "q", 4), TypeError, "Point"),
        (lambda: Point(1).replace(z=1), TypeError, "Point: no field named 'z'"),
        (lambda: Point([1]), TypeError, "unhashable"),
        (lambda: Point(-1), ValueError, "x: got -1"),
        (lambda: Point(1).replace(x=-1), ValueError, "x: got -1"),
    ],
)
def test_bad_fields(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_refused_value_is_not_interned() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="x: got -5"):
            Point(-5)
    assert (Point, -5, 0, "p") not in Value._interned


def test_registration() -> None:
    assert is_registered(Cast) == is_registered(Point) == AVAILABLE
    assert not is_registered(Unregistered)
    assert not is_registered(Point3), "a base's registration says nothing about a subclass"


@pytest.mark.skipif(not AVAILABLE, reason="this PyTorch has no opaque objects")
def test_compiled_code_reads_fields_and_guards_on_the_value() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def shift(t: torch.Tensor, p: Point) -> torch.Tensor:
        return t * p.x + p.y + p.total

    t = torch.ones(3)
    assert torch.equal(shift(t, Point(2, 3)), t * 10)
    assert torch.equal(shift(t, equal_but_distinct(Point(2, 3))), t * 10)
    assert counter.frame_count == 1
    assert torch.equal(shift(t, Point(2, 4)), t * 12)
    assert counter.frame_count == 2
