"""Lists all targets by name."""

from __future__ import annotations

from fuzz.targets import (
    admission,
    checkpoints,
    control,
    credentials,
    engine,
    frames,
    grpc,
    launching,
    membership,
    memory,
    point_to_point,
    tls,
    values,
)

FAMILIES = (
    frames,
    control,
    point_to_point,
    admission,
    tls,
    grpc,
    membership,
    credentials,
    values,
    checkpoints,
    memory,
    engine,
    launching,
)
TARGETS = {target.name: target for family in FAMILIES for target in family.TARGETS}
