"""Every kernel compiles for Hopper and Blackwell without a GPU, and keeps its values in registers.

`variants()` of each kernel module names the specialisations; `ptxas -v` on their PTX says what they
spill. CI compiles `IN_CI` of them, `make test-deep` all.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from minifloat import env, kernels  # noqa: E402
from minifloat.formats import Cast, Scale  # noqa: E402
from minifloat.kernels import (  # noqa: E402
    activation_grad,
    gradient_e8m0,
    produce,
    produce_e8m0,
)
from minifloat.kernels.variant import Variant  # noqa: E402
from minifloat.producer import activation  # noqa: E402

ARCHES = (90, 100)
# Modules that launch nothing of their own.
NO_KERNELS = {"entry", "produce_entry", "ragged_entry", "variant"}
# Bytes a kernel may spill, stores and loads together, by a pattern of its id. What is not listed
# may spill nothing. A reason goes with each line.
MAY_SPILL: dict[str, int] = {
    # The ptxas of Triton 3.6, partial tiles: 4 of 255 registers' worth. Triton 3.9's spills none.
    r"^blocks-mxfp8_e4m3_both_bf16_4097x4000-sm100": 32,
    # Some versions of ptxas stay below a number of registers that suits more warps: one too few.
    r"^gradient_e8m0-(values_reglu_sums|only_codes_swiglu)_bf16_4096x4096-": 8,
    # Two casts in partial tiles, one of 8 warps: `pairs` leaves them apart, since they spill.
    r"^beside-1x128_(for|back)ward_partial-": 1 << 13,
    # Whole rows in registers, by some versions of ptxas: 3 and 6 of 255.
    r"^norm-(amax_layer_bf16_4000|backward_add_layer_bf16_20480)-sm90": 24,
}
# CI: bf16 and E4M3 in partial tiles (more code than whole ones), in both directions at once, and of
# NVFP4, whose kernels take seconds each, the three options that differ most.
IN_CI = re.compile(
    r"""
    ^(tensorwise|blocks|dequantize|fp4_amax)-(?!.*e5m2).*bf16_4097x4000-
    | ^blocks-((pow2_)?fp8_e4m3_1x128|mxfp8_e4m3)_both_bf16_4096x4096-  # whole tiles: in words
    | ^blocks-fp8_e4m3_128x128_(row|col)_bf16_4096x4096-
    | ^tensorwise-(amax|((current|large)_both|(scaled|roomy)_(row|col))_e4m3)_bf16_4100x4096-
    | ^tensorwise-amax_fp16_4097x4000-  # in no words
    | ^(transpose|swizzle|delayed|sums)-
    | ^beside-(amax|scaled_backward|1x128_(for|back)ward)_whole-
    | ^produce-(value|amax|scaled_both)_(swiglu|layernorm)_bf16_4097x4000-
    | ^produce-(scaled|1x128)_both_(swiglu|layernorm)_bf16_4100x4096-  # in words
    | ^produce-1x128_both_swiglu_bf16_4096x4096-
    | ^activation_grad-(value(_scaled)?|amax|scaled)_swiglu_bf16_4097x4000-
    | ^activation_grad-(scaled|1x128)_swiglu_sums_bf16_4100x4096-  # in words
    | ^produce_e8m0-kept_both_layernorm_bf16_4097x4096-
    | ^gradient_e8m0-values_swiglu_sums_bf16_4097x4096-
    | ^gradient_blocks-gate_swiglu_e4m3_y_bf16_4096x4096-
    | ^norm-(amax|backward_add)_layer_bf16_(4000|20480)-
    | finish-
    | ^members-
    | ^ragged-ragged_(amax|transpose|(current|scaled)_fp8_e4m3)_spread_bf16_4097x4000-
    | ^ragged-ragged_(fp8_e4m3_1x128|mxfp8_e4m3)_spread_bf16_4097x4000-
    | ^ragged_fp4-ragged_(amax|fp4)_hadamard_spread_bf16_4097x4000-
    | ^ragged-ragged_scaled_fp8_e4m3_spread_bf16_4096x4096-  # in words
    | ^grouped_gemm-.*(fast|split|blocks1?)_whole-
    | ^flat_gemm-(rows|contraction_fast)_whole-
    | ^fp4-fp4_(plain|stochastic|tiles)_both_bf16_4097x4000-
    | ^fp4-fp4_plain_both_bf16_4097x4000_fake-
    """,
    re.VERBOSE,
)


def modules() -> dict[str, Any]:
    """The modules of `minifloat.kernels` that hold kernels, by name."""
    names = (m.name for m in pkgutil.iter_modules(kernels.__path__))
    launching = (n for n in names if not n.startswith("_") and n not in NO_KERNELS)
    return {n: importlib.import_module(f"{kernels.__name__}.{n}") for n in launching}


def parameters() -> Iterator[Any]:
    for name, module in modules().items():
        for variant in module.variants():
            for arch in ARCHES:
                key = f"{name}-{variant.name}-sm{arch}"
                marks = () if IN_CI.search(key) else (pytest.mark.deep,)
                yield pytest.param(variant, arch, id=key, marks=marks)


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was compiled before is compiled again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def ptxas(arch: int) -> str:
    """The assembler that Triton brings for `arch`."""
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        found = get_ptxas(arch)
    except RuntimeError as error:
        pytest.skip(f"no ptxas for sm_{arch}: {error}")
    return str(found.path)


def compile_ptx(variant: Variant, arch: int) -> str:
    source = ASTSource(
        fn=variant.fn,
        signature=variant.signature,
        constexprs=variant.constants,
        attrs=variant.attrs,
    )
    options = variant.config.options
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return str(compiled.asm["ptx"])


def spilled(ptx: str, arch: int, folder: Path) -> int:
    """Bytes of spill stores and loads, per thread, that `ptxas -v` reports."""
    file = folder / "kernel.ptx"
    file.write_text(ptx, encoding="utf-8")
    words = [ptxas(arch), "-v", f"--gpu-name=sm_{arch}a", str(file), "-o", str(folder / "kernel.o")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    assert len(found) >= 2, f"ptxas says nothing about spills:\n{done.stderr}"
    return sum(int(n) for n in found)


def allowed(key: str) -> int:
    return max((n for pattern, n in MAY_SPILL.items() if re.search(pattern, key)), default=0)


PARAMETERS = list(parameters())


@pytest.mark.parametrize(("variant", "arch"), PARAMETERS)
def test_compiles_without_spills(
    variant: Variant, arch: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    key = request.node.callspec.id
    ptxas(arch)  # skips first: a compilation needs it as well
    found = spilled(compile_ptx(variant, arch), arch, tmp_path)
    assert found <= allowed(key), f"{key} spills {found} bytes per thread"


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("tensorwise", r"^(amax|(scaled|current)_both_e4m3)_bf16_4096x4096$"),
        ("blocks", r"^(fp8_e4m3_(1x128|128x128)|mxfp8_e4m3)_both_bf16_4096x4096$"),
        ("fp4_amax", r"^fp4_amax_plain_bf16_4096x4096$"),
        ("fp4", r"^fp4_plain_row_bf16_4096x4096$"),
        ("produce", r"^scaled_both_swiglu_bf16_4096x4096$"),
        ("activation_grad", r"^scaled_swiglu_bf16_4096x4096$"),
        ("ragged", r"^ragged_scaled_fp8_e4m3_spread_bf16_4096x4096$"),
    ],
)
def test_casts_of_whole_tiles_compile_for_sm_89(
    name: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has FP8, and not all that kernels of words are made of."""
    ptxas(90)
    monkeypatch.setattr(env, "capability", lambda device: 89)
    made = set()
    with contextlib.suppress(KeyError):  # blocks that are made in words alone: see `fuses`
        for variant in modules()[name].variants():
            if re.search(pattern, variant.name):
                assert compile_ptx(variant, 89)
                made.add(variant.name)
    assert made


