"""``python -m tvmcap`` is ``tvmcap``."""

import sys

from tvmcap.cli import main

sys.exit(main())
