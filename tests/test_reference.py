"""docs/configuration.md is what the code says, and says something about every setting."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from common.sections import OwnTaskSettings
from common.settings import Settings
from grapevine.setup.reference import reference

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "renew it with `make reference`"


def test_every_setting_is_described_once() -> None:
    page = reference()
    for path, description in _fields("", Settings) + _fields("own_tasks.<name>", OwnTaskSettings):
        assert description, f"{path} has no description"
        assert page.count(f"\n| `{path}` |") == 1, path


def _fields(path: str, model: type[BaseModel]) -> list[tuple[str, str | None]]:
    found = []
    for name, field in model.model_fields.items():
        place = f"{path}.{name}".lstrip(".")
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            assert inner.__doc__, f"{place} has no docstring"
            found += _fields(place, inner)
        else:
            found.append((place, field.description))
    return found
