"""Producers: what computes a matrix that is cast as it is computed, as values.

    activation   y = f(g) * (l + offset)   of h = [g | l]; ungated: y = f(h)
    gradient     dh = [dy * f'(g) * (l + offset) | dy * f(g)]; ungated: dh = dy * f'(h)
    norm         y = (x - mean) * rstd * gamma + beta

With a limit, g is clamped from above and l from both sides first. Which tensors a producer reads,
and in which order, is `producers.Lazy`'s business; how it computes, `reference`'s.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, NamedTuple

from .opaque import Value, register

__all__ = [
    "ACTIVATIONS",
    "CUBIC",
    "GELU",
    "Activation",
    "Kind",
    "Producer",
    "activation",
    "columns",
    "norm",
]

# gelu(x) = x * sigmoid(GELU * (x + CUBIC * x^3))
GELU = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715


class Kind(Enum):
    """What a producer computes."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"  # of an activation
    NORM = "norm"


class Activation(NamedTuple):
    """The numbers of one activation; `function` is a row of `reference.FUNCTIONS`."""

    function: str
    gated: bool
    alpha: float = 1.0  # swish: x * sigmoid(alpha * x)
    limit: float = math.inf
    offset: float = 0.0


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation("gelu", False),
    "geglu": Activation("gelu", True),
    "glu": Activation("sigmoid", True),
    "qgelu": Activation("swish", False, 1.702),
    "qgeglu": Activation("swish", True, 1.702),
    "relu": Activation("relu", False),
    "reglu": Activation("relu", True),
    "srelu": Activation("srelu", False),
    "sreglu": Activation("srelu", True),
    "silu": Activation("swish", False),
    "swiglu": Activation("swish", True),
    "clamped_swiglu": Activation("swish", True, 1.702, 7.0, 1.0),
}


class Producer(Value):
    """One of the module's equations with its numbers.

    `interleave` 0: h is [g | l]; n: blocks of n columns of g and of l take turns. `zero_centered`
    norms multiply by 1 + gamma.
    """

    kind: Kind
    function: str
    gated: bool
    alpha: float
    limit: float
    offset: float
    interleave: int
    zero_centered: bool
    # Derived: the gradient's producer of an activation is this one with `differentiates`.
    differentiates: bool
    normalizes: bool
    _fields = (
        "kind", "function", "gated", "alpha", "limit", "offset", "interleave", "zero_centered",
    )  # fmt: skip
    _defaults = ("", False, 1.0, math.inf, 0.0, 0, False)

    def _derived(self) -> dict[str, Any]:
        for name in ("alpha", "offset"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}: got {getattr(self, name)!r}; it must be finite")
        if not self.limit > 0:
            raise ValueError(f"limit: got {self.limit!r}; it must be > 0")
        if self.interleave < 0 or (self.interleave and not self.gated):
            raise ValueError(
                f"glu_interleave_size: got {self.interleave!r}; a positive number of columns, for "
                "gated activations"
            )
        return {
            "differentiates": self.kind is Kind.GRADIENT,
            "normalizes": self.kind is Kind.NORM,
        }

    def gradient(self) -> Producer:
        """The producer of an activation's gradient."""
        return self.replace(kind=Kind.GRADIENT)

    def activation(self) -> Producer:
        """The producer of the activation whose gradient this one is."""
        return self.replace(kind=Kind.ACTIVATION)


register(
    Producer,
    real=(
        *Producer._fields,
        "differentiates",
        "normalizes",
        "gradient",
        "activation",
        "_key",
        "__eq__",
        "replace",
    ),
)


def columns(p: Producer, width: int) -> int:
    """Columns of y for an h of `width` columns; ValueError where there is no such h."""
    if not p.gated:
        return width
    step = 2 * max(p.interleave, 1)
    if width % step != 0:
        halves = f", in blocks of {p.interleave}" if p.interleave else ""
        raise ValueError(
            f"h: got {width} columns; a gated activation splits them into two halves{halves}, "
            f"so a multiple of {step} is needed"
        )
    return width // 2


def activation(
    name: str,
    *,
    limit: float | None = None,
    alpha: float | None = None,
    glu_linear_offset: float | None = None,
    glu_interleave_size: int | None = None,
) -> Producer:
    """The producer of the activation `name`; numbers left out are its own."""
    found = ACTIVATIONS.get(name)
    if found is None:
        raise ValueError(f"activation: got {name!r}; allowed: {', '.join(ACTIVATIONS)}")
    given = {"limit": limit, "alpha": alpha, "offset": glu_linear_offset}
    numbers = {k: float(v) for k, v in given.items() if v is not None}
    if numbers and math.isinf(found.limit):
        raise ValueError(
            f"limit, alpha, glu_linear_offset: {name!r} takes none; they belong to "
            f"{', '.join(n for n, a in ACTIVATIONS.items() if not math.isinf(a.limit))}"
        )
    size = glu_interleave_size
    if size is not None and (not isinstance(size, int) or size <= 0):
        raise ValueError(
            f"glu_interleave_size: got {size!r}; a positive number of columns is needed, or None"
        )
    made = Producer(Kind.ACTIVATION, *found, interleave=size or 0)
    return made.replace(**numbers)


# As in `env`: asked while tracing, the answer is a constant of the graph.
activation._dynamo_marked_constant = True  # type: ignore[attr-defined]

# A constant that is made while tracing is none to `torch.compiler.nested_compile_region`.
_NORM, _CENTERED = Producer(Kind.NORM), Producer(Kind.NORM, zero_centered=True)


def norm(zero_centered: bool = False) -> Producer:
    """The producer of LayerNorm's and RMSNorm's output."""
    return _CENTERED if zero_centered else _NORM
