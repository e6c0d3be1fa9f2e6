"""Starts the processes of a job on this machine and supervises them.

worker_main           the first code in a worker process
screen                shows the lines of all workers, each with its prefix
restart_policy        which workers are replaced, and when the job has failed; pure
terminal_lines        splits the bytes of a stream into lines as a terminal shows them
process_tree          all processes of a worker, and the guard that kills them
log_folder            the folder for the logs of a run; moves the logs of earlier runs
stop_escalation       which signal is sent when; pure
graceful_stop         what workers report when they leave after a whole step; pure
rendezvous            the coordinator and the secret of a job of fixed size
coordinator_wait      waits for a coordinator before workers are started
nodes                 the group of the launchers of a job on several hosts
defer_signals         defers signals while processes are started
root_cause            which failure explains the others; pure
output                what workers print, in logs and on the screen
worker_process        one worker as the supervisor sees it
fault_injection       deliberate faults
worker_setup          the environment of a worker, and the hooks of a supervisor
coordinator_process   the coordinator of an elastic job, restarted when it dies
node_setup            the worker setup of a job of fixed size on several hosts
supervisor            `Supervisor`: start, wait, stop
elastic_setup         the worker setup of an elastic job
function              `gw.launch`: a function in n processes
elastic_rendezvous    the rendezvous of an elastic job, here or elsewhere
"""

from __future__ import annotations

from gradwire.launch.function import launch

__all__ = ["launch"]
