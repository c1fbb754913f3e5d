"""State dicts: `nn.Linear`'s and ours, delayed scaling as plain tensors, Transformer Engine's."""

from __future__ import annotations

import contextlib
import copy
import enum
import io
import os
import pickle
import re
import sys
import types
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import minifloat
from minifloat import recipe as recipes
from minifloat.cli import main
from minifloat.convert import convert_checkpoint, convert_state_dict, read_extra_state

from .cases import RECIPES, STATELESS

SLOTS = ("input", "weight", "output", "grad_output", "grad_input")
DELAYED = {
    *(f"delayed.{kind}_{slot}" for kind in ("scale", "amax") for slot in SLOTS),
    "delayed.history_forward",
    "delayed.history_backward",
}
RECIPE = recipes.DelayedScaling(amax_history_len=4)


def layer(**kwargs: Any) -> Any:
    torch.manual_seed(1)
    return minifloat.Linear(16, 24, **kwargs)


def step(module: Any, i: int, recipe: recipes.Recipe = RECIPE) -> list[Tensor]:
    """One training step; what it made."""
    torch.manual_seed(50 + i)
    x = (torch.randn(5, 16, generator=torch.Generator().manual_seed(i)) * (i + 1)).to(
        module.weight.dtype
    )
    x.requires_grad_()
    module.zero_grad(set_to_none=True)
    with minifloat.autocast(recipe=recipe):
        y = module(x)
    (y * torch.linspace(-2, 3, y.numel()).reshape(y.shape).to(y.dtype)).sum().backward()
    assert x.grad is not None
    made = [y.detach(), x.grad, module.weight.grad.clone()]
    return made + [b.clone() for b in module.delayed.buffers()]


def equal(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    for i, (one, other) in enumerate(zip(a, b, strict=True)):
        assert one.dtype == other.dtype and torch.equal(one, other), i


def used(steps: int = 3) -> Any:
    made = layer()
    for i in range(steps):
        step(made, i)
    return made


# ------------------------------------------------------------------------------- with nn.Linear
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_nn_linear_loads_strictly_and_back(bias: bool, dtype: torch.dtype) -> None:
    plain = nn.Linear(16, 24, bias=bias, dtype=dtype)
    ours = layer(bias=bias, params_dtype=dtype)
    assert list(ours.state_dict()) == list(plain.state_dict())
    ours.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(ours.weight, plain.weight)
    other = nn.Linear(16, 24, bias=bias, dtype=dtype)
    other.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(other.weight, plain.weight)


@pytest.mark.parametrize("name", STATELESS)
def test_stateless_recipes_leave_no_state(name: str) -> None:
    ours = layer()
    step(ours, 0, RECIPES[name]())
    assert list(ours.state_dict()) == ["weight", "bias"]
    nn.Linear(16, 24).load_state_dict(ours.state_dict(), strict=True)


def test_a_module_that_holds_one_loads_by_its_path() -> None:
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU())
    ours = nn.Sequential(layer(), nn.ReLU())
    ours.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(ours[0].weight, model[0].weight)


def test_split_parameters_are_plain_keys() -> None:
    ours = layer(parameters_split=("a", "b_"))
    assert list(ours.state_dict()) == ["a_weight", "b_weight", "a_bias", "b_bias"]


def test_a_workspace_is_no_state() -> None:
    with minifloat.autocast(recipe=recipes.Float8CurrentScaling()):
        ours = layer(cache_weights=True)
    assert list(ours.state_dict()) == ["weight", "bias"]


# -------------------------------------------------------------------------------- delayed state
def test_it_is_written_after_a_delayed_forward_only() -> None:
    ours = layer()
    assert not any(k.startswith("delayed") for k in ours.state_dict())
    with minifloat.autocast(enabled=False):
        ours(torch.randn(5, 16))
    assert not any(k.startswith("delayed") for k in ours.state_dict())
    step(ours, 0)
    state = ours.state_dict()
    assert set(state) == {"weight", "bias"} | DELAYED
    for key in DELAYED:
        assert type(state[key]) is Tensor and state[key].dtype is torch.float32, key
        assert not state[key].requires_grad


