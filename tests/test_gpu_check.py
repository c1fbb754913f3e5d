"""`scripts/gpu_check` and the sweep behind it: what is planted is found, and nothing else.

Kernels are made up here: they fill their outputs by the reference, and then do what a test says.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.cases import CASES
from benchmarks.produced import CASES as PRODUCED
from minifloat import casting, dispatch, env
from minifloat.layout import part_names
from tests.exact import __main__ as command
from tests.exact import checks, large, plan, pool
from tests.exact.compare import Case, Tally, different, guarded, reference_only
from tests.exact.inputs import DTYPES, matrix
from tests.exact.kinds import KINDS, SCALED, directions
from tests.exact.plan import Result, Unit

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
BY_NAME = {kind.name: kind for kind in KINDS}

Damage = Callable[[dict[str, Tensor]], None]


def load_script() -> Any:
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(ROOT / "scripts" / "gpu_check"))
    spec = importlib.util.spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


gpu_check = load_script()


def use_kernels(monkeypatch: pytest.MonkeyPatch, damage: Damage) -> None:
    """Kernels on the CPU that quantize as the reference does, then do `damage` to their outputs."""

    def quantize(x: Any, row: Any, col: Any, out: dict[str, Tensor], *rest: Any) -> None:
        made = casting.quantize_reference(x, row, col, *rest)
        for name, value in zip(part_names(row, col), made, strict=True):
            out[name].copy_(value.reshape(out[name].shape))
        damage(out)

    fake = types.SimpleNamespace(quantize=quantize)
    monkeypatch.setattr(casting, "_kernels", lambda *_: None if env.reference_only() else fake)


def case(name: str, direction: str = "row+col", shape: tuple[int, int] = (33, 48)) -> Case:
    row, col = directions(BY_NAME[name])[direction]
    x = matrix(shape, torch.bfloat16, CPU)
    seed = checks.seed_of(row, col, CPU)
    label = f"quantize {name} bf16 {shape[0]}x{shape[1]} {direction}"
    return Case(label, part_names(row, col), lambda: dispatch.quantize(x, row, col, seed=seed))


# ---------------------------------------------------------------------------------- the comparison
def test_right_kernels_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch, lambda out: None)
    tally = Tally()
    for name in BY_NAME:
        tally.add(case(name))
    tally.finish()
    assert (tally.cases, tally.failed, tally.messages) == (len(BY_NAME), 0, [])


@pytest.mark.parametrize("buffer", ["row_data", "row_scale", "col_data", "col_scale", "col_amax"])
def test_one_wrong_element_is_found(monkeypatch: pytest.MonkeyPatch, buffer: str) -> None:
    def damage(out: dict[str, Tensor]) -> None:
        out[buffer].view(torch.uint8).view(-1)[-1] ^= 1

    use_kernels(monkeypatch, damage)
    tally = Tally()
    tally.add(case("nvfp4"))
    tally.finish()
    assert (tally.cases, tally.failed, tally.elements) == (1, 1, 1)
    first, closely = tally.messages
    assert first == f"quantize nvfp4 bf16 33x48 row+col {buffer}: 1 differ"
    assert "first at [" in closely and "expected" in closely


def test_what_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.SimpleNamespace(quantize=lambda *_: None)
    monkeypatch.setattr(casting, "_kernels", lambda *_: None if env.reference_only() else fake)
    tally = Tally()
    tally.add(case("mxfp8_e4m3"))
    tally.finish()
    assert tally.failed == 1
    unwritten = {m.split(":")[0].split()[-1] for m in tally.messages if m.endswith("differ")}
    assert unwritten == {"row_data", "row_scale", "col_data", "col_scale"}


@pytest.mark.parametrize("where", [-1, 1])
def test_what_is_written_outside_is_found(monkeypatch: pytest.MonkeyPatch, where: int) -> None:
    def damage(out: dict[str, Tensor]) -> None:
        data = out["col_data"]
        start = data.storage_offset() + (-1 if where < 0 else data.numel())
        memory = torch.empty(0, dtype=torch.uint8)
        memory.set_(data.untyped_storage(), start, (1,))
        memory.zero_()

    use_kernels(monkeypatch, damage)
    tally = Tally()
    tally.add(case("fp8_e4m3_1x128"))
    tally.finish()
    assert tally.messages == [
        "quantize fp8_e4m3_1x128 bf16 33x48 row+col outside its outputs: 1 differ"
    ]


def test_an_error_is_a_failed_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(out: dict[str, Tensor]) -> None:
        raise ValueError("not today")

    use_kernels(monkeypatch, damage)
    tally = Tally()
    tally.add(case("fp8_e4m3"))
    assert tally.finish().messages == [
        "quantize fp8_e4m3 bf16 33x48 row+col: ValueError: not today"
    ]
    assert (tally.cases, tally.failed) == (1, 1)


def test_a_lost_device_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(out: dict[str, Tensor]) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    use_kernels(monkeypatch, damage)
    with pytest.raises(RuntimeError, match="illegal"):
        Tally().add(case("fp8_e4m3"))


def test_wrong_shapes_dtypes_and_numbers_are_found() -> None:
    a = torch.zeros(3, 4)
    tally = Tally()
    tally.compare("x", ["shape"], [a], [a.t()])
    tally.compare("x", ["dtype"], [a], [a.half()])
    tally.compare("x", ["count", "more"], [a], [a, a])
    assert tally.finish().failed == 3


def test_bits_are_compared_and_nans_are_one() -> None:
    a = torch.tensor([0.0, 1.0, torch.nan, torch.inf])
    b = torch.tensor([-0.0, 1.0, -torch.nan, torch.inf])
    b.view(torch.int32)[2] |= 1  # another payload
    assert different(a, b).tolist() == [True, False, False, False]
    assert different(a.bfloat16(), b.bfloat16()).tolist() == [True, False, False, False]
    assert different(a, torch.tensor([0.0, torch.nan, 1.0, torch.inf])).sum() == 2
    assert different(torch.tensor([1, 2]), torch.tensor([1, 3])).tolist() == [False, True]


def test_guarded_memory_is_poisoned_and_aligned() -> None:
    with guarded() as guards:
        made = [torch.empty(3, 5), torch.zeros(2).new_empty((0, 7), dtype=torch.uint8)]
        made.append(made[0].new_empty(7, 2))
    assert [tuple(t.shape) for t in made] == [(3, 5), (0, 7), (7, 2)]
    assert (made[0].view(torch.uint8) == 0xA5).all()
    assert all(t.storage_offset() * t.element_size() % 16 == 0 for t in made)
    assert guards.broken() == 0


def test_reference_only_is_left_again() -> None:
    before = env.reference_only()
    with reference_only():
        assert env.reference_only()
    assert env.reference_only() == before


# ----------------------------------------------------------------------------------- large tensors
SMALL = {"shape": (300, 272), "step": 128}  # a partial band, partial tiles


@pytest.mark.parametrize("name", plan._LARGE)
def test_bands_are_slices_of_the_whole(name: str) -> None:
    tally = Tally()
    large.copies(BY_NAME[name], CPU, tally, emulated=not name.startswith("fp8"), **SMALL)
    assert (tally.failed, tally.messages) == (0, [])


def test_bands_of_delayed_scaling_and_moves() -> None:
    tally = Tally()
    large.delayed(SCALED[0], CPU, tally, **SMALL)
    large.moves(CPU, tally, **SMALL)
    assert (tally.cases, tally.failed, tally.messages) == (3, 0, [])


@pytest.mark.parametrize("name", ["fp8_e4m3_1x128", "mxfp8_e4m3", "nvfp4 rht+sr"])
@pytest.mark.parametrize("buffer", ["row_data", "row_scale", "col_data", "col_scale"])
def test_one_wrong_byte_in_a_large_tensor_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, buffer: str
) -> None:
    real = casting.quantize

    def wrong(x: Tensor, row: Any, col: Any, *rest: Any) -> list[Tensor]:
        made = real(x, row, col, *rest)
        made[part_names(row, col).index(buffer)].view(torch.uint8).view(-1)[-1] ^= 1
        return made

    monkeypatch.setattr(casting, "quantize", wrong)
    tally = Tally()
    large.copies(BY_NAME[name], CPU, tally, **SMALL)
    assert tally.failed == 1
    assert any(f" {buffer} band " in message for message in tally.messages)


# -------------------------------------------------------------------------------------------- units
def test_every_kind_is_in_a_unit_for_every_dtype() -> None:
    units = plan.units()
    names = [u.name for u in units]
    assert len(set(names)) == len(names)
    assert [u.cost for u in units] == sorted((u.cost for u in units), reverse=True)
    for kind in KINDS:
        for dtype in DTYPES:
            assert f"quantize {kind.name} {checks.name_of(dtype)} row+col" in names
        for direction in ("row", "col"):
            assert f"quantize {kind.name} bf16 {direction}" in names
    quick = plan.units(quick=True)
    assert quick and len(quick) < len(units) / 2
    assert not any(u.big or "e5m2" in u.name for u in quick)


def test_units_make_cases() -> None:
    """Every unit finds its function: the first case of each is made, not run."""
    for unit in plan.units():
        if not unit.big:
            assert next(iter(plan.cases(unit, CPU))).label


@pytest.mark.parametrize(
    "name", ["transpose", "swizzle", "dequantize nvfp4 row_scaled", "fake nvfp4 rht bf16"]
)
def test_a_unit_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes in ("PAIRS", "BROAD", "WHOLE"):
        monkeypatch.setattr(checks, sizes, ((1, 1), (17, 100), (33, 48)))
    (unit,) = (u for u in plan.units() if u.name == name)
    result = plan.run(unit, CPU)
    assert result.cases >= 10
    assert (result.failed, result.messages) == (0, [])


def test_a_worker_that_is_lost_is_replaced() -> None:
    bad, good = Unit("nonsense"), Unit("swizzle")
    results = pool.sweep([bad, good], "cpu", workers=1)
    assert [(r.unit, r.failed) for r in results] == [(bad, 1), (good, 0)]
    assert "nonsense: did not finish" in results[0].messages[0]
    assert results[1].cases > 0


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "PAIRS", ((1, 1), (100, 17)))
    words = ["--device", "cpu", "--workers", "0", "--filter", "swizzle"]
    report = tmp_path / "sweep.json"
    assert command.main([*words, "--json", str(report)]) == 0
    assert json.loads(report.read_text())["failed"] == 0
    real = casting.swizzle

    def wrong(scale: Tensor) -> Tensor:
        made = real(scale)
        return made if env.reference_only() or scale.shape != (100, 17) else made.add_(1)

    monkeypatch.setattr(casting, "swizzle", wrong)
    capsys.readouterr()
    assert command.main([*words, "--json", str(report)]) == 1
    assert json.loads(report.read_text())["failed"] == 3  # contiguous, a view, strided
    assert "MISMATCH swizzle 100x17 scale: " in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- script
def full_result() -> dict[str, Any]:
    """What a whole run reports."""
    work = plan.units()
    results = [Result(u, 100, 0, 0, [], "triton", 1.0) for u in work]
    row = {"us": 12345.6, "gb_s": 4260.0, "percent_of_copy": 99.5}
    rows = [{"case": c.id, "shape": [8192, 8192], **row} for c in CASES]
    ceilings = {"copy 2 GiB": 4260.0, "copy 128 MiB": 4000.0}
    return {
        "kernels": {"ok": True, "seconds": 60.0, "ran": 500, "failures": 0, "errors": 0},
        "modules": {"ok": False, "seconds": 70.0, "ran": 400, "failures": 1, "errors": 2},
        "tests": {"ok": True, "seconds": 80.0, "ran": 300, "failures": 0, "errors": 0},
        "sweep": {
            "ok": True,
            "seconds": 120.0,
            "cases": 9,
            "failed": 0,
            "rows": command.table(results),
        },
        "bench": {
            "ok": True,
            "seconds": 99.0,
            "rows": rows,
            "ceilings_before": ceilings,
            "ceilings_after": ceilings,
            "drift": ["DRIFT: copy 2 GiB went from 1 to 2 GB/s"],
        },
        "produced": {
            "ok": True,
            "seconds": 30.0,
            "rows": [{"case": c.id, "shape": [16384, 14336], **row} for c in PRODUCED],
        },
        "linear": {
            "ok": True,
            "seconds": 50.0,
            "rows": [
                {"shape": [2048, 768, 3072], "recipe": recipe, "step": 9.0, "step_ratio": 0.5}
                for recipe in ("nn.Linear", "delayed", "nvfp4")
            ],
        },
        "mlp": {
            "ok": True,
            "seconds": 40.0,
            "rows": [
                {"shape": [8192, 8192, 28672], "recipe": recipe, "step": 9.0, "kept_ratio": 0.65}
                for recipe in ("bf16 compile", "delayed")
            ],
        },
        "grouped": {
            "ok": True,
            "seconds": 70.0,
            "rows": [
                {"shape": "8 x (2048, 4096 -> 4096)", "recipe": "best", "weights": weights}
                | {"equal": 0.68, "ragged": 1.04, "memory": 1.27}
                for weights in ("cast", "kept")
            ],
        },
    }


def test_the_summary_is_short_and_complete() -> None:
    lines = gpu_check.summary(full_result())
    text = "\n".join(lines)
    assert len(lines) < 100, text
    assert max(len(line) for line in lines) <= 120, text
    for name in ("fp8_e5m2 delayed", "nvfp4 rht+sr", "dequantize nvfp4", "transpose fp8_e4m3"):
        (line,) = (line for line in lines if line.startswith(f"{name} "))
        assert " 12345.6  4260 " in line
    assert any(line.startswith("2048x768x3072 nvfp4") and "0.50" in line for line in lines)
    assert any(line.startswith("8192x8192x28672 delayed") and "0.65" in line for line in lines)
    assert not any("bf16 compile" in line for line in lines)
    assert any(line.startswith("swiglu delayed") and "row+col 100%" in line for line in lines)
    assert "8 x (2048, 4096 -> 4096) best, weights kept        0.68   1.04   1.27" in lines
    assert lines[-9:] == [
        "kernels: ok, 500 ran, 0 failed, 60 s",
        "modules: FAILED, 400 ran, 3 failed, 70 s",
        "tests: ok, 300 ran, 0 failed, 80 s",
        "sweep: ok, 9 cases, 0 failed, 120 s",
        "bench: ok, 99 s",
        "produced: ok, 30 s",
        "linear: ok, 50 s",
        "mlp: ok, 40 s",
        "grouped: ok, 70 s",
    ]


def test_the_summary_of_failures() -> None:
    result = full_result()
    result["sweep"] |= {"ok": False, "failed": 2}
    result["bench"]["rows"][0] = {"case": CASES[0].id, "shape": [8192, 8192], "error": "no"}
    lines = gpu_check.summary(result)
    assert "sweep: FAILED, 9 cases, 2 failed, 120 s" in lines
    assert any("FAILED" in line for line in lines if line.startswith(CASES[0].name))
    gpu_check.summary(
        {"sweep": {"ok": False, "seconds": 1.0}, "bench": {"ok": False, "seconds": 1.0}}
    )


@pytest.mark.parametrize(("wrong", "code"), [(None, 0), ("sweep", 1), ("tests", 1)])
def test_main(
    wrong: str | None, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = []

    def step(name: str) -> Callable[[Path, bool], dict[str, Any]]:
        def run(folder: Path, quick: bool) -> dict[str, Any]:
            ran.append((name, quick))
            return {**full_result()[name], "ok": name != wrong}

        return run

    monkeypatch.setattr(gpu_check, "STEPS", {name: step(name) for name in gpu_check.STEPS})
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert gpu_check.main(["sweep", "tests", "mlp", "linear", "--quick"]) == code
    assert ran == [("tests", True), ("sweep", True), ("linear", True), ("mlp", True)]
    written = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert set(written) == {"tests", "sweep", "linear", "mlp"}


def test_steps_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["test"])
    assert "steps: got test; allowed: kernels, modules, tests, sweep," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "written", "ok"),
    [
        (0, [{"recipe": "delayed"}], True),
        (0, {"rows": [{"recipe": "delayed"}], "launches": {}}, True),
        (0, {"rows": [{"recipe": "delayed", "error": "no"}]}, False),
        (1, [{"recipe": "delayed"}], False),
        (0, [], False),
        (0, None, False),
    ],
)
def test_a_table_must_be_whole(
    code: int, written: Any, ok: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(*words: str) -> tuple[int, float]:
        assert words[:3] == ("-m", "benchmarks.linear", "--json")
        if written is not None:
            Path(words[3]).write_text(json.dumps(written))
        return code, 1.0

    monkeypatch.setattr(gpu_check, "run", run)
    found = gpu_check.table_of("benchmarks.linear")(tmp_path, False)
    assert (found["ok"], found["seconds"]) == (ok, 1.0)


@pytest.mark.parametrize(
    ("code", "tests", "skipped", "ok"), [(0, 5, 2, True), (1, 5, 2, False), (0, 5, 5, False)]
)
def test_tests_must_run(
    code: int, tests: int, skipped: int, ok: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(*words: str) -> tuple[int, float]:
        assert words[:4] == ("-m", "pytest", "-q", "tests/kernels")
        (report,) = (w.removeprefix("--junitxml=") for w in words if w.startswith("--junitxml="))
        suite = f'<testsuite tests="{tests}" failures="0" errors="0" skipped="{skipped}"/>'
        Path(report).write_text(f"<testsuites>{suite}</testsuites>")
        return code, 1.0

    monkeypatch.setattr(gpu_check, "run", run)
    found = gpu_check.tests_of("tests/kernels")(tmp_path, False)
    assert (found["ok"], found["ran"], found["seconds"]) == (ok, tests - skipped, 1.0)
    monkeypatch.setattr(gpu_check, "run", lambda *words: (2, 1.0))  # it ended before its report
    assert gpu_check.tests_of("tests/kernels")(tmp_path, False)["ran"] == 0


def test_the_environment_has_the_checkout_and_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "known")
    deps = tmp_path / "deps"

    def paths() -> list[str]:
        return gpu_check.environment(tmp_path, deps)["PYTHONPATH"].split(os.pathsep)

    monkeypatch.setattr(gpu_check, "NEEDED", ("pytest", "no_such_package"))
    assert paths() == [str(tmp_path), "known"]
    deps.mkdir()
    assert paths() == [str(tmp_path), str(deps), "known"]
    monkeypatch.setattr(gpu_check, "NEEDED", ("pytest",))
    assert paths() == [str(tmp_path), "known"]


def test_counts(tmp_path: Path) -> None:
    assert gpu_check.counts(tmp_path / "missing.xml") == {}
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite tests="5" failures="1" errors="0" skipped="2"/></testsuites>'
    )
    assert gpu_check.counts(report) == {"tests": 5, "failures": 1, "errors": 0, "skipped": 2}
