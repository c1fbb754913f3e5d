"""The two forward APIs: what a class may define, and how each is run."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import minifloat
from minifloat import ops
from minifloat.ops import BasicOperation, FusedOperation, OperationContext
from minifloat.ops.basic.values import plain

from .cases import CASES, RECIPES, Case, inputs, made

PAIRS = {
    "op": ("op_forward_compute", "op_forward_save_ctx"),
    "fuser": ("fuser_forward_compute", "fuser_forward_save_ctx"),
}
BASES = {"op": BasicOperation, "fuser": FusedOperation}


def method(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise AssertionError("not called")


def define(name: str, base: type[Any], *methods: str) -> Any:
    return type(name, (base,), dict.fromkeys(methods, method))


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("half", [0, 1])
def test_half_a_pair_is_refused(kind: str, half: int) -> None:
    have, lack = PAIRS[kind][half], PAIRS[kind][1 - half]
    for base in (BasicOperation, FusedOperation) if kind == "fuser" else (BasicOperation,):
        with pytest.raises(TypeError, match=f"Half: defines {have} without {lack}"):
            define("Half", base, have)


@pytest.mark.parametrize("legacy", ["op_forward", "fuser_forward"])
@pytest.mark.parametrize("kind", PAIRS)
def test_both_styles_are_refused(kind: str, legacy: str) -> None:
    for halves in (PAIRS[kind], PAIRS[kind][:1], PAIRS[kind][1:]):
        with pytest.raises(TypeError, match=f"Both: defines both {legacy} and {sorted(halves)[0]}"):
            define("Both", BasicOperation, legacy, *halves)


@pytest.mark.parametrize("kind", PAIRS)
def test_the_flag_follows_the_class(kind: str) -> None:
    base, legacy = BASES[kind], f"{kind}_forward"
    split = define("Split", base, *PAIRS[kind])
    assert split._use_split_forward
    assert not define("Old", base, legacy)._use_split_forward
    assert define("Inherits", split)._use_split_forward
    assert define("OverridesHalf", split, PAIRS[kind][0])._use_split_forward
    back = define("Back", split, legacy)
    assert not back._use_split_forward
    assert not define("StillBack", back)._use_split_forward
    assert define("Again", back, *PAIRS[kind])._use_split_forward
    with pytest.raises(TypeError, match=f"Half: defines {PAIRS[kind][0]} without"):
        define("Half", back, PAIRS[kind][0])


def test_a_mixin_counts_as_the_class_that_uses_it() -> None:
    half = type("Mixin", (), {"op_forward_compute": method})
    with pytest.raises(TypeError, match="User: defines op_forward_compute without op_forward_save"):
        type("User", (half, BasicOperation), {})
    whole = type("Mixin", (), dict.fromkeys(PAIRS["op"], method))
    assert type("User", (whole, BasicOperation), {})._use_split_forward  # type: ignore[attr-defined]


def test_every_built_in_operation_is_split_and_says_its_kwargs() -> None:
    found = [getattr(ops, name) for name in ops.__all__]
    basic = [c for c in found if isinstance(c, type) and issubclass(c, BasicOperation)]
    assert len(basic) > 25
    for cls in basic:
        if cls is not BasicOperation:
            kwargs = ("output", "grad_input") if cls is ops.GroupedLinear else ()
            assert cls._use_split_forward and cls.forward_keywords == kwargs, cls


class Square(BasicOperation):
    """Split."""

    def op_forward_compute(
        self, input_: Any, *, requires_grad: bool, power: float = 2.0, **kwargs: Any
    ) -> tuple[Any, Any]:
        return input_**power, (input_, None) if requires_grad else ()

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: Any,
        tensors_to_save: Any,
        *,
        power: float = 2.0,
        **kwargs: Any,
    ) -> None:
        ctx.power = power
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, Iterable[Any]]:
        assert ctx.saved_tensors is not None
        x, nothing = ctx.saved_tensors
        assert nothing is None
        return grad_output * ctx.power * x ** (ctx.power - 1), ()


class OldSquare(Square):
    """The same, back on the legacy API."""

    def op_forward(self, ctx: OperationContext, input_: Any, **kwargs: Any) -> Any:
        assert "requires_grad" not in kwargs
        ctx.power = 2.0
        ctx.save_for_backward(input_, None)
        return input_**2.0


@pytest.mark.parametrize("cls", [Square, OldSquare])
def test_both_styles_run(cls: type[Square]) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = ops.Sequential(ops.Identity(), cls(), ops.ConstantScale(3.0))(x)
    y.sum().backward()
    torch.testing.assert_close(y, 3 * x**2)
    torch.testing.assert_close(x.grad, 6 * x.detach())


def test_op_forward_of_a_split_operation_computes_and_saves() -> None:
    ctx = OperationContext()
    x = torch.randn(3)
    kwargs: dict[str, Any] = dict.fromkeys(
        ("prev_op_grad_output_quantizer", "next_op_input_quantizer")
    )
    y = Square().op_forward(ctx, x, power=3.0, **kwargs)
    assert torch.equal(y, x**3)
    assert ctx.to_save is not None and ctx.to_save[0] is x and ctx.power == 3.0


def test_kwargs_reach_both_halves() -> None:
    x = torch.randn(4, requires_grad=True)
    Square()(x, power=3.0).sum().backward()
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)
    assert x.grad is not None
    x.grad = None
    model = ops.Sequential(Square(), Square())
    model(x, op_kwargs={0: {"power": 3.0}, model[1]: {"power": 1.0}}).sum().backward()
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_unknown_kwargs_are_refused(compiled: bool) -> None:
    class Strict(Square):
        forward_keywords = ("power",)

    ran: list[int] = []
    watched = nn.Identity()
    watched.register_forward_hook(lambda *_: ran.append(1))
    gelu, strict, loose = ops.GELU(), Strict(), Square()
    model = ops.Sequential(watched, gelu, strict, loose)
    x = torch.ones(2, 4)
    for op, name, takes in (
        (gelu, "typo", "takes none"),
        (gelu, "dtype", "takes none"),  # what its `begin` makes for itself
        (strict, "pwoer", "takes power from"),
        (loose, "requires_grad", "takes any but requires_grad"),
    ):
        for run in (partial(op, **{name: 1}), partial(model, op_kwargs={op: {name: 1}})):
            f = torch.compile(run, backend="aot_eager") if compiled else run
            with pytest.raises(TypeError, match=f"{type(op).__name__}.*'{name}'.*{takes}"):
                f(x)
            torch.compiler.reset()
    assert not ran  # nothing has changed before
    assert torch.equal(model(x, op_kwargs={strict: {"power": 3.0}}), model(x) ** 1.5)
    with pytest.raises(TypeError, match="GELU: keyword arguments: got NoneType; a dict"):
        model(x, op_kwargs={gelu: None})


@pytest.mark.parametrize(
    "name", ["op_forward", "op_forward_compute", "op_forward_save_ctx", "op_backward"]
)
def test_one_guard_for_extra_inputs_and_outputs(name: str) -> None:
    for op in (ops.AddExtraInput(), ops.MakeExtraOutput(), ops.ScaledSwiGLU()):
        arguments: list[Any] = [OperationContext(), torch.ones(2, 2), ()]
        if name == "op_forward_compute":
            arguments = arguments[1:2]
        elif name != "op_forward_save_ctx":
            arguments = arguments[:2]
        match = f"{type(op).__name__}.{name}: the operation has . extra inputs"
        with pytest.raises(RuntimeError, match=match):
            getattr(op, name)(*arguments)


def test_operations_that_define_nothing_say_so() -> None:
    class Nothing(BasicOperation):
        pass

    with pytest.raises(NotImplementedError, match=r"Nothing \(op 0 of 1\): Nothing defines no for"):
        Nothing()(torch.ones(2))
    with pytest.raises(ValueError, match="basic_ops: got none"):
        FusedOperation([])


def test_quantized_storages_can_be_saved() -> None:
    quantizer = minifloat.MXFP8Quantizer(minifloat.DType.kFloat8E4M3)
    quantizer.internal = True

    class Keeps(BasicOperation):
        def op_forward_compute(self, input_: Any, **kwargs: Any) -> tuple[Any, Any]:
            return input_ * 2, (quantizer.quantize(input_.detach()), None, input_)

        def op_forward_save_ctx(
            self, ctx: OperationContext, input_: Any, tensors_to_save: Any, **kwargs: Any
        ) -> None:
            ctx.save_for_backward(*tensors_to_save)

        def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, Iterable[Any]]:
            assert ctx.saved_tensors is not None
            kept, nothing, x = ctx.saved_tensors
            assert isinstance(kept, minifloat.MXFP8TensorStorage) and nothing is None
            assert torch.equal(kept.dequantize(dtype=torch.float32), expected)
            return grad_output * 2, ()

    x = torch.randn(32, 32, requires_grad=True)
    expected = quantizer.quantize(x.detach()).dequantize(dtype=torch.float32)
    y = ops.Sequential(Keeps(), Keeps())(x.detach().requires_grad_())
    with pytest.raises(AssertionError):  # the second one saw other values: it does compare
        y.sum().backward()
    Keeps()(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


NO_NEIGHBOURS: dict[str, Any] = dict.fromkeys(
    ("prev_op_grad_output_quantizer", "next_op_input_quantizer")
)


ALONE = [c for c in CASES if not c.extra and c.name not in ("Linear", "MakeExtraOutput")]


@pytest.mark.parametrize("recipe", [None, "current", "mxfp8"])
@pytest.mark.parametrize("given", [NO_NEIGHBOURS, {}], ids=["neighbours", "bare"])
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_every_operation_can_be_called_by_hand(
    case: Case, given: dict[str, Any], recipe: str | None
) -> None:
    """`op_forward`, `fuser_forward` and the two halves, without a fuser: the fuser's results."""
    op = made(case)
    (x,) = inputs(case)
    found = None if recipe is None else RECIPES[recipe]
    with minifloat.autocast(enabled=found is not None, recipe=found):
        expected = plain(op(x))
        grads = torch.autograd.grad(expected.sum(), (x, *op.parameters()))
        x = x.detach()
        ctxs = [OperationContext() for _ in range(3)]
        outputs = [op.op_forward(ctxs[0], x, **given)]
        fuser: dict[str, Any] = {"basic_op_extra_inputs": [()], "basic_op_kwargs": [{}]}
        outputs.append(op.fuser_forward([ctxs[1]], x, **fuser, **NO_NEIGHBOURS)[0])
        with torch.no_grad():
            y, saved = op.op_forward_compute(x, **given)
        op.op_forward_save_ctx(ctxs[2], x, saved, **given)
        outputs.append(y)
        for output, ctx in zip(outputs, ctxs, strict=True):
            assert torch.equal(plain(output), expected)
            ctx.saved_tensors = ctx.to_save
            dx, of_params = op.op_backward(ctx, torch.ones_like(expected))
            for a, b in zip((plain(dx), *of_params), grads, strict=True):
                assert torch.equal(a, b)


