"""What the server process loads."""

from __future__ import annotations

import subprocess
import sys


def test_the_server_never_loads_torch() -> None:
    code = (
        "import sys, moestro.server.app, moestro.server.text;"
        "print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
