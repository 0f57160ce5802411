"""Servers that several modules talk to, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.story import Story
from tests.oracle.serving import Served, serve


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return Story(tmp_path_factory.mktemp("story") / "scripted")


@pytest.fixture(scope="session")
def scripted_server(story: Story, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A roomy server of the scripted model; a test leaves it idle."""
    log = tmp_path_factory.mktemp("log") / "scripted.log"
    with serve(story.folder, "--served-model-name", "scripted", log=log) as served:
        yield served


@pytest.fixture
def scripted(scripted_server: Served) -> Iterator[Served]:
    """The scripted server, checked for leftovers after each test."""
    yield scripted_server
    scripted_server.wait_idle()
