"""The description of the service, and whether the service does what it says, whatever is sent."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from nearveil.server import limits
from nearveil.wire.schema import FRAME, KEY_HEADER

from ..gallery.index_places import one_thread
from .serving import Server, serving

__all__ = ["one_thread"]  # fixture

CHECKS = [status_code_conformance, content_type_conformance, response_headers_conformance, response_schema_conformance]
PATHS = {
    "/health",
    "/ready",
    "/metrics",
    "/v1/galleries",
    "/v1/galleries/{gallery}/map",
    "/v1/galleries/{gallery}/query",
    "/v1/galleries/{gallery}/model",
    "/v1/galleries/{gallery}/items/{number}/original",
    "/v1/galleries/{gallery}/codes",
    "/v1/galleries/{gallery}/codes/{number}",
    "/v1/galleries/{gallery}/sealed",
    "/v1/galleries/{gallery}/sealed/tokens",
}


@schemathesis.serializer(FRAME)
def as_frame(_: object, value: object) -> bytes:
    """Send what was made for a body: bytes as they are, all else as text."""
    held = getattr(value, "data", value)
    return held if isinstance(held, bytes) else str(held).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "UNAUTHENTICATED", (6e4, 10_000, 4096))
        with serving(tmp_path_factory.mktemp("schema"), rate=None) as found:
            yield found


def test_the_description_is_complete(server: Server) -> None:
    schema = server.client.get("/openapi.json").json()
    assert set(schema["paths"]) == PATHS
    assert schema["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    assert "HTTPValidationError" not in str(schema)
    for path, methods in schema["paths"].items():
        for method, told in methods.items():
            assert told["security"] == ([{"token": []}] if path.startswith(("/v1", "/metrics")) else [])
            assert {"200", "400", "405"} <= set(told["responses"])
            if path.startswith("/v1"):
                assert {"401", "403", "429", "500", "503"} <= set(told["responses"])
            if method == "post":
                assert set(told["requestBody"]["content"]) == {FRAME}
                assert {"408", "409", "411", "413", "415", "422"} <= set(told["responses"])
                assert {one["name"] for one in told["parameters"]} == {"gallery", KEY_HEADER}
                framed = {FRAME} if path.endswith("/query") else set()  # of sealed questions none is refused by a frame
                assert set(told["responses"]["409"]["content"]) == {"application/json"} | framed


def sent(server: Server, case: Any, known: bool) -> httpx.Response:
    """Send a case as it was made; with a token or without."""
    made = case.as_transport_kwargs(base_url="http://localhost")
    headers = {name: str(value).encode("latin-1", "replace") for name, value in (made.get("headers") or {}).items()}
    if known:
        headers["authorization"] = f"Bearer {server.secret}".encode()
    body = made.get("data")
    content = body if isinstance(body, bytes) or body is None else str(body).encode()
    return server.client.request(
        made["method"], made["url"], headers=headers, params=made.get("params"), content=content
    )


@pytest.mark.parametrize(
    ("path", "mode"),
    [(path, GenerationMode.POSITIVE) for path in sorted(PATHS)]
    + [(path, GenerationMode.NEGATIVE) for path in sorted(PATHS) if "{" in path],
)
def test_whatever_is_sent_the_answer_is_as_described(server: Server, path: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(server.client.get("/openapi.json").json())
    operations: list[Any] = list(schema.get_all_operations())
    strategies = [one.ok().as_strategy(generation_mode=mode) for one in operations if one.ok().path == path]
    statuses = set()

    @settings(max_examples=20, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=st.one_of(strategies), mine=st.booleans(), known=st.booleans())
    def check(case: Any, mine: bool, known: bool) -> None:
        if mine and "gallery" in (case.path_parameters or {}):
            case.path_parameters["gallery"] = "birds"
        response = sent(server, case, known)
        statuses.add(response.status_code)
        assert response.status_code < 500
        case.validate_response(response, checks=CHECKS)

    check()
    assert statuses & {200, 400, 401, 403, 404, 422}


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_frames_that_are_nearly_right(server: Server, data: st.DataObject) -> None:
    good = bytearray(server.query())
    for _ in range(data.draw(st.integers(0, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)) | st.just(len(good)))
    response = server.ask(bytes(good[:cut]))
    assert response.status_code in (200, 400, 403, 409, 413)
    assert response.headers["content-type"] == FRAME
