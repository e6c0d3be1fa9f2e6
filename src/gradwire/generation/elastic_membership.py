"""A member of an elastic job, in one generation: how it gets to the next one, and what it tells the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class ElasticMembership:
    """Made by the job that the member is in; a generation of a job with fixed membership has none."""

    def __init__(
        self,
        succeed: Callable[[Any, float], Any],
        leave: Callable[[bool], None],
        *,
        joined: bool = False,
        news: Callable[[], Any] = lambda: None,
        cuts: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """`succeed` makes the next generation's group from this generation, within some seconds; `leave` tells the
        coordinator that the member has left for good, and whether all work is done. `joined`: the member was not in the
        generation before. `cuts` are the ids of members with which links are to be cut on purpose."""
        self._succeed = succeed
        self._leave = leave
        self.joined = joined
        self.news = news  # the coordinator's latest: how many members wait to join
        self.cuts = cuts
        self.unreachable: frozenset[int] = frozenset()  # world ranks, if the generation could not be set up
        self._lacks_state = self._finished = self._goes_on = False

    # -- going on -----------------------------------------------------------------------------------------------------

    def next_group(self, generation: Any, timeout: float) -> Any:
        """The group of the next generation; this one ends."""
        return self._succeed(generation, timeout)

    def go_on(self) -> None:
        """The member goes on to the next generation: the end of this one does not mean that it leaves the job."""
        self._goes_on = True

    def set_up_failed(self, unreachable: Iterable[int]) -> None:
        """The generation did not come about, and this rank could not reach these world ranks."""
        self.unreachable = frozenset(unreachable)
        self._goes_on = True

    # -- the state of the training ------------------------------------------------------------------------------------

    @property
    def lacks_state(self) -> bool:
        """Whether this member still has to receive the state of the training."""
        return self._lacks_state

    def mark_without_state(self, without: bool) -> None:
        """Note whether this member still has to receive the state of the training."""
        self._lacks_state = without

    def mark_finished(self, finished: bool) -> None:
        """Note whether all work of the job is done: a member that joined now would begin it anew."""
        self._finished = finished

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The generation has ended here."""
        if not self._goes_on:
            self._leave(self._finished)

    def abandon(self) -> None:
        """A forked child has no part in the job."""
