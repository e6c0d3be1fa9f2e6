"""Links over TCP, with TLS if there are certificates.

link        a link over a connected socket
tls_link    the non-blocking TLS handshake, and links inside TLS
accept      the listening side: admits peers, with limits on bytes, number and time
dial        the connecting side
transport   `TcpTransport`: one connection for each pair of ranks and channel
"""
