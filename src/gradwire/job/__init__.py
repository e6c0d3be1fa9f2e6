"""A process in a job: its configuration, its session from one generation to the next, `gw.init`.

environments       the variables of each launcher
process_hooks      what happens at the end of this process and after a fork
address            addresses as users write them
session_protocol   from one generation to the next: claims, set-up, failures; pure
thread_job         a job whose members are threads of this process
config             `JobConfig`: rank, size, address and other settings, with their origin
member_session     joins one generation after another
init               `gw.init`, `gw.local_group`, `gw.loopback_pair`: the composition root
"""