class LegacyGELU(ops.GELU):
    def op_forward(self, ctx: OperationContext, input_: Any, **kwargs: Any) -> Any:
        return 2 * super().op_forward(ctx, input_, **kwargs)


class LegacyFuserGELU(ops.GELU):
    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **kwargs: Any) -> Any:
        y, extra = super().fuser_forward(basic_op_ctxs, input_, **kwargs)
        return 2 * y, extra


class LegacyAdd(ops.AddExtraInput):
    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **kwargs: Any) -> Any:
        y, extra = super().fuser_forward(basic_op_ctxs, input_, **kwargs)
        return 2 * y, extra


class LegacyLinear(ops.BasicLinear):
    def op_forward(self, ctx: OperationContext, input_: Any, **kwargs: Any) -> Any:
        return 2 * super().op_forward(ctx, input_, **kwargs)


@pytest.mark.parametrize("recipe", [None, "current"])
def test_a_legacy_subclass_reaches_its_split_parent(recipe: str | None) -> None:
    x = torch.randn(32, 32)
    linear = LegacyLinear(32, 32, device="cpu")
    plain_linear = ops.BasicLinear(32, 32, device="cpu")
    plain_linear.weight = linear.weight
    found = None if recipe is None else RECIPES[recipe]
    with minifloat.autocast(enabled=found is not None, recipe=found):
        for op, parent, extra in (
            (LegacyGELU(), ops.GELU(), ()),
            (LegacyFuserGELU(), ops.GELU(), ()),
            (LegacyAdd(), ops.AddExtraInput(), (x,)),
            (linear, plain_linear, ()),
        ):
            assert not op._use_split_forward
            assert torch.equal(op(x, *extra), 2 * parent(x, *extra)), type(op)


def test_classes_are_found_where_they_live() -> None:
    """By Transformer Engine's paths, too."""
    from minifloat.ops import basic, fused

    assert basic.BasicLinear is ops.BasicLinear and basic.RMSNorm is ops.RMSNorm
    assert fused.ForwardLinearBiasAdd is ops.ForwardLinearBiasAdd
    for module, name in ((basic, "Sequential"), (basic, "FusedMLP"), (fused, "GELU")):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(module, name)
