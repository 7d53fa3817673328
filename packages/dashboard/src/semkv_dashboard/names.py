"""Names of tenants, from a file or from a trusted proxy. They are only displayed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from semkv.errors import ConfigError, DatasetError
from semkv.latest import Latest
from semkv.user_files import read_toml

FLAG = "--tenant-names"
DIGITS = 8
"""Digits of a tenant's digest that operators see, and by which a rule names a tenant."""

_LONGEST = 64  # characters of a name
_KNOWN = 10_000
_ID = re.compile(r"[0-9a-f]{8,32}")
_KEY = re.compile(r"[0-9a-f]{64}")
_FORM = (
    'a TOML file with lines such as 3fa9c1d2 = "Search team": before the sign the digits that the dashboard shows, or'
    " the SHA-256 of an API key in 64 digits; behind it a name of 1 to 64 printable characters"
)


def read_names(file: Path) -> dict[str, str]:
    """The names in a file.

    Raises:
        ConfigError: it cannot be read, or has another form. What stands in it is left out, since it may be a key.
    """
    try:
        given = read_toml(file.expanduser())
    except (DatasetError, RuntimeError):
        raise ConfigError(FLAG, file, _FORM) from None
    for number, (whose, name) in enumerate(given.items(), 1):
        is_id = _ID.fullmatch(whose) or _KEY.fullmatch(whose)
        if not is_id or not isinstance(name, str) or not name or _shown(name) != name:
            raise ConfigError(FLAG, f"entry {number} of {file}", _FORM)
    return given


def _shown(name: str) -> str:
    """A name without what cannot be printed, and no longer than it may be; empty where nothing is left."""
    seen = "".join(letter if letter.isprintable() else "?" for letter in name)
    return seen.strip()[:_LONGEST]


def _decoded(header: str) -> str:
    """A header that was read as Latin-1, as UTF-8 where it is that."""
    try:
        return header.encode("latin-1").decode()
    except ValueError:
        return header


class TenantNames:
    """What tenants are called.

    Args:
        given: names by the first digits of a tenant's digest, or by the SHA-256 of a key.
        known: names by digests, from before this start.
    """

    def __init__(
        self, given: Mapping[str, str] | None = None, known: Mapping[str, str] | None = None
    ) -> None:
        self._ids = {whose: name for whose, name in (given or {}).items() if len(whose) <= 32}
        self._keys = {whose: name for whose, name in (given or {}).items() if len(whose) == 64}
        self._names: Latest[str, str] = Latest(_KNOWN)  # by whole digests; empty for none
        self._by_digits: Latest[str, str] = Latest(_KNOWN)
        self.new: dict[str, str] = {}  # learned and not taken yet
        for tenant, name in (known or {}).items():
            self._set(tenant, self._from_file(tenant) or name)

    def __contains__(self, tenant: str) -> bool:
        """Whether a tenant need not be looked at."""
        return tenant in self._names

    def learn(
        self,
        tenant: str,
        *,
        keys: Iterable[str],
        named: str,
    ) -> None:
        """A tenant asks for the first time: with these keys, and named so by a trusted proxy."""
        digests = (hashlib.sha256(key.encode("latin-1")).hexdigest() for key in keys)
        by_key = next((self._keys[found] for found in digests if found in self._keys), "")
        name = self._from_file(tenant) or by_key or _shown(_decoded(named))
        self._set(tenant, name)
        if name and len(self.new) < _KNOWN:
            self.new[tenant] = name

    def take(self) -> dict[str, str]:
        """What was learned since the last time."""
        new, self.new = self.new, {}
        return new

    def _from_file(self, tenant: str) -> str:
        lengths = range(DIGITS, len(tenant) + 1) if self._ids else ()
        return next((self._ids[tenant[:n]] for n in lengths if tenant[:n] in self._ids), "")

    def _set(
        self,
        tenant: str,
        name: str,
    ) -> None:
        self._names[tenant] = name
        if name:
            self._by_digits[tenant[:DIGITS]] = name

    @property
    def given(self) -> dict[str, str]:
        """Names by first digits, of those that the file names so."""
        return {whose[:DIGITS]: name for whose, name in self._ids.items()}

    def of(self, digits: str) -> str:
        """The name of a tenant that has asked, by its first digits; empty for none."""
        return self._by_digits.get(digits, "")

    def find(self, text: str) -> frozenset[str]:
        """What the digests of tenants begin with whose name or digits begin with a text."""
        wanted = text.casefold()
        named = {d for d, name in self._by_digits.items() if name.casefold().startswith(wanted)}
        named |= {whose for whose, name in self._ids.items() if name.casefold().startswith(wanted)}
        return frozenset(named | {wanted})

    def shown(self, tenant: str) -> str:
        """The name, else the first digits."""
        digits = tenant[:DIGITS]
        return self.of(digits) or self._from_file(tenant) or digits
