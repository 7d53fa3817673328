"""Where a gateway keeps responses: in memory, in SQLite, in Redis, or in a store of the user's own."""
