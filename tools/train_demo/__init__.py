"""How the demo checkpoint is made: its tasks, its training, its export and its scores."""
