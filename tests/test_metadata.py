"""The README of the wheel works on a package index, where relative links lead nowhere."""

import re
from pathlib import Path

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

ROOT = Path(__file__).parents[1]


def test_links_of_the_readme_are_absolute_and_lead_to_files() -> None:
    core = ProjectMetadata(str(ROOT), PluginManager()).core
    home = core.urls["Homepage"]
    links = re.findall(r"\]\(([^)\s]+)\)", core.readme)
    assert links
    assert all(link.startswith(("https://", "#")) for link in links)
    paths = [link.split("/main/")[1].split("#")[0] for link in links if link.startswith(f"{home}/")]
    assert paths
    assert all((ROOT / path).exists() for path in paths)
    pictures = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", core.readme)
    assert pictures
    assert all(f"{home}/raw/main/" in picture for picture in pictures)


def test_the_wheel_names_its_authors_and_readers() -> None:
    core = ProjectMetadata(str(ROOT), PluginManager()).core
    assert core.authors_data["name"] == ["The nearveil developers"]
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= set(core.urls)
