"""What a whole output must match: which tokens may come next. No torch, no requests."""
