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
from nearveil.server import OpenGallery, ProtectedGallery
from studies.demo import build_photos, build_words, split_words
from studies.pictures import PHOTOGRAPHS, write_details
from tests.ui.test_browser import Look, looking, shown

FOLDER = Path("docs/howto")
WORD = "doctor"
PRIVATE, PUBLIC = 110, 25  # details of each photograph in a protected gallery
WIDE, NARROW = ViewportSize(width=1280, height=860), ViewportSize(width=400, height=780)


def take(look: Look, name: str, *, whole: bool = True, width: int = 960) -> None:
    """Take a picture, with few colours and at most `width` pixels wide, so that it is small."""
    look.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    path = FOLDER / f"ui-{name}.png"
    look.page.screenshot(path=path, full_page=whole, animations="disabled")
    with Image.open(path) as picture:
        small = picture.convert("RGB")
    small.thumbnail((width, 10_000), Image.Resampling.LANCZOS)
    small.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def load_pictures(look: Look) -> None:
    """Wait until the originals are there."""
    look.page.wait_for_load_state("networkidle")


def tour_local(look: Look, image: Path) -> None:
    """Search a gallery on this machine."""
    page = look.page
    page.set_viewport_size(WIDE)
    look.open(epsilon="")
    look.choose(image)
    look.ask()
    expect(page.locator(".matches li")).to_have_count(8)
    load_pictures(look)
    take(look, "local")
    page.emulate_media(color_scheme="dark")
    page.locator(".matches .tile").nth(2).click()
    load_pictures(look)
    take(look, "dark", whole=False)
    page.keyboard.press("Escape")
    page.set_viewport_size(NARROW)
    page.reload()
    look.wait_until_ready()
    load_pictures(look)
    take(look, "narrow", whole=False)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(WIDE)
    look.go("gallery")
    expect(page.locator("#gallery-body dd").first).to_be_visible()
    load_pictures(look)
    take(look, "gallery")
    look.check_quiet()


def tour_server(look: Look, image: Path) -> None:
    """Search a server by a message."""
    look.page.set_viewport_size(WIDE)
    look.open()
    look.choose(image)
    look.ask()
    while look.page.locator(".worth.miss").count():
        look.ask()
    look.page.evaluate("document.querySelectorAll('.under, .foot').forEach((one) => one.remove())")
    take(look, "ask", width=840)


def tour_words(look: Look) -> None:
    """Search words: a hit, a miss, and the budget."""
    page = look.page
    page.set_viewport_size(NARROW)
    look.open(epsilon="")
    page.fill("#item-id", WORD)
    look.ask()
    expect(page.locator(".matches li").first).to_contain_text(WORD)
    page.locator("#ask-status").evaluate("(one) => one.scrollIntoView()")
    page.screenshot(path=FOLDER / "ui-narrow-light.png")
    page.set_viewport_size(WIDE)
    look.pay("2")
    while not page.locator(".worth.miss").count():
        look.ask()
    take(look, "miss")
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
            shown(Path(folder), str(gallery), None, where="a folder of photographs") as address,
            looking(browser, address, reduced_motion="reduce") as look,
        ):
            tour_local(look, image)
        with (
            Index.open(gallery) as index,
            shown(Path(folder), OpenGallery(index, "photographs"), None, epsilon=100.0, where="a server") as address,
            looking(browser, address, reduced_motion="reduce") as look,
        ):
            tour_server(look, pictures / "coffee.png")
        words = split_words()
        build_words(words, Path(folder) / "words")
        with (
            shown(Path(folder), str(Path(folder) / "words"), None, epsilon=100.0, where="5,000 words") as address,
            looking(browser, address, reduced_motion="reduce") as look,
        ):
            tour_words(look)
        with (
            closing(protected(Path(folder) / "protected")) as model,
            shown(Path(folder), model, None, where="a protected gallery of photographs") as address,
            looking(browser, address, reduced_motion="reduce") as look,
        ):
            classify(look, image)
        browser.close()


if __name__ == "__main__":
    main()
