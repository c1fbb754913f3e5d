"""Which recipe is in force: nesting, errors, defaults, delayed scaling's steps, compiled code."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat import recipe as recipes
from minifloat.opaque import AVAILABLE
from minifloat.quantizers import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
)
from minifloat.recipe.autocast import STATE
from minifloat.recipe.factories import delayed_scaling_factory

from .cases import RECIPES, STATELESS, Counter

CURRENT, MX, BLOCK = (
    recipes.Float8CurrentScaling(),
    recipes.MXFP8BlockScaling(),
    recipes.Float8BlockScaling(),
)
DELAYED = recipes.DelayedScaling(amax_history_len=4)
compiles = pytest.mark.skipif(not AVAILABLE, reason="this PyTorch has no opaque objects")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    assert STATE.recipe is None and STATE.calibration is None and STATE.group is None
    assert STATE.depth == 0 and STATE.ran is None
    assert STATE.init is None and not STATE.preserve and not STATE.checkpointed


def layer(**kwargs: Any) -> Any:
    torch.manual_seed(1)
    return minifloat.Linear(32, 48, **kwargs)


def data(i: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(6, 32, generator=torch.Generator().manual_seed(i)) * scale


def run(module: Any, recipe: recipes.Recipe | None, x: Tensor | None = None) -> Tensor:
    """The output under a recipe; None: in high precision."""
    with torch.no_grad():
        torch.manual_seed(5)
        with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
            return module(data() if x is None else x)  # type: ignore[no-any-return]


# -------------------------------------------------------------------------------------- nesting
def test_recipes_differ_and_nothing_is_quantized_outside() -> None:
    module = layer()
    made = {name: run(module, RECIPES[name]()) for name in STATELESS}
    made["high"] = run(module, None)
    plain = nn.functional.linear(data(), module.weight, module.bias)
    assert torch.equal(made["high"], plain) and torch.equal(module(data()), plain)
    assert torch.equal(made.pop("custom"), made["current"])  # its factory says so
    del made["block"]  # on numbers like these, its powers of two are as good as MXFP8's
    for one, other in itertools.combinations(made, 2):
        assert not torch.equal(made[one], made[other]), (one, other)


def test_the_inner_one_is_in_force_and_leaving_restores() -> None:
    module, x = layer(), data()
    current, mx = run(module, CURRENT), run(module, MX)
    high = run(module, None)
    with torch.no_grad(), minifloat.autocast(recipe=CURRENT):
        assert torch.equal(module(x), current)
        with minifloat.autocast(recipe=MX):
            assert torch.equal(module(x), mx)
            with minifloat.autocast(enabled=False):
                assert torch.equal(module(x), high)
                with minifloat.autocast(recipe=CURRENT):
                    assert torch.equal(module(x), current)
            assert torch.equal(module(x), mx)
        assert torch.equal(module(x), current)
    assert torch.equal(module(x), high)


def test_an_error_restores() -> None:
    with minifloat.autocast(recipe=MX):
        with pytest.raises(ZeroDivisionError), minifloat.autocast(recipe=CURRENT):
            raise ZeroDivisionError
        assert STATE.recipe == MX
    assert STATE.recipe is None


def test_an_error_in_a_layer_restores_and_updates_nothing_more() -> None:
    module = layer()
    with pytest.raises(ValueError, match="in_features"), minifloat.autocast(recipe=DELAYED):
        module(torch.randn(3, 5))
    assert STATE.ran is None


def test_a_layer_with_its_own_recipe_updates_itself_alone() -> None:
    """Another thread evaluates another model in the middle of a forward."""
    one, other = layer(), layer()
    one.recipe = other.recipe = DELAYED
    end, thread = one._end, threading.Thread(target=torch.no_grad()(other), args=(data(),))

    def evaluated_meanwhile(begun: Any) -> None:
        thread.start()
        thread.join()
        end(begun)

    one._end = evaluated_meanwhile
    one(data())
    assert one.delayed.scale_input != 1 and one.delayed.history_forward.any()
    assert other.delayed.scale_input == 1 and not other.delayed.history_forward.any()


def test_an_autocast_that_stays_open_keeps_a_note_of_each_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minifloat.recipe.autocast._LINKS", 8)
    modules, later = [layer() for _ in range(3)], DELAYED.replace(margin=3)
    with minifloat.autocast(recipe=DELAYED):
        for i in range(50):
            with minifloat.autocast(recipe=DELAYED if i < 20 else later):
                modules[i % 3](data())
        at = STATE.ran
        for _ in range(3 + 8):
            at = at and at[4]
        assert at is None
    for module in modules:  # once each, by the last recipe
        assert module.delayed.history_forward.any(1).sum() == 1
        assert module.delayed.scale_input == 448 / data().abs().max() / 8


def test_one_object_cannot_be_active_twice() -> None:
    one = minifloat.autocast(recipe=CURRENT)
    with one:
        with pytest.raises(RuntimeError, match="autocast: this object is active already"), one:
            pass
        assert STATE.recipe == CURRENT and STATE.depth == 1
    assert STATE.recipe is None


def test_one_object_can_be_entered_again_later() -> None:
    one = minifloat.autocast(recipe=CURRENT)
    for _ in range(3):
        with one:
            assert STATE.recipe == CURRENT


def test_no_recipe_is_the_default_one() -> None:
    with minifloat.autocast():
        assert STATE.recipe == minifloat.get_default_recipe()
        assert STATE.recipe == CURRENT  # where MXFP8 is not native


def test_no_recipe_inside_another_is_the_default_as_well() -> None:
    with minifloat.autocast(recipe=MX), minifloat.autocast():
        assert STATE.recipe == minifloat.get_default_recipe()


def test_a_disabled_region_is_high_precision() -> None:
    module = layer()
    with minifloat.autocast(enabled=False, recipe=MX):
        y = module(data())
    assert torch.equal(y, nn.functional.linear(data(), module.weight, module.bias))
    assert not module.delayed.used


@pytest.mark.parametrize("recipe", ["fp8", recipes.Float8CurrentScaling, 3, object()])
def test_what_is_no_recipe_is_refused(recipe: Any) -> None:
    with pytest.raises(TypeError, match="recipe: got"):
        minifloat.autocast(recipe=recipe)
    with pytest.raises(TypeError, match="recipe: got"):
        minifloat.quantized_model_init(recipe=recipe)


def test_as_a_decorator_of_its_own_it_is_not_offered() -> None:
    assert not callable(minifloat.autocast())


def test_deprecated_names() -> None:
    with (
        pytest.warns(DeprecationWarning, match="fp8_autocast is now called autocast"),
        minifloat.fp8_autocast(enabled=True, fp8_recipe=MX),
    ):
        assert STATE.recipe == MX
    with (
        pytest.warns(DeprecationWarning, match="now called quantized_model_init"),
        minifloat.fp8_model_init(enabled=True, recipe=MX),
    ):
        assert STATE.init == MX
    with pytest.warns(DeprecationWarning), minifloat.fp8_autocast(enabled=False):
        assert STATE.recipe is None


# ------------------------------------------------------------------------------ quantized weights
def test_quantized_model_init_nests() -> None:
    with minifloat.quantized_model_init(recipe=CURRENT):
        first = layer()
        with minifloat.quantized_model_init(enabled=False):
            second = layer()
        with minifloat.quantized_model_init(recipe=MX):
            third = layer()
        fourth = layer()
    fifth = layer()
    kinds = [type(m.weight) for m in (first, second, third, fourth, fifth)]
    plain = type(fifth.weight)
    assert kinds == [
        minifloat.Float8Tensor, plain, minifloat.MXFP8Tensor, minifloat.Float8Tensor, plain,
    ]  # fmt: skip
    assert first.primary_weights_in_fp8 and not second.primary_weights_in_fp8


def test_quantized_model_init_restores_on_error() -> None:
    with pytest.raises(ZeroDivisionError), minifloat.quantized_model_init(recipe=MX):
        raise ZeroDivisionError
    assert STATE.init is None


@pytest.mark.parametrize("name", list(RECIPES))
def test_values_before_quantization_are_preserved_on_request(name: str) -> None:
    recipe = RECIPES[name]()
    plain = layer()
    with minifloat.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        module = layer()
    value = module.weight.get_high_precision_init_val()
    assert value.device.type == "cpu" and torch.equal(value, plain.weight)
    module.weight.clear_high_precision_init_val()
    assert module.weight.get_high_precision_init_val() is None
    with minifloat.quantized_model_init(recipe=recipe):
        module = layer()
    assert not hasattr(module.weight, "get_high_precision_init_val")


def test_a_quantized_weight_outside_autocast_is_dequantized_and_says_so() -> None:
    with minifloat.quantized_model_init(recipe=MX):
        module = layer(name="fc")
    with pytest.warns(UserWarning, match=r"Linear\(fc\): a quantized weight outside autocast"):
        y = module(data())
    assert torch.equal(y, nn.functional.linear(data(), module.weight.dequantize(), module.bias))


def test_a_weight_that_a_recipe_leaves_alone_is_not_complained_about() -> None:
    high = recipes.CustomRecipe(qfactory=recipes.high_precision_factory)
    with minifloat.quantized_model_init(recipe=high):
        module = layer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(module, high), nn.functional.linear(data(), *plain(module)))


def plain(module: Any) -> Any:
    return module.weight.dequantize(), module.bias


def test_a_quantized_weight_under_another_recipe_is_refused() -> None:
    with minifloat.quantized_model_init(recipe=MX):
        module = layer(name="fc")
    with (
        pytest.raises(RuntimeError, match=r"Recipe mismatch for 'Linear\(fc\)'.*quantized_model"),
        minifloat.autocast(recipe=BLOCK),
    ):
        module(data())


# ------------------------------------------------------------------------------- delayed scaling
def buffers(module: Any) -> list[Tensor]:
    return [b.clone() for b in module.delayed.buffers()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_update_comes_with_the_outermost_exit() -> None:
    module = layer()
    x = data(0, 3.0)
    with minifloat.autocast(recipe=DELAYED):
        with minifloat.autocast(recipe=DELAYED):
            module(x)
        assert module.delayed.scale_input == 1 and module.delayed.amax_input == x.abs().max()
    assert module.delayed.scale_input == torch.tensor(448.0) / x.abs().max()
    assert module.delayed.amax_input == 0
    assert module.delayed.history_forward[-1, 0] == x.abs().max()
    assert module.delayed.scale_output == 1  # nothing was quantized there


def test_a_module_that_ran_twice_is_updated_once() -> None:
    module = layer()
    small, large = data(0), data(1, 7.0)
    with minifloat.autocast(recipe=DELAYED):
        module(large)
        module(small)
    assert module.delayed.scale_input == torch.tensor(448.0) / large.abs().max()
    history = module.delayed.history_forward[:, 0]
    assert history.count_nonzero() == 1 and history[-1] == large.abs().max()


def test_backward_updates_its_own() -> None:
    module = layer()
    x = data().requires_grad_()
    with minifloat.autocast(recipe=DELAYED):
        y = module(x)
    before = buffers(module)
    g = torch.full_like(y, 0.5)
    y.backward(g)
    assert module.delayed.scale_grad_output == 57344.0 / 0.5
    assert module.delayed.history_backward[-1, 0] == 0.5
    assert torch.equal(before[0], module.delayed.scale_input)


def test_no_update_without_gradients() -> None:
    module = layer()
    with torch.no_grad(), minifloat.autocast(recipe=DELAYED):
        module(data())
    assert module.delayed.scale_input == 1 and module.delayed.history_forward.count_nonzero() == 0


def test_steps_use_the_scale_of_the_one_before() -> None:
    module = layer()
    scales = [1.0]
    for i in range(6):
        x = data(i, 10.0 ** (i % 3))
        assert float(module.delayed.scale_input) == scales[-1]
        with minifloat.autocast(recipe=DELAYED):
            module(x)
        seen = [float(data(j, 10.0 ** (j % 3)).abs().max()) for j in range(max(0, i - 2), i + 1)]
        scales.append(float(torch.tensor(448.0) / max(seen)))
    assert float(module.delayed.scale_input) == scales[-1]


def test_calibration_records_and_quantizes_nothing() -> None:
    module = layer()
    with minifloat.autocast(enabled=False, calibrating=True, recipe=DELAYED):
        y = module(data())
    assert torch.equal(y, nn.functional.linear(data(), module.weight, module.bias))
    assert module.delayed.amax_input == data().abs().max()
    assert module.delayed.amax_weight == module.weight.abs().max()


@pytest.mark.parametrize("name", STATELESS)
def test_calibration_for_a_recipe_without_state_is_nothing(name: str) -> None:
    module = layer()
    with minifloat.autocast(enabled=False, calibrating=True, recipe=RECIPES[name]()):
        module(data())
    assert not module.delayed.used


def test_requests_of_a_factory_scale_by_history() -> None:
    ours, theirs = layer(), layer()
    custom = recipes.CustomRecipe(qfactory=delayed_scaling_factory)
    for i in range(3):
        for module, recipe in ((ours, custom), (theirs, recipes.DelayedScaling())):
            with minifloat.autocast(recipe=recipe):
                module(data(i, i + 1.0)).sum().backward()
    assert same(buffers(ours), buffers(theirs))
    assert torch.equal(ours.weight.grad, theirs.weight.grad)


def test_one_slot_by_history_and_the_others_by_themselves() -> None:
    def factory(role: Any) -> Any:
        if role is not None and role.tensor_type == "input":
            return recipes.DelayedScalingRequest(amax_history_len=4)
        return current()

    module, x = layer(), data(0, 3.0)
    with minifloat.autocast(recipe=recipes.CustomRecipe(qfactory=factory)):
        module(x).sum().backward()
    assert module.delayed.scale_input == torch.tensor(448.0) / x.abs().max()
    assert module.delayed.scale_weight == 1 and module.delayed.scale_grad_output == 1
    assert module.delayed.history_forward.shape == (4, 3)


@pytest.mark.parametrize("way", ["eager", pytest.param("compiled", marks=compiles)])
def test_a_backward_of_dequantized_operands_has_the_scale_of_forward(way: str) -> None:
    """Which has moved on by then; and backward records nothing."""

    def factory(role: Any) -> Any:
        if role is not None and role.tensor_type == "weight":
            return recipes.DelayedScalingRequest()
        return current()

    recipe = recipes.CustomRecipe(qfactory=factory, backward_override="dequantized")
    module = layer(bias=False)
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if way != "eager" else module
    for i in range(4):
        scale = module.delayed.scale_weight.clone()
        quantizer = Float8Quantizer(scale, torch.zeros(1), minifloat.DType.kFloat8E4M3)
        seen = quantizer.quantize(module.weight.detach()).dequantize()
        x = data(i).requires_grad_()
        with minifloat.autocast(recipe=recipe):
            y = call(x)
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(y) @ seen)
        assert not module.delayed.amax_weight.any()
        with torch.no_grad():
            module.weight.mul_(0.7)


# --------------------------------------------------------------------------- changes of recipe
def test_a_changed_value_is_in_force_at_the_next_forward() -> None:
    module = layer()
    plain = run(module, CURRENT)
    pow2 = run(module, CURRENT.replace(use_power_2_scales=True))
    assert not torch.equal(plain, pow2)
    assert torch.equal(run(module, recipes.Float8CurrentScaling()), plain)


def test_a_new_custom_recipe_asks_its_factory() -> None:
    module = layer()
    asked: list[str] = []

    def factory(role: Any) -> Any:
        asked.append("" if role is None else f"{role.tensor_type}:{role.name}")
        return IdentityQuantizer()

    module.name = "fc"
    first = recipes.CustomRecipe(qfactory=factory)
    run(module, first)
    assert asked == ["input:fc", "weight:fc", "", "grad_output:fc", ""]
    run(module, first)
    assert len(asked) == 5
    run(module, recipes.CustomRecipe(qfactory=factory))
    assert len(asked) == 10


def test_nested_custom_recipes() -> None:
    module, x = layer(), data()
    mx = recipes.CustomRecipe(qfactory=lambda role: MXFP8Quantizer(minifloat.DType.kFloat8E4M3))
    high = recipes.CustomRecipe(qfactory=lambda role: IdentityQuantizer())
    with torch.no_grad(), minifloat.autocast(recipe=mx):
        a = module(x)
        with minifloat.autocast(recipe=high):
            b = module(x)
        c = module(x)
    assert torch.equal(a, run(module, MX)) and torch.equal(a, c)
    assert torch.equal(b, module(x))


# ----------------------------------------------------------------------------------- compiled
def by_type(**kinds: Any) -> recipes.CustomRecipe:
    """A factory that goes by `role.tensor_type`."""

    def factory(role: Any) -> Any:
        return kinds.get("output" if role is None else role.tensor_type, IdentityQuantizer)()

    return recipes.CustomRecipe(qfactory=factory)


def mxfp8() -> Any:
    return MXFP8Quantizer(minifloat.DType.kFloat8E4M3)


def current() -> Any:
    return Float8CurrentScalingQuantizer(minifloat.DType.kFloat8E4M3, "cpu")


def compiled(function: Any) -> tuple[Any, Counter]:
    counter = Counter()
    return torch.compile(function, backend=counter, fullgraph=True), counter


def agree(function: Any, *modules: Any) -> int:
    """Compiled and eager make the same output and gradients; how many graphs there were."""
    fast, counter = compiled(function)
    made = []
    for call in (function, fast):
        x = data().requires_grad_()
        for module in modules:
            module.zero_grad(set_to_none=True)
        torch.manual_seed(9)
        y = call(x)
        y.square().sum().backward()
        made.append([y, x.grad, *(p.grad for m in modules for p in m.parameters())])
    for a, b in zip(*made, strict=True):
        assert torch.equal(a, b)
    return counter.graphs


@compiles
def test_two_recipes_in_one_compiled_region() -> None:
    first, second = layer(), minifloat.Linear(48, 32)

    def function(x: Tensor) -> Any:
        with minifloat.autocast(recipe=CURRENT):
            h = first(x)
            with minifloat.autocast(recipe=MX):
                h = second(h)
            y = first(h)
        return y + first(x)  # in high precision

    assert agree(function, first, second) == 1


@compiles
def test_two_custom_recipes_nested_in_one_graph() -> None:
    first, second = layer(name="a"), minifloat.Linear(48, 32, name="b")
    outer = by_type(input=mxfp8, weight=mxfp8, grad_output=mxfp8)
    inner = by_type(input=current, weight=current, grad_output=current)

    def function(x: Tensor) -> Any:
        with minifloat.autocast(recipe=outer):
            h = first(x)
            with minifloat.autocast(recipe=inner):
                h = second(h)
            return first(h)

    assert agree(function, first, second) == 1
    with torch.no_grad():
        assert torch.equal(function(data()), run(first, MX, run(second, inner, run(first, MX))))


@compiles
def test_a_factory_that_mixes_by_type_in_a_graph() -> None:
    module = layer(name="a")
    mixed = by_type(input=mxfp8, weight=mxfp8, grad_output=mxfp8)

    def function(x: Tensor) -> Any:
        with minifloat.autocast(recipe=mixed):
            return module(x)

    assert agree(function, module) == 1
    assert torch.equal(run(module, mixed), run(module, MX))


@compiles
def test_equal_recipes_share_a_graph_and_others_do_not() -> None:
    module = layer()
    fast, counter = compiled(module)
    for _ in range(3):
        with torch.no_grad(), minifloat.autocast(recipe=recipes.Float8CurrentScaling()):
            y = fast(data())
        assert torch.equal(y, run(module, CURRENT))
    assert counter.graphs == 1
    changed = CURRENT.replace(use_power_2_scales=True)
    with torch.no_grad(), minifloat.autocast(recipe=changed):
        y = fast(data())
    assert torch.equal(y, run(module, changed)) and counter.graphs == 2
    with torch.no_grad(), minifloat.autocast(recipe=recipes.Float8CurrentScaling()):
        fast(data())
    assert counter.graphs == 2


@compiles
def test_delayed_scaling_is_updated_once_per_outermost_region_of_a_graph() -> None:
    eager, other = layer(), layer()

    def step(module: Any) -> Any:
        def function(x: Tensor) -> Any:
            with minifloat.autocast(recipe=recipes.DelayedScaling()):
                with minifloat.autocast(recipe=recipes.DelayedScaling()):
                    y = module(x)
                return y + module(2 * x)

        return function

    fast, counter = compiled(step(other))
    slow = step(eager)
    for i in range(3):
        slow(data(i)).sum().backward()
        fast(data(i)).sum().backward()
    assert counter.graphs == 1
    assert same(buffers(eager), buffers(other))
    assert eager.delayed.history_forward[:, 0].count_nonzero() == 3
    assert torch.equal(eager.weight.grad, other.weight.grad)


@compiles
def test_the_first_forward_of_a_recipe_with_another_history_is_compiled() -> None:
    eager, other = layer(), layer()
    fast, _ = compiled(other)
    for i in range(2):
        for module in (eager, fast):
            with minifloat.autocast(recipe=DELAYED):
                y = module(data(i))
            y.sum().backward()
    other.delayed.fit(4)  # a graph leaves it as long as it was, and uses the first rows
    assert same(buffers(eager), buffers(other))


# -------------------------------------------------------------------- users' modules and operators
def _user_operator() -> Any:
    """`user::round(x, quantizer)`: an operator of the user's own, which takes one of ours."""
    name = f"{MXFP8Quantizer.__module__}.{MXFP8Quantizer.__qualname__}"
    library = torch.library.Library("minifloat_user_test", "FRAGMENT")
    library.define(f"round(Tensor x, {name} quantizer) -> Tensor")

    def rounded(x: Tensor, quantizer: Any) -> Tensor:
        return quantizer.quantize(x).dequantize()  # type: ignore[no-any-return]

    library.impl("round", rounded, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "minifloat_user_test::round", lambda x, quantizer: torch.empty_like(x), lib=library
    )
    torch.library.register_autograd(
        "minifloat_user_test::round", lambda ctx, grad: (grad, None), lib=library
    )
    return library


