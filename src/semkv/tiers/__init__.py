"""The matching levels: each offers donors for a request, best first."""
