"""A wheel has the kernels compiled for the usual instruction sets: it needs no compiler to be fast.

An editable install has none of them: its sources change, so they are compiled where they run.
"""

import platform
import re
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CPU = "specserve_kernels/cpu"  # in the wheel, and below kernels/


class PrebuiltKernels(BuildHookInterface):
    def initialize(self, version, build_data):
        if version == "editable":
            return
        levels, compiler = (self.load(name) for name in ("levels", "compiler"))
        libraries = {}
        for level in levels.LEVELS:
            if level.machine != platform.machine():
                continue
            try:
                path = self.compiled(compiler, level.flags)
            except compiler.BuildError as e:
                self.app.display_warning(f"the wheel has no kernels for {level.name}: {e}")
            else:
                libraries[path] = f"{CPU}/prebuilt/{level.name}-{compiler.source_hash()}.so"
        if libraries:
            build_data["force_include"].update({str(k): v for k, v in libraries.items()})
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag(libraries)}"

    def compiled(self, compiler, flags):
        """The library, from the cache folder where that can be used."""
        try:
            folder = compiler.cache_folder()
        except (compiler.BuildError, OSError):
            folder = Path(tempfile.mkdtemp())  # read after this hook has returned
        # Not loaded: this machine may lack the instructions.
        return compiler.compiled_in(folder, (*flags, *compiler.STATIC), compiler.is_whole)

    def load(self, name):
        """A module of the kernels, which cannot be imported: their package needs torch."""
        path = Path(self.root, "kernels", CPU, f"{name}.py")
        spec = spec_from_file_location(f"specserve_build_{name}", path)
        sys.modules[spec.name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def platform_tag(libraries):
    """The oldest C library that has all symbols, as the wheel's name tells it to an installer."""
    symbols = b"".join(path.read_bytes() for path in libraries)
    versions = [int(number) for number in re.findall(rb"GLIBC_2\.(\d+)", symbols)]
    libc = f"manylinux_2_{max(versions)}" if versions else "linux"
    return f"{libc}_{platform.machine()}"
