"""Checks the coordinator's answer to a member's claim: accepted, waiting, or an error to raise. Pure."""

from __future__ import annotations

from gradwire.errors import Finished, OtherRun, Refused
from gradwire.membership.types import Assembly, Claim, Outcome, Refusal, Waiting


def accepted(claim: Claim, outcome: Outcome, address: str) -> Assembly | Waiting:
    """The answer to a claim. A refusal, or an answer that does not fit the claim, raises `Refused` or a subclass.

    A member of one run takes no part in another run, with one exception: the coordinator may start a new run in place
    of the member's own (`Assembly.previous_run`).
    """
    if isinstance(outcome, Waiting):
        return outcome
    if isinstance(outcome, Refusal):
        kind = Finished if outcome.finished else OtherRun if outcome.other_run else Refused
        raise kind(f"the coordinator at {address} refused this worker: {outcome.reason}")
    ours = outcome.members[outcome.rank].id == claim.member.id
    if not ours or outcome.generation <= claim.generation:
        raise other_version(address)
    if is_of_another_run(claim, outcome):
        raise OtherRun(
            f"the coordinator at {address} serves run {outcome.run.hex()} of the job, and this worker is "
            f"a member of run {claim.run.hex()}: the two must not be mixed. Start this worker anew to join that run"
        )
    return outcome


def is_of_another_run(claim: Claim, assembly: Assembly) -> bool:
    """Whether a member is offered a place in a run that neither is its own nor was begun in place of that."""
    return bool(claim.run) and claim.run not in (assembly.run, assembly.previous_run)


def other_version(address: str) -> Refused:
    return Refused(f"the coordinator at {address} answers in a way that this version of gradwire does not know")
