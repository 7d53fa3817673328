"""``semkv demo``: what comes again, asked with and without semkv in turns, in one table.

- **Gateway.** Questions about drawn pictures go to vLLM's own server with the bundled model, and to a gateway in front
  of the same server: again as they were, in other words, and as traps, which have another answer and must not hit.
- **After a restart.** An engine with semkv answers questions about documents and pictures, and ends. Then two new
  engines are asked: one with semkv, which finds KV and encoder outputs on disk, and one without. The bundled model
  reads a picture in milliseconds, so this one is larger; its weights are drawn, and answers are compared by tokens.

vLLM's own caches are on everywhere. Files are dropped from the page cache before the new engines read them.
"""