class Scaled(minifloat.Module):
    """A user's module: a gain, its input rounded as the recipe rounds an activation."""

    module_type = "gain"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.gain = nn.Parameter(torch.linspace(0.5, 2, 32))
        self.asked = 0

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> Any:
        kinds = ("input", "weight", "output") if fwd else ("grad_output", "grad_input")
        return [minifloat.QuantizerRole("gain", kind, self.name or "") for kind in kinds]

    def forward(self, x: Tensor) -> Tensor:
        quantizer = self.quantizers["scaling_fwd"][2]
        rounded = torch.ops.minifloat_user_test.round(x, quantizer)
        return rounded * self.gain  # type: ignore[no-any-return]


@compiles
def test_a_users_module_and_operator_in_one_graph() -> None:
    roles: list[Any] = []

    def factory(role: Any) -> Any:
        roles.append(role)
        return MXFP8Quantizer(minifloat.DType.kFloat8E4M3)

    library = _user_operator()
    try:
        recipe = recipes.CustomRecipe(qfactory=factory)
        module, tail = Scaled("mine"), layer()

        def function(x: Tensor) -> Any:
            with minifloat.autocast(recipe=recipe):
                return tail(module(x))

        assert agree(function, module, tail) == 1
        assert minifloat.QuantizerRole("gain", "output", "mine") in roles
        x = data()
        quantizer = MXFP8Quantizer(minifloat.DType.kFloat8E4M3)
        with torch.no_grad(), minifloat.autocast(recipe=recipe):
            assert torch.equal(module(x), quantizer.quantize(x).dequantize() * module.gain)
    finally:
        library._destroy()


