"""Who is in the job: how its processes find each other.

    members.py     a member, and the assembly of all of them
    answers.py     what comes to the membership, and what it answers
    state.py       the membership as a pure state machine: claims, deaths and the time in, answers out; it uses
                   clock.py, roster.py (where everybody is), entry.py (who may come in), election.py (who must go,
                   and in which order the others stand) and checkpoints.py
    journal.py     what a restarted coordinator goes on from
    sealing.py     proofs of the job's secret on every message
    addresses.py   host names, ports and what is reachable from other machines
    messages.py    between the protocol's messages and our own types
    service.py     the coordinator: the state machine behind gRPC; its calls are answered in desk.py, and
                   health.py is the standard health check. Clients connect to front.py, which passes on what
                   limits.py allows; descriptors.py is what that takes of the system
    client.py      a worker's side: it registers, says that it lives, takes part in checkpoints, takes its leave. Each
                   is a conversation.py of calls.py, on a socket that is open no longer than that
    lease.py       heartbeats of a lone worker
    heartbeats.py  heartbeats of a launcher, for all workers of its host
    worker.py      WorkerNode: a member that brings its own data plane
    doorkeeper.py  who still knocks when the rendezvous in rank 0 is over is told so
    v1/            the published protocol and its generated code

Only `service` and what it is made of import gRPC: there is none in a process that trains.
"""

from gradwire.membership.members import Assembly, Member

__all__ = ["Assembly", "Member"]
