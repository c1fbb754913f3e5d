"""`OperationFuser`: channels, registered fusions, and what is wrong with them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize
import torch.nn.utils.prune

import minifloat
from minifloat import ops
from minifloat.ops import OperationFuser
from minifloat.recipe import RecipeState

from .cases import RECIPES


def residual(width: int = 8) -> ops.Sequential:
    """`y = x + gelu(x + bias)`, by a channel."""
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.Bias(width),
        ops.GELU(),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


# -------------------------------------------------------------------------------------- channels
def test_a_channel_joins_output_and_input() -> None:
    model = residual()
    x = torch.randn(3, 8, requires_grad=True)
    y = model(x)
    expected = x + torch.nn.functional.gelu(x + model[1].bias, approximate="tanh")
    torch.testing.assert_close(y, expected)
    grads = torch.autograd.grad(expected.sum(), (x, model[1].bias))
    y.sum().backward()
    torch.testing.assert_close(x.grad, grads[0])
    torch.testing.assert_close(model[1].bias.grad, grads[1])
    assert model._module_groups[0].num_extra_inputs == 0


def test_gradients_of_a_channel_are_summed() -> None:
    """Two consumers, and the caller."""
    model = ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "a"),
        ops.AddExtraInput().set_extra_input_channel(0, "a"),
        ops.ConstantScale(3.0),
        ops.AddExtraInput().set_extra_input_channel(0, "a"),
        ops.AddExtraInput(),
    )
    x, other = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    y, a = model(x, other)
    torch.testing.assert_close(y, 7 * x + other)
    assert torch.equal(a, x)
    torch.autograd.backward((y, a), (torch.ones(2, 3), torch.full((2, 3), 10.0)))
    torch.testing.assert_close(x.grad, torch.full((2, 3), 17.0))
    torch.testing.assert_close(other.grad, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: [ops.AddExtraInput().set_extra_input_channel(0, "a")],
            r"channel 'a': AddExtraInput \(op 0 of 1\), extra input 0, reads it, and no operation",
        ),
        (
            lambda: [
                ops.AddExtraInput().set_extra_input_channel(0, "a"),
                ops.MakeExtraOutput().set_extra_output_channel(0, "a"),
            ],
            r"AddExtraInput \(op 0 of 2\), extra input 0, reads it before MakeExtraOutput \(op 1",
        ),
        (
            lambda: [
                ops.MakeExtraOutput().set_extra_output_channel(0, "a"),
                ops.GELU(),
                ops.MakeExtraOutput().set_extra_output_channel(0, "a"),
            ],
            r"MakeExtraOutput \(op 2 of 3\), extra output 0, puts a second tensor on it, after Mak",
        ),
    ],
)
def test_wrong_wiring(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OperationFuser(model())
    with pytest.raises(ValueError, match=message):
        ops.Sequential(*model())(torch.ones(2))


def test_arguments_of_channels() -> None:
    op = ops.AddExtraInput()
    with pytest.raises(IndexError, match="AddExtraInput: index: got 1; it has 1 extra inputs"):
        op.set_extra_input_channel(1, "a")
    for name in ("", 3):
        with pytest.raises(ValueError, match="name: got .*; a non-empty string"):
            op.set_extra_input_channel(0, name)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="output_to_caller: got 1"):
        ops.MakeExtraOutput().set_extra_output_channel(0, "a", output_to_caller=1)  # type: ignore[arg-type]
    made = ops.MakeExtraOutput().set_extra_output_channel(0, "a", output_to_caller=False)
    made.set_extra_output_channel(0, None)
    assert len(made(torch.ones(2))) == 2


def test_an_operation_of_a_fuser_keeps_its_channels() -> None:
    model = residual()
    model(torch.ones(2, 8))
    message = r"AddExtraInput: the channel of extra input 0 .* captured .* \(op 3 of 4\)"
    with pytest.raises(RuntimeError, match=message):
        model[3].set_extra_input_channel(0, "other")
    # In another fuser, where nothing is on its channel:
    with pytest.raises(ValueError, match=r"AddExtraInput \(op 1 of 2\), extra input 0, reads it"):
        ops.Sequential(ops.GELU(), model[3])(torch.ones(2, 8))
    alone = ops.AddExtraInput()
    alone(torch.ones(2), torch.ones(2))
    with pytest.raises(RuntimeError, match="captured the operation"):
        alone.set_extra_input_channel(0, "a")


def test_the_number_of_extra_inputs_is_checked() -> None:
    message = r"extra_inputs: got 0, 1 are needed: AddExtraInput \(op 1 of 2\), extra input 0"
    with pytest.raises(ValueError, match=message):
        OperationFuser([ops.GELU(), ops.AddExtraInput()])(torch.ones(2))
    with pytest.raises(ValueError, match="got 1, 0 are needed"):
        ops.GELU()(torch.ones(2), torch.ones(2))
    message = r"AddExtraInput \(op 0 of 1\), extra input 0: got list; a tensor is needed"
    with pytest.raises(TypeError, match=message):
        ops.AddExtraInput()(torch.ones(2), [1.0, 1.0])
    with pytest.raises(ValueError, match="basic_op_kwargs: got 2 for 1"):
        OperationFuser([ops.GELU()])(torch.ones(2), basic_op_kwargs=[{}, {}])
    with pytest.raises(TypeError, match="ops: got Linear"):
        OperationFuser([torch.nn.Linear(2, 2)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="ops: got none"):
        OperationFuser([])


def test_errors_of_operations_name_their_position() -> None:
    model = ops.Sequential(ops.Identity(), ops.SwiGLU(), ops.Identity())
    message = r"SwiGLU \(op 1 of 3\): input: got shape \(2, 7\); h: got 7 columns"
    with pytest.raises(ValueError, match=message):
        model(torch.ones(2, 7))
    with pytest.raises(ValueError, match=r"BasicLinear \(op 0 of 2\): input: got shape \(2, 7\)"):
        ops.Linear(8, 8)(torch.ones(2, 7))
    with pytest.raises(ValueError, match=r"Bias \(op 0 of 1\): input: got shape"):
        ops.Bias(4)(torch.ones(2, 3))


# ----------------------------------------------------------------------------------- registration
@pytest.fixture
def restored() -> Iterator[None]:
    names = ("forward", "backward", "forward_backward")
    lists = [getattr(OperationFuser, f"{n}_fusion_functions") for n in names]
    kept = [list(x) for x in lists]
    yield
    for now, then in zip(lists, kept, strict=True):
        now[:] = then


class Twice(ops.FusedOperation):
    """Two scales as one."""

    def fuser_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
        return input_ * (self.basic_ops[0].scale * self.basic_ops[1].scale), [(), ()], ()

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input_: Any, tensors_to_save: Any, **kwargs: Any
    ) -> None:
        for i, (op, ctx) in enumerate(zip(self.basic_ops, basic_op_ctxs, strict=True)):
            op.fuser_forward_save_ctx([ctx], input_, (), **self.basic_kwargs(i, kwargs))

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **kwargs: Any) -> Any:
        scale = self.basic_ops[0].scale * self.basic_ops[1].scale
        return grad_output * scale, [(), ()], [(), ()]


def fuse_scales(ops_: list[Any], *, recipe: Any) -> list[Any]:
    made: list[Any] = []
    for op in ops_:
        last = made[-1] if made else None
        if isinstance(op, ops.ConstantScale) and isinstance(last, ops.ConstantScale):
            made[-1] = Twice([last, op])
        else:
            made.append(op)
    return made


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("direction", ["forward", "backward", "forward_backward"])
def test_a_registered_fusion_is_used(direction: str) -> None:
    getattr(ops, f"register_{direction}_fusion")(fuse_scales, prepend=True)
    model = ops.Sequential(ops.Identity(), ops.ConstantScale(2.0), ops.ConstantScale(4.0))
    x = torch.randn(3, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert torch.equal(y, 8 * x) and torch.equal(x.grad, torch.full((3,), 8.0))
    fuser = model._module_groups[0]
    there = [[type(op) for op, _ in fuser._forward_ops], [type(o) for o, _ in fuser._backward_ops]]
    assert (Twice in there[0]) == ("forward" in direction.split("_"))
    assert (Twice in there[1]) == ("backward" in direction.split("_"))
    if direction != "backward":
        assert fuser._forward_ops[1][1] == [1, 2]


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("fusion", "message"),
    [
        (lambda ops_, *, recipe: ops_[:-1], r"dropped ConstantScale \(op 1 of 2\)"),
        (lambda ops_, *, recipe: ops_[::-1], r"moved GELU \(op 0 of 2\)"),
        (lambda ops_, *, recipe: [*ops_, ops.Identity()], "added Identity after the last of 2"),
    ],
)
def test_a_fusion_that_loses_operations(fusion: Any, message: str) -> None:
    ops.register_forward_fusion(fusion)
    with pytest.raises(RuntimeError, match=f"fusion .*lambda.*: {message}"):
        ops.Sequential(ops.GELU(), ops.ConstantScale(2.0))(torch.ones(2))


@pytest.mark.usefixtures("restored")
def test_a_fusion_that_returns_nothing() -> None:
    ops.register_forward_fusion(lambda ops_, *, recipe: None)
    with pytest.raises(TypeError, match="fusion .*lambda.*: returned NoneType; a list of"):
        ops.GELU()(torch.ones(2))


def test_registration_takes_functions() -> None:
    with pytest.raises(TypeError, match="func: got 3"):
        ops.register_forward_fusion(3)  # type: ignore[arg-type]


def test_hooks_run() -> None:
    seen: list[Any] = []

    class Hooked(ops.Identity):
        def pre_first_fuser_forward(self) -> None:
            seen.append("first")

        def pre_fuser_forward(self, *, requires_grad: bool) -> None:
            seen.append(requires_grad)

    model = ops.Sequential(Hooked())
    model(torch.ones(2))
    model(torch.ones(2, requires_grad=True))
    assert seen == ["first", False, True]


def test_wrong_numbers_of_results() -> None:
    class Gives(ops.Identity):
        def op_backward(self, ctx: Any, grad_output: Any) -> Any:
            return grad_output, (grad_output,)

    message = r"Gives \(op 1 of 2\): backward returned 1 gradients for 0 parameters"
    with pytest.raises(RuntimeError, match=message):
        ops.Sequential(ops.GELU(), Gives())(torch.ones(2, 2, requires_grad=True)).sum().backward()

    class Makes(ops.MakeExtraOutput):
        def fuser_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
            return input_, [(None,)], ()

    with pytest.raises(RuntimeError, match=r"Makes \(op 0 of 1\): extra output 0 is None"):
        Makes()(torch.ones(2))


HALVES = {
    "op_forward_compute": lambda self, input_, **kwargs: (input_ * 1, ()),
    "op_forward_save_ctx": lambda self, ctx, input_, tensors_to_save, **kwargs: None,
    "op_backward": lambda self, ctx, grad_output: (grad_output, ()),
}


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        (
            "op_forward_compute",
            lambda self, input_, **kwargs: input_ * 1,
            r"op_forward_compute: returned Tensor; \(output, tensors to save\) is needed",
        ),
        (
            "op_forward_compute",
            lambda self, input_, **kwargs: (3, ()),
            "returned int as its output; a tensor is needed",
        ),
        (
            "op_forward_save_ctx",
            lambda self, ctx, input_, tensors_to_save, **kwargs: ctx.save_for_backward(3),
            "tensors: got int; a Tensor",
        ),
        (
            "op_backward",
            lambda self, ctx, grad_output: grad_output,
            r"op_backward: returned Tensor; \(gradient of the input, ",
        ),
        (
            "op_backward",
            lambda self, ctx, grad_output: (grad_output, None),
            r"gradients of parameters: got \[NoneType\]; a tuple for each of its 1 basic",
        ),
        (
            "fuser_backward",
            lambda self, ctxs, grad_output, **kwargs: grad_output,
            r"fuser_backward: returned Tensor; \(gradient of the input, ",
        ),
    ],
)
def test_wrong_results_of_a_users_operation(name: str, method: Any, message: str) -> None:
    """A tensor of two or three rows would unpack, and go on as something else."""
    op = type("User", (ops.BasicOperation,), {**HALVES, name: method})()
    x = torch.randn(3 if "fuser" in name else 2, 4, requires_grad=True)
    with pytest.raises(TypeError, match=rf"User \(op 1 of 2\): .*{message}"):
        ops.Sequential(ops.Identity(), op)(x).sum().backward()


def test_wrong_results_of_a_users_operation_with_extras() -> None:
    class Add(ops.AddExtraInput):
        def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **kwargs: Any) -> Any:
            return grad_output, [()], [()]

    x = torch.randn(2, 4, requires_grad=True)
    message = r"Add \(op 0 of 1\): backward returned 0 gradients for 1 extra inputs"
    with pytest.raises(RuntimeError, match=message):
        Add()(x, x.detach().requires_grad_()).sum().backward()

    class Make(ops.MakeExtraOutput):
        def fuser_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
            return input_

    with pytest.raises(TypeError, match=r"Make \(op 0 of 1\): fuser_forward_compute: returned Ten"):
        Make()(torch.randn(3, 4))


def test_backward_twice_with_a_retained_graph() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    y = residual()(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y.sum(), x)[0])


def test_in_place_leaves_channels_alone() -> None:
    """What is on a channel may be saved by operations in between."""
    made = [
        ops.MakeExtraOutput(in_place=True).set_extra_output_channel(0, "x", output_to_caller=False),
        ops.GELU(),
        ops.AddExtraInput(in_place=True).set_extra_input_channel(0, "x"),
    ]
    x = torch.randn(3, 4, requires_grad=True)
    grad = torch.randn(3, 4)
    given = grad.clone()
    y = ops.Sequential(ops.ConstantScale(2.0), *made)(x)
    y.backward(given)
    z = x.detach().clone().requires_grad_()
    (2 * z + torch.nn.functional.gelu(2 * z, approximate="tanh")).backward(grad)
    torch.testing.assert_close(x.grad, z.grad)
    assert torch.equal(given, grad)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 8), ops.GELU()),
        lambda: minifloat.LayerNormLinear(8, 8, device="cpu"),
    ],
)
def test_a_second_derivative_is_refused(layer: Any) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad((layer()(x) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (grad**2).sum().backward()


def test_in_place_spares_what_was_given_twice() -> None:
    """A residual: the norm saves the input, which the sum may not overwrite."""
    model = ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 8), ops.AddExtraInput(in_place=True))
    given = torch.randn(4, 8)
    results = []
    for extra in (lambda x: x, lambda x: x.clone(), lambda x: x.view(2, 2, 8).view(4, 8)):
        x = given.clone().requires_grad_()
        y = model(x, extra(x))
        y.sum().backward()
        results.append((y.detach(), x.grad))
        assert torch.equal(x, given)
    for y, grad in results[1:]:
        torch.testing.assert_close(y, results[0][0])
        torch.testing.assert_close(grad, results[0][1])
    both = torch.randn(2, 4, 8)  # parts of one memory that do not overlap
    expected = both[0] + both[1]
    ops.AddExtraInput(in_place=True)(both[0], both[1])
    assert torch.equal(both[1], expected)


@pytest.mark.parametrize("last", [ops.GELU, lambda: ops.Linear(8, 8)])
def test_in_place_needs_memory_of_its_own(last: Any) -> None:
    """The gradient of a sum is one number, expanded."""
    model = ops.Sequential(ops.MakeExtraOutput(in_place=True), last())
    grads = []
    for in_place in (True, False):
        model[0]._in_place = in_place
        x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
        y, extra = model(x)
        (y.sum() + 3 * extra.sum()).backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_in_place_keeps_the_dtype_of_what_it_may_write_to() -> None:
    op, x = ops.AddExtraInput(in_place=True), torch.randn(4, 8)
    for extra in (torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(8), torch.randn(8, 1)[:, 0]):
        expected = (x + extra).to(extra.dtype)
        compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x, extra.clone()), expected)
        assert torch.equal(op(x, extra), expected)


class Stacked(ops.BasicOperation):
    """`y = [x, x]`, the rows twice."""

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
        return torch.cat((input_, input_)), ()

    def op_forward_save_ctx(self, ctx: Any, input_: Any, saved: Any, **kwargs: Any) -> None:
        pass

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        return sum(grad_output.chunk(2)), ()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", [None, "mxfp8"])
def test_an_extra_input_that_is_broadcast_gets_the_sum_of_its_gradients(
    name: str | None, compiled: bool
) -> None:
    """By a channel too, where no autograd sums it; fused or not."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False),
        Stacked(),
        *(ops.Linear(32, 32), ops.SiLU(), ops.Linear(32, 32)),
        ops.AddExtraInput(in_place=True).set_extra_input_channel(0, "x"),
    )
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    x = torch.randn(1, 32, requires_grad=True)
    same = x.detach().clone().requires_grad_()
    recipe = None if name is None else RECIPES[name]
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        y = call(x)
        h = ops.Sequential(*model[2:5])(torch.cat((same, same)))
    torch.testing.assert_close(y, h + same)
    grad = torch.randn_like(y)
    y.backward(grad)
    (h + same).backward(grad)
    torch.testing.assert_close(x.grad, same.grad)


