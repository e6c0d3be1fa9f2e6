"""Decides which processes are members of a job: the rendezvous, the generations, and their coordinator.

    v1                the published protocol and its generated code
    types             members, claims, outcomes and news, shared by coordinator and clients
    grpc_import       imports gRPC without its messages on stderr
    endpoints         host names and ports: splitting, joining and resolving
    sealing           proofs of the job's secret on every message
    codec             converts between the protocol's messages and `types`
    closed_listener   informs late callers that an embedded coordinator has finished
    coordinator       the state machine, its journal and the gRPC service
    client            the worker's and the launcher's side

Only `coordinator` imports gRPC: a process that trains never loads it.
"""

from gradwire.membership.types import Assembly, Member

__all__ = ["Assembly", "Member"]
