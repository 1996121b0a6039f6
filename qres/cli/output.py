"""Writes reports: beside the final name first, then renamed, so that no partial file is ever left."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import filelock
from pathvalidate import sanitize_filename

from qres.errors import InputError, reason_of
from qres.files import protect, remove_leftovers, write_text
from qres.measure.job import STATE_NAME
from qres.records.as_json import reference_path, to_json
from qres.records.result import Result

NAMES = {"json": "result.json", "html": "report.html", "md": "report.md"}
"""In the order of writing: what cannot be made again without the model comes first."""
LOCK_NAME = ".qres.lock"
ELSEWHERE = "choose another place with --out"
SPARE_BYTES = 32 * 2**20
"""Reports of a large model, and the state of the unfinished scan."""


def default_folder(models: Sequence[Path], root: Path = Path("reports")) -> Path:
    """Where the reports of a model go: a folder of its name, numbered when another model's reports are there already.

    Args:
        models: The files of the scan, the first of which names the folder.
        root: Folder that it is in.
    """
    name = sanitize_filename(os.fsencode(_base(models[0]).name).decode(errors="ignore")) or "model"
    folders = (root / name if number == 1 else root / f"{name}-{number}" for number in count(1))
    own = {base for model in models for base in _bases(model)}
    for folder in folders:
        known = reference_path(folder / NAMES["json"])
        if known is None or _bases(Path(known)) & own:
            break
    return folder


def _bases(model: Path) -> set[Path]:
    """What tells a model from others: its place as it is given, and the place that links lead to."""
    bases = {_base(model.absolute())}
    with suppress(OSError, RuntimeError):  # a loop of links
        bases |= {_base(model.parent.resolve() / model.name), _base(model.resolve())}
    return bases


def _base(model: Path) -> Path:
    """A model's file without its ending and, of a shard, without its number."""
    name = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", model.name, flags=re.IGNORECASE).strip(". ")
    return model.parent / (name or "model")


@contextmanager
def output_folder(folder: Path, inputs: Sequence[Path]) -> Iterator[None]:
    """Make the output folder before any work is done, and keep other scans out of it until the work is over.

    When the work fails and left nothing in it, the folder is taken away again.

    Raises:
        InputError: the folder cannot be made or written, another scan writes to it, or a report would overwrite an
            input.
    """
    created: list[Path] = []
    try:
        try:
            created = [path for path in (folder, *folder.parents) if not path.exists()]  # innermost first
            folder.mkdir(parents=True, exist_ok=True)
            protect(_written(folder), inputs, ELSEWHERE)
            lock = filelock.FileLock(folder / LOCK_NAME)
            lock.acquire(blocking=False)
        except filelock.Timeout as error:
            if not (folder / LOCK_NAME).exists():  # it could not be made, which filelock takes for a lock of others
                raise InputError(f"cannot write to {folder}", "choose another folder with --out") from error
            raise InputError(f"another scan is writing to {folder}", "wait for it, or choose another --out") from error
        except OSError as error:
            raise InputError(
                f"cannot write to {folder}: {reason_of(error)}", "choose another folder with --out"
            ) from error
        try:
            odd = next((path for path in _written(folder) if path.exists() and not path.is_file()), None)
            if odd is not None:
                raise InputError(f"{odd} exists and is not a file", "choose another folder with --out")
            _remove_partial(folder)
            free = shutil.disk_usage(folder).free
            if free < SPARE_BYTES:
                raise InputError(
                    f"{folder} has {free / 2**20:.0f} MiB free, the reports need up to {SPARE_BYTES / 2**20:.0f}",
                    "free some space, or choose another folder with --out",
                )
            yield
        finally:
            _remove_partial(folder)
            with suppress(OSError):
                Path(lock.lock_file).unlink(missing_ok=True)  # before the release: nobody else can hold it
            lock.release()
    except BaseException:
        with suppress(OSError):  # the first that holds something ends it
            for path in created:
                path.rmdir()
        raise


def _written(folder: Path) -> tuple[Path, ...]:
    """Every file that a scan writes into its folder."""
    charts = folder.glob("charts/*.svg")
    return (*(folder / name for name in NAMES.values()), folder / STATE_NAME, folder / LOCK_NAME, *charts)


def _remove_partial(folder: Path) -> None:
    """Take away what a process that was killed left half written: whoever holds the lock is the only one at work."""
    remove_leftovers(folder, "|".join(re.escape(name) for name in (*NAMES.values(), STATE_NAME)))
    remove_leftovers(folder / "charts", r"[\w-]+\.svg")


def rescue(result: Result, folder: Path) -> Path | None:
    """Keep a result that could not be written where it belongs; None where that fails, too."""
    path = folder / f"result-{os.getpid()}.json"
    try:
        _write(path, to_json(result))
    except InputError:
        return None
    return path


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
    from qres.report.html import render_html
    from qres.report.markdown import render_markdown

    written: dict[str, Path] = {}
    for kind in (name for name in NAMES if name in formats):
        path = target or folder / NAMES[kind]
        images: dict[str, str] = {}
        try:
            if kind == "html":
                text = render_html(result)
            elif kind == "md":
                rendered = render_markdown(result)
                text, images = rendered.text, dict(rendered.images)
            else:
                text = to_json(result)
        except (ArithmeticError, ValueError) as error:  # a size of 0, a negative KLD: no scan writes these
            raise InputError(
                f"the result holds numbers that cannot be shown ({error})",
                "give the result.json that `qres scan` wrote",
            ) from error
        for name, image in images.items():
            _write(path.parent / name, image)
        _write(path, text)
        written[kind] = path
    return tuple(written[kind] for kind in ("html", "md", "json") if kind in written)


def _write(path: Path, text: str) -> None:
    write_text(path, text, ELSEWHERE)
