"""Membership of a job: rendezvous, generations, and the coordinator that decides them.

    v1                the published protocol and its generated code
    types             members, claims, outcomes and news, shared by coordinator and clients
    grpc_import       imports gRPC without its messages on stderr
    endpoints         host names and ports: splitting, resolving, and addresses that other machines reach
    sealing           proofs of the job's secret on every message
    codec             between the protocol's messages and `types`
    closed_listener   tells late callers that an embedded coordinator has finished
    coordinator       the state machine, its journal and the gRPC service
    client            the worker's and the launcher's side

Only `coordinator` imports gRPC: a process that trains never loads it.
"""

from gradwire.membership.types import Assembly, Member

__all__ = ["Assembly", "Member"]
