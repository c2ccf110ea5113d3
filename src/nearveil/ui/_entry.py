"""Who may use the page: whoever held the address that was printed, once."""

import hashlib
import hmac
import secrets
import threading
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pass:
    """What lets one browser in: both are needed.

    `secret`: Kept by the page itself, in the storage of its own origin and tab, and sent as a header.
    """

    cookie: str = field(repr=False)  # kept by the browser. Every server at 127.0.0.1 is sent it, whatever its port
    secret: str = field(repr=False)


class Entry:
    """A token that is good once, and the pass that it is exchanged for. Neither is kept on a disk.

    Examples
    --------
    >>> entry = Entry()
    >>> found = entry.exchange(entry.token)
    >>> entry.knows(found.cookie), entry.lets_in(found.cookie, found.secret), entry.lets_in(found.cookie, "guessed")
    (True, True, False)
    >>> entry.exchange(entry.token)
    """

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self._lock = threading.Lock()
        self._pass: Pass | None = None

    def __repr__(self) -> str:
        return "Entry()"

    def exchange(self, token: str) -> Pass | None:
        """Return a new pass for the token, the first time; None for another token, and ever after."""
        with self._lock:
            if self._pass is not None or not _same(token, self.token):
                return None
            self._pass = Pass(secrets.token_urlsafe(32), secrets.token_urlsafe(32))
            return self._pass

    def knows(self, cookie: str) -> bool:
        """Return whether a cookie is the one that was given out."""
        return self._pass is not None and _same(cookie, self._pass.cookie)

    def lets_in(self, cookie: str, secret: str) -> bool:
        """Return whether a cookie and a secret are those that were given out."""
        return self.knows(cookie) and self._pass is not None and _same(secret, self._pass.secret)


def _same(one: str, other: str) -> bool:
    """Compare in a time that tells nothing, whatever letters and lengths there are."""
    digests = (hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (one, other))
    return hmac.compare_digest(*digests)
