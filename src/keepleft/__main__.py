"""python -m keepleft"""

import sys

from keepleft.cli import main

sys.exit(main())
