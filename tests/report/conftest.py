"""The programs of bench/, and a browser."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from selenium import webdriver

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench" / room) for room in ("report", "gpu")]
sys.dont_write_bytecode = True


def is_debian():
    release = Path("/etc/os-release")
    return release.is_file() and "\nID=debian" in "\n" + release.read_text()


@pytest.fixture(scope="session")
def browser():
    """Chromium under remote control. tools/setup.sh installs it on Debian; elsewhere these tests are skipped without one."""
    programs = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    program, driver = next(filter(None, programs), None), shutil.which("chromedriver")
    if program is None or driver is None:
        what = f"no {'chromedriver' if program else 'Chromium'} here (Debian: chromium, chromium-driver)"
        pytest.fail(what + "; tools/setup.sh report-test installs it") if is_debian() else pytest.skip(what)
    options = webdriver.ChromeOptions()
    options.binary_location = program
    # Containers have little shared memory, and as root there is no sandbox.
    for argument in ("--headless=new", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars",
                     *(["--no-sandbox"] if os.geteuid() == 0 else [])):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    found.set_page_load_timeout(120)
    yield found
    found.quit()
