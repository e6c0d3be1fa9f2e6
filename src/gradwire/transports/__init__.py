"""Transports: each makes links between ranks with the same few methods.

base               the interfaces `Transport` and `Link`, channels, and their errors
fork_safe_sockets  sockets that forked children close at once
frames             whole messages over a link, for channels that the service thread reads
local              ranks as threads of one process: byte pipes in memory
shm                memory shared by the ranks of one host
tcp                TCP connections, with TLS where there are certificates
"""
