"""The retriever for LangChain pays once for a question, however often a chain tries it, and ignores no argument."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest

pytest.importorskip("langchain_core")

from langchain_core.load import dumpd, dumps
from langchain_core.runnables import ConfigurableField, RunnableLambda
from pydantic import ValidationError

from nearveil.client.errors import QuestionError, UnansweredError, UnreachableError
from nearveil.integrations.langchain import NearveilRetriever
from nearveil.ledger import KeySpentError
from nearveil.wire.messages import MapChanged
from tests.clocks import hurry
from tests.service.asking import DIMENSION, QUERIES, Scene, framed, is_post, make_index, scene


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_index(tmp_path_factory.mktemp("made") / "birds")


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    hurry(monkeypatch)
    with scene(made, tmp_path) as found:
        yield found


class Breaks:
    """Breaks the first replies to questions."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        if is_post(request) and self.left:
            self.left -= 1
            raise httpx.ReadError("broken pipe", request=request)
        return reply


def embed(text: str) -> Any:
    return QUERIES[len(text)]


def retry(runnable: Any, attempts: int = 4) -> Any:
    return runnable.with_retry(stop_after_attempt=attempts, wait_exponential_jitter=False)


def wrap_retriever(retriever: NearveilRetriever) -> Any:
    return retry(retriever)


def wrap_configurable(retriever: NearveilRetriever) -> Any:
    fields = retriever.configurable_fields(k=ConfigurableField(id="k"))
    return retry(fields).with_config(configurable={"k": 3})


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch"])
@pytest.mark.parametrize("wrap", [wrap_retriever, wrap_configurable])
def test_all_attempts_of_a_retry_are_one_payment_and_one_message(here: Scene, wrap: Any, way: str) -> None:
    client, wire = here.client(Breaks(3), retries=0)
    runnable = wrap(NearveilRetriever(client=client, embed=embed, epsilon=4.0, k=3))
    if way == "invoke":
        documents = runnable.invoke("text")
    elif way == "ainvoke":
        documents = asyncio.run(runnable.ainvoke("text"))
    else:
        (documents,) = runnable.batch(["text"])
    assert len(documents) == 3
    assert (here.paid, len(wire.posts), len(set(wire.posts))) == (1, 4, 1)
    runnable.invoke("text")  # another question: its answer came
    assert here.paid == 2


@pytest.mark.parametrize("wrap", [lambda retriever: retriever, lambda retriever: retry(retriever, 2)])
def test_another_call_with_the_same_text_is_another_message(here: Scene, wrap: Any) -> None:
    """A server that withholds an answer must not learn whether the next call has the same text."""
    client, wire = here.client(Breaks(2), retries=0)
    runnable = wrap(NearveilRetriever(client=client, embed=embed, epsilon=4.0))
    with pytest.raises(UnansweredError):
        runnable.invoke("text")
    with contextlib.suppress(UnansweredError):
        runnable.invoke("text")
    assert (here.paid, len(set(wire.posts))) == (2, 2)


def test_a_chain_that_is_retried_pays_for_each_attempt(here: Scene) -> None:
    client, _ = here.client(Breaks(2), retries=0)
    chain = RunnableLambda(str) | NearveilRetriever(client=client, embed=embed, epsilon=4.0)
    assert retry(chain).invoke("text")
    assert here.paid == 3
    assert retry(NearveilRetriever(client=here.client(Breaks(2), retries=0)[0], embed=embed, epsilon=4.0)).invoke(
        "text"
    )
    assert here.paid == 4


def test_another_text_epsilon_or_client_never_gets_the_key(here: Scene) -> None:
    client, _ = here.client(Breaks(1), retries=0)
    with pytest.raises(UnansweredError):
        NearveilRetriever(client=client, embed=embed, epsilon=4.0).invoke("text")
    NearveilRetriever(client=client, embed=embed, epsilon=4.0).invoke("another text")
    NearveilRetriever(client=client, embed=embed, epsilon=2.0).invoke("text")
    NearveilRetriever(client=here.client()[0], embed=embed, epsilon=4.0).invoke("text")
    assert here.paid == 4


class StubClient:
    """Fails as it is told to, and notes the keys."""

    def __init__(self, *errors: BaseException | None) -> None:
        self._errors = list(errors)
        self.keys: list[str] = []

    def nearest(self, *_: Any, key: str, **__: Any) -> Any:
        self.keys.append(key)
        if self._errors and (error := self._errors.pop(0)) is not None:
            raise error
        return SimpleNamespace(matches=())


@pytest.mark.parametrize(
    ("first", "same"),
    [
        (UnansweredError("it broke", "key"), True),
        (KeyboardInterrupt(), True),
        (asyncio.CancelledError(), True),
        (UnreachableError("no connection"), True),
        (UnansweredError("another map", "key", again=False), False),
        (KeySpentError("no message"), False),
    ],
)
def test_a_key_is_used_again_as_long_as_it_can_help(first: BaseException, same: bool) -> None:
    client = StubClient(UnansweredError("it broke", "key"), first, None, None)
    retriever, run = NearveilRetriever(client=client, embed=embed, epsilon=4.0), uuid4()

    def ask() -> None:
        with retriever._choose_key("text", run) as key:
            retriever._search("text", 3, key)

    for _ in range(2):
        with pytest.raises((Exception, KeyboardInterrupt, asyncio.CancelledError)):
            ask()
    ask()
    ask()
    one, two, three, four = client.keys
    assert one == two
    assert (two == three) == same
    assert four not in (one, three)


