"""`python -m testbed.control` is the `testbed` command."""

from testbed.control.cli.main import main

main()
