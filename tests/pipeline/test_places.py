"""What files are called when several claim one level: by the paths that were given, never by digests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qres.gguf import model_file
from qres.gguf.inventory import Inventory
from qres.pipeline import candidates, places
from tests import tiny
from tests.gguf.building import inventory

BLOB, COMMIT = (
    "4a695471baef96f0b54ba44fd340214cbb4b03711961fc44fdddce7b79ebbca0",
    "0123456789abcdef0123456789abcdef01234567",
)


def hub(root: Path, repository: str, name: str, commit: str = COMMIT) -> Path:
    """A file of a hub's cache: a link, in a folder called after a commit, to a blob called after its content."""
    folder = root / f"models--{repository.replace('/', '--')}"
    blob, link = folder / "blobs" / BLOB, folder / "snapshots" / commit / name
    blob.parent.mkdir(parents=True, exist_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    if not blob.exists():
        tiny.write_llama(blob, n_layer=1)
    link.symlink_to(Path("../" * len(link.relative_to(folder).parent.parts)) / "blobs" / BLOB)
    return link


def names(*paths: Path) -> set[str]:
    found = [one.name for one in candidates.from_files([model_file.read(path) for path in paths])]
    assert not any(BLOB[:8] in name or COMMIT[:8] in name or "snapshots" in name for name in found)
    return set(found)


def test_c9_two_publishers(tmp_path: Path) -> None:
    one, two = (hub(tmp_path, f"{owner}/T-GGUF", "T-F16.gguf") for owner in ("someone", "other"))
    assert names(one, two) == {"F16 (someone/T-GGUF)", "F16 (other/T-GGUF)"}


def test_c9_other_names(tmp_path: Path) -> None:
    one, two = hub(tmp_path, "someone/T-GGUF", "T-F16.gguf"), hub(tmp_path, "other/T", "T.f16.gguf")
    assert names(one, two) == {"F16 (T-F16.gguf)", "F16 (T.f16.gguf)"}


def test_c9_three_files_two_of_one_repository(tmp_path: Path) -> None:
    files = [hub(tmp_path, "a/T", "T.gguf"), hub(tmp_path, "a/T", "T-2.gguf"), hub(tmp_path, "b/T", "T.gguf")]
    assert names(*files) == {"F16 (a/T/T.gguf)", "F16 (a/T/T-2.gguf)", "F16 (b/T/T.gguf)"}


def test_c9_a_folder_inside_a_repository(tmp_path: Path) -> None:
    files = [hub(tmp_path, f"{owner}/T-GGUF", "F16/T-F16.gguf") for owner in "ab"]
    assert names(*files) == {"F16 (a/T-GGUF)", "F16 (b/T-GGUF)"}


def test_c9_two_commits_of_one_repository_are_numbered(tmp_path: Path) -> None:
    files = [hub(tmp_path, "a/T", "T.gguf", commit) for commit in (COMMIT, COMMIT[::-1])]
    assert names(*files) == {"F16 (file 1)", "F16 (file 2)"}


def test_c9_the_blobs_themselves(tmp_path: Path) -> None:
    blobs = [hub(tmp_path, f"{owner}/T", "T.gguf").resolve() for owner in "ab"]
    assert names(*blobs) == {"F16 (a/T)", "F16 (b/T)"}


def test_a_digest_is_no_name_of_a_level(tmp_path: Path) -> None:
    def named(name: str) -> Inventory:
        return replace(inventory(tmp_path), path=tmp_path / name, file_type="")

    assert candidates.from_files([named("mine.gguf")])[0].name == "mine"
    assert BLOB[:8] not in candidates.from_files([named(f"sha256-{BLOB}")])[0].name


@pytest.mark.parametrize("given", ["link/../T.gguf", "link/./T.gguf"])
def test_a_folder_is_the_one_that_a_link_leads_to_before_going_up(tmp_path: Path, given: str) -> None:
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "inner")
    assert places.folder_name(tmp_path / given) == ("far/T.gguf" if ".." in given else "link/T.gguf")
