"""Programs that check files of deployments: those installed, or packages that have them."""

import functools
import shutil
import tarfile
import zipfile
from pathlib import Path

from tests.server.environments import python_with


@functools.cache
def environment() -> Path:
    """The folder of an environment with the linters; the test is skipped where none can be had."""
    return Path(python_with("deploy")).parents[1]


def program(name: str) -> str:
    """The path of a Python package's program."""
    return str(environment() / "bin" / name)


@functools.cache
def helm() -> str:
    """helm, from PATH or from the package that has it for another purpose."""
    if found := shutil.which("helm"):
        return found
    path = environment() / "helm" / "helm"
    if not path.exists():
        [package] = environment().glob("lib/*/site-packages/aws_cdk/*/_jsii/*.tgz")
        with tarfile.open(package) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            zipfile.ZipFile(layer).extract("helm/helm", environment())
        path.chmod(0o755)
    return str(path)
