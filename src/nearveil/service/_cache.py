"""Answers that were made once, kept as bytes up to a bound."""

import threading
from collections import OrderedDict

_OVERHEAD = 250  # bytes that an entry costs besides its own


class ByteCache:
    """Remembers bytes by bytes, and forgets what was not asked for the longest.

    `most`: Bytes of keys and values together.

    Examples
    --------
    >>> cache = ByteCache(4000)
    >>> for number in range(20):
    ...     cache.put(b"%d" % number, bytes(300))
    >>> cache.get(b"0"), len(cache.get(b"19")), len(cache)
    (None, 300, 7)
    """

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes) -> bytes | None:
        """Return what was put under a key, or None."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: bytes, value: bytes) -> None:
        """Remember a value, unless it alone would be a quarter of what may be held."""
        size = len(key) + len(value) + _OVERHEAD
        if size > self._most // 4:
            return
        with self._lock:
            old = self._kept.pop(key, None)
            self._held += size - (0 if old is None else len(key) + len(old) + _OVERHEAD)
            self._kept[key] = value
            while self._held > self._most:
                gone, bytes_ = self._kept.popitem(last=False)
                self._held -= len(gone) + len(bytes_) + _OVERHEAD
