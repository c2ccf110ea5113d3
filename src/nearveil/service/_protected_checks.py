"""What a protected gallery must be, before it serves anybody."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sqlalchemy.engine import make_url

from nearveil.gallery import Index
from nearveil.ledger import Account
from nearveil.service._protected_records import Records, share_images
from nearveil.votes._public_discriminant import MOST_CLASSES

_LONGEST_CLASS = 200


class Places(Protocol):
    """Where the parts of a gallery are; settings are that."""

    @property
    def kind(self) -> str: ...

    @property
    def index(self) -> str: ...

    @property
    def public(self) -> str | None: ...

    @property
    def ledger(self) -> str | None: ...

    @property
    def account(self) -> str | None: ...


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the public list of classes, sorted."""
    given = [] if isinstance(classes, str) else list(classes)
    fits = all(
        isinstance(one, str) and 0 < len(one) <= _LONGEST_CLASS and "/" not in one and one.isprintable()
        for one in given
    )
    if not fits or not 2 <= len(given) <= MOST_CLASSES or len(set(given)) != len(given):
        raise ValueError(
            f"classes must list 2 to {MOST_CLASSES} different names of folders, of at most {_LONGEST_CLASS} characters"
        )
    return tuple(sorted(given))


def check_indexes(private: Index, public: Index) -> None:
    """Refuse a pair that cannot keep the promise."""
    if private._database.url == public._database.url:
        raise ValueError("private and public must be different indexes: what is published is not protected")
    public.assert_open()
    private.assert_row_exact()
    if (private.extractor, private.dimension) != (public.extractor, public.dimension):
        raise ValueError("private and public must have the features of one extractor")


def check_records(records: Records, public: Index) -> None:
    """Refuse records that cannot be protected: said to whoever publishes, before anything is paid, naming no record."""
    if not len(public):
        raise ValueError("public: it holds no image, and the model needs some: add images that anybody may see")
    if records.stray:
        raise ValueError(
            "private holds a record whose first folder is not in classes: the list must be complete, and public"
        )
    if not len(records.labels):
        raise ValueError("private holds no record: there is nothing to publish")
    if share_images(records, public):
        raise ValueError("private and public share an image: what is published is not protected; delete it from one")


def check_binding(private: Index, account: Account) -> None:
    """Bind records to their account, and keep them private from then on, in every process.

    Records of another account are refused: each account would promise as if there were no other.
    """
    opening = account.history()[0].hash
    if private.bind(opening) != opening:
        raise ValueError(
            "ledger, account: a model of this index was paid for from another account, and a second one would add to "
            "what the first has promised. Give the first; for a second promise, index the records anew"
        )


def check_apart(told: Sequence[Places]) -> None:
    """Refuse galleries of one server that would break each other's promise.

    `told`: As the server is told of them: galleries with `name`, `kind`, `index`, `public`, `ledger` and `account`.
    """
    private = [_place(one.index) for one in told if one.kind == "protected"]
    shown = {_place(one.index) for one in told if one.kind == "open"}
    shown |= {_place(one.public) for one in told if one.public is not None}
    if len(set(private)) < len(private) or shown & set(private):
        raise ValueError(
            "galleries: the private index of a protected gallery must not be served by another, open or protected"
        )
    accounts = [(_place(one.ledger), one.account) for one in told if one.ledger is not None]
    if len(set(accounts)) < len(accounts):
        raise ValueError("galleries: two protected galleries must not publish from one account: records differ")


def _place(where: str) -> str:
    """Return where something is, the same for all ways to write it, as far as can be seen."""
    if "://" not in where:
        return str(Path(where).expanduser().resolve())
    url = make_url(where)
    return f"{url.host}:{url.port or 5432}/{url.database}?{sorted(url.query.items())}"
