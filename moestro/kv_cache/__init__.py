"""Where keys and values live: block bookkeeping (no torch here) and, apart, their storage."""
