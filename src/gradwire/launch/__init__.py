"""Starting the processes of a job on this machine, and supervising them.

function.py     `gw.launch`: a function in n processes, results and exceptions back
supervisor.py   `Supervisor`: start, wait, stop; everything below is its parts
  worker.py       one worker: its process, its channel, what it runs (`Task`)
  child.py        the first code in that process
  output.py       what the workers print: logs, and the screen (lines.py, screen.py)
  log_folder.py   where the logs go; those of earlier runs are moved aside
  ladder.py       when to send which signal, pure
  restarts.py     who is replaced, and when the job has failed, pure
  rootcause.py    which failure explains the others, pure
  undisturbed.py  signals wait while it starts
  sessions.py     all processes of a worker; the guard that ends them if the supervisor is killed
stage.py        what the workers of a job of fixed size find around them
  environment.py  the variables of a worker
  rendezvous.py   the coordinator and the secret of the job
elastic.py      what those of an elastic job do: news, and leases held for them
  meeting.py      where its members meet
  keeper.py       its coordinator, a process that is started anew when it dies
  frozen.py       which stopped workers are not waited for, pure
trouble.py      faults on purpose; chaos.py is their schedule, pure
"""

from __future__ import annotations

from gradwire.launch.function import launch

__all__ = ["launch"]
