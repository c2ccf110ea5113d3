"""Which cells, colours and grids find the nearest: simulated with exact scores and the noise of the bounds, on a GPU.

Encrypting every question of ten million items for a dozen shapes would take hours. Here scores are those of the codes,
plus Gaussian noise of the deviation of Theorem 2 (docs/theory/sealed.md), and the best are matched to the buckets of
grids at random places. Cells are assigned as the library does, by torch; the script needs torch and NumPy alone.
``bench/sealed.py`` measures chosen shapes with encryption. Recall is of the 10 nearest, over 500 held-out queries.
Shapes are cells:colours::

    python bench/sealed_shapes.py --prepare out/shapes            # features, projected to 128 dimensions
    python bench/sealed_shapes.py out/shapes --data photos --items 1000000 --dimension 128 --shapes 1704:54 854:28
"""

import argparse
import importlib.util
import math
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

NEAREST, QUERIES = 10, 500
_BLOCK = 1 << 20  # rows at a time
_DISTANCES = 1 << 29  # in memory at a time


def prepare(folder: Path) -> None:
    """Write features of photos, projected to 128 dimensions, and words in 8 bits."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from sealed import load_photos, unit

    data = Path(os.environ.get("NEARVEIL_DATA", "../shared/data"))
    rows, classes, queries = load_photos(data, QUERIES)
    directions = np.linalg.eigh(rows.T @ rows)[1][:, ::-1][:, :128]
    folder.mkdir(parents=True, exist_ok=True)
    photos = {"rows": (rows @ directions).astype(np.float16), "queries": (queries @ directions).astype(np.float16)}
    np.savez(folder / "photos.npz", classes=classes, **photos)
    with np.load(data / "glove100" / "glove100.npz") as stored:
        words = unit(stored["vectors"])
    order = np.random.default_rng(5).permutation(len(words))
    base, queries = words[order[:-QUERIES]], words[order[-QUERIES:]]
    steps = np.rint(base * 127 / np.abs(words).max()).astype(np.int8)
    np.savez(folder / "glove.npz", rows=steps, queries=queries.astype(np.float16))


def scale(rows: Any) -> Any:
    """Return rows of length 1."""
    return rows / rows.norm(dim=1, keepdim=True)


def make_gallery(folder: Path, data: str, count: int, dimension: int, device: str) -> tuple[Any, Any]:
    """Return rows in 16 bits, and queries: words, or photos that are enlarged as ``bench/sealed.py`` does."""
    with np.load(folder / f"{data}.npz") as stored:
        rows, queries = (
            torch.as_tensor(stored[name].astype(np.float32), device=device) for name in ("rows", "queries")
        )
        classes = torch.as_tensor(stored["classes"], device=device) if data == "photos" else None
    rows, queries = (scale(part[:, :dimension]) for part in (rows, queries))
    if classes is None:
        return rows[:count].half(), queries
    likeness = rows @ rows.T
    likeness[classes[:, None] != classes] = -9
    likeness.fill_diagonal_(-8)
    best, near = likeness.topk(10, dim=1)
    near = torch.where(best > -5, near, near[:, :1])
    random = torch.Generator(device=device).manual_seed(2)
    made = torch.empty(count, dimension, dtype=torch.float16, device=device)
    for start in range(0, count, _BLOCK):
        which = torch.arange(start, min(start + _BLOCK, count), device=device) % len(rows)
        second = rows[near[which, torch.randint(10, which.shape, generator=random, device=device)]]
        share = torch.rand(len(which), 1, generator=random, device=device) / 2 + 0.5
        noise = torch.randn(len(which), dimension, generator=random, device=device) * (0.05 / math.sqrt(dimension))
        made[start : start + len(which)] = scale(share * rows[which] + (1 - share) * second + noise)
    made[: len(rows)] = rows[:count]
    return made, queries


def find_nearest(rows: Any, queries: Any, count: int) -> Any:
    """Return the rows with the largest products."""
    values, ids = torch.empty(len(queries), 0, device=rows.device), None
    for start in range(0, len(rows), _BLOCK):
        products = queries @ rows[start : start + _BLOCK].float().T
        top, at = products.topk(count, dim=1)
        at = at + start if ids is None else torch.cat([ids, at + start], dim=1)
        values, order = torch.cat([values, top], dim=1).topk(count, dim=1)
        ids = at.gather(1, order)
    return ids


def make_codes(rows: Any, dimension: int) -> tuple[Any, Any, float]:
    """Return codes of 8 bits, the projection and the scale, as the library makes them."""
    sample = rows[:: max(1, len(rows) // 65_536)].float()
    directions = torch.linalg.eigh((sample.T @ sample).double())[1].flip(1)[:, :dimension].float()
    width = -(-directions.shape[1] // 8) * 8
    rotation = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(1)))[0]
    projection = directions @ rotation[: directions.shape[1]].to(rows.device)
    steps = (sample @ projection).abs().flatten()
    factor = 127 / float(steps.kthvalue(int(0.9997 * len(steps))).values)
    codes = torch.empty(len(rows), width, dtype=torch.int8, device=rows.device)
    for start in range(0, len(rows), _BLOCK):
        codes[start : start + _BLOCK] = (
            (rows[start : start + _BLOCK].float() @ projection * factor).round().clamp(-127, 127)
        )
    return codes, projection, factor


class Cells:
    """Assignment of items to cells, as ``nearveil.sealed.cells`` has it, computed by torch."""

    def __init__(self, codes: Any, n_cells: int, n_colours: int, n_slots: int) -> None:
        self.n_colours, count = n_colours, len(codes)
        centroids = self._find_means(codes[:: max(1, count // (40 * n_cells))][: 40 * n_cells].float(), n_cells)
        colours = load_cells()._colour(centroids.cpu().numpy(), n_colours)
        self.centroids = centroids[torch.as_tensor(np.argsort(colours, kind="stable"), device=codes.device)]
        sample = codes[:: max(1, count // max(40 * n_cells, min(200 * n_cells, 1 << 18)))].float()
        prices = torch.zeros(n_cells, device=codes.device)
        for _ in range(8):
            near, margins = self._choose(sample)
            cells = self._balance(near, margins, prices, -(-n_slots * len(sample) // count))
            counts = torch.bincount(cells, minlength=n_cells)[:, None]
            sums = torch.zeros_like(self.centroids).index_add_(0, cells, sample)
            self.centroids = torch.where(counts > 0, sums / counts.clamp(min=1), self.centroids)
        near, margins = self._choose(codes)
        self.cells = self._balance(near, margins, prices, n_slots)
        self._move_overflow(codes, n_slots)

    def _find_means(self, sample: Any, n_cells: int) -> Any:
        means = sample[torch.randperm(len(sample), generator=torch.Generator().manual_seed(0))[:n_cells]]
        for _ in range(10):
            scores = [block @ means.T - means.square().sum(dim=1) / 2 for block in sample.split(1 << 16)]
            nearest = torch.cat([block.argmax(dim=1) for block in scores])
            counts = torch.bincount(nearest, minlength=n_cells)[:, None]
            sums = torch.zeros_like(means).index_add_(0, nearest, sample)
            means = torch.where(counts > 0, sums / counts.clamp(min=1), means)
        return means

    def find_margins(self, vectors: Any) -> tuple[Any, Any]:
        """Return the nearest cell and its margin for every vector and colour."""
        by_colour = self.centroids.reshape(self.n_colours, -1, self.centroids.shape[1])
        lengths = by_colour.square().sum(dim=2)
        apart = lengths[:, :, None] + lengths[:, None] - 2 * by_colour @ by_colour.transpose(1, 2)
        least = 1e-6 * float(lengths.max())
        scales = torch.where(apart > least, 0.5 / (apart.clamp(min=least) + 1e-30).sqrt(), torch.zeros_like(apart))
        squares = (vectors.float() @ self.centroids.T * -2).reshape(-1, *lengths.shape) + lengths
        smallest, nearest = squares.min(dim=2)
        colours = torch.arange(self.n_colours, device=vectors.device)
        near = nearest + colours * by_colour.shape[1]
        if by_colour.shape[1] == 1:
            return near, -smallest
        squares = (squares - smallest[:, :, None]) * scales[colours, nearest]
        return near, squares.scatter_(2, nearest[:, :, None], math.inf).min(dim=2).values

    def _choose(self, vectors: Any) -> tuple[Any, Any]:
        """Return the cells with the largest margins, and these."""
        choices = min(32 if len(self.centroids) <= 16 * self.n_colours else 8, self.n_colours)
        parts = []
        for block in vectors.split(max(64, _DISTANCES // len(self.centroids))):
            near, margins = self.find_margins(block)
            best, order = margins.topk(choices, dim=1)
            parts.append((near.gather(1, order).int(), best))
        return torch.cat([near for near, _ in parts]), torch.cat([best for _, best in parts])

    def _balance(self, near: Any, margins: Any, prices: Any, n_slots: int) -> Any:
        unit, step = float((margins[:, 0] - margins[:, -1]).median()) + 1e-12, 0.5
        for _ in range(60):
            cells = near.gather(1, (margins - prices[near]).argmax(dim=1, keepdim=True))[:, 0].long()
            counts = torch.bincount(cells, minlength=len(prices))
            if int(counts.max()) <= n_slots:
                break
            prices += step * unit * (counts / n_slots - 1).clamp(-0.2, 1)
            prices.clamp_(min=0)
            step = max(0.05, 0.95 * step)
        return cells

    def _move_overflow(self, codes: Any, n_slots: int) -> None:
        counts = torch.bincount(self.cells, minlength=len(self.centroids)).cpu().numpy()
        for cell in np.flatnonzero(counts > n_slots).tolist():
            items = torch.nonzero(self.cells == cell)[n_slots:, 0]
            near, margins = self.find_margins(codes[items])
            for item, ranked in zip(items, near.gather(1, margins.argsort(descending=True)).cpu().numpy(), strict=True):
                free = ranked[counts[ranked] < n_slots]
                chosen = int(free[0] if len(free) else counts.argmin())
                self.cells[item] = chosen
                counts[chosen] += 1
            counts[cell] = n_slots


@cache
def load_cells() -> Any:
    """Load the library's cells; where faiss is missing, with a search of its own."""
    if importlib.util.find_spec("faiss") is None:
        sys.modules["faiss"] = stub = ModuleType("faiss")
        stub.IndexFlatL2 = FlatSearch  # type: ignore[attr-defined]
    path = Path(__file__).resolve().parent.parent / "src/nearveil/sealed/cells.py"
    spec = importlib.util.spec_from_file_location("cells", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018, S101
    sys.modules["cells"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FlatSearch:
    """The part of ``faiss.IndexFlatL2`` that colours need."""

    def __init__(self, dimension: int) -> None:
        del dimension

    def add(self, rows: Any) -> None:
        """Keep rows."""
        self._rows = torch.as_tensor(rows)

    def search(self, queries: Any, count: int) -> tuple[Any, Any]:
        """Return the distances and numbers of the nearest rows."""
        near = torch.cdist(torch.as_tensor(queries), self._rows).topk(count, dim=1, largest=False)
        return near.values.numpy(), near.indices.numpy()


def match(buckets: Any, n_buckets: int) -> list[int]:
    """Return the records that are fetched, as ``nearveil.sealed.records.match_buckets`` chooses them."""
    owners, pairs = [-1] * n_buckets, buckets.tolist()
    for record, pair in enumerate(pairs):
        for start in pair:
            path = [start]
            while len(path) <= n_buckets and (owner := owners[path[-1]]) >= 0:
                path.append(sum(pairs[owner]) - path[-1])
            if len(path) <= n_buckets:
                moved = [record, *(owners[bucket] for bucket in path[:-1])]
                for bucket, owner in zip(path, moved, strict=True):
                    owners[bucket] = owner
                break
    return [owner for owner in owners if owner >= 0]


def simulate(shape: str, sides: list[int], made: tuple[Any, Any, float], queries: Any, nearest: Any) -> str:
    """Return a row of the table: the shape, and the share of the nearest that is found."""
    (n_cells, n_colours), (codes, projection, factor) = map(int, shape.split(":")), made
    n_cells, count, dimension = -(-n_cells // n_colours) * n_colours, len(codes), codes.shape[1]
    slots = -(-math.ceil(1.035 * count / n_cells + 1) // 8) * 8
    made_cells = Cells(codes, n_cells, n_colours, slots)
    counts = torch.bincount(made_cells.cells, minlength=n_cells)
    ends, order = counts.cumsum(0), made_cells.cells.argsort(stable=True)
    norms = torch.cat([block.float().norm(dim=1) for block in codes.split(_BLOCK)])
    reach, per_colour = math.ceil(float(norms.max()) * 1.02) + 1, n_cells // n_colours
    row_norm2 = float(norms.square().mean()) * count / (n_colours * slots)
    variance = row_norm2 * (6.4**2 + 4.0**4 / 12) + (1024 * 6.4**2 + 1) * 4.0**10 / 12 + reach**2 / 12
    deviation = math.sqrt(variance) * 2.1 / 2**26
    points, centroids = queries @ projection, made_cells.centroids
    distances = centroids.square().sum(dim=1) - 2 * factor * points @ centroids.T
    probed = distances.reshape(len(queries), n_colours, per_colour).argmin(dim=2)
    probed += torch.arange(n_colours, device=codes.device) * per_colour
    places, sums = np.random.default_rng(3), np.zeros(3 + len(sides))
    for point, chosen, true in zip(points, probed.tolist(), nearest, strict=True):
        items = torch.cat([order[ends[cell] - counts[cell] : ends[cell]] for cell in chosen])
        exact = codes[items].float() @ point / (point.norm() * reach)
        noisy = exact + torch.randn(len(exact), device=codes.device) * deviation
        best, plain = (items[scores.topk(min(160, len(items))).indices] for scores in (noisy, exact))
        shares = [torch.isin(true, part).float().mean().item() for part in (items, plain[:40], best[:40])]
        for side in sides:
            blocks = places.integers(0, side, (min(5 * side, len(best)), 2)) + np.array([0, side])
            shares.append(torch.isin(true, best[match(blocks, 2 * side)]).float().mean().item())
        sums += shares
    sizes = f"{count:,} x {dimension} | {n_cells}, {n_colours} | {n_colours * slots:,}"
    return (
        f"| {sizes} | {n_cells * dimension * 22 / 8e6:.2f} | "
        + " | ".join(f"{share:.3f}" for share in sums / len(queries))
        + " |"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--prepare", type=Path)
    parser.add_argument("--data", choices=("photos", "glove"), default="photos")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=128)
    parser.add_argument("--sides", type=int, nargs="+", default=[16, 20, 24, 32])
    parser.add_argument("--shapes", nargs="+", default=["1704:54"])
    options = parser.parse_args()
    if options.prepare:
        prepare(options.prepare)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, queries = make_gallery(options.folder, options.data, options.items, options.dimension, device)
    nearest, made = find_nearest(rows, queries, NEAREST), make_codes(rows, options.dimension)
    columns = "items", "cells, colours", "rows", "MB up", "probed", "40 by exact scores", "40 by encrypted scores"
    names = [*columns, *(f"side {side}" for side in options.sides)]
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for shape in options.shapes:
        print(simulate(shape, options.sides, made, queries, nearest), flush=True)


if __name__ == "__main__":
    main()
