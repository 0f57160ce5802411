"""What tests compare against: tiny checkpoints, transformers' answers, scripted models."""
