"""Checks the coordinator's answer to a worker's claim: accepted, waiting, or an error to raise. Pure."""

from __future__ import annotations

from gradwire.errors import Finished, OtherRun, Refused
from gradwire.membership.types import Assembly, Claim, Outcome, Refusal, Waiting


def accepted(claim: Claim, outcome: Outcome, address: str) -> Assembly | Waiting:
    """Return the answer to a claim. Raise `Refused` or a subclass if it is a refusal or does not fit the claim.

    A member of one run does not join another run, with one exception: the coordinator may have started a new run as the
    replacement of the member's own (`Assembly.previous_run`).
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
            f"a member of run {claim.run.hex()}: the two must not be mixed. Restart this worker to join the new run"
        )
    return outcome


def is_of_another_run(claim: Claim, assembly: Assembly) -> bool:
    """Return whether the assembly is of a run that is neither the member's own nor the replacement of it."""
    return bool(claim.run) and claim.run not in (assembly.run, assembly.previous_run)


def other_version(address: str) -> Refused:
    return Refused(f"the coordinator at {address} sent a reply that this version of gradwire does not understand")
