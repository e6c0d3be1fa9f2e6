"""The gRPC transport: each link is a bidirectional stream of gRPC, which HTTP/2 proxies and service meshes forward.

session     one HTTP/2 connection with its gRPC streams: bytes in, bytes out, no socket
connection  moves bytes between a session's TCP or TLS connection and the local sockets of its streams
relay       the thread that serves all connections of a rank
transport   `GrpcTransport`, and how it opens a stream to a peer
"""
