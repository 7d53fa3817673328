"""What is counted by name for the dashboard: the names that come most, however many there are."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from semkv_gateway.metrics import Busiest, Live


def test_who_comes_late_and_often_is_shown_in_place_of_who_came_first() -> None:
    live = Live()
    for number in range(1000):
        live.ended("m", f"early {number}", "miss")
    for number in range(1000):
        live.ended("m", "busy", "hit")
        live.ended("m", f"late {number}", "miss")
    tenants = live.view()["by"]["tenant"]
    assert tenants[0] == ("busy", {"hit": 1000})
    assert len(tenants) == 51
    assert tenants[-1][0] == "others"
    assert sum(counts.total() for _, counts in tenants) == 3000
    assert live.view()["by"]["model"] == [("m", {"miss": 2000, "hit": 1000})]


@given(st.lists(st.sampled_from("aaaaabbbcdefghij"), max_size=200), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_whatever_comes_more_often_than_its_share_has_a_place(names: list[str], most: int) -> None:
    busiest = Busiest(most)
    for name in names:
        busiest.add(name, "hit")
    found = dict(busiest.view(most))
    assert {
        name for name, count in Counter(names).items() if count > len(names) / most
    } <= found.keys()
    assert sum(counts.total() for counts in found.values()) == len(names)
    assert len(found.keys() - {"others"}) <= most
    assert all(
        counts.total() <= names.count(name) for name, counts in found.items() if name != "others"
    )
