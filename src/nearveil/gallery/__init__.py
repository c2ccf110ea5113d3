"""Galleries: items with their features and codes, an index that keeps them, and the maps that are published of it."""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.gallery.errors import IndexStoreError
    from nearveil.gallery.index import Index
    from nearveil.gallery.items import Item
    from nearveil.gallery.publishing import Published
    from nearveil.gallery.sync import sync_folder

__all__ = ["Index", "IndexStoreError", "Item", "Published", "sync_folder"]

__getattr__ = import_later(
    __name__,
    {
        ".errors": "IndexStoreError",
        ".sync": "sync_folder",
        ".index": "Index",
        ".items": "Item",
        ".publishing": "Published",
    },
)