def test_calibration_counts_as_a_delayed_forward() -> None:
    ours = layer()
    with minifloat.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        ours(torch.randn(5, 16))
    assert set(ours.state_dict()) >= DELAYED


def test_its_absence_is_accepted_and_changes_nothing() -> None:
    ours = used()
    before = {k: v.clone() for k, v in ours.delayed.named_buffers()}
    ours.load_state_dict(nn.Linear(16, 24).state_dict(), strict=True)
    for name, buffer in ours.delayed.named_buffers():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.parametrize("way", ["dict", "file", "safetensors", "deepcopy", "assign", "pickle"])
def test_the_next_step_is_that_of_an_uninterrupted_run(way: str, tmp_path: Any) -> None:
    ours = used()
    if way == "deepcopy":
        other = copy.deepcopy(ours)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(ours))
    else:
        state = {k: v.clone() for k, v in ours.state_dict().items()}
        if way == "file":
            torch.save(ours.state_dict(), tmp_path / "a.pt")
            state = torch.load(tmp_path / "a.pt", weights_only=True)
        elif way == "safetensors":
            from safetensors.torch import load_file, save_file

            save_file(state, tmp_path / "a.safetensors")
            state = load_file(tmp_path / "a.safetensors")
        other = minifloat.Linear(16, 24)
        other.load_state_dict(state, strict=True, assign=way == "assign")
    for (name, a), (_, b) in zip(
        ours.delayed.named_buffers(), other.delayed.named_buffers(), strict=True
    ):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr(), name
    assert other.delayed.used
    for i in range(3, 6):
        equal(step(ours, i), step(other, i))


def test_between_forward_and_backward_amaxes_are_kept() -> None:
    """A checkpoint of a step under way: what was recorded is part of it."""
    ours = used()
    with minifloat.autocast(recipe=RECIPE):
        ours(torch.randn(5, 16))
        state = copy.deepcopy(ours.state_dict())
    assert state["delayed.amax_input"] > 0
    other = layer()
    other.load_state_dict(state)
    assert torch.equal(other.delayed.amax_input, state["delayed.amax_input"])


@pytest.mark.parametrize("length", [1, 2, 4, 9, 1024])
def test_histories_of_any_length_load(length: int) -> None:
    ours = used()
    other = layer()
    step(other, 0, RECIPE.replace(amax_history_len=length))
    other.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(other.delayed.history_forward, ours.delayed.history_forward)
    equal(step(ours, 3), step(other, 3))


def test_a_recipe_with_another_length_resizes_it() -> None:
    ours = used()
    before = ours.delayed.history_forward.clone()
    step(ours, 3, RECIPE.replace(amax_history_len=7))
    assert ours.delayed.history_forward.shape == (7, 3)
    assert torch.equal(ours.delayed.history_forward[1:3], before[2:])  # rolled by the step


@pytest.mark.parametrize("name", sorted(RECIPES))
@pytest.mark.parametrize("first", [None, True])
def test_an_evaluation_in_inference_mode_leaves_nothing_that_cannot_train(
    name: str, first: bool | None
) -> None:
    """Neither in the histories, which it may fit to its recipe, nor in a kept weight."""
    recipe, x = RECIPES[name](), torch.randn(5, 16)
    mine, plain = (layer(cache_weights=first is None) for _ in range(2))
    with torch.inference_mode(), minifloat.autocast(recipe=recipe):
        mine(x, is_first_microbatch=first)
    for module in (mine, plain):
        for again in (first, None if first is None else False):
            torch.manual_seed(0)
            with minifloat.autocast(recipe=recipe):
                module(x, is_first_microbatch=again).square().sum().backward()
    assert torch.equal(mine.weight.grad, plain.weight.grad)


def test_histories_that_are_loaded_in_inference_mode_train() -> None:
    module, other = layer(), layer()
    step(module, 0, recipes.DelayedScaling(amax_history_len=9))
    with torch.inference_mode():
        other.load_state_dict(module.state_dict())
    step(other, 1)


