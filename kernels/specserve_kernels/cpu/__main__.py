"""`python -m specserve_kernels.cpu` compiles the kernels before their first use."""

import sys

from specserve_kernels.cpu.build import main

sys.exit(main())
