"""What a protected gallery must be, before it serves anybody."""

from collections.abc import Sequence

from nearveil.retrieval import Index
from nearveil.service._protected_records import read_records, share_images

_LONGEST_CLASS = 200


def checked_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the public list of classes, sorted.

    Parameters
    ----------
    classes : sequence of str

    Returns
    -------
    tuple of str
    """
    given = [] if isinstance(classes, str) else list(classes)
    fits = all(isinstance(one, str) and 0 < len(one) <= _LONGEST_CLASS and "/" not in one for one in given)
    if not fits or len(given) < 2 or len(set(given)) != len(given):
        raise ValueError(
            f"classes must list at least two different names of folders, of at most {_LONGEST_CLASS} characters"
        )
    return tuple(sorted(given))


def check_counts(**counts: int | None) -> None:
    """Refuse what is given and no count."""
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ValueError(f"{name} must be a whole number of at least 1")


def check_indexes(private: Index, public: Index, classes: tuple[str, ...]) -> None:
    """Refuse a pair that cannot keep the promise: said to the operator before anything is served, naming no record.

    Parameters
    ----------
    private, public : Index
    classes : tuple of str
    """
    if private._database.url == public._database.url:
        raise ValueError("private and public must be different indexes: what is published is not protected")
    if (private.extractor, private.dimension) != (public.extractor, public.dimension):
        raise ValueError("private and public must have the features of one extractor")
    if read_records(private, classes).stray:
        raise ValueError(
            "private holds a record whose first folder is not in classes: the list must be complete, and public"
        )
    if share_images(private, public):
        raise ValueError("private and public share an image: what is published is not protected; delete it from one")


def check_part(answers_per_client: int | None, answers: int) -> None:
    """Refuse a client's part that is more than the whole."""
    if answers_per_client is not None and answers_per_client > answers:
        raise ValueError(f"answers_per_client must be at most {answers}, the answers of the account")
