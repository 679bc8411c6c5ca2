"""`python -m specmesh.cli`: the `specmesh` command where the package is not installed."""

import sys

from specmesh.cli import main

sys.exit(main())
