"""Configure this process, join the job and follow it from one generation to the next.

environments       reads the variables of each launcher
process_hooks      closes groups when this process exits, and drops their links in a forked child
address            `Address`: checked text of the form "host:port"
session_protocol   decides how a member enters the next generation, without I/O and without a clock
thread_job         runs a job whose members are threads of this process
settings           the names, variables and types of the settings
config_file        reads settings from a TOML file
config_sources     finds each setting in the first source that has it
config             `JobConfig`: rank, size, address and other settings, with their origin
member_session     joins one generation after another, over sockets
init               `gw.init`, `gw.local_group`, `gw.loopback_pair`: creates the objects above and connects them
"""
