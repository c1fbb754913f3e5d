"""Two kernels in one launch, their programs side by side.

A cast of a small matrix takes 3 to 5 us, most of it the beginning and the end of a launch, in which
the device is not full. Of two that do not wait for each other the second one's programs follow the
first one's in one grid. The kernel that does both is written from the text of the two: a program's
number, and how many there are, are arguments there. The second one runs in as many warps as the
first, which sums alone would tell; nothing else differs, and so no bits do.
"""

from __future__ import annotations

import inspect
import linecache
import re
import textwrap
from collections.abc import Hashable, Iterator
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources, PTXASError

from ..formats import E4M3, E5M2, Cast
from .variant import Config, Launch, Variant

__all__ = ["beside", "compiled", "joined", "variants"]

NUMBER, COUNT = "tl.program_id(0)", "tl.num_programs(0)"
FIRST, SECOND = "a_", "b_"  # how arguments of the two begin


def beside(a: Launch, b: Launch) -> Launch | None:
    """Both in one launch, the programs of `a` first; its arguments are `programs of a, *a, *b`.

    None where they have no such kernel: limits of registers are those of one kernel, and another
    number of warps, as the second one may get, adds up in another order.
    """
    configs = (a.config, b.config)
    if any(c.registers is not None for c in configs) or min(a.programs, b.programs) < 1:
        return None
    if not (_numbers_itself(a.fn) and _numbers_itself(b.fn)):
        return None
    if a.config.warps != b.config.warps and _adds_up(b.fn):
        return None
    config = Config(1, 1, a.config.warps, max(c.stages for c in configs))
    args: dict[str, Any] = {"programs": a.programs}
    for prefix, one in ((FIRST, a), (SECOND, b)):
        args |= {prefix + name: one.args[name] for name in one.fn.arg_names}
    return Launch(joined(a.fn, b.fn), a.programs + b.programs, args, config)


# What Triton made, by all that it depends on. Read from the disk again it would be loaded again,
# for each program that launches it, and nothing unloads a copy.
_COMPILED: dict[Hashable, Any] = {}


def compiled(launch: Launch) -> Any:
    """What Triton makes of a launch on the current device, ready to be launched; None where that
    has too little shared memory, where the two assemble alone and together do not, or where what is
    new cannot be stored: each of the two may come from a cache that is read-only."""
    variant = Variant.of("", launch)
    tables = (variant.signature, variant.constants, variant.config.options)
    known = (variant.fn, variant.divisible, *(tuple(t.items()) for t in tables))
    of = (triton.runtime.driver.active.get_current_device(), *known)
    if of not in _COMPILED:
        _COMPILED[of] = _compile(variant)
    return _COMPILED[of]


def _compile(variant: Variant) -> Any:
    source = triton.compiler.ASTSource(
        fn=variant.fn,
        signature=variant.signature,
        constexprs=variant.constants,
        attrs=variant.attrs,
    )
    target = triton.runtime.driver.active.get_current_target()
    try:
        made = triton.compile(source, target=target, options=variant.config.options)
        made.run  # noqa: B018  (loads it)
    except (OutOfResources, PTXASError, OSError):
        return None
    return made


@cache
def joined(a: Any, b: Any) -> Any:
    """The kernel whose programs are those of `a`, then those of `b`."""
    parts = {FIRST: a, SECOND: b}
    params = [p + _parameter(q) for p, fn in parts.items() for q in fn.params]
    calls = {p: ", ".join(p + q.name for q in fn.params) for p, fn in parts.items()}
    plain = [p + q.name for p, fn in parts.items() for q in fn.params if q.do_not_specialize]
    text = f"""\
def joined_kernel(programs, {", ".join(params)}):
    i_p = tl.program_id(0)
    if i_p < programs:
        first(i_p, programs, {calls[FIRST]})
    else:
        second(i_p - programs, tl.num_programs(0) - programs, {calls[SECOND]})
"""
    scope = {"__name__": __name__, "tl": tl, "first": part(a), "second": part(b)}
    name = f"{a.fn.__module__}.{a.fn.__name__} beside {b.fn.__module__}.{b.fn.__name__}"
    return _jit(text, name, scope, do_not_specialize=["programs", *plain])


