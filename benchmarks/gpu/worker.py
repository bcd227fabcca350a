"""Worker: one case in a process of its own: `python -m benchmarks.gpu.worker MODULE [ARGUMENTS]`. `run.py` starts it.

It imports everything at once and then waits for a line on standard input, so that imports of the next case cost the
device no time. Exits with 1 if the case raised.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings


def main() -> None:
    """Import, wait, run."""
    name, arguments = sys.argv[1], sys.argv[2:]
    warnings.simplefilter("ignore")  # of libraries; a case's own words are its lines
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for noisy in ("megatron", "httpx", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    module = importlib.import_module(f"benchmarks.gpu.{name}")
    sys.argv = [name, *arguments]
    if sys.stdin.readline():
        module.main()


if __name__ == "__main__":
    main()
