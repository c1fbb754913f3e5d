"""`import minifloat` is light: no Triton, no CUDA, next to no time on top of `import torch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

MAX_SECONDS = 0.3

REPORT = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()  # a machine that is busy with others adds to the clock on the wall
import minifloat
seconds = time.process_time() - start
print(json.dumps({
    "seconds": seconds,
    "triton": [m for m in sys.modules if m.partition(".")[0] == "triton" and m not in before],
    "cuda": torch.cuda.is_initialized(),
    "version": minifloat.__version__,
}))
"""

# To import it is an error, and to look for it finds nothing, as PyTorch's CUDA builds do.
NO_TRITON = """
import sys
sys.modules["triton"] = None
"""


def run(code: str) -> Any:
    # As installed: pip compiles what it installs, and so does the first import from a checkout,
    # unless it is told not to.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_import_is_light() -> None:
    reports = [run(REPORT) for _ in range(4)]
    for report in reports:
        assert report["triton"] == []
        assert report["cuda"] is False
    # The least of them: caches that others have emptied can only add.
    assert min(report["seconds"] for report in reports) < MAX_SECONDS


def test_import_without_triton() -> None:
    assert run(NO_TRITON + REPORT)["triton"] == []


def test_the_block_blocks() -> None:
    code = NO_TRITON + "try:\n    import triton.language\nexcept ImportError as e:\n    print('1')"
    assert run(code) == 1
