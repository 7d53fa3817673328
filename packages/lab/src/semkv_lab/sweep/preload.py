"""Imported once by the server that experiments' processes are forked from: they find the heavy libraries loaded.

Imports alone: no thread, no model, no GPU, so that a fork is clean.
"""

import importlib
import importlib.util

for _name in ("torch", "transformers", "sentence_transformers", "faiss", "vllm", "vllm.entrypoints.llm"):
    if importlib.util.find_spec(_name.partition(".")[0]) is not None:
        importlib.import_module(_name)
