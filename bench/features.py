"""Measure images to features: images a second in a gallery, milliseconds for one query, peak memory.

Every extractor runs in a process of its own, so that its peak memory is its own. The images are three photographs that
scikit-image carries, as JPEG in memory; what is timed is bytes in, features out, decoding included.
"""

import argparse
import io
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUERIES = 10


def lite0() -> Any:
    """EfficientNet-Lite0."""
    from nearveil.features import EfficientNetLite0

    return EfficientNetLite0()


def mobilenet() -> Any:
    """MobileNetV2."""
    from nearveil.features.backbones import MobileNetV2

    return MobileNetV2()


def hog_color() -> Any:
    """HOG and colour."""
    from nearveil.features import HogColor

    return HogColor()


def onnx() -> Any:
    """EfficientNet-Lite0 as an ONNX file."""
    from nearveil.features import OnnxExtractor

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lite0.onnx"
        # Another process writes it, so that the memory measured is that of onnxruntime alone.
        subprocess.run([sys.executable, __file__, "--export", str(path)], check=True)
        return OnnxExtractor(path, mean=(127, 127, 127), std=(128, 128, 128))


EXTRACTORS: dict[str, Callable[[], Any]] = {one.__name__: one for one in (lite0, mobilenet, onnx, hog_color)}


def export(path: Path) -> None:
    """Write EfficientNet-Lite0 as an ONNX file."""
    import torch

    from nearveil.features.backbones import backbone

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer's: sizes are fixed here
        torch.onnx.export(
            backbone("EfficientNet-Lite0"),
            (torch.zeros(2, 3, 224, 224),),
            str(path),
            dynamo=False,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
        )


def photographs() -> list[bytes]:
    """Return three photographs of 300 x 451, 400 x 600 and 512 x 512 pixels."""
    from PIL import Image
    from skimage import data

    pictures: Any = data
    found = []
    for array in (pictures.chelsea(), pictures.coffee(), pictures.astronaut()):
        out = io.BytesIO()
        Image.fromarray(array).save(out, "JPEG", quality=90)
        found.append(out.getvalue())
    return found


def measure(name: str, images: int) -> dict[str, Any]:
    """Measure one extractor in this process."""
    from nearveil.features import load_image

    files = photographs()
    extractor = EXTRACTORS[name]()
    extractor.extract([load_image(files[0])])  # the first call prepares
    before = time.perf_counter()
    pixels = [load_image(files[number % 3]) for number in range(images)]
    decoded = time.perf_counter()
    extractor.extract(pixels)
    done = time.perf_counter()
    alone = []
    for number in range(QUERIES):
        start = time.perf_counter()
        extractor.extract([load_image(files[number % 3])])
        alone.append(time.perf_counter() - start)
    return {
        "extractor": extractor.name,
        "how": EXTRACTORS[name].__doc__,
        "dimension": extractor.dimension,
        "images": images,
        "decoded_per_second": images / (decoded - before),
        "images_per_second": images / (done - before),
        "query_ms": 1000 * sorted(alone)[QUERIES // 2],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def collect(images: int) -> list[dict[str, Any]]:
    """Measure every extractor that is installed, each in a new process."""
    records = []
    for name, built in EXTRACTORS.items():
        command = [sys.executable, __file__, "--one", name, "--images", str(images)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            print(f"{built.__doc__} left out: {last}")
        else:
            records.append(json.loads(done.stdout.splitlines()[-1]))
    return records


def show(records: list[dict[str, Any]]) -> None:
    """Print one row an extractor."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title="Bytes of a JPEG to a feature")
    for heading in ("extractor", "dimensions", "decoded a second", "images a second", "one query, ms", "peak MiB"):
        grid.add_column(heading, justify="left" if heading == "extractor" else "right")
    for record in records:
        grid.add_row(
            record["how"].rstrip("."),
            str(record["dimension"]),
            f"{record['decoded_per_second']:.0f}",
            f"{record['images_per_second']:.1f}",
            f"{record['query_ms']:.0f}",
            f"{record['peak_mib']:.0f}",
        )
    Console(width=120).print(grid)


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the JSON")
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--one", choices=EXTRACTORS, help="measure this one in this process and print JSON")
    parser.add_argument("--export", type=Path, help="write the ONNX file and stop")
    options = parser.parse_args()
    if options.export:
        export(options.export)
    elif options.one:
        print(json.dumps(measure(options.one, options.images)))
    else:
        records = collect(options.images)
        show(records)
        options.out.mkdir(parents=True, exist_ok=True)
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        (options.out / "features.json").write_text(json.dumps({"machine": machine, "records": records}, indent=1))


if __name__ == "__main__":
    main()
