"""``python -m semkv``."""

from semkv.cli import main

main()
