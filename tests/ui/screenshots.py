"""The pictures of the documentation, of photographs: ``python -m tests.ui.screenshots`` makes them anew."""

import shutil
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from PIL import Image
from playwright.sync_api import ViewportSize, expect, sync_playwright

from nearveil.features import HogColor
from nearveil.gallery import Index
from nearveil.gallery.sync import sync_folder
from nearveil.server import ProtectedGallery
from studies.demo import build_photos
from studies.pictures import PHOTOGRAPHS, write_details
from tests.ui.test_browser import Look, looking, shown

FOLDER = Path("docs/howto")
PRIVATE, PUBLIC = 110, 25  # details of each photograph in a protected gallery
WIDE, NARROW = ViewportSize(width=1280, height=860), ViewportSize(width=400, height=780)


def take(look: Look, name: str, *, whole: bool = True) -> None:
    """Take a picture, with few colours, so that it is small."""
    look.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    path = FOLDER / f"ui-{name}.png"
    look.page.screenshot(path=path, full_page=whole, animations="disabled")
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(220, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def tour(look: Look, image: Path) -> None:
    """Go through the pages."""
    page = look.page
    page.set_viewport_size(WIDE)
    look.open()
    look.choose(image)
    look.ask()
    expect(page.locator(".matches li")).to_have_count(8)
    take(look, "ask")
    page.emulate_media(color_scheme="dark")
    take(look, "dark", whole=False)
    page.set_viewport_size(NARROW)
    take(look, "narrow", whole=False)
    page.emulate_media(color_scheme="light")
    take(look, "narrow-light", whole=False)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(WIDE)
    look.go("gallery")
    expect(page.locator("#gallery-body dd").first).to_be_visible()
    take(look, "gallery")
    look.go("budget")
    page.get_by_role("button", name="Preview").click()
    expect(page.locator("#plan-words")).to_contain_text("fit")
    page.get_by_role("button", name="Verify").click()
    expect(page.locator("#verify-words")).to_contain_text("all is well")
    take(look, "budget")
    look.check_quiet()


def protected(folder: Path) -> ProtectedGallery:
    """Publish a model that knows the photograph of a detail."""
    write_details(folder / "private", folder / "queries", PRIVATE + PUBLIC)
    for path in sorted((folder / "private").glob("*/*.png")):
        if int(path.stem) > PRIVATE:
            (folder / "public" / path.parent.name).mkdir(parents=True, exist_ok=True)
            path.rename(folder / "public" / path.parent.name / path.name)
    for name in ("private", "public"):
        sync_folder(folder / name, folder / f"{name} index", extractor=HogColor(), private=name == "private")
    gallery = ProtectedGallery(
        Index.open(folder / "private index"),
        Index.open(folder / "public index"),
        "photographs",
        classes=sorted(PHOTOGRAPHS),
        epsilon=2.0,
        delta=1e-5,
        ledger=folder / "gallery.db",
        account="photographs",
    )
    gallery.publish()
    return gallery


def classify(look: Look, image: Path) -> None:
    """Let the page classify an image."""
    page = look.page
    page.set_viewport_size(WIDE)
    page.goto(look.address)
    look.choose(image)
    page.get_by_role("button", name="Classify").click()
    expect(page.locator(".classes tbody tr")).to_have_count(len(PHOTOGRAPHS))
    take(look, "classes")


def main() -> None:
    """Make a gallery of photographs, open the page on it, and take pictures."""
    program = shutil.which("chromium")
    if program is None:
        sys.exit("there is no chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        pictures, gallery = Path(folder) / "pictures", Path(folder) / "gallery"
        build_photos(Path(folder) / "photos", pictures, gallery)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        image = pictures / "chelsea.png"
        with (
            shown(Path(folder), str(gallery), None, where="a gallery of photographs") as address,
            looking(browser, address, reduced_motion="reduce") as look,
        ):
            tour(look, image)
        with (
            closing(protected(Path(folder) / "protected")) as model,
            shown(Path(folder), model, None, where="a protected gallery of photographs") as address,
            looking(browser, address, reduced_motion="reduce") as look,
        ):
            classify(look, image)
        browser.close()


if __name__ == "__main__":
    main()
