"""State dicts of LayerNormLinear and LayerNormMLP: keys, delayed scaling, Transformer Engine's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import minifloat
from minifloat import recipe as recipes
from minifloat.convert import convert_checkpoint, convert_state_dict

from .cases import RECIPES, STATELESS
from .layers import KINDS
from .test_linear_state import DELAYED, SLOTS, delayed_state, payload, with_recipe

RECIPE = recipes.DelayedScaling(amax_history_len=4)
NORM = ["layer_norm_weight", "layer_norm_bias"]
KEYS = {
    "LayerNormLinear": [*NORM, "weight", "bias"],
    "LayerNormMLP": [*NORM, "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"],
}
PARTS = {"LayerNormLinear": ("",), "LayerNormMLP": ("fc1.", "fc2.")}
STATE = {kind: {f"{part}{key}" for part in PARTS[kind] for key in DELAYED} for kind in KINDS}
both = pytest.mark.parametrize("kind", KINDS)


def layer(kind: str, **kwargs: Any) -> Any:
    torch.manual_seed(1)
    return getattr(minifloat, kind)(16, 24, **kwargs)


def delayed_of(module: Any) -> list[Any]:
    if hasattr(module, "fc1"):
        return [module.fc1.delayed, module.fc2.delayed]
    return [module.delayed]


def step(module: Any, i: int, recipe: recipes.Recipe = RECIPE) -> list[Tensor]:
    """One training step; what it made."""
    torch.manual_seed(50 + i)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(i)) * (i + 1)
    x = x.to(module.layer_norm_weight.dtype).requires_grad_()
    module.zero_grad(set_to_none=True)
    with minifloat.autocast(recipe=recipe):
        y = module(x)
    (y * torch.linspace(-2, 3, y.numel()).reshape(y.shape).to(y.dtype)).sum().backward()
    assert x.grad is not None
    made = [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
    return made + [b.clone() for b in module.buffers()]


def equal(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    for i, (one, other) in enumerate(zip(a, b, strict=True)):
        assert one.dtype == other.dtype and torch.equal(one, other), i


def used(kind: str, steps: int = 3, **kwargs: Any) -> Any:
    made = layer(kind, **kwargs)
    for i in range(steps):
        step(made, i)
    return made


# ------------------------------------------------------------------------------------------- keys
@both
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rms", [True, False])
def test_keys_are_the_parameters(kind: str, bias: bool, rms: bool) -> None:
    made = layer(kind, bias=bias, normalization="RMSNorm" if rms else "LayerNorm")
    keys = [k for k in KEYS[kind] if bias or not k.endswith("bias") or k in NORM]
    keys = [k for k in keys if not (rms and k == "layer_norm_bias")]
    assert list(made.state_dict()) == keys
    assert [name for name, _ in made.named_parameters()] == keys
    assert not rms or made.layer_norm_bias is None
    plain = {k: torch.randn(made.state_dict()[k].shape) for k in keys}
    made.load_state_dict(plain, strict=True)
    assert all(torch.equal(v, made.state_dict()[k]) for k, v in plain.items())


@both
def test_sizes_and_initial_values(kind: str) -> None:
    made, centred = layer(kind), layer(kind, zero_centered_gamma=True)
    assert bool((made.layer_norm_weight == 1).all()) and not centred.layer_norm_weight.any()
    assert not made.layer_norm_bias.any()
    if kind == "LayerNormMLP":
        assert tuple(made.fc1_weight.shape) == (24, 16) and tuple(made.fc2_weight.shape) == (16, 24)
        gated = layer(kind, activation="swiglu")
        assert tuple(gated.fc1_weight.shape) == (48, 16) and tuple(gated.fc1_bias.shape) == (48,)
        assert tuple(gated.fc2_weight.shape) == (16, 24)


@pytest.mark.parametrize("kind", KINDS)
def test_norm_parameters_are_reset_by_themselves(kind: str) -> None:
    layer = getattr(minifloat, kind)(16, 32, zero_centered_gamma=True, device="cpu")
    weights = [p.clone() for n, p in layer.named_parameters() if n.endswith("weight")][1:]
    with torch.no_grad():
        layer.layer_norm_weight.fill_(3.0)
        layer.layer_norm_bias.fill_(3.0)
    with pytest.warns(DeprecationWarning, match="reset_parameters does this too"):
        layer.reset_layer_norm_parameters()
    assert not layer.layer_norm_weight.any() and not layer.layer_norm_bias.any()
    now = [p for n, p in layer.named_parameters() if n.endswith("weight")][1:]
    assert all(torch.equal(a, b) for a, b in zip(weights, now, strict=True))


def test_each_weight_has_its_init_method() -> None:
    ones, twos = nn.init.ones_, lambda w: nn.init.constant_(w, 2.0)
    made = layer("LayerNormMLP", init_method=ones, output_layer_init_method=twos)
    assert bool((made.fc1_weight == 1).all()) and bool((made.fc2_weight == 2).all())
    made = layer("LayerNormMLP", init_method=ones)
    assert bool((made.fc2_weight == 1).all())


@both
@pytest.mark.parametrize("name", STATELESS)
def test_stateless_recipes_leave_no_state(kind: str, name: str) -> None:
    made = layer(kind)
    step(made, 0, RECIPES[name]())
    assert list(made.state_dict()) == KEYS[kind]


@both
def test_a_workspace_is_no_state(kind: str) -> None:
    with minifloat.autocast(recipe=recipes.Float8CurrentScaling()):
        made = layer(kind, cache_weights=True)
    assert list(made.state_dict()) == KEYS[kind]


# --------------------------------------------------------------------------------- delayed scaling
@both
def test_it_is_written_after_a_delayed_forward_only(kind: str) -> None:
    made = layer(kind)
    assert not any("delayed" in k for k in made.state_dict())
    step(made, 0)
    assert set(made.state_dict()) == {*KEYS[kind], *STATE[kind]}
    calibrated = layer(kind)
    with minifloat.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        calibrated(torch.randn(5, 16))
    assert set(calibrated.state_dict()) == {*KEYS[kind], *STATE[kind]}


@both
def test_calibration_records_what_a_delayed_forward_would(kind: str) -> None:
    """Up to fc1, whose output calibration computes in high precision."""
    x = torch.randn(5, 16)
    made, other = layer(kind), layer(kind)
    with minifloat.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        y = made(x)
    assert torch.equal(y, other(x))
    with torch.no_grad(), minifloat.autocast(recipe=RECIPE):
        other(x)
    for slot in ("input", "weight"):
        a, b = (delayed_of(m)[0].live(slot)[1] for m in (made, other))
        assert torch.equal(a, b) and a > 0
        assert all(held.live(slot)[1] > 0 for held in delayed_of(made))


def test_calibration_records_what_fc2_reads_of_quantized_weights_under_torch_autocast() -> None:
    torch.manual_seed(1)
    with minifloat.quantized_model_init(recipe=recipes.Float8CurrentScaling()):
        made = minifloat.LayerNormMLP(64, 64, params_dtype=torch.float16, device="cpu")
    with torch.no_grad():
        made.fc2_weight.copy_(torch.eye(64))
    for i in range(40):
        made.fc2.delayed.reset()
        x = torch.randn(1, 64, generator=torch.Generator().manual_seed(i))
        with (
            pytest.warns(UserWarning, match="dequantized"),
            torch.autocast("cpu", dtype=torch.bfloat16),
            minifloat.autocast(enabled=False, calibrating=True, recipe=RECIPE),
        ):
            y = made(x)
        assert made.fc2.delayed.amax_input == y.abs().max()


@both
def test_its_absence_is_accepted_and_changes_nothing(kind: str) -> None:
    made = used(kind)
    before = [b.clone() for b in made.buffers()]
    made.load_state_dict(layer(kind).state_dict(), strict=True)
    equal(before, list(made.buffers()))


@both
@pytest.mark.parametrize("way", ["dict", "file", "deepcopy", "assign"])
def test_the_next_step_is_that_of_an_uninterrupted_run(kind: str, way: str, tmp_path: Any) -> None:
    made = used(kind)
    if way == "deepcopy":
        other = copy.deepcopy(made)
    else:
        other, state = layer(kind), copy.deepcopy(made.state_dict())
        if way == "file":
            torch.save(state, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt")
        other.load_state_dict(state, strict=True, assign=way == "assign")
    equal(step(made, 3), step(other, 3))


@both
@pytest.mark.parametrize("key", ["scale_input", "history_backward"])
def test_part_of_it_is_missing_or_wrong(kind: str, key: str) -> None:
    state, fresh = used(kind).state_dict(), layer(kind)
    key = f"{PARTS[kind][-1]}delayed.{key}"
    with pytest.raises(RuntimeError, match=f"(?s)Missing.*{key}"):
        layer(kind).load_state_dict({k: v for k, v in state.items() if k != key})
    with pytest.raises(RuntimeError, match=f"{key}: the checkpoint has shape"):
        fresh.load_state_dict({**state, key: torch.zeros(3, 9)})
    assert not delayed_of(fresh)[-1].used


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_of_parameters_are_not_its_own(kind: str, dtype: torch.dtype) -> None:
    made = used(kind)
    before = [b.clone() for b in made.buffers()]
    made = made.to(dtype)
    assert all(p.dtype is dtype for p in made.parameters())
    equal(before, list(made.buffers()))
    step(made, 3)


@both
def test_a_workspace_is_dropped_when_the_module_moves(kind: str) -> None:
    made, x = layer(kind), torch.randn(5, 16)
    with minifloat.autocast(recipe=recipes.Float8CurrentScaling()):
        made(x, is_first_microbatch=True)
        made = made.bfloat16()
        y = made(x.bfloat16(), is_first_microbatch=False)
        assert torch.equal(y, made(x.bfloat16()))


@both
def test_a_cached_weight_kept_in_buffers_survives_a_move(kind: str) -> None:
    with minifloat.autocast(recipe=recipes.Float8CurrentScaling()):
        made = layer(kind, cache_weights=True).bfloat16()
        x = torch.randn(5, 16).bfloat16()
        plain = layer(kind).bfloat16()
        assert torch.equal(made(x), plain(x))


# -------------------------------------------------------------------------------------------- meta
@both
@pytest.mark.parametrize("primary", [False, True])
def test_meta_parameters_are_made_by_reset(kind: str, primary: bool) -> None:
    recipe = recipes.Float8CurrentScaling()
    with minifloat.quantized_model_init(enabled=primary, recipe=recipe):
        made = layer(kind, device="meta")
        assert all(p.is_meta for p in made.parameters())
        torch.manual_seed(1)
        made.reset_parameters()
        torch.manual_seed(1)
        other = layer(kind)
    assert not any(t.is_meta for t in (*made.parameters(), *made.buffers()))
    for (name, a), b in zip(made.named_parameters(), other.parameters(), strict=True):
        quantized = primary and a.dim() == 2
        assert isinstance(a, minifloat.QuantizedTensor) is quantized, name
        assert torch.equal(*(t.dequantize() if quantized else t for t in (a, b))), name
        assert getattr(a, "tensor_model_parallel", False) is (a.dim() == 2)
        if name.startswith("layer_norm"):
            assert a.sequence_parallel is False
    equal(step(made, 0, recipe), step(other, 0, recipe))


@both
@pytest.mark.parametrize("way", ["assign", "to_empty"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_checkpoint_brings_a_module_from_the_meta_device(kind: str, way: str, steps: int) -> None:
    """Delayed scaling's state too, whether it is in the checkpoint or not."""
    reference = used(kind, steps)
    made = layer(kind, device="meta")
    if way == "to_empty":
        made.to_empty(device="cpu")
    made.load_state_dict(copy.deepcopy(reference.state_dict()), assign=way == "assign")
    equal(step(made, steps), step(reference, steps))


