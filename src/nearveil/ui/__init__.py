"""The client's page: what the server saw, what you got, and what it cost. It runs on the client's own machine.

* :class:`Desk` asks, for the page, through a :class:`nearveil.Client`;
* :class:`Purse` is the account that this client pays from;
* :func:`create_app` and :func:`serve` put the page on a port of loopback.
"""

from nearveil.ui._app import create_app
from nearveil.ui._desk import Desk
from nearveil.ui._entry import Entry
from nearveil.ui._purse import Purse
from nearveil.ui._serve import serve

__all__ = ["Desk", "Entry", "Purse", "create_app", "serve"]
