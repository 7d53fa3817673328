"""Every exception semkv raises on purpose.

    SemkvError
    ├── ConfigError      a setting is wrong: raised at load, names key, value and what is allowed
    ├── DatasetError     an input file cannot be read: names file and line
    ├── EngineError      the inference engine cannot be started or failed on a request
    └── StoreError       a store cannot be opened (other version, not a directory, not writable)
        └── CorruptValue a stored value failed its checksum, shape, dtype or version test

`CorruptValue` never leaves the stores: it is counted and becomes a miss.
"""

from __future__ import annotations

from semkv_stores.errors import ConfigError, CorruptValue, EngineError, SemkvError, StoreError

__all__ = ["ConfigError", "CorruptValue", "DatasetError", "EngineError", "SemkvError", "StoreError"]


class DatasetError(SemkvError):
    """A data file cannot be read. The message names the file and, where there is one, the line."""
