"""All targets, by name."""

from __future__ import annotations

from fuzz.targets import (
    admission,
    control,
    engine,
    frames,
    launching,
    mail,
    membership,
    memory,
    strangers,
    tls,
    values,
)

FAMILIES = (frames, control, mail, admission, tls, membership, strangers, values, memory, engine, launching)
TARGETS = {target.name: target for family in FAMILIES for target in family.TARGETS}
