"""`python -m specserve_bench.gpu`"""

import sys

from specserve_bench.gpu.stages import main

sys.exit(main(sys.argv[1:]))
