"""Run the command `fire-core` as `python -m fire_core`."""

import sys

from fire_core.checkpoints.command_line import main

sys.exit(main())
