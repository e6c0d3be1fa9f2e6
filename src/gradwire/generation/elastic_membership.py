"""One generation of a member of an elastic job: how it gets to the next one, and what the coordinator learns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class ElasticMembership:
    """The link from a generation to its job. A generation of a job with fixed membership has none."""

    def __init__(
        self,
        succeed: Callable[[Any, float], Any],
        leave: Callable[[bool], None],
        *,
        joined: bool = False,
        news: Callable[[], Any] = lambda: None,
        cuts: Callable[[], frozenset[str]] = frozenset,
        checkpoint_written: Callable[[int], None] = lambda epoch: None,
    ) -> None:
        """Store the callbacks of the job.

        `succeed(generation, seconds)` returns the group of the next generation. `leave(finished)` reports to the
        coordinator that the member has left for good, and whether all work is done. `joined`: the member was not in
        the previous generation. `news` returns the coordinator's latest report. `cuts` returns the ids of the members
        whose links fault injection cuts. `checkpoint_written(epoch)` reports to the coordinator that the checkpoint
        is complete for which it has asked.
        """
        self._succeed = succeed
        self._leave = leave
        self.joined = joined
        self.news = news
        self.cuts = cuts
        self.checkpoint_written = checkpoint_written
        self.unreachable: frozenset[int] = frozenset()  # world ranks, if the generation could not be set up
        self._lacks_state = self._finished = self._continues = False

    # -- the next generation ------------------------------------------------------------------------------------------

    def next_group(self, generation: Any, timeout: float) -> Any:
        """End this generation, and return the group of the next one."""
        return self._succeed(generation, timeout)

    def go_on(self) -> None:
        """Note that the member continues in the next generation. Closing this one then does not leave the job."""
        self._continues = True

    def set_up_failed(self, unreachable: Iterable[int]) -> None:
        """Note that the generation could not be set up because this rank could not reach these world ranks."""
        self.unreachable = frozenset(unreachable)
        self._continues = True

    # -- training state -----------------------------------------------------------------------------------------------

    @property
    def lacks_state(self) -> bool:
        """Whether this member has not received the training state yet."""
        return self._lacks_state

    def mark_without_state(self, without: bool) -> None:
        """Note whether this member still needs the training state."""
        self._lacks_state = without

    def mark_finished(self, finished: bool) -> None:
        """Note whether all work of the job is done. A member that joined after that would start the work again."""
        self._finished = finished

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the job, unless the member continues in the next generation."""
        if not self._continues:
            self._leave(self._finished)

    def abandon(self) -> None:
        """Do nothing: a forked child is not a member of the job."""
