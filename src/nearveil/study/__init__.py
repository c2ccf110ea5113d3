"""Tables and figures: of the papers, and of this library; and the data they are made from."""

from nearveil.study._report import table, write
from nearveil.study._study import Case, Mean, Measured, Row, Study, grouped, mean, run

__all__ = ["Case", "Mean", "Measured", "Row", "Study", "grouped", "mean", "run", "table", "write"]