def test_part_of_it_is_missing() -> None:
    ours = used()
    state = ours.state_dict()
    del state["delayed.scale_weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*delayed\.scale_weight"):
        layer().load_state_dict(state, strict=True)
    other = layer()
    result = other.load_state_dict(state, strict=False)
    assert result.missing_keys == ["delayed.scale_weight"] and not result.unexpected_keys
    assert torch.equal(other.delayed.scale_input, ours.delayed.scale_input)
    assert other.delayed.scale_weight == 1


def test_what_is_not_part_of_it_is_unexpected() -> None:
    state = {**used().state_dict(), "delayed.colour": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*delayed\.colour"):
        layer().load_state_dict(state, strict=True)


@pytest.mark.parametrize("key", ["delayed.scale_input", "delayed.history_backward"])
def test_a_wrong_shape_is_refused_and_changes_nothing(key: str) -> None:
    state = {**used().state_dict(), key: torch.zeros(2, 5)}
    other = layer()
    with pytest.raises(RuntimeError, match=rf"{key}.*\(2, 5\)"):
        other.load_state_dict(state)
    assert not other.delayed.used
    assert torch.equal(other.delayed.scale_input, torch.ones(1))


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.float(),
    ],
)
def test_dtypes_of_parameters_are_not_its_own(move: Any) -> None:
    ours = used()
    before = {k: v.clone() for k, v in ours.delayed.named_buffers()}
    move(ours)
    for name, buffer in ours.delayed.named_buffers():
        assert buffer.dtype is torch.float32 and torch.equal(buffer, before[name]), name
    state = ours.state_dict()
    assert all(state[key].dtype is torch.float32 for key in DELAYED)


def test_a_bf16_checkpoint_of_it_is_widened() -> None:
    state = used().state_dict()
    other = layer()
    other.load_state_dict({k: v.bfloat16() if k in DELAYED else v for k, v in state.items()})
    assert other.delayed.scale_input.dtype is torch.float32
    other = layer()
    other.load_state_dict(
        {k: v.bfloat16() if k in DELAYED else v for k, v in state.items()}, assign=True
    )
    assert other.delayed.scale_input.dtype is torch.float32


def test_a_compiled_layer_sees_what_is_loaded() -> None:
    ours = used()
    other = layer()
    step(other, 0)  # histories have their length now
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 16)
    with minifloat.autocast(recipe=RECIPE):
        compiled(x)
    other.load_state_dict(ours.state_dict())
    with minifloat.autocast(recipe=RECIPE):
        got = compiled(x)
    with minifloat.autocast(recipe=RECIPE):
        expected = ours(x)
    assert torch.equal(got, expected)
    assert torch.equal(other.delayed.history_forward, ours.delayed.history_forward)


@pytest.mark.parametrize("name", list(RECIPES))
def test_quantized_weights_load_and_are_saved_bit_for_bit(name: str, tmp_path: Any) -> None:
    recipe = RECIPES[name]()
    with minifloat.quantized_model_init(recipe=recipe):
        ours, other = layer(), minifloat.Linear(16, 24)
    step(ours, 0, recipe)
    torch.save(ours.state_dict(), tmp_path / "a.pt")
    other.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True), strict=True)
    assert torch.equal(ours.weight.dequantize(), other.weight.dequantize())
    plain = nn.Linear(16, 24)
    with torch.no_grad():
        plain.weight.mul_(0.2)  # delayed scaling quantizes it by the scale of smaller weights
    other.load_state_dict(plain.state_dict(), strict=True)
    error = (other.weight.dequantize() - plain.weight).abs().max()
    assert error < 0.2 * plain.weight.abs().max()


