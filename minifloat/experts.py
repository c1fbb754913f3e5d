"""`Experts`: the parameters of linear layers side by side, apart or as one, and what they need.

The module and the fusible operation are two ways to run them; where the weights live, how they are
read together, where their gradients go, and how a state dict of one layout becomes that of the
other is here.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from . import apart, library, ragged, rates
from .autograd import later
from .core import grouped
from .core.linear import Call
from .inputs import holds
from .module import Module
from .parameters import (
    add_gradient,
    default_device,
    initialise,
    keep_values,
    main_grad,
    make_writable,
    quantized_parameter,
)
from .recipe.base import Recipe
from .recipe.delayed import DelayedState
from .recipe.plan import Plan, products
from .tensors import GroupedTensorStorage, QuantizedTensorStorage, as_parameter
from .tensors.grouped import as_group, group_like

__all__ = ["QUANTIZED", "Apart", "Experts", "Later", "Splits", "as_operands", "together", "watched"]

Splits = Sequence[int] | Tensor
QUANTIZED = (QuantizedTensorStorage, GroupedTensorStorage)
_NEVER = -(2**48)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Experts(Module):
    """Weights `weight0`, `weight1`, ... of shape (out, in), or one `weight` of shape (experts, out,
    in) with `single_grouped_weight`; biases alike.

    Weights that are apart lie side by side in one buffer, as long as nobody moves one of them: an
    eager call then reads them as they are.
    """

    num_gemms: int
    in_features: int
    out_features: int
    use_bias: bool
    single_grouped_weight: bool
    single_grouped_bias: bool
    parallel_mode: str | None = None
    sequence_parallel: bool = False
    wgrad_store: Any
    weight: Any
    bias: Any
    _init_recipe: Recipe | None
    _preserve: bool
    _init_method: Callable[[Tensor], Any]
    _tracker: tuple[Callable[[], Any] | None, str | None]

    # -------------------------------------------------------------------------------- parameters
    def _make_parameters(self, dtype: torch.dtype, device: torch.device) -> None:
        n, k, num = self.out_features, self.in_features, self.num_gemms
        whole = torch.empty(num, n, k, dtype=dtype, device=device)
        if self.single_grouped_weight:
            self.register_parameter("weight", nn.Parameter(whole))
        if self.single_grouped_bias:
            vectors = torch.zeros(num, n, dtype=dtype, device=device)
            self.register_parameter("bias", nn.Parameter(vectors))
        for kind, i in self._order():
            made = None
            if kind == "weight" and not self.single_grouped_weight:
                made = nn.Parameter(whole[i])
            elif kind == "bias" and self.use_bias and not self.single_grouped_bias:
                made = nn.Parameter(torch.zeros(n, dtype=dtype, device=device))
            self.register_parameter(f"{kind}{i}", made)
        self.reset_parameters(defer_init=device.type == "meta")

    def _order(self) -> list[tuple[str, int]]:
        """In which order parameters of single experts are registered."""
        return [(kind, i) for i in range(self.num_gemms) for kind in ("weight", "bias")]

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise; with `defer_init` only mark the parameters. Meta parameters are made real."""
        if not defer_init:
            make_writable(self, self._init_recipe is not None)
            self.delayed.materialise(default_device(None))
            self._join()
            with torch.no_grad():
                owners = self._weights()
                each = list(owners[0].unbind(0)) if self.single_grouped_weight else owners
                initialise(each, self._init_method, *self._tracker, self._where())
                for b in self._biases():
                    b.zero_()
            self.delayed.reset()
            if self._init_recipe is not None:
                self._quantize_parameters()
        self._mark_parameters()

    def _init_scales_by_history(self) -> bool:
        recipe = self._init_recipe
        return recipe is not None and recipe.plan(*self._roles(recipe)).delayed[1]

    def _quantize_parameters(self) -> None:
        assert self._init_recipe is not None
        roles = self.get_quantizer_roles(fwd=True, num_quantizers=3)

        def made(i: int, w: Tensor) -> nn.Parameter:
            state: Any = self.delayed
            mine = slice(i, i + 1)  # of delayed scaling's state
            live: Any = SimpleNamespace(
                scale_weight=state.scale_weight[mine], amax_weight=state.amax_weight[mine]
            )
            recipe = self._init_recipe
            assert recipe is not None
            return quantized_parameter(w, recipe, roles, live, self._preserve)

        if not self.single_grouped_weight:
            for i, w in enumerate(self._weights()):
                self.register_parameter(f"weight{i}", made(i, w))
            return
        values = self.weight.detach()
        group = group_like(made(0, values[0]), self.num_gemms)
        group.quantize(list(values.unbind(0)))
        self.register_parameter("weight", as_parameter(group, self.weight.requires_grad))
        if self._preserve:
            keep_values(self.weight, values.cpu())

    def make_grouped_weights(self, defer_init: bool = False) -> None:
        """Make weights that are apart the one parameter `weight`; nothing where they are one.

        An optimizer must be given the new parameter. Quantized weights with delayed scaling stay
        apart, with a warning. Nothing is initialised here, so `defer_init` changes nothing.
        """
        owners = self._weights()
        if self.single_grouped_weight:
            return
        self._check_alike(owners)
        if not isinstance(owners[0], QUANTIZED):
            whole: Any = nn.Parameter(together(owners))
        elif self._init_scales_by_history():
            warnings.warn(
                f"{self._where()}: make_grouped_weights: each quantized weight has a live scale of "
                "its own with delayed scaling, so the weights stay apart",
                UserWarning,
                stacklevel=2,
            )
            return
        else:
            if any(w.get_usages()["columnwise"] for w in owners):
                for w in owners:
                    w.update_usage(columnwise_usage=True)
            group = as_group(owners)
            if group is None:
                raise ValueError(
                    f"{self._where()}: make_grouped_weights: the experts' weights are not "
                    "quantized alike; members of one parameter are"
                )
            whole = as_parameter(group)
            kept: list[Any] = [getattr(w, "get_high_precision_init_val", _none)() for w in owners]
            if any(k is None for k in kept) and any(k is not None for k in kept):
                raise RuntimeError(
                    f"{self._where()}: make_grouped_weights: some of the weights have kept their "
                    "initial values and some have not; clear_high_precision_init_val() of all"
                )
            if kept[0] is not None:
                keep_values(whole, torch.stack(kept))
        whole.requires_grad_(any(w.requires_grad for w in owners))
        for i in range(self.num_gemms):
            self.register_parameter(f"weight{i}", None)
        self.register_parameter("weight", whole)
        self.single_grouped_weight = True
        self._mark_parameters()

    def _mark_parameters(self) -> None:
        """Attributes that Megatron-style optimizers and checkpoints look for."""
        for w in self._weights():
            w.tensor_model_parallel = True
            w.partition_dim = (1 if self.parallel_mode == "row" else 0) + (w.dim() - 2)
            w.partition_stride = 1
            if self.wgrad_store.enabled:
                w.skip_backward_post_hook = True  # its gradient comes with backward_dw
        for b in self._biases():
            if self.parallel_mode == "row":
                b.sequence_parallel = self.sequence_parallel
            elif self.parallel_mode == "column":
                b.tensor_model_parallel = True
                b.partition_dim, b.partition_stride = b.dim() - 1, 1

    def _weights(self) -> list[Any]:
        if self.single_grouped_weight:
            return [self.weight]
        return [getattr(self, f"weight{i}") for i in range(self.num_gemms)]

    def _biases(self) -> list[Any]:
        if not self.use_bias:
            return []
        if self.single_grouped_bias:
            return [self.bias]
        return [getattr(self, f"bias{i}") for i in range(self.num_gemms)]

    def _bias_matrix(self) -> Any:
        """The biases as one tensor `[experts, out]`, or None."""
        if not self.use_bias:
            return None
        return self.bias if self.single_grouped_bias else apart.joined(torch.stack, self._biases())

    # ---------------------------------------------------------------------------- side by side
    def _join(self) -> None:
        """Put weights that are apart back into one buffer; they stay the parameters they are."""
        if self.single_grouped_weight:
            return
        owners = self._weights()
        alike = len({(w.dtype, w.device, w.shape) for w in owners}) == 1
        if not alike or not _plain(owners) or apart.whole(owners) is not None:
            return
        with torch.no_grad():
            buffer = torch.stack([w.detach() for w in owners])
        for w, part in zip(owners, buffer.unbind(0), strict=True):
            w.data = part

    def _joined(self) -> bool:
        owners = [] if self.single_grouped_weight else self._weights()
        return bool(owners) and _plain(owners) and apart.whole(owners) is not None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        joined = self._joined()
        super()._apply(fn, recurse)
        if joined:
            self._join()
        return self

    def _scaled_weights(self) -> Iterable[tuple[Any, DelayedState, int]]:
        return [(w, self.delayed, i) for i, w in enumerate(self._weights())]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Parameters are copied one by one; the copies share a buffer where these do."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        if self._joined():
            made._join()
        return made

    # --------------------------------------------------------------------------- reading weights
    def _read(self, weight: Any, dtype: torch.dtype, plan: Plan) -> Any:
        """A parameter as this plan reads it."""
        if not isinstance(weight, QUANTIZED):
            # torch.autocast, where nothing quantizes
            return weight.to(dtype) if plan.w_row.layout[0] is None else weight
        if plan.w_row.layout[0] is not torch.uint8:
            if not torch.compiler.is_compiling():
                warnings.warn(
                    f"{self._where()}: a quantized weight outside autocast is dequantized",
                    UserWarning,
                    stacklevel=4,
                )
            return weight.dequantize()
        self._check_recipe(weight, plan)
        return weight

    def _check_recipe(self, weight: Any, plan: Plan) -> None:
        """Raise unless `plan` multiplies weights as this one is quantized, if it is, or none."""
        if not isinstance(weight, QUANTIZED) or plan.w_row.layout[0] is not torch.uint8:
            return
        one: Any = weight
        held = one._cast(False).format_name
        if held != plan.w_row.format_name:
            raise RuntimeError(
                f"Recipe mismatch for '{self._where()}': the weight was quantized as {held}, and "
                f"{plan.name} multiplies {plan.w_row.format_name}; use the recipe of "
                "quantized_model_init"
            )
        if plan.override:
            raise NotImplementedError(
                f"{self._where()}: backward_override={plan.override!r} with quantized weights; "
                "leave one of them out"
            )

    def _main_grads(self, owners: list[Any], argument: str) -> tuple[Any, bool, bool | None]:
        """(where the weights' gradients go, None for a frozen one among several, whether to
        overwrite it, dummy gradient: None, or whether it is zeros)."""
        where = self._where()
        found = [main_grad(w, where, argument) if w.requires_grad else None for w in owners]
        trained = [f for f in found if f is not None]
        _, overwrite, dummy = trained[0]
        if any([f[1:] != trained[0][1:] for f in trained]):  # noqa: C419  (2.11 traces lists)
            raise ValueError(
                f"{self._where()}: {argument}: the experts' weights differ in "
                "overwrite_main_grad, grad_added_to_main_grad or zero_out_wgrad; make them agree"
            )
        each = [None if f is None else f[0] for f in found]
        return each[0] if self.single_grouped_weight else tuple(each), overwrite, dummy

    # ------------------------------------------------------------------------------------ checks
    def _check_alike(self, owners: list[Any]) -> None:
        """Raise unless the experts' parameters have one dtype, and each the shape of its kind."""
        biases = self._biases()
        dtypes = {p.dtype for p in (*owners, *biases)}
        if len(dtypes) > 1:
            raise TypeError(
                f"{self._where()}: the parameters have dtypes {sorted(map(str, dtypes))}; all "
                "experts must have one"
            )
        n, k, num = self.out_features, self.in_features, self.num_gemms
        for kind, each, single, one in (
            ("weights", owners, self.single_grouped_weight, (n, k)),
            ("biases", biases, self.single_grouped_bias, (n,)),
        ):
            needed = (num, *one) if single else one
            if any([p.shape != needed for p in each]):  # noqa: C419  (2.11 traces lists)
                shapes = sorted({tuple(p.shape) for p in each})
                rule = "one parameter has" if single else "all experts must have one,"
                raise ValueError(f"{self._where()}: {kind}: got shapes {shapes}; {rule} {needed}")

    def _check_all_quantized(self, owners: list[Any]) -> None:
        """Raise where an expert's weight is quantized and another one's is not."""
        coded = [isinstance(w, QUANTIZED) for w in owners]
        if True in coded and False in coded:
            raise TypeError(
                f"{self._where()}: weight{coded.index(True)} is quantized and "
                f"weight{coded.index(False)} is not; all experts' weights must be, or none"
            )

    def _sizes(self, given: Any, rows: int, device: torch.device, argument: str) -> Tensor:
        """int64 on `device`. What the host knows is checked here, the rest on the device; nothing
        waits for it."""
        num, name = self.num_gemms, f"{self._where()}: {argument}"
        traced = torch.compiler.is_compiling()
        if not isinstance(given, Tensor):
            found = ragged.integers(given, name)
            ragged.check_sizes(found, num, rows, name)
            if traced:
                return torch.tensor(found, dtype=torch.int64, device=device)
            host = torch.tensor(found, dtype=torch.int64, device="cpu")  # whatever the default is
            return _uploaded(host, device, name)
        if given.dtype not in _INTEGERS or given.dim() != 1 or not holds(given.shape[0] == num):
            raise ValueError(
                f"{name}: got {given.dtype} of shape {tuple(given.shape)}; integers of shape "
                f"({num},) are needed, one for each expert"
            )
        if library.traced() or given.device.type != "cpu":  # fake ones cannot be read
            # A graph takes a length that it is told to be 1 for any length still.
            counts: Tensor = given.narrow(0, 0, num) if traced else given
            sizes = counts.to(device, torch.int64)
            if given.is_cuda or sizes.is_cuda:
                _assert_sizes(sizes, rows, name, traced)
            return sizes
        ragged.check_sizes(given.tolist(), num, rows, name)
        return _uploaded(given.to(torch.int64), device, name)

    def _check_buffer(self, name: str, buffer: Any, like: Tensor, shape: Sequence[int]) -> None:
        """Raise unless `buffer` can take what has `shape` and is otherwise like `like`."""
        if not isinstance(buffer, Tensor):
            raise TypeError(
                f"{self._where()}: {name}: got {type(buffer).__name__}; a tensor is needed"
            )
        given = (buffer.shape, buffer.dtype, buffer.device, buffer.requires_grad)
        if given != (shape, like.dtype, like.device, False):
            raise ValueError(
                f"{self._where()}: {name}: got {buffer.dtype} of shape {tuple(buffer.shape)} on "
                f"{buffer.device}, requires_grad={buffer.requires_grad}; {like.dtype} of shape "
                f"{tuple(shape)} on {like.device}, without a gradient, is needed"
            )

    def wgrad_choice(self, recipe: Recipe | None = None) -> rates.Choice:
        """Whether the weights' gradient by `recipe`, or by the one in force, multiplies codes or
        the bf16 values that hold them exactly, and why: a question of formats, features and
        device, and of no splits."""
        if recipe is None:
            recipe = self._in_force()
        plan = self._plan_of(recipe)
        weight = self._weights()[0]
        into = getattr(weight, "main_grad", None) if self._fuses_wgrad() else None
        return rates.choose(
            *products(plan)[2],
            self.out_features,
            self.in_features,
            weight.device,
            out_dtype=weight.dtype if into is None else into.dtype,
            into=into is not None and self.single_grouped_weight,
            fast=plan.fast[2],
        )

    def _fuses_wgrad(self) -> bool:
        """Whether the weights' gradient goes to `main_grad`."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------- later wgrad
    def need_backward_dw(self) -> bool:
        """Whether `backward_dw` has anything to do with this module."""
        return bool(self.wgrad_store.enabled)

    def backward_dw(self) -> None:
        """Compute the gradients that the oldest backward left, if any, and store them."""
        store = self.wgrad_store
        if not store.enabled or not store.queue:
            return
        dw = store.pop(self._where())
        if dw is not None:
            owners = self._weights()
            parts = (dw,) if self.single_grouped_weight else dw.unbind(0)
            for w, part in zip(owners, parts, strict=True):
                if w.requires_grad:
                    add_gradient(w, part)
        for hook in store.hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """`hook()` runs after each `backward_dw`."""
        self.wgrad_store.hooks.append(hook)

    # -------------------------------------------------------------------------------- state dict
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state = dict(state_dict)
        layouts = [("weight", self.single_grouped_weight)]
        if self.use_bias:
            layouts.append(("bias", self.single_grouped_bias))
        for kind, single in layouts:
            whole = f"{prefix}{kind}"
            each = [f"{prefix}{kind}{i}" for i in range(self.num_gemms)]
            self._convert(state, whole, each, single)
        super()._load_from_state_dict(state, prefix, *rest)

    def _convert(self, state: dict[str, Any], whole: str, each: list[str], single: bool) -> None:
        """Entries of the other layout into those of this one; redundant ones are dropped."""
        if single:
            if whole not in state and all(name in state for name in each):
                parts = [state[name] for name in each]
                shapes = sorted({tuple(p.shape) for p in parts})
                if len(shapes) > 1:
                    raise ValueError(
                        f"{self._where()}: {each[0]} to {each[-1]}: got shapes {shapes}; members "
                        f"of one parameter {whole} have one shape"
                    )
                group = as_group(parts)
                values = group is None
                state[whole] = torch.stack([_dense(p) for p in parts]) if values else group
            if whole in state:
                for name in each:
                    state.pop(name, None)
                if state[whole].dim() == 3 and self.single_grouped_bias and whole.endswith("bias"):
                    state[whole] = state[whole].squeeze(1)
            return
        held = state.pop(whole, None)
        if held is None or all(name in state for name in each):
            return
        if held.shape[0] != self.num_gemms:
            state[whole] = held  # reported as unexpected
            return
        if isinstance(held, GroupedTensorStorage):
            members = held.split_into_quantized_tensors()
        else:
            held = _dense(held)
            held = held.squeeze(1) if held.dim() == 3 and whole.endswith("bias") else held
            members = held.unbind(0)
        for name, member in zip(each, members, strict=True):
            state.setdefault(name, member)


def _none() -> None:
    return None


def _dense(t: Any) -> Any:
    """The values of an entry of a state dict."""
    return t.dequantize() if isinstance(t, QUANTIZED) else t


# -------------------------------------------------------------------------- weights that are apart
def together(weights: list[Any]) -> Tensor:
    """`[experts, out, in]` of weights `[out, in]`, without a gradient: where they lie side by side,
    as they lie; else a copy. A graph cannot ask where they lie, and copies."""
    if not library.traced() and _plain(weights):
        return apart.stacked(weights)
    with torch.no_grad():
        return apart.joined(torch.stack, [w.detach() for w in weights])


def _plain(weights: list[Any]) -> bool:
    """Whether each has memory of its own kind: no quantized tensor, no DTensor, no meta."""
    return all(type(w) in (nn.Parameter, Tensor) and not w.is_meta for w in weights)


def as_operands(weights: list[Any], call: Call) -> tuple[list[Any], Call]:
    """A weight of each expert, as `core.grouped` takes them, and the call it takes them with: one
    tensor, or several, of which it then reads copies that the call has.

    A graph casts weights that are apart as they lie, and so puts nothing together that is cast.
    """
    if isinstance(weights[0], QUANTIZED):
        return weights, call
    plan = call.plan
    coded = plan.w_row.layout[0] is torch.uint8 and plan.w_col.layout[0] is torch.uint8
    if library.traced() and coded and not plan.override and call.probe is None:
        if call.workspace is None:
            copies = grouped.weight_operands(weights, plan, call.live[1], call.needs[0])
            call = call._replace(workspace=copies)
        return weights, call
    return [together(weights)], call


class Apart:
    """Work for `autograd.run` on (sizes, x, bias or None, weight of each expert): that of
    `core.grouped`, whose one weight is read from them together, and its gradient given to each."""

    @staticmethod
    def kind(tensors: tuple[Any, ...]) -> Any:
        """How far apart the weights are, and whether the first one's storage has room for all of
        them: what reads them together does so as a view of the first."""
        weights = list(tensors[3:])
        if not _plain(weights):
            return None
        one, first = weights[0], weights[0].data_ptr()
        room = one.untyped_storage().nbytes() - one.storage_offset() * one.element_size()
        return len(weights) * one.nbytes <= room, *[w.data_ptr() - first for w in weights]

    @staticmethod
    def forward(call: Any, tensors: tuple[Any, ...]) -> tuple[Tensor, list[Any], Any]:
        sizes, x, bias, *weights = tensors
        work = grouped.GroupedLinear
        given, call = as_operands(weights, call)
        y, saved, _ = work.forward(call, (sizes, x, bias, *given))
        return y, [*saved, *watched(weights, saved)], (len(saved), len(weights))

    @staticmethod
    def backward(call: Any, note: Any, saved: list[Any], grads: tuple[Any, ...]) -> tuple[Any, ...]:
        count, num = note
        del saved[count:]
        _, dx, db, dw = grouped.GroupedLinear.backward(call, 1, saved, grads)
        dws = (None,) * num if dw is None else tuple(dw.unbind(0))
        return None, dx, db, *dws


def watched(weights: list[Any], saved: list[Any]) -> list[Any]:
    """What to save besides `saved`: the weights, if that holds a view of them. Such a view changes
    when any of them does, which autograd only sees of tensors that it is given."""
    if library.traced() or not _plain(weights):
        return []
    at = weights[0].untyped_storage().data_ptr()
    views = [t is not None and t.untyped_storage().data_ptr() == at for t in saved]
    return weights if True in views else []


class Later:
    """Products for the weights' gradients that backward left, first in, first out."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.queue: deque[Any] = deque()
        self.hooks: list[Callable[[], Any]] = []

    def put(self, *work: Any) -> None:
        self.queue.append(work)

    def pop(self, where: str) -> Any:
        """The oldest gradient; None where `main_grad` took it."""
        return later(grouped.wgrad, *self.queue.popleft())


# ------------------------------------------------------------------------------------------ sizes
def _uploaded(sizes: Tensor, device: torch.device, name: str) -> Tensor:
    """Sizes of the host on `device`; a copy from pinned memory waits for nothing."""
    if device.type == "meta":  # shapes alone, which the sizes themselves decide
        return sizes
    if device.type != "cuda":
        return sizes.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name}: sizes on the host inside the capture of a CUDA graph, which would repeat "
            "them for ever; pass a tensor on the device"
        )
    return sizes.pin_memory().to(device, non_blocking=True)


def _assert_sizes(sizes: Tensor, rows: int, name: str, traced: bool) -> None:
    """Let the device stop where sizes are not those of `rows` rows."""
    # A number in the text of a graph would make it a graph for that number.
    of = "the rows of the input" if traced else f"the {rows} rows of the input"
    # A negative size counts as one that no sum makes up for: a launch less than asking apart.
    total = torch.threshold(sizes, -1, _NEVER).sum()
    message = f"{name}: none may be negative, and together they must be {of}"
    torch._assert_async(total == rows, message)
