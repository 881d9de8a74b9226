"""Exit codes of the commands; 128 + the signal's number where one ended a command at once."""

EXIT_FAILED = 1  # something went wrong on the way; a hang counts
EXIT_USAGE = 2  # the command line or the configuration is at fault: nothing was begun
EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped by a signal and saved; can be resumed
