"""Contains the clients of the coordinator. None of them imports gRPC.

grpc_socket           gRPC calls on a plain socket, with h2 and without threads
news_pipe             the pipe through which a launcher sends news to its workers
session               an authenticated session of short calls
registration_rules    how a worker treats the coordinator's answer to its claim; pure
requests              register, leave, heartbeat, checkpoint
heartbeat_rules       which members of a host a heartbeat names, and in which run; pure
launcher_heartbeats   one stream of heartbeats for all workers of a host
worker_lease          heartbeats of a worker without a launcher
"""
