"""What recipes are made of: `Format`, `MMParams`, `QParams`."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import formats
from ..formats import Element
from ..opaque import Value, register
from .checks import RecipeError, flag, number

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Format", "Limits", "MMParams", "QParams", "Record"]


class Limits(NamedTuple):
    """The largest value a format holds, in forward and in backward."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Element type of the operands; HYBRID is E4M3 in forward and E5M2 in backward."""

    E2M1 = Limits(formats.E2M1.max, formats.E2M1.max)
    E4M3 = Limits(formats.E4M3.max, formats.E4M3.max)
    E5M2 = Limits(formats.E5M2.max, formats.E5M2.max)
    HYBRID = Limits(formats.E4M3.max, formats.E5M2.max)

    def element(self, *, forward: bool) -> Element:
        """The element of tensors of forward, or of backward."""
        if self is Format.HYBRID:
            return formats.E4M3 if forward else formats.E5M2
        return {e.name: e for e in formats.ELEMENTS.values()}[self.name.lower()]

    def __repr__(self) -> str:
        return f"Format.{self.name}"


class Record(Value):
    """A value that prints as a call with keywords, of what differs from the defaults."""

    def _given(self) -> dict[str, Any]:
        """The fields as they were given."""
        return dict(zip(self._fields, self._key[1:], strict=True))

    def __repr__(self) -> str:
        names = self._fields[len(self._fields) - len(self._defaults) :]
        defaults = dict(zip(names, self._defaults, strict=True))
        given = self._given().items()
        shown = [f"{k}={v!r}" for k, v in given if k not in defaults or v != defaults[k]]
        return f"{type(self).__name__}({', '.join(shown)})"


class MMParams(Record):
    """How a matrix product accumulates: split (accurate), or fast."""

    use_split_accumulator: bool
    _fields = ("use_split_accumulator",)
    _defaults = (True,)

    def __new__(cls, use_split_accumulator: bool = True) -> Self:
        return super().__new__(cls, flag(use_split_accumulator, "use_split_accumulator"))

    def to_dict(self) -> dict[str, Any]:
        return self._given()


class QParams(Record):
    """How one kind of tensor is quantized; a recipe takes only what its format has."""

    power_2_scale: bool
    amax_epsilon: float
    random_hadamard_transform: bool
    stochastic_rounding: bool
    fp4_2d_quantization: bool
    _fields = (
        "power_2_scale", "amax_epsilon", "random_hadamard_transform", "stochastic_rounding",
        "fp4_2d_quantization",
    )  # fmt: skip
    _defaults = (False, 0.0, False, False, False)

    def __new__(
        cls,
        power_2_scale: bool = False,
        amax_epsilon: float = 0.0,
        random_hadamard_transform: bool = False,
        stochastic_rounding: bool = False,
        fp4_2d_quantization: bool = False,
    ) -> Self:
        epsilon = float(number(amax_epsilon, "amax_epsilon"))
        if epsilon < 0:
            raise RecipeError(f"amax_epsilon: got {amax_epsilon}; it must be >= 0")
        return super().__new__(
            cls,
            flag(power_2_scale, "power_2_scale"),
            epsilon,
            flag(random_hadamard_transform, "random_hadamard_transform"),
            flag(stochastic_rounding, "stochastic_rounding"),
            flag(fp4_2d_quantization, "fp4_2d_quantization"),
        )

    def to_dict(self) -> dict[str, Any]:
        return self._given()


for _cls in (MMParams, QParams):
    register(_cls, real=(*_cls._fields, "_key", "__eq__", "replace", "to_dict"))
