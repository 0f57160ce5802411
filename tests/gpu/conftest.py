"""Tests that need a CUDA device: python -m pytest -m gpu tests/gpu."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(300))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