def test_a_quantized_weight_takes_the_checkpoints_scale() -> None:
    """Delayed scaling's scale is there before the values that it quantizes."""
    with minifloat.quantized_model_init(recipe=RECIPE):
        ours = layer()
    plain = nn.Linear(16, 24)
    state: dict[str, Tensor] = dict(plain.state_dict())
    state |= {f"delayed.{k}": v.clone() for k, v in layer().delayed.named_buffers()}
    state["delayed.scale_weight"] = torch.tensor([64.0])
    ours.load_state_dict(state, strict=True)
    assert ours.weight._scale_inv == 1 / 64


def test_to_empty_and_reset_start_anew() -> None:
    ours = minifloat.Linear(16, 24, device="meta")
    ours.to_empty(device="cpu")
    ours.reset_parameters()
    equal(list(ours.delayed.buffers()), list(layer().delayed.buffers()))
    assert not ours.delayed.used
    step(ours, 0)


@pytest.mark.parametrize("way", ["assign", "to_empty"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_checkpoint_brings_a_layer_from_the_meta_device(way: str, steps: int) -> None:
    """Delayed scaling's state too, whether it is in the checkpoint or not."""
    reference, ours = used(steps), layer(device="meta")
    if way == "to_empty":
        ours.to_empty(device="cpu")
    ours.load_state_dict(copy.deepcopy(reference.state_dict()), assign=way == "assign")
    equal(step(ours, steps), step(reference, steps))


# -------------------------------------------------------------- Transformer Engine's extra state
MODULE = "transformer_engine.common.recipe"


@contextlib.contextmanager
def stand_in() -> Iterator[Any]:
    """A module of that name, with classes of the kinds that its recipes are. Nothing is theirs."""
    made: Any = types.ModuleType(MODULE)
    helper = namedtuple("helper", ("max_fwd", "max_bwd"))

    class Kind(enum.Enum):
        FIRST = helper(1.0, 2.0)
        SECOND = helper(1.0, 1.0)

    @dataclass
    class DelayedScaling:
        margin: int = 0
        kind: Kind = Kind.FIRST
        algorithm: Any = "max"

    @dataclass
    class Float8CurrentScaling:
        kind: Kind = Kind.FIRST

    for cls in (helper, Kind, DelayedScaling, Float8CurrentScaling):
        cls.__module__, cls.__qualname__ = MODULE, cls.__name__
        setattr(made, cls.__name__, cls)
    names = [MODULE.rsplit(".", i)[0] for i in range(3)]
    before = {name: sys.modules.get(name) for name in names}
    sys.modules[MODULE] = made
    for name in names[1:]:
        sys.modules.setdefault(name, types.ModuleType(name))
    try:
        yield made
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def delayed_state(length: int = 6, fwd: int = 3, bwd: int = 2) -> dict[str, Any]:
    return {
        "scale_fwd": torch.arange(1.0, fwd + 1),
        "amax_history_fwd": torch.arange(float(length * fwd)).reshape(length, fwd),
        "scale_bwd": torch.arange(10.0, 10 + bwd),
        "amax_history_bwd": torch.arange(100.0, 100 + length * bwd).reshape(length, bwd),
        "extra_fp8_variables": {"num_gemms": 1, "names": ["a"], "pair": (1, 2.5)},
    }


def payload(state: Any, kind: str = "uint8", protocol: int = 4) -> Any:
    if kind == "uint8":
        data = pickle.dumps(state, protocol)
        return torch.tensor(list(data), dtype=torch.uint8)
    file = io.BytesIO()
    torch.save(state, file, _use_new_zipfile_serialization=kind == "zip")
    file.seek(0)
    return file


def with_recipe(state: dict[str, Any], kind: str, name: str = "DelayedScaling") -> Any:
    with stand_in() as module:
        return payload({"recipe": getattr(module, name)(), **state}, kind)


KINDS = ("uint8", "zip", "legacy")


def load(entry: Any, **kwargs: Any) -> Any:
    ours = layer()
    ours.load_state_dict({**nn.Linear(16, 24).state_dict(), "_extra_state": entry}, **kwargs)
    return ours


@pytest.mark.parametrize("entry", [None, torch.empty(0, dtype=torch.uint8), io.BytesIO()])
def test_nothing_is_ignored(entry: Any) -> None:
    assert not load(entry, strict=True).delayed.used


@pytest.mark.parametrize("kind", KINDS)
def test_stateless_payloads_are_ignored(kind: str) -> None:
    extra = {"extra_fp8_variables": {"num_gemms": 1}}
    assert not load(with_recipe(extra, kind, "Float8CurrentScaling")).delayed.used
    assert not load(payload(extra, kind)).delayed.used


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("named", [True, False])
def test_delayed_payloads_are_refused(kind: str, named: bool) -> None:
    state = delayed_state()
    entry = with_recipe(state, kind) if named else payload(state, kind)
    ours = layer()
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(RuntimeError, match="minifloat convert-checkpoint") as raised:
        ours.load_state_dict({**nn.Linear(16, 24).state_dict(), "_extra_state": entry})
    assert "_extra_state" in str(raised.value)
    assert torch.equal(ours.weight, before["weight"]) and not ours.delayed.used


def test_the_message_has_the_modules_path() -> None:
    model = nn.Sequential(nn.ReLU(), layer())
    entry = payload(delayed_state())
    with pytest.raises(RuntimeError, match=r"1\._extra_state.*convert-checkpoint"):
        model.load_state_dict({"1._extra_state": entry}, strict=False)


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/nonexistent/bomb",)  # would raise


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("state", [Bomb(), {"a": Bomb()}, {"scale_fwd": Bomb()}])
def test_nothing_is_ever_run(state: Any, protocol: int) -> None:
    entry = payload(state, protocol=protocol)
    with pytest.raises(RuntimeError, match="must not run"):
        load(entry)
    with pytest.raises(ValueError, match=r"mkdir: refused"):
        read_extra_state(entry)


@pytest.mark.parametrize("entry", [torch.full((9,), 7, dtype=torch.uint8), io.BytesIO(b"PK\x03")])
def test_rubbish_is_refused(entry: Any) -> None:
    with pytest.raises(RuntimeError, match="_extra_state.*no pickle"):
        load(entry)
    with pytest.raises(ValueError, match="_extra_state"):
        read_extra_state(entry)


@pytest.mark.parametrize("entry", [torch.zeros(3), {"a": 1}, b"bytes", 3])
def test_other_types_are_refused(entry: Any) -> None:
    with pytest.raises(RuntimeError, match="uint8 tensor"):
        load(entry)
    with pytest.raises(ValueError, match="uint8 tensor"):
        read_extra_state(entry)


# --------------------------------------------------------------------------- convert-checkpoint
def check_converted(ours: Any, state: dict[str, Any]) -> None:
    fwd, bwd = state["amax_history_fwd"].clone(), state["amax_history_bwd"].clone()
    for i, slot in enumerate(SLOTS):
        scale, history, column = ("scale_fwd", fwd, i) if i < 3 else ("scale_bwd", bwd, i - 3)
        s, amax = ours.delayed.live(slot)
        assert s == state[scale][column] and amax == history[0, column], slot
    fwd[0], bwd[0] = 0, 0
    assert torch.equal(ours.delayed.history_forward, fwd)
    assert torch.equal(ours.delayed.history_backward, bwd)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nested", [False, True])
def test_a_file_of_torch_save_is_converted(kind: str, nested: bool, tmp_path: Any) -> None:
    state = delayed_state()
    plain = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16))
    found: Any = plain.state_dict()
    assert isinstance(found, OrderedDict)
    found["0._extra_state"] = with_recipe(state, kind)
    found["1._extra_state"] = torch.empty(0, dtype=torch.uint8)
    whole = {"model": found, "step": 3, "list": [1, "a", None]} if nested else found
    torch.save(whole, tmp_path / "in.pt")
    assert main(["convert-checkpoint", str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]) == 0
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    if nested:
        assert (made["step"], made["list"]) == (3, [1, "a", None])
        made = made["model"]
    assert made._metadata == found._metadata
    ours = nn.Sequential(layer(), minifloat.Linear(24, 16))
    ours.load_state_dict(made, strict=True)
    assert torch.equal(ours[0].weight, plain[0].weight)
    check_converted(ours[0], state)
    assert not ours[1].delayed.used
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.pt", "out.pt"]


