"""An inspection on the terminal: the verdict, what the file is, what it holds and why, and its metadata."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from qres.cli.terminal import answer_console, text_table
from qres.gguf.bpw_gap import BpwGap
from qres.gguf.inspection import Inspection, MetadataRow
from qres.printable import sentence
from qres.records.files import TypeShare
from qres.report.formatting import count, fixed, mib, percent, significant

if TYPE_CHECKING:
    from qres.gguf.magnitudes import Magnitudes


_BAR = 20
"""Characters of the longest bar."""


def show_inspection(inspection: Inspection) -> None:
    """Print it to standard output; every text is printed as it is, without markup."""
    console = answer_console()
    verdict = inspection.verdict
    console.print(Text(f"{verdict.role.capitalize()}: {_sentences(verdict.reason, verdict.instead)}", style="bold"))
    console.print()
    console.print(_facts(inspection), soft_wrap=False)
    for title, content in _sections(inspection):
        console.print()
        console.print(Text(title, style="bold"))
        for part in content:
            console.print(part, soft_wrap=isinstance(part, Text))
    if inspection.metadata:
        console.print()
        console.print(_metadata(inspection.metadata, console.width), soft_wrap=False)


def _sections(inspection: Inspection) -> Iterable[tuple[str, Sequence[Table | Text]]]:
    """Titles, each with what stands below it."""
    problems = [_sentences(problem.message, problem.hint) for problem in inspection.problems]
    for title, lines in (
        ("Problems", problems),
        ("Claims and contents disagree", inspection.disagreements),
        ("Odd values", inspection.odd_values),
    ):
        if lines:
            yield title, [Text(f"- {line}") for line in lines]
    if inspection.types:
        yield "Tensor types", [_types(inspection.types)]
    if inspection.gap:
        yield _gap_title(inspection.gap, inspection.file_type), [_gap(inspection.gap)]
    yield _magnitudes_title(inspection.values), _magnitudes(inspection.values or ())


def _sentences(first: str, second: str) -> str:
    return f"{first}. {sentence(second)}" if second else f"{first}."


def _facts(inspection: Inspection) -> Table:
    tokenizer = inspection.tokenizer
    skipped = f" (and {inspection.n_layer_skipped} NextN that never run)" if inspection.n_layer_skipped else ""
    shards = f"{len(inspection.shards)} shards, " if len(inspection.shards) > 1 else ""
    template = tokenizer.chat_template_length
    facts = [
        ("file", f"{inspection.path} ({shards}{mib(inspection.file_bytes)} MiB, GGUF {inspection.gguf_version})"),
        ("kind", f"{inspection.kind}{f', {inspection.architecture}' if inspection.architecture else ''}"),
        ("name", inspection.name),
        ("parameters", _parameters(inspection.n_weights)),
    ]
    if inspection.n_layer:
        facts.append(("layers", f"{count(inspection.n_layer)}{skipped}, width {count(inspection.n_embd)}"))
    if inspection.n_ctx_train:
        facts.append(("context", f"{count(inspection.n_ctx_train)} tokens"))
    if tokenizer.model:
        names = f"{tokenizer.model}, {tokenizer.pre}" if tokenizer.pre else tokenizer.model
        facts.append(("tokenizer", f"{names}, {count(tokenizer.n_vocab)} tokens"))
        facts.append(("BOS", tokenizer.bos))
        facts.append(("chat template", "none" if template is None else f"{count(template)} characters, not run"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in facts:
        table.add_row(Text(label), Text(value))
    return table


def _parameters(n_weights: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if n_weights >= size:
            return f"{significant(n_weights / size, 4)} {unit}"
    return count(n_weights)


def _types(types: Sequence[TypeShare]) -> Table:
    total = sum(share.bytes for share in types) or 1
    rows = [
        [
            share.type,
            count(share.tensors),
            count(share.weights),
            mib(share.bytes),
            percent(share.bytes / total),
            "█" * round(_BAR * share.bytes / total),
        ]
        for share in types
    ]
    return text_table(("type", "tensors", "weights", "MiB", "of bytes", ""), rows, right=(1, 2, 3, 4))


def _gap_title(gap: BpwGap, file_type: str) -> str:
    nominal = f", nominally {gap.nominal_bpw:.2f} for {file_type}" if gap.nominal_bpw is not None else ""
    return f"Bits per weight: {gap.bpw:.2f}{nominal}"


def _gap(gap: BpwGap) -> Table:
    rows = [[fixed(gap.base_bpw, 4), "", "", gap.base, "base type", ""]]
    for group in gap.groups:
        added = f"{'+' if group.bpw_added >= 0 else ''}{fixed(group.bpw_added, 4)}"
        rows.append([added, count(group.tensors), mib(group.bytes), group.type, group.reason, group.example])
    rows.append([fixed(gap.bpw, 4), "", "", "", "together", ""])
    titles = ("bits", "tensors", "MiB", "type", "reason", "for example")
    return text_table(titles, rows, right=(0, 1, 2), wrapped=(4, 5))


def _magnitudes_title(magnitudes: Sequence[Magnitudes] | None) -> str:
    if magnitudes is None:
        return "Values: the tensor data was not looked at (--values does)"
    checked = [found for found in magnitudes if found.checked]
    largest = max(checked, key=lambda found: found.absmax, default=None)
    size = f", largest magnitude {significant(largest.absmax)} in {largest.tensor}" if largest else ""
    bad = sum(found.n_bad > 0 for found in checked)
    zeros = sum(found.only_zeros for found in checked)
    state = (f"{bad} not finite" if bad else "all finite") + (f", {zeros} only zeros" if zeros else "")
    return f"Values: {len(checked)} of {len(magnitudes)} tensors looked at, {state}{size}"


def _magnitudes(magnitudes: Sequence[Magnitudes]) -> list[Table]:
    rows = [[found.tensor, significant(found.absmax), said] for found in magnitudes if (said := _said(found))]
    return [text_table(("tensor", "largest", "finding"), rows, right=(1,), wrapped=(2,))] if rows else []


def _said(found: Magnitudes) -> str:
    """What is to be said about a tensor's values; empty when they are as they should be."""
    if not found.checked:
        return f"not looked at: {found.not_checked}"
    if found.n_bad:
        return f"{count(found.n_nan)} NaN, {count(found.n_inf)} infinite, the first at {count(found.first_bad or 0)}"
    if found.only_zeros:
        return "holds only zeros"
    if found.beyond_f16:
        return "beyond 65,504: does not fit F16"
    return "more than half of 65,504, where F16 ends" if found.near_f16 else ""


def _metadata(metadata: Sequence[MetadataRow], width: int) -> Table:
    """One line per value, cut to what is left of `width` columns beside the keys."""
    keys = min(max(len(row.key) for row in metadata), width // 2)
    rows = [[_cut(row.key, keys), _cut(row.value, width - keys - 2)] for row in metadata]
    return text_table(("metadata", "value"), rows)


def _cut(text: str, width: int) -> str:
    line = Text(text)
    line.truncate(width, overflow="ellipsis")
    return line.plain
