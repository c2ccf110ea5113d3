"""The public interface changes only where somebody means it to."""

from tests.interface import FILE, interface


def test_it_is_the_one_that_is_written_down() -> None:
    assert interface().splitlines() == FILE.read_text().splitlines(), "python -m tests.interface writes it anew"