@both
def test_to_empty_and_reset_start_anew(kind: str) -> None:
    made = used(kind).to_empty(device="cpu")
    torch.manual_seed(1)
    made.reset_parameters()
    equal(step(made, 0), step(layer(kind), 0))


# ------------------------------------------------------------------------------ quantized weights
@both
@pytest.mark.parametrize("name", list(RECIPES))
def test_quantized_weights_load_and_are_saved_bit_for_bit(
    kind: str, name: str, tmp_path: Any
) -> None:
    recipe = RECIPES[name]()
    with minifloat.quantized_model_init(recipe=recipe):
        made, other = layer(kind), layer(kind)
    assert made.primary_weights_in_fp8
    step(made, 0, recipe)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape))
    torch.save(made.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"), strict=True)
    third = copy.deepcopy(made)
    expected = step(made, 1, recipe)
    equal(expected, step(other, 1, recipe))
    equal(expected, step(third, 1, recipe))


@both
def test_a_quantized_weight_takes_the_checkpoints_scale(kind: str) -> None:
    state = used(kind).state_dict()
    with minifloat.quantized_model_init(recipe=RECIPE):
        made = layer(kind)
    made.load_state_dict(state, strict=True)
    for part, name in (("fc1.", "fc1_weight"), ("fc2.", "fc2_weight"), ("", "weight")):
        if name in state:
            scale, w = state[f"{part}delayed.scale_weight"], getattr(made, name)
            quantizer = minifloat.Float8Quantizer(
                scale, torch.zeros(1), minifloat.DType.kFloat8E4M3
            )
            assert torch.equal(w.dequantize(), quantizer.quantize(state[name]).dequantize())
            assert scale != 1


# ------------------------------------------------------------------------------ Transformer Engine
SIZES = {"LayerNormLinear": (3, 2), "LayerNormMLP": (6, 4)}


def check_converted(held: Any, state: dict[str, Any], part: int) -> None:
    """Slots of a GEMM follow those of the one before it: three forward, two backward."""
    fwd = state["amax_history_fwd"][:, 3 * part : 3 * part + 3].clone()
    bwd = state["amax_history_bwd"][:, 2 * part : 2 * part + 2].clone()
    for i, slot in enumerate(SLOTS):
        name, history, at = ("scale_fwd", fwd, i) if i < 3 else ("scale_bwd", bwd, i - 3)
        s, amax = held.live(slot)
        assert s == state[name][(3 if i < 3 else 2) * part + at], slot
        assert amax == history[0, at], slot
    fwd[0], bwd[0] = 0, 0
    assert torch.equal(held.history_forward, fwd) and torch.equal(held.history_backward, bwd)


@both
@pytest.mark.parametrize("kind_of_bytes", ["uint8", "zip", "legacy"])
def test_extra_state_is_refused_and_converted(kind: str, kind_of_bytes: str, tmp_path: Any) -> None:
    state = delayed_state(6, *SIZES[kind])
    plain = layer(kind).state_dict()
    entry = with_recipe(state, kind_of_bytes)
    theirs = {**{f"block.{k}": v for k, v in plain.items()}, "block._extra_state": entry}
    model = nn.ModuleDict({"block": layer(kind)})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"block\._extra_state.*minifloat convert-checkpoint"):
        model.load_state_dict({k: v + 1 if "weight" in k else v for k, v in theirs.items()})
    assert model.state_dict().keys() == before.keys()
    equal(list(before.values()), list(model.state_dict().values()))
    if kind_of_bytes == "uint8":
        torch.save(theirs, tmp_path / "in.pt")
        assert convert_checkpoint(tmp_path / "in.pt", tmp_path / "out.pt") == 1
        ours = torch.load(tmp_path / "out.pt")
    else:
        ours, count = convert_state_dict(theirs)
        assert count == 1
    assert set(ours) == {f"block.{k}" for k in (*KEYS[kind], *STATE[kind])}
    model.load_state_dict(ours, strict=True)
    for part, held in enumerate(delayed_of(model["block"])):
        check_converted(held, state, part)
    step(model["block"], 0)


