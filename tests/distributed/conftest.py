"""The standing processes end with the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.distributed import harness


@pytest.fixture(scope="session", autouse=True)
def _processes() -> Iterator[None]:
    yield
    harness.close_all()
