"""The coordinator: a pure state machine, its journal, and the gRPC service around them.

connection_limits   which connections stay open and for how long; pure
clock               the time of a state machine that may itself be paused
journal             the SQLite file from which a restarted coordinator resumes
health              the standard health check, `grpc.health.v1`
election            members of a generation and their order; pure
checkpoints         checkpoints that are complete when every live worker has reported; pure
proxy_sockets       a private socket for gRPC, and the number of descriptors
roster              the present generation, returned members and newcomers: moves without rules
proxy               the public address: passes bytes of admitted connections on to gRPC
admission_rules     which claims are valid, and which are in conflict with other members; pure
state_machine       `Membership`: claims, deaths and the time in, answers out; pure
call_rules          what each call does: join tokens, heartbeats, the journal before the answer; pure
servicer            answers gRPC calls: checks proofs and certificates, holds calls back
service             `Coordinator`: starts and stops all of it
"""
