"""Vector indexes: built from the catalog at start, never the only copy of anything."""
