"""Features of a whole gallery, computed once: kept by what a file holds and by what computed them."""

import hashlib
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from nearveil.cluster import Cluster, connect, cut_rows
from nearveil.features.extractor import Extractor, FeatureError, Floats, Progress
from nearveil.features.images import ImageError, Pixels, hash_content, load_image, read_file
from nearveil.storage import make_private_folder

NO_FEATURE = "without a feature: the extractor gave zeros, NaN or infinity"

_MOST_AT_ONCE = 64  # images
_PIXELS_AT_ONCE = 32_000_000  # of one batch, so that large images do not fill the memory
_LIBRARIES = ("numpy", "pillow", "scikit-image", "torch", "onnxruntime")
_PROCESSOR = ("model name", "flags", "CPU part", "Features")  # lines of /proc/cpuinfo


@dataclass(frozen=True)
class GalleryFeatures:
    """Rows of norm one, the image of each, what was skipped and why, and whether rows are row-exact."""

    features: Floats = field(repr=False)
    paths: tuple[Path, ...] = field(repr=False)
    skipped: tuple[tuple[Path, str], ...]
    row_exact: bool


class FeatureCache:
    """Features of a gallery's images on disk, by the content of a file and the fingerprint of the extractor.

    For galleries only: it tells of the images. A row is 4 bytes for each dimension and 32 more, in a file of its own
    that appears whole or not at all; a damaged row is computed anew. Several processes may share a cache. It never
    shrinks; to empty it, delete the folder.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        make_private_folder(self.directory)

    def _place(self, content: str, fingerprint: str) -> Path:
        return self.directory / fingerprint / content[:2] / content

    def get(self, content: str, fingerprint: str, dimension: int) -> Floats | None:
        """Return the row of an image by the SHA-256 of its file, or None if there is none that is whole."""
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
        make_private_folder(place.parent)
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
    """What is known of some files of a gallery so far, by position."""

    def __init__(self, extractor: Extractor, cache: FeatureCache | None, *, row_exact: bool) -> None:
        self.extractor, self.cache, self.row_exact = extractor, cache, row_exact
        self.key = make_exact_key(extractor.fingerprint) if row_exact else extractor.fingerprint
        self.rows: dict[int, Floats] = {}
        self.skipped: dict[int, str] = {}

    def _kept(self, content: str) -> Floats | None:
        if self.cache is None:
            return None
        return self.cache.get(content, self.key, self.extractor.dimension)

    def look(self, position: int, path: Path) -> _Waiting | None:
        """Return an image that has to be extracted; None if its row is in the cache or it is left out."""
        try:
            content = read_file(path)
            name = hash_content(content)
            if (row := self._kept(name)) is None:
                return _Waiting(position, name, load_image(content))
            self.rows[position] = row
        except ImageError as refused:
            self.skipped[position] = refused.reason
        return None

    def extract(self, batch: list[_Waiting]) -> None:
        try:
            found = self.extractor.extract([one.image for one in batch], row_exact=self.row_exact)
        except FeatureError as error:
            self.skipped.update((batch[number].position, NO_FEATURE) for number in error.positions)
            self.extract([one for number, one in enumerate(batch) if number not in error.positions])
            return
        for one, row in zip(batch, found, strict=True):
            self.rows[one.position] = row
            if self.cache is not None:
                self.cache.put(one.content, self.key, row)


def _extract_part(
    files: Sequence[Path], extractor: Extractor, cache: FeatureCache | None, row_exact: bool
) -> tuple[Floats, list[int], dict[int, str]]:
    """Return the rows of some files, which of them have one, and why the others have none."""
    known = _Collection(extractor, cache, row_exact=row_exact)
    waiting = (one for number, path in enumerate(files) if (one := known.look(number, path)) is not None)
    for batch in _cut_batches(waiting):
        known.extract(batch)
    order = sorted(known.rows)
    features = np.empty((len(order), extractor.dimension), dtype=np.float32)
    for place, position in enumerate(order):
        features[place] = known.rows[position]
    return features, order, dict(sorted(known.skipped.items()))


def gallery_features(
    paths: Iterable[str | os.PathLike[str]],
    extractor: Extractor,
    *,
    row_exact: bool = False,
    cache: FeatureCache | None = None,
    progress: Progress | None = None,
    cluster: Any = None,
) -> GalleryFeatures:
    """Return the features of a gallery's files; what is no sound image is left out with a reason.

    A few images are in memory at a time. With a cache, a file that was seen before is read and hashed, not decoded.

    Parameters
    ----------
    paths : iterable of paths
    extractor : Extractor
    row_exact : bool, default=False
        Whether each row must be a function of its own file alone, as of :meth:`Extractor.extract`. Such rows are cached
        apart from the others, and from those of other libraries or another processor.
    cache : FeatureCache, optional
    progress : callable, optional
        Called with the number of files finished since it was called last.
    cluster : str or dask.distributed.Client, optional
        Whose workers read the files, under the same paths; see :func:`nearveil.cluster.connect`. Row-exact rows are
        made by this process or by workers of ``"local"`` or ``"local:N"``.

    Returns
    -------
    GalleryFeatures
        With the attributes `features`, `paths`, `skipped` and `row_exact`.

    Examples
    --------
    >>> found = gallery_features(["a.jpg", "b.jpg"], HogColor())  # doctest: +SKIP
    >>> found.features.shape  # doctest: +SKIP
    (2, 436)
    """
    files = [Path(path) for path in paths]
    cuts = cut_rows(len(files), _MOST_AT_ONCE)
    parts = [files[some] for some in cuts]
    names = [f"files {some.start:,} to {some.stop - 1:,}, from {files[some.start]}" for some in cuts]
    rows: list[Floats] = [np.empty((0, extractor.dimension), np.float32)]
    kept: list[Path] = []
    skipped: list[tuple[Path, str]] = []
    with connect(cluster) as workers:
        if row_exact:
            assert_here(workers)
        found = workers.map(_extract_part, parts, extractor, cache, row_exact, stage="making features", names=names)
        for part, (some, order, refused) in zip(parts, found, strict=True):
            rows.append(some)
            kept += [part[position] for position in order]
            skipped += [(part[position], reason) for position, reason in refused.items()]
            if progress is not None:
                progress(len(part))
    return GalleryFeatures(np.concatenate(rows), tuple(kept), tuple(skipped), row_exact or extractor.row_exact)


def assert_here(workers: Cluster) -> None:
    """Raise unless workers are processes of this machine."""
    if not workers.is_here:
        raise ValueError(
            "cluster: features of private images (row-exact ones) are made on this machine alone: others would see "
            "the images and keep their features, and may compute another last bit. Use local or local:N, or leave it "
            "out"
        )


def make_exact_key(fingerprint: str) -> str:
    """Return the key of row-exact rows in a cache: they must be the rows that this process would make.

    Otherwise a row would depend on whether other libraries made one of the same file before, as another record.
    """
    return hashlib.sha256(f"row-exact {fingerprint} {_describe_machinery()}".encode()).hexdigest()


@cache
def _describe_machinery() -> str:
    """Return what decides the last bit of a row besides image and extractor: libraries and processor."""
    told = [platform.machine(), platform.processor()]
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            told.append(f"{name} {importlib.metadata.version(name)}")
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        told += sorted({line for line in lines if line.startswith(_PROCESSOR)})
    return "\n".join(told)


def _cut_batches(waiting: Iterable[_Waiting]) -> Iterator[list[_Waiting]]:
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
