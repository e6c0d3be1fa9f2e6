"""Every command in a console block of the documentation runs exactly as it is written there."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.documents import HERE, ROOT, code_blocks, machines_of, run_commands
from support.namespaces import Hosts
from support.namespaces import hosts_fixture as hosts_fixture

PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if code_blocks(page, "console")]
ON_ONE_MACHINE = [page for page in PAGES if machines_of(page) == {HERE}]
ON_TWO_MACHINES = [page for page in PAGES if machines_of(page) != {HERE}]


def name_of(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", ON_ONE_MACHINE, ids=name_of)
def test_page_commands_run_as_written(page: Path, tmp_path: Path) -> None:
    run_commands(page, tmp_path)


@pytest.mark.parametrize("page", ON_TWO_MACHINES, ids=name_of)
@pytest.mark.parametrize("hosts", ["10.0.0"], indirect=True)
def test_page_commands_for_two_machines_run_as_written(page: Path, hosts: Hosts, tmp_path: Path) -> None:
    run_commands(page, tmp_path, dict(zip(("host-a", "host-b"), hosts.pids, strict=True)))
