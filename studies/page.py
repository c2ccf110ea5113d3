"""``make demo`` ends here: a gallery that stays, private pictures to drop, and how to open the page."""

import argparse
import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from nearveil.features import FeatureCache, HogColor, load_image
from nearveil.gallery import Index, Item
from studies.photos import Photos, load_photos

FRACTIONS = (0.2, 0.1)  # the last is the newest, so the page begins with it
EPSILON = 4.0
MOST = 600  # items of a gallery whose features are made here


def add_extractor(data: Photos) -> Photos:
    """Return a gallery whose features can be made of a file that is dropped.

    Photographs have an extractor. Handwritten digits are rows of scikit-learn: some are taken as pictures instead.
    """
    if data.fingerprint:
        return data
    extractor = HogColor()
    pictures = [load_image(image) for image in data.thumbnails[:MOST]]
    return replace(
        data,
        extractor=extractor.name,
        fingerprint=extractor.fingerprint,
        gallery=extractor.extract(pictures),
        gallery_y=data.gallery_y[:MOST],
        thumbnails=data.thumbnails[:MOST],
        names=data.names[:MOST],
    )


def keep(data: Photos, out: Path) -> tuple[Path, Path]:
    """Make the gallery anew, and write the private pictures beside it."""
    from PIL import Image

    gallery, pictures = out / "gallery", out / "pictures"
    for old in (gallery, pictures):
        shutil.rmtree(old, ignore_errors=True)
    with Index.create(gallery, dimension=data.gallery.shape[1], extractor=data.fingerprint) as index:
        index.add(
            Item(row, name, image) for row, name, image in zip(data.gallery, data.names, data.thumbnails, strict=True)
        )
        for fraction in FRACTIONS:
            index.publish(EPSILON, fraction)
    pictures.mkdir()
    for number, picture in enumerate(data.pictures):
        Image.fromarray(picture).save(pictures / f"{number + 1:02}.png")
    return gallery, pictures


def main(arguments: list[str] | None = None) -> None:
    """Make the gallery, and say how to open the page."""
    parser = argparse.ArgumentParser(description="A gallery for the page, and how to open it.")
    parser.add_argument("--out", type=Path, default=Path("out"))
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)
    try:
        import nearveil.ui  # noqa: F401

        gallery, pictures = keep(add_extractor(load_photos(FeatureCache(out / "photos.features"), console)), out)
    except ModuleNotFoundError as missing:
        console.print(f'The page needs more ({missing}): pip install "nearveil[images,service]"')
        return
    program = Path(os.path.relpath(Path(sys.executable).parent / "nearveil"))
    told = shlex.join([str(program), "ui", "--index", str(gallery), "--ledger", str(out / "budget.db")])
    console.print(f"To see what a server sees, open the page and drop a picture of {pictures} on it:\n\n    {told}\n")


if __name__ == "__main__":
    main()
