"""Runs cases: builds providers, checks what they compute, times them in turns, writes it down."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import env
from . import environment, limits, measure, numerics, table
from .cases import CPU, CPU_QUICK, FULL, KINDS, PART1, QUICK, Case, select
from .ceilings import Ceilings, drifted, heat
from .errors import BenchError, choose
from .options import Options
from .providers import DEFAULT, LIBRARIES, RECIPES, Provider, providers
from .report import write_report
from .step import Step
from .store import Store
from .timing import Stats, Timer
from .work import Work, dtype_name, make_work

__all__ = ["Bench", "bench"]

SETTLE = 2.0  # seconds of products before ceilings are measured: clocks follow the temperature
WALL = 30  # steps
GRAPHS = 20  # replays
Row = dict[str, Any]


def bench(options: Options) -> int:
    """Run what `options` ask for; 0 if everything that ran was right, 1 if not."""
    device = options.where()
    if options.list:
        print("\n".join(case.id for case in FULL))
        return 0
    cases = _cases(options, device)
    libraries = choose("provider", options.providers, list(LIBRARIES), DEFAULT)
    names = choose("recipe", options.recipes, list(RECIPES), list(RECIPES))
    options.budget(device)
    if options.report:
        return _report(Path(options.out))
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return Bench(options, device, libraries, names).run(cases)
    except torch.OutOfMemoryError as error:
        raise BenchError(
            f"{device} has no memory left for the ceilings ({_first_line(error)}): end what else "
            "runs on it, or name another --device"
        ) from error


def _report(folder: Path) -> int:
    """Tables and plot of results that are there; nothing is measured."""
    if not (folder / "results.jsonl").exists():
        raise BenchError(f"--report: {folder} has no results.jsonl: --out DIR names the folder")
    store = Store(folder, resume=True)
    for record in store.of("case"):
        print("\n" + table.of_case(record["case"], record["rows"]))
    write_report(folder, store, {record["case"] for record in store.of("case")})
    return 0


def _cases(options: Options, device: torch.device) -> list[Case]:
    if options.all and options.quick:
        raise BenchError("--all and --quick exclude each other")
    found: Sequence[Case] = PART1
    if options.all:
        found = FULL
    elif device.type != "cuda":
        found = CPU_QUICK if options.quick else CPU
    elif options.quick:
        found = QUICK
    return select(options.cases, found)


@dataclass
class _Live:
    """A provider that was built for the case at hand."""

    provider: Provider
    step: Step
    row: Row


class Bench:
    """One run: a device, its ceilings, and a file of results."""

    def __init__(
        self, options: Options, device: torch.device, libraries: list[str], names: list[str]
    ) -> None:
        self.options, self.device = options, device
        self.cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.names = names
        self.providers = providers(libraries, names)
        # On a CPU a compiler alone takes longer than the rest: it has to be asked for.
        self.compiles = self.cuda or options.providers is not None
        self.environment = environment.describe(device, options.seed)
        self.environment["dtype"] = dtype_name(self.dtype)
        budget = options.budget(device)
        self.timer = Timer(
            device, iterations=budget.iterations, seconds=budget.seconds, warmup=budget.warmup,
            heat=budget.heat, batch=1, least=budget.least, strict=False,
        )  # fmt: skip
        self.ceilings: dict[str, float] = {}
        self.identity = {
            **{n: self.environment[n] for n in ("device", "torch", "minifloat", "git")},
            "dtype": self.environment["dtype"],
            "providers": [p.name for p in self.providers],
            "seed": options.seed,
        }

    # -------------------------------------------------------------------------------- the run
    def run(self, cases: list[Case]) -> int:
        folder = Path(self.options.out)
        if folder.exists() and not folder.is_dir():
            raise BenchError(f"--out {folder}: is a file, and a folder is wanted")
        store = Store(folder, self.options.resume)
        self._check_identity(store)
        done = {record["case"] for record in store.of("case")}
        todo = [case for case in cases if case.id not in done]
        print(_about(self.environment), flush=True)
        if done:
            print(f"{len(cases) - len(todo)} of {len(cases)} cases are there already")
        try:
            if todo:
                self._measure(todo, store)
        finally:
            wanted = {case.id for case in cases}
            write_report(folder, store, wanted)
        rows = [row for row in store.rows if row["case"] in wanted]
        drift = [line for end in store.of("end") for line in end["drift"]] if self.cuda else []
        for line in table.closing(rows, drift):
            print(line)
        bad = any(row["status"] in ("failed", "wrong") for row in rows)
        return int(bad or bool(drift))

    def _measure(self, cases: list[Case], store: Store) -> None:
        calls = Ceilings([RECIPES[n] for n in self.names], self.device, self.dtype)
        heat(self.timer, calls.calls.values(), SETTLE)
        before = self.ceilings = calls.measure(self.timer)
        session = {"identity": self.identity, "environment": self.environment}
        store.append(
            {"type": "session", **session, "ceilings": before, "clocks": environment.clocks()}
        )
        print("\n".join(table.ceilings(before)), flush=True)
        for i, case in enumerate(cases):
            begin = time.perf_counter()
            rows = self.case(case)
            spent = time.perf_counter() - begin
            store.append(
                {"type": "case", "case": case.id, "seconds": spent, "flops": case.flops,
                 "clocks": environment.clocks(), "rows": rows}
            )  # fmt: skip
            print(f"\n[{i + 1}/{len(cases)}, {spent:.0f} s]  " + table.of_case(case.id, rows, case))
            sys.stdout.flush()
            self._check_device()
        heat(self.timer, calls.calls.values(), SETTLE / 4)
        after = calls.measure(self.timer)
        store.append(
            {"type": "end", "ceilings": after, "clocks": environment.clocks(),
             "drift": drifted(table.scaled(before), table.scaled(after), "GB/s or TFLOP/s")}
        )  # fmt: skip

    def _check_identity(self, store: Store) -> None:
        for session in store.of("session"):
            found = session["identity"]
            differ = [n for n, v in self.identity.items() if found.get(n) != v]
            if differ:
                name = differ[0]
                raise BenchError(
                    f"--resume: {store.path} was measured with {name} {found.get(name)!r}, and "
                    f"this is {self.identity[name]!r}: --out DIR starts anew"
                )

    def _check_device(self) -> None:
        try:
            self.timer.synchronize()
        except RuntimeError as error:
            raise BenchError(
                f"the device does not answer any more ({_first_line(error)}): the results so far "
                "are kept, and --resume goes on after this case"
            ) from error

    # -------------------------------------------------------------------------------- one case
    def case(self, case: Case) -> list[Row]:
        """A row for each provider; nothing that goes wrong in one of them stops the others."""
        mine = [p for p in self.providers if case.kind in p.kinds]
        rows = [_row(case, p) for p in mine]
        try:
            self._run_case(case, mine, rows)
        except Exception as error:  # the case as a whole: its data, or the timing of all
            if self.options.debug and not _is_memory(error):
                raise
            for row in rows:
                if row["status"] == "":
                    _note(row, error)
        finally:
            self._clean(any(p.compiled for p in mine))
        _compare(rows)
        return rows

    def _run_case(self, case: Case, mine: list[Provider], rows: list[Row]) -> None:
        work = make_work(case, self.device, self.dtype, self.options.seed)
        built = [self._build(p, case, work, row) for p, row in zip(mine, rows, strict=True)]
        live = self._judge(work, [one for one in built if one is not None])
        self._time(case, self._memory(live))

    def _build(self, provider: Provider, case: Case, work: Work, row: Row) -> _Live | None:
        reason = provider.missing(case, self.device)
        if provider.compiled and not self.compiles and not reason:
            reason = "compiling takes a CPU longer than the rest: --providers asks for it"
        if reason:
            row |= {"status": "not measured", "reason": reason}
            return None
        try:
            begin = time.perf_counter()
            step = provider.build(work)
            step()
            self.timer.synchronize()
            row["first_s"] = time.perf_counter() - begin
            for _ in range(2):  # delayed scaling has its scales after one step
                step()
            self.timer.synchronize()
        except Exception as error:
            if self.options.debug and not provider.foreign and not _is_memory(error):
                raise
            _note(row, error, provider.foreign)
            work.x.grad = None
            self._clean(False)
            return None
        return _Live(provider, step, row)

    def _judge(self, work: Work, live: list[_Live]) -> list[_Live]:
        """Errors of each provider, beside its recipe's reference's; those that could be asked."""
        good = []
        try:
            truth = numerics.results(work, None, exact=True)
            expected: dict[str, numerics.Errors] = {}
            for one in live:
                name = one.provider.judged
                if name not in expected:
                    made = numerics.results(work, RECIPES[name] if name else None)
                    expected[name] = numerics.errors(made, truth)
                    del made
                try:
                    found = numerics.errors(one.step.results(), truth)
                except Exception as error:
                    self._fail(one, error)
                    continue
                good.append(one)
                verdict = numerics.judge(found, expected[name], self.dtype)
                one.row |= {
                    "errors": verdict.errors,
                    "expected_errors": verdict.expected,
                    "error_ratio": verdict.ratio,
                }
                if verdict.failure:
                    one.row |= {"status": "wrong", "reason": verdict.failure}
        except Exception as error:
            if not _is_memory(error):
                raise
            for one in live:
                if "errors" not in one.row and one.row["status"] == "":
                    one.row["unchecked"] = "out of memory for the reference"
                    if one not in good:
                        good.append(one)
        self._clean(False)
        return good

    def _memory(self, live: list[_Live]) -> list[_Live]:
        """Bytes of a step, on a GPU; those that got through."""
        if not self.cuda:
            return live
        good = []
        for one in live:
            try:
                peak, kept = measure.memory(one.step)
            except Exception as error:
                self._fail(one, error)
                continue
            one.row |= {"peak_bytes": peak, "kept_bytes": kept}
            good.append(one)
        return good

    def _fail(self, one: _Live, error: Exception) -> None:
        if self.options.debug and not one.provider.foreign and not _is_memory(error):
            raise error
        _note(one.row, error, one.provider.foreign)
        one.step.clear()

    def _time(self, case: Case, live: list[_Live]) -> None:
        if not live:
            return
        for one, stats in zip(live, self.timer.time([one.step for one in live]), strict=True):
            self._timed(case, one, stats)
        if self.cuda and case.small:
            for one in live:
                one.row["wall_us"] = measure.wall_time(one.step, WALL)
        if self.cuda and case.graph:
            for one in live:
                self._graph(one)

    def _timed(self, case: Case, one: _Live, stats: Stats) -> None:
        row, seconds = one.row, 1e-6 * stats.median
        row |= {
            "us": stats.median,
            "p20": stats.p20,
            "p80": stats.p80,
            "samples": stats.samples,
            "waits": stats.waits,
            "host_us": stats.host if self.cuda else None,
            "tflops": 1e-12 * case.flops / seconds,
        }
        if row["status"] == "":
            row["status"] = "ok"
        name = one.provider.limited
        if name is None or not KINDS[case.kind].bounded:
            return
        recipe = RECIPES[name] if name else None
        limit = limits.limit_of(case, recipe, self.device, self.dtype)
        row["intensity"] = limit.intensity
        least = limit.seconds(self.ceilings)
        if least is not None:
            row |= {"limit_us": 1e6 * least, "percent_of_limit": 100 * least / seconds}
        peak = limits.peak_of(env.device_name(self.device)) if self.cuda else None
        if peak is not None:
            hard = limits.peak_time(case, recipe, self.device, peak)
            row["percent_of_peak"] = 100 * hard / seconds

    def _graph(self, one: _Live) -> None:
        """Time in a CUDA graph; a step that waits for the device cannot be in one."""
        if one.provider.foreign or one.provider.compiled:
            return
        if one.row["waits"]:
            one.row["graph_note"] = "the step waits for the device"
            return
        try:
            graph = measure.capture(one.step)
            graph.replay()
            spent = measure.device_time(graph.replay, GRAPHS)
            one.row["graph_us"] = spent / measure.CAPTURED
            del graph
        except Exception as error:
            one.row["graph_note"] = _first_line(error)
        torch.cuda.synchronize()

    def _clean(self, compiled: bool) -> None:
        if compiled and "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        if self.cuda:
            gc.collect()
            with suppress(RuntimeError):  # a device that is lost: found out after the case
                torch.cuda.empty_cache()


def _row(case: Case, provider: Provider) -> Row:
    return {
        "case": case.id,
        "kind": case.kind,
        "provider": provider.name,
        "library": provider.library,
        "status": "",
        "reason": "",
    }


def _note(row: Row, error: Exception, foreign: bool = False) -> None:
    """What became of a provider that raised."""
    if _is_memory(error):
        row |= {
            "status": "out of memory",
            "reason": "name fewer --providers or --recipes, or a smaller case",
        }
    else:
        said = f"{type(error).__name__}: {_first_line(error)}"
        row |= {"status": "not measured" if foreign else "failed", "reason": said}


def _is_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = ("not enough memory", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in said)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _compare(rows: list[Row]) -> None:
    """Ratios of time and memory to plain PyTorch's."""
    for base in ("eager", "compile"):
        found = next((r for r in rows if r["provider"] == base and "us" in r), None)
        if found is None:
            continue
        for row in rows:
            for name in ("us", "host_us", "wall_us", "graph_us", "peak_bytes", "kept_bytes"):
                if row.get(name) is not None and found.get(name):
                    row[f"{name.split('_')[0]}_vs_{base}"] = row[name] / found[name]


def _about(about: dict[str, Any]) -> str:
    parts = [f"{about['device']}, {about['dtype']}", f"torch {about['torch']}"]
    parts += [f"{n} {about[n]}" for n in ("triton", "cublas", "minifloat") if about[n]]
    return ", ".join(parts)
