"""Triton's interpreter, mended for this numpy."""

from __future__ import annotations


def mend() -> None:
    """Triton 3.6's interpreter calls int() on arrays of one element, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "mended", False):
        return

    def patch_better(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        tensor.__index__ = lambda self: self.handle.data.item()  # the scope restores the original

    patch_better.mended = True
    interpreter._patch_lang_tensor = patch_better
