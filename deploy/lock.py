"""Write deploy/requirements.txt: what the container needs of requirements.lock, with the hashes of its wheels."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("service", "postgres", "sealed", "cluster")
PYTHON = "3.12"  # of the image
MACHINES = ("x86_64", "aarch64")
LIBC = ("manylinux2014", "manylinux_2_17", "manylinux_2_24", "manylinux_2_27", "manylinux_2_28")


def wanted() -> list[str]:
    """Return what the server needs, and what builds it, as pyproject.toml says."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = told["project"]
    extras = [one for extra in EXTRAS for one in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *extras, *told["build-system"]["requires"]]


def resolve(machine: str) -> dict[str, str]:
    """Return the hash of each wheel that pip would install on a machine, by name and version."""
    platforms = [word for libc in LIBC for word in ("--platform", f"{libc}_{machine}")]
    how = ["--dry-run", "--quiet", "--ignore-installed", "--only-binary=:all:", "--python-version", PYTHON]
    command = [sys.executable, "-m", "pip", "install", *how, *platforms, "--target", "unused", "--report", "-"]
    done = subprocess.run(
        [*command, "-c", str(ROOT / "requirements.lock"), *wanted()], stdout=subprocess.PIPE, check=True
    )
    found = ((one["metadata"], one["download_info"]["archive_info"]) for one in json.loads(done.stdout)["install"])
    return {
        f"{told['name'].lower().replace('_', '-')}=={told['version']}": archive["hashes"]["sha256"]
        for told, archive in found
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
