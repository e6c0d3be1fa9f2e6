"""Configure this process, join the job and follow it from one generation to the next.

environments       reads the variables of each launcher
stop_notices       the pipe through which a worker reports to its launcher that a signal stops its job
stop_signals       records the signals that stop a job, so that a run can leave after a whole step
process_hooks      closes groups when this process exits, and drops their links in a forked child
address            `Address`: checked text of the form "host:port"
session_protocol   decides how a member enters the next generation, without I/O and without a clock
thread_job         runs a job whose members are threads of this process
settings           the names, variables and types of the settings
config_file        reads settings from a TOML file
config_sources     finds each setting in the first source that has it
data_links         this process as a member with data links; binds a transport to the members of a generation
config             `JobConfig`: rank, size, address and other settings, with their origin
member_session     joins one generation after another, over sockets
init               `gw.init`, `gw.local_group`, `gw.loopback_pair`: creates the objects above and connects them
node_group         the group of a worker node, connected on request
health_server      the standard health check of a worker, `grpc.health.v1`
worker_node        `gw.WorkerNode`: a member whose program decides when to use a group
"""
