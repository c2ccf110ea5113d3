"""All studies, in the order in which they are made."""

from nearveil.study._study import Study

_ALL: tuple[Study, ...] = ()
STUDIES: dict[str, Study] = {study.name: study for study in _ALL}
