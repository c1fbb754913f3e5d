"""What may be cast, checked before anything is written, and the bits that it is rounded by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .formats import Cast
from .layout import shares_scale

__all__ = [
    "INPUT_DTYPES",
    "autocast_dtype",
    "check_codes",
    "check_input",
    "check_nominal",
    "check_noop",
    "check_seed",
    "check_usage",
    "check_whole",
    "draw_seed",
    "holds",
    "known",
    "known_equal",
]

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What torch.autocast computes in where `x` is; None: it is off there, or knows no such device,
    as the meta device."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def check_input(x: Tensor, row: Cast | None, col: Cast | None, name: str = "tensor") -> None:
    """Raise for an input that no format can hold, before anything is written."""
    if type(x) is not Tensor:
        check_whole(x, name)
    if x.dtype not in INPUT_DTYPES:
        allowed = ", ".join(str(d) for d in INPUT_DTYPES)
        raise TypeError(f"{name}: got dtype {x.dtype}; allowed: {allowed}")
    check_usage(row is not None, col is not None)
    differ = row is not None and col is not None and row != col
    if differ and all(c is not None and shares_scale(c) for c in (row, col)):
        raise ValueError(
            f"row, col: got {row!r} and {col!r}; copies with one scale must be cast alike"
        )
    for cast in (row, col):
        if cast is not None and cast.tiled and x.dim() == 0:
            raise ValueError(
                f"{name}: got a 0-d tensor; {cast.format_name} scales blocks of a tensor with at "
                "least one dim: reshape it to (1,)"
            )


def holds(condition: bool) -> bool:
    """`condition`, of sizes. Where data decides it, which a graph does not know while it is traced,
    True: the graph checks it as it runs."""
    if not torch.compiler.is_compiling():
        return condition
    if not torch.fx.experimental.symbolic_shapes.guard_or_true(condition):
        return False
    torch._check(condition)  # type: ignore[no-untyped-call]
    return True


def known(condition: bool) -> bool:
    """`condition`, of sizes. Where data decides it, which a graph does not know while it is traced,
    False: what follows has to be right either way."""
    if not torch.compiler.is_compiling():
        return condition
    return torch.fx.experimental.symbolic_shapes.guard_or_false(condition)


def known_equal(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether as many sizes are known to be equal, one by one."""
    return all([known(m == n) for m, n in zip(a, b, strict=True)])  # noqa: C419  (2.11 traces lists)


def check_whole(x: Tensor, name: str) -> None:
    """Raise for what is no tensor, and for what is spread over ranks: codes would be of the part
    that is here."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}; a torch.Tensor is needed")
    if hasattr(x, "_local_tensor"):
        raise TypeError(
            f"{name}: got a {type(x).__name__}, whose parts are not cast together; pass "
            "to_local() or full_tensor() of it. Layers split their weights by parallel_mode= and "
            "tp_group=, and FSDP2 gathers its own before forward"
        )


def check_usage(row: bool, col: bool) -> None:
    """Raise where no copy is asked for."""
    if not (row or col):
        raise ValueError(
            "usage: neither rowwise nor columnwise was asked for; ask for at least one"
        )


def check_nominal(dtype: torch.dtype | None) -> None:
    """Raise for a dtype that no quantized tensor can stand for."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: got {dtype!r}; a floating torch dtype is needed")


def check_noop(flag: Tensor | None) -> None:
    """Raise for what is no flag on the device: one number, 1.0 to skip."""
    if flag is None:
        return
    if not isinstance(flag, Tensor):
        raise TypeError(f"noop_flag: got {type(flag).__name__}; a torch.Tensor is needed")
    if flag.numel() != 1:
        raise ValueError(f"noop_flag: got shape {tuple(flag.shape)}; one element is needed")


def check_codes(data: Tensor, dtype: torch.dtype | None) -> None:
    """Raise unless `data` holds codes: bytes, or the element's own torch dtype."""
    if not isinstance(data, Tensor):
        raise TypeError(f"data: got {type(data).__name__}; a torch.Tensor is needed")
    if data.dtype not in (torch.uint8, dtype):
        raise TypeError(f"data: got dtype {data.dtype}; codes are torch.uint8 or {dtype}")


def check_seed(seed: Tensor | None) -> None:
    """Raise for what is no `[seed, offset]`."""
    if seed is None:
        return
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or tuple(seed.shape) != (2,):
        given = f"{seed.dtype} {tuple(seed.shape)}" if isinstance(seed, Tensor) else repr(seed)
        raise ValueError(f"seed: got {given}; an int64 tensor [seed, offset] is needed")


def draw_seed(device: torch.device) -> Tensor:
    """`[seed, offset]` for one stochastic cast, of PyTorch's generator for the device."""
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)