def test_two_questions_at_once_have_two_keys() -> None:
    client = StubClient(UnansweredError("it broke", "key"))
    retriever = NearveilRetriever(client=client, embed=embed, epsilon=4.0)
    run = uuid4()
    with pytest.raises(UnansweredError), retriever._choose_key("text", run) as first:
        retriever._search("text", 3, first)
    with retriever._choose_key("text", run) as outer, retriever._choose_key("text", run) as inner:
        assert outer == first != inner


def test_a_question_that_is_cancelled_was_paid_for(here: Scene) -> None:
    client, wire = here.client()
    retriever = NearveilRetriever(client=client, embed=embed, epsilon=4.0, k=3)

    async def cancel() -> None:
        task = asyncio.ensure_future(retriever.ainvoke("text"))
        loop = asyncio.get_running_loop()
        sent = asyncio.Event()
        wire.before = lambda request: loop.call_soon_threadsafe(sent.set) if is_post(request) else None
        await sent.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    wire.before = None
    assert len(retriever.invoke("text")) == 3  # a call of its own
    assert (here.paid, len(set(wire.posts))) == (2, 2)


def test_a_map_that_changes_is_a_new_question(here: Scene) -> None:
    def republished(request: httpx.Request, reply: httpx.Response) -> httpx.Response:
        return framed(MapChanged("birds", 9).to_bytes(), 409) if is_post(request) else reply

    client, wire = here.client(republished, retries=0)
    retriever = NearveilRetriever(client=client, embed=embed, epsilon=4.0)
    with pytest.raises(UnansweredError):
        retriever.invoke("text")
    wire.change = None
    assert retriever.invoke("text")
    assert here.paid == 2


@pytest.mark.parametrize("fields", [{"epsilom": 0.1}, {"repeat": 2}, {"by": "hoem"}, {"embed": 4}, {"wher": "secret"}])
def test_unknown_and_wrong_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        NearveilRetriever(**{"client": StubClient(), "embed": embed, **fields})
    assert next(iter(fields)) in str(raised.value)
    assert "secret" not in str(raised.value)


def test_no_text_of_a_retriever_shows_its_filter() -> None:
    """Chains print their parts, and tracers send the text of what they cannot serialize."""
    retriever = NearveilRetriever(client=StubClient(), embed=embed, epsilon=4.0, where={"diagnosis": "secret"})
    texts = (
        repr(retriever),
        str(retriever),
        str(dumpd(retriever)),
        dumps(retriever),
        repr(retriever | RunnableLambda(len)),
    )
    assert not any("secret" in text or "diagnosis" in text for text in texts)


def test_unknown_arguments_of_a_call_are_refused_before_anything_is_sent() -> None:
    client = StubClient()
    retriever = NearveilRetriever(client=client, embed=embed, epsilon=4.0)
    for options in ({"epsilon": 0.1}, {"by": "home"}, {"top_k": 3}):
        with pytest.raises(TypeError, match=next(iter(options))):
            retriever.invoke("text", **options)
        with pytest.raises(TypeError, match=next(iter(options))):
            asyncio.run(retriever.ainvoke("text", **options))
        with pytest.raises(TypeError, match=next(iter(options))):
            retriever.bind(**options).invoke("text")
    with pytest.raises(ValueError, match="epsilom"):
        retriever.epsilom = 0.1  # type: ignore[attr-defined]
    assert client.keys == []


def test_a_search_at_home_sends_and_pays_nothing(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    with scene(made, tmp_path, offers=("names", "codes")) as here:
        client, wire = here.client(home=tmp_path / "copies")
        client.sync()
        before = len(wire.requests)
        assert len(NearveilRetriever(client=client, embed=embed, by="home").invoke("text")) == 4
        assert (here.paid, len(wire.requests)) == (0, before)
        with pytest.raises(QuestionError, match="leave epsilon out"):
            NearveilRetriever(client=client, embed=embed, by="home", epsilon=4.0).invoke("text")
        NearveilRetriever(client=client, embed=embed, epsilon=4.0, by="message").invoke("text")
        assert (here.paid, len(wire.posts)) == (1, 1)


def test_any_object_with_embed_query_makes_vectors(here: Scene) -> None:
    model = SimpleNamespace(embed_query=lambda text: [float(len(text))] * DIMENSION)
    assert NearveilRetriever(client=here.client()[0], embed=model, epsilon=4.0).invoke("text")


def test_without_an_epsilon_nothing_is_paid(here: Scene) -> None:
    client, wire = here.client()
    with pytest.raises(QuestionError, match="epsilon=4, for example, costs 4, from the account 'me'"):
        NearveilRetriever(client=client, embed=embed).invoke("text")
    assert (here.paid, wire.posts) == (0, [])
