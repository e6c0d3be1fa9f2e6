"""All targets, by name."""

from __future__ import annotations

from fuzz.targets import admission, control, frames, mail, membership, strangers, values

FAMILIES = (frames, control, mail, admission, membership, strangers, values)
TARGETS = {target.name: target for family in FAMILIES for target in family.TARGETS}
