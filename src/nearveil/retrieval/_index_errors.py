"""What can go wrong with an index, and what to do then."""

from collections.abc import Sequence

from nearveil.errors import NearveilError
from nearveil.release import MessageError


class IndexStoreError(NearveilError):
    """The index could not do what was asked; nothing was changed, unless the text says otherwise."""


class NotAnIndexError(IndexStoreError, ValueError):
    """There is no index at this place."""


class IndexExistsError(IndexStoreError, ValueError):
    """There is an index, or something else, at this place already."""


class DamagedIndexError(IndexStoreError):
    """A checksum does not fit, or the file cannot be read: put a backup back."""


class NewerIndexError(IndexStoreError):
    """A newer version of nearveil wrote this index."""


class IndexFullError(IndexStoreError):
    """The disk is full, or all ids are used up; nothing was changed."""


class IndexUnavailableError(IndexStoreError):
    """The database did not answer in time, or others held its lock."""


class UnknownItemError(IndexStoreError, ValueError):
    """The index does not hold some ids: they were deleted, or never given.

    Attributes
    ----------
    ids : tuple of int
        Those that it does not hold.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = tuple(int(number) for number in ids)
        shown = ", ".join(map(str, self.ids[:5])) + (", ..." if len(self.ids) > 5 else "")
        super().__init__(f"ids must be of items in the index; it does not hold {shown}")

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling: processes send errors to one another."""
        return UnknownItemError, (self.ids,)


class NotPublishedError(IndexStoreError):
    """Nothing was published yet, so no message can be answered."""


class PrivateIndexError(IndexStoreError):
    """The rows of this index are private: they are not served, published or asked as an open gallery."""


class InexactRowsError(IndexStoreError, ValueError):
    """Private rows must be row-exact: each a function of its own image alone, to the last bit."""


class StaleMapError(IndexStoreError):
    """A map is too old: no answer of its size can be made any more, or a newer one was published meanwhile."""


class MapChangedError(MessageError):
    """A message was made for a map that is not served any more: fetch the public part and ask anew.

    Attributes
    ----------
    asked : str
        The map that the message was made for.
    current : str
        The map that is served now.
    revision : int
        The revision of the gallery that the current map was learned on.
    """

    def __init__(self, asked: str, current: str, revision: int) -> None:
        self.asked, self.current, self.revision = asked, current, revision
        super().__init__(
            f"message was made for map {asked[:32]!r}, which is not served any more; the map is now {current!r}, of "
            f"revision {revision}: fetch the public part and ask anew"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling."""
        return MapChangedError, (self.asked, self.current, self.revision)
