from __future__ import annotations

import subprocess
import sys


def test_what_only_decides_never_loads_torch() -> None:
    names = "layout policy policies slot_table arena_table residency rebatch trace replay simulate"
    code = "import sys\n" + "".join(
        f"import moestro.expert_cache.{name}\n" for name in names.split()
    )
    code += "assert not {'torch', 'transformers', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
