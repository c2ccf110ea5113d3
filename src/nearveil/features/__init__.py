"""Images to vectors."""

from nearveil.features._hog import hog

__all__ = ["hog"]
