"""Write deploy/requirements.txt: the part of requirements.lock that the container needs, with hashes of wheels."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("service", "oidc", "postgres", "sealed", "cluster")
PYTHON = "3.12"  # of the image
MACHINES = ("x86_64", "aarch64")
LIBC = ("manylinux2014", "manylinux_2_17", "manylinux_2_24", "manylinux_2_27", "manylinux_2_28")


def list_requirements() -> list[str]:
    """Return the requirements of the server and of its build, from pyproject.toml."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = content["project"]

    def expand(extra: str) -> Iterator[str]:
        for requirement in project["optional-dependencies"][extra]:
            included = re.fullmatch(r"nearveil\[(.+)\]", requirement)
            if included is None:
                yield requirement
            else:
                for other in included[1].split(","):
                    yield from expand(other)

    extras = [requirement for extra in EXTRAS for requirement in expand(extra)]
    return [*project["dependencies"], *extras, *content["build-system"]["requires"]]


def resolve(machine: str) -> dict[str, str]:
    """Return the hash of each wheel that pip would install on a machine, by name and version."""
    platforms = [word for libc in LIBC for word in ("--platform", f"{libc}_{machine}")]
    options = ["--dry-run", "--quiet", "--ignore-installed", "--only-binary=:all:", "--python-version", PYTHON]
    command = [sys.executable, "-m", "pip", "install", *options, *platforms, "--target", "unused", "--report", "-"]
    process = subprocess.run(
        [*command, "-c", str(ROOT / "requirements.lock"), *list_requirements()], stdout=subprocess.PIPE, check=True
    )
    wheels = (
        (entry["metadata"], entry["download_info"]["archive_info"]) for entry in json.loads(process.stdout)["install"]
    )
    return {
        f"{metadata['name'].lower().replace('_', '-')}=={metadata['version']}": archive["hashes"]["sha256"]
        for metadata, archive in wheels
    }


def main() -> None:
    """Write the file."""
    hashes: dict[str, set[str]] = {}
    for machine in MACHINES:
        for name, digest in resolve(machine).items():
            hashes.setdefault(name, set()).add(digest)
    lines = [f"# Made by `make containerlock`, for Python {PYTHON} on Linux ({', '.join(MACHINES)}).\n"]
    for name, digests in sorted(hashes.items()):
        lines.append(" \\\n    ".join([name, *(f"--hash=sha256:{digest}" for digest in sorted(digests))]) + "\n")
    (ROOT / "deploy" / "requirements.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
