"""`python -m fire_core` is the command `fire-core`."""

import sys

from fire_core.checkpoints.command_line import main

sys.exit(main())
