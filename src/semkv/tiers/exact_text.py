"""L0.5: the same text, byte for byte or but for what `keys.normalise` folds: blanks, the case of typing, Unicode form.

The longest stored leading run wins. A run shorter than the prompt counts only when it holds a context: a shared system
prompt or image alone is what vLLM's own prefix cache is for, and calling it a hit would make every second question
about an image one.
"""

from __future__ import annotations

from collections.abc import Iterator

from semkv.stores.catalog import Catalog
from semkv.tiers.base import Candidate
from semkv.tiers.keying import SPELLINGS, Keyed, same_texts
from semkv.types import Scope

STATUS = "exact_text"
_DONORS = 4  # the next ones are asked when the policy refuses the first


class ExactTextTier:
    """Looks prompts up by chain keys. With ``--scope any`` media items are all alike, and the donor's come along.

    Args:
        catalog: where the entries are.
        scope: ``any`` takes all images as one.
        normalised: False finds byte-equal texts alone; with ``any``, behind another image, among the ``SPELLINGS``
            oldest entries of the folded text.
    """

    def __init__(self, catalog: Catalog, scope: Scope, *, normalised: bool = True) -> None:
        self._catalog, self._alike, self._normalised = catalog, scope is Scope.ANY, normalised
        self._most = _DONORS if normalised or not self._alike else SPELLINGS

    def candidates(self, keyed: Keyed) -> Iterator[Candidate]:
        """Donors, longest run first; among equals the byte-equal ones, then the oldest."""
        for depth, key in self._keys(keyed):
            for donor in self._catalog.find(key, self._most):
                if self._normalised or same_texts(keyed.segments[:depth], donor.segments):
                    yield Candidate(donor, depth, STATUS, 1.0, (STATUS,))

    def _keys(self, keyed: Keyed) -> Iterator[tuple[int, str]]:
        """Each key with the length of its run, made when asked for: the first is what most hits are found by."""
        folded = self._normalised or self._alike  # no key is kept of exact texts with media alike
        yield len(keyed.segments), keyed.whole(keyed.exact, "exact")
        if folded:
            yield len(keyed.segments), keyed.whole(keyed.loose if self._alike else keyed.folded, "folded")
        for depth in reversed(keyed.lead_depths()):
            yield depth, keyed.lead(keyed.exact, "exact", depth)
            if folded:
                yield depth, keyed.lead(keyed.loose if self._alike else keyed.folded, "folded", depth)
