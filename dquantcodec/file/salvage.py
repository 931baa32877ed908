"""Reading what is whole in a damaged file, and saying what is lost (specification, clause 9.6)."""

from __future__ import annotations

from ..errors import DQuantError
from .records import Record, RecordRules, payload_bytes
from .scan import Log, indexed, later_records, own_record
from .sequences import SequenceBuilder, SequenceLog, Sound
from .structs import BLOCK, INDEX, PAGES, ROWS, Bytes, crc32c
from .verify import Finding


def salvage(data: Bytes, rules: RecordRules) -> tuple[Log, tuple[SequenceLog, ...], tuple[Finding, ...]]:
    """The log as far as it can be followed, the sequences up to their first token that is lost, and what is lost.

    Checks every checksum.  Nothing that a lost record may have taken back is returned.
    """
    lost: list[Finding] = []
    log = indexed(data, rules) or _walk(data, rules, lost)
    builders: dict[int, SequenceBuilder] = {}
    frozen: set[int] = set()
    for record in log.records:
        sequence = record.header.sequence
        if record.header.ignorable or sequence in frozen:
            continue
        sound = _sound(data, rules, record, lost)
        if sequence not in builders:
            builders[sequence] = SequenceBuilder(rules, gaps=True)
        try:
            builders[sequence].add(record, sound)
        except DQuantError as error:
            # Records that contradict one another: what came before them is all that can be believed.
            lost.append(Finding.of(error))
            frozen.add(sequence)
    logs = {number: builder.finish(torn=True) for number, builder in builders.items()}
    for number, found in sorted(logs.items()):
        if found.tokens < builders[number].end:
            text = f"tokens {found.tokens} to {builders[number].end - 1} of sequence {number} are lost"
            lost.append(Finding("tokens-lost", text, {"sequence": number, "token": found.tokens}))
    empty = SequenceBuilder(rules).finish(torn=True)
    return log, tuple(logs.get(number, empty) for number in range(rules.header.sequences)), tuple(lost)


def _walk(data: Bytes, rules: RecordRules, lost: list[Finding]) -> Log:
    """The records one after another, passing over one lost header where it cannot have been a REWIND's."""
    records: list[Record] = []
    offset, number, epoch = rules.header.block_bytes, 0, 0
    complete = True
    while offset < data.nbytes:
        record = own_record(data, rules, offset)
        if record is None:
            later = next(later_records(data, rules, offset, number), None)
            if later is None:
                break
            complete = False
            passable = later.header.number == number + 1 and later.offset - offset > BLOCK
            lost.append(_lost_header(offset, number, later, passable))
            if not passable:
                break
            record, number = later, number + 1
        try:
            rules.check(record, number, epoch, data.nbytes)
        except DQuantError as error:
            if error.code != "record-truncated":
                lost.append(Finding.of(error))
            break
        records.append(record)
        offset, number, epoch = record.end, record.header.number + 1, record.header.epoch
    # A last record that is not whole stays: what of it can be read is found like that of any other.
    end = records[-1].end if records else rules.header.block_bytes
    closed = complete and bool(records) and records[-1].header.type == INDEX and end == data.nbytes
    return Log(tuple(records), torn=not closed, indexed=False, end=end)


def _lost_header(offset: int, number: int, later: Record, passable: bool) -> Finding:
    missing = later.header.number - number
    what = "record is" if missing == 1 else "records are"
    end = "" if passable else "; nothing behind it is used, because a REWIND may be among the lost"
    return Finding(
        "record-header",
        f"{missing} {what} lost between byte {offset} and byte {later.offset}{end}",
        {"offset": offset, "record": number},
    )


def _sound(data: Bytes, rules: RecordRules, record: Record, lost: list[Finding]) -> Sound:
    """What can be read of ``record``; everything that cannot is added to ``lost``."""
    head = record.header
    where = {"record": head.number, "offset": record.offset}
    coded, exact = head.tokens, True
    try:
        parts = list(rules.parts(data, record)) if head.type in (PAGES, ROWS) else []
    except DQuantError as error:
        lost.append(Finding.of(error))
        return Sound(0, False)
    layers = rules.rows_layers(head.flags)
    for number, (name, place, crc) in enumerate(parts):
        if crc32c(payload_bytes(data, record, place)) == crc:
            continue
        code = "page-crc" if head.type == PAGES else "rows-crc"
        lost.append(Finding(code, f"record {head.number}: {name} is damaged", where))
        if head.type == PAGES:
            coded = min(coded, number % rules.run.windows(head.tokens) * rules.run.window)
        elif layers[number // 2] in rules.exact:
            exact = False
        else:
            coded = 0
    return Sound(coded, exact)
