"""`python -m mlcompute` is the command `mlcompute`."""

import sys

from mlcompute.cli import main

sys.exit(main())
