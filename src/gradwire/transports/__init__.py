"""Transports: each one makes links between ranks, with the same few methods.

base               the interfaces `Transport` and `Link`, the channels and the errors
fork_safe_sockets  sockets that forked children close at once
frames             complete messages over a link, for the channels that the service thread reads
local              links between ranks that are threads of one process: byte pipes in memory
shm                memory shared by the ranks of one host
tcp                TCP connections, with TLS if there are certificates
grpc               gRPC streams, which HTTP/2 proxies and service meshes forward
"""
