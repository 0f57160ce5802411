"""Triton kernels: what a machine with a GPU runs in place of `kernels.reference`.

Owns: one op a module, each a kernel and a thin launcher. Launchers take torch tensors and write to
those given as outputs; they never synchronise and never allocate, so that a CUDA graph can capture
them. Does not own: which op runs where (`kernels.registry`), nor any cache decision beyond carrying
out the tables of `kernels.gpu.tables`.

Import a module only where Triton is installed: this package itself imports nothing.
"""
