"""One token: what is kept of it, and what it may say."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from nearveil.service._token_places import TokenError
from nearveil.service.schema import GALLERY_NAME

Scope = Literal["query", "originals", "metrics"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
EVERY = "*"
_LONGEST_LABEL = 200
_LONGEST_LIFE = 36_500  # days


@dataclass(frozen=True)
class Token:
    """What is kept of a token. Times are seconds since 1970.

    Parameters
    ----------
    id : str
        16 hexadecimal digits: what logs and ledgers call the client.
    label : str
        For people.
    scopes : tuple of {"query", "originals", "metrics"}
    galleries : tuple of str
        Names, or "*" for all.
    created : int
    expires, revoked : int or None
    """

    id: str
    label: str
    scopes: tuple[Scope, ...]
    galleries: tuple[str, ...]
    created: int
    expires: int | None = None
    revoked: int | None = None
    digest: bytes = field(default=b"", repr=False, compare=False)

    def may(self, scope: Scope) -> bool:
        """Return whether it is good for a scope."""
        return scope in self.scopes

    def may_use(self, gallery: str) -> bool:
        """Return whether it is good for a gallery."""
        return EVERY in self.galleries or gallery in self.galleries

    def good(self, now: float) -> bool:
        """Return whether it is neither revoked nor expired."""
        return self.revoked is None and (self.expires is None or now < self.expires)


def check_label(label: str) -> None:
    if not isinstance(label, str) or not 1 <= len(label) <= _LONGEST_LABEL or not label.isprintable():
        raise TokenError(f"label must be 1 to {_LONGEST_LABEL} characters of text that prints")


def checked_days(days: float) -> float:
    if isinstance(days, bool) or not isinstance(days, (int, float)) or not 0 < days <= _LONGEST_LIFE:
        raise TokenError(f"days must be above 0 and at most {_LONGEST_LIFE}")
    return days


def checked_scopes(scopes: Sequence[Scope]) -> tuple[Scope, ...]:
    if isinstance(scopes, str) or not scopes or any(scope not in SCOPES for scope in scopes):
        raise TokenError(f"scopes must be of {', '.join(SCOPES)}, at least one")
    return tuple(scope for scope in SCOPES if scope in scopes)


def checked_galleries(galleries: Sequence[str]) -> tuple[str, ...]:
    wrong = isinstance(galleries, str) or not galleries
    if wrong or any(name != EVERY and not re.fullmatch(GALLERY_NAME, name) for name in galleries):
        raise TokenError('galleries must be names of galleries, at least one, or "*" for all')
    return (EVERY,) if EVERY in galleries else tuple(dict.fromkeys(galleries))
