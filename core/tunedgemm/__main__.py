"""``python -m tunedgemm`` is the ``tunedgemm`` command."""

import sys

from tunedgemm.cli import main

if __name__ == "__main__":
    sys.exit(main())
