"""``python -m rankscope`` and ``accelerate launch -m rankscope``."""

import sys

from rankscope.cli.__main__ import main

sys.exit(main())
