"""Write the word list by which the guards tell a slip of the keyboard from a word.

    python bench/spelling.py --common FILE... --usual FILE... --rare FILE... --vocabulary FILE

Debian's packages wamerican-small and wbritish-small have the files for ``--common`` (in /usr/share/dict), wamerican
and wbritish those for ``--usual``, wamerican-huge and wbritish-huge those for ``--rare``. ``--vocabulary`` is that of
the packaged sentence encoder (vocab.txt), which has names and brands: a usual word that it has is common, too. Of the
rare words only those are kept that one slip makes of a common one. The vocabulary has words in the order of how often
they are used.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable
from pathlib import Path

from semkv_guards.spelling import SHORTEST_ALONE, WORDS, slips_alone

_HEAD = """# English words: a word that is in no table, and one slip away from a common one, is misspelled.
# The frequent ones are in the order of how often they are used.
#
# Written by bench/spelling.py from SCOWL (Spell Checker Oriented Word Lists), and from the vocabulary of
# all-MiniLM-L6-v2 (Apache 2.0). The collective work SCOWL is Copyright 2000-2011 by Kevin Atkinson. Permission to use,
# copy, modify, distribute and sell these word lists, the associated scripts, the output created from the scripts, and
# its documentation for any purpose is hereby granted without fee, provided that the above copyright notice appears in
# all copies and that both that copyright notice and this permission notice appear in supporting documentation. Kevin
# Atkinson makes no representations about the suitability of this array for any purpose. It is provided "as is" without
# express or implied warranty.
"""


_FREQUENT = 10_000  # words whose rank is kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("common", "usual", "rare", "vocabulary"):
        parser.add_argument(f"--{name}", nargs="+", type=Path, required=True)
    given = parser.parse_args()
    vocabulary = _words(given.vocabulary, names=True)
    common = _words(given.common, names=False) | (_words(given.usual, names=False) & vocabulary)
    common = {word for word in common if len(word) >= SHORTEST_ALONE}
    known = (_words([*given.usual, *given.rare], names=True) | vocabulary) - common
    rare = {slip for word in common for slip in slips_alone(word)} & known
    lists = {
        "common": sorted(common),
        "rare": sorted(rare),
        "frequent": _frequent(given.vocabulary),
    }
    tables = (f'{name} = """\n{_filled(found)}"""\n' for name, found in lists.items())
    WORDS.write_text("".join((_HEAD, *tables)), encoding="utf-8")
    print(f"{len(common)} common words, {len(rare)} rare ones")


def _words(files: Iterable[Path], *, names: bool) -> set[str]:
    """The words of some files that are written in plain letters; names, in small letters, where they count."""
    lines = (line for file in files for line in file.read_text(encoding="utf-8").split())
    return {
        line.lower()
        for line in lines
        if line.isascii() and line.isalpha() and (names or line.islower())
    }


def _frequent(files: Iterable[Path]) -> list[str]:
    """The words of vocabularies, the most frequent first."""
    lines = (line for file in files for line in file.read_text(encoding="utf-8").split())
    words = dict.fromkeys(line for line in lines if line.isascii() and line.isalpha())
    return [word for word in words if len(word) > 1][:_FREQUENT]


def _filled(words: Iterable[str]) -> str:
    return textwrap.fill(" ".join(words), 100)


if __name__ == "__main__":
    main()