def test_quantizers_of_a_module() -> None:
    module = layer()
    assert module.quantizers == {"scaling_fwd": [], "scaling_bwd": []}
    for name, make in RECIPES.items():
        recipe = make()
        with minifloat.autocast(recipe=recipe):
            found = module.quantizers
        assert [len(found[k]) for k in ("scaling_fwd", "scaling_bwd")] == [3, 2]
        for mode, key in (("forward", "scaling_fwd"), ("backward", "scaling_bwd")):
            state = recipes.RecipeState.create(
                recipe,
                mode=mode,
                num_quantizers=len(found[key]),
                roles=module.get_quantizer_roles(
                    fwd=mode == "forward", num_quantizers=len(found[key])
                ),
            )
            for ours, theirs in zip(found[key], state.make_quantizers(), strict=True):
                assert type(ours) is type(theirs)
                assert name == "delayed" or ours == theirs


class Rounds(minifloat.Module):
    """A user's module that scales by history."""

    def forward(self, x: Tensor) -> Tensor:
        return self.quantizers["scaling_fwd"][0].quantize(x).dequantize()  # type: ignore[no-any-return]


def test_a_users_module_scales_by_history() -> None:
    module, x = Rounds(), data()
    for _ in range(2):
        with minifloat.autocast(recipe=DELAYED):
            y = module(x)
    scale = 448 / x.abs().max()
    assert module.delayed.scale_input == scale and "delayed.scale_input" in module.state_dict()
    quantizer = Float8Quantizer(scale, torch.zeros(1), minifloat.DType.kFloat8E4M3)
    assert torch.equal(y, quantizer.quantize(x).dequantize())


