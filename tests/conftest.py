"""What all tests share: examples have no deadline, proofs of layouts are remembered in a folder of their own, no test
sees what was measured on the machine it runs on, and `make quick` knows which tests start processes."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A shell starts background jobs with SIGINT ignored, and every process that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

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


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A browser without a window, driven by selenium."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromium-driver are not installed: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(driver))
    yield found
    found.quit()


STARTING_FOLDERS = {"accelerator", "checkpoint", "distributed", "fuzz"}
STARTING_FIXTURES = {"device", "place", "ranks"}
STARTS = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"}
_quick_test: str | None = None


@pytest.hookimpl(tryfirst=True)  # Before pytest selects by marker.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in STARTING_FOLDERS or STARTING_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("processes")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _quick_test
    _quick_test = None if item.get_closest_marker("processes") else item.nodeid
    try:
        return (yield)
    finally:
        _quick_test = None


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if event in STARTS and _quick_test is not None:
        raise RuntimeError(f"{_quick_test} starts a process: mark it with pytest.mark.processes")


sys.addaudithook(_refuse_processes)
