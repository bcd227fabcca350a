"""`python -m lilo_volume.cli`."""

import sys

from lilo_volume.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