BROADCAST: dict[str, Callable[[], list[Any]]] = {
    "alone": lambda: [ops.RMSNorm(32)],
    "product": lambda: [ops.Linear(32, 32)],
    "mlp": lambda: [ops.Linear(32, 32), ops.SiLU(), ops.Linear(32, 32)],
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("parts", BROADCAST)
def test_what_an_extra_input_broadcasts_gets_the_sum_of_its_gradients(
    parts: str, compiled: bool
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    before = BROADCAST[parts]()
    model = ops.Sequential(*before, ops.AddExtraInput(in_place=True))
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    x, extra = torch.randn(3, 1, 32, requires_grad=True), torch.randn(2, 3, 5, 32)
    same = x.detach().clone().requires_grad_()
    with minifloat.autocast(recipe=RECIPES["mxfp8"]):
        y = call(x, extra)
        expected = ops.Sequential(*before)(same) + extra
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    y.backward(grad)
    found = [x.grad, *[p.grad for p in model.parameters()]]
    model.zero_grad()
    expected.backward(grad)
    torch.testing.assert_close(found, [same.grad, *[p.grad for p in model.parameters()]])


class Rounds(ops.BasicOperation):
    """A user's operation with quantizers of its own."""

    def num_quantizers(self, mode: str) -> int:
        return 1

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self._rounded(input_, self.get_quantizer("forward", 0)), ()

    def op_forward_save_ctx(
        self, ctx: Any, input_: Any, tensors_to_save: Any, **kwargs: Any
    ) -> None:
        ctx.quantizer = self.get_quantizer("backward", 0)

    def op_backward(self, ctx: Any, grad_output: Any) -> tuple[Any, Any]:
        return self._rounded(grad_output, ctx.quantizer), ()

    def _rounded(self, x: Any, quantizer: Any) -> Any:
        return x if quantizer is None else quantizer.quantize(x).dequantize()


class Router(ops.BasicOperation):
    """`y = x`, and `sigmoid(x w)` of each row besides."""

    num_extra_outputs = 1

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width))

    def fuser_forward_compute(self, input_: Any, **fwd_kwargs: Any) -> tuple[Any, Any, Any]:
        probs = torch.sigmoid(input_ @ self.weight)
        return input_, [(probs,)], (input_, probs)

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input_: Any, tensors_to_save: Any, **fwd_kwargs: Any
    ) -> None:
        basic_op_ctxs[0].save_for_backward(*tensors_to_save)

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        x, probs = basic_op_ctxs[0].saved_tensors
        d = basic_op_grad_extra_outputs[0][0] * probs * (1 - probs)
        return grad_output + d[:, None] * self.weight, [(d @ x,)], [()]


