"""What runs on a host on our behalf, and sees to it that nothing stays behind.

Standard library only, Python 3.8 or newer: the modules travel over stdin as one bundle and are
never stored on the host. The agent speaks JSON, one message per line, on stdin and stdout; each
carries a hash with a key that came on stdin (``wire``). From before it reads the key, no process
without CAP_SYS_PTRACE can open the agent, and ranks do not have that.

Stdin is a lease. At its end, or without a byte for ``lease_s``, the agent ends every process that
descends from it (TERM, grace, KILL until none is left), removes the trial's folder and exits. The
same happens when a rank fails, the deadline passes or it is told to stop; then the agent also
sends what the ranks left behind and waits for the next job.

Three nets lie below each other: the agent is a child subreaper, so that daemons come back to it;
ranks die with their parent (PDEATHSIG); and where the kernel allows, all of it lives in a PID
namespace whose first process is the agent, so that even SIGKILL to the agent leaves nothing.

``main`` is the agent, ``job`` one trial of it, ``warm`` the process that forks ranks; ``wire`` is
the language of both ends, ``processes`` and ``resources`` are what they know of a host. ``probe``,
with ``software``, is the doctor's: another program, of the same parts.

============  ==========================================================================
message       meaning, controller to agent
============  ==========================================================================
(empty line)  a sign of life
``prepare``   make the trial's folder; find address, interface and a free port
``put``       a piece of the content of a file that is missing
``job``       write files, start ranks
``stop``      end the job, or only its preparation
``claim``     keep slots from the agents of others
``warm``      start the process that imports modules once and forks ranks
``sweep``     end what another agent's tag or a trial's folder marks, remove the folders
============  ==========================================================================

============  ==========================================================================
message       meaning, agent to controller
============  ==========================================================================
``hello``     version of Python, isolation, the host's own name
``alive``     a sign of life
``prepared``  folder, address, interface, port; which contents are missing
``stored``    all contents that were missing have come
``claimed``   who uses a slot already, if anybody does
``warm``      the warm process is ready, or what prevents it
``warm-died`` how the warm process has died that is started once more
``started``   rank and process id
``said``      a rank's event: a line of its output, JSON with ``event`` first and our ``tag``
``trouble``   ``disk-full``, ``folder``, ``network``, ``start`` or ``warm``, and its text
``exit``      a rank's exit code or signal, last lines, whether the agent ended it and in what state
``collecting``  all ranks have ended; files follow
``file``      a piece of a collected file
``done``      why the job ended, whether it is clean, what is left
``swept``     what a sweep could not end
============  ==========================================================================
"""
