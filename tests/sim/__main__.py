"""`python -m tests.sim`."""

import sys

from tests.sim.seeds import main

if __name__ == "__main__":
    sys.exit(main())
