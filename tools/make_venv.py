"""Make the virtual environment that `make` works in: python tools/make_venv.py FOLDER

Where this Python already has a suitable torch, the environment sees it and keeps it: nobody is
made to download gigabytes a second time. FOLDER/constraints.txt is what pip is then held to.
Every Python must be able to parse this file, so that an old one gets our message and no traceback.
"""

import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 11)
# Come with torch, or are built against it: where torch is kept, so are these.
KEPT = ("torch", "triton", "numpy", "setuptools")


def stop(message):
    sys.exit("minifloat: " + message)


def check_python():
    if sys.version_info < OLDEST_PYTHON:
        stop(
            "needs Python %d.%d or newer, and %s is Python %d.%d: say make PYTHON=/path/to/python3"
            % (OLDEST_PYTHON + (sys.executable,) + sys.version_info[:2])
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        stop(
            "%s cannot make virtual environments: install its venv module"
            " (on Debian and Ubuntu the package is python3-venv)"
            " or say make PYTHON=/path/to/python3" % sys.executable
        )


def is_suitable(version):
    """Whether pip takes this torch for `torch>=2.11`: a pre-release of 2.11 itself is older."""
    match = re.match(r"(\d+)\.(\d+)([.\d]*)(a|b|rc|\.?dev)?", version)
    if match is None:
        return False
    release = (int(match.group(1)), int(match.group(2)))
    if release == OLDEST_TORCH and match.group(4):
        return bool(match.group(3).strip(".0"))
    return release >= OLDEST_TORCH


def installed_torch():
    """(version, folder) of the torch this Python imports, or None where it has no suitable one."""
    from importlib.metadata import PackageNotFoundError, distribution
    from importlib.util import find_spec

    try:
        torch = distribution("torch")
    except PackageNotFoundError:
        return None
    if find_spec("torch") is None or not is_suitable(torch.version):
        return None
    return torch.version, str(torch.locate_file(""))


def constraints(torch_version):
    """The lines of constraints.txt, less what an installed torch decides."""
    with open(os.path.join(HERE, os.pardir, "constraints.txt")) as file:
        lines = file.read().splitlines()
    if torch_version is None:
        return lines
    kept = [line for line in lines if re.split("[=<>; ]", line)[0] not in KEPT]
    return ["torch==" + torch_version] + kept


def main(folder):
    check_python()
    import venv

    torch = installed_torch()
    version, torch_folder = torch or (None, None)
    venv.create(folder, with_pip=True, system_site_packages=torch is not None)
    if torch is not None and sys.prefix != sys.base_prefix:
        # From inside a virtual environment, "system" means the Python beneath it; torch is in
        # the environment, which the new one is therefore pointed at.
        name = "python%d.%d" % sys.version_info[:2]
        site = os.path.join(folder, "lib", name, "site-packages")
        with open(os.path.join(site, "minifloat-kept-torch.pth"), "w") as file:
            file.write(torch_folder + "\n")
    with open(os.path.join(folder, "constraints.txt"), "w") as file:
        file.write("\n".join(constraints(version)) + "\n")
    found = "its torch " + version if version else "no torch >= %d.%d: will install" % OLDEST_TORCH
    print("minifloat: %s from %s (%s)" % (folder, sys.executable, found))


if __name__ == "__main__":
    main(sys.argv[1])
