"""The client's page: what the server saw, what you got, and what it cost. It runs on the client's own machine."""

from nearveil.ui._app import serve_page

__all__ = ["serve_page"]
