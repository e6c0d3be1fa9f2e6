"""Find each setting in the first source that has it: arguments, config, `GRADWIRE_*`, launchers, the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradwire.job import config_file, environments
from gradwire.job.environments import Found, Partial
from gradwire.job.environments.launcher_settings import find
from gradwire.job.settings import ADDRESS, COORDINATOR, MEMBER, VARIABLES, Layer, Setting, parsed, source
from gradwire.security import credentials
from gradwire.security.credentials import Credentials
from gradwire.security.secret import TOKEN

# These belong to one process. A source that gives another rank gives them for another process.
_OF_ONE_RANK = ("local_rank", "role", "member")
_PLAIN = ("transport", "timeout", "peer_timeout", "insecure")


@dataclass(frozen=True, slots=True)
class Collected:
    """The settings that were found. `hint` explains why a launcher gave no address; it may be empty."""

    settings: dict[str, Setting]
    hint: str


def collect(given: Sequence[Layer], environ: Mapping[str, str]) -> Collected:
    """Return the settings of this process. `given` are the arguments and the config, in this order.

    A value is parsed only if it is used, so an invalid value in an overridden variable has no effect.
    """
    search = _Search(given, environ)
    found = {"elastic": search.plain("elastic")}
    found |= {name: search.number(name) for name in ("rank", "size")}
    elastic = found["elastic"] is not None and bool(found["elastic"].value)
    rank, size = (setting.value if setting else None for setting in (found["rank"], found["size"]))
    if not elastic:
        rank, size = assumed(rank, size)
    search.choose_launchers(rank, size)
    found |= search.rendezvous()
    served = found["served"] is not None and bool(found["served"].value)
    found |= {name: search.of_rank(name, rank) for name in _OF_ONE_RANK}
    found |= {name: search.plain(name) for name in _PLAIN}
    found |= {"job": search.job(served), "tls": search.tls(), "token_file": search.token_file()}
    return Collected({name: setting for name, setting in found.items() if setting is not None}, search.hint)


def assumed(rank: int | None, size: int | None) -> tuple[int | None, int | None]:
    """Return rank and size with what follows from their absence: without both, a job has one rank."""
    if rank is None and size is None:
        return 0, 1
    return (0, 1) if rank is None and size == 1 else (rank, size)


class _Search:
    """The sources of one process."""

    def __init__(self, given: Sequence[Layer], environ: Mapping[str, str]) -> None:
        self._given, self._environ = given, environ
        self._launchers = environments.detect(environ)
        self._agreeing: list[Partial] = []  # the launchers whose rank and size are those of this process
        self._usable: list[Partial] = []  # the launchers whose address may be used
        self._file = _file_settings(environ)

    def _own(self, name: str) -> Setting | None:
        """Return a setting from the arguments, the config or its `GRADWIRE_*` variable."""
        for layer in self._given:
            if name in layer:
                return layer[name]
        found = find(self._environ, VARIABLES[name]) if name in VARIABLES else None
        return _parsed(name, found)

    def plain(self, name: str) -> Setting | None:
        return self._own(name) or self._file.get(name)

    def number(self, name: str) -> Setting | None:
        """Return rank or size. Both come from the same launcher."""
        gives_both = (partial for partial in self._launchers if partial.rank and partial.size)
        gives_one = (partial for partial in self._launchers if partial.rank or partial.size)
        launcher = next(gives_both, None) or next(gives_one, None)
        found = getattr(launcher, name) if launcher else None
        return self._own(name) or _parsed(name, found, launcher) or self._file.get(name)

    def choose_launchers(self, rank: int | None, size: int | None) -> None:
        self._agreeing = [partial for partial in self._launchers if _agrees(partial, rank, size)]
        self._usable = [one for one in self._launchers if one in self._agreeing or not one.address_derived]

    @property
    def hint(self) -> str:
        return next((partial.hint for partial in self._agreeing if partial.hint), "")

    def rendezvous(self) -> dict[str, Setting | None]:
        """Return the address, and how it is served: both come from the same source.

        `GRADWIRE_COORDINATOR` takes precedence over `GRADWIRE_ADDRESS`.
        """
        nothing: dict[str, Setting | None] = dict.fromkeys(("address", "served", "address_taken"))
        for layer in self._given:
            if "address" in layer:
                return {name: layer.get(name) for name in nothing}
        if found := find(self._environ, COORDINATOR, ADDRESS):
            served = Setting(True, found.source) if found.source == COORDINATOR else None
            return nothing | {"address": _parsed("address", found), "served": served}
        for partial in self._usable:
            if address := _parsed("address", partial.address, partial):
                taken = Setting(True, address.origin) if partial.address_taken else None
                return nothing | {"address": address, "address_taken": taken}
        return {name: self._file.get(name) for name in nothing}

    def of_rank(self, name: str, rank: int | None) -> Setting | None:
        """Return a setting that belongs to this rank. Sources that give another rank are skipped."""
        for layer in self._given:
            if name in layer and _of_rank(layer, rank):
                return layer[name]
        variable, rank_variable = VARIABLES.get(name), find(self._environ, VARIABLES["rank"])
        if variable and (rank_variable is None or name == "member" or rank_variable.text == str(rank)):
            found = find(self._environ, variable)
            if found is not None:
                return _parsed(name, found)
        if name == "local_rank":
            for partial in self._agreeing:
                if partial.rank and partial.local_rank:
                    return _parsed(name, partial.local_rank, partial)
        return self._file.get(name) if _of_rank(self._file, rank) else None

    def job(self, served: bool) -> Setting | None:
        """Return the name of the job. A separate coordinator names its job itself; a launcher's name would differ."""
        partial = next((one for one in self._agreeing if one.rank and one.job and not served), None)
        return self._own("job") or _parsed("job", partial.job if partial else None, partial) or self._file.get("job")

    def tls(self) -> Setting | None:
        for layer in self._given:
            if "tls" in layer:
                return layer["tls"]
        found = Credentials.from_environ(self._environ)
        return Setting(found, f"{credentials.CA}, _CERT and _KEY") if found is not None else self._file.get("tls")

    def token_file(self) -> Setting | None:
        """Return the file with the job's secret. `GRADWIRE_TOKEN` takes precedence over the configuration file."""
        return self._own("token_file") or (None if self._environ.get(TOKEN) else self._file.get("token_file"))


def _file_settings(environ: Mapping[str, str]) -> Layer:
    """Return the settings in the file of `GRADWIRE_CONFIG`, without those that a launcher has decided."""
    decided: tuple[str, ...] = ()
    if find(environ, COORDINATOR):  # the variables describe the job at this coordinator
        decided += ("elastic",)
    if find(environ, MEMBER):  # a launcher gave this process its place in an elastic job
        decided += ("rank", "size", *_OF_ONE_RANK)
    return {name: setting for name, setting in config_file.named_by(environ).items() if name not in decided}


def _agrees(partial: Partial, rank: int | None, size: int | None) -> bool:
    """Return whether the rank and size in a launcher's variables, if any, are those of this process."""
    return (partial.rank is None or partial.rank.text == str(rank)) and (
        partial.size is None or partial.size.text == str(size)
    )


def _of_rank(layer: Layer, rank: int | None) -> bool:
    return "rank" not in layer or layer["rank"].value == rank


def _parsed(name: str, found: Found | None, launcher: Partial | None = None) -> Setting | None:
    if found is None:
        return None
    origin = f"{found.source} ({launcher.launcher})" if launcher else found.source
    return Setting(parsed(name, found.text, source(name, origin)), origin)
