"""Contains the coordinator: a pure state machine, its journal, and the gRPC service around them.

connection_limits   which connections stay open and for how long; pure
clock               the time of a state machine whose process may be paused
journal             the SQLite file from which a restarted coordinator resumes
health              the standard health check, `grpc.health.v1`
election            members of a generation and their order; pure
checkpoints         checkpoints that are complete when every live worker has reported; pure
proxy_sockets       a private socket for gRPC, and the number of available descriptors
roster              the current generation, its returning members and the queue: data without rules
proxy               the public address: forwards the bytes of accepted connections to gRPC
admission_rules     which claims are valid, and which conflict with other members; pure
state_machine       `Membership`: claims, deaths and the time in, answers out; pure
journal_files       where the journal of a job is, and which journals of earlier runs are kept
call_rules          what each call does: join tokens, heartbeats, the journal before the answer; pure
servicer            answers gRPC calls: checks proofs and certificates, delays replies
service             `Coordinator`: starts and stops all of these
"""
