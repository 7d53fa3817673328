"""Vector indexes: built from the catalog at start with the help of kept graphs, never the only copy of anything."""
