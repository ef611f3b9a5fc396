"""The event log and the console."""

import errno
import io
import json
import os
import sys

import pytest

from andrea_numba.log import Console, EventLog, read_events


def test_each_event_is_one_flushed_json_line(tmp_path):
    log = EventLog(tmp_path / "log.jsonl", "id")
    log.write("run.loss", 3, loss=float("nan"), lr=0.1, text="a\nb é")
    record = json.loads((tmp_path / "log.jsonl").read_text(encoding="utf-8"))  # before close
    assert record["loss"] is None and record["lr"] == 0.1 and record["text"] == "a\nb é"
    assert (record["event"], record["run_id"], record["step"]) == ("run.loss", "id", 3)
    assert record["ts"] > 1.7e9
    log.close()


def test_resume_drops_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "log.jsonl"
    log = EventLog(path, "id")
    for step in range(1, 6):
        log.write("run.loss", step)
    log.close()
    with path.open("a") as file:
        file.write('{"event": "run.loss", "st')  # cut short by a crash
    log = EventLog(path, "id", last_step=3)
    log.write("run.loss", 4)
    log.close()
    assert [r["step"] for r in read_events(path, "run.loss")] == [1, 2, 3, 4]


def test_resume_keeps_the_lines_of_others(tmp_path):
    """Whatever is not an event of this run after the checkpoint stays, byte for byte."""
    path = tmp_path / "log.jsonl"
    foreign = [b"a note\n", b'{"step": 9}\n', b"\n", b"\xff\x00\r\n", b"[" * 5000 + b"\n",
               b'{"event": "run.loss", "run_id": "other", "step": 9}\n',
               b'{"event": "run.loss", "run_id": "id", "step": "9"}\n']
    ours = [b'{"run_id":"id",  "event": "run.loss", "step": %d}\n' % step for step in (3, 4)]
    path.write_bytes(b"".join(foreign[:3]) + ours[0] + b"".join(foreign[3:]) + ours[1])
    EventLog(path, "id", last_step=3).close()
    assert path.read_bytes() == b"".join(foreign[:3]) + ours[0] + b"".join(foreign[3:])
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]
    assert [r["step"] for r in read_events(path, "run.loss")] == [3, 9]


def test_a_log_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    log = EventLog(path, "id")
    log.write("run.loss", 7)
    log.close()
    before = path.read_bytes()

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        EventLog(path, "id", last_step=3)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def test_what_a_full_disk_does_not_take_is_written_later(tmp_path, capsys):
    """Also the rest of a line that was half written."""
    path = tmp_path / "log.jsonl"
    log = EventLog(path, "id")
    disk = log._file
    room = [10]

    class Full:
        name = disk.name
        close = disk.close

        def write(self, data):
            taken = data[:room[0]]
            if not taken:
                raise OSError(errno.ENOSPC, "No space left on device")
            room[0] -= len(taken)
            return disk.write(taken)

    log._file = Full()
    log.write("run.loss", 1)
    log.write("run.loss", 2)
    assert read_events(path, "run.loss") == []
    room[0] = 10**6
    log.write("run.loss", 3)
    log.close()
    assert [r["step"] for r in read_events(path, "run.loss")] == [1, 2, 3]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "log.jsonl: No space left" in said


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_plain_lines_without_a_terminal(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    console = Console(steps=2)
    console.step("step 1")
    console.step()
    console.line("done")
    console.close()
    assert stream.getvalue() == "step 1\ndone\n"


def test_a_bar_on_a_terminal(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    console = Console(steps=2)
    console.step("loss 1.5")
    console.line("a line above the bar")
    console.step("loss 1.2")
    console.close()
    assert "\r" in stream.getvalue() and "a line above the bar\n" in stream.getvalue()
    assert "2/2" in stream.getvalue() and "loss 1.2\n" in stream.getvalue()


def test_unusual_separators_do_not_break_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    log = EventLog(path, "id")
    log.write("run.sample", 1, text="a\u2028b\u0085c")
    log.close()
    EventLog(path, "id", last_step=1).close()
    assert [r["text"] for r in read_events(path, "run.sample")] == ["a\u2028b\u0085c"]