def test_a_safetensors_file_is_converted(tmp_path: Any) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    state = delayed_state()
    tensors = {**layer().state_dict(), "_extra_state": with_recipe(state, "uint8")}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"who": "me"})
    with pytest.raises(ValueError, match=r"b\.pt: it is a file of safetensors"):
        convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert not (tmp_path / "b.pt").exists()
    convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    ours = layer()
    ours.load_state_dict(load_file(tmp_path / "b.safetensors"), strict=True)
    check_converted(ours, state)
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert file.metadata() == {"who": "me"}


def test_in_place(tmp_path: Any) -> None:
    path = tmp_path / "a.pt"
    torch.save({"_extra_state": payload(delayed_state())}, path)
    assert convert_checkpoint(path, path) == 1
    assert set(torch.load(path, weights_only=True)) == DELAYED
    assert convert_checkpoint(path, path) == 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Any) -> None:
    """A device or a pipe, /dev/stdout too, was gone afterwards, and so was a link."""
    source, pipe, link = tmp_path / "in.pt", tmp_path / "pipe", tmp_path / "latest.pt"
    torch.save({"_extra_state": payload(delayed_state())}, source)
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="pipe: it is a device or a pipe"):
        convert_checkpoint(source, pipe)
    assert pipe.is_fifo()
    link.symlink_to(source)
    assert convert_checkpoint(link, link) == 1
    assert link.is_symlink() and set(torch.load(source, weights_only=True)) == DELAYED