@compiles
def test_a_users_module_that_scales_by_history_says_so_in_a_graph() -> None:
    fast, _ = compiled(Rounds(name="mine"))
    with (
        minifloat.autocast(recipe=DELAYED),
        pytest.raises(Exception, match="(?s)mine.*quantizers with delayed.*use current scaling"),
    ):
        fast(data())


@compiles
def test_roles_of_the_boundary_are_given_to_the_factory() -> None:
    roles: list[Any] = []

    def factory(role: Any) -> Any:
        roles.append(role)
        return mxfp8()

    module = layer(name="fc")
    consumer = minifloat.QuantizerRole("dpa", "qkv", "attention")
    module.output_quantizer_role = consumer
    module.grad_input_quantizer_role = consumer
    with minifloat.autocast(recipe=recipes.CustomRecipe(qfactory=factory)):
        module(data())
    assert roles[2] == consumer and roles[4] == consumer
    assert roles[0] == minifloat.QuantizerRole("linear", "input", "fc")


@compiles
def test_names_do_not_tell_layers_apart_under_built_in_recipes() -> None:
    first, second = layer(name="a"), layer(name="b")
    recipe = recipes.Float8CurrentScaling()
    assert recipe.plan(*first._roles(recipe)) is recipe.plan(*second._roles(recipe))


