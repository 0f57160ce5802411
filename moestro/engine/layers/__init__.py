"""What a decoder is built of. A layer gets its `step` argument and holds no request state."""