def test_it_trains_on() -> None:
    """The slots mean the same: one step with the converted state, and with ours."""
    ours, other = used(), layer()
    state = {
        "scale_fwd": torch.cat([ours.delayed.live(s)[0] for s in SLOTS[:3]]),
        "scale_bwd": torch.cat([ours.delayed.live(s)[0] for s in SLOTS[3:]]),
        "amax_history_fwd": ours.delayed.history_forward.clone(),
        "amax_history_bwd": ours.delayed.history_backward.clone(),
    }
    state["amax_history_fwd"][0] = torch.cat([ours.delayed.live(s)[1] for s in SLOTS[:3]])
    state["amax_history_bwd"][0] = torch.cat([ours.delayed.live(s)[1] for s in SLOTS[3:]])
    weights = {k: v for k, v in ours.state_dict().items() if k not in DELAYED}
    made, _ = convert_state_dict({**weights, "_extra_state": payload(state)})
    other.load_state_dict(made, strict=True)
    equal(step(ours, 3), step(other, 3))


@pytest.mark.parametrize("fwd,bwd", [(6, 4), (2, 2), (3, 3)])
def test_layers_of_other_kinds_are_refused(fwd: int, bwd: int) -> None:
    with pytest.raises(ValueError, match=r"x\._extra_state: scale_.*a linear layer has"):
        convert_state_dict({"x._extra_state": payload(delayed_state(4, fwd, bwd))})


@pytest.mark.parametrize("what", [Bomb(), os.system, nn.Linear(2, 2), enum.Enum])
def test_what_it_does_not_know_is_refused_by_name(what: Any, tmp_path: Any, capsys: Any) -> None:
    source, target = tmp_path / "in.pt", tmp_path / "out.pt"
    torch.save({"a": what}, source)
    assert main(["convert-checkpoint", str(source), str(target)]) == 1
    shown = capsys.readouterr().err
    assert str(source) in shown and "refused" in shown
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.pt"]


def test_getattr_is_for_enums_alone() -> None:
    class Reach:
        def __reduce__(self) -> Any:
            return getattr, (torch.device, "__init__")

    with pytest.raises(ValueError, match="getattr.*refused"):
        read_extra_state(payload(Reach()))


