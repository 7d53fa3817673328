"""What is counted by name: the names that come most, however many there are."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from semkv_dashboard.busiest import Busiest


@given(st.lists(st.sampled_from("aaaaabbbcdefghij"), max_size=200), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_whatever_comes_more_often_than_its_share_has_a_place(names: list[str], most: int) -> None:
    busiest = Busiest(most)
    for name in names:
        busiest.add(name, "hit")
    found = busiest.names
    assert {name for name, count in Counter(names).items() if count > len(names) / most} <= found
    assert len(found) <= most
