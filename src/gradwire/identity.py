"""Who a rank is, and among whom: what every message says."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.topology import Topology
from gradwire.wire import Header, Kind, WireError


@dataclass(frozen=True, slots=True)
class Identity:
    """One rank in one generation of a job."""

    job: int
    number: int
    rank: int
    names: tuple[str, ...]  # of all ranks, as errors show them
    topology: Topology

    @property
    def size(self) -> int:
        return len(self.names)

    def frame(self, kind: Kind, payload: bytes = b"", **fields: int) -> bytes:
        """A whole message of a served channel."""
        known = {"source": self.rank, "group": 0, "sequence": 0, "fingerprint": 0, "tile": 0, "round": 0}
        header = Header(kind=kind, job=self.job, generation=self.number, nbytes=len(payload), **(known | fields))
        return header.pack() + payload

    def check_header(self, header: Header) -> None:
        """Admitted links carry only this generation's messages; `WireError` for anything else."""
        if (header.job, header.generation) != (self.job, self.number):
            raise WireError(f"a message of job {header.job:#x}, generation {header.generation}")
