"""The parts of `make interop`. Each is a module with `run(report, subject)`; see `__main__`."""
