"""What operators see of a gateway: pages, admin routes, traffic by time, names of tenants."""

from __future__ import annotations

__all__: list[str] = []
