"""Write the settings of specserve's config into the schema of the chart's values.

Run it after a change of specserve/config.py; the rest of the schema is written by hand.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from specserve.config import Config

SCHEMA = Path(__file__).parent / "specserve" / "values.schema.json"


def with_settings(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the settings that the config has."""
    _, sections = msgspec.json.schema_components([Config], ref_template="#/$defs/{name}")
    return schema | {"$defs": json.loads(json.dumps(sections))}  # as it is read: no tuples


if __name__ == "__main__":
    changed = with_settings(json.loads(SCHEMA.read_text()))
    SCHEMA.write_text(json.dumps(changed, indent=2) + "\n")
