"""Fresh environments that have specserve from an archive, and nothing of the checkout."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def run(*args, **options):
    """What a command prints; its failure is the test's."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    done = subprocess.run(list(map(str, args)), **options)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def install(archive, folder):
    """The Python of an environment with a wheel or a source distribution; everything else it
    borrows from this one.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    # A .pth file's folder is searched last, and its own .pth files, our editable install among
    # them, are not read: so `specserve` can only be the archive's.
    site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps"]
    # --ignore-installed: the borrowed folder holds the metadata of the editable install.
    run(*pip, "--ignore-installed", "--no-build-isolation", archive)
    return python
