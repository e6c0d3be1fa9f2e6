"""All targets, by name."""

from __future__ import annotations

from fuzz.targets import admission, control, frames, mail

FAMILIES = (frames, control, mail, admission)
TARGETS = {target.name: target for family in FAMILIES for target in family.TARGETS}
