"""What a layer says about its speed, once: that its recipe runs emulated, that its shape is slow.

Both go to the logger "minifloat" as warnings, which Python prints unless told otherwise, and not
through `warnings`: a test suite that turns those into errors goes on.

The speed is a roofline (of an H200, in forward and backward together): three products of T K N
multiplications each, and casts that move c bytes for each element of input, weight and gradient,

    time / time of bf16 = r + 30.6 (c_input / N + c_weight / T + c_gradient / K)

where r is the time of a product over bf16's, and 30.6 = P16 / (6 BW) elements. What launching costs
and what kernels do not reach is not in it, so it errs in favour of the recipe.
"""

from __future__ import annotations

import logging

import torch

from .. import env
from ..formats import Cast, Scale
from ..native import Backend, backend
from ..recipe.plan import Plan, products

__all__ = ["SETTLED", "advise", "served", "speed"]

LOG = logging.getLogger("minifloat")
HOPPER = 90  # whose numbers these are
ELEMENTS = 30.6  # P16 / (6 BW)
TENSORWISE, BLOCKWISE = 0.545, 0.7  # time of a native product over bf16's
BF16 = 2.0  # bytes

# (id(plan), device) with nothing more to say. Plans are interned: an id is one plan's for ever.
SETTLED: set[tuple[int, torch.device]] = set()
_said: set[tuple[object, ...]] = set()


def advise(
    module_name: str,
    plan: Plan,
    tokens: int,
    in_features: int,
    out_features: int,
    device: torch.device,
) -> None:
    """Say once what is to be said about a layer that runs `plan` on `device`; eager only."""
    key = (id(plan), device)
    if key in SETTLED or torch.compiler.is_compiling():
        return
    found = served(plan, device)
    if found.name == "emulated":
        _once((plan.name, found.why), f"{plan.name} runs emulated: {found.why}")
    known = env.capability(device) in (None, HOPPER)  # without a GPU: what an H200 would do
    if not (known and env.advise()) or not _quantizes(plan):
        SETTLED.add(key)
        return
    gain = speed(plan, tokens, in_features, out_features)
    if gain < 1.0:
        tokens_help = speed(plan, 1 << 40, in_features, out_features) > 1.0
        _once(
            (plan.name, in_features, out_features),
            f"{module_name}: {in_features} to {out_features} features, {tokens} tokens: "
            f"{plan.name} runs at {gain:.2f} times the speed of bf16 at best (an H200's roofline); "
            "run this layer outside autocast" + ", or on more tokens at once" * tokens_help,
        )


def served(plan: Plan, device: torch.device) -> Backend:
    """What multiplies the worst served of the three products, and why."""
    found = [backend(a, b, device) for a, b in products(plan)]
    return max(found, key=lambda b: ("native", "cpu", "emulated").index(b.name))


def speed(plan: Plan, tokens: int, in_features: int, out_features: int) -> float:
    """How many times as fast as bf16 a layer is on an H200, at best."""
    if not (tokens and in_features and out_features):
        return 1.0
    pairs = products(plan)
    x, w, g = plan.delayed[0], plan.delayed[1], plan.delayed[3]
    fprop, dgrad, wgrad = ([_written(cast, pair) for cast in pair] for pair in pairs)
    time = sum(_time(pair) for pair in pairs) / 3 + ELEMENTS * (
        _moved((pairs[0].a, pairs[2].b), x, fprop[0] + wgrad[1]) / out_features
        + _moved((pairs[0].b, pairs[1].b), w, fprop[1] + dgrad[1]) / tokens
        + _moved((pairs[1].a, pairs[2].a), g, dgrad[0] + wgrad[0]) / in_features
    )
    return 1.0 / time


def _quantizes(plan: Plan) -> bool:
    return any(cast.format.element is not None for pair in products(plan) for cast in pair)


def _native(pair: tuple[Cast, Cast]) -> bool:
    return all(cast.native[0] <= HOPPER < cast.native[1] for cast in pair)


def _time(pair: tuple[Cast, Cast]) -> float:
    """Of a product, over bf16's."""
    if not _native(pair):
        return 1.0
    return BLOCKWISE if any(cast.tiled for cast in pair) else TENSORWISE


def _written(cast: Cast, pair: tuple[Cast, Cast]) -> float:
    """Bytes per element that a cast writes: codes and scales, or the values of an emulated one."""
    fmt = cast.format
    if fmt.element is None:
        return 0.0
    if not _native(pair):
        return BF16
    scales = 4 / 128 if fmt.tile == (1, 128) else 0.0
    return fmt.element.bits / 8 + scales


def _moved(copies: tuple[Cast, Cast], delayed: bool, written: float) -> float:
    """Bytes per element: one read for both copies, and one for a scale of the whole tensor."""
    coded = [cast.format for cast in copies if cast.format.element is not None]
    if not coded:
        return 0.0
    whole = any(f.two_level or (f.scale is Scale.F32 and f.tile is None) for f in coded)
    return BF16 * (2 if whole and not delayed else 1) + written


def _once(key: tuple[object, ...], text: str) -> None:
    if key not in _said:
        _said.add(key)
        LOG.warning("minifloat: %s", text)
