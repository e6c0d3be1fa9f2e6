"""Finds the reason why a TLS connection to the coordinator fails, by trying a handshake without gRPC.

gRPC itself only reports that the socket was closed.
"""

from __future__ import annotations

import socket
import ssl

from gradwire.errors import ConfigError
from gradwire.security.certificates import identity_of, may_coordinate
from gradwire.security.credentials import Credentials, explain


def tls_problem(sock: socket.socket, credentials: Credentials | None) -> str | None:
    """Return why TLS fails with the coordinator at the other end of a new connection; None if TLS is not the reason.

    The socket must have a timeout, and `OSError` is raised when that ends. The connection cannot be used afterwards.
    """
    if credentials is None:
        return _problem_without_credentials(sock)
    try:
        context = credentials.probe_context()
    except ConfigError as error:  # for example: the certificate has expired since it was loaded
        return str(error)
    try:
        with context.wrap_socket(sock) as connection:
            reason = identity_problem(connection, credentials)
            # With TLS 1.3 this side finishes its handshake before the other side has checked this side's certificate.
            if reason is None and not connection.recv(1):
                reason = (
                    "it does not accept this process's certificate: check that both are signed by the same authority, "
                    "and that the clocks are right"
                )
            return reason
    except ssl.SSLError as error:
        if error.reason == "WRONG_VERSION_NUMBER":
            return "it does not use TLS, and this process does: give certificates to all processes or to none"
        return explain(error)


def _problem_without_credentials(sock: socket.socket) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # No data is exchanged and nothing is trusted: the handshake only shows whether the other side uses TLS.
    context.verify_mode = ssl.CERT_NONE
    try:
        context.wrap_socket(sock).close()
    except (ssl.SSLError, ConnectionError):
        return None
    return "it uses TLS: give this process certificates too (GRADWIRE_TLS_CA, GRADWIRE_TLS_CERT and GRADWIRE_TLS_KEY)"


def identity_problem(connection: ssl.SSLSocket, credentials: Credentials) -> str | None:
    """Return why the peer's certificate is not that of a coordinator of this job; None if it is."""
    certificate = connection.getpeercert(binary_form=True) or b""
    try:
        identity = identity_of(certificate)
    except ValueError as error:
        return f"its certificate is not accepted: {error}"
    if identity.job != credentials.job:
        return f"its certificate is for job {identity.job}, and this is job {credentials.job}"
    if not may_coordinate(certificate, identity.job):
        return f"its certificate is for {identity.member}, which may not be the coordinator"
    return None
