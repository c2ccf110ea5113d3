"""Map rows one by one, to the last bit: public bounds and exact products. Warn of rows that were standardized."""

import warnings
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rows = NDArray[np.float64]

_STANDARD = 1e-6  # how near to 0 and 1 means and deviations are after StandardScaler
_DEVIATIONS = 3.0  # from the mean of public rows to a bound


class ScalingWarning(UserWarning):
    """The private rows look as if a scaler had been fitted on them: it publishes their means without noise."""


@dataclass(frozen=True, eq=False)
class ColumnBounds:
    """Public bounds of each column. They map a row to [-1, 1], whatever the other rows are."""

    # Element by element in IEEE arithmetic: exact to the last bit (docs/howto/pipelines.md, test_scaling.py).

    low: Rows = field(repr=False)
    high: Rows = field(repr=False)

    @classmethod
    def make(cls, bounds: ArrayLike, n_features: int) -> Self:
        """Check bounds: a pair (low, high), each a number or a number for each column."""
        message = f"bounds must be (low, high), each a number or {n_features:,} numbers, one for each column of X"
        try:
            low, high = (np.array(part, dtype=np.float64) for part in bounds)  # type: ignore[union-attr]
            low, high = (np.array(np.broadcast_to(part, n_features)) for part in (low, high))
        except (TypeError, ValueError):
            raise ValueError(message) from None
        with np.errstate(all="ignore"):
            # Half of the smallest number is 0: a row in the middle would be 0 / 0, an error that depends on the row.
            fits = np.isfinite(high - low).all() and np.isfinite(high + low).all() and ((high - low) / 2 > 0).all()
        if not fits:
            raise ValueError(f"{message}; low must be below high, and both finite")
        return cls(low, high)

    @classmethod
    def measure(cls, public: Rows) -> Self:
        """Return the bounds of public rows: three standard deviations on either side of their means."""
        spread = public.std(axis=0)
        reach = _DEVIATIONS * np.where(spread > 0, spread, 1.0)
        return cls.make((public.mean(axis=0) - reach, public.mean(axis=0) + reach), public.shape[1])

    def scale(self, rows: Any) -> Any:
        """Map [low, high] to [-1, 1], and clip values beyond. Takes arrays of NumPy and of Dask."""
        middle, half = (self.low + self.high) / 2, (self.high - self.low) / 2
        with np.errstate(over="ignore", under="ignore"):  # a warning would depend on a row
            return ((rows - middle) / half).clip(-1.0, 1.0)


EXACT = 53  # bits of a whole number that float64 holds
_AT_ONCE = 4096  # rows


def multiply_exactly(rows: Rows, components: NDArray[Any], reach: float, bits: int) -> Rows:
    """Cut rows off at `reach`, round them to `bits` bits, and multiply them by components that are whole numbers."""
    # Partial sums are whole numbers below 2^53, if `bits` and the components are small enough: exact in any order.
    wide = components.astype(np.float64)
    images = np.empty((len(rows), wide.shape[1]))
    for start in range(0, len(rows), _AT_ONCE):
        batch = slice(start, start + _AT_ONCE)
        images[batch] = np.rint(np.clip(rows[batch] / reach, -1, 1) * 2.0**bits) @ wide
    return images


def warn_of_scaled_rows(rows: Rows, stacklevel: int = 3) -> None:
    """Warn the owner alone if all columns have mean 0 and deviation 1 (or are 0): that depends on the records."""
    if len(rows) < 2:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        means, deviations = rows.mean(axis=0), rows.std(axis=0)
        constant = deviations <= _STANDARD
        standard = (np.abs(means) <= _STANDARD) & (constant | (np.abs(deviations - 1) <= _STANDARD))
    if standard.all() and not constant.all():
        warnings.warn(
            "every column of X has mean 0 and standard deviation 1: a scaler that was fitted on private rows publishes "
            "their means and deviations without noise, and epsilon does not cover them. Leave the scaler out and give "
            "public bounds (bounds=), or fit the scaler on public rows",
            ScalingWarning,
            stacklevel=stacklevel,
        )
