"""What the engine computes, against transformers."""
