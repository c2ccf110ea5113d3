"""Protected galleries: private records that never leave, and the model of them that is published."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from nearveil.errors import NearveilError
from nearveil.features.backbones import name_extractor
from nearveil.gallery import Index
from nearveil.ledger import Account, KeySpentError, Ledger, LedgerError, OverBudgetError
from nearveil.private_knn import PrivateDiscriminant
from nearveil.private_knn.discriminant import Forecast
from nearveil.server.errors import NotOfferedError, UnavailableError, UnknownError
from nearveil.server.galleries import check_name
from nearveil.server.publications import (
    Publication,
    Publications,
    Records,
    Terms,
    check_binding,
    check_classes,
    check_indexes,
    check_records,
    look_up,
    open_account,
    open_ledger,
    read_records,
)
from nearveil.wire.schema import GalleryInfo

_PATIENCE = 30.0  # seconds that another process has to store the model that it paid for
_SHOWN = "this gallery is protected: it shows nothing of its records but its model"


class PublicationError(NearveilError, ValueError):
    """A model is not published: it would be noise alone, or all publications are used up. Nothing was paid."""


class ProtectedGallery:
    """Publish a model of private records, of which nothing else is shown. Clients classify at home.

    The model is a linear discriminant with noise. Publishing it is paid for from one account, before it is computed;
    it is kept in the ledger, and everybody is given the same bytes. Records that come or go change nothing until
    :meth:`publish` is called again. Serving reads no record. Both sides, with proofs: ``docs/theory/two-sided.md``.

    Parameters
    ----------
    private : Index
        Records, with rows that are row-exact (``Index.add(items, row_exact=True)``). The label of one is the first
        folder of its name: "benign/scan 3.png" is "benign". :meth:`publish` binds the index to the account; it is
        private from then on: maps of it are deleted, and no process serves it as an open gallery.
    public : Index
        Public images with the same features, without labels. None of them may be a private record.
    name : str
    classes : sequence of str
        The public list of labels, complete.
    epsilon, delta : float
        Of all models that the gallery will ever publish, together. They cannot be changed later.
    publications : int, default=1
        How many models may ever be published. A process that is killed while it publishes uses one up.
    unit : str, default="record"
        What one record is, and so what is protected; clients are told. Give "person with all images" only where each
        person has one record. It must be the account's unit.
    ledger : Ledger, Path or str, optional
        Where the account is.
    account : Account or str
        Opened by :meth:`publish` where there is none of that name.
    extractor : str, default=""
        The name of what makes the features. Those that come with nearveil are named without it.

    Examples
    --------
    >>> import tempfile
    >>> from nearveil.gallery import Item
    >>> folder = tempfile.TemporaryDirectory()
    >>> place, rng = Path(folder.name), np.random.default_rng(0)
    >>> angles = rng.uniform(0, np.pi, 300)
    >>> rows = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    >>> private, public = (Index.create(place / where, dimension=2, extractor="toy") for where in ("mine", "all"))
    >>> records = (Item(row, "right/scan" if row[0] > 0 else "left/scan") for row in rows[:200])
    >>> _ = private.add(records, row_exact=True)
    >>> _ = public.add(Item(row) for row in rows[200:])
    >>> gallery = ProtectedGallery(
    ...     private, public, "scans", classes=["left", "right"], epsilon=2.0, delta=1e-6,
    ...     ledger=place / "ledger.db", account="scans",
    ... )
    >>> bool(gallery.forecast().accuracy > 0.9)  # for your eyes alone
    True
    >>> gallery.publish().number
    1
    >>> print(gallery.info().promise.words)
    Seeing the answers makes any conclusion about whether any one record is in the database at most 7.4 times as
    likely as it would be otherwise, plus 1.0e-6.
    >>> gallery.close(); folder.cleanup()
    """

    def __init__(
        self,
        private: Index,
        public: Index,
        name: str,
        *,
        classes: Sequence[str],
        epsilon: float,
        delta: float,
        publications: int = 1,
        unit: str = "record",
        ledger: Ledger | Path | str | None = None,
        account: Account | str,
        extractor: str = "",
    ) -> None:
        check_name(name)
        self._classes = check_classes(classes)
        self._terms = Terms(epsilon, delta, publications, unit)
        check_indexes(private, public)
        self._private, self._public, self._name = private, public, name
        self._extractor = extractor or name_extractor(public.extractor)
        self._given, self._lock = account, threading.Lock()
        self._publications: Publications | None = None
        self._ledger, self._ours = open_ledger(ledger, account)
        try:
            self._look()
            if self._publications is None:
                self._terms.plan()  # raises where the terms cannot be kept
        except BaseException:
            self._close_ledger()
            raise

    @property
    def name(self) -> str:
        """Of the gallery, as clients call it."""
        return self._name

    @property
    def is_published(self) -> bool:
        """Whether there was a model when `refresh` was last called."""
        return self._newest is not None

    @property
    def account(self) -> Account | None:
        """Who pays; None before the first publication."""
        return None if self._publications is None else self._publications.account

    @property
    def publications_left(self) -> int:
        """How many models may still be published."""
        if self.account is None:
            return self._terms.publications
        return sum(count for _, count in self.account.remaining())

    def info(self) -> GalleryInfo:
        """Return what a client may know before it asks. Nothing of it depends on the records, but for the model."""
        found = self._newest
        return GalleryInfo(
            name=self._name,
            kind="protected",
            candidates=(),
            offers=(),
            extractor=self._extractor,
            fingerprint=self._public.extractor,
            dimension=self._public.dimension,
            revision=0 if found is None else found.number,
            version="" if found is None else found.version,
            promise=None if self._publications is None else self._publications.promise,
        )

    def model(self) -> bytes:
        """Return the newest model: the same bytes for everybody, until another is published.

        Returns
        -------
        bytes
            For ``PublicDiscriminant.from_bytes``.
        """
        found = self._newest
        if found is None:
            raise UnknownError("this gallery has published no model yet")
        return found.model

    def forecast(self) -> Forecast:
        """Say what accuracy a model would have if it were published now. For the owner of the records alone.

        Nothing is paid or released. What comes back is computed from the records without a guarantee: never publish
        it, and keep it out of logs.

        Returns
        -------
        Forecast
        """
        records = self._read()
        return self._estimator().forecast(records.features, records.labels, self._rows())

    def publish(self, *, allow_noise: bool = False) -> Publication:
        """Publish a model of the records as they are now. The account pays first, and the ledger keeps the model.

        Where another process is publishing at this moment, its model is waited for and returned, and nothing is paid.

        Parameters
        ----------
        allow_noise : bool, default=False
            Whether to publish also where noise alone is to be expected.

        Returns
        -------
        Publication

        Raises
        ------
        PublicationError
            If noise alone is to be expected, or all publications are used up.
        ValueError
            If the records cannot be protected: one is of no class, or is a public image, or is bound to another
            account.
        """
        with self._lock:
            self._look()
            if self._publications is not None and (found := self._publications.wait_for_others(_PATIENCE)):
                return found
            key = "model:0" if self._publications is None else self._publications.next_key
            records, public = self._read(), self._rows()
            forecast = self._estimator().forecast(records.features, records.labels, public)
            if forecast.is_noise and not allow_noise:
                raise PublicationError(
                    "the model would be noise alone: the noise hides the records of each class. Gather more records, "
                    "open the gallery with a larger epsilon or fewer publications, or allow noise (allow_noise=True, "
                    "--allow-noise)"
                )
            return self._pay_and_store(key, records, public)

    def map(self, candidates: float | None = None) -> NoReturn:
        """Refuse: there is no map."""
        del candidates
        raise NotOfferedError(_SHOWN)

    def query(self, data: bytes) -> NoReturn:
        """Refuse: candidates, codes, names and images of records are not shown."""
        del data
        raise NotOfferedError(_SHOWN)

    def original(self, number: int) -> NoReturn:
        """Refuse: originals of records are not shown."""
        del number
        raise NotOfferedError(_SHOWN)

    def codes(self) -> NoReturn:
        """Refuse: codes of records are not shown."""
        raise NotOfferedError(_SHOWN)

    def codes_group(self, number: int, blocks: tuple[int, ...] | None = None) -> NoReturn:
        """Refuse: codes of records are not shown."""
        del number, blocks
        raise NotOfferedError(_SHOWN)

    def sealed(self, part: int | None = None, since: int = 0) -> NoReturn:
        """Refuse: records are not searched."""
        del part, since
        raise NotOfferedError(_SHOWN)

    sealed_pass_bytes = 0

    def sealed_lengths(self) -> NoReturn:
        """Refuse: records are not searched."""
        raise NotOfferedError(_SHOWN)

    def ask_sealed(self, data: bytes) -> NoReturn:
        """Refuse: records are not searched."""
        del data
        raise NotOfferedError(_SHOWN)

    def refresh(self) -> None:
        """Look whether another model was published."""
        try:
            with self._lock:
                self._look()
        except LedgerError:
            raise UnavailableError("the gallery's ledger cannot be read now") from None

    def close(self) -> None:
        """Close both indexes, and the ledger if it was opened here."""
        self._public.close()
        self._private.close()
        self._close_ledger()

    def __repr__(self) -> str:
        return f"<ProtectedGallery {self.name}>"

    @property
    def _newest(self) -> Publication | None:
        return None if self._publications is None else self._publications.newest

    def _look(self) -> None:
        """Find the account, if it was opened, and read what it has paid for and stored."""
        if self._publications is None:
            account = look_up(self._ledger, self._given)
            if account is None:
                return
            self._terms.check(account)
            check_binding(self._private, account)
            self._publications = Publications(account)
        self._publications.refresh()

    def _pay_and_store(self, key: str, records: Records, public: NDArray[np.float32]) -> Publication:
        """Debit the account, then compute the model, then store it; or find what was stored under the key."""
        plan, guarantee = self._terms.plan()
        account = open_account(self._ledger, self._given, plan, guarantee)
        check_binding(self._private, account)
        self._look()
        assert self._publications is not None
        try:
            with account.spend(guarantee.part(plan.parts["answered"]), key) as debit:
                if not debit.repeated:
                    model = self._estimator().fit(records.features, records.labels, public).export()
                    debit.store(model.to_bytes())
        except OverBudgetError:
            raise PublicationError(
                f"publications are used up: the account has paid for all {self._terms.publications} that it was "
                "opened for, and never pays for more. The newest model stays"
            ) from None
        except KeySpentError:
            if self._publications.wait_for_others(_PATIENCE) is None:
                raise PublicationError(
                    "another process has paid for this publication and has not stored it: it may have died. "
                    "Publish again, which takes another publication"
                ) from None
        self._publications.refresh()
        found = self._publications.newest
        assert found is not None
        return found

    def _read(self) -> Records:
        """Read the records; ValueError where they cannot be protected."""
        records = read_records(self._private, self._classes)
        check_records(records, self._public)
        return records

    def _rows(self) -> NDArray[np.float32]:
        return self._public.snapshot().features

    def _estimator(self) -> PrivateDiscriminant:
        terms = self._terms
        return PrivateDiscriminant(
            terms.epsilon, terms.delta, classes=self._classes, unit=terms.unit, publications=terms.publications
        )

    def _close_ledger(self) -> None:
        if self._ours and self._ledger is not None:
            self._ledger.close()
