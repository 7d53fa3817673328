"""The tiers: each proposes donors for a request; `semkv.tiers.matching` asks them in order."""
