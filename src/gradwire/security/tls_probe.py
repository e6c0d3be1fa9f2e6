"""Finds out by trying why two processes cannot speak TLS: gRPC only reports that the socket was closed."""

from __future__ import annotations

import socket
import ssl

from gradwire.errors import ConfigError
from gradwire.security.certificates import identity_of, may_coordinate
from gradwire.security.credentials import Credentials, explain


def trouble(sock: socket.socket, credentials: Credentials | None) -> str | None:
    """Why the coordinator at the other end of a fresh connection cannot be spoken to; None if TLS is not the reason.

    The socket has a timeout; `OSError` when it is over. Afterwards the connection is of no further use.
    """
    if credentials is None:
        return _trouble_without(sock)
    try:
        context = credentials.probe_context()
    except ConfigError as error:  # what is in use may have expired meanwhile, for one
        return str(error)
    try:
        with context.wrap_socket(sock) as line:
            reason = wrong_name(line, credentials)
            # With TLS 1.3 this side is done before the other one has looked at its certificate.
            if reason is None and not line.recv(1):
                reason = (
                    "it does not accept this process's certificate: is it of the same authority, and the clock right?"
                )
            return reason
    except ssl.SSLError as error:
        if error.reason == "WRONG_VERSION_NUMBER":
            return "it does not use TLS, and this process does: give certificates to all or to none"
        return explain(error)


def _trouble_without(sock: socket.socket) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is said or believed: all that counts is whether TLS is spoken
    try:
        context.wrap_socket(sock).close()
    except (ssl.SSLError, ConnectionError):
        return None
    return "it uses TLS: give this process certificates too (GRADWIRE_TLS_CA, GRADWIRE_TLS_CERT and GRADWIRE_TLS_KEY)"


def wrong_name(line: ssl.SSLSocket, credentials: Credentials) -> str | None:
    """Why the certificate at the other end is not one of a coordinator of this job; None if it is."""
    shown = line.getpeercert(binary_form=True) or b""
    try:
        identity = identity_of(shown)
    except ValueError as error:
        return f"its certificate is not accepted: {error}"
    if identity.job != credentials.job:
        return f"its certificate is for job {identity.job}, and this is job {credentials.job}"
    if not may_coordinate(shown, identity.job):
        return f"its certificate is for {identity.member}, which may not be the coordinator"
    return None
