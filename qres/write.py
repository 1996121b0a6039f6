"""Writes reports: beside the final name first, then renamed, so that no partial file is ever left."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from qres.errors import InputError
from qres.records import Result
from qres.result_json import to_json

NAMES = {"json": "result.json", "html": "report.html", "md": "report.md"}
"""In the order of writing: what cannot be made again without the model comes first."""


@contextmanager
def output_folder(folder: Path, inputs: Sequence[Path]) -> Iterator[None]:
    """Make the output folder before any work is done; take it away again when the work fails and left nothing in it.

    Raises:
        InputError: the folder cannot be made or written, or a report would overwrite an input.
    """
    created: list[Path] = []
    try:
        try:
            created = [path for path in (folder, *folder.parents) if not path.exists()]  # innermost first
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".qres-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InputError(
                f"cannot write to {folder}: {error.strerror or error}", "choose another folder with --out"
            ) from error
        outputs = [folder / name for name in NAMES.values()]
        odd = next((path for path in outputs if path.exists() and not path.is_file()), None)
        if odd is not None:
            raise InputError(f"{odd} exists and is not a file", "choose another folder with --out")
        protect(outputs, inputs)
        yield
    except BaseException:
        with suppress(OSError):  # the first that holds something ends it
            for path in created:
                path.rmdir()
        raise


def protect(outputs: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Refuse to write over an input, whatever name or link leads to it.

    Raises:
        InputError: an output is an input.
    """
    for path in outputs:
        if path.exists() and any(given.exists() and path.samefile(given) for given in inputs):
            raise InputError(f"{path} is an input and would be overwritten", "choose another place with --out")


def reports(result: Result, folder: Path, formats: Collection[str], target: Path | None = None) -> tuple[Path, ...]:
    """Render and write.

    Args:
        result: What to render.
        folder: Where to, unless `target` names the file.
        formats: Any of `html`, `md`, `json`. Markdown also writes its images into `charts/`.
        target: The file, when there is one format only.

    Returns:
        The main files written, in the order html, md, json.

    Raises:
        InputError: a file cannot be written.
    """
    from qres.report import render_html, render_markdown

    written: dict[str, Path] = {}
    for kind in (name for name in NAMES if name in formats):
        path = target or folder / NAMES[kind]
        if kind == "html":
            text, images = render_html(result), {}
        elif kind == "md":
            rendered = render_markdown(result)
            text, images = rendered.text, dict(rendered.images)
        else:
            text, images = to_json(result), {}
        for name, image in images.items():
            _write(path.parent / name, image)
        _write(path, text)
        written[kind] = path
    return tuple(written[kind] for kind in ("html", "md", "json") if kind in written)


def _write(path: Path, text: str) -> None:
    path = path.resolve()  # a link stays a link, and what it leads to is replaced
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path} exists and is not a file", "choose another place with --out")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8", newline="\n")
        partial.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # where no partial file could be made there is none to remove
            partial.unlink()
