"""Engine and frontend each read a folder's processor settings, since neither may import the other: from the same file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ep_runtime.frontend.vision.settings import _processor_file
from model.folder import PROCESSOR_FILES, open_folder

OWN = {name: json.dumps({"from": name}) for name in PROCESSOR_FILES.values()}
BOTH = json.dumps({part: {"from": f"nested {part}"} for part in PROCESSOR_FILES})
IMAGE_ALONE = json.dumps({"image_processor": {"from": "nested image_processor"}})


@pytest.mark.parametrize(
    "files",
    [
        {},
        OWN,
        {"processor_config.json": BOTH},
        {"processor_config.json": BOTH, **OWN},
        {"processor_config.json": IMAGE_ALONE, **OWN},
        {"processor_config.json": "{}", **OWN},
        {
            "processor_config.json": json.dumps({"image_processor": None}),
            "preprocessor_config.json": OWN["preprocessor_config.json"],
        },
    ],
)
def test_both_readers_take_a_processors_settings_from_the_same_place(tmp_path: Path, files: dict[str, str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    seen = {}
    for part, name in PROCESSOR_FILES.items():
        found = _processor_file(tmp_path, part, name)
        if found is not None:
            seen[part] = (found[0].name, found[1])
    assert open_folder(tmp_path).processors == seen
