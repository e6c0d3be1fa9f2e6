"""The progress of the workers, read from their records while they write them."""

from __future__ import annotations

from pathlib import Path

from nemesis.history import Record


class Progress:
    """The newest run is the one that began last. `update` reads what has been written since."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._last: dict[str, Record] = {}  # the last commit of each member
        self._began: dict[str, float] = {}  # when each run did
        self.run = ""
        self.generation, self.step = 0, -1  # of the newest run

    def update(self) -> Progress:
        for path in self._folder.glob("*.txt"):
            begin = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(begin)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = begin + len(whole)
            for line in whole.decode().splitlines():
                self._take(Record.from_line(line))
        return self

    def _take(self, record: Record) -> None:
        began = min(record.began, self._began.get(record.run, record.began))
        self._began[record.run] = began
        if record.kind == "commit":
            self._last[record.member] = record
        newest = max(self._began, key=lambda run: self._began[run])
        if newest != self.run:
            self.run, self.generation, self.step = newest, 0, -1
        if record.kind == "commit" and record.run == newest:
            self.generation, self.step = max(self.generation, record.generation), max(self.step, record.step)

    def holders(self) -> set[str]:
        """The members of the newest run's newest generation: whoever of them lives has its last committed step."""
        present = (self.run, self.generation)
        return {name for name, last in self._last.items() if (last.run, last.generation) == present}
