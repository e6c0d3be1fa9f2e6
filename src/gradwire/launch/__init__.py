"""Starts the processes of a job on this machine and supervises them.

worker_main           the first code in a worker process
screen                shows the lines of all workers, each with its prefix
restart_policy        which workers are replaced, and when the job has failed; pure
terminal_lines        from the bytes of a stream to lines as a terminal shows them
process_tree          all processes of a worker, and the guard that ends them
log_folder            the folder of a run's logs; those of earlier runs are moved aside
stop_escalation       when to send which signal; pure
rendezvous            the coordinator and the secret of a job of fixed size
defer_signals         holds signals back while processes are started
root_cause            which failure explains the others; pure
output                what workers print, in logs and on the screen
worker_process        one worker as the supervisor sees it
fault_injection       deliberate faults
worker_setup          environment and surroundings of a worker
coordinator_process   the coordinator of an elastic job, restarted when it dies
supervisor            `Supervisor`: start, wait, stop
elastic_setup         worker setup of an elastic job: leases and news
function              `gw.launch`: a function in n processes
elastic_rendezvous    where the members of an elastic job meet
"""

from __future__ import annotations

from gradwire.launch.function import launch

__all__ = ["launch"]
