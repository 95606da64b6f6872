"""YAML as people write it by hand.

Guarantees: plain values only (no objects are made); a key that stands twice in one mapping is refused, since one of the two
would be lost without a word; whatever cannot be read is a BadYaml of one sentence.
"""

from __future__ import annotations

from typing import Any

import yaml


class BadYaml(Exception):
    """One sentence on what is wrong, with the line where that is known."""


class _Loader(yaml.SafeLoader):
    """Looks at the keys as they are written: a merge (`<<`) may well bring a key that is there."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            written = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if written in seen:
                raise BadYaml(f"line {key.start_mark.line + 1}: {key.value} is there twice; keep one of the two")
            if written is not None:
                seen.add(written)
        return node


def parse(text: str) -> Any:
    """The value of a YAML text. Raises BadYaml."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a safe loader
    except yaml.YAMLError as error:
        raise BadYaml(" ".join(str(error).split())) from None
    except (ValueError, LookupError, AttributeError) as error:  # a date that no calendar has, a number of 5000 digits
        raise BadYaml(f"a value in it cannot be read: {error}") from None
    except RecursionError:
        raise BadYaml("it is nested too deeply") from None
