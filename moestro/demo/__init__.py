"""The demo checkpoint: a tiny Mixture-of-Experts chat model that ships inside the package.

Its model card is model/README.md; tools/train_demo makes it. Nothing here loads it.
"""

from __future__ import annotations

from pathlib import Path


def demo_path() -> Path:
    """The folder of the demo checkpoint, in the layout that model hubs use."""
    return Path(__file__).parent / "model"
