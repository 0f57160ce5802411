"""Text and HTTP. Owns everything a client sees; knows tokens only as ids and never loads torch."""