def scaled_bias() -> Any:
    op = ops.GroupedLinear(2, 8, 8, device="cpu", scale_bias=True)
    for b in op._biases():
        torch.nn.init.normal_(b)
    return op


@pytest.mark.parametrize("make", [ops.ScaledSwiGLU, ops.ScaledSReLU, scaled_bias])
def test_scales_that_come_by_a_channel_have_a_gradient(make: Any) -> None:
    torch.manual_seed(0)
    router, op = Router(8), make()
    x, sizes = torch.randn(6, 8), (torch.tensor([2, 4]),) if make is scaled_bias else ()
    given, weight = x.clone().requires_grad_(), router.weight.detach().clone().requires_grad_()
    op(given, *sizes, torch.sigmoid(given @ weight)).square().sum().backward()
    op = copy.deepcopy(op)
    op._captured = None
    op.set_extra_input_channel(len(sizes), "probs")
    router.set_extra_output_channel(0, "probs", output_to_caller=False)
    x.requires_grad_()
    ops.Sequential(router, op)(x, *sizes).square().sum().backward()
    torch.testing.assert_close(x.grad, given.grad)
    torch.testing.assert_close(router.weight.grad, weight.grad)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_users_operation_has_the_quantizers_of_the_recipe(compiled: bool) -> None:
    op = Rounds()
    model = ops.Sequential(ops.ConstantScale(2.0), op)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for name in ("current",) if compiled else ("current", "block", "mxfp8"):
        state = [
            RecipeState.create(RECIPES[name], mode=mode, device="cpu").make_quantizers()[0]
            for mode in ("forward", "backward")
        ]
        for alone in (False, True):
            if alone:  # outside of autocast, and so by another fuser without a recipe
                x = torch.randn(8, 32)
                assert torch.equal(op(x), x) and op.get_quantizer("forward", 0) is None
            x, g = torch.randn(8, 32, requires_grad=True), torch.randn(8, 32)
            with minifloat.autocast(recipe=RECIPES[name]):
                y = call(x)
            y.backward(g)
            assert x.grad is not None
            assert torch.equal(y, state[0].quantize(2 * x.detach()).dequantize())
            assert torch.equal(x.grad, 2 * state[1].quantize(g).dequantize())
            if not compiled:
                assert type(op.get_quantizer("forward", 0)) is type(state[0])


