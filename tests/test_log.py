"""The event log and the console."""

import io
import json
import sys

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
