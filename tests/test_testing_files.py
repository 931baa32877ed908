"""Writer and reader against a model of lists, and files that were damaged with their checksums made right."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis.stateful import run_state_machine_as_test

from dquantcodec.testing import files, lives


def test_a_file_reads_as_what_was_appended() -> None:
    run_state_machine_as_test(files.FileMachine, settings=settings(max_examples=25, stateful_step_count=8))


def test_a_file_reads_the_same_all_its_life() -> None:
    run_state_machine_as_test(lives.LifeMachine, settings=settings(max_examples=12, stateful_step_count=10))


@settings(max_examples=60)
@given(files.damaged_files())
def test_damaged_files_open_or_say_why(case: files.FileCase) -> None:
    files.files_open_or_say_why(case.data)
    if case.data == case.whole:
        assert not list(files.reader_of(case.data).verify())
