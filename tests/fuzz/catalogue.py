"""All targets, by name."""

from __future__ import annotations

from fuzz.targets import admission, control, engine, frames, mail, membership, memory, strangers, tls, values

FAMILIES = (frames, control, mail, admission, membership, strangers, values, tls, memory, engine)
TARGETS = {target.name: target for family in FAMILIES for target in family.TARGETS}
