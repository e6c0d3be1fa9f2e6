"""environments/: the variables as each real launcher sets them, and nested launchers."""

from __future__ import annotations

import pytest

from gradwire.errors import ConfigError
from gradwire.job.address import Address
from gradwire.job.config import JobConfig, resolve
from gradwire.job.environments import LAUNCHERS, detect, openmpi, pmi, slurm, torchrun
from gradwire.job.environments.launcher_settings import DERIVED_PORTS, FIRST_DERIVED_PORT, derived_port

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "run7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node1-4711@1",
    "PMIX_RANK": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}
SBATCH = {
    "SLURM_JOB_ID": "812",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODELIST": "a,b",
}


def test_detect_without_a_launcher_finds_none() -> None:
    assert detect({}) == ()
    assert all(launcher.detect({}) is None for launcher in LAUNCHERS)


class TestTorchrun:
    def test_torchrun_port_of_its_store_is_marked(self) -> None:
        config = resolve(environ=TORCHRUN)
        assert config == JobConfig(
            size=8, rank=5, local_rank=1, address=Address("10.0.0.7", 29400), job="torchrun-run7", address_taken=True
        )

    def test_torchrun_other_address_is_used_as_it_is(self) -> None:
        assert not resolve(address="h:9", environ=TORCHRUN).address_taken
        assert not resolve(environ=TORCHRUN | {"GRADWIRE_ADDRESS": "h:9"}).address_taken
        assert not resolve(environ=TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).address_taken

    def test_torchrun_four_variables_suffice(self) -> None:
        environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}
        config = resolve(environ=environ)
        assert config == JobConfig(size=2, rank=0, address=Address("::1", 29500))
        assert config.origin("address") == "MASTER_ADDR and MASTER_PORT (torchrun)"

    def test_torchrun_run_without_a_name_gives_no_job(self) -> None:
        assert resolve(environ=TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).job is None

    def test_torchrun_incomplete_address_gives_a_hint(self) -> None:
        found = torchrun.detect({"MASTER_PORT": "1"})
        assert found is not None
        assert found.hint == "MASTER_PORT is set, but MASTER_ADDR is not"


class TestOpenMpi:
    def test_openmpi_on_one_host_meets_on_loopback(self) -> None:
        config = resolve(environ=OPEN_MPI_5)
        job = "openmpi-prterun-node1-4711@1"
        assert config == JobConfig(
            size=4, rank=2, local_rank=2, address=Address("127.0.0.1", derived_port(job)), job=job
        )

    def test_openmpi_before_version_5_is_understood(self) -> None:
        old = {name: value for name, value in OPEN_MPI_5.items() if not name.startswith("PMIX")}
        assert resolve(environ=old | {openmpi.OLD_NAMESPACE: "3236233217"}).job == "openmpi-3236233217"

    def test_openmpi_on_several_hosts_needs_an_address(self) -> None:
        spread = OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        with pytest.raises(ConfigError, match="mpirun -x GRADWIRE_ADDRESS"):
            resolve(environ=spread)
        assert resolve(environ=spread | {"GRADWIRE_ADDRESS": "h:9"}).rank == 2
        assert resolve(environ=spread | {"MASTER_ADDR": "h", "MASTER_PORT": "9"}).address == Address("h", 9)


class TestPmi:
    def test_pmi_needs_an_address(self) -> None:
        with pytest.raises(ConfigError, match="mpiexec -genv GRADWIRE_ADDRESS"):
            resolve(environ=HYDRA)
        config = resolve(address="h:9", environ=HYDRA)
        assert config == JobConfig(size=4, rank=3, local_rank=1, address=Address("h", 9))

    @pytest.mark.parametrize("name", pmi.LOCAL_RANKS)
    def test_pmi_local_rank_is_read_from_any_implementation(self, name: str) -> None:
        assert resolve(address="h:9", environ={"PMI_RANK": "3", "PMI_SIZE": "4", name: "0"}).local_rank == 0

    def test_pmi_rank_without_a_size_is_not_enough(self) -> None:
        assert pmi.detect({"PMI_RANK": "0"}) is None


