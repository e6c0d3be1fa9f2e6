"""Clients of the coordinator; none of them imports gRPC.

grpc_socket           gRPC calls on a socket of our own, by h2, without threads
news_pipe             the pipe by which a launcher passes news on to its workers
session               an authenticated session of short calls
registration_rules    what the coordinator's answer to a claim means; pure
requests              register, leave, heartbeat, checkpoint
heartbeat_rules       which members of a host a heartbeat names, and in which run; pure
launcher_heartbeats   one stream of heartbeats for all workers of a host
worker_lease          heartbeats of a worker without a launcher
worker_node           `WorkerNode`: a member that brings its own data plane
"""
