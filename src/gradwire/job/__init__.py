"""Configure this process, join the job and follow it from one generation to the next.

environments       reads the variables of each launcher
process_hooks      closes groups when this process exits, and drops their links in a forked child
address            parses "host:port"
session_protocol   decides how a member enters the next generation, without I/O and without a clock
thread_job         runs a job whose members are threads of this process
config             `JobConfig`: rank, size, address and other settings, with their origin
member_session     joins one generation after another, over sockets
init               `gw.init`, `gw.local_group`, `gw.loopback_pair`: creates the objects above and connects them
"""
