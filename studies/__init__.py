"""Tables and figures: of the papers, and of this library; and the data they are made from."""

from studies._report import table, write
from studies._study import Case, Mean, Measured, Row, Study, grouped, mean, run

__all__ = ["Case", "Mean", "Measured", "Row", "Study", "grouped", "mean", "run", "table", "write"]
