"""Model families as data, and the one decoder stack that runs them."""
