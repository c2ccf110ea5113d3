"""Who may use the page: whoever held the address that was printed, once."""

import hashlib
import hmac
import secrets
import threading


class Entry:
    """A token that is good once, and the cookie that it is exchanged for. Neither is kept on a disk.

    Examples
    --------
    >>> entry = Entry()
    >>> cookie = entry.exchange(entry.token)
    >>> entry.knows(cookie), entry.exchange(entry.token), entry.knows("guessed")
    (True, None, False)
    """

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self._lock = threading.Lock()
        self._cookie: str | None = None

    def __repr__(self) -> str:
        return "Entry()"

    def exchange(self, token: str) -> str | None:
        """Return a new cookie for the token, the first time; None for another token, and ever after.

        Parameters
        ----------
        token : str

        Returns
        -------
        str or None
        """
        with self._lock:
            if self._cookie is not None or not _same(token, self.token):
                return None
            self._cookie = secrets.token_urlsafe(32)
            return self._cookie

    def knows(self, cookie: str) -> bool:
        """Return whether a cookie is the one that was given out.

        Parameters
        ----------
        cookie : str

        Returns
        -------
        bool
        """
        return self._cookie is not None and _same(cookie, self._cookie)


def _same(one: str, other: str) -> bool:
    """Compare in a time that tells nothing, whatever letters and lengths there are."""
    digests = (hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (one, other))
    return hmac.compare_digest(*digests)
