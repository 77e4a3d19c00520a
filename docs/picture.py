"""Take the picture of a report page for the README: `python docs/picture.py runs/quick docs/report.png`.

The report of the run folders is written into a temporary folder and opened in Chromium. The picture shows its top, down
to the first figures.
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

WIDTH = 1120  # CSS pixels
SCALE = 1.25  # pixels of the picture per CSS pixel
COLOURS = (192, 128, 96, 64)  # the first that gives a file of at most MAX_BYTES
MAX_BYTES = 200_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main(folder: Path, picture: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"no browser: none of {', '.join(BROWSERS)} is installed. Install Chromium.")
    with tempfile.TemporaryDirectory() as out, sync_playwright() as driver:
        page_file = write([folder], Path(out)).page
        opened = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        view = {"width": WIDTH, "height": 900}
        page = opened.new_page(viewport=view, color_scheme="light", device_scale_factor=SCALE)
        page.goto(page_file.as_uri())
        boxes = [figure.bounding_box() for figure in page.locator("figure").all()]
        height = 16 + max(box["y"] + box["height"] for box in boxes if box["y"] == boxes[0]["y"])
        shot = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
        opened.close()
    image = Image.open(io.BytesIO(shot)).convert("RGB")
    content = next((png for colours in COLOURS if len(png := _encode(image, colours)) <= MAX_BYTES), None)
    if content is None:
        raise SystemExit(f"{picture}: more than {MAX_BYTES} bytes even with {COLOURS[-1]} colours. Lower SCALE.")
    picture.write_bytes(content)
    print(f"{picture}: {len(content) // 1000} kB")


def _encode(image: Image.Image, colours: int) -> bytes:
    """A PNG with a palette."""
    encoded = io.BytesIO()
    image.quantize(colours, dither=Image.Dither.NONE).save(encoded, "PNG", optimize=True)
    return encoded.getvalue()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python docs/picture.py RUN_FOLDER PICTURE.png")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
