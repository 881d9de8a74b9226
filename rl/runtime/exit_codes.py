"""Exit codes of the commands; 128 + signal number if a signal killed a command immediately."""

EXIT_FAILED = 1  # a failure during the run, or a hang
EXIT_USAGE = 2  # a wrong command line or configuration: nothing was started
EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped by a signal and saved; can be resumed
