"""The client's page: the message that was sent, the matches, and the cost. It runs on the client's machine."""

from nearveil.lazy import require_extra

with require_extra("service"):
    from nearveil.ui._app import serve_page

__all__ = ["serve_page"]