def test_a_users_operation_keeps_no_history() -> None:
    raises = pytest.raises(NotImplementedError, match="Rounds: quantizer 0 of forward scales by")
    with minifloat.autocast(recipe=RECIPES["delayed"]), raises:
        Rounds()(torch.randn(8, 32))


def test_a_users_roles_reach_the_factory() -> None:
    seen: list[Any] = []

    def factory(role: Any) -> Any:
        seen.append(role)
        return minifloat.IdentityQuantizer()

    class Named(Rounds):
        def get_quantizer_roles(self, mode: str) -> list[Any]:
            return [minifloat.QuantizerRole("mine", mode, "r")]

    recipe = minifloat.recipe.CustomRecipe(qfactory=factory)
    with minifloat.autocast(recipe=recipe):
        Named()(torch.randn(8, 32, requires_grad=True)).sum().backward()
    assert seen == [minifloat.QuantizerRole("mine", mode, "r") for mode in ("forward", "backward")]


class Symmetric(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + weight.t()


def test_a_parametrization_is_refused() -> None:
    """The gradient of what it makes would pass for that of the parameter."""
    model = ops.Sequential(ops.GELU(), ops.BasicLinear(8, 8))
    torch.nn.utils.parametrize.register_parametrization(model[1], "weight", Symmetric())
    with pytest.raises(NotImplementedError, match=r"BasicLinear \(op 1 of 2\): .*parametriz"):
        model(torch.randn(4, 8))


@pytest.mark.parametrize("by", ["prune", "weight_norm", "spectral_norm"])
def test_a_weight_that_a_hook_makes_is_refused(by: str) -> None:
    """So would that of the weight for what it is made of; in a pipeline the hook did not run."""
    model = ops.Sequential(ops.GELU(), ops.Linear(8, 8, device="cpu"))
    if by == "prune":
        torch.nn.utils.prune.random_unstructured(model[1].basic_ops[0], "weight", 0.5)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated
            getattr(torch.nn.utils, by)(model[1].basic_ops[0])
    for f in (model, model[1]):
        with pytest.raises(NotImplementedError, match=rf"BasicLinear \(op 0 of 1\): .*{by}"):
            f(torch.randn(4, 8))
