"""Stores of whole answers: in memory, in a SQLite file, in Redis. One contract, `base.ResponseStore`."""
