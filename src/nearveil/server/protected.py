"""Protected galleries: private records that are never shown, and the published model of them."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from nearveil.errors import NearveilError
from nearveil.features.backbones import name_extractor
from nearveil.gallery import Index
from nearveil.ledger import Account, AccountError, KeySpentError, Ledger, LedgerError, OverBudgetError
from nearveil.private_knn import PrivateDiscriminant
from nearveil.private_knn.discriminant import Forecast
from nearveil.private_knn.spending import find_account
from nearveil.server.errors import ServiceError
from nearveil.server.galleries import Gallery
from nearveil.server.publications import (
    Publication,
    Publications,
    Records,
    Terms,
    check_binding,
    check_classes,
    check_indexes,
    check_records,
    load_records,
)
from nearveil.wire.schema import GalleryInfo

_STORE_TIMEOUT = 30.0  # seconds that another process has to store the model that it paid for
_NOISE = (
    "the model would be noise alone: the noise hides the records of each class. Collect more records, open the gallery "
    "with a larger epsilon or fewer publications, or allow noise (allow_noise=True, --allow-noise)"
)
_LOST = (
    "another process has paid for this publication and has not stored it: it may have died. Publish again, which takes "
    "another publication"
)


class PublicationError(NearveilError, ValueError):
    """A model is not published: it would be noise alone, or all publications are used up. Nothing was paid."""


class ProtectedGallery(Gallery):
    """Publish a model of private records, of which nothing else is shown. Clients classify locally.

    The model is a linear discriminant with noise. One account pays for it before it is computed; the ledger stores it,
    and all clients get the same bytes. Changed records change nothing until :meth:`publish` is called again. Serving
    reads no record. Both sides, with proofs: ``docs/theory/two-sided.md``.

    Parameters
    ----------
    private : Index
        Records, with rows that are row-exact (``Index.add(items, row_exact=True)``). The label of a record is the first
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
        The meaning of one record, the unit of protection; clients see it. Use "person with all images" only if each
        person has one record. It must be the account's unit.
    ledger : Ledger, Path or str, optional
        The ledger of the account.
    account : Account or str
        :meth:`publish` opens it if there is none of that name.
    extractor : str, default=""
        Display name of the feature extractor. Those that come with nearveil have one.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from nearveil.gallery import Item
    >>> folder = tempfile.TemporaryDirectory()
    >>> path, rng = Path(folder.name), np.random.default_rng(0)
    >>> angles = rng.uniform(0, np.pi, 300)
    >>> rows = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    >>> private, public = (Index.create(path / name, dimension=2, extractor="toy") for name in ("mine", "all"))
    >>> records = (Item(row, "right/scan" if row[0] > 0 else "left/scan") for row in rows[:200])
    >>> _ = private.add(records, row_exact=True)
    >>> _ = public.add(Item(row) for row in rows[200:])
    >>> gallery = ProtectedGallery(
    ...     private, public, "scans", classes=["left", "right"], epsilon=2.0, delta=1e-6,
    ...     ledger=path / "ledger.db", account="scans",
    ... )
    >>> bool(gallery.forecast().accuracy > 0.9)  # private: do not publish it
    True
    >>> gallery.publish().number
    1
    >>> print(gallery.info().promise.words)
    Seeing the answers makes any conclusion about whether any one record is in the database at most 7.4 times as
    likely as it would be otherwise, plus 1.0e-6.
    >>> gallery.close(); folder.cleanup()
    """

    _refusal = "This gallery is protected: it shows nothing of its records but its model."

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
        super().__init__(name)
        self._classes = check_classes(classes)
        self._terms = Terms(epsilon, delta, publications, unit)
        check_indexes(private, public)
        self._private, self._public = private, public
        self._extractor = extractor or name_extractor(public.extractor)
        self._payer, self._lock = account, threading.Lock()
        self._publications = Publications()
        if ledger is not None and isinstance(account, Account):
            raise ValueError("account must be the name of an account in the ledger")
        if ledger is None and isinstance(account, str):
            raise ValueError("ledger must be given: account is only a name")
        with ExitStack() as stack:
            self._ledger = stack.enter_context(Ledger(ledger)) if isinstance(ledger, (Path, str)) else ledger
            self._refresh()
            if self.account is None:
                self._terms.plan()  # raises if the terms cannot be kept
            self._resources = stack.pop_all()  # the ledger, if it was opened here

    @property
    def is_published(self) -> bool:
        """Whether there was a model at the last `refresh`."""
        return self._publications.newest is not None

    @property
    def account(self) -> Account | None:
        """The account that pays; None before the first publication."""
        return self._publications.account

    @property
    def publications_left(self) -> int:
        """How many models may still be published."""
        if self.account is None:
            return self._terms.publications
        return sum(count for _, count in self.account.remaining())

    def info(self) -> GalleryInfo:
        """Return the public information about the gallery. Except for the model, it does not depend on the records."""
        newest = self._publications.newest
        return GalleryInfo(
            name=self.name,
            kind="protected",
            candidates=(),
            offers=(),
            extractor=self._extractor,
            fingerprint=self._public.extractor,
            dimension=self._public.dimension,
            revision=0 if newest is None else newest.number,
            version="" if newest is None else newest.version,
            promise=None if self.account is None else self._publications.promise,
        )

    def model(self) -> bytes:
        """Return the newest model, for ``PublicDiscriminant.from_bytes``: the same bytes for all clients."""
        newest = self._publications.newest
        if newest is None:
            raise ServiceError("unknown", "This gallery has published no model yet.")
        return newest.model

    def forecast(self) -> Forecast:
        """Estimate the accuracy of a model that would be published now. For the owner of the records only.

        Nothing is paid or released. The forecast is computed from the records without a guarantee: never publish it,
        and keep it out of logs.

        Returns
        -------
        Forecast
        """
        records = self._load_records()
        return self._estimator().forecast(records.features, records.labels, self._public.snapshot().features)

    def publish(self, *, allow_noise: bool = False) -> Publication:
        """Publish a model of the current records. The account pays first; then the ledger stores the model.

        If another process is publishing now, its model is awaited and returned, and nothing is paid.

        Parameters
        ----------
        allow_noise : bool, default=False
            Publish even if the model is expected to be noise alone.

        Returns
        -------
        Publication

        Raises
        ------
        PublicationError
            If the model would be noise alone, or all publications are used up.
        ValueError
            If the records cannot be protected: one has no class, or is a public image, or is bound to another account.
        """
        with self._lock:
            self._refresh()
            if other := self._publications.wait_for_others(_STORE_TIMEOUT):
                return other
            key = self._publications.next_key
            records, public = self._load_records(), self._public.snapshot().features
            forecast = self._estimator().forecast(records.features, records.labels, public)
            if forecast.is_noise and not allow_noise:
                raise PublicationError(_NOISE)
            plan, guarantee = self._terms.plan()
            account = find_account(self._ledger, self._payer, plan, guarantee)
            assert account is not None
            check_binding(self._private, account)
            self._refresh()
            try:
                with account.spend(guarantee.part(plan.parts["answered"]), key) as debit:
                    if not debit.repeated:
                        model = self._estimator().fit(records.features, records.labels, public).export()
                        debit.store(model.to_bytes())
            except OverBudgetError:
                raise PublicationError(
                    f"publications are used up: the account has paid for all {self._terms.publications} that it was "
                    "opened for, and never pays for more. The newest model stays available"
                ) from None
            except KeySpentError:
                if self._publications.wait_for_others(_STORE_TIMEOUT) is None:
                    raise PublicationError(_LOST) from None
            self._publications.refresh()
            assert self._publications.newest is not None
            return self._publications.newest

    def refresh(self) -> None:
        """Load the newest model."""
        try:
            with self._lock:
                self._refresh()
        except LedgerError:
            raise ServiceError(
                "unavailable", "The ledger of the gallery cannot be read now. Try again later."
            ) from None

    def close(self) -> None:
        """Close both indexes, and the ledger if it was opened here."""
        self._public.close()
        self._private.close()
        self._resources.close()

    def __repr__(self) -> str:
        return f"<ProtectedGallery {self.name}>"

    def _refresh(self) -> None:
        """Look up the account, if it was opened, and load the models that it has paid for."""
        account = self._payer
        if self.account is None and isinstance(account, str) and self._ledger is not None:
            with suppress(AccountError):  # :meth:`publish` opens it
                account = self._ledger.account(account)
        if self.account is None and isinstance(account, Account):
            self._terms.check(account)
            check_binding(self._private, account)
            self._publications.account = account
        self._publications.refresh()

    def _load_records(self) -> Records:
        """Load the records; ValueError if they cannot be protected."""
        records = load_records(self._private, self._classes)
        check_records(records, self._public)
        return records

    def _estimator(self) -> PrivateDiscriminant:
        terms = self._terms
        return PrivateDiscriminant(
            terms.epsilon, terms.delta, classes=self._classes, unit=terms.unit, publications=terms.publications
        )
