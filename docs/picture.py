"""Take the picture of a report page for the README: `python docs/picture.py runs/quick docs/report.png`.

The report of the run folders is written into a temporary folder and opened in Chromium. The picture shows its top.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from testbed.report.page import write

WIDTH, HEIGHT = 1120, 1180  # CSS pixels: the verdict, the first table and the first figures
SCALE = 1.5  # pixels of the picture per CSS pixel
COLOURS = 96
MAX_BYTES = 200_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main(folder: Path, picture: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"no browser: none of {', '.join(BROWSERS)} is installed. Install Chromium.")
    with tempfile.TemporaryDirectory() as out, sync_playwright() as driver:
        page_file = write([folder], Path(out)).page
        opened = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = opened.new_page(
            viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light", device_scale_factor=SCALE
        )
        page.goto(page_file.as_uri())
        shot = page.screenshot(type="png")
        opened.close()
    small = io.BytesIO()
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
        small, "PNG", optimize=True
    )
    if len(small.getvalue()) > MAX_BYTES:
        raise SystemExit(f"{picture}: {len(small.getvalue())} bytes, at most {MAX_BYTES}. Lower SCALE or COLOURS.")
    picture.write_bytes(small.getvalue())
    print(f"{picture}: {len(small.getvalue()) // 1000} kB")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python docs/picture.py RUN_FOLDER PICTURE.png")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