@cache
def part(fn: Any) -> Any:
    """A kernel as a function of a program's number and of how many programs there are."""
    text = textwrap.dedent(inspect.getsource(fn.fn))
    text = text[text.index("\ndef ") + 1 :]
    text = text.replace(NUMBER, "i_program").replace(COUNT, "n_programs")
    text = re.sub(r"\Adef (\w+)\(", r"def \1_part(i_program, n_programs, ", text)
    scope = dict(fn.fn.__globals__)
    return _jit(text, f"part of {fn.fn.__module__}.{fn.fn.__name__}", scope)


def _jit(text: str, name: str, scope: dict[str, Any], **options: Any) -> Any:
    """The one function of a text, known by its name to whoever reads source: Triton does."""
    file = f"<minifloat {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    known = set(scope)
    exec(compile(text, file, "exec"), scope)
    (made,) = (v for k, v in scope.items() if k not in known and k != "__builtins__")
    return triton.jit(made, **options) if options else triton.jit(made)


def _parameter(p: Any) -> str:
    return f"{p.name}: tl.constexpr" if p.is_constexpr else str(p.name)


@cache
def _numbers_itself(fn: Any) -> bool:
    """Whether the kernel's own text alone asks for a program's number: what it calls does not."""
    if not isinstance(fn, triton.JITFunction):
        return False
    asks = ("program_id(" in f.src or "num_programs(" in f.src for f in _family(fn) if f is not fn)
    return fn.src.count("program_id(") == fn.src.count(NUMBER) and not any(asks)


@cache
def _adds_up(fn: Any) -> bool:
    """Whether the numbers of a tile are added up, by the kernel or by what it calls."""
    return any("tl.sum(" in f.src for f in _family(fn))


def _family(fn: Any) -> set[Any]:
    """A function and all that it calls."""
    called, seen = _callees(fn), {fn}
    while called:
        one = called.pop()
        if one not in seen:
            seen.add(one)
            called += _callees(one)
    return seen


def _callees(fn: Any) -> list[Any]:
    """Functions by the names in a function's code; attributes of those names are taken for them."""
    found = (fn.fn.__globals__.get(name) for name in fn.fn.__code__.co_names)
    return [f for f in found if isinstance(f, triton.JITFunction)]


def variants() -> Iterator[Variant]:
    """Casts of a layer's input and weight, and of its gradient and weight."""
    from . import blocks, tensorwise

    def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    bits, one = make(torch.int32, 1), make(torch.float32, 1)
    code, value = make(torch.uint8, 1), make(torch.bfloat16, 1)
    lines, square, mx, mx_square = (
        Cast(name)
        for name in ("fp8_e4m3_1x128", "fp8_e4m3_128x128", "mxfp8_e4m3", "mxfp8_e4m3_32x32")
    )
    none = (None, None, None, None)
    for tag, m, k, n in (("whole", 2048, 768, 3072), ("partial", 2047, 760, 3064)):
        x, w, g = (make(torch.bfloat16, *s) for s in ((m, k), (n, k), (m, n)))
        live: dict[str, Any] = {"source": one, "scaled": True}
        found: dict[str, Any] = {"source": bits, "n": 5}
        pairs = {
            "amax": (tensorwise._amax_launch(x), tensorwise._amax_launch(w)),
            "scaled_forward": (
                tensorwise._cast(x, E4M3, code, code, one, amax=bits, **live),
                tensorwise._cast(w, E4M3, code, None, one, amax=bits, kept=one, **live),
            ),
            "scaled_backward": (
                tensorwise._cast(g, E5M2, code, code, one, amax=bits, **live),
                tensorwise._cast(w, E4M3, None, code, one, **live),
            ),
            "current_forward": (
                tensorwise._cast(x, E4M3, code, code, one, **found),
                tensorwise._cast(w, E4M3, code, None, one, kept=one, **found),
            ),
            "1x128_forward": (
                blocks._f32(x, lines, code, one, code, one),
                blocks._f32(w, square, code, one, None, None),
            ),
            "1x128_backward": (
                blocks._f32(g, lines, code, one, code, one),
                blocks._f32(w, square, None, None, code, one),
            ),
            "mxfp8_forward": (
                blocks._e8m0(x, mx, None, None, code, code, row_out=value),
                blocks._e8m0(w, mx_square, *none, row_out=value),
            ),
        }
        for name, pair in pairs.items():
            both = beside(*pair)
            assert both is not None
            yield Variant.of(f"{name}_{tag}", both)
