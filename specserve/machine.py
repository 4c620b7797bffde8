"""What this runs on, for whoever reads a figure later."""

import platform
from pathlib import Path


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(": ")[2]
    except OSError:
        pass  # Linux alone has it
    return platform.processor() or "unknown"
