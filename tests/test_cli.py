"""`python -m minifloat` runs with no GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import minifloat
from minifloat.cli import main


def test_doctor_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "minifloat", "doctor", "--device", "cpu"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "MXFP8BlockScaling" in done.stdout


def test_doctor_takes_a_device(capsys):
    assert main(["doctor", "--device", "cpu"]) == 0
    assert "device   cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "message"), [("foo", "'foo' is no device"), ("cuda:99", "PyTorch sees")]
)
def test_doctor_names_a_device_that_is_not_there(capsys, device, message):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--device", device])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"minifloat {minifloat.__version__}\n"


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fly"])
    assert stop.value.code == 2
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["doctor", "--device", "cpu"], ["bench", "--list"]])
def test_a_reader_that_has_gone_ends_a_command_quietly(command):
    """As of `minifloat bench --list | head -1`: it was a traceback."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "minifloat", *command], stdout=write, stderr=subprocess.PIPE
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
