"""`GrpcTransport`: each link is a bidirectional stream of gRPC, over HTTP/2, with TLS if there are credentials.

A link is admitted like a link over TCP: by mutual challenge, inside the stream. So a proxy that ends TLS and HTTP/2
forwards the bytes of a link, but it cannot open links of its own. With credentials, the certificate at the other end of
the connection must cover the member with that rank, so a proxy between the ranks must not end TLS.
"""

from __future__ import annotations

from collections.abc import Generator

from gradwire.security.admission import Acceptor, Dialer, Hello
from gradwire.security.credentials import Credentials
from gradwire.transports.grpc.connection import CheckCertificate
from gradwire.transports.grpc.relay import Relay, RelayedSocket
from gradwire.transports.tcp.accept import Acceptance, Stream
from gradwire.transports.tcp.dial import Call
from gradwire.transports.tcp.link import SocketLink
from gradwire.transports.tcp.transport import TcpTransport


class GrpcTransport(TcpTransport):
    """The transport of one rank over gRPC. It listens at once, for the registration; `assemble` makes it usable."""

    name = "grpc"
    relayed = True

    def __init__(self, host: str, credentials: Credentials | None = None) -> None:
        super().__init__(host, credentials)
        self._relay = Relay(self._listener, self._sockets, credentials, self.bell(), self.bell())

    def _admissions(self, key: bytes) -> Acceptance:
        self._relay.start()
        return Acceptance(self._relay, key, self._refusal, self._admitted, self.bell())

    def _check_certificate(self, rank: int, stream: Stream) -> str | None:
        tls = stream.facts.tls if isinstance(stream, RelayedSocket) else stream
        return super()._check_certificate(rank, tls) if tls is not None else None

    def _link(self, stream: Stream, peer: int, channel: int, admission: Dialer | Acceptor) -> SocketLink:
        assert isinstance(stream, RelayedSocket)
        stream.facts.admitted = True
        return SocketLink(stream, peer, channel, self._forget)

    def _call(self, peer: int, channel: int) -> Call:
        assert self._hello is not None
        hello = self._hello(peer, channel)
        return GrpcCall(
            self._relay, self._addresses[peer], self._key, hello, lambda tls: self._check_certificate(peer, tls)
        )

    def _links_closed(self) -> None:
        self._relay.stop()


class GrpcCall(Call):
    """An attempt to open a stream to a peer, up to its admission."""

    def __init__(
        self, relay: Relay, address: tuple[str, int], key: bytes, hello: Hello, check: CheckCertificate
    ) -> None:
        self._relayed = relay.open(address, check)
        super().__init__(self._relayed, key, hello)

    def advance(self) -> bool:
        try:
            return super().advance()
        except (BrokenPipeError, ConnectionResetError) as error:  # the relay has closed its end of the local sockets
            failure = self._ended()
            if failure is error:
                raise
            raise failure from error

    def _connect(self) -> Generator[int, None, Stream]:
        yield from ()  # the relay connects; what is sent meanwhile waits in the local socket
        return self._relayed

    def _ended(self) -> Exception:
        failure = self._relayed.facts.failure
        if isinstance(failure, str):
            return self._refused(failure)
        return failure or super()._ended()
