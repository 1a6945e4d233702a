"""The README's generated parts are what the code says now."""

from __future__ import annotations

from supervisor import docs, lifecycle
from supervisor.option import options


def test_the_readme_is_fresh() -> None:
    text = docs.README.read_text()
    assert docs.render(text) == text, "try: make fix"


def test_every_option_and_every_state_is_in_it() -> None:
    text = docs.README.read_text()
    assert all(f"| `{name}` |" in text for name in options())
    assert all(f"    {state.name} -->" in text for state in lifecycle.State)
