"""What a report says, and writes."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import minifloat
from minifloat import recipe
from minifloat.inspect import OPERANDS, Report

from .models import BF16, LAYERS, RECIPES, Step, batch, model


def reported(name: str = "nvfp4") -> Report:
    step = Step(model(), RECIPES[name]())
    with minifloat.inspect(step.net) as report:
        step()
    return report


def test_json(tmp_path: Path) -> None:
    report = reported("dequantized")
    path = tmp_path / "report.json"
    report.to_json(path)
    read = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert read["version"] == 1 and list(read["layers"]) == LAYERS
    layer = read["layers"]["1.fc2"]
    assert list(layer["operands"]) == list(OPERANDS)
    row = layer["operands"]["input.row"]
    assert row["format"] == "mxfp8_e4m3" and row["exact"] is False
    assert row["sqnr_db"] == report.layers["1.fc2"].operands["input.row"].sqnr
    high = layer["operands"]["grad_output.row"]
    assert high["exact"] is True and high["sqnr_db"] is None and high["scale_min"] is None
    assert layer["gemms"]["fprop"]["operands"] == ["input.row", "weight.row"]
    assert 25 < layer["gemms"]["fprop"]["expected_sqnr_db"] < row["sqnr_db"]


def test_json_of_what_is_not_finite(tmp_path: Path) -> None:
    net = minifloat.Linear(64, 48, **BF16)
    x = batch()
    x[0, 0] = math.nan
    with minifloat.inspect(net) as report, minifloat.autocast(recipe=recipe.MXFP8BlockScaling()):
        net(x).sum().backward()
    report.to_json(tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert read["layers"][""]["operands"]["input.row"]["nonfinite"] == 1


def test_tables_mark_what_is_not_finite(tmp_path: Path) -> None:
    net = torch.nn.Sequential(minifloat.Linear(64, 64, **BF16), minifloat.Linear(64, 64, **BF16))
    x = batch()
    current = minifloat.autocast(recipe=recipe.Float8CurrentScaling())
    with minifloat.inspect(net) as report, current:
        net(x)
    assert "!" not in str(report)
    with torch.no_grad():
        net[0].weight[3] = math.nan
    with minifloat.inspect(net) as report, current:
        net(x)
    head, _, first, second = str(report).splitlines()
    assert head.endswith("! has infinite or NaN elements, which are left out")
    assert [cell[-1] == "!" for cell in first.split()[1:3]] == [False, True]  # input, weight
    assert [cell[-1] == "!" for cell in second.split()[1:3]] == [True, False]
    report.to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "64 not finite" in text and "!</td>" in text


class Page(HTMLParser):
    """Tags that are closed in order, cells with a background, and what is asked from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.text: list[str] = []
        self.asked: list[Any] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.asked += [given[k] for k in ("src", "href") if k in given]
        if tag not in ("meta",):
            self.open.append(tag)
        if tag == "td" and "background" in (given.get("style") or ""):
            self.cells.append(given.get("title") or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_html(tmp_path: Path) -> None:
    report = reported()
    report.to_html(tmp_path / "report.html")
    page = Page()
    page.feed((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.open == [] and page.asked == []
    assert len(page.cells) == 3 * len(LAYERS) * len(OPERANDS)  # three maps
    assert any("grad_output.row for dgrad, nvfp4: amax" in title for title in page.cells)
    text = " ".join(page.text)
    for name in LAYERS:
        assert name in text
    assert f"{report.layers['0'].operands['input.row'].sqnr:.1f}" in text


def test_html_escapes_names(tmp_path: Path) -> None:
    net = torch.nn.ModuleDict({"<b>": minifloat.Linear(64, 48, **BF16)})
    with minifloat.inspect(net) as report, minifloat.autocast():
        net["<b>"](batch())
    report.to_html(tmp_path / "report.html")
    assert "<b>" not in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_png(tmp_path: Path) -> None:
    reported().to_png(tmp_path / "report.png")
    data = (tmp_path / "report.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20], "big") > 1000  # pixels wide


def test_png_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib, or use to_html"):
        reported().to_png(tmp_path / "report.png")
    assert list(tmp_path.iterdir()) == []


def test_as_text() -> None:
    report = reported("high_override")
    lines = str(report).splitlines()
    assert len(lines) == 2 + len(LAYERS)
    assert lines[1].split() == ["layer", *OPERANDS]
    assert lines[2].split()[0] == "0" and lines[2].split()[3:] == ["="] * 4
    assert repr(report) == "<inspect report of 6 layers>"


def test_worst() -> None:
    report = reported()
    found = report.worst(3)
    assert len(found) == 3
    sqnrs = [o.sqnr for _, o in found]
    assert sqnrs == sorted(sqnrs)  # type: ignore[type-var]
    everything = [o.sqnr for layer in report.layers.values() for o in layer.operands.values()]
    assert sqnrs[0] == min(everything)  # type: ignore[type-var]
    underflow = [o.underflow for _, o in report.worst(4, by="underflow")]
    assert underflow == sorted(underflow, reverse=True)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="by: got 'amax'; allowed: 'sqnr', 'underflow'"):
        report.worst(by="amax")


def test_the_expected_sqnr_of_a_product() -> None:
    layer = reported().layers["0"]
    a, b = (layer.operands[name].sqnr for name in ("input.row", "weight.row"))
    assert a is not None and b is not None
    noise = 10 ** (-a / 10) + 10 ** (-b / 10)
    assert layer.gemms["fprop"].sqnr == pytest.approx(-10 * math.log10(noise))


def test_the_expectation_is_what_products_have() -> None:
    net = minifloat.Linear(512, 256, bias=False, **BF16)
    x = batch(256, 512)
    with minifloat.inspect(net) as report, minifloat.autocast(recipe=recipe.NVFP4BlockScaling()):
        y = net(x).detach().double()
    exact = x.double() @ net.weight.detach().double().t()
    measured = 10 * torch.log10(exact.square().sum() / (y - exact).square().sum())
    assert report.layers[""].gemms["fprop"].sqnr == pytest.approx(float(measured), abs=0.5)
