"""Objects at URLs (``s3://``, ``gs://``, ``https://``): copied into the data folder, and read there."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nearveil.cluster import is_loopback
from nearveil.errors import NearveilError
from nearveil.lazy import require_extra
from nearveil.progress import start_stage
from nearveil.storage import data_folder, make_private_folder, replace_file

READ_ONLY = "an index at a URL is read-only; change the one that was uploaded, and upload it again"
_SCHEMES = ("s3://", "gs://", "https://", "http://")
_FOLDER, _LOCK, _RECORD = "remote", ".lock", ".objects"
_CHUNK = 8 << 20  # bytes of one request to a store
_TIMEOUT = 60.0  # seconds for a web server to connect, and to send the next bytes
_STAMPS = ("ETag", "etag", "generation", "Last-Modified", "LastModified")


class RemoteError(NearveilError):
    """An object at a URL cannot be read."""


def is_remote(location: str | os.PathLike[str]) -> bool:
    """Return whether a location is the URL of an object, or of a folder of objects."""
    return os.fspath(location).startswith(_SCHEMES)


def refuse_change(location: str | os.PathLike[str]) -> None:
    """Raise RemoteError if a location is a URL: only indexes in folders and databases can be changed."""
    if is_remote(location):
        raise RemoteError(f"{_describe(os.fspath(location))}: {READ_ONLY}")


def is_copy(path: str) -> bool:
    """Return whether a resolved path is in the folders of copies."""
    return (data_folder() / _FOLDER).resolve() in Path(path).parents


def copy_folder(url: str) -> Path:
    """Return the folder of the copies of all objects directly below a URL; it may not exist."""
    return data_folder() / _FOLDER / hashlib.sha256(_describe(url).encode()).hexdigest()[:16]


def fetch_object(url: str) -> Path:
    """Copy an object, unless the copy is current; return the path of the copy."""
    path, _, name = urlsplit(url).path.rpartition("/")
    if not name or "\0" in name or name.startswith("."):
        raise RemoteError(f"{_describe(url)} names no object; add the name of a file")
    return fetch_objects(urlsplit(url)._replace(path=path).geturl(), name) / name


def fetch_objects(url: str, name: str, *optional: str) -> Path:
    """Copy objects below a URL, those that changed: all of them, or none. Return their folder.

    The store chooses no name and no path; which objects are fetched does not depend on a query.
    """
    store, folder, record = _open_store(url), copy_folder(url), {}
    urls = {key: _join(url, key) for key in (name, *optional)}
    make_private_folder(folder)
    with (folder / _LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for draft in folder.glob(".*.part"):  # of a process that was killed
            draft.unlink()
        with suppress(OSError, ValueError):
            record = dict(json.loads((folder / _RECORD).read_bytes()))
        stamps = {key: _read_stamp(store, urls[key], missing=key != name) for key in urls}
        changed = {
            key: stamp[0]
            for key, stamp in stamps.items()
            if stamp and (stamp != record.get(key) or not stamp[1] or not (folder / key).exists())
        }
        total = sum(changed.values())
        if total > shutil.disk_usage(folder).free:
            raise RemoteError(f"{_describe(url)} has {total:,} bytes, and {folder} has fewer: free some space")
        tick = start_stage("Downloading", total)
        with ExitStack() as files:  # they get their names together, after the last byte
            for key, size in changed.items():
                file = files.enter_context(replace_file(folder / key))
                for chunk in _read_chunks(store, urls[key], size):
                    file.write(chunk)
                    tick(len(chunk))
                os.fchmod(file.fileno(), 0o400)  # SQLite then opens it as immutable
            if any(_read_stamp(store, urls[key]) != stamps[key] for key in changed):
                raise RemoteError(f"{_describe(url)} changed while it was downloaded; try again")
        if changed:
            with replace_file(folder / _RECORD) as file:
                file.write(json.dumps(record | stamps).encode())
    return folder


def read_object(url: str, name: str, most: int) -> bytes:
    """Return the bytes of an object below a URL; RemoteError if there are more than `most`."""
    store, url = _open_store(url), _join(url, name)
    size, _ = _read_stamp(store, url)
    if size > most:
        raise RemoteError(f"{_describe(url)} has {size:,} bytes, and the limit is {most:,}")
    return b"".join(_read_chunks(store, url, size))


def _open_store(url: str) -> Any:
    parts = urlsplit(url)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise RemoteError(f"{_describe(url)}: anyone on the network path could change it; use https://")
    with require_extra("storage"):
        import aiohttp
        import fsspec
    timeout = aiohttp.ClientTimeout(sock_connect=_TIMEOUT, sock_read=_TIMEOUT)
    options = {"client_kwargs": {"timeout": timeout}} if parts.scheme.startswith("http") else {}
    try:
        return fsspec.filesystem(parts.scheme, use_listings_cache=False, **options)
    except ImportError:
        package = "gcsfs" if parts.scheme == "gs" else '"nearveil[storage]"'
        raise RemoteError(f"{parts.scheme}:// needs a library that is not installed: pip install {package}") from None


def _read_stamp(store: Any, url: str, *, missing: bool = False) -> list[Any]:
    """Return the size of an object, and a text that changes with it, "" if unknown; [] if it may be `missing`."""
    with _translate_errors(url):
        try:
            info = store.info(url)
        except (FileNotFoundError, PermissionError):  # without permission to list, S3 denies missing objects
            if missing:
                return []
            raise
    if info.get("type") != "file" or not isinstance(info.get("size"), int):
        raise RemoteError(f"{_describe(url)} is no object of a stated size; check the URL")
    return [info["size"], next((str(info[name]) for name in _STAMPS if info.get(name)), "")]


def _read_chunks(store: Any, url: str, size: int) -> Iterator[bytes]:
    """Yield the bytes of an object, which must be as many as its store states."""
    block = 0 if urlsplit(url).scheme.startswith("http") else _CHUNK  # web servers may not support ranges
    with _translate_errors(url), store.open(url, "rb", block_size=block, cache_type="none") as source:
        while size >= 0 and (chunk := source.read(_CHUNK)):
            size -= len(chunk)
            yield chunk[: len(chunk) + min(size, 0)]
    if size:
        raise RemoteError(f"{_describe(url)} has another size than its store states; try again, or upload it again")


@contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    """Translate errors of a store, without their text, which may quote credentials."""
    try:
        yield
    except NearveilError:
        raise
    except FileNotFoundError:
        raise RemoteError(f"No object at {_describe(url)}; check the URL.") from None
    except Exception as error:
        raise RemoteError(
            f"{_describe(url)} cannot be read ({type(error).__name__}); check the URL, the network and the store's "
            "credentials in the environment"
        ) from None


def _join(url: str, name: str) -> str:
    parts = urlsplit(url)
    return parts._replace(path=f"{parts.path.rstrip('/')}/{name}").geturl()


def _describe(url: str) -> str:
    """Return a URL without credentials."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
