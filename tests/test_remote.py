"""Galleries, tables and copies at URLs: served by moto on loopback, and by web servers that lie."""

import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest

from nearveil import Client
from nearveil.client.copies import HomeError
from nearveil.client.errors import QuestionError
from nearveil.gallery import Index
from nearveil.gallery.errors import CorruptedIndexError, IndexStoreError
from nearveil.gallery.sync import sync_table
from nearveil.remote import RemoteError, fetch_object, fetch_objects, is_remote
from nearveil.server import Settings
from nearveil.server.serving import open_galleries
from nearveil.server.settings import GallerySettings
from tests.service.asking import QUERIES, make_index, scene

from .cli.galleries import fine, run, told

fsspec = pytest.importorskip("fsspec", reason="the extra `storage` is not installed")
pytest.importorskip("s3fs", reason="the extra `storage` is not installed")
moto = pytest.importorskip("moto.server", reason="moto[s3] and flask are not installed")


def serve_sealed(index: str) -> Settings:
    return Settings(galleries=(GallerySettings(name="birds", index=index, offers=("sealed",)),))


class Bucket:
    """A bucket of moto, with a count of the objects that are read."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.read: list[str] = []

    def upload(self, folder: Path, prefix: str) -> str:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
        return f"s3://gallery/{prefix}"

    def put(self, key: str, data: bytes) -> None:
        self._store.pipe_file(f"gallery/{key}", data)

    def delete(self, key: str) -> None:
        self._store.rm_file(f"gallery/{key}")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bucket:
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    s3fs.S3FileSystem.clear_instance_cache()
    httpx.post(f"{server}/moto-api/reset")
    store = s3fs.S3FileSystem(endpoint_url=server, use_listings_cache=False)
    store.mkdir("gallery")
    bucket = Bucket(store)
    fetch = s3fs.S3FileSystem._open

    def note(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        bucket.read.append(path.removeprefix("s3://").partition("/")[2])
        return fetch(self, path, *arguments, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_open", note)
    return bucket


def test_a_gallery_is_read_from_a_bucket_and_only_changes_are_downloaded(bucket: Bucket, tmp_path: Path) -> None:
    folder = make_index(tmp_path / "birds")
    url = bucket.upload(folder, "birds")
    with Index.open(folder) as index, Index.open(url) as remote:
        assert np.array_equal(remote.search(QUERIES, 5)[0], index.search(QUERIES, 5)[0])
        assert remote.items([3])[0].name == index.items([3])[0].name
        remote.verify()
    assert bucket.read == ["birds/index.db"]
    Index.open(f"{url}/").close()
    assert bucket.read == ["birds/index.db"]  # nothing has changed
    with Index.open(folder) as index:
        index.delete([3])
        index.republish()
    with Index.open(url) as opened:  # a program that runs while another one fetches the new gallery
        bucket.upload(folder, "birds")
        with Index.open(url) as remote:
            assert (len(remote), len(opened)) == (119, 120)
        assert len(opened.search(QUERIES, 5)[0]) == len(QUERIES)
    assert bucket.read == ["birds/index.db"] * 2
    (copy,) = (tmp_path / "data" / "nearveil" / "remote").iterdir()
    assert sorted(path.name for path in copy.iterdir()) == [".lock", ".objects", "index.db"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (copy, copy / "index.db")] == [0o700, 0o400]


def test_a_client_and_a_server_read_a_gallery_and_its_sealed_index(bucket: Bucket, tmp_path: Path) -> None:
    folder = make_index(tmp_path / "birds")
    sealed = open_galleries(serve_sealed(str(folder)))
    for gallery in sealed:
        gallery.close()
    assert (folder / "index.sealed").exists()
    url = bucket.upload(folder, "birds")
    with Client(url) as client, Client(str(folder)) as local:
        assert client.nearest(QUERIES[0], 5).matches == local.nearest(QUERIES[0], 5).matches
    (served,) = open_galleries(serve_sealed(url))
    with closing(served):
        assert served.info().is_published
        (copy,) = (tmp_path / "data" / "nearveil" / "remote").iterdir()
        assert (copy / "index.sealed").read_bytes() == (folder / "index.sealed").read_bytes()
    assert bucket.read == ["birds/index.db", "birds/index.sealed"]


def test_what_is_fetched_does_not_depend_on_a_query(bucket: Bucket, tmp_path: Path) -> None:
    url = bucket.upload(make_index(tmp_path / "birds"), "birds")
    with Client(url) as client:
        first = len(bucket.read)
        for row in QUERIES[:4]:
            client.nearest(row, 5)
    assert len(bucket.read) == first == 1


def test_a_url_is_read_only(bucket: Bucket, tmp_path: Path) -> None:
    url = bucket.upload(make_index(tmp_path / "birds"), "birds")
    with Index.open(url) as index:
        for change in (lambda: index.delete([3]), lambda: index.publish(2.0), index.protect):
            with pytest.raises(IndexStoreError, match="read-only"):
                change()
    with pytest.raises(RemoteError, match="read-only; change the one that was uploaded, and upload it again"):
        Index.create("s3://gallery/new", dimension=3)
    np.save(tmp_path / "rows.npy", np.eye(4, dtype=np.float32))
    with pytest.raises(RemoteError, match=r"^s3://gallery/birds: an index at a URL is read-only"):
        sync_table(None, url, delete=["a"])
    done = run("index", tmp_path / "rows.npy", "--into", url)
    assert (done.exit_code, "is read-only" in done.output) == (1, True)


def test_the_command_line_reads_tables_and_galleries(bucket: Bucket, tmp_path: Path) -> None:
    rows = np.random.default_rng(1).standard_normal((300, 8)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)
    bucket.put("tables/rows.npy", (tmp_path / "rows.npy").read_bytes())
    fine("index", "s3://gallery/tables/rows.npy", "--into", tmp_path / "texts")
    np.save(tmp_path / "query.npy", rows[7])
    url = bucket.upload(tmp_path / "texts", "texts")
    found = told("query", tmp_path / "query.npy", "--index", url)["found"]
    assert found[0]["external_id"] == "rows.npy:7"
    assert "download other data" in run("index", "s3://gallery/photos/").output


def test_a_local_copy_is_read_from_a_url_on_command_and_never_by_a_query(bucket: Bucket, tmp_path: Path) -> None:
    with scene(make_index(tmp_path / "birds"), tmp_path, offers=("names", "codes")) as here:
        first, _ = here.client(home=tmp_path / "home")
        first.sync()
        url = bucket.upload(tmp_path / "home", "copies")
        client, wire = here.client(home=url)
        with pytest.raises(QuestionError, match="nearveil sync"):
            client.nearest(QUERIES[0], epsilon=0, by="home", gallery="birds")
        sent = len(wire.requests)
        with pytest.raises(QuestionError, match="name the gallery"):
            client.sync()
        with pytest.raises(QuestionError, match="name the gallery"):
            client.sync(gallery="../birds")
        assert bucket.read == []
        copy = client.sync(gallery="birds")
        assert copy.fetched > 0
        assert len(wire.requests) == sent  # the server is not asked
        fetched = sorted(bucket.read)
        assert len(fetched) == 3
        answer = client.nearest(QUERIES[0], 5, epsilon=0, by="home")
        assert answer.matches == first.nearest(QUERIES[0], 5, epsilon=0, by="home").matches
        assert sorted(bucket.read) == fetched
        client.sync(gallery="birds")
        assert sorted(set(bucket.read)) == fetched
        assert len(bucket.read) == 5  # no group again
        group = next(key for key in fetched if key.endswith(".codes"))
        bucket.put(group, b"corrupted")
        other, _ = here.client(home=f"{url}/")
        copy.folder.joinpath(group.rpartition("/")[2]).unlink()
        with pytest.raises(HomeError, match=r"birds at the URL is corrupted: data is not .*; upload it again"):
            other.sync(gallery="birds")
        assert len(copy) == len(other.home(gallery="birds") or ())  # the manifest is as before
        with pytest.raises(QuestionError, match="limit"):
            other.sync(gallery="birds", most=1)


def test_an_interrupted_download_leaves_the_copy_as_it_was(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        bucket.put(f"pair/{name}", b"old")
    folder = fetch_objects("s3://gallery/pair", "first", "second")
    for name in ("first", "second"):
        bucket.put(f"pair/{name}", b"newer")
    import nearveil.remote

    read = nearveil.remote._read_chunks

    def fail(store: Any, url: str, size: int) -> Iterator[bytes]:
        yield from read(store, url, size)
        if url.endswith("second"):
            raise KeyboardInterrupt

    monkeypatch.setattr(nearveil.remote, "_read_chunks", fail)
    with pytest.raises(KeyboardInterrupt):
        fetch_objects("s3://gallery/pair", "first", "second")
    monkeypatch.setattr(nearveil.remote, "_read_chunks", read)
    assert [(folder / name).read_bytes() for name in ("first", "second")] == [b"old"] * 2
    (folder / ".first.12345678.part").touch()  # of a process that was killed
    fetch_objects("s3://gallery/pair", "first", "second")
    assert [(folder / name).read_bytes() for name in ("first", "second")] == [b"newer"] * 2
    assert sorted(path.name for path in folder.iterdir()) == [".lock", ".objects", "first", "second"]
    bucket.delete("pair/second")
    fetch_objects("s3://gallery/pair", "first", "second")  # it is optional
    (folder / ".objects").write_text("corrupted")
    fetch_objects("s3://gallery/pair", "first")


def test_objects_that_cannot_be_used_have_a_remedy(bucket: Bucket, tmp_path: Path) -> None:
    url = bucket.upload(make_index(tmp_path / "birds"), "birds")
    data = (tmp_path / "birds" / "index.db").read_bytes()
    with pytest.raises(RemoteError, match=r"^No object at s3://gallery/none/index.db; check the URL.$"):
        Index.open("s3://gallery/none")
    bucket.put("birds/index.db", data[: len(data) // 2])
    with pytest.raises(CorruptedIndexError) as failure, Index.open(url) as index:
        index.verify()
    bucket.put("birds/index.db", b"<html>not an index</html>")
    with pytest.raises(CorruptedIndexError) as failure:
        Index.open(url)
    assert "upload it again" in str(failure.value)
    for location in ("s3://gallery/birds/", "s3://gallery/birds/..", "s3://gallery/.objects"):
        with pytest.raises(RemoteError, match="name of a file"):
            fetch_object(location)
    with pytest.raises(RemoteError, match=r"^s3://gallery/birds names no object|no object"):
        fetch_object("s3://gallery/birds")
    with pytest.raises(ValueError, match="a directory, or a URL"):
        Index.open("ftp://host/birds")


class Liar(BaseHTTPRequestHandler):
    """A web server that states one size, and sends another."""

    stated, sent, etag = 8, b"8 bytes.", '"a"'
    requests: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(self.stated))
        if self.etag:
            self.send_header("ETag", self.etag)
        self.end_headers()

    def do_GET(self) -> None:
        self.requests.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.sent)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[type[Liar], str]]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    handler = type("Handler", (Liar,), {"requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_web_servers_need_no_listing_and_no_ranges(web: tuple[type[Liar], str]) -> None:
    handler, url = web
    for _ in range(2):
        assert fetch_object(f"{url}/rows.npy?signature=secret").read_bytes() == b"8 bytes."
    assert handler.requests == ["/rows.npy?signature=secret"]
    handler.etag = ""  # without a stamp, nobody knows whether it changed
    for _ in range(2):
        fetch_object(f"{url}/rows.npy")
    assert len(handler.requests) == 3


@pytest.mark.parametrize(
    ("stated", "sent", "message"),
    [
        (8, b"7 bytes", "another size"),
        (8, b"endless" * 10**6, "another size"),
        (1 << 60, b"8 bytes.", "free some space"),
    ],
)
def test_a_web_server_that_lies_about_sizes_is_refused(
    web: tuple[type[Liar], str], stated: int, sent: bytes, message: str, tmp_path: Path
) -> None:
    handler, url = web
    handler.stated, handler.sent = stated, sent
    with pytest.raises(RemoteError, match=message) as failure:
        fetch_object(url.replace("://", "://user:secret@") + "/rows.npy?signature=secret")
    assert "secret" not in str(failure.value)
    (folder,) = (tmp_path / "data" / "nearveil" / "remote").iterdir()
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_plain_http_to_other_machines_and_missing_libraries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RemoteError, match="use https://"):
        fetch_object("http://192.0.2.1/rows.npy")

    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("Please install gcsfs")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(RemoteError, match=r"pip install gcsfs$"):
        fetch_object("gs://gallery/rows.npy")
    assert not is_remote(Path("s3://gallery"))
    assert not is_remote("postgresql://me@host/gallery")
