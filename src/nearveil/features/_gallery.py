"""Features of a whole gallery, computed once: kept by what a file holds and by what computed them."""

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nearveil.features._extractor import Extractor, FeatureError, Floats, Progress
from nearveil.features._images import ImageError, Pixels, content_hash, load_image, read_file

NO_FEATURE = "without a feature: the extractor gave zeros, NaN or infinity"

_MOST_AT_ONCE = 64  # images
_PIXELS_AT_ONCE = 32_000_000  # of one batch, so that large images do not fill the memory


@dataclass(frozen=True)
class GalleryFeatures:
    """The features of a gallery.

    Attributes
    ----------
    features : ndarray of shape (n, dimension), float32
        Rows of norm one.
    paths : tuple of Path
        The image of each row, in the order given.
    skipped : tuple of (Path, str)
        What was left out, and why.
    """

    features: Floats = field(repr=False)
    paths: tuple[Path, ...] = field(repr=False)
    skipped: tuple[tuple[Path, str], ...]


class FeatureCache:
    """Features of a gallery's images on disk, by the content of a file and the fingerprint of the extractor.

    For galleries only: what it keeps tells of the images. A row takes 4 bytes for each dimension and 32 more in a
    file of its own (5,152 bytes for 1,280 dimensions). A row is written beside its place and then renamed: a crash
    leaves a whole row or none. A row that was damaged is not used: it is computed and written anew. Several processes
    may share a cache. It never shrinks; to empty it, delete the folder.

    Parameters
    ----------
    directory : path
        Made if it is not there, for its owner alone.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = FeatureCache(folder)
    ...     cache.put("5f" * 32, "ab" * 32, np.array([0.6, 0.8], dtype=np.float32))
    ...     cache.get("5f" * 32, "ab" * 32, 2), cache.get("00" * 32, "ab" * 32, 2), cache.nbytes
    (array([0.6, 0.8], dtype=float32), None, 40)
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _place(self, content: str, fingerprint: str) -> Path:
        return self.directory / fingerprint / content[:2] / content

    def get(self, content: str, fingerprint: str, dimension: int) -> Floats | None:
        """Return the row of one image, or None if there is none that is whole.

        Parameters
        ----------
        content : str
            SHA-256 of the file.
        fingerprint : str
            Of the extractor.
        dimension : int
        """
        try:
            stored = self._place(content, fingerprint).read_bytes()
        except OSError:
            return None
        check, row = stored[:32], stored[32:]
        if len(row) != 4 * dimension or hashlib.sha256(row).digest() != check:
            return None
        return np.frombuffer(row, dtype="<f4").astype(np.float32)

    def put(self, content: str, fingerprint: str, row: Floats) -> None:
        """Keep the row of one image, in place of any before."""
        place = self._place(content, fingerprint)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        written = row.astype("<f4").tobytes()
        handle, beside = tempfile.mkstemp(dir=place.parent, prefix=".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(written).digest() + written)
            Path(beside).replace(place)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise

    @property
    def nbytes(self) -> int:
        """The bytes of all files in it."""
        return sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())


@dataclass(frozen=True)
class _Waiting:
    """An image that has no feature yet."""

    position: int
    content: str
    image: Pixels


class _Collection:
    """What is known of a gallery so far, by position."""

    def __init__(self, extractor: Extractor, cache: FeatureCache | None, progress: Progress | None) -> None:
        self.extractor, self.cache, self.progress = extractor, cache, progress
        self.rows: dict[int, Floats] = {}
        self.skipped: dict[int, str] = {}

    def tick(self, count: int) -> None:
        if self.progress is not None and count:
            self.progress(count)

    def _kept(self, content: str) -> Floats | None:
        if self.cache is None:
            return None
        return self.cache.get(content, self.extractor.fingerprint, self.extractor.dimension)

    def look(self, position: int, path: Path) -> _Waiting | None:
        """Return an image that has to be extracted; None if its row is in the cache or it is left out."""
        try:
            content = read_file(path)
            name = content_hash(content)
            if (row := self._kept(name)) is None:
                return _Waiting(position, name, load_image(content))
            self.rows[position] = row
        except ImageError as refused:
            self.skipped[position] = refused.reason
        self.tick(1)
        return None

    def extract(self, batch: list[_Waiting]) -> None:
        try:
            found = self.extractor.extract([one.image for one in batch])
        except FeatureError as error:
            self.skipped.update((batch[number].position, NO_FEATURE) for number in error.positions)
            self.tick(len(error.positions))
            self.extract([one for number, one in enumerate(batch) if number not in error.positions])
            return
        for one, row in zip(batch, found, strict=True):
            self.rows[one.position] = row
            if self.cache is not None:
                self.cache.put(one.content, self.extractor.fingerprint, row)
        self.tick(len(batch))


def gallery_features(
    paths: Iterable[str | os.PathLike[str]],
    extractor: Extractor,
    *,
    cache: FeatureCache | None = None,
    progress: Progress | None = None,
) -> GalleryFeatures:
    """Return the features of a gallery's files; what is no sound image is left out with a reason.

    A few images are in memory at a time. With a cache, a file that was seen before is read and hashed, not decoded.

    Parameters
    ----------
    paths : iterable of paths
    extractor : Extractor
    cache : FeatureCache, optional
    progress : callable, optional
        Called with the number of files finished since it was called last.

    Returns
    -------
    GalleryFeatures
    """
    files = [Path(path) for path in paths]
    known = _Collection(extractor, cache, progress)
    waiting = (one for number, path in enumerate(files) if (one := known.look(number, path)) is not None)
    for batch in _batches(waiting):
        known.extract(batch)
    order = sorted(known.rows)
    features = np.empty((len(order), extractor.dimension), dtype=np.float32)
    for place, position in enumerate(order):
        features[place] = known.rows[position]
    return GalleryFeatures(
        features,
        tuple(files[position] for position in order),
        tuple((files[position], known.skipped[position]) for position in sorted(known.skipped)),
    )


def _batches(waiting: Iterable[_Waiting]) -> Iterator[list[_Waiting]]:
    batch: list[_Waiting] = []
    pixels = 0
    for one in waiting:
        batch.append(one)
        pixels += one.image.size // 3
        if len(batch) == _MOST_AT_ONCE or pixels >= _PIXELS_AT_ONCE:
            yield batch
            batch, pixels = [], 0
    if batch:
        yield batch
