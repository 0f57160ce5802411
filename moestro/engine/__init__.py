"""The engine: its loop, executor, layers and model families. It sees token ids, never text."""