def test_no_warnings_in_a_plain_step() -> None:
    module = layer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in RECIPES:
            x = data().requires_grad_()
            with minifloat.autocast(recipe=RECIPES[name]()):
                y = module(x)
            y.sum().backward()


def _largest(history: Tensor) -> Tensor:
    return history.amax(0)


def _scale(amax: Tensor, scale: Tensor, limit: Tensor, recipe: Any) -> Tensor:
    return limit / (amax + 1 + recipe.margin)


@compiles
@pytest.mark.parametrize("around", [None, CURRENT], ids=["outermost", "nested"])
def test_functions_of_delayed_scaling_around_a_graph(around: Any) -> None:
    recipe = recipes.DelayedScaling(
        margin=2, amax_compute_algo=_largest, scaling_factor_compute_algo=_scale
    )
    eager, other = layer(), layer()

    def step(module: Any) -> Any:
        def function(x: Tensor) -> Any:
            if around is None:
                return module(x)
            with minifloat.autocast(recipe=recipe):
                return module(x)

        return function

    fast, counter = compiled(step(other))
    for i in range(3):
        for call in (step(eager), fast):
            with minifloat.autocast(recipe=recipe if around is None else around):
                y = call(data(i))
            y.sum().backward()
    assert counter.graphs == 1 and same(buffers(eager), buffers(other))
    assert eager.delayed.scale_input != 1 and torch.equal(eager.weight.grad, other.weight.grad)


@compiles
def test_the_deprecated_name_in_a_graph() -> None:
    module = layer()

    def function(x: Tensor) -> Any:
        with minifloat.fp8_autocast(enabled=True, fp8_recipe=MX):
            return module(x)

    with pytest.warns(DeprecationWarning, match="autocast"):
        assert agree(function, module) == 1


@pytest.mark.parametrize("region", [minifloat.autocast, minifloat.quantized_model_init])
def test_a_recipe_in_the_place_of_enabled(region: Any) -> None:
    with pytest.raises(TypeError, match="enabled: got a recipe.*recipe="):
        region(MX)


def test_a_group_that_is_none() -> None:
    with pytest.raises(TypeError, match="amax_reduction_group: got str.*process group"):
        minifloat.autocast(amax_reduction_group="world")