def test_a_storage_inside_a_pickle_is_read_as_data() -> None:
    class Inner:
        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (pickle.dumps(Bomb()),)

    with pytest.raises(ValueError, match="_extra_state"):
        read_extra_state(payload({"scale_fwd": Inner()}))


def test_an_enum_as_python_3_11_pickles_it() -> None:
    state = delayed_state()
    with stand_in() as module:

        class Member:
            def __reduce__(self) -> Any:
                return getattr, (module.Kind, "FIRST")

        entry = payload({"recipe": Member(), **state})
    assert set(read_extra_state(entry)) == DELAYED


def test_a_write_that_fails_leaves_the_target_alone(tmp_path: Any, monkeypatch: Any) -> None:
    source, target = tmp_path / "in.pt", tmp_path / "out.pt"
    torch.save({"a": torch.ones(1)}, source)
    target.write_bytes(b"before")

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    assert main(["convert-checkpoint", str(source), str(target)]) == 1
    assert target.read_bytes() == b"before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.pt", "out.pt"]


def test_files_that_are_no_checkpoints(tmp_path: Any, capsys: Any) -> None:
    """The messages were the unpickler's, and named IN and a temporary file for what OUT lacks."""
    good, bad, cut = tmp_path / "good.pt", tmp_path / "bad.pt", tmp_path / "cut.pt"
    torch.save({"a": torch.ones(1)}, good)
    bad.write_bytes(b"")
    cut.write_bytes(good.read_bytes()[:200])
    out = tmp_path / "out.pt"
    for source, target, said in (
        (bad, out, "bad.pt: neither a file of torch.save nor of safetensors"),
        (cut, out, "cut.pt: neither a file of torch.save nor of safetensors"),
        (tmp_path, out, "is a folder; a file"),
        (good, tmp_path, "cannot be written to .*: it is a folder"),
        (good, tmp_path / "no" / "out.pt", "cannot be written to .*out.pt: there is no folder"),
        (good, tmp_path / "out.safetensors", "out.safetensors: it is a file of torch.save"),
    ):
        assert main(["convert-checkpoint", str(source), str(target)]) == 1
        assert re.search(said, capsys.readouterr().err), said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.pt", "cut.pt", "good.pt"]


def test_a_missing_file(tmp_path: Any, capsys: Any) -> None:
    assert main(["convert-checkpoint", str(tmp_path / "no.pt"), str(tmp_path / "out.pt")]) == 1
    assert "no.pt" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["current", "delayed", "nvfp4"])
@pytest.mark.parametrize("move", [lambda m: m.bfloat16(), lambda m: m.to("meta")])
def test_attributes_of_a_quantized_parameter_survive_a_move(name: str, move: Any) -> None:
    with minifloat.quantized_model_init(recipe=RECIPES[name]()):
        layer = minifloat.Linear(32, 48, parallel_mode="row")
    main_grad = layer.weight.main_grad = torch.zeros(48, 32)
    move(layer)
    assert layer.weight.main_grad is main_grad
    assert layer.weight.tensor_model_parallel and layer.weight.partition_dim == 1


def test_weights_whose_gradient_comes_later_say_so() -> None:
    later = minifloat.Linear(8, 8, delay_wgrad_compute=True)
    assert later.weight.skip_backward_post_hook
    assert not hasattr(minifloat.Linear(8, 8).weight, "skip_backward_post_hook")


@pytest.mark.parametrize("name", list(RECIPES))
def test_shapes_without_values(name: str) -> None:
    """A layer on the meta device, and one of fake tensors, tell the shapes of a step."""
    for region in (torch.device("meta"), FakeTensorMode()):
        with region, minifloat.autocast(recipe=RECIPES[name]()):
            layer = minifloat.Linear(32, 48)
            x = torch.randn(2, 5, 32, requires_grad=True)
            y = layer(x)
        with region if isinstance(region, FakeTensorMode) else contextlib.nullcontext():
            y.sum().backward()
        assert y.shape == (2, 5, 48) and x.grad is not None and x.grad.shape == x.shape
        assert layer.weight.grad is not None and layer.weight.grad.shape == (48, 32)
