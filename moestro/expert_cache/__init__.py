"""Which expert is where: layout, three tiers, policies, transfers, traces and their replay.

`layout`, `policy`, `policies`, `slot_table`, `arena_table`, `residency`, `trace` and `simulate`
never load torch. `cache.ExpertCache` is what an engine talks to.
"""
