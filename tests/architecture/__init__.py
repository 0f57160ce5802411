"""The rules that hold for the whole tree."""
