"""The agent: a program that runs a trial's ranks on a host and cleans up after them.

It needs only the standard library, Python 3.8 or newer: its modules arrive over stdin as one bundle
and are never stored on the host. Agent and controller exchange JSON, one message per line, on stdin
and stdout. Each message carries a hash with a key that arrives on stdin (``wire``). Ranks must not
learn the key: before the agent reads it, the agent forbids processes without CAP_SYS_PTRACE, such
as ranks, to read its memory.

Stdin is a lease. At its end, or without a byte for ``lease_s``, the agent ends all its descendant
processes (TERM, grace, KILL until none is left), removes the trial's folder and exits. After a
failed rank, the deadline or a ``stop`` it does the same, but sends the ranks' files and waits for
the next job instead of exiting.

Three mechanisms catch stray processes. The agent is a child subreaper, so daemons become its
children; ranks die with their parent (PDEATHSIG); and where the kernel allows it, the agent is the
first process of a PID namespace, so even SIGKILL to the agent ends all of them.

``main`` is the agent's loop, ``job`` one trial, ``warm`` the process that forks ranks. ``wire`` is
the protocol, ``processes`` and ``resources`` deal with the host. The doctor's ``probe``, with
``software``, is another program built from the same modules.

============  ==========================================================================
message       meaning, controller to agent
============  ==========================================================================
(empty line)  renews the lease
``prepare``   make the trial's folder; find address, interface and a free port
``put``       a piece of the content of a file that this agent has not stored yet
``job``       write files, start ranks
``stop``      end the job, or only its preparation
``claim``     reserve slots against other users' agents
``warm``      start the process that imports modules once and forks ranks
``sweep``     end processes with another agent's tag or trial's folder, remove the folders
============  ==========================================================================

============  ==========================================================================
message       meaning, agent to controller
============  ==========================================================================
``hello``     version of Python, isolation, host name
``alive``     shows that the agent runs
``prepared``  folder, address, interface, port
``stored``    a whole content has arrived
``claimed``   the slots are claimed, or a message that names the holder of a slot
``warm``      the warm process is ready, or why it is not
``warm-died`` how the warm process died; it is restarted
``started``   rank and process id
``said``      a rank's event: a line of its output, JSON with ``event`` first and our ``tag``
``trouble``   ``disk-full``, ``folder``, ``network``, ``start`` or ``warm``, and its text
``exit``      a rank's exit code or signal, last lines and state; whether the agent ended the rank
``collecting``  all ranks have ended; files follow
``file``      a piece of a collected file
``done``      why the job ended, whether all processes ended, and a list of those that did not
``swept``     processes that a sweep could not end
============  ==========================================================================
"""
