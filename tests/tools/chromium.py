"""Debian's Chromium, driven by Selenium; tests that need it are skipped where it is not installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDED = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="there is no Chromium here: apt-get install chromium chromium-driver"
)


NARROWEST = 500
"""No window is narrower; a page can be shown as on a narrower screen."""


@contextmanager
def chromium(
    folder: Path, *, width: int = 1280, height: int = 900, dark: bool = False, scripts: bool = True
) -> Iterator[Any]:
    """Start a browser with a profile of its own in a folder, and end it."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                     f"--user-data-dir={folder}", f"--window-size={width},{height}", "--force-device-scale-factor=1",
                     "--disable-dev-shm-usage"):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    if not scripts:
        options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
    driver = Chrome(options=options, service=Service(DRIVER))
    if dark:
        driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
        )
    if width < NARROWEST:
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
    try:
        yield driver
    finally:
        driver.quit()