class TestSlurm:
    def test_slurm_on_several_hosts_meets_at_the_first(self) -> None:
        config = resolve(environ=SRUN)
        address = Address("gpu03", derived_port("slurm-812.0"))
        assert config == JobConfig(size=4, rank=3, local_rank=1, address=address, job="slurm-812.0")

    def test_slurm_ranks_of_a_step_share_an_address_and_steps_do_not(self) -> None:
        places = {str(resolve(environ=SRUN | {"SLURM_PROCID": str(rank)}).address) for rank in range(4)}
        assert len(places) == 1
        assert resolve(environ=SRUN | {"SLURM_STEP_ID": "1"}).job == "slurm-812.1"

    def test_slurm_on_one_host_meets_on_loopback(self) -> None:
        address = resolve(environ=SRUN | {"SLURM_STEP_NUM_NODES": "1"}).address
        assert address is not None
        assert address.is_loopback()

    def test_slurm_without_a_list_of_hosts_raises(self) -> None:
        with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST is not set"):
            resolve(environ={name: value for name, value in SRUN.items() if name != "SLURM_STEP_NODELIST"})

    def test_slurm_batch_script_is_one_process(self) -> None:
        assert resolve(environ=SBATCH).size == 1

    @pytest.mark.parametrize("step", ["4294967290", "4294967291"])
    def test_slurm_interactive_shell_is_one_process(self, step: str) -> None:
        assert slurm.detect(SRUN | {"SLURM_STEP_ID": step}) is None

    @pytest.mark.parametrize(
        ("hosts", "first"),
        [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("n[1-3]", "n1"),
            ("n[007,009-012]", "n007"),
            ("n[3,5],m1", "n3"),
            ("a[1-2]b[3-4].cluster,z", "a1b3.cluster"),
            ("a-b[10-20]", "a-b10"),
        ],
    )
    def test_slurm_compressed_host_list_gives_the_first_host(self, hosts: str, first: str) -> None:
        assert slurm.first_host(hosts) == first


class TestNesting:
    def test_nesting_mpirun_inside_srun_describes_this_process(self) -> None:
        daemon = SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
        config = resolve(environ=daemon | OPEN_MPI_5)
        assert (config.rank, config.size, config.job) == (2, 4, "openmpi-prterun-node1-4711@1")

    def test_nesting_torchrun_inside_srun_describes_this_process(self) -> None:
        agent = SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
        config = resolve(environ=agent | TORCHRUN)
        assert (config.rank, config.size, config.job) == (5, 8, "torchrun-run7")

    def test_nesting_srun_with_pmi_has_the_address(self) -> None:
        config = resolve(environ=SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"})
        assert (config.address, config.local_rank) == (Address("gpu03", derived_port("slurm-812.0")), 1)

    def test_nesting_mpiexec_inside_srun_without_an_address_raises(self) -> None:
        with pytest.raises(ConfigError, match="mpiexec"):
            resolve(environ=SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"} | HYDRA)

    def test_nesting_srun_with_an_exported_address_uses_it(self) -> None:
        config = resolve(environ=SRUN | {"MASTER_ADDR": "h", "MASTER_PORT": "9", "WORLD_SIZE": "4"})
        assert (config.rank, config.size, config.address, config.job) == (3, 4, Address("h", 9), "slurm-812.0")

    def test_nesting_explicit_ranks_do_not_take_the_launchers_job(self) -> None:
        config = resolve(0, 2, "h:9", environ=SRUN)
        assert (config.job, config.local_rank) == (None, None)

    def test_nesting_served_job_has_its_own_name(self) -> None:
        assert resolve(environ=SRUN | {"GRADWIRE_COORDINATOR": "h:9"}).job is None


def test_derived_ports_stay_in_their_range() -> None:
    ports = {derived_port(f"slurm-{job}.0") for job in range(500)}
    assert all(FIRST_DERIVED_PORT <= port < FIRST_DERIVED_PORT + DERIVED_PORTS for port in ports)
    assert FIRST_DERIVED_PORT + DERIVED_PORTS <= 65536
    assert len(ports) > 400
