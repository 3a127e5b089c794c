"""What all tests share: examples have no deadline, proofs of layouts are remembered in a folder of their own, and no
test sees what was measured on the machine it runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes depends on who else uses the machine; every test has a timeout of its own.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    own = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own))
        patch.setenv("SHOAL_CALIBRATION", str(own / "never-written.toml"))
        yield
