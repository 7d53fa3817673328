"""``python -m semkv``."""

from semkv.cli import main

if __name__ == "__main__":  # a spawned engine process imports this module again
    main()
