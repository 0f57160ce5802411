"""Running a model on a CUDA device: decode steps as graphs, sweeps that stream experts."""
