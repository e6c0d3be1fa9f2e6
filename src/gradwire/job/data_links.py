"""Describes this process as a member with data links, and binds its transport to the members of a generation."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket

from gradwire.errors import ConfigError
from gradwire.host import machine
from gradwire.identity import Identity
from gradwire.job.address import Address
from gradwire.membership import Assembly, Member
from gradwire.security.credentials import Credentials
from gradwire.security.secret import derive
from gradwire.security.tokens import Token
from gradwire.topology import Topology
from gradwire.transports.tcp.transport import TcpTransport

HOST = "GRADWIRE_HOST"  # overrides the identity of this machine, so that tests can have several "hosts" on one machine


def new_id(credentials: Credentials | None) -> str:
    """Return a new member id. It begins with the certificate's member name, if there is a certificate."""
    unique = secrets.token_hex(8)
    return f"{credentials.member}/{unique}" if credentials else unique


def this_process(id: str, rank: int | None, address: str) -> Member:
    """Return this process as a member that other members reach at `address`."""
    return Member(
        id=id,
        rank=rank,
        host=os.environ.get(HOST) or machine.identity(),
        hostname=os.environ.get(HOST) or socket.gethostname(),
        pid=os.getpid(),
        address=address,
        started=machine.process_started(),
    )


def new_transport(name: str, coordinator: Address, credentials: Credentials | None) -> TcpTransport:
    """Return a transport that listens where the members of the coordinator's job can reach this process."""
    host = own_address(coordinator)
    if name == "grpc":
        from gradwire.transports.grpc.transport import GrpcTransport  # loads h2

        return GrpcTransport(host, credentials)
    return TcpTransport(host, credentials)


def address_of(transport: TcpTransport) -> str:
    """Return the address at which a transport listens."""
    return str(Address(*transport.address))


def own_address(coordinator: Address) -> str:
    """Return the local IP address that this machine uses to reach the coordinator."""
    for host in coordinator.resolve():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, coordinator.port or 9))  # connecting a UDP socket sends nothing: it selects the route
            return str(probe.getsockname()[0])
    raise ConfigError(f"this machine has no network route to {coordinator}")


def assemble(assembly: Assembly, transport: TcpTransport, secret: bytes | Token) -> Identity:
    """Bind a transport to the members of a generation, and return the identity of this member in it."""
    members = assembly.members
    addresses = [_address_of(rank, member) for rank, member in enumerate(members)]
    local_size = sum(member.host == members[assembly.rank].host for member in members)
    transport.assemble(
        rank=assembly.rank,
        addresses=[(address.host, address.port) for address in addresses],
        job=assembly.run,
        generation=assembly.generation,
        key=_link_key(secret, assembly),
        cores=machine.usable_cores() / local_size,
        members=[member.id for member in members],
    )
    names = tuple(str(member) for member in members)
    topology = Topology.of([member.host for member in members])
    return Identity(assembly.run, assembly.generation, assembly.rank, names, topology)


def _address_of(rank: int, member: Member) -> Address:
    try:
        return Address.parse(member.address, f"the address of {member}")
    except ConfigError as error:
        raise ConfigError(str(error), peer=rank) from error


def _link_key(secret: bytes | Token, assembly: Assembly) -> bytes:
    if isinstance(secret, bytes):
        return derive(secret, "links", assembly.run)
    assert assembly.link_key is not None  # the coordinator sends it to members that hold a join token
    return assembly.link_key
