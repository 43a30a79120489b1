"""Pages as people see them: a screenshot or the DOM by headless Chromium, and how much of a colour is on a picture."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str:
    """The browser's path; the test is skipped where there is none."""
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(_NAMES)}")
    return program


def screenshot(address: str, file: Path, *, width: int = 800, height: int = 3000, wait_ms: int = 2000) -> Path:
    """Draw a page into a PNG file."""
    look = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
    size = [f"--window-size={width},{height}", f"--virtual-time-budget={wait_ms}", f"--user-data-dir={file}.profile"]
    subprocess.run(
        [find_browser(), *look, *size, f"--screenshot={file}", address], check=True, capture_output=True, timeout=90
    )
    return file


def pixels(file: Path, colour: str, *, near: float = 0.12) -> int:
    """Pixels of about this colour ('#rrggbb')."""
    wanted = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return int((np.abs(imread(file)[..., :3] - wanted).max(axis=-1) < near).sum())


@contextmanager
def browsing(address: str, folder: Path) -> Iterator[None]:
    """Keep the page open, by the clock on the wall."""
    look = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    command = [find_browser(), *look, f"--user-data-dir={folder}/open", address]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            yield
        finally:
            browser.terminate()


def read_dom(address: str, folder: Path, *flags: str, wait_ms: int = 4000) -> str:
    """The page as HTML text after its script has run for so long."""
    look = ["--headless", "--no-sandbox", "--disable-gpu", f"--virtual-time-budget={wait_ms}", "--dump-dom", *flags]
    command = [find_browser(), *look, f"--user-data-dir={folder}/profile", address]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=90).stdout
