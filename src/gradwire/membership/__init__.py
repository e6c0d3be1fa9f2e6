"""Who is in the job: how its processes find each other.

    members.py     a member, and the assembly of all of them
    answers.py     what comes to the membership, and what it answers
    state.py       the membership as a pure state machine: claims, deaths and the time in, answers out; it uses
                   clock.py, roster.py (where everybody is), entry.py (who may come in), election.py (who must go,
                   and in which order the others stand) and checkpoints.py
    journal.py     what a restarted coordinator goes on from
    sealing.py     proofs of the job's secret on every message
    addresses.py   host names, ports and what is reachable from other machines
    service.py     the coordinator: the state machine behind gRPC
    client.py      a worker's side of it
    v1/            the published protocol and its generated code

Importing this package does not import gRPC; `service` and `client` do.
"""

from gradwire.membership.members import Assembly, Member

__all__ = ["Assembly", "Member"]
