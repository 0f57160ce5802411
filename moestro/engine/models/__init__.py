"""Model families as data: what each is, read from its config."""