@both
def test_empty_and_stateless_extra_state_is_ignored(kind: str) -> None:
    made = layer(kind)
    extra = {"extra_fp8_variables": {"num_gemms": 2}}
    for entry in (
        None,
        torch.empty(0, dtype=torch.uint8),
        with_recipe(extra, "uint8", "Float8CurrentScaling"),
    ):
        made.load_state_dict({**made.state_dict(), "_extra_state": entry}, strict=True)
        ours, _ = convert_state_dict({**made.state_dict(), "_extra_state": entry})
        assert list(ours) == KEYS[kind]


def test_the_number_of_slots_must_be_the_modules() -> None:
    state = {"x.fc1_weight": torch.zeros(1), "x._extra_state": payload(delayed_state(4, 3, 2))}
    with pytest.raises(
        ValueError, match=r"x\._extra_state: scale_fwd.*2 linear layers have \(6,\)"
    ):
        convert_state_dict(state)


LAYERS: dict[str, Any] = {
    **{kind: lambda kind=kind: layer(kind, device="cpu") for kind in KINDS},
    "GroupedLinear": lambda: minifloat.GroupedLinear(2, 16, 24, device="cpu"),
    "ops.Linear": lambda: minifloat.ops.Sequential(minifloat.ops.Linear(16, 24, device="cpu")),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_distributed_checkpoint_has_delayed_scalings_state(kind: str, tmp_path: Path) -> None:
    """It is read in place, into what the state dict of a new model names: without the state the
    model began with scale 1, and nobody said so."""
    trained, new = LAYERS[kind](), LAYERS[kind]()
    splits = ([4, 4],) if kind == "GroupedLinear" else ()
    for _ in range(2):
        with minifloat.autocast(recipe=RECIPE):
            y = trained(torch.randn(8, 16), *splits)
        y.sum().backward()
    dcp.save(trained.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    names = set(new.state_dict())
    with minifloat.autocast(recipe=recipes.MXFP8BlockScaling()):
        assert set(new.state_dict()) == names
    with minifloat.autocast(recipe=RECIPE):
        dcp.load(new.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    expected = trained.state_dict()
    assert set(new.state_dict()) == set(expected) > names
    for name, value in new.state_dict().items():
        assert torch.equal(value, expected[name]), name
