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
        self._observers: list[Callable[[Any], None]] = []

    # -- going on -----------------------------------------------------------------------------------------------------

    def next_group(self, generation: Any, timeout: float) -> Any:
        """The group of the next generation; this one ends."""
        group = self._succeed(generation, timeout)
        for observer in self._observers:
            observer(group)
        return group

    def on_next_group(self, observer: Callable[[Any], None]) -> None:
        """Call this with the next generation's group, before its user gets it."""
        self._observers.append(observer)

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
        """Whether the member has joined, and does not have the state of the training yet."""
        return self._lacks_state

    def begin_settling(self) -> None:
        """The members are about to agree on a step to go on from; one that has joined needs its state first."""
        self._lacks_state = self.joined

    def settled(self) -> None:
        """This member has the state that all agreed on."""
        self._lacks_state = False

    def mark_finished(self, finished: bool = True) -> None:
        """Whether all work of the job is done: a member that joined now would begin it anew."""
        self._finished = finished

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The generation has ended here."""
        if not self._goes_on:
            self._leave(self._finished)

    def abandon(self) -> None:
        """A forked child has no part in the job."""
