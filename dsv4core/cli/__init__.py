"""The command line, `dsv4`."""
