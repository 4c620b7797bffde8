"""The name of the CPU, which is reported with measurements."""

import platform
from pathlib import Path


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(": ")[2]
    except OSError:
        pass  # only Linux has this file
    return platform.processor() or "unknown"
