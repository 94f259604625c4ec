"""The one exception that means "the user can mend this"."""


class UserError(Exception):
    """Something in the user's data, config or machine is wrong.

    The message is one line that names what is wrong, where, what follows from it and the remedy. The command line
    prints it without a traceback and exits with code 2; every other exception is a bug and keeps its traceback.
    """