@pytest.mark.parametrize("sm", [None, 89, 90, 120])
def test_blocks_of_what_is_produced_are_made_in_words_alone(
    sm: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "capability", lambda device: sm)
    h = torch.empty(256, 512, dtype=torch.bfloat16, device="meta")
    dy = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    for cast in (Cast("fp8_e4m3_1x128"), Cast("mxfp8_e4m3")):
        made = [
            (produce if cast.format.scale is Scale.F32 else produce_e8m0).fuses(
                activation("swiglu"), (h,), torch.bfloat16, cast, cast
            ),
            (activation_grad if cast.format.scale is Scale.F32 else gradient_e8m0).fuses_backward(
                activation("swiglu").gradient(), (h, dy), torch.bfloat16, cast, cast, None
            ),
        ]
        assert made == [sm != 89] * 2


def test_every_kernel_is_compiled_in_ci() -> None:
    """A kernel that no variant names would not be compiled at all."""
    for name, module in modules().items():
        if name == "beside":  # its kernels are written when they are needed
            continue
        kernels_ = {
            n
            for n, f in vars(module).items()
            if isinstance(f, triton.JITFunction)
            and f.fn.__module__ == module.__name__
            and n.endswith("_kernel")
        }
        assert kernels_, f"{name}: no function is named *_kernel"
        for arch in ARCHES:
            ids = [(v, f"{name}-{v.name}-sm{arch}") for v in module.variants()]
            compiled = {v.fn.fn.__name__ for v, key in ids if IN_CI.search(key)}
            assert compiled == kernels_, f"{name}, sm_{arch}"


def test_spills_are_found(tmp_path: Path) -> None:
    """A kernel with more live values than registers is noticed."""
    registers = " ".join(f"%f{i}," for i in range(300)).rstrip(",")
    loads = "\n".join(f"ld.volatile.global.f32 %f{i}, [%rd+{4 * i}];" for i in range(300))
    stores = "\n".join(
        f"st.volatile.global.f32 [%rd+{4 * i}], %f{i};" for i in reversed(range(300))
    )
    ptx = f""".version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p)
{{
.reg .f32 {registers};
.reg .b64 %rd;
ld.param.u64 %rd, [p];
{loads}
{stores}
ret;
}}
"""
    assert spilled(ptx, 90, tmp_path) > 0


def test_the_allowances_are_used() -> None:
    keys = [p.id for p in PARAMETERS]
    unused = [p for p in MAY_SPILL if not any(re.search(p, key) for key in keys)]
    assert not unused, "patterns that no variant matches"
