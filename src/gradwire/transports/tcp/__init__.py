"""Links over TCP, with TLS where there are certificates.

link        a link over a connected socket
tls_link    the TLS handshake without blocking, and links inside TLS
accept      the listening side: admits peers within limits on bytes, number and time
dial        the connecting side
transport   `TcpTransport`: one connection for each pair of ranks and channel
"""
