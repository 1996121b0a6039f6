"""What people call a file by its path as given: its name, its folder, or the repository that it was downloaded from."""

from __future__ import annotations

import os
import re
from pathlib import Path

_HASH = re.compile(r"(?:sha256[-:])?(?:[0-9a-f]{40}|[0-9a-f]{64})")
"""What stores of downloads call a file: a digest, which tells nobody anything."""
_REPOSITORY = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
"""A repository's folder in a hub's cache."""


def file_name(path: Path) -> str:
    """The name of the file; empty when it is a digest."""
    return "" if _HASH.fullmatch(path.name) else path.name


def folder_name(path: Path) -> str:
    """The repository (`someone/T-GGUF`) of a file in a hub's cache, else the folder and the name of the file."""
    parts = _folder(path).parts
    for part in reversed(parts):
        match = _REPOSITORY.fullmatch(part)
        if match:
            return f"{match['owner']}/{match['name']}"
    return "/".join(one for one in (parts[-1], file_name(path)) if one)


def full_name(path: Path) -> str:
    """As `folder_name`, always with the name of the file."""
    place, name = folder_name(path), file_name(path)
    return place if not name or place.endswith(f"/{name}") else f"{place}/{name}"


def _folder(path: Path) -> Path:
    """The folder as given; one that goes up, behind a link perhaps, as it is."""
    folder = path.parent.absolute()
    return Path(os.path.realpath(folder)) if ".." in folder.parts else folder
