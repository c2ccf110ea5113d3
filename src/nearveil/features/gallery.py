"""Compute the features of a gallery's files once, with a cache keyed by file content and extractor."""

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from nearveil.cluster import Cluster, Tick, connect, cut_rows
from nearveil.features.extractor import Extractor, FeatureError, Floats, map_in_threads
from nearveil.features.images import ImageError, Pixels, load_picture, read_file, resize, thumbnail
from nearveil.storage import make_private_folder, replace_file

NO_FEATURE = "without a feature: the extractor gave zeros, NaN or infinity"

_BATCH_IMAGES = 64
_LIBRARIES = ("numpy", "pillow", "scikit-image", "torch", "onnxruntime")
_PROCESSOR = ("model name", "flags", "CPU part", "Features")  # lines of /proc/cpuinfo


@dataclass(frozen=True)
class GalleryFeatures:
    """Unit rows with their paths, the skipped files with reasons, and whether rows are row-exact."""

    features: Floats = field(repr=False)
    paths: tuple[Path, ...] = field(repr=False)
    skipped: tuple[tuple[Path, str], ...]
    row_exact: bool
    thumbnails: tuple[bytes, ...] = field(repr=False)  #: WebP; empty for rows from the cache


class FeatureCache:
    """Feature rows on disk, one file each, keyed by the SHA-256 of the image file and the extractor's fingerprint."""

    # For galleries only: it reveals the images. Rows are written atomically, with a digest; corrupted ones are
    # recomputed. Processes may share a cache. It never shrinks; delete the folder to empty it.

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        make_private_folder(self.directory)

    def _path(self, content_hash: str, fingerprint: str) -> Path:
        return self.directory / fingerprint / content_hash[:2] / content_hash

    def get(self, content_hash: str, fingerprint: str, dimension: int) -> Floats | None:
        """Return the row of an image, or None if it is missing or corrupted."""
        try:
            stored = self._path(content_hash, fingerprint).read_bytes()
        except OSError:
            return None
        digest, row = stored[:32], stored[32:]
        if len(row) != 4 * dimension or hashlib.sha256(row).digest() != digest:
            return None
        return np.frombuffer(row, dtype="<f4").astype(np.float32)

    def put(self, content_hash: str, fingerprint: str, row: Floats) -> None:
        """Store the row of an image and replace any earlier one."""
        path = self._path(content_hash, fingerprint)
        make_private_folder(path.parent)
        payload = row.astype("<f4").tobytes()
        with replace_file(path, durable=False) as file:  # a corrupted row is recomputed
            file.write(hashlib.sha256(payload).digest() + payload)


def _extract_part(
    files: Sequence[Path], extractor: Extractor, cache: FeatureCache | None, row_exact: bool
) -> list[tuple[Floats, bytes] | str]:
    """Return the row and the thumbnail of each file, or the reason why it has none."""
    key = extractor.fingerprint
    if row_exact:  # with versions and processor: else rows would depend on the cache
        key = hashlib.sha256(f"row-exact 2 {key} {_describe_machinery()}".encode()).hexdigest()
    loaded = list(map_in_threads(partial(_load_file, extractor, cache, key), files))
    images = {position: image for position, image in enumerate(loaded) if isinstance(image, _LoadedImage)}
    rows = _extract_batch({position: image.pixels for position, image in images.items()}, extractor, row_exact)
    results = [NO_FEATURE if isinstance(result, _LoadedImage) else result for result in loaded]
    for position, row in rows.items():
        image = images[position]
        results[position] = row, image.thumbnail
        if cache is not None:
            cache.put(image.content_hash, key, row)
    return results


@dataclass(frozen=True)
class _LoadedImage:
    """An image in the size that an extractor needs."""

    pixels: Pixels
    thumbnail: bytes
    content_hash: str


def _load_file(
    extractor: Extractor, cache: FeatureCache | None, key: str, path: Path
) -> _LoadedImage | tuple[Floats, bytes] | str:
    """Return the resized image, the row if it is in the cache, or the reason for skipping the file."""
    try:
        content = read_file(path)
        content_hash = hashlib.sha256(content).hexdigest()
        row = None if cache is None else cache.get(content_hash, key, extractor.dimension)
        if row is not None:
            return row, b""
        image = load_picture(content)
    except ImageError as error:
        return error.reason
    return _LoadedImage(resize(image, extractor.side), thumbnail(image), content_hash)


def _extract_batch(batch: dict[int, Pixels], extractor: Extractor, row_exact: bool) -> dict[int, Floats]:
    """Return the rows of images by position, without images that have no feature."""
    while batch:
        try:
            return dict(zip(batch, extractor.extract(list(batch.values()), row_exact=row_exact), strict=True))
        except FeatureError as error:
            failed = {list(batch)[number] for number in error.positions}
            batch = {position: image for position, image in batch.items() if position not in failed}
    return {}


def gallery_features(
    paths: Iterable[str | os.PathLike[str]],
    extractor: Extractor,
    *,
    row_exact: bool = False,
    cache: FeatureCache | None = None,
    tick: Tick | None = None,
    cluster: Any = None,
) -> GalleryFeatures:
    """Compute the features of a gallery's files; files that cannot be used are skipped with a reason.

    Threads share the images; each holds one in full size. With a cache, known files are hashed and not decoded; it
    keeps row-exact rows apart from others, and from those of other library versions or processors. Workers of a
    `cluster` read the files under the same paths; row-exact rows need this process, ``"local"`` or ``"local:N"``.
    """
    files = [Path(path) for path in paths]
    cuts = cut_rows(len(files), _BATCH_IMAGES)
    parts = [files[cut] for cut in cuts]
    names = [f"files {cut.start:,} to {cut.stop - 1:,}, from {files[cut.start]}" for cut in cuts]
    features: list[Floats] = []
    thumbnails: list[bytes] = []
    used: list[Path] = []
    skipped: list[tuple[Path, str]] = []
    with connect(cluster) as workers:
        if row_exact:
            assert_here(workers)
        results = workers.map(_extract_part, parts, extractor, cache, row_exact, stage="making features", names=names)
        for part, part_results in zip(parts, results, strict=True):
            for path, result in zip(part, part_results, strict=True):
                if isinstance(result, str):
                    skipped.append((path, result))
                else:
                    used.append(path)
                    features.append(result[0])
                    thumbnails.append(result[1])
            if tick is not None:
                tick(len(part))
    rows = np.array(features, dtype=np.float32).reshape(-1, extractor.dimension)
    exact = row_exact or extractor.row_exact
    return GalleryFeatures(rows, tuple(used), tuple(skipped), exact, tuple(thumbnails))


def assert_here(workers: Cluster) -> None:
    """Raise unless all workers are processes on this machine."""
    if not workers.is_local:
        raise ValueError(
            "cluster: features of private images (row-exact features) are computed on this machine only: other "
            "machines would see the images, keep their features, and may round differently. Use local or local:N, or "
            "omit it"
        )


@cache
def _describe_machinery() -> str:
    """Return the libraries and the processor, which decide the last bit of a row."""
    lines = [platform.machine(), platform.processor()]
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            lines.append(f"{name} {importlib.metadata.version(name)}")
    with suppress(OSError):
        processors = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        lines += sorted({line for line in processors if line.startswith(_PROCESSOR)})
    return "\n".join(lines)
