"""Which pairs in other languages hit: ``python bench/languages.py --out FILE``.

For each file of ``bench/data/languages``, traps and paraphrases that hit with default settings, and by a cosine alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from semkv.config import PolicyConfig
from semkv_lab.semantic import DATA, Row, eval_pairs, machine

_COSINES = (0.92, 0.85, 0.98)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    arms = {"defaults": PolicyConfig()}
    for cosine in _COSINES:
        alone = PolicyConfig(similarity_threshold=cosine, guards=False)
        arms[f"cosine {cosine:g} alone"] = alone
    files = sorted((DATA / "languages").glob("*.jsonl"))
    found: dict[str, Row] = {
        name: {file.stem: _hits(file, flags) for file in files} for name, flags in arms.items()
    }
    for name, row in found.items():
        print(name, json.dumps(row))
    out.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n", encoding="utf-8")


def _hits(file: Path, flags: PolicyConfig) -> Row:
    row = eval_pairs(file, flags)
    hits = {"paraphrases": "same that hit", "traps": "different that hit"}
    return {"encoder": row["encoder"]} | {kind: row[name] for kind, name in hits.items()}


if __name__ == "__main__":
    main()
